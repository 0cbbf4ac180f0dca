//! Rows that claim to be other events.

use super::{advance_slot, insert_rows, verify};
use crate::support::scene::Scene;

/// A role that may insert makes a dead letter with the id of an event that was never delivered.
#[test]
fn dead_letter_does_not_account_for_the_event_that_its_row_names_in_a_header() {
    let mut scene = Scene::new();
    let letters = format!("{}.dead", scene.name);
    scene.topic(&letters, 1, &[]);
    scene.use_settings(&format!(
        "on_unroutable = 'dead-letter'\ndead_letter_topic = '{letters}'\n"
    ));
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "first");
    walpost.terminate().expect_code(0);
    let lost = insert_rows(&scene, &aggregate, &["lost"]);
    advance_slot(&scene);
    let walpost = scene.start();
    let victim = &lost[0];
    scene.db.run(&format!(
        "INSERT INTO public.outbox (aggregatetype, aggregateid, type, payload, headers) \
         VALUES ('__x', 'k', 't', '{{}}', '{{\"id\": \"{victim}\"}}')"
    ));
    // The lost row could still be on its way if nothing after it were in a topic of events.
    scene.insert(&aggregate, "last");
    scene.wait_for_records(3);
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let verdict = verify(&scene);
    let findings = verdict.findings();
    let missing = findings.iter().find(|finding| finding["id"] == *victim);
    let missing = missing.unwrap_or_else(|| panic!("{findings:?}"));
    assert_eq!(missing["finding"], "missing", "{findings:?}");
    assert!(
        verdict.counts().contains("missing 1"),
        "{}",
        verdict.counts()
    );
}
