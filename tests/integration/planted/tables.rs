//! Several outboxes: the owner of one may not create the objects that all of them share.

use std::process::Command;

use super::*;
use crate::support::postgres::MAJOR;
use crate::support::reaper;

impl Shop {
    /// Creates a database without Walpost's objects, and a tenant's schema and table that belong to
    /// the attacker.
    fn of_tenants(major: u32) -> Self {
        let mut shop = Self::bare(Outbox::Table, major);
        shop.fixture
            .use_settings("tables = [\"tenant_*.outbox\"]\n");
        shop.theirs.run(
            "CREATE SCHEMA tenant_m;
             CREATE TABLE tenant_m.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb);
             INSERT INTO tenant_m.outbox VALUES (gen_random_uuid(), 'order', 'k', 't', '{}')",
        );
        shop
    }

    fn add(&self) -> Invocation {
        self.init().args(["--table", "tenant_m.outbox"])
    }

    /// Asserts that `init` is refused with these words, and that none of the attacker's code has
    /// run.
    fn expect_refused(&self, init: Invocation, words: &[&str]) {
        let refused = init.finish();
        assert_ne!(refused.code, Some(0), "{refused:?}");
        refused.expect_mentions(words);
        self.expect_nothing_ran(words[0]);
    }
}

#[test]
fn rejects_shared_objects_owned_by_an_outbox_owner() {
    for major in [14, 18] {
        let shop = Shop::of_tenants(major);
        let (db, mallory) = (&shop.fixture.db, &shop.mallory);
        shop.init().finish().expect_code(0);
        // As if the attacker had created the objects first.
        db.run(&format!(
            "GRANT USAGE, CREATE ON SCHEMA walpost TO {mallory}; ALTER FUNCTION walpost.add_outbox(regclass, name) OWNER TO {mallory}"
        ));
        shop.theirs.run(
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
        shop.theirs.run(
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

/// Commands in messages are pasted into a shell, and the names of schemas are chosen by other
/// roles.
#[test]
fn names_in_commands_are_not_evaluated_by_a_shell() {
    let shop = Shop::of_tenants(MAJOR);
    shop.init().finish().expect_code(0);
    shop.theirs.run(
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
fn table_whose_rows_would_run_code_of_its_owner_is_added_by_that_one_alone() {
    for major in [14, 18] {
        let shop = Shop::of_tenants(major);
        shop.theirs
            .run("CREATE INDEX planted ON tenant_m.outbox ((plot.note(type)))");
        // Also with an `init` that adds all tables.
        for init in [shop.init(), shop.add()] {
            shop.expect_refused(
                init,
                &["tenant_m.outbox", "plot.note", "SELECT walpost.add_outbox"],
            );
        }
        let publication = shop.fixture.slot();
        // A role that owns both and was granted the function may call it.
        let (db, mallory) = (&shop.fixture.db, &shop.mallory);
        db.run(&format!(
            "ALTER PUBLICATION {publication} OWNER TO {mallory}; GRANT USAGE ON SCHEMA walpost TO {mallory};
             GRANT SELECT, INSERT, DELETE ON walpost.outbox_row TO {mallory};
             GRANT SELECT, INSERT, UPDATE ON walpost.table_state TO {mallory};
             GRANT EXECUTE ON FUNCTION walpost.add_outbox(regclass, name) TO {mallory}"
        ));
        let add = format!("SELECT walpost.add_outbox('tenant_m.outbox', '{publication}')");
        assert_eq!(shop.theirs.number(&add), 1);
        // If the table is already in the publication, none of its rows are read.
        db.run(&format!(
            "ALTER PUBLICATION {publication} OWNER TO CURRENT_USER"
        ));
        shop.add().finish().expect_code(0);
        shop.expect_nothing_ran("add_outbox");
    }
}

/// The table would be examined for the calling role, and read as the owner of the function.
#[test]
fn add_outbox_refuses_to_run_as_the_owner_of_a_function_that_calls_it() {
    for major in [14, 18] {
        let shop = Shop::of_tenants(major);
        shop.init().finish().expect_code(0);
        shop.fixture.db.run(&format!(
            "GRANT USAGE ON SCHEMA walpost TO {};
             CREATE FUNCTION public.register(tenant regclass) RETURNS int8 LANGUAGE sql SECURITY DEFINER AS
                 $$ SELECT walpost.add_outbox(tenant, '{}') $$",
            shop.mallory,
            shop.fixture.slot()
        ));
        shop.theirs
            .run("CREATE INDEX planted ON tenant_m.outbox ((plot.note(type)))");
        let added = shop
            .theirs
            .try_run("SELECT public.register('tenant_m.outbox')");
        let error = added.expect_err("it is refused");
        let said = format!("{error:?}");
        assert!(
            said.contains("was called by a function that runs as role"),
            "{said}"
        );
        shop.expect_nothing_ran("add_outbox");
    }
}
