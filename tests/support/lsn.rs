//! Formats and parses LSNs and positions.

/// Formats an LSN in PostgreSQL's notation, such as `0/16B3748`.
pub(crate) fn lsn_text(lsn: u64) -> String {
    format!("{:X}/{:X}", lsn >> 32, lsn & 0xFFFF_FFFF)
}

/// Parses an LSN such as `0/16B3748`.
pub(crate) fn parse_lsn(text: &str) -> u64 {
    let (high, low) = text.split_once('/').expect("an LSN");
    let half = |digits| u64::from_str_radix(digits, 16).expect("an LSN");
    half(high) << 32 | half(low)
}

/// Parses a position such as `00000000/016B3748:0000000002`.
pub(crate) fn parse_position(text: &str) -> (u64, u32) {
    let parse = || {
        let (lsn, index) = text.split_once(':')?;
        let (high, low) = lsn.split_once('/')?;
        if high.len() != 8 || low.len() != 8 || index.len() != 10 {
            return None;
        }
        let high = u64::from_str_radix(high, 16).ok()?;
        let low = u64::from_str_radix(low, 16).ok()?;
        Some((high << 32 | low, index.parse().ok()?))
    };
    parse().unwrap_or_else(|| panic!("not a position: {text}"))
}
