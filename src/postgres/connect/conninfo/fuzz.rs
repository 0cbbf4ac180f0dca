//! Fuzz target for connection strings.

use super::*;

/// A password that a fuzzer won't generate.
const PASSWORD: &str = "q7Zr0vT2mXw9";

/// Parses bytes as a connection string, and as part of a password in other connection strings.
///
/// # Panics
/// Panics if a connection string that was rebuilt from its parts has different parts, or if a
/// password is displayed.
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
    // A quoted password can contain anything.
    let quoted = written(&[("password".to_owned(), format!("{text}{PASSWORD}"))]);
    if let Some(parsed) = quoted.and_then(|text| parsed(&text).ok()) {
        let Secret(password) = parsed.password.expect("a password");
        assert_eq!(password, format!("{text}{PASSWORD}").into_bytes());
    }
}

fn parsed(text: &str) -> Result<Conninfo, ConninfoError> {
    Conninfo::parse(text, &|name| (name == "USER").then(|| "me".to_owned()))
}

/// Returns all text that the parsed connection string or the error displays.
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

/// Returns the pairs as one connection string, or `None` if a name can't be represented.
fn written(pairs: &[syntax::Pair]) -> Option<String> {
    // A leading space keeps the string from being parsed as a URL.
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

/// Returns whether the unescaped password can't be distinguished from other parameters.
fn is_ambiguous(password: &str) -> bool {
    let has_name = |keyword: &keywords::Keyword| password.contains(keyword.name);
    password.contains('=') && (password.contains('%') || keywords::KEYWORDS.iter().any(has_name))
}
