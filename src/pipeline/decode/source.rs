//! Interprets messages from the output plugin, depending on the kind of outbox. Shared by the
//! delivery of events, the preview of a range of WAL, and the lookahead for new topics, so that all
//! three agree on what an event is.

use super::message_source::MessageSource;
use super::table_source::TableSource;
use crate::outbox::columns::MappingError;
use crate::outbox::settings::OutboxSettings;
use crate::postgres::target::Outbox;
use crate::postgres::wire::pgoutput::{Begin, Commit, Message, Relation, Tuple};

/// The source of a pipeline's events.
pub(super) enum Source {
    Table(TableSource),
    Messages(MessageSource),
}

impl Source {
    pub(super) fn new(outbox: Outbox, settings: OutboxSettings) -> Result<Self, MappingError> {
        Ok(match outbox {
            Outbox::Messages { prefix } => Self::Messages(MessageSource::new(prefix, &settings)?),
            tables => Self::Table(TableSource::new(tables, settings)),
        })
    }

    /// See [`Core::read_older_rows_of`](super::Core::read_older_rows_of).
    pub(super) fn read_older_rows_of(&mut self, publication: &str) {
        if let Self::Table(source) = self {
            source.read_older_rows_of(publication);
        }
    }

    /// Interprets a message for this kind of outbox.
    #[inline]
    pub(super) fn meaning<'s, 'm, 't>(&'s self, message: &'m Message<'t>) -> Meaning<'s, 'm, 't> {
        match (message, self) {
            (Message::Begin(begin), _) => Meaning::Begin(begin),
            (Message::Commit(commit), _) => Meaning::Commit(commit),
            (Message::Relation(relation), _) => Meaning::Relation(relation),
            (Message::Insert { relation, new }, Self::Table(source))
                if source.has_older_rows(*relation) =>
            {
                Meaning::OlderRow { source, tuple: new }
            }
            (Message::Insert { relation, new }, Self::Table(source)) => Meaning::Row {
                source,
                relation: *relation,
                tuple: new,
            },
            (Message::Insert { relation, .. }, Self::Messages(_)) => Meaning::UnexpectedRow {
                relation: *relation,
            },
            (Message::Update { relation, .. }, _) => Meaning::Changed {
                relation: *relation,
                is_update: true,
            },
            (Message::Delete { relation, .. }, _) => Meaning::Changed {
                relation: *relation,
                is_update: false,
            },
            (
                Message::Logical {
                    transactional,
                    prefix,
                    content,
                    ..
                },
                Self::Messages(source),
            ) => match (transactional, source.has_prefix(prefix)) {
                (false, _) => Meaning::Nontransactional { prefix },
                (true, true) => Meaning::Published {
                    source,
                    prefix,
                    content,
                },
                (true, false) => Meaning::Foreign,
            },
            // The server sends logical decoding messages only if the session requests them, and
            // sessions for outbox tables do not request them.
            (Message::Logical { .. }, Self::Table(_))
            | (Message::Truncate { .. } | Message::Origin { .. } | Message::Type { .. }, _) => {
                Meaning::Ignored
            }
        }
    }
}

/// The meaning of a message from the output plugin, given the kind of outbox.
pub(super) enum Meaning<'s, 'm, 't> {
    Begin(&'m Begin),
    Commit(&'m Commit),
    Relation(&'m Relation<'t>),
    /// An inserted row. The row belongs to an outbox table if the publication is set up correctly.
    Row {
        source: &'s TableSource,
        relation: u32,
        tuple: &'m Tuple<'t>,
    },
    /// A row that was already in its table when the table was added to the publication.
    OlderRow {
        source: &'s TableSource,
        tuple: &'m Tuple<'t>,
    },
    /// An inserted row, which is unexpected because the outbox consists of logical decoding
    /// messages.
    UnexpectedRow {
        relation: u32,
    },
    /// An updated or deleted row.
    Changed {
        relation: u32,
        is_update: bool,
    },
    /// A transactional message with the outbox's prefix.
    Published {
        source: &'s MessageSource,
        prefix: &'t str,
        content: &'t [u8],
    },
    /// A transactional message whose prefix is not the outbox's.
    Foreign,
    /// A non-transactional message.
    Nontransactional {
        prefix: &'t str,
    },
    /// A message that has no effect and is not assigned an index in its transaction.
    Ignored,
}
