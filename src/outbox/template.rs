//! Templates that contain column names in braces, such as `{tenant}:{aggregateid}`.

use std::fmt;
use std::str::FromStr;

/// Text with column names in braces. `{{` and `}}` represent literal braces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
}

/// A part of a [`Template`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text that is copied unchanged.
    Literal(String),
    /// The name of a column. The expansion contains the column's value.
    Column(String),
    /// The name of a column that contains a time: `{created_at:rfc3339}`. The expansion contains
    /// the time in RFC 3339 format.
    Time(String),
    /// The name of the schema that contains the row's table: `{table.schema}`.
    TableSchema,
    /// The name of the row's table: `{table.name}`.
    TableName,
}

/// The suffix that is appended to a column's name to select RFC 3339 format.
const RFC3339: &str = ":rfc3339";

/// The error returned if text is not a valid template.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// An opening brace has no closing brace.
    #[error(
        "template {0:?}: '{{' at byte {1} has no closing brace; write '{{{{' for a literal brace"
    )]
    Unclosed(String, usize),
    /// A closing brace has no opening brace.
    #[error(
        "template {0:?}: '}}' at byte {1} has no opening brace; write '}}}}' for a literal brace"
    )]
    Unopened(String, usize),
    /// The text contains `{}`, which does not name a column.
    #[error("template {0:?}: empty braces at byte {1}; expected a column name between them")]
    NoName(String, usize),
    /// The text is empty.
    #[error("the template is empty; expected a column name in braces, like {{aggregateid}}")]
    Empty,
}

impl Template {
    /// Returns the parts, in order.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Returns the names of the columns.
    pub(crate) fn columns(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().filter_map(|part| match part {
            Part::Column(name) | Part::Time(name) => Some(name.as_str()),
            Part::Literal(_) | Part::TableSchema | Part::TableName => None,
        })
    }

    /// Returns whether the expansion depends on the row's table.
    pub(crate) fn names_table(&self) -> bool {
        let mut parts = self.parts.iter();
        parts.any(|part| matches!(part, Part::TableSchema | Part::TableName))
    }

    /// Returns the first character in `text` that can't be distinguished from the separators around
    /// the part at `index`, or `None` if there is no such character. `text` is the value of this
    /// part. If it contains a separator, the expansion is ambiguous: `a.b` and `c` produce the same
    /// topic as `a` and `b.c`.
    ///
    /// A dot always counts as a separator, unless the part at `index` is the only part that varies.
    /// Letters, digits and `_` are never separators.
    #[must_use]
    pub(crate) fn separator_in(&self, index: usize, text: &str) -> Option<char> {
        let is_literal = |part: &Part| matches!(part, Part::Literal(_));
        if self.parts.iter().filter(|part| !is_literal(part)).count() < 2 {
            return None;
        }
        let literal = |index: Option<usize>| match index.and_then(|index| self.parts.get(index)) {
            Some(Part::Literal(text)) => text.as_str(),
            _ => "",
        };
        let before = literal(index.checked_sub(1)).chars().next_back();
        let after = literal(index.checked_add(1)).chars().next();
        let separates = |c: &char| *c == '.' || *c == '-' && [before, after].contains(&Some(*c));
        text.chars().find(separates)
    }

    /// Returns the template with columns replaced by the text that `text_of` returns. `text_of`
    /// receives the index of the part and the name of the column. Times, and columns for which
    /// `text_of` returns `None`, are left unchanged.
    ///
    /// # Errors
    /// Returns any error that `text_of` returns.
    pub(crate) fn with_texts<E>(
        &self,
        text_of: impl Fn(usize, &str) -> Result<Option<String>, E>,
    ) -> Result<String, E> {
        let literal = |text: &str| text.replace('{', "{{").replace('}', "}}");
        let mut written = String::new();
        for (index, part) in self.parts.iter().enumerate() {
            match part {
                Part::Literal(text) => written.push_str(&literal(text)),
                Part::Column(name) => match text_of(index, name)? {
                    Some(text) => written.push_str(&literal(&text)),
                    None => written.push_str(&format!("{{{name}}}")),
                },
                Part::Time(name) => written.push_str(&format!("{{{name}{RFC3339}}}")),
                Part::TableSchema => written.push_str("{table.schema}"),
                Part::TableName => written.push_str("{table.name}"),
            }
        }
        Ok(written)
    }

    /// Returns a character in the literal text that is not allowed in topic names, or `None` if all
    /// characters are allowed.
    #[must_use]
    pub(crate) fn invalid_topic_char(&self) -> Option<char> {
        let mut literals = self.parts.iter().filter_map(|part| match part {
            Part::Literal(text) => Some(text.as_str()),
            _ => None,
        });
        literals.find_map(|text| text.chars().find(|c| !is_topic_char(*c)))
    }

    /// Returns the text of the template if it consists only of literal text, and `None` otherwise.
    #[must_use]
    pub fn constant(&self) -> Option<&str> {
        match self.parts() {
            [Part::Literal(text)] => Some(text),
            _ => None,
        }
    }
}

/// Returns whether a topic name may contain the character.
#[must_use]
pub(crate) fn is_topic_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Template {
    type Err = TemplateError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            let offset = text.len() - rest.len() + at;
            let (before, brace) = rest.split_at(at);
            literal.push_str(before);
            if let Some(after) = brace.strip_prefix("{{") {
                literal.push('{');
                rest = after;
            } else if let Some(after) = brace.strip_prefix("}}") {
                literal.push('}');
                rest = after;
            } else if let Some(after) = brace.strip_prefix('{') {
                let (name, after) = after
                    .split_once('}')
                    .filter(|(name, _)| !name.contains('{'))
                    .ok_or_else(|| TemplateError::Unclosed(text.to_owned(), offset))?;
                if name.is_empty() {
                    return Err(TemplateError::NoName(text.to_owned(), offset));
                }
                if !literal.is_empty() {
                    parts.push(Part::Literal(std::mem::take(&mut literal)));
                }
                parts.push(match (name, name.strip_suffix(RFC3339)) {
                    ("table.schema", _) => Part::TableSchema,
                    ("table.name", _) => Part::TableName,
                    (_, Some(column)) if !column.is_empty() => Part::Time(column.to_owned()),
                    _ => Part::Column(name.to_owned()),
                });
                rest = after;
            } else {
                return Err(TemplateError::Unopened(text.to_owned(), offset));
            }
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            parts.push(Part::Literal(literal));
        }
        if parts.is_empty() {
            return Err(TemplateError::Empty);
        }
        Ok(Self {
            text: text.to_owned(),
            parts,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn literal(text: &str) -> Part {
        Part::Literal(text.to_owned())
    }

    fn column(name: &str) -> Part {
        Part::Column(name.to_owned())
    }

    #[test]
    fn splits_templates_into_parts() {
        let check = |text: &str, parts: &[Part]| {
            assert_eq!(
                text.parse::<Template>().expect(text).parts(),
                parts,
                "{text}"
            );
        };
        check("{id}", &[column("id")]);
        check(
            "outbox.event.{aggregatetype}",
            &[literal("outbox.event."), column("aggregatetype")],
        );
        check(
            "{tenant}:{id}",
            &[column("tenant"), literal(":"), column("id")],
        );
        check("fixed", &[literal("fixed")]);
        check("{{{a}}}", &[literal("{"), column("a"), literal("}")]);
        check("{Größe x}", &[column("Größe x")]);
        check(
            "{at:rfc3339}-{at}",
            &[Part::Time("at".to_owned()), literal("-"), column("at")],
        );
        check("{a:b}{:rfc3339}", &[column("a:b"), column(":rfc3339")]);
        check(
            "{table.schema}.{table.name}{table.oid}",
            &[
                Part::TableSchema,
                literal("."),
                Part::TableName,
                column("table.oid"),
            ],
        );
    }

    #[test]
    fn template_is_constant_only_if_it_contains_no_placeholders() {
        let constant = |text: &str| {
            let template = text.parse::<Template>().expect(text);
            template.constant().map(str::to_owned)
        };
        assert_eq!(constant("or{{ders").as_deref(), Some("or{ders"));
        assert_eq!(constant("{id}"), None);
        assert_eq!(constant("orders.{id}"), None);
    }

    #[test]
    fn reports_the_location_of_an_error_in_a_template() {
        let error = |text: &str| text.parse::<Template>().expect_err(text);
        assert_eq!(error("a{b"), TemplateError::Unclosed("a{b".to_owned(), 1));
        assert_eq!(
            error("{a{b}"),
            TemplateError::Unclosed("{a{b}".to_owned(), 0)
        );
        assert_eq!(error("ab}"), TemplateError::Unopened("ab}".to_owned(), 2));
        assert_eq!(error("{}"), TemplateError::NoName("{}".to_owned(), 0));
        assert_eq!(error(""), TemplateError::Empty);
    }

    #[test]
    fn finds_separators_that_make_a_template_ambiguous() {
        let separator = |template: &str, index: usize, text: &str| {
            let template = template.parse::<Template>().expect(template);
            template.separator_in(index, text)
        };
        let topic = "{table.schema}.{aggregatetype}";
        assert_eq!(separator(topic, 0, "tenant_a-b"), None);
        assert_eq!(separator(topic, 0, "a.b"), Some('.'));
        assert_eq!(separator(topic, 2, "a.b"), Some('.'));
        assert_eq!(separator("x-{a}-{b}", 1, "a-b"), Some('-'));
        assert_eq!(separator("{a}-{b}", 2, "a-b"), Some('-'));
        assert_eq!(separator("{a}_{b}", 0, "a_b"), None);
        assert_eq!(separator("{a}_{b}", 0, "a.b"), Some('.'));
        assert_eq!(separator("{a}{b}", 0, "a.b"), Some('.'));
        assert_eq!(separator("outbox.{table.schema}", 1, "a.b"), None);
    }

    #[test]
    fn keeps_placeholders_for_which_no_value_is_supplied() {
        let written = "{{x}}{source.a}-{b}{c:rfc3339}{table.schema}{table.name}";
        let template = written.parse::<Template>().expect("a template");
        let filled = template.with_texts(|_, name| {
            Ok::<_, ()>(name.strip_prefix("source.").map(|name| format!("{name}{{")))
        });
        let expected = "{{x}}a{{-{b}{c:rfc3339}{table.schema}{table.name}";
        assert_eq!(filled.as_deref(), Ok(expected));
        assert_eq!(
            template.with_texts(|_, _| Ok::<_, ()>(None)).as_deref(),
            Ok(written)
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn parses_or_rejects_arbitrary_text(text in "[{}a-z]{0,12}") {
            let _ = text.parse::<Template>();
        }

        #[test]
        fn parses_escaped_text_as_a_single_literal(text in "[{}a-z]{1,12}") {
            let escaped = text.replace('{', "{{").replace('}', "}}");
            let template = escaped.parse::<Template>().expect("escaped");
            prop_assert_eq!(template.parts(), &[Part::Literal(text)]);
        }
    }
}
