//! Warns if the database's encoding allows text that PostgreSQL can't convert to UTF-8 and
//! therefore can't send.

use super::Observed;
use crate::postgres::table::identifier;

impl Observed {
    /// Returns a warning if the database's encoding allows text that PostgreSQL can't send as
    /// UTF-8.
    pub(crate) fn encoding_warning(&self) -> Option<String> {
        let encoding = &self.encoding;
        match encoding.as_str() {
            // Every LATIN1 character can be converted to UTF-8.
            "UTF8" | "LATIN1" | "" => None,
            "SQL_ASCII" => Some(format!(
                "database {} has encoding SQL_ASCII, which means that PostgreSQL does not validate text. A row with a \
                 value that is not valid UTF-8 can't be delivered: depending on the settings, it halts the pipeline, \
                 becomes a dead letter or causes its table to be set aside. Use a database with encoding UTF8 for the outbox",
                identifier(&self.database)
            )),
            _ => Some(format!(
                "database {} has encoding {encoding}, and PostgreSQL can't send a row that contains a character without \
                 an equivalent in UTF-8. Such a row in any table halts the pipeline, even if the settings make other invalid \
                 rows dead letters or set their tables aside. The error message contains the command that skips the row's transaction. Use \
                 a database with encoding UTF8 for the outbox",
                identifier(&self.database)
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warns_about_encodings_that_allow_text_without_a_utf8_equivalent() {
        for (encoding, expected) in [
            ("UTF8", None),
            ("LATIN1", None),
            ("SQL_ASCII", Some("does not validate text")),
            ("WIN1252", Some("can't send a row")),
            ("EUC_JP", Some("can't send a row")),
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
