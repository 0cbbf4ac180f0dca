//! Detects what a publication omits since it was changed while the pipeline runs. If it would omit
//! the whole outbox, the pipeline halts ([`Observed::publication_problem`]); this module detects
//! partial omissions.

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

/// The contents of the publication since the pipeline started, shared by all clones.
#[derive(Clone, Default)]
pub(crate) struct WatchedPublication(Arc<Mutex<PublicationSeen>>);

#[derive(Default)]
struct PublicationSeen {
    /// Every table that it has contained.
    tables: HashSet<TableName>,
    /// Its row filter when the pipeline started; `None` if it has not been read yet.
    filter: Option<Option<String>>,
    /// When its tables were last recorded as published, and how many events had been delivered by
    /// then.
    refreshed: Option<(Instant, u64)>,
    /// A warning was logged that its tables can't be recorded.
    has_warned: bool,
}

/// Minimum interval between two recordings of the tables as published, multiplied by the number of
/// tables, because each table requires a write.
const REFRESH_INTERVAL_PER_TABLE: Duration = Duration::from_millis(100);

impl WatchedPublication {
    /// Compares the publication with its earlier contents, and records in the counters what it
    /// omits now.
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
        let found = seen.left_out(&watched.target, publication, &unpublished);
        let found = found.or_else(|| hidden_rows_warning(&watched.target, &hidden));
        watched.stats().record_left_out(found);
    }

    /// Records how the tables are published. Failures to connect are reported elsewhere.
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
            "failed to record the tables of the publication in walpost.table_state, so it goes unnoticed if one is taken out of it and \
             added again: {why}"
        );
    }

    fn lock_seen(&self) -> MutexGuard<'_, PublicationSeen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PublicationSeen {
    /// Returns whether to record that the tables are published as before. If no events were
    /// delivered since the last time, there is no row that could be sent twice.
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

    /// Returns what `publication` omits, and the command that fixes this. `unpublished` contains
    /// existing tables that are not in the publication.
    fn left_out(
        &mut self,
        target: &Target,
        publication: &ObservedPublication,
        unpublished: &[TableName],
    ) -> Option<(String, String)> {
        self.tables.extend(publication.tables.iter().cloned());
        let name = identifier(&target.publication);
        let lost = unpublished
            .iter()
            .filter(|table| self.tables.contains(*table));
        let lost: Vec<_> = lost.map(TableName::to_string).collect();
        if let Some(first) = lost.first() {
            let replay = replay_command(&target.commands, Some(first));
            return Some((
                format!(
                    "tables were taken out of publication {:?} while the pipeline ran, and their events are not delivered: {}",
                    target.publication,
                    format_some(&lost)
                ),
                format!(
                    "Add each again, and send what was written meanwhile: ALTER PUBLICATION {name} ADD TABLE {first}; {replay}. \
                     If it is meant, restart the pipeline"
                ),
            ));
        }
        // A later query compares the filter, when the table is no longer locked.
        if publication.has_locked_filter {
            return None;
        }
        let filter_before = self
            .filter
            .get_or_insert_with(|| publication.row_filter.clone());
        let filter = publication.row_filter.as_ref()?;
        // With several tables, it is unknown to which of them this filter belongs.
        let is_new = match target.outbox.is_several() {
            true => filter_before.is_none(),
            false => filter_before.as_ref() != Some(filter),
        };
        is_new.then(|| {
            let all = match target.outbox.table() {
                Some(table) => format!("ALTER PUBLICATION {name} SET TABLE {table}"),
                None => "drop the table from it, and add it again without WHERE".to_owned(),
            };
            (
                format!(
                    "publication {:?} was changed while the pipeline ran, and leaves out rows that don't fulfil {filter}",
                    target.publication
                ),
                format!("To have all: {all}. If it is meant, restart the pipeline"),
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
    fn reports_tables_that_the_publication_contained_before() {
        let mut seen = PublicationSeen::default();
        let unpublished = [table("tenant_a.outbox"), table("tenant_c.outbox")];
        let both = publication(&["tenant_a.outbox", "tenant_b.outbox"], None);
        assert_eq!(seen.left_out(&several(), &both, &unpublished[1..]), None);
        let one = publication(&["tenant_b.outbox"], None);
        let (what, remedy) = seen
            .left_out(&several(), &one, &unpublished)
            .expect("a table is missing");
        assert!(what.ends_with("not delivered: tenant_a.outbox"), "{what}");
        let command = "ALTER PUBLICATION tenants ADD TABLE tenant_a.outbox";
        assert!(remedy.contains(command), "{remedy}");
        assert_eq!(seen.left_out(&several(), &both, &unpublished[1..]), None);
        // A dropped table is not among the existing ones.
        assert_eq!(seen.left_out(&several(), &one, &[]), None);
    }

    #[test]
    fn reports_row_filters_that_were_added_or_changed() {
        let single = target(Outbox::Table(table("public.outbox")));
        let mut seen = PublicationSeen::default();
        let first = publication(&[], Some("(a)"));
        assert_eq!(seen.left_out(&single, &first, &[]), None);
        let changed = publication(&[], Some("(false)"));
        let (what, remedy) = seen.left_out(&single, &changed, &[]).expect("changed");
        assert!(what.contains("(false)"), "{what}");
        let command = "ALTER PUBLICATION tenants SET TABLE public.outbox";
        assert!(remedy.contains(command), "{remedy}");
        assert_eq!(seen.left_out(&single, &publication(&[], None), &[]), None);

        let mut seen = PublicationSeen::default();
        assert_eq!(
            seen.left_out(&several(), &publication(&[], None), &[]),
            None
        );
        assert!(seen.left_out(&several(), &first, &[]).is_some());
    }
}
