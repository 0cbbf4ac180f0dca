//! Looks up passwords in the password file, which is `~/.pgpass` or the file that `passfile` names.
//!
//! Spec: PostgreSQL 18, 32.16 "The Password File".

use std::io;
use std::path::Path;

use crate::trusted_path::{self, PathError};

/// The values that a line in the file must match, in the order of the line's fields.
pub(crate) struct PassfileQuery<'a> {
    pub(crate) host: &'a str,
    pub(crate) port: u16,
    pub(crate) dbname: &'a str,
    pub(crate) user: &'a str,
}

/// Returns the password from the first matching line, or `None` if no line matches or the file does
/// not exist. The file is ignored, and a warning is logged, if other users can read it or could
/// have written it, or if it is not a regular file.
pub(crate) fn find_password(path: &Path, wanted: &PassfileQuery<'_>) -> Option<Vec<u8>> {
    match read_private(path) {
        Ok(bytes) => find_in(&bytes, wanted),
        Err(error) if error.is_not_found() => None,
        Err(error) => {
            tracing::warn!(file = %path.display(), %error, "password file ignored");
            None
        }
    }
}

fn read_private(path: &Path) -> Result<Vec<u8>, PathError> {
    let file = trusted_path::open(path)?;
    match file.mode() & 0o077 {
        0 => file.read(),
        _ => Err(io::Error::other(
            "group or other users can access the file; run chmod 0600 on it",
        )
        .into()),
    }
}

fn find_in(file: &[u8], wanted: &PassfileQuery<'_>) -> Option<Vec<u8>> {
    let port = wanted.port.to_string();
    let wanted = [wanted.host, &port, wanted.dbname, wanted.user];
    file.split(|byte| *byte == b'\n')
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
        .filter(|line| !line.starts_with(b"#"))
        .find_map(|line| {
            let mut rest = line;
            for wanted in wanted {
                let (raw, value, after) = field(rest);
                if raw != b"*" && value != wanted.as_bytes() {
                    return None;
                }
                rest = after?;
            }
            let (_, password, _) = field(rest);
            (!password.is_empty()).then_some(password)
        })
}

/// Returns the first field of a line as written, the same field unescaped, and the rest of the line
/// after the field's colon.
fn field(line: &[u8]) -> (&[u8], Vec<u8>, Option<&[u8]>) {
    let mut value = Vec::new();
    let mut at = 0;
    while let Some(&byte) = line.get(at) {
        match (byte, line.get(at + 1)) {
            (b':', _) => return (&line[..at], value, Some(&line[at + 1..])),
            (b'\\', Some(&escaped)) => {
                value.push(escaped);
                at += 2;
            }
            _ => {
                value.push(byte);
                at += 1;
            }
        }
    }
    (line, value, None)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const DB1: PassfileQuery<'_> = PassfileQuery {
        host: "db1",
        port: 5432,
        dbname: "shop",
        user: "walpost",
    };

    #[test]
    fn first_matching_password_file_line_supplies_the_password() {
        for (file, expected) in [
            ("db1:5432:shop:walpost:one", Some("one")),
            (
                "db2:5432:shop:walpost:two\ndb1:5432:shop:walpost:one\n",
                Some("one"),
            ),
            ("*:*:*:*:any\ndb1:5432:shop:walpost:one", Some("any")),
            ("*:5433:*:*:no\n*:*:shop:*:yes\r\n", Some("yes")),
            ("# db1:5432:shop:walpost:comment\n", None),
            ("db1:5432:shop:walpost:a\\:b\\\\c", Some("a:b\\c")),
            ("db1:5432:shop:walpost:a:ignored", Some("a")),
            ("d\\b1:5432:shop:walpost:escaped", Some("escaped")),
            ("\\*:5432:shop:walpost:literal", None),
            ("db1:5432:shop:walpost:", None),
            ("db1:5432:shop:walpost", None),
            ("db1:5432", None),
            ("", None),
        ] {
            let found = find_in(file.as_bytes(), &DB1);
            assert_eq!(found.as_deref(), expected.map(str::as_bytes), "{file:?}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn ignores_a_password_file_that_other_users_can_read() {
        use std::os::unix::fs::PermissionsExt;

        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "*:*:*:*:secret").unwrap();
        let with_mode = |mode| {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(file.path(), permissions).unwrap();
            find_password(file.path(), &DB1)
        };
        assert_eq!(with_mode(0o600).as_deref(), Some(&b"secret"[..]));
        assert_eq!(with_mode(0o640), None);
        assert_eq!(with_mode(0o604), None);
    }

    #[test]
    fn returns_no_password_if_the_file_is_missing_or_a_directory() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(find_password(folder.path(), &DB1), None);
        assert_eq!(find_password(&folder.path().join("none"), &DB1), None);
    }
}
