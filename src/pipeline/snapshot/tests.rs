use super::*;

const BORDER: Lsn = Lsn(0x200);
const BEFORE: Lsn = Lsn(0x1ff);
const BEYOND: Lsn = Lsn(0x201);

fn copying(connection: Option<Connection>, resumed: Lsn) -> Copying {
    Copying {
        connection,
        border: BORDER,
        resumed,
        progress: None,
        rows: 2,
        counted: 2,
    }
}

/// A connection on which nothing ever comes.
fn silent() -> Connection {
    let session = crate::postgres::connect::dial::Session {
        socket: crate::postgres::connect::dial::Socket::Memory(tokio::io::duplex(1).0),
        buffer: bytes::BytesMut::new(),
        parameters: std::collections::HashMap::default(),
        backend_pid: 1,
        secret: 1,
        host: "test".to_owned(),
    };
    Connection::over(session, 1)
}

fn decided(written: Said, has_streamed: bool, rows: Rows, confirmed: Lsn) -> Decision {
    let past = Past {
        written,
        has_streamed,
        rows,
    };
    let table = "public.outbox".parse().expect("table");
    decide(&past, confirmed, &table, "slot").expect("it can go on")
}

/// Before, a start would take it for delivered, and copy nothing: what the sink had not written yet
/// would be lost.
#[tokio::test]
async fn copy_is_durable_when_all_was_read_and_its_border_is_confirmed() {
    let all_read = copying(None, Lsn::ZERO);
    assert!(!all_read.is_durable(BEFORE));
    assert!(all_read.is_durable(BORDER));
    assert!(all_read.is_durable(BEYOND));
    assert!(!copying(Some(silent()), Lsn::ZERO).is_durable(BEYOND));
}

/// A standby was promoted that had nothing behind that, and the copy goes on from there.
#[tokio::test]
async fn copy_whose_border_the_slot_stood_at_is_durable_when_more_is_confirmed() {
    let all_read = copying(None, BORDER);
    assert!(!all_read.is_durable(BORDER));
    assert!(all_read.is_durable(BEYOND));
}

#[test]
fn begun_copy_is_made_again_unless_the_slot_is_confirmed_up_to_its_border() {
    let begun = |confirmed| decided(Said::Begun(BORDER), true, Rows::About(3), confirmed);
    assert_eq!(begun(BEFORE), Decision::Copy);
    // The border is confirmed by the copy, and by nothing before it.
    assert_eq!(begun(BORDER), Decision::Settled("copied"));
    assert_eq!(begun(BEYOND), Decision::Settled("copied"));
}

#[test]
fn rows_are_copied_only_where_nothing_says_that_they_were() {
    let some = || Rows::About(3);
    assert_eq!(
        decided(Said::Nothing, false, some(), BORDER),
        Decision::Copy
    );
    let settled = decided(Said::Nothing, true, some(), BORDER);
    assert_eq!(settled, Decision::Settled("streamed before"));
    let settled = decided(Said::Nothing, false, Rows::None, BORDER);
    assert_eq!(settled, Decision::Settled("empty table"));
    for (written, has_streamed, rows) in [
        (Said::Done, false, some()),
        (Said::NoJournal, true, some()),
        (Said::NoJournal, false, Rows::None),
    ] {
        let decision = decided(written, has_streamed, rows, BORDER);
        assert_eq!(decision, Decision::Stream, "{written:?}");
    }
    // The table may be empty by now, and what was begun is ended all the same.
    assert_eq!(
        decided(Said::Begun(BORDER), false, Rows::None, BEFORE),
        Decision::Copy
    );
}

#[test]
fn snapshot_that_another_instance_has_outrun_is_not_copied() {
    for planned in [Said::Nothing, Said::Begun(BEFORE)] {
        let outrun = |written, confirmed| is_outrun(planned, written, confirmed, BORDER);
        assert!(!outrun(planned, BEFORE));
        // It may stand there, and has nothing beyond it.
        assert!(!outrun(planned, BORDER));
        // It has confirmed what the stream would begin with.
        assert!(outrun(planned, BEYOND));
        // It has begun a copy of its own, or ended one.
        for written in [Said::Done, Said::Begun(BORDER)] {
            assert!(outrun(written, BEFORE), "{written:?}");
        }
    }
}
