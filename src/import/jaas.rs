//! Options of a JAAS configuration: `MODULE required NAME="VALUE" ...;`

/// The value of an option of a JAAS configuration.
pub(super) fn option(jaas: &str, name: &str) -> Option<String> {
    let mut rest = jaas;
    loop {
        let at = rest.find(name)?;
        let is_whole = rest[..at]
            .chars()
            .next_back()
            .is_none_or(char::is_whitespace);
        rest = &rest[at + name.len()..];
        let value = rest.trim_start().strip_prefix('=').map(str::trim_start);
        let (true, Some(value)) = (is_whole, value) else {
            continue;
        };
        let Some(quote @ ('"' | '\'')) = value.chars().next() else {
            let end = value.find(|c: char| c.is_whitespace() || c == ';');
            return Some(value[..end.unwrap_or(value.len())].to_owned());
        };
        let mut found = String::new();
        let mut chars = value[1..].chars();
        while let Some(c) = chars.next() {
            match c {
                '\\' => found.extend(chars.next()),
                c if c == quote => return Some(found),
                c => found.push(c),
            }
        }
        return None;
    }
}
