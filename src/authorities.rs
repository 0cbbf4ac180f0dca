//! The certificate authorities that this machine trusts. Imports nothing of ours.

use std::env;
use std::path::Path;

/// Where the usual systems keep them in one file; an OpenSSL that was built into the program looks elsewhere.
const BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The file that has them in PEM form; none where OpenSSL's own defaults are to be used, as the environment names others
/// (`SSL_CERT_FILE`, `SSL_CERT_DIR`) or there is no such file.
#[must_use]
pub(crate) fn of_the_system() -> Option<&'static Path> {
    let are_named = ["SSL_CERT_FILE", "SSL_CERT_DIR"]
        .iter()
        .any(|name| env::var_os(name).is_some());
    let mut bundles = BUNDLES.iter().map(Path::new);
    bundles.find(|path| !are_named && path.is_file())
}
