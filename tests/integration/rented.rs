//! A managed PostgreSQL service, where no user is a superuser and some privileges have other names.

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::Server;

/// Imitates Amazon RDS in this database only: membership in a role permits replication, and
/// `rolreplication` is false for every role.
const HIDE_ATTRIBUTES_SQL: &str = "SET allow_system_table_mods = on;
    CREATE OR REPLACE VIEW pg_catalog.pg_roles AS SELECT rolname, rolsuper, rolinherit, rolcreaterole, rolcreatedb, rolcanlogin,
        false AS rolreplication, rolconnlimit, '********'::text AS rolpassword, rolvaliduntil, rolbypassrls,
        setconfig AS rolconfig, pg_authid.oid
    FROM pg_authid LEFT JOIN pg_db_role_setting s ON pg_authid.oid = s.setrole AND s.setdatabase = 0;
    RESET allow_system_table_mods";

#[test]
fn accepts_membership_in_the_replication_role_only_if_the_server_honors_it() {
    let server = Server::private(16, "");
    let fixture = Fixture::bare_on_servers(&server, Broker::shared());
    let (db, name) = (&fixture.db, &fixture.name);
    db.run(&format!(
        "CREATE ROLE rds_replication; CREATE ROLE dba LOGIN CREATEROLE; GRANT rds_replication TO dba WITH ADMIN OPTION;
         ALTER DATABASE {name} OWNER TO dba; {HIDE_ATTRIBUTES_SQL}"
    ));
    let dba = fixture.conninfo_as("dba");
    let init = || {
        let init = fixture.with_conninfo(&dba).invoke("init");
        init.args(["--role", "walpost"]).finish()
    };
    // Unlike RDS, this server checks whether a role has the REPLICATION attribute, and not whether
    // the role is a member of `rds_replication`.
    init().expect_code(3).expect_mentions(&[
        "role dba lacks REPLICATION",
        "GRANT rds_replication TO dba",
        "Nothing was changed",
    ]);
    db.run("ALTER ROLE dba REPLICATION");
    init().expect_code(0);
    init().expect_code(0);
    let made = "SELECT rolcanlogin AND NOT rolreplication AND pg_has_role(oid, 'rds_replication', 'MEMBER')
        FROM pg_authid WHERE rolname = 'walpost'";
    assert_eq!(db.value(made).as_deref(), Some("t"));

    let walpost = fixture.conninfo_as("walpost");
    let check = || fixture.with_conninfo(&walpost).check().finish();
    let remedy = "GRANT rds_replication TO walpost";
    let refused = check().expect_code(3);
    refused.expect_mentions(&["FAILED", "replication: ", remedy]);
    let halted = fixture
        .with_conninfo(&walpost)
        .run()
        .finish()
        .expect_code(3);
    halted.expect_mentions(&["halted", remedy]);

    db.run("ALTER ROLE walpost REPLICATION");
    check().expect_code(0);
    let streams = fixture.with_conninfo(&walpost).run().start_streaming();
    fixture.insert(&fixture.aggregate(1), "k");
    fixture.wait_for_records(1);
    streams.terminate().expect_code(0);
}
