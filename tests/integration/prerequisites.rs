//! `walpost init` changes nothing if the server rejects one of its steps.

use crate::support::postgres::{MAJOR, MAJORS, Server, StopMode};
use crate::support::session::Session;
use crate::support::walpost::Invocation;

/// Returns everything that `init` could leave behind in the database: objects, privileges and
/// roles.
fn database_contents(db: &Session) -> Vec<Vec<Option<String>>> {
    db.rows(
        "SELECT 'schema', nspname::text, nspacl::text FROM pg_namespace
         UNION ALL SELECT 'relation', oid::regclass::text, relacl::text FROM pg_class WHERE oid >= 16384
         UNION ALL SELECT 'function', oid::regprocedure::text, proacl::text FROM pg_proc WHERE oid >= 16384
         UNION ALL SELECT 'publication', pubname::text, NULL FROM pg_publication
         UNION ALL SELECT 'slot', slot_name::text, NULL FROM pg_replication_slots
         UNION ALL SELECT 'role', rolname::text, NULL FROM pg_roles
         UNION ALL SELECT 'database', datname::text, datacl::text FROM pg_database
         ORDER BY 1, 2",
    )
}

/// A server on which `init` has not been run. The role `shop` will write to an outbox in its
/// database `postgres`.
struct UnpreparedServer(Server);

impl UnpreparedServer {
    fn new(major: u32, settings: &str) -> Self {
        let server = Server::private(major, settings);
        server.session("postgres").run(
            "CREATE ROLE shop; CREATE ROLE dba LOGIN; GRANT CREATE ON DATABASE postgres TO dba;
             GRANT CREATE ON SCHEMA public TO dba",
        );
        Self(server)
    }

    fn db(&self) -> Session {
        self.0.session("postgres")
    }

    fn set(&self, setting: &str) {
        self.db().run(&format!("ALTER SYSTEM SET {setting}"));
        self.0.stop(StopMode::Fast);
        self.0.start();
    }

    fn init(&self, role: &str) -> Invocation {
        let conninfo = self.0.conninfo_as(role, "postgres");
        Invocation::new(["init", "--postgres", &conninfo, "--writer", "shop"])
    }

    /// Asserts that `init` is rejected for an ordinary table, for a partitioned table, and for an
    /// outbox that uses messages instead of a table.
    fn expect_rejected(&self, role: &str, code: i32, arguments: &[&str], expected: &[&str]) {
        let before = database_contents(&self.db());
        for kind in [None, Some("--partitioned"), Some("--outbox=messages")] {
            let init = self.init(role).args(arguments).args(kind);
            let init = init.finish().expect_code(code);
            init.expect_mentions(expected)
                .expect_mentions(&["Nothing was changed"]);
            let after = database_contents(&self.db());
            assert_eq!(after, before, "{kind:?}: {expected:?}");
        }
    }
}

#[test]
fn init_changes_nothing_if_wal_level_requires_a_restart() {
    for major in MAJORS {
        let unprepared = UnpreparedServer::new(major, "wal_level = replica\n");
        let alter = "ALTER SYSTEM SET wal_level = logical";
        let expected = ["wal_level is replica", alter, "restart the server"];
        unprepared.expect_rejected("postgres", 3, &[], &expected);
        unprepared.set("wal_level = logical");
        unprepared.init("postgres").finish().expect_code(0);
    }
}

#[test]
fn init_changes_nothing_without_enough_slots_walsenders_or_privileges() {
    let unprepared = UnpreparedServer::new(MAJOR, "max_replication_slots = 1\n");
    unprepared
        .db()
        .rows("SELECT pg_create_physical_replication_slot('of_a_standby')");
    let all = "max_replication_slots is 1, and all are in use: of_a_standby (not read)";
    let needs = "slot walpost_outbox needs one";
    unprepared.expect_rejected("postgres", 1, &[], &[needs, all]);
    let physical = "slot of_a_standby exists and is a physical slot";
    unprepared.expect_rejected("postgres", 3, &["--slot=of_a_standby"], &[physical]);
    unprepared
        .db()
        .rows("SELECT pg_catalog.pg_drop_replication_slot('of_a_standby')");

    unprepared.set("max_wal_senders = 0");
    let all = "all WAL senders are in use, but reading slot walpost_outbox requires one";
    unprepared.expect_rejected("postgres", 1, &[], &[all, "max_wal_senders is 0"]);
    unprepared.set("max_wal_senders = 5");

    let expected = ["role dba lacks REPLICATION", "ALTER ROLE dba REPLICATION"];
    unprepared.expect_rejected("dba", 3, &["--no-role"], &expected);
    unprepared.db().run("ALTER ROLE dba REPLICATION");
    // The server reports this error only after `init` has created many objects.
    unprepared.expect_rejected(
        "dba",
        3,
        &[],
        &[
            "role dba can't create role walpost",
            "CREATE ROLE walpost LOGIN REPLICATION, run by a superuser",
        ],
    );

    let name = "--publication=theirs";
    unprepared
        .db()
        .run("CREATE PUBLICATION theirs FOR ALL TABLES");
    unprepared
        .db()
        .run("CREATE ROLE mallory SUPERUSER; ALTER PUBLICATION theirs OWNER TO mallory; ALTER ROLE mallory NOSUPERUSER");
    let expected = "publication theirs belongs to role mallory";
    unprepared.expect_rejected("postgres", 3, &[name], &[expected]);
    unprepared
        .init("dba")
        .arg("--no-role")
        .finish()
        .expect_code(0);
}

#[test]
fn init_rejects_a_standby_and_explains_why() {
    let primary = Server::private(MAJOR, "");
    let standby = primary.standby("standby", "");
    let init = Invocation::new(["init", "--postgres", &standby.conninfo("postgres")]);
    let expected = [
        "a standby in recovery",
        "Connect to the primary",
        "Nothing was changed",
    ];
    init.finish().expect_code(3).expect_mentions(&expected);
}

/// The slot can't be created in the same transaction as the other objects.
#[test]
fn init_reports_created_objects_if_slot_creation_fails_and_can_be_rerun() {
    let unprepared = UnpreparedServer::new(MAJOR, "");
    let other = unprepared.db();
    other.run("CREATE TABLE busy (); BEGIN; INSERT INTO busy DEFAULT VALUES");
    let init = || {
        unprepared
            .init("postgres")
            .arg("--lock-timeout=1s")
            .finish()
    };
    let expected = [
        "slot walpost_outbox: ",
        "after all transactions that are already running have ended",
        "Everything except the slot was created",
        "run the same command again",
    ];
    init().expect_code(3).expect_mentions(&expected);
    let found = "SELECT count(*) FROM pg_publication WHERE pubname = 'walpost_outbox'";
    assert_eq!(unprepared.db().number(found), 1);
    other.run("COMMIT");
    init().expect_code(0);
    // Make another session hold a lock that the transaction of `init` needs.
    other.run("BEGIN; LOCK TABLE outbox");
    unprepared
        .init("postgres")
        .args(["--owner=shop", "--lock-timeout=1s"])
        .finish()
        .expect_code(3)
        .expect_mentions(&["Another transaction holds the lock", "Nothing was changed"]);
    other.run("COMMIT");
}
