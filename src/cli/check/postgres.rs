//! Checks the database, and the database objects that a pipeline needs.

use std::collections::HashSet;

use tokio::sync::Mutex;

use super::findings::{Finding, Outcome, Report, outcome_of};
use crate::pipeline::recovery;
use crate::pipeline::settings::{Delivery, PipelineSettings};
use crate::pipeline::snapshot::{self, Outlook};
use crate::pipeline::wal_budget::budget::OnMax;
use crate::postgres::catalog::failover::Note;
use crate::postgres::catalog::{
    Catalog, CatalogError, EventLimit, GuardFunction, Limit, Observed, Problem, PublicPrivileges,
    Statement, format_some, hidden_rows_warning, left_publication_error, unpublished_warning,
};
use crate::postgres::replication::{Connection, ConnectionError, WANTED_BUFFER_BYTES};
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::{Outbox, Target};

/// Checks the database. Returns the highest size limit that any outbox table sets for events.
pub(super) async fn postgres(
    settings: &PipelineSettings,
    replication: &Mutex<()>,
    report: &mut Report<'_>,
) -> Option<EventLimit> {
    let database = settings.postgres.describe();
    let opened = match Catalog::open(&settings.postgres).await {
        Ok(catalog) => {
            report.add("connection", Outcome::Ok, format!("{database} accepts SQL"));
            let observed = catalog.observe(&settings.target).await;
            observed.map(|observed| (catalog, observed))
        }
        Err(error) => Err(error),
    };
    let (catalog, observed) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            report.add(
                "connection",
                outcome_of(recovery::catalog_remedy(&error)),
                error,
            );
            return None;
        }
    };
    // Run IDENTIFY_SYSTEM, because a connection pooler may accept the connection but not support
    // replication commands.
    let opened = async {
        let guard = replication.lock().await;
        let (limit, row_bytes) = (settings.link_timeout, settings.row_bytes_max);
        let mut connection = Connection::open(&settings.postgres, limit, row_bytes).await?;
        connection.identify().await?;
        Ok::<_, ConnectionError>((connection, guard))
    };
    match opened.await {
        Ok((connection, _guard)) => {
            let message = "the server accepts a replication connection";
            report.add("replication", Outcome::Ok, message);
            buffer(&connection, report);
        }
        Err(mut error) => {
            let mut is_explained = false;
            if let Some(error) = error.server_mut() {
                catalog.explain_rejection(error).await;
                is_explained = error.hint.is_some();
            }
            let message = match is_explained {
                true => error.to_string(),
                false => format!(
                    "{error}. The role needs REPLICATION, and pg_hba.conf needs an entry that matches the role and database"
                ),
            };
            report.add("replication", Outcome::Failure, message);
        }
    }
    let mut problems = observed.problems(&settings.target);
    problems.extend(observed.publisher_problem(&settings.target));
    // A table that does not exist can't be in the publication, so report only that it does not
    // exist.
    if problems
        .iter()
        .any(|problem| matches!(problem, Problem::NoTable { .. }))
    {
        problems.retain(|problem| !matches!(problem, Problem::NotPublished { .. }));
    }
    for problem in &problems {
        let outcome = match problem {
            Problem::InRecovery { .. } => Outcome::Unreachable,
            problem if settings.tolerates(problem) => Outcome::Warning,
            _ => Outcome::Failure,
        };
        report.add("database", outcome, problem);
    }
    if problems.is_empty() {
        report.add(
            "database",
            Outcome::Ok,
            "the outbox, publication and slot exist and are consistent",
        );
    }
    owners(settings, &observed, &catalog, report).await;
    columns(settings, &observed, report);
    writers(settings, &observed, &catalog, report).await;
    budget(settings, &observed, &catalog, report).await;
    let mut needs_slot = observed.slot.is_none();
    if problems.is_empty() {
        match snapshot::predict_snapshot(settings, &catalog, &observed).await {
            Ok(Some(outlook)) => {
                // A temporary slot is needed to copy rows that were committed before the slot was
                // created.
                needs_slot |= matches!(outlook, Outlook::Copies(_));
                report.add("older rows", Outcome::Ok, outlook);
            }
            Ok(None) => {}
            Err(error) => report.add(
                "older rows",
                outcome_of(recovery::snapshot_remedy(&error)),
                error,
            ),
        }
    }
    if needs_slot {
        match catalog.exhausted_limit(Limit::Slots).await {
            Ok(Some(exhausted_limit)) => report.add("slots", Outcome::Failure, exhausted_limit),
            Ok(None) => {}
            Err(error) => report.add("slots", outcome_of(recovery::catalog_remedy(&error)), error),
        }
    }
    let left = left_publication(settings, &observed, &catalog, report).await;
    tables(settings, &observed, &catalog, &left, report).await;
    hidden_rows(&observed, &settings.target, &catalog, left, report).await;
    set_aside(settings, &catalog, report).await;
    risks(settings, &observed, report);
    failover(settings, &catalog, report).await;
    check_owner(settings, &observed, &catalog, report).await;
    check_moved(settings, &observed, &catalog, report).await;
    unrecorded_gaps(settings, &observed, &catalog, report).await;
    if matches!(settings.target.outbox, Outbox::Messages { .. }) {
        match catalog.public_privileges().await {
            Ok(public_privileges) => forgery(&settings.target, &public_privileges, report),
            Err(error) => report.add(
                "publish",
                outcome_of(recovery::catalog_remedy(&error)),
                error,
            ),
        }
    }
    largest_event(&observed, &settings.target.outbox, &catalog).await
}

/// Returns the highest size limit that any outbox table sets for events.
async fn largest_event(
    observed: &Observed,
    outbox: &Outbox,
    catalog: &Catalog,
) -> Option<EventLimit> {
    let tables = observed.publication.as_ref()?.outbox_tables(outbox);
    // If the query fails, other checks report the error.
    let limits = catalog.event_limits(&tables).await.ok()?;
    limits.into_iter().max_by_key(|limit| limit.bytes)
}

/// Reports rows that queries of an outbox table return but that are never delivered. These include
/// rows of the tables in `left`, which are no longer in the publication.
async fn hidden_rows(
    observed: &Observed,
    target: &Target,
    catalog: &Catalog,
    left: Vec<TableName>,
    report: &mut Report<'_>,
) {
    let Some(publication) = &observed.publication else {
        return;
    };
    let mut outboxes = publication.outbox_tables(&target.outbox);
    outboxes.extend(left);
    match catalog.hidden_rows(&outboxes).await {
        Ok(hidden) => {
            if let Some((what, remedy)) = hidden_rows_warning(target, &hidden) {
                report.add("tables", Outcome::Failure, format!("{what}. {remedy}"));
            }
        }
        Err(error) => report.add(
            "tables",
            outcome_of(recovery::catalog_remedy(&error)),
            error,
        ),
    }
}

/// Reports a small socket buffer. The outcome is `Ok`, because a small buffer merely reduces
/// throughput.
fn buffer(connection: &Connection, report: &mut Report<'_>) {
    if let Some(bytes) = connection
        .unix_buffer()
        .filter(|bytes| *bytes < WANTED_BUFFER_BYTES)
    {
        let message = format!(
            "the Unix-domain socket's buffer is {bytes} bytes. A backlog is delivered faster over TCP (host=localhost) \
             or with a larger buffer: run sysctl -w net.core.wmem_default={WANTED_BUFFER_BYTES}, and add this setting \
             to /etc/sysctl.d to make it permanent. The new size applies to new connections"
        );
        report.add("socket", Outcome::Ok, message);
    }
}

/// Reports privileges that allow every role to publish or forge events.
fn forgery(target: &Target, public_privileges: &PublicPrivileges, report: &mut Report<'_>) {
    let init = target.init(&["--writer", "ROLE"]);
    let first =
        format!("First, grant the required privileges to each role that writes events: {init}.");
    if public_privileges.publishes {
        let message = format!(
            "every role in the database can publish events. {first} Then, revoke the privileges from all other roles: \
             REVOKE EXECUTE ON FUNCTION walpost.publish(text, text, text, jsonb, jsonb, uuid, text), walpost.publish_bytes(text, text, \
             text, bytea, jsonb, uuid, text) FROM PUBLIC; REVOKE USAGE ON SCHEMA walpost FROM PUBLIC"
        );
        report.add("publish", Outcome::Warning, message);
    }
    if let Some(functions) = &public_privileges.emits {
        let message = format!(
            "every role in the database can write logical decoding messages, and therefore forge events. {first} Then, \
             as a superuser: REVOKE EXECUTE ON FUNCTION {functions} FROM PUBLIC"
        );
        report.add("messages", Outcome::Warning, message);
    }
}

/// Reports objects whose owners could run code with the privileges of Walpost's role.
async fn owners(
    settings: &PipelineSettings,
    observed: &Observed,
    catalog: &Catalog,
    report: &mut Report<'_>,
) {
    let target = &settings.target;
    if let Err(error) = catalog.examine_owners(target, true).await {
        report.add(
            "owners",
            outcome_of(recovery::catalog_remedy(&error)),
            error,
        );
    } else if let Err(error) = catalog.examine_owners(target, false).await {
        report.add("owners", Outcome::Warning, error);
    } else {
        let message = "the objects that Walpost uses are owned by a superuser, Walpost's role or the owner of the outbox";
        report.add("owners", Outcome::Ok, message);
    }
    let mut can_examine = true;
    if !target.outbox.is_messages() {
        match catalog.guard_function().await {
            Ok(function) => {
                can_examine = function != GuardFunction::Missing;
                if let Some(warning) = function.warning(target) {
                    report.add("owners", Outcome::Warning, warning);
                }
            }
            Err(error) => report.add(
                "owners",
                outcome_of(recovery::catalog_remedy(&error)),
                error,
            ),
        }
    }
    if let Some(table) = observed.table.as_ref().filter(|_| can_examine)
        && let Err(error) = catalog.lock_table(&table.version, Statement::Select).await
    {
        let error = error.with_commands(&target.commands);
        report.add("owners", Outcome::Warning, error);
    }
    let publication = observed.publication.as_ref();
    let tables = publication.map(|found| found.outbox_tables(&target.outbox));
    match catalog
        .partitions_with_other_owners(&tables.unwrap_or_default())
        .await
    {
        Ok(found) => {
            for table in found {
                report.add("owners", Outcome::Warning, table.warning());
            }
        }
        Err(error) => report.add(
            "owners",
            outcome_of(recovery::catalog_remedy(&error)),
            error,
        ),
    }
}

/// Reports the roles that may send events.
async fn writers(
    settings: &PipelineSettings,
    observed: &Observed,
    catalog: &Catalog,
    report: &mut Report<'_>,
) {
    const SUBJECT: &str = "writers";
    let (Some(table), Some(_)) = (settings.target.outbox.table(), &observed.table) else {
        return;
    };
    let writers = match catalog.writers(table).await {
        Ok(writers) => writers,
        Err(error) => {
            return report.add(SUBJECT, outcome_of(recovery::catalog_remedy(&error)), error);
        }
    };
    let owner = identifier(&writers.owner);
    let words = ["--table", &table.to_string(), "--writer", "ROLE"];
    let grant = settings.target.init(&words);
    if writers.is_public {
        let message = format!(
            "every role may insert into {table}, and can therefore send events. To allow only some roles, grant them INSERT \
             ({grant}), and then: REVOKE INSERT ON {table} FROM PUBLIC"
        );
        return report.add(SUBJECT, Outcome::Warning, message);
    }
    match (writers.granted.as_slice(), writers.is_owner_superuser) {
        ([], true) => report.add(
            SUBJECT,
            Outcome::Warning,
            format!("only superusers may insert into {table}. Allow the service's role to send events: {grant}"),
        ),
        ([], false) => {
            let message = format!("only the owner, {owner}, may insert into {table}. To allow other roles: {grant}");
            report.add(SUBJECT, Outcome::Ok, message);
        }
        (roles, _) => {
            let names: Vec<_> = roles.iter().map(|role| identifier(role)).collect();
            let message = format!("roles that may insert into {table}: {}", format_some(&names));
            report.add(SUBJECT, Outcome::Ok, message);
        }
    }
}

/// Reports slots that retain WAL although no configured pipeline uses them. Each database is
/// queried once.
pub(super) async fn unused_slots(pipelines: &[PipelineSettings], findings: &mut Vec<Finding>) {
    let used: Vec<_> = pipelines
        .iter()
        .map(|settings| settings.target.slot.clone())
        .collect();
    let names: Vec<_> = pipelines
        .iter()
        .map(|settings| settings.name.clone())
        .collect();
    let mut databases = HashSet::new();
    for settings in pipelines {
        if !databases.insert(settings.postgres.describe()) {
            continue;
        }
        // The connection check has already reported the error.
        let Ok(catalog) = Catalog::open(&settings.postgres).await else {
            continue;
        };
        let mut report = Report {
            pipeline: settings.name.clone(),
            findings: &mut *findings,
        };
        match catalog.unused_slots(&settings.target, &used).await {
            Ok(unused) => {
                for slot in unused {
                    report.add("unused slots", Outcome::Warning, slot);
                }
            }
            Err(error) => report.add(
                "unused slots",
                outcome_of(recovery::catalog_remedy(&error)),
                error,
            ),
        }
        match catalog
            .vanished_slots(&settings.target, &used, &names)
            .await
        {
            Ok(vanished) => {
                for slot in vanished {
                    report.add("former slots", Outcome::Warning, slot);
                }
            }
            // The pipeline's checks have already reported the error.
            Err(CatalogError::Server(_) | CatalogError::NoJournal { .. }) => {}
            Err(error) => report.add(
                "former slots",
                outcome_of(recovery::catalog_remedy(&error)),
                error,
            ),
        }
    }
}

/// Reports whether the requirements for the WAL budget are met, and which slots were dropped.
async fn budget(
    settings: &PipelineSettings,
    observed: &Observed,
    catalog: &Catalog,
    report: &mut Report<'_>,
) {
    if settings.wal_budget.on_max == OnMax::DropSlot {
        match settings.check_drop_slot(observed) {
            Ok(()) => report.add(
                "WAL budget",
                Outcome::Ok,
                "the slot can be dropped, because its events can be sent again from the table",
            ),
            Err(error) => report.add("WAL budget", Outcome::Failure, error),
        }
    }
    if !observed.has_journal || settings.target.outbox.is_messages() {
        return;
    }
    // If the journal is required but can't be read, other checks report the error.
    let entries = catalog
        .dropped_slots(&settings.name, &settings.target)
        .await;
    for entry in entries.unwrap_or_default() {
        let message = format!(
            "{} may exist only in the table: {}. Send these events again: {}",
            entry.describe(),
            entry.cause(),
            entry.replay(&settings.target.commands)
        );
        report.add("dropped slots", Outcome::Failure, message);
    }
}

/// Reports whether the requirements for setting tables aside are met, and which tables are set
/// aside.
async fn set_aside(settings: &PipelineSettings, catalog: &Catalog, report: &mut Report<'_>) {
    const SUBJECT: &str = "set aside";
    let outbox = &settings.target.outbox;
    if outbox.is_messages() {
        return;
    }
    let entries = match catalog.set_aside(&settings.target).await {
        Err(CatalogError::NoJournal { .. }) if !settings.sets_tables_aside() => Vec::new(),
        // If the journal is required but can't be read, other checks report the error.
        Err(CatalogError::Server(_)) if !outbox.is_several() => Vec::new(),
        Err(error) => {
            return report.add(SUBJECT, outcome_of(recovery::catalog_remedy(&error)), error);
        }
        Ok(entries) => entries,
    };
    for entry in entries.iter().filter(|entry| entry.until.is_none()) {
        let message = format!(
            "{}: {}. Fix the cause, then send the table's rows: {}",
            entry.describe(),
            entry.reason,
            settings.target.replay_set_aside(&entry.table)
        );
        // A pipeline can't set its only table aside.
        let is_only_table =
            matches!(outbox, Outbox::Table(table) if table.to_string() == entry.table);
        let outcome = match is_only_table {
            true => Outcome::Failure,
            false => Outcome::Warning,
        };
        report.add(SUBJECT, outcome, message);
    }
}

/// Reports and returns tables that were delivered from the slot but are no longer published.
async fn left_publication(
    settings: &PipelineSettings,
    observed: &Observed,
    catalog: &Catalog,
    report: &mut Report<'_>,
) -> Vec<TableName> {
    let target = &settings.target;
    if !observed.has_table_state || !matches!(target.outbox, Outbox::Tables(_)) {
        return Vec::new();
    }
    let left = match catalog.left_publication(target).await {
        Ok(left) => left,
        // The "table state" check reports this error.
        Err(CatalogError::Server(_)) => return Vec::new(),
        Err(error) => {
            report.add(
                "tables",
                outcome_of(recovery::catalog_remedy(&error)),
                error,
            );
            return Vec::new();
        }
    };
    if let Some(error) = left_publication_error(target, &left) {
        report.add("tables", Outcome::Failure, error);
    }
    left
}

/// Checks the tables that share the slot. Tables in `left`, which are no longer in the publication,
/// have already been reported.
async fn tables(
    settings: &PipelineSettings,
    observed: &Observed,
    catalog: &Catalog,
    left: &[TableName],
    report: &mut Report<'_>,
) {
    let (Outbox::Tables(patterns), Some(publication)) =
        (&settings.target.outbox, &observed.publication)
    else {
        return;
    };
    if !publication.has_outbox_row {
        let name = identifier(&settings.target.publication);
        let message = format!(
            "the publication does not contain table walpost.outbox_row, so existing rows can't be delivered when a table is \
             added. Create the table: {}; then add it to the publication: ALTER PUBLICATION {name} ADD TABLE walpost.outbox_row",
            settings.target.init(&[])
        );
        report.add("tables", Outcome::Warning, message);
    }
    let query = async {
        let found = catalog.tables(&publication.tables, &settings.target.publication);
        let found = found.await?;
        let unpublished = catalog.unpublished(patterns, &publication.tables).await?;
        Ok::<_, CatalogError>((found, unpublished))
    };
    let (found, mut unpublished) = match query.await {
        Ok(found) => found,
        Err(error) => {
            return report.add(
                "tables",
                outcome_of(recovery::catalog_remedy(&error)),
                error,
            );
        }
    };
    unpublished.retain(|table| !left.contains(table));
    if let Some(warning) = unpublished_warning(&settings.target, &unpublished) {
        report.add("tables", Outcome::Warning, warning);
    }
    let exists = |table: &TableName| {
        let is_found = found.iter().any(|(name, _)| name == table);
        is_found || unpublished.contains(table) || left.contains(table)
    };
    for table in patterns.named().filter(|table| !exists(table)) {
        let init = settings.target.init_table(&table);
        let message = format!("table {table} does not exist. Create it: {init}");
        report.add("tables", Outcome::Warning, message);
    }
    let describe = |names: &[String]| match names {
        [] => format!(
            "no table is in the publication yet. Add each table: {}",
            settings.target.init(&["--table", "SCHEMA.TABLE"])
        ),
        [one] => format!("table {one} is in the publication"),
        names => format!(
            "{} tables are in the publication: {}",
            names.len(),
            format_some(names)
        ),
    };
    let mut names: Vec<_> = found.iter().map(|(name, _)| name.to_string()).collect();
    names.sort_unstable();
    let outcome = if names.is_empty() {
        Outcome::Warning
    } else {
        Outcome::Ok
    };
    report.add("tables", outcome, describe(&names));
    let unfit = found
        .iter()
        .filter_map(|(name, table)| settings.mapping_for(name, Some(table)).err());
    let unfit: Vec<_> = unfit.collect();
    if let Some(first) = unfit.first() {
        let more = match unfit.len() {
            1 => String::new(),
            count => format!(" (and {} more tables with unsuitable columns)", count - 1),
        };
        let outcome = match settings.sets_tables_aside() {
            true => Outcome::Warning,
            false => Outcome::Failure,
        };
        report.add("columns", outcome, format!("{first}{more}"));
    } else if !found.is_empty() {
        let message = "each table has the columns for topic, key, headers and payload";
        report.add("columns", Outcome::Ok, message);
    }
    let accepting = found.iter().filter(|(_, table)| !table.rejects_update);
    let accepting: Vec<_> = accepting.map(|(name, _)| name.to_string()).collect();
    if !accepting.is_empty() {
        let message = format!(
            "some tables accept UPDATE ({}), but an updated row is not an event. If INSERT ... ON CONFLICT DO UPDATE finds an \
             existing row, the event of that INSERT is lost. Reject updates with the trigger in sql/no_update.sql",
            format_some(&accepting)
        );
        report.add("updates", Outcome::Warning, message);
    }
}

fn columns(settings: &PipelineSettings, observed: &Observed, report: &mut Report<'_>) {
    // `observed.table` is `None` if there are several outbox tables. In that case, `tables` checks
    // the columns.
    if observed.table.is_none() && !settings.target.outbox.is_messages() {
        return;
    }
    match settings.check_columns(observed) {
        Ok(()) => report.add(
            "columns",
            Outcome::Ok,
            "the table has the columns for topic, key, headers and payload",
        ),
        Err(error) => report.add("columns", Outcome::Failure, error),
    }
    let table = observed.table.as_ref();
    let columns = table.map(|table| &table.columns).into_iter().flatten();
    let is_column = |key: &str| columns.clone().any(|(name, _)| name == key);
    if let Some(warning) = settings.outbox.key_without_braces(is_column) {
        report.add("key", Outcome::Warning, warning);
    }
}

/// Reports tables that were temporarily not in the publication, unless the journal already records
/// their missing rows.
async fn unrecorded_gaps(
    settings: &PipelineSettings,
    observed: &Observed,
    catalog: &Catalog,
    report: &mut Report<'_>,
) {
    const SUBJECT: &str = "table state";
    if !observed.has_table_state {
        return;
    }
    match catalog.unrecorded_gaps(&settings.target).await {
        Ok(gaps) => {
            for gap in gaps {
                let message = format!(
                    "{gap}. Run the pipeline, or run {}: both record the missing rows and log the command that \
                     sends these rows",
                    settings.target.init(&[])
                );
                report.add(SUBJECT, Outcome::Failure, message);
            }
        }
        // Only a warning is reported, because the pipeline can run without the table state.
        Err(error @ CatalogError::Server(_)) => report.add(SUBJECT, Outcome::Warning, error),
        Err(error) => report.add(SUBJECT, outcome_of(recovery::catalog_remedy(&error)), error),
    }
}

/// For a pipeline that is defined by a row of a query, reports whether the slot belongs to that
/// pipeline.
async fn check_owner(
    settings: &PipelineSettings,
    observed: &Observed,
    catalog: &Catalog,
    report: &mut Report<'_>,
) {
    let (defined_by, target) = (settings.defined_by, &settings.target);
    let unknown = observed.unknown_owner(target);
    let checked = catalog.check_slot_owner(&settings.name, defined_by, target, unknown);
    if let Err(error) = checked.await {
        report.add("slot", outcome_of(recovery::catalog_remedy(&error)), error);
    }
}

/// Reports whether another process has moved the slot. If so, `run` halts unless it resumes from a
/// checkpoint.
async fn check_moved(
    settings: &PipelineSettings,
    observed: &Observed,
    catalog: &Catalog,
    report: &mut Report<'_>,
) {
    let Some(slot) = observed.slot.as_ref().filter(|_| observed.has_slot_state) else {
        return;
    };
    let query = async {
        let identity = catalog
            .slot_identity(&settings.name, &settings.target)
            .await?;
        let first_start = settings.first_start();
        let gap = catalog.gap_of_other_history(&identity, slot.confirmed, first_start);
        if let Some(gap) = gap.await? {
            let message = format!(
                "{}. {}",
                gap.describe(slot.confirmed),
                gap.next_step(&settings.target)
            );
            report.add("slot", Outcome::Failure, message);
        }
        catalog.moved(&identity, slot.confirmed).await
    };
    match query.await {
        Ok(None) => {}
        Ok(Some(moved)) if moved.begun && settings.delivery == Delivery::AtLeastOnce => {
            report.add("slot", Outcome::Failure, moved);
        }
        Ok(Some(moved)) => report.add("slot", Outcome::Warning, moved),
        // Only a warning is reported, because the pipeline can run without the slot state.
        Err(error @ CatalogError::Server(_)) => report.add("slot state", Outcome::Warning, error),
        Err(error) => report.add(
            "slot state",
            outcome_of(recovery::catalog_remedy(&error)),
            error,
        ),
    }
}

/// Reports whether the slot would survive a failover, and any settings that could cause it to be
/// lost.
async fn failover(settings: &PipelineSettings, catalog: &Catalog, report: &mut Report<'_>) {
    let slot = &settings.target.slot;
    match catalog.failover(slot).await {
        Ok(found) => {
            for note in found.notes(slot, settings.postgres.dbname()) {
                match note {
                    Note::Ok(message) => report.add("failover", Outcome::Ok, message),
                    Note::Warning(message) => report.add("failover", Outcome::Warning, message),
                }
            }
        }
        Err(error) => report.add(
            "failover",
            outcome_of(recovery::catalog_remedy(&error)),
            error,
        ),
    }
}

/// Reports conditions that cause no failure now but may cause events to be lost or repeated later.
fn risks(settings: &PipelineSettings, observed: &Observed, report: &mut Report<'_>) {
    let target = &settings.target;
    let outbox = &target.outbox;
    if let Some(table) = &observed.table
        && !table.rejects_update
    {
        report.add(
            "updates",
            Outcome::Warning,
            format!(
                "{outbox} accepts UPDATE, but an updated row is not an event: if INSERT ... ON CONFLICT DO UPDATE finds an \
                 existing row, the event of that INSERT is lost. Reject updates with the trigger in sql/no_update.sql"
            ),
        );
    }
    if matches!(outbox, Outbox::Messages { .. }) {
        match observed.has_publish {
            true => report.add("publish", Outcome::Ok, "function walpost.publish exists"),
            false => report.add(
                "publish",
                Outcome::Warning,
                format!(
                    "function walpost.publish does not exist, so roles can't use it to write events. Create it: {}",
                    target.init(&[])
                ),
            ),
        }
    }
    if let Some(warning) = observed.encoding_warning() {
        report.add("encoding", Outcome::Warning, warning);
    }
    if let Some(warning) = observed.synchronous_warning() {
        report.add("synchronous", Outcome::Warning, warning);
    }
    match observed.has_journal {
        true => report.add("journal", Outcome::Ok, "table walpost.journal exists"),
        false => report.add(
            "journal",
            Outcome::Warning,
            format!(
                "table walpost.journal does not exist, so events can't be skipped or sent again, because the journal records \
                 these operations. Create it: {}",
                target.init(&[])
            ),
        ),
    }
    match observed.has_slot_state {
        true => report.add(
            "slot state",
            Outcome::Ok,
            "table walpost.slot_state exists",
        ),
        false => report.add(
            "slot state",
            Outcome::Warning,
            format!(
                "table walpost.slot_state does not exist, so Walpost can't detect whether the slot is moved or re-created while \
                 walpost run is not reading it. Create it: {}",
                target.init(&[])
            ),
        ),
    }
    if !observed.has_table_state && !outbox.is_messages() {
        let message = format!(
            "table walpost.table_state does not exist, so Walpost can't detect whether a table is removed from the \
             publication and added again. Rows committed in between are not delivered. Create it: {}",
            target.init(&[])
        );
        report.add("table state", Outcome::Warning, message);
    }
    if let Some(publication) = &observed.publication
        && !outbox.is_messages()
    {
        let name = &target.publication;
        if let Some(filter) = &publication.row_filter {
            let remedy = match outbox.table() {
                Some(table) => format!("ALTER PUBLICATION {name} SET TABLE {table}"),
                None => {
                    "drop the table from the publication, and add it again without a WHERE clause"
                        .to_owned()
                }
            };
            let message = format!(
                "publication {name:?} omits rows that don't satisfy {filter}. To publish all rows: {remedy}"
            );
            report.add("row filter", Outcome::Warning, message);
        }
        if publication.more_than_inserts {
            let message = format!(
                "publication {name:?} also publishes operations other than inserts, which are decoded and then ignored. Change \
                 it: ALTER PUBLICATION {name} SET (publish = 'insert')"
            );
            report.add("publication", Outcome::Warning, message);
        }
    }
    match observed.slot_wal_keep.as_deref() {
        Some("-1") => report.add(
            "disk",
            Outcome::Warning,
            "max_slot_wal_keep_size is -1: while Kafka or Walpost is down, the slot retains WAL until the \
             disk is full. Set a limit: ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'. If the slot needs more WAL \
             than the limit, the slot and the events that were not delivered are lost",
        ),
        Some(limit) => {
            report.add("disk", Outcome::Ok, format!("max_slot_wal_keep_size is {limit}"));
        }
        None => {}
    }
    if let Some(slot) = &observed.slot {
        match slot.wal_status.as_deref() {
            Some("unreserved") => report.add(
                "slot",
                Outcome::Warning,
                format!(
                    "slot {:?} is unreserved: at the next checkpoint, the server will remove WAL that the slot needs. \
                     Let Walpost catch up now, or raise max_slot_wal_keep_size",
                    target.slot
                ),
            ),
            status => {
                let status = status.unwrap_or("unknown");
                let message = format!(
                    "the slot is confirmed up to {}, and its wal_status is {status}",
                    slot.confirmed
                );
                report.add("slot", Outcome::Ok, message);
            }
        }
    }
}
