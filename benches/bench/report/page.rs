//! docs/benchmarks.md.

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

/// The whole page.
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
    page.add("## How it was measured");
    page.add(warm_up());
    page.add(METHOD);
    setting(&mut page, results);
    page.add(AGAIN);
    page.0
}

struct Page(String);

impl Page {
    /// A paragraph, a table or a section, with an empty line after it.
    fn add(&mut self, text: impl Display) {
        let text = text.to_string();
        writeln!(self.0, "{}\n", text.trim_matches('\n')).unwrap();
    }

    fn chart(&mut self, alternative: &str, file: &str) {
        self.add(format!("![{alternative}](benchmarks/{file})"));
    }

    fn when<T>(&mut self, part: &Part<T>) {
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

How fast Walpost carries a backlog, how soon an event arrives, how that changes with the load, and what it costs the
database; beside what the database alone can do and beside other programs.

Back to the [README](../README.md).

What the database alone can do, *the limit*, is `pg_recvlogical` to /dev/null, from the same slot position over the same
socket. Each figure is the median of the rounds, with the least and the most in parentheses. `./dev bench render` makes
this page and its charts of [benchmarks.json](benchmarks.json), which has every round.

PostgreSQL, Kafka, the program under test and the benchmark itself share the cores of one machine. So figures are
lower than on machines of their own, and move from machine to machine; ratios move much less. All that a table compares
was measured in turn in one run.";

const TARGETS: &str = "
## Targets and what was measured

All are judged by the median of the rounds. What keeps Walpost from those that are not reached
stands [further below](#where-a-target-is-not-reached-and-by-what).";

const DRAIN_NOTES: &str = "
*rows/s* is from the first record in the topic to the last. *Of the limit* is the rate as a part of the limit's over
the same link in the same round. Costs are those from the program's start to its last record, so that the start of a
Java virtual machine is in them. *Topic* is the size of its segments on the broker's disk, after the program has stopped.
With exactly-once, records count when their transaction is committed, and they are counted one by one afterwards. Other
programs come over TCP: not every driver knows the unix-domain socket.";

fn drain(page: &mut Page, results: &Results) {
    let Some(part) = &results.drain else { return };
    let data = &part.data;
    page.add("## Drain of a backlog");
    page.chart("Rows a second of each program", "drain.svg");
    for series in summary::distinct(data.drains.iter().map(|drain| &drain.series)) {
        if series == comparison::MORE_ROWS {
            page.add("The same with more rows:");
        }
        page.add(super::backlog(&data.drains, series));
        page.add(tables::comparison(&data.drains, series));
    }
    page.add(DRAIN_NOTES);
    page.when(part);
    page.add("### Memory while the broker does not answer");
    page.chart("Resident memory over the outage", "memory.svg");
    page.add(super::outage(data));
    page.add(
        "The broker is stopped with SIGSTOP: connections stay open, nothing answers. What Walpost may hold then is \
         bounded by\n`window_bytes` (8 MiB), whatever waits in the log.",
    );
}

const LATENCY_NOTES: &str = "
Single-row transactions are due at even distances, and eight sessions commit them. A session that is late does not
leave out or move what is due meanwhile: times *as scheduled* count from when the transaction was due, so that a stall
counts for everything it holds up. The other times count from `clock_timestamp()` in the INSERT. Both end when a
consumer (`fetch.min.bytes=1`) has the record, and have the commit in them, with `fsync` on; the second table says how
much of it that is. Over the unix-domain socket; other programs over TCP. Debezium's settings are those of the drain:
made for throughput, with `poll.interval.ms` and `linger.ms` already small. Set for latency alone, it would be sooner and
burn more CPU while idle.";

fn latency(page: &mut Page, results: &Results) {
    let Some(part) = &results.latency else { return };
    page.add("## Latency");
    page.chart("Percentiles of latency", "latency.svg");
    page.add(tables::latency(&part.data));
    page.add(tables::floors(&part.data));
    page.add(tables::idle(&part.data));
    page.add(LATENCY_NOTES);
    page.when(part);
}

const OUTBOX_NOTES: &str = "
The same events, in transactions of 100, once as rows of a table and once by `walpost.publish` into the log alone. One
session writes them with one statement a transaction, in each round anew; *written in* is how long that takes, with
making the payloads. *Log* is what it puts into the write-ahead log. The limit is sent the same messages, with an empty
publication.";

const BOUNDS_NOTES: &str = "
Seconds for a million rows, medians. *Runs* is user and system time; *waits for a processor* is what the kernel says of
threads that could run and had none (`/proc/PID/task/TID/schedstat`). What is left of the walsender's time it sleeps:
until its reader has emptied the socket, or on the disk. Nothing is faster than what the walsender runs; that is the whole
of the limit. All processes together have no more than the machine's processors.";

fn growth(page: &mut Page, results: &Results) {
    let Some(part) = &results.growth else { return };
    page.add("## How it grows");
    page.add(
        "One thing at a time is made larger, over the unix-domain socket. What is not said is as in the drain above. \
         The payloads\nof given size are text that does not compress. *Log* is what writing the rows put into the \
         write-ahead log. Where \
         topics are many, each has one partition.",
    );
    for (series, title, what) in SERIES {
        page.add(format!("### {title}"));
        page.chart(title, &charts::file_of_series(series));
        page.add(tables::growth(&part.data, series, what));
    }
    page.add(
        "PostgreSQL decodes a transaction whole before it sends its first row, and what it can't hold in memory it \
         writes to disk.\nThat time is in *start to last record*, for Walpost as for the limit, and not in rows/s. \
         Where one look at the topic found most\nof the records, there is no rate (–).",
    );
    page.add("### A table, or the log alone");
    page.chart(
        "Events in a table and in the log alone",
        &charts::file_of_series(growth::OUTBOX),
    );
    page.add(tables::outbox(&part.data));
    page.add(OUTBOX_NOTES);
    page.add("### What bounds a drain");
    page.add(tables::bounds(&part.data));
    page.add(BOUNDS_NOTES);
    page.when(part);
}

fn profile(page: &mut Page, results: &Results) {
    let Some(part) = &results.profile else { return };
    page.add("### What Walpost itself spends a drain on");
    page.chart("Flame graph of Walpost in a drain", "profile.svg");
    page.add(tables::profile(&part.data));
    page.add(
        "Each function stands above the one that called it, as wide as its part of Walpost's samples (perf, user and kernel).\n\
         Frames of the standard library and of the runtime between them are left out, as is what is in fewer than 0.2 % of the\n\
         samples. The first row above the bottom are the threads.",
    );
    page.when(part);
}

const BEHIND: &str = "
- **Over the unix-domain socket**: the kernel keeps each send of the walsender in a buffer of its own, so that some 170 rows
  fill the socket, and the two wake each other a few thousand times a second. TCP gathers them: 2,000,000 rows come faster over
  TCP than pg_recvlogical has them over the unix-domain socket, for less of Walpost's CPU.
- **100 partitions**: most of what 500,000 rows cost the broker is once, not per row: it makes the files of 100 partitions at
  their first record. That is 2 s of its CPU, in the time that a drain into few partitions takes as a whole. The drain below is of
  2,000,000 rows.
- **1 KB, and 1,000,000 rows in a transaction**: with the latter walsender, Walpost and broker have both processors all the time,
  with the former each of them waits for one of the two, and the walsender for the socket.
- **10 KB**: LZ4 takes more than half of the CPU, for text that it makes 6 % shorter. Without it (`compression.type = none`
  in `[kafka]`) the rate is reached, and a row costs less than half.
- **Events in messages**: the walsender does half of the work that it does for a table, so what the unix-domain socket costs
  weighs more. Over TCP they reach the target.
- **1,000 topics**: while librdkafka makes statistics, it keeps two histograms for each topic, some 20 KB, and copies them
  for each document. With `statistics.interval.ms = 0` it has neither, and of the `walpost_kafka_...` metrics only
  `walpost_kafka_up` is left.
- **Latency of exactly-once**: a checkpoint takes four requests, one after the other: AddPartitionsToTxn, Produce for the
  events, Produce for the checkpoint, EndTxn. The first three take 3 to 4 ms on this machine, EndTxn 0.6 ms, and the broker's
  transaction markers 2 ms, after which a consumer sees the records. The events of the next transaction wait for them.
- **1.7 CPU s a million**: reached over TCP with 2,000,000 rows. Over the unix-domain socket, the wake-ups above are the
  difference.";

fn tuned(page: &mut Page, results: &Results) {
    let Some(part) = &results.tuned else { return };
    page.add("### Where a target is not reached, and by what");
    page.add(BEHIND);
    page.add(tables::growth(&part.data, tuned::SERIES, "drain"));
    page.add(tables::bounds(&part.data));
    page.when(part);
}

fn forms(page: &mut Page, results: &Results) {
    let Some(part) = &results.forms else { return };
    page.add("## What the form of a record costs");
    page.add(
        "The same backlog with `key_format` and `value_format` of that name (`bytes`: the value alone), and with `expand_payload`. \
         What\nConnect's converters write is longer, with schemas several times as long: Kafka has more to write as well.",
    );
    page.chart(
        "Form of the records",
        &charts::file_of_series(forms::SERIES),
    );
    page.add(tables::growth(&part.data, forms::SERIES, "form"));
    page.when(part);
}

fn database(page: &mut Page, results: &Results) {
    let Some(part) = &results.database else {
        return;
    };
    page.add("## What it costs the database");
    page.chart(
        "CPU seconds of the server for a million events",
        "database.svg",
    );
    page.add(tables::database(&part.data));
    let events = part.data.first().map_or(0, |cost| cost.events);
    page.add(format!(
        "{WRITERS} sessions commit {} events, each in a transaction of its own, while they are carried; all figures \
         are scaled to a\nmillion. *Polling* is the usual other way to carry an outbox: one session takes {} rows at a \
         time with\n`SELECT ... ORDER BY id LIMIT {} FOR UPDATE SKIP LOCKED`, sends them to the same Kafka, waits for \
         its acknowledgement, and\nDELETEs them or UPDATEs `sent_at` (with a partial index on what is not sent); it \
         rests {} ms when it finds none.\n*Nothing reads* is what writing alone costs; making the payloads is part of \
         it, and the same for all. autovacuum is off:\nVACUUM is run once afterwards, and stands apart. \
         `synchronous_commit` is off for the writers alone: waiting for the disk\ncosts no CPU. Walpost leaves rows \
         where they are; drop partitions to be rid of them. With *no table* the sessions call\n`walpost.publish`, \
         which leaves nothing behind.",
        whole(events as f64),
        poller::BATCH,
        poller::BATCH,
        poller::REST.as_millis(),
    ));
    page.when(part);
}

fn shards(page: &mut Page, results: &Results) {
    let Some(part) = &results.shards else { return };
    page.add("### Many databases with a backlog");
    page.add(
        "One process with a pipeline for each of many PostgreSQL servers, all of which have a backlog, and with one pipeline for one\n\
         server with as many rows. The one has a topic of 3 partitions, the many a topic of one partition each. *At half*: when half\n\
         of all records were in Kafka, what the pipeline that was furthest behind had of the average, and the one in front.",
    );
    page.add(tables::shards(&part.data));
    page.when(part);
}

fn many(page: &mut Page, results: &Results) {
    let Some(part) = &results.tables else { return };
    page.add("## Many tables, many pipelines");
    page.add(
        "The same rows in one outbox table, or spread over many in schemas of their own that share a slot; each transaction \
         writes into\nanother one. All tables are in the publication, however many are written to.",
    );
    page.add(tables::growth(
        &part.data.drains,
        bench_tables::SERIES,
        "tables",
    ));
    page.add(super::added(&part.data));
    page.add(tables::fleets(&part.data));
    page.add(
        "A walsender decodes the whole WAL, whatever its publication has: with a slot for each table, rows of others cost it \
         as many\ntimes. *Rows of others* go into a table that is no outbox. The last line is of pipelines while nothing is written.",
    );
    page.when(part);
}

fn warm_up() -> String {
    format!(
        "PostgreSQL and Kafka are started for the run alone, from empty folders. Then Walpost drains a backlog of {} \
         rows\n{} to {} times, which is not counted: until the broker's CPU has twice in a row not fallen by 10 % or \
         more from one drain\nto the next. The broker's Java virtual machine compiles what it runs often; until it \
         has, it takes several times the CPU, and\nfigures say more about it than about the programs.",
        whole(WARM_UP_ROWS as f64),
        WARM_UPS.start(),
        WARM_UPS.end(),
    )
}

const METHOD: &str = "
- Rounds are interleaved, and each begins with another program, so that a machine that slows down does so for all.
- A backlog is written once, in front of a slot that never moves; each drain reads it through a copy of that slot, into
  a topic of its own. So all read the same log from the same place.
- The end offsets of the topic are read every 10 ms, of many topics every 100 ms. The rate leaves out what was there at the first look that found
  something. The limit is counted in bytes written, in the same way.
- Before latency is counted, each program has been through all of it once: what many small requests take, the broker's JVM
  has not compiled for a drain.
- CPU is user and system time from /proc, in steps of 10 ms: of the program with its children, of the walsender, of the
  broker. Peak RSS is VmHWM.
- After a drain Walpost is stopped, and the records are counted again: one too many or too few ends the benchmark.
- Debezium runs on Kafka Connect in one Java virtual machine, with the options of Kafka's own start script, and tuned for
  throughput; [benches/debezium](../benches/debezium) has all its settings. It also adds four headers to each record.";

fn setting(page: &mut Page, results: &Results) {
    page.add("### Settings");
    page.add(format!(
        "PostgreSQL, beside its defaults: `wal_level = logical`, `autovacuum = off`, and\n\n```text\n{POSTGRES_SETTINGS}```"
    ));
    page.add(format!(
        "`synchronous_commit` is on where latency is measured. Kafka: one broker, its own controller, replication \
         factor 1, `{}`.\nProducers have `acks=all`. Walpost has its defaults, but for what the command line above \
         says.",
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

const AGAIN: &str = "
## Run it again

    ./dev bench                     # drain, latency and database: some minutes
    ./dev bench all --peers         # everything, beside Debezium, which is downloaded: an hour and a half
    ./dev bench drain --rows 2000000 --rounds 5
    ./dev bench drain -X compression.type=zstd
    ./dev bench all --quick         # whether it works: the figures mean nothing
    ./dev bench all --peers --write # puts what was measured into this page
    ./dev bench render              # this page again, of benchmarks.json

Nothing else should run meanwhile. Another program joins with `--peer NAME='COMMAND'`; `./dev bench --help` says what it
finds in its environment, and [benches/debezium](../benches/debezium) is an example.";
