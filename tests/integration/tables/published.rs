//! Tables that leave a publication for several tables, and return.

use super::{SETTINGS, add, scene, scene_on, writer};
use crate::published::gaps;
use crate::support::event::Event;
use crate::support::postgres::MAJOR;
use crate::support::scene::Scene;

const TABLES: [&str; 2] = ["tenant_1.outbox", "tenant_2.outbox"];
const GAP: &str = "table tenant_1.outbox was not in publication";

in_both_modes! {
    table_that_is_added_again_by_init_is_not_sent_again
    table_that_is_re_created_by_hand_is_named
    table_that_is_re_created_by_add_outbox_has_no_gap
}

fn insert(scene: &Scene, aggregate: &str, table: &str, key: &str) {
    let event = Event::new(aggregate, key, "{}");
    scene.db.run(&writer(&[table]).insert_one(event));
}

fn count(scene: &Scene, key: &str) -> usize {
    let records = scene.records();
    records.iter().filter(|record| record.key() == key).count()
}

fn alter(scene: &Scene, what: &str) {
    scene
        .db
        .run(&format!("ALTER PUBLICATION {} {what}", scene.slot()));
}

fn replay(scene: &Scene) {
    let command = format!(
        "walpost replay --dropped-slots --table tenant_1.outbox --pipeline {}",
        scene.name
    );
    let check = scene.check().finish().expect_code(3);
    assert!(check.stdout.contains(&command), "{}", check.stdout);
    let replay = ["--dropped-slots", "--table", "tenant_1.outbox", "--yes"];
    scene.replay(&replay).finish().expect_code(0);
    scene.check().finish().expect_code(0);
}

/// Ten rows of the table were delivered. They are not sent again, and the rows committed in between
/// are named.
fn table_that_is_added_again_by_init_is_not_sent_again(exactly_once: bool) {
    for arguments in [&["--table", "tenant_1.outbox"][..], &[]] {
        let scene = scene(&TABLES).in_mode(exactly_once);
        let aggregate = scene.aggregate(1);
        let walpost = scene.start();
        for _ in 0..10 {
            insert(&scene, &aggregate, TABLES[0], "delivered");
        }
        scene.wait_until_confirmed();
        walpost.terminate().expect_code(0);
        let walpost = scene.start();
        alter(&scene, "DROP TABLE tenant_1.outbox");
        insert(&scene, &aggregate, TABLES[0], "between");
        let init = scene.init().args(arguments).finish().expect_code(0);
        init.expect_mentions(&[
            GAP,
            "walpost replay --dropped-slots --table tenant_1.outbox",
        ]);
        insert(&scene, &aggregate, TABLES[0], "after");
        scene.wait_for_records(11);
        scene.wait_until_confirmed();
        assert_eq!(count(&scene, "delivered"), 10);
        assert_eq!(count(&scene, "between"), 0);
        replay(&scene);
        assert_eq!(count(&scene, "between"), 1);
        assert_eq!(gaps(&scene), 1);
        walpost.terminate().expect_code(0);
    }
}

fn table_that_is_re_created_by_hand_is_named(exactly_once: bool) {
    let scene = scene(&TABLES).in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.start();
    for table in TABLES {
        insert(&scene, &aggregate, table, "before");
    }
    scene.wait_until_confirmed();
    scene.db.run(
        "CREATE TABLE tenant_1.copy (LIKE tenant_1.outbox INCLUDING ALL); DROP TABLE tenant_1.outbox;
         ALTER TABLE tenant_1.copy RENAME TO outbox",
    );
    insert(&scene, &aggregate, TABLES[0], "between");
    alter(&scene, "ADD TABLE tenant_1.outbox");
    walpost.wait_for_log(GAP);
    replay(&scene);
    assert_eq!(count(&scene, "between"), 1);
    assert_eq!(gaps(&scene), 1);
    walpost.terminate().expect_code(0);
}

/// A tenant's table that is dropped and created again has only rows that were never sent, and all
/// of them are delivered.
fn table_that_is_re_created_by_add_outbox_has_no_gap(exactly_once: bool) {
    let scene = scene(&TABLES).in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    insert(&scene, &aggregate, TABLES[0], "before");
    scene.wait_until_confirmed();
    scene.db.run(
        "CREATE TABLE tenant_1.copy (LIKE tenant_1.outbox INCLUDING ALL); DROP TABLE tenant_1.outbox;
         ALTER TABLE tenant_1.copy RENAME TO outbox",
    );
    insert(&scene, &aggregate, TABLES[0], "between");
    add(&scene, TABLES[0], "");
    insert(&scene, &aggregate, TABLES[0], "after");
    scene.wait_for_records(3);
    walpost.terminate().expect_code(0);
    let walpost = scene.start();
    walpost.terminate().expect_code(0);
    assert_eq!(gaps(&scene), 0);
    scene.check().finish().expect_code(0);
    // The table was added by that function, and is then removed and added again before Walpost
    // notices.
    alter(&scene, "DROP TABLE tenant_1.outbox");
    insert(&scene, &aggregate, TABLES[0], "missed");
    alter(&scene, "ADD TABLE tenant_1.outbox");
    let walpost = scene.start();
    replay(&scene);
    assert_eq!(count(&scene, "missed"), 1);
    walpost.terminate().expect_code(0);
}

/// The table's rows are not copied under the new name, but are reported under it.
#[test]
fn table_that_is_renamed_while_it_is_out_is_named() {
    let scene = scene(&TABLES[..1]);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    insert(&scene, &aggregate, TABLES[0], "before");
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    alter(&scene, "DROP TABLE tenant_1.outbox");
    scene.db.run("ALTER SCHEMA tenant_1 RENAME TO tenant_2");
    insert(&scene, &aggregate, TABLES[1], "between");
    let init = scene
        .init()
        .args(["--table", "tenant_2.outbox"])
        .finish()
        .expect_code(0);
    init.expect_mentions(&["table tenant_2.outbox was not in publication"]);
    let walpost = scene.start();
    let replay = ["--dropped-slots", "--table", "tenant_2.outbox", "--yes"];
    scene.replay(&replay).finish().expect_code(0);
    assert_eq!(count(&scene, "between"), 1);
    walpost.terminate().expect_code(0);
}

#[test]
fn role_that_adds_tables_needs_the_right_to_record_them() {
    let scene = scene_on(MAJOR, SETTINGS, &TABLES[..1]);
    let (role, slot) = (format!("migrator_{}", scene.name), scene.slot());
    scene.db.run(&format!(
        "CREATE ROLE {role}; GRANT USAGE ON SCHEMA walpost TO {role};
         GRANT CREATE ON DATABASE {name} TO {role};
         GRANT SELECT, INSERT, DELETE ON walpost.outbox_row TO {role};
         GRANT EXECUTE ON FUNCTION walpost.add_outbox(regclass, name) TO {role};
         ALTER PUBLICATION {slot} OWNER TO {role};
         CREATE SCHEMA tenant_2 AUTHORIZATION {role};
         SET ROLE {role};
         CREATE TABLE tenant_2.outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb)",
        name = scene.name
    ));
    let call = format!("SELECT walpost.add_outbox('tenant_2.outbox', '{slot}')");
    let error = scene.db.try_run(&call).unwrap_err();
    let message = error.as_db_error().unwrap().message();
    assert_eq!(message, "permission denied for table walpost.table_state");
    scene.db.run(&format!(
        "RESET ROLE; GRANT SELECT, INSERT, UPDATE ON walpost.table_state TO {role}; SET ROLE {role}; {call}; RESET ROLE"
    ));
    scene.check().finish();
}
