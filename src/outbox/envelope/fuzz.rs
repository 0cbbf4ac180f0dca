//! Checks the decoder for events sent as logical decoding messages, whose content any database user
//! can write.

use super::super::settings::OutboxSettings;
use super::*;

/// Decodes bytes as the content of a message.
///
/// # Panics
/// Panics if the envelope does not match the bytes, or the row does not match the event.
pub fn envelope(data: &[u8]) {
    let Ok(event) = Envelope::decode(data) else {
        return;
    };
    assert_eq!(encoded(&event), data);

    let mut settings = OutboxSettings::default();
    let all = "{type} {created_at}".parse().expect("a template");
    settings.headers.push(("all".to_owned(), all));
    let mapping = Mapping::for_messages(&settings).expect("binds");
    let mut texts = Texts::default();
    let row = event.row(&mapping, &mut texts);
    let value = |index| mapping.slot(index).and_then(|slot| row[slot]);
    assert_eq!(value(ID), Some(event.id.to_string().as_bytes()));
    assert_eq!(value(1), Some(event.aggregatetype.as_bytes()));
    assert_eq!(value(2), Some(event.aggregateid.as_bytes()));
    assert_eq!(value(3), Some(event.kind.as_bytes()));
    assert_eq!(value(4), event.payload);
    assert_eq!(value(5), event.headers);
    let created_at = value(CREATED_AT).expect("not null");
    let created_at = std::str::from_utf8(created_at).expect("ASCII");
    assert_eq!(created_at.parse().ok(), Some(event.created_at));
}

/// Encodes an envelope.
fn encoded(event: &Envelope<'_>) -> Vec<u8> {
    let sized = |bytes: &[u8]| {
        let len = i32::try_from(bytes.len()).expect("fits into 32 bits");
        [&len.to_be_bytes()[..], bytes].concat()
    };
    let from_2000 = event.created_at.as_microsecond() - 946_684_800_000_000;
    [
        &[VERSION][..],
        event.id.as_bytes(),
        &from_2000.to_be_bytes(),
        &sized(event.aggregatetype.as_bytes()),
        &sized(event.aggregateid.as_bytes()),
        &sized(event.kind.as_bytes()),
        &event.headers.map_or(vec![0xff; 4], sized),
        &[u8::from(event.payload.is_some())],
        event.payload.unwrap_or_default(),
    ]
    .concat()
}
