use super::*;
use crate::model::lifecycle::{ErrorKind, Failure};

const MEBI: u64 = 1 << 20;

/// A pipeline, and a clock controlled by the test.
struct Fixture {
    about: About,
    lifecycle: LifecycleSnapshot,
    totals: Totals,
    vitals: Vitals,
    began: Instant,
    second: u64,
    watchdog: Watchdog,
    /// The time in seconds, the type of line, and the kind of problem for each logged line.
    logged: Vec<(u64, &'static str, Kind)>,
    last_line: String,
}

impl Fixture {
    fn new() -> Self {
        let slot = SlotVitals {
            active: true,
            confirmed: Some(Lsn(1000 * MEBI)),
            restart: Some(Lsn(1000 * MEBI)),
            wal_status: Some("reserved".to_owned()),
            ..SlotVitals::default()
        };
        Self {
            about: About {
                slot: "s".to_owned(),
                ..About::default()
            },
            lifecycle: LifecycleSnapshot {
                state: State::Streaming,
                ..LifecycleSnapshot::default()
            },
            totals: Totals {
                confirmed: Lsn(1000 * MEBI),
                ..Totals::default()
            },
            vitals: Vitals {
                end: Lsn(1000 * MEBI),
                slot: Some(slot),
                ..Vitals::default()
            },
            began: Instant::now(),
            second: 0,
            watchdog: Watchdog::default(),
            logged: Vec::new(),
            last_line: String::new(),
        }
    }

    fn slot(&mut self) -> &mut SlotVitals {
        self.vitals.slot.as_mut().expect("a slot")
    }

    fn now_micros(&self) -> u64 {
        (1_000_000_000 + self.second) * 1_000_000
    }

    /// Advances the clock by `seconds`, querying the database once per second.
    fn advance(&mut self, seconds: u64) {
        for _ in 0..seconds {
            let now = self.now_micros();
            self.lifecycle.database = Some((self.vitals.clone(), now));
            self.advance_without_query();
        }
    }

    /// Advances the clock by one second without querying the database.
    fn advance_without_query(&mut self) {
        let facts = Facts {
            about: &self.about,
            lifecycle: &self.lifecycle,
            totals: &self.totals,
            now: self.began + Duration::from_secs(self.second),
            now_micros: self.now_micros(),
        };
        for line in self.watchdog.check(&facts) {
            let (line_type, kind) = match line {
                Line::Started(problem) => {
                    self.last_line = problem.line();
                    ("started", problem.kind)
                }
                Line::Ongoing(problem, _) => ("ongoing", problem.kind),
                Line::Resolved(kind, _) => ("resolved", kind),
            };
            self.logged.push((self.second, line_type, kind));
        }
        self.second += 1;
    }

    fn enter(&mut self, state: State) {
        self.lifecycle.state = state;
        self.lifecycle.since_micros = self.now_micros();
    }

    fn reported_kinds(&self) -> Vec<Kind> {
        let problems = self.watchdog.problems();
        problems.iter().map(|seen| seen.problem.kind).collect()
    }
}

fn transaction(whose: TransactionOwner, began_micros: Option<u64>) -> Option<OpenTransaction> {
    Some(OpenTransaction {
        xid: "777".to_owned(),
        age: 12,
        whose,
        role: Some("app".to_owned()),
        database: Some("shop".to_owned()),
        began_micros,
    })
}

#[test]
fn never_reports_an_idle_pipeline() {
    let mut fixture = Fixture::new();
    // Even an idle database writes some WAL, and not all of that WAL is confirmed immediately.
    fixture.vitals.end = Lsn(1015 * MEBI);
    fixture.advance(3_000);
    fixture.vitals.end = Lsn(2000 * MEBI);
    for _ in 0..1_000 {
        fixture.totals.confirmed.0 += MEBI / 2;
        fixture.advance(1);
    }
    assert_eq!(fixture.logged, []);
}

#[test]
fn logs_the_start_and_end_of_a_delivery_stall_and_a_reminder_every_ten_minutes() {
    let mut fixture = Fixture::new();
    fixture.totals.waits = true;
    fixture.totals.in_flight = 7;
    for second in 0..1_300 {
        fixture.totals.since_last_progress = Duration::from_secs(second);
        fixture.advance(1);
    }
    assert_eq!(fixture.reported_kinds(), [Kind::DeliveryStuck]);
    assert!(
        fixture.last_line.contains("7 events are in flight"),
        "{}",
        fixture.last_line
    );
    fixture.totals.waits = false;
    fixture.advance(5);
    let kind = Kind::DeliveryStuck;
    assert_eq!(
        fixture.logged,
        [
            (10, "started", kind),
            (610, "ongoing", kind),
            (1_210, "ongoing", kind),
            (1_300, "resolved", kind)
        ]
    );
    assert_eq!(fixture.reported_kinds(), []);
}

#[test]
fn reports_a_kafka_outage_without_logging_it_twice() {
    let mut fixture = Fixture::new();
    fixture.totals.waits = true;
    fixture.totals.since_last_progress = Duration::from_secs(60);
    fixture.lifecycle.kafka_down = Some("2/2 brokers are down".to_owned());
    fixture.advance(60);
    assert_eq!(fixture.reported_kinds(), [Kind::DeliveryStuck]);
    fixture.totals.waits = false;
    fixture.advance(1);
    assert_eq!((fixture.reported_kinds(), fixture.logged), (vec![], vec![]));
}

#[test]
fn reports_a_stall_after_five_minutes_if_wal_is_pending() {
    let mut fixture = Fixture::new();
    fixture.vitals.end = Lsn(1016 * MEBI);
    fixture.advance(300);
    assert_eq!(fixture.logged, []);
    fixture.advance(10);
    assert_eq!(fixture.logged, [(300, "started", Kind::NoProgress)]);
    assert!(
        fixture.last_line.contains("16.0 MiB of WAL"),
        "{}",
        fixture.last_line
    );
    assert!(
        fixture.last_line.contains("slot_name = 's'"),
        "{}",
        fixture.last_line
    );
    // Delivery resumes, but no position is confirmed until the transaction ends.
    fixture.totals.delivered += 1;
    fixture.advance(1);
    assert_eq!(
        fixture.logged.last(),
        Some(&(310, "resolved", Kind::NoProgress))
    );
    fixture.advance(299);
    assert_eq!(fixture.logged.len(), 2);
}

#[test]
fn does_not_report_a_stall_if_a_more_specific_problem_is_reported() {
    let mut fixture = Fixture::new();
    fixture.vitals.end = Lsn(2000 * MEBI);
    fixture.totals.waits = true;
    for second in 0..400 {
        fixture.totals.since_last_progress = Duration::from_secs(second);
        fixture.advance(1);
    }
    assert_eq!(fixture.reported_kinds(), [Kind::DeliveryStuck]);
}

#[test]
fn reports_an_unread_slot_after_a_minute_unless_the_pipeline_is_standing_by() {
    for state in [State::Starting, State::Reconnecting, State::Halted] {
        let mut fixture = Fixture::new();
        fixture.advance(5);
        fixture.enter(state);
        fixture.lifecycle.last_error = Some(Failure {
            at_micros: 0,
            kind: ErrorKind::Postgres,
            message: "connection refused".to_owned(),
            remedy: "Start PostgreSQL".to_owned(),
        });
        fixture.advance(100);
        assert_eq!(fixture.logged, [(65, "started", Kind::NotStreaming)]);
        for text in [
            "slot \"s\"",
            "60 s",
            "connection refused",
            "Start PostgreSQL",
        ] {
            assert!(
                fixture.last_line.contains(text),
                "{text} in {}",
                fixture.last_line
            );
        }
        fixture.enter(State::Streaming);
        fixture.advance(1);
        assert_eq!(
            fixture.logged.last(),
            Some(&(105, "resolved", Kind::NotStreaming))
        );
    }
    let mut fixture = Fixture::new();
    fixture.enter(State::StandingBy);
    fixture.slot().wal_status = Some("unreserved".to_owned());
    fixture.advance(1_000);
    assert_eq!((fixture.reported_kinds(), fixture.logged), (vec![], vec![]));
}

#[test]
fn does_not_log_a_stall_as_resolved_when_the_pipeline_stops() {
    let mut fixture = Fixture::new();
    fixture.totals.since_last_iteration = Duration::from_secs(60);
    fixture.advance(3);
    assert_eq!(fixture.logged, [(0, "started", Kind::EventLoopStalled)]);
    fixture.enter(State::Draining);
    fixture.advance(3);
    assert_eq!(fixture.logged.len(), 1);
}

/// While an event loop counts as stalled, Walpost does not notify systemd, which then kills the
/// process with all of its pipelines.
#[test]
fn event_loop_no_longer_counts_as_stalled_while_the_pipeline_reconnects() {
    let mut fixture = Fixture::new();
    fixture.totals.since_last_iteration = Duration::from_secs(60);
    fixture.advance(3);
    assert_eq!(fixture.reported_kinds(), [Kind::EventLoopStalled]);
    fixture.enter(State::Reconnecting);
    fixture.advance(1);
    assert_eq!(fixture.reported_kinds(), []);
    assert_eq!(
        fixture.logged.last(),
        Some(&(3, "resolved", Kind::EventLoopStalled))
    );
}

#[test]
fn reports_a_long_transaction_that_retains_a_large_amount_of_wal() {
    let mut fixture = Fixture::new();
    let began = fixture.now_micros() - 100 * 1_000_000;
    fixture.vitals.oldest_open = transaction(TransactionOwner::Session(4711), Some(began));
    fixture.slot().restart = Some(Lsn(940 * MEBI));
    fixture.advance(1_000);
    assert_eq!(fixture.logged, [], "60 MiB is below the threshold");
    fixture.slot().restart = Some(Lsn(930 * MEBI));
    fixture.advance(1);
    assert_eq!(fixture.logged, [(1_000, "started", Kind::LongTransaction)]);
    for text in [
        "PID 4711",
        "role \"app\"",
        "database \"shop\"",
        "since 2001-09-09T01:45:00Z",
        "70.0 MiB",
        "pg_catalog.pg_terminate_backend(4711)",
    ] {
        assert!(
            fixture.last_line.contains(text),
            "{text} in {}",
            fixture.last_line
        );
    }
    fixture.vitals.oldest_open = None;
    fixture.advance(1);
    let over = Some(&(1_001, "resolved", Kind::LongTransaction));
    assert_eq!(fixture.logged.last(), over);
}

#[test]
fn measures_transaction_age_from_first_observation_if_the_start_time_is_hidden() {
    let mut fixture = Fixture::new();
    fixture.slot().restart = Some(Lsn(0));
    fixture.vitals.oldest_open = transaction(TransactionOwner::Session(1), None);
    fixture.advance(299);
    // Replace the oldest open transaction with a different one.
    if let Some(open) = &mut fixture.vitals.oldest_open {
        open.xid = "778".to_owned();
    }
    fixture.advance(300);
    assert_eq!(fixture.logged, []);
    fixture.advance(1);
    assert_eq!(fixture.logged, [(599, "started", Kind::LongTransaction)]);
    assert!(
        fixture.last_line.contains("at least 5 min"),
        "{}",
        fixture.last_line
    );
}

#[test]
fn reports_a_transaction_early_if_it_retains_a_quarter_of_the_limit() {
    let mut fixture = Fixture::new();
    fixture.slot().restart = Some(Lsn(990 * MEBI));
    fixture.slot().safe_wal_bytes = Some(29 << 20);
    fixture.vitals.oldest_open = transaction(TransactionOwner::Prepared("it's".to_owned()), None);
    fixture.advance(12);
    assert_eq!(fixture.logged, [(10, "started", Kind::LongTransaction)]);
    for text in ["prepared transaction \"it's\"", "ROLLBACK PREPARED 'it''s'"] {
        assert!(
            fixture.last_line.contains(text),
            "{text} in {}",
            fixture.last_line
        );
    }
}

#[test]
fn reports_a_long_transaction_that_delays_vacuum_without_retaining_wal() {
    let mut fixture = Fixture::new();
    fixture.vitals.oldest_open = transaction(TransactionOwner::Session(1), None);
    if let Some(open) = &mut fixture.vitals.oldest_open {
        open.age = 100_000_000;
    }
    fixture.advance(301);
    assert_eq!(fixture.logged, [(300, "started", Kind::LongTransaction)]);
}

#[test]
fn ignores_outdated_query_results() {
    let mut fixture = Fixture::new();
    fixture.slot().restart = Some(Lsn(0));
    fixture.vitals.oldest_open = transaction(TransactionOwner::Session(1), Some(1));
    fixture.advance(1);
    assert_eq!(fixture.reported_kinds(), [Kind::LongTransaction]);
    for _ in 0..100 {
        fixture.advance_without_query();
    }
    assert_eq!(fixture.reported_kinds(), [Kind::LongTransaction]);
    assert_eq!(fixture.logged.len(), 1);
}

#[test]
fn logs_a_slot_problem_as_resolved_only_when_the_slot_is_healthy() {
    let mut fixture = Fixture::new();
    fixture.vitals.end = Lsn(1010 * MEBI);
    fixture.slot().safe_wal_bytes = Some(1 << 20);
    fixture.advance(2);
    fixture.slot().wal_status = Some("unreserved".to_owned());
    fixture.advance(2);
    assert_eq!(fixture.reported_kinds(), [Kind::SlotUnreserved]);
    fixture.slot().wal_status = Some("extended".to_owned());
    fixture.advance(2);
    fixture.slot().safe_wal_bytes = Some(1 << 30);
    fixture.advance(2);
    assert_eq!(
        fixture.logged,
        [
            (0, "started", Kind::SlotInDanger),
            (2, "started", Kind::SlotUnreserved),
            (4, "started", Kind::SlotInDanger),
            (6, "resolved", Kind::SlotInDanger)
        ]
    );
}
