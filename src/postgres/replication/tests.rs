//! Tests for connections to servers that are malicious or are not PostgreSQL, and for reading
//! ahead.

use super::fuzz::{ROW_MAX, copy_both_over, read_all, streaming};
use super::*;
use crate::postgres::connect::dial::Socket;
use proptest::prelude::*;
use tokio::io::AsyncWriteExt;

/// Reads frames from the server until an error occurs. Returns the number of frames and the error.
async fn read(sent: &[u8]) -> (usize, ConnectionError) {
    let (mut connection, mut server) = streaming(1 << 16);
    let sent = sent.to_vec();
    let sending = tokio::spawn(async move {
        // The client may close the connection before everything is sent.
        let _ = server.write_all(&sent).await;
    });
    let mut frames = 0;
    let error = read_all(&mut connection, |_| frames += 1).await;
    sending.abort();
    (frames, error)
}

fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len() + 4).expect("short");
    [&[tag][..], &len.to_be_bytes(), body].concat()
}

fn keepalive() -> Vec<u8> {
    message(b'd', &[&b"k"[..], &[0; 17]].concat())
}

#[tokio::test]
async fn rejects_invalid_message_lengths() {
    let with_length = |len: [u8; 4]| [&b"d"[..], &len, b"k"].concat();
    let error = read(&with_length([0x7f, 0xff, 0xff, 0xff])).await.1;
    assert!(
        matches!(error, ConnectionError::TooLarge { bytes, max: ROW_MAX } if bytes == 1 << 31),
        "{error:?}"
    );
    for len in [[0x80, 0, 0, 0], [0xff; 4], [0; 4], [0, 0, 0, 3]] {
        let error = read(&with_length(len)).await.1;
        assert!(
            matches!(error, ConnectionError::Io(_) | ConnectionError::Protocol(_)),
            "{len:?}: {error:?}"
        );
    }
}

#[tokio::test]
async fn skips_oversized_messages_and_rows() {
    let large = |tag: u8| {
        let data = [&[tag, 1][..], &[0; 8], b"p\0", &[b'x'; 5 * ROW_MAX]].concat();
        message(b'd', &[&b"w"[..], &[0; 24], &data].concat())
    };
    let (frames, error) = read(&[large(b'M'), keepalive(), large(b'M')].concat()).await;
    assert_eq!(frames, 3);
    assert!(matches!(error, ConnectionError::Closed), "{error:?}");
    let rows = [large(b'I'), large(b'U'), keepalive(), large(b'D')].concat();
    let (frames, error) = read(&rows).await;
    assert_eq!(frames, 4);
    assert!(matches!(error, ConnectionError::Closed), "{error:?}");
    let (frames, error) = read(&[large(b'M'), large(b'R')].concat()).await;
    assert_eq!(frames, 1);
    assert!(
        matches!(error, ConnectionError::TooLarge { .. }),
        "{error:?}"
    );
}

#[tokio::test]
async fn returns_buffered_messages_up_to_the_first_incomplete_one() {
    let notice = message(b'N', b"SWARNING\0C01000\0Mhm\0\0");
    let row = |text: &[u8]| message(b'd', text);
    let cut = &row(b"cut")[..6];
    let bodies = |connection: &Connection| -> Vec<Vec<u8>> {
        connection.buffered().map(<[u8]>::to_vec).collect()
    };
    for last in [&notice[..], cut, b"d\0\0\0\x03", b""] {
        let (mut connection, mut server) = streaming(1 << 16);
        assert!(bodies(&connection).is_empty());
        let sent = [&row(b"one"), &row(b"two")[..], last].concat();
        server.write_all(&sent).await.expect("sent");
        connection.receive().await.expect("filled");
        assert_eq!(bodies(&connection), [b"one", b"two"]);
        let next = connection.peek_row().expect("a row");
        assert_eq!(next, Some(CopyOut::Row(b"one")));
        connection.consume();
        assert_eq!(bodies(&connection), [b"two"]);
    }
}

#[tokio::test]
async fn rejects_invalid_frames() {
    for body in [
        &b""[..],
        b"x",
        b"w",
        b"w1234567",
        b"k",
        b"k12345678123456781x",
    ] {
        let error = read(&message(b'd', body)).await.1;
        assert!(matches!(error, ConnectionError::Frame(_)), "{error:?}");
    }
    for tag in *b"DTZ1QX\0\xff" {
        let (frames, error) = read(&[keepalive(), message(tag, b"")].concat()).await;
        assert_eq!(frames, 1);
        assert!(
            matches!(error, ConnectionError::Io(_) | ConnectionError::Protocol(_)),
            "{tag}: {error:?}"
        );
    }
}

#[tokio::test]
async fn reports_a_truncated_stream_as_closed() {
    let whole = [
        keepalive(),
        message(b'N', b"SWARNING\0C01000\0Mhm\0\0"),
        keepalive(),
    ]
    .concat();
    for len in 0..=whole.len() {
        let (frames, error) = read(&whole[..len]).await;
        assert!(matches!(error, ConnectionError::Closed), "{len}: {error:?}");
        let complete = usize::from(len >= keepalive().len()) + usize::from(len == whole.len());
        assert_eq!(frames, complete, "{len}");
    }
}

#[tokio::test]
async fn endless_notices_do_not_increase_memory_use() {
    let notice = message(b'N', b"SWARNING\0C01000\0Mhm\0\0");
    let (frames, error) = read(&notice.repeat(50_000)).await;
    assert_eq!(frames, 0);
    assert!(matches!(error, ConnectionError::Closed), "{error:?}");
}

/// Sends numbered rows in pieces of random length. Occasional pauses are so long that the thread
/// that reads ahead stops.
fn send_rows(mut socket: std::os::unix::net::UnixStream, rows: u32, mut dice: fastrand::Rng) {
    use std::io::Write;
    let mut sent = Vec::new();
    for number in 0..rows {
        let len = if dice.u32(..200) == 0 {
            dice.usize(..ROW_MAX - 10)
        } else {
            dice.usize(..300)
        };
        sent.extend(message(
            b'd',
            &[&number.to_be_bytes()[..], &vec![b'x'; len]].concat(),
        ));
    }
    let mut rest = &sent[..];
    while !rest.is_empty() {
        let (piece, following) = rest.split_at(rest.len().min(dice.usize(1..20_000)));
        socket.write_all(piece).expect("the client reads");
        rest = following;
        if dice.u32(..40) == 0 {
            std::thread::sleep(Duration::from_millis(dice.u64(1..12)));
        }
    }
}

/// How many times data was received while reading ahead and while reading directly.
#[derive(Clone, Copy, Debug, Default)]
struct ReadCounts {
    ahead: u32,
    direct: u32,
    /// How many times an idle reader was dropped.
    dropped: u32,
}

#[test]
fn receives_rows_once_and_in_order_in_every_read_mode() {
    const RUNS_MAX: u32 = 50;
    let mut total = ReadCounts::default();
    // Whether rows are read ahead or directly depends on timing, so repeat the test until both have
    // happened and an idle reader has been dropped.
    for _ in 0..RUNS_MAX {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let run = receive_in_order(seed);
        total.ahead += run.ahead;
        total.direct += run.direct;
        total.dropped += run.dropped;
        if total.ahead > 0 && total.direct > 0 && total.dropped > 0 {
            return;
        }
    }
    panic!("not every mode was used in {RUNS_MAX} runs: {total:?}");
}

/// Receives rows and checks that each row is received once and in order. Switches between reading
/// ahead and reading directly at random times that `seed` determines.
fn receive_in_order(seed: u64) -> ReadCounts {
    const ROWS: u32 = 20_000;
    let mut dice = fastrand::Rng::with_seed(seed);
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("sockets");
    ours.set_nonblocking(true).expect("set");
    // Make the socket's buffer small, because connections with a large buffer do not read ahead.
    // The size is similar to the default on most systems.
    let small = socket2::SockRef::from(&ours).set_send_buffer_size(100_000);
    small.expect("set");
    let server = theirs.try_clone().expect("a handle");
    let sending = dice.fork();
    let sender = std::thread::spawn(move || send_rows(server, ROWS, sending));
    let receive = async {
        let socket = tokio::net::UnixStream::from_std(ours).expect("registered");
        let mut connection = copy_both_over(Socket::Unix(socket));
        let mut counts = ReadCounts::default();
        let mut next = 0_u32;
        while next < ROWS {
            while let Some(CopyOut::Row(row)) = connection.peek_row().expect("rows") {
                assert_eq!(row[..4], next.to_be_bytes(), "seed {seed}");
                next += 1;
                connection.consume();
            }
            if dice.u32(..10) == 0 {
                assert!(connection.read_ahead(1 << 18, Instant::now()));
            }
            if dice.u32(..10) == 0 {
                connection.read_directly(Instant::now());
            }
            if dice.u32(..10) == 0 {
                let was_reader = matches!(connection.ahead, Ahead::Reader { .. });
                connection
                    .read_directly(Instant::now() + READER_IDLE_TIMEOUT + Duration::from_secs(1));
                let is_reader = matches!(connection.ahead, Ahead::Reader { .. });
                counts.dropped += u32::from(was_reader && !is_reader);
            }
            match connection.transport {
                Transport::Whole(_) => counts.direct += 1,
                Transport::Written(_) => counts.ahead += 1,
            }
            if dice.u32(..20) == 0 {
                // Drop the future before data arrives, to test that `receive` is cancel safe.
                let _ = timeout(Duration::from_micros(1), connection.receive()).await;
            } else if next < ROWS {
                connection.receive().await.expect("more");
            }
        }
        // Check that status updates reach the server both while reading ahead and while reading
        // directly.
        for reads_ahead in [false, true] {
            if reads_ahead {
                assert!(connection.read_ahead(1 << 18, Instant::now()));
            } else {
                while let Transport::Written(_) = connection.transport {
                    let _ = timeout(Duration::from_millis(20), connection.receive()).await;
                }
            }
            connection.write(b"status").await.expect("written");
        }
        let last = connection.receive();
        theirs.shutdown(std::net::Shutdown::Write).expect("closed");
        assert!(matches!(last.await, Err(ConnectionError::Closed)));
        (theirs, counts)
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let (mut theirs, counts) = runtime.expect("a runtime").block_on(receive);
    sender.join().expect("all sent");
    let mut written = String::new();
    std::io::Read::read_to_string(&mut theirs, &mut written).expect("read");
    assert_eq!(written, "statusstatus");
    counts
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    #[test]
    fn decodes_or_rejects_arbitrary_streams(
        good in 0..3_usize,
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let sent = [keepalive().repeat(good), bytes].concat();
        let (frames, _) = runtime.block_on(read(&sent));
        prop_assert!(frames >= good);
    }
}
