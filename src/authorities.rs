//! Locates the certificate authorities that the system trusts.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::trusted_path::{self, PathError};

/// The environment variables that name OpenSSL's default certificate authorities: a file, and
/// folders separated by colons.
const VARIABLES: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// The files in which common distributions store the trusted CA certificates. These files must be
/// passed to OpenSSL, because a statically linked OpenSSL searches other locations.
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
    let are_named = VARIABLES.iter().any(|name| env::var_os(name).is_some());
    let mut bundles = BUNDLES.iter().map(Path::new);
    bundles.find(|path| !are_named && path.is_file())
}

/// The error for an environment variable that names an unsafe location.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: {}: {error}", path.display())]
pub(crate) struct LocationError {
    /// The environment variable that contains the location.
    pub variable: &'static str,
    /// The file or folder that the environment variable names.
    pub path: PathBuf,
    /// The reason why the location is unsafe.
    pub error: Box<PathError>,
}

/// Checks the locations that OpenSSL uses if [`system_bundle`] returns `None`. The result is not
/// cached: if a location is in a sticky folder and its file is removed, any user can create a new
/// file there.
///
/// # Errors
/// Returns an error if other users can write to a file, or create a file that OpenSSL would use.
pub(crate) fn check_environment() -> Result<(), LocationError> {
    check_locations(|name| env::var_os(name))
}

fn check_locations(env: impl Fn(&str) -> Option<OsString>) -> Result<(), LocationError> {
    for variable in VARIABLES {
        let value = env(variable).unwrap_or_default();
        let paths = value.as_bytes().split(|byte| match variable {
            "SSL_CERT_DIR" => *byte == b':',
            _ => false,
        });
        for path in paths.filter(|path| !path.is_empty()) {
            let path = Path::new(OsStr::from_bytes(path));
            trusted_path::check_all_if_present(path).map_err(|error| LocationError {
                variable,
                path: path.to_owned(),
                error: Box::new(error),
            })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn rejects_certificate_files_from_the_environment_if_other_users_can_write_to_them() {
        let root = tempfile::tempdir().expect("a folder");
        let [file, folder] = ["ca.pem", "certs"].map(|name| root.path().join(name));
        fs::write(&file, "").expect("a file");
        fs::create_dir(&folder).expect("a folder");
        symlink(&file, folder.join("0.0")).expect("a link");
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("permissions");
        };
        let missing = root.path().join("missing");
        let folders = env::join_paths([&missing, &folder]).expect("a list");
        let check_file =
            || check_locations(|name| (name == "SSL_CERT_FILE").then(|| file.clone().into()));
        let check_folders =
            || check_locations(|name| (name == "SSL_CERT_DIR").then(|| folders.clone()));
        mode(&file, 0o644);
        mode(&folder, 0o755);
        assert_eq!((check_file(), check_folders()), (Ok(()), Ok(())));
        mode(&file, 0o666);
        let error = check_file().expect_err("a writable file");
        assert!(error.error.is_untrusted(), "{error}");
        assert_eq!((error.variable, &error.path), ("SSL_CERT_FILE", &file));
        let error = check_folders().expect_err("a link to a writable file must be rejected");
        assert_eq!((error.variable, &error.path), ("SSL_CERT_DIR", &folder));
        mode(&file, 0o644);
        // In a sticky folder, other users could create the missing file.
        mode(root.path(), 0o1777);
        assert_eq!(check_file(), Ok(()));
        check_folders().expect_err("a missing folder");
        mode(root.path(), 0o755);
        mode(&folder, 0o1777);
        check_folders().expect_err("a writable folder");
    }
}
