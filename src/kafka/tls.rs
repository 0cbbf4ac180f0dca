//! TLS connections that Walpost establishes without librdkafka. Walpost connects to token
//! endpoints, and to a broker if librdkafka rejected the broker's certificate, to determine the
//! reason.

use std::path::Path;

use openssl::error::ErrorStack;
use openssl::ssl::{SslConnector, SslConnectorBuilder, SslMethod};
use openssl::x509::X509;
use openssl::x509::store::X509StoreBuilder;

use super::properties::is_probe;
use crate::authorities;
use crate::trusted_path;

/// The certificate authorities to trust.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Authorities {
    /// The authorities that the operating system trusts.
    System,
    /// A PEM file, or a folder prepared with OpenSSL's `c_rehash`, that contains the authorities.
    Location(String),
    /// The authorities' certificates in PEM format.
    Pem(String),
}

impl Authorities {
    /// Interprets the value of `ssl.ca.location` or `https.ca.location` in the same way as
    /// librdkafka.
    pub(super) fn from_location(location: String) -> Self {
        match location.is_empty() || is_probe(Path::new(&location)) {
            true => Self::System,
            false => Self::Location(location),
        }
    }

    /// Returns a connection builder that trusts only these authorities, and that verifies
    /// certificates and host names.
    ///
    /// # Errors
    /// Returns an error if the certificates can't be read, or if another user can write to their
    /// file. The message names the file.
    pub(super) fn connector(&self) -> Result<SslConnectorBuilder, String> {
        let internal = |error: ErrorStack| error.to_string();
        let mut builder = SslConnector::builder(SslMethod::tls_client()).map_err(internal)?;
        let path = match self {
            Self::System => authorities::system_bundle(),
            Self::Location(location) => Some(Path::new(location)),
            Self::Pem(_) => None,
        };
        if path.is_none() && *self == Self::System {
            authorities::check_environment().map_err(|error| error.to_string())?;
        } else {
            // By default, the builder also trusts the authorities in OpenSSL's default locations.
            let none = X509StoreBuilder::new().map_err(internal)?;
            builder.set_cert_store(none.build());
        }
        if let Some(path) = path {
            load(&mut builder, path).map_err(|reason| format!("{}: {reason}", path.display()))?;
        }
        if let Self::Pem(pem) = self {
            for certificate in X509::stack_from_pem(pem.as_bytes()).map_err(internal)? {
                let store = builder.cert_store_mut();
                store.add_cert(certificate).map_err(internal)?;
            }
        }
        Ok(builder)
    }
}

fn load(builder: &mut SslConnectorBuilder, path: &Path) -> Result<(), String> {
    trusted_path::check_all(path).map_err(|error| error.to_string())?;
    let loaded = match path.is_dir() {
        true => builder.load_verify_locations(None, Some(path)),
        false => builder.load_verify_locations(Some(path), None),
    };
    loaded.map_err(|error| error.to_string())
}
