//! Every method of authenticating to PostgreSQL, and of verifying the server's identity.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::{LazyLock, Mutex};

use crate::support::certificates::{Authority, Identity, Validity, write_private};
use crate::support::checker::Resends;
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

/// Creates roles on the shared server. In pg_hba.conf, each role's name selects its authentication
/// method.
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

/// The client certificate of the role `cert_only`, which has no other way to authenticate.
static CLIENT_IDENTITY: LazyLock<Identity> = LazyLock::new(|| AUTHORITY.sign("cert_only", &[]));

fn password_of(role: &str) -> String {
    format!("{SECRET} of {role}'s")
}

/// Quotes a value for use in a key=value connection string.
fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\\', r"\\").replace('\'', r"\'"))
}

struct AuthFixture {
    fixture: Fixture<'static>,
    aggregate: String,
}

impl AuthFixture {
    fn new() -> Self {
        LazyLock::force(&ROLES);
        let fixture = Fixture::new();
        // The roles are shared by all databases of the server. Allow every role to run the pipeline
        // in this database.
        fixture
            .db
            .run("GRANT USAGE ON SCHEMA walpost TO PUBLIC; GRANT SELECT, INSERT ON walpost.journal TO PUBLIC; \
                 GRANT SELECT, INSERT, UPDATE ON walpost.slot_state, walpost.table_state TO PUBLIC");
        let aggregate = fixture.aggregate(1);
        fixture.insert(&aggregate, "k");
        Self { fixture, aggregate }
    }

    /// Returns the role's connection string for TCP, with additional parameters.
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
    fn expect_delivery(&self, run: Invocation) {
        let topics = self.fixture.topics();
        let before = self.fixture.broker.count(&topics);
        let walpost = run.start_streaming();
        self.fixture.insert(&self.aggregate, "k");
        self.fixture.wait_for_records(before + 1);
        self.fixture.wait_until_confirmed();
        walpost.terminate().expect_code(0);
    }

    fn expect_rejection(&self, conninfo: &str, texts: &[&str]) -> Finished {
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
fn authenticates_with_every_password_method() {
    let auth = AuthFixture::new();
    for role in ["md5_user", "scram_user", "plain_user"] {
        for mode in ["disable", "require"] {
            let password = quoted(&password_of(role));
            let conninfo = auth.tcp(role, &format!("password={password} sslmode={mode}"));
            auth.expect_delivery(auth.run(&conninfo));
        }
        let wrong = auth.tcp(role, &format!("password={SECRET}-wrong"));
        auth.expect_rejection(&wrong, &["authentication failed", role]);
    }
}

#[test]
fn decodes_a_password_in_a_connection_url() {
    let auth = AuthFixture::new();
    let url = format!(
        "postgresql://scram_user:{SECRET}%20of%20scram_user%27s@localhost:{}/{}?sslmode=prefer",
        auth.fixture.server.port, auth.fixture.name
    );
    auth.expect_delivery(auth.run(&url).args(["--log-level", "trace"]));
}

#[test]
fn check_output_contains_no_password() {
    let auth = AuthFixture::new();
    for password in [password_of("scram_user"), format!("{SECRET}-wrong")] {
        let url = auth.tcp("scram_user", &format!("password={}", quoted(&password)));
        let check = auth.fixture.with_conninfo(&url).check();
        let check = check.args(["--json", "--log-level", "trace"]);
        assert!(!check.finish().stdout.is_empty());
    }
}

#[test]
fn reads_the_password_from_the_environment_or_a_file() {
    let auth = AuthFixture::new();
    let conninfo = auth.tcp("scram_user", "");
    let password = password_of("scram_user");
    auth.expect_delivery(auth.run(&conninfo).env("PGPASSWORD", &password));

    let home = reaper::folder("home");
    let line = format!(
        "# of everyone\nelsewhere:*:*:*:wrong\n*:{}:{}:scram_user:{password}\n",
        auth.fixture.server.port, auth.fixture.name
    );
    write_private(&home.join(".pgpass"), line.as_bytes());
    auth.expect_delivery(auth.run(&conninfo).env("HOME", &home));
    auth.expect_delivery(auth.run(&conninfo).env("PGPASSFILE", home.join(".pgpass")));
    auth.expect_rejection(&conninfo, &["password"]);
}

#[test]
fn rejects_a_password_file_readable_by_other_users() {
    use std::os::unix::fs::PermissionsExt;
    let auth = AuthFixture::new();
    let file = reaper::folder("home").join("passwords");
    write_private(
        &file,
        format!("*:*:*:*:{}\n", password_of("scram_user")).as_bytes(),
    );
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let run = auth
        .run(&auth.tcp("scram_user", ""))
        .env("PGPASSFILE", &file);
    run.finish().expect_code(3).expect_mentions(&["password"]);
}

/// OpenSSL's configuration file can name libraries for OpenSSL to load, and Walpost can't inspect
/// them. If OpenSSL read the file in this test, no algorithm would be available.
#[test]
fn does_not_load_the_openssl_configuration_file() {
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

/// Anyone who can write to the password file, or to a certificate or key file, can choose which
/// credentials Walpost uses or which server it trusts.
#[test]
fn rejects_connection_files_writable_by_other_users() {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;
    let auth = AuthFixture::new();
    let folder = reaper::folder("files");
    let [passwords, authority] = ["passwords", "root.pem"].map(|name| folder.join(name));
    let line = format!("*:*:*:*:{}\n", password_of("scram_user"));
    write_private(&passwords, line.as_bytes());
    std::fs::copy(&AUTHORITY.root, &authority).unwrap();
    let open = |mode| set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
    let verified = format!("sslmode=verify-full sslrootcert={}", authority.display());
    let remedy = format!("chmod go-w {}", folder.display());
    let conninfo = auth.tcp("scram_user", &verified);
    let run = || auth.run(&conninfo).env("PGPASSFILE", &passwords);
    open(0o777);
    let mut walpost = run().start();
    let line = walpost.wait_for_log("reconnecting");
    for text in ["sslrootcert", "the file is not used", &remedy] {
        assert!(line.contains(text), "{text} in {line}");
    }
    let plain = auth.run(&auth.tcp("scram_user", ""));
    let refused = plain.env("PGPASSFILE", &passwords).finish();
    refused.expect_code(3).expect_mentions(&[
        "password file ignored",
        &remedy,
        "the server requests a password for role",
    ]);
    let path = |file: &Path| quoted(&file.display().to_string());
    let others = [
        ("sslcrl", String::new()),
        ("sslcert", String::new()),
        (
            "sslkey",
            format!(" sslcert={}", path(&CLIENT_IDENTITY.certificate)),
        ),
    ];
    for (parameter, more) in others {
        let file = folder.join(parameter);
        write_private(&file, &std::fs::read(&CLIENT_IDENTITY.key).unwrap());
        let parameters = format!(
            "sslmode=verify-full sslrootcert={}{more} {parameter}={}",
            root(),
            path(&file)
        );
        let mut walpost = auth.run(&auth.tcp("scram_user", &parameters)).start();
        let line = walpost.wait_for_log("reconnecting");
        for text in [parameter, "the file is not used", &remedy] {
            assert!(line.contains(text), "{text} in {line}");
        }
        walpost.terminate().expect_code(0);
    }
    // The pipeline has been retrying all along, so it recovers without a restart.
    open(0o755);
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
}

#[test]
fn connects_using_only_libpq_environment_variables() {
    let auth = AuthFixture::new();
    let fixture = &auth.fixture;
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
    auth.expect_delivery(run);
}

#[test]
fn encrypts_the_connection_according_to_sslmode() {
    let auth = AuthFixture::new();
    let password = quoted(&password_of("tls_user"));
    let root = root();
    for parameters in [
        "sslmode=prefer".to_owned(),
        "sslmode=require".to_owned(),
        "sslmode=require channel_binding=require".to_owned(),
        format!("sslmode=verify-ca sslrootcert={root}"),
        format!("sslmode=verify-full sslrootcert={root}"),
    ] {
        let conninfo = auth.tcp("tls_user", &format!("password={password} {parameters}"));
        auth.expect_delivery(auth.run(&conninfo));
    }
    let conninfo = auth.tcp("tls_user", &format!("password={password} sslmode=disable"));
    auth.expect_rejection(&conninfo, &["pg_hba.conf"]);
    let conninfo = auth.tcp("tls_user", &format!("password={password}"));
    auth.expect_delivery(auth.run(&conninfo).env("PGSSLMODE", "require"));
}

#[test]
fn encrypts_the_replication_stream() {
    let auth = AuthFixture::new();
    let password = quoted(&password_of("tls_user"));
    let conninfo = auth.tcp("tls_user", &format!("password={password} sslmode=require"));
    let walpost = auth.run(&conninfo).start_streaming();
    let encrypted = auth.fixture.db.is_true(&format!(
        "SELECT ssl FROM pg_stat_ssl JOIN pg_replication_slots ON active_pid = pid WHERE slot_name = '{}'",
        auth.fixture.slot()
    ));
    assert!(encrypted);
    walpost.terminate().expect_code(0);
}

#[test]
fn rejects_a_server_certificate_with_the_wrong_authority_or_host_name() {
    let auth = AuthFixture::new();
    let password = quoted(&password_of("tls_user"));
    let other_authority = Authority::new("Another CA");
    let other_authority = quoted(&other_authority.root.display().to_string());
    for mode in ["verify-ca", "verify-full"] {
        let parameters =
            format!("password={password} sslmode={mode} sslrootcert={other_authority}");
        auth.expect_rejection(&auth.tcp("tls_user", &parameters), &["certificate"]);
    }
    let by_address = |mode| {
        let root = root();
        let parameters = format!("password={password} sslmode={mode} sslrootcert={root}");
        auth.tcp("tls_user", &parameters)
            .replace("host=localhost", "host=127.0.0.1")
    };
    auth.expect_rejection(&by_address("verify-full"), &["127.0.0.1", "certificate"]);
    auth.expect_delivery(auth.run(&by_address("verify-ca")));
    let parameters =
        format!("password={password} sslmode=verify-full sslrootcert=/nowhere/root.pem");
    let finished = auth.run(&auth.tcp("tls_user", &parameters)).finish();
    assert!(matches!(finished.code, Some(2 | 3)), "{finished:?}");
    finished.expect_mentions(&["/nowhere/root.pem"]);
}

/// Returns one invocation of every command that connects to the database.
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
fn every_command_rejects_a_server_with_an_invalid_certificate() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    let (right, other_authority) = (root(), Authority::new("Another CA"));
    let other_authority = quoted(&other_authority.root.display().to_string());
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
        &conninfo("localhost", "verify-full", &other_authority),
        "self-signed",
    );
    refused(&conninfo("127.0.0.1", "verify-full", &right), "127.0.0.1");
    for (validity, reason) in [
        (Validity::Past, "expired"),
        (Validity::Future, "not yet valid"),
    ] {
        server.present_certificate(&AUTHORITY.sign_for("localhost", &["localhost"], validity));
        refused(&conninfo("localhost", "verify-full", &right), reason);
        // As in libpq, `require` verifies the server's certificate if a root certificate file
        // exists.
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
fn authenticates_with_a_client_certificate() {
    let auth = AuthFixture::new();
    let file = |path: &Path| quoted(&path.display().to_string());
    let (certificate, key) = (
        file(&CLIENT_IDENTITY.certificate),
        file(&CLIENT_IDENTITY.key),
    );
    let root = root();
    let parameters =
        format!("sslmode=verify-full sslrootcert={root} sslcert={certificate} sslkey={key}");
    auth.expect_delivery(auth.run(&auth.tcp("cert_only", &parameters)));
    auth.expect_rejection(&auth.tcp("cert_only", "sslmode=require"), &["certificate"]);
}

#[test]
fn connects_to_the_first_host_that_accepts_writes() {
    let auth = AuthFixture::new();
    let fixture = &auth.fixture;
    let conninfo = format!(
        "host=127.0.0.1,{} port={},{} user=postgres dbname={} target_session_attrs=read-write",
        fixture.server.socket.display(),
        free_port(),
        fixture.server.port,
        fixture.name
    );
    auth.expect_delivery(auth.run(&conninfo));
}

/// Returns a connection string for the attacker's proxy, for a role that has a password.
fn conninfo_through(
    auth: &AuthFixture,
    proxy: &InterceptingProxy,
    role: &str,
    parameters: &str,
) -> String {
    let password = quoted(&password_of(role));
    format!(
        "{} user={role} dbname={} password={password} {parameters}",
        proxy.parameters(),
        auth.fixture.name
    )
}

/// An attacker on the network path can't halt a pipeline that has been connected before: the
/// pipeline keeps trying to connect, and continues once the attack ends.
#[test]
fn keeps_reconnecting_while_an_attacker_answers_in_place_of_the_server() {
    static REPLY: Mutex<Option<&'static [u8]>> = Mutex::new(None);
    let set_reply = |reply| *REPLY.lock().unwrap() = reply;
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let address = IpAddr::from(Ipv4Addr::LOCALHOST);
    let proxy =
        InterceptingProxy::tunnel_unless(address, fixture.server.port, || *REPLY.lock().unwrap());
    let conninfo = format!(
        "host=localhost {} user=postgres dbname={} sslmode=verify-full sslrootcert={}",
        proxy.parameters(),
        fixture.name,
        root()
    );
    let mut walpost = fixture.with_conninfo(&conninfo).run().start_streaming();
    set_reply(Some(b"N"));
    wait_until("the walsender to end", || fixture.end_walsender());
    let line = walpost.wait_for_log("does not support TLS");
    assert!(line.contains("keeps trying to connect"), "{line}");
    set_reply(None);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    fixture.settle(walpost, &[], Resends::AtMost(1));
    // If a server rejects TLS when Walpost starts, the configuration is the more likely cause, so
    // Walpost exits.
    set_reply(Some(b"N"));
    let run = fixture.with_conninfo(&conninfo).run().finish();
    run.expect_code(3)
        .expect_mentions(&["does not support TLS"]);
}

#[test]
fn sends_no_password_to_an_intercepting_proxy() {
    let Some(address) = non_loopback_address() else {
        return;
    };
    let auth = AuthFixture::new();
    let port = auth.fixture.server.port;
    for (action, method) in [
        (InterceptAction::RequestPassword, "password"),
        (InterceptAction::RequestHash, "md5"),
    ] {
        let everyone = InterceptingProxy::start(address, port, move |_| action);
        // This proxy attacks only the replication connection and forwards the catalog connection
        // unchanged.
        let replication = InterceptingProxy::start(address, port, move |is_replication| {
            if is_replication {
                action
            } else {
                InterceptAction::Pass
            }
        });
        for proxy in [&everyone, &replication] {
            let conninfo = conninfo_through(&auth, proxy, "scram_user", "");
            let opt_in = format!("require_auth={method}");
            let check = auth
                .fixture
                .with_conninfo(&conninfo)
                .check()
                .finish()
                .expect_code(3);
            assert_eq!(proxy.received(), "", "of {action:?}");
            let found = &check.stdout;
            assert!(
                found.contains("does not use TLS") && found.contains(&opt_in),
                "{found}"
            );
            auth.expect_rejection(&conninfo, &["does not use TLS", "was not sent", &opt_in]);
            assert_eq!(proxy.received(), "", "of {action:?}");

            // Verify that the attack works: if the user opts in, the proxy does receive the
            // password.
            let conninfo = conninfo_through(
                &auth,
                proxy,
                "scram_user",
                &format!("{opt_in},scram-sha-256"),
            );
            auth.expect_rejection(&conninfo, &["got it"]);
            assert_ne!(proxy.received(), "", "of {action:?}");
        }
    }
}

#[test]
fn each_command_warns_once_about_an_unprotected_network_connection() {
    let Some(address) = non_loopback_address() else {
        return;
    };
    let auth = AuthFixture::new();
    let proxy =
        InterceptingProxy::start(address, auth.fixture.server.port, |_| InterceptAction::Pass);
    let conninfo = conninfo_through(&auth, &proxy, "scram_user", "");
    let warning = format!(
        "the connection to PostgreSQL at {} does not use TLS (sslmode=prefer)",
        proxy.address
    );
    let mut walpost = auth.run(&conninfo).start_streaming();
    wait_until("a walsender to end", || auth.fixture.end_walsender());
    walpost.wait_for_logs("streaming", 2);
    assert_eq!(walpost.logged(&warning), 1, "{}", walpost.log());
    walpost.terminate().expect_code(0);

    let check = auth.fixture.with_conninfo(&conninfo).check().finish();
    let finding = format!("encryption: {warning}");
    let lines: Vec<_> = check
        .stdout
        .lines()
        .filter(|line| line.contains(&finding))
        .collect();
    assert_eq!(lines.len(), 1, "{}", check.stdout);
    assert!(lines[0].starts_with("WARNING"), "{lines:?}");

    // Connections that use TLS. The last three also authenticate the server.
    let tunnel = InterceptingProxy::tunnel(address, auth.fixture.server.port);
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
        let conninfo = conninfo_through(&auth, &tunnel, "tls_user", &parameters);
        let check = auth.fixture.with_conninfo(&conninfo).check().finish();
        assert!(check.stdout.contains("accepts SQL"), "{}", check.stdout);
        let text = "uses TLS without verifying the server's certificate";
        for found in [&check.stdout, &check.stderr] {
            assert_eq!(found.contains(text), is_open, "{parameters}: {found}");
            assert!(!found.contains("does not use TLS"), "{parameters}: {found}");
        }
    }

    // No warning is needed for a connection over the loopback interface.
    let conninfo = auth.tcp(
        "scram_user",
        &format!(
            "password={} sslmode=disable",
            quoted(&password_of("scram_user"))
        ),
    );
    let check = auth.fixture.with_conninfo(&conninfo).check().finish();
    assert!(!check.stdout.contains("encryption"), "{}", check.stdout);
    assert!(
        !check.stderr.contains("does not use TLS"),
        "{}",
        check.stderr
    );
}

#[test]
fn rejects_authentication_methods_excluded_by_require_auth() {
    let auth = AuthFixture::new();
    let with = |role: &str, required: &str| {
        let password = quoted(&password_of(role));
        auth.tcp(
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
        auth.expect_delivery(auth.run(&with(role, required)));
    }
    for (role, required, asked) in [
        ("plain_user", "scram-sha-256", "cleartext password"),
        ("md5_user", "!md5", "md5 password"),
        ("scram_user", "password,md5", "SASL"),
        ("postgres", "!none", "no"),
    ] {
        let words = format!("requests {asked} authentication, which require_auth={required}");
        auth.expect_rejection(&with(role, required), &[&words]);
    }
    let conninfo = with("plain_user", "");
    let run = auth
        .run(&conninfo.replace("require_auth=", ""))
        .env("PGREQUIREAUTH", "!password");
    run.finish()
        .expect_code(3)
        .expect_mentions(&["require_auth=!password"]);
    let run = auth.run(&with("md5_user", "md5,!password")).finish();
    run.expect_code(2)
        .expect_mentions(&["require_auth is \"md5,!password\""]);
}

#[test]
fn rejects_a_900_megabyte_response_without_buffering_it() {
    const BYTES: u32 = 900_000_000;
    let server = InterceptingProxy::start([127, 0, 0, 1].into(), 0, |_| {
        InterceptAction::RespondWith(BYTES)
    });
    let conninfo = format!("{} user=u dbname=d sslmode=disable", server.parameters());
    let words = ["check", "--postgres", &conninfo, "--kafka", "127.0.0.1:9"];
    let mut walpost = Invocation::new(words).start();
    let peak = walpost.peak_memory_at_exit();
    let finished = walpost.finish().expect_code(3);
    let found = &finished.stdout;
    for text in [
        "a message of 900000000 bytes",
        "at most 16777216 are accepted",
    ] {
        assert!(found.contains(text), "{found}");
    }
    assert!(peak < 150 << 20, "Walpost used {peak} bytes");
}

#[test]
fn memory_stays_bounded_while_reading_a_100_megabyte_table_comment() {
    let fixture = Fixture::new();
    fixture.db.run(
        "CREATE FUNCTION public.long() RETURNS void LANGUAGE plpgsql AS $$ BEGIN EXECUTE format( \
         'COMMENT ON TABLE public.outbox IS %L', repeat('x', 100000000)); END $$; SELECT public.long()",
    );
    let maintain = fixture
        .invoke("maintain")
        .args(["--retention=1h", "--delete-rows"]);
    let mut walpost = maintain.start();
    let peak = walpost.peak_memory_at_exit();
    let finished = walpost.finish();
    // Reading this long comment can take longer than `maintain` may keep the table locked, so the
    // command may fail.
    assert!(matches!(finished.code, Some(0 | 1)), "{finished:?}");
    assert!(peak < 150 << 20, "Walpost used {peak} bytes");
}

/// While PostgreSQL is down, another user of the host could listen on its port and receive the
/// password.
#[test]
fn check_warns_about_a_cleartext_password_on_the_loopback_interface() {
    let auth = AuthFixture::new();
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
        let conninfo = auth.tcp(role, &format!("password={password} {parameters}"));
        let check = auth.fixture.with_conninfo(&conninfo).check().finish();
        assert!(check.stdout.contains("accepts SQL"), "{}", check.stdout);
        let found = check.stdout.contains(warning);
        assert_eq!(found, is_warned, "{role} {parameters}: {}", check.stdout);
    }
}
