//! Determines whether the process that listens on a Unix-domain socket can be assumed to be
//! PostgreSQL.
//!
//! While PostgreSQL is down, anyone who can create files in the socket's directory can create the
//! socket and impersonate the server. The kernel reports which user owns the listening process. If
//! `requirepeer` is not set, that user is trusted if it is root or Walpost's own user. The
//! directory's owner is also trusted, provided that no other user could have created the directory.
//! If only root and Walpost's own user can create files in the directory, any user is trusted.
//!
//! Spec: PostgreSQL 18, 32.1.2 `requirepeer`; unix(7), SO_PEERCRED.

use std::path::Path;

use rustix::process::geteuid;
use tokio::net::UnixStream;

use super::error::DialError;
use crate::postgres::connect::conninfo::exposure::Exposure;
use crate::trusted_path;

/// The ID that the kernel reports for users that have no ID in this user namespace, for example in
/// a rootless container.
const OVERFLOW_UID: u32 = 65534;

/// The file in which user names are looked up.
const PASSWD_FILE: &str = "/etc/passwd";

/// Determines which user owns the other end of a connected socket, and therefore how well the
/// connection is protected from other users. `directory` contains the socket, or starts with `@`
/// and names an abstract socket.
///
/// # Errors
/// Returns an error if `required`, which is the value of `requirepeer`, is not the peer's user or
/// does not exist.
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

/// Returns the ID of a user on this machine. `name` may be a numeric ID, because users of other
/// containers have no names in this container.
fn user_id(name: &str) -> Option<u32> {
    let users = trusted_path::read(Path::new(PASSWD_FILE)).unwrap_or_default();
    find_user(&String::from_utf8_lossy(&users), name).or_else(|| name.parse().ok())
}

/// Looks up a user's ID in the contents of a passwd(5) file.
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
        assert_eq!(user_id("no such user"), None);
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
