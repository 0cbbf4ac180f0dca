//! Errors about WAL that was written before the publication existed. PostgreSQL looks up the
//! publication as of each transaction that it decodes: versions 14 to 17 end the stream, and
//! version 18 omits the rows. Creating the publication afterwards, or restarting, does not help for
//! that WAL.

use super::error::PipelineError;
use super::settings::PipelineSettings;
use crate::postgres::connect::dial::ServerError;
use crate::postgres::replication::ConnectionError;
use crate::postgres::sql::escape_literal;
use crate::postgres::target::Target;

/// SQLSTATE of the error (undefined_object), which a missing slot also has.
const UNDEFINED_OBJECT: &str = "42704";

/// Function of PostgreSQL 14 to 17 that reports the error, in src/backend/catalog/pg_publication.c.
/// The message itself may be translated, so it can't be compared.
const PUBLICATION_LOOKUP: &str = "get_publication_oid";

/// Adds the remedy to an error about such WAL.
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
        false => "walpost init names the commands that send its events again".to_owned(),
    };
    error.hint = Some(format!(
        "The publication did not exist when the next events of slot {slot:?} were committed, and they cannot be read with it. If the \
         pipeline had another publication then, set publication to that one until they are delivered. Otherwise replace the slot: \
         SELECT pg_catalog.pg_drop_replication_slot({}); {}. {resend}",
        escape_literal(slot).trim_start(),
        target.init_slot(),
    ));
}
