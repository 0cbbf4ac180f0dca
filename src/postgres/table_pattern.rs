//! Patterns for table names, such as `tenant_*.outbox`.

use std::fmt;
use std::str::FromStr;

use regex::Regex;

use super::table::{TableName, identifier};

/// A pattern for table names, in which `*` matches any sequence of characters and `?` matches any
/// single character.
///
/// As in psql's `\d`, letters outside double quotes are folded to lower case, all characters inside
/// double quotes are literal, and it is possible to quote just a part of a name. The default schema
/// is `public`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TablePattern {
    schema: NamePattern,
    name: NamePattern,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct NamePattern(Vec<Element>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    This(char),
    /// `?`
    One,
    /// `*`
    Any,
}

/// The error for text that is not a valid pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a valid table pattern: expected SCHEMA.TABLE with * for any characters and ? for one character, like \
     tenant_*.outbox, and \"double quotes\" around text that requires them, like \"tenant-\"*.outbox"
)]
pub(crate) struct TablePatternError(String);

impl TablePattern {
    /// Returns the schema and the name as SQL `LIKE` patterns. Characters that are special in
    /// `LIKE` patterns but meant literally are escaped with a backslash.
    #[must_use]
    pub(crate) fn like(&self) -> [String; 2] {
        [self.schema.like(), self.name.like()]
    }

    /// Returns the only table that the pattern matches, or `None` if it contains wildcards.
    fn table(&self) -> Option<TableName> {
        Some(TableName {
            schema: self.schema.text()?,
            name: self.name.text()?,
        })
    }
}

impl NamePattern {
    /// Returns the pattern as a regular expression.
    fn regex(&self) -> String {
        let element = |element: &Element| match element {
            Element::Any => "[^\0]*".to_owned(),
            Element::One => "[^\0]".to_owned(),
            Element::This(char) => regex::escape(char.encode_utf8(&mut [0; 4])),
        };
        self.0.iter().map(element).collect()
    }

    fn like(&self) -> String {
        let mut like = String::new();
        for element in &self.0 {
            match element {
                Element::Any => like.push('%'),
                Element::One => like.push('_'),
                Element::This(char) => {
                    if matches!(char, '%' | '_' | '\\') {
                        like.push('\\');
                    }
                    like.push(*char);
                }
            }
        }
        like
    }

    fn text(&self) -> Option<String> {
        let char = |element: &Element| match element {
            Element::This(char) => Some(*char),
            Element::One | Element::Any => None,
        };
        self.0.iter().map(char).collect()
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(text) = self.text() {
            return f.write_str(&identifier(&text));
        }
        let mut literal = String::new();
        let flush = |literal: &mut String, f: &mut fmt::Formatter<'_>| {
            let needs_quotes = |char: char| !is_plain(char) || char.is_ascii_uppercase();
            match literal.contains(needs_quotes) {
                true => write!(f, "\"{}\"", literal.replace('"', "\"\""))?,
                false => f.write_str(literal)?,
            }
            literal.clear();
            Ok(())
        };
        for element in &self.0 {
            match element {
                Element::This(char) => literal.push(*char),
                Element::One | Element::Any => {
                    flush(&mut literal, f)?;
                    f.write_str(if *element == Element::One { "?" } else { "*" })?;
                }
            }
        }
        flush(&mut literal, f)
    }
}

impl fmt::Display for TablePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.schema, self.name)
    }
}

/// Returns whether a character may appear outside double quotes. This includes upper-case letters,
/// which are folded to lower case.
fn is_plain(char: char) -> bool {
    char.is_alphanumeric() || matches!(char, '_' | '$')
}

impl FromStr for TablePattern {
    type Err = TablePatternError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || TablePatternError(text.to_owned());
        let (first, rest) = part(text).ok_or_else(error)?;
        let second = match rest.strip_prefix('.') {
            None if rest.is_empty() => None,
            Some(rest) => match part(rest).ok_or_else(error)? {
                (second, "") => Some(second),
                _ => return Err(error()),
            },
            None => return Err(error()),
        };
        let public = || NamePattern("public".chars().map(Element::This).collect());
        Ok(match second {
            Some(name) => Self {
                schema: first,
                name,
            },
            None => Self {
                schema: public(),
                name: first,
            },
        })
    }
}

/// Parses the pattern for a single name at the beginning of `text`. Returns the pattern and the
/// remaining text.
fn part(text: &str) -> Option<(NamePattern, &str)> {
    let mut elements = Vec::new();
    let mut rest = text;
    while let Some(char) = rest.chars().next() {
        let after = &rest[char.len_utf8()..];
        match char {
            '.' => break,
            '*' => elements.push(Element::Any),
            '?' => elements.push(Element::One),
            '"' => {
                rest = after;
                loop {
                    let (before, after) = rest.split_once('"')?;
                    elements.extend(before.chars().map(Element::This));
                    rest = after;
                    match after.strip_prefix('"') {
                        Some(after) => {
                            elements.push(Element::This('"'));
                            rest = after;
                        }
                        None => break,
                    }
                }
                continue;
            }
            char if is_plain(char) => elements.push(Element::This(char.to_ascii_lowercase())),
            _ => return None,
        }
        rest = after;
    }
    (!elements.is_empty()).then_some((NamePattern(elements), rest))
}

/// The patterns for a pipeline's outbox tables. A table is an outbox if it matches any of them.
#[derive(Clone, Debug)]
pub struct TablePatterns {
    patterns: Vec<TablePattern>,
    /// Matches a schema and a name that are separated by a NUL character, which names can't
    /// contain.
    regex: Regex,
}

impl PartialEq for TablePatterns {
    fn eq(&self, other: &Self) -> bool {
        self.patterns == other.patterns
    }
}

impl Eq for TablePatterns {}

impl TablePatterns {
    /// Returns whether the table with this schema and name, as stored in the catalog, matches a
    /// pattern.
    #[must_use]
    pub(crate) fn matches(&self, schema: &str, name: &str) -> bool {
        self.regex.is_match(&format!("{schema}\0{name}"))
    }

    /// Returns the patterns for SQL's `LIKE` as two lists of equal length: one for schemas and one
    /// for names.
    #[must_use]
    pub(crate) fn like(&self) -> [Vec<String>; 2] {
        let pairs = self.patterns.iter().map(TablePattern::like);
        let (schemas, names) = pairs.map(|[schema, name]| (schema, name)).unzip();
        [schemas, names]
    }

    /// Returns the tables that are named by patterns without wildcards.
    pub(crate) fn named(&self) -> impl Iterator<Item = TableName> {
        self.patterns.iter().filter_map(TablePattern::table)
    }
}

impl TablePatterns {
    /// Parses patterns.
    ///
    /// # Errors
    /// Returns an error if the list is empty or contains an invalid pattern.
    pub(crate) fn new(texts: &[String]) -> Result<Self, TablePatternError> {
        let patterns = texts.iter().map(|text| text.parse());
        let patterns = patterns.collect::<Result<Vec<TablePattern>, _>>()?;
        if patterns.is_empty() {
            return Err(TablePatternError(String::new()));
        }
        let tables = patterns
            .iter()
            .map(|pattern| format!("{}\\x00{}", pattern.schema.regex(), pattern.name.regex()));
        let regex = format!("\\A(?:{})\\z", tables.collect::<Vec<_>>().join("|"));
        // Compiling the regular expression fails if there are so many patterns that it exceeds the
        // size limit.
        let regex = Regex::new(&regex).map_err(|_| TablePatternError(texts.join(", ")))?;
        Ok(Self { patterns, regex })
    }
}

impl fmt::Display for TablePatterns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, pattern) in self.patterns.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            pattern.fmt(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pattern(text: &str) -> TablePattern {
        text.parse().expect(text)
    }

    fn patterns(texts: &[&str]) -> TablePatterns {
        let texts = texts.iter().map(|&text| text.to_owned());
        TablePatterns::new(&texts.collect::<Vec<_>>()).expect("patterns")
    }

    #[test]
    fn matches_tables_by_schema_and_name() {
        let check = |text: &str, is: &[(&str, &str)], is_not: &[(&str, &str)]| {
            let pattern = patterns(&[text]);
            for (schema, name) in is {
                assert!(pattern.matches(schema, name), "{text}: {schema}.{name}");
            }
            for (schema, name) in is_not {
                assert!(!pattern.matches(schema, name), "{text}: {schema}.{name}");
            }
        };
        check(
            "tenant_*.outbox",
            &[("tenant_", "outbox"), ("tenant_42", "outbox")],
            &[
                ("tenant", "outbox"),
                ("tenant_1", "outbox2"),
                ("Tenant_1", "outbox"),
            ],
        );
        check("outbox", &[("public", "outbox")], &[("shop", "outbox")]);
        check(
            "Shop.Out?ox_*",
            &[("shop", "outbox_"), ("shop", "outyox_2026")],
            &[("shop", "outox_"), ("shop", "outbox")],
        );
        check(
            "\"Tenant-\"*.\"out*box\"",
            &[("Tenant-", "out*box"), ("Tenant-a.b", "out*box")],
            &[("tenant-1", "out*box"), ("Tenant-1", "outxbox")],
        );
        check("*.*", &[("a", "b"), ("", "")], &[]);
        check(
            "s.*a*b",
            &[("s", "ab"), ("s", "xaxbxb"), ("s", "aab")],
            &[("s", "ba"), ("s", "abx"), ("s", "")],
        );
        check("s.größe?", &[("s", "größeß")], &[("s", "größe")]);
    }

    #[test]
    fn formats_patterns_so_that_they_can_be_parsed_again() {
        for (text, shown) in [
            ("tenant_*.outbox", "tenant_*.outbox"),
            ("Outbox", "public.outbox"),
            ("\"Tenant-\"*.out?", "\"Tenant-\"*.out?"),
            ("s.\"a*\"\"\"", "s.\"a*\"\"\""),
            ("s.x\"*\"*", "s.\"x*\"*"),
            ("\"order\".user", "\"order\".\"user\""),
        ] {
            assert_eq!(pattern(text).to_string(), shown, "{text}");
            assert_eq!(pattern(shown), pattern(text), "{text}");
        }
    }

    #[test]
    fn rejects_invalid_patterns() {
        for text in [
            "", ".", "a.", ".b", "a.b.c", "a b", "\"a", "\"\"", "a;b", "a-*.b", "a.b,c",
        ] {
            let error = TablePatternError(text.to_owned());
            assert_eq!(text.parse::<TablePattern>(), Err(error));
        }
    }

    #[test]
    fn escapes_literal_characters_for_the_like_operator() {
        let like = pattern("ten_nt?*.\"50%\\\"").like();
        assert_eq!(like, ["ten\\_nt_%", "50\\%\\\\"]);
    }

    #[test]
    fn finds_patterns_without_wildcards() {
        let patterns = patterns(&["shop.outbox", "tenant_*.outbox", "\"*\".x"]);
        let named: Vec<_> = patterns.named().map(|table| table.to_string()).collect();
        assert_eq!(named, ["shop.outbox", "\"*\".x"]);
        assert!(patterns.matches("*", "x") && patterns.matches("tenant_", "outbox"));
        assert!(!patterns.matches("shop", "x"));
        assert!(TablePatterns::new(&[]).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn parses_or_rejects_arbitrary_patterns(text in "[a*?\".A-]{0,10}", name in "[a*]{0,5}") {
            if let Ok(pattern) = text.parse::<TablePattern>() {
                let _ = patterns(&[&text]).matches(&name, &name);
                prop_assert_eq!(pattern.to_string().parse::<TablePattern>(), Ok(pattern));
            }
        }
    }
}
