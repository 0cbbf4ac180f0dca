//! Requests TLS, performs the handshake, and determines which certificates to trust.
//!
//! Spec: PostgreSQL 18, 32.19 "SSL Support" and 54.2.9 "SSL Session Encryption".

use std::io;
use std::path::Path;
use std::pin::Pin;

use bytes::BytesMut;
use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::PKey;
use openssl::ssl::{
    ConnectConfiguration, SslConnector, SslConnectorBuilder, SslFiletype, SslMethod, SslOptions,
    SslRef, SslVerifyMode, SslVersion,
};
use openssl::x509::store::{X509Lookup, X509StoreBuilder};
use openssl::x509::verify::X509VerifyFlags;
use openssl::x509::{X509, X509VerifyResult};
use postgres_protocol::message::frontend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_openssl::SslStream;

use super::error::DialError;
use super::socket::Socket;
use crate::authorities;
use crate::postgres::connect::conninfo::{RootCert, SslMode, Tls, TlsFile, TlsVersion};
use crate::trusted_path::{self, PathError};

/// Requests TLS from the server and performs the handshake. With `verify-full`, the certificate
/// must match `name`. `host` identifies the server in errors.
///
/// # Errors
/// Returns [`DialError::TlsRefused`] if TLS is required but not supported, or else
/// [`DialError::TlsFile`], [`DialError::UntrustedFile`], [`DialError::Tls`],
/// [`DialError::Protocol`] or [`DialError::Io`].
pub(crate) async fn negotiate(
    mut stream: TcpStream,
    tls: &Tls,
    name: &str,
    host: &str,
) -> Result<Socket, DialError> {
    if tls.mode == SslMode::Disable {
        return Ok(Socket::Tcp(stream));
    }
    // Files are read before anything is sent to the server, so that an unreadable file is reported
    // first.
    let configuration = configuration(tls, host)?;

    let io = |source| DialError::Io {
        host: host.to_owned(),
        source,
    };
    let mut request = BytesMut::new();
    frontend::ssl_request(&mut request);
    stream.write_all(&request).await.map_err(io)?;
    // The buffer has space for one byte more than a valid reply. If there are further bytes, an
    // attacker may have injected them so that they are treated as part of the encrypted session
    // (CVE-2021-23222).
    let mut answer = [0; 2];
    let answer_len = stream.read(&mut answer).await.map_err(io)?;
    match answer[..answer_len] {
        [b'S'] => {}
        [b'N'] if tls.mode == SslMode::Prefer => return Ok(Socket::Tcp(stream)),
        [b'N'] => {
            return Err(DialError::TlsRefused {
                host: host.to_owned(),
                mode: tls.mode,
            });
        }
        // The error's text is not printed, because anyone on the network could have written it
        // (CVE-2024-10977).
        [b'E', ..] => {
            return Err(io(io::Error::other(
                "the server replied to SSLRequest with an error",
            )));
        }
        [] => return Err(io(io::ErrorKind::UnexpectedEof.into())),
        [b'S' | b'N', _] => {
            let what = "received unencrypted bytes after the reply to SSLRequest".to_owned();
            return Err(DialError::Protocol {
                host: host.to_owned(),
                what,
            });
        }
        _ => {
            let what = format!(
                "received unexpected byte {:#04x} in reply to SSLRequest",
                answer[0]
            );
            return Err(DialError::Protocol {
                host: host.to_owned(),
                what,
            });
        }
    }

    let failed = |reason: String| DialError::Tls {
        host: host.to_owned(),
        reason,
    };
    let ssl = configuration
        .into_ssl(name)
        .map_err(|error| failed(reasons(&error)))?;
    let mut stream = SslStream::new(ssl, stream).map_err(|error| failed(reasons(&error)))?;
    match Pin::new(&mut stream).connect().await {
        Ok(()) => Ok(Socket::Tls(stream)),
        Err(error) => {
            let verified = stream.ssl().verify_result();
            // OpenSSL reports a verification result even if verification is disabled, but in that
            // case the result is not the cause of the failure.
            let verifies = stream.ssl().verify_mode() != SslVerifyMode::NONE;
            if verifies && verified != X509VerifyResult::OK {
                return Err(failed(format!(
                    "the server's certificate is not accepted: {} (sslmode={}, host {name})",
                    verified.error_string(),
                    tls.mode,
                )));
            }
            Err(match error.ssl_error() {
                Some(stack) => failed(reasons(stack)),
                None => io(error
                    .into_io_error()
                    .unwrap_or_else(|_| io::ErrorKind::UnexpectedEof.into())),
            })
        }
    }
}

/// Returns the reason if an I/O error was caused by TLS rather than by the network. With TLS 1.3, a
/// rejected client certificate causes such an error in the first read after the handshake.
pub(crate) fn refusal(error: &io::Error) -> Option<String> {
    let error = error.get_ref()?.downcast_ref::<openssl::ssl::Error>()?;
    error.ssl_error().map(reasons)
}

/// Returns the data for `tls-server-end-point` channel binding, which is a hash of the server's
/// certificate.
///
/// Returns `None` if the certificate's signature algorithm does not identify a hash function, as
/// with Ed25519 and RSA-PSS. Spec: RFC 5929, 4.1.
pub(crate) fn server_end_point(ssl: &SslRef) -> Option<Vec<u8>> {
    let certificate = ssl.peer_certificate()?;
    let algorithm = certificate.signature_algorithm().object().nid();
    let digest = match algorithm.signature_algorithms()?.digest {
        Nid::MD5 | Nid::SHA1 => MessageDigest::sha256(),
        nid => MessageDigest::from_nid(nid)?,
    };
    certificate.digest(digest).ok().map(|hash| hash.to_vec())
}

fn reasons(stack: &ErrorStack) -> String {
    let mut reasons = Vec::new();
    for reason in stack.errors().iter().filter_map(|error| error.reason()) {
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    if reasons.is_empty() {
        stack.to_string()
    } else {
        reasons.join(", ")
    }
}

/// Converts a [`PathError`] about the file that `parameter` names.
fn path_error(parameter: &'static str, path: &Path, error: PathError) -> DialError {
    match error.is_untrusted() {
        true => DialError::UntrustedFile {
            parameter,
            path: path.to_owned(),
            error: error.into(),
        },
        false => file_error(parameter, path, error),
    }
}

fn file_error(parameter: &'static str, path: &Path, reason: impl ToString) -> DialError {
    DialError::TlsFile {
        parameter,
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

fn configuration(tls: &Tls, host: &str) -> Result<ConnectConfiguration, DialError> {
    let internal = |error: ErrorStack| DialError::Tls {
        host: host.to_owned(),
        reason: reasons(&error),
    };
    let mut builder = SslConnector::builder(SslMethod::tls_client()).map_err(internal)?;
    builder
        .set_min_proto_version(Some(version(tls.version_min)))
        .map_err(internal)?;
    builder
        .set_max_proto_version(tls.version_max.map(version))
        .map_err(internal)?;
    // A missing close_notify is treated as an ordinary end of the stream. This is safe, because
    // PostgreSQL's messages contain their length, so truncation is detected.
    builder.set_options(SslOptions::IGNORE_UNEXPECTED_EOF);
    // Reading ahead reduces the number of system calls from two per TLS record to one per read.
    builder.set_read_ahead(true);

    // The builder's default store is not used, because it trusts the system's authorities.
    let mut store = X509StoreBuilder::new().map_err(internal)?;
    let verify = add_authorities(tls, &mut store)?;
    if let (true, Some(path)) = (verify, tls.revoked.to_read()) {
        trusted_path::check(path).map_err(|error| path_error("sslcrl", path, error))?;
        let lists = store.add_lookup(X509Lookup::file()).map_err(internal)?;
        lists
            .load_crl_file(path, SslFiletype::PEM)
            .map_err(|error| file_error("sslcrl", path, reasons(&error)))?;
        let flags = X509VerifyFlags::CRL_CHECK | X509VerifyFlags::CRL_CHECK_ALL;
        store.set_flags(flags).map_err(internal)?;
    }
    builder.set_cert_store(store.build());
    builder.set_verify(if verify {
        SslVerifyMode::PEER
    } else {
        SslVerifyMode::NONE
    });
    client_certificate(tls, &mut builder)?;

    let mut configuration = builder.build().configure().map_err(internal)?;
    configuration.set_use_server_name_indication(tls.server_name_indication);
    configuration.set_verify_hostname(verify && tls.mode == SslMode::VerifyFull);
    Ok(configuration)
}

fn version(version: TlsVersion) -> SslVersion {
    match version {
        TlsVersion::V1_2 => SslVersion::TLS1_2,
        TlsVersion::V1_3 => SslVersion::TLS1_3,
    }
}

/// Adds the trusted certificate authorities to the store. Returns false if the server's certificate
/// should not be verified.
fn add_authorities(tls: &Tls, store: &mut X509StoreBuilder) -> Result<bool, DialError> {
    let file = match (&tls.root, tls.mode) {
        (_, SslMode::Disable | SslMode::Prefer) => return Ok(false),
        (RootCert::System, _) => return add_system_authorities(store).map(|()| true),
        (RootCert::File(file), _) => file,
    };
    match (file.to_read(), file, tls.mode) {
        (Some(path), _, _) => add_certificates(store, "sslrootcert", path).map(|()| true),
        (None, _, SslMode::Require) => Ok(false),
        (None, TlsFile::Named(path) | TlsFile::Default(path), mode) => {
            Err(missing_root(path, mode))
        }
        (None, TlsFile::Absent, mode) => {
            Err(missing_root(Path::new("~/.postgresql/root.crt"), mode))
        }
    }
}

fn missing_root(path: &Path, mode: SslMode) -> DialError {
    let reason = format!(
        "no such file. sslmode={mode} requires the certificate of the authority that signed the \
         server's certificate: store it in that file, or set sslrootcert=FILE or sslrootcert=system"
    );
    file_error("sslrootcert", path, reason)
}

fn add_system_authorities(store: &mut X509StoreBuilder) -> Result<(), DialError> {
    match authorities::system_bundle() {
        Some(path) => add_certificates(store, "sslrootcert=system", path),
        None => {
            authorities::check_environment()
                .map_err(|found| path_error(found.variable, &found.path, *found.error))?;
            store.set_default_paths().map_err(|error| {
                file_error(
                    "sslrootcert=system",
                    Path::new("SSL_CERT_FILE"),
                    reasons(&error),
                )
            })
        }
    }
}

fn add_certificates(
    store: &mut X509StoreBuilder,
    parameter: &'static str,
    path: &Path,
) -> Result<(), DialError> {
    let pem = trusted_path::read(path).map_err(|error| path_error(parameter, path, error))?;
    let unusable = |error: ErrorStack| file_error(parameter, path, reasons(&error));
    let certificates = X509::stack_from_pem(&pem).map_err(unusable)?;
    if certificates.is_empty() {
        return Err(file_error(
            parameter,
            path,
            "the file does not contain a certificate in PEM format",
        ));
    }
    certificates
        .into_iter()
        .try_for_each(|one| store.add_cert(one))
        .map_err(unusable)
}

fn client_certificate(tls: &Tls, builder: &mut SslConnectorBuilder) -> Result<(), DialError> {
    let Some(certificate) = tls.certificate.to_read() else {
        return Ok(());
    };
    trusted_path::check(certificate).map_err(|error| path_error("sslcert", certificate, error))?;
    builder
        .set_certificate_chain_file(certificate)
        .map_err(|error| file_error("sslcert", certificate, reasons(&error)))?;

    let Some(key) = tls.key.to_read() else {
        return Err(file_error(
            "sslcert",
            certificate,
            "no private key is configured for the certificate: set sslkey",
        ));
    };
    let pem = read_key(key).map_err(|error| path_error("sslkey", key, error))?;
    // If no passphrase is configured, pass an empty one so that OpenSSL does not prompt for it on
    // the terminal.
    let passphrase = tls
        .key_password
        .as_ref()
        .map_or(&b""[..], |secret| &secret.0);
    let private = PKey::private_key_from_pem_passphrase(&pem, passphrase).map_err(|error| {
        let reason = format!(
            "failed to read the key: {} (to decrypt it, set sslpassword)",
            reasons(&error)
        );
        file_error("sslkey", key, reason)
    })?;
    builder
        .set_private_key(&private)
        .and_then(|()| builder.check_private_key())
        .map_err(|error| file_error("sslkey", key, reasons(&error)))
}

/// Reads a private key, which other users must not be able to read. As in libpq, the group of a key
/// that root owns is allowed to read the key.
fn read_key(path: &Path) -> Result<Vec<u8>, PathError> {
    let file = trusted_path::open(path)?;
    let forbidden = if file.owner() == 0 { 0o037 } else { 0o077 };
    match file.mode() & forbidden {
        0 => file.read(),
        _ => Err(io::Error::other(
            "group or other users can access the file; run chmod 0600 on it",
        )
        .into()),
    }
}
