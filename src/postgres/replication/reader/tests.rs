use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;

use super::*;

const AHEAD: usize = 256 << 10;
const PATIENCE: Duration = Duration::from_secs(60);

/// The results of successive reads from a simulated socket. After the last one, reads return
/// `WouldBlock`.
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
        sender.send(step).expect("sent");
    }
    Reader::start(Script(receiver), AHEAD).expect("a thread")
}

/// Returns all bytes that arrive before the reader stops, and the error that stopped the reader, if
/// any.
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
async fn returns_bytes_read_before_an_error_and_then_the_error() {
    let reset = || Err(ErrorKind::ConnectionReset.into());
    let reader = scripted([Ok(b"one".to_vec()), Ok(b"two".to_vec()), reset()]);
    reader.read();
    let found = all(&reader).await;
    assert_eq!(
        found,
        (b"onetwo".to_vec(), Some(ErrorKind::ConnectionReset))
    );
    // The error is returned only once. With a real socket, the next read would fail again.
    assert_eq!(all(&reader).await, (Vec::new(), None));
}

#[tokio::test]
async fn stops_reading_at_end_of_file_or_when_idle_and_can_be_restarted() {
    let later = |kind: ErrorKind| Err(kind.into());
    let script = [
        Ok(b"one".to_vec()),
        later(ErrorKind::Interrupted),
        Ok(Vec::new()),
        Ok(b"two".to_vec()),
    ];
    let reader = scripted(script);
    assert_eq!(
        all(&reader).await,
        (Vec::new(), None),
        "reading was not requested"
    );
    for expected in [&b"one"[..], b"two", b""] {
        reader.read();
        let began = Instant::now();
        assert_eq!(all(&reader).await, (expected.to_vec(), None));
        assert!(expected == b"one" || began.elapsed() >= IDLE_TIMEOUT);
    }
}

/// A socket whose reads alternate between returning one byte and failing with `WouldBlock`.
struct AlternatelyReady(bool);

impl Read for AlternatelyReady {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.0 = !self.0;
        room[0] = b'x';
        self.0.then_some(1).ok_or(ErrorKind::WouldBlock.into())
    }
}

/// Reads until this many chunks have arrived, restarting the reader whenever it stops. Returns how
/// many times the reader stopped.
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
async fn stops_once_the_socket_is_empty_after_finish_is_called() {
    let reader = Reader::start(AlternatelyReady(false), AHEAD).expect("a thread");
    stops_within(&reader, 1).await;
    reader.finish();
    let (rest, stopped) = all(&reader).await;
    assert_eq!(stopped, None);
    // The limit is roughly the number of bytes that arrive in one second, because the thread may
    // have to wait for a CPU before it can stop.
    assert!(rest.len() < 2000, "{} bytes more", rest.len());
    // A call to `finish` before `read` has no effect.
    reader.finish();
    let stops = stops_within(&reader, 100).await;
    assert!(stops < 50, "the reader stopped {stops} times");
}

#[tokio::test]
async fn returns_all_chunks_read_before_it_stopped() {
    let reader = scripted([Ok(b"one".to_vec()), Ok(b"two".to_vec())]);
    reader.read();
    while reader.shared.lock().task == Task::Read {
        thread::sleep(BUFFER_FILL_DELAY);
    }
    assert_eq!(all(&reader).await, (b"onetwo".to_vec(), None));
}

/// A socket that never runs out of data and counts the bytes that are read.
struct Endless(Arc<AtomicUsize>);

impl Read for Endless {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let count = room.len().min(10_000);
        self.0.fetch_add(count, Ordering::Relaxed);
        Ok(count)
    }
}

#[test]
fn reads_up_to_the_memory_limit() {
    let bytes = Arc::default();
    let reader = Reader::start(Endless(Arc::clone(&bytes)), AHEAD).expect("a thread");
    reader.read();
    let began = Instant::now();
    // The number of bytes can stay slightly below the limit, because the reader doesn't fill the
    // last few bytes of a chunk.
    while bytes.load(Ordering::Relaxed) < AHEAD - AHEAD / READ_BYTES * CHUNK_SPACE_MIN {
        assert!(began.elapsed() < PATIENCE, "{bytes:?} bytes");
        thread::sleep(BUFFER_FILL_DELAY);
    }
    thread::sleep(20 * BUFFER_FILL_DELAY);
    assert!(bytes.load(Ordering::Relaxed) <= AHEAD, "{bytes:?} bytes");
}

/// Returns a thousand bytes of an endless sequence, starting at offset `at`.
fn bytes_from(at: usize) -> Vec<u8> {
    let endless = (0..=250_u8).cycle();
    endless.skip(at % 251).take(1000).collect()
}

#[test]
fn stops_reading_at_the_memory_limit_without_losing_bytes() {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    for socket in [&ours, &theirs] {
        socket.set_nonblocking(true).expect("set");
    }
    let reader = Reader::start(socket2::Socket::from(ours), AHEAD).expect("a thread");
    let mut sent = Vec::new();
    let (began, mut full) = (Instant::now(), 0);
    // Write until the socket stays full for longer than the reader needs to read everything, so
    // that it must have stopped reading.
    while full < 50 {
        // The reader stops if it receives no data for a while, which can happen on a busy machine,
        // so start the reader again.
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
        assert!(sent.len() < 4 << 20, "the reader did not stop");
        assert!(began.elapsed() < PATIENCE, "{} bytes were sent", sent.len());
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
            "received {} of {} bytes",
            found.len(),
            sent.len()
        );
    }
    assert!(
        found == sent,
        "received {} of {} bytes",
        found.len(),
        sent.len()
    );
}

#[test]
fn dropping_the_reader_stops_the_thread_and_closes_the_socket() {
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
        // Writing fails because dropping the reader has closed the socket.
        let found = io::Write::write(&mut theirs, b"x");
        assert_eq!(
            found.expect_err("a closed socket").kind(),
            ErrorKind::BrokenPipe
        );
    }
}
