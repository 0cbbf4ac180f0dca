//! Parses the options in a JAAS configuration: `MODULE required NAME="VALUE" ...;`

/// Returns the value of the option with this name.
pub(super) fn option(jaas: &str, name: &str) -> Option<String> {
    Options(jaas).find_map(|(found, value)| (found == name).then_some(value))
}

/// Returns the options whose names begin with `prefix`, with the prefix removed from their names.
pub(super) fn options_with_prefix<'j>(
    jaas: &'j str,
    prefix: &str,
) -> impl Iterator<Item = (&'j str, String)> {
    Options(jaas).filter_map(move |(name, value)| Some((name.strip_prefix(prefix)?, value)))
}

/// Iterates over the names and values of options.
struct Options<'j>(&'j str);

impl<'j> Iterator for Options<'j> {
    type Item = (&'j str, String);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let rest = self.0.trim_start();
            let end = rest.find(|c: char| c.is_whitespace() || c == '=')?;
            let (name, rest) = rest.split_at(end);
            let rest = rest.trim_start();
            // Skip the login module and its control flag, which are not followed by `=`.
            let Some(value) = rest.strip_prefix('=') else {
                self.0 = rest;
                continue;
            };
            return Some((name, self.value(value.trim_start())?));
        }
    }
}

impl<'j> Options<'j> {
    /// Parses a value. A value without quotes ends at whitespace or a semicolon. Returns `None` if
    /// a closing quote is missing.
    fn value(&mut self, text: &'j str) -> Option<String> {
        let Some(quote @ ('"' | '\'')) = text.chars().next() else {
            let end = text.find(|c: char| c.is_whitespace() || c == ';');
            let (value, rest) = text.split_at(end.unwrap_or(text.len()));
            self.0 = rest;
            return Some(value.to_owned());
        };
        let mut found = String::new();
        let mut chars = text[1..].chars();
        while let Some(c) = chars.next() {
            match c {
                '\\' => found.extend(chars.next()),
                c if c == quote => {
                    self.0 = chars.as_str();
                    return Some(found);
                }
                c => found.push(c),
            }
        }
        self.0 = "";
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JAAS: &str =
        "org.apache.X required clientId=a scope = 'b c'\textension_x=\"1\\\"2\" extension_y=z;";

    #[test]
    fn finds_options_by_name_and_prefix() {
        for (name, value) in [
            ("clientId", Some("a")),
            ("scope", Some("b c")),
            ("extension_x", Some("1\"2")),
            ("extension_y", Some("z")),
            ("Id", None),
            ("required", None),
        ] {
            assert_eq!(option(JAAS, name).as_deref(), value, "{name}");
        }
        let found: Vec<_> = options_with_prefix(JAAS, "extension_").collect();
        assert_eq!(found, [("x", "1\"2".to_owned()), ("y", "z".to_owned())]);
        for text in ["", "a", "a=", "a='b", "=", "= b=c", "a=\"b\\"] {
            let _ = Options(text).count();
            let _ = option(text, "a");
        }
        assert_eq!(option("a=\"x b=y\" b=z", "b").as_deref(), Some("z"));
    }

    #[test]
    fn parses_text_with_many_names_in_linear_time() {
        for text in ["extension_ ", "extension_a='' ", "extension_a= "] {
            let jaas = text.repeat(360_000);
            let began = std::time::Instant::now();
            let _ = options_with_prefix(&jaas, "extension_").count();
            let _ = option(&jaas, "clientId");
            assert!(began.elapsed().as_secs() < 10, "{text}");
        }
    }
}
