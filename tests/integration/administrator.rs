//! `walpost init --config` sets up several pipelines over a single administrator connection.

use std::fs;
use std::path::PathBuf;

use crate::init::psql;
use crate::support::fixture::Fixture;
use crate::support::reaper;
use crate::support::walpost::{Finished, Invocation};

/// Two pipelines that are defined in one file, each with its own database. Their connection strings
/// name a role that does not exist, so `init` would fail if it used them.
struct TwoPipelines {
    fixtures: [Fixture<'static>; 2],
    file: PathBuf,
}

impl TwoPipelines {
    fn new() -> Self {
        let two = Self {
            fixtures: [Fixture::bare(), Fixture::bare()],
            file: reaper::folder("config").join("walpost.toml"),
        };
        two.write(two.fixtures.each_ref().map(Fixture::conninfo));
        two
    }

    fn write(&self, conninfos: [String; 2]) {
        let pipelines = conninfos.iter().zip(&self.fixtures).map(|(conninfo, fixture)| {
            let postgres = conninfo.replace("user=postgres", "user=nobody");
            format!("[[pipeline]]\nname = \"{}\"\npostgres = \"{postgres}\"\nkafka = {{ \"bootstrap.servers\" = \"k:1\" }}\n", fixture.name)
        });
        fs::write(&self.file, pipelines.collect::<String>()).unwrap();
    }

    fn init(&self) -> Invocation {
        Invocation::new(["init", "--no-role", "--config"]).arg(&self.file)
    }

    /// Runs `init` with the kind of connection string that a hosting provider supplies: its
    /// database belongs to neither pipeline.
    fn init_as_postgres(&self) -> Invocation {
        let conninfo = self.fixtures[0].server.conninfo("postgres");
        self.init().args(["--postgres", &conninfo])
    }

    /// Returns which of the two pipelines have a publication and a slot. Asserts that neither
    /// database contains the other pipeline's publication or slot.
    fn created(&self) -> [bool; 2] {
        self.fixtures.each_ref().map(|fixture| {
            let found = fixture.db.rows(
                "SELECT pubname::text FROM pg_publication UNION ALL
                 SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database() AND plugin = 'pgoutput'",
            );
            let name = vec![Some(fixture.slot())];
            assert!(found.is_empty() || found == [name.clone(), name], "{found:?}");
            !found.is_empty()
        })
    }

    /// Asserts that a log line contains both `text` and the pipeline's name.
    fn expect_for(&self, finished: &Finished, which: usize, text: &str) {
        let name = &self.fixtures[which].name;
        let is_of = |line: &str| line.contains(text) && line.contains(name.as_str());
        assert!(
            finished.stderr.lines().any(is_of),
            "{name}: {text}: {finished:?}"
        );
    }
}

#[test]
fn init_as_administrator_sets_up_each_pipeline_in_its_own_database() {
    let two = TwoPipelines::new();
    let done = two.init_as_postgres().finish().expect_code(0);
    assert_eq!(two.created(), [true, true]);
    for which in [0, 1] {
        two.expect_for(&done, which, "ready");
    }
    two.init_as_postgres().finish().expect_code(0);
    let none = "SELECT count(*) FROM pg_namespace WHERE nspname = 'walpost'";
    let postgres = two.fixtures[0].server.session("postgres");
    assert_eq!(
        postgres.number(none),
        0,
        "it is not the database of a pipeline"
    );
}

#[test]
fn init_reads_the_administrator_connection_from_libpq_environment_variables() {
    let two = TwoPipelines::new();
    let server = two.fixtures[0].server;
    let init = two
        .init()
        .env("WALPOST_POSTGRES", "postgresql://")
        .env("PGHOST", &server.socket)
        .env("PGPORT", server.port.to_string())
        .env("PGUSER", "postgres")
        .env("PGDATABASE", "postgres");
    init.finish().expect_code(0);
    assert_eq!(two.created(), [true, true]);
}

#[test]
fn init_sets_up_only_the_selected_pipelines() {
    let two = TwoPipelines::new();
    let name = &two.fixtures[1].name;
    // With a single pipeline, the connection string is used unchanged, including its database.
    two.init()
        .args([
            "--pipeline",
            name,
            "--postgres",
            &two.fixtures[1].conninfo(),
        ])
        .finish()
        .expect_code(0);
    assert_eq!(two.created(), [false, true]);
    let both = two.fixtures.each_ref().map(|fixture| fixture.name.clone());
    let init = two.init_as_postgres().args(["--pipeline", &both.join(",")]);
    init.finish().expect_code(0);
    assert_eq!(two.created(), [true, true]);
}

#[test]
fn init_reports_a_failing_pipeline_and_sets_up_the_others() {
    let two = TwoPipelines::new();
    let [first, second] = two.fixtures.each_ref().map(Fixture::conninfo);
    let lacking = first.replace(&two.fixtures[0].name, "not_there");
    two.write([lacking, second.clone()]);
    let failed = two.init_as_postgres().finish().expect_code(3);
    two.expect_for(&failed, 0, "not_there");
    two.expect_for(&failed, 1, "ready");
    assert_eq!(two.created(), [false, true]);
    two.write([first, second]);
    two.init_as_postgres().finish().expect_code(0);
    assert_eq!(two.created(), [true, true]);
}

#[test]
fn init_rejects_pipelines_on_another_server() {
    let two = TwoPipelines::new();
    let [first, second] = two.fixtures.each_ref().map(Fixture::conninfo);
    let elsewhere = second.replace("host=", "host=/elsewhere");
    two.write([first, elsewhere]);
    let refused = two.init_as_postgres().finish().expect_code(2);
    refused.expect_mentions(&["are on different servers", "--pipeline"]);
    assert_eq!(two.created(), [false, false]);
    // A flag that applies to only one pipeline, such as `--table`, is still rejected.
    let table = two.init_as_postgres().args(["--table", "public.other"]);
    table
        .finish()
        .expect_code(2)
        .expect_mentions(&["--pipeline NAME"]);
}

#[test]
fn printed_statements_run_in_the_database_of_their_pipeline() {
    let two = TwoPipelines::new();
    let printed = two.init_as_postgres().arg("--print").finish();
    let printed = printed.expect_code(0).stdout;
    assert_eq!(two.created(), [false, false]);
    let file = two.file.with_extension("sql");
    fs::write(&file, printed).unwrap();
    // The printed script contains commands that connect to each pipeline's database, so psql can be
    // started in any database.
    psql(&two.fixtures[1], &file);
    assert_eq!(two.created(), [true, true]);
}
