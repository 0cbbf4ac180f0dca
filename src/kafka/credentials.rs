//! Who we are to the brokers. A password may be rotated while clients are at work: what the configuration file
//! says of it is read again for each client, and for one that is refused.

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

/// Where the properties come from that prove who we are. Clones are about the same brokers.
#[derive(Clone, Default)]
pub struct Credentials(Arc<Source>);

#[derive(Default)]
struct Source {
    /// For a person who has to change the password there.
    origin: String,
    read: Option<Box<Read>>,
    tokens: Option<Tokens>,
    was_accepted: AtomicBool,
}

type Read = dyn Fn() -> Result<Properties, String> + Send + Sync;

/// `sasl.username` and `sasl.password`.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) username: String,
    pub(super) password: String,
}

impl Login {
    pub(super) fn of(config: &ClientConfig) -> Option<Self> {
        Some(Self {
            username: config.get("sasl.username")?.to_owned(),
            password: config.get("sasl.password")?.to_owned(),
        })
    }
}

impl Credentials {
    /// Those that never change; `origin` says for a person where the password is.
    #[must_use]
    pub fn fixed(origin: String) -> Self {
        Self(Arc::new(Source {
            origin,
            ..Source::default()
        }))
    }

    /// Those that `read` gives. Only properties that [`Credentials::have`] are read again.
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

    /// Tokens for SASL/OAUTHBEARER, which the program prints; `origin` says for a person where it is named.
    pub(crate) fn of_program(origin: String, program: Program) -> Self {
        Self::of_tokens(origin, Tokens::printed_by(program))
    }

    /// Tokens for SASL/OAUTHBEARER that are fetched from there.
    pub(crate) fn of_endpoint(endpoint: Endpoint) -> Self {
        let origin = format!("the token endpoint {}", endpoint.url());
        Self::of_tokens(origin, Tokens::fetched_from(endpoint))
    }

    fn of_tokens(origin: String, tokens: Tokens) -> Self {
        Self(Arc::new(Source {
            origin,
            tokens: Some(tokens),
            ..Source::default()
        }))
    }

    /// What they leave open to those who share the network with where they come from, with its remedy.
    #[must_use]
    pub(crate) fn warning(&self) -> Option<String> {
        self.tokens()?.endpoint()?.warning()
    }

    /// Where tokens come from, if there are any.
    pub(super) fn tokens(&self) -> Option<&Tokens> {
        self.0.tokens.as_ref()
    }

    /// Gives a client that nobody hears a token. One that is in use for longer needs another one then. Blocks while the
    /// program runs that prints it.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn equip<C: ClientContext>(&self, client: &Client<C>) -> Result<(), TokenError> {
        let Some(tokens) = self.tokens() else {
            return Ok(());
        };
        let token = tokens.get()?;
        match oauthbearer::set_token(client, &token) {
            true => Ok(()),
            false => Err(tokens.discard_unusable(&token)),
        }
    }

    /// As [`Self::equip`], where a client without a token finds no broker, which is told of by who asks it.
    pub(super) fn equip_or_warn<C: ClientContext>(&self, client: &Client<C>) {
        if let Err(error) = self.equip(client) {
            warn!("{error}");
        }
    }

    /// Whether the property is a part of them.
    #[must_use]
    pub fn have(property: &str) -> bool {
        property == "sasl.username" || is_secret(property)
    }

    /// Where the password comes from, for a person.
    pub(super) fn origin(&self) -> &str {
        &self.0.origin
    }

    /// A broker has accepted who we are.
    pub(super) fn accepted(&self) {
        self.0.was_accepted.store(true, Ordering::Relaxed);
    }

    /// Whether a broker has ever accepted who we are, in this process.
    pub(super) fn were_accepted(&self) -> bool {
        self.0.was_accepted.load(Ordering::Relaxed)
    }

    /// Puts what they are by now into the configuration of a client.
    pub(super) fn renew(&self, config: &mut ClientConfig) {
        let Some(read) = &self.0.read else { return };
        match read() {
            Ok(now) => {
                for (name, value) in now.into_iter().filter(|(name, _)| Self::have(name)) {
                    config.set(name, value);
                }
            }
            Err(reason) => warn!(
                "{} can't be read again, so the previous password is used: {reason}",
                self.0.origin
            ),
        }
    }
}
