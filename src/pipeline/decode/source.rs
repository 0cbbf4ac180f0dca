//! The source of events, and its interpretation of messages from the output plugin. Delivery, the
//! preview and the search for the topics of received events use this interpretation.

use super::message_source::MessageSource;
use super::table_source::TableSource;
use crate::outbox::columns::MappingError;
use crate::outbox::settings::OutboxSettings;
use crate::postgres::target::Outbox;
use crate::postgres::wire::pgoutput::{Begin, Commit, Message, Relation, Tuple};

/// The source of events.
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

    /// Returns the meaning of the message for an outbox of this kind.
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
            // The server sends such messages only if the session requests them.
            (Message::Logical { .. }, Self::Table(_))
            | (Message::Truncate { .. } | Message::Origin { .. } | Message::Type { .. }, _) => {
                Meaning::Ignored
            }
        }
    }
}

/// The meaning of a message of the output plugin for an outbox.
pub(super) enum Meaning<'s, 'm, 't> {
    Begin(&'m Begin),
    Commit(&'m Commit),
    Relation(&'m Relation<'t>),
    /// An inserted row, which belongs to the outbox table if the publication is set up correctly.
    Row {
        source: &'s TableSource,
        relation: u32,
        tuple: &'m Tuple<'t>,
    },
    /// A row that its table contained when it was added to the publication.
    OlderRow {
        source: &'s TableSource,
        tuple: &'m Tuple<'t>,
    },
    /// An inserted row, although the outbox uses messages.
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
    /// A transactional message with a different prefix.
    Foreign,
    /// A non-transactional message.
    Nontransactional {
        prefix: &'t str,
    },
    /// A message that is not counted.
    Ignored,
}
