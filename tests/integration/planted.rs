//! Objects that another role of the database has planted run nothing as the DBA who calls Walpost, nor as
//! Walpost's own role. Each test does the attack. Planted code logs a warning that says as whom it ran.

use std::fs;
use std::path::Path;

use crate::init::try_psql;
use crate::support::event::Outbox;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::scene::Scene;
use crate::support::session::Session;
use crate::support::walpost::Invocation;

/// A database with a role that attacks, and one for `walpost run`.
struct Shop {
    scene: Scene<'static>,
    /// Who attacks. Makes objects in any schema, as every role could in public up to PostgreSQL 14.
    mallory: String,
    /// Who runs Walpost.
    walpost: String,
    /// A session of the attacker's.
    theirs: Session,
}

impl Shop {
    /// With nothing of Walpost's.
    fn bare(outbox: Outbox, major: u32) -> Self {
        let scene = Scene::bare_of(outbox, Server::shared(major), Broker::shared(), "");
        let (mallory, walpost) = (format!("{}_m", scene.name), format!("{}_w", scene.name));
        scene.db.run(&format!(
            "CREATE ROLE {mallory} LOGIN; GRANT CREATE ON SCHEMA public TO PUBLIC;
             GRANT CREATE ON DATABASE {} TO {mallory};
             SET search_path = pg_catalog",
            scene.name
        ));
        let theirs = scene.server.session_as(&mallory, &scene.name);
        theirs.run(
            "CREATE SCHEMA plot; GRANT USAGE ON SCHEMA plot TO PUBLIC;
             CREATE FUNCTION plot.note(what text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
                 RAISE WARNING 'PLANTED % in % ran as %.', what, current_database(), current_user;
                 RETURN true; END $$;
             CREATE FUNCTION plot.row() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 PERFORM plot.note('trigger'); RETURN NULL; END $$",
        );
        Self {
            scene,
            mallory,
            walpost,
            theirs,
        }
    }

    /// With what `walpost init` makes.
    fn new(outbox: Outbox, major: u32) -> Self {
        let shop = Self::bare(outbox, major);
        shop.init().finish().expect_code(0);
        shop
    }

    /// With a table outbox that is the attacker's, and a row in it.
    fn theirs(major: u32) -> Self {
        let shop = Self::new(Outbox::Table, major);
        let scene = &shop.scene;
        scene.insert(&scene.aggregate(1), "k");
        scene.db.run(&format!(
            "ALTER TABLE public.outbox OWNER TO {}; ALTER TABLE public.outbox DISABLE TRIGGER USER;
             DELETE FROM walpost.journal",
            shop.mallory
        ));
        shop
    }

    fn init(&self) -> Invocation {
        self.scene.invoke("init").args(["--role", &self.walpost])
    }

    /// A command as Walpost's role.
    fn command(&self, words: &[&str]) -> Invocation {
        self.command_as(&self.walpost, words)
    }

    fn command_as(&self, role: &str, words: &[&str]) -> Invocation {
        let user = format!("user={role}");
        let conninfo = self.scene.conninfo().replace("user=postgres", &user);
        let command = self.scene.invoke_as(words[0], &conninfo).args(&words[1..]);
        match words[0] {
            "maintain" | "init" => command,
            _ => command.args(["--kafka", &self.scene.broker.address()]),
        }
    }

    /// Every line about planted code that ran as somebody else than its author.
    fn ran(&self) -> Vec<String> {
        let (ours, theirs) = (
            format!(" in {} ran as ", self.scene.name),
            format!(" ran as {}.", self.mallory),
        );
        let log = self.scene.server.log();
        let lines = log.lines().filter(|line| {
            line.contains("PLANTED") && line.contains(&ours) && !line.contains(&theirs)
        });
        lines.map(str::to_owned).collect()
    }

    fn expect_nothing_ran(&self, after: &str) {
        let (ran, major) = (self.ran(), self.scene.server.major);
        assert!(
            ran.is_empty(),
            "PostgreSQL {major}, after {after}: {ran:#?}"
        );
    }

    /// For every function and operator of pg_catalog whose name our statements could have, overloads
    /// with all pairs of types that they call them with: one that fits better than pg_catalog's is among
    /// them, where there can be one.
    fn plant_overloads(&self) {
        let names = names_in_our_statements(&self.scene);
        self.theirs.run(&format!(
            "SET search_path = pg_catalog;
             DO $plant$ DECLARE
                 types text[] := '{{text,name,varchar,integer,bigint,numeric,oid,boolean,timestamptz,date,pg_lsn,regclass}}';
                 body text := 'LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN PERFORM plot.note(%L); RETURN NULL; END $$';
                 a text; b text; f text; result text;
             BEGIN
                 FOREACH f IN ARRAY '{{{}}}'::text[] LOOP
                     result := CASE WHEN f ~ '^(has_|pg_has_|isfinite|pg_is)' THEN 'boolean' ELSE 'text' END;
                     FOREACH a IN ARRAY types LOOP
                         EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s ' || body, f, a, result, f);
                         FOREACH b IN ARRAY types LOOP
                             EXECUTE format('CREATE FUNCTION public.%I(%s, %s) RETURNS %s ' || body, f, a, b, result, f);
                         END LOOP;
                     END LOOP;
                     EXECUTE format('CREATE FUNCTION public.%I(text, text, text) RETURNS %s ' || body, f, result, f);
                     EXECUTE format('CREATE FUNCTION public.%I(text, name, name) RETURNS %s ' || body, f, result, f);
                     EXECUTE format('CREATE FUNCTION public.%I(text, text, boolean) RETURNS %s ' || body, f, result, f);
                     EXECUTE format('CREATE FUNCTION public.%I(text, text, text, text) RETURNS %s ' || body, f, result, f);
                     EXECUTE format('CREATE FUNCTION public.%I(text, text, text, text, text) RETURNS %s ' || body, f, result, f);
                 END LOOP;
                 FOREACH f IN ARRAY '{{=,<>,<,>,<=,>=,||,+,-,*,/,%,~,->>,->,@>,&&,&,<<,|}}'::text[] LOOP
                     result := CASE WHEN f IN ('=', '<>', '<', '>', '<=', '>=', '~', '@>', '&&') THEN 'boolean' ELSE NULL END;
                     FOREACH a IN ARRAY types LOOP FOREACH b IN ARRAY types LOOP
                         EXECUTE format('CREATE FUNCTION plot.%I(%s, %s) RETURNS %s ' || body, 'op' || f, a, b,
                             coalesce(result, a), 'operator ' || f);
                         EXECUTE format('CREATE OPERATOR public.%s (FUNCTION = plot.%I, LEFTARG = %s, RIGHTARG = %s)', f,
                             'op' || f, a, b);
                     END LOOP; END LOOP;
                 END LOOP;
             END $plant$",
            names.join(",")
        ));
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        for role in [&self.mallory, &self.walpost] {
            let drop = format!("DROP OWNED BY {role} CASCADE; DROP ROLE {role}");
            let _ = self.scene.db.try_run(&drop);
        }
    }
}

/// Functions of pg_catalog whose names stand in the files of sql/ and in src/.
fn names_in_our_statements(scene: &Scene) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut text = String::new();
    let mut folders = vec![root.join("sql"), root.join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => text.push_str(&fs::read_to_string(path).unwrap()),
            }
        }
    }
    let known = scene.db.rows(
        "SELECT DISTINCT proname FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f'
         AND pronargs > 0 AND proname !~ '(in|out|recv|send)$' ORDER BY 1",
    );
    let known = known.into_iter().flatten().flatten();
    // Aggregates and what has a keyword's syntax can't be called otherwise.
    let called = |name: &String| {
        let call = format!("{name}(");
        text.match_indices(&call).any(|(at, _)| {
            let before = text[..at].chars().next_back();
            before.is_none_or(|c| !(c.is_alphanumeric() || c == '_' || c == '.'))
        })
    };
    let names: Vec<_> = known.filter(called).collect();
    for expected in [
        "format",
        "current_setting",
        "substring",
        "to_char",
        "pg_has_role",
    ] {
        assert!(
            names.iter().any(|name| name == expected),
            "{expected}: {names:?}"
        );
    }
    names
}

/// Makes a test for each version of PostgreSQL.
macro_rules! on_each_version {
    ($($name:ident)*) => { $(
        mod $name {
            #[test]
            fn on_14() {
                super::$name(14);
            }

            #[test]
            fn on_15() {
                super::$name(15);
            }

            #[test]
            fn on_16() {
                super::$name(16);
            }

            #[test]
            fn on_17() {
                super::$name(17);
            }

            #[test]
            fn on_18() {
                super::$name(18);
            }
        }
    )* };
}

on_each_version! {
    overloads_of_another_role_are_never_called
    journal_that_another_role_has_made_before_is_refused
    journal_of_the_owner_of_the_outbox_runs_nothing_as_others
    slot_state_of_the_owner_of_the_outbox_runs_nothing_as_others
    functions_and_a_publication_of_another_role_are_refused
    outbox_runs_no_code_of_its_owner_as_others
    policies_of_the_outbox_are_not_evaluated
    partitions_of_a_table_with_code_of_others_are_not_made
    owner_of_the_outbox_runs_nothing_as_who_gives_it_the_table
}

fn overloads_of_another_role_are_never_called(major: u32) {
    let shop = Shop::bare(Outbox::Table, major);
    let scene = &shop.scene;
    shop.plant_overloads();
    shop.init().finish().expect_code(0);
    shop.expect_nothing_ran("init");
    let owner = format!("--owner={}", shop.walpost);
    for (number, arguments) in [
        ["--partitioned", "--table=public.parts"],
        ["--no-role", "--outbox=messages"],
        [&owner, "--table=public.owned"],
        [&owner, "--table=public.owned"],
    ]
    .iter()
    .enumerate()
    {
        let name = format!("{}_{number}", scene.name);
        let init = Invocation::new(["init", "--postgres", &scene.conninfo(), "--pipeline=other"])
            .args(arguments)
            .args(["--role", &shop.walpost, "--writer", &shop.mallory])
            .args(["--publication", &name, "--slot", &name]);
        init.finish().expect_code(0);
        shop.expect_nothing_ran(arguments[1]);
    }
    shop.command(&["check"]).finish().expect_code(0);
    shop.expect_nothing_ran("check");
    let aggregate = scene.aggregate(1);
    let mut walpost = shop.command(&["run", "--http=127.0.0.1:0"]).start();
    walpost.wait_for_log("streaming");
    let id = "INSERT INTO public.outbox (aggregatetype, aggregateid, type) VALUES";
    // As an application does, which has public in its path.
    scene
        .server
        .session(&scene.name)
        .run(&format!("{id} ('{aggregate}', 'k', 't')"));
    shop.expect_nothing_ran("INSERT");
    scene.wait_for_records(1);
    scene.wait_until_confirmed();
    let http = walpost.http();
    crate::support::wait::wait_until("the slot to be looked at", || {
        http.get("/metrics")
            .body
            .contains("walpost_slot_retained_bytes{")
    });
    shop.expect_nothing_ran("run");
    walpost.terminate().expect_code(0);
    for words in [
        &["status"][..],
        &["verify"],
        &[
            "replay",
            "--yes",
            "--from=2025-01-01",
            "--aggregate=a/b",
            "--id=0198c1a2-7b3e-7000-8000-000000000000",
        ],
        &["skip", "--dry-run", "--to=0/1"],
        &["maintain", "--dry-run", "--retention=24h", "--delete-rows"],
    ] {
        let finished = shop.command(words).finish();
        assert!(
            matches!(finished.code, Some(0 | 2 | 3)),
            "{words:?}: {finished:?}"
        );
        assert!(
            !finished.stderr.contains("does not exist"),
            "{words:?}: {finished:?}"
        );
        shop.expect_nothing_ran(words[0]);
    }
    let checkpoint = |word| {
        let user = format!("user={}", shop.walpost);
        scene.checkpoint_as(word, &scene.conninfo().replace("user=postgres", &user))
    };
    checkpoint("adopt").arg("--yes").finish().expect_code(0);
    checkpoint("show").finish().expect_code(0);
    shop.expect_nothing_ran("checkpoint");
    for file in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("sql")).unwrap() {
        let file = file.unwrap().path();
        if file.ends_with("teardown.sql") {
            continue;
        }
        let output = try_psql(scene, &file);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // publish.sql and the partitioned table have another kind of outbox.
        assert!(
            output.status.success() || said.contains("not partitioned"),
            "{}: {said}",
            file.display()
        );
        shop.expect_nothing_ran(&file.display().to_string());
    }
}

/// What a role may plant in the place of the journal, that is exactly as ours but for the last statement.
const JOURNAL: &str = "CREATE SCHEMA IF NOT EXISTS walpost;
    CREATE TABLE walpost.journal (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        at timestamptz NOT NULL DEFAULT now(), pipeline text NOT NULL, slot text NOT NULL,
        action text NOT NULL CHECK (action IN ('snapshot', 'skip', 'drop slot', 'replay', 'let go')), from_lsn pg_lsn,
        to_lsn pg_lsn, by_role text NOT NULL DEFAULT session_user, detail jsonb NOT NULL DEFAULT '{}');
    GRANT USAGE ON SCHEMA walpost TO PUBLIC; GRANT ALL ON walpost.journal TO PUBLIC;";

/// Each has the owner of the journal run code as whoever writes or reads it.
const TRAPS: [(&str, &str); 9] = [
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

fn journal_that_another_role_has_made_before_is_refused(major: u32) {
    for (_, trap) in TRAPS {
        let shop = Shop::bare(Outbox::Table, major);
        shop.theirs.run(&format!(
            "{JOURNAL}{trap}; GRANT ALL ON walpost.journal TO PUBLIC"
        ));
        let init = shop.init().finish().expect_code(3);
        init.expect_says(&[
            "schema walpost belongs to",
            &shop.mallory,
            "ALTER SCHEMA walpost OWNER",
        ]);
        shop.expect_nothing_ran(trap);
        // Where the schema is the DBA's, and the table alone is not.
        shop.scene.db.run("ALTER SCHEMA walpost OWNER TO postgres");
        let init = shop.init().finish().expect_code(3);
        init.expect_says(&["walpost.journal belongs to", &shop.mallory]);
        let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/journal.sql");
        assert!(!try_psql(&shop.scene, &sql).status.success(), "{trap}");
        shop.expect_nothing_ran(trap);
    }
}

/// The owner of the outbox may own the journal, and nothing of it may run as anybody else: neither when
/// it is there before `init`, nor when it is changed later.
fn journal_of_the_owner_of_the_outbox_runs_nothing_as_others(major: u32) {
    for (kind, trap) in TRAPS {
        let shop = Shop::bare(Outbox::Table, major);
        shop.theirs.run(&format!(
            "{JOURNAL}{trap}; GRANT ALL ON walpost.journal TO PUBLIC"
        ));
        shop.theirs.run(
            "CREATE TABLE public.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)",
        );
        shop.init()
            .finish()
            .expect_code(3)
            .expect_says(&["walpost.journal has what", kind]);
        shop.expect_nothing_ran(trap);
        drop(shop);

        let shop = Shop::theirs(major);
        let scene = &shop.scene;
        scene.db.run(&format!(
            "ALTER SCHEMA walpost OWNER TO {0}; ALTER TABLE walpost.journal OWNER TO {0}",
            shop.mallory
        ));
        shop.theirs
            .run(&format!("{trap}; GRANT ALL ON walpost.journal TO PUBLIC"));
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
                // It does without a journal that it may not read.
                continue;
            }
            let finished = finished.expect_code(3);
            match kind {
                "policy" => {
                    finished.expect_says(&["row-level security policy for table \"journal\""])
                }
                kind => finished.expect_says(&["walpost.journal has what", kind]),
            };
        }
        shop.init().finish().expect_code(3);
        shop.expect_nothing_ran("init");
    }
}

/// The same of the slots' states; nor may anybody else have the right to add to that table what is run.
fn slot_state_of_the_owner_of_the_outbox_runs_nothing_as_others(major: u32) {
    for (kind, trap) in TRAPS {
        let shop = Shop::theirs(major);
        shop.scene.db.run(&format!(
            "ALTER SCHEMA walpost OWNER TO {0}; ALTER TABLE walpost.slot_state OWNER TO {0}",
            shop.mallory
        ));
        let trap = trap
            .replace("journal", "slot_state")
            .replace("(id)", "(slot)");
        shop.theirs.run(&format!(
            "{trap}; GRANT SELECT, INSERT, UPDATE ON walpost.slot_state TO PUBLIC"
        ));
        let run = shop.command(&["run"]).finish().expect_code(3);
        run.expect_says(&["walpost.slot_state has what", kind]);
        shop.expect_nothing_ran("run");
        shop.init().finish().expect_code(3);
        shop.expect_nothing_ran("init");
    }
    let shop = Shop::theirs(major);
    for right in ["TRIGGER", "REFERENCES"] {
        for role in ["PUBLIC", "pg_monitor"] {
            let says = format!("the right {right} on table walpost.slot_state belongs to");
            let to = format!("ON walpost.slot_state TO {role}");
            shop.scene.db.run(&format!("GRANT {right} {to}"));
            let run = shop.command(&["run"]).finish().expect_code(3);
            run.expect_says(&[
                &says,
                role,
                &format!("REVOKE {right} ON walpost.slot_state FROM {role}"),
            ]);
            let from = to.replace(" TO ", " FROM ");
            shop.scene.db.run(&format!("REVOKE {right} {from}"));
        }
    }
}

fn functions_and_a_publication_of_another_role_are_refused(major: u32) {
    let shop = Shop::bare(Outbox::Table, major);
    let publication = shop.scene.slot();
    for (plant, drop, says) in [
        (
            "CREATE FUNCTION public.walpost_uuidv7() RETURNS uuid LANGUAGE sql AS $$ SELECT gen_random_uuid() FROM plot.note('id') $$".to_owned(),
            "DROP FUNCTION public.walpost_uuidv7()".to_owned(),
            "function public.walpost_uuidv7() belongs to",
        ),
        (
            "CREATE FUNCTION public.walpost_no_update() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$".to_owned(),
            "DROP FUNCTION public.walpost_no_update()".to_owned(),
            "function public.walpost_no_update() belongs to",
        ),
        (
            format!("CREATE PUBLICATION {publication}"),
            format!("DROP PUBLICATION {publication}"),
            "belongs to",
        ),
    ] {
        shop.theirs.run(&plant);
        let init = shop.init().finish().expect_code(3);
        init.expect_says(&[says, &shop.mallory]);
        shop.theirs.run(&drop);
    }
    shop.theirs.run(
        "CREATE SCHEMA walpost; GRANT USAGE ON SCHEMA walpost TO PUBLIC;
         CREATE FUNCTION walpost.publish(text) RETURNS text LANGUAGE sql AS 'SELECT $1'",
    );
    let init = shop.init().arg("--outbox=messages").finish().expect_code(3);
    init.expect_says(&["schema walpost belongs to", &shop.mallory]);
    shop.scene.db.run("ALTER SCHEMA walpost OWNER TO postgres");
    let init = shop.init().arg("--outbox=messages").finish().expect_code(3);
    init.expect_says(&["function walpost.publish(text) belongs to", &shop.mallory]);
    shop.theirs.run("DROP FUNCTION walpost.publish(text)");
    // Who may create there can do so later.
    let (db, mallory) = (&shop.scene.db, &shop.mallory);
    db.run(&format!("GRANT CREATE ON SCHEMA walpost TO {mallory}"));
    let init = shop.init().finish().expect_code(3);
    init.expect_says(&[
        "right to create in schema walpost",
        &format!("REVOKE CREATE ON SCHEMA walpost FROM {mallory}"),
    ]);
    db.run(&format!("REVOKE CREATE ON SCHEMA walpost FROM {mallory}"));
    shop.init().finish().expect_code(0);
    shop.command(&["check"]).finish().expect_code(0);
}

#[test]
fn functions_that_were_made_among_planted_ones_are_made_again() {
    let shop = Shop::bare(Outbox::Table, 14);
    // As a version of Walpost did that left search_path as it was.
    shop.theirs.run(
        "CREATE FUNCTION public.int8send(numeric) RETURNS bytea LANGUAGE plpgsql AS $$ BEGIN
             PERFORM plot.note('int8send'); RETURN '\\x0198c1a27b3e7000'; END $$",
    );
    let db = shop.scene.server.session(&shop.scene.name);
    db.run(
        "CREATE FUNCTION public.walpost_uuidv7() RETURNS uuid LANGUAGE sql
         RETURN encode(int8send(1.5) || substring(uuid_send(gen_random_uuid()) FROM 9), 'hex')::uuid",
    );
    db.run("SELECT public.walpost_uuidv7()");
    assert_eq!(shop.ran().len(), 1);
    shop.init().finish().expect_code(0);
    db.run("INSERT INTO public.outbox (aggregatetype, aggregateid, type) VALUES ('a', 'k', 't')");
    assert_eq!(shop.ran().len(), 1);
}

/// Everything on the outbox table that its owner, or who has the right TRIGGER, can have run as whoever reads it or
/// deletes from it.
fn outbox_runs_no_code_of_its_owner_as_others(major: u32) {
    for (plant, calls) in [
        (
            "CREATE INDEX i ON public.outbox (id) WHERE plot.note('index')",
            "i calls function plot.note(text)",
        ),
        (
            "CREATE STATISTICS public.s ON (plot.note(type)), (plot.note(id::text)) FROM public.outbox",
            "statistics object",
        ),
        (
            "ALTER TABLE public.outbox ADD CONSTRAINT c CHECK (plot.note('constraint'))",
            "constraint c on table",
        ),
    ] {
        let shop = Shop::theirs(major);
        shop.theirs.run(plant);
        for words in [&["verify"][..], &["replay", "--all", "--yes"], &["run"]] {
            let finished = shop.command(words).finish().expect_code(3);
            finished.expect_says(&[
                "table public.outbox has code of other roles",
                calls,
                &shop.mallory,
            ]);
            shop.expect_nothing_ran(words[0]);
        }
        for role in [&*shop.walpost, "postgres"] {
            let maintain = shop.command_as(role, &["maintain", "--retention=24h", "--delete-rows"]);
            assert_eq!(maintain.finish().code, Some(3), "{plant}");
            shop.command_as(role, &["check"]).finish();
            shop.expect_nothing_ran("maintain");
        }
        shop.init().finish().expect_code(0);
        shop.expect_nothing_ran("init");
    }
}

fn policies_of_the_outbox_are_not_evaluated(major: u32) {
    let shop = Shop::theirs(major);
    shop.theirs.run(
        "ALTER TABLE public.outbox ENABLE ROW LEVEL SECURITY; ALTER TABLE public.outbox FORCE ROW LEVEL SECURITY;
         CREATE POLICY p ON public.outbox USING (plot.note('policy'))",
    );
    for words in [&["verify"][..], &["replay", "--all", "--yes"], &["run"]] {
        let finished = shop.command(words).finish().expect_code(3);
        finished.expect_says(&["row-level security", "BYPASSRLS", &shop.walpost]);
        shop.expect_nothing_ran(words[0]);
    }
    shop.command(&["check"]).finish();
    shop.init().finish().expect_code(0);
    shop.expect_nothing_ran("init");
    shop.scene
        .db
        .run(&format!("ALTER ROLE {} BYPASSRLS", shop.walpost));
    shop.command(&["verify", "--kafka", &shop.scene.broker.address()]);
    let replay = shop
        .command(&["replay", "--all", "--yes"])
        .finish()
        .expect_code(0);
    replay.expect_says(&["1 row of table"]);
    shop.expect_nothing_ran("replay");
}

#[test]
fn rows_are_not_deleted_where_that_would_run_triggers_of_others() {
    for plant in [
        "CREATE TRIGGER t BEFORE DELETE ON public.outbox FOR EACH ROW EXECUTE FUNCTION plot.row()",
        "CREATE TRIGGER t AFTER DELETE ON public.outbox FOR EACH STATEMENT EXECUTE FUNCTION plot.row()",
        "CREATE RULE r AS ON DELETE TO public.outbox DO ALSO SELECT plot.note('rule')",
    ] {
        let shop = Shop::theirs(MAJOR);
        let (db, mallory) = (&shop.scene.db, &shop.mallory);
        shop.theirs.run(plant);
        db.run(&format!("GRANT {mallory} TO {}", shop.walpost));
        for role in [&*shop.walpost, "postgres"] {
            let maintain = ["maintain", "--retention=24h", "--delete-rows"];
            let finished = shop.command_as(role, &maintain).finish().expect_code(3);
            finished.expect_says(&["code of other roles", "plot."]);
            shop.expect_nothing_ran(plant);
        }
        // Its owner may run its own code.
        shop.command_as(mallory, &["maintain", "--retention=24h", "--delete-rows"])
            .finish();
        shop.expect_nothing_ran(plant);
    }
}

fn partitions_of_a_table_with_code_of_others_are_not_made(major: u32) {
    let shop = Shop::bare(Outbox::Table, major);
    let column = "id uuid, aggregatetype text, aggregateid text, type text, payload jsonb, headers jsonb, created_at";
    for (table, says) in [
        (
            format!(
                "({column} timestamptz, CONSTRAINT walpost_event_size CHECK (plot.note('check'))) PARTITION BY RANGE (created_at)"
            ),
            "code of other roles",
        ),
        (
            format!(
                "({column} timestamptz, CONSTRAINT walpost_event_size CHECK (true)) PARTITION BY RANGE (plot.at(created_at))"
            ),
            "not partitioned by range of one column",
        ),
        (
            format!(
                "({column} plot.moment, CONSTRAINT walpost_event_size CHECK (true)) PARTITION BY RANGE (created_at)"
            ),
            "not partitioned by range of one column",
        ),
    ] {
        shop.theirs.run(&format!(
            "DROP TABLE IF EXISTS public.outbox;
             CREATE OR REPLACE FUNCTION plot.at(at timestamptz) RETURNS timestamptz LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
                 PERFORM plot.note('partition key'); RETURN at; END $$;
             DROP DOMAIN IF EXISTS plot.moment; CREATE DOMAIN plot.moment AS timestamptz CHECK (plot.note('domain'));
             CREATE TABLE public.outbox {table}; CREATE TABLE public.rest PARTITION OF public.outbox DEFAULT"
        ));
        let init = shop.init().arg("--partitioned").finish().expect_code(3);
        init.expect_says(&[says]);
        shop.expect_nothing_ran(&table);
    }
}

/// The application's role is not trusted more because it owns the table.
fn owner_of_the_outbox_runs_nothing_as_who_gives_it_the_table(major: u32) {
    let shop = Shop::bare(Outbox::Table, major);
    let mallory = &shop.mallory;
    let init = |owner: &str| {
        let init = shop.init().args(["--owner", owner, "--writer", mallory]);
        init.finish()
    };
    // A table that waits for the name, and would be taken for Walpost's.
    shop.theirs.run(
        "CREATE TABLE public.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb,
             CONSTRAINT walpost_event_size CHECK (plot.note('check')))",
    );
    init("postgres").expect_code(3).expect_says(&[
        &format!("table public.outbox belongs to role {mallory}, expected role postgres"),
        "Nothing was changed",
    ]);
    shop.expect_nothing_ran("init for another owner");
    shop.theirs.run("DROP TABLE public.outbox");

    init(mallory).expect_code(0);
    // What other outboxes of the schema call too is not the owner's to change.
    for function in [
        "walpost_uuidv7() RETURNS uuid",
        "walpost_no_update() RETURNS trigger",
    ] {
        let replace = format!(
            "CREATE OR REPLACE FUNCTION public.{function} LANGUAGE plpgsql AS $$ BEGIN PERFORM plot.note('mine'); RETURN NULL; END $$"
        );
        // From PostgreSQL 18 on the first of them is the server's.
        if major < 18 || function.contains("update") {
            shop.theirs.try_run(&replace).expect_err(function);
        }
    }
    shop.theirs.run(
        "CREATE TRIGGER t AFTER INSERT ON public.outbox FOR EACH ROW EXECUTE FUNCTION plot.row();
         CREATE INDEX i ON public.outbox (id) WHERE plot.note('index');
         ALTER TABLE public.outbox ADD CONSTRAINT c CHECK (plot.note('constraint')) NOT VALID;
         ALTER TABLE public.outbox ALTER aggregateid SET DEFAULT plot.note('default')::text;
         INSERT INTO public.outbox (aggregatetype, aggregateid, type) VALUES ('a', 'k', 't')",
    );
    init(mallory).expect_code(0);
    shop.expect_nothing_ran("init for its owner again");
    shop.command(&["check"]).finish();
    shop.expect_nothing_ran("check");
}

#[test]
fn role_that_the_owner_of_the_database_has_set_for_it_is_not_taken_on() {
    for major in MAJORS {
        let shop = Shop::bare(Outbox::Table, major);
        let (db, mallory, name) = (&shop.scene.db, &shop.mallory, &shop.scene.name);
        db.run(&format!("ALTER DATABASE {name} OWNER TO {mallory}"));
        shop.theirs
            .run(&format!("ALTER DATABASE {name} SET role = '{mallory}'"));
        shop.init().finish().expect_code(0);
        let owners = "SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class
            WHERE oid IN ('public.outbox'::regclass, 'walpost.journal'::regclass)
            UNION SELECT pg_get_userbyid(pubowner) FROM pg_publication
            UNION SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'walpost'";
        assert_eq!(
            db.rows(owners),
            [vec![Some("postgres".to_owned())]],
            "PostgreSQL {major}"
        );
        shop.command(&["check"]).finish().expect_code(0);
    }
}

#[test]
fn role_that_others_can_act_as_is_warned_of() {
    let shop = Shop::new(Outbox::Table, MAJOR);
    let (walpost, mallory) = (&shop.walpost, &shop.mallory);
    shop.scene.db.run(&format!("GRANT {walpost} TO {mallory}"));
    let init = shop.init().finish().expect_code(0);
    init.expect_says(&["WARNING", &format!("REVOKE {walpost} FROM {mallory}")]);
}

/// On servers where the DBA is no superuser, as rented ones.
#[test]
fn what_the_role_that_may_make_roles_owns_is_used() {
    for major in MAJORS {
        let shop = Shop::bare(Outbox::Table, major);
        let (name, dba) = (&shop.scene.name, format!("{}_dba", shop.scene.name));
        let replication = if major < 16 { "" } else { "REPLICATION" };
        shop.scene.db.run(&format!(
            "CREATE ROLE {dba} LOGIN CREATEROLE REPLICATION; ALTER DATABASE {name} OWNER TO {dba};
             CREATE ROLE {0}_app; GRANT {0}_app TO {dba};
             GRANT CREATE ON SCHEMA public TO {dba}",
            shop.mallory
        ));
        // Up to 15 nobody else can give REPLICATION.
        let made = format!("CREATE ROLE {} LOGIN {replication}", shop.walpost);
        shop.scene.server.session_as(&dba, name).run(&made);
        shop.scene
            .db
            .run(&format!("ALTER ROLE {} REPLICATION", shop.walpost));
        shop.command_as(&dba, &["init", "--role", &shop.walpost])
            .finish()
            .expect_code(0);
        shop.scene.db.run(&format!(
            "ALTER TABLE public.outbox OWNER TO {}_app",
            shop.mallory
        ));
        shop.command(&["check"]).finish().expect_code(0);
        let aggregate = shop.scene.aggregate(1);
        let mut walpost = shop.command(&["run"]).start();
        walpost.wait_for_log("streaming");
        shop.scene.insert(&aggregate, "k");
        shop.scene.wait_for_records(1);
        walpost.terminate().expect_code(0);
        shop.scene.db.run(&format!(
            "DROP OWNED BY {dba}, {0}_app CASCADE; DROP ROLE {0}_app",
            shop.mallory
        ));
        shop.scene.db.run(&format!(
            "ALTER DATABASE {name} OWNER TO postgres; DROP OWNED BY {dba} CASCADE; DROP ROLE {dba}"
        ));
    }
}
