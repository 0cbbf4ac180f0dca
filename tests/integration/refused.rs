//! Invalid command lines and configurations cause exit code 2 before any server is contacted.

use crate::support::walpost::{Finished, Invocation, config_file};

const UNREACHABLE_DATABASE: &str = "postgresql://walpost@/shop?host=/nowhere";

/// Runs `walpost run` without a configuration file, and with addresses at which neither PostgreSQL
/// nor Kafka is available.
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

/// Runs `walpost run` with a configuration file that contains `text`.
fn run_file(text: &str) -> Finished {
    let file = config_file(text);
    Invocation::new(["run", "--config"]).arg(file).finish()
}

/// Runs `walpost run` with a configuration file that contains one pipeline and the additional
/// `lines`.
fn pipeline(lines: &str) -> Finished {
    run_file(&format!(
        "[kafka]\n\"bootstrap.servers\" = \"127.0.0.1:9\"\n
         [[pipeline]]\nname = \"orders\"\npostgres = \"{UNREACHABLE_DATABASE}\"\n{lines}"
    ))
}

fn expect_rejection(finished: Finished, texts: &[&str]) {
    finished.expect_code(2).expect_mentions(texts);
}

#[test]
fn suggests_the_nearest_known_key_for_an_unknown_configuration_key() {
    expect_rejection(pipeline("publicaton = 'x'"), &["publicaton", "publication"]);
    expect_rejection(
        pipeline("window_byte = '1MiB'"),
        &["window_byte", "window_bytes"],
    );
    expect_rejection(pipeline("heders = { id = '{id}' }"), &["heders", "headers"]);
    expect_rejection(
        pipeline("create_topics = { partition = 3 }"),
        &["partition", "partitions"],
    );
    expect_rejection(
        run_file("[kafak]\n[[pipeline]]\nname = 'x'\n"),
        &["kafak", "kafka"],
    );
    expect_rejection(
        run_file("[[pipelines]]\nname = 'x'\n"),
        &["pipelines", "pipeline"],
    );
}

#[test]
fn reports_an_invalid_or_missing_configuration_file() {
    expect_rejection(
        run_file("[[pipeline]\nname = 'x'"),
        &["walpost.toml", "line 1"],
    );
    let missing = Invocation::new(["run", "--config", "/nowhere/walpost.toml"]).finish();
    expect_rejection(missing, &["/nowhere/walpost.toml"]);
}

#[test]
fn reports_a_configuration_value_of_the_wrong_type() {
    expect_rejection(pipeline("slot = 5"), &["slot"]);
    expect_rejection(pipeline("window_bytes = 'many'"), &["window_bytes", "many"]);
    expect_rejection(pipeline("link_timeout = 'soon'"), &["link_timeout", "soon"]);
    expect_rejection(
        pipeline("null_payload = 'nothing'"),
        &["null_payload", "nothing", "tombstone"],
    );
    expect_rejection(pipeline("sink = 'pulsar'"), &["sink", "pulsar", "stdout"]);
}

#[test]
fn rejects_invalid_or_duplicate_pipeline_names() {
    expect_rejection(
        pipeline("[[pipeline]]\nname = 'Big Orders'\npostgres = ''"),
        &["Big Orders"],
    );
    let twice = format!(
        "[[pipeline]]\nname = 'orders'\npostgres = '{UNREACHABLE_DATABASE}'\nslot = 'other'"
    );
    expect_rejection(pipeline(&twice), &["orders"]);
    let shared_slot = format!(
        "[[pipeline]]\nname = 'more'\npostgres = '{UNREACHABLE_DATABASE}'\nslot = 'walpost_orders'"
    );
    expect_rejection(pipeline(&shared_slot), &["orders", "more", "slot"]);
}

#[test]
fn error_for_an_unknown_pipeline_lists_the_defined_pipelines() {
    let file = config_file(format!(
        "[[pipeline]]\nname = 'orders'\npostgres = '{UNREACHABLE_DATABASE}'\nsink = 'stdout'"
    ));
    let finished = Invocation::new(["run", "--pipeline", "order", "--config"])
        .arg(file)
        .finish();
    expect_rejection(finished, &["\"order\"", "orders"]);
}

#[test]
fn reports_an_invalid_template() {
    expect_rejection(run(&["--key", "{aggregateid"]), &["{aggregateid"]);
    expect_rejection(run(&["--topic", "outbox.}"]), &["outbox.}"]);
    expect_rejection(run(&["--topic", "outbox.{}"]), &["outbox.{}"]);
    expect_rejection(pipeline("key = '{a'"), &["key", "{a"]);
}

#[test]
fn rejects_kafka_properties_that_break_order_or_durability() {
    for (property, value) in [
        ("acks", "1"),
        ("acks", "0"),
        ("request.required.acks", "1"),
        ("enable.idempotence", "false"),
        ("message.timeout.ms", "30000"),
        ("delivery.timeout.ms", "30000"),
    ] {
        let assignment = format!("{property}={value}");
        expect_rejection(
            run(&["-X", &assignment]),
            &[property, value, "is not allowed"],
        );
    }
    let finished = pipeline("kafka = { acks = '1' }");
    expect_rejection(finished, &["acks", "is not allowed"]);
}

#[test]
fn reports_a_kafka_property_unknown_to_librdkafka() {
    expect_rejection(run(&["-X", "compresion.type=lz4"]), &["compresion.type"]);
    expect_rejection(run(&["-X", "linger.ms=soon"]), &["linger.ms"]);
    expect_rejection(run(&["-X", "no-equals-sign"]), &["no-equals-sign"]);
}

#[test]
fn missing_server_address_error_explains_how_to_set_it() {
    let no_kafka = Invocation::new(["run", "--postgres", UNREACHABLE_DATABASE]).finish();
    expect_rejection(no_kafka, &["--kafka", "bootstrap.servers"]);
}

#[test]
fn rejects_an_invalid_conninfo_without_printing_its_password() {
    let postgres = "postgresql://walpost:s3cr3t-x@/shop?sslmode=sometimes";
    expect_rejection(
        Invocation::new(["run", "--kafka", "a:1", "--postgres", postgres]).finish(),
        &["sslmode", "sometimes"],
    );
    let postgres = "host=/nowhere user=u password=s3cr3t-x sslmoode=require";
    expect_rejection(
        Invocation::new(["run", "--kafka", "a:1", "--postgres", postgres]).finish(),
        &["the text after the password", "did you mean \"sslmode\"?"],
    );
    let postgres = "host=/nowhere user=u password=s3cr3t-x port=high";
    expect_rejection(
        Invocation::new(["run", "--kafka", "a:1", "--postgres", postgres]).finish(),
        &["port"],
    );
}

#[test]
fn rejects_unknown_flags_and_commands() {
    expect_rejection(
        run(&["--publicaton", "x"]),
        &["--publicaton", "--publication"],
    );
    expect_rejection(Invocation::new(["runn"]).finish(), &["runn", "run"]);
    expect_rejection(Invocation::new([""; 0]).finish(), &["init", "check", "run"]);
    expect_rejection(run(&["--log-level", "walpost=loud"]), &["walpost=loud"]);
}

#[test]
fn environment_variables_supply_values_for_omitted_flags() {
    let finished = Invocation::new(["run", "--postgres", UNREACHABLE_DATABASE])
        .env("WALPOST_KAFKA", "127.0.0.1:9")
        .env("WALPOST_KEY", "{broken")
        .finish();
    expect_rejection(finished, &["{broken"]);
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
    expect_rejection(finished, &["{of the flag"]);
    let finished = Invocation::new(["run", "--postgres", UNREACHABLE_DATABASE, "--kafka", "a:1"])
        .env("WALPOST_KAFKA_ACKS", "1")
        .finish();
    expect_rejection(finished, &["acks", "is not allowed"]);
}
