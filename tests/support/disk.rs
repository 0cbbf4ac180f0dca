//! Small disks that can be full: file systems in memory, mounted for one test.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::process::effective_user;
use super::reaper;

/// A mounted file system. Unmounted when dropped, or by the [`reaper`].
pub(crate) struct Disk {
    path: PathBuf,
}

impl Disk {
    /// An empty disk of so many megabytes.
    ///
    /// # Panics
    /// Only root can mount: others need sudo without a password, as `./dev setup` does.
    pub(crate) fn new(megabytes: usize) -> Self {
        // The reaper knows it by its name.
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
            "this test mounts a tmpfs, for which it has to be root or may use sudo, in a container with CAP_SYS_ADMIN; \
             leave it out with --skip disk:: where that can't be: {}",
            String::from_utf8_lossy(&mounted.stderr)
        );
        disk
    }

    /// Its root folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves no byte free.
    pub(crate) fn fill(&self) {
        let mut ballast = File::create(self.ballast()).unwrap();
        let piece = vec![b'x'; 1 << 16];
        let error = loop {
            if let Err(error) = ballast.write_all(&piece) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    }

    /// Frees what [`Disk::fill`] took.
    pub(crate) fn make_room(&self) {
        fs::remove_file(self.ballast()).unwrap();
    }

    fn ballast(&self) -> PathBuf {
        self.path.join("ballast")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily: whoever still has a file open there ends soon.
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
