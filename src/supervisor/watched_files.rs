//! Detects when files have changed and are no longer being written.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often files are checked. A file that has not changed since the previous check is considered
/// completely written.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A file or folder, and its metadata at a point in time.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileVersion {
    path: PathBuf,
    /// Device, inode, size, mtime and ctime. `None` if the file does not exist.
    metadata: Option<(u64, u64, u64, [i64; 4])>,
}

/// Files and folders to watch for changes. The metadata of these files and folders, and of the
/// files in the folders, is recorded as of the time when the files were read.
#[derive(Debug, Default)]
pub(crate) struct WatchedFiles {
    paths: Vec<PathBuf>,
    captured: Vec<FileVersion>,
    /// The metadata at the last check. `None` if it equals `captured`.
    changed: Option<Vec<FileVersion>>,
}

impl WatchedFiles {
    /// Captures the current metadata. Must be called before reading the files, so that no change is
    /// missed.
    pub(crate) fn capture(paths: Vec<PathBuf>) -> Self {
        Self {
            captured: versions(&paths),
            paths,
            changed: None,
        }
    }

    /// Returns whether the files have changed since they were read, but not since the previous
    /// check. Must be called once every [`POLL_INTERVAL`].
    pub(super) fn have_changed(&mut self) -> bool {
        let current = versions(&self.paths);
        if current == self.captured {
            self.changed = None;
            return false;
        }
        if self.changed.as_ref() != Some(&current) {
            self.changed = Some(current);
            return false;
        }
        self.captured = current;
        self.changed = None;
        true
    }
}

fn versions(paths: &[PathBuf]) -> Vec<FileVersion> {
    let mut versions = Vec::new();
    for path in paths {
        versions.push(version(path));
        #[expect(
            clippy::disallowed_methods,
            reason = "this function only detects changes; a reload checks the folder before it uses a file"
        )]
        let Ok(folder) = fs::read_dir(path) else {
            continue;
        };
        let mut files: Vec<_> = folder.flatten().map(|entry| entry.path()).collect();
        files.sort_unstable();
        versions.extend(files.iter().map(|path| version(path)));
    }
    versions
}

/// Returns a file's metadata. Follows symbolic links, because Kubernetes updates all files of a
/// ConfigMap by replacing a single link.
fn version(path: &Path) -> FileVersion {
    let identify = |file: Metadata| {
        (
            file.dev(),
            file.ino(),
            file.size(),
            // Include ctime, which also changes if only the file's mode is changed. If Walpost
            // rejected a file because other users could write to it, Walpost therefore reads the
            // file again after its mode is corrected.
            [
                file.mtime(),
                file.mtime_nsec(),
                file.ctime(),
                file.ctime_nsec(),
            ],
        )
    };
    FileVersion {
        path: path.to_owned(),
        metadata: fs::metadata(path).ok().map(identify),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_changed_files_once_they_are_no_longer_being_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, inside) = (folder.path().join("a.toml"), folder.path().join("d"));
        fs::create_dir(&inside).expect("a folder");
        let all = [file.clone(), inside.clone()];
        let mut watched = WatchedFiles::capture(all.to_vec());
        assert!(!watched.have_changed());
        fs::write(&file, "1").expect("a file");
        assert!(!watched.have_changed(), "may be incomplete");
        fs::write(&file, "12").expect("a file");
        assert!(!watched.have_changed(), "still being written");
        assert!(watched.have_changed());
        assert!(!watched.have_changed(), "already reported");
        fs::write(inside.join("b.toml"), "3").expect("a file");
        assert!(!watched.have_changed());
        assert!(watched.have_changed());
        fs::remove_file(inside.join("b.toml")).expect("removed");
        assert!(!watched.have_changed());
        fs::write(inside.join("b.toml"), "3").expect("a file");
        watched = WatchedFiles::capture(all.to_vec());
        assert!(!watched.have_changed(), "unchanged since the capture");
    }

    #[test]
    fn reports_a_link_with_a_new_target_as_changed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        fs::write(path("1"), "x").expect("a file");
        fs::write(path("2"), "x").expect("a file");
        std::os::unix::fs::symlink("1", path("data")).expect("a link");
        let all = [path("data")];
        let mut watched = WatchedFiles::capture(all.to_vec());
        std::os::unix::fs::symlink("2", path("next")).expect("a link");
        fs::rename(path("next"), path("data")).expect("renamed");
        assert!(!watched.have_changed());
        assert!(watched.have_changed());
    }
}
