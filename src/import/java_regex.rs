//! Translates `java.util.regex` regular expressions to the syntax of the `regex` crate. A
//! translated expression matches the same topic names as the original. Expressions that the crate
//! can't represent are rejected, with an error that states the reason.
//!
//! Dots are kept as they are. In Java, a dot excludes more line terminators than in Rust, but topic
//! names never contain line terminators.
//!
//! Spec: Java 17, `Pattern` and `Matcher.replaceFirst`.

use std::fmt::Write;
use std::iter::Peekable;
use std::str::Chars;

use regex::Regex;

/// The maximum nesting depth of character classes.
const CLASS_DEPTH_MAX: usize = 100;

/// A pattern that was translated from Java to Rust.
#[derive(Debug)]
pub(super) struct Pattern {
    /// The pattern in Rust's syntax.
    pub(super) text: String,
    /// The compiled pattern, anchored so that it must match the entire text.
    whole: Regex,
    /// The names of the capture groups, by group number. Group 0 is the whole match.
    groups: Vec<Option<String>>,
}

impl Pattern {
    #[must_use]
    pub(super) fn matches_whole(&self, text: &str) -> bool {
        self.whole.is_match(text)
    }
}

/// A part of a replacement string.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part {
    Literal(String),
    /// The text of the capture group with this number. Group 0 is the whole match.
    Group(usize),
}

/// Translates a regular expression.
///
/// # Errors
/// Returns the reason if the expression can't be translated.
pub(super) fn pattern(java: &str) -> Result<Pattern, String> {
    let mut translator = Translator {
        rest: java.chars().peekable(),
        rust: String::with_capacity(java.len()),
    };
    translator.run()?;
    let text = translator.rust;
    // The crate's syntax errors span several lines, which show the location of the error. Keep only
    // the last line, which contains the reason.
    let invalid = |error: regex::Error| match error {
        regex::Error::Syntax(text) => {
            let last = text.lines().last().unwrap_or_default().to_owned();
            last.trim_start_matches("error: ").to_owned()
        }
        other => other.to_string(),
    };
    let whole = Regex::new(&format!("\\A(?:{text})\\z")).map_err(invalid)?;
    let groups = whole.capture_names();
    let groups = groups.map(|name| name.map(str::to_owned)).collect();
    Regex::new(&text).map_err(invalid)?;
    Ok(Pattern {
        text,
        whole,
        groups,
    })
}

struct Translator<'j> {
    rest: Peekable<Chars<'j>>,
    rust: String,
}

const LOOK_AROUND: &str = "look-around is not supported";
const POSSESSIVE: &str = "possessive quantifiers are not supported";

/// Names of POSIX character classes in Java (`\p{Lower}`), and the equivalent names in Rust
/// (`[:lower:]`).
const POSIX: &[(&str, &str)] = &[
    ("Lower", "lower"),
    ("Upper", "upper"),
    ("ASCII", "ascii"),
    ("Alpha", "alpha"),
    ("Digit", "digit"),
    ("Alnum", "alnum"),
    ("Punct", "punct"),
    ("Graph", "graph"),
    ("Print", "print"),
    ("Blank", "blank"),
    ("Cntrl", "cntrl"),
    ("XDigit", "xdigit"),
    ("Space", "space"),
];

impl Translator<'_> {
    fn run(&mut self) -> Result<(), String> {
        while let Some(c) = self.rest.next() {
            match c {
                '\\' => self.escape(false)?,
                '[' => self.class(1)?,
                '(' => self.group()?,
                '*' | '+' | '?' | '}' => {
                    self.rust.push(c);
                    let is_quantifier = c != '}' || self.ends_with_repetition();
                    if is_quantifier && self.rest.next_if_eq(&'+').is_some() {
                        return Err(POSSESSIVE.to_owned());
                    }
                    if is_quantifier && self.rest.next_if_eq(&'?').is_some() {
                        self.rust.push('?');
                    }
                }
                c => self.rust.push(c),
            }
        }
        Ok(())
    }

    /// Returns whether the translated text ends with a repetition such as `{2}`, `{2,}` or `{2,3}`.
    fn ends_with_repetition(&self) -> bool {
        let Some(rust) = self.rust.strip_suffix('}') else {
            return false;
        };
        let before = rust.trim_end_matches(|c: char| c.is_ascii_digit() || c == ',');
        before.ends_with('{') && rust[before.len()..].starts_with(|c: char| c.is_ascii_digit())
    }

    /// Translates the start of a group, such as `(?:`, whose parenthesis has already been read.
    fn group(&mut self) -> Result<(), String> {
        self.rust.push('(');
        if self.rest.next_if_eq(&'?').is_none() {
            return Ok(());
        }
        self.rust.push('?');
        match self.rest.next() {
            Some(':') => self.rust.push(':'),
            Some('=' | '!') => return Err(LOOK_AROUND.to_owned()),
            Some('>') => return Err("atomic groups are not supported".to_owned()),
            Some('<') => {
                if matches!(self.rest.peek(), Some('=' | '!')) {
                    return Err(LOOK_AROUND.to_owned());
                }
                self.rust.push('<');
            }
            Some(first) => {
                let mut flag = Some(first);
                while let Some(c) = flag {
                    match c {
                        'i' | 's' | '-' => self.rust.push(c),
                        ')' | ':' => {
                            self.rust.push(c);
                            return Ok(());
                        }
                        other => return Err(format!("the flag {other:?} is not supported")),
                    }
                    flag = self.rest.next();
                }
            }
            None => {}
        }
        Ok(())
    }

    /// Translates a character class whose opening bracket has already been read.
    fn class(&mut self, depth: usize) -> Result<(), String> {
        if depth > CLASS_DEPTH_MAX {
            return Err(format!(
                "more than {CLASS_DEPTH_MAX} nested character classes are not supported"
            ));
        }
        self.rust.push('[');
        if self.rest.next_if_eq(&'^').is_some() {
            self.rust.push('^');
        }
        let mut is_first = true;
        // Whether the previous character was the hyphen of a range. If so, the next hyphen is
        // literal.
        let mut after_range = false;
        while let Some(c) = self.rest.next() {
            let was_range = std::mem::take(&mut after_range);
            match c {
                ']' if is_first => self.rust.push_str("\\]"),
                ']' => {
                    self.rust.push(']');
                    return Ok(());
                }
                '[' => self.class(depth + 1)?,
                '\\' => self.escape(true)?,
                '-' if is_first || was_range || self.rest.peek() == Some(&']') => {
                    self.rust.push_str("\\-");
                }
                '-' => {
                    self.rust.push('-');
                    after_range = true;
                }
                '&' if self.rest.next_if_eq(&'&').is_some() => {
                    return Err("intersections of character classes are not supported".to_owned());
                }
                '&' | '~' | '^' | ':' => {
                    self.rust.push('\\');
                    self.rust.push(c);
                }
                c => self.rust.push(c),
            }
            is_first = false;
        }
        Ok(())
    }

    /// Translates an escape sequence whose backslash has already been read.
    fn escape(&mut self, in_class: bool) -> Result<(), String> {
        let Some(c) = self.rest.next() else {
            return Err("the regex ends with a backslash".to_owned());
        };
        // Write the members explicitly, because Java's predefined classes contain only ASCII
        // characters.
        let class = |members: &str| format!("[{members}]");
        match c {
            'd' | 'D' | 'w' | 'W' | 's' | 'S' => {
                let not = if c.is_ascii_uppercase() { "^" } else { "" };
                let members = match c.to_ascii_lowercase() {
                    'd' => "0-9",
                    'w' => "0-9A-Za-z_",
                    _ => " \\t\\n\\x0B\\f\\r",
                };
                self.rust.push_str(&class(&format!("{not}{members}")));
            }
            'b' if !in_class && self.rest.peek() != Some(&'{') => self.rust.push_str("(?-u:\\b)"),
            // `\Z` also matches before a final line terminator, which topic names do not contain.
            'Z' | 'z' if !in_class => self.rust.push_str("\\z"),
            'A' if !in_class => self.rust.push_str("\\A"),
            't' | 'n' | 'r' | 'f' | 'a' => {
                self.rust.push('\\');
                self.rust.push(c);
            }
            'e' => self.rust.push_str("\\x1B"),
            'x' | 'u' => {
                self.rust.push('\\');
                self.rust.push(c);
            }
            'p' | 'P' => self.property(c == 'P')?,
            'Q' if !in_class => self.quoted(),
            '1'..='9' | 'k' => return Err("back-references are not supported".to_owned()),
            c if c.is_ascii_alphanumeric() => return Err(format!("\\{c} is not supported")),
            // Don't keep the backslash: in Rust, `\<` and `\>` match word boundaries.
            c => self.literal(c),
        }
        Ok(())
    }

    fn literal(&mut self, c: char) {
        match c {
            '<' | '>' => self.rust.push(c),
            c => self.rust.push_str(&regex::escape(&c.to_string())),
        }
    }

    /// Translates a character property, such as `\p{Name}` or `\pL`, whose `\p` has already been
    /// read.
    fn property(&mut self, is_negated: bool) -> Result<(), String> {
        let name: String = match self.rest.next() {
            Some('{') => {
                let name = std::iter::from_fn(|| self.rest.next_if(|c| *c != '}')).collect();
                self.rest.next();
                name
            }
            Some(c) => c.to_string(),
            None => String::new(),
        };
        let not = if is_negated { "^" } else { "" };
        if let Some((_, posix)) = POSIX.iter().find(|(java, _)| *java == name) {
            let _ = write!(self.rust, "[[:{not}{posix}:]]");
            return Ok(());
        }
        // General categories have the same names in Java and in the crate.
        let is_category = (1..=2).contains(&name.len())
            && name.starts_with(|c: char| c.is_ascii_uppercase())
            && name.chars().all(|c| c.is_ascii_alphabetic());
        if !is_category {
            return Err(format!("\\p{{{name}}} is not supported"));
        }
        let p = if is_negated { 'P' } else { 'p' };
        let _ = write!(self.rust, "\\{p}{{{name}}}");
        Ok(())
    }

    /// Translates literal text up to `\E`. The preceding `\Q` has already been read.
    fn quoted(&mut self) {
        while let Some(c) = self.rest.next() {
            if c == '\\' && self.rest.next_if_eq(&'E').is_some() {
                return;
            }
            self.literal(c);
        }
    }
}

/// Parses a replacement string in Java's syntax, which can refer to the groups of `pattern`.
///
/// # Errors
/// Returns an error if Java would reject the replacement.
pub(super) fn replacement(java: &str, pattern: &Pattern) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    let mut literal = String::new();
    let mut rest = java.chars().peekable();
    while let Some(c) = rest.next() {
        let group = match c {
            '\\' => {
                let escaped = rest.next().ok_or("the replacement ends with a backslash")?;
                literal.push(escaped);
                continue;
            }
            '$' if rest.next_if_eq(&'{').is_some() => {
                let name: String = std::iter::from_fn(|| rest.next_if(|c| *c != '}')).collect();
                rest.next()
                    .ok_or("the replacement contains ${ without a closing }")?;
                let mut names = pattern.groups.iter();
                let found = names.position(|group| group.as_deref() == Some(&*name));
                found.ok_or_else(|| format!("the regex has no group {name:?}"))?
            }
            '$' => {
                let digit = |rest: &mut Peekable<Chars<'_>>| {
                    let digit = rest.peek()?.to_digit(10)?;
                    usize::try_from(digit).ok()
                };
                let mut group = digit(&mut rest)
                    .ok_or("the replacement contains a $ that is not followed by a group")?;
                rest.next();
                if group >= pattern.groups.len() {
                    return Err(format!("the regex has no group {group}"));
                }
                // The next digit is part of the group number only if a group with the longer number
                // exists.
                while let Some(more) = digit(&mut rest) {
                    let longer = group.saturating_mul(10).saturating_add(more);
                    if longer >= pattern.groups.len() {
                        break;
                    }
                    group = longer;
                    rest.next();
                }
                group
            }
            c => {
                literal.push(c);
                continue;
            }
        };
        if !literal.is_empty() {
            parts.push(Part::Literal(std::mem::take(&mut literal)));
        }
        parts.push(Part::Group(group));
    }
    if !literal.is_empty() {
        parts.push(Part::Literal(literal));
    }
    Ok(parts)
}

/// Formats a replacement in the syntax of the `regex` crate.
#[must_use]
pub(super) fn in_rust(parts: &[Part], pattern: &Pattern) -> String {
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        match part {
            Part::Literal(literal) => text.push_str(&literal.replace('$', "$$")),
            Part::Group(group) => {
                let name = pattern.groups.get(*group).and_then(Option::as_deref);
                let name = name.map_or_else(|| group.to_string(), str::to_owned);
                let continues = match parts.get(index + 1) {
                    Some(Part::Literal(next)) => {
                        next.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                    }
                    _ => false,
                };
                let is_number = name.bytes().all(|b| b.is_ascii_digit());
                let _ = match is_number && !continues {
                    true => write!(text, "${name}"),
                    false => write!(text, "${{{name}}}"),
                };
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translation_error(java: &str) -> String {
        pattern(java).map(|pattern| pattern.text).expect_err(java)
    }

    /// Asserts that the translated pattern matches each text in `matching` entirely, and matches no
    /// text in `others`.
    fn check(java: &str, matching: &[&str], others: &[&str]) {
        let pattern = pattern(java).unwrap_or_else(|error| panic!("{java}: {error}"));
        for text in matching {
            assert!(
                pattern.matches_whole(text),
                "{java} {text:?}: {}",
                pattern.text
            );
        }
        for text in others {
            assert!(
                !pattern.matches_whole(text),
                "{java} {text:?}: {}",
                pattern.text
            );
        }
    }

    #[test]
    fn handles_long_and_deeply_nested_patterns_in_bounded_time() {
        let began = std::time::Instant::now();
        for part in [
            "[", "[^", "[a[", "}", "1}", "{1", "(", "\\", "a{1,", "[]", "&&",
        ] {
            let _ = pattern(&part.repeat(1 << 20));
        }
        assert!(began.elapsed().as_secs() < 60, "{:?}", began.elapsed());
        assert!(
            translation_error(&"[".repeat(101)).contains("more than 100 nested character classes")
        );
        check("[a[b[c]]]{2}", &["ab", "cc"], &["a", "ad"]);
    }

    #[test]
    fn translates_constructs_whose_syntax_differs_between_java_and_rust() {
        check("(?<routedByValue>.*)", &["", "order", "é"], &["a\nb"]);
        check("(?s).*", &["a"], &[]);
        check("\\d+", &["12"], &["", "٣", "a"]);
        check("\\w+", &["a_1"], &["é", "-"]);
        check("\\W", &["é", "-"], &["a"]);
        check("\\s", &["\t", "\x0b"], &["\u{a0}"]);
        check("[\\w.-]+", &["a.b-c"], &["é", " "]);
        check("[^\\d]", &["a", "٣"], &["1"]);
        check("[]a-c-]+", &["]b-"], &["d"]);
        check("[+--]+", &["+,-"], &["."]);
        check("[a~~b&:^]+", &["a~b&:^"], &["c"]);
        check("[a[b-c]]+", &["abc"], &["d"]);
        check(
            "public\\.(outbox|events)",
            &["public.outbox", "public.events"],
            &["publicxoutbox", "public.outbox2"],
        );
        check("\\Qa.b*\\E.", &["a.b*x"], &["aabbx"]);
        check("\\<a\\>\\-\\_", &["<a>-_"], &["a-_"]);
        check("\\p{Lower}\\p{Alpha}", &["ab"], &["é1", "äb"]);
        check("\\P{Digit}", &["a", "٣"], &["1"]);
        check("[\\p{Upper}_]+", &["A_"], &["a", "Ä"]);
        check("\\p{Lu}\\pL", &["Äb"], &["ab"]);
        check("\\u0041\\x42", &["AB"], &["ab"]);
        check("(?i)order-(?:a|b)", &["ORDER-A"], &["order-c"]);
        check("a{2}b{1,}c{0,2}", &["aab"], &["ab", "aabccc"]);
        check("^a\\Z", &["a"], &["a\n"]);
        check("a.*?b", &["axb"], &["ax"]);
        check("\\bfoo\\b", &["foo"], &["foo1"]);
    }

    #[test]
    fn error_explains_why_a_construct_cannot_be_translated() {
        for (java, reason) in [
            ("(?!internal).*", LOOK_AROUND),
            ("(?=a)a", LOOK_AROUND),
            ("(?<=a)b", LOOK_AROUND),
            ("(?<!a)b", LOOK_AROUND),
            (".*+", POSSESSIVE),
            ("a++", POSSESSIVE),
            ("a?+", POSSESSIVE),
            ("a{2}+", POSSESSIVE),
            ("(a)\\1", "back-references"),
            ("(?<n>a)\\k<n>", "back-references"),
            ("(?>a)", "atomic"),
            ("(?x)a", "flag 'x'"),
            ("(?U)a", "flag 'U'"),
            ("\\Ga", "\\G"),
            ("\\h", "\\h"),
            ("\\v", "\\v"),
            ("\\p{IsGreek}", "\\p{IsGreek}"),
            ("[a-z&&[^b]]", "intersections"),
            ("(a", "unclosed group"),
            ("[a", "unclosed"),
            ("a\\", "backslash"),
        ] {
            let error = translation_error(java);
            assert!(error.contains(reason), "{java}: {error}");
        }
        assert!(!translation_error("(a").contains('\n'));
    }

    fn translated(regex: &str, java: &str) -> Result<String, String> {
        let pattern = pattern(regex).expect(regex);
        Ok(in_rust(&replacement(java, &pattern)?, &pattern))
    }

    #[test]
    fn parses_replacements_like_java() {
        for (regex, java, expected) in [
            ("(.*)", "outbox.event.$1", "outbox.event.$1"),
            ("(.*)", "$1_x", "${1}_x"),
            ("(.*)", "$1x", "${1}x"),
            ("(.*)", "$12", "${1}2"),
            ("(.*)-(.*)", "t.$1.$2", "t.$1.$2"),
            (
                "(?<routedByValue>.*)",
                "outbox.event.${routedByValue}",
                "outbox.event.${routedByValue}",
            ),
            ("(?<a>.*)", "$1", "${a}"),
            (".*", "$0.v1", "$0.v1"),
            (".*", "a\\$b\\\\c", "a$$b\\c"),
            (".*", "events", "events"),
        ] {
            assert_eq!(
                translated(regex, java).as_deref(),
                Ok(expected),
                "{regex} {java}"
            );
        }
        for (regex, java) in [
            ("(.*)", "$2"),
            ("(.*)", "${name}"),
            ("(.*)", "${1"),
            ("(.*)", "a$"),
            ("(.*)", "$x"),
            ("(.*)", "a\\"),
        ] {
            assert!(translated(regex, java).is_err(), "{regex} {java}");
        }
    }

    #[test]
    fn translated_replacement_produces_the_same_text_as_java() {
        let check = |regex: &str, java: &str, text: &str, expected: &str| {
            let pattern = pattern(regex).expect(regex);
            let rust = in_rust(&replacement(java, &pattern).expect(java), &pattern);
            let found = Regex::new(&pattern.text).expect(regex);
            assert_eq!(found.replace(text, rust), expected, "{regex} {java}");
        };
        check("h2-(.*)-v([0-9]+)", "t.$1.$2", "h2-order-v3", "t.order.3");
        check("(.*)\\.v(\\d)", "$2_$1$1x", "order.v7", "7_orderorderx");
    }
}
