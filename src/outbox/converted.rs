//! Keys, values and headers in the formats of Kafka Connect's converters. The layout is determined
//! when the settings are bound, so that routing a row only has to insert text between constant
//! bytes.

use std::ops::Range;

use super::bound::{self, Bound, Piece, Row, Source};
use super::connect::{Form, Kind};
use super::expand::{self, Expanded, Expander, Keep};
use super::json;
use super::route_error::RouteError;
use super::settings::{Format, HeaderFormat, OutboxSettings, Untyped};
use super::timestamp;

/// A value and its Connect type.
#[derive(Debug)]
pub(super) struct Converted {
    from: From,
    /// The schema as written by `JsonConverter`, without the closing brace.
    schema: Box<[u8]>,
}

#[derive(Debug)]
enum From {
    Column(Source, Kind),
    Template(Bound),
}

impl Converted {
    pub(super) fn from_column(source: Source, kind: Kind, schema: Vec<u8>) -> Self {
        Self {
            from: From::Column(source, kind),
            schema: schema.into(),
        }
    }

    pub(super) fn from_template(template: Bound) -> Self {
        Self {
            from: From::Template(template),
            schema: b"{\"type\":\"string\",\"optional\":false"[..].into(),
        }
    }

    /// Appends the value unless it is null. Returns whether the value was appended.
    fn push(&self, row: &Row<'_>, form: Form, out: &mut Vec<u8>) -> Result<bool, RouteError> {
        match &self.from {
            From::Column(source, kind) => match source.value_in(row) {
                None => Ok(false),
                Some(text) => push_column(*source, kind, text, form, out).map(|()| true),
            },
            From::Template(template) => push_template(template, row, form, out),
        }
    }

    /// Like [`Converted::push`], but appends `null` for a null value.
    fn push_json(&self, row: &Row<'_>, out: &mut Vec<u8>) -> Result<(), RouteError> {
        if !self.push(row, Form::Json, out)? {
            out.extend_from_slice(b"null");
        }
        Ok(())
    }

    /// Appends the value together with its schema.
    fn push_json_schema(&self, row: &Row<'_>, out: &mut Vec<u8>) -> Result<(), RouteError> {
        out.extend_from_slice(b"{\"schema\":");
        out.extend_from_slice(&self.schema);
        out.extend_from_slice(b"},\"payload\":");
        self.push_json(row, out)?;
        out.push(b'}');
        Ok(())
    }
}

fn push_column(
    source: Source,
    kind: &Kind,
    text: &[u8],
    form: Form,
    out: &mut Vec<u8>,
) -> Result<(), RouteError> {
    if source.bytea {
        let in_quotes = form == Form::Json;
        if in_quotes {
            out.push(b'"');
        }
        push_base64_of_hex(text, out)?;
        if in_quotes {
            out.push(b'"');
        }
        return Ok(());
    }
    let text = str::from_utf8(text).map_err(|_| RouteError::NotText)?;
    kind.push(out, text, form, false);
    Ok(())
}

/// Appends the base64 encoding of the bytes that a bytea value's text form represents.
fn push_base64_of_hex(text: &[u8], out: &mut Vec<u8>) -> Result<(), RouteError> {
    // The number of hexadecimal digits per part. The base64 encoding of a full part needs no
    // padding, so the encoded parts can be concatenated.
    const DIGITS: usize = 96;
    let digits = text.strip_prefix(b"\\x").ok_or(RouteError::Bytea)?;
    for part in digits.chunks(DIGITS) {
        let mut bytes = [0; DIGITS / 2];
        let bytes = bound::bytes_of_hex(part, &mut bytes).ok_or(RouteError::Bytea)?;
        json::push_base64(out, bytes);
    }
    Ok(())
}

fn push_template(
    template: &Bound,
    row: &Row<'_>,
    form: Form,
    out: &mut Vec<u8>,
) -> Result<bool, RouteError> {
    if form != Form::Json {
        return Ok(bound::append(template, row, out)?.or_null().is_some());
    }
    let start = out.len();
    let (mut columns, mut nulls) = (0, 0);
    out.push(b'"');
    for piece in &template.pieces {
        let source = match piece {
            Piece::Literal(bytes) => {
                json::push_escaped(out, str::from_utf8(bytes).unwrap_or_default());
                continue;
            }
            Piece::Column(source) | Piece::Time(source, _) => *source,
        };
        columns += 1;
        match (source.value_in(row), piece) {
            (None, _) => nulls += 1,
            (Some(text), Piece::Time(_, kind)) => {
                if !timestamp::push_rfc3339(text, *kind, out) {
                    return Err(RouteError::time(text));
                }
            }
            (Some(text), _) if source.bytea => push_base64_of_hex(text, out)?,
            (Some(text), _) => {
                let text = str::from_utf8(text).map_err(|_| RouteError::NotText)?;
                json::push_escaped(out, text);
            }
        }
    }
    out.push(b'"');
    let is_null = columns > 0 && nulls == columns;
    if is_null {
        out.truncate(start);
    }
    Ok(!is_null)
}

/// How a key is encoded.
#[derive(Debug)]
pub(super) enum KeyForm {
    /// The template's text.
    Text,
    Json(Converted),
    JsonSchema(Converted),
}

impl KeyForm {
    /// Appends the key and returns its location, or `None` if there is no key.
    pub(super) fn append(
        &self,
        template: &Bound,
        row: &Row<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Option<Range<usize>>, RouteError> {
        let start = out.len();
        match self {
            Self::Text => return Ok(bound::append(template, row, out)?.or_null()),
            Self::Json(key) => key.push_json(row, out)?,
            Self::JsonSchema(key) => key.push_json_schema(row, out)?,
        }
        Ok(Some(start..out.len()))
    }
}

/// How a header's value is encoded.
#[derive(Debug)]
pub(super) enum HeaderForm {
    Simple(Converted),
    Json(Converted),
    JsonSchema(Converted),
}

impl HeaderForm {
    /// Creates the encoding for a header whose format is not plain text.
    pub(super) fn new(format: HeaderFormat, value: Converted) -> Self {
        match format {
            HeaderFormat::String | HeaderFormat::Simple => Self::Simple(value),
            HeaderFormat::Json => Self::Json(value),
            HeaderFormat::JsonSchema => Self::JsonSchema(value),
        }
    }

    /// Appends the header's value and returns its location, or `None` if there is no value.
    pub(super) fn append(
        &self,
        row: &Row<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Option<Range<usize>>, RouteError> {
        let start = out.len();
        match self {
            Self::Simple(value) => {
                if !value.push(row, Form::Simple, out)? {
                    return Ok(None);
                }
            }
            Self::Json(value) => value.push_json(row, out)?,
            Self::JsonSchema(value) => value.push_json_schema(row, out)?,
        }
        Ok(Some(start..out.len()))
    }
}

/// How a record's value is encoded if it is not simply the text or bytes of the payload column.
#[derive(Debug)]
pub(super) struct ValueForm {
    form: Form,
    with_schema: bool,
    payload: Converted,
    /// The escaped name of the column. If the payload is an object, this is also the name of the
    /// object's schema.
    payload_name: Box<[u8]>,
    expand: Option<Keep>,
    envelope: Option<Envelope>,
}

/// An object that contains the payload and additional columns.
#[derive(Debug, Default)]
struct Envelope {
    members: Vec<Member>,
    /// The beginning of the schema's name. The rest of the name is the value of the column that
    /// determines the topic, followed by `.Value`.
    name: Box<[u8]>,
    routed: Option<Source>,
}

#[derive(Debug)]
struct Member {
    name: Box<str>,
    /// The escaped name of the JSON member.
    label: Box<[u8]>,
    value: Converted,
}

fn escaped(text: &str) -> Box<[u8]> {
    let mut out = Vec::new();
    json::push_escaped(&mut out, text);
    out.into()
}

impl ValueForm {
    pub(super) fn new(settings: &OutboxSettings, payload: Converted) -> Self {
        let (form, with_schema) = match settings.value_format {
            Format::String | Format::Bytes => (Form::Java, false),
            Format::Json => (Form::Json, false),
            Format::JsonSchema => (Form::Json, true),
        };
        Self {
            form,
            with_schema,
            payload,
            payload_name: escaped(&settings.payload),
            expand: settings.expand_payload.map(|expansion| Keep {
                nulls: expansion.nulls == Untyped::Keep,
                empty_arrays: expansion.empty_arrays == Untyped::Keep,
            }),
            envelope: None,
        }
    }

    /// Adds a column to the envelope.
    pub(super) fn add_member(&mut self, name: &str, value: Converted) {
        self.envelope.get_or_insert_default().members.push(Member {
            name: name.into(),
            label: escaped(name),
            value,
        });
    }

    /// Sets the name of the envelope's schema.
    pub(super) fn name_schema(
        &mut self,
        prefix: Option<&str>,
        table: Option<&str>,
        routed: Option<Source>,
    ) {
        if let Some(envelope) = &mut self.envelope {
            let parts = [prefix, table].into_iter().flatten();
            envelope.name = escaped(&parts.collect::<Vec<_>>().join("."));
            envelope.routed = routed;
        }
    }

    /// Returns whether the value is JSON, which can represent null. A JSON `null` is different from
    /// a record without a value.
    pub(super) fn is_json(&self) -> bool {
        self.form == Form::Json
    }

    /// Returns whether the value is an object that contains the payload and additional columns.
    pub(super) fn has_envelope(&self) -> bool {
        self.envelope.is_some()
    }

    /// Appends the value for the payload and returns its location, or `None` if the value is the
    /// payload's own text or bytes.
    pub(super) fn append(
        &self,
        row: &Row<'_>,
        payload: Option<&[u8]>,
        expander: &mut Expander,
        out: &mut Vec<u8>,
    ) -> Result<Option<Range<usize>>, RouteError> {
        let start = out.len();
        let text = match (self.expand, payload) {
            (Some(_), Some(text)) if self.is_text() => {
                Some(str::from_utf8(text).map_err(|_| RouteError::NotText)?)
            }
            _ => None,
        };
        let expanded = match (self.expand, text) {
            (Some(keep), Some(text)) => expander.read(text, keep, self.with_schema),
            _ => None,
        };
        if self.form == Form::Java && expanded.is_none() && self.envelope.is_none() {
            return Ok(None);
        }
        if self.with_schema {
            out.extend_from_slice(b"{\"schema\":");
            let ignores = |keep: Keep| !keep.empty_arrays && self.envelope.is_none();
            match text.filter(|_| self.expand.is_some_and(ignores)) {
                Some(text) if expand::is_empty_array(text) => out.extend_from_slice(b"null"),
                _ => {
                    self.push_schema(row, expanded.as_ref(), out)?;
                    out.push(b'}');
                }
            }
            out.extend_from_slice(b",\"payload\":");
        }
        match &self.envelope {
            None => {
                let is_appended = self.push_payload(row, expanded.as_ref(), out)?;
                if !is_appended {
                    out.extend_from_slice(b"null");
                }
            }
            Some(envelope) if self.form == Form::Java => {
                self.push_struct(envelope, row, expanded.as_ref(), out)?;
            }
            Some(envelope) => {
                out.extend_from_slice(b"{\"payload\":");
                if !self.push_payload(row, expanded.as_ref(), out)? {
                    out.extend_from_slice(b"null");
                }
                for member in &envelope.members {
                    out.extend_from_slice(b",\"");
                    out.extend_from_slice(&member.label);
                    out.extend_from_slice(b"\":");
                    member.value.push_json(row, out)?;
                }
                out.push(b'}');
            }
        }
        if self.with_schema {
            out.push(b'}');
        }
        Ok(Some(start..out.len()))
    }

    fn is_text(&self) -> bool {
        matches!(self.payload.from, From::Column(_, Kind::Text))
    }

    fn push_payload(
        &self,
        row: &Row<'_>,
        expanded: Option<&Expanded<'_>>,
        out: &mut Vec<u8>,
    ) -> Result<bool, RouteError> {
        match expanded {
            Some(expanded) => {
                expanded.push(out, self.form);
                Ok(true)
            }
            None => self.payload.push(row, self.form, out),
        }
    }

    /// Appends a struct as Java prints it, without members that are null.
    fn push_struct(
        &self,
        envelope: &Envelope,
        row: &Row<'_>,
        expanded: Option<&Expanded<'_>>,
        out: &mut Vec<u8>,
    ) -> Result<(), RouteError> {
        out.extend_from_slice(b"Struct{");
        let mut before = out.len();
        out.extend_from_slice(b"payload=");
        let mut is_first = !self.push_payload(row, expanded, out)?;
        if is_first {
            out.truncate(before);
        }
        for member in &envelope.members {
            before = out.len();
            if !is_first {
                out.push(b',');
            }
            out.extend_from_slice(member.name.as_bytes());
            out.push(b'=');
            if member.value.push(row, Form::Java, out)? {
                is_first = false;
            } else {
                out.truncate(before);
            }
        }
        out.push(b'}');
        Ok(())
    }

    /// Appends the schema without the closing brace.
    fn push_schema(
        &self,
        row: &Row<'_>,
        expanded: Option<&Expanded<'_>>,
        out: &mut Vec<u8>,
    ) -> Result<(), RouteError> {
        let Some(envelope) = &self.envelope else {
            self.push_payload_schema(expanded, out);
            return Ok(());
        };
        out.extend_from_slice(b"{\"type\":\"struct\",\"fields\":[");
        self.push_payload_schema(expanded, out);
        out.extend_from_slice(b",\"field\":\"payload\"}");
        for member in &envelope.members {
            out.push(b',');
            out.extend_from_slice(&member.value.schema);
            out.extend_from_slice(b",\"field\":\"");
            out.extend_from_slice(&member.label);
            out.extend_from_slice(b"\"}");
        }
        out.extend_from_slice(b"],\"optional\":false,\"name\":\"");
        out.extend_from_slice(&envelope.name);
        if let Some(routed) = envelope.routed.and_then(|source| source.value_in(row)) {
            out.push(b'.');
            json::push_escaped(
                out,
                str::from_utf8(routed).map_err(|_| RouteError::NotText)?,
            );
        }
        out.extend_from_slice(b".Value\"");
        Ok(())
    }

    fn push_payload_schema(&self, expanded: Option<&Expanded<'_>>, out: &mut Vec<u8>) {
        match expanded {
            Some(expanded) => expanded.push_schema(out, &self.payload_name),
            None => out.extend_from_slice(&self.payload.schema),
        }
    }
}
