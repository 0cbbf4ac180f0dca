//! Servers that mean no good, or are none.

use super::fuzz::{ROW_MAX, read_all, streaming};
use super::*;
use proptest::prelude::*;

/// Reads frames of what the server sends until something is wrong with it; then how many there were.
async fn read(sent: &[u8]) -> (usize, ConnectionError) {
    let (mut connection, mut server) = streaming(1 << 16);
    let sent = sent.to_vec();
    let sending = tokio::spawn(async move {
        // The client may have gone before all was sent.
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
async fn a_length_that_no_message_can_have_is_refused() {
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
async fn a_message_that_is_too_large_is_passed_over_and_a_row_is_not() {
    let large = |tag: u8| {
        let data = [&[tag, 1][..], &[0; 8], b"p\0", &[b'x'; 5 * ROW_MAX]].concat();
        message(b'd', &[&b"w"[..], &[0; 24], &data].concat())
    };
    let (frames, error) = read(&[large(b'M'), keepalive(), large(b'M')].concat()).await;
    assert_eq!(frames, 3);
    assert!(matches!(error, ConnectionError::Closed), "{error:?}");
    let (frames, error) = read(&[large(b'M'), large(b'I')].concat()).await;
    assert_eq!(frames, 1);
    assert!(
        matches!(error, ConnectionError::TooLarge { .. }),
        "{error:?}"
    );
}

#[tokio::test]
async fn what_is_buffered_stays_the_next_and_ends_with_what_is_not_whole() {
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
        server.write_all(&sent).await.expect("room");
        connection.fill().await.expect("filled");
        assert_eq!(bodies(&connection), [b"one", b"two"]);
        let next = connection.peek_row().expect("a row");
        assert_eq!(next, Some(CopyOut::Row(b"one")));
        connection.consume();
        assert_eq!(bodies(&connection), [b"two"]);
    }
}

#[tokio::test]
async fn what_is_no_frame_is_refused() {
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
async fn a_stream_that_ends_anywhere_is_closed() {
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
async fn notices_without_end_take_no_memory() {
    let notice = message(b'N', b"SWARNING\0C01000\0Mhm\0\0");
    let (frames, error) = read(&notice.repeat(50_000)).await;
    assert_eq!(frames, 0);
    assert!(matches!(error, ConnectionError::Closed), "{error:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    #[test]
    fn any_bytes_are_frames_or_an_error(
        good in 0..3_usize,
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let sent = [keepalive().repeat(good), bytes].concat();
        let (frames, _) = runtime.block_on(read(&sent));
        prop_assert!(frames >= good);
    }
}
