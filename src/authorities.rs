//! Locates the certificate authorities that the system trusts. Imports no other module.

use std::env;
use std::path::Path;

/// The locations at which common distributions store the authorities in one file. An OpenSSL that
/// is built into the program searches other locations.
const BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Returns the PEM file with the certificate authorities, or `None` if OpenSSL's defaults should be
/// used: either the environment specifies others (`SSL_CERT_FILE`, `SSL_CERT_DIR`), or there is no
/// such file.
#[must_use]
pub(crate) fn system_bundle() -> Option<&'static Path> {
    let are_named = ["SSL_CERT_FILE", "SSL_CERT_DIR"]
        .iter()
        .any(|name| env::var_os(name).is_some());
    let mut bundles = BUNDLES.iter().map(Path::new);
    bundles.find(|path| !are_named && path.is_file())
}
