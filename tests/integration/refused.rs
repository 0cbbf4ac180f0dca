//! Invalid usage and configuration: exit code 2, before any server is contacted.

use crate::support::walpost::{Finished, Invocation, config_file};

const UNREACHABLE_DATABASE: &str = "postgresql://walpost@/shop?host=/nowhere";

/// Runs `walpost run` with flags only; none of the servers exists.
fn run(arguments: &[&str]) -> Finished {
    Invocation::new([
        "run",
        "--postgres",
        UNREACHABLE_DATABASE,
        "--kafka",
        "127.0.0.1:9",
    ])
    .args(arguments)
    .finish()
}

/// Runs `walpost run` with a file.
fn run_file(text: &str) -> Finished {
    let file = config_file(text);
    Invocation::new(["run", "--config"]).arg(file).finish()
}

/// Runs with a file with one pipeline that also has these lines.
fn pipeline(lines: &str) -> Finished {
    run_file(&format!(
        "[kafka]\n\"bootstrap.servers\" = \"127.0.0.1:9\"\n
         [[pipeline]]\nname = \"orders\"\npostgres = \"{UNREACHABLE_DATABASE}\"\n{lines}"
    ))
}

fn refuses(finished: Finished, texts: &[&str]) {
    finished.expect_code(2).expect_mentions(texts);
}

#[test]
fn unknown_key_names_the_nearest_known_one() {
    refuses(pipeline("publicaton = 'x'"), &["publicaton", "publication"]);
    refuses(
        pipeline("window_byte = '1MiB'"),
        &["window_byte", "window_bytes"],
    );
    refuses(pipeline("heders = { id = '{id}' }"), &["heders", "headers"]);
    refuses(
        pipeline("create_topics = { partition = 3 }"),
        &["partition", "partitions"],
    );
    refuses(
        run_file("[kafak]\n[[pipeline]]\nname = 'x'\n"),
        &["kafak", "kafka"],
    );
    refuses(
        run_file("[[pipelines]]\nname = 'x'\n"),
        &["pipelines", "pipeline"],
    );
}

#[test]
fn file_that_is_not_toml_or_not_there_is_named() {
    refuses(
        run_file("[[pipeline]\nname = 'x'"),
        &["walpost.toml", "line 1"],
    );
    let missing = Invocation::new(["run", "--config", "/nowhere/walpost.toml"]).finish();
    refuses(missing, &["/nowhere/walpost.toml"]);
}

#[test]
fn value_of_a_wrong_type_is_named() {
    refuses(pipeline("slot = 5"), &["slot"]);
    refuses(pipeline("window_bytes = 'many'"), &["window_bytes", "many"]);
    refuses(pipeline("link_timeout = 'soon'"), &["link_timeout", "soon"]);
    refuses(
        pipeline("null_payload = 'nothing'"),
        &["null_payload", "nothing", "tombstone"],
    );
    refuses(pipeline("sink = 'pulsar'"), &["sink", "pulsar", "stdout"]);
}

#[test]
fn pipelines_need_good_and_different_names() {
    refuses(
        pipeline("[[pipeline]]\nname = 'Big Orders'\npostgres = ''"),
        &["Big Orders"],
    );
    let twice = format!(
        "[[pipeline]]\nname = 'orders'\npostgres = '{UNREACHABLE_DATABASE}'\nslot = 'other'"
    );
    refuses(pipeline(&twice), &["orders"]);
    let shared_slot = format!(
        "[[pipeline]]\nname = 'more'\npostgres = '{UNREACHABLE_DATABASE}'\nslot = 'walpost_orders'"
    );
    refuses(pipeline(&shared_slot), &["orders", "more", "slot"]);
}

#[test]
fn pipeline_that_the_file_does_not_have_is_named_with_those_it_has() {
    let file = config_file(format!(
        "[[pipeline]]\nname = 'orders'\npostgres = '{UNREACHABLE_DATABASE}'\nsink = 'stdout'"
    ));
    let finished = Invocation::new(["run", "--pipeline", "order", "--config"])
        .arg(file)
        .finish();
    refuses(finished, &["\"order\"", "orders"]);
}

#[test]
fn template_that_does_not_parse_is_shown() {
    refuses(run(&["--key", "{aggregateid"]), &["{aggregateid"]);
    refuses(run(&["--topic", "outbox.}"]), &["outbox.}"]);
    refuses(run(&["--topic", "outbox.{}"]), &["outbox.{}"]);
    refuses(pipeline("key = '{a'"), &["key", "{a"]);
}

#[test]
fn kafka_properties_that_break_order_or_durability_are_refused_with_the_reason() {
    for (property, value) in [
        ("acks", "1"),
        ("acks", "0"),
        ("request.required.acks", "1"),
        ("enable.idempotence", "false"),
        ("message.timeout.ms", "30000"),
        ("delivery.timeout.ms", "30000"),
    ] {
        let assignment = format!("{property}={value}");
        refuses(run(&["-X", &assignment]), &[property, value, "refused"]);
    }
    let finished = pipeline("kafka = { acks = '1' }");
    refuses(finished, &["acks", "refused"]);
}

#[test]
fn kafka_property_that_librdkafka_does_not_know_is_named() {
    refuses(run(&["-X", "compresion.type=lz4"]), &["compresion.type"]);
    refuses(run(&["-X", "linger.ms=soon"]), &["linger.ms"]);
    refuses(run(&["-X", "no-equals-sign"]), &["no-equals-sign"]);
}

#[test]
fn missing_server_address_explains_how_to_set_it() {
    let no_kafka = Invocation::new(["run", "--postgres", UNREACHABLE_DATABASE]).finish();
    refuses(no_kafka, &["--kafka", "bootstrap.servers"]);
}

#[test]
fn conninfo_that_does_not_parse_is_refused_without_its_password() {
    let postgres = "postgresql://walpost:s3cr3t-x@/shop?sslmode=sometimes";
    refuses(
        Invocation::new(["run", "--kafka", "a:1", "--postgres", postgres]).finish(),
        &["sslmode", "sometimes"],
    );
    let postgres = "host=/nowhere user=u password=s3cr3t-x sslmoode=require";
    refuses(
        Invocation::new(["run", "--kafka", "a:1", "--postgres", postgres]).finish(),
        &["the text after the password", "did you mean \"sslmode\"?"],
    );
    let postgres = "host=/nowhere user=u password=s3cr3t-x port=high";
    refuses(
        Invocation::new(["run", "--kafka", "a:1", "--postgres", postgres]).finish(),
        &["port"],
    );
}

#[test]
fn unknown_flags_and_commands_are_refused() {
    refuses(
        run(&["--publicaton", "x"]),
        &["--publicaton", "--publication"],
    );
    refuses(Invocation::new(["runn"]).finish(), &["runn", "run"]);
    refuses(Invocation::new([""; 0]).finish(), &["init", "check", "run"]);
    refuses(run(&["--log-level", "walpost=loud"]), &["walpost=loud"]);
}

#[test]
fn environment_takes_the_place_of_flags() {
    let finished = Invocation::new(["run", "--postgres", UNREACHABLE_DATABASE])
        .env("WALPOST_KAFKA", "127.0.0.1:9")
        .env("WALPOST_KEY", "{broken")
        .finish();
    refuses(finished, &["{broken"]);
    let finished = Invocation::new([
        "run",
        "--postgres",
        UNREACHABLE_DATABASE,
        "--kafka",
        "a:1",
        "--key",
        "{of the flag",
    ])
    .env("WALPOST_KEY", "{of the environment")
    .finish();
    refuses(finished, &["{of the flag"]);
    let finished = Invocation::new(["run", "--postgres", UNREACHABLE_DATABASE, "--kafka", "a:1"])
        .env("WALPOST_KAFKA_ACKS", "1")
        .finish();
    refuses(finished, &["acks", "refused"]);
}
