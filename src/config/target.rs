//! Builds the settings for the slot, the publication and the outbox.

use super::Given;
use super::error::ConfigError;
use super::file::{FilePipeline, OutboxName};
use super::reader::Reader;
use crate::model::commands::Commands;
use crate::pipeline::settings::SnapshotMode;
use crate::postgres::table::TableName;
use crate::postgres::table_pattern::TablePatterns;
use crate::postgres::target::{Outbox, Target};

pub(super) fn target(
    reader: &Reader,
    file: &FilePipeline,
    given: &Given<'_>,
    commands: Commands,
) -> Result<Target, ConfigError> {
    let default = format!("walpost_{}", reader.pipeline);
    let slot = file.slot.clone().unwrap_or_else(|| default.clone());
    let is_legal = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_';
    if slot.is_empty() || slot.len() > 63 || !slot.bytes().all(is_legal) {
        let reason = format!("{slot:?}: expected 1 to 63 characters of a-z, 0-9 and _");
        return Err(reader.error("slot", reason));
    }
    let publication = file.publication.clone().unwrap_or_else(|| default.clone());
    if publication.is_empty() || publication.len() > 63 {
        return Err(reader.error("publication", "expected a name of 1 to 63 bytes"));
    }
    let outbox = match file.outbox.unwrap_or_default() {
        OutboxName::Table => match &file.tables {
            None => Outbox::Table(table(reader, file)?),
            Some(patterns) => {
                let tables = tables(reader, file, patterns)?;
                match given.connection.table.as_ref() {
                    None => Outbox::Tables(tables),
                    Some(one) => select_table(reader, tables, one, given.accepts_single_table)?,
                }
            }
        },
        OutboxName::Messages if file.snapshot == Some(SnapshotMode::Initial) => {
            let reason = "an outbox that uses logical decoding messages has no table, and therefore no older rows. Remove the snapshot \
                 setting";
            return Err(reader.error("snapshot", reason));
        }
        OutboxName::Messages => Outbox::Messages {
            prefix: prefix(reader, file, default)?,
        },
    };
    Ok(Target {
        outbox,
        publication,
        slot,
        commands,
    })
}

fn reject_prefix(reader: &Reader, file: &FilePipeline) -> Result<(), ConfigError> {
    if file.prefix.is_none() {
        return Ok(());
    }
    let reason = "a prefix is used only with logical decoding messages, but this outbox is a table. Remove prefix, or set \
                  outbox to messages";
    Err(reader.error("prefix", reason))
}

/// Parses the patterns that select the outbox tables.
fn tables(
    reader: &Reader,
    file: &FilePipeline,
    patterns: &[String],
) -> Result<TablePatterns, ConfigError> {
    reject_prefix(reader, file)?;
    if file.table.is_some() {
        let reason = "table and tables both determine the outbox. Remove one of them";
        return Err(reader.error("tables", reason));
    }
    if file.snapshot.is_some() {
        let reason = "with several tables, the existing rows of each table are delivered when the table is added. Remove the snapshot setting";
        return Err(reader.error("snapshot", reason));
    }
    TablePatterns::new(patterns).map_err(|error| reader.error("tables", error))
}

/// Limits the outbox of a pipeline with several tables to the table named by `--table`. Returns an
/// error if the command does not accept that flag.
fn select_table(
    reader: &Reader,
    tables: TablePatterns,
    selected: &String,
    is_accepted: bool,
) -> Result<Outbox, ConfigError> {
    if !is_accepted {
        let reason = "--table or WALPOST_TABLE selects one of several tables, but this command applies to all of them. \
                      Remove the flag or variable";
        return Err(reader.error("tables", reason));
    }
    let table: Option<TableName> = reader.read("table", Some(selected))?;
    match table {
        Some(table) if tables.matches(&table.schema, &table.name) => {
            Ok(Outbox::OneOf { table, of: tables })
        }
        _ => {
            let reason = format!(
                "{selected} is not one of the outbox's tables, {tables}. Specify one of these tables, or add a pattern to the \
                 tables setting"
            );
            Err(reader.error("table", reason))
        }
    }
}

fn table(reader: &Reader, file: &FilePipeline) -> Result<TableName, ConfigError> {
    reject_prefix(reader, file)?;
    let table = reader.read("table", file.table.as_ref())?;
    Ok(table.unwrap_or_else(|| TableName {
        schema: "public".to_owned(),
        name: "outbox".to_owned(),
    }))
}

fn prefix(reader: &Reader, file: &FilePipeline, default: String) -> Result<String, ConfigError> {
    let given = [
        ("table", file.table.is_some()),
        ("tables", file.tables.is_some()),
    ];
    if let Some((key, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
        let reason = "an outbox that uses logical decoding messages has no table. Remove this key, or set outbox = \"table\"";
        return Err(reader.error(key, reason));
    }
    let prefix = file.prefix.clone().unwrap_or(default);
    let is_legal = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-');
    if prefix.is_empty() || prefix.len() > 63 || !prefix.bytes().all(is_legal) {
        let reason = format!("{prefix:?}: expected 1 to 63 characters of a-z A-Z 0-9 . _ -");
        return Err(reader.error("prefix", reason));
    }
    Ok(prefix)
}
