//! `walpost check` reports each mistake in `[kafka]` with a specific message.

use std::net::TcpListener;

use crate::support::fixture::Fixture;

const SASL: [&str; 6] = [
    "-X",
    "security.protocol=sasl_plaintext",
    "-X",
    "sasl.mechanisms=SCRAM-SHA-256",
    "-X",
    "sasl.username=walpost",
];

#[test]
fn error_for_a_missing_password_names_its_environment_variable() {
    let fixture = Fixture::new();
    let missing = ["sasl.password is missing", "WALPOST_KAFKA_SASL_PASSWORD"];
    fixture
        .check()
        .args(SASL)
        .finish()
        .expect_code(3)
        .expect_mentions(&missing);
    let offline = fixture.check().arg("--offline").args(SASL).finish();
    offline.expect_code(0).expect_mentions(&missing);
}

#[test]
fn reports_a_missing_certificate_file() {
    let fixture = Fixture::new();
    let file = "/nowhere/kafka-ca.pem";
    let location = format!("ssl.ca.location={file}");
    let flags = ["-X", "security.protocol=ssl", "-X", &location];
    let found = fixture.check().args(flags).finish().expect_code(3);
    found.expect_mentions(&["FAILED", "ssl.ca.location", file]);
    let offline = fixture.check().arg("--offline").args(flags).finish();
    offline
        .expect_code(0)
        .expect_mentions(&["WARNING", "ssl.ca.location", file]);
}

#[test]
fn distinguishes_a_closed_port_from_other_connection_failures() {
    let fixture = Fixture::new();
    let nowhere = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = nowhere.local_addr().unwrap().to_string();
    drop(nowhere);
    let found = fixture
        .invoke("check")
        .args(["--kafka", &address])
        .finish()
        .expect_code(1);
    found.expect_mentions(&[
        &format!("no broker at {address} responds"),
        "Connection refused",
    ]);
}
