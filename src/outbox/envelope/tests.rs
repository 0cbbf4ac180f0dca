use proptest::prelude::*;

use super::super::settings::OutboxSettings;
use super::*;

const MICROS: i64 = 848_567_100_123_400;

fn sized(bytes: &[u8]) -> Vec<u8> {
    let len = i32::try_from(bytes.len()).expect("short");
    [&len.to_be_bytes()[..], bytes].concat()
}

/// Returns the bytes that `walpost.publish` writes. A test in `tests/integration/messages/` checks
/// that the function really writes these bytes.
fn envelope(headers: Option<&str>, payload: Option<&[u8]>) -> Vec<u8> {
    let null = (-1i32).to_be_bytes().to_vec();
    let mut out = vec![VERSION];
    out.extend(0x406c_07f3_26f0_4eea_a50c_1099_4006_4b8f_u128.to_be_bytes());
    out.extend(MICROS.to_be_bytes());
    for text in ["order", "o-1", "Größe"] {
        out.extend(sized(text.as_bytes()));
    }
    out.extend(headers.map_or(null, |json| sized(json.as_bytes())));
    out.push(u8::from(payload.is_some()));
    out.extend(payload.unwrap_or_default());
    out
}

#[test]
fn decodes_all_fields_of_an_envelope() {
    let bytes = envelope(Some("{}"), Some(b"\x00\xff"));
    let event = Envelope::decode(&bytes).expect("decodes");
    assert_eq!(event.id.to_string(), "406c07f3-26f0-4eea-a50c-109940064b8f");
    assert_eq!(
        event.created_at.as_microsecond(),
        MICROS + 946_684_800_000_000
    );
    assert_eq!(
        (event.aggregatetype, event.aggregateid, event.kind),
        ("order", "o-1", "Größe")
    );
    assert_eq!(
        (event.headers, event.payload),
        (Some(&b"{}"[..]), Some(&b"\x00\xff"[..]))
    );
    let bytes = envelope(None, None);
    let event = Envelope::decode(&bytes).expect("decodes");
    assert_eq!((event.headers, event.payload), (None, None));
    let bytes = envelope(None, Some(b""));
    let event = Envelope::decode(&bytes).expect("decodes");
    assert_eq!(event.payload, Some(&[][..]));
}

#[test]
fn creates_rows_in_postgresql_text_format() {
    let mut settings = OutboxSettings::default();
    settings.headers.push((
        "all".to_owned(),
        "{type} {created_at}".parse().expect("template"),
    ));
    let mapping = Mapping::for_messages(&settings).expect("binds");
    let bytes = envelope(Some("{}"), Some(b"p"));
    let event = Envelope::decode(&bytes).expect("decodes");
    let mut texts = Texts::default();
    let row = event.row(&mapping, &mut texts);
    let values: Vec<_> = (0..COLUMNS.len())
        .map(|index| row[mapping.slot(index).expect("named")].expect("not null"))
        .map(String::from_utf8_lossy)
        .collect();
    assert_eq!(
        values,
        [
            "406c07f3-26f0-4eea-a50c-109940064b8f",
            "order",
            "o-1",
            "Größe",
            "p",
            "{}",
            "2026-11-21 09:05:00.1234+00",
        ]
    );
}

#[test]
fn formats_times_like_postgresql() {
    let check = |text: &str, expected: &str| {
        let at: Timestamp = text.parse().expect(text);
        let mut room = [0; Texts::TIMESTAMP_LEN];
        assert_eq!(print(at, &mut room), expected.as_bytes());
    };
    check("2026-11-21T09:05:00Z", "2026-11-21 09:05:00+00");
    check(
        "0001-01-01T00:00:00.000001Z",
        "0001-01-01 00:00:00.000001+00",
    );
    check("9999-12-30T22:00:00.5Z", "9999-12-30 22:00:00.5+00");
}

#[test]
fn errors_name_the_invalid_field() {
    let check =
        |bytes: &[u8], expected: EnvelopeError| assert_eq!(Envelope::decode(bytes), Err(expected));
    let good = envelope(None, Some(b"p"));
    check(b"", EnvelopeError::Empty);
    check(b"{\"a\": 1}", EnvelopeError::Version(b'{'));
    check(&[2, 0], EnvelopeError::Version(2));
    check(&good[..10], EnvelopeError::Short("id"));
    check(&good[..24], EnvelopeError::Short("created_at"));
    check(&good[..30], EnvelopeError::Short("aggregatetype"));
    let changed = |at: usize, bytes: &[u8]| {
        let mut envelope = good.clone();
        envelope[at..at + bytes.len()].copy_from_slice(bytes);
        envelope
    };
    let infinity = changed(17, &i64::MAX.to_be_bytes());
    check(&infinity, EnvelopeError::Unexpected("created_at", i64::MAX));
    let before_christ = -64_000_000_000_000_000;
    check(
        &changed(17, &i64::to_be_bytes(before_christ)),
        EnvelopeError::Unexpected("created_at", before_christ),
    );
    let null = changed(25, &(-1i32).to_be_bytes());
    check(&null, EnvelopeError::Unexpected("aggregatetype", -1));
    let negative = changed(25, &(-2i32).to_be_bytes());
    check(&negative, EnvelopeError::Unexpected("aggregatetype", -2));
    check(
        &changed(29, b"\xff"),
        EnvelopeError::NotUtf8("aggregatetype"),
    );
    let flag = good.len() - 2;
    check(
        &changed(flag, &[7]),
        EnvelopeError::Unexpected("payload", 7),
    );
    check(
        &changed(flag, &[0]),
        EnvelopeError::Unexpected("payload", 0),
    );
}

#[test]
fn rejects_truncated_envelopes() {
    let whole = envelope(Some("{\"a\": 1}"), Some(b""));
    for end in 0..whole.len() {
        assert!(Envelope::decode(&whole[..end]).is_err(), "{end} bytes");
    }
    let null = [&envelope(None, None)[..], b"x"].concat();
    assert!(
        Envelope::decode(&null).is_err(),
        "accepted bytes after a null payload"
    );
}

#[test]
fn hides_the_payload_in_debug_output() {
    let bytes = envelope(None, Some(b"secret"));
    let shown = format!("{:?}", Envelope::decode(&bytes));
    assert!(
        !shown.contains("secret") && shown.contains("Some(6)"),
        "{shown}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn decodes_or_rejects_arbitrary_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Envelope::decode(&bytes);
        let _ = Envelope::decode(&[&[VERSION], &bytes[..]].concat());
    }

    #[test]
    fn decodes_or_rejects_an_envelope_with_changed_bytes(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
    ) {
        let timestamp = Some("created_at".to_owned());
        let settings = OutboxSettings { timestamp, ..OutboxSettings::default() };
        let mapping = Mapping::for_messages(&settings).expect("binds");
        let mut bytes = envelope(Some("{}"), Some(b"payload"));
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(event) = Envelope::decode(&bytes) {
            let mut texts = Texts::default();
            let row = event.row(&mapping, &mut texts);
            prop_assert!(row[mapping.slot(CREATED_AT).expect("named")].expect("printed").ends_with(b"+00"));
        }
    }
}
