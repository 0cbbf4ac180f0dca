use std::fmt::Write;
use std::path::Path;

use proptest::prelude::*;

use super::*;

/// Returns messages that `./dev golden` captured from a real server of this version. In the file,
/// each message is preceded by its length.
fn golden(version: u32) -> Vec<Vec<u8>> {
    let path = format!("tests/golden/pg{version}.bin");
    let bytes = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(&path)).expect(&path);
    let mut rest = &bytes[..];
    let mut messages = Vec::new();
    while let Some((len, after)) = rest.split_first_chunk::<4>() {
        let (message, after) = after.split_at(u32::from_be_bytes(*len) as usize);
        messages.push(message.to_vec());
        rest = after;
    }
    assert!(
        rest.is_empty(),
        "{path}: {} unexpected bytes at the end",
        rest.len()
    );
    messages
}

const VERSIONS: [u32; 5] = [14, 15, 16, 17, 18];

/// Formats a message, omitting the values that differ between captures: LSNs, times, transaction
/// IDs and OIDs.
fn shown(message: &Message<'_>) -> String {
    let row = |tuple: &Tuple<'_>| {
        let values = tuple.values().map(|value| match value {
            Value::Null => "null".to_owned(),
            Value::UnchangedToast => "unchanged".to_owned(),
            Value::Text(bytes) | Value::Binary(bytes) if bytes.len() > 80 => {
                format!("{} bytes", bytes.len())
            }
            Value::Text(text) => String::from_utf8_lossy(text).into_owned(),
            Value::Binary(bytes) => format!("b'{}'", bytes.escape_ascii()),
        });
        values.collect::<Vec<_>>().join(", ")
    };
    let before = |old: &OldTuple<'_>| match old {
        OldTuple::Key(tuple) => format!("key ({})", row(tuple)),
        OldTuple::Full(tuple) => format!("full ({})", row(tuple)),
    };
    match message {
        Message::Begin(_) => "begin".to_owned(),
        Message::Commit(_) => "commit".to_owned(),
        Message::Origin { name, .. } => format!("origin {name}"),
        Message::Relation(relation) => {
            let columns = relation
                .columns
                .iter()
                .fold(String::new(), |mut all, column| {
                    let key = if column.key { "*" } else { "" };
                    write!(all, " {key}{}", column.name).expect("to a String");
                    all
                });
            let identity = char::from(relation.replica_identity);
            format!(
                "relation {}.{} {identity}:{columns}",
                relation.namespace, relation.name
            )
        }
        Message::Type {
            namespace, name, ..
        } => format!("type {namespace}.{name}"),
        Message::Insert { new, .. } => format!("insert ({})", row(new)),
        Message::Update { old: None, new, .. } => format!("update to ({})", row(new)),
        Message::Update {
            old: Some(old),
            new,
            ..
        } => {
            format!("update {} to ({})", before(old), row(new))
        }
        Message::Delete { old, .. } => format!("delete {}", before(old)),
        Message::Truncate {
            cascade,
            restart_identity,
            relations,
        } => {
            format!(
                "truncate {} cascade={cascade} restart={restart_identity}",
                relations.len()
            )
        }
        Message::Logical {
            transactional,
            prefix,
            content,
            ..
        } => {
            let content = String::from_utf8_lossy(content);
            format!("message {prefix} {content} transactional={transactional}")
        }
    }
}

#[test]
fn decodes_messages_from_real_servers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/decoded.txt");
    let expected = std::fs::read_to_string(path).expect("tests/golden/decoded.txt");
    for version in VERSIONS {
        let messages = golden(version);
        let lines = messages.iter().map(|message| {
            shown(&Message::decode(message).unwrap_or_else(|error| panic!("pg{version}: {error}")))
        });
        let decoded = lines.collect::<Vec<_>>().join("\n") + "\n";
        assert!(decoded == expected, "pg{version} decodes to:\n{decoded}");
    }
}

#[test]
fn rejects_messages_with_missing_or_trailing_bytes() {
    for message in VERSIONS.into_iter().flat_map(golden) {
        for end in 0..message.len() {
            assert!(
                Message::decode(&message[..end]).is_err(),
                "{end} bytes of {message:?}"
            );
        }
        let longer = [&message[..], b"x"].concat();
        assert!(Message::decode(&longer).is_err(), "{longer:?}");
    }
}

#[test]
fn errors_name_the_invalid_field() {
    let check = |bytes: &[u8], expected| assert_eq!(Message::decode(bytes), Err(expected));
    check(b"", DecodeError::Empty);
    check(b"?", DecodeError::UnknownTag(b'?'));
    check(
        &[b"B", &[0; 17][..]].concat(),
        DecodeError::Short("begin.xid"),
    );
    check(
        &[b"C\x01", &[0; 24][..]].concat(),
        DecodeError::Unexpected("commit.flags", 1),
    );
    check(
        b"Y\0\0\0\x01\xff\0x\0",
        DecodeError::NotUtf8("type.namespace"),
    );
    check(
        b"I\0\0\0\x01K",
        DecodeError::Unexpected("insert.new", i64::from(b'K')),
    );
    let negative = b"I\0\0\0\x01N\0\x01t\xff\xff\xff\xff";
    check(negative, DecodeError::Unexpected("tuple.text", -1));
    let huge = b"I\0\0\0\x01N\0\x01t\x7f\xff\xff\xff";
    check(huge, DecodeError::Short("tuple.text"));
    check(b"I\0\0\0\x01N\0\0x", DecodeError::Leftover("insert", 1));
    check(
        b"T\xff\xff\xff\xff\0",
        DecodeError::Unexpected("truncate.relations", -1),
    );
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn decodes_or_rejects_arbitrary_messages(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Message::decode(&bytes);
    }

    #[test]
    fn decodes_or_rejects_a_message_with_changed_bytes(
        version in 0..VERSIONS.len(),
        which: prop::sample::Index,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let messages = golden(VERSIONS[version]);
        let mut message = messages[which.index(messages.len())].clone();
        for (at, byte) in changes {
            let at = at.index(message.len());
            message[at] = byte;
        }
        if let Ok(Message::Insert { new, .. }) = Message::decode(&message) {
            prop_assert_eq!(new.values().count(), new.len());
        }
    }
}
