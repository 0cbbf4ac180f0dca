//! The files of `sql/`, filled in.
//!
//! They are written for psql. Here, a file that another includes (`\ir`) stands in its place, once; other lines that are
//! psql's own are left out (what stands from `\if` to `\endif` are defaults), and `:"name"` and `:'name'` are replaced by
//! quoted identifiers and literals.

use postgres_protocol::escape::{escape_identifier, escape_literal};

use super::target::{Outbox, Target};

pub(super) const EXAMINE: &str = include_str!("../../sql/examine.sql");
pub(super) const GUARD: &str = include_str!("../../sql/guard.sql");
const SESSION: &str = include_str!("../../sql/session.sql");
pub(super) const UUIDV7: &str = include_str!("../../sql/uuidv7.sql");
pub(super) const NO_UPDATE: &str = include_str!("../../sql/no_update.sql");
pub(super) const PREREQUISITES: &str = include_str!("../../sql/prerequisites.sql");

/// An argument of `pg_create_logical_replication_slot`, from PostgreSQL 17 on.
const FAILOVER: &str = ", failover => true";

/// The largest event that a new outbox accepts unless told otherwise; the same default is in the files.
pub(super) const MAX_EVENT_BYTES: u64 = 990_000;

/// What the variables in a file stand for. A file that names one which is not there keeps its name, which no server takes.
#[derive(Clone, Copy)]
pub(super) struct Variables<'v> {
    pub(super) pipeline: &'v str,
    pub(super) target: &'v Target,
    pub(super) role: Option<&'v str>,
    pub(super) owner: Option<&'v str>,
    pub(super) writer: Option<&'v str>,
    /// The slot is to follow a failover.
    pub(super) failover: bool,
    /// `max_row_bytes` of the pipeline.
    pub(super) row_bytes_max: usize,
    /// The most that a new outbox accepts in one event, if it is not the default.
    pub(super) max_event_bytes: Option<u64>,
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

    /// Adds a file to `out`. `examine` is the variable of this name, and `included` what is in `out` already.
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
                    name => unreachable!("{name} is included by no file of ours"),
                };
                if !included.contains(&inner) {
                    included.push(inner);
                    self.include(inner.0, inner.1, included, out);
                }
            }
            // A batch is one transaction.
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

    /// Reads `:'name'` or `:"name"` off the front of `text`, or the one variable that is SQL.
    fn variable<'t>(&self, text: &'t str, examine: &str) -> Option<(String, &'t str)> {
        if let Some(rest) = text.strip_prefix(":failover") {
            let argument = if self.failover { FAILOVER } else { "" };
            return Some((argument.to_owned(), rest));
        }
        let quoted = text.strip_prefix(':')?;
        let quote = quoted.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
        let (name, rest) = quoted[1..].split_once(quote)?;
        // The files take an empty name for no table.
        let table = self.target.outbox.table();
        let row_bytes_max;
        let max_event_bytes;
        let value = match name {
            // For functions that exist already, an empty value keeps their limit.
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
            "several" if self.target.outbox.is_several() => "on",
            "several" => "off",
            "writer" => self.writer?,
            _ => return None,
        };
        let text = match quote {
            '\'' => escape_literal(value),
            _ => escape_identifier(value),
        };
        Some((text, rest))
    }
}

/// The statements of `sql/examine.sql`, for these of the words that it knows.
pub(super) fn examine(target: &Target, examine: &str) -> String {
    let variables = Variables {
        pipeline: "",
        target,
        role: None,
        owner: None,
        writer: None,
        failover: false,
        row_bytes_max: 0,
        max_event_bytes: None,
    };
    variables.fill_in_with(EXAMINE, examine)
}
