//! Parses the values of one pipeline. Errors name the pipeline and the key.

use super::error::ConfigError;

/// A parser for the values of one pipeline. Errors name the pipeline and the key.
pub(super) struct Reader {
    pub(super) pipeline: String,
}

impl Reader {
    pub(super) fn error(&self, key: &'static str, reason: impl ToString) -> ConfigError {
        ConfigError::Value {
            pipeline: self.pipeline.clone(),
            key,
            reason: reason.to_string(),
        }
    }

    pub(super) fn parse<T>(
        &self,
        key: &'static str,
        given: Option<&String>,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Option<T>, ConfigError> {
        given
            .map(|text| parse(text).map_err(|reason| self.error(key, reason)))
            .transpose()
    }

    pub(super) fn read<T>(
        &self,
        key: &'static str,
        given: Option<&String>,
    ) -> Result<Option<T>, ConfigError>
    where
        T: std::str::FromStr,
        T::Err: ToString,
    {
        self.parse(key, given, |text| {
            text.parse().map_err(|error: T::Err| error.to_string())
        })
    }
}
