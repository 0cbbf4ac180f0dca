//! Tokens for SASL/OAUTHBEARER, obtained from a configured program or token endpoint.
//!
//! librdkafka requests a new token by adding an event to the client's queue. For a client whose
//! queue is never polled, the token is set once, when the client is created.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::token_endpoint::{Endpoint, EndpointError};
use crate::model::time::unix_micros;
use crate::program::{Program, ProgramError, RUN_TIMEOUT};

/// Fraction of a token's lifetime that must remain for the token to be passed to another client.
const REMAINING_LIFETIME_MIN: f64 = 0.5;
/// Minimum delay before another token is requested after a request has failed or brokers have
/// rejected the token.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// Expiry times above this value are assumed to be in milliseconds: as a number of seconds, this
/// value would be in the year 5138.
const SECONDS_MAX: f64 = 1e11;
/// Maximum lifetime of a token. Longer lifetimes are shortened to this value, because librdkafka
/// rejects times that are too far in the future.
const LIFETIME_MAX_MILLIS: i64 = 365 * 24 * 60 * 60 * 1000;

/// A token with which a client authenticates.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) value: String,
    /// Expiry time, in milliseconds since 1970.
    pub(super) expires_millis: i64,
    /// Name of the principal. Brokers read the name from the token, but librdkafka requires it
    /// separately.
    pub(super) principal: String,
    /// SASL extensions sent with the token, by name.
    pub(super) extensions: Vec<(String, String)>,
}

/// The reason why no token could be obtained. The output of the program or endpoint may contain
/// secrets, so no variant contains any part of that output.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TokenError {
    #[error("kafka_token_command: {program} did not supply a token: {error}")]
    Program {
        program: String,
        error: ProgramError,
    },
    #[error("kafka_token_command: {program} did not print a valid token: {found}")]
    Output { program: String, found: OutputError },
    #[error("{url}: {error}")]
    Endpoint { url: String, error: EndpointError },
    #[error("the token endpoint {url} did not return a valid token: {found}")]
    Answer { url: String, found: OutputError },
}

/// The reason why the output of the program or endpoint does not contain a valid token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum OutputError {
    #[error("the output is not UTF-8; expected a token")]
    Encoding,
    #[error("the JSON is invalid at line {line}, column {column}")]
    Json { line: usize, column: usize },
    #[error("the JSON has no string member \"token\" (or \"access_token\")")]
    NoToken,
    #[error(
        "the output has several words; expected one token, or JSON: {{\"token\": \"...\", \"expires_at\": ...}}"
    )]
    Words,
    #[error(
        "the token has no expiry time; expected a JWT with \"exp\", or JSON: {{\"token\": \"...\", \"expires_at\": ...}}, where \
         expires_at is in seconds since 1970 or a time like 2026-11-25T09:05:00Z. Instead of expires_at, \"lifetime\" in seconds is \
         also accepted"
    )]
    NoExpiry,
    #[error(
        "the JSON has an invalid value for {0:?}; expected a number of seconds or, for expires_at, a time with a UTC offset"
    )]
    Value(&'static str),
    #[error(
        "the value for \"extensions\" is invalid; expected an object whose member names consist of letters (\"auth\" is not allowed) and \
         whose values are ASCII strings"
    )]
    Extensions,
    #[error("the token expired {0} s ago. Compare this machine's clock with the issuer's clock")]
    Expired(i64),
    #[error("the token contains characters other than visible ASCII")]
    Characters,
    /// librdkafka's own message is not used because it repeats the token.
    #[error("librdkafka rejected the token because the token had already expired")]
    Unusable,
}

/// Accepted names of the JSON member for the token: Walpost's own name, and the names from OAuth
/// 2.0 (RFC 6749, section 5.1) and the Azure CLI.
const TOKEN: [&str; 3] = ["token", "access_token", "accessToken"];
const EXPIRES_AT: [&str; 2] = ["expires_at", "expires_on"];
const LIFETIME: [&str; 2] = ["lifetime", "expires_in"];

impl Token {
    /// Parses the output of the program or the response of the endpoint: a JWT, or JSON that
    /// contains a token. `extensions` are added to the SASL extensions in the JSON.
    pub(super) fn parse(
        output: &[u8],
        extensions: &[(String, String)],
        now_millis: i64,
    ) -> Result<Self, OutputError> {
        let text = std::str::from_utf8(output).map_err(|_| OutputError::Encoding)?;
        let text = text.trim();
        let mut token = match text.starts_with('{') {
            true => Self::from_json(text, now_millis)?,
            false => Self::from_word(text)?,
        };
        token.extensions.extend_from_slice(extensions);
        // librdkafka also rejects invalid characters, but its error message repeats the token.
        let is_visible = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_visible(&token.value) || token.principal.contains('\0') {
            return Err(OutputError::Characters);
        }
        let is_name = |name: &str| {
            let is_word = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphabetic());
            is_word && name != "auth"
        };
        let is_value = |text: &str| {
            text.bytes()
                .all(|byte| byte.is_ascii_graphic() || byte == b' ')
        };
        let mut extensions = token.extensions.iter();
        if !extensions.all(|(name, value)| is_name(name) && is_value(value)) {
            return Err(OutputError::Extensions);
        }
        if token.expires_millis <= now_millis {
            let seconds = now_millis.saturating_sub(token.expires_millis) / 1000;
            return Err(OutputError::Expired(seconds));
        }
        let latest = now_millis.saturating_add(LIFETIME_MAX_MILLIS);
        token.expires_millis = token.expires_millis.min(latest);
        Ok(token)
    }

    /// Returns the expiry time to pass to librdkafka, which is earlier than the token's real expiry
    /// time.
    ///
    /// librdkafka requests a new token after four fifths of the lifetime that Walpost passes to it.
    /// librdkafka checks only once a second whether a new token is due, and the program that prints
    /// the token also takes some time. However, the new token must be available before librdkafka
    /// reauthenticates, which it does after nine tenths of the session lifetime that the broker
    /// returns. That lifetime depends on the real expiry time.
    pub(super) fn librdkafka_expiry_millis(&self, now_millis: i64) -> i64 {
        let left = self.expires_millis.saturating_sub(now_millis);
        now_millis.saturating_add(left - left / 4)
    }

    fn from_word(text: &str) -> Result<Self, OutputError> {
        if text.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(OutputError::Words);
        }
        let claims = Claims::from_token(text);
        Ok(Self {
            expires_millis: claims.expires_millis().ok_or(OutputError::NoExpiry)?,
            principal: claims.principal(),
            value: text.to_owned(),
            extensions: Vec::new(),
        })
    }

    fn from_json(text: &str, now_millis: i64) -> Result<Self, OutputError> {
        let members: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| OutputError::Json {
                line: error.line(),
                column: error.column(),
            })?;
        let member = |names: &[&'static str]| {
            let mut found = names.iter().filter_map(|name| {
                let value = members.get(*name)?;
                (!value.is_null()).then_some((*name, value))
            });
            found.next()
        };
        let value = member(&TOKEN).and_then(|(_, value)| value.as_str());
        let value = value.map(str::trim).filter(|value| !value.is_empty());
        let value = value.ok_or(OutputError::NoToken)?;
        let claims = Claims::from_token(value);
        let expires_millis = if let Some((name, time)) = member(&EXPIRES_AT) {
            time_millis(time).ok_or(OutputError::Value(name))?
        } else if let Some((name, lifetime)) = member(&LIFETIME) {
            let seconds = number(lifetime).filter(|seconds| seconds.is_finite());
            let seconds = seconds.ok_or(OutputError::Value(name))?;
            now_millis.saturating_add(millis(seconds * 1000.0))
        } else {
            claims.expires_millis().ok_or(OutputError::NoExpiry)?
        };
        let principal = member(&["principal"]).and_then(|(_, principal)| principal.as_str());
        let extensions = match member(&["extensions"]) {
            None => Vec::new(),
            Some((_, Value::Object(extensions))) => extensions
                .iter()
                .map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
                .collect::<Option<_>>()
                .ok_or(OutputError::Extensions)?,
            Some(_) => return Err(OutputError::Extensions),
        };
        Ok(Self {
            value: value.to_owned(),
            expires_millis,
            principal: principal.map_or_else(|| claims.principal(), str::to_owned),
            extensions,
        })
    }
}

/// Parses a JSON number, or a JSON string that contains a number.
fn number(value: &Value) -> Option<f64> {
    value
        .as_f64()
        .or_else(|| value.as_str()?.trim().parse().ok())
}

/// Parses a time and returns it in milliseconds since 1970. The value is a number of seconds or
/// milliseconds since 1970, or a time with its UTC offset.
fn time_millis(value: &Value) -> Option<i64> {
    if let Some(number) = number(value).filter(|number| number.is_finite()) {
        return Some(match number > SECONDS_MAX {
            true => millis(number),
            false => millis(number * 1000.0),
        });
    }
    let time: jiff::Timestamp = value.as_str()?.trim().parse().ok()?;
    Some(time.as_millisecond())
}

#[expect(clippy::cast_possible_truncation, reason = "the cast saturates")]
fn millis(number: f64) -> i64 {
    number as i64
}

/// Claims of a JWT (RFC 7519, section 4.1); empty if the token is not a JWT.
#[derive(Default, Deserialize)]
struct Claims {
    exp: Option<f64>,
    sub: Option<String>,
}

impl Claims {
    fn from_token(token: &str) -> Self {
        let mut parts = token.split('.');
        let (Some(_), Some(claims), Some(_)) = (parts.next(), parts.next(), parts.next()) else {
            return Self::default();
        };
        let decoded = URL_SAFE_NO_PAD.decode(claims.trim_end_matches('='));
        let claims = decoded
            .ok()
            .and_then(|json| serde_json::from_slice(&json).ok());
        claims.unwrap_or_default()
    }

    fn expires_millis(&self) -> Option<i64> {
        self.exp.map(|seconds| millis(seconds * 1000.0))
    }

    fn principal(&self) -> String {
        self.sub.clone().unwrap_or_else(|| "walpost".to_owned())
    }
}

/// A source of tokens. Clones share the current token.
#[derive(Clone)]
pub(super) struct Tokens(Arc<SharedTokens>);

struct SharedTokens {
    issuer: Issuer,
    state: Mutex<TokenState>,
}

/// The issuer of the tokens.
enum Issuer {
    Program(Program),
    Endpoint(Endpoint),
}

#[derive(Default)]
struct TokenState {
    last: Option<Issued>,
    failed: Option<(Instant, TokenError)>,
}

/// A token, and when it was issued.
struct Issued {
    token: Arc<Token>,
    at: Instant,
    at_millis: i64,
}

impl Issued {
    /// Returns whether enough of the lifetime remains to pass the token to another client.
    fn is_fresh(&self, now_millis: i64) -> bool {
        let lifetime = self.token.expires_millis.saturating_sub(self.at_millis);
        let left = self.token.expires_millis.saturating_sub(now_millis);
        #[expect(
            clippy::cast_precision_loss,
            reason = "an approximate fraction is sufficient"
        )]
        let part = left as f64 / lifetime.max(1) as f64;
        part > REMAINING_LIFETIME_MIN
    }
}

impl Tokens {
    pub(super) fn from_program(program: Program) -> Self {
        Self::new(Issuer::Program(program))
    }

    pub(super) fn from_endpoint(endpoint: Endpoint) -> Self {
        Self::new(Issuer::Endpoint(endpoint))
    }

    fn new(issuer: Issuer) -> Self {
        Self(Arc::new(SharedTokens {
            issuer,
            state: Mutex::default(),
        }))
    }

    /// Returns the token endpoint, or `None` if tokens are not requested from an endpoint.
    pub(super) fn endpoint(&self) -> Option<&Endpoint> {
        match &self.0.issuer {
            Issuer::Program(_) => None,
            Issuer::Endpoint(endpoint) => Some(endpoint),
        }
    }

    /// Returns a token that remains valid for a while. Blocks while the program runs or the
    /// endpoint is queried; concurrent callers get the same token.
    ///
    /// # Errors
    /// Returns an error if no token could be obtained.
    pub(super) fn get_token(&self) -> Result<Arc<Token>, TokenError> {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = state
            .last
            .as_ref()
            .filter(|last| last.is_fresh(now_millis()))
        {
            return Ok(Arc::clone(&last.token));
        }
        if let Some((_, error)) = state
            .failed
            .as_ref()
            .filter(|(at, _)| at.elapsed() < RETRY_DELAY)
        {
            return Err(error.clone());
        }
        match self.request_token() {
            Ok(token) => {
                let token = Arc::new(token);
                state.failed = None;
                state.last = Some(Issued {
                    token: Arc::clone(&token),
                    at: Instant::now(),
                    at_millis: now_millis(),
                });
                Ok(token)
            }
            Err(error) => {
                state.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// Discards a token that librdkafka has rejected, and returns the corresponding error.
    pub(super) fn discard_unusable(&self, token: &Token) -> TokenError {
        let error = self.output_error(OutputError::Unusable);
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state
            .last
            .as_ref()
            .is_some_and(|last| *last.token == *token)
        {
            state.last = None;
            state.failed = Some((Instant::now(), error.clone()));
        }
        error
    }

    fn output_error(&self, found: OutputError) -> TokenError {
        match &self.0.issuer {
            Issuer::Program(program) => TokenError::Output {
                program: program.path().to_owned(),
                found,
            },
            Issuer::Endpoint(endpoint) => TokenError::Answer {
                url: endpoint.url().to_owned(),
                found,
            },
        }
    }

    /// Discards the last token because brokers reject it, and returns whether the token was
    /// discarded. A very recent token is kept, because a new request would probably return the same
    /// token.
    pub(super) fn discard_rejected(&self) -> bool {
        // If the lock is held, another thread is already requesting a new token.
        let Ok(mut state) = self.0.state.try_lock() else {
            return false;
        };
        let is_old = |issued: &Issued| issued.at.elapsed() > RETRY_DELAY;
        match state.last.as_ref().is_some_and(is_old) {
            true => state.last.take().is_some(),
            false => false,
        }
    }

    /// Returns whether the last token is still valid for clients that already have it.
    pub(super) fn is_last_valid(&self) -> bool {
        let Ok(state) = self.0.state.try_lock() else {
            return true;
        };
        let now = now_millis();
        let is_valid = |issued: &Issued| issued.token.expires_millis > now;
        state.last.as_ref().is_some_and(is_valid)
    }

    fn request_token(&self) -> Result<Token, TokenError> {
        let read = match &self.0.issuer {
            Issuer::Program(program) => {
                let output = program
                    .run(RUN_TIMEOUT)
                    .map_err(|error| TokenError::Program {
                        program: program.path().to_owned(),
                        error,
                    })?;
                Token::parse(&output, &[], now_millis())
            }
            Issuer::Endpoint(endpoint) => {
                let answer = endpoint
                    .request_token()
                    .map_err(|error| TokenError::Endpoint {
                        url: endpoint.url().to_owned(),
                        error,
                    })?;
                Token::parse(&answer, endpoint.extensions(), now_millis())
            }
        };
        read.map_err(|found| self.output_error(found))
    }
}

pub(super) fn now_millis() -> i64 {
    i64::try_from(unix_micros() / 1000).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_795_575_600_000;

    fn jwt(claims: &str) -> String {
        format!(
            "eyJhbGciOiJub25lIn0.{}.c2ln",
            URL_SAFE_NO_PAD.encode(claims)
        )
    }

    fn parse(output: &str) -> Result<Token, OutputError> {
        Token::parse(output.as_bytes(), &[], NOW)
    }

    #[test]
    fn reads_the_token_expiry_from_the_token_or_the_json_that_contains_it() {
        let later = NOW / 1000 + 900;
        let token = jwt(&format!("{{\"sub\": \"shop\", \"exp\": {later}}}"));
        let check = |output: &str, expires_millis, principal: &str| {
            let found = parse(output).unwrap_or_else(|error| panic!("{output}: {error}"));
            let expected = (expires_millis, principal);
            assert_eq!(
                (found.expires_millis, &*found.principal),
                expected,
                "{output}"
            );
        };
        check(&format!("{token}\n"), later * 1000, "shop");
        check(
            &format!("{{\"access_token\": \"{token}\"}}"),
            later * 1000,
            "shop",
        );
        for (expiry, expected) in [
            (format!("\"expires_at\": {later}"), later * 1000),
            (format!("\"expires_at\": {}", later * 1000), later * 1000),
            (format!("\"expires_on\": \"{later}\""), later * 1000),
            (
                "\"expires_at\": \"2026-11-25T09:05:00+01:00\"".to_owned(),
                1_795_593_900_000,
            ),
            ("\"lifetime\": 60".to_owned(), NOW + 60_000),
            (
                "\"token_type\": \"Bearer\", \"expires_in\": 3599".to_owned(),
                NOW + 3_599_000,
            ),
        ] {
            check(
                &format!("{{\"token\": \"opaque\", {expiry}}}"),
                expected,
                "walpost",
            );
        }
        let all = format!(
            "{{\"token\": \"{token}\", \"principal\": \"other\", \"lifetime\": 1, \"extensions\": {{\"logicalCluster\": \"lkc-1\"}}}}"
        );
        let found = parse(&all).expect("a token");
        assert_eq!(found.value, token);
        assert_eq!(found.principal, "other");
        let extension = ("logicalCluster".to_owned(), "lkc-1".to_owned());
        assert_eq!(found.extensions, [extension]);
    }

    #[test]
    fn reports_invalid_tokens_without_quoting_them() {
        let past = jwt(&format!("{{\"exp\": {}}}", NOW / 1000 - 7));
        for (output, expected) in [
            ("hunter2 hunter2", "several words"),
            (
                "{\"token\": \"hunter2\\u00e9\", \"lifetime\": 7}",
                "other than visible ASCII",
            ),
            (
                "{\"token\": \"x\", \"lifetime\": 9, \"extensions\": {\"a\": \"hunter2\\n\"}}",
                "extensions",
            ),
            (
                "{\"token\": \"x\", \"lifetime\": 9, \"extensions\": {\"auth\": \"hunter2\"}}",
                "extensions",
            ),
            ("hunter2", "no expiry time"),
            ("hunter2.hunter2.hunter2", "no expiry time"),
            ("{\"token\": \"hunter2\"}", "no expiry time"),
            ("{\"token\": hunter2}", "at line 1, column"),
            ("{\"tokn\": \"hunter2\"}", "no string member \"token\""),
            (
                "{\"token\": 7, \"lifetime\": 7}",
                "no string member \"token\"",
            ),
            (
                "{\"token\": \"hunter2\", \"lifetime\": \"hunter2\"}",
                "value for \"lifetime\"",
            ),
            (
                "{\"token\": \"hunter2\", \"expires_at\": \"hunter2\"}",
                "value for \"expires_at\"",
            ),
            (
                "{\"token\": \"hunter2\", \"lifetime\": 9, \"extensions\": [\"hunter2\"]}",
                "extensions",
            ),
            (
                "{\"token\": \"hunter2\", \"lifetime\": -9}",
                "expired 9 s ago",
            ),
            (&past, "expired 7 s ago"),
        ] {
            let error = parse(output).err().unwrap_or_else(|| panic!("{output}"));
            let text = error.to_string();
            assert!(text.contains(expected), "{output}: {text}");
            assert!(!text.contains("hunter2"), "{output}: {text}");
        }
        assert_eq!(
            Token::parse(b"\xff\xfe", &[], NOW).err(),
            Some(OutputError::Encoding)
        );
    }

    fn tokens(script: &str) -> Tokens {
        let argv = ["/bin/sh", "-c", script].map(str::to_owned);
        Tokens::from_program(Program::new(&argv).expect("a program"))
    }

    #[test]
    fn shares_a_token_until_half_of_its_lifetime_has_passed() {
        let issued = Issued {
            token: Arc::new(parse("{\"token\": \"x\", \"lifetime\": 100}").expect("a token")),
            at: Instant::now(),
            at_millis: NOW,
        };
        assert!(issued.is_fresh(NOW + 49_000));
        assert!(!issued.is_fresh(NOW + 51_000));
        // librdkafka requests another token after four fifths of the lifetime that Walpost passes
        // to it. By that time, more than half of the token's lifetime has passed, so the token is
        // not shared again.
        assert_eq!(issued.token.librdkafka_expiry_millis(NOW), NOW + 75_000);

        let tokens = tokens("echo '{\"token\": \"'$$'\", \"lifetime\": 100}'");
        let first = tokens.get_token().expect("a token").value.clone();
        assert_eq!(tokens.get_token().expect("a token").value, first);
        // The token is very recent, so it is not discarded.
        assert!(!tokens.discard_rejected());
        assert!(tokens.is_last_valid());
    }

    #[test]
    fn requests_a_new_token_when_brokers_reject_an_old_one() {
        let tokens = tokens("echo '{\"token\": \"'$$'\", \"lifetime\": 1000}'");
        let first = tokens.get_token().expect("a token").value.clone();
        let mut state = tokens.0.state.lock().expect("lock should not be poisoned");
        let issued = state.last.as_mut().expect("a token");
        issued.at -= RETRY_DELAY + Duration::from_secs(1);
        drop(state);
        assert!(tokens.discard_rejected());
        let second = tokens.get_token().expect("a token").value.clone();
        assert_ne!(second, first, "the rejected token was used again");
    }

    #[test]
    fn does_not_reuse_a_token_that_librdkafka_rejects() {
        let tokens = tokens("echo '{\"token\": \"'$$'\", \"lifetime\": 100}'");
        let first = tokens.get_token().expect("a token");
        let error = tokens.discard_unusable(&first);
        assert!(!tokens.is_last_valid());
        // As after any other failure, the next token request is delayed.
        assert_eq!(tokens.get_token().err(), Some(error));
        tokens
            .0
            .state
            .lock()
            .expect("lock should not be poisoned")
            .failed = None;
        let second = tokens.get_token().expect("a token");
        assert_ne!(second.value, first.value);
        // If a client reports late that an old token is rejected, the current token is not
        // discarded.
        tokens.discard_unusable(&first);
        assert_eq!(tokens.get_token().expect("a token").value, second.value);
    }

    #[test]
    fn limits_the_lifetime_of_a_token() {
        for expiry in [
            "\"expires_in\": 2e13",
            "\"expires_in\": 1e300",
            "\"expires_at\": 1e300",
            "\"expires_at\": \"9999-01-01T00:00:00Z\"",
        ] {
            let token = parse(&format!("{{\"token\": \"x\", {expiry}}}")).expect(expiry);
            assert_eq!(token.expires_millis, NOW + LIFETIME_MAX_MILLIS, "{expiry}");
        }
        let past = parse("{\"token\": \"x\", \"expires_at\": -1e300}").err();
        assert!(matches!(past, Some(OutputError::Expired(_))), "{past:?}");
    }

    #[test]
    fn reports_the_path_of_a_failed_program_and_delays_its_next_run() {
        let failing = tokens("exit 7");
        assert!(!failing.is_last_valid());
        let error = failing.get_token().err().expect("it fails");
        let text = error.to_string();
        let expected = "kafka_token_command: /bin/sh did not supply a token: the program failed with exit status: 7. ";
        assert!(text.starts_with(expected), "{text}");
        let state = failing.0.state.lock().expect("lock should not be poisoned");
        let first = state.failed.as_ref().map(|(at, _)| *at);
        drop(state);
        assert_eq!(failing.get_token().err(), Some(error));
        let state = failing.0.state.lock().expect("lock should not be poisoned");
        assert_eq!(state.failed.as_ref().map(|(at, _)| *at), first);
    }
}
