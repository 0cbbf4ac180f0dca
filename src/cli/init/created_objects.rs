//! Describes which objects `init` created or changed, and which already existed.

use crate::postgres::catalog::Observed;
use crate::postgres::table::identifier;
use crate::postgres::target::Target;

/// Lists a pipeline's objects on one line, in three groups: objects that `init` created, objects
/// that `init` changed, and objects that already existed. `role` contains the role's name, and
/// whether the role already existed.
pub(super) fn describe_created(
    target: &Target,
    role: Option<(&str, bool)>,
    before: &Observed,
    after: &Observed,
) -> String {
    let mut groups = [
        ("created", Vec::new()),
        ("changed", Vec::new()),
        ("existed", Vec::new()),
    ];
    let mut add = |name: String, existed: bool, exists: bool, has_changed: bool| {
        let group = match (existed, exists, has_changed) {
            (_, false, _) => return,
            (false, true, _) => 0,
            (true, true, true) => 1,
            (true, true, false) => 2,
        };
        groups[group].1.push(name);
    };
    if let Some(table) = target.outbox.table() {
        let (before, after) = (&before.table, &after.table);
        add(
            format!("table {table}"),
            before.is_some(),
            after.is_some(),
            before != after,
        );
    }
    if target.outbox.is_messages() {
        let (existed, exists) = (before.has_publish, after.has_publish);
        add(
            "function walpost.publish".to_owned(),
            existed,
            exists,
            false,
        );
    }
    for (name, existed, exists) in [
        (
            "table walpost.journal",
            before.has_journal,
            after.has_journal,
        ),
        (
            "table walpost.slot_state",
            before.has_slot_state,
            after.has_slot_state,
        ),
        (
            "table walpost.table_state",
            before.has_table_state,
            after.has_table_state,
        ),
    ] {
        add(name.to_owned(), existed, exists, false);
    }
    if let Some((role, existed)) = role {
        add(format!("role {}", identifier(role)), existed, true, false);
    }
    let publication = format!("publication {}", identifier(&target.publication));
    let (old, new) = (&before.publication, &after.publication);
    add(publication, old.is_some(), new.is_some(), old != new);
    let slot = format!("slot {}", target.slot);
    add(slot, before.slot.is_some(), after.slot.is_some(), false);
    let groups = groups.iter().filter(|(_, names)| !names.is_empty());
    let groups: Vec<_> = groups
        .map(|(what, names)| format!("{what}: {}", names.join(", ")))
        .collect();
    groups.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::catalog::ObservedPublication;
    use crate::postgres::target::Outbox;

    #[test]
    fn reports_which_objects_were_created_or_changed_and_which_already_existed() {
        let target = Target {
            outbox: Outbox::Messages {
                prefix: "p".to_owned(),
            },
            publication: "My pub".to_owned(),
            slot: "s".to_owned(),
            commands: Default::default(),
        };
        let before = Observed {
            has_journal: true,
            publication: Some(ObservedPublication::default()),
            ..Observed::default()
        };
        let after = Observed {
            has_publish: true,
            publication: Some(ObservedPublication {
                inserts: true,
                ..ObservedPublication::default()
            }),
            ..before.clone()
        };
        assert_eq!(
            describe_created(&target, Some(("walpost", false)), &before, &after),
            "created: function walpost.publish, role walpost; changed: publication \"My pub\"; existed: table walpost.journal"
        );
    }
}
