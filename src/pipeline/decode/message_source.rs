//! Events that are written to the WAL as logical decoding messages.

use tracing::warn;

use super::IgnoredCounts;
use crate::outbox::columns::{Mapping, MappingError};
use crate::outbox::envelope::{Envelope, EnvelopeError};
use crate::outbox::settings::OutboxSettings;

/// An outbox that consists of logical decoding messages with a certain prefix.
pub(crate) struct MessageSource {
    prefix: String,
    mapping: Mapping,
    pub(crate) ignored_counts: IgnoredCounts,
    has_warned: bool,
}

impl MessageSource {
    pub(crate) fn new(prefix: String, settings: &OutboxSettings) -> Result<Self, MappingError> {
        Ok(Self {
            prefix,
            mapping: Mapping::for_messages(settings)?,
            ignored_counts: IgnoredCounts::default(),
            has_warned: false,
        })
    }

    pub(crate) fn has_prefix(&self, prefix: &str) -> bool {
        self.prefix == prefix
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Decodes the event in a message with the outbox's prefix.
    pub(crate) fn event<'a>(&self, content: &'a [u8]) -> Result<Envelope<'a>, EnvelopeError> {
        Envelope::decode(content)
    }

    /// Counts a non-transactional message, and warns about the first one with the outbox's prefix.
    pub(crate) fn count_nontransactional(&mut self, prefix: &str) {
        self.ignored_counts.nontransactional += 1;
        if self.has_prefix(prefix) && !std::mem::replace(&mut self.has_warned, true) {
            warn!(
                prefix,
                "skipped a non-transactional message, which is not an event because PostgreSQL sends it even if its \
                 transaction is rolled back. Write events with walpost.publish"
            );
        }
    }
}
