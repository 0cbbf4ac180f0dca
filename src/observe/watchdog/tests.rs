use super::*;
use crate::model::lifecycle::{ErrorKind, Failure};

const MEBI: u64 = 1 << 20;

/// A pipeline, and a clock controlled by the test.
struct Scene {
    about: About,
    lifecycle: LifecycleSnapshot,
    totals: Totals,
    vitals: Vitals,
    began: Instant,
    second: u64,
    watchdog: Watchdog,
    /// The lines that were logged: the second, the type of the line, and the kind of problem.
    said: Vec<(u64, &'static str, Kind)>,
    last: String,
}

impl Scene {
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
            said: Vec::new(),
            last: String::new(),
        }
    }

    fn slot(&mut self) -> &mut SlotVitals {
        self.vitals.slot.as_mut().expect("a slot")
    }

    fn micros(&self) -> u64 {
        (1_000_000_000 + self.second) * 1_000_000
    }

    /// Advances the clock by `seconds`, with a database query each second.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            let now = self.micros();
            self.lifecycle.database = Some((self.vitals.clone(), now));
            self.turn();
        }
    }

    /// Advances the clock by one second.
    fn turn(&mut self) {
        let facts = Facts {
            about: &self.about,
            lifecycle: &self.lifecycle,
            totals: &self.totals,
            now: self.began + Duration::from_secs(self.second),
            now_micros: self.micros(),
        };
        for line in self.watchdog.check(&facts) {
            let (begins, kind) = match line {
                Line::Started(problem) => {
                    self.last = problem.line();
                    ("begins", problem.kind)
                }
                Line::Ongoing(problem, _) => ("lasts", problem.kind),
                Line::Over(kind, _) => ("over", kind),
            };
            self.said.push((self.second, begins, kind));
        }
        self.second += 1;
    }

    fn enter(&mut self, state: State) {
        self.lifecycle.state = state;
        self.lifecycle.since_micros = self.micros();
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
fn idle_pipeline_is_never_complained_of() {
    let mut scene = Scene::new();
    // An idle database writes some WAL, and not all of it is confirmed at once.
    scene.vitals.end = Lsn(1015 * MEBI);
    scene.pass(3_000);
    scene.vitals.end = Lsn(2000 * MEBI);
    for _ in 0..1_000 {
        scene.totals.confirmed.0 += MEBI / 2;
        scene.pass(1);
    }
    assert_eq!(scene.said, []);
}

#[test]
fn stalled_delivery_is_logged_at_the_start_rarely_while_it_lasts_and_at_the_end() {
    let mut scene = Scene::new();
    scene.totals.waits = true;
    scene.totals.in_flight = 7;
    for second in 0..1_300 {
        scene.totals.since_last_progress = Duration::from_secs(second);
        scene.pass(1);
    }
    assert_eq!(scene.reported_kinds(), [Kind::DeliveryStuck]);
    assert!(
        scene.last.contains("7 events are in flight"),
        "{}",
        scene.last
    );
    scene.totals.waits = false;
    scene.pass(5);
    let kind = Kind::DeliveryStuck;
    assert_eq!(
        scene.said,
        [
            (10, "begins", kind),
            (610, "lasts", kind),
            (1_210, "lasts", kind),
            (1_300, "over", kind)
        ]
    );
    assert_eq!(scene.reported_kinds(), []);
}

#[test]
fn outage_of_kafka_is_a_problem_and_its_log_lines_are_the_producers() {
    let mut scene = Scene::new();
    scene.totals.waits = true;
    scene.totals.since_last_progress = Duration::from_secs(60);
    scene.lifecycle.kafka_down = Some("2/2 brokers are down".to_owned());
    scene.pass(60);
    assert_eq!(scene.reported_kinds(), [Kind::DeliveryStuck]);
    scene.totals.waits = false;
    scene.pass(1);
    assert_eq!((scene.reported_kinds(), scene.said), (vec![], vec![]));
}

#[test]
fn stall_is_reported_after_five_minutes_if_wal_is_pending() {
    let mut scene = Scene::new();
    scene.vitals.end = Lsn(1016 * MEBI);
    scene.pass(300);
    assert_eq!(scene.said, []);
    scene.pass(10);
    assert_eq!(scene.said, [(300, "begins", Kind::NoProgress)]);
    assert!(scene.last.contains("16.0 MiB of WAL"), "{}", scene.last);
    assert!(scene.last.contains("slot_name = 's'"), "{}", scene.last);
    // Rows arrive again, though nothing is confirmed until the transaction ends.
    scene.totals.delivered += 1;
    scene.pass(1);
    assert_eq!(scene.said.last(), Some(&(310, "over", Kind::NoProgress)));
    scene.pass(299);
    assert_eq!(scene.said.len(), 2);
}

#[test]
fn stall_is_not_reported_if_a_more_specific_problem_is() {
    let mut scene = Scene::new();
    scene.vitals.end = Lsn(2000 * MEBI);
    scene.totals.waits = true;
    for second in 0..400 {
        scene.totals.since_last_progress = Duration::from_secs(second);
        scene.pass(1);
    }
    assert_eq!(scene.reported_kinds(), [Kind::DeliveryStuck]);
}

#[test]
fn unread_slot_is_reported_after_a_minute_but_not_by_a_hot_standby() {
    for state in [State::Starting, State::Reconnecting, State::Halted] {
        let mut scene = Scene::new();
        scene.pass(5);
        scene.enter(state);
        scene.lifecycle.last_error = Some(Failure {
            at_micros: 0,
            kind: ErrorKind::Postgres,
            message: "connection refused".to_owned(),
            remedy: "Start PostgreSQL".to_owned(),
        });
        scene.pass(100);
        assert_eq!(scene.said, [(65, "begins", Kind::NotStreaming)]);
        for text in [
            "slot \"s\"",
            "60 s",
            "connection refused",
            "Start PostgreSQL",
        ] {
            assert!(scene.last.contains(text), "{text} in {}", scene.last);
        }
        scene.enter(State::Streaming);
        scene.pass(1);
        assert_eq!(scene.said.last(), Some(&(105, "over", Kind::NotStreaming)));
    }
    let mut scene = Scene::new();
    scene.enter(State::StandingBy);
    scene.slot().wal_status = Some("unreserved".to_owned());
    scene.pass(1_000);
    assert_eq!((scene.reported_kinds(), scene.said), (vec![], vec![]));
}

#[test]
fn stalled_session_is_reported_but_not_its_end_on_stop() {
    let mut scene = Scene::new();
    scene.totals.since_last_iteration = Duration::from_secs(60);
    scene.pass(3);
    assert_eq!(scene.said, [(0, "begins", Kind::EventLoopStalled)]);
    scene.enter(State::Draining);
    scene.pass(3);
    assert_eq!(scene.said.len(), 1);
}

#[test]
fn long_transaction_that_retains_much_wal_is_reported() {
    let mut scene = Scene::new();
    let began = scene.micros() - 100 * 1_000_000;
    scene.vitals.oldest_open = transaction(TransactionOwner::Session(4711), Some(began));
    scene.slot().restart = Some(Lsn(940 * MEBI));
    scene.pass(1_000);
    assert_eq!(scene.said, [], "60 MiB are not much");
    scene.slot().restart = Some(Lsn(930 * MEBI));
    scene.pass(1);
    assert_eq!(scene.said, [(1_000, "begins", Kind::LongTransaction)]);
    for text in [
        "PID 4711",
        "role \"app\"",
        "database \"shop\"",
        "since 2001-09-09T01:45:00Z",
        "70.0 MiB",
        "pg_catalog.pg_terminate_backend(4711)",
    ] {
        assert!(scene.last.contains(text), "{text} in {}", scene.last);
    }
    scene.vitals.oldest_open = None;
    scene.pass(1);
    let over = Some(&(1_001, "over", Kind::LongTransaction));
    assert_eq!(scene.said.last(), over);
}

#[test]
fn transaction_whose_beginning_is_hidden_is_as_old_as_it_was_seen() {
    let mut scene = Scene::new();
    scene.slot().restart = Some(Lsn(0));
    scene.vitals.oldest_open = transaction(TransactionOwner::Session(1), None);
    scene.pass(299);
    // A different transaction.
    if let Some(open) = &mut scene.vitals.oldest_open {
        open.xid = "778".to_owned();
    }
    scene.pass(300);
    assert_eq!(scene.said, []);
    scene.pass(1);
    assert_eq!(scene.said, [(599, "begins", Kind::LongTransaction)]);
    assert!(scene.last.contains("for 5 min at least"), "{}", scene.last);
}

#[test]
fn transaction_that_retains_a_quarter_of_the_limit_is_reported_soon() {
    let mut scene = Scene::new();
    scene.slot().restart = Some(Lsn(990 * MEBI));
    scene.slot().safe_wal_bytes = Some(29 << 20);
    scene.vitals.oldest_open = transaction(TransactionOwner::Prepared("it's".to_owned()), None);
    scene.pass(12);
    assert_eq!(scene.said, [(10, "begins", Kind::LongTransaction)]);
    for text in ["prepared transaction \"it's\"", "ROLLBACK PREPARED 'it''s'"] {
        assert!(scene.last.contains(text), "{text} in {}", scene.last);
    }
}

#[test]
fn long_transaction_that_delays_vacuum_is_reported_without_wal() {
    let mut scene = Scene::new();
    scene.vitals.oldest_open = transaction(TransactionOwner::Session(1), None);
    if let Some(open) = &mut scene.vitals.oldest_open {
        open.age = 100_000_000;
    }
    scene.pass(301);
    assert_eq!(scene.said, [(300, "begins", Kind::LongTransaction)]);
}

#[test]
fn outdated_query_results_start_and_end_no_problem() {
    let mut scene = Scene::new();
    scene.slot().restart = Some(Lsn(0));
    scene.vitals.oldest_open = transaction(TransactionOwner::Session(1), Some(1));
    scene.pass(1);
    assert_eq!(scene.reported_kinds(), [Kind::LongTransaction]);
    for _ in 0..100 {
        scene.turn();
    }
    assert_eq!(scene.reported_kinds(), [Kind::LongTransaction]);
    assert_eq!(scene.said.len(), 1);
}

#[test]
fn worsening_slot_is_logged_at_each_step_and_ends_only_when_healthy() {
    let mut scene = Scene::new();
    scene.vitals.end = Lsn(1010 * MEBI);
    scene.slot().safe_wal_bytes = Some(1 << 20);
    scene.pass(2);
    scene.slot().wal_status = Some("unreserved".to_owned());
    scene.pass(2);
    assert_eq!(scene.reported_kinds(), [Kind::SlotUnreserved]);
    scene.slot().wal_status = Some("extended".to_owned());
    scene.pass(2);
    scene.slot().safe_wal_bytes = Some(1 << 30);
    scene.pass(2);
    assert_eq!(
        scene.said,
        [
            (0, "begins", Kind::SlotInDanger),
            (2, "begins", Kind::SlotUnreserved),
            (4, "begins", Kind::SlotInDanger),
            (6, "over", Kind::SlotInDanger)
        ]
    );
}
