//! The password is changed while Walpost runs.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::support::certificates::write_private;
use crate::support::fixture::Fixture;
use crate::support::kafka::{Broker, SASL_USER, sasl_password};
use crate::support::postgres::{MAJOR, Server};
use crate::support::reaper;
use crate::support::secrets::SECRET;
use crate::support::session::Session;
use crate::support::wait::wait_until;
use crate::support::walpost::{Invocation, Walpost};
use crate::support::walpost_role::WalpostRole;

/// Part of the message that Walpost logs for each rejected connection attempt.
const REFUSED_MESSAGE: &str = "but has been rejecting it for";

/// A fixture with its own role, which authenticates with a password.
struct PasswordFixture {
    fixture: Fixture<'static>,
    aggregate: String,
}

impl PasswordFixture {
    fn new(exactly_once: bool) -> Self {
        let fixture = Fixture::new().in_mode(exactly_once);
        let role = &fixture.name;
        fixture.db.run(&format!(
            "CREATE ROLE {role} SUPERUSER LOGIN PASSWORD '{}'",
            password(0)
        ));
        let aggregate = fixture.aggregate(1);
        Self { fixture, aggregate }
    }

    /// Returns a connection string for TCP connections, for which the server requires a password.
    fn conninfo(&self) -> String {
        format!(
            "host=localhost port={} user={role} dbname={role}",
            self.fixture.server.port,
            role = self.fixture.name
        )
    }

    fn change_password(&self, number: u32) {
        let role = &self.fixture.name;
        self.fixture.db.run(&format!(
            "ALTER ROLE {role} PASSWORD '{}'",
            password(number)
        ));
    }

    /// Asserts that Walpost delivers one event before the server's password changes, and two more
    /// after `change` has provided the new password. The first of these two is committed while
    /// Walpost still has the old password.
    fn expect_rotation(
        &self,
        mut walpost: Walpost,
        source: &str,
        change: impl FnOnce(&mut Walpost),
    ) {
        let fixture = &self.fixture;
        walpost.wait_for_log("streaming");
        fixture.insert(&self.aggregate, "before");
        fixture.wait_until_confirmed();
        self.change_password(1);
        wait_until("a walsender to end", || fixture.end_walsender());
        for count in 1..=3 {
            let line = walpost.wait_for_logs(REFUSED_MESSAGE, count);
            for text in ["WARN", "localhost", "28P01", &fixture.name, source] {
                assert!(line.contains(text), "{text} in {line}");
            }
        }
        fixture.insert(&self.aggregate, "meanwhile");
        change(&mut walpost);
        walpost.wait_for_logs("streaming", 2);
        fixture.insert(&self.aggregate, "after");
        fixture.settle(walpost, &[], fixture.resends(1));
    }
}

impl Drop for PasswordFixture {
    fn drop(&mut self) {
        self.fixture.db.drop_role(&self.fixture.name);
    }
}

fn password(number: u32) -> String {
    format!("{SECRET}-{number}")
}

/// Replaces the file atomically, as any tool that rotates passwords should.
fn replace(file: &Path, text: &str) {
    let new = file.with_extension("new");
    write_private(&new, text.as_bytes());
    fs::rename(new, file).unwrap();
}

/// Creates a password file that contains the given password.
fn password_file(number: u32) -> PathBuf {
    let file = reaper::folder("pgpass").join("pgpass");
    replace(&file, &line(number));
    file
}

fn line(number: u32) -> String {
    format!("*:*:*:*:{}\n", password(number))
}

in_both_modes! {
    rereads_the_password_file
}

fn rereads_the_password_file(exactly_once: bool) {
    let password_fixture = PasswordFixture::new(exactly_once);
    let file = password_file(0);
    let run = password_fixture
        .fixture
        .with_conninfo(&password_fixture.conninfo())
        .run();
    let walpost = run.env("PGPASSFILE", &file).start();
    let source = format!("the password file {}", file.display());
    password_fixture.expect_rotation(walpost, &source, |_| replace(&file, &line(1)));
}

#[test]
fn rereads_the_password_in_the_configuration_file() {
    let password_fixture = PasswordFixture::new(false);
    let fixture = &password_fixture.fixture;
    let with_password = |number| {
        format!(
            "[kafka]\n\"bootstrap.servers\" = \"{}\"\n[[pipeline]]\nname = \"{}\"\npostgres = \"{} password={}\"\n",
            fixture.broker.address(),
            fixture.name,
            password_fixture.conninfo(),
            password(number)
        )
    };
    let file = reaper::folder("config").join("walpost.toml");
    replace(&file, &with_password(0));
    let walpost = Invocation::new(["run", "--config"]).arg(&file).start();
    let source = format!(
        "postgres of pipeline \\\"{}\\\" in {}",
        fixture.name,
        file.display()
    );
    let source = source.replace('\\', "");
    password_fixture.expect_rotation(walpost, &source, |walpost| {
        // Overwrite the file in place, as some tools do, so that Walpost reads an incomplete file.
        replace(&file, &with_password(1)[..40]);
        walpost.wait_for_log("again, so the previous password is used");
        replace(&file, &with_password(1));
    });
}

#[test]
fn rereads_the_password_from_a_query_result() {
    let password_fixture = PasswordFixture::new(false);
    let fixture = &password_fixture.fixture;
    fixture.db.run(&format!(
        "CREATE TABLE public.shards AS SELECT '{} password={}' AS url",
        password_fixture.conninfo(),
        password(0)
    ));
    let text = format!(
        "[kafka]\n'bootstrap.servers' = '{}'\n[[fleet.source]]\npostgres = \"{}\"\nquery = 'SELECT url FROM public.shards'
         every = '1s'\ntemplate = {{ name = '{}', postgres = '{{url}}' }}\n",
        fixture.broker.address(),
        fixture.conninfo(),
        fixture.name
    );
    let file = reaper::folder("config").join("walpost.toml");
    replace(&file, &text);
    let walpost = Invocation::new(["run", "--config"]).arg(&file).start();
    let source = format!(
        "postgres of pipeline \"{}\" in a query in {}",
        fixture.name,
        file.display()
    );
    password_fixture.expect_rotation(walpost, &source, |walpost| {
        fixture.db.run(&format!(
            "UPDATE public.shards SET url = replace(url, '{}', '{}')",
            password(0),
            password(1)
        ));
        let line = walpost.wait_for_log("configuration reloaded");
        assert!(line.contains(": 1 unchanged"), "{line}");
    });
}

/// A password command can supply short-lived tokens. In this test, the command also fails once.
#[test]
fn runs_the_password_command_for_each_connection() {
    let password_fixture = PasswordFixture::new(false);
    let fixture = &password_fixture.fixture;
    let folder = reaper::folder("program");
    let script = folder.join("password.sh");
    let prints = |lines: &str| {
        replace(
            &script,
            &format!("echo >> {}/calls\n{lines}", folder.display()),
        )
    };
    let calls = || fs::read(folder.join("calls")).map_or(0, |calls| calls.len());
    let echo = |number| format!("echo '{}'\necho more\n", password(number));
    prints(&echo(0));
    let file = folder.join("walpost.toml");
    let text = format!(
        "[kafka]\n\"bootstrap.servers\" = \"{}\"\n[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\n\
         password_command = [\"/bin/sh\", \"{}\"]\n",
        fixture.broker.address(),
        fixture.name,
        password_fixture.conninfo(),
        script.display()
    );
    replace(&file, &text);
    let mut walpost = Invocation::new(["run", "--config"])
        .arg(&file)
        // Walpost must ignore this password, because a password command is configured.
        .env("PGPASSWORD", password(9))
        .start_streaming();
    fixture.insert(&password_fixture.aggregate, "before");
    fixture.wait_until_confirmed();
    assert!(calls() >= 2, "a catalog connection, and a walsender");
    // The program leaks its secret to standard error, in two encodings. Walpost must log neither.
    prints(&format!(
        "echo '{0}'\necho 'got {0}' >&2\necho '{0}' | base64 >&2\nexit 3\n",
        password(0)
    ));
    wait_until("a walsender to end", || fixture.end_walsender());
    let line = walpost.wait_for_log(
        "password_command /bin/sh did not supply one: the program failed with exit status: 3",
    );
    for text in ["Run the program by hand", "localhost"] {
        assert!(line.contains(text), "{text} in {line}");
    }
    password_fixture.change_password(1);
    prints(&echo(1));
    walpost.wait_for_logs("streaming", 2);
    fixture.insert(&password_fixture.aggregate, "after");
    fixture.settle(walpost, &[], fixture.resends(1));
}

/// The path of the password command contains a symbolic link, as in `/opt/app/current ->
/// /opt/releases/1`, and other users can write to the link's directory, `/opt/app`.
#[test]
fn does_not_run_a_password_command_that_other_users_can_replace() {
    let password_fixture = PasswordFixture::new(false);
    let fixture = &password_fixture.fixture;
    let folder = reaper::folder("program");
    let [app, mark, descriptors] = ["app", "mark", "descriptors"].map(|name| folder.join(name));
    let link = app.join("current");
    for (release, line) in [
        (
            "releases/1",
            format!("ls -l /proc/self/fd > {}", descriptors.display()),
        ),
        ("releases/2", format!("touch {}", mark.display())),
    ] {
        fs::create_dir_all(folder.join(release)).unwrap();
        let program = folder.join(release).join("password");
        let script = format!("#!/bin/sh\n{line}\necho '{}'\n", password(0));
        write_private(&program, script.as_bytes());
        fs::set_permissions(&program, Permissions::from_mode(0o700)).unwrap();
    }
    fs::create_dir(&app).unwrap();
    symlink("../releases/1", &link).unwrap();
    let file = folder.join("walpost.toml");
    let text = format!(
        "[kafka]\n\"bootstrap.servers\" = \"{}\"\n[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\n\
         password_command = [\"{}/password\"]\n",
        fixture.broker.address(),
        fixture.name,
        password_fixture.conninfo(),
        link.display()
    );
    replace(&file, &text);
    let mut walpost = Invocation::new(["run", "--config"])
        .arg(&file)
        .start_streaming();
    fixture.insert(&password_fixture.aggregate, "before");
    fixture.wait_until_confirmed();
    fs::set_permissions(&app, Permissions::from_mode(0o777)).unwrap();
    fs::remove_file(&link).unwrap();
    symlink("../releases/2", &link).unwrap();
    wait_until("a walsender to end", || fixture.end_walsender());
    let line = walpost.wait_for_log("the program was not run: ");
    for text in [
        "is writable by other users",
        &format!("chmod go-w {}", app.display()),
    ] {
        assert!(line.contains(text), "{text} in {line}");
    }
    fs::remove_file(&link).unwrap();
    symlink("../releases/1", &link).unwrap();
    fs::remove_file(&descriptors).unwrap();
    fs::set_permissions(&app, Permissions::from_mode(0o755)).unwrap();
    // Include the log level in the text to wait for, because the watchdog also logs the word
    // "streaming".
    walpost.wait_for_logs("INFO streaming", 2);
    assert!(!mark.exists(), "the other program was run");
    // The program must not inherit file descriptors from Walpost. By now, librdkafka has created
    // clients, whose pipes it opens without `O_CLOEXEC`.
    let inherited = fs::read_to_string(&descriptors).unwrap();
    // The program has four open descriptors: the three standard streams, and the directory that
    // `ls` reads.
    assert_eq!(inherited.matches(" -> ").count(), 4, "{inherited}");
    fixture.insert(&password_fixture.aggregate, "after");
    fixture.settle(walpost, &[], fixture.resends(1));
}

/// Although a standby instance does not need the password yet, it must have the new one when it
/// takes over.
#[test]
fn standby_instance_waits_for_a_rotated_password() {
    let password_fixture = PasswordFixture::new(false);
    let fixture = &password_fixture.fixture;
    let active = fixture.start();
    let file = password_file(0);
    let mut other = fixture
        .with_conninfo(&password_fixture.conninfo())
        .run()
        .env("PGPASSFILE", &file)
        .start();
    other.wait_for_log("standing by");
    password_fixture.change_password(1);
    other.wait_for_logs(REFUSED_MESSAGE, 2);
    replace(&file, &line(1));
    active.terminate().expect_code(0);
    other.wait_for_log("streaming");
    fixture.insert(&password_fixture.aggregate, "after");
    fixture.settle(other, &[], fixture.resends(0));
}

/// A pipeline that authenticates to a private broker with SCRAM. The password is in walpost.toml.
struct ScramPipeline<'b> {
    fixture: Fixture<'b>,
    file: PathBuf,
}

impl<'b> ScramPipeline<'b> {
    fn new(broker: &'b Broker, exactly_once: bool) -> Self {
        let fixture = Fixture::on_servers(Server::shared(MAJOR), broker).in_mode(exactly_once);
        let file = reaper::folder("config").join("walpost.toml");
        let scrambled = Self { fixture, file };
        scrambled.write(&sasl_password());
        scrambled
    }

    fn write(&self, password: &str) {
        let delivery = match self.fixture.is_exactly_once() {
            true => "exactly-once",
            false => "at-least-once",
        };
        let text = format!(
            "[kafka]\n\"bootstrap.servers\" = \"{}\"\n\"security.protocol\" = \"sasl_plaintext\"\n\
             \"sasl.mechanism\" = \"SCRAM-SHA-256\"\n\"sasl.username\" = \"{SASL_USER}\"\n\
             \"sasl.password\" = \"{password}\"\n[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\n\
             delivery = \"{delivery}\"\n",
            self.fixture.broker.sasl_address(),
            self.fixture.name,
            self.fixture.conninfo(),
        );
        replace(&self.file, &text);
    }

    /// Starts Walpost, delivers one event, then changes the user's password and restarts the
    /// broker.
    fn start_and_change(&self, aggregate: &str, password: &str) -> Walpost {
        let (fixture, broker) = (&self.fixture, self.fixture.broker);
        let walpost = Invocation::new(["run", "--config"])
            .arg(&self.file)
            .start_streaming();
        fixture.insert(aggregate, "before");
        fixture.wait_until_confirmed();
        let add = format!("SCRAM-SHA-256=[password={password}]");
        broker.tool(
            "kafka.admin.ConfigCommand",
            &[
                "--alter",
                "--entity-type",
                "users",
                "--entity-name",
                SASL_USER,
                "--add-config",
                &add,
            ],
        );
        // Restart the broker, because existing connections would remain authenticated.
        broker.stop();
        broker.start();
        walpost
    }
}

in_both_modes! {
    rereads_the_kafka_password
    rereads_the_kafka_password_while_looking_up_a_topic
}

fn rereads_the_kafka_password(exactly_once: bool) {
    let broker = Broker::private();
    let scrambled = ScramPipeline::new(&broker, exactly_once);
    let fixture = &scrambled.fixture;
    let aggregate = fixture.aggregate(1);
    let mut walpost = scrambled.start_and_change(&aggregate, &password(1));
    fixture.insert(&aggregate, "meanwhile");
    let line = walpost.wait_for_log("Kafka rejects credentials that it accepted earlier");
    let source = format!("\"sasl.password\" in {}", scrambled.file.display());
    for text in ["WARN", &source] {
        assert!(line.contains(text), "{text} in {line}");
    }
    scrambled.write(&password(1));
    fixture.wait_for_records(2);
    fixture.insert(&aggregate, "after");
    fixture.settle(walpost, &[], fixture.resends(1));
}

/// If Kafka rejects the credentials of a pipeline that has never connected, the pipeline halts
/// after ten seconds. If Kafka has accepted the credentials before, Walpost retries for longer.
fn rereads_the_kafka_password_while_looking_up_a_topic(exactly_once: bool) {
    let broker = Broker::private();
    let scrambled = ScramPipeline::new(&broker, exactly_once);
    let fixture = &scrambled.fixture;
    let (aggregate, other) = (fixture.aggregate(1), fixture.aggregate(1));
    let mut walpost = scrambled.start_and_change(&aggregate, &password(1));
    fixture.insert(&other, "meanwhile");
    walpost.wait_for_log("Kafka still rejects the credentials");
    scrambled.write(&password(1));
    fixture.wait_for_records(2);
    fixture.settle(walpost, &[], fixture.resends(1));
}

in_both_modes! {
    temporarily_revoked_permissions_do_not_halt_the_pipeline
}

fn temporarily_revoked_permissions_do_not_halt_the_pipeline(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let walpost_role = WalpostRole::new(&fixture, format!("{}_clerk", fixture.name));
    let (database, role) = (&fixture.name, &walpost_role.role);
    let admin = Session::connect(&fixture.server.conninfo("postgres")).unwrap();
    admin.run(&format!(
        "REVOKE CONNECT ON DATABASE {database} FROM PUBLIC"
    ));
    let aggregate = fixture.aggregate(1);
    let mut walpost = walpost_role.commands().run().start();
    walpost.wait_for_log("streaming");
    let changes = [
        (
            format!("REVOKE CONNECT ON DATABASE {database} FROM {role}"),
            "42501",
            format!("GRANT CONNECT ON DATABASE {database} TO {role}"),
        ),
        (
            format!("ALTER ROLE {role} NOREPLICATION"),
            "42501",
            format!("ALTER ROLE {role} REPLICATION"),
        ),
        (
            format!("ALTER DATABASE {database} ALLOW_CONNECTIONS false"),
            "55000",
            format!("ALTER DATABASE {database} ALLOW_CONNECTIONS true"),
        ),
    ];
    for (number, (change, code, remedy)) in changes.iter().enumerate() {
        admin.run(change);
        wait_until("a walsender to end", || fixture.end_walsender());
        let line = walpost.wait_for_log(remedy);
        for text in ["WARN", code, REFUSED_MESSAGE] {
            assert!(line.contains(text), "{text} in {line}");
        }
        admin.run(remedy);
        walpost.wait_for_logs("streaming", number + 2);
        fixture.insert(&aggregate, "k");
        fixture.wait_until_confirmed();
    }
    fixture.settle(walpost, &[], fixture.resends(changes.len()));
}
