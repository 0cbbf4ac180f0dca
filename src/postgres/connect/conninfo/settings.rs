//! Collects the parameters that are set, and converts their values.

use std::collections::HashMap;

use super::ConninfoError;
use super::keywords::{self, KEYWORDS, Setting};
use super::syntax;

/// The parameters that the connection string sets, and those that only the environment sets.
pub(crate) struct Settings(HashMap<&'static str, Setting>);

impl Settings {
    /// # Errors
    /// Returns a [`ConninfoError`] if a parameter's name or the syntax is invalid. Most values are
    /// checked later, when they are read.
    pub(crate) fn gather(
        text: &str,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Settings, ConninfoError> {
        let mut set = HashMap::new();
        let mut before = "";
        for (name, value) in syntax::pairs(text)? {
            let keyword = KEYWORDS.iter().find(|keyword| keyword.name == name);
            let name = keyword
                .ok_or_else(|| keywords::unknown(&name, before))?
                .name;
            before = name;
            set.insert(name, Setting { value, name });
        }
        for keyword in KEYWORDS {
            if let Some(variable) = keyword.variable
                && !set.contains_key(keyword.name)
                && let Some(value) = env(variable)
            {
                set.insert(
                    keyword.name,
                    Setting {
                        value,
                        name: variable,
                    },
                );
            }
            if let Some(setting) = set.get(keyword.name) {
                keywords::check(keyword, setting)?;
            }
        }
        Ok(Settings(set))
    }

    /// Returns the value if it is set and not empty.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.0
            .get(key)
            .map(|setting| setting.value.as_str())
            .filter(|value| !value.is_empty())
    }

    /// Returns the environment variable that set the value, or `None` if no environment variable
    /// set it.
    pub(crate) fn variable(&self, key: &str) -> Option<&'static str> {
        self.0
            .get(key)
            .map(|setting| setting.name)
            .filter(|name| *name != key)
    }

    /// Returns the elements of a comma-separated list, and the name of the parameter or variable
    /// that set it. There are no elements if the parameter is unset or empty.
    pub(crate) fn list(&self, key: &'static str) -> (&'static str, Vec<&str>) {
        let name = self.0.get(key).map_or(key, |setting| setting.name);
        (
            name,
            self.text(key)
                .map(|text| text.split(',').collect())
                .unwrap_or_default(),
        )
    }

    /// Returns the element of `choices` that the parameter's value selects, or `default` if the
    /// parameter is not set.
    ///
    /// # Errors
    /// Returns [`ConninfoError::Value`] for any other value. This includes an empty value, so that
    /// an environment variable that a template left empty does not silently select an `sslmode`.
    pub(crate) fn choice<T: Copy>(
        &self,
        key: &'static str,
        choices: &[(&str, T)],
        default: T,
    ) -> Result<T, ConninfoError> {
        let Some(setting) = self.0.get(key) else {
            return Ok(default);
        };
        match choices.iter().find(|(word, _)| *word == setting.value) {
            Some((_, chosen)) => Ok(*chosen),
            None => {
                let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
                Err(self.value_error(key, &format!("one of {}", words.join(", "))))
            }
        }
    }

    /// Returns the value as a whole number, or `default` if the parameter is not set. As in libpq,
    /// negative values are treated as zero.
    ///
    /// # Errors
    /// Returns [`ConninfoError::Value`] if the value is not a whole number.
    pub(crate) fn number(&self, key: &'static str, default: u32) -> Result<u64, ConninfoError> {
        let Some(text) = self.text(key) else {
            return Ok(default.into());
        };
        let number: i32 = text
            .trim()
            .parse()
            .map_err(|_| self.value_error(key, "a whole number"))?;
        Ok(u64::from(number.max(0).unsigned_abs()))
    }

    /// Creates the error for an invalid parameter value.
    pub(crate) fn value_error(&self, key: &'static str, expected: &str) -> ConninfoError {
        let setting = self.0.get(key);
        ConninfoError::Value {
            name: setting.map_or(key, |setting| setting.name),
            found: setting
                .map(|setting| setting.value.clone())
                .unwrap_or_default(),
            expected: expected.to_owned(),
        }
    }
}
