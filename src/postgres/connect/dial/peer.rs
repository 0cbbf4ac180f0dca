//! Determines whether the process that listens on a Unix-domain socket can be trusted to be
//! PostgreSQL.
//!
//! Anyone who can create files in the socket's directory can bind the socket while PostgreSQL is
//! down, without authenticating. The kernel reports which user owns the listening process. Without
//! `requirepeer`, that user is trusted if it is root, Walpost's own user, or the owner of the
//! directory, provided that no other user could have created that directory. In a directory in
//! which only root and Walpost's own user can create files, any user is trusted.
//!
//! Spec: PostgreSQL 18, 32.1.2 `requirepeer`; unix(7), SO_PEERCRED.

use std::path::Path;

use rustix::process::geteuid;
use tokio::net::UnixStream;

use super::error::DialError;
use crate::postgres::connect::conninfo::exposure::Exposure;
use crate::trusted_path;

/// The ID that the kernel reports for users without an ID in this user namespace, for example in a
/// rootless container.
const OVERFLOW_UID: u32 = 65534;

/// The file in which user names are looked up.
const PASSWD_FILE: &str = "/etc/passwd";

/// Examines the peer of a connected socket in the directory `directory`, or of an abstract socket
/// if `directory` starts with `@`.
///
/// # Errors
/// Returns an error if `required`, the value of `requirepeer`, is another user or a user that does
/// not exist.
pub(super) fn examine(
    stream: &UnixStream,
    directory: &str,
    required: Option<&str>,
    host: &str,
) -> Result<Exposure, DialError> {
    let uid = stream.peer_cred().ok().map(|peer| peer.uid());
    let Some(required) = required else {
        return Ok(match is_trusted(uid, directory) {
            true => Exposure::Local,
            false => Exposure::OtherUser { uid },
        });
    };
    let expected = user_id(required).ok_or_else(|| DialError::UnknownPeer {
        host: host.to_owned(),
        required: required.to_owned(),
    })?;
    match uid == Some(expected) {
        true => Ok(Exposure::Local),
        false => Err(DialError::OtherPeer {
            host: host.to_owned(),
            required: required.to_owned(),
            found: uid.map_or_else(|| "unknown".to_owned(), |uid| uid.to_string()),
        }),
    }
}

fn is_trusted(uid: Option<u32>, directory: &str) -> bool {
    let named = uid.filter(|uid| *uid != OVERFLOW_UID);
    if named.is_some_and(|uid| uid == 0 || uid == geteuid().as_raw()) {
        return true;
    }
    if directory.starts_with('@') {
        return false;
    }
    let directory = Path::new(directory);
    let is_owner =
        || trusted_path::socket_folder_owner(directory).is_ok_and(|owner| named == Some(owner));
    is_owner() || trusted_path::check_private_folder(directory).is_ok()
}

/// Returns the ID of a user of this machine. `name` may be a numeric ID, because users of other
/// containers don't have names in this container.
fn user_id(name: &str) -> Option<u32> {
    let users = trusted_path::read(Path::new(PASSWD_FILE)).unwrap_or_default();
    find_user(&String::from_utf8_lossy(&users), name).or_else(|| name.parse().ok())
}

/// Returns the ID of a user in the text of a passwd(5) file.
fn find_user(users: &str, name: &str) -> Option<u32> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_users_by_name_or_id() {
        let users =
            "root:x:0:0:root:/root:/bin/sh\npostgres:x:103:109::/var/lib/postgresql:\nbroken:x\n";
        assert_eq!(find_user(users, "postgres"), Some(103));
        for name in ["postgre", "x", "103", "broken", ""] {
            assert_eq!(find_user(users, name), None, "{name}");
        }
        assert_eq!(user_id("root"), Some(0));
        assert_eq!(user_id("4294967294"), Some(4_294_967_294));
        assert_eq!(user_id("no user of this machine"), None);
    }

    #[test]
    fn trusts_only_users_that_could_legitimately_own_the_socket() {
        let own = geteuid().as_raw();
        let shared = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(
            shared.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o1777),
        )
        .expect("a mode");
        let private = tempfile::tempdir().expect("a directory");
        let [shared, private] =
            [&shared, &private].map(|directory| directory.path().to_str().expect("UTF-8"));
        let other = own + 7;
        for (uid, directory, expected) in [
            (Some(0), shared, true),
            (Some(own), shared, true),
            (Some(other), shared, false),
            (None, shared, false),
            (Some(OVERFLOW_UID), shared, false),
            (Some(0), "@walpost", true),
            (Some(own), "@walpost", true),
            (Some(other), "@walpost", false),
            (Some(other), private, true),
            (Some(other), "/no directory", false),
        ] {
            assert_eq!(
                is_trusted(uid, directory),
                expected,
                "{uid:?} in {directory}"
            );
        }
    }
}
