//! Pipelines that a query finds.

use super::*;
use crate::support::http::Http;

const FAILED: &str = "its pipelines go on as they are";

/// A table with the names of databases, of which each is a pipeline.
struct Shards {
    scene: Scene<'static>,
}

impl Shards {
    fn new() -> Self {
        let scene = Scene::bare();
        scene
            .db
            .run("CREATE TABLE public.shards (name text, dbname text, active bool)");
        Self { scene }
    }

    fn add(&self, scene: &Scene) {
        self.run(&format!(
            "INSERT INTO shards VALUES ('{name}', '{name}', true)",
            name = scene.name
        ));
    }

    fn run(&self, sql: &str) {
        self.scene.db.run(sql);
    }

    fn source(&self) -> String {
        let server = self.scene.server;
        format!(
            "[[fleet.source]]
             postgres = \"{}\"
             query = 'SELECT name, dbname FROM public.shards WHERE active'
             every = '1s'
             template = {{ name = '{{name}}', postgres = 'postgresql://postgres@/{{dbname}}?host={}&port={}' }}\n",
            self.scene.conninfo(),
            server.socket.display(),
            server.port
        )
    }

    /// A process with these pipelines by now, some of which its file has.
    fn start(&self, in_file: &str, pipelines: usize) -> Process {
        let folder = reaper::folder("config");
        let text = head() + &self.source() + in_file;
        replace(&folder.join("walpost.toml"), &text);
        Process::start_in(folder, pipelines)
    }
}

fn wait_until_failed(http: &Http, expected: f64) {
    wait_until("the metric", || {
        http.metrics()["walpost_config_reload_failed"] == expected
    });
}

#[test]
fn pipelines_come_and_go_with_the_rows_and_the_others_do_not_notice() {
    let [stays, comes] = [Scene::new(), Scene::new()];
    let shards = Shards::new();
    shards.add(&stays);
    let mut process = shards.start("", 1);
    let aggregate = stays.aggregate(2);
    let load = stays.load(&[&aggregate]);
    let sender = walsender(&stays);
    shards.add(&comes);
    let line = process.walpost.wait_for_logs(RELOADED, 1);
    assert!(
        line.contains("1 added") && line.contains(&comes.name) && line.contains("1 unchanged"),
        "{line}"
    );
    wait_until_streaming(&comes);
    let other = comes.aggregate(1);
    comes.insert(&other, "k");
    comes.wait_for_records(1);
    shards.run(&format!(
        "UPDATE shards SET active = false WHERE name = '{}'",
        comes.name
    ));
    let line = process.walpost.wait_for_logs(RELOADED, 2);
    assert!(line.contains("1 removed"), "{line}");
    wait_until("the slot to be released", || !comes.slot_is_active());
    comes.insert(&other, "k");
    shards.run("UPDATE shards SET active = true");
    comes.wait_for_records(2);
    load.wait_for_transactions(20);
    load.stop();
    assert_eq!(walsender(&stays), sender);
    let summary = stays.settle(process.walpost, &[], Resends::Never);
    assert_eq!(summary.repeated, 0);
    assert_eq!(comes.judge(&[], Resends::Never).committed, 2);
}

#[test]
fn source_that_is_broken_changes_nothing_and_is_told() {
    let [one, other, in_file] = [Scene::new(), Scene::new(), Scene::new()];
    let shards = Shards::new();
    shards.add(&one);
    shards.add(&other);
    let mut process = shards.start(&pipeline(&in_file, ""), 3);
    let http = process.walpost.http();
    let scenes = [&one, &other, &in_file];
    let senders = scenes.map(walsender);
    let broken = [
        (
            "ALTER TABLE shards RENAME TO away",
            "public.shards",
            "ALTER TABLE away RENAME TO shards",
        ),
        (
            "ALTER TABLE shards RENAME name TO away",
            "column \\\"name\\\"",
            "ALTER TABLE shards RENAME away TO name",
        ),
        (
            "INSERT INTO shards VALUES ('new', NULL, true)",
            "column dbname is NULL",
            "DELETE FROM shards WHERE name = 'new'",
        ),
        (
            "INSERT INTO shards VALUES ('Bad', 'x', true)",
            "characters of a-z",
            "DELETE FROM shards WHERE name = 'Bad'",
        ),
        (
            "INSERT INTO shards SELECT * FROM shards LIMIT 1",
            "another pipeline has that name",
            "DELETE FROM shards WHERE ctid = (SELECT max(ctid) FROM shards)",
        ),
    ];
    for (times, (breaks, why, repairs)) in broken.into_iter().enumerate() {
        shards.run(breaks);
        let line = process.walpost.wait_for_logs(FAILED, times + 1);
        assert!(line.contains(&why.replace('\\', "")), "{line}");
        wait_until_failed(&http, 1.0);
        shards.run(repairs);
        wait_until_failed(&http, 0.0);
    }
    // A pipeline that the file has is none of the rows', and the file can be changed while a source is broken.
    shards.run(&format!(
        "INSERT INTO shards VALUES ('{name}', '{name}', true)",
        name = in_file.name
    ));
    let line = process.walpost.wait_for_logs(FAILED, broken.len() + 1);
    assert!(line.contains("another pipeline has that name"), "{line}");
    let changed = head() + &shards.source() + &pipeline(&in_file, "window_records = 500");
    replace(&process.file(), &changed);
    process.walpost.wait_for_log("1 changed");
    assert_eq!([&one, &other].map(walsender), senders[..2]);
    shards.run(&format!(
        "DELETE FROM shards WHERE name = '{}'",
        in_file.name
    ));
    wait_until_failed(&http, 0.0);
    // Under half of them, or none, is a mistake until a person says that it is none.
    shards.run("UPDATE shards SET active = false");
    let line = process.walpost.wait_for_log(NOT_RELOADED);
    assert!(
        line.contains("2 pipelines would be removed") && line.contains("reload --accept"),
        "{line}"
    );
    wait_until_failed(&http, 1.0);
    assert_eq!([&one, &other].map(walsender), senders[..2]);
    let accepted = process.ask(&["reload", "--accept"]).expect_code(0);
    accepted.expect_says(&["2 removed", "1 unchanged"]);
    wait_until_failed(&http, 0.0);
    wait_until("two slots to be released", || {
        !one.slot_is_active() && !other.slot_is_active()
    });
    process.walpost.terminate().expect_code(0);
}

#[test]
fn database_that_is_away_at_the_start_keeps_no_other_pipeline_from_starting() {
    let [of_row, in_file] = [Scene::new(), Scene::new()];
    let shards = Shards::new();
    shards.add(&of_row);
    shards.run("ALTER TABLE shards RENAME TO away");
    let mut process = shards.start(&pipeline(&in_file, ""), 1);
    let told = process.walpost.wait_for_log("pipelines are missing");
    assert!(told.contains("public.shards"), "{told}");
    let http = process.walpost.http();
    assert_eq!(http.metrics()["walpost_config_reload_failed"], 1.0);
    let sender = walsender(&in_file);
    let check = |words: &[&str]| {
        let config = process.file();
        Invocation::new(["check", "--config"])
            .arg(config)
            .args(words)
            .finish()
    };
    check(&["--offline"])
        .expect_code(0)
        .expect_says(&["source", "not asked"]);
    let found = check(&[]).expect_code(3);
    found.expect_says(&["walpost.toml: source", "public.shards", &in_file.name]);
    // A query that nobody has answered yet changes nothing.
    let changed = std::fs::read_to_string(process.file())
        .unwrap()
        .replace("WHERE active", "WHERE true");
    replace(&process.file(), &changed);
    let line = process.walpost.wait_for_log(NOT_RELOADED);
    assert!(line.contains("public.shards"), "{line}");
    shards.run("ALTER TABLE away RENAME TO shards");
    wait_until_streaming(&of_row);
    wait_until_failed(&http, 0.0);
    assert_eq!(walsender(&in_file), sender);
    process.walpost.terminate().expect_code(0);
}
