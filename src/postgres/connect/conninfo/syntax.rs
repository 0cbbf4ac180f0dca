//! Parses connection strings in both syntaxes, `key=value` pairs and URLs. The result is a list of
//! unescaped pairs in the order in which they were written. The parts of a URL become pairs with
//! the corresponding keywords. Does not check whether the keywords are valid.
//!
//! Spec: PostgreSQL 18, 32.1.1 "Connection Strings".

use std::borrow::Cow;

use super::ConninfoError;

/// A parameter's name and its unescaped value.
pub(crate) type Pair = (String, String);

/// Splits a connection string in either syntax into pairs.
///
/// # Errors
/// Returns [`ConninfoError::Syntax`] or [`ConninfoError::Userinfo`]. These errors don't quote the
/// string, because any part of it may belong to the password.
pub(crate) fn pairs(text: &str) -> Result<Vec<Pair>, ConninfoError> {
    if let Some(at) = text.find('\0') {
        return Err(syntax(at, "a NUL character"));
    }
    let scheme = ["postgresql://", "postgres://"]
        .into_iter()
        .find(|s| text.starts_with(s));
    match scheme {
        Some(scheme) => Url {
            text,
            at: scheme.len(),
        }
        .pairs(),
        None => key_values(text),
    }
}

/// Returns whether `text` is a URL whose password contains an unescaped special character. Part of
/// such a password would be parsed as the host, port or a parameter.
pub(crate) fn has_unescaped_password(text: &str) -> bool {
    let Some((_, rest)) = text.split_once("://") else {
        return false;
    };
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    let own = usize::from(authority.contains('@'));
    rest.matches('@').count() > own
}

fn syntax(at: usize, what: &'static str) -> ConninfoError {
    ConninfoError::Syntax { at, what }
}

fn key_values(text: &str) -> Result<Vec<Pair>, ConninfoError> {
    let mut pairs = Vec::new();
    let mut rest = text.char_indices().peekable();
    loop {
        while rest.next_if(|(_, c)| c.is_ascii_whitespace()).is_some() {}
        let Some(&(start, _)) = rest.peek() else {
            return Ok(pairs);
        };

        let mut key = String::new();
        while let Some((_, c)) = rest.next_if(|(_, c)| *c != '=' && !c.is_ascii_whitespace()) {
            key.push(c);
        }
        while rest.next_if(|(_, c)| c.is_ascii_whitespace()).is_some() {}
        if key.is_empty() || rest.next_if(|(_, c)| *c == '=').is_none() {
            return Err(syntax(
                start,
                "expected key=value, or a URL that begins with postgresql://",
            ));
        }
        while rest.next_if(|(_, c)| c.is_ascii_whitespace()).is_some() {}

        let mut value = String::new();
        if let Some((quote, _)) = rest.next_if(|(_, c)| *c == '\'') {
            loop {
                match rest.next() {
                    Some((_, '\'')) => break,
                    Some((_, '\\')) => value.extend(rest.next().map(|(_, c)| c)),
                    Some((_, c)) => value.push(c),
                    None => return Err(syntax(quote, "an unclosed quote")),
                }
            }
        } else {
            while let Some((_, c)) = rest.next_if(|(_, c)| !c.is_ascii_whitespace()) {
                match c {
                    '\\' => value.extend(rest.next().map(|(_, c)| c)),
                    c => value.push(c),
                }
            }
        }
        pairs.push((key, value));
    }
}

/// Formats a value for the `key=value` syntax, quoting it if necessary.
#[must_use]
pub(crate) fn quote_value(value: &str) -> Cow<'_, str> {
    let is_plain = |c: char| !c.is_ascii_whitespace() && !matches!(c, '\'' | '\\');
    match !value.is_empty() && value.chars().all(is_plain) {
        true => Cow::Borrowed(value),
        false => {
            let escaped = value.replace('\\', r"\\").replace('\'', r"\'");
            Cow::Owned(format!("'{escaped}'"))
        }
    }
}

/// A cursor over a URL, starting after its scheme.
struct Url<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Url<'a> {
    fn pairs(mut self) -> Result<Vec<Pair>, ConninfoError> {
        let mut pairs = Vec::new();
        let store = |pairs: &mut Vec<Pair>, key: &str, value: (usize, &str)| {
            if !value.1.is_empty() {
                pairs.push((key.to_owned(), percent_decode(value)?));
            }
            Ok(())
        };

        let authority = self.text[self.at..].split('/').next().unwrap_or_default();
        if authority.contains('@') {
            let user = self.text_until(&[':', '@']);
            store(&mut pairs, "user", user)?;
            if self.eat(':') {
                let password = self.text_until(&['@']);
                store(&mut pairs, "password", password)?;
            }
            self.eat('@');
        }

        let (mut hosts, mut ports) = (String::new(), String::new());
        loop {
            let host = if self.eat('[') {
                let host = self.text_until(&[']']);
                if host.1.is_empty() || !self.eat(']') {
                    return Err(syntax(
                        host.0,
                        "expected an IPv6 address in brackets, like [::1]",
                    ));
                }
                if !matches!(self.peek(), None | Some(':' | '/' | '?' | ',')) {
                    return Err(syntax(self.at, "expected ':', '/', '?' or ',' after ']'"));
                }
                host
            } else {
                self.text_until(&[':', '/', '?', ','])
            };
            if host.1.contains('@') {
                return Err(ConninfoError::Userinfo);
            }
            hosts.push_str(&percent_decode(host)?);
            if self.eat(':') {
                let port = self.text_until(&['/', '?', ',']);
                ports.push_str(&percent_decode(port)?);
            }
            if !self.eat(',') {
                break;
            }
            hosts.push(',');
            ports.push(',');
        }
        if !hosts.is_empty() {
            pairs.push(("host".to_owned(), hosts));
        }
        if !ports.is_empty() {
            pairs.push(("port".to_owned(), ports));
        }

        if self.eat('/') {
            let dbname = self.text_until(&['?']);
            if dbname.1.contains('@') {
                return Err(ConninfoError::Userinfo);
            }
            store(&mut pairs, "dbname", dbname)?;
        }
        if self.eat('?') {
            while self.peek().is_some() {
                let key = self.text_until(&['=', '&']);
                if !self.eat('=') {
                    return Err(syntax(key.0, "expected key=value after ?"));
                }
                let value = self.text_until(&['=', '&']);
                if self.peek() == Some('=') {
                    return Err(syntax(
                        self.at,
                        "unexpected second equals sign (in a value, write it as %3D)",
                    ));
                }
                self.eat('&');
                let (key, value) = (percent_decode(key)?, percent_decode(value)?);
                // Like libpq, accept `ssl=true`, which is used in JDBC URLs.
                if (key.as_str(), value.as_str()) == ("ssl", "true") {
                    pairs.push(("sslmode".to_owned(), "require".to_owned()));
                } else {
                    pairs.push((key, value));
                }
            }
        }
        Ok(pairs)
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn eat(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.at += wanted.len_utf8();
        }
        found
    }

    /// Returns the text up to the first character in `ends`, or to the end of the URL, and the
    /// offset of the text.
    fn text_until(&mut self, ends: &[char]) -> (usize, &'a str) {
        let rest = &self.text[self.at..];
        let found = &rest[..rest.find(ends).unwrap_or(rest.len())];
        let start = self.at;
        self.at += found.len();
        (start, found)
    }
}

fn percent_decode((start, text): (usize, &str)) -> Result<String, ConninfoError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes().enumerate();
    while let Some((at, byte)) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let hex = text
            .get(at + 1..at + 3)
            .filter(|h| h.bytes().all(|b| b.is_ascii_hexdigit()));
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(0) => return Err(syntax(start + at, "%00, a NUL character")),
            Some(byte) => bytes.push(byte),
            None => {
                let what =
                    "expected two hexadecimal digits after % (write a literal percent sign as %25)";
                return Err(syntax(start + at, what));
            }
        }
        rest.nth(1);
    }
    String::from_utf8(bytes)
        .map_err(|_| syntax(start, "the percent-encoded bytes are not valid UTF-8"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn split(text: &str) -> String {
        let written: Vec<_> = pairs(text)
            .unwrap()
            .into_iter()
            .map(|(k, v)| format!("{k}={v}"))
            .collect();
        written.join("|")
    }

    #[test]
    fn splits_key_value_strings_like_libpq() {
        for (text, expected) in [
            ("", ""),
            ("  \t\n", ""),
            ("host=a port=1", "host=a|port=1"),
            ("host = a  port= 1", "host=a|port=1"),
            ("password='it\\'s \\\\' user=u", "password=it's \\|user=u"),
            ("user='' host=a", "user=|host=a"),
            ("user=a\\ b", "user=a b"),
            ("host= 'a b' ", "host=a b"),
            ("user=", "user="),
            ("password=a=b", "password=a=b"),
            ("user=jos\u{e9}", "user=jos\u{e9}"),
        ] {
            assert_eq!(split(text), expected, "{text:?}");
        }
    }

    #[test]
    fn splits_urls_like_libpq() {
        for (text, expected) in [
            ("postgresql://", ""),
            ("postgres://localhost", "host=localhost"),
            (
                "postgresql://localhost:5433/mydb",
                "host=localhost|port=5433|dbname=mydb",
            ),
            ("postgresql://user@localhost", "user=user|host=localhost"),
            (
                "postgresql://user:secret@localhost",
                "user=user|password=secret|host=localhost",
            ),
            ("postgresql://user:@localhost", "user=user|host=localhost"),
            (
                "postgresql://u:p%40s%2Fs%25@h",
                "user=u|password=p@s/s%|host=h",
            ),
            ("postgresql://u:a:b@h", "user=u|password=a:b|host=h"),
            ("postgresql://u:a?b@h", "user=u|password=a?b|host=h"),
            (
                "postgresql://other@localhost/otherdb?connect_timeout=10&application_name=myapp",
                "user=other|host=localhost|dbname=otherdb|connect_timeout=10|application_name=myapp",
            ),
            (
                "postgresql://host1:123,host2:456/db",
                "host=host1,host2|port=123,456|dbname=db",
            ),
            ("postgresql://host1,host2:456", "host=host1,host2|port=,456"),
            (
                "postgresql://[2001:db8::1234]:5/database",
                "host=2001:db8::1234|port=5|dbname=database",
            ),
            ("postgresql://[::1],[::2]", "host=::1,::2|port=,"),
            (
                "postgresql:///dbname?host=/var/lib/postgresql",
                "dbname=dbname|host=/var/lib/postgresql",
            ),
            (
                "postgresql://%2Fvar%2Flib%2Fpostgresql/dbname",
                "host=/var/lib/postgresql|dbname=dbname",
            ),
            (
                "postgresql://user@/shop?host=/run/pg",
                "user=user|dbname=shop|host=/run/pg",
            ),
            ("postgresql://h?user=a%20b", "host=h|user=a b"),
            ("postgresql://h/?ssl=true", "host=h|sslmode=require"),
            ("postgresql://h/db?", "host=h|dbname=db"),
        ] {
            assert_eq!(split(text), expected, "{text:?}");
        }
    }

    #[test]
    fn rejects_malformed_connection_strings_without_quoting_them() {
        for text in [
            "shop",
            "host",
            "=hunter2",
            "password=my hunter2",
            "password='hunter2",
            "host=a\0hunter2",
            "mysql://hunter2@h",
            "postgresql://u:hunter2%@h",
            "postgresql://u:hunter2%zz@h",
            "postgresql://u:hunter2%00@h",
            "postgresql://u:hunter2%ff@h",
            "postgresql://[::1",
            "postgresql://[]",
            "postgresql://[::1]x",
            "postgresql://h/db?hunter2",
            "postgresql://h/db?a=b=hunter2",
            "postgresql://u:p@hunter2@h/db",
        ] {
            let error = pairs(text).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{text:?}: {error}");
        }
    }

    #[test]
    fn detects_a_password_that_extends_into_other_parts_of_a_url() {
        assert!(has_unescaped_password("postgresql://u:pa/ss@host/db"));
        assert!(has_unescaped_password("postgresql://u:pa?ss@host/db"));
        assert!(has_unescaped_password("postgresql://u:p@ss@host/db"));
        assert!(has_unescaped_password("postgresql://u:p@s/s?a=b@host/db"));
        assert!(!has_unescaped_password("postgresql://u:p%2Fss@host/db"));
        assert!(!has_unescaped_password("postgresql://host/db"));
    }
}
