//! Checks that no memory is allocated per row between the socket and the sink, except by
//! librdkafka.
//!
//! Allocations are counted for the whole process, in every thread, so the tests run one after
//! another on the main thread. A test that fails writes the allocation sites to a file for
//! Valgrind's DHAT viewer.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

#[path = "support/stream.rs"]
mod stream;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use dhat::{HeapStats, Profiler};
use libtest_mimic::{Arguments, Trial};
use rdkafka::mocking::MockCluster;
use stream::{Kind, NullSink, Stream, null_pipeline, play, templates};
use walpost::facade::Connection;
use walpost::facade::Conninfo;
use walpost::facade::Credentials;
use walpost::facade::Frame;
use walpost::facade::KafkaSink;
use walpost::facade::Lsn;
use walpost::facade::OutboxSettings;
use walpost::facade::Sink;
use walpost::facade::{Core, Step};
use walpost::facade::{Format, HeaderFormat};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

const ROWS: usize = 100_000;
const DHAT_FILE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/dhat-heap.json");

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // With more than one thread, the harness would run each test on its own thread, and the
    // allocations of concurrent tests would be counted together.
    arguments.test_threads = Some(1);
    let plain = |per_transaction| Stream::rows(Kind::Plain, ROWS, per_transaction);
    let defaults = OutboxSettings::default;
    let tests = vec![
        test("rows_of_the_default_table_allocate_nothing", move || {
            streamed(Kind::Plain, defaults(), &plain(100));
        }),
        test("transactions_of_one_row_allocate_nothing", move || {
            // The first third of the stream contains more transactions than the window can hold in
            // flight. Processing them uses every slot that the watermark has for transactions. The
            // memory of such a slot is allocated when the slot is first used, so all of it is
            // allocated before counting starts.
            let stream = Stream::rows(Kind::Plain, 2 * ROWS, 1);
            streamed(Kind::Plain, defaults(), &stream);
        }),
        test("large_transactions_allocate_nothing", move || {
            streamed(Kind::Plain, defaults(), &plain(ROWS / 4));
        }),
        test(
            "templates_and_several_headers_allocate_nothing",
            move || {
                streamed(Kind::Plain, templates(), &plain(100));
            },
        ),
        test("headers_from_a_json_column_allocate_nothing", move || {
            let stream = Stream::rows(Kind::Headers, ROWS, 100);
            streamed(Kind::Headers, defaults(), &stream);
        }),
        test("a_bytea_payload_allocates_nothing", move || {
            let stream = Stream::rows(Kind::Bytea, ROWS, 100);
            streamed(Kind::Bytea, defaults(), &stream);
        }),
        test("json_of_columns_allocates_nothing", move || {
            streamed(Kind::Plain, in_format(Format::Json), &plain(100));
        }),
        test("json_with_schemas_allocates_nothing", move || {
            streamed(Kind::Plain, in_format(Format::JsonSchema), &plain(100));
        }),
        test("json_of_a_bytea_payload_allocates_nothing", move || {
            let stream = Stream::rows(Kind::Bytea, ROWS, 100);
            streamed(Kind::Bytea, in_format(Format::Json), &stream);
        }),
        test("events_in_messages_allocate_nothing", move || {
            let stream = Stream::rows(Kind::Messages, ROWS, 100);
            streamed(Kind::Messages, defaults(), &stream);
        }),
        test("keepalives_allocate_nothing", move || {
            streamed(Kind::Plain, defaults(), &Stream::keepalives(ROWS));
        }),
        test("reading_from_the_socket_allocates_nothing", move || {
            received(&plain(1));
        }),
        test(
            "producing_to_kafka_allocates_nothing_for_a_record",
            move || {
                produced(&Stream::rows(Kind::Headers, ROWS, 100));
            },
        ),
    ];
    libtest_mimic::run(&arguments, tests).exit_code()
}

/// Creates pipeline settings with the given format for the key, value, envelope and headers.
fn in_format(format: Format) -> OutboxSettings {
    OutboxSettings {
        key_format: format,
        value_format: format,
        header_format: match format {
            Format::JsonSchema => HeaderFormat::JsonSchema,
            _ => HeaderFormat::Json,
        },
        envelope: vec![("type".to_owned(), "eventType".to_owned())],
        ..OutboxSettings::default()
    }
}

fn test(name: &'static str, run: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, move || {
        run();
        Ok(())
    })
}

/// Starts counting allocations.
fn profiler() -> Profiler {
    Profiler::builder().testing().file_name(DHAT_FILE).build()
}

/// Asserts that nothing was allocated during this profiler's lifetime, which means that no buffer
/// has grown.
fn assert_nothing_allocated(profiler: Profiler) {
    assert_allocated_at_most(0, profiler);
}

fn assert_allocated_at_most(blocks: u64, profiler: Profiler) {
    let stats = HeapStats::get();
    dhat::assert!(
        stats.total_blocks <= blocks,
        "{} allocations with {} bytes in total; the allocation sites are in {DHAT_FILE}",
        stats.total_blocks,
        stats.total_bytes
    );
    drop(profiler);
}

/// Processes the first third of `stream`, so that every buffer grows to its final size, then counts
/// the allocations made while processing the rest.
fn streamed(kind: Kind, settings: OutboxSettings, stream: &Stream) {
    let (mut core, mut sink) = null_pipeline(kind, settings);
    let mut bodies = stream.bodies();
    play(&mut core, &mut sink, bodies.by_ref().take(stream.len() / 3));
    let profiler = profiler();
    play(&mut core, &mut sink, bodies);
    assert_nothing_allocated(profiler);
    assert_delivered(&mut core, &mut sink, stream);
}

/// Like [`streamed`], but receives the stream over a connection.
fn received(stream: &Stream) {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join(".s.PGSQL.5432")).unwrap();
    let bytes = stream.bytes().to_vec();
    let (begin, begins) = mpsc::channel();
    let server = thread::spawn(move || walsender(&listener, &begins, &bytes));
    let url = format!(
        "postgresql://walpost@/shop?host={}",
        folder.path().display()
    );
    let conninfo = Conninfo::parse(&url, &|_| None).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let limit = Duration::from_secs(60);
        let mut connection = Connection::open(&conninfo, limit, 1 << 20).await.unwrap();
        connection
            .start("slot", Lsn::ZERO, "publication", false)
            .await
            .unwrap();
        // The server sends rows only after this signal. If it sent rows before the signal, they
        // could arrive together with the response to START_REPLICATION, which is read before the
        // `Connection` has its buffer.
        begin.send(()).unwrap();
        let (mut core, mut sink) = null_pipeline(Kind::Plain, OutboxSettings::default());
        let warm_up = stream.len() / 3;
        receive(&mut connection, &mut core, &mut sink, warm_up).await;
        let profiler = profiler();
        receive(
            &mut connection,
            &mut core,
            &mut sink,
            stream.len() - warm_up,
        )
        .await;
        assert_nothing_allocated(profiler);
        assert_delivered(&mut core, &mut sink, stream);
    });
    server.join().unwrap();
}

async fn receive(connection: &mut Connection, core: &mut Core, sink: &mut NullSink, frames: usize) {
    let mut left = frames;
    while left > 0 {
        while left > 0
            && let Some(frame) = connection.peek().unwrap()
        {
            assert_eq!(core.frame(&frame, sink).unwrap(), Step::Done);
            connection.consume();
            // Query the confirmed position after every frame rather than once per read. The amount
            // of data per read differs from run to run. With one query per read, the number of
            // transactions that the watermark tracks would therefore also differ.
            core.delivery.watermark.confirmed();
            left -= 1;
        }
        if left > 0 {
            connection.receive().await.unwrap();
        }
    }
}

/// Like [`streamed`], but delivers to librdkafka's mock broker. Counts the allocations made by the
/// Rust code that handles delivery reports, but not the allocations that librdkafka itself makes in
/// C. rdkafka allocates twice for each batch of reports, regardless of the number of records in the
/// batch.
fn produced(stream: &Stream) {
    const TOPIC: &str = "outbox.event.order";
    let broker = MockCluster::new(1).unwrap();
    broker.create_topic(TOPIC, 3, 1).unwrap();
    let properties = [("bootstrap.servers".to_owned(), broker.bootstrap_servers())].into();
    let (mut core, deliveries) = stream::core(Kind::Headers, OutboxSettings::default());
    let mut sink = KafkaSink::new(
        "test",
        &properties,
        None,
        None,
        &Credentials::default(),
        deliveries,
    )
    .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let prepared = sink.prepare(TOPIC, Vec::new).await.unwrap();
        sink.prepared(TOPIC, prepared).unwrap();
        let mut bodies = stream.bodies();
        let warm_up = bodies.by_ref().take(stream.len() / 3);
        produce(&mut core, &mut sink, warm_up).await;
        let profiler = profiler();
        produce(&mut core, &mut sink, bodies).await;
        assert_allocated_at_most(ROWS as u64 / 4, profiler);
    });
    assert_eq!(core.delivery.watermark.confirmed().lsn(), stream.end());
}

/// Passes the frames to `core`, and waits until every record is delivered.
async fn produce<'s>(
    core: &mut Core,
    sink: &mut KafkaSink,
    bodies: impl Iterator<Item = &'s [u8]>,
) {
    for body in bodies {
        let frame = Frame::decode(body).unwrap();
        while core.frame(&frame, sink).unwrap() == Step::Full {
            core.delivery.watermark.wait_for_space().await;
        }
        sink.flush(true).unwrap();
    }
    sink.flush(false).unwrap();
    core.delivery.watermark.empty().await;
}

/// Accepts a connection as a server would, waits for a message on the channel `begins`, and then
/// streams `bytes` to the client.
fn walsender(listener: &UnixListener, begins: &mpsc::Receiver<()>, bytes: &[u8]) {
    const AUTHENTICATION_OK: &[u8] = b"R\0\0\0\x08\0\0\0\0";
    const READY_FOR_QUERY: &[u8] = b"Z\0\0\0\x05I";
    const SEARCH_PATH: &[u8] = b"D\0\0\0\x1d\0\x01\0\0\0\x13pg_catalog, pg_temp";
    const COPY_BOTH: &[u8] = b"W\0\0\0\x07\0\0\0";
    let (mut socket, _) = listener.accept().unwrap();
    read_message(&mut socket);
    socket.write_all(AUTHENTICATION_OK).unwrap();
    socket.write_all(READY_FOR_QUERY).unwrap();
    assert_eq!(read_query(&mut socket), b"SHOW search_path\0");
    socket.write_all(SEARCH_PATH).unwrap();
    socket.write_all(READY_FOR_QUERY).unwrap();
    assert!(read_query(&mut socket).starts_with(b"START_REPLICATION"));
    socket.write_all(COPY_BOTH).unwrap();
    begins.recv().unwrap();
    socket.write_all(bytes).unwrap();
}

/// Reads a Query message and returns its text.
fn read_query(socket: &mut UnixStream) -> Vec<u8> {
    let mut tag = [0];
    socket.read_exact(&mut tag).unwrap();
    assert_eq!(tag, *b"Q");
    read_message(socket)
}

/// Reads a length field and a message body of that length, and returns the body.
fn read_message(socket: &mut UnixStream) -> Vec<u8> {
    let mut len = [0; 4];
    socket.read_exact(&mut len).unwrap();
    let mut body = vec![0; u32::from_be_bytes(len) as usize - len.len()];
    socket.read_exact(&mut body).unwrap();
    body
}

/// Asserts that the rows reached the sink, by checking that the end of the stream can be confirmed.
fn assert_delivered(core: &mut Core, sink: &mut NullSink, stream: &Stream) {
    sink.deliver();
    assert_eq!(core.delivery.watermark.confirmed().lsn(), stream.end());
}
