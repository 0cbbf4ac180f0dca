//! Authentication with SASL/OAUTHBEARER: a program or an endpoint supplies the tokens, and the
//! brokers validate them.

use std::path::{Path, PathBuf};
use std::thread;

use crate::support::certificates::{Authority, write_private};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{AUTHORITY, MAJOR, Server};
use crate::support::reaper;
use crate::support::secrets::SECRET;
use crate::support::tokens::{CLIENT_ID, Endpoint, Issuer};
use crate::support::under_load::UnderLoad;
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

/// Creates a walpost.toml for a pipeline that gets its tokens from a program.
fn file(fixture: &Fixture, issuer: &Issuer) -> PathBuf {
    let file = reaper::folder("config").join("walpost.toml");
    let text = format!(
        "[kafka]\n\"security.protocol\" = \"sasl_plaintext\"\n\"sasl.mechanisms\" = \"OAUTHBEARER\"\n\
         [[pipeline]]\nname = \"{}\"\nkafka_token_command = {}\n",
        fixture.name,
        issuer.command()
    );
    write_private(&file, text.as_bytes());
    file
}

/// Returns flags that make a command use tokens from the program and connect to the listener that
/// verifies their signatures.
fn flags(fixture: &Fixture, issuer: &Issuer) -> [String; 4] {
    flags_at(&fixture.broker.sasl_address(), fixture, issuer)
}

fn flags_at(address: &str, fixture: &Fixture, issuer: &Issuer) -> [String; 4] {
    let file = file(fixture, issuer).display().to_string();
    let listener = format!("bootstrap.servers={address}");
    ["--config".to_owned(), file, "-X".to_owned(), listener]
}

/// Writes a walpost.toml for a pipeline that fetches its tokens from the endpoint, using the given
/// secret.
fn write_fetching(file: &Path, fixture: &Fixture, endpoint: &Endpoint, secret: &str) {
    let text = format!(
        "[kafka]\n\"security.protocol\" = \"sasl_plaintext\"\n\"sasl.mechanisms\" = \"OAUTHBEARER\"\n\
         \"sasl.oauthbearer.method\" = \"oidc\"\n\"sasl.oauthbearer.token.endpoint.url\" = \"{}\"\n\
         \"sasl.oauthbearer.client.id\" = \"{CLIENT_ID}\"\n\"sasl.oauthbearer.client.secret\" = \"{secret}\"\n\
         [[pipeline]]\nname = \"{}\"\n",
        endpoint.url(),
        fixture.name
    );
    write_private(file, text.as_bytes());
}

/// Returns flags that make a command fetch its tokens as configured in the given file.
fn fetching_flags(fixture: &Fixture, file: &Path) -> [String; 6] {
    let listener = format!("bootstrap.servers={}", fixture.broker.sasl_address());
    let authority = format!("https.ca.location={}", AUTHORITY.root.display());
    let file = file.display().to_string();
    ["--config", &file, "-X", &listener, "-X", &authority].map(str::to_owned)
}

/// Waits until everything is delivered and confirmed, while tokens keep expiring, and then checks
/// the delivery.
fn settle(mut stream: UnderLoad) {
    stream.wait_for_transactions(20);
    stream.stop_load();
    let fixture = &stream.fixture;
    fixture.wait_for_ids(&fixture.history());
    fixture.wait_until_confirmed();
    end(stream.walpost, fixture);
}

/// Stops Walpost and checks the delivery, allowing for one repetition per reconnect.
fn end(walpost: Walpost, fixture: &Fixture) {
    let ended = walpost.terminate().expect_code(0);
    let breaks = ended.stderr.matches("reconnecting").count();
    fixture.check_delivered(&[], fixture.resends(breaks));
}

#[test]
fn renews_tokens_from_an_oauth_endpoint_under_load_in_both_delivery_modes() {
    let (server, broker) = (Server::shared(MAJOR), Broker::shared());
    let endpoint = Endpoint::start(5, SECRET);
    let streams = [false, true].map(|exactly_once| {
        let fixture = Fixture::on_servers(server, broker).in_mode(exactly_once);
        let file = reaper::folder("config").join("walpost.toml");
        write_fetching(&file, &fixture, &endpoint, SECRET);
        let flags = fetching_flags(&fixture, &file);
        let conninfo = fixture.conninfo();
        UnderLoad::start(
            fixture,
            &conninfo,
            &flags.each_ref().map(String::as_str),
            &[],
        )
    });
    let before = endpoint.calls();
    wait_until("repeatedly fetched tokens", || {
        let more = endpoint.calls() - before;
        let refused: usize = streams
            .iter()
            .map(|stream| stream.walpost.logged("Kafka rejects"))
            .sum();
        more >= 8 && 2 * refused <= more
    });
    streams.into_iter().for_each(settle);
    assert_eq!(endpoint.rejected_clients(), 0);
}

#[test]
fn rereads_a_rotated_client_secret_in_both_delivery_modes() {
    let other = &format!("{SECRET}-rotated");
    let rotate = |exactly_once| {
        let fixture = Fixture::new().in_mode(exactly_once);
        let aggregate = fixture.aggregate(1);
        let endpoint = Endpoint::start(5, SECRET);
        let file = reaper::folder("config").join("walpost.toml");
        let flags = fetching_flags(&fixture, &file);

        // Start with a wrong secret.
        write_fetching(&file, &fixture, &endpoint, other);
        let mut walpost = fixture.run().args(&flags).start();
        fixture.insert(&aggregate, "k");
        let line = walpost.wait_for_log("Kafka is unreachable");
        for text in [&endpoint.url(), "invalid_client"] {
            assert!(line.contains(text), "{text} in {line}");
        }
        let check = fixture.check().args(&flags).finish().expect_code(1);
        check.expect_mentions(&["UNREACHABLE", &endpoint.url(), "invalid_client"]);
        write_fetching(&file, &fixture, &endpoint, SECRET);
        fixture.wait_for_records(1);
        fixture.check().args(&flags).finish().expect_code(0);

        // Change the endpoint's secret before the pipeline's.
        endpoint.rotate(other);
        let before = endpoint.rejected_clients();
        wait_until("a refusal", || endpoint.rejected_clients() > before);
        write_fetching(&file, &fixture, &endpoint, other);
        let before = endpoint.calls();
        wait_until("a token", || endpoint.calls() > before);
        fixture.insert(&aggregate, "k");
        fixture.wait_for_records(2);
        fixture.wait_until_confirmed();
        end(walpost, &fixture);
    };
    // Run both modes concurrently, because librdkafka waits ten seconds before it requests another
    // token.
    thread::scope(|scope| {
        scope.spawn(|| rotate(false));
        rotate(true);
    });
}

#[test]
fn sends_no_secret_to_an_endpoint_with_an_invalid_certificate() {
    let fixture = Fixture::new();
    let endpoint = Endpoint::start(60, SECRET);
    let file = reaper::folder("config").join("walpost.toml");
    write_fetching(&file, &fixture, &endpoint, SECRET);
    let flags = fetching_flags(&fixture, &file);
    let of_the_system = &flags[..4];
    let finished = fixture.check().args(of_the_system).finish().expect_code(1);
    finished.expect_mentions(&["UNREACHABLE", "certificate", "https.ca.location"]);
    assert_eq!((endpoint.calls(), endpoint.rejected_clients()), (0, 0));

    let root = AUTHORITY.root.display().to_string();
    let by_variable = fixture.check().env("SSL_CERT_FILE", &root);
    by_variable.args(of_the_system).finish().expect_code(0);
    fixture.check().args(&flags).finish().expect_code(0);

    // A configured certificate authority replaces the default ones; it is not added to them.
    let other_authority = Authority::new("Another CA");
    let named = format!("https.ca.location={}", other_authority.root.display());
    let calls = endpoint.calls();
    let check = fixture
        .check()
        .env("SSL_CERT_FILE", &root)
        .args(of_the_system);
    let refused = check.args(["-X", &named]).finish().expect_code(1);
    refused.expect_mentions(&["UNREACHABLE", "certificate"]);
    assert_eq!((endpoint.calls(), endpoint.rejected_clients()), (calls, 0));
}

/// A broker closes a connection when its token expires, unless the client has presented a new
/// token.
#[test]
fn renews_tokens_from_a_program_under_load_and_retries_if_the_program_fails() {
    let (server, broker) = (Server::shared(MAJOR), Broker::shared());
    // A new token is requested after 80 % of the lifetime. On a busy machine, the rest must be long
    // enough to run the program and to send the token to the broker.
    let issuers = [Issuer::new(15), Issuer::new(15)];
    let streams = [false, true].map(|exactly_once| {
        let fixture = Fixture::on_servers(server, broker).in_mode(exactly_once);
        let flags = flags(&fixture, &issuers[usize::from(exactly_once)]);
        let conninfo = fixture.conninfo();
        UnderLoad::start(
            fixture,
            &conninfo,
            &flags.each_ref().map(String::as_str),
            &[],
        )
    });
    let before = issuers.each_ref().map(Issuer::calls);

    // Also run a third pipeline, whose token command fails at first. The failure must not count as
    // a rejection by Kafka, which would halt the pipeline.
    let fixture = Fixture::new();
    let away = Issuer::new(60);
    away.start_failing();
    let arguments = flags(&fixture, &away);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.run().args(&arguments).start();
    fixture.insert(&aggregate, "k");
    let line = walpost.wait_for_log("Kafka is unreachable");
    let failure = "kafka_token_command: /bin/sh did not supply a token: the program failed with exit status: 3";
    assert!(line.contains(failure), "{line}");
    let check = fixture.check().args(&arguments).finish().expect_code(1);
    check.expect_mentions(&["UNREACHABLE", failure]);
    away.stop_failing();
    fixture.wait_for_records(1);
    fixture.check().args(&arguments).finish().expect_code(0);
    fixture.verify().args(&arguments).finish().expect_code(0);
    fixture.settle(walpost, &[], fixture.resends(0));

    for ((issuer, before), stream) in issuers.iter().zip(before).zip(&streams) {
        // On a busy machine, some tokens are renewed only after they have expired. Others are
        // renewed so late that the broker, which accepts one authentication per second, rejects the
        // next authentication. Allow for such rejections. If no token were renewed in time, the
        // broker would reject every authentication.
        wait_until("tokens that arrive before the last one has expired", || {
            let more = issuer.calls() - before;
            more >= 3 && 2 * stream.walpost.logged("Kafka rejects") <= more
        });
    }
    streams.into_iter().for_each(settle);
}

#[test]
fn sends_unsigned_tokens_only_to_brokers_that_accept_them() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let issuer = Issuer::unsecured(60);
    let refused = fixture.check().args(flags(&fixture, &issuer)).finish();
    refused
        .expect_code(3)
        .expect_mentions(&["FAILED", "invalid_token"]);
    let flags = flags_at(&fixture.broker.unsecured_address(), &fixture, &issuer);
    fixture.check().args(&flags).finish().expect_code(0);
    let walpost = fixture.run().args(&flags).start_streaming();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    walpost.terminate().expect_code(0);

    // For testing, librdkafka can also generate unsigned tokens itself.
    let address = format!("bootstrap.servers={}", fixture.broker.unsecured_address());
    let properties = [
        &address,
        "security.protocol=sasl_plaintext",
        "sasl.mechanisms=OAUTHBEARER",
        "enable.sasl.oauthbearer.unsecure.jwt=true",
        "sasl.oauthbearer.config=principal=walpost",
    ];
    let walpost = fixture
        .run()
        .args(properties.iter().flat_map(|property| ["-X", property]))
        .start_streaming();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(2);
    fixture.settle(walpost, &[], fixture.resends(0));
}
