//! Locates the certificate authorities that the system trusts.

use std::env;
use std::path::Path;

/// The files in which common distributions store the trusted CA certificates. They must be passed
/// to OpenSSL, because a statically linked OpenSSL searches other locations.
const BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Returns the PEM file that contains the trusted CA certificates. Returns `None` if OpenSSL's
/// defaults should be used, because the environment specifies other locations (`SSL_CERT_FILE`,
/// `SSL_CERT_DIR`) or none of the files exists.
#[must_use]
pub(crate) fn system_bundle() -> Option<&'static Path> {
    let are_named = ["SSL_CERT_FILE", "SSL_CERT_DIR"]
        .iter()
        .any(|name| env::var_os(name).is_some());
    let mut bundles = BUNDLES.iter().map(Path::new);
    bundles.find(|path| !are_named && path.is_file())
}
