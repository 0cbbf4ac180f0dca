//! Generates docs/benchmarks.md.

use std::fmt::{Display, Write as _};

use super::numbers::whole;
use super::table::Table;
use super::{SERIES, charts, summary, tables, targets};
use crate::bed::{BROKER_JVM, POSTGRES_SETTINGS, WARM_UP_ROWS, WARM_UPS};
use crate::comparison;
use crate::database::{WRITERS, poller};
use crate::forms;
use crate::growth;
use crate::machine::{Machine, Versions};
use crate::results::{Part, Results};
use crate::tables as bench_tables;
use crate::tuned;

/// Returns the contents of docs/benchmarks.md.
pub(super) fn render(results: &Results) -> String {
    let mut page = Page(String::new());
    page.add(INTRODUCTION);
    page.add(TARGETS);
    page.add(targets::table(results));
    drain(&mut page, results);
    latency(&mut page, results);
    growth(&mut page, results);
    profile(&mut page, results);
    tuned(&mut page, results);
    forms(&mut page, results);
    database(&mut page, results);
    many(&mut page, results);
    shards(&mut page, results);
    page.add("## Method");
    page.add(warm_up());
    page.add(METHOD);
    setting(&mut page, results);
    page.add(RUN_IT_AGAIN);
    page.0
}

struct Page(String);

impl Page {
    /// Appends a paragraph, a table or a section, followed by an empty line.
    fn add(&mut self, text: impl Display) {
        let text = text.to_string();
        writeln!(self.0, "{}\n", text.trim_matches('\n')).unwrap();
    }

    fn chart(&mut self, alternative: &str, file: &str) {
        self.add(format!("![{alternative}](benchmarks/{file})"));
    }

    /// Appends a sentence that states when a part was measured and with which command.
    fn measured_on<T>(&mut self, part: &Part<T>) {
        let Part { date, minutes, .. } = part;
        let arguments = part.arguments.join(" ");
        let command = format!("./dev bench {arguments}");
        self.add(format!(
            "Measured on {date} UTC with `{}`; this part took {minutes:.1} minutes.",
            command.trim_end()
        ));
    }
}

const INTRODUCTION: &str = "
# Benchmarks

This page shows how fast Walpost delivers a backlog, how quickly an event arrives, how both depend on the load, and how
much CPU time delivery costs the database server. For comparison, the page also shows the rate of the database alone and
the figures of other programs.

Back to the [README](../README.md).

*The limit* is the rate of the database alone, measured with `pg_recvlogical`, which starts at the same slot position,
uses the same kind of connection, and writes to /dev/null. Each figure is the median of the rounds, with the minimum and
maximum in parentheses. `./dev bench render` generates this page and its charts from [benchmarks.json](benchmarks.json),
which contains every round.

PostgreSQL, Kafka, the program under test and the benchmark itself share the cores of one machine. Absolute figures are
therefore lower than on separate machines, and vary between machines; ratios vary much less. All figures in a table were
measured in the same run, one after another.";

const TARGETS: &str = "
## Targets and what was measured

The median of the rounds determines whether a target is met. [Why some targets are not
met](#why-some-targets-are-not-met) explains why Walpost misses some of the targets.";

const DRAIN_NOTES: &str = "
*rows/s* is measured from the first record in the topic to the last. *Of the limit* is the rate divided by the rate of
`pg_recvlogical` over the same kind of connection in the same round. CPU time is measured from the program's start to
its last record, and includes the startup of a Java virtual machine. *Topic* is the size of the topic's segments on the
broker's disk after the program has stopped. With exactly-once, a record counts as delivered when its transaction has
been committed; after the drain, the records are also counted one by one. Other programs connect over TCP, because not
every driver supports Unix-domain sockets.";

fn drain(page: &mut Page, results: &Results) {
    let Some(part) = &results.drain else { return };
    let data = &part.data;
    page.add("## Drain of a backlog");
    page.chart("Rows per second for each program", "drain.svg");
    for series in summary::distinct(data.drains.iter().map(|drain| &drain.series)) {
        if series == comparison::MORE_ROWS {
            page.add("The measurement was repeated with more rows:");
        }
        page.add(super::describe_backlog(&data.drains, series));
        page.add(tables::comparison(&data.drains, series));
    }
    page.add(DRAIN_NOTES);
    page.measured_on(part);
    page.add("### Memory while the broker does not respond");
    page.chart("Resident memory during the outage", "memory.svg");
    page.add(super::describe_outage(data));
    page.add(
        "The broker is stopped with SIGSTOP: connections stay open, but the broker does not respond. `window_bytes` (8 MiB)\n\
         limits the records in Walpost's memory, however much WAL is waiting.",
    );
}

const LATENCY_NOTES: &str = "
Single-row transactions are scheduled at equal intervals and committed by eight sessions. A session that falls behind
still commits every transaction. Times *as scheduled* are measured from the moment at which the transaction was due, so
that a stall affects the time of every transaction that it delays. The other times are measured from `clock_timestamp()`
in the INSERT. All times are measured until a consumer (`fetch.min.bytes=1`) receives the record, and include the
commit, with `fsync` on. The second table shows how long the commit takes. Walpost connects over the Unix-domain socket,
and other programs connect over TCP. Debezium has the same settings here as in [Drain of a backlog](#drain-of-a-backlog).
These settings are tuned for throughput, although `poll.interval.ms` and `linger.ms` are already small. Debezium would
have a lower latency if it were tuned only for latency, but would use more CPU while idle.";

fn latency(page: &mut Page, results: &Results) {
    let Some(part) = &results.latency else { return };
    page.add("## Latency");
    page.chart("Percentiles of latency", "latency.svg");
    page.add(tables::latency(&part.data));
    page.add(tables::floors(&part.data));
    page.add(tables::idle(&part.data));
    page.add(LATENCY_NOTES);
    page.measured_on(part);
}

const OUTBOX_NOTES: &str = "
The same events, in transactions of 100, are written once as rows of a table and once with `walpost.publish` as WAL
messages. In each round, one session writes the events again, with one statement per transaction; *written in* is how
long this takes, including generating the payloads. *WAL* is the amount of WAL generated. To measure the limit,
`pg_recvlogical` receives the same messages, with an empty publication.";

const BOUNDS_NOTES: &str = "
Figures are medians, in seconds per million rows. *Runs* is user and system time; *waits for a processor* is the time in
which threads were runnable but had no processor, according to the kernel (`/proc/PID/task/TID/schedstat`). For the rest
of the time, the walsender sleeps until its reader has emptied the socket, or until the disk responds. A drain takes at
least as long as the walsender runs. While pg_recvlogical reads the slot, the walsender runs almost all of the time. All
processes share the machine's processors.";

fn growth(page: &mut Page, results: &Results) {
    let Some(part) = &results.growth else { return };
    page.add("## How performance changes with load");
    page.add(
        "Each series varies one parameter, and uses the same values as the drain above for all other parameters. Walpost connects\n\
         over the Unix-domain socket. In the series that varies the payload size, payloads are nearly incompressible text. *WAL*\n\
         is the amount of WAL generated by writing the rows. With 1,000 topics, each topic has one partition.",
    );
    for (series, title, what) in SERIES {
        page.add(format!("### {title}"));
        page.chart(title, &charts::series_file(series));
        page.add(tables::growth(&part.data, series, what));
    }
    page.add(
        "PostgreSQL decodes a whole transaction before it sends the first row, and writes changes that do not fit in memory to\n\
         disk. The time until the first row is sent is included in *start to last record*, both for Walpost and for the measured\n\
         limit, but not in rows/s. A rate is shown as – if the first query that found records in the topic already found at least\n\
         half of them.",
    );
    page.add("### A table, or WAL messages only");
    page.chart(
        "Events in a table and in WAL messages only",
        &charts::series_file(growth::OUTBOX),
    );
    page.add(tables::outbox(&part.data));
    page.add(OUTBOX_NOTES);
    page.add("### What limits a drain");
    page.add(tables::bounds(&part.data));
    page.add(BOUNDS_NOTES);
    page.measured_on(part);
}

fn profile(page: &mut Page, results: &Results) {
    let Some(part) = &results.profile else { return };
    page.add("### Where Walpost spends CPU time during a drain");
    page.chart("Flame graph of Walpost in a drain", "profile.svg");
    page.add(tables::profile(&part.data));
    page.add(
        "Each function is drawn above its caller, and its width is its share of Walpost's samples (perf, user and kernel).\n\
         Frames of the standard library and the async runtime are left out, and so are functions in fewer than 0.2 % of the\n\
         samples. The row above the bottom one shows the threads.",
    );
    page.measured_on(part);
}

const MISSED_TARGETS: &str = "
- **Over the Unix-domain socket**: the kernel keeps each write of the walsender in a separate buffer, so only about 170
  rows fit into the socket, and the walsender and its reader wake each other a few thousand times a second. TCP combines
  the writes. Over TCP, Walpost delivers 2,000,000 rows faster than pg_recvlogical reads them over the Unix-domain
  socket, and uses less CPU.
- **100 partitions**: most of the broker's CPU time for 500,000 rows is a fixed cost, because the broker creates the
  files of each of the 100 partitions when the first record arrives. Creating these files takes 2 s of CPU time. With
  few partitions, the entire drain takes only slightly longer than 2 s. The table below therefore shows a drain of
  2,000,000 rows.
- **1 KB, and 1,000,000 rows in a transaction**: with 1,000,000 rows in a transaction, the walsender, Walpost and the
  broker keep both processors busy. With payloads of 1 KB, the walsender, Walpost and the broker each wait for a
  processor, and the walsender also waits for the socket.
- **10 KB**: LZ4 takes more than half of Walpost's CPU time, and compresses the text by only 6 %. Without compression
  (`compression.type = none` in `[kafka]`), Walpost meets the target rate, and a row costs less than half as much CPU
  time.
- **Events in messages**: the walsender does only half of the work that it does for a table, so the cost of the
  Unix-domain socket matters more. Over TCP, Walpost meets the target.
- **1,000 topics**: while statistics are enabled, librdkafka keeps two histograms per topic (about 20 KB), and copies
  them for each report. With `statistics.interval.ms = 0`, librdkafka keeps no histograms, and `walpost_kafka_up` is the only
  remaining `walpost_kafka_...` metric.
- **Latency of exactly-once**: a checkpoint takes four sequential requests (AddPartitionsToTxn, Produce for the events,
  Produce for the checkpoint, and EndTxn). The first three requests take 3 to 4 ms on this machine, EndTxn takes 0.6 ms,
  and the broker then takes 2 ms to write the transaction markers, after which a consumer sees the records. The events
  of the next transaction have to wait for the markers of the previous one.
- **1.7 CPU s per million rows**: Walpost meets this target over TCP with 2,000,000 rows. Over the Unix-domain socket,
  Walpost misses the target because the walsender and Walpost wake each other too often.";

fn tuned(page: &mut Page, results: &Results) {
    let Some(part) = &results.tuned else { return };
    page.add("### Why some targets are not met");
    page.add(MISSED_TARGETS);
    page.add(tables::growth(&part.data, tuned::SERIES, "drain"));
    page.add(tables::bounds(&part.data));
    page.measured_on(part);
}

fn forms(page: &mut Page, results: &Results) {
    let Some(part) = &results.forms else { return };
    page.add("## Cost of the record formats");
    page.add(
        "The same backlog is delivered with `key_format` and `value_format` set to each format in turn (for `bytes`, only\n\
         `value_format`), and with `expand_payload`. Records in the formats of Kafka Connect's converters are longer (several\n\
         times as long with schemas), so the broker also writes more data.",
    );
    page.chart("Format of the records", &charts::series_file(forms::SERIES));
    page.add(tables::growth(&part.data, forms::SERIES, "form"));
    page.measured_on(part);
}

fn database(page: &mut Page, results: &Results) {
    let Some(part) = &results.database else {
        return;
    };
    page.add("## Cost for the database");
    page.chart(
        "CPU seconds of the server per million events",
        "database.svg",
    );
    page.add(tables::database(&part.data));
    let events = part.data.first().map_or(0, |cost| cost.events);
    page.add(format!(
        "{WRITERS} sessions commit {} events, each in its own transaction, while the events are delivered; all figures are scaled to\n\
         a million events. *Polling* is the usual alternative for delivering an outbox: one session selects {} rows at a time\n\
         (`ORDER BY id LIMIT {} FOR UPDATE SKIP LOCKED`), sends them to the same Kafka broker, waits for the acknowledgement,\n\
         and deletes them or sets `sent_at` (with a partial index on unsent rows); if it finds no rows, it pauses for {} ms.\n\
         The row *nothing reads* shows the cost of writing alone, including the cost of generating the payloads, which is the\n\
         same in every case. autovacuum is off. VACUUM runs once afterwards, and is shown separately. The writers commit with\n\
         `synchronous_commit = off`, which saves time but does not affect the comparison, because a session that waits for the\n\
         disk uses no CPU. Walpost leaves the rows in the table; you can remove them by dropping partitions. With *no table*, the\n\
         sessions call `walpost.publish`, which leaves nothing to remove.",
        whole(events as f64),
        poller::BATCH_ROWS,
        poller::BATCH_ROWS,
        poller::EMPTY_POLL_PAUSE.as_millis(),
    ));
    page.measured_on(part);
    page.add(PROTECTION);
}

/// A section with figures that were measured by hand.
const PROTECTION: &str = "
### What protection against attacks costs the database

| operation                                                     | without, ms | with, ms | ratio |
| ------------------------------------------------------------- | ----------: | -------: | ----: |
| read 1,000 rows, after `walpost.lock_and_examine`             |         9.4 |     24.9 |   2.7 |
| delete 5,000 rows, after `walpost.lock_and_examine`           |        60.8 |     91.3 |   1.6 |
| write a position to `walpost.slot_state`, after `examine.sql` |        0.18 |      2.8 |    16 |
| insert an event, with the CHECKs on the length of its columns |        0.28 |     0.28 |   1.0 |
| insert 1,000 events in one statement, with the same CHECKs    |        28.7 |     48.0 |   1.6 |

All figures are transaction durations. Walpost examines a table once in each transaction that reads or deletes its rows.
The examination takes 9.7 ms, or 13.5 ms with 33 partitions. Walpost writes its position at most ten times a second
while events arrive, and less often otherwise. Nearly all of the cost of the CHECKs is due to the regular expression on
`aggregatetype`.

These figures were measured by hand with pgbench on 2026-11-30, not with `./dev bench`. The table compares transactions
with and without the examination, or tables with and without the three CHECKs. PostgreSQL 15 ran with `fsync = off` and
`autovacuum = off`. The outbox belongs to a role other than Walpost's, and contains 50,000 events of 1 KB. Each figure
is the median of 7 rounds, which alternate between the variants in one run. The ratios of single rounds vary by about 15
percent, and for 1,000 events in one statement from 1.1 to 2.1.";

fn shards(page: &mut Page, results: &Results) {
    let Some(part) = &results.shards else { return };
    page.add("### Many databases with a backlog");
    page.add(
        "One process runs a pipeline for each of many PostgreSQL servers with a backlog, or a single pipeline for one server with\n\
         the same total number of rows. The single pipeline has a topic with 3 partitions, and each of the other pipelines has a\n\
         topic with one partition. *At half* compares the slowest and the fastest pipeline with the average at the time when half\n\
         of all records were in Kafka.",
    );
    page.add(tables::shards(&part.data));
    page.measured_on(part);
}

fn many(page: &mut Page, results: &Results) {
    let Some(part) = &results.tables else { return };
    page.add("## Many tables, many pipelines");
    page.add(
        "The same rows are written to one outbox table, or spread over many tables that share a slot. Each table is in its own\n\
         schema, and each transaction writes to a different table than the previous one. All tables are in the publication, even\n\
         if only some are written to.",
    );
    page.add(tables::growth(
        &part.data.drains,
        bench_tables::SERIES,
        "tables",
    ));
    page.add(super::describe_added_tables(&part.data));
    page.add(tables::fleets(&part.data));
    page.add(
        "A walsender decodes all WAL, regardless of its publication: with a slot for each table, every slot's walsender \
         decodes\nthe rows of other tables too. *Rows in other tables* are written to a table that is not an outbox. In the last \
         row, the pipelines are idle.",
    );
    page.measured_on(part);
}

fn warm_up() -> String {
    format!(
        "PostgreSQL and Kafka are started for each run, with empty data directories. As a warm-up, Walpost then drains a backlog\n\
         of {} rows {} to {} times, until the broker's CPU time has fallen by less than 10 % from one drain to the next,\n\
         twice in a row. Until the broker's Java virtual machine has compiled its hot code, the broker uses several times as much\n\
         CPU, which would affect the figures more than the choice of the program under test.",
        whole(WARM_UP_ROWS as f64),
        WARM_UPS.start(),
        WARM_UPS.end(),
    )
}

const METHOD: &str = "
- Rounds are interleaved, and each starts with a different program, so that a slowdown of the machine affects all
  programs.
- Each backlog is written once, after the creation of a slot that is never advanced; each drain reads the backlog
  through a copy of that slot, and writes to its own topic. All drains therefore read the same WAL from the same
  position.
- The end offsets of the topic are queried every 10 ms, or every 100 ms if there are many topics. The rate is measured
  from the first query that finds records, and excludes the records found by that query. The limit is measured in the
  same way, but from the number of bytes that `pg_recvlogical` has written.
- Before latency is measured, each program runs the whole measurement once, because a drain does not make the broker's
  JVM compile the code that handles many small requests.
- CPU is the user and system time of the program and its children, of the walsender, or of the broker. CPU times are
  read from /proc, with a resolution of 10 ms. Peak RSS is VmHWM.
- After a drain, Walpost is stopped and the records are counted again: a missing or extra record aborts the benchmark.
- Debezium runs on Kafka Connect in one Java virtual machine, with the options of Kafka's own start script, and is tuned
  for throughput; [benches/debezium](../benches/debezium) has all its settings. Debezium also adds four headers to each
  record.";

fn setting(page: &mut Page, results: &Results) {
    page.add("### Settings");
    page.add(format!(
        "PostgreSQL uses its defaults, except for `wal_level = logical`, `autovacuum = off`, and the following settings:\n\n```text\n{POSTGRES_SETTINGS}```"
    ));
    page.add(format!(
        "`synchronous_commit` is on when latency is measured. Kafka runs as a single broker, which is also the controller, with \
         replication factor 1 and\n`{}`. Producers use `acks=all`. Walpost uses its defaults, except for the flags in the \
         command lines above.",
        BROKER_JVM.join(" ")
    ));
    let parts = [
        results.drain.as_ref().map(Part::setting),
        results.latency.as_ref().map(Part::setting),
        results.growth.as_ref().map(Part::setting),
        results.forms.as_ref().map(Part::setting),
        results.tuned.as_ref().map(Part::setting),
        results.database.as_ref().map(Part::setting),
        results.tables.as_ref().map(Part::setting),
        results.shards.as_ref().map(Part::setting),
        results.profile.as_ref().map(Part::setting),
    ];
    for (machine, versions) in summary::distinct(parts.into_iter().flatten()) {
        page.add(environment(machine, versions));
    }
}

fn environment(machine: &Machine, versions: &Versions) -> Table {
    let mut table = Table::new(["what", "which"]);
    let memory = format!("{:.0} GB", machine.memory_bytes as f64 / 1e9);
    for (what, which) in [
        (
            "processor",
            format!("{}, {} cores", machine.processor, machine.cores),
        ),
        ("memory", memory),
        ("system", format!("{}, {}", machine.system, machine.kernel)),
        ("Walpost", versions.walpost.clone()),
        ("librdkafka", versions.librdkafka.clone()),
        ("PostgreSQL", versions.postgres.clone()),
        ("Kafka", versions.kafka.clone()),
        ("Java", versions.java.clone()),
        ("Debezium", versions.debezium.clone()),
    ] {
        if !which.is_empty() {
            table.row([what.to_owned(), which]);
        }
    }
    table
}

const RUN_IT_AGAIN: &str = "
## Run the benchmark

    ./dev bench                     # drain, latency and database: a few minutes
    ./dev bench all --peers         # everything, and Debezium, which is downloaded: an hour and a half
    ./dev bench drain --rows 2000000 --rounds 5
    ./dev bench drain -X compression.type=zstd
    ./dev bench all --quick         # checks that the benchmark works; the figures are meaningless
    ./dev bench all --peers --write # writes the results to this page
    ./dev bench render              # generates this page from benchmarks.json

Run nothing else on the machine during a benchmark. To measure another program, use `--peer NAME='COMMAND'`;
`./dev bench --help` lists the environment variables that the command receives, and
[benches/debezium](../benches/debezium) is an example.";
