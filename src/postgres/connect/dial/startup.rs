//! Turns a connected socket into a session that is ready for queries by sending the startup
//! message, authenticating, and reading the server's parameters.
//!
//! Spec: PostgreSQL 18, 54.2.1 "Start-up" and 54.3 "SASL Authentication".

use std::collections::HashMap;
use std::io;

use bytes::BytesMut;
use postgres_protocol::authentication::{md5_hash, sasl};
use postgres_protocol::message::backend::{AuthenticationSaslBody, Header, Message};
use postgres_protocol::message::frontend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_postgres::fallible_iterator::FallibleIterator;

use super::Session;
use super::error::{DialError, ServerError};
use super::scram;
use super::socket::Socket;
use super::tls;
use crate::postgres::connect::conninfo::exposure::Exposure;
use crate::postgres::connect::conninfo::{AuthMethod, ChannelBinding, Conninfo, Host, Secret};

/// Maximum length of a message during startup. PostgreSQL's messages are much shorter.
const MESSAGE_BYTES_MAX: usize = 64 * 1024;
/// Maximum total length of the server's messages during startup. All messages before ReadyForQuery
/// are kept in memory.
const STARTUP_BYTES_MAX: usize = 1024 * 1024;

/// The type of the message that a server sends if it does not support the requested protocol
/// version or options. Walpost requests version 3.0 without options, which every server supports,
/// so the message is treated as an error.
const NEGOTIATE_PROTOCOL_VERSION: u8 = b'v';

/// Maximum number of bytes to read from an error message in the format used before protocol 3.0,
/// which does not include the length of the message.
const TEXT_BYTES_MAX: usize = 1024;

/// Sends and receives protocol messages over a socket until the session is ready.
pub(crate) struct Wire<'a> {
    socket: Socket,
    buffer: BytesMut,
    received_bytes: usize,
    host: &'a str,
    exposure: Exposure,
}

impl<'a> Wire<'a> {
    /// Wraps a connected socket. `host` identifies the server in errors.
    pub(crate) fn new(socket: Socket, exposure: Exposure, host: &'a str) -> Wire<'a> {
        Wire {
            socket,
            exposure,
            buffer: BytesMut::with_capacity(8 * 1024),
            received_bytes: 0,
            host,
        }
    }

    /// Starts the session: sends the startup message with `parameters`, authenticates, and reads up
    /// to ReadyForQuery.
    pub(crate) async fn start(
        mut self,
        conninfo: &Conninfo,
        host: &Host,
        parameters: &[(&str, &str)],
    ) -> Result<(Wire<'a>, Started), DialError> {
        let own = [
            ("user", conninfo.user.as_str()),
            ("database", &conninfo.dbname),
            ("client_encoding", "UTF8"),
            ("application_name", &conninfo.application_name),
        ];
        let options = conninfo
            .options
            .as_deref()
            .map(|options| ("options", options));
        let all = own
            .into_iter()
            .chain(options)
            .chain(parameters.iter().copied());
        self.send(|buffer| frontend::startup_message(all, buffer))
            .await?;
        self.authenticate(conninfo, host).await?;
        let started = self.wait_until_ready().await?;
        Ok((self, started))
    }

    pub(crate) fn exposure(&self) -> Exposure {
        self.exposure
    }

    /// Runs a query and returns its first value, or `None` if the value is null or the result is
    /// empty.
    pub(crate) async fn query(&mut self, sql: &str) -> Result<Option<String>, DialError> {
        self.send(|buffer| frontend::query(sql, buffer)).await?;
        let mut value = None;
        loop {
            match self.next_message().await? {
                Message::DataRow(row) => {
                    let range = row.ranges().next().map_err(|error| self.protocol(error))?;
                    let bytes = range.flatten().and_then(|range| row.buffer().get(range));
                    value = bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned());
                }
                Message::RowDescription(_)
                | Message::CommandComplete(_)
                | Message::ParameterStatus(_) => {}
                Message::ReadyForQuery(_) => return Ok(value),
                _ => {
                    return Err(self.protocol("received an unexpected message in reply to a query"));
                }
            }
        }
    }

    /// Closes the session. Sends a Terminate message first, so that the server does not log a lost
    /// connection.
    pub(crate) async fn terminate(mut self) {
        // Errors are ignored, because the server may already have closed the connection.
        let terminate = |buffer: &mut BytesMut| {
            frontend::terminate(buffer);
            Ok(())
        };
        let _ = self.send(terminate).await;
        let _ = self.socket.shutdown().await;
    }

    pub(crate) fn into_session(self, started: Started) -> Session {
        Session {
            socket: self.socket,
            buffer: self.buffer,
            parameters: started.parameters,
            backend_pid: started.backend_pid,
            secret: started.secret,
            host: self.host.to_owned(),
        }
    }

    async fn authenticate(&mut self, conninfo: &Conninfo, host: &Host) -> Result<(), DialError> {
        let request = self.next_message().await?;
        // The authentication method that the server requested, and the method's name for messages.
        // The method is `None` if it is obsolete, because `require_auth` has no name for an
        // obsolete method.
        let (method, name) = match &request {
            Message::AuthenticationOk => (Some(AuthMethod::None), "no"),
            Message::AuthenticationCleartextPassword => {
                (Some(AuthMethod::Password), "cleartext password")
            }
            Message::AuthenticationMd5Password(_) => (Some(AuthMethod::Md5), "md5 password"),
            Message::AuthenticationSasl(_) => (Some(AuthMethod::ScramSha256), "SASL"),
            Message::AuthenticationGss => (Some(AuthMethod::Gss), "gss"),
            Message::AuthenticationSspi => (Some(AuthMethod::Sspi), "sspi"),
            Message::AuthenticationKerberosV5 => (None, "Kerberos V5"),
            Message::AuthenticationScmCredential => (None, "SCM credential"),
            _ => {
                return Err(self
                    .protocol("expected an authentication request, but received another message"));
            }
        };
        if method.is_some_and(|method| !conninfo.require_auth.allows(method)) {
            return Err(DialError::RequireAuth {
                host: self.host.to_owned(),
                required: conninfo.require_auth.to_string(),
                requested: name,
            });
        }
        if conninfo.channel_binding == ChannelBinding::Require
            && matches!(
                method,
                Some(AuthMethod::None | AuthMethod::Password | AuthMethod::Md5)
            )
        {
            let reason = "the server does not request SCRAM authentication";
            return Err(DialError::ChannelBinding {
                host: self.host.to_owned(),
                reason,
            });
        }
        match request {
            Message::AuthenticationOk => Ok(()),
            Message::AuthenticationSasl(body) => self.scram(conninfo, host, &body).await,
            Message::AuthenticationCleartextPassword => {
                self.check_may_send(conninfo, AuthMethod::Password)?;
                let Secret(password) = self.password(conninfo, host).await?;
                let is_wanted = conninfo.require_auth.requires(AuthMethod::Password);
                if self.exposure == Exposure::Local && self.socket.is_tcp() && !is_wanted {
                    conninfo.exposures.warn_clear_password(self.host);
                }
                self.send(|buffer| frontend::password_message(&password, buffer))
                    .await?;
                self.expect_ok().await
            }
            Message::AuthenticationMd5Password(body) => {
                self.check_may_send(conninfo, AuthMethod::Md5)?;
                let Secret(password) = self.password(conninfo, host).await?;
                let hash = md5_hash(conninfo.user.as_bytes(), &password, body.salt());
                self.send(|buffer| frontend::password_message(hash.as_bytes(), buffer))
                    .await?;
                self.expect_ok().await
            }
            _ => Err(DialError::AuthMethod {
                host: self.host.to_owned(),
                method: name.to_owned(),
            }),
        }
    }

    /// Returns an error if it is not safe to send a password, or a hash that could be used in place
    /// of a password. Sending is not safe if the server has not proven its identity and the
    /// connection uses a network or a socket that another user could have created. If
    /// `require_auth` explicitly allows the method, sending is always allowed.
    fn check_may_send(&self, conninfo: &Conninfo, method: AuthMethod) -> Result<(), DialError> {
        if !self.exposure.is_open() || conninfo.require_auth.requires(method) {
            return Ok(());
        }
        Err(DialError::Exposed {
            host: self.host.to_owned(),
            what: match method {
                AuthMethod::Password => "a cleartext password",
                _ => "an MD5 password hash",
            },
            exposure: self.exposure,
            method: method.to_string(),
        })
    }

    async fn scram(
        &mut self,
        conninfo: &Conninfo,
        host: &Host,
        offer: &AuthenticationSaslBody,
    ) -> Result<(), DialError> {
        let offered: Vec<&str> = offer
            .mechanisms()
            .collect()
            .map_err(|error| self.protocol(error))?;
        let end_point = match &self.socket {
            Socket::Tls(stream) if conninfo.channel_binding != ChannelBinding::Disable => {
                tls::server_end_point(stream.ssl())
            }
            _ => None,
        };
        let plus = offered.contains(&sasl::SCRAM_SHA_256_PLUS);
        let (mechanism, binding) = match end_point {
            Some(hash) if plus => (
                sasl::SCRAM_SHA_256_PLUS,
                sasl::ChannelBinding::tls_server_end_point(hash),
            ),
            // The SCRAM exchange also authenticates the client's channel binding flag. If an
            // attacker has removed the server's offer of channel binding, the server detects this
            // from the flag.
            Some(_) => (sasl::SCRAM_SHA_256, sasl::ChannelBinding::unrequested()),
            None => (sasl::SCRAM_SHA_256, sasl::ChannelBinding::unsupported()),
        };
        if !offered.contains(&mechanism) {
            let method = format!("SASL {}", offered.join(" or "));
            return Err(DialError::AuthMethod {
                host: self.host.to_owned(),
                method,
            });
        }
        if conninfo.channel_binding == ChannelBinding::Require
            && mechanism != sasl::SCRAM_SHA_256_PLUS
        {
            let reason = match (&self.socket, plus) {
                (Socket::Tls(_), false) => "the server does not offer SCRAM-SHA-256-PLUS",
                (Socket::Tls(_), true) => {
                    "the signature algorithm of the server's certificate does not support channel binding"
                }
                _ => "the connection does not use TLS",
            };
            return Err(DialError::ChannelBinding {
                host: self.host.to_owned(),
                reason,
            });
        }

        let Secret(password) = self.password(conninfo, host).await?;
        let mut proof = sasl::ScramSha256::new(&password, binding);
        let failed = |error: io::Error| DialError::Scram {
            host: self.host.to_owned(),
            reason: error.to_string(),
        };
        self.send(|buffer| frontend::sasl_initial_response(mechanism, proof.message(), buffer))
            .await?;
        let Message::AuthenticationSaslContinue(body) = self.next_message().await? else {
            return Err(
                self.protocol("expected AuthenticationSASLContinue, but received another message")
            );
        };
        if let Some(reason) =
            scram::check_first_message(proof.message(), body.data(), self.exposure)
        {
            return Err(failed(io::Error::other(reason)));
        }
        proof.update(body.data()).map_err(failed)?;
        self.send(|buffer| frontend::sasl_response(proof.message(), buffer))
            .await?;
        let Message::AuthenticationSaslFinal(body) = self.next_message().await? else {
            return Err(
                self.protocol("expected AuthenticationSASLFinal, but received another message")
            );
        };
        proof.finish(body.data()).map_err(failed)?;
        // If channel binding is required, the SCRAM exchange has proven the server's identity, and
        // the proof is bound to the server's certificate. If channel binding is optional, an
        // attacker on the network could have removed the server's offer of channel binding, so the
        // proof might not be bound to the certificate.
        if conninfo.channel_binding == ChannelBinding::Require {
            self.exposure = Exposure::Proven;
        }
        self.expect_ok().await
    }

    async fn password(&self, conninfo: &Conninfo, host: &Host) -> Result<Secret, DialError> {
        if let Some(command) = conninfo.password_command() {
            let (running, host) = (command.clone(), self.host.to_owned());
            let ran = tokio::task::spawn_blocking(move || running.run()).await;
            // The task fails only if it panics.
            let ran = ran.map_err(|error| self.protocol(error))?;
            return ran.map_err(|error| DialError::PasswordCommand {
                host,
                program: command.program.path().to_owned(),
                error,
            });
        }
        conninfo
            .password(host)
            .ok_or_else(|| DialError::NoPassword {
                host: self.host.to_owned(),
                user: conninfo.user.clone(),
            })
    }

    async fn expect_ok(&mut self) -> Result<(), DialError> {
        match self.next_message().await? {
            Message::AuthenticationOk => Ok(()),
            _ => Err(self.protocol("expected AuthenticationOk, but received another message")),
        }
    }

    async fn wait_until_ready(&mut self) -> Result<Started, DialError> {
        let mut started = Started {
            parameters: HashMap::new(),
            backend_pid: 0,
            secret: 0,
        };
        loop {
            match self.next_message().await? {
                Message::ParameterStatus(body) => {
                    let name = body.name().map_err(|error| self.protocol(error))?;
                    let value = body.value().map_err(|error| self.protocol(error))?;
                    started.parameters.insert(name.to_owned(), value.to_owned());
                }
                Message::BackendKeyData(body) => {
                    started.backend_pid = body.process_id();
                    started.secret = body.secret_key();
                }
                Message::ReadyForQuery(_) => return Ok(started),
                _ => {
                    return Err(
                        self.protocol("received an unexpected message before ReadyForQuery")
                    );
                }
            }
        }
    }

    async fn send(
        &mut self,
        encode: impl FnOnce(&mut BytesMut) -> io::Result<()>,
    ) -> Result<(), DialError> {
        let mut buffer = BytesMut::new();
        encode(&mut buffer).map_err(|error| self.protocol(error))?;
        let sent = match self.socket.write_all(&buffer).await {
            Ok(()) => self.socket.flush().await,
            Err(error) => Err(error),
        };
        let Err(error) = sent else { return Ok(()) };
        // A server that closes the connection has usually sent the reason first, so try to read it.
        Err(match self.next_message().await {
            Err(reason @ (DialError::Server { .. } | DialError::Tls { .. })) => reason,
            Ok(_) | Err(_) => self.broken(error),
        })
    }

    /// Returns the next message. Skips notices and returns an ErrorResponse as an error.
    async fn next_message(&mut self) -> Result<Message, DialError> {
        loop {
            match self.read().await? {
                Message::ErrorResponse(body) => {
                    let error = ServerError::parse(body.fields());
                    let error = Box::new(error.map_err(|error| self.protocol(error))?);
                    return Err(DialError::Server {
                        host: self.host.to_owned(),
                        error,
                    });
                }
                Message::NoticeResponse(body) => {
                    let notice = ServerError::parse(body.fields());
                    let notice = notice.map_err(|error| self.protocol(error))?;
                    tracing::debug!(host = self.host, %notice, "notice from the server");
                }
                message => return Ok(message),
            }
        }
    }

    async fn read(&mut self) -> Result<Message, DialError> {
        loop {
            if let Some(header) =
                Header::parse(&self.buffer).map_err(|error| self.protocol(error))?
            {
                let message_bytes = usize::try_from(header.len()).unwrap_or(usize::MAX);
                if message_bytes > MESSAGE_BYTES_MAX {
                    return Err(self.oversize(header.tag(), message_bytes).await);
                }
                if header.tag() == NEGOTIATE_PROTOCOL_VERSION {
                    let what = "received NegotiateProtocolVersion, although Walpost requested version 3.0 without protocol options";
                    return Err(self.protocol(what));
                }
                // Parse only complete messages, because the parser allocates as much memory as the
                // header specifies.
                if self.buffer.len() > message_bytes {
                    let message = Message::parse(&mut self.buffer);
                    let message = message.map_err(|error| self.protocol(error))?;
                    return message.ok_or_else(|| self.protocol("a truncated message"));
                }
                self.buffer.reserve(message_bytes + 1 - self.buffer.len());
            }
            let read = self.socket.read_buf(&mut self.buffer).await;
            let read_bytes = read.map_err(|error| self.broken(error))?;
            if read_bytes == 0 {
                let error = io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the server closed the connection",
                );
                return Err(self.broken(error));
            }
            self.received_bytes += read_bytes;
            if self.received_bytes > STARTUP_BYTES_MAX {
                let what =
                    format!("received more than {STARTUP_BYTES_MAX} bytes before ReadyForQuery");
                return Err(self.protocol(what));
            }
        }
    }

    /// Returns the error for a message that is too long. If a postmaster of version 17 or earlier
    /// fails to fork, it sends the letter E and plain text, which is the format used before
    /// protocol 3.0. The bytes of the length field then contain text.
    async fn oversize(&mut self, tag: u8, message_bytes: usize) -> DialError {
        let is_text = self.buffer[1..5]
            .iter()
            .all(|byte| byte.is_ascii_graphic() || *byte == b' ');
        if tag == b'E' && self.received_bytes == self.buffer.len() && is_text {
            // Read the text until a NUL character arrives or the server closes the connection.
            while self.buffer.len() < TEXT_BYTES_MAX && !self.buffer.contains(&0) {
                let read = self.socket.read_buf(&mut self.buffer).await;
                if !matches!(read, Ok(1..)) {
                    break;
                }
            }
            self.buffer.truncate(TEXT_BYTES_MAX);
            let text = self.buffer[1..]
                .split(|byte| *byte == 0)
                .next()
                .unwrap_or_default();
            let text = String::from_utf8_lossy(text).trim().to_owned();
            return self.broken(io::Error::other(text));
        }
        self.protocol(format!(
            "received a message of {message_bytes} bytes with tag {tag:#04x}, which is too long"
        ))
    }

    fn protocol(&self, what: impl ToString) -> DialError {
        DialError::Protocol {
            host: self.host.to_owned(),
            what: what.to_string(),
        }
    }

    fn broken(&self, source: io::Error) -> DialError {
        let host = self.host.to_owned();
        match tls::refusal(&source) {
            Some(reason) => DialError::Tls { host, reason },
            None => DialError::Io { host, source },
        }
    }
}

/// Information that the server reports at the start of a session.
pub(crate) struct Started {
    parameters: HashMap<String, String>,
    backend_pid: i32,
    secret: i32,
}

impl Started {
    /// Returns whether the server's major version may be `major` or later. Returns true if the
    /// version can't be parsed. Returns false if no version is reported: PostgreSQL always reports
    /// one, so the peer is not PostgreSQL.
    pub(crate) fn may_be_since(&self, major: u32) -> bool {
        let Some(version) = self.parameters.get("server_version") else {
            return false;
        };
        let digits = version.split(|c: char| !c.is_ascii_digit()).next();
        let found = digits.and_then(|digits| digits.parse::<u32>().ok());
        found.is_none_or(|found| found >= major)
    }
}
