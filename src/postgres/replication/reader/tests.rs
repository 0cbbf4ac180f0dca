use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;

use super::*;

const AHEAD: usize = 256 << 10;
const PATIENCE: Duration = Duration::from_secs(60);

/// Results of successive reads from a socket; after the last, reads would block.
struct Script(mpsc::Receiver<io::Result<Vec<u8>>>);

impl Read for Script {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let bytes = self.0.try_recv().map_err(|_| ErrorKind::WouldBlock)??;
        room[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }
}

fn scripted(script: impl IntoIterator<Item = io::Result<Vec<u8>>>) -> Reader {
    let (sender, receiver) = mpsc::channel();
    for step in script {
        sender.send(step).expect("room");
    }
    Reader::start(Script(receiver), AHEAD).expect("a thread")
}

/// Returns all bytes until the reader has stopped, and its error.
async fn all(reader: &Reader) -> (Vec<u8>, Option<ErrorKind>) {
    let mut bytes = Vec::new();
    loop {
        match reader.next_chunk().await {
            Ok(Some(chunk)) => {
                assert!(!chunk.unread().is_empty());
                bytes.extend_from_slice(chunk.unread());
                reader.reuse(chunk);
            }
            Ok(None) => return (bytes, None),
            Err(error) => return (bytes, Some(error.kind())),
        }
    }
}

#[tokio::test]
async fn returns_bytes_read_before_an_error_first() {
    let reset = || Err(ErrorKind::ConnectionReset.into());
    let reader = scripted([Ok(b"one".to_vec()), Ok(b"two".to_vec()), reset()]);
    reader.read();
    let found = all(&reader).await;
    assert_eq!(
        found,
        (b"onetwo".to_vec(), Some(ErrorKind::ConnectionReset))
    );
    // The error is reported once; the next reader of the socket gets its own.
    assert_eq!(all(&reader).await, (Vec::new(), None));
}

#[tokio::test]
async fn it_stops_at_the_end_and_after_a_lull_and_can_begin_again() {
    let later = |kind: ErrorKind| Err(kind.into());
    let script = [
        Ok(b"one".to_vec()),
        later(ErrorKind::Interrupted),
        Ok(Vec::new()),
        Ok(b"two".to_vec()),
    ];
    let reader = scripted(script);
    assert_eq!(all(&reader).await, (Vec::new(), None), "it was not told to");
    for expected in [&b"one"[..], b"two", b""] {
        reader.read();
        let began = Instant::now();
        assert_eq!(all(&reader).await, (expected.to_vec(), None));
        assert!(expected == b"one" || began.elapsed() >= IDLE_TIMEOUT);
    }
}

/// A socket that alternates between one byte and would-block.
struct EverySecondTime(bool);

impl Read for EverySecondTime {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.0 = !self.0;
        room[0] = b'x';
        self.0.then_some(1).ok_or(ErrorKind::WouldBlock.into())
    }
}

/// Makes the reader read until this many chunks have arrived, and returns how often it stopped
/// meanwhile.
async fn stops_within(reader: &Reader, mut chunks: u32) -> u32 {
    let mut stops = 0;
    reader.read();
    while chunks > 0 {
        if reader.next_chunk().await.expect("no error").is_some() {
            chunks -= 1;
        } else {
            stops += 1;
            reader.read();
        }
    }
    stops
}

#[tokio::test]
async fn where_it_is_to_finish_it_waits_for_no_lull() {
    let reader = Reader::start(EverySecondTime(false), AHEAD).expect("a thread");
    stops_within(&reader, 1).await;
    reader.finish();
    let (rest, stopped) = all(&reader).await;
    assert_eq!(stopped, None);
    // The number of bytes that arrive in a second; a thread that waits for a CPU has an occasional
    // lull.
    assert!(rest.len() < 2000, "{} bytes more", rest.len());
    // A `finish` from before `read` has no effect.
    reader.finish();
    let stops = stops_within(&reader, 100).await;
    assert!(stops < 50, "it has stopped {stops} times");
}

#[tokio::test]
async fn what_nobody_has_asked_for_when_it_stops_is_kept() {
    let reader = scripted([Ok(b"one".to_vec()), Ok(b"two".to_vec())]);
    reader.read();
    while reader.shared.lock().task == Task::Read {
        thread::sleep(BUFFER_FILL_DELAY);
    }
    assert_eq!(all(&reader).await, (b"onetwo".to_vec(), None));
}

/// A socket that always has more bytes, and counts those that were read.
struct Endless(Arc<AtomicUsize>);

impl Read for Endless {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let count = room.len().min(10_000);
        self.0.fetch_add(count, Ordering::Relaxed);
        Ok(count)
    }
}

#[test]
fn as_much_is_read_as_it_may_hold() {
    let bytes = Arc::default();
    let reader = Reader::start(Endless(Arc::clone(&bytes)), AHEAD).expect("a thread");
    reader.read();
    let began = Instant::now();
    // The space at the end of each chunk is too small for a read.
    while bytes.load(Ordering::Relaxed) < AHEAD - AHEAD / READ_BYTES * CHUNK_SPACE_MIN {
        assert!(began.elapsed() < PATIENCE, "{bytes:?} bytes");
        thread::sleep(BUFFER_FILL_DELAY);
    }
    thread::sleep(20 * BUFFER_FILL_DELAY);
    assert!(bytes.load(Ordering::Relaxed) <= AHEAD, "{bytes:?} bytes");
}

/// Returns a thousand bytes of an endless sequence.
fn bytes_from(at: usize) -> Vec<u8> {
    let endless = (0..=250_u8).cycle();
    endless.skip(at % 251).take(1000).collect()
}

#[test]
fn no_more_is_read_than_it_may_hold_and_nothing_of_that_is_lost() {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    for socket in [&ours, &theirs] {
        socket.set_nonblocking(true).expect("set");
    }
    let reader = Reader::start(socket2::Socket::from(ours), AHEAD).expect("a thread");
    let mut sent = Vec::new();
    let (began, mut full) = (Instant::now(), 0);
    // Writes until the socket has been full for as long as reading everything would take.
    while full < 50 {
        // On a busy machine there can be a lull, and then a chunk of what had arrived by then.
        reader.read();
        let bytes = bytes_from(sent.len());
        match io::Write::write(&mut &theirs, &bytes) {
            Ok(count) => {
                sent.extend_from_slice(&bytes[..count]);
                full = 0;
            }
            Err(_) => {
                full += 1;
                thread::sleep(BUFFER_FILL_DELAY);
            }
        }
        assert!(sent.len() < 4 << 20, "it reads without end");
        assert!(
            began.elapsed() < PATIENCE,
            "it has read {} bytes",
            sent.len()
        );
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime");
    let mut found = Vec::new();
    while found.len() < sent.len() {
        reader.read();
        let (more, stopped) = runtime.block_on(all(&reader));
        assert_eq!(stopped, None);
        found.extend(more);
        assert!(
            began.elapsed() < PATIENCE,
            "{} bytes of {}",
            found.len(),
            sent.len()
        );
    }
    assert!(found == sent, "{} bytes of {}", found.len(), sent.len());
}

#[test]
fn the_thread_and_its_handle_end_with_it_whatever_it_does() {
    for fills in [false, true] {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        ours.set_nonblocking(true).expect("set");
        let reader = Reader::start(socket2::Socket::from(ours), AHEAD).expect("a thread");
        if fills {
            reader.read();
            theirs.set_nonblocking(true).expect("set");
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(100) {
                let _ = io::Write::write(&mut theirs, &[0; 10_000]);
            }
            theirs.set_nonblocking(false).expect("set");
        }
        drop(reader);
        // The other end finds that the socket is closed.
        let found = io::Write::write(&mut theirs, b"x");
        assert_eq!(found.expect_err("nobody").kind(), ErrorKind::BrokenPipe);
    }
}
