//! Events that are logical decoding messages in the WAL.

use tracing::warn;

use super::IgnoredCounts;
use crate::outbox::columns::{Mapping, MappingError};
use crate::outbox::envelope::{Envelope, EnvelopeError};
use crate::outbox::settings::OutboxSettings;

/// The messages with one prefix.
pub(crate) struct MessageSource {
    prefix: String,
    mapping: Mapping,
    pub(crate) left_alone: IgnoredCounts,
    warned: bool,
}

impl MessageSource {
    pub(crate) fn new(prefix: String, settings: &OutboxSettings) -> Result<Self, MappingError> {
        Ok(Self {
            prefix,
            mapping: Mapping::for_messages(settings)?,
            left_alone: IgnoredCounts::default(),
            warned: false,
        })
    }

    pub(crate) fn is_ours(&self, prefix: &str) -> bool {
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

    /// Processes a non-transactional message.
    pub(crate) fn outside_of_transactions(&mut self, prefix: &str) {
        self.left_alone.nontransactional += 1;
        if self.is_ours(prefix) && !std::mem::replace(&mut self.warned, true) {
            warn!(
                prefix,
                "skipped a non-transactional message: it is not an event, since it was sent whether or not its \
                 transaction commits. Write events with walpost.publish"
            );
        }
    }
}
