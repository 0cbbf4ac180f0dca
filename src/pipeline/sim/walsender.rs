//! A simulated walsender that speaks the real replication protocol.

use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::{sleep, timeout};

use super::older::Snapshot;
use super::world::{Event, SYSTEM_ID, Shared, Transaction, is_unroutable};
use crate::model::lsn::Lsn;
use crate::postgres::replication::SERVER_PROCESS_QUERY;

const OUTBOX: u32 = 16_500;
/// Capacity of the pipe that replaces a socket and its buffers.
const PIPE_BYTES: usize = 4096;

/// Spawns a walsender task, and returns the client's end of its connection.
pub(super) fn connect(shared: &Shared) -> DuplexStream {
    let (client, server) = tokio::io::duplex(PIPE_BYTES);
    let (number, cut, incarnation) = {
        let mut world = shared.lock();
        let number = world.database.next_connection;
        world.database.next_connection += 1;
        // Some connections are cut in the middle of a message.
        let cut = world.chance(30).then(|| world.dice.usize(1..20_000));
        let incarnation = world.database.incarnation;
        (number, cut.unwrap_or(usize::MAX), incarnation)
    };
    let walsender = Walsender {
        shared: shared.clone(),
        number,
        incarnation,
        stream: server,
        bytes_until_cut: cut,
        input: BytesMut::new(),
        sent: Lsn::ZERO,
        described: false,
        snapshot: None,
    };
    tokio::spawn(walsender.run());
    client
}

struct Walsender {
    shared: Shared,
    number: u64,
    /// The server's incarnation when this connection was opened. If the incarnation has changed
    /// since then, the server has terminated the connection.
    incarnation: u64,
    stream: DuplexStream,
    /// Number of bytes to send before the connection is cut.
    bytes_until_cut: usize,
    input: BytesMut,
    /// The end of the WAL that has been sent.
    sent: Lsn,
    /// Whether the outbox table has been described on this connection.
    described: bool,
    /// The snapshot that the open transaction uses.
    snapshot: Option<Snapshot>,
}

/// The connection has been closed or cut.
struct ConnectionEnded;

type WalsenderResult<T> = Result<T, ConnectionEnded>;

impl Walsender {
    async fn run(mut self) {
        let shared = self.shared.clone();
        let number = self.number;
        let _ = self.serve().await;
        let mut world = shared.lock();
        if world.database.active == Some(number) {
            world.database.active = None;
        }
    }

    async fn serve(&mut self) -> WalsenderResult<()> {
        loop {
            let query = self.query().await?;
            if query == "IDENTIFY_SYSTEM" {
                let (timeline, end) = {
                    let world = self.shared.lock();
                    (world.database.timeline, world.database.end)
                };
                let row = [SYSTEM_ID, &timeline.to_string(), &end.to_string(), "sim"];
                self.send_row(&row).await?;
            } else if query.starts_with("TIMELINE_HISTORY") {
                let history: String = {
                    let world = self.shared.lock();
                    let line = |switch: &crate::delivery::checkpoint::Switch| {
                        format!("{}\t{}\tno recovery target\n", switch.timeline, switch.at)
                    };
                    world.database.history.iter().map(line).collect()
                };
                self.send_row(&["history", &history]).await?;
            } else if query == SERVER_PROCESS_QUERY {
                let postmaster_start = self.incarnation.to_string();
                self.send_row(&["1", &postmaster_start]).await?;
            } else if query.starts_with("START_REPLICATION") {
                return self.replicate(&query).await;
            } else if query.starts_with("CREATE_REPLICATION_SLOT") {
                self.make_snapshot().await?;
            } else if let Some(snapshot) = self.snapshot.take() {
                self.copy(&query, snapshot).await?;
            } else {
                self.done().await?;
            }
        }
    }

    /// Creates a temporary slot, and with it a snapshot for the open transaction.
    async fn make_snapshot(&mut self) -> WalsenderResult<()> {
        self.pause(100..20_000).await?;
        let made = {
            let mut world = self.shared.lock();
            (!world.chance(3)).then(|| world.snapshot())
        };
        self.pause(100..5000).await?;
        match made {
            Some(snapshot) => {
                let snapshot_lsn = snapshot.snapshot_lsn.to_string();
                self.snapshot = Some(snapshot);
                self.send_row(&["temporary", &snapshot_lsn]).await
            }
            None => {
                let error = b"SERROR\0VERROR\0C55P03\0Mcanceling statement due to lock timeout\0\0";
                self.send(b'E', error).await?;
                self.send(b'Z', b"E").await
            }
        }
    }

    /// Sends the rows of a snapshot. `query` has the form `COPY (SELECT columns FROM ... WHERE
    /// ("id") > ('1') ...) TO STDOUT`.
    async fn copy(&mut self, query: &str, snapshot: Snapshot) -> WalsenderResult<()> {
        let columns = query
            .split_once("SELECT ")
            .and_then(|(_, rest)| rest.split_once(" FROM "));
        let columns: Vec<_> = columns.expect("columns").0.split(", ").collect();
        let after = query.split_once(r#"("id") > ('"#);
        let after = after.and_then(|(_, rest)| rest.split_once('\''));
        let after = after.map_or(0, |(id, _)| id.parse().expect("an id"));
        let (rows, pause_max) = {
            let mut world = self.shared.lock();
            // Some copies are so slow that a fault is likely to interrupt them.
            let pause_max = if world.dice.bool() { 300 } else { 30_000 };
            (world.copy(snapshot, after), pause_max)
        };
        self.send(b'H', &[0; 3]).await?;
        for event in &rows {
            let [id, topic, key, payload] = row(event);
            let value = |column: &&str| match *column {
                r#""id""# => id.as_str(),
                r#""aggregatetype""# => &topic,
                r#""aggregateid""# => &key,
                r#""payload""# => &payload,
                column => panic!("column {column}"),
            };
            let values: Vec<_> = columns.iter().map(value).collect();
            self.send(b'd', format!("{}\n", values.join("\t")).as_bytes())
                .await?;
            self.pause(0..pause_max).await?;
        }
        self.send(b'c', b"").await?;
        self.done().await
    }

    /// Waits for a random number of microseconds. Returns an error if the server has crashed in the
    /// meantime.
    async fn pause(&mut self, micros: std::ops::Range<u64>) -> WalsenderResult<()> {
        let pause = self.shared.lock().dice.u64(micros);
        sleep(Duration::from_micros(pause)).await;
        match self.shared.lock().database.incarnation == self.incarnation {
            true => Ok(()),
            false => Err(ConnectionEnded),
        }
    }

    async fn replicate(&mut self, query: &str) -> WalsenderResult<()> {
        let from = query.split(' ').find_map(|word| word.parse().ok());
        let from: Lsn = from.expect("an LSN");
        let acquired = {
            let mut world = self.shared.lock();
            let free = world.database.active.is_none();
            let start = world.database.confirmed.max(from);
            if free {
                world.database.active = Some(self.number);
                world.database.streamed_from = start;
            }
            free.then_some(start).ok_or(())
        };
        let start = match acquired {
            Ok(start) => start,
            Err(()) => {
                let error = b"SERROR\0VERROR\0C55006\0Mslot is active for PID 1\0\0";
                return self.send(b'E', error).await;
            }
        };
        self.send(b'W', &[0, 0, 0]).await?;
        self.sent = start;
        let mut next = {
            let world = self.shared.lock();
            let skipped = |transaction: &&Transaction| transaction.commit < start;
            world.database.log.iter().take_while(skipped).count()
        };
        let mut idle_at = start;
        loop {
            self.process_messages(Duration::ZERO).await?;
            let (transaction, end, active, reply, pause) = {
                let mut world = self.shared.lock();
                let reply = world.chance(5);
                let pause = world.dice.u64(0..300);
                (
                    world.database.log.get(next).cloned(),
                    world.database.end,
                    world.database.active == Some(self.number),
                    reply,
                    pause,
                )
            };
            if !active {
                return Err(ConnectionEnded);
            }
            match transaction {
                Some(transaction) => {
                    self.transaction(&transaction).await?;
                    next += 1;
                    idle_at = transaction.end;
                    if reply {
                        self.keepalive(self.sent, true).await?;
                    }
                }
                None if end > idle_at || reply => {
                    idle_at = end;
                    self.sent = self.sent.max(end);
                    self.keepalive(end, reply).await?;
                }
                None => {
                    let changed = self.shared.changed.clone();
                    tokio::select! {
                        () = changed.notified() => {}
                        processed = self.process_messages(Duration::from_millis(50)) => processed?,
                    }
                }
            }
            sleep(Duration::from_micros(pause)).await;
        }
    }

    async fn transaction(&mut self, transaction: &Transaction) -> WalsenderResult<()> {
        let commit = transaction.commit.0.to_be_bytes();
        let time = transaction.time.to_be_bytes();
        let xid = transaction.xid.to_be_bytes();
        self.sent = self.sent.max(transaction.commit);
        self.shared.lock().database.has_sent = true;
        self.data(&[b"B", &commit[..], &time, &xid].concat())
            .await?;
        if !transaction.events.is_empty() && !std::mem::replace(&mut self.described, true) {
            self.data(&relation()).await?;
        }
        for event in &transaction.events {
            self.data(&insert(&row(event))).await?;
            if self.shared.lock().chance(3) {
                self.keepalive(transaction.commit, true).await?;
            }
            self.process_messages(Duration::ZERO).await?;
        }
        let end = transaction.end.0.to_be_bytes();
        self.sent = self.sent.max(transaction.end);
        self.data(&[b"C\0", &commit[..], &end, &time].concat())
            .await
    }

    async fn data(&mut self, message: &[u8]) -> WalsenderResult<()> {
        let head = [&b"w"[..], &[0; 24]].concat();
        self.send(b'd', &[&head, message].concat()).await
    }

    async fn keepalive(&mut self, end: Lsn, reply: bool) -> WalsenderResult<()> {
        let body = [&b"k"[..], &end.0.to_be_bytes(), &[0; 8], &[u8::from(reply)]];
        self.send(b'd', &body.concat()).await
    }

    async fn send_row(&mut self, row: &[&str]) -> WalsenderResult<()> {
        let mut body = u16::try_from(row.len())
            .expect("few")
            .to_be_bytes()
            .to_vec();
        for value in row {
            body.extend(u32::try_from(value.len()).expect("short").to_be_bytes());
            body.extend(value.as_bytes());
        }
        self.send(b'D', &body).await?;
        self.done().await
    }

    /// Sends the messages that complete a statement.
    async fn done(&mut self) -> WalsenderResult<()> {
        self.send(b'C', b"SIM\0").await?;
        self.send(b'Z', b"I").await
    }

    async fn send(&mut self, tag: u8, body: &[u8]) -> WalsenderResult<()> {
        let len = u32::try_from(body.len() + 4).expect("short");
        let message = [&[tag][..], &len.to_be_bytes(), body].concat();
        let part = &message[..message.len().min(self.bytes_until_cut)];
        self.bytes_until_cut -= part.len();
        // A client that waits for Kafka stops reading but still sends messages, which must be
        // processed.
        let mut rest = part;
        while !rest.is_empty() {
            match timeout(Duration::from_millis(20), self.stream.write(rest)).await {
                Ok(Ok(count)) => rest = &rest[count..],
                Ok(Err(_)) => return Err(ConnectionEnded),
                Err(_) => self.process_messages(Duration::ZERO).await?,
            }
        }
        if self.bytes_until_cut == 0 {
            Err(ConnectionEnded)
        } else {
            Ok(())
        }
    }

    /// Processes the client's messages. Waits at most `within` for one to arrive.
    async fn process_messages(&mut self, within: Duration) -> WalsenderResult<()> {
        match timeout(within, self.stream.read_buf(&mut self.input)).await {
            Ok(Ok(1..)) => {}
            Ok(_) => return Err(ConnectionEnded),
            Err(_) => return Ok(()),
        }
        while let Some((tag, body)) = self.next_message() {
            match (tag, body.first()) {
                (b'd', Some(b'r')) => {
                    let flushed: [u8; 8] = body[9..17].try_into().expect("a status update");
                    let lsn = Lsn(u64::from_be_bytes(flushed));
                    self.shared.lock().confirm(self.number, lsn, self.sent);
                }
                (b'c', _) => {
                    self.send_end().await?;
                    return Err(ConnectionEnded);
                }
                _ => return Err(ConnectionEnded),
            }
        }
        Ok(())
    }

    async fn send_end(&mut self) -> WalsenderResult<()> {
        let end = b"c\0\0\0\x04C\0\0\0\x0eCOPY 0 0\0\0Z\0\0\0\x05I";
        self.stream
            .write_all(end)
            .await
            .map_err(|_| ConnectionEnded)
    }

    async fn query(&mut self) -> WalsenderResult<String> {
        loop {
            if let Some((tag, body)) = self.next_message() {
                if tag != b'Q' {
                    return Err(ConnectionEnded);
                }
                let text = &body[..body.len() - 1];
                return Ok(String::from_utf8_lossy(text).into_owned());
            }
            match self.stream.read_buf(&mut self.input).await {
                Ok(1..) => {}
                _ => return Err(ConnectionEnded),
            }
        }
    }

    fn next_message(&mut self) -> Option<(u8, BytesMut)> {
        let len = self.input.get(1..5)?.try_into().ok()?;
        let len = usize::try_from(u32::from_be_bytes(len)).ok()? + 1;
        (self.input.len() >= len).then_some(())?;
        let message = self.input.split_to(len);
        let tag = message[0];
        Some((tag, BytesMut::from(&message[5..])))
    }
}

fn relation() -> Vec<u8> {
    let columns: [(&str, u32); 4] = [
        ("id", 20),
        ("aggregatetype", 25),
        ("aggregateid", 25),
        ("payload", 25),
    ];
    let mut out = [b"R", &OUTBOX.to_be_bytes()[..], b"public\0outbox\0d\0\x04"].concat();
    for (name, oid) in columns {
        out.push(0);
        out.extend(name.as_bytes());
        out.push(0);
        out.extend(oid.to_be_bytes());
        out.extend([255; 4]);
    }
    out
}

/// Returns the column values of an event's row.
fn row(event: &Event) -> [String; 4] {
    let topic = if is_unroutable(event.id) {
        "no topic"
    } else {
        "order"
    };
    let (id, key) = (event.id.to_string(), event.partition.to_string());
    [id.clone(), topic.to_owned(), key, id]
}

fn insert(values: &[String; 4]) -> Vec<u8> {
    let mut out = [b"I", &OUTBOX.to_be_bytes()[..], b"N\0\x04"].concat();
    for value in values {
        out.push(b't');
        out.extend(u32::try_from(value.len()).expect("short").to_be_bytes());
        out.extend(value.as_bytes());
    }
    out
}
