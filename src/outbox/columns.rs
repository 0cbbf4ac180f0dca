//! Resolves the column names in the settings to the columns of an existing table.

use super::bound::{Bound, Piece, Source};
use super::connect::{ColumnFacts, Kind, default_text};
use super::converted::{Converted, HeaderForm, KeyForm, ValueForm};
use super::reserved_topics::ReservedTopics;
use super::settings::{
    DebeziumHeaders, EmptyPayload, Format, HeaderFormat, HeadersColumn, NullPayload,
    OutboxSettings, Route, Topic,
};
use super::template::{Part, Template};
use super::timestamp::TimestampType;

pub use super::bound::{COLUMNS_MAX, Row};

/// The names of columns that contain a W3C trace context. If no headers are configured, these
/// columns become headers with the same names.
const TRACE_CONTEXT: [&str; 2] = ["traceparent", "tracestate"];

/// A column of the table, as described by the Relation message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableColumn<'a> {
    pub name: &'a str,
    /// The OID of the column's type (`pg_type.oid`).
    pub type_oid: u32,
}

impl<'a> TableColumn<'a> {
    /// Creates columns from names and type OIDs.
    pub(crate) fn list(columns: &'a [(String, u32)]) -> Vec<Self> {
        let columns = columns.iter().map(|(name, type_oid)| Self {
            name,
            type_oid: *type_oid,
        });
        columns.collect()
    }
}

/// The table that contains the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SourceTable<'a> {
    /// The name of the schema, as stored in the catalog.
    pub schema: &'a str,
    pub name: &'a str,
    /// The qualified name in SQL syntax.
    pub sql_name: &'a str,
}

/// The settings, with column names resolved to the columns of a table.
#[derive(Debug)]
pub struct Mapping {
    /// The table's name in SQL syntax, or `None` for events sent as logical decoding messages.
    table: Option<Box<str>>,
    /// For each column of the table, the index of the column's value in a [`Row`], or `None` if the
    /// settings do not refer to the column.
    slots: Vec<Option<u8>>,
    pub(super) topic: BoundTopic,
    pub(super) topic_rule: Box<TopicRule>,
    pub(super) key: Bound,
    pub(super) key_form: KeyForm,
    /// Whether the key, the value and the headers are plain text and no headers precede the event's
    /// own headers. This is the common case, which has a fast path.
    pub(super) is_plain: bool,
    /// The column that contains the value.
    pub(super) payload: Source,
    /// How the value is encoded, or `None` if the value is the column's text or bytes.
    pub(super) value_form: Option<Box<ValueForm>>,
    /// How a null value is written.
    pub(super) null_payload: NullPayload,
    pub(super) empty_payload: EmptyPayload,
    /// The default values that replace nulls, with the indices of their columns. The defaults apply
    /// to the key, the value and the headers from templates.
    pub(super) defaults: Vec<(u8, Box<[u8]>)>,
    /// The values of the `__debezium.context.*` headers, which identify Debezium's connector;
    /// `None` if these headers are not added.
    pub(super) debezium_headers: Option<DebeziumHeaders>,
    /// The column that contains the trace context in the format of Java properties.
    pub(super) tracing: Option<Source>,
    /// Headers from templates.
    pub(super) headers: Vec<(String, Bound)>,
    pub(super) header_format: HeaderFormat,
    /// How the headers from templates are encoded. Empty if all of them are text.
    pub(super) header_forms: Vec<HeaderForm>,
    /// Columns that become headers with the same names. Null columns are omitted.
    pub(super) trace_context: Vec<(&'static str, Source)>,
    /// The JSON column whose members become headers.
    pub(super) headers_column: Option<Source>,
    /// The column that contains the record's timestamp.
    pub(super) timestamp: Option<(Source, TimestampType)>,
    /// The column that contains the record's partition.
    pub(super) partition: Option<Source>,
    /// The column `id`, which identifies a row in error messages.
    id: Option<Source>,
}

/// Data that is needed only when a row's topic differs from the previous row's topic.
#[derive(Debug)]
pub(super) struct TopicRule {
    /// The setting that determines the topic, for use in error messages.
    pub(super) setting: String,
    /// The reserved topics that this setting could produce.
    pub(super) reserved: ReservedTopics,
}

/// The setting that determines a record's topic, with column names replaced by the indices of their
/// values in a [`Row`].
#[derive(Debug)]
pub(super) enum BoundTopic {
    Template(Bound),
    Route { source: Source, route: Route },
}

/// The error returned if a table does not match the settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MappingError {
    /// A configured column does not exist.
    #[error(
        "table {table} has no column {column:?}, which {setting} refers to; the table has: {found}. \
         Use one of these in {setting}, or add the column"
    )]
    MissingColumn {
        table: String,
        /// The column that is missing.
        column: String,
        /// The setting that refers to the missing column.
        setting: String,
        /// The existing columns.
        found: String,
    },
    /// A configured column has an unsuitable type.
    #[error(
        "column {column:?} of table {table} has type {found}, but {setting} requires \
         {expected}. Use another column in {setting}, or have the owner of the table \
         change the type: ALTER TABLE {table} ALTER COLUMN {column:?} TYPE ..."
    )]
    WrongType {
        table: String,
        column: String,
        /// The name of the column's type, or the type's OID if the name is unknown.
        found: String,
        /// The setting that refers to the column.
        setting: &'static str,
        /// The suitable types.
        expected: &'static str,
    },
    /// A configured column does not exist in events sent as logical decoding messages.
    #[error(
        "events sent as messages have no column {column:?}, which {setting} refers to; they have: {found}. \
         Use one of these in {setting}"
    )]
    MissingField {
        /// The column that is missing.
        column: String,
        /// The setting that refers to the missing column.
        setting: String,
        /// The existing columns.
        found: String,
    },
    /// A configured column of events sent as logical decoding messages has an unsuitable type.
    #[error(
        "column {column:?} of events sent as messages can't be used for {setting}, which requires {expected}. \
         Use another column in {setting}, or remove the setting"
    )]
    WrongField {
        column: String,
        /// The setting that refers to the column.
        setting: &'static str,
        /// The suitable types.
        expected: &'static str,
    },
    /// A part of the table's name can't be distinguished from the surrounding text in a topic's
    /// name.
    #[error(
        "table {table} has the character {separator:?} in its {part}, but {setting} uses that character as a separator: events \
         of another table could have the same topic. Rename the {part}: {remedy}; or use only one of the parts in the topic \
         setting"
    )]
    AmbiguousTopic {
        table: String,
        /// `schema` or `name`.
        part: &'static str,
        separator: char,
        /// The setting that uses `separator` to separate the parts of the topic's name.
        setting: String,
        /// The statement that renames the schema or table.
        remedy: String,
    },
    /// The table was renamed, and a setting includes the table's name in records.
    #[error(
        "table {found} was named {before} when its name was last accepted. With {setting}, its rows from position \
         {at} on would be published as rows of another table. {remedy}"
    )]
    Renamed {
        /// The last accepted name of the table.
        before: String,
        /// The new name.
        found: String,
        /// The position of the first row that was read under the new name.
        at: String,
        /// The setting that includes the table's name in records.
        setting: String,
        /// Describes how to restore the previous name or to accept the new one.
        remedy: String,
    },
    /// The settings refer to more columns than a [`Row`] can hold.
    #[error(
        "the settings for table {0} refer to more than {COLUMNS_MAX} different columns; use fewer"
    )]
    TooManyColumns(String),
}

/// Maximum number of names in a list returned by [`list_names`].
const LISTED_NAMES_MAX: usize = 20;
/// Maximum length of a list returned by [`list_names`], in characters.
const LISTED_CHARS_MAX: usize = 1000;

/// The OIDs of built-in types, from `src/include/catalog/pg_type.dat` in PostgreSQL 18.
mod oid {
    pub(super) const BYTEA: u32 = 17;
    pub(super) const TEXT: u32 = 25;
    pub(super) const BPCHAR: u32 = 1042;
    pub(super) const VARCHAR: u32 = 1043;
    pub(super) const INT8: u32 = 20;
    pub(super) const INT2: u32 = 21;
    pub(super) const INT4: u32 = 23;
    pub(super) const JSON: u32 = 114;
    pub(super) const TIMESTAMP: u32 = 1114;
    pub(super) const TIMESTAMPTZ: u32 = 1184;
    pub(super) const JSONB: u32 = 3802;
    /// The lowest OID of user-defined types.
    pub(super) const FIRST_USER_OID: u32 = 16384;
}

impl MappingError {
    /// Adds the name of the unsuitable type to the error. `name_of` returns the name of a column's
    /// type.
    #[must_use]
    pub fn with_type(mut self, name_of: impl FnOnce(&str) -> Option<String>) -> Self {
        if let Self::WrongType { column, found, .. } = &mut self
            && let Some(name) = name_of(column)
        {
            *found = name;
        }
        self
    }
}

impl Mapping {
    /// Binds the columns in `settings` to the columns of `table`, whose name must not require
    /// quoting in SQL.
    ///
    /// # Errors
    /// Returns an error if a configured column does not exist or has an unsuitable type.
    pub fn bind(
        settings: &OutboxSettings,
        table: &str,
        columns: &[TableColumn<'_>],
    ) -> Result<Self, MappingError> {
        let (schema, name) = table.split_once('.').unwrap_or(("public", table));
        let table = SourceTable {
            schema,
            name,
            sql_name: table,
        };
        Self::bind_to(settings, Some(table), columns, &[])
    }

    /// Like [`Mapping::bind`], but also uses the column properties in `facts`, which come from the
    /// catalog.
    ///
    /// # Errors
    /// Returns an error if a configured column does not exist or has an unsuitable type.
    pub(crate) fn bind_with(
        settings: &OutboxSettings,
        table: SourceTable<'_>,
        columns: &[TableColumn<'_>],
        facts: &[ColumnFacts],
    ) -> Result<Self, MappingError> {
        Self::bind_to(settings, Some(table), columns, facts)
    }

    pub(super) fn bind_to(
        settings: &OutboxSettings,
        table: Option<SourceTable<'_>>,
        columns: &[TableColumn<'_>],
        facts: &[ColumnFacts],
    ) -> Result<Self, MappingError> {
        let columns = &without_domains(columns, facts)[..];
        let mut binder = Binder {
            table,
            columns,
            facts,
            slots: vec![None; columns.len()],
            used: 0,
        };
        let topic = match &settings.topic {
            Topic::Template(template) => {
                binder.check_topic(template)?;
                BoundTopic::Template(binder.template(template, "topic")?)
            }
            Topic::Route(route) => BoundTopic::Route {
                source: binder.column(&route.column, "route")?,
                route: route.clone(),
            },
        };
        let key = binder.template(&settings.key, "key")?;
        let key_form = match settings.key_format {
            Format::String | Format::Bytes => KeyForm::Text,
            Format::Json => KeyForm::Json(binder.converted(&settings.key, "key")?),
            Format::JsonSchema => KeyForm::JsonSchema(binder.converted(&settings.key, "key")?),
        };
        let payload = binder.typed(
            &settings.payload,
            "payload",
            "a built-in type such as jsonb, json, text or bytea, or a domain over one",
            |oid| !is_user_defined(oid),
        )?;
        let (mut headers, mut header_forms) = (Vec::new(), Vec::new());
        for (name, template) in &settings.headers {
            let setting = format!("header {name:?}");
            headers.push((name.clone(), binder.template(template, &setting)?));
            if settings.header_format != HeaderFormat::String {
                let converted = binder.converted(template, &setting)?;
                header_forms.push(HeaderForm::new(settings.header_format, converted));
            }
        }
        let value_form = binder.value_form(settings)?;
        let tracing = match &settings.tracing_span_context {
            None => None,
            Some(name) => Some(binder.column(name, "tracing_span_context")?),
        };
        let is_text = |oid| matches!(oid, oid::TEXT | oid::BPCHAR | oid::VARCHAR);
        let mut trace_context = Vec::new();
        for name in TRACE_CONTEXT {
            let is_match =
                |column: &&TableColumn<'_>| column.name == name && is_text(column.type_oid);
            if settings.has_default_headers() && columns.iter().any(|column| is_match(&column)) {
                trace_context.push((name, binder.column(name, "headers")?));
            }
        }
        let is_json = |oid| oid == oid::JSON || oid == oid::JSONB;
        let headers_column = match &settings.headers_column {
            HeadersColumn::Off => None,
            HeadersColumn::Named(name) => {
                Some(binder.typed(name, "headers_column", "json or jsonb", is_json)?)
            }
            HeadersColumn::IfPresent => columns
                .iter()
                .find(|column| column.name == "headers" && is_json(column.type_oid))
                .map(|column| binder.column(column.name, "headers_column"))
                .transpose()?,
        };
        let timestamp = match &settings.timestamp {
            None => None,
            Some(name) => {
                let source = binder.typed(
                    name,
                    "timestamp",
                    "timestamptz, timestamp, or int8 with milliseconds since 1970",
                    |oid| timestamp_type(oid).is_some(),
                )?;
                timestamp_type(binder.type_oid(name)).map(|kind| (source, kind))
            }
        };
        let partition = match &settings.partition {
            None => None,
            Some(name) => {
                Some(binder.typed(name, "partition", "int2, int4 or int8", is_integer)?)
            }
        };
        let id = match columns.iter().any(|column| column.name == "id") {
            true => Some(binder.column("id", "id")?),
            false => None,
        };
        let defaults = match settings.null_default {
            true => binder.defaults(),
            false => Vec::new(),
        };
        let is_plain = matches!(key_form, KeyForm::Text)
            && value_form.is_none()
            && header_forms.is_empty()
            && settings.empty_payload == EmptyPayload::Value
            && settings.debezium_headers.is_none()
            && tracing.is_none();
        Ok(Self {
            table: table.map(|table| table.sql_name.into()),
            slots: binder.slots,
            topic,
            topic_rule: Box::new(TopicRule {
                setting: topic_setting(&settings.topic),
                reserved: settings.topic.reachable(&settings.reserved_topics),
            }),
            key,
            key_form,
            is_plain,
            payload,
            value_form: value_form.map(Box::new),
            null_payload: settings.null_payload,
            empty_payload: settings.empty_payload,
            defaults,
            debezium_headers: settings.debezium_headers.clone(),
            tracing,
            headers,
            header_format: settings.header_format,
            header_forms,
            trace_context,
            headers_column,
            timestamp,
            partition,
            id,
        })
    }

    /// Returns the table's name in SQL syntax, or `None` for events sent as logical decoding
    /// messages.
    #[must_use]
    pub(crate) fn table(&self) -> Option<&str> {
        self.table.as_deref()
    }

    /// Returns the number of columns in the table.
    #[must_use]
    pub fn width(&self) -> usize {
        self.slots.len()
    }

    /// Returns where a [`Row`] stores the value of the table's column at `index`, or `None` if the
    /// settings do not refer to the column.
    #[must_use]
    pub fn slot(&self, index: usize) -> Option<usize> {
        self.slots.get(index).copied().flatten().map(usize::from)
    }

    /// Returns the value of the column `id`, if the table has one.
    #[must_use]
    pub fn id<'r>(&self, row: &Row<'r>) -> Option<&'r [u8]> {
        self.id.and_then(|id| id.value_in(row))
    }

    /// Describes a row for use in error messages. If the table has a column `id`, the description
    /// contains the value of that column.
    #[must_use]
    pub fn describe(&self, row: &Row<'_>) -> String {
        match self.id(row) {
            Some(id) => format!(
                "row with id {}",
                String::from_utf8_lossy(&id[..id.len().min(100)])
            ),
            None => "row".to_owned(),
        }
    }
}

/// Returns the columns, with the type of each column that is a domain replaced by the domain's base
/// type.
fn without_domains<'a>(columns: &[TableColumn<'a>], facts: &[ColumnFacts]) -> Vec<TableColumn<'a>> {
    let base = |column: &TableColumn<'a>| {
        let facts = facts.iter().find(|facts| facts.name == column.name)?;
        let domain = facts
            .domain
            .filter(|domain| domain.oid == column.type_oid)?;
        Some(TableColumn {
            type_oid: domain.base_oid,
            ..*column
        })
    };
    let columns = columns.iter();
    columns
        .map(|column| base(column).unwrap_or(*column))
        .collect()
}

/// Returns whether the type is user-defined.
pub(crate) fn is_user_defined(type_oid: u32) -> bool {
    type_oid >= oid::FIRST_USER_OID
}

/// Returns the setting that determines the topic, in the form in which errors quote it.
fn topic_setting(topic: &Topic) -> String {
    let key = match topic {
        Topic::Template(_) => "topic",
        Topic::Route(_) => "route",
    };
    format!("{key} = \"{topic}\"")
}

/// Returns a list of names for use in an error message. If there are too many names, the list ends
/// with the number of names that were omitted. The length of the list is limited, because errors
/// for many tables may be kept in memory.
pub(crate) fn list_names<'n>(names: impl ExactSizeIterator<Item = &'n str>) -> String {
    let total = names.len();
    let (mut list, mut chars, mut listed) = (String::new(), 0, 0);
    for name in names.take(LISTED_NAMES_MAX) {
        let separator = if listed == 0 { "" } else { ", " };
        chars += separator.len() + name.chars().count();
        if chars > LISTED_CHARS_MAX {
            break;
        }
        list.push_str(separator);
        list.push_str(name);
        listed += 1;
    }
    match (listed, total - listed) {
        (_, 0) => list,
        (0, omitted) => format!("{omitted} columns with long names"),
        (_, omitted) => format!("{list} and {omitted} more"),
    }
}

fn is_integer(oid: u32) -> bool {
    matches!(oid, oid::INT2 | oid::INT4 | oid::INT8)
}

fn timestamp_type(oid: u32) -> Option<TimestampType> {
    match oid {
        oid::TIMESTAMPTZ => Some(TimestampType::Zoned),
        oid::TIMESTAMP => Some(TimestampType::Local),
        oid if is_integer(oid) => Some(TimestampType::Millis),
        _ => None,
    }
}

struct Binder<'a> {
    /// The table, or `None` for events sent as logical decoding messages.
    table: Option<SourceTable<'a>>,
    columns: &'a [TableColumn<'a>],
    /// Properties of the columns that were read from the catalog.
    facts: &'a [ColumnFacts],
    slots: Vec<Option<u8>>,
    used: u8,
}

impl Binder<'_> {
    fn column(&mut self, name: &str, setting: &str) -> Result<Source, MappingError> {
        let index = self
            .columns
            .iter()
            .position(|column| column.name == name)
            .ok_or_else(|| self.missing_column(name, setting))?;
        let slot = match self.slots[index] {
            Some(slot) => slot,
            None if usize::from(self.used) == COLUMNS_MAX => {
                let table = self.table.map_or("", |table| table.sql_name).to_owned();
                return Err(MappingError::TooManyColumns(table));
            }
            None => {
                let slot = self.used;
                self.used += 1;
                self.slots[index] = Some(slot);
                slot
            }
        };
        Ok(Source {
            slot,
            bytea: self.columns[index].type_oid == oid::BYTEA,
        })
    }

    fn missing_column(&self, column: &str, setting: &str) -> MappingError {
        let found = list_names(self.columns.iter().map(|column| column.name));
        let (column, setting) = (column.to_owned(), setting.to_owned());
        match self.table {
            Some(table) => MappingError::MissingColumn {
                table: table.sql_name.to_owned(),
                column,
                setting,
                found,
            },
            None => MappingError::MissingField {
                column,
                setting,
                found,
            },
        }
    }

    fn type_oid(&self, name: &str) -> u32 {
        self.columns
            .iter()
            .find(|column| column.name == name)
            .map_or(0, |column| column.type_oid)
    }

    fn typed(
        &mut self,
        name: &str,
        setting: &'static str,
        expected: &'static str,
        serves: impl Fn(u32) -> bool,
    ) -> Result<Source, MappingError> {
        let source = self.column(name, setting)?;
        let type_oid = self.type_oid(name);
        if serves(type_oid) {
            return Ok(source);
        }
        Err(self.wrong_type(name, setting, expected))
    }

    fn wrong_type(
        &self,
        name: &str,
        setting: &'static str,
        expected: &'static str,
    ) -> MappingError {
        let (column, type_oid) = (name.to_owned(), self.type_oid(name));
        match self.table {
            Some(table) => MappingError::WrongType {
                table: table.sql_name.to_owned(),
                column,
                found: format!("OID {type_oid}"),
                setting,
                expected,
            },
            None => MappingError::WrongField {
                column,
                setting,
                expected,
            },
        }
    }

    fn template(&mut self, template: &Template, setting: &str) -> Result<Bound, MappingError> {
        let setting = format!("{setting} = \"{template}\"");
        let pieces = template
            .parts()
            .iter()
            .map(|part| match part {
                Part::Literal(text) => Ok(Piece::Literal(text.as_bytes().into())),
                Part::Column(name) => self.column(name, &setting).map(Piece::Column),
                Part::Time(name) => self.time(name, &setting),
                Part::TableSchema => {
                    self.bind_table_part("table.schema", &setting, |table| table.schema)
                }
                Part::TableName => self.bind_table_part("table.name", &setting, |table| table.name),
            })
            .collect::<Result<_, _>>()?;
        Ok(Bound { pieces })
    }

    /// Checks that the parts of the table's name can be distinguished from the rest of the topic's
    /// name.
    fn check_topic(&self, template: &Template) -> Result<(), MappingError> {
        let Some(table) = &self.table else {
            return Ok(());
        };
        for (index, part) in template.parts().iter().enumerate() {
            let (part, text) = match part {
                Part::TableSchema => ("schema", table.schema),
                Part::TableName => ("name", table.name),
                Part::Literal(_) | Part::Column(_) | Part::Time(_) => continue,
            };
            if let Some(separator) = template.separator_in(index, text) {
                return Err(MappingError::AmbiguousTopic {
                    table: table.sql_name.to_owned(),
                    part,
                    separator,
                    setting: format!("topic = \"{template}\""),
                    remedy: match part {
                        "schema" => "ALTER SCHEMA ... RENAME TO ...".to_owned(),
                        _ => format!("ALTER TABLE {} RENAME TO ...", table.sql_name),
                    },
                });
            }
        }
        Ok(())
    }

    fn bind_table_part(
        &self,
        part: &str,
        setting: &str,
        text: impl for<'t> FnOnce(&SourceTable<'t>) -> &'t str,
    ) -> Result<Piece, MappingError> {
        match &self.table {
            Some(table) => Ok(Piece::Literal(text(table).as_bytes().into())),
            None => Err(self.missing_column(part, setting)),
        }
    }

    fn time(&mut self, name: &str, setting: &str) -> Result<Piece, MappingError> {
        let source = self.column(name, setting)?;
        match timestamp_type(self.type_oid(name)) {
            Some(kind @ (TimestampType::Zoned | TimestampType::Local)) => {
                Ok(Piece::Time(source, kind))
            }
            _ => Err(self.wrong_type(name, "rfc3339", "timestamptz or timestamp")),
        }
    }

    /// Binds a template whose result is passed to one of Connect's converters. If the template
    /// consists of a single column, the result has the type of that column. Otherwise, the result
    /// is a string.
    fn converted(&mut self, template: &Template, setting: &str) -> Result<Converted, MappingError> {
        match template.parts() {
            [Part::Column(name)] => self.converted_column(name, setting),
            _ => Ok(Converted::from_template(self.template(template, setting)?)),
        }
    }

    fn converted_column(&mut self, name: &str, setting: &str) -> Result<Converted, MappingError> {
        let source = self.column(name, setting)?;
        let type_oid = self.type_oid(name);
        let facts = self.facts.iter().find(|facts| facts.name == name);
        let type_modifier = facts.map_or(-1, |facts| facts.type_modifier);
        let kind = Kind::from_type(type_oid, type_modifier);
        let is_optional = !facts.is_some_and(|facts| facts.not_null);
        let default = self.default_text(name);
        let schema = kind.schema(type_oid, type_modifier, is_optional, default.as_deref());
        Ok(Converted::from_column(source, kind, schema))
    }

    fn default_text(&self, name: &str) -> Option<String> {
        let facts = self.facts.iter().find(|facts| facts.name == name)?;
        let type_oid = self.type_oid(name);
        let kind = Kind::from_type(type_oid, facts.type_modifier);
        default_text(&kind, type_oid, facts.default.as_deref()?)
    }

    /// Returns the default values that replace nulls in the columns to which the settings refer.
    fn defaults(&self) -> Vec<(u8, Box<[u8]>)> {
        let slots = self.slots.iter().zip(self.columns);
        let defaults = slots.filter_map(|(slot, column)| {
            let text = self.default_text(column.name)?;
            Some(((*slot)?, text.into_bytes().into_boxed_slice()))
        });
        defaults.collect()
    }

    /// Returns how the value is encoded, or `None` if the value is the column's text or bytes.
    fn value_form(&mut self, settings: &OutboxSettings) -> Result<Option<ValueForm>, MappingError> {
        let is_text = matches!(settings.value_format, Format::String | Format::Bytes);
        if is_text && settings.expand_payload.is_none() && settings.envelope.is_empty() {
            return Ok(None);
        }
        let payload = self.converted_column(&settings.payload, "payload")?;
        let mut form = ValueForm::new(settings, payload);
        if settings.envelope.is_empty() {
            return Ok(Some(form));
        }
        for (column, alias) in &settings.envelope {
            let setting = format!("envelope {column:?}");
            let member = self.converted_column(column, &setting)?;
            form.add_member(alias, member);
        }
        // Debezium derives the name of the envelope's schema from the table and from the value of
        // the column that determines the topic.
        let mut routed = settings.topic.columns();
        let routed = match (routed.next(), routed.next()) {
            (Some(column), None) => Some(self.column(column, "topic")?),
            _ => None,
        };
        let prefix = settings.debezium_headers.as_ref();
        form.name_schema(
            prefix.map(|headers| headers.logical_name.as_str()),
            self.table.map(|table| table.sql_name),
            routed,
        );
        Ok(Some(form))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns() -> Vec<TableColumn<'static>> {
        [
            ("id", 2950),
            ("aggregatetype", 1043),
            ("aggregateid", 1043),
            ("type", 1043),
            ("payload", oid::JSONB),
            ("raw", oid::BYTEA),
            ("kind", oid::FIRST_USER_OID),
        ]
        .map(|(name, type_oid)| TableColumn { name, type_oid })
        .to_vec()
    }

    fn bind(change: impl FnOnce(&mut OutboxSettings)) -> Result<Mapping, MappingError> {
        let mut settings = OutboxSettings::default();
        change(&mut settings);
        Mapping::bind(&settings, "public.outbox", &columns())
    }

    #[test]
    fn limits_the_number_and_total_length_of_listed_column_names() {
        let list = |names: &[&str]| list_names(names.iter().copied());
        assert_eq!(list(&["id", "type"]), "id, type");
        assert_eq!(list(&[]), "");
        let many = list(&["column"; 1600]);
        assert_eq!(many, format!("{} and 1580 more", ["column"; 20].join(", ")));
        let long = "\u{e4}".repeat(400);
        let some = list(&[&long[..], &long, &long, "id"]);
        assert_eq!(some, format!("{long}, {long} and 2 more"));
        let longest = "x".repeat(1001);
        assert_eq!(list(&[&longest[..], "id"]), "2 columns with long names");
    }

    #[test]
    fn error_about_a_missing_column_does_not_grow_with_the_number_of_columns() {
        let name = "x".repeat(1000);
        let column = TableColumn {
            name: &name,
            type_oid: 25,
        };
        let columns = vec![column; 1600];
        let error = Mapping::bind(&OutboxSettings::default(), "public.outbox", &columns);
        let length = error.expect_err("no column").to_string().len();
        assert!(length < 2000, "{length}");
    }

    #[test]
    fn default_settings_match_a_debezium_outbox_table() {
        let mapping = bind(|_| {}).expect("binds");
        let needed: Vec<_> = (0..mapping.width())
            .map(|i| mapping.slot(i).is_some())
            .collect();
        assert_eq!(needed, [true, true, true, false, true, false, false]);
        assert!(mapping.headers_column.is_none());
    }

    #[test]
    fn accepts_a_table_without_an_id_column_if_no_setting_refers_to_it() {
        let columns = &columns()[1..];
        let mut settings = OutboxSettings::default();
        settings.headers.clear();
        let mapping = Mapping::bind(&settings, "public.outbox", columns).expect("binds");
        let row = [None; COLUMNS_MAX];
        assert_eq!(mapping.id(&row), None);
        assert_eq!(mapping.describe(&row), "row");
    }

    #[test]
    fn adds_trace_context_from_text_columns_unless_headers_are_configured() {
        let bind = |type_oid, change: fn(&mut OutboxSettings)| {
            let mut columns = columns();
            columns.push(TableColumn {
                name: "traceparent",
                type_oid,
            });
            let mut settings = OutboxSettings::default();
            change(&mut settings);
            let mapping = Mapping::bind(&settings, "public.outbox", &columns).expect("binds");
            let names = mapping.trace_context.iter().map(|(name, _)| *name);
            (names.collect::<Vec<_>>(), mapping.slot(7).is_some())
        };
        for type_oid in [oid::TEXT, oid::BPCHAR, oid::VARCHAR] {
            assert_eq!(bind(type_oid, |_| {}), (vec!["traceparent"], true));
        }
        assert_eq!(bind(oid::JSONB, |_| {}), (vec![], false));
        assert_eq!(bind(oid::TEXT, |s| s.headers.clear()), (vec![], false));
    }

    #[test]
    fn table_name_placeholders_need_no_column_and_are_invalid_for_logical_messages() {
        let topic = "{table.schema}-{table.name}";
        let mapping = bind(|s| s.topic = topic.parse().expect("template")).expect("binds");
        assert_eq!(mapping.slot(1), None, "aggregatetype");
        let settings = OutboxSettings {
            topic: topic.parse().expect("template"),
            ..OutboxSettings::default()
        };
        let error = Mapping::for_messages(&settings).expect_err("no table");
        let text = error.to_string();
        assert!(
            text.contains("\"table.schema\"") && text.contains(topic),
            "{text}"
        );
    }

    #[test]
    fn rejects_tables_whose_name_makes_the_topic_ambiguous() {
        let bind = |topic: &str, schema, name| {
            let settings = OutboxSettings {
                topic: topic.parse::<Template>().expect("template").into(),
                ..OutboxSettings::default()
            };
            let sql_name = "a.\"b.c\"";
            let table = SourceTable {
                schema,
                name,
                sql_name,
            };
            Mapping::bind_with(&settings, table, &columns(), &[]).map(drop)
        };
        for (topic, schema, name, part) in [
            ("{table.schema}.{table.name}", "a.b", "c", "schema"),
            ("{table.schema}.{table.name}", "a", "b.c", "name"),
            (
                "{table.schema}.{aggregatetype}",
                "other.orders",
                "outbox",
                "schema",
            ),
            ("{aggregatetype}-{table.name}", "a", "b-c", "name"),
        ] {
            let error = bind(topic, schema, name).expect_err(topic).to_string();
            for text in [&format!("in its {part}"), topic, "a.\"b.c\""] {
                assert!(error.contains(text), "{text} in {error}");
            }
        }
        for (topic, schema, name) in [
            ("{table.schema}.{aggregatetype}", "tenant_a-b", "b.c"),
            ("outbox.{table.schema}", "a.b", "c"),
            ("{aggregatetype}", "a.b", "b.c"),
        ] {
            assert_eq!(bind(topic, schema, name), Ok(()), "{topic}");
        }
    }

    #[test]
    fn stores_the_value_of_a_column_once_if_the_column_is_used_twice() {
        let mapping = bind(|s| s.key = "{id}{id}".parse().expect("template")).expect("binds");
        assert_eq!(mapping.slot(0), Some(mapping.key.slots()[0]));
        assert_eq!(mapping.key.slots()[0], mapping.key.slots()[1]);
    }

    #[test]
    fn error_for_a_missing_column_lists_the_existing_columns() {
        let error = bind(|s| s.key = "{tenant}".parse().expect("template")).expect_err("missing");
        let text = error.to_string();
        for part in [
            "public.outbox",
            "\"tenant\"",
            "key = \"{tenant}\"",
            "aggregateid, type",
        ] {
            assert!(text.contains(part), "{part:?} in {text:?}");
        }
    }

    #[test]
    fn rejects_columns_with_unsuitable_types() {
        let wrong = |change: fn(&mut OutboxSettings), setting: &str| match bind(change) {
            Err(MappingError::WrongType { setting: found, .. }) => assert_eq!(found, setting),
            other => panic!("{setting}: {other:?}"),
        };
        wrong(|s| s.payload = "kind".to_owned(), "payload");
        wrong(|s| s.timestamp = Some("type".to_owned()), "timestamp");
        wrong(|s| s.partition = Some("type".to_owned()), "partition");
        wrong(
            |s| s.headers_column = HeadersColumn::Named("raw".to_owned()),
            "headers_column",
        );
    }

    #[test]
    fn logical_message_events_have_the_same_columns_as_a_table_created_by_init() {
        let with = |change: fn(&mut OutboxSettings)| {
            let mut settings = OutboxSettings::default();
            change(&mut settings);
            Mapping::for_messages(&settings)
        };
        let mapping = with(|s| s.timestamp = Some("created_at".to_owned())).expect("binds");
        assert!(mapping.headers_column.is_some());
        let error = |change| with(change).expect_err("refused").to_string();
        let missing = error(|s| s.key = "{tenant}".parse().expect("template"));
        for part in [
            "\"tenant\"",
            "key = \"{tenant}\"",
            "payload, headers, created_at",
        ] {
            assert!(missing.contains(part), "{part:?} in {missing:?}");
        }
        let wrong = error(|s| s.partition = Some("type".to_owned()));
        assert!(wrong.contains("partition, which requires int2"), "{wrong}");
    }

    #[test]
    fn rejects_settings_that_use_more_columns_than_the_maximum() {
        let names: Vec<_> = (0..=COLUMNS_MAX).map(|i| format!("c{i}")).collect();
        let columns: Vec<_> = names
            .iter()
            .map(|name| TableColumn { name, type_oid: 25 })
            .collect();
        let all: String = names.iter().map(|name| format!("{{{name}}}")).collect();
        let settings = OutboxSettings {
            topic: all.parse::<Template>().expect("template").into(),
            ..OutboxSettings::default()
        };
        assert_eq!(
            Mapping::bind(&settings, "t", &columns).expect_err("too many"),
            MappingError::TooManyColumns("t".to_owned())
        );
    }

    impl Bound {
        fn slots(&self) -> Vec<usize> {
            self.pieces
                .iter()
                .filter_map(|piece| match piece {
                    Piece::Column(source) | Piece::Time(source, _) => {
                        Some(usize::from(source.slot))
                    }
                    Piece::Literal(_) => None,
                })
                .collect()
        }
    }
}
