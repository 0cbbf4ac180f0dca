//! Fuzz target for connection strings.

use super::*;

/// A password that a fuzzer is very unlikely to generate by chance.
const PASSWORD: &str = "q7Zr0vT2mXw9";

/// Parses `data` as a connection string, and also as part of the password in other connection
/// strings.
///
/// # Panics
/// Panics if a parsed connection string changes when it is written and parsed again, or if a
/// password is printed.
pub fn conninfo(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if text.contains(PASSWORD) {
        return;
    }
    let _ = displayed(text);
    if let Ok(pairs) = syntax::pairs(text)
        && let Some(again) = written(&pairs)
    {
        assert_eq!(syntax::pairs(&again).as_ref().ok(), Some(&pairs), "{again}");
    }

    if !is_ambiguous(text) {
        let half = (0..=text.len() / 2).rfind(|&at| text.is_char_boundary(at));
        for at in [0, half.unwrap_or_default(), text.len()] {
            let (before, after) = text.split_at(at);
            let password = format!("{before}{PASSWORD}{after}");
            for text in [
                format!("postgresql://u:{password}@h/db"),
                format!("user=u password={password} host=h"),
            ] {
                let shown = displayed(&text);
                assert!(!shown.contains(PASSWORD), "{text}: {shown}");
            }
        }
    }
    // If a password is quoted, parsing must return exactly this password.
    let quoted = written(&[("password".to_owned(), format!("{text}{PASSWORD}"))]);
    if let Some(parsed) = quoted.and_then(|text| parsed(&text).ok()) {
        let Secret(password) = parsed.password.expect("a password");
        assert_eq!(password, format!("{text}{PASSWORD}").into_bytes());
    }
}

fn parsed(text: &str) -> Result<Conninfo, ConninfoError> {
    Conninfo::parse(text, &|name| (name == "USER").then(|| "me".to_owned()))
}

/// Returns everything that Walpost prints about the connection string, including parse errors.
fn displayed(text: &str) -> String {
    match parsed(text) {
        Ok(conninfo) => {
            assert!(!conninfo.hosts.is_empty());
            assert!(conninfo.hosts.iter().all(|host| host.port != 0));
            format!("{conninfo:?} {}", conninfo.describe())
        }
        Err(error) => format!("{error} {error:?}"),
    }
}

/// Returns a connection string that contains the pairs, or `None` if one of the names can't be
/// written in a connection string.
fn written(pairs: &[syntax::Pair]) -> Option<String> {
    // The leading space prevents the string from being parsed as a URL.
    let mut text = String::from(" ");
    for (name, value) in pairs {
        if name.is_empty() || name.contains(|c: char| c == '=' || c.is_ascii_whitespace()) {
            return None;
        }
        let value = value.replace('\\', "\\\\").replace('\'', "\\'");
        text.push_str(&format!("{name} = '{value}' "));
    }
    Some(text)
}

/// Returns whether part of this password could be mistaken for another parameter if the password is
/// not escaped.
fn is_ambiguous(password: &str) -> bool {
    let has_name = |keyword: &keywords::Keyword| password.contains(keyword.name);
    password.contains('=') && (password.contains('%') || keywords::KEYWORDS.iter().any(has_name))
}
