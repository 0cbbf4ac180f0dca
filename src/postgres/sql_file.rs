//! Substitutes the variables in the files in `sql/`.
//!
//! The files are written for psql. This module replaces `:"name"` and `:'name'` with quoted
//! identifiers and literals. A file that `\ir` includes is inserted once, even if it is included
//! several times. All other psql commands are removed, as are the lines from `\if` to `\endif`,
//! which set default values.

use std::fmt::Write;

use postgres_protocol::escape::{escape_identifier, escape_literal};

use super::target::{Outbox, Target};
use crate::escape::is_control;

pub(super) const EXAMINE: &str = include_str!("../../sql/examine.sql");
pub(super) const GUARD: &str = include_str!("../../sql/guard.sql");
const SESSION: &str = include_str!("../../sql/session.sql");
pub(super) const UUIDV7: &str = include_str!("../../sql/uuidv7.sql");
pub(super) const NO_UPDATE: &str = include_str!("../../sql/no_update.sql");
pub(super) const PREREQUISITES: &str = include_str!("../../sql/prerequisites.sql");

/// An argument to `pg_create_logical_replication_slot` that was added in PostgreSQL 17.
const FAILOVER: &str = ", failover => true";

/// Default maximum size of an event in a new outbox. The SQL files contain the same default.
pub(super) const MAX_EVENT_BYTES: u64 = 990_000;

/// The values of the variables in a file. A variable without a value is not replaced, which makes
/// the server report a syntax error.
#[derive(Clone, Copy)]
pub(super) struct Variables<'v> {
    pub(super) pipeline: &'v str,
    pub(super) target: &'v Target,
    pub(super) role: Option<&'v str>,
    pub(super) owner: Option<&'v str>,
    pub(super) writer: Option<&'v str>,
    /// Whether to create a failover slot, which is synchronized to standbys.
    pub(super) failover: bool,
    /// The pipeline's `max_row_bytes`.
    pub(super) row_bytes_max: usize,
    /// Maximum size of an event in a new outbox, or `None` for the default.
    pub(super) max_event_bytes: Option<u64>,
    pub(super) session: SessionKind,
}

/// The kind of session in which a file runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionKind {
    /// One of Walpost's own connections, in which the queries of `sql/examine.sql` can be prepared
    /// once and then reused.
    Own,
    /// Any session, for example the session of an administrator who runs printed statements.
    Any,
}

impl Variables<'_> {
    pub(super) fn fill_in(&self, file: &str) -> String {
        self.fill_in_with(file, "")
    }

    fn fill_in_with(&self, file: &str, examine: &str) -> String {
        let mut out = String::with_capacity(file.len());
        self.include(file, examine, &mut Vec::new(), &mut out);
        out
    }

    /// Appends a file to `out`. `examine` is the value of the variable `examine`, and `included`
    /// lists the files that `out` already contains.
    fn include<'f>(
        &self,
        file: &'f str,
        examine: &'f str,
        included: &mut Vec<(&'f str, &'f str)>,
        out: &mut String,
    ) {
        let mut examine = examine;
        let mut is_default = false;
        for line in file.lines() {
            match line.split(' ').next() {
                Some("\\if") => is_default = true,
                Some("\\endif") => is_default = false,
                _ => {}
            }
            if is_default {
                continue;
            }
            if let Some(value) = line.strip_prefix("\\set examine ") {
                examine = value.trim_matches('\'');
            }
            if let Some(name) = line.strip_prefix("\\ir ") {
                let inner = match name {
                    "examine.sql" => (EXAMINE, examine),
                    "session.sql" => (SESSION, ""),
                    "uuidv7.sql" => (UUIDV7, ""),
                    "no_update.sql" => (NO_UPDATE, ""),
                    "prerequisites.sql" => (PREREQUISITES, ""),
                    name => unreachable!("no file in sql/ includes {name}"),
                };
                if !included.contains(&inner) {
                    included.push(inner);
                    self.include(inner.0, inner.1, included, out);
                }
            }
            // Omit BEGIN and COMMIT, because the server already runs a batch as one transaction.
            let is_transaction = matches!(line, "BEGIN;" | "COMMIT;");
            if !line.starts_with('\\') && !is_transaction {
                self.fill_in_line(line, examine, out);
            }
        }
    }

    fn fill_in_line(&self, line: &str, examine: &str, out: &mut String) {
        let mut rest = line;
        while let Some(at) = rest.find(':') {
            let (before, after) = rest.split_at(at);
            out.push_str(before);
            match self.variable(after, examine) {
                Some((text, after)) => {
                    out.push_str(&text);
                    rest = after;
                }
                None => {
                    out.push(':');
                    rest = &after[1..];
                }
            }
        }
        out.push_str(rest);
        out.push('\n');
    }

    /// Parses the variable at the beginning of `text`: `:'name'`, `:"name"` or `:failover`. Only
    /// the value of `:failover` is inserted as SQL instead of being quoted. Returns the value and
    /// the rest of the text.
    fn variable<'t>(&self, text: &'t str, examine: &str) -> Option<(String, &'t str)> {
        if let Some(rest) = text.strip_prefix(":failover") {
            let argument = if self.failover { FAILOVER } else { "" };
            return Some((argument.to_owned(), rest));
        }
        let quoted = text.strip_prefix(':')?;
        let quote = quoted.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
        let (name, rest) = quoted[1..].split_once(quote)?;
        // In the SQL files, an empty name means that there is no table.
        let table = self.target.outbox.table();
        let row_bytes_max;
        let max_event_bytes;
        let value = match name {
            // If the value is empty, publish.sql keeps the existing size limit, if any.
            "max_event_bytes" => {
                max_event_bytes = match (self.max_event_bytes, &self.target.outbox) {
                    (None, Outbox::Messages { .. }) => String::new(),
                    (limit, _) => limit.unwrap_or(MAX_EVENT_BYTES).to_string(),
                };
                &max_event_bytes
            }
            "max_row_bytes" => {
                row_bytes_max = self.row_bytes_max.to_string();
                &row_bytes_max
            }
            "pipeline" => self.pipeline,
            "schema" => table.map_or("", |table| &table.schema),
            "table" => table.map_or("", |table| &table.name),
            "publication" => &self.target.publication,
            "slot" => &self.target.slot,
            "role" => self.role?,
            "owner" => self.owner?,
            "examine" => examine,
            "keep_prepared" => match self.session {
                SessionKind::Own => "on",
                SessionKind::Any => "off",
            },
            "several" if self.target.outbox.is_several() => "on",
            "several" => "off",
            "writer" => self.writer?,
            _ => return None,
        };
        Some((in_quotes(quote, value), rest))
    }
}

/// Returns the value as an SQL literal, if `quote` is a single quote, or else as an identifier.
/// Control characters are written as Unicode escapes, because `walpost init --print` prints the
/// statements, and a terminal could interpret the characters.
fn in_quotes(quote: char, value: &str) -> String {
    if !value.contains(is_control) {
        return match quote {
            '\'' => escape_literal(value),
            _ => escape_identifier(value),
        };
    }
    let mut text = format!("U&{quote}");
    for c in value.chars() {
        match c {
            c if c == quote || c == '\\' => text.extend([c, c]),
            // All control characters have a code below 0x10000. Writing to a string can't fail.
            c if is_control(c) => {
                let _ = write!(text, "\\{:04x}", u32::from(c));
            }
            c => text.push(c),
        }
    }
    text.push(quote);
    text
}

/// Returns the statements in `sql/examine.sql`. `examine` lists the checks to perform, separated by
/// spaces.
pub(super) fn examine(target: &Target, session: SessionKind, examine: &str) -> String {
    let variables = Variables {
        pipeline: "",
        target,
        role: None,
        owner: None,
        writer: None,
        failover: false,
        row_bytes_max: 0,
        max_event_bytes: None,
        session,
    };
    variables.fill_in_with(EXAMINE, examine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_control_characters_as_unicode_escapes() {
        let name = "a\n\x1b]\u{9b}\u{202e}\\'\"";
        assert_eq!(in_quotes('"', name), r#"U&"a\000a\001b]\009b\202e\\'""""#);
        assert_eq!(in_quotes('\'', name), r#"U&'a\000a\001b]\009b\202e\\''"'"#);
        assert_eq!(in_quotes('"', "a\\b\"'"), r#""a\b""'""#);
        assert_eq!(in_quotes('\'', "a\"'"), r#"'a"'''"#);
    }
}
