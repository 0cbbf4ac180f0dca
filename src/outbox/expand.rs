//! Expands a JSON payload in the same way as Debezium's event router (`table.expand.json.payload`):
//! the value is the object itself instead of a string that contains it, and its schema is derived
//! from the values. This module performs no I/O.
//!
//! The text is parsed once into nodes, from which a [`Shape`] is derived. The output is written
//! from the nodes and the shape. Text for which no shape can be derived is not expanded: see
//! [`Expander::read`].

use std::collections::HashMap;
use std::ops::Range;

use super::connect::Form;
use super::json;

/// The maximum nesting depth of arrays and objects, which is Jackson's limit.
const DEPTH_MAX: usize = 1000;
/// The maximum length of a number in characters, which is Jackson's limit.
const NUMBER_CHARS_MAX: usize = 1000;
/// Objects with at least this many members use a hash table to look up names.
const HASH_TABLE_MEMBERS_MIN: usize = 16;
/// The capacity of the text buffer that is kept for the next payload.
const TEXTS_KEPT_BYTES: usize = 1 << 20;
/// Limits on the amount of work that expanding a payload may require. The limit is [`WORK_EMPTY`]
/// for an empty payload, and increases by [`WORK_PER_BYTE`] for each byte of the payload, up to
/// [`WORK_MAX`]. One unit of work is about one byte written or one name compared. Each object in an
/// array is given the members of all the other objects, so without a limit, a payload of a few
/// megabytes could expand to terabytes.
const WORK_PER_BYTE: usize = 16;
const WORK_EMPTY: usize = 2 << 20;
const WORK_MAX: usize = 32 << 20;
/// Limits on the memory for nodes, in bytes. The limit is [`NODE_BYTES_EMPTY`] for an empty
/// payload, and increases by [`NODE_BYTES_PER_BYTE`] for each byte of the payload, up to
/// [`NODE_BYTES_MAX`]. The most demanding payload, `[1],[1],...`, requires twelve bytes of memory
/// per byte. The memory limits of the manifests in deploy/ must leave room for the maximum, in
/// addition to the largest row, the output and the records in flight.
const NODE_BYTES_PER_BYTE: usize = 16;
const NODE_BYTES_EMPTY: usize = 4 << 20;
const NODE_BYTES_MAX: usize = 32 << 20;
/// Arrays with at least this many items grow by a quarter when they are full, instead of doubling.
const SLOW_GROWTH_ITEMS_MIN: usize = 1 << 10;

/// Returns the work limit or the memory limit for a payload of `len` bytes.
fn limit(len: usize, per_byte: usize, least: usize, max: usize) -> usize {
    len.saturating_mul(per_byte).saturating_add(least).min(max)
}

/// Specifies which members to keep even though their values do not determine a type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Keep {
    /// Whether to keep members that are null.
    pub(super) nulls: bool,
    /// Whether to keep members that are empty arrays.
    pub(super) empty_arrays: bool,
}

/// Parses payloads. Owns the memory for their strings.
#[derive(Debug, Default)]
pub(super) struct Expander {
    /// Strings and names, escaped for the output.
    texts: Vec<u8>,
}

/// A JSON value.
#[derive(Debug)]
enum Node {
    Null,
    Boolean(bool),
    Int32(i64),
    Int64(i64),
    Double(f64),
    /// A number that is too large for Connect.
    TooLarge,
    String(Range<usize>),
    Array(Box<[Node]>),
    Object(Box<[(Range<usize>, Node)]>),
}

/// The type that is derived from all values at the same location in a payload.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Shape {
    Null,
    Boolean,
    Int32,
    Int64,
    Double,
    String,
    Array {
        items: Box<Shape>,
        is_empty: bool,
    },
    Struct {
        fields: Vec<(Range<usize>, Shape)>,
        /// Whether objects with different members in the same array were merged. Debezium's schema
        /// for a merged object is not optional.
        is_joined: bool,
    },
}

/// A payload that was parsed and can be written.
#[derive(Debug)]
pub(super) struct Expanded<'e> {
    texts: &'e [u8],
    keep: Keep,
    node: Node,
    shape: Shape,
}

impl Expander {
    /// Parses a payload, or returns `None` if the payload must not be expanded. A payload is
    /// expanded only if it is a JSON object, if all values in each array have the same type and the
    /// first value determines this type, if no number is too large for Connect, and if neither the
    /// output nor the nodes exceed their limits. If `with_schema` is true, the schema counts
    /// towards the length of the output.
    pub(super) fn read(
        &mut self,
        text: &str,
        keep: Keep,
        with_schema: bool,
    ) -> Option<Expanded<'_>> {
        if !text.starts_with('{') {
            return None;
        }
        self.texts.clear();
        self.texts.shrink_to(TEXTS_KEPT_BYTES);
        let mut reader = Reader {
            bytes: text.as_bytes(),
            text,
            at: 0,
            depth: 0,
            texts: &mut self.texts,
            bytes_left: limit(
                text.len(),
                NODE_BYTES_PER_BYTE,
                NODE_BYTES_EMPTY,
                NODE_BYTES_MAX,
            ),
        };
        let node = reader.value()?;
        reader.space();
        if reader.at < text.len() {
            return None;
        }
        let texts = self.texts.as_slice();
        if !node.is_typed(keep) {
            return None;
        }
        let mut work = Work {
            left: limit(text.len(), WORK_PER_BYTE, WORK_EMPTY, WORK_MAX),
        };
        let shape = node.shape(texts, keep, &mut work)?;
        let expanded = Expanded {
            texts,
            keep,
            node,
            shape,
        };
        expanded.weigh(&expanded.node, &expanded.shape, &mut work);
        if with_schema {
            expanded.weigh_schema(&expanded.shape, 0, &mut work);
        }
        (work.left > 0).then_some(expanded)
    }
}

/// The amount of work that may still be spent on expanding a payload. One unit is roughly one byte
/// written or one name compared.
struct Work {
    left: usize,
}

impl Work {
    fn spend(&mut self, count: usize) {
        self.left = self.left.saturating_sub(count);
    }
}

/// Returns whether the text is an empty array, for which Connect writes no schema.
pub(super) fn is_empty_array(text: &str) -> bool {
    let inner = text
        .strip_prefix('[')
        .and_then(|rest| rest.trim_end().strip_suffix(']'));
    inner.is_some_and(|inner| inner.trim().is_empty())
}

/// Parses JSON as Jackson does: according to RFC 8259, except that unpaired surrogates are accepted
/// as characters.
struct Reader<'t> {
    text: &'t str,
    bytes: &'t [u8],
    at: usize,
    depth: usize,
    texts: &'t mut Vec<u8>,
    /// The number of bytes of memory that nodes may still use.
    bytes_left: usize,
}

/// The memory used for a member while repeated names are being removed.
const MEMBER_BYTES: usize = 2 * size_of::<(Range<usize>, Node)>() + size_of::<(&[u8], usize)>();

impl Reader<'_> {
    /// Subtracts memory that is about to be allocated from the memory that remains. Returns `None`
    /// if too little memory remains.
    fn spend(&mut self, bytes: usize) -> Option<()> {
        self.bytes_left = self.bytes_left.checked_sub(bytes)?;
        Some(())
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn expect_byte(&mut self, byte: u8) -> Option<()> {
        (self.peek() == Some(byte)).then(|| self.at += 1)
    }

    fn expect_word(&mut self, word: &str, node: Node) -> Option<Node> {
        let rest = self.text.get(self.at..)?;
        rest.starts_with(word).then(|| {
            self.at += word.len();
            node
        })
    }

    fn value(&mut self) -> Option<Node> {
        self.space();
        match self.peek()? {
            b'{' => self.nested(Self::object),
            b'[' => self.nested(Self::array),
            b'"' => self.string().map(Node::String),
            b't' => self.expect_word("true", Node::Boolean(true)),
            b'f' => self.expect_word("false", Node::Boolean(false)),
            b'n' => self.expect_word("null", Node::Null),
            _ => self.number(),
        }
    }

    fn nested(&mut self, read: impl Fn(&mut Self) -> Option<Node>) -> Option<Node> {
        self.depth += 1;
        let node = (self.depth <= DEPTH_MAX).then(|| read(self))?;
        self.depth -= 1;
        node
    }

    fn array(&mut self) -> Option<Node> {
        self.expect_byte(b'[')?;
        let mut items = Vec::new();
        self.space();
        if self.expect_byte(b']').is_some() {
            return Some(Node::Array(Box::default()));
        }
        loop {
            self.spend(size_of::<Node>())?;
            let item = self.value()?;
            if items.len() == items.capacity() && items.len() >= SLOW_GROWTH_ITEMS_MIN {
                items.reserve_exact(items.len() / 4);
            }
            items.push(item);
            self.space();
            if self.expect_byte(b',').is_none() {
                self.expect_byte(b']')?;
                return Some(Node::Array(items.into_boxed_slice()));
            }
        }
    }

    fn object(&mut self) -> Option<Node> {
        self.expect_byte(b'{')?;
        let mut members: Vec<(Range<usize>, Node)> = Vec::new();
        self.space();
        if self.expect_byte(b'}').is_some() {
            return Some(Node::Object(Box::default()));
        }
        loop {
            self.space();
            let name = self.string()?;
            self.space();
            self.expect_byte(b':')?;
            self.spend(MEMBER_BYTES)?;
            let value = self.value()?;
            members.push((name, value));
            self.space();
            if self.expect_byte(b',').is_none() {
                self.expect_byte(b'}')?;
                return Some(Node::Object(self.once(members).into_boxed_slice()));
            }
        }
    }

    /// Removes repeated names. Each name keeps its first position and its last value.
    fn once(&self, members: Vec<(Range<usize>, Node)>) -> Vec<(Range<usize>, Node)> {
        let mut unique: Vec<(Range<usize>, Node)> = Vec::with_capacity(members.len());
        let mut indexes: HashMap<&[u8], usize> = HashMap::new();
        let is_large = members.len() >= HASH_TABLE_MEMBERS_MIN;
        for (name, value) in members {
            let text = &self.texts[name.clone()];
            let index = match is_large {
                true => indexes.get(text).copied(),
                false => unique
                    .iter()
                    .position(|(other, _)| &self.texts[other.clone()] == text),
            };
            if let Some(index) = index {
                unique[index].1 = value;
                continue;
            }
            if is_large {
                indexes.insert(text, unique.len());
            }
            unique.push((name, value));
        }
        unique
    }

    fn string(&mut self) -> Option<Range<usize>> {
        self.expect_byte(b'"')?;
        let start = self.texts.len();
        loop {
            let rest = self.bytes.get(self.at..)?;
            let plain = rest
                .iter()
                .position(|byte| matches!(byte, b'"' | b'\\' | ..0x20))?;
            json::push_escaped(self.texts, self.text.get(self.at..self.at + plain)?);
            self.at += plain + 1;
            match rest[plain] {
                b'"' => return Some(start..self.texts.len()),
                b'\\' => self.escape()?,
                _ => return None,
            }
        }
    }

    fn escape(&mut self) -> Option<()> {
        let byte = self.peek()?;
        self.at += 1;
        let char = match byte {
            b'"' | b'\\' | b'/' => char::from(byte),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let digits = self.text.get(self.at..self.at + 4)?;
                let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
                let unit = u16::from_str_radix(digits, 16).ok().filter(|_| is_hex)?;
                self.at += 4;
                match char::from_u32(u32::from(unit)) {
                    Some(char) => char,
                    // A surrogate is not a character by itself. Write it as an escape.
                    None => {
                        json::push_unit(self.texts, unit);
                        return Some(());
                    }
                }
            }
            _ => return None,
        };
        json::push_escaped(self.texts, char.encode_utf8(&mut [0; 4]));
        Some(())
    }

    fn number(&mut self) -> Option<Node> {
        let start = self.at;
        let digits = |reader: &mut Self| {
            let from = reader.at;
            while reader.peek().is_some_and(|byte| byte.is_ascii_digit()) {
                reader.at += 1;
            }
            (reader.at > from).then_some(from)
        };
        let _ = self.expect_byte(b'-');
        let first = digits(self)?;
        if self.bytes[first] == b'0' && self.at - first > 1 {
            return None;
        }
        let mut is_whole = true;
        if self.expect_byte(b'.').is_some() {
            is_whole = false;
            digits(self)?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            is_whole = false;
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            digits(self)?;
        }
        let text = self.text.get(start..self.at)?;
        if text.len() > NUMBER_CHARS_MAX {
            return None;
        }
        if !is_whole {
            let value: f64 = text.parse().ok()?;
            return Some(match value.is_finite() {
                true => Node::Double(value),
                false => Node::TooLarge,
            });
        }
        Some(match text.parse::<i64>() {
            Ok(value) if i32::try_from(value).is_ok() => Node::Int32(value),
            Ok(value) => Node::Int64(value),
            Err(_) => Node::TooLarge,
        })
    }
}

impl Node {
    /// Returns whether the first value of each array determines a type according to Debezium's
    /// rules, and every member has a name.
    fn is_typed(&self, keep: Keep) -> bool {
        match self {
            Self::Object(members) => members.iter().all(|(name, value)| {
                let is_dropped = match value {
                    Self::Null => !keep.nulls,
                    Self::Array(items) => items.is_empty() && !keep.empty_arrays,
                    _ => false,
                };
                is_dropped || !name.is_empty() && value.is_typed(keep)
            }),
            Self::Array(items) if items.is_empty() => true,
            Self::Array(items) => match items.iter().find(|item| !matches!(item, Self::Null)) {
                None => keep.nulls,
                Some(Self::Object(_)) => items.iter().all(|item| item.is_typed(keep)),
                Some(Self::Array(first)) if first.is_empty() => keep.empty_arrays,
                Some(first) => first.is_typed(keep),
            },
            _ => true,
        }
    }

    /// Returns the shape of the value, or `None` if an array contains values of incompatible types.
    fn shape(&self, texts: &[u8], keep: Keep, work: &mut Work) -> Option<Shape> {
        Some(match self {
            Self::Null => Shape::Null,
            Self::Boolean(_) => Shape::Boolean,
            Self::Int32(_) => Shape::Int32,
            Self::Int64(_) => Shape::Int64,
            Self::Double(_) => Shape::Double,
            Self::TooLarge => return None,
            Self::String(_) => Shape::String,
            Self::Array(items) => {
                let mut joined = Shape::Null;
                let mut differ = false;
                for item in items {
                    let shape = item.shape(texts, keep, work)?;
                    let are_both =
                        !matches!((&joined, &shape), (Shape::Null, _) | (_, Shape::Null));
                    differ = differ || are_both && !joined.is_same(&shape, texts, keep, work);
                    joined = joined.joined(shape, texts, work)?;
                    if work.left == 0 {
                        return None;
                    }
                }
                if let Shape::Struct { is_joined, .. } = &mut joined {
                    *is_joined = differ;
                }
                Shape::Array {
                    items: Box::new(joined),
                    is_empty: items.is_empty(),
                }
            }
            Self::Object(members) => {
                let shapes = members
                    .iter()
                    .map(|(name, value)| Some((name.clone(), value.shape(texts, keep, work)?)));
                Shape::Struct {
                    fields: shapes.collect::<Option<_>>()?,
                    is_joined: false,
                }
            }
        })
    }
}

impl Shape {
    /// Returns a shape that can represent the values of both shapes.
    fn joined(self, other: Self, texts: &[u8], work: &mut Work) -> Option<Self> {
        Some(match (self, other) {
            (Self::Null, shape) | (shape, Self::Null) => shape,
            (
                Self::Array { items, is_empty },
                Self::Array {
                    items: others,
                    is_empty: is_other_empty,
                },
            ) => Self::Array {
                items: Box::new(items.joined(*others, texts, work)?),
                is_empty: is_empty && is_other_empty,
            },
            (
                Self::Struct { fields, is_joined },
                Self::Struct {
                    fields: others,
                    is_joined: is_other_joined,
                },
            ) => Self::Struct {
                fields: joined_fields(fields, others, texts, work)?,
                is_joined: is_joined || is_other_joined,
            },
            (shape, other) if shape == other => shape,
            _ => return None,
        })
    }

    /// Returns whether Debezium would write the same schema for both shapes.
    fn is_same(&self, other: &Self, texts: &[u8], keep: Keep, work: &mut Work) -> bool {
        match (self, other) {
            (Self::Struct { fields, .. }, Self::Struct { fields: others, .. }) => {
                work.spend(fields.len() + others.len());
                let is_known = |(_, shape): &&(Range<usize>, Self)| shape.is_known(keep);
                let mut others = others.iter().filter(is_known);
                fields.iter().filter(is_known).all(|(name, shape)| {
                    others.next().is_some_and(|(other, other_shape)| {
                        texts.get(name.clone()) == texts.get(other.clone())
                            && shape.is_same(other_shape, texts, keep, work)
                    })
                }) && others.next().is_none()
            }
            (
                Self::Array { items, is_empty },
                Self::Array {
                    items: others,
                    is_empty: is_other_empty,
                },
            ) => {
                is_empty == is_other_empty
                    && (*is_empty || items.is_same(others, texts, keep, work))
            }
            (shape, other) => shape == other,
        }
    }

    /// Returns whether Debezium includes a value of this shape in the schema.
    fn is_known(&self, keep: Keep) -> bool {
        match self {
            Self::Null => keep.nulls,
            Self::Array { is_empty, .. } => !is_empty || keep.empty_arrays,
            _ => true,
        }
    }
}

fn joined_fields(
    mut fields: Vec<(Range<usize>, Shape)>,
    others: Vec<(Range<usize>, Shape)>,
    texts: &[u8],
    work: &mut Work,
) -> Option<Vec<(Range<usize>, Shape)>> {
    let name = |range: &Range<usize>| texts.get(range.clone()).unwrap_or_default();
    let mut indexes: HashMap<&[u8], usize> = HashMap::new();
    let is_large = others.len() >= HASH_TABLE_MEMBERS_MIN;
    if is_large {
        work.spend(fields.len());
        indexes.extend(
            fields
                .iter()
                .enumerate()
                .map(|(at, (range, _))| (name(range), at)),
        );
    }
    for (at, (range, shape)) in others.into_iter().enumerate() {
        let is_match = |field: &(Range<usize>, Shape)| name(&field.0) == name(&range);
        // Objects in an array usually have the same members in the same order.
        let index = match fields.get(at).is_some_and(is_match) {
            true => Some(at),
            false if is_large => indexes.get(name(&range)).copied(),
            false => {
                work.spend(fields.len());
                fields.iter().position(is_match)
            }
        };
        match index {
            Some(index) => {
                let before = std::mem::replace(&mut fields[index].1, Shape::Null);
                fields[index].1 = before.joined(shape, texts, work)?;
            }
            None => {
                if is_large {
                    indexes.insert(name(&range), fields.len());
                }
                fields.push((range, shape));
            }
        }
    }
    Some(fields)
}

impl Expanded<'_> {
    /// Subtracts part of the cost of [`Expanded::push`] from the work budget: the cost of the
    /// names in the output, and of the nulls that are written for missing members.
    fn weigh(&self, node: &Node, shape: &Shape, work: &mut Work) {
        match (node, shape) {
            (Node::Array(items), Shape::Array { items: shape, .. }) => {
                for item in items {
                    self.weigh(item, shape, work);
                }
            }
            (Node::Object(members), Shape::Struct { fields, .. }) if work.left > 0 => {
                self.for_each_field(members, fields, |name, value, shape| {
                    work.spend(name.len() + "\"\":null,".len());
                    self.weigh(value, shape, work);
                });
            }
            _ => {}
        }
    }

    /// Subtracts the cost of [`Expanded::push_schema`] from the work budget. `name` is the
    /// length of the enclosing struct's name.
    fn weigh_schema(&self, shape: &Shape, name: usize, work: &mut Work) {
        const FIELD: &str = "{\"type\":\"boolean\",\"optional\":true,\"field\":\"\"},";
        match shape {
            Shape::Array { items, .. } => self.weigh_schema(items, name, work),
            Shape::Struct { fields, .. } if work.left > 0 => {
                work.spend(name);
                for (field, shape) in self.known(fields) {
                    work.spend(field.len() + FIELD.len());
                    self.weigh_schema(shape, name + ".".len() + field.len(), work);
                }
            }
            _ => {}
        }
    }

    /// Calls `visit` for each field in the output of an object. The value passed to `visit` is null
    /// if the object has no member with the field's name.
    fn for_each_field<'s>(
        &'s self,
        members: &'s [(Range<usize>, Node)],
        fields: &'s [(Range<usize>, Shape)],
        mut visit: impl FnMut(&'s [u8], &'s Node, &'s Shape),
    ) {
        let mut next = 0;
        let mut indexes: HashMap<&[u8], usize> = HashMap::new();
        for (name, shape) in self.known(fields) {
            let is_match = |member: &(Range<usize>, Node)| &self.texts[member.0.clone()] == name;
            // An object's members are usually in the same order as the fields of its shape.
            let index = match members.get(next).is_some_and(is_match) {
                true => Some(next),
                false if members.len() < HASH_TABLE_MEMBERS_MIN => {
                    members.iter().position(is_match)
                }
                false => {
                    if indexes.is_empty() {
                        let names = members.iter().map(|(name, _)| &self.texts[name.clone()]);
                        indexes.extend(names.zip(0..));
                    }
                    indexes.get(name).copied()
                }
            };
            next = index.map_or(next, |index| index + 1);
            let value = index.map_or(&Node::Null, |index| &members[index].1);
            visit(name, value, shape);
        }
    }

    /// Appends the schema without the closing brace. `name` is the escaped name of the struct.
    pub(super) fn push_schema(&self, out: &mut Vec<u8>, name: &[u8]) {
        self.push_schema_of(&self.shape, out, name);
    }

    fn push_schema_of(&self, shape: &Shape, out: &mut Vec<u8>, name: &[u8]) {
        let scalar = match shape {
            Shape::Null => "bytes",
            Shape::Boolean => "boolean",
            Shape::Int32 => "int32",
            Shape::Int64 => "int64",
            Shape::Double => "double",
            Shape::String => "string",
            Shape::Array { items, is_empty } => {
                out.extend_from_slice(b"{\"type\":\"array\",\"items\":");
                match &**items {
                    Shape::Null if *is_empty => self.push_schema_of(&Shape::String, out, b""),
                    // An object in an array is named after the array. An object in a nested array
                    // does not have a name.
                    items @ Shape::Struct { .. } => self.push_schema_of(items, out, name),
                    items => self.push_schema_of(items, out, b""),
                }
                return out.extend_from_slice(b"},\"optional\":true");
            }
            Shape::Struct { fields, is_joined } => {
                out.extend_from_slice(b"{\"type\":\"struct\",\"fields\":[");
                let mut is_first = true;
                for (field, shape) in self.known(fields) {
                    if !std::mem::take(&mut is_first) {
                        out.push(b',');
                    }
                    let mut path = Vec::new();
                    if !name.trim_ascii().is_empty() {
                        path.extend_from_slice(name);
                        path.push(b'.');
                    }
                    path.extend_from_slice(field);
                    self.push_schema_of(shape, out, &path);
                    out.extend_from_slice(b",\"field\":\"");
                    out.extend_from_slice(field);
                    out.extend_from_slice(b"\"}");
                }
                out.extend_from_slice(b"],\"optional\":");
                out.extend_from_slice(if *is_joined { b"false" } else { b"true" });
                if !name.is_empty() {
                    out.extend_from_slice(b",\"name\":\"");
                    out.extend_from_slice(name);
                    out.push(b'"');
                }
                return;
            }
        };
        out.extend_from_slice(b"{\"type\":\"");
        out.extend_from_slice(scalar.as_bytes());
        out.extend_from_slice(b"\",\"optional\":true");
    }

    /// Returns the fields that are included in the schema.
    fn known<'s>(
        &'s self,
        fields: &'s [(Range<usize>, Shape)],
    ) -> impl Iterator<Item = (&'s [u8], &'s Shape)> {
        let known = fields.iter().filter(|(_, shape)| shape.is_known(self.keep));
        known.map(|(name, shape)| (&self.texts[name.clone()], shape))
    }

    /// Appends the expanded payload.
    pub(super) fn push(&self, out: &mut Vec<u8>, form: Form) {
        self.push_node(&self.node, &self.shape, out, form);
    }

    fn push_node(&self, node: &Node, shape: &Shape, out: &mut Vec<u8>, form: Form) {
        match (node, shape) {
            (Node::Boolean(true), _) => out.extend_from_slice(b"true"),
            (Node::Boolean(false), _) => out.extend_from_slice(b"false"),
            (Node::Int32(value) | Node::Int64(value), _) => {
                out.extend_from_slice(value.to_string().as_bytes());
            }
            (Node::Double(value), _) => json::push_double(out, *value),
            (Node::String(text), _) => self.push_text(text, out, form),
            (Node::Array(items), Shape::Array { items: shape, .. }) => {
                let separator: &[u8] = if form == Form::Java { b", " } else { b"," };
                out.push(b'[');
                for (at, item) in items.iter().enumerate() {
                    if at > 0 {
                        out.extend_from_slice(separator);
                    }
                    self.push_node(item, shape, out, form);
                }
                out.push(b']');
            }
            (Node::Object(members), Shape::Struct { fields, .. }) => {
                self.push_struct(members, fields, out, form);
            }
            // `Node::TooLarge` and incompatible values do not have a shape, so they do not occur
            // here.
            _ => out.extend_from_slice(b"null"),
        }
    }

    fn push_struct(
        &self,
        members: &[(Range<usize>, Node)],
        fields: &[(Range<usize>, Shape)],
        out: &mut Vec<u8>,
        form: Form,
    ) {
        let is_java = form == Form::Java;
        out.extend_from_slice(if is_java { b"Struct{" } else { b"{" });
        let mut is_first = true;
        self.for_each_field(members, fields, |name, value, shape| {
            if is_java && matches!(value, Node::Null) {
                return;
            }
            if !std::mem::take(&mut is_first) {
                out.push(b',');
            }
            match is_java {
                true => {
                    self.push_unescaped(name, out);
                    out.push(b'=');
                }
                false => {
                    out.push(b'"');
                    out.extend_from_slice(name);
                    out.extend_from_slice(b"\":");
                }
            }
            self.push_node(value, shape, out, form);
        });
        out.push(b'}');
    }

    fn push_text(&self, text: &Range<usize>, out: &mut Vec<u8>, form: Form) {
        let text = &self.texts[text.clone()];
        if form == Form::Java {
            return self.push_unescaped(text, out);
        }
        out.push(b'"');
        out.extend_from_slice(text);
        out.push(b'"');
    }

    /// Appends the characters of escaped text. An unpaired surrogate becomes a question mark, as in
    /// Java's UTF-8 encoding.
    #[expect(clippy::unused_self, reason = "`text` is a part of `self.texts`")]
    fn push_unescaped(&self, text: &[u8], out: &mut Vec<u8>) {
        if !text.contains(&b'\\') {
            return out.extend_from_slice(text);
        }
        let mut units = Vec::new();
        let text = String::from_utf8_lossy(text);
        let mut chars = text.chars();
        while let Some(char) = chars.next() {
            if char != '\\' {
                units.extend(char.encode_utf16(&mut [0; 2]).iter());
                continue;
            }
            units.push(match chars.next() {
                Some('b') => 8,
                Some('f') => 12,
                Some('n') => 10,
                Some('r') => 13,
                Some('t') => 9,
                Some('u') => {
                    let digits: String = chars.by_ref().take(4).collect();
                    u16::from_str_radix(&digits, 16).unwrap_or_default()
                }
                Some('\\') => u16::from(b'\\'),
                _ => u16::from(b'"'),
            });
        }
        for char in char::decode_utf16(units) {
            let char = char.unwrap_or('?');
            out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the schema and the value, or `None` if the payload is not expanded.
    fn expand(text: &str, keep: Keep) -> Option<(String, String)> {
        let mut expander = Expander::default();
        let expanded = expander.read(text, keep, true)?;
        let (mut schema, mut value) = (Vec::new(), Vec::new());
        expanded.push_schema(&mut schema, b"payload");
        expanded.push(&mut value, Form::Json);
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        Some((text(schema), text(value)))
    }

    fn value(text: &str) -> Option<String> {
        expand(text, Keep::default()).map(|(_, value)| value)
    }

    #[test]
    fn expands_only_valid_json_objects() {
        for text in [
            "",
            "1",
            "[]",
            "{",
            "{}}",
            "{} x",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{,}",
            "{a:1}",
            "{'a':1}",
            "{\"a\":01}",
            "{\"a\":1.}",
            "{\"a\":.5}",
            "{\"a\":-}",
            "{\"a\":1e}",
            "{\"a\":+1}",
            "{\"a\":nul}",
            "{\"a\":\"\n\"}",
            "{\"a\":\"\\x\"}",
            "{\"a\":\"\\u12\"}",
            "{\"a\":\"\\u+123\"}",
            "{\"a\":[1,]}",
            "{\"a\":NaN}",
            "{\"a\":\"",
            "{\"a\":\"\\",
            " {}",
        ] {
            assert_eq!(value(text), None, "{text:?}");
        }
        assert_eq!(value("{ } \n").as_deref(), Some("{}"));
    }

    #[test]
    fn does_not_expand_a_payload_that_would_grow_to_many_times_its_size() {
        let objects = |count: usize, of: &dyn Fn(usize) -> String| {
            let objects: Vec<_> = (0..count).map(of).collect();
            format!("{{\"a\":[{}]}}", objects.join(","))
        };
        let long = "x".repeat(1 << 20);
        let nested = |depth: usize| {
            let begin = "{\"a\":".repeat(depth);
            format!("{{\"{long}\":{begin}1{}}}", "}".repeat(depth))
        };
        for (text, is_expanded) in [
            // Each object has a member that the other objects lack. In the output, each object
            // would have the members of all objects.
            (objects(100_000, &|at| format!("{{\"m{at}\":1}}")), false),
            (objects(300, &|at| format!("{{\"m{at}\":1}}")), true),
            // Objects with different members, each nested in an array with a single item.
            (objects(100_000, &|at| format!("[{{\"m{at}\":1}}]")), false),
            // The objects differ only in members that are omitted from the output.
            (objects(100_000, &|at| format!("{{\"m{at}\":null}}")), false),
            // In the output, each short object would have a member whose name is 1 MiB long.
            (
                objects(100_000, &|at| match at {
                    0 => format!("{{\"{long}\":1}}"),
                    _ => "{\"b\":1}".to_owned(),
                }),
                false,
            ),
            // The output for many similar objects is as long as the payload.
            (
                objects(100_000, &|at| format!("{{\"m\":{at},\"n\":\"x\"}}")),
                true,
            ),
            // In the schema, the name of each nested struct contains the name of the outermost
            // member, which is 1 MiB long.
            (nested(900), false),
            (nested(10), true),
        ] {
            let began = std::time::Instant::now();
            let found = expand(&text, Keep::default());
            assert_eq!(found.is_some(), is_expanded, "{}", &text[..60]);
            // An implementation that compares each object with every other one would take minutes.
            assert!(began.elapsed().as_secs() < 20, "{}", &text[..60]);
        }
    }

    /// Before memory was limited, a payload of 16 MB required 682 MiB, and one of 60 MB required
    /// 2.4 GiB.
    #[test]
    fn does_not_expand_a_payload_that_needs_too_much_memory() {
        let arrays =
            |megabytes: usize| format!("{{\"a\":[{}[1]]}}", "[1],".repeat(megabytes << 18));
        let digits = |megabytes: usize| format!("{{\"a\":[{}1]}}", "1,".repeat(megabytes << 19));
        for (text, is_expanded) in [
            (arrays(2), true),
            (digits(2), true),
            (arrays(4), false),
            (digits(4), false),
            (arrays(16), false),
        ] {
            assert_eq!(
                expand(&text, Keep::default()).is_some(),
                is_expanded,
                "{}",
                &text[..20]
            );
        }
    }

    #[test]
    fn finds_members_of_large_objects_in_any_order() {
        let object = |order: &[usize]| {
            let members: Vec<_> = order.iter().map(|at| format!("\"m{at}\":{at}")).collect();
            format!("{{{}}}", members.join(","))
        };
        let order: Vec<usize> = (0..40).collect();
        let other: Vec<usize> = (0..40).rev().filter(|at| at % 3 != 0).collect();
        let (_, value) = expand(
            &format!("{{\"a\":[{},{}]}}", object(&order), object(&other)),
            Keep::default(),
        )
        .expect("expands");
        let filled: Vec<_> = (0..40)
            .map(|at| match at % 3 {
                0 => format!("\"m{at}\":null"),
                _ => format!("\"m{at}\":{at}"),
            })
            .collect();
        let expected = format!("{{\"a\":[{},{{{}}}]}}", object(&order), filled.join(","));
        assert_eq!(value, expected);
    }

    #[test]
    fn gives_all_objects_in_an_array_the_same_members() {
        let (schema, value) = expand(
            r#"{"o":[{"a":1,"n":{"x":1}},{"b":true,"n":{"y":2}},null]}"#,
            Keep::default(),
        )
        .expect("expands");
        assert_eq!(
            value,
            r#"{"o":[{"a":1,"n":{"x":1,"y":null},"b":null},{"a":null,"n":{"x":null,"y":2},"b":true},null]}"#
        );
        assert!(
            schema.contains(r#""optional":false,"name":"payload.o"}"#),
            "{schema}"
        );
        assert!(
            schema.contains(r#""optional":true,"name":"payload.o.n","field":"n"}"#),
            "{schema}"
        );
    }

    #[test]
    fn does_not_expand_incompatible_or_oversized_values() {
        for text in [
            r#"{"a":[1,"x"]}"#,
            r#"{"a":[[1],["x"]]}"#,
            r#"{"a":[{"b":1},{"b":"x"}]}"#,
            r#"{"a":[{"b":1},{"b":3000000000}]}"#,
            r#"{"a":[{"b":[1]},{"b":[true]}]}"#,
            r#"{"a":[{"b":{}},{"b":[]}]}"#,
            r#"{"a":9223372036854775808}"#,
            r#"{"a":1e309}"#,
        ] {
            assert_eq!(value(text), None, "{text}");
        }
    }

    #[test]
    fn handles_repeated_and_reordered_names_in_large_objects() {
        let members: Vec<_> = (0..100).map(|n| format!("\"m{n}\":{n}")).collect();
        let twice = format!("{{{},\"m7\":null,\"m8\":-8}}", members.join(","));
        let found = value(&twice).expect("expands");
        assert!(!found.contains("\"m7\":"), "{found}");
        assert!(found.contains("\"m6\":6,\"m8\":-8,\"m9\":9"), "{found}");
        let reversed: Vec<_> = members.iter().rev().cloned().collect();
        let array = format!(
            "{{\"a\":[{{{}}},{{{}}}]}}",
            members.join(","),
            reversed.join(",")
        );
        let expected = format!("{{{}}}", members.join(","));
        assert_eq!(
            value(&array),
            Some(format!("{{\"a\":[{expected},{expected}]}}"))
        );
    }

    #[test]
    fn rejects_nesting_deeper_than_the_limit() {
        let deep = |depth: usize| format!("{}1{}", "{\"a\":".repeat(depth), "}".repeat(depth));
        assert_eq!(value(&deep(DEPTH_MAX)), Some(deep(DEPTH_MAX)));
        assert_eq!(value(&deep(DEPTH_MAX + 1)), None);
        let arrays = "[".repeat(100_000);
        assert_eq!(value(&format!("{{\"a\":{arrays}")), None);
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig {
            failure_persistence: None,
            ..proptest::prelude::ProptestConfig::default()
        })]

        #[test]
        fn produces_valid_json_for_arbitrary_text(text in r#"\{[\[\]{}":,0-9a-z\\ue.+\- ]{0,40}"#) {
            if let Some((_, value)) = expand(&text, Keep { nulls: true, empty_arrays: true }) {
                serde_json::from_str::<serde_json::Value>(&value).expect("JSON");
            }
        }
    }
}
