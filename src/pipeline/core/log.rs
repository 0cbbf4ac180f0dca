//! Events that are messages in the log.

use tracing::warn;

use super::LeftAlone;
use crate::outbox::columns::{Mapping, MappingError};
use crate::outbox::envelope::Envelope;
use crate::outbox::settings::OutboxSettings;
use crate::pipeline::PipelineError;
use crate::postgres::lsn::Position;

/// The messages of one prefix.
pub(super) struct LogSource {
    prefix: String,
    mapping: Mapping,
    pub(super) left_alone: LeftAlone,
    warned: bool,
}

impl LogSource {
    pub(super) fn new(prefix: String, settings: &OutboxSettings) -> Result<Self, MappingError> {
        Ok(Self {
            prefix,
            mapping: Mapping::of_log(settings)?,
            left_alone: LeftAlone::default(),
            warned: false,
        })
    }

    pub(super) fn is_ours(&self, prefix: &str) -> bool {
        self.prefix == prefix
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// The event of a message with our prefix.
    pub(super) fn event<'a>(
        &self,
        at: Position,
        content: &'a [u8],
    ) -> Result<Envelope<'a>, PipelineError> {
        Envelope::decode(content).map_err(|error| PipelineError::Envelope {
            at,
            prefix: self.prefix.clone(),
            error,
        })
    }

    /// A message has come that belongs to no transaction.
    pub(super) fn outside_of_transactions(&mut self, prefix: &str) {
        self.left_alone.nontransactional += 1;
        if self.is_ours(prefix) && !std::mem::replace(&mut self.warned, true) {
            warn!(
                prefix,
                "a message outside of transactions is not an event, and is left out: nobody can say whether what it \
                 tells was committed. Write events with walpost.publish"
            );
        }
    }
}
