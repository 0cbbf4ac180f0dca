//! SASL and TLS connections to Kafka. librdkafka implements them and is configured with its own
//! properties. Walpost rejects properties that would make librdkafka run code, unless they are
//! explicitly allowed.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::certificates::{Authority, write_private};
use crate::support::fixture::Fixture;
use crate::support::kafka::{Broker, SASL_USER, sasl_password};
use crate::support::postgres::AUTHORITY;
use crate::support::reaper;
use crate::support::secrets::SECRET;
use crate::support::walpost::Invocation;

/// While a request is pending, librdkafka reconnects twice per `reconnect.backoff.ms`. A higher
/// value spares the broker expensive TLS handshakes.
const SLOW_RECONNECT: [&str; 2] = ["-X", "reconnect.backoff.ms=1000"];

/// Returns a `walpost run` command that uses the given properties and the given listener of the
/// shared broker.
fn run(fixture: &Fixture, address: &str, properties: &[&str]) -> Invocation {
    let run = fixture
        .invoke("run")
        .args(["--kafka", address])
        .args(SLOW_RECONNECT);
    properties
        .iter()
        .fold(run, |run, property| run.args(["-X", property]))
}

fn expect_delivery(fixture: &Fixture, run: Invocation) {
    let aggregate = fixture.aggregate(1);
    let before = fixture.broker.count(&fixture.topics());
    let walpost = run.start_streaming();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(before + 1);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
}

fn sasl(mechanism: &str) -> Vec<String> {
    vec![
        "security.protocol=sasl_plaintext".to_owned(),
        format!("sasl.mechanism={mechanism}"),
        format!("sasl.username={SASL_USER}"),
    ]
}

#[test]
fn authenticates_with_sasl_plain_and_scram() {
    let fixture = Fixture::new();
    let password = format!("sasl.password={}", sasl_password());
    for mechanism in ["PLAIN", "SCRAM-SHA-256"] {
        let mut properties = sasl(mechanism);
        properties.push(password.clone());
        let properties: Vec<&str> = properties.iter().map(String::as_str).collect();
        expect_delivery(
            &fixture,
            run(&fixture, &fixture.broker.sasl_address(), &properties),
        );
    }
}

#[test]
fn reads_the_sasl_password_from_the_environment() {
    let fixture = Fixture::new();
    let properties = sasl("PLAIN");
    let properties: Vec<&str> = properties.iter().map(String::as_str).collect();
    let run = run(&fixture, &fixture.broker.sasl_address(), &properties);
    expect_delivery(
        &fixture,
        run.env("WALPOST_KAFKA_SASL_PASSWORD", sasl_password())
            .args(["--log-level", "trace"]),
    );
}

#[test]
fn halts_on_a_wrong_sasl_password() {
    let fixture = Fixture::new();
    let mut properties = sasl("PLAIN");
    properties.push(format!("sasl.password={SECRET}-wrong"));
    let properties: Vec<&str> = properties.iter().map(String::as_str).collect();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    let finished = run(&fixture, &fixture.broker.sasl_address(), &properties).finish();
    finished
        .expect_code(3)
        .expect_mentions(&["halted", "authentication"]);
}

#[test]
fn verifies_brokers_with_the_configured_certificate_authority() {
    let fixture = Fixture::new();
    let root = format!("ssl.ca.location={}", AUTHORITY.root.display());
    let address = fixture.broker.tls_address();
    expect_delivery(
        &fixture,
        run(&fixture, &address, &["security.protocol=ssl", &root]),
    );

    let other_authority = Authority::new("Another CA");
    let root = format!("ssl.ca.location={}", other_authority.root.display());
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    let finished = run(&fixture, &address, &["security.protocol=ssl", &root]).finish();
    finished
        .expect_code(3)
        .expect_mentions(&["halted", "certificate"]);
}

/// librdkafka's OpenSSL was built with certificate locations that do not exist on any system, so
/// Walpost has to find the system's certificates.
#[test]
fn trusts_system_certificate_authorities_unless_others_are_configured() {
    const BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
    let fixture = Fixture::new();
    let conninfo = fixture.server.tcp_conninfo(&fixture.name);
    let check = |root: &Path| {
        let check = fixture.with_conninfo(&conninfo).invoke("check");
        let check = check.args(["--kafka", &fixture.broker.tls_address()]);
        let check = check.args(["-X", "security.protocol=ssl"]);
        let check = check
            .without_env("SSL_CERT_FILE")
            .without_env("SSL_CERT_DIR");
        check
            .with_mounts(&format!("mount --bind {} {BUNDLE}", root.display()))
            .finish()
    };
    let trusted = check(&AUTHORITY.root);
    if !matches!(trusted.code, Some(0..=3)) {
        eprintln!("this machine does not allow mounts in a namespace: {trusted:?}");
        return;
    }
    trusted.expect_code(0);
    let other_authority = Authority::new("Another CA");
    let refused = check(&other_authority.root).expect_code(3);
    assert!(
        refused
            .stdout
            .contains("an authority that this machine does not trust"),
        "{refused:?}"
    );
}

#[test]
fn rejects_a_certificate_file_from_the_environment_that_is_writable_by_other_users() {
    let fixture = Fixture::new();
    let file = reaper::folder("authorities").join("ca.pem");
    std::fs::copy(&AUTHORITY.root, &file).unwrap();
    let with_tls = |conninfo: &str| {
        let check = fixture.with_conninfo(conninfo).invoke("check");
        let check = check.args(["--kafka", &fixture.broker.tls_address()]);
        let check = check.args(["-X", "security.protocol=ssl"]);
        check
            .env("SSL_CERT_FILE", file.display().to_string())
            .finish()
    };
    let conninfo = fixture.server.tcp_conninfo(&fixture.name);
    with_tls(&conninfo).expect_code(0);
    std::fs::set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
    let expected = ["SSL_CERT_FILE", "is writable by other users"];
    with_tls(&conninfo)
        .expect_code(2)
        .expect_mentions(&expected);
    let with_system = "sslmode=verify-full sslrootcert=system";
    let conninfo = conninfo.replace("sslmode=disable", with_system);
    let check = fixture.with_conninfo(&conninfo).check();
    let check = check.env("SSL_CERT_FILE", file.display().to_string());
    check.finish().expect_code(1).expect_mentions(&expected);
}

#[test]
fn every_command_rejects_a_broker_with_an_invalid_certificate() {
    let right = format!("ssl.ca.location={}", AUTHORITY.root.display());
    let other_authority = Authority::new("Another CA");
    let other_authority = format!("ssl.ca.location={}", other_authority.root.display());
    let broker = Broker::shared();
    let [expired, early] = broker.invalid_certificate_addresses();
    let other_name = broker.tls_address().replace("localhost", "127.0.0.1");
    for (address, root, what) in [
        (broker.tls_address(), &other_authority, "authority"),
        (other_name, &right, "is for a different name (localhost"),
        (expired, &right, "has expired"),
        (early, &right, "is not valid yet"),
    ] {
        // Each command retries for as long as a transient failure could last, so all commands for
        // one address run concurrently.
        let mut running = Vec::new();
        // Each `run` acquires its slot before Kafka responds, and keeps other commands from using
        // the slot. Therefore, use a separate slot for each `run`.
        let streaming = [&["run"][..]];
        let exactly_once = [&["run", "--exactly-once"][..]];
        let others = [
            &["check"][..],
            &["checkpoint", "show"],
            &["checkpoint", "adopt", "--yes"],
            &["replay", "--all", "--yes"],
        ];
        for commands in [&streaming[..], &exactly_once, &others] {
            let fixture = Fixture::new();
            fixture.insert(&fixture.aggregate(1), "k");
            let start = |words: &&[&str]| {
                Invocation::new(*words)
                    .args([
                        "--pipeline",
                        &fixture.name,
                        "--postgres",
                        &fixture.conninfo(),
                    ])
                    .args(["--kafka", &address])
                    .args(["-X", "security.protocol=ssl", "-X", root])
                    .args(SLOW_RECONNECT)
                    .start()
            };
            let started: Vec<_> = commands.iter().map(start).collect();
            running.push((fixture, started));
        }
        for (_fixture, started) in running {
            for walpost in started {
                let finished = walpost.finish().expect_code(3);
                finished.expect_mentions(&[
                    "rejects the connection",
                    &address,
                    "certificate",
                    what,
                ]);
            }
        }
    }
}

/// A librdkafka plugin that creates a file when it is loaded, which shows that its code ran.
struct Plugin {
    library: PathBuf,
    mark: PathBuf,
}

impl Plugin {
    fn new() -> Self {
        let folder = reaper::folder("plugin");
        let (source, library) = (folder.join("plugin.c"), folder.join("plugin.so"));
        let mark = folder.join("was_here");
        let code = format!(
            "#include <stdio.h>\n\
             __attribute__((constructor)) static void load(void) {{ fclose(fopen(\"{}\", \"w\")); }}\n\
             int conf_init(void *conf, void **opaque, char *error, unsigned long size) {{ return 0; }}\n",
            mark.display()
        );
        write_private(&source, code.as_bytes());
        let compiler = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .status()
            .expect("a C compiler");
        assert!(compiler.success());
        Self { library, mark }
    }

    fn is_loaded(&self) -> bool {
        self.mark.exists()
    }

    fn property(&self) -> String {
        format!("plugin.library.paths={}", self.library.display())
    }
}

/// All commands that read Kafka properties.
const COMMANDS: [&[&str]; 7] = [
    &["check"],
    &["run"],
    &["verify"],
    &["checkpoint", "show", "--exactly-once"],
    &["checkpoint", "adopt", "--exactly-once", "--yes"],
    &["replay", "--all", "--yes"],
    &["skip", "--to=0/1", "--yes"],
];

#[test]
fn no_command_loads_a_library_named_in_a_kafka_property() {
    let plugin = Plugin::new();
    let nowhere = "postgresql://u@/shop?host=/nowhere";
    let file = reaper::folder("config").join("walpost.toml");
    let text = format!(
        "[kafka]\n\"plugin.library.paths\" = \"{}\"\n[[pipeline]]\n",
        plugin.library.display()
    );
    write_private(&file, text.as_bytes());
    for words in COMMANDS {
        let base =
            || Invocation::new(words).args(["--postgres", nowhere, "--kafka", "127.0.0.1:9"]);
        let by_variable = base().env("WALPOST_KAFKA_PLUGIN_LIBRARY_PATHS", &plugin.library);
        let by_flag = base().args(["-X", &plugin.property()]);
        let by_file = base().arg("--config").arg(&file);
        for command in [by_variable, by_flag, by_file] {
            let finished = command.finish();
            assert!(!plugin.is_loaded(), "{words:?}: {finished:?}");
            finished.expect_code(2).expect_mentions(&[
                "plugin.library.paths",
                "load a library",
                "--allow-code-in-kafka-properties",
            ]);
        }
    }
}

#[test]
fn loads_a_library_only_if_the_command_line_or_environment_allows_it() {
    let allow = |check: Invocation, how: usize| match how {
        0 => check.arg("--allow-code-in-kafka-properties"),
        _ => check.env("WALPOST_ALLOW_CODE_IN_KAFKA_PROPERTIES", "1"),
    };
    for how in [0, 1] {
        let plugin = Plugin::new();
        let nowhere = "postgresql://u@/shop?host=/nowhere";
        let check = Invocation::new(["check", "--postgres", nowhere, "--kafka", "127.0.0.1:9"])
            .args(["-X", &plugin.property()]);
        let finished = allow(check, how).finish();
        assert!(plugin.is_loaded(), "{finished:?}");
    }
    // A configuration file can't allow libraries to be loaded.
    let file = reaper::folder("config").join("walpost.toml");
    write_private(&file, b"allow_code_in_kafka_properties = true\n");
    let check = Invocation::new(["check", "--config"]).arg(&file).finish();
    check.expect_code(2).expect_mentions(&["unknown field"]);
}

#[test]
fn rejects_kafka_properties_that_load_openssl_engines_or_run_commands() {
    let mark = |folder: &Path| folder.join("was_here");
    let folder = reaper::folder("command");
    let command = format!("touch {}", mark(&folder).display());
    for property in [
        "ssl.engine.location=/nowhere/engine.so".to_owned(),
        "ssl.engine.id=dynamic".to_owned(),
        "ssl.providers=/nowhere/provider".to_owned(),
        format!("sasl.kerberos.kinit.cmd={command}"),
        format!("sasl.kerberos.keytab=\"; {command}; \""),
        format!("sasl.kerberos.principal=$({command})"),
    ] {
        let nowhere = "postgresql://u@/shop?host=/nowhere";
        let name = property.split('=').next().unwrap_or_default();
        for subcommand in ["check", "run"] {
            let words = [subcommand, "--postgres", nowhere, "--kafka", "127.0.0.1:9"];
            let finished = Invocation::new(words).args(["-X", &property]).finish();
            finished
                .expect_code(2)
                .expect_mentions(&[name, "is not allowed: librdkafka would"]);
        }
    }
    assert!(!mark(&folder).exists());
}

#[test]
fn rejects_forbidden_kafka_properties_written_with_the_topic_prefix() {
    let nowhere = "postgresql://u@/shop?host=/nowhere";
    for property in ["topic.message.timeout.ms=1000", "topic.acks=1"] {
        let words = [
            "check",
            "--postgres",
            nowhere,
            "--kafka",
            "127.0.0.1:9",
            "-X",
            property,
        ];
        let finished = Invocation::new(words).finish();
        finished.expect_code(2).expect_mentions(&["is not allowed"]);
    }
}

#[test]
fn check_and_run_warn_about_unverified_brokers() {
    let password = format!("sasl.password={SECRET}");
    let sasl = [
        "security.protocol=sasl_ssl",
        "sasl.mechanism=PLAIN",
        "sasl.username=u",
        password.as_str(),
    ];
    let sasl_in_clear = [
        "security.protocol=sasl_plaintext",
        sasl[1],
        sasl[2],
        sasl[3],
    ];
    let with = |properties: &[&'static str], more: &'static str| {
        properties.iter().copied().chain([more]).collect::<Vec<_>>()
    };
    // A host name that can't be resolved.
    let elsewhere = "broker.invalid:9092";
    let unverified = "enable.ssl.certificate.verification=false";
    let unnamed = "ssl.endpoint.identification.algorithm=none";
    let mut running = Vec::new();
    for (brokers, properties, expected) in [
        (
            "127.0.0.1:9",
            with(&["security.protocol=ssl"], unverified),
            Some(unverified),
        ),
        (
            "127.0.0.1:9",
            with(&["security.protocol=ssl"], unnamed),
            Some(unnamed),
        ),
        (elsewhere, vec![], Some("security.protocol=plaintext")),
        ("127.0.0.1:9,localhost:9", vec![], None),
        (
            elsewhere,
            sasl_in_clear.to_vec(),
            Some("records and credentials"),
        ),
        (elsewhere, sasl.to_vec(), None),
        ("127.0.0.1:9", sasl_in_clear.to_vec(), None),
    ] {
        for subcommand in ["check", "run"] {
            let nowhere = "postgresql://u@/shop?host=/nowhere";
            let words = [subcommand, "--postgres", nowhere, "--kafka", brokers];
            let command = properties
                .iter()
                .fold(Invocation::new(words), |command, property| {
                    command.args(["-X", property])
                });
            // Each command needs some time to find that nothing is listening, so all commands run
            // concurrently.
            let case = format!("{subcommand} {brokers} {properties:?}");
            running.push((case, subcommand, expected, command.start()));
        }
    }
    for (case, subcommand, expected, mut walpost) in running {
        let finished = match subcommand {
            "check" => walpost.finish(),
            // `run` does not exit, because it retries the database connection indefinitely.
            _ => {
                walpost.wait_for_log("/nowhere");
                walpost.kill()
            }
        };
        let is_there = |text: &str| {
            expected.is_some_and(|words| {
                let words = words.replace('=', " = ");
                text.lines()
                    .any(|line| line.contains("WARN") && line.contains(&words))
            })
        };
        let log = &finished.stderr;
        assert_eq!(is_there(log), expected.is_some(), "{case}: {log}");
        assert_eq!(
            log.contains("impersonate a broker"),
            expected.is_some(),
            "{case}: {log}"
        );
        if subcommand == "check" {
            let output = &finished.stdout;
            assert_eq!(is_there(output), expected.is_some(), "{case}: {output}");
        }
    }
}

/// Anyone who can write to a file with certificates or keys can choose which brokers Walpost
/// trusts.
#[test]
fn rejects_librdkafka_files_writable_by_other_users() {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;
    let folder = reaper::folder("files");
    let file = folder.join("ca.pem");
    std::fs::copy(&AUTHORITY.root, &file).unwrap();
    let check = |property: &str, path: &Path| {
        Invocation::new(["check", "--postgres", "host=/nowhere user=u dbname=d"])
            .args([
                "--kafka",
                "127.0.0.1:9",
                "-X",
                "security.protocol=ssl",
                "-X",
            ])
            .arg(format!("{property}={}", path.display()))
            .finish()
    };
    for property in [
        // `https.ca.location` can't be set, because librdkafka is built without libcurl.
        "ssl.ca.location",
        "ssl.certificate.location",
        "ssl.crl.location",
        "ssl.key.location",
        "ssl.keystore.location",
    ] {
        set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
        let remedy = format!("chmod go-w {}", file.display());
        check(property, &file).expect_code(2).expect_mentions(&[
            property,
            "is writable by other users",
            &remedy,
        ]);
        set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
    }
    // A certificate directory that contains a file that other users can write to.
    set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
    check("ssl.ca.location", &folder).expect_code(2);
    set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
    let exposed = check("ssl.key.location", &file);
    exposed.expect_mentions(&["other users can read the private key", "chmod 0600"]);
}

/// With `ProtectSystem=strict`, systemd mounts all file systems read-only for the service, but
/// other users can still write to the files. Therefore, a read-only mount alone does not show that
/// a file can be trusted.
#[test]
fn trusts_a_read_only_mount_only_if_an_environment_variable_allows_it() {
    use std::os::unix::fs::PermissionsExt;
    let folder = reaper::folder("config");
    let file = folder.join("walpost.toml");
    let text = "[kafka]\n\"bootstrap.servers\" = \"127.0.0.1:9\"\n[[pipeline]]\n\
                postgres = \"host=localhost port=1 user=u dbname=d\"\n";
    write_private(&file, text.as_bytes());
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).unwrap();
    let check = |value: &str| {
        let check = Invocation::new(["check", "--offline", "--config"]).arg(&file);
        let check = check.env("WALPOST_TRUST_READ_ONLY_MOUNTS", value);
        check.with_read_only(&folder).finish()
    };
    let trusted = check("true");
    if !matches!(trusted.code, Some(0 | 2 | 3)) {
        eprintln!("this machine does not allow mounts in a namespace: {trusted:?}");
        return;
    }
    trusted.expect_code(0);
    for value in ["", "false"] {
        check(value).expect_code(2).expect_mentions(&[
            "is writable by other users",
            "WALPOST_TRUST_READ_ONLY_MOUNTS=true",
        ]);
    }
}

/// Anyone who can write to the configuration file or the program can run code as Walpost.
#[test]
fn no_command_runs_a_program_writable_by_other_users() {
    use std::os::unix::fs::PermissionsExt;
    let folder = reaper::folder("config");
    let [file, program, mark] =
        ["walpost.toml", "program.sh", "mark"].map(|name| folder.join(name));
    let script = format!("#!/bin/sh\ntouch {}\necho x\n", mark.display());
    write_private(&program, script.as_bytes());
    let set = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let tokens =
        "\"security.protocol\" = \"sasl_plaintext\"\n\"sasl.mechanisms\" = \"OAUTHBEARER\"\n";
    for (key, properties) in [("password_command", ""), ("kafka_token_command", tokens)] {
        let text = format!(
            "[kafka]\n\"bootstrap.servers\" = \"127.0.0.1:9\"\n{properties}[[pipeline]]\n\
             postgres = \"host=localhost port=1 user=u dbname=d\"\n{key} = [\"{}\"]\n",
            program.display()
        );
        write_private(&file, text.as_bytes());
        for (path, safe, open) in [
            (&file, 0o600, 0o602),
            (&file, 0o600, 0o620),
            (&program, 0o700, 0o722),
            (&folder, 0o755, 0o777),
        ] {
            set(&program, 0o700);
            set(path, open);
            for words in [
                &["check"][..],
                &["run"],
                &["init", "--no-role"],
                &["maintain"],
                &["verify"],
            ] {
                let refused = Invocation::new(words).arg("--config").arg(&file).finish();
                let path_text = path.display().to_string();
                let expected = [&path_text, "is writable by other users", "chmod go-w"];
                let refused = refused.expect_code(2).expect_mentions(&expected);
                if path == &program {
                    refused.expect_mentions(&[key]);
                }
            }
            set(path, safe);
            assert!(!mark.exists(), "{key}: {} {open:o}", path.display());
        }
    }
}
