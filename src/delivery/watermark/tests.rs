use proptest::prelude::*;

use super::*;
use crate::delivery::histogram::Histogram;

const WINDOW: Window = Window {
    records: 1000,
    bytes: 1_000_000,
};

fn watermark() -> Watermark {
    Watermark::new(WINDOW, Lsn(100))
}

/// Passes a transaction with `records` records to the watermark. The transaction's commit record is
/// at `commit` and is 10 bytes long. Returns the tags of the records.
fn transaction(watermark: &mut Watermark, commit: u64, records: usize) -> Vec<Tag> {
    watermark.begin(Lsn(commit)).expect("a valid begin");
    let tags = (0..records)
        .map(|_| {
            watermark
                .reserve(7)
                .expect("in a transaction")
                .expect("space")
        })
        .collect();
    watermark
        .commit(Lsn(commit), Lsn(commit + 10))
        .expect("a valid commit");
    tags
}

fn deliver(watermark: &Watermark, tags: &[Tag]) {
    let deliveries = watermark.deliveries();
    deliveries.delivered(tags.iter().copied());
}

#[test]
fn confirms_no_position_after_an_undelivered_record() {
    let mut watermark = watermark();
    let first = transaction(&mut watermark, 200, 2);
    let second = transaction(&mut watermark, 300, 1);
    deliver(&watermark, &second);
    deliver(&watermark, &first[..1]);
    assert_eq!(watermark.confirmed().lsn(), Lsn(100));
    deliver(&watermark, &first[1..]);
    assert_eq!(watermark.confirmed().lsn(), Lsn(310));
}

#[test]
fn counts_a_row_as_durable_when_it_and_all_preceding_rows_are_delivered() {
    let mut watermark = Watermark::new(WINDOW, Lsn::ZERO);
    let mut row = || {
        watermark.begin_row().expect("a valid begin");
        let tag = watermark.reserve(7).expect("a row").expect("space");
        watermark.end_row().expect("a valid commit");
        tag
    };
    let tags = [row(), row(), row()];
    assert_eq!(watermark.durable_rows(), 0);
    deliver(&watermark, &tags[1..]);
    assert_eq!(watermark.durable_rows(), 0, "the first record is in flight");
    deliver(&watermark, &tags[..1]);
    assert_eq!(watermark.durable_rows(), 3);
    watermark.begin_row().expect("a valid begin");
    assert!(
        watermark.begin_row().is_err(),
        "expected an error, because the previous row is still open"
    );
    assert_eq!(
        watermark.durable_rows(),
        3,
        "end_row was not called for the last row"
    );
}

#[test]
fn does_not_confirm_an_open_transaction() {
    let mut watermark = watermark();
    watermark.begin(Lsn(200)).expect("a valid begin");
    let tag = watermark.reserve(1).expect("open").expect("space");
    deliver(&watermark, &[tag]);
    assert_eq!(watermark.confirmed().lsn(), Lsn(100));
    watermark
        .commit(Lsn(200), Lsn(210))
        .expect("a valid commit");
    assert_eq!(watermark.confirmed().lsn(), Lsn(210));
}

/// Returns the number of durations recorded from commit to delivery, and the number recorded from
/// read to delivery.
fn timed(watermark: &Watermark) -> (u64, u64) {
    let stats = watermark.stats();
    let total = |histogram: &Histogram| histogram.counts().total();
    (total(&stats.commit_to_delivery), total(&stats.delivery))
}

#[test]
fn records_transaction_latency_once_after_its_last_record_is_delivered() {
    let mut watermark = watermark();
    watermark.tick(unix_micros());
    let tags = transaction(&mut watermark, 200, 3);
    deliver(&watermark, &tags[..2]);
    assert_eq!(timed(&watermark), (0, 0));
    deliver(&watermark, &tags[2..]);
    assert_eq!(timed(&watermark), (0, 1), "the commit time is unknown");
    // Deliver the record before the end of its transaction has been read.
    watermark.begin(Lsn(300)).expect("a valid begin");
    watermark.set_commit_time(unix_micros() - 2_000_000);
    let tag = watermark.reserve(1).expect("open").expect("space");
    deliver(&watermark, &[tag]);
    assert_eq!(timed(&watermark), (0, 1));
    watermark
        .commit(Lsn(300), Lsn(310))
        .expect("a valid commit");
    assert_eq!(timed(&watermark), (1, 2));
    let committed = watermark.stats().commit_to_delivery.counts();
    assert!(committed.sum_micros >= 2_000_000, "{committed:?}");
    // Many transactions become durable at once.
    let tags: Vec<_> = (0..50)
        .flat_map(|n| transaction(&mut watermark, 400 + n * 10, 2))
        .collect();
    deliver(&watermark, &tags);
    assert_eq!(timed(&watermark), (1, 52));
}

#[test]
fn records_transaction_latency_when_a_checkpoint_covers_the_transaction() {
    let mut watermark = watermark();
    watermark.tick(unix_micros());
    watermark.record_checkpoint(Lsn(100));
    let first = transaction(&mut watermark, 200, 1);
    let second = transaction(&mut watermark, 300, 1);
    deliver(&watermark, &first);
    deliver(&watermark, &second);
    assert_eq!(timed(&watermark), (0, 0));
    watermark.record_checkpoint(Lsn(210));
    assert_eq!(timed(&watermark), (0, 1));
    watermark.record_checkpoint(Lsn(400));
    assert_eq!(timed(&watermark), (0, 2));
}

#[test]
fn reports_the_oldest_transaction_that_is_not_durable() {
    let mut watermark = watermark();
    let oldest = |watermark: &mut Watermark| {
        let confirmed = watermark.confirmed();
        watermark.progress(confirmed, false).oldest_micros
    };
    assert_eq!(oldest(&mut watermark), 0);
    let mut sent = |commit, micros| {
        watermark.begin(Lsn(commit)).expect("a valid begin");
        watermark.set_commit_time(micros);
        let tag = watermark.reserve(1).expect("open").expect("space");
        let end = Lsn(commit + 10);
        watermark.commit(Lsn(commit), end).expect("a valid commit");
        tag
    };
    let (first, second) = (sent(200, 7), sent(300, 8));
    assert_eq!(oldest(&mut watermark), 7);
    deliver(&watermark, &[first]);
    assert_eq!(oldest(&mut watermark), 8);
    deliver(&watermark, &[second]);
    assert_eq!(oldest(&mut watermark), 0);
    watermark.begin(Lsn(400)).expect("a valid begin");
    watermark.set_commit_time(9);
    assert_eq!(
        oldest(&mut watermark),
        0,
        "the transaction has no records yet"
    );
    let confirmed = watermark.confirmed();
    let waiting = watermark.progress(confirmed, true).oldest_micros;
    assert_eq!(waiting, 9, "the first row is waiting for its topic");
    watermark.reserve(1).expect("open").expect("space");
    assert_eq!(oldest(&mut watermark), 9);
}

#[test]
fn confirms_no_position_after_the_last_checkpoint() {
    let mut watermark = watermark();
    watermark.record_checkpoint(Lsn(100));
    let first = transaction(&mut watermark, 200, 1);
    let second = transaction(&mut watermark, 300, 1);
    deliver(&watermark, &[first, second].concat());
    assert_eq!(watermark.confirmed().lsn(), Lsn(100));
    watermark.record_checkpoint(Lsn(210));
    assert_eq!(watermark.confirmed().lsn(), Lsn(210));
    // A checkpoint alone does not make a record durable.
    transaction(&mut watermark, 400, 1);
    watermark.record_checkpoint(Lsn(410));
    assert_eq!(watermark.confirmed().lsn(), Lsn(310));
}

#[test]
#[should_panic(expected = "the checkpoint moved backwards: found 0/63")]
fn panics_if_a_checkpoint_moves_backwards() {
    let mut watermark = watermark();
    watermark.record_checkpoint(Lsn(100));
    watermark.record_checkpoint(Lsn(99));
}

#[test]
fn confirms_a_keepalive_position_once_the_preceding_transactions_are_durable() {
    let mut watermark = watermark();
    watermark.record_keepalive(Lsn(150));
    assert_eq!(watermark.confirmed().lsn(), Lsn(150));
    let tags = transaction(&mut watermark, 200, 1);
    watermark.record_keepalive(Lsn(500));
    assert_eq!(watermark.confirmed().lsn(), Lsn(150));
    deliver(&watermark, &tags);
    assert_eq!(watermark.confirmed().lsn(), Lsn(500));
}

#[test]
fn keepalive_within_a_transaction_does_not_confirm_it() {
    let mut watermark = watermark();
    watermark.begin(Lsn(200)).expect("a valid begin");
    watermark.record_keepalive(Lsn(190));
    watermark.record_keepalive(Lsn(201));
    assert_eq!(watermark.confirmed().lsn(), Lsn(190));
}

#[test]
fn ignores_an_older_keepalive() {
    let mut watermark = watermark();
    watermark.record_keepalive(Lsn(300));
    watermark.record_keepalive(Lsn(200));
    assert_eq!(watermark.confirmed().lsn(), Lsn(300));
}

#[test]
fn does_not_advance_past_a_failed_delivery() {
    let mut watermark = watermark();
    let first = transaction(&mut watermark, 200, 1);
    let second = transaction(&mut watermark, 300, 2);
    let failure = DeliveryFailure {
        refused: None,
        refused_until: None,
        reason: "refused".to_owned(),
        permanent: true,
    };
    watermark.deliveries().report_failure(failure.clone());
    deliver(&watermark, &first);
    deliver(&watermark, &second[1..]);
    assert_eq!(watermark.confirmed().lsn(), Lsn(210));
    assert_eq!(watermark.deliveries().failure(), Some(failure));
}

#[test]
fn does_not_confirm_positions_for_records_sent_before_a_reconnect() {
    let mut watermark = watermark();
    let old = transaction(&mut watermark, 500, 1);
    watermark.begin(Lsn(600)).expect("a valid begin");
    let half = watermark.reserve(1).expect("open").expect("space");
    watermark.reconnected(Lsn(120));
    let again = transaction(&mut watermark, 130, 1);
    deliver(&watermark, &old);
    assert_eq!(watermark.confirmed().lsn(), Lsn(120));
    deliver(&watermark, &again);
    assert_eq!(
        watermark.confirmed().lsn(),
        Lsn(120),
        "an earlier record is in flight"
    );
    deliver(&watermark, &[half]);
    assert_eq!(watermark.confirmed().lsn(), Lsn(140));
}

#[test]
fn rejects_an_invalid_sequence_of_begins_and_commits() {
    let mut watermark = watermark();
    assert_eq!(watermark.reserve(1), Err(OrderError::Stray));
    let unmatched = Err(OrderError::Unmatched(Lsn(200), Lsn(210)));
    assert_eq!(watermark.commit(Lsn(200), Lsn(210)), unmatched);
    watermark.begin(Lsn(200)).expect("a valid begin");
    assert_eq!(
        watermark.begin(Lsn(300)),
        Err(OrderError::Nested(Lsn(300), Lsn(200)))
    );
    let early = Err(OrderError::Unmatched(Lsn(200), Lsn(200)));
    assert_eq!(watermark.commit(Lsn(200), Lsn(200)), early);
    watermark
        .commit(Lsn(200), Lsn(210))
        .expect("a valid commit");
    assert_eq!(
        watermark.begin(Lsn(209)),
        Err(OrderError::NotRising(Lsn(209), Lsn(210)))
    );
    watermark.begin(Lsn(210)).expect("commits may be adjacent");
}

/// After a failover to a standby whose WAL ends at the slot's confirmed LSN, the copy of existing
/// rows ends exactly at the LSN where the stream resumes.
#[test]
fn confirms_streamed_events_only_after_the_preceding_copy_is_complete() {
    let mut watermark = watermark();
    let after_snapshot = Err(OrderError::NotRising(Lsn(99), Lsn(100)));
    assert_eq!(watermark.begin_copy(Lsn(98), Lsn(99)), after_snapshot);
    let (commit, snapshot_lsn) = (Lsn(99), Lsn(100));
    watermark
        .begin_copy(commit, snapshot_lsn)
        .expect("a valid begin");
    let copied = watermark.reserve(7).expect("in a copy").expect("space");
    watermark
        .commit(commit, snapshot_lsn)
        .expect("a valid commit");
    let streamed = transaction(&mut watermark, 100, 1);
    deliver(&watermark, &streamed);
    assert_eq!(watermark.confirmed().lsn(), snapshot_lsn);
    deliver(&watermark, &[copied]);
    assert_eq!(watermark.confirmed().lsn(), Lsn(110));
}

#[test]
fn limits_records_and_bytes_in_flight() {
    let mut watermark = Watermark::new(
        Window {
            records: 2,
            bytes: 100,
        },
        Lsn(0),
    );
    watermark.begin(Lsn(10)).expect("a valid begin");
    let large = watermark
        .reserve(1000)
        .expect("open")
        .expect("a record larger than the window is accepted if no other record is in flight");
    assert_eq!(watermark.reserve(1), Ok(None));
    deliver(&watermark, &[large]);
    let first = watermark.reserve(60).expect("open").expect("space");
    assert_eq!(watermark.reserve(41), Ok(None), "bytes");
    watermark.release(first);
    watermark.reserve(40).expect("open").expect("space");
    watermark.reserve(60).expect("open").expect("space");
    assert_eq!(watermark.reserve(0), Ok(None), "records");
}

#[test]
fn limits_transactions_in_flight() {
    let window = Window {
        records: u64::MAX,
        bytes: u64::MAX,
    };
    let mut watermark = Watermark::new(window, Lsn(0));
    let tags: Vec<_> = (0..TRANSACTIONS_MAX as u64)
        .map(|n| transaction(&mut watermark, n * 20 + 20, 1)[0])
        .collect();
    watermark.begin(Lsn(1 << 40)).expect("a valid begin");
    deliver(&watermark, &tags[1..]);
    assert_eq!(
        watermark.reserve(1),
        Ok(None),
        "the oldest transaction is in flight"
    );
    deliver(&watermark, &tags[..1]);
    assert!(watermark.reserve(1).expect("open").is_some());
}

/// Returns the number of allocated segments.
fn segments(watermark: &Watermark) -> usize {
    let segments = &watermark.deliveries.slots.0;
    segments
        .iter()
        .filter(|segment| segment.get().is_some())
        .count()
}

#[test]
fn allocates_memory_only_for_transactions_in_flight() {
    let mut watermark = Watermark::new(WINDOW, Lsn(100));
    assert_eq!(segments(&watermark), 0);
    let several = u64::try_from(3 * SEGMENT_TRANSACTIONS).expect("a small number");
    for commit in 1..several {
        let tags = transaction(&mut watermark, commit * 200, 1);
        deliver(&watermark, &tags);
        assert_eq!(watermark.confirmed().lsn(), Lsn(commit * 200 + 10));
    }
    assert_eq!(segments(&watermark), 1);
    // If one transaction is always in flight, the counters of all segments are used in rotation.
    let mut before = transaction(&mut watermark, several * 200, 1);
    for commit in several + 1..2 * several {
        let tags = transaction(&mut watermark, commit * 200, 1);
        deliver(&watermark, &before);
        assert_eq!(watermark.confirmed().lsn(), Lsn((commit - 1) * 200 + 10));
        before = tags;
    }
    assert_eq!(segments(&watermark), 3);
}

#[test]
fn keeps_an_open_transaction_after_all_earlier_ones_are_durable() {
    let mut watermark = watermark();
    let first = transaction(&mut watermark, 200, 1);
    watermark.begin(Lsn(300)).expect("a valid begin");
    let tag = watermark.reserve(7).expect("open").expect("space");
    deliver(&watermark, &first);
    assert_eq!(watermark.confirmed().lsn(), Lsn(210));
    let last = watermark.reserve(7).expect("open").expect("space");
    watermark
        .commit(Lsn(300), Lsn(310))
        .expect("a valid commit");
    deliver(&watermark, &[tag]);
    assert_eq!(watermark.confirmed().lsn(), Lsn(210));
    deliver(&watermark, &[last]);
    assert_eq!(watermark.confirmed().lsn(), Lsn(310));
}

#[test]
fn applies_a_changed_window_size_to_the_open_transaction() {
    let mut watermark = watermark();
    watermark.begin(Lsn(200)).expect("a valid begin");
    watermark.reserve(1).expect("open").expect("space");
    let window = Window {
        records: 2,
        bytes: 100,
    };
    watermark.set_window(window);
    watermark.reserve(1).expect("open").expect("space");
    assert_eq!(watermark.reserve(1), Ok(None));
    watermark.set_window(WINDOW);
    watermark.reserve(1).expect("open").expect("space");
}

#[test]
fn decoding_an_encoded_tag_returns_the_original_tag() {
    let mut watermark = watermark();
    let first = transaction(&mut watermark, 200, 1);
    let second = transaction(&mut watermark, 300, 1);
    let as_words = |tags: &[Tag]| -> Vec<_> {
        let words = tags.iter().map(|tag| tag.to_word());
        words.map(Tag::from_word).collect()
    };
    deliver(&watermark, &as_words(&second));
    assert_eq!(watermark.confirmed().lsn(), Lsn(100));
    deliver(&watermark, &as_words(&first));
    assert_eq!(watermark.confirmed().lsn(), Lsn(310));
    assert_eq!(watermark.in_flight(), Window::default());
}

#[test]
fn counts_nonempty_transactions_and_tracks_the_end_of_the_last_one() {
    let mut watermark = watermark();
    let found = |watermark: &mut Watermark| {
        let confirmed = watermark.confirmed();
        let progress = watermark.progress(confirmed, false);
        assert_eq!(progress.transactions, watermark.transactions());
        (progress.transactions, watermark.last_records_end())
    };
    assert_eq!(found(&mut watermark), (0, Lsn::ZERO));
    transaction(&mut watermark, 200, 1);
    transaction(&mut watermark, 300, 2);
    transaction(&mut watermark, 400, 0);
    watermark.record_keepalive(Lsn(500));
    assert_eq!(found(&mut watermark), (2, Lsn(310)));
    watermark.reconnected(Lsn(100));
    assert_eq!(found(&mut watermark), (2, Lsn::ZERO), "on this connection");
}

#[test]
fn watermark_uses_the_statistics_of_its_pipeline() {
    let stats = Arc::new(PipelineStats::default());
    let watermark = Watermark::observed(WINDOW, Lsn(100), Arc::clone(&stats));
    assert!(std::ptr::eq(
        watermark.deliveries().stats(),
        &raw const *stats
    ));
    assert!(Arc::ptr_eq(watermark.stats(), &stats));
}

#[test]
fn returns_the_first_failure_unless_a_permanent_failure_follows() {
    let failures = |all: &[(&str, bool)]| {
        let watermark = watermark();
        let deliveries = watermark.deliveries();
        for (reason, permanent) in all {
            deliveries.report_failure(DeliveryFailure {
                reason: (*reason).to_owned(),
                permanent: *permanent,
                refused: None,
                refused_until: None,
            });
        }
        deliveries.failure().map(|failure| failure.reason)
    };
    assert_eq!(failures(&[]), None);
    let check = |all: &[(&str, bool)], counts: &str| {
        assert_eq!(failures(all).as_deref(), Some(counts), "{all:?}");
    };
    check(&[("first", false), ("second", false)], "first");
    check(&[("first", false), ("second", true)], "second");
    check(&[("first", true), ("second", false)], "first");
    check(&[("first", true), ("second", true)], "first");
}

/// Counts how often a task was woken.
#[derive(Default)]
struct Wakes(AtomicU64);

impl std::task::Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Wakes {
    fn poll<F: Future>(self: &Arc<Self>, future: std::pin::Pin<&mut F>) -> std::task::Poll<()> {
        let waker = Arc::clone(self).into();
        let done = future.poll(&mut std::task::Context::from_waker(&waker));
        done.map(drop)
    }

    fn count(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn wakes_the_waiting_task_once_when_the_sink_is_empty() {
    let mut watermark = watermark();
    let tags = transaction(&mut watermark, 200, 2);
    let wakes = Arc::new(Wakes::default());
    let mut empty = Box::pin(watermark.empty());
    assert!(wakes.poll(empty.as_mut()).is_pending());
    deliver(&watermark, &tags);
    assert_eq!(wakes.count(), 1);
    assert!(wakes.poll(empty.as_mut()).is_ready());
}

#[test]
fn wakes_a_waiting_task_when_a_quarter_of_the_window_is_free() {
    for (records, bytes) in [(8, 1_000_000), (1_000_000, 8 * 7)] {
        let mut watermark = Watermark::new(Window { records, bytes }, Lsn(0));
        let tags = transaction(&mut watermark, 10, 8);
        let deliveries = watermark.deliveries();
        let wakes = Arc::new(Wakes::default());
        let mut room = Box::pin(watermark.wait_for_space());
        assert!(wakes.poll(room.as_mut()).is_pending());
        deliveries.delivered([tags[0]]);
        assert_eq!(wakes.count(), 0, "an eighth");
        assert!(wakes.poll(room.as_mut()).is_pending());
        deliveries.delivered([tags[1]]);
        assert_eq!(wakes.count(), 1, "a quarter");
        assert!(wakes.poll(room.as_mut()).is_ready());
        let mut empty = Box::pin(watermark.empty());
        assert!(wakes.poll(empty.as_mut()).is_pending());
        deliveries.delivered(tags[2..7].iter().copied());
        assert_eq!(wakes.count(), 1, "one record is in flight");
        assert!(wakes.poll(empty.as_mut()).is_pending());
        deliveries.delivered([tags[7]]);
        assert_eq!(wakes.count(), 2, "no records are in flight");
        assert!(wakes.poll(empty.as_mut()).is_ready());
    }
}

/// A single step of the property test.
#[derive(Clone, Debug)]
enum Step {
    Begin { gap: u64 },
    Record,
    Commit,
    Idle { ahead: u64 },
    Deliver { from: usize, together: usize },
    Reconnect { back: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..50_u64).prop_map(|gap| Step::Begin { gap }),
        5 => Just(Step::Record),
        3 => Just(Step::Commit),
        2 => (0..100_u64).prop_map(|ahead| Step::Idle { ahead }),
        4 => (any::<usize>(), 1..5_usize).prop_map(|(from, together)| Step::Deliver { from, together }),
        1 => (0..200_u64).prop_map(|back| Step::Reconnect { back }),
    ]
}

/// A simple model of the watermark. The queue contains the transactions and keepalives since the
/// connection started, in order. Each entry consists of the LSN that can be confirmed once the
/// entry is durable, and its number of records in flight.
#[derive(Default)]
struct Model {
    queue: Vec<(u64, usize)>,
    resume: u64,
}

impl Model {
    fn confirmed(&self) -> u64 {
        let durable = self.queue.iter().take_while(|(_, waits)| *waits == 0);
        durable.map(|(lsn, _)| *lsn).fold(self.resume, u64::max)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn confirms_the_same_positions_as_the_reference_model(steps in proptest::collection::vec(step(), 1..120)) {
        let mut watermark = Watermark::new(WINDOW, Lsn(1000));
        let mut model = Model { resume: 1000, ..Model::default() };
        let mut received = 1000;
        let mut open: Option<u64> = None;
        let mut in_flight: Vec<(Tag, usize)> = Vec::new();
        for step in steps {
            match (step, open) {
                (Step::Begin { gap }, None) => {
                    let commit = received + gap;
                    watermark.begin(Lsn(commit)).expect("a valid begin");
                    open = Some(commit);
                    model.queue.push((0, 1));
                }
                (Step::Record, Some(_)) => {
                    let tag = watermark.reserve(3).expect("open").expect("space");
                    let at = model.queue.iter().rposition(|(lsn, _)| *lsn == 0).expect("open");
                    model.queue[at].1 += 1;
                    in_flight.push((tag, at));
                }
                (Step::Commit, Some(commit)) => {
                    watermark.commit(Lsn(commit), Lsn(commit + 5)).expect("a valid commit");
                    let at = model.queue.iter().rposition(|(lsn, _)| *lsn == 0).expect("open");
                    model.queue[at] = (commit + 5, model.queue[at].1 - 1);
                    received = commit + 5;
                    open = None;
                }
                (Step::Idle { ahead }, open) => {
                    let lsn = received + ahead;
                    watermark.record_keepalive(Lsn(lsn));
                    if open.is_none_or(|commit| lsn <= commit) {
                        // A keepalive inside a transaction raises the LSN that may be confirmed
                        // once the preceding transactions are durable.
                        let at = model.queue.len() - usize::from(open.is_some());
                        model.queue.insert(at, (lsn, 0));
                        in_flight.iter_mut().filter(|(_, of)| *of >= at).for_each(|(_, of)| *of += 1);
                        received = lsn;
                    }
                }
                (Step::Deliver { from, together }, _) if !in_flight.is_empty() => {
                    let from = from % in_flight.len();
                    let delivered = in_flight.drain(from..in_flight.len().min(from + together));
                    watermark.deliveries().delivered(delivered.map(|(tag, of)| {
                        model.queue[of].1 -= 1;
                        tag
                    }));
                }
                (Step::Reconnect { back }, _) => {
                    let resume = model.confirmed().saturating_sub(back).max(1);
                    watermark.reconnected(Lsn(resume));
                    for (lsn, waits) in &mut model.queue {
                        *waits -= usize::from(*lsn == 0 && open.is_some());
                        *lsn = 1;
                    }
                    (model.resume, received, open) = (resume, resume, None);
                }
                _ => {}
            }
            prop_assert_eq!(watermark.confirmed().lsn(), Lsn(model.confirmed()));
            prop_assert_eq!(watermark.in_flight().records, in_flight.len() as u64);
        }
    }
}
