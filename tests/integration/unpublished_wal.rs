//! Events that were committed before the publication existed. PostgreSQL never sends them with this
//! publication, whatever objects are created later.

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJORS, Server};

/// Found by a random walk of `./dev soak --shapes` with seed 211777191430145: the pipeline halted,
/// but its message contained no remedy.
#[test]
fn halt_message_suggests_a_remedy_for_events_committed_before_the_publication_existed() {
    for major in MAJORS {
        let mut fixture = Fixture::on_servers(Server::shared(major), Broker::shared());
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start_and_confirm_one(&aggregate, "before");
        walpost.terminate().expect_code(0);
        fixture.insert(&aggregate, "between");
        let slot = fixture.slot();
        fixture.use_settings(&format!("publication = \"{slot}_2\"\n"));
        fixture.init().finish().expect_code(0);
        let run = fixture.run().start().finish().expect_code(3);
        run.expect_mentions(&[
            "these events can't be read with this publication",
            &format!(
                "SELECT pg_catalog.pg_drop_replication_slot('{slot}'); walpost init --slot {slot}"
            ),
        ]);
        fixture.drop_slot();
        let init = fixture.init().finish().expect_code(0);
        init.expect_mentions(&["walpost replay --dropped-slots"]);
        let mut walpost = fixture.run().start();
        walpost.wait_for_log("streaming");
        let replay = fixture.replay(&["--dropped-slots", "--yes"]);
        replay.finish().expect_code(0);
        walpost.terminate().expect_code(0);
        let records = fixture.records();
        let is_delivered = records.iter().any(|record| record.key() == "between");
        assert!(is_delivered, "{major}");
        fixture.check().finish().expect_code(0);
    }
}
