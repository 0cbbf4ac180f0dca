//! Several outboxes that share Walpost's objects: the owner of one outbox must not be able to
//! create those objects.

use std::path::Path;
use std::process::Command;

use super::*;
use crate::init::try_psql;
use crate::support::postgres::MAJOR;
use crate::support::reaper;

on_each_version! {
    rejects_a_schema_created_by_an_outbox_owner
    column_types_of_an_untrusted_table_state_run_no_code
    add_outbox_rejects_walpost_tables_owned_by_another_role
}

impl PlantedFixture {
    /// Creates a database without Walpost's objects, but with a tenant's schema and table, both
    /// owned by the attacker.
    fn of_tenants(major: u32) -> Self {
        let mut shop = Self::bare(Outbox::Table, major);
        shop.fixture
            .use_settings("tables = [\"tenant_*.outbox\"]\n");
        shop.attacker.run(
            "CREATE SCHEMA tenant_m;
             CREATE TABLE tenant_m.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb);
             INSERT INTO tenant_m.outbox VALUES (gen_random_uuid(), 'order', 'k', 't', '{}')",
        );
        shop
    }

    fn add(&self) -> Invocation {
        self.init().args(["--table", "tenant_m.outbox"])
    }

    /// Asserts that the command is rejected, that its message contains all of `words`, and that
    /// none of the attacker's code ran.
    fn expect_refused(&self, init: Invocation, words: &[&str]) {
        let refused = init.finish();
        assert_ne!(refused.code, Some(0), "{refused:?}");
        refused.expect_mentions(words);
        self.expect_nothing_ran(words[0]);
    }
}

/// PostgreSQL parses a literal with the input function for the type of the column that the literal
/// is compared with. If the type is a domain, PostgreSQL also evaluates its constraints. This
/// happens when a statement is prepared, which is before the table is examined.
fn column_types_of_an_untrusted_table_state_run_no_code(major: u32) {
    let mut shop = PlantedFixture::of_tenants(major);
    shop.fixture
        .use_settings("tables = [\"tenant_*.*\"]\nretention = \"1d\"\ndelete_rows = true\n");
    shop.attacker
        .run("ALTER TABLE tenant_m.outbox ADD created_at timestamptz NOT NULL DEFAULT now()");
    shop.init().finish().expect_code(0);
    shop.add().finish().expect_code(0);
    let mallory = &shop.mallory;
    shop.fixture.db.run(&format!(
        "ALTER TABLE walpost.table_state OWNER TO {mallory}; GRANT USAGE ON SCHEMA walpost TO {mallory}"
    ));
    // The table's name is a valid literal of an array type.
    shop.attacker.run(
        "CREATE DOMAIN plot.checked AS text CHECK (plot.note(VALUE));
         ALTER TABLE tenant_m.outbox RENAME TO \"{x}\";
         ALTER TABLE walpost.table_state DROP CONSTRAINT table_state_pkey;
         ALTER TABLE walpost.table_state ALTER table_name TYPE plot.checked[] USING '{}'::text[]",
    );
    let expected = [&*format!(
        "table walpost.table_state belongs to role {mallory}"
    )];
    let maintain = shop.fixture.invoke("maintain").finish();
    maintain.expect_mentions(&expected);
    shop.expect_nothing_ran("maintain");
    let check = shop.command(&["check"]).finish();
    check.expect_mentions(&expected);
    shop.expect_nothing_ran("check");
}

/// `walpost.add_outbox` can also be called directly instead of through `sql/add_outbox.sql`, which
/// examines the tables first.
fn add_outbox_rejects_walpost_tables_owned_by_another_role(major: u32) {
    let shop = PlantedFixture::of_tenants(major);
    shop.init().finish().expect_code(0);
    // `init` has already added the table `tenant_m.outbox`, so create another one.
    shop.attacker.run(
        "CREATE TABLE tenant_m.later (LIKE tenant_m.outbox INCLUDING ALL);
         INSERT INTO tenant_m.later SELECT * FROM tenant_m.outbox",
    );
    let (db, mallory) = (&shop.fixture.db, &shop.mallory);
    let add = format!(
        "SELECT walpost.add_outbox('tenant_m.later', '{}')",
        shop.fixture.slot()
    );
    db.run(&format!("GRANT USAGE ON SCHEMA walpost TO {mallory}"));
    for table in ["table_state", "outbox_row"] {
        for plant in [
            format!(
                "CREATE TRIGGER t BEFORE INSERT OR UPDATE OR DELETE ON walpost.{table} FOR EACH ROW EXECUTE FUNCTION plot.row()"
            ),
            format!(
                "CREATE RULE r AS ON INSERT TO walpost.{table} DO ALSO SELECT plot.note('rule')"
            ),
            format!("ALTER TABLE walpost.{table} ADD planted bool DEFAULT plot.note('default')"),
            // Creating an index requires the CREATE privilege on the schema, so the superuser
            // creates it. The function in the index still runs as the table's owner.
            format!("RESET ROLE; CREATE INDEX planted ON walpost.{table} (plot.note('index'))"),
        ] {
            db.run(&format!("BEGIN; SAVEPOINT planted; ALTER TABLE walpost.{table} OWNER TO {mallory}; SET ROLE {mallory}; {plant}; RESET ROLE"));
            for owner in [mallory.as_str(), "CURRENT_USER"] {
                db.run(&format!(
                    "ALTER TABLE walpost.{table} OWNER TO {owner}; SAVEPOINT call"
                ));
                let error = db.try_rows(&add).expect_err("an error");
                let error = error.as_db_error().expect("an error").message();
                assert!(
                    error.contains(&format!(
                        "table walpost.{table} belongs to an untrusted role"
                    )),
                    "{error}"
                );
                db.run("ROLLBACK TO call");
            }
            db.run("ROLLBACK");
            shop.expect_nothing_ran(&plant);
        }
    }
    assert_eq!(db.value(&add).as_deref(), Some("1"));
}

/// Since PostgreSQL 17, `pg_publication_tables` locks every table in the publication.
#[test]
fn init_of_one_table_does_not_wait_for_a_lock_on_another() {
    let shop = PlantedFixture::of_tenants(18);
    shop.init().finish().expect_code(0);
    shop.add().finish().expect_code(0);
    shop.attacker
        .run("BEGIN; LOCK TABLE tenant_m.outbox IN ACCESS EXCLUSIVE MODE");
    shop.fixture.db.run("CREATE SCHEMA tenant_n");
    let init = shop.init().args(["--table", "tenant_n.outbox"]).finish();
    shop.attacker.run("ROLLBACK");
    init.expect_code(0);
}

/// The functions in the schema serve the outboxes of all tenants, so no tenant may own them, even
/// if a command adds only that tenant's table.
fn rejects_a_schema_created_by_an_outbox_owner(major: u32) {
    let shop = PlantedFixture::of_tenants(major);
    shop.attacker.run(
        "CREATE SCHEMA walpost; GRANT USAGE ON SCHEMA walpost TO PUBLIC;
         CREATE FUNCTION walpost.add_outbox(outbox regclass, publication name DEFAULT 'walpost_outbox')
             RETURNS int8 LANGUAGE plpgsql AS $$ BEGIN PERFORM plot.note('add_outbox'); RETURN NULL; END $$;
         CREATE FUNCTION walpost.lock_and_examine(schema_name text, table_name text, statement text)
             RETURNS text LANGUAGE plpgsql AS $$ BEGIN PERFORM plot.note('lock_and_examine'); RETURN ''; END $$;
         CREATE TABLE walpost.outbox_row (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, publication text NOT NULL,
             relation oid NOT NULL, table_schema text NOT NULL, table_name text NOT NULL, column_list text NOT NULL,
             row_values text NOT NULL);
         GRANT SELECT, INSERT, DELETE ON walpost.outbox_row TO PUBLIC;
         CREATE TRIGGER t AFTER INSERT OR DELETE ON walpost.outbox_row FOR EACH ROW EXECUTE FUNCTION plot.row()",
    );
    let owner = format!("schema walpost belongs to role {}", shop.mallory);
    for init in [shop.init(), shop.add()] {
        shop.expect_refused(init, &[&owner]);
    }
    for file in ["sql/guard.sql", "sql/tables.sql", "sql/add_outbox.sql"] {
        let run = try_psql(
            &shop.fixture,
            &Path::new(env!("CARGO_MANIFEST_DIR")).join(file),
        );
        let output = String::from_utf8_lossy(&run.stderr);
        assert!(
            !run.status.success() && output.contains(&owner),
            "{file}: {output}"
        );
        shop.expect_nothing_ran(file);
    }
}

#[test]
fn rejects_objects_in_the_walpost_schema_that_are_owned_by_an_outbox_owner() {
    for major in [14, 18] {
        let shop = PlantedFixture::of_tenants(major);
        let (db, mallory) = (&shop.fixture.db, &shop.mallory);
        shop.init().finish().expect_code(0);
        // The attacker creates objects that resemble Walpost's before `init` runs.
        db.run(&format!(
            "GRANT USAGE, CREATE ON SCHEMA walpost TO {mallory}; ALTER FUNCTION walpost.add_outbox(regclass, name) OWNER TO {mallory}"
        ));
        shop.attacker.run(
            "CREATE OR REPLACE FUNCTION walpost.add_outbox(outbox regclass, publication name DEFAULT 'walpost_outbox')
                 RETURNS int8 LANGUAGE plpgsql AS $$ BEGIN PERFORM plot.note('add_outbox'); RETURN NULL; END $$",
        );
        db.run(&format!("REVOKE CREATE ON SCHEMA walpost FROM {mallory}"));
        let owner = format!("role {mallory}");
        shop.expect_refused(shop.add(), &["function walpost.add_outbox", &owner]);
        db.run("DROP FUNCTION walpost.add_outbox(regclass, name)");

        db.run(&format!(
            "ALTER TABLE walpost.outbox_row OWNER TO {mallory}"
        ));
        shop.attacker.run(
            "CREATE TRIGGER planted AFTER INSERT ON walpost.outbox_row FOR EACH ROW EXECUTE FUNCTION plot.row()",
        );
        shop.expect_refused(shop.add(), &["table walpost.outbox_row", &owner]);
        db.run("ALTER TABLE walpost.outbox_row OWNER TO CURRENT_USER");
        shop.expect_refused(shop.add(), &["table walpost.outbox_row", "trigger planted"]);
        db.run("DROP TRIGGER planted ON walpost.outbox_row");
        shop.add().finish().expect_code(0);
        shop.expect_nothing_ran("init --table");
    }
}

/// Operators paste printed commands into a shell. Because other roles can choose schema names, the
/// names must be quoted.
#[test]
fn printed_commands_quote_names_for_the_shell() {
    let shop = PlantedFixture::of_tenants(MAJOR);
    shop.init().finish().expect_code(0);
    shop.attacker.run(
        "CREATE SCHEMA \"tenant_$(touch hit)`touch hit`'; touch hit\";
         CREATE TABLE \"tenant_$(touch hit)`touch hit`'; touch hit\".outbox (LIKE tenant_m.outbox)",
    );
    let check = shop.command(&["check"]).finish();
    let (_, command) = check
        .stdout
        .split_once("Add each one: walpost init --table ")
        .unwrap_or_else(|| panic!("{check:?}"));
    let (word, _) = command
        .split_once("; or change the patterns")
        .expect("the end");
    let folder = reaper::folder("planted");
    let shell = Command::new("sh")
        .args(["-c", &format!("set -- {word}; printf %s \"$1\"")])
        .current_dir(&folder)
        .output()
        .expect("sh runs");
    let name = "\"tenant_$(touch hit)`touch hit`'; touch hit\".outbox";
    assert_eq!(String::from_utf8_lossy(&shell.stdout), name, "{word}");
    assert!(!folder.join("hit").exists(), "{word}");
}

#[test]
fn only_the_owner_can_add_a_table_whose_indexes_call_untrusted_functions() {
    for major in [14, 18] {
        let shop = PlantedFixture::of_tenants(major);
        shop.attacker
            .run("CREATE INDEX planted ON tenant_m.outbox ((plot.note(type)))");
        // Test both an `init` that adds every table and an `init` that adds only this table.
        for init in [shop.init(), shop.add()] {
            shop.expect_refused(
                init,
                &["tenant_m.outbox", "plot.note", "SELECT walpost.add_outbox"],
            );
        }
        let publication = shop.fixture.slot();
        // A role can call `walpost.add_outbox` if it owns both the table and the publication and
        // has the EXECUTE privilege.
        let (db, mallory) = (&shop.fixture.db, &shop.mallory);
        db.run(&format!(
            "ALTER PUBLICATION {publication} OWNER TO {mallory}; GRANT USAGE ON SCHEMA walpost TO {mallory};
             GRANT SELECT, INSERT, DELETE ON walpost.outbox_row TO {mallory};
             GRANT SELECT, INSERT, UPDATE ON walpost.table_state TO {mallory};
             GRANT EXECUTE ON FUNCTION walpost.add_outbox(regclass, name) TO {mallory}"
        ));
        let add = format!("SELECT walpost.add_outbox('tenant_m.outbox', '{publication}')");
        assert_eq!(shop.attacker.number(&add), 1);
        // If the table is already in the publication, `init` reads none of its rows.
        db.run(&format!(
            "ALTER PUBLICATION {publication} OWNER TO CURRENT_USER"
        ));
        shop.add().finish().expect_code(0);
        shop.expect_nothing_ran("add_outbox");
    }
}

/// If a SECURITY DEFINER function called `walpost.add_outbox`, the table would be inspected on
/// behalf of the calling role but read as the function's owner.
#[test]
fn add_outbox_rejects_calls_from_a_security_definer_function() {
    for major in [14, 18] {
        let shop = PlantedFixture::of_tenants(major);
        shop.init().finish().expect_code(0);
        shop.fixture.db.run(&format!(
            "GRANT USAGE ON SCHEMA walpost TO {};
             CREATE FUNCTION public.register(tenant regclass) RETURNS int8 LANGUAGE sql SECURITY DEFINER AS
                 $$ SELECT walpost.add_outbox(tenant, '{}') $$",
            shop.mallory,
            shop.fixture.slot()
        ));
        shop.attacker
            .run("CREATE INDEX planted ON tenant_m.outbox ((plot.note(type)))");
        let added = shop
            .attacker
            .try_run("SELECT public.register('tenant_m.outbox')");
        let error = added.expect_err("it is refused");
        let output = format!("{error:?}");
        assert!(
            output.contains("was called by a function that runs as role"),
            "{output}"
        );
        shop.expect_nothing_ran("add_outbox");
    }
}
