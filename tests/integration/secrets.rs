//! Walpost never prints a password, whatever fails and however verbose the log is.

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use openssl::pkey::PKey;
use openssl::symm::Cipher;

use crate::support::certificates::{Identity, write_private};
use crate::support::fixture::Fixture;
use crate::support::kafka::{SASL_USER, sasl_password};
use crate::support::postgres::AUTHORITY;
use crate::support::reaper;
use crate::support::secrets::{OutputStream, PAYLOAD_MARK, SECRET, expect_none, is_leak};
use crate::support::wait::wait_until;
use crate::support::walpost::{Finished, Invocation};

/// Percent-encodes every byte.
fn percent_encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

/// A fixture in which every connection needs a password or a passphrase.
struct SecretsFixture {
    fixture: Fixture<'static>,
    identity: Identity,
    /// The client certificate's private key, encrypted with the passphrase.
    key: PathBuf,
    password: String,
    passphrase: String,
}

impl SecretsFixture {
    fn new() -> Self {
        let fixture = Fixture::new();
        let role = &fixture.name;
        let password = format!("{SECRET} of the role");
        fixture.db.run(&format!(
            "CREATE ROLE {role} SUPERUSER LOGIN PASSWORD '{password}'"
        ));
        let passphrase = format!("{SECRET} of the key");
        let identity = AUTHORITY.sign(role, &[]);
        let key = PKey::private_key_from_pem(&fs::read(&identity.key).unwrap()).unwrap();
        let pem = key
            .private_key_to_pem_pkcs8_passphrase(Cipher::aes_256_cbc(), passphrase.as_bytes())
            .unwrap();
        let key = reaper::folder("key").join("client.key");
        write_private(&key, &pem);
        Self {
            fixture,
            identity,
            key,
            password,
            passphrase,
        }
    }

    /// Returns a connection URL for the database in which every byte of the password and the
    /// passphrase is percent-encoded.
    fn url(&self, password: &str, passphrase: &str) -> String {
        format!(
            "postgresql://{role}:{}@localhost:{}/{role}?sslmode=verify-full&sslrootcert={}&sslcert={}&sslkey={}\
             &sslpassword={}",
            percent_encoded(password),
            self.fixture.server.port,
            AUTHORITY.root.display(),
            self.identity.certificate.display(),
            self.key.display(),
            percent_encoded(passphrase),
            role = self.fixture.name,
        )
    }

    /// Returns a Walpost command that logs at the most verbose level.
    fn command(&self, words: &[&str], url: &str) -> Invocation {
        Invocation::new(words)
            .args(["--pipeline", &self.fixture.name, "--postgres", url])
            .args(["--log-level", "trace"])
    }

    fn with_correct_url(&self, words: &[&str]) -> Invocation {
        self.command(words, &self.url(&self.password, &self.passphrase))
    }

    /// Configures the command to connect to Kafka with a password, and librdkafka to log as much as
    /// it can.
    fn by_sasl(&self, command: Invocation, password: &str) -> Invocation {
        command
            .args(["--kafka", &self.fixture.broker.sasl_address()])
            .args(["-Xdebug=all", "-Xsecurity.protocol=sasl_plaintext"])
            .args(["-Xsasl.mechanism=PLAIN"])
            .args([
                format!("-Xsasl.username={SASL_USER}"),
                format!("-Xsasl.password={password}"),
            ])
    }

    /// Configures the command to connect to Kafka over TLS with the encrypted client key.
    fn with_client_key(&self, command: Invocation, passphrase: &str) -> Invocation {
        let file = |name, path: &Path| format!("-X{name}={}", path.display());
        command
            .args(["--kafka", &self.fixture.broker.tls_address()])
            .args(["-Xdebug=all", "-Xsecurity.protocol=ssl"])
            .args([
                file("ssl.ca.location", &AUTHORITY.root),
                file("ssl.key.location", &self.key),
                file("ssl.certificate.location", &self.identity.certificate),
                format!("-Xssl.key.password={passphrase}"),
            ])
    }
}

impl Drop for SecretsFixture {
    fn drop(&mut self) {
        self.fixture.db.drop_role(&self.fixture.name);
    }
}

/// Asserts that the log really is verbose. [`Invocation`] has already searched the output for
/// secrets.
fn expect_verbose_log(finished: &Finished) {
    for text in ["TRACE", "DEBUG"] {
        assert!(finished.stderr.contains(text), "{text}");
    }
}

#[test]
fn prints_no_secrets_during_init_or_while_streaming_or_reconnecting() {
    let locked = SecretsFixture::new();
    let fixture = &locked.fixture;
    let aggregate = fixture.aggregate(1);
    let init = locked.with_correct_url(&["init"]).arg("--no-role");
    expect_verbose_log(&init.finish().expect_code(0));
    let sasl = |words: &[&str]| {
        let password = sasl_password();
        locked.by_sasl(locked.with_correct_url(words), &password)
    };
    let adopt = sasl(&["checkpoint", "adopt"]).arg("--yes");
    adopt.finish().expect_code(0);
    sasl(&["checkpoint", "show"]).finish().expect_code(0);
    for more in [&["--exactly-once"][..], &["--json"]] {
        expect_verbose_log(&sasl(&["check"]).args(more).finish().expect_code(0));
    }

    let runs = [
        sasl(&["run"]).arg("--exactly-once"),
        sasl(&["run"]),
        locked.with_client_key(locked.with_correct_url(&["run"]), &locked.passphrase),
    ];
    for run in runs {
        let before = fixture.broker.count(&fixture.topics());
        let mut walpost = run.start_streaming();
        fixture.insert(&aggregate, "before");
        fixture.wait_until_confirmed();
        wait_until("a walsender to end", || fixture.end_walsender());
        walpost.wait_for_logs("streaming", 2);
        fixture.insert(&aggregate, "after");
        fixture.wait_until_confirmed();
        expect_verbose_log(&walpost.terminate().expect_code(0));
        assert!(fixture.broker.count(&fixture.topics()) > before);
    }
}

#[test]
fn prints_no_secrets_when_credentials_are_wrong() {
    let locked = SecretsFixture::new();
    let wrong = format!("{SECRET}-wrong");
    let no_login = locked.url(&wrong, &locked.passphrase);
    let no_key = locked.url(&locked.password, &wrong);
    for (url, reason) in [(&no_login, "28P01"), (&no_key, "client.key")] {
        let init = locked.command(&["init"], url).arg("--no-role");
        init.finish().expect_code(3).expect_mentions(&[reason]);
        for words in [&["check"][..], &["checkpoint", "show"], &["run"]] {
            let command = locked.by_sasl(locked.command(words, url), &sasl_password());
            command.finish().expect_code(3).expect_mentions(&[reason]);
        }
    }
    locked.fixture.insert(&locked.fixture.aggregate(1), "k");
    let run = locked.by_sasl(locked.with_correct_url(&["run"]), &wrong);
    run.finish()
        .expect_code(3)
        .expect_mentions(&["authentication"]);
    let check = locked.by_sasl(locked.with_correct_url(&["check"]), &wrong);
    check.finish().expect_mentions(&["sasl"]);
    let run = locked.with_client_key(locked.with_correct_url(&["run"]), &wrong);
    let finished = run.finish().expect_mentions(&["ssl.key"]);
    assert!(matches!(finished.code, Some(2 | 3)), "{finished:?}");
}

#[test]
fn configuration_errors_do_not_reveal_secrets() {
    let url = format!("postgresql://u:{SECRET}@/shop?host=/nowhere");
    let property = format!("sasl.password={SECRET}");
    for arguments in [
        vec!["run", &url],
        vec!["run", &property],
        vec!["run", "--postgres", &url, "-X", "acks"],
        vec!["run", "--postgres", &url, "--kafka", "a:1", "-X", "acks=1"],
        vec!["run", "--postgres", &url, "-X", &property, "-X", "x=y"],
    ] {
        Invocation::new(arguments).finish().expect_code(2);
    }
    let without_equals = format!("sasl.password:{SECRET}");
    let run = Invocation::new(["run", "--postgres", &url, "-X", &without_equals]);
    run.finish().expect_code(2).expect_mentions(&["NAME=VALUE"]);
    for (line, text) in [
        (6, format!("postgres = \"{url}\"\nslto = 1")),
        (5, format!("postgres = \"{url}")),
        (5, format!("postgres = [\"{url}\"]")),
        (
            5,
            format!("kafka = {{ \"sasl.password\" = [\"{SECRET}\"] }}"),
        ),
    ] {
        let file = reaper::folder("config").join("walpost.toml");
        let head = format!("[kafka]\n\"sasl.password\" = \"{SECRET}\"\n\n[[pipeline]]\n");
        write_private(&file, format!("{head}{text}\n").as_bytes());
        let run = Invocation::new(["run", "--config"]).arg(file).finish();
        run.expect_code(2)
            .expect_mentions(&[&format!("line {line}")]);
    }
}

#[test]
fn warns_about_a_password_on_the_command_line_and_suggests_alternatives() {
    let nowhere = "postgresql://u@/shop?host=/nowhere";
    let with_password = format!("postgresql://u:{SECRET}@/shop?host=/nowhere");
    let property = format!("sasl.password={SECRET}");
    let check = || Invocation::new(["check", "--kafka", "127.0.0.1:9"]);
    let warned = check().args(["--postgres", &with_password, "-X", &property]);
    let warned = warned.finish().expect_mentions(&[
        "WARN",
        "--postgres: a password was passed on the command line",
        "PGPASSWORD",
        "-X sasl.password: a password was passed on the command line",
        "WALPOST_KAFKA_SASL_PASSWORD",
    ]);
    assert_eq!(warned.stderr.matches("on the command line").count(), 2);
    let quiet = check()
        .env("WALPOST_POSTGRES", &with_password)
        .env("WALPOST_KAFKA_SASL_PASSWORD", SECRET);
    let from_flags = check()
        .args(["--postgres", nowhere])
        .env("PGPASSWORD", SECRET);
    for finished in [quiet.finish(), from_flags.finish()] {
        let log = &finished.stderr;
        assert!(!log.contains("on the command line"), "{log}");
    }
}

#[test]
fn warns_if_a_configuration_file_with_a_password_is_readable_by_others() {
    use std::os::unix::fs::PermissionsExt;
    let nowhere = "postgres = \"postgresql://u@/shop?host=/nowhere\"";
    let in_url = format!("postgres = \"postgresql://u:{SECRET}@/shop?host=/nowhere\"");
    let in_pairs = format!("postgres = \"host=/nowhere user=u sslpassword={SECRET}\"");
    let in_kafka = format!("{nowhere}\nkafka = {{ \"ssl.key.password\" = \"{SECRET}\" }}");
    let kafka = "[kafka]\n\"bootstrap.servers\" = \"127.0.0.1:9\"\n";
    let with_sasl = format!("{kafka}\"sasl.password\" = \"{SECRET}\"\n");
    for (head, pipeline, named) in [
        (
            kafka,
            in_url.as_str(),
            Some("postgres of pipeline \"outbox\""),
        ),
        (kafka, &in_pairs, Some("postgres of pipeline \"outbox\"")),
        (
            kafka,
            &in_kafka,
            Some("ssl.key.password in pipeline \"outbox\""),
        ),
        (&with_sasl, nowhere, Some("sasl.password in [kafka]")),
        (kafka, nowhere, None),
    ] {
        let file = reaper::folder("config").join("walpost.toml");
        write_private(
            &file,
            format!("{head}[[pipeline]]\n{pipeline}\n").as_bytes(),
        );
        for (mode, is_open) in [
            (0o600, false),
            (0o400, false),
            (0o640, true),
            (0o604, true),
            (0o644, true),
        ] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            let maintain = Invocation::new(["maintain", "--config"]).arg(&file);
            let finished = maintain.finish();
            let expected = named.filter(|_| is_open);
            let count = usize::from(expected.is_some());
            let log = &finished.stderr;
            assert_eq!(
                log.matches("other users can read").count(),
                count,
                "{mode:o}: {log}"
            );
            if let Some(named) = expected {
                let remedy = format!("Run: chmod 0600 {}", file.display());
                finished.expect_mentions(&["WARN", named, &remedy]);
            }
        }
    }

    let file = reaper::folder("config").join("walpost.toml");
    write_private(
        &file,
        format!("{with_sasl}[[pipeline]]\n{in_url}\n").as_bytes(),
    );
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    // Run the commands concurrently, because some need a while to fail when nothing is listening.
    let commands = [
        &["check"][..],
        &["init", "--no-role"],
        &["status"],
        &["verify"],
        &["checkpoint", "show"],
        &["replay", "--all", "--yes"],
        &["skip", "--to=0/1"],
        &["run"],
    ];
    let start = |words: &&[&str]| Invocation::new(*words).arg("--config").arg(&file).start();
    for mut walpost in commands.iter().map(start).collect::<Vec<_>>() {
        walpost.wait_for_log(
            "other users can read the passwords in it (sasl.password in [kafka], postgres of",
        );
        // Some of the commands have exited by now.
        if walpost.is_running() {
            walpost.signal("KILL");
        }
        let log = walpost.finish().stderr;
        assert_eq!(log.matches("other users can read").count(), 1, "{log}");
    }
}

#[test]
fn help_explains_where_to_put_a_password() {
    for words in [&["run"][..], &["check"], &["init"], &["checkpoint", "show"]] {
        let help = Invocation::new(words).arg("--help").finish();
        let stdout = help.expect_code(0).stdout;
        // Undo the line wrapping of the help text.
        let text = stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        let advice = "Set the password in PGPASSWORD or ~/.pgpass, because other users of this machine can see command lines";
        assert!(text.contains(advice), "{words:?}: {text}");
        if words != ["init"] {
            let advice =
                "For secrets, use a file or an environment variable: WALPOST_KAFKA_SASL_PASSWORD";
            assert!(text.contains(advice), "{words:?}: {text}");
        }
    }
}

#[test]
fn help_does_not_show_passwords_from_the_environment() {
    let url = format!("postgresql://u:{SECRET}@/shop");
    let help = Invocation::new(["run", "--help"])
        .env("WALPOST_POSTGRES", url)
        .env("WALPOST_KAFKA_SASL_PASSWORD", SECRET)
        .env("PGPASSWORD", SECRET);
    help.finish().expect_code(0);
}

/// Returns a command whose pipeline name contains [`SECRET`] and is invalid, so that the error
/// message contains [`SECRET`] too.
fn command_that_prints_secret() -> Invocation {
    let name = format!("{SECRET}!");
    Invocation::new(["run", "--kafka", "a:1", "--postgres", "", "--pipeline"]).arg(name)
}

#[test]
fn harness_fails_a_test_whose_program_prints_a_secret() {
    assert!(catch_unwind(|| command_that_prints_secret().finish()).is_err());
    let dropped = catch_unwind(|| {
        let walpost = command_that_prints_secret().start();
        wait_until("the error", || walpost.log().contains(SECRET));
    });
    assert!(dropped.is_err());
}

#[test]
fn secret_search_finds_every_encoding_of_a_secret() {
    let inside = format!("x{SECRET} of");
    for text in [
        inside.clone(),
        percent_encoded(&inside),
        format!("{:?}", inside.as_bytes()),
        inside.bytes().map(|byte| format!("{byte:02x}")).collect(),
        STANDARD.encode(&inside),
        STANDARD.encode(format!("x{inside}")),
        STANDARD.encode(format!("xx{inside}")),
    ] {
        assert!(is_leak(OutputStream::Error, &text), "{text}");
        assert!(is_leak(OutputStream::Output, &text), "{text}");
        assert!(catch_unwind(|| expect_none(OutputStream::Output, &text)).is_err());
    }
    assert!(is_leak(OutputStream::Error, PAYLOAD_MARK));
    assert!(
        !is_leak(OutputStream::Output, PAYLOAD_MARK),
        "standard output may contain records"
    );
    assert!(!is_leak(OutputStream::Error, "secret"));
}

/// Only helpers that search the output for secrets may start the binary.
#[test]
fn only_test_helpers_that_search_output_for_secrets_start_the_walpost_binary() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut starters = Vec::new();
    let mut folders = vec![folder];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(text) = fs::read_to_string(&path)
                && text.contains(concat!("CARGO_BIN_EXE", "_walpost"))
            {
                starters.push(path);
            }
        }
    }
    starters.sort();
    let expected = [
        "integration/debezium.rs",
        "integration/printed_commands.rs",
        "integration/readme/environment.rs",
        "support/walpost.rs",
    ];
    assert_eq!(starters.len(), expected.len(), "{starters:?}");
    for (starter, expected) in starters.iter().zip(expected) {
        assert!(starter.ends_with(expected), "{starters:?}");
    }
}
