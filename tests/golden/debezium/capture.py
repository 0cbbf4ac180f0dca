"""Captures the records that the real Debezium creates from rows. `./dev golden debezium` writes them to captured.jsonl.

capture.py TARGET POSTGRES_BIN [GROUP...]    TARGET has kafka/lib, debezium and, for the group traced, opentelemetry/lib, as
                                             ./dev fetches them; without groups, all

lab.jsonl has the same format, and was captured earlier in another environment.

Starts PostgreSQL, Kafka, and a Connect worker with a connector for each case, on separate ports and in a temporary
directory. Records are read as raw bytes from the segments of Kafka's log. Each line of captured.jsonl is a case: the
configuration of its connector, the table definition in PostgreSQL, and for each row the texts of its columns and the
record, or null if Debezium did not deliver one.
"""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PARTITIONS = 6
STRING = "org.apache.kafka.connect.storage.StringConverter"
SIMPLE = "org.apache.kafka.connect.storage.SimpleHeaderConverter"
JSON = "org.apache.kafka.connect.json.JsonConverter"
BYTE_ARRAY = "org.apache.kafka.connect.converters.ByteArrayConverter"
BINARY_DATA = "io.debezium.converters.BinaryDataConverter"


def converter(of, form):
    """Returns the properties of a converter."""
    if form == "json":
        return {f"{of}.converter": JSON, f"{of}.converter.schemas.enable": "false"}
    if form == "json-schema":
        return {f"{of}.converter": JSON, f"{of}.converter.schemas.enable": "true"}
    classes = {"string": STRING, "bytes": BYTE_ARRAY, "binary": BINARY_DATA, "simple": SIMPLE}
    return {f"{of}.converter": classes[form]}


# ---------------------------------------------------------------- the cases

KEYS = "id uuid PRIMARY KEY, aggregatetype text NOT NULL, aggregateid text, type text NOT NULL"
MORE = "tenant text, ts timestamptz, part int"

# Payloads for every table with a JSON or text column.
DOCUMENTS = {
    "object": '{"orderId": 1, "item": "book"}',
    "empty object": "{}",
    "null member": '{"a": null, "b": 1}',
    "only null": '{"a": null}',
    "nested": '{"z": {"b": 1, "a": {"deep": [{"x": "y", "z": [[1.5]]}]}}, "arr": [1, 2, 3], "strs": ["a", "b"]}',
    "empty array member": '{"a": [], "b": {}, "c": 1}',
    "array of objects": '{"o": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]}',
    "array of objects, one null": '{"o": [{"a": 1}, null, {"a": 3}]}',
    "array with null": '{"a": [1, null, 3]}',
    "array of null": '{"a": [null], "b": 1}',
    "array of empty array": '{"a": [[]], "b": 1}',
    "array of arrays": '{"a": [[1, 2], [3], []]}',
    "empty array first": '{"a": [[], [1]]}',
    "array of arrays of null": '{"a": [[1], [null]]}',
    "array of arrays of objects": '{"a": [[{"x": {"y": 1}}]]}',
    "mixed array": '{"a": [1, "x"], "b": 1}',
    "mixed array deep": '{"a": {"b": {"c": [true, "x"]}}, "d": 1}',
    "mixed numbers": '{"a": [1, 2.5]}',
    "mixed integers": '{"a": [1, 3000000000]}',
    "null member in array": '{"o": [{"a": null, "b": 1}]}',
    "members with null": '{"o": [{"a": 1, "b": "x"}, {"a": null, "b": null}]}',
    "array of booleans": '{"a": [true, false]}',
    "top-level array": '[{"a": 1}, {"a": 2}]',
    "top-level empty array": "[]",
    "top-level array of null": "[null]",
    "top-level number": "12",
    "top-level string": '"text"',
    "top-level true": "true",
    "top-level null": "null",
    "decimals": '{"a": 10.00, "b": 1.5, "c": 0.1, "d": -0.25, "e": 123456789.125, "f": 0.001, "g": 0.00099}',
    "exponents": '{"a": 1e-7, "b": 1E3, "c": 1.5e10, "d": 1e22, "e": 1e-5}',
    "zeros": '{"a": -0, "b": 0, "c": -0.0, "d": 0.0}',
    "large doubles": '{"a": 10000000.0, "b": 9999999.0, "c": 1.7976931348623157e308, "d": 0.1234567890123456789}',
    "int32 border": '{"a": 2147483647, "b": 2147483648, "c": -2147483648, "d": -2147483649}',
    "int64 border": '{"a": 9223372036854775807, "b": -9223372036854775808}',
    "beyond int64": '{"a": 9223372036854775808}',
    "beyond double": '{"a": 1e400}',
    "outside the BMP": '{"\U0001f418": "\U0001f418 \u20ac \u00fc", "esc": "\\ud83d\\udc18"}',
    "escapes": '{"a": "q\\" b\\\\ s\\/ n\\n t\\t r\\r f\\f b\\b u\\u001f d\u007f e\\u00e9 l\u2028"}',
    "empty strings": '{"a": "", "b": " "}',
    "empty name": '{"": 1, "b": 2}',
    "dots and spaces": '{"a.b": {"c d": 1}, "$e-f": {"g": [{"h": 1}]}}',
    "long text": '{"a": "' + "x" * 300 + '"}',
    "spaces": ' {"a" :  1 , "b":[ 1,2 ] } ',
}
# Additional payloads for text columns.
TEXTS = {
    "no JSON": "plain text",
    "begins like an object": "{no json",
    "begins like an array": "[1, 2",
    "empty string": "",
    "blank": "  ",
    "controls": "a\tb\nc\rd\u0001e\"f\\g/h\u20ac\U0001f418",
    "twice the same member": '{"a": 1, "b": 2, "a": "x"}',
    "lone surrogate": '{"a": "\\ud83d"}',
    "something behind": '{"a": 1} x',
    "comment": '{"a": 1 /* c */}',
    "leading zero": '{"a": 01}',
}


def quoted(text):
    return "NULL" if text is None else "'" + text.replace("'", "''") + "'"


def documents(texts):
    rows = {name: {"payload": text} for name, text in {**DOCUMENTS, **texts}.items()}
    rows["NULL payload"] = {"payload": None, "tenant": "acme"}
    rows["NULL key"] = {"aggregateid": None, "payload": "{}", "tenant": "acme", "part": "2"}
    rows["empty key"] = {"aggregateid": "", "payload": '{"a": 1}', "tenant": "\U0001f418 \u00fc \" \\"}
    rows["key with quotes"] = {"aggregateid": "a\"b\\c\n\u20ac\U0001f418", "payload": '{"a": 1}', "tenant": ""}
    return rows


# One column for each type, with its values.
TYPES = {
    "bool": ["true", "false"],
    "int2": ["32767", "-1"],
    "int4": ["2147483647", "-5"],
    "int8": ["9007199254740993", "-9223372036854775808"],
    "oid": ["4294967295", "1"],
    "float4": ["1.5", "0.1"],
    "float8": ["0.1", "1e-7"],
    "numeric": ["10.00", "-12345678901234567890.5"],
    "numeric(10,2)": ["10.5", "-0.01"],
    "numeric(5)": ["12345", "-7"],
    "text": ["a\"b\\c\u20ac\U0001f418", ""],
    "varchar(20)": ["v", "12"],
    "char(4)": ["ab", "abcd"],
    "uuid": ["00000000-0000-4000-8000-000000000001", "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"],
    "json": ['{"b": 1, "a": [10.00]}', "[]"],
    "jsonb": ['{"b": 1, "a": [10.00]}', '"x"'],
    "bytea": ["\\x00ff107b", "\\x"],
    "date": ["2024-02-29", "1969-12-31"],
    "time": ["12:34:56.789654", "00:00:00"],
    "time(3)": ["12:34:56.789", "23:59:59"],
    "timetz": ["12:34:56.789+02", "00:00:00+00"],
    "timestamp": ["2024-02-29 12:34:56.789654", "1969-12-31 23:59:59.9995"],
    "timestamp(3)": ["2024-02-29 12:34:56.789", "1969-12-31 23:59:59.999"],
    "timestamptz": ["2024-02-29 12:34:56.789654+00", "1969-12-31 23:59:59.5+00"],
    "timestamptz(0)": ["2024-02-29 12:34:56+00", "2024-02-29 00:00:00+02"],
    "interval": ["1 day 02:03:04.5", "-1 mon"],
    "inet": ["192.168.0.1/24", "::1"],
    "xml": ["<a/>", "<b>x</b>"],
    "money": ["12.50", "-1"],
    "bit(1)": ["1", "0"],
    "bit(4)": ["1010", "0001"],
    "text[]": ['{a,"b c",NULL,"q\\"x"}', "{}"],
    "int4[]": ["{1,NULL,3}", "{}"],
    "int8[]": ["{1,9007199254740993}", "{-1}"],
    "bool[]": ["{t,f}", "{}"],
    "float8[]": ["{1.5,NULL}", "{1e-7}"],
    "uuid[]": ["{00000000-0000-4000-8000-000000000001}", "{}"],
}
DEFAULTS = {
    "text": "'it''s'", "varchar(20)": "upper('x')", "int4": "7", "int8": "-8", "bool": "true", "numeric(10,2)": "1.5",
    "float8": "0.25", "uuid": "'00000000-0000-4000-8000-000000000009'", "jsonb": "'{\"a\": 1}'", "date": "'2024-02-29'",
    "timestamp": "'2024-02-29 12:34:56.789'", "timestamptz": "now()", "text[]": "'{}'", "int2": "'3'", "bytea": "'\\x61'",
    "float4": "random()", "oid": "1", "char(4)": "'ab'", "timestamp(3)": "now()", "time": "'01:02:03'",
}


def name_of(kind):
    return "c_" + "".join(c if c.isalnum() else "_" for c in kind).rstrip("_").replace("[]", "_array") + ("_a" if "[" in kind else "")


def typed(not_null=False):
    """Returns the DDL of a column of each type."""
    null = " NOT NULL" if not_null else ""
    return ", ".join(f"{name_of(kind)} {kind}{null}" for kind in TYPES)


def typed_rows():
    first = {name_of(kind): values[0] for kind, values in TYPES.items()}
    second = {name_of(kind): values[1] for kind, values in TYPES.items()}
    return {
        "first values": {"payload": '{"a": 1}', **first},
        "second values": {"payload": '{"a": 1}', **second},
    }


def case(group, table, name, key="string", value="string", header="simple", **keys):
    outbox = {k.replace("_", "."): v for k, v in keys.items()}
    return {"group": group, "table": table, "case": name,
            "config": {**converter("key", key), **converter("value", value), **converter("header", header),
                       **{f"transforms.outbox.{k}": v for k, v in outbox.items()}}}


def place(where, kinds=TYPES):
    return ",".join(f"{name_of(kind)}:{where}" for kind in kinds)


TABLES = {
    "jsonb": (f"{KEYS}, payload jsonb, {MORE}", documents({})),
    "json": (f"{KEYS}, payload json, {MORE}", documents({"lone surrogate": TEXTS["lone surrogate"],
             "twice the same member": TEXTS["twice the same member"]})),
    "text": (f"{KEYS}, payload text, {MORE}", documents(TEXTS)),
    "required": (KEYS.replace("aggregateid text", "aggregateid varchar(40) NOT NULL") +
                 ", payload jsonb NOT NULL, tenant varchar(10) NOT NULL",
                 {k: {"payload": v, "tenant": "t"} for k, v in list(DOCUMENTS.items())[:12]}),
    "bytea": (f"{KEYS}, payload bytea, {MORE}", {
        "bytes": {"payload": "\\x00ff107b"}, "no bytes": {"payload": "\\x"}, "NULL payload": {"payload": None},
        "JSON": {"payload": "\\x7b2261223a20317d"}, "one": {"payload": "\\x61"}, "two": {"payload": "\\x6162"}}),
    "typed": (f"{KEYS}, payload jsonb, {typed()}", {**typed_rows(), "NULL": {"payload": '{"a": 1}'}}),
    "strict": (f"{KEYS}, payload jsonb NOT NULL, {typed(True)}", typed_rows()),
    "defaults": (KEYS.replace("id uuid", "id uuid DEFAULT gen_random_uuid()") +
                 ", payload jsonb DEFAULT '{\"d\": 1}', " +
                 ", ".join(f"{name_of(kind)} {kind} DEFAULT {default}" for kind, default in DEFAULTS.items()),
                 {"NULL": {"payload": '{"a": 1}', **{name_of(kind): None for kind in DEFAULTS}},
                  "values": {"payload": '{"a": 1}', **{name_of(kind): TYPES[kind][0] for kind in DEFAULTS}},
                  "NULL payload": {"payload": None}}),
}

# Trace contexts in a column, as an application writes them: Java properties.
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CONTEXTS = {
    "sampled": f"traceparent={PARENT}",
    "not sampled": "traceparent=00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
    "with a comment, as Properties.store writes it": f"#Thu Nov 26 20:00:00 UTC 2026\ntraceparent={PARENT}\ntracestate=vendor\\=1,other\\=2\n",
    "with state": f"traceparent={PARENT}\ntracestate=vendor=1,other=2",
    "with baggage": f"traceparent={PARENT}\nbaggage=user=7,tenant=acme",
    "something else": f"uber-trace-id=1:2:0:1\ntraceparent={PARENT}",
    "only state": "tracestate=vendor=1",
    "only baggage": "baggage=user=7",
    "spaces": f"  traceparent : {PARENT}",
    "escaped": "traceparent=" + PARENT.replace("a", "\\u0061"),
    "capitals": f"TraceParent={PARENT}",
    "no trace": "traceparent=00-00000000000000000000000000000000-b7ad6b7169203331-01",
    "too short": "traceparent=00-0af7651916cd43dd-b7ad6b7169203331-01",
    "later version": f"traceparent=01{PARENT[2:]}",
    "no properties": "text",
    "empty": "",
    "NULL": None,
}
TABLES["traced"] = (f"{KEYS}, payload jsonb, tracingspancontext text, context text", {
    name: {"payload": '{"a": 1}', "tracingspancontext": text, "context": text} for name, text in CONTEXTS.items()})

CASES = []
for table in ["jsonb", "text", "json"]:
    of = lambda name, *a, **k: CASES.append(case(table, table, f"{table} {name}", *a, **k))
    of("string", "string", "string")
    of("json", "json", "json")
    of("json-schema", "json-schema", "json-schema")
    expand = {"table_expand_json_payload": "true"}
    of("expanded json", "string", "json", **expand)
    of("expanded json-schema", "string", "json-schema", **expand)
    if table == "json":
        continue
    of("expanded string", "string", "string", **expand)
    nulls = {"table_json_payload_null_behavior": "optional_bytes"}
    empty = {"table_json_payload_empty_array_behavior": "optional_string"}
    of("expanded json, null kept", "string", "json", **expand, **nulls)
    of("expanded json-schema, null and [] kept", "string", "json-schema", **expand, **nulls, **empty)
    of("expanded json, [] kept", "string", "json", **expand, **empty)
    tombstone = {"route_tombstone_on_empty_payload": "true"}
    of("string, tombstone", "string", "string", **tombstone)
    of("json, tombstone", "json", "json", **tombstone)
    of("expanded json-schema, tombstone", "json-schema", "json-schema", **expand, **tombstone)
    placed = {"table_fields_additional_placement": "tenant:envelope,type:envelope:eventType,part:partition,tenant:header"}
    of("envelope string", "string", "string", **placed)
    of("envelope json", "json", "json", **placed)
    of("envelope json-schema", "json-schema", "json-schema", **placed)
    of("envelope expanded json", "string", "json", **placed, **expand)
    of("envelope expanded json-schema", "string", "json-schema", **placed, **expand)
    of("timestamp", "string", "string", table_field_event_timestamp="ts")
other = lambda table, name, *a, **k: CASES.append(case("typed", table, f"{table} {name}", *a, **k))
for form in ["string", "json", "json-schema"]:
    other("required", form, form, form, form)
    other("bytea", form, form, form)
other("required", "expanded json-schema", "json-schema", "json-schema", table_expand_json_payload="true",
      table_fields_additional_placement="tenant:envelope")
other("bytea", "bytes", "string", "bytes")
other("bytea", "binary", "string", "binary")
other("bytea", "expanded json", "string", "json", table_expand_json_payload="true")
other("bytea", "tombstone json", "string", "json", route_tombstone_on_empty_payload="true")
other("bytea", "envelope json-schema", "string", "json-schema", table_fields_additional_placement="payload:envelope:again")
# Walpost accepts at most 32 columns.
half = len(TYPES) // 2
for table, kinds in [("typed", list(TYPES)[:half]), ("typed", list(TYPES)[half:]), ("strict", list(TYPES)[:half]),
                     ("strict", list(TYPES)[half:]), ("defaults", list(DEFAULTS))]:
    for form in ["simple", "string", "json", "json-schema"]:
        other(table, f"headers {form}, {kinds[0]} and others", "string", "string", form,
              table_fields_additional_placement=place("header", kinds))
    for form in ["string", "json", "json-schema"]:
        other(table, f"envelope {form}, {kinds[0]} and others", "string", form,
              table_fields_additional_placement=place("envelope", kinds))
for kind in ["int2", "int4", "int8", "uuid", "bool", "numeric", "numeric(10,2)", "date", "timestamptz", "bytea", "char(4)", "float8"]:
    other("typed", f"key {kind} string", "string", table_field_event_key=name_of(kind))
    other("typed", f"key {kind} json-schema", "json-schema", table_field_event_key=name_of(kind))
    if kind in ["int8", "bytea", "numeric"]:
        other("typed", f"key {kind} json", "json", table_field_event_key=name_of(kind))
for kind in ["text", "int8", "uuid"]:
    other("defaults", f"key {kind} json-schema", "json-schema", table_field_event_key=name_of(kind))
for kind in ["int2", "int4", "int8"]:
    other("typed", f"partition {kind}", table_fields_additional_placement=f"{name_of(kind)}:partition")
for kind in ["timestamp", "timestamp(3)", "timestamptz", "int8"]:
    other("typed", f"timestamp {kind}", table_field_event_timestamp=name_of(kind))
for form in ["simple", "json", "json-schema"]:
    CASES.append(case("traced", "traced", f"traced {form}", "string", "string", form, **{
        "tracing_span_context_field": "tracingspancontext"}))
CASES.append(case("traced", "traced", "traced by another column", tracing_span_context_field="context",
                  tracing_with_context_field_only="true"))


# ---------------------------------------------------------------- the servers

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def as_server(command):
    if os.geteuid() == 0:
        return ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", *command]
    return command


class Postgres:
    def __init__(self, folder, binaries):
        self.binaries, self.port = Path(binaries), free_port()
        self.data = folder / "postgres"
        self.data.mkdir()
        if os.geteuid() == 0:
            shutil.chown(self.data, "postgres", "postgres")
        subprocess.run(as_server([self.binaries / "initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8",
                                  "--locale=C.UTF-8", "-N"]), check=True, stdout=subprocess.DEVNULL)
        options = (f"-p {self.port} -k {self.data} -c wal_level=logical -c max_replication_slots=200 -c max_wal_senders=200 "
                   "-c max_connections=300 -c fsync=off -c listen_addresses=127.0.0.1 -c timezone=UTC -c lc_monetary=C")
        subprocess.run(as_server([self.binaries / "pg_ctl", "-D", self.data, "-w", "-l", self.data / "log", "-o", options,
                                  "start"]), check=True, stdout=subprocess.DEVNULL)

    def sql(self, text):
        answer = subprocess.run(["psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-d", "postgres", "-qAtX",
                                 "-v", "ON_ERROR_STOP=1"], input=text, text=True, capture_output=True, encoding="utf-8",
                                env={**os.environ, "PGCLIENTENCODING": "UTF8"}, check=False)
        if answer.returncode:
            raise SystemExit(f"{answer.stderr}\n{text[:2000]}")
        return answer.stdout

    def stop(self):
        subprocess.run(as_server([self.binaries / "pg_ctl", "-D", self.data, "-w", "-m", "immediate", "stop"]), check=False,
                       stdout=subprocess.DEVNULL)


LOGGING = """status=WARN
appender.c.type=Console
appender.c.name=C
appender.c.layout.type=PatternLayout
appender.c.layout.pattern=%p %m (%c)%n%throwable{short.message}
rootLogger.level=WARN
rootLogger.appenderRef.c.ref=C
"""


def java(folder, target, log, *arguments):
    logging = folder / "log4j2.properties"
    logging.write_text(LOGGING)
    return subprocess.Popen(["java", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Dlog4j2.configurationFile={logging}",
                             f"-Djava.io.tmpdir={folder}", "-cp", f"{target}/kafka/lib/*", *map(str, arguments)],
                            stdout=open(folder / log, "w", encoding="utf-8"), stderr=subprocess.STDOUT)


def broker(folder, target):
    port, controller = free_port(), free_port()
    properties = folder / "server.properties"
    properties.write_text(f"""process.roles=broker,controller
node.id=1
controller.listener.names=CONTROLLER
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
log.dirs={folder}/kafka
num.partitions={PARTITIONS}
default.replication.factor=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
auto.create.topics.enable=true
log.cleaner.enable=false
""")
    format_ = java(folder, target, "format.log", "kafka.tools.StorageTool", "format", "-t", "AAAAAAAAAAAAAAAAAAAAAQ", "-c", properties)
    if format_.wait():
        raise SystemExit((folder / "format.log").read_text())
    return java(folder, target, "broker.log", "-Xmx512m", "kafka.Kafka", properties), port


# Options of the OpenTelemetry agent, if it is installed. Spans are not exported.
TRACING = ["-Dotel.java.global-autoconfigure.enabled=true", *(f"-Dotel.{of}.exporter=none" for of in ["traces", "metrics", "logs"])]


def plugins(folder, target, cases):
    """Returns the plugin path of Debezium, which includes OpenTelemetry if any case needs it."""
    if not any(of["group"] == "traced" for of in cases):
        return target / "debezium"
    plugin = folder / "plugins" / "debezium"
    plugin.mkdir(parents=True)
    for jar in [*target.glob("debezium/*/*.jar"), *target.glob("opentelemetry/lib/*.jar")]:
        (plugin / jar.name).symlink_to(jar)
    return plugin.parent


def connect(folder, target, kafka, postgres, cases):
    worker = folder / "worker.properties"
    worker.write_text(f"""bootstrap.servers=127.0.0.1:{kafka}
listeners=http://127.0.0.1:0
plugin.path={plugins(folder, target, cases)}
plugin.discovery=service_load
offset.storage.file.filename={folder}/offsets
offset.flush.interval.ms=60000
key.converter={STRING}
value.converter={STRING}
producer.linger.ms=20
producer.compression.type=none
""")
    files = []
    for number, of in enumerate(cases):
        file = folder / f"connector{number}.json"
        file.write_text(json.dumps({
            "name": f"c{number}", "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "database.hostname": "127.0.0.1", "database.port": str(postgres), "database.user": "postgres",
            "database.password": "x", "database.dbname": "postgres", "plugin.name": "pgoutput", "slot.name": f"c{number}",
            "publication.name": f"p_{of['table']}", "publication.autocreate.mode": "disabled",
            "table.include.list": f"{of['table']}.outbox", "snapshot.mode": "no_data", "tombstones.on.delete": "false",
            "topic.prefix": "lab", "poll.interval.ms": "50", "errors.tolerance": "all", "errors.log.enable": "true",
            "transforms": "outbox", "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
            "transforms.outbox.route.topic.replacement": f"c{number}.${{routedByValue}}", **of["config"]}))
        files.append(file)
    return java(folder, target, "connect.log", "-Xmx1500m", *TRACING, "org.apache.kafka.connect.cli.ConnectStandalone", worker, *files)


# ---------------------------------------------------------------- records in Kafka

def varint(data, at):
    shift = value = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at


def field(data, at):
    length, at = varint(data, at)
    return (None, at) if length < 0 else (data[at:at + length], at + length)


def batches(segment):
    """Yields the records of a segment in uncompressed format 2: timestamp, key, value and headers."""
    at = 0
    while at + 61 <= len(segment):
        length, = struct.unpack_from(">i", segment, at + 8)
        if length <= 0 or at + 12 + length > len(segment):
            return
        base, = struct.unpack_from(">q", segment, at + 27)
        count, = struct.unpack_from(">i", segment, at + 57)
        place = at + 61
        for _ in range(count):
            _, place = varint(segment, place)
            delta, place = varint(segment, place + 1)
            _, place = varint(segment, place)
            key, place = field(segment, place)
            value, place = field(segment, place)
            headers = []
            number, place = varint(segment, place)
            for _ in range(number):
                name, place = field(segment, place)
                content, place = field(segment, place)
                headers.append((name.decode(), content))
            yield base + delta, key, value, headers
        at += 12 + length


def text(data):
    """Returns bytes as text if they are valid text, or otherwise as hexadecimal digits in an object."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"hex": data.hex()}


def records(folder, number):
    found = []
    for part in sorted((folder / "kafka").glob(f"c{number}.*-[0-9]*")):
        topic, _, partition = part.name.rpartition("-")
        for segment in sorted(part.glob("*.log")):
            for stamp, key, value, headers in batches(segment.read_bytes()):
                found.append((topic, int(partition), stamp, key, value, headers))
    return found


def wait(what, within, condition):
    until = time.time() + within
    while not condition():
        if time.time() > until:
            return print(f"capture: timed out waiting for {what}", file=sys.stderr)
        time.sleep(0.3)
    return None


# ---------------------------------------------------------------- the capture

def columns(postgres, table):
    """Returns the columns as described by pgoutput's Relation message and the catalog."""
    return json.loads(postgres.sql(
        "SELECT json_agg(json_build_array(attname, atttypid::int8, atttypmod, attnotnull, pg_get_expr(adbin, adrelid)) "
        f"ORDER BY attnum) FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum "
        f"WHERE attrelid = '{table}.outbox'::regclass AND attnum > 0"))


def insert(table, number, row, aggregate="x"):
    values = {"id": f"00000000-0000-4000-8000-{number:012}", "aggregatetype": aggregate, "aggregateid": f"key {number}",
              "type": "OrderPlaced", **row}
    names = ", ".join(values)
    return f"INSERT INTO {table}.outbox ({names}) VALUES ({', '.join(map(quoted, values.values()))});"


def main():
    target, binaries, groups = Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3:]
    cases = [of for of in CASES if not groups or of["group"] in groups]
    folder = Path(tempfile.mkdtemp(prefix="walpost-golden."))
    folder.chmod(0o755)
    tables = {of["table"] for of in cases}
    processes, postgres = [], None
    try:
        process, kafka = broker(folder, target)
        processes.append(process)
        postgres = Postgres(folder, binaries)
        for table in tables:
            postgres.sql(f"CREATE SCHEMA {table}; CREATE TABLE {table}.outbox ({TABLES[table][0]}); "
                         f"CREATE PUBLICATION p_{table} FOR TABLE {table}.outbox")
        for number, _ in enumerate(cases):
            postgres.sql(f"SELECT pg_create_logical_replication_slot('c{number}', 'pgoutput')")
        processes.append(connect(folder, target, kafka, postgres.port, cases))
        active = "SELECT count(*) FROM pg_replication_slots WHERE active"
        wait("connectors", 240, lambda: int(postgres.sql(active)) == len(cases))
        for table in tables:
            rows = TABLES[table][1]
            last = {k: v for k, v in next(iter(rows.values())).items()}
            postgres.sql("\n".join([insert(table, n, row) for n, row in enumerate(rows.values())] +
                                   [insert(table, 999, last, "end")]))
        ended = lambda number: any(topic == f"c{number}.end" for topic, *_ in records(folder, number))
        wait("records", 45, lambda: all(map(ended, range(len(cases)))))
        time.sleep(1)
        lines = [line_of(folder, postgres, number, of) for number, of in enumerate(cases)]
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()
        if postgres:
            postgres.stop()
        shutil.rmtree(folder, ignore_errors=True)
    file = HERE / "captured.jsonl"
    before = file.read_text(encoding="utf-8").split("\n") if file.exists() and groups else []
    kept = [line for line in before if line and json.loads(line)["group"] not in groups]
    file.write_text("\n".join(kept + lines) + "\n", encoding="utf-8")
    print(f"capture: {len(lines)} cases in {file}", file=sys.stderr)


def line_of(folder, postgres, number, of):
    table = of["table"]
    shape = columns(postgres, table)
    # Formats each value with the output function of its type. For some types, a cast to text
    # differs.
    texts = ", ".join(f"""CASE WHEN "{name}" IS NOT NULL THEN format('%s', "{name}") END""" for name, *_ in shape)
    shown = json.loads(postgres.sql(f"SELECT json_agg(json_build_array({texts})) FROM (SELECT * FROM {table}.outbox "
                                    "WHERE aggregatetype = 'x' ORDER BY id) AS rows"))
    names = list(TABLES[table][1])
    by_id = {}
    for topic, partition, stamp, key, value, headers in records(folder, number):
        # The header `id` contains the identity, in any of several forms.
        id_ = next(content for name, content in headers if name == "id")
        by_id[int(id_.decode().strip('}"').rpartition("-")[2])] = {
            "topic": topic.partition(".")[2], "partition": partition, "timestamp": stamp, "key": text(key), "value": text(value),
            "headers": [[name, text(content)] for name, content in headers if not name.endswith("runId")]}
    now = time.time() * 1000
    rows = []
    for n, values in enumerate(shown):
        record = by_id.get(n)
        # A timestamp from the connector's clock is not compared.
        if record and abs(record["timestamp"] - now) < 3_600_000:
            del record["timestamp"]
        rows.append({"row": names[n], "values": values, "record": record})
    config = {k: v for k, v in of["config"].items() if v != SIMPLE}
    return json.dumps({"case": of["case"], "group": of["group"], "table": f"{table}.outbox", "config": config, "columns": shape, "rows": rows},
                      ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    main()
