//! Events committed before the publication existed: PostgreSQL never sends them with that
//! publication, whatever is created later.

use crate::support::kafka::Broker;
use crate::support::postgres::{MAJORS, Server};
use crate::support::scene::Scene;

/// Found by a walk of `./dev soak --shapes` with seed 211777191430145: the pipeline halted without
/// a remedy in its message.
#[test]
fn halt_names_the_remedy_for_events_older_than_the_publication() {
    for major in MAJORS {
        let mut scene = Scene::on_servers(Server::shared(major), Broker::shared());
        let aggregate = scene.aggregate(1);
        let walpost = scene.start_and_confirm_one(&aggregate, "before");
        walpost.terminate().expect_code(0);
        scene.insert(&aggregate, "between");
        let slot = scene.slot();
        scene.use_settings(&format!("publication = \"{slot}_2\"\n"));
        scene.init().finish().expect_code(0);
        let run = scene.run().start().finish().expect_code(3);
        run.expect_mentions(&[
            "they cannot be read with it",
            &format!(
                "SELECT pg_catalog.pg_drop_replication_slot('{slot}'); walpost init --slot {slot}"
            ),
        ]);
        scene.drop_slot();
        let init = scene.init().finish().expect_code(0);
        init.expect_mentions(&["walpost replay --dropped-slots"]);
        let mut walpost = scene.run().start();
        walpost.wait_for_log("streaming");
        let replay = scene.replay(&["--dropped-slots", "--yes"]);
        replay.finish().expect_code(0);
        walpost.terminate().expect_code(0);
        let records = scene.records();
        let is_delivered = records.iter().any(|record| record.key() == "between");
        assert!(is_delivered, "{major}");
        scene.check().finish().expect_code(0);
    }
}
