//! How the encoding of a database affects its rows, which PostgreSQL sends in UTF-8.

use super::Observed;
use crate::postgres::table::identifier;

impl Observed {
    /// Returns a warning if the encoding of the database allows rows that PostgreSQL can't send.
    pub(crate) fn encoding_warning(&self) -> Option<String> {
        let encoding = &self.encoding;
        match encoding.as_str() {
            // UTF-8 has every character of LATIN1.
            "UTF8" | "LATIN1" | "" => None,
            "SQL_ASCII" => Some(format!(
                "database {} has the encoding SQL_ASCII, with which PostgreSQL does not check texts: a row with a value that is not \
                 UTF-8 can't be delivered, and halts the pipeline, becomes a dead letter or sets its table aside, as the settings \
                 say. Have the outbox in a database with the encoding UTF8",
                identifier(&self.database)
            )),
            _ => Some(format!(
                "database {} has the encoding {encoding}, and PostgreSQL refuses to send a row that has a character without an \
                 equivalent in UTF-8. Such a row of any table halts the pipeline, also if dead letters are enabled or tables are \
                 set aside. The halt names the command that leaves its transaction out. Have the outbox in a database with the \
                 encoding UTF8",
                identifier(&self.database)
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warns_of_encodings_with_texts_that_have_no_equivalent_in_utf8() {
        for (encoding, expected) in [
            ("UTF8", None),
            ("LATIN1", None),
            ("SQL_ASCII", Some("does not check texts")),
            ("WIN1252", Some("refuses to send a row")),
            ("EUC_JP", Some("refuses to send a row")),
        ] {
            let observed = Observed {
                encoding: encoding.to_owned(),
                ..Observed::default()
            };
            let warning = observed.encoding_warning();
            assert_eq!(warning.is_some(), expected.is_some(), "{encoding}");
            let text = warning.unwrap_or_default();
            assert!(text.contains(expected.unwrap_or_default()), "{text}");
        }
    }
}
