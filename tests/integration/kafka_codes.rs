//! Brokers that are hostile, or newer than librdkafka, respond with error codes that librdkafka
//! does not recognize.

use crate::support::error_codes::ResponseKind;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::wait_until;
use crate::support::walpost::{Invocation, Walpost, config_file};

/// Codes that librdkafka's enumeration does not contain. The first is `TRANSACTION_ABORTABLE` of
/// Apache Kafka 4.
const CODES: [i16; 4] = [120, 500, 9999, i16::MIN];

fn survives(walpost: &mut Walpost, what: impl std::fmt::Debug) {
    assert!(walpost.is_running(), "{what:?}: {}", walpost.log());
}

in_both_modes! { survives_error_codes_unknown_to_librdkafka }

fn survives_error_codes_unknown_to_librdkafka(exactly_once: bool) {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let codes = kafka.error_codes();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker)
        .behind_proxy(&kafka)
        .in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_and_confirm_one(&aggregate, "k");
    let mut answers = vec![ResponseKind::Produce, ResponseKind::Metadata];
    if exactly_once {
        answers.extend([
            ResponseKind::InitProducerId,
            ResponseKind::EndTxn,
            ResponseKind::DescribeConfigs,
            ResponseKind::ListOffsets,
            ResponseKind::Fetch,
        ]);
    }
    for answer in answers {
        for code in CODES {
            codes.replace(answer, code);
            fixture.insert(&aggregate, "k");
            // Interrupt the connections to Kafka and to PostgreSQL, so that the pipeline reconnects
            // and repeats all of its requests.
            kafka.cut();
            fixture.end_walsender();
            wait_until("a response with another code", || {
                survives(&mut walpost, (answer, code));
                codes.changed_responses() > 0
            });
            codes.stop_replacing();
            fixture.wait_until_confirmed();
            survives(&mut walpost, (answer, code));
        }
    }
    assert!(
        walpost.log().contains("code=9999"),
        "the number is not logged: {}",
        walpost.log()
    );
    walpost.terminate().expect_code(0);
    fixture.wait_for_ids(&fixture.history());
}

/// The pipelines of one Walpost process can belong to different owners, each with their own
/// brokers.
#[test]
fn unknown_broker_error_codes_in_one_pipeline_do_not_stop_others() {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let codes = kafka.error_codes();
    let hostile = Fixture::on_servers(Server::shared(MAJOR), &broker).behind_proxy(&kafka);
    let other = Fixture::new();
    let (attacked, aggregate) = (hostile.aggregate(1), other.aggregate(1));
    let pipeline = |fixture: &Fixture| {
        format!(
            "[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\nkafka = {{ \"bootstrap.servers\" = \"{}\" }}\n",
            fixture.name,
            fixture.conninfo(),
            fixture.kafka()
        )
    };
    let file = config_file(pipeline(&hostile) + &pipeline(&other));
    let mut walpost = Invocation::new(["run", "--config"]).arg(file).start();
    walpost.wait_for_logs("streaming", 2);
    codes.replace(ResponseKind::Produce, 9999);
    hostile.insert(&attacked, "k");
    wait_until("a response with another code", || {
        survives(&mut walpost, "produce");
        codes.changed_responses() > 1
    });
    walpost.wait_for_log("error code 9999");
    other.insert(&aggregate, "k");
    other.wait_for_records(1);
    other.wait_until_confirmed();
    codes.stop_replacing();
    hostile.wait_until_confirmed();
    walpost.terminate().expect_code(0);
}

/// A broker responds with an unknown error code when Walpost asks it to create a topic.
#[test]
fn unknown_error_code_from_topic_creation_does_not_crash_the_process() {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let codes = kafka.error_codes();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).behind_proxy(&kafka);
    codes.replace(ResponseKind::CreateTopics, 9999);
    let mut walpost = fixture.start_with(&["--create-topics", "1:1"]);
    fixture.insert("new", "k");
    wait_until("a response with another code", || {
        codes.changed_responses() > 0
    });
    walpost.wait_for_log("9999");
    // The pipeline halts, as it does for every error that is not known to be transient.
    let finished = walpost.terminate();
    assert!(finished.mentions("9999"), "{finished:?}");
    assert_ne!(finished.code, None, "{finished:?}");
}
