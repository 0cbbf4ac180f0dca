//! Children of an outbox table that is renamed before Walpost has examined them.

use super::{scene, writer};
use crate::support::event::Event;
use crate::support::scene::Scene;

const TABLES: [&str; 2] = ["tenant_1.outbox", "tenant_2.outbox"];

const RENAME: &str = "ALTER TABLE tenant_1.outbox RENAME TO former";

/// Creates two tables, and a child of the first with an event.
fn with_child() -> Scene<'static> {
    let scene = scene(&TABLES);
    let aggregate = scene.aggregate(1);
    scene
        .db
        .run("CREATE TABLE tenant_1.child () INHERITS (tenant_1.outbox)");
    let event = Event::new(&aggregate, "hidden", "{}");
    scene.db.run(&writer(&["tenant_1.child"]).insert_one(event));
    scene
}

fn take_former_out(scene: &Scene<'_>) {
    scene.db.run(&format!(
        "ALTER PUBLICATION {} DROP TABLE ONLY tenant_1.former",
        scene.slot()
    ));
}

/// Asserts that `check` names the command until it has been run, and that the command sends the
/// row.
fn expect_replay(scene: &mut Scene<'_>) {
    let command = format!(
        "walpost replay --dropped-slots --table tenant_1.child --pipeline {}",
        scene.name
    );
    let check = scene.check().finish().expect_code(3);
    check.expect_mentions(&["events of table tenant_1.child committed before", &command]);
    scene.use_settings("tables = [\"tenant_*.outbox\", \"tenant_1.child\"]\n");
    scene
        .db
        .run("ALTER TABLE tenant_1.child ADD PRIMARY KEY (id)");
    let replay = ["--dropped-slots", "--table", "tenant_1.child", "--yes"];
    scene.replay(&replay).finish().expect_code(0);
    let records = scene.records();
    let keys: Vec<_> = records.iter().map(|record| record.key()).collect();
    assert_eq!(keys, ["hidden"]);
    let check = scene.check().finish();
    assert!(!check.stdout.contains(&command), "{}", check.stdout);
}

/// Found by walks of `./dev soak --shapes` with seeds 164992341767450 and 110022328567302.
#[test]
fn rows_of_a_child_are_named_if_its_parent_is_replaced_before_any_look() {
    let mut scene = with_child();
    scene.db.run(&format!(
        "{RENAME}; CREATE TABLE tenant_1.outbox (LIKE tenant_1.former INCLUDING ALL);
         ALTER PUBLICATION {} ADD TABLE tenant_1.outbox",
        scene.slot()
    ));
    let says = ["table tenant_1.child inherits from tenant_1.former, which was tenant_1.outbox"];
    scene.check().finish().expect_code(3).expect_mentions(&says);
    let halted = scene.run().finish().expect_code(3).expect_mentions(&says);
    halted.expect_mentions(&[
        "No pattern in tables stands for tenant_1.child",
        "a primary key",
    ]);
    take_former_out(&scene);
    let mut walpost = scene.start();
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    assert_eq!(count_entries(&scene), 1);
    expect_replay(&mut scene);
}

#[test]
fn rows_of_a_child_are_named_if_its_parent_is_renamed_before_any_look() {
    let mut scene = with_child();
    scene.db.run(RENAME);
    take_former_out(&scene);
    let mut walpost = scene.start();
    walpost.wait_for_log("table tenant_1.child inherits from tenant_1.former");
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    assert_eq!(count_entries(&scene), 1);
    expect_replay(&mut scene);
}

#[test]
fn rows_of_a_child_are_named_if_its_parent_is_renamed_before_a_new_slot() {
    let mut scene = with_child();
    scene.db.run(RENAME);
    take_former_out(&scene);
    scene.drop_slot();
    let init = scene.init().finish();
    init.expect_mentions(&["table tenant_1.child inherits from tenant_1.former"]);
    expect_replay(&mut scene);
}

/// Returns the number of journal entries about the child.
fn count_entries(scene: &Scene<'_>) -> i64 {
    scene
        .db
        .number("SELECT count(*) FROM walpost.journal WHERE detail ->> 'table' = 'tenant_1.child'")
}
