//! Explains errors about WAL that was written before the publication existed. To decode a
//! transaction, PostgreSQL uses the publication as it was when the transaction was committed. If
//! the publication did not exist, versions 14 to 17 abort the stream, and version 18 skips the
//! rows. Neither a restart nor creating the publication afterwards makes a difference for WAL that
//! has already been written.

use super::error::PipelineError;
use super::settings::PipelineSettings;
use crate::postgres::connect::dial::ServerError;
use crate::postgres::replication::ConnectionError;
use crate::postgres::sql::escape_literal;
use crate::postgres::target::Target;

/// SQLSTATE undefined_object, which PostgreSQL reports if a publication does not exist, but also if
/// a slot does not exist.
const UNDEFINED_OBJECT: &str = "42704";

/// The function that reports a missing publication in PostgreSQL 14 to 17
/// (src/backend/catalog/pg_publication.c). Used to recognize the error, because its message may be
/// translated.
const PUBLICATION_LOOKUP: &str = "get_publication_oid";

/// If `error` is about WAL that was written before the publication existed, adds instructions for
/// fixing the problem.
pub(super) fn with_remedy(mut error: PipelineError, settings: &PipelineSettings) -> PipelineError {
    if let PipelineError::Connection(connection) = &mut error {
        match connection {
            ConnectionError::PublicationSkipped(error) => add_remedy(error, &settings.target),
            ConnectionError::Server(error)
                if error.code == UNDEFINED_OBJECT && error.routine == PUBLICATION_LOOKUP =>
            {
                add_remedy(error, &settings.target);
            }
            _ => {}
        }
    }
    error
}

fn add_remedy(error: &mut ServerError, target: &Target) {
    let slot = &target.slot;
    let resend = match target.outbox.is_messages() {
        true => target.resend(),
        false => "walpost init prints the commands that resend the slot's events".to_owned(),
    };
    error.hint = Some(format!(
        "The publication did not exist when the next events of slot {slot:?} were committed, so these events can't be read with \
         this publication. If the pipeline used a different publication when the events were committed, set publication to the name \
         of that publication until the events are delivered. Otherwise, replace the slot: \
         SELECT pg_catalog.pg_drop_replication_slot({}); {}. {resend}",
        escape_literal(slot).trim_start(),
        target.init_slot(),
    ));
}
