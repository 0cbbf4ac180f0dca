use super::replaced::ReplacedTable;
use super::*;

fn observed(memberships: &[u32], stored: Option<StoredTable>) -> TableObservation {
    TableObservation {
        table: "tenant_a.outbox".parse().expect("a table"),
        relation: 7,
        memberships: memberships.iter().copied().collect(),
        member_xid: Some(500),
        stored,
        slot: SlotProgress {
            confirmed: Some(Lsn(9)),
            catalog_xmin: Some(300),
            end: Lsn(10),
        },
    }
}

fn stored(memberships: &[u32]) -> StoredTable {
    StoredTable {
        name: None,
        is_published: false,
        publication: "tenants".to_owned(),
        relation: 7,
        memberships: memberships.iter().copied().collect(),
        is_out: false,
        seen_lsn: Some(Lsn(5)),
        seen_xid: Some(400),
        out_lsn: None,
    }
}

fn gap(since: Option<u64>) -> TableChange {
    TableChange::Gap(TableGap {
        table: "tenant_a.outbox".parse().expect("a table"),
        publication: "tenants".to_owned(),
        from: Some(Lsn(5)),
        since,
    })
}

#[track_caller]
fn check(observed: &TableObservation, expected: TableChange) {
    assert_eq!(observed.evaluate("tenants"), expected);
}

#[test]
fn reports_a_published_table_as_new_until_it_is_recorded() {
    check(&observed(&[1], None), TableChange::New);
    check(&observed(&[], None), TableChange::Nothing);
}

#[test]
fn reports_no_missing_rows_if_the_table_was_published_without_interruption() {
    check(&observed(&[1], Some(stored(&[1]))), TableChange::Same);
    check(&observed(&[1, 2], Some(stored(&[1]))), TableChange::Changed);
    check(&observed(&[2], Some(stored(&[1, 2]))), TableChange::Changed);
    let re_created = StoredTable {
        relation: 6,
        ..stored(&[1])
    };
    check(&observed(&[1], Some(re_created)), TableChange::Changed);
}

#[test]
fn reports_missing_rows_if_a_recorded_table_was_added_to_every_publication_again() {
    check(&observed(&[2], Some(stored(&[1]))), gap(Some(400)));
    let older = TableObservation {
        member_xid: Some(399),
        ..observed(&[2], Some(stored(&[1])))
    };
    check(&older, TableChange::Changed);
    let unknown = StoredTable {
        seen_xid: None,
        ..stored(&[1])
    };
    check(&observed(&[2], Some(unknown)), gap(None));
}

#[test]
fn reports_missing_rows_when_an_unpublished_table_is_published_again() {
    check(&observed(&[], Some(stored(&[1]))), TableChange::Unpublished);
    let out = StoredTable {
        is_out: true,
        ..stored(&[1])
    };
    check(&observed(&[], Some(out.clone())), TableChange::Nothing);
    let other_publication = StoredTable {
        publication: "before".to_owned(),
        ..stored(&[1])
    };
    let left = match gap(Some(400)) {
        TableChange::Gap(gap) => TableChange::NotInNewPublication(gap),
        other => other,
    };
    check(&observed(&[], Some(other_publication)), left);
    // The table was recorded as not published, although it is still in the publication. This
    // happens if the publication temporarily does not publish inserts.
    check(&observed(&[1], Some(out)), gap(Some(400)));
}

#[test]
fn reports_missing_rows_of_a_replaced_table_unless_it_was_always_published() {
    let target = Target {
        outbox: Outbox::Table("tenant_a.outbox".parse().expect("a table")),
        publication: "tenants".to_owned(),
        slot: "tenants".to_owned(),
        commands: Default::default(),
    };
    // The catalog row that publishes the current table differs from the row that published the
    // former table.
    let has_missing_rows = |memberships: &[u32], is_published, is_out| {
        let former = StoredTable {
            name: Some("tenant_a.former".parse().expect("a table")),
            is_published,
            relation: 6,
            is_out,
            ..stored(&[1])
        };
        let observed = observed(memberships, Some(former));
        ReplacedTable::find(&observed, &target, true, None).is_some()
    };
    assert!(!has_missing_rows(&[2], true, false));
    assert!(has_missing_rows(&[2], false, false));
    assert!(has_missing_rows(&[2], false, true));
    // The publication temporarily did not publish inserts.
    assert!(has_missing_rows(&[2], true, true));
    assert!(has_missing_rows(&[], true, true));
    // The former table is still unpublished, so the range of its missing rows is not final yet.
    assert!(!has_missing_rows(&[], false, true));
}

#[test]
fn reports_rows_left_unsent_before_a_new_publication_was_created() {
    let other_publication = StoredTable {
        publication: "before".to_owned(),
        ..stored(&[1])
    };
    let observed = |member_xid| TableObservation {
        member_xid: Some(member_xid),
        ..observed(&[1], Some(other_publication.clone()))
    };
    check(&observed(299), TableChange::Changed);
    check(&observed(350), gap(Some(300)));
}

#[test]
fn reports_unsent_existing_rows_as_missing_if_a_different_publication_is_configured() {
    let whole = TableGap {
        table: "tenant_a.outbox".parse().expect("a table"),
        publication: "tenants".to_owned(),
        from: None,
        since: None,
    };
    let added = StoredTable {
        seen_lsn: Some(Lsn(10)),
        ..stored(&[1])
    };
    check(&observed(&[1], Some(added.clone())), TableChange::Same);
    check(
        &observed(&[], Some(added.clone())),
        TableChange::Unpublished,
    );
    let other_publication = StoredTable {
        publication: "before".to_owned(),
        ..added
    };
    check(
        &observed(&[], Some(other_publication.clone())),
        TableChange::NotInNewPublication(whole.clone()),
    );
    let older = TableObservation {
        member_xid: Some(299),
        ..observed(&[1], Some(other_publication))
    };
    check(&older, TableChange::Gap(whole));
}

#[test]
fn reports_unsent_rows_of_a_removed_table_if_a_different_publication_is_configured() {
    let out = |out_lsn, memberships| StoredTable {
        publication: "before".to_owned(),
        is_out: true,
        out_lsn: Some(Lsn(out_lsn)),
        ..stored(memberships)
    };
    let left = match gap(Some(400)) {
        TableChange::Gap(gap) => TableChange::NotInNewPublication(gap),
        other => other,
    };
    check(&observed(&[], Some(out(10, &[1]))), left);
    check(&observed(&[], Some(out(9, &[1]))), TableChange::Nothing);
    // A record without publication memberships means that the journal already contains an entry for
    // the missing rows.
    check(&observed(&[], Some(out(10, &[]))), TableChange::Nothing);
}

#[test]
fn reports_no_missing_rows_for_the_internal_table_outbox_row() {
    let mut observed = observed(&[2], Some(stored(&[1])));
    observed.table = TableName::from_catalog(OUTBOX_ROW[0], OUTBOX_ROW[1]);
    check(&observed, TableChange::Changed);
    observed.memberships = Memberships::new();
    check(&observed, TableChange::Unpublished);
    observed.stored = Some(StoredTable {
        publication: "before".to_owned(),
        ..stored(&[1])
    });
    check(&observed, TableChange::Unpublished);
}
