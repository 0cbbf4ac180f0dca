//! All methods to authenticate to PostgreSQL, and to authenticate the server.

use std::path::Path;
use std::sync::LazyLock;

use crate::support::certificates::{Authority, Identity, Validity, write_private};
use crate::support::fixture::Fixture;
use crate::support::intercepting_proxy::{
    InterceptAction, InterceptingProxy, non_loopback_address,
};
use crate::support::kafka::Broker;
use crate::support::postgres::{AUTHORITY, MAJOR, Server};
use crate::support::process::free_port;
use crate::support::reaper;
use crate::support::secrets::SECRET;
use crate::support::wait::wait_until;
use crate::support::walpost::{Finished, Invocation};

/// Roles of the shared server; their names select the method in pg_hba.conf.
static ROLES: LazyLock<()> = LazyLock::new(|| {
    let session = Server::shared(MAJOR).session("postgres");
    for (role, encryption) in [
        ("md5_user", "md5"),
        ("scram_user", "scram-sha-256"),
        ("plain_user", "scram-sha-256"),
        ("tls_user", "scram-sha-256"),
        ("cert_only", "scram-sha-256"),
    ] {
        let password = password_of(role).replace('\'', "''");
        session.run(&format!(
            "SET password_encryption = '{encryption}';
             CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{password}'"
        ));
    }
});

/// The certificate of a role that authenticates with a certificate alone.
static CLIENT: LazyLock<Identity> = LazyLock::new(|| AUTHORITY.sign("cert_only", &[]));

fn password_of(role: &str) -> String {
    format!("{SECRET} of {role}'s")
}

/// Returns a value quoted for the key=value form.
fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\\', r"\\").replace('\'', r"\'"))
}

struct Guarded {
    fixture: Fixture<'static>,
    aggregate: String,
}

impl Guarded {
    fn new() -> Self {
        LazyLock::force(&ROLES);
        let fixture = Fixture::new();
        // The roles exist on the whole server, and each of them may run the pipeline in this
        // database.
        fixture
            .db
            .run("GRANT USAGE ON SCHEMA walpost TO PUBLIC; GRANT SELECT, INSERT ON walpost.journal TO PUBLIC; \
                 GRANT SELECT, INSERT, UPDATE ON walpost.slot_state, walpost.table_state TO PUBLIC");
        let aggregate = fixture.aggregate(1);
        fixture.insert(&aggregate, "k");
        Self { fixture, aggregate }
    }

    /// Returns a conninfo for the role over TCP, with more parameters.
    fn tcp(&self, role: &str, parameters: &str) -> String {
        let port = self.fixture.server.port;
        format!(
            "host=localhost port={port} user={role} dbname={} {parameters}",
            self.fixture.name
        )
    }

    fn run(&self, conninfo: &str) -> Invocation {
        self.fixture.with_conninfo(conninfo).run()
    }

    /// Asserts that `run` delivers an event.
    fn delivers(&self, run: Invocation) {
        let topics = self.fixture.topics();
        let before = self.fixture.broker.count(&topics);
        let walpost = run.start_streaming();
        self.fixture.insert(&self.aggregate, "k");
        self.fixture.wait_for_records(before + 1);
        self.fixture.wait_until_confirmed();
        walpost.terminate().expect_code(0);
    }

    fn refuses(&self, conninfo: &str, texts: &[&str]) -> Finished {
        self.run(conninfo)
            .finish()
            .expect_code(3)
            .expect_mentions(&["halted"])
            .expect_mentions(texts)
    }
}

fn root() -> String {
    quoted(&AUTHORITY.root.display().to_string())
}

#[test]
fn authenticates_with_a_password_by_every_method() {
    let guarded = Guarded::new();
    for role in ["md5_user", "scram_user", "plain_user"] {
        for mode in ["disable", "require"] {
            let password = quoted(&password_of(role));
            let conninfo = guarded.tcp(role, &format!("password={password} sslmode={mode}"));
            guarded.delivers(guarded.run(&conninfo));
        }
        let wrong = guarded.tcp(role, &format!("password={SECRET}-wrong"));
        guarded.refuses(&wrong, &["authentication failed", role]);
    }
}

#[test]
fn password_in_a_url_is_decoded() {
    let guarded = Guarded::new();
    let url = format!(
        "postgresql://scram_user:{SECRET}%20of%20scram_user%27s@localhost:{}/{}?sslmode=prefer",
        guarded.fixture.server.port, guarded.fixture.name
    );
    guarded.delivers(guarded.run(&url).args(["--log-level", "trace"]));
}

#[test]
fn check_shows_no_password() {
    let guarded = Guarded::new();
    for password in [password_of("scram_user"), format!("{SECRET}-wrong")] {
        let url = guarded.tcp("scram_user", &format!("password={}", quoted(&password)));
        let check = guarded.fixture.with_conninfo(&url).check();
        let check = check.args(["--json", "--log-level", "trace"]);
        assert!(!check.finish().stdout.is_empty());
    }
}

#[test]
fn password_comes_from_the_environment_or_a_file() {
    let guarded = Guarded::new();
    let conninfo = guarded.tcp("scram_user", "");
    let password = password_of("scram_user");
    guarded.delivers(guarded.run(&conninfo).env("PGPASSWORD", &password));

    let home = reaper::folder("home");
    let line = format!(
        "# of everyone\nelsewhere:*:*:*:wrong\n*:{}:{}:scram_user:{password}\n",
        guarded.fixture.server.port, guarded.fixture.name
    );
    write_private(&home.join(".pgpass"), line.as_bytes());
    guarded.delivers(guarded.run(&conninfo).env("HOME", &home));
    guarded.delivers(
        guarded
            .run(&conninfo)
            .env("PGPASSFILE", home.join(".pgpass")),
    );
    guarded.refuses(&conninfo, &["password"]);
}

#[test]
fn password_file_that_others_may_read_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let guarded = Guarded::new();
    let file = reaper::folder("home").join("passwords");
    write_private(
        &file,
        format!("*:*:*:*:{}\n", password_of("scram_user")).as_bytes(),
    );
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let run = guarded
        .run(&guarded.tcp("scram_user", ""))
        .env("PGPASSFILE", &file);
    run.finish().expect_code(3).expect_mentions(&["password"]);
}

/// OpenSSL's configuration file can name libraries that OpenSSL loads, and is not examined. This one
/// disables all algorithms.
#[test]
fn configuration_file_of_openssl_is_not_loaded() {
    let fixture = Fixture::new();
    let file = reaper::folder("openssl").join("openssl.cnf");
    let text = "openssl_conf = all\n[all]\nalg_section = algorithms\n[algorithms]\ndefault_properties = fips=yes\n";
    write_private(&file, text.as_bytes());
    let conninfo = fixture
        .server
        .tcp_conninfo(&fixture.name)
        .replace("sslmode=disable", "sslmode=require");
    let check = fixture
        .with_conninfo(&conninfo)
        .invoke("check")
        .env("OPENSSL_CONF", &file);
    let check = check.args(["--kafka", &fixture.broker.address()]).finish();
    check.expect_code(0);
}

/// Write access to one of these files is enough to choose which server is trusted or which
/// credentials Walpost uses.
#[test]
fn files_that_others_can_write_are_not_used() {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;
    let guarded = Guarded::new();
    let folder = reaper::folder("files");
    let [passwords, authority] = ["passwords", "root.pem"].map(|name| folder.join(name));
    let line = format!("*:*:*:*:{}\n", password_of("scram_user"));
    write_private(&passwords, line.as_bytes());
    std::fs::copy(&AUTHORITY.root, &authority).unwrap();
    let open = |mode| set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
    let verified = format!("sslmode=verify-full sslrootcert={}", authority.display());
    let remedy = format!("chmod go-w {}", folder.display());
    let conninfo = guarded.tcp("scram_user", &verified);
    let run = || guarded.run(&conninfo).env("PGPASSFILE", &passwords);
    open(0o777);
    let mut walpost = run().start();
    let line = walpost.wait_for_log("reconnecting");
    for text in ["sslrootcert", "the file is not used", &remedy] {
        assert!(line.contains(text), "{text} in {line}");
    }
    let plain = guarded.run(&guarded.tcp("scram_user", ""));
    let refused = plain.env("PGPASSFILE", &passwords).finish();
    refused.expect_code(3).expect_mentions(&[
        "password file ignored",
        &remedy,
        "the server requests a password for role",
    ]);
    // The pipeline has been retrying all the time.
    open(0o755);
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
}

#[test]
fn connection_is_named_by_libpq_variables_alone() {
    let guarded = Guarded::new();
    let fixture = &guarded.fixture;
    let run = Invocation::new([
        "run",
        "--pipeline",
        &fixture.name,
        "--kafka",
        &fixture.broker.address(),
    ])
    .env("PGHOST", &fixture.server.socket)
    .env("PGPORT", fixture.server.port.to_string())
    .env("PGUSER", "postgres")
    .env("PGDATABASE", &fixture.name);
    guarded.delivers(run);
}

#[test]
fn encryption_follows_sslmode() {
    let guarded = Guarded::new();
    let password = quoted(&password_of("tls_user"));
    let root = root();
    for parameters in [
        "sslmode=prefer".to_owned(),
        "sslmode=require".to_owned(),
        "sslmode=require channel_binding=require".to_owned(),
        format!("sslmode=verify-ca sslrootcert={root}"),
        format!("sslmode=verify-full sslrootcert={root}"),
    ] {
        let conninfo = guarded.tcp("tls_user", &format!("password={password} {parameters}"));
        guarded.delivers(guarded.run(&conninfo));
    }
    let conninfo = guarded.tcp("tls_user", &format!("password={password} sslmode=disable"));
    guarded.refuses(&conninfo, &["pg_hba.conf"]);
    let conninfo = guarded.tcp("tls_user", &format!("password={password}"));
    guarded.delivers(guarded.run(&conninfo).env("PGSSLMODE", "require"));
}

#[test]
fn stream_itself_is_encrypted() {
    let guarded = Guarded::new();
    let password = quoted(&password_of("tls_user"));
    let conninfo = guarded.tcp("tls_user", &format!("password={password} sslmode=require"));
    let walpost = guarded.run(&conninfo).start_streaming();
    let encrypted = guarded.fixture.db.is_true(&format!(
        "SELECT ssl FROM pg_stat_ssl JOIN pg_replication_slots ON active_pid = pid WHERE slot_name = '{}'",
        guarded.fixture.slot()
    ));
    assert!(encrypted);
    walpost.terminate().expect_code(0);
}

#[test]
fn server_of_another_authority_or_name_is_refused() {
    let guarded = Guarded::new();
    let password = quoted(&password_of("tls_user"));
    let stranger = Authority::new("Another CA");
    let stranger = quoted(&stranger.root.display().to_string());
    for mode in ["verify-ca", "verify-full"] {
        let parameters = format!("password={password} sslmode={mode} sslrootcert={stranger}");
        guarded.refuses(&guarded.tcp("tls_user", &parameters), &["certificate"]);
    }
    let by_address = |mode| {
        let root = root();
        let parameters = format!("password={password} sslmode={mode} sslrootcert={root}");
        guarded
            .tcp("tls_user", &parameters)
            .replace("host=localhost", "host=127.0.0.1")
    };
    guarded.refuses(&by_address("verify-full"), &["127.0.0.1", "certificate"]);
    guarded.delivers(guarded.run(&by_address("verify-ca")));
    let parameters =
        format!("password={password} sslmode=verify-full sslrootcert=/nowhere/root.pem");
    let finished = guarded.run(&guarded.tcp("tls_user", &parameters)).finish();
    assert!(matches!(finished.code, Some(2 | 3)), "{finished:?}");
    finished.expect_mentions(&["/nowhere/root.pem"]);
}

/// Returns every command that connects to the database.
fn commands(fixture: &Fixture, conninfo: &str) -> Vec<Invocation> {
    let kafka = fixture.broker.address();
    let command = |words: &[&str]| {
        Invocation::new(words).args(["--pipeline", &fixture.name, "--postgres", conninfo])
    };
    let with_kafka = |words| command(words).args(["--kafka", &kafka]);
    vec![
        command(&["init", "--no-role"]),
        with_kafka(&["check"]),
        with_kafka(&["checkpoint", "show"]),
        with_kafka(&["checkpoint", "adopt", "--yes"]),
        with_kafka(&["run"]),
        with_kafka(&["skip", "--to", "0/1", "--yes"]),
        with_kafka(&["replay", "--all", "--yes"]),
    ]
}

#[test]
fn no_command_talks_to_a_server_whose_certificate_does_not_hold() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    let (right, stranger) = (root(), Authority::new("Another CA"));
    let stranger = quoted(&stranger.root.display().to_string());
    let conninfo = |host: &str, mode: &str, root: &str| {
        let (port, name) = (server.port, &fixture.name);
        format!(
            "host={host} port={port} user=postgres dbname={name} sslmode={mode} sslrootcert={root}"
        )
    };
    let refused = |conninfo: &str, reason: &str| {
        for command in commands(&fixture, conninfo) {
            let finished = command.finish().expect_code(3);
            finished.expect_mentions(&["certificate", reason]);
        }
    };
    refused(
        &conninfo("localhost", "verify-full", &stranger),
        "self-signed",
    );
    refused(&conninfo("127.0.0.1", "verify-full", &right), "127.0.0.1");
    for (validity, reason) in [
        (Validity::Past, "expired"),
        (Validity::Future, "not yet valid"),
    ] {
        server.present_certificate(&AUTHORITY.sign_for("localhost", &["localhost"], validity));
        refused(&conninfo("localhost", "verify-full", &right), reason);
        // As in libpq, `require` checks the certificate if there is a root certificate.
        for mode in ["verify-ca", "require"] {
            let run = fixture
                .with_conninfo(&conninfo("localhost", mode, &right))
                .run()
                .finish();
            run.expect_code(3).expect_mentions(&["certificate", reason]);
        }
    }
    server.present_certificate(&AUTHORITY.sign("localhost", &["localhost"]));
    let conninfo = conninfo("localhost", "verify-full", &right);
    fixture
        .with_conninfo(&conninfo)
        .init()
        .finish()
        .expect_code(0);
}

#[test]
fn client_certificate_authenticates() {
    let guarded = Guarded::new();
    let file = |path: &Path| quoted(&path.display().to_string());
    let (certificate, key) = (file(&CLIENT.certificate), file(&CLIENT.key));
    let root = root();
    let parameters =
        format!("sslmode=verify-full sslrootcert={root} sslcert={certificate} sslkey={key}");
    guarded.delivers(guarded.run(&guarded.tcp("cert_only", &parameters)));
    guarded.refuses(
        &guarded.tcp("cert_only", "sslmode=require"),
        &["certificate"],
    );
}

#[test]
fn first_host_that_takes_writes_is_used() {
    let guarded = Guarded::new();
    let fixture = &guarded.fixture;
    let conninfo = format!(
        "host=127.0.0.1,{} port={},{} user=postgres dbname={} target_session_attrs=read-write",
        fixture.server.socket.display(),
        free_port(),
        fixture.server.port,
        fixture.name
    );
    guarded.delivers(guarded.run(&conninfo));
}

/// Returns a conninfo through the attacker's proxy, for a role that has a password.
fn through(
    guarded: &Guarded,
    interceptor: &InterceptingProxy,
    role: &str,
    parameters: &str,
) -> String {
    let password = quoted(&password_of(role));
    format!(
        "{} user={role} dbname={} password={password} {parameters}",
        interceptor.parameters(),
        guarded.fixture.name
    )
}

#[test]
fn intercepting_proxy_does_not_get_the_password() {
    let Some(address) = non_loopback_address() else {
        return;
    };
    let guarded = Guarded::new();
    let port = guarded.fixture.server.port;
    for (deed, method) in [
        (InterceptAction::RequestPassword, "password"),
        (InterceptAction::RequestHash, "md5"),
    ] {
        let everyone = InterceptingProxy::start(address, port, move |_| deed);
        // The catalog connection is passed through, and the replication connection is attacked.
        let replication = InterceptingProxy::start(address, port, move |is_replication| {
            if is_replication {
                deed
            } else {
                InterceptAction::Pass
            }
        });
        for interceptor in [&everyone, &replication] {
            let conninfo = through(&guarded, interceptor, "scram_user", "");
            let opt_in = format!("require_auth={method}");
            let check = guarded
                .fixture
                .with_conninfo(&conninfo)
                .check()
                .finish()
                .expect_code(3);
            assert_eq!(interceptor.received(), "", "of {deed:?}");
            let found = &check.stdout;
            assert!(
                found.contains("does not use TLS") && found.contains(&opt_in),
                "{found}"
            );
            guarded.refuses(&conninfo, &["does not use TLS", "was not sent", &opt_in]);
            assert_eq!(interceptor.received(), "", "of {deed:?}");

            // Verifies that the proxy would have received the password.
            let conninfo = through(
                &guarded,
                interceptor,
                "scram_user",
                &format!("{opt_in},scram-sha-256"),
            );
            guarded.refuses(&conninfo, &["got it"]);
            assert_ne!(interceptor.received(), "", "of {deed:?}");
        }
    }
}

#[test]
fn connection_that_is_open_to_the_network_is_warned_of_once_by_each_command() {
    let Some(address) = non_loopback_address() else {
        return;
    };
    let guarded = Guarded::new();
    let interceptor = InterceptingProxy::start(address, guarded.fixture.server.port, |_| {
        InterceptAction::Pass
    });
    let conninfo = through(&guarded, &interceptor, "scram_user", "");
    let warning = format!(
        "the connection to PostgreSQL at {} does not use TLS (sslmode=prefer)",
        interceptor.address
    );
    let mut walpost = guarded.run(&conninfo).start_streaming();
    wait_until("a walsender to end", || guarded.fixture.end_walsender());
    walpost.wait_for_logs("streaming", 2);
    assert_eq!(walpost.logged(&warning), 1, "{}", walpost.log());
    walpost.terminate().expect_code(0);

    let check = guarded.fixture.with_conninfo(&conninfo).check().finish();
    let finding = format!("encryption: {warning}");
    let lines: Vec<_> = check
        .stdout
        .lines()
        .filter(|line| line.contains(&finding))
        .collect();
    assert_eq!(lines.len(), 1, "{}", check.stdout);
    assert!(lines[0].starts_with("WARNING"), "{lines:?}");

    // TLS, and the settings that make it sufficient.
    let tunnel = InterceptingProxy::tunnel(address, guarded.fixture.server.port);
    let root = root();
    for (parameters, is_open) in [
        ("sslmode=prefer".to_owned(), true),
        ("sslmode=require".to_owned(), true),
        ("sslmode=require channel_binding=require".to_owned(), false),
        (format!("sslmode=verify-ca sslrootcert={root}"), false),
        (
            format!("host=localhost sslmode=verify-full sslrootcert={root}"),
            false,
        ),
    ] {
        let conninfo = through(&guarded, &tunnel, "tls_user", &parameters);
        let check = guarded.fixture.with_conninfo(&conninfo).check().finish();
        assert!(check.stdout.contains("accepts SQL"), "{}", check.stdout);
        let text = "uses TLS without verifying the server's certificate";
        for found in [&check.stdout, &check.stderr] {
            assert_eq!(found.contains(text), is_open, "{parameters}: {found}");
            assert!(!found.contains("does not use TLS"), "{parameters}: {found}");
        }
    }

    // The loopback interface is not a network.
    let conninfo = guarded.tcp(
        "scram_user",
        &format!(
            "password={} sslmode=disable",
            quoted(&password_of("scram_user"))
        ),
    );
    let check = guarded.fixture.with_conninfo(&conninfo).check().finish();
    assert!(!check.stdout.contains("encryption"), "{}", check.stdout);
    assert!(
        !check.stderr.contains("does not use TLS"),
        "{}",
        check.stderr
    );
}

#[test]
fn server_may_request_only_methods_that_require_auth_allows() {
    let guarded = Guarded::new();
    let with = |role: &str, required: &str| {
        let password = quoted(&password_of(role));
        guarded.tcp(
            role,
            &format!("password={password} require_auth={required}"),
        )
    };
    for (role, required) in [
        ("scram_user", "scram-sha-256"),
        ("md5_user", "md5,scram-sha-256"),
        ("plain_user", "!md5,!none"),
        ("postgres", "none"),
    ] {
        guarded.delivers(guarded.run(&with(role, required)));
    }
    for (role, required, asked) in [
        ("plain_user", "scram-sha-256", "cleartext password"),
        ("md5_user", "!md5", "md5 password"),
        ("scram_user", "password,md5", "SASL"),
        ("postgres", "!none", "no"),
    ] {
        let words = format!("requests {asked} authentication, which require_auth={required}");
        guarded.refuses(&with(role, required), &[&words]);
    }
    let conninfo = with("plain_user", "");
    let run = guarded
        .run(&conninfo.replace("require_auth=", ""))
        .env("PGREQUIREAUTH", "!password");
    run.finish()
        .expect_code(3)
        .expect_mentions(&["require_auth=!password"]);
    let run = guarded.run(&with("md5_user", "md5,!password")).finish();
    run.expect_code(2)
        .expect_mentions(&["require_auth is \"md5,!password\""]);
}

#[test]
fn answer_of_900_megabytes_is_refused_and_not_kept() {
    const BYTES: u32 = 900_000_000;
    let server = InterceptingProxy::start([127, 0, 0, 1].into(), 0, |_| {
        InterceptAction::RespondWith(BYTES)
    });
    let conninfo = format!("{} user=u dbname=d sslmode=disable", server.parameters());
    let words = ["check", "--postgres", &conninfo, "--kafka", "127.0.0.1:9"];
    let mut walpost = Invocation::new(words).start();
    let most = walpost.peak_memory_at_exit();
    let finished = walpost.finish().expect_code(3);
    let found = &finished.stdout;
    for text in [
        "a message of 900000000 bytes",
        "at most 16777216 are accepted",
    ] {
        assert!(found.contains(text), "{found}");
    }
    assert!(most < 150 << 20, "it took {most} bytes");
}

#[test]
fn comment_of_100_megabytes_takes_no_memory() {
    let fixture = Fixture::new();
    fixture.db.run(
        "CREATE FUNCTION public.long() RETURNS void LANGUAGE plpgsql AS $$ BEGIN EXECUTE format( \
         'COMMENT ON TABLE public.outbox IS %L', repeat('x', 100000000)); END $$; SELECT public.long()",
    );
    let maintain = fixture
        .invoke("maintain")
        .args(["--retention=1h", "--delete-rows"]);
    let mut walpost = maintain.start();
    let most = walpost.peak_memory_at_exit();
    let finished = walpost.finish();
    // Processing the comment can take longer than maintenance may lock the table.
    assert!(matches!(finished.code, Some(0 | 1)), "{finished:?}");
    assert!(most < 150 << 20, "it took {most} bytes");
}

/// Another user of the host can listen on PostgreSQL's port while PostgreSQL is down.
#[test]
fn check_warns_of_a_password_in_clear_text_on_the_loopback_interface() {
    let guarded = Guarded::new();
    let warning = "requests the password in clear text";
    let root = root();
    for (role, parameters, is_warned) in [
        ("plain_user", "sslmode=disable".to_owned(), true),
        ("plain_user", "sslmode=require".to_owned(), true),
        (
            "plain_user",
            "sslmode=disable require_auth=password".to_owned(),
            false,
        ),
        (
            "plain_user",
            format!("sslmode=verify-full sslrootcert={root}"),
            false,
        ),
        ("scram_user", "sslmode=disable".to_owned(), false),
    ] {
        let password = quoted(&password_of(role));
        let conninfo = guarded.tcp(role, &format!("password={password} {parameters}"));
        let check = guarded.fixture.with_conninfo(&conninfo).check().finish();
        assert!(check.stdout.contains("accepts SQL"), "{}", check.stdout);
        let found = check.stdout.contains(warning);
        assert_eq!(found, is_warned, "{role} {parameters}: {}", check.stdout);
    }
}
