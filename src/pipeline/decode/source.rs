//! Where events come from, and what a message of the plugin is to them: the same for who delivers, who shows and who looks
//! ahead.

use super::message_source::MessageSource;
use super::table_source::TableSource;
use crate::outbox::columns::MappingError;
use crate::outbox::settings::OutboxSettings;
use crate::postgres::target::Outbox;
use crate::postgres::wire::pgoutput::{Begin, Commit, Message, Relation, Tuple};

/// Where events come from.
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

    /// What the message is to an outbox of this kind.
    #[inline]
    pub(super) fn meaning<'s, 'm, 't>(&'s self, message: &'m Message<'t>) -> Meaning<'s, 'm, 't> {
        match (message, self) {
            (Message::Begin(begin), _) => Meaning::Begin(begin),
            (Message::Commit(commit), _) => Meaning::Commit(commit),
            (Message::Relation(relation), _) => Meaning::Relation(relation),
            (Message::Insert { relation, new }, Self::Table(source))
                if source.has_older_rows(*relation) =>
            {
                Meaning::Older { source, tuple: new }
            }
            (Message::Insert { relation, new }, Self::Table(source)) => Meaning::Row {
                source,
                relation: *relation,
                tuple: new,
            },
            (Message::Insert { relation, .. }, Self::Messages(_)) => Meaning::RowBeside {
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
            ) => match (transactional, source.is_ours(prefix)) {
                (false, _) => Meaning::OutsideOfTransactions { prefix },
                (true, true) => Meaning::Published {
                    source,
                    prefix,
                    content,
                },
                (true, false) => Meaning::Foreign,
            },
            // A publication that is asked for no messages sends none.
            (Message::Logical { .. }, Self::Table(_))
            | (Message::Truncate { .. } | Message::Origin { .. } | Message::Type { .. }, _) => {
                Meaning::Nothing
            }
        }
    }
}

/// What a message of the plugin is to an outbox.
pub(super) enum Meaning<'s, 'm, 't> {
    Begin(&'m Begin),
    Commit(&'m Commit),
    Relation(&'m Relation<'t>),
    /// An inserted row, of the outbox table if the publication is as it has to be.
    Row {
        source: &'s TableSource,
        relation: u32,
        tuple: &'m Tuple<'t>,
    },
    /// A row from before its table was added.
    Older {
        source: &'s TableSource,
        tuple: &'m Tuple<'t>,
    },
    /// An inserted row, and the outbox is of messages.
    RowBeside {
        relation: u32,
    },
    /// A row was updated or deleted.
    Changed {
        relation: u32,
        is_update: bool,
    },
    /// A message with our prefix.
    Published {
        source: &'s MessageSource,
        prefix: &'t str,
        content: &'t [u8],
    },
    /// A message of a transaction with another prefix.
    Foreign,
    /// A message of no transaction.
    OutsideOfTransactions {
        prefix: &'t str,
    },
    /// Nothing that is counted.
    Nothing,
}
