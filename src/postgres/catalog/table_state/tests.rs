use super::*;

fn look(memberships: &[u32], stored: Option<StoredTable>) -> TableLook {
    TableLook {
        table: "tenant_a.outbox".parse().expect("a table"),
        relation: 7,
        memberships: memberships.iter().copied().collect(),
        member_xid: Some(500),
        stored,
        slot: SlotPlace {
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

fn gap(since: Option<u64>) -> Finding {
    Finding::Gap(TableGap {
        table: "tenant_a.outbox".parse().expect("a table"),
        publication: "tenants".to_owned(),
        from: Some(Lsn(5)),
        since,
    })
}

#[track_caller]
fn check(look: &TableLook, expected: Finding) {
    assert_eq!(look.evaluate("tenants"), expected);
}

#[test]
fn table_is_new_until_it_is_recorded() {
    check(&look(&[1], None), Finding::New);
    check(&look(&[], None), Finding::Nothing);
}

#[test]
fn unchanged_membership_is_not_a_gap() {
    check(&look(&[1], Some(stored(&[1]))), Finding::Same);
    check(&look(&[1, 2], Some(stored(&[1]))), Finding::Changed);
    check(&look(&[2], Some(stored(&[1, 2]))), Finding::Changed);
    let re_created = StoredTable {
        relation: 6,
        ..stored(&[1])
    };
    check(&look(&[1], Some(re_created)), Finding::Changed);
}

#[test]
fn membership_that_was_replaced_is_a_gap_unless_it_is_older_than_the_record() {
    check(&look(&[2], Some(stored(&[1]))), gap(Some(400)));
    let older = TableLook {
        member_xid: Some(399),
        ..look(&[2], Some(stored(&[1])))
    };
    check(&older, Finding::Changed);
    let unknown = StoredTable {
        seen_xid: None,
        ..stored(&[1])
    };
    check(&look(&[2], Some(unknown)), gap(None));
}

#[test]
fn table_that_was_found_unpublished_has_a_gap_when_it_is_back() {
    check(&look(&[], Some(stored(&[1]))), Finding::Out);
    let out = StoredTable {
        is_out: true,
        ..stored(&[1])
    };
    check(&look(&[], Some(out.clone())), Finding::Nothing);
    let of_other = StoredTable {
        publication: "before".to_owned(),
        ..stored(&[1])
    };
    let left = match gap(Some(400)) {
        Finding::Gap(gap) => Finding::Left(gap),
        other => other,
    };
    check(&look(&[], Some(of_other)), left);
    // The publication did not publish inserts for a while.
    check(&look(&[1], Some(out)), gap(Some(400)));
}

#[test]
fn another_publication_has_to_be_as_old_as_what_the_slot_still_sends() {
    let of_other = StoredTable {
        publication: "before".to_owned(),
        ..stored(&[1])
    };
    let look = |member_xid| TableLook {
        member_xid: Some(member_xid),
        ..look(&[1], Some(of_other.clone()))
    };
    check(&look(299), Finding::Changed);
    check(&look(350), gap(Some(300)));
}

#[test]
fn older_rows_that_the_slot_has_not_sent_are_lost_with_the_publication_that_they_were_written_for()
{
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
    check(&look(&[1], Some(added.clone())), Finding::Same);
    check(&look(&[], Some(added.clone())), Finding::Out);
    let of_other = StoredTable {
        publication: "before".to_owned(),
        ..added
    };
    check(
        &look(&[], Some(of_other.clone())),
        Finding::Left(whole.clone()),
    );
    let older = TableLook {
        member_xid: Some(299),
        ..look(&[1], Some(of_other))
    };
    check(&older, Finding::Gap(whole));
}

#[test]
fn rows_from_before_a_table_left_one_publication_are_not_sent_for_another() {
    let out = |out_lsn, memberships| StoredTable {
        publication: "before".to_owned(),
        is_out: true,
        out_lsn: Some(Lsn(out_lsn)),
        ..stored(memberships)
    };
    let left = match gap(Some(400)) {
        Finding::Gap(gap) => Finding::Left(gap),
        other => other,
    };
    check(&look(&[], Some(out(10, &[1]))), left);
    check(&look(&[], Some(out(9, &[1]))), Finding::Nothing);
    // It was recorded.
    check(&look(&[], Some(out(10, &[]))), Finding::Nothing);
}

#[test]
fn table_of_older_rows_has_no_gap() {
    let mut look = look(&[2], Some(stored(&[1])));
    look.table = TableName::from_catalog(OUTBOX_ROW[0], OUTBOX_ROW[1]);
    check(&look, Finding::Changed);
    look.memberships = Memberships::new();
    check(&look, Finding::Out);
    look.stored = Some(StoredTable {
        publication: "before".to_owned(),
        ..stored(&[1])
    });
    check(&look, Finding::Out);
}
