//! Expressions, triggers and rules of a table owned by another role. Built-in functions, and
//! functions owned by a superuser, can evaluate or run them.

use std::path::Path;

use super::PlantedFixture;
use crate::init::try_psql;
use crate::support::event::Outbox;

on_each_version! {
    superuser_owned_functions_run_no_code_planted_by_the_table_owner
    accepts_expressions_that_use_only_built_in_or_extension_objects
    rejects_expressions_of_unknown_types
    never_calls_the_cast_of_an_enumeration_in_an_inlined_function
    never_calls_functions_of_range_types_to_plan_a_statement
    never_calls_the_cast_of_a_type_that_json_value_returns
    creates_no_partitions_if_an_index_calls_an_extension_function
    deleting_rows_fires_no_trigger_or_rule_created_by_the_table_owner
    compares_keys_with_the_operators_of_their_base_type
    never_evaluates_partition_keys_of_ancestors_of_the_outbox
}

/// A domain with a CHECK constraint written by the attacker, and a composite type that contains the
/// domain.
const DOMAIN: &str = "CREATE DOMAIN plot.checked AS text CHECK (plot.note('domain'));
    CREATE TYPE plot.pair AS (a plot.checked);";

/// An SQL condition that evaluates the CHECK constraint of the domain through a function of hstore,
/// which belongs to the superuser who created the extension.
const POPULATED: &str = "(public.populate_record(NULL::plot.pair, 'a=>1'::public.hstore) IS NULL)";

impl PlantedFixture {
    fn create_extension(&self, name: &str) {
        let create = format!("CREATE EXTENSION {name} SCHEMA public");
        self.fixture.db.run(&create);
    }

    /// Calls `walpost.lock_and_examine` as a superuser for the given statement on the table, and
    /// returns its result.
    pub(super) fn examined(&self, statement: &str) -> String {
        let examine = format!("SELECT walpost.lock_and_examine('public', 'outbox', '{statement}')");
        self.fixture.db.value(&examine).expect("a text")
    }
}

fn superuser_owned_functions_run_no_code_planted_by_the_table_owner(major: u32) {
    let hash = "CREATE FUNCTION plot.one() RETURNS int LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN PERFORM plot.note('partition key'); RETURN 1; END $$;
         CREATE TABLE plot.parted (a int) PARTITION BY HASH ((a + plot.one()));
         DO $$ BEGIN EXECUTE format('CREATE INDEX i ON public.outbox ((satisfies_hash_partition(%s, 2, 0, NULL::int)))',
             'plot.parted'::regclass::oid); END $$";
    for (plant, found) in [
        (
            format!("CREATE INDEX i ON public.outbox ({POPULATED})"),
            "index public.i uses function public.populate_record(anyelement,public.hstore)",
        ),
        (
            format!("CREATE INDEX i ON public.outbox (id) WHERE {POPULATED}"),
            "index public.i uses function",
        ),
        (
            format!("CREATE STATISTICS public.s ON {POPULATED}, type FROM public.outbox"),
            "statistics object public.s uses function",
        ),
        (
            format!("ALTER TABLE public.outbox ADD CONSTRAINT c CHECK {POPULATED} NOT VALID"),
            "constraint c on table public.outbox uses function",
        ),
        (
            hash.to_owned(),
            "index public.i calls function satisfies_hash_partition",
        ),
    ] {
        let shop = PlantedFixture::owned_by_attacker(major);
        shop.create_extension("hstore");
        shop.attacker.run(&format!("{DOMAIN} {plant}"));
        for words in [&["replay", "--all", "--dry-run"][..], &["run"]] {
            for role in [&*shop.walpost, "postgres"] {
                let finished = shop.command_as(role, words).finish();
                shop.expect_nothing_ran(&plant);
                let refused = finished.expect_code(3);
                refused.expect_mentions(&[
                    "statements on table public.outbox would run code owned by other roles",
                    found,
                ]);
            }
        }
        let maintain = ["maintain", "--retention=24h", "--delete-rows"];
        shop.command_as("postgres", &maintain)
            .finish()
            .expect_code(3);
        shop.command_as("postgres", &["check"]).finish();
        shop.init().finish().expect_code(0);
        shop.expect_nothing_ran(&plant);
    }
}

fn accepts_expressions_that_use_only_built_in_or_extension_objects(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.create_extension("citext");
    shop.attacker.run(
        "CREATE TYPE plot.state AS ENUM ('new', 'old');
         ALTER TABLE public.outbox ADD state plot.state, ADD tag public.citext, ADD states plot.state[];
         CREATE INDEX ON public.outbox (id) WHERE state = 'new' OR states = '{new,old}';
         CREATE INDEX ON public.outbox (tag);
         CREATE INDEX ON public.outbox USING gin (to_tsvector('english', type));
         CREATE INDEX ON public.outbox (lower(type) COLLATE \"C\");
         CREATE STATISTICS public.s ON (lower(type)), (length(aggregateid)) FROM public.outbox;
         ALTER TABLE public.outbox ADD CONSTRAINT c CHECK (length(type) < 100)",
    );
    for statement in ["SELECT", "DELETE", "ALTER"] {
        assert_eq!(shop.examined(statement), "", "{statement}");
    }
    let json = match major {
        14 | 15 => "payload IS NOT NULL",
        _ => "payload::text IS JSON OBJECT",
    };
    shop.attacker.run(&format!(
        "ALTER TABLE public.outbox ADD tags text[], ADD CONSTRAINT many CHECK (
             CASE WHEN type = 'a' THEN true WHEN type IN ('b', 'c') THEN false ELSE coalesce(type, 'd') <> 'd' END
             AND greatest(type, 'e') IS DISTINCT FROM nullif(aggregateid, 'f') AND tags[1] <> ALL (ARRAY['g', type])
             AND (type, aggregateid) < ('h', 'i') AND (length(type) > 1) IS NOT FALSE AND id::text LIKE '0%'
             AND '{{1}}'::text[]::int[] = tags::int[] AND row(type, 1) IS NOT NULL AND current_user <> 'j' COLLATE \"C\"
             AND make_interval(days => 1) > '0' AND {json}) NOT VALID"
    ));
    for statement in ["SELECT", "DELETE", "ALTER"] {
        assert_eq!(shop.examined(statement), "", "{statement}");
    }
    // If only trusted roles can change the table, Walpost accepts hstore functions in its indexes.
    shop.create_extension("hstore");
    shop.fixture.db.run(
        "ALTER TABLE public.outbox OWNER TO postgres; REVOKE ALL ON public.outbox FROM PUBLIC;
         CREATE INDEX ON public.outbox ((public.hstore(type, type) IS NULL))",
    );
    for statement in ["SELECT", "DELETE", "ALTER"] {
        assert_eq!(shop.examined(statement), "", "{statement}");
    }
}

/// A later version of PostgreSQL may have types of expressions that Walpost does not know. To test
/// this, a known type is removed from the list.
fn rejects_expressions_of_unknown_types(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker
        .run("CREATE INDEX i ON public.outbox ((type IS NULL))");
    assert_eq!(shop.examined("SELECT"), "");
    let find = "SELECT pg_get_functiondef('walpost.lock_and_examine'::regproc)";
    let definition = shop.fixture.db.value(find).expect("a function");
    let older = definition.replace(",NULLTEST,", ",");
    assert_ne!(older, definition);
    shop.fixture.db.run(&older);
    assert_eq!(
        shop.examined("SELECT"),
        "index public.i contains an expression of type NULLTEST, which Walpost does not know"
    );
}

/// `quote_literal(anyelement)` and the operator `||` cast a value that is not text to text. When the
/// planner inlines them, it looks up the cast, which the owner of the value's type can create at any
/// time. `pg_depend` does not record the cast.
fn never_calls_the_cast_of_an_enumeration_in_an_inlined_function(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(
        "CREATE TYPE plot.state AS ENUM ('new');
         CREATE FUNCTION plot.to_text(plot.state) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS
             $$ BEGIN PERFORM plot.note('cast to text'); RETURN 'x'; END $$;
         CREATE FUNCTION plot.to_text(plot.state[]) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS
             $$ BEGIN PERFORM plot.note('cast of an array to text'); RETURN 'x'; END $$;
         CREATE CAST (plot.state AS text) WITH FUNCTION plot.to_text(plot.state);
         CREATE CAST (plot.state[] AS text) WITH FUNCTION plot.to_text(plot.state[]);
         ALTER TABLE public.outbox ADD state plot.state, ADD states plot.state[], ADD number int;
         CREATE INDEX of_an_operator ON public.outbox ((type || 'new'::plot.state));
         CREATE INDEX of_a_function ON public.outbox ((quote_literal(state)));
         CREATE INDEX of_an_array ON public.outbox ((quote_literal(states)));
         CREATE INDEX of_a_number ON public.outbox ((type || number));
         ALTER TABLE public.outbox ADD CONSTRAINT c CHECK (type || state <> '')",
    );
    let found = [
        "index public.of_an_operator calls function textanycat(text,anynonarray), which can use a cast of type plot.state",
        "index public.of_a_function calls function quote_literal(anyelement)",
        "index public.of_an_array calls function quote_literal(anyelement), which can use a cast of type plot.state[]",
        "constraint c on table public.outbox calls function textanycat",
    ];
    for words in [&["replay", "--all", "--dry-run"][..], &["run"]] {
        for role in [&*shop.walpost, "postgres"] {
            let finished = shop.command_as(role, words).finish();
            shop.expect_nothing_ran(words[0]);
            finished.expect_code(3).expect_mentions(&found);
        }
    }
    shop.attacker
        .run("DROP CAST (plot.state AS text); DROP CAST (plot.state[] AS text)");
    for statement in ["SELECT", "DELETE", "ALTER"] {
        let examined = shop.examined(statement);
        for found in found {
            assert!(examined.contains(found), "{statement}: {examined}");
        }
        assert!(!examined.contains("of_a_number"), "{examined}");
    }
    // The type of another role can also be used in an index of a trusted role.
    let cast = "CREATE CAST (plot.state AS text) WITH FUNCTION plot.to_text(plot.state)";
    shop.attacker.run(cast);
    shop.fixture.db.run(
        "ALTER TABLE public.outbox OWNER TO postgres; REVOKE ALL ON public.outbox FROM PUBLIC",
    );
    let check = |owned: &str, is_found: bool| {
        shop.fixture
            .db
            .run(&format!("ALTER {owned} OWNER TO postgres"));
        let examined = shop.examined("SELECT");
        assert_eq!(examined.contains(found[0]), is_found, "{owned}: {examined}");
    };
    check("TABLE public.outbox", true);
    check("TYPE plot.state", true);
    check("FUNCTION plot.to_text(plot.state)", false);
}

/// To estimate how many rows satisfy a partial index's predicate, the planner calls the range type's
/// `subtype_diff` function. `pg_depend` does not record the type of a column in the predicate.
fn never_calls_functions_of_range_types_to_plan_a_statement(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(
        "CREATE FUNCTION plot.diff(int, int) RETURNS float8 LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN PERFORM plot.note('subtype_diff'); RETURN $1 - $2; END $$;
         CREATE TYPE plot.span AS RANGE (subtype = int4, subtype_diff = plot.diff);
         ALTER TABLE public.outbox ADD span plot.span;
         INSERT INTO public.outbox (aggregatetype, aggregateid, type, span)
             SELECT 'order', '1', 't', plot.span(g, g + 10) FROM generate_series(1, 100) AS g;
         CREATE INDEX i ON public.outbox (type) WHERE created_at IS NOT NULL OR span @> 50;
         ANALYZE public.outbox",
    );
    let found =
        ["index public.i uses range type plot.span, whose functions belong to another role"];
    let replay = ["replay", "--from=2025-01-01", "--dry-run"];
    let maintain = ["maintain", "--retention=24h", "--delete-rows"];
    for (role, words) in [
        (&*shop.walpost, &replay),
        ("postgres", &replay),
        ("postgres", &maintain),
    ] {
        let finished = shop.command_as(role, words).finish();
        shop.expect_nothing_ran(words[0]);
        finished.expect_code(3).expect_mentions(&found);
    }
    // The functions of a built-in range type belong to PostgreSQL.
    shop.attacker.run(
        "DROP INDEX public.i; ALTER TABLE public.outbox ADD builtin int4range;
         CREATE INDEX ON public.outbox (type) WHERE created_at IS NOT NULL OR builtin @> 50",
    );
    assert_eq!(shop.examined("SELECT"), "");
}

/// In `JSON_VALUE ... RETURNING`, the type has a different place in the stored expression than in
/// other expressions.
fn never_calls_the_cast_of_a_type_that_json_value_returns(major: u32) {
    // Versions before 17 do not support JSON_VALUE.
    if major < 17 {
        return;
    }
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(
        "CREATE TYPE plot.state AS ENUM ('new');
         CREATE FUNCTION plot.boom() RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS
             $$ BEGIN PERFORM plot.note('cast to text'); RETURN 'x'; END $$;
         CREATE FUNCTION plot.second(plot.state, text) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS
             $$ BEGIN RETURN $2; END $$;
         CREATE FUNCTION plot.to_text(plot.state) RETURNS text LANGUAGE sql IMMUTABLE STRICT AS
             $$ SELECT plot.second($1, plot.boom()) $$;
         CREATE CAST (plot.state AS text) WITH FUNCTION plot.to_text(plot.state);
         CREATE INDEX i ON public.outbox ((quote_literal(JSON_VALUE(jsonb '\"new\"', '$'
             RETURNING plot.state ERROR ON EMPTY ERROR ON ERROR))))",
    );
    for words in [&["replay", "--all", "--dry-run"][..], &["run"]] {
        let finished = shop.command_as("postgres", words).finish();
        shop.expect_nothing_ran(words[0]);
        let found = "index public.i calls function quote_literal(anyelement), which can use a cast of type plot.state";
        finished.expect_code(3).expect_mentions(&[found]);
    }
}

fn creates_no_partitions_if_an_index_calls_an_extension_function(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    shop.create_extension("hstore");
    shop.init().arg("--partitioned").finish().expect_code(0);
    shop.fixture.db.run(&format!(
        "ALTER TABLE public.outbox OWNER TO {}",
        shop.mallory
    ));
    shop.attacker.run(&format!(
        "{DOMAIN} CREATE INDEX i ON ONLY public.outbox ({POPULATED})"
    ));
    let maintain = ["maintain", "--partitions-ahead", "20"];
    let finished = shop.command_as("postgres", &maintain).finish();
    shop.expect_nothing_ran("maintain");
    finished
        .expect_code(3)
        .expect_mentions(&["index public.i uses function public.populate_record"]);
}

fn deleting_rows_fires_no_trigger_or_rule_created_by_the_table_owner(major: u32) {
    let trigger = |rest: &str| {
        format!(
            "{DOMAIN} CREATE FUNCTION plot.query() RETURNS tsquery LANGUAGE plpgsql AS
                 $$ BEGIN PERFORM plot.note('query'); RETURN 'a'; END $$;
             CREATE TRIGGER t BEFORE DELETE ON public.outbox {rest}"
        )
    };
    let suppress = "EXECUTE FUNCTION suppress_redundant_updates_trigger()";
    let expected = "trigger t on table public.outbox would run with each DELETE";
    for (plant, expected) in [
        (
            "CREATE TABLE plot.victim (a int);
             CREATE TRIGGER t AFTER INSERT ON plot.victim FOR EACH ROW EXECUTE FUNCTION plot.row();
             CREATE RULE t AS ON DELETE TO public.outbox DO ALSO INSERT INTO plot.victim VALUES (1)"
                .to_owned(),
            "rule t on table public.outbox runs with the privileges of the owner",
        ),
        (trigger(&format!(
            "FOR EACH ROW WHEN (ts_rewrite('a'::tsquery, 'SELECT ''a''::tsquery, plot.query()') IS NULL) {suppress}"
        )), expected),
        (trigger(&format!(
            "FOR EACH ROW WHEN (OLD.type::plot.checked IS NULL) {suppress}"
        )), expected),
        (trigger("FOR EACH ROW EXECUTE FUNCTION public.lo_manage(type)"), expected),
        (trigger(
            "FOR EACH ROW EXECUTE FUNCTION public.check_foreign_key(1, 'cascade', 'id', 'plot.victim', 'a')",
        ), expected),
    ] {
        let shop = PlantedFixture::owned_by_attacker(major);
        shop.create_extension("lo");
        shop.create_extension("refint");
        shop.attacker.run(&plant);
        let maintain = ["maintain", "--retention=24h", "--delete-rows"];
        let finished = shop.command_as("postgres", &maintain).finish();
        finished.expect_code(3).expect_mentions(&[
            "statements on table public.outbox would run code owned by other roles",
            expected,
        ]);
        shop.expect_nothing_ran(&plant);
    }
}

/// For a column with a domain type, an operator for the domain takes precedence over the operator
/// for its base type. Any role with the CREATE privilege on the schema can create an operator for
/// the domain, so Walpost must use the operator for the base type.
fn compares_keys_with_the_operators_of_their_base_type(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    shop.create_extension("citext");
    shop.fixture.db.run(
        "CREATE DOMAIN public.base AS public.citext; CREATE DOMAIN public.code AS public.base;
         CREATE TABLE public.outbox (id public.code PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb);
         INSERT INTO public.outbox SELECT id, 'order', 'k', 't', '{}' FROM unnest('{a1,B1,c1}'::text[]) AS id",
    );
    shop.init().finish().expect_code(0);
    for name in ["<", "<=", "=", ">=", ">"] {
        let function = format!("plot.f{}", name.len());
        shop.attacker.run(&format!(
            "CREATE OR REPLACE FUNCTION {function}(public.code, public.code) RETURNS boolean LANGUAGE plpgsql AS
                 $$ BEGIN RETURN plot.note('operator'); END $$;
             CREATE OPERATOR public.{name} (LEFTARG = public.code, RIGHTARG = public.code, FUNCTION = {function})"
        ));
    }
    for (flag, rows) in [("--from", "2 rows of table"), ("--to", "2 rows of table")] {
        let replay = shop
            .command(&["replay", "--dry-run", flag, "B1"])
            .finish()
            .expect_code(0);
        shop.expect_nothing_ran(flag);
        replay.expect_mentions(&[rows]);
    }
}

/// The planner evaluates the partition keys of all of a partition's ancestors, and these partition
/// keys can call functions of other roles.
fn never_evaluates_partition_keys_of_ancestors_of_the_outbox(major: u32) {
    for layout in [None, Some("--partitioned")] {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        let (fixture, mallory) = (&shop.fixture, &shop.mallory);
        shop.init().args(layout).finish().expect_code(0);
        fixture.insert(&fixture.aggregate(1), "k");
        fixture.db.run(&format!(
            "ALTER TABLE public.outbox OWNER TO {mallory}; DELETE FROM walpost.journal;
             ALTER DATABASE {} SET constraint_exclusion = on",
            fixture.name
        ));
        shop.attacker.run(
            "CREATE FUNCTION plot.one() RETURNS int LANGUAGE plpgsql IMMUTABLE AS
                 $$ BEGIN PERFORM plot.note('partition key'); RETURN 1; END $$;
             CREATE TABLE plot.root (LIKE public.outbox) PARTITION BY RANGE ((length(type) + plot.one()));
             ALTER TABLE plot.root ATTACH PARTITION public.outbox FOR VALUES FROM (MINVALUE) TO (MAXVALUE)",
        );
        let found = "table plot.root calls function plot.one()";
        for statement in ["SELECT", "DELETE", "ALTER"] {
            let examined = shop.examined(statement);
            assert!(examined.contains(found), "{statement}: {examined}");
        }
        let mut commands = vec![
            &["run"][..],
            &["replay", "--dry-run", "--from", "2025-01-01"],
            &["maintain", "--retention=24h", "--delete-rows"],
        ];
        if layout.is_some() {
            commands.push(&["maintain", "--partitions-ahead", "20"]);
        }
        for role in [&*shop.walpost, "postgres"] {
            for words in &commands {
                let refused = shop.command_as(role, words).finish().expect_code(3);
                shop.expect_nothing_ran(words[0]);
                // Walpost's role lacks the privileges to run `maintain` on the table.
                if role == "postgres" || words[0] != "maintain" {
                    refused.expect_mentions(&[found]);
                }
            }
        }
        shop.init().args(layout).finish();
        shop.expect_nothing_ran("init");
        let file = match layout {
            Some(_) => "outbox_partitioned.sql",
            None => "snapshot.sql",
        };
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql").join(file);
        try_psql(fixture, &file);
        shop.expect_nothing_ran("the files");
    }
}
