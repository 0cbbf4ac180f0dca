//! Small disks that can fill up: in-memory file systems, each mounted for a single test.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::process::effective_user;
use super::reaper;

/// A mounted file system. It is unmounted when this value is dropped, or by the [`reaper`] if the
/// process is killed.
pub(crate) struct Disk {
    path: PathBuf,
}

impl Disk {
    /// Creates an empty disk of the given size in megabytes.
    ///
    /// # Panics
    /// Panics if the disk can't be mounted. Only root can mount file systems; other users need sudo
    /// without a password, as for `./dev setup`.
    pub(crate) fn new(megabytes: usize) -> Self {
        // The reaper unmounts all directories whose names have this form.
        let disk = Self {
            path: reaper::folder("disk"),
        };
        let size = format!("size={megabytes}m,mode=755");
        let mounted = as_root("mount")
            .args(["-t", "tmpfs", "-o", &size, "walpost-test"])
            .arg(&disk.path)
            .output()
            .expect("mount runs");
        assert!(
            mounted.status.success(),
            "this test mounts a tmpfs, which requires root or sudo, and CAP_SYS_ADMIN in a container; if that is not \
             possible, skip it with --skip disk:: {}",
            String::from_utf8_lossy(&mounted.stderr)
        );
        disk
    }

    /// Returns the root directory of the disk.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Fills the disk completely.
    pub(crate) fn fill(&self) {
        let mut ballast = File::create(self.ballast()).unwrap();
        let chunk = vec![b'x'; 1 << 16];
        let error = loop {
            if let Err(error) = ballast.write_all(&chunk) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    }

    /// Frees the space that [`Disk::fill`] used.
    pub(crate) fn free_space(&self) {
        fs::remove_file(self.ballast()).unwrap();
    }

    fn ballast(&self) -> PathBuf {
        self.path.join("ballast")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Unmount lazily, because processes may still have files open on the disk for a moment.
        let _ = as_root("umount").arg("-l").arg(&self.path).status();
        let _ = fs::remove_dir(&self.path);
    }
}

fn as_root(program: &str) -> Command {
    if effective_user() == 0 {
        return Command::new(program);
    }
    let mut command = Command::new("sudo");
    command.args(["-n", program]);
    command
}
