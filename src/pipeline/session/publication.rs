//! Detects that the publication was changed while the pipeline was running, and no longer contains
//! some tables or rows. If it no longer contains the outbox at all, the pipeline halts
//! ([`Observed::publication_problem`]). This module detects the other cases, which are only
//! reported.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use crate::model::dropped_slot::replay_command;
use crate::pipeline::database::CatalogQueries;
use crate::pipeline::wal_budget::slot_monitor::Watched;
use crate::postgres::catalog::table_state::Refresh;
use crate::postgres::catalog::{Observed, ObservedPublication, format_some, hidden_rows_warning};
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::{Outbox, Target};

/// Everything that the publication has contained since the pipeline started. Clones share the same
/// state.
#[derive(Clone, Default)]
pub(crate) struct WatchedPublication(Arc<Mutex<PublicationSeen>>);

#[derive(Default)]
struct PublicationSeen {
    /// All tables that have been in the publication at any time since the pipeline started.
    tables: HashSet<TableName>,
    /// The publication's row filter when the pipeline started; the outer `None` means that it has
    /// not been read yet.
    filter: Option<Option<String>>,
    /// When the published tables were last recorded, and how many events had been delivered by
    /// then.
    refreshed: Option<(Instant, u64)>,
    /// Whether a warning has been logged that the tables could not be recorded.
    has_warned: bool,
}

/// Unchanged tables are recorded again after this interval, multiplied by the number of tables in
/// the publication. The total interval is proportional to the number of tables, because each table
/// requires a write.
const REFRESH_INTERVAL_PER_TABLE: Duration = Duration::from_millis(100);

impl WatchedPublication {
    /// Compares the publication with its earlier contents, and reports to monitoring which tables
    /// or rows it no longer contains.
    pub(super) async fn compare(
        &self,
        catalog: &impl CatalogQueries,
        watched: &Watched,
        observed: &Observed,
    ) {
        let Some(publication) = &observed.publication else {
            return;
        };
        let unpublished = match &watched.target.outbox {
            Outbox::Tables(patterns) => {
                match catalog.unpublished(patterns, &publication.tables).await {
                    Ok(tables) => tables,
                    Err(error) => return debug!(%error, "catalog query failed"),
                }
            }
            Outbox::Table(_) | Outbox::OneOf { .. } | Outbox::Messages { .. } => Vec::new(),
        };
        let tables = publication.outbox_tables(&watched.target.outbox);
        let hidden = match catalog.hidden_rows(&tables).await {
            Ok(hidden) => hidden,
            Err(error) => return debug!(%error, "catalog query failed"),
        };
        let mut seen = self.lock_seen();
        let found = seen.find_omission(&watched.target, publication, &unpublished);
        let found = found.or_else(|| hidden_rows_warning(&watched.target, &hidden));
        watched.stats().record_omission(found);
    }

    /// Records in the database how each table is published. If this fails, logs a warning once.
    pub(super) async fn record(&self, catalog: &impl CatalogQueries, watched: &Watched) {
        let delivered = watched.stats().totals().delivered;
        let refresh = self.lock_seen().refresh(Instant::now(), delivered);
        let recorded = catalog.record_tables(watched.pipeline(), &watched.target, refresh);
        let why = match recorded.await {
            Ok(None) => return self.lock_seen().has_warned = false,
            Ok(Some(why)) => why,
            Err(error) => error.to_string(),
        };
        if std::mem::replace(&mut self.lock_seen().has_warned, true) {
            return debug!(why, "failed to record the tables of the publication");
        }
        warn!(
            pipeline = watched.pipeline(),
            "failed to record the tables of the publication in walpost.table_state, so Walpost can't detect a table that is removed \
             from the publication and added again: {why}"
        );
    }

    fn lock_seen(&self) -> MutexGuard<'_, PublicationSeen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PublicationSeen {
    /// Decides whether unchanged tables are recorded again as published. Recording them is
    /// unnecessary if no events have been delivered since the last time: a replay that starts at
    /// the recorded time can't send any row twice.
    fn refresh(&mut self, now: Instant, delivered: u64) -> Refresh {
        let pause =
            REFRESH_INTERVAL_PER_TABLE * u32::try_from(self.tables.len()).unwrap_or(u32::MAX);
        match self.refreshed {
            Some((_, events)) if events == delivered => Refresh::Nothing,
            Some((at, _)) if now.duration_since(at) < pause => Refresh::Nothing,
            _ => {
                self.refreshed = Some((now, delivered));
                Refresh::All
            }
        }
    }

    /// If `publication` no longer contains some tables or rows, returns a description of them, and
    /// instructions for fixing the publication. `unpublished` contains the existing tables that are
    /// not in the publication.
    fn find_omission(
        &mut self,
        target: &Target,
        publication: &ObservedPublication,
        unpublished: &[TableName],
    ) -> Option<(String, String)> {
        self.tables.extend(publication.tables.iter().cloned());
        let name = identifier(&target.publication);
        let removed = unpublished
            .iter()
            .filter(|table| self.tables.contains(*table));
        let removed: Vec<_> = removed.map(TableName::to_string).collect();
        if let Some(first) = removed.first() {
            let replay = replay_command(&target.commands, Some(first));
            return Some((
                format!(
                    "tables were removed from publication {:?} while the pipeline was running, so their events are not delivered: {}",
                    target.publication,
                    format_some(&removed)
                ),
                format!(
                    "Add each table again, and send the events that were written in the meantime: ALTER PUBLICATION {name} ADD TABLE \
                     {first}; {replay}. If the change is intentional, restart the pipeline"
                ),
            ));
        }
        // A table's filter can't be read while the table is locked. Compare the filter next time.
        if publication.has_locked_filter {
            return None;
        }
        let filter_before = self
            .filter
            .get_or_insert_with(|| publication.row_filter.clone());
        let filter = publication.row_filter.as_ref()?;
        // With several tables, `row_filter` is the first filter found, which may belong to a
        // different table than before. Report it only if there was no filter before.
        let is_new = match target.outbox.is_several() {
            true => filter_before.is_none(),
            false => filter_before.as_ref() != Some(filter),
        };
        is_new.then(|| {
            let all = match target.outbox.table() {
                Some(table) => format!("ALTER PUBLICATION {name} SET TABLE {table}"),
                None => "drop the table from the publication, and add the table again without WHERE".to_owned(),
            };
            (
                format!(
                    "publication {:?} was changed while the pipeline was running, and omits rows that do not match {filter}",
                    target.publication
                ),
                format!("To publish all rows: {all}. If the change is intentional, restart the pipeline"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::table_pattern::TablePatterns;

    fn table(text: &str) -> TableName {
        text.parse().expect("a table")
    }

    fn target(outbox: Outbox) -> Target {
        Target {
            outbox,
            publication: "tenants".to_owned(),
            slot: "slot".to_owned(),
            commands: Default::default(),
        }
    }

    fn several() -> Target {
        let patterns = TablePatterns::new(&["tenant_*.outbox".to_owned()]).expect("patterns");
        target(Outbox::Tables(patterns))
    }

    fn publication(tables: &[&str], filter: Option<&str>) -> ObservedPublication {
        ObservedPublication {
            tables: tables.iter().map(|name| table(name)).collect(),
            row_filter: filter.map(str::to_owned),
            ..ObservedPublication::default()
        }
    }

    #[test]
    fn reports_tables_that_are_no_longer_in_the_publication() {
        let mut seen = PublicationSeen::default();
        let unpublished = [table("tenant_a.outbox"), table("tenant_c.outbox")];
        let both = publication(&["tenant_a.outbox", "tenant_b.outbox"], None);
        assert_eq!(
            seen.find_omission(&several(), &both, &unpublished[1..]),
            None
        );
        let one = publication(&["tenant_b.outbox"], None);
        let (what, remedy) = seen
            .find_omission(&several(), &one, &unpublished)
            .expect("a table is missing");
        assert!(what.ends_with("not delivered: tenant_a.outbox"), "{what}");
        let command = "ALTER PUBLICATION tenants ADD TABLE tenant_a.outbox";
        assert!(remedy.contains(command), "{remedy}");
        assert_eq!(
            seen.find_omission(&several(), &both, &unpublished[1..]),
            None
        );
        // A table that was dropped is not reported.
        assert_eq!(seen.find_omission(&several(), &one, &[]), None);
    }

    #[test]
    fn reports_row_filters_that_were_added_or_changed() {
        let single = target(Outbox::Table(table("public.outbox")));
        let mut seen = PublicationSeen::default();
        let first = publication(&[], Some("(a)"));
        assert_eq!(seen.find_omission(&single, &first, &[]), None);
        let changed = publication(&[], Some("(false)"));
        let (what, remedy) = seen.find_omission(&single, &changed, &[]).expect("changed");
        assert!(what.contains("(false)"), "{what}");
        let command = "ALTER PUBLICATION tenants SET TABLE public.outbox";
        assert!(remedy.contains(command), "{remedy}");
        assert_eq!(
            seen.find_omission(&single, &publication(&[], None), &[]),
            None
        );

        let mut seen = PublicationSeen::default();
        assert_eq!(
            seen.find_omission(&several(), &publication(&[], None), &[]),
            None
        );
        assert!(seen.find_omission(&several(), &first, &[]).is_some());
    }
}
