//! Objects planted in place of the journal, walpost.slot_state and walpost.table_state.

use std::path::Path;

use super::PlantedFixture;
use crate::init::try_psql;
use crate::support::event::Outbox;

on_each_version! {
    rejects_a_journal_created_earlier_by_another_role
    rejects_a_journal_owned_by_the_outbox_owner
    rejects_a_slot_state_table_owned_by_the_outbox_owner
    rejects_a_table_state_table_owned_by_the_outbox_owner
    rejects_walpost_tables_owned_by_the_outbox_owner_in_a_schema_owned_by_a_superuser
}

/// SQL for a table that another role could plant in place of the journal. It differs from Walpost's
/// journal only in the privileges that the last statement grants.
const JOURNAL: &str = "CREATE SCHEMA IF NOT EXISTS walpost;
    CREATE TABLE walpost.journal (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        at timestamptz NOT NULL DEFAULT now(), pipeline text NOT NULL, slot text NOT NULL,
        action text NOT NULL CHECK (action IN ('snapshot', 'skip', 'drop slot', 'replay', 'set aside')), from_lsn pg_lsn,
        to_lsn pg_lsn, by_role text NOT NULL DEFAULT session_user, detail jsonb NOT NULL DEFAULT '{}');
    GRANT USAGE ON SCHEMA walpost TO PUBLIC; GRANT ALL ON walpost.journal TO PUBLIC;";

/// Objects that run the journal owner's code as the role that writes or reads the journal.
const PLANTED_CODE: [(&str, &str); 10] = [
    (
        "trigger",
        "CREATE TRIGGER t AFTER INSERT ON walpost.journal FOR EACH STATEMENT EXECUTE FUNCTION plot.row()",
    ),
    (
        "rule",
        "CREATE RULE r AS ON INSERT TO walpost.journal DO ALSO SELECT plot.note('rule')",
    ),
    (
        "index",
        "CREATE INDEX i ON walpost.journal (id) WHERE plot.note('index')",
    ),
    (
        "constraint",
        "ALTER TABLE walpost.journal ADD CONSTRAINT c CHECK (plot.note(slot)) NOT VALID",
    ),
    (
        "column slot text",
        "ALTER TABLE walpost.journal ALTER slot SET DEFAULT plot.note('default')::text",
    ),
    (
        "column more text",
        "ALTER TABLE walpost.journal ADD more text DEFAULT plot.note('default')::text",
    ),
    (
        "parent plot.parent",
        "CREATE TABLE plot.parent (slot text); ALTER TABLE walpost.journal INHERIT plot.parent",
    ),
    (
        "policy",
        "ALTER TABLE walpost.journal ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON walpost.journal USING (plot.note('policy'))",
    ),
    (
        "inherit",
        "CREATE TABLE plot.child () INHERITS (walpost.journal)",
    ),
    (
        "relkind v",
        "ALTER TABLE walpost.journal RENAME TO real;
        CREATE VIEW walpost.journal AS SELECT * FROM walpost.real WHERE plot.note('view')",
    ),
];

fn rejects_a_journal_created_earlier_by_another_role(major: u32) {
    for (_, trap) in PLANTED_CODE {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        shop.attacker.run(&format!(
            "{JOURNAL}{trap}; GRANT ALL ON walpost.journal TO PUBLIC"
        ));
        let init = shop.init().finish().expect_code(3);
        init.expect_mentions(&[
            "schema walpost belongs to",
            &shop.mallory,
            "ALTER SCHEMA walpost RENAME TO",
        ]);
        shop.expect_nothing_ran(trap);
        // Next, make the DBA the owner of the schema `walpost`, so that only the journal table
        // belongs to the attacker.
        shop.fixture
            .db
            .run("ALTER SCHEMA walpost OWNER TO postgres");
        let init = shop.init().finish().expect_code(3);
        init.expect_mentions(&["walpost.journal belongs to", &shop.mallory]);
        let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/journal.sql");
        assert!(!try_psql(&shop.fixture, &sql).status.success(), "{trap}");
        shop.expect_nothing_ran(trap);
    }
}

/// The owner of the outbox must not own the journal, whether that role created the journal before
/// `init` ran or became its owner later. Every command must also detect objects that were added to
/// Walpost's own table.
fn rejects_a_journal_owned_by_the_outbox_owner(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    shop.attacker.run(&format!(
        "{JOURNAL} CREATE TABLE public.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)"
    ));
    let init = shop.init().finish().expect_code(3);
    init.expect_mentions(&["schema walpost belongs to", &shop.mallory]);
    drop(shop);

    for (kind, trap) in PLANTED_CODE {
        let shop = PlantedFixture::owned_by_attacker(major);
        let (fixture, mallory) = (&shop.fixture, &shop.mallory);
        let give = |to: &str| {
            fixture.db.run(&format!(
                "ALTER SCHEMA walpost OWNER TO {to}; ALTER TABLE walpost.journal OWNER TO {to}"
            ));
        };
        give(mallory);
        shop.attacker
            .run(&format!("{trap}; GRANT ALL ON walpost.journal TO PUBLIC"));
        for words in [
            &["replay", "--all", "--yes"][..],
            &["run"],
            &["check"],
            &["verify"],
        ] {
            let finished = shop.command(words).finish();
            shop.expect_nothing_ran(words[0]);
            if (kind, words[0]) == ("policy", "verify") {
                // `verify` does not need access to the journal.
                continue;
            }
            match kind {
                // Walpost may report either error, depending on which it detects first.
                "policy" if !finished.mentions("schema walpost belongs to") => finished
                    .expect_code(3)
                    .expect_mentions(&["row-level security policy"]),
                _ => finished
                    .expect_code(3)
                    .expect_mentions(&["schema walpost belongs to", mallory]),
            };
        }
        shop.init().finish().expect_code(3);
        shop.expect_nothing_ran("init");

        // The planted objects remain after the privilege to create them is revoked.
        give("CURRENT_USER");
        fixture
            .db
            .run("REVOKE TRIGGER, REFERENCES ON walpost.journal FROM PUBLIC");
        for words in [
            &["replay", "--all", "--yes"][..],
            &["skip", "--yes", "--to=FFFFFF/0"],
            &["run"],
            &["check"],
            &["verify"],
        ] {
            let finished = shop.command(words).finish();
            shop.expect_nothing_ran(words[0]);
            if (kind, words[0]) == ("policy", "verify") {
                // `verify` does not need access to the journal.
                continue;
            }
            let finished = finished.expect_code(3);
            match kind {
                "policy" => {
                    finished.expect_mentions(&["row-level security policy for table \"journal\""])
                }
                kind => finished.expect_mentions(&["walpost.journal has objects or columns", kind]),
            };
        }
    }
}

/// Repeats the journal test for walpost.slot_state. In addition, no other role may have privileges
/// that allow it to attach code to this table.
fn rejects_a_slot_state_table_owned_by_the_outbox_owner(major: u32) {
    for (kind, trap) in PLANTED_CODE {
        let shop = PlantedFixture::owned_by_attacker(major);
        let give = |to: &str| {
            shop.fixture.db.run(&format!(
                "ALTER SCHEMA walpost OWNER TO {to}; ALTER TABLE walpost.slot_state OWNER TO {to}"
            ));
        };
        give(&shop.mallory);
        let trap = trap
            .replace("journal", "slot_state")
            .replace("(id)", "(slot)");
        shop.attacker.run(&format!(
            "{trap}; GRANT SELECT, INSERT, UPDATE ON walpost.slot_state TO PUBLIC"
        ));
        for words in [&["run"], &["check"]] {
            let refused = shop.command(words).finish().expect_code(3);
            refused.expect_mentions(&["schema walpost belongs to", &shop.mallory]);
            shop.expect_nothing_ran(words[0]);
        }
        shop.init().finish().expect_code(3);
        shop.expect_nothing_ran("init");
        give("CURRENT_USER");
        let run = shop.command(&["run"]).finish().expect_code(3);
        match kind {
            "policy" => run.expect_mentions(&["row-level security policy"]),
            kind => run.expect_mentions(&["walpost.slot_state has objects or columns", kind]),
        };
        shop.expect_nothing_ran("run");
    }
    let shop = PlantedFixture::owned_by_attacker(major);
    for right in ["TRIGGER", "REFERENCES"] {
        for role in ["PUBLIC", "pg_monitor"] {
            let expected = format!("the privilege {right} on table walpost.slot_state belongs to");
            let to = format!("ON walpost.slot_state TO {role}");
            shop.fixture.db.run(&format!("GRANT {right} {to}"));
            let run = shop.command(&["run"]).finish().expect_code(3);
            run.expect_mentions(&[
                &expected,
                role,
                &format!("REVOKE {right} ON walpost.slot_state FROM {role}"),
            ]);
            let from = to.replace(" TO ", " FROM ");
            shop.fixture.db.run(&format!("REVOKE {right} {from}"));
        }
    }
}

/// Repeats the journal test for walpost.table_state. `run` can stream without this table, but logs
/// a warning.
fn rejects_a_table_state_table_owned_by_the_outbox_owner(major: u32) {
    for (kind, trap) in PLANTED_CODE {
        let shop = PlantedFixture::owned_by_attacker(major);
        let give = |to: &str| {
            shop.fixture.db.run(&format!(
                "ALTER SCHEMA walpost OWNER TO {to}; ALTER TABLE walpost.table_state OWNER TO {to}"
            ));
        };
        give(&shop.mallory);
        let trap = trap
            .replace("journal", "table_state")
            .replace("(id)", "(slot)");
        shop.attacker.run(&format!(
            "{trap}; GRANT SELECT, INSERT, UPDATE ON walpost.table_state TO PUBLIC"
        ));
        let check = shop.command(&["check"]).finish().expect_code(3);
        check.expect_mentions(&["schema walpost belongs to", &shop.mallory]);
        shop.expect_nothing_ran("check");
        give("CURRENT_USER");
        let mut run = shop.command(&["run"]).start_streaming();
        run.wait_for_log(match kind {
            "policy" => "row-level security policy",
            _ => "table walpost.table_state has objects or columns",
        });
        run.terminate().expect_code(0);
        shop.expect_nothing_ran("run");
        shop.init().finish().expect_code(3);
        shop.expect_nothing_ran("init");
    }
}

/// The owner of the outbox owns one of Walpost's tables, but not the schema that contains it.
fn rejects_walpost_tables_owned_by_the_outbox_owner_in_a_schema_owned_by_a_superuser(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    let (db, mallory) = (&shop.fixture.db, &shop.mallory);
    db.run(&format!("GRANT USAGE ON SCHEMA walpost TO {mallory}"));
    for table in ["journal", "slot_state", "table_state"] {
        db.run(&format!("ALTER TABLE walpost.{table} OWNER TO {mallory}"));
        shop.attacker.run(&format!(
            "CREATE TRIGGER t AFTER INSERT OR UPDATE ON walpost.{table} FOR EACH ROW EXECUTE FUNCTION plot.row()"
        ));
        let expected = format!("table walpost.{table} belongs to role {mallory}");
        let check = shop.command(&["check"]).finish();
        let check = check.expect_mentions(&[&expected]);
        let init = shop.init().finish().expect_code(3);
        init.expect_mentions(&[&expected]);
        if table == "table_state" {
            // `run` can stream without this table, but logs a warning.
            check.expect_code(0).expect_mentions(&["WARNING"]);
            let mut run = shop.command(&["run", "--snapshot=never"]).start_streaming();
            run.wait_for_log(&expected);
            run.terminate().expect_code(0);
        } else {
            check.expect_code(3);
            let run = shop.command(&["run"]).finish().expect_code(3);
            run.expect_mentions(&[&expected]);
        }
        shop.expect_nothing_ran(table);
        db.run(&format!(
            "DROP TRIGGER t ON walpost.{table}; ALTER TABLE walpost.{table} OWNER TO CURRENT_USER"
        ));
    }
}
