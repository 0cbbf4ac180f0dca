//! Credentials for connecting to the brokers.
//!
//! A password may be rotated while clients are connected. Credentials in the configuration file are
//! therefore read again for each new client, and whenever a client fails to authenticate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdkafka::client::{Client, ClientContext};
use rdkafka::config::ClientConfig;
use tracing::warn;

use super::oauthbearer;
use super::properties::{Properties, is_secret};
use super::token::{TokenError, Tokens};
use super::token_endpoint::Endpoint;
use crate::program::Program;

/// The source of the properties that authenticate a client. Clones share their state, such as
/// whether a broker has accepted the credentials, so all clones must be used for the same brokers.
#[derive(Clone, Default)]
pub struct Credentials(Arc<Source>);

#[derive(Default)]
struct Source {
    /// Where the credentials are configured, for error messages.
    origin: String,
    read: Option<Box<Read>>,
    tokens: Option<Tokens>,
    was_accepted: AtomicBool,
}

type Read = dyn Fn() -> Result<Properties, String> + Send + Sync;

/// The values of `sasl.username` and `sasl.password`.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) username: String,
    pub(super) password: String,
}

impl Login {
    pub(super) fn for_config(config: &ClientConfig) -> Option<Self> {
        Some(Self {
            username: config.get("sasl.username")?.to_owned(),
            password: config.get("sasl.password")?.to_owned(),
        })
    }
}

impl Credentials {
    /// Creates credentials that never change. `origin` describes where the password is configured,
    /// for use in messages.
    #[must_use]
    pub fn fixed(origin: String) -> Self {
        Self(Arc::new(Source {
            origin,
            ..Source::default()
        }))
    }

    /// Creates credentials that can be read again by calling `read`. Only properties for which
    /// [`Credentials::have`] returns true are updated. `origin` describes where the password is
    /// configured, for use in messages.
    #[must_use]
    pub fn kept(
        origin: String,
        read: impl Fn() -> Result<Properties, String> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Source {
            origin,
            read: Some(Box::new(read)),
            ..Source::default()
        }))
    }

    /// Creates credentials that obtain SASL/OAUTHBEARER tokens from the output of a program.
    /// `origin` describes where the program is configured, for use in messages.
    pub(crate) fn from_program(origin: String, program: Program) -> Self {
        Self::from_tokens(origin, Tokens::from_program(program))
    }

    /// Creates credentials that request SASL/OAUTHBEARER tokens from an endpoint.
    pub(crate) fn from_endpoint(endpoint: Endpoint) -> Self {
        let origin = format!("the token endpoint {}", endpoint.url());
        Self::from_tokens(origin, Tokens::from_endpoint(endpoint))
    }

    fn from_tokens(origin: String, tokens: Tokens) -> Self {
        Self(Arc::new(Source {
            origin,
            tokens: Some(tokens),
            ..Source::default()
        }))
    }

    /// Returns a warning, including the remedy, if the connection to the token source can be
    /// intercepted.
    #[must_use]
    pub(crate) fn warning(&self) -> Option<String> {
        self.tokens()?.endpoint()?.warning()
    }

    /// Returns the source of tokens, if tokens are used.
    pub(super) fn tokens(&self) -> Option<&Tokens> {
        self.0.tokens.as_ref()
    }

    /// Obtains a token and passes the token to a client whose event queue is not polled. librdkafka
    /// can't request a new token for such a client, so this method must be called regularly if the
    /// client is long-lived. Blocks until the token is obtained.
    ///
    /// # Errors
    /// Returns an error if no token could be obtained, or if librdkafka does not accept the token.
    pub(super) fn set_token<C: ClientContext>(&self, client: &Client<C>) -> Result<(), TokenError> {
        let Some(tokens) = self.tokens() else {
            return Ok(());
        };
        let token = tokens.get_token()?;
        match oauthbearer::set_token(client, &token) {
            true => Ok(()),
            false => Err(tokens.discard_unusable(&token)),
        }
    }

    /// Sets a token like [`Self::set_token`], but logs errors instead of returning them. Without a
    /// token, the client can't connect to any broker, and its next request fails.
    pub(super) fn set_token_or_warn<C: ClientContext>(&self, client: &Client<C>) {
        if let Err(error) = self.set_token(client) {
            warn!("{error}");
        }
    }

    /// Returns whether the property is part of the credentials.
    #[must_use]
    pub fn have(property: &str) -> bool {
        property == "sasl.username" || is_secret(property)
    }

    /// Returns where the credentials are configured, for use in messages.
    pub(super) fn origin(&self) -> &str {
        &self.0.origin
    }

    /// Marks the credentials as accepted by a broker.
    pub(super) fn record_accepted(&self) {
        self.0.was_accepted.store(true, Ordering::Relaxed);
    }

    /// Returns whether a broker has accepted the credentials since this process started.
    pub(super) fn were_accepted(&self) -> bool {
        self.0.was_accepted.load(Ordering::Relaxed)
    }

    /// Reads the credentials again and sets them in a client's configuration.
    pub(super) fn renew(&self, config: &mut ClientConfig) {
        let Some(read) = &self.0.read else { return };
        match read() {
            Ok(now) => {
                for (name, value) in now.into_iter().filter(|(name, _)| Self::have(name)) {
                    config.set(name, value);
                }
            }
            Err(reason) => warn!(
                "failed to reread {}; using the previous password: {reason}",
                self.0.origin
            ),
        }
    }
}
