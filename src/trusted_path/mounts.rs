//! Determines which user mounted a FUSE file system, and whether the current user's ID is reliable.
//!
//! On a FUSE file system, the process of the user who mounted it chooses the owner and the mode
//! that the kernel reports for each file. If `user_allow_other` is set in fuse.conf, any user can
//! mount such a file system on their own folder, and all other users can read it (mount.fuse3(8)).

use std::os::fd::AsFd;

use rustix::fs::{Stat, fstatfs, major, minor};
use rustix::io::Errno;

/// The type of a FUSE file system; see statfs(2).
const FUSE_SUPER_MAGIC: u64 = 0x6573_5546;
/// The user ID mapping of the initial user namespace (user_namespaces(7)).
const ALL_USERS: [&str; 3] = ["0", "0", "4294967295"];

/// Returns whether the file is on a FUSE file system.
pub(super) fn is_fuse(entry: impl AsFd) -> Result<bool, Errno> {
    Ok(u64::try_from(fstatfs(entry)?.f_type) == Ok(FUSE_SUPER_MAGIC))
}

/// Returns the user who mounted the FUSE file system that contains the file, or `None` if
/// `mountinfo` does not list the file system. `mountinfo` is the contents of `/proc/self/mountinfo`
/// (proc_pid_mountinfo(5)). A file system whose options do not name a user, such as virtiofs, was
/// mounted by root.
pub(super) fn fuse_user(mountinfo: &str, stat: &Stat) -> Option<u32> {
    let device = format!("{}:{}", major(stat.st_dev), minor(stat.st_dev));
    let is_device = |line: &&str| line.split(' ').nth(2) == Some(&device);
    let line = mountinfo.lines().find(is_device)?;
    // The type and the source may contain any text, because the user who mounts the file system
    // chooses them. The kernel escapes spaces in them.
    let (_, description) = line.split_once(" - ")?;
    let options = description.split(' ').nth(2)?;
    let user = options
        .split(',')
        .find_map(|option| option.strip_prefix("user_id="));
    user.map_or(Some(0), |user| user.parse().ok())
}

/// Returns whether files of other users can appear to belong to the user with this ID. In a user
/// namespace, every user without a mapping appears under the ID in `overflow_uid`, the contents of
/// `/proc/sys/kernel/overflowuid`. `uid_map` is the contents of `/proc/self/uid_map`.
pub(super) fn is_ambiguous(user: u32, overflow_uid: &str, uid_map: &str) -> bool {
    overflow_uid.trim().parse() == Ok(user) && !uid_map.split_whitespace().eq(ALL_USERS)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{makedev, stat};

    use super::*;

    const MOUNTINFO: &str = "\
21 1 8:1 / / rw,relatime - ext4 /dev/vda rw,discard
40 21 0:61 / /home/a/m rw,nosuid shared:3 - fuse.sshfs a@host: rw,user_id=1000,group_id=1000,allow_other
41 21 0:62 / /mnt rw - virtiofs share rw
42 21 0:63 / /srv rw - fuse.s3 bucket rw,user_id=0,group_id=0
43 21 0:64 / /tmp/m rw - fuse.x name rw,user_id=many
44 21 0:65 / /tmp/n rw - fuse.x,user_id=0 name,user_id=0 rw,user_id=1000
";

    fn on_device(minor: u32) -> Stat {
        let mut stat = stat("/").expect("a folder");
        stat.st_dev = makedev(0, minor);
        stat
    }

    #[test]
    fn returns_the_user_who_mounted_a_fuse_file_system() {
        let user = |minor| fuse_user(MOUNTINFO, &on_device(minor));
        assert_eq!(user(61), Some(1000));
        assert_eq!([user(62), user(63)], [Some(0); 2]);
        assert_eq!(user(65), Some(1000));
        assert_eq!([user(64), user(6)], [None; 2]);
    }

    #[test]
    fn user_id_is_ambiguous_only_if_unmapped_users_appear_with_the_same_id() {
        let all = "         0          0 4294967295\n";
        let two = "         0          0          1\n     65534       2000          1\n";
        assert!(is_ambiguous(65534, "65534\n", two));
        assert!(!is_ambiguous(65534, "65534\n", all));
        assert!(!is_ambiguous(2000, "65534\n", two));
    }
}
