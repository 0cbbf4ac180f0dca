//! Detects that files have changed and are no longer being written.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often files are checked. A file that has not changed since the previous check is considered complete.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The metadata of a file or folder, or `None` if it does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileVersion {
    path: PathBuf,
    /// Device, inode, size, and the times of the last change of content (mtime) and of content or metadata (ctime).
    seen: Option<(u64, u64, u64, [i64; 4])>,
}

/// Files and folders, and the metadata that they and the folders' files had when they were read.
#[derive(Debug, Default)]
pub(crate) struct WatchedFiles {
    paths: Vec<PathBuf>,
    taken: Vec<FileVersion>,
    /// The changed metadata seen by the last check.
    changed: Option<Vec<FileVersion>>,
}

impl WatchedFiles {
    /// Captures the current metadata. Call this before reading the files, so that no change is missed.
    pub(crate) fn capture(paths: Vec<PathBuf>) -> Self {
        Self {
            taken: marks(&paths),
            paths,
            changed: None,
        }
    }

    /// Returns whether the files have changed since they were read, but not since the previous check. Call this once every
    /// [`POLL_INTERVAL`].
    pub(super) fn have_changed(&mut self) -> bool {
        let now = marks(&self.paths);
        if now == self.taken {
            self.changed = None;
            return false;
        }
        if self.changed.as_ref() != Some(&now) {
            self.changed = Some(now);
            return false;
        }
        self.taken = now;
        self.changed = None;
        true
    }
}

fn marks(places: &[PathBuf]) -> Vec<FileVersion> {
    let mut marks = Vec::new();
    for place in places {
        marks.push(mark(place));
        let Ok(folder) = fs::read_dir(place) else {
            continue;
        };
        let mut inside: Vec<_> = folder.flatten().map(|entry| entry.path()).collect();
        inside.sort_unstable();
        marks.extend(inside.iter().map(|path| mark(path)));
    }
    marks
}

/// Returns a file's metadata, following symbolic links: Kubernetes updates all files of a ConfigMap by replacing one link.
fn mark(path: &Path) -> FileVersion {
    let seen = |file: Metadata| {
        (
            file.dev(),
            file.ino(),
            file.size(),
            // ctime also detects that the mode of a file that other users could write has been corrected.
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
        seen: fs::metadata(path).ok().map(seen),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_have_changed_are_noticed_once_they_stay_as_they_are() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, inside) = (folder.path().join("a.toml"), folder.path().join("d"));
        fs::create_dir(&inside).expect("a folder");
        let all = [file.clone(), inside.clone()];
        let mut places = WatchedFiles::capture(all.to_vec());
        assert!(!places.have_changed());
        fs::write(&file, "1").expect("a file");
        assert!(!places.have_changed(), "it can be half written");
        fs::write(&file, "12").expect("a file");
        assert!(!places.have_changed(), "it is being written");
        assert!(places.have_changed());
        assert!(!places.have_changed(), "once");
        fs::write(inside.join("b.toml"), "3").expect("a file");
        assert!(!places.have_changed());
        assert!(places.have_changed());
        fs::remove_file(inside.join("b.toml")).expect("removed");
        assert!(!places.have_changed());
        fs::write(inside.join("b.toml"), "3").expect("a file");
        places = WatchedFiles::capture(all.to_vec());
        assert!(!places.have_changed(), "what was taken is no change");
    }

    #[test]
    fn link_that_leads_elsewhere_is_a_change() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        fs::write(path("1"), "x").expect("a file");
        fs::write(path("2"), "x").expect("a file");
        std::os::unix::fs::symlink("1", path("data")).expect("a link");
        let all = [path("data")];
        let mut places = WatchedFiles::capture(all.to_vec());
        std::os::unix::fs::symlink("2", path("next")).expect("a link");
        fs::rename(path("next"), path("data")).expect("renamed");
        assert!(!places.have_changed());
        assert!(places.have_changed());
    }
}
