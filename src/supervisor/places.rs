//! Notices that files have changed, and that nobody is writing them any more.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often they are looked at. What is as it was at the look before is not being written.
pub(super) const LOOK: Duration = Duration::from_secs(1);

/// A file or folder, as it was seen; nothing where it is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mark {
    path: PathBuf,
    /// Device, inode, size, and the times of the last change of its content and of its mode or owner.
    seen: Option<(u64, u64, u64, [i64; 4])>,
}

/// Files, folders with the files in them, and how they were when they were read.
#[derive(Debug, Default)]
pub(crate) struct Places {
    paths: Vec<PathBuf>,
    taken: Vec<Mark>,
    /// They have changed to this, as of the last look.
    changed: Option<Vec<Mark>>,
}

impl Places {
    /// These, as they are now. To be called before they are read: so no change is missed.
    pub(crate) fn of(paths: Vec<PathBuf>) -> Self {
        Self {
            taken: marks(&paths),
            paths,
            changed: None,
        }
    }

    /// They have changed since they were taken, and not since the last look. To be called each [`LOOK`].
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

fn marks(places: &[PathBuf]) -> Vec<Mark> {
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

/// A link is seen as what it leads to: Kubernetes changes all files of a ConfigMap by one link.
fn mark(path: &Path) -> Mark {
    let seen = |file: Metadata| {
        (
            file.dev(),
            file.ino(),
            file.size(),
            // A file that others could write is used once its mode is corrected.
            [
                file.mtime(),
                file.mtime_nsec(),
                file.ctime(),
                file.ctime_nsec(),
            ],
        )
    };
    Mark {
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
        let mut places = Places::of(all.to_vec());
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
        places = Places::of(all.to_vec());
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
        let mut places = Places::of(all.to_vec());
        std::os::unix::fs::symlink("2", path("next")).expect("a link");
        fs::rename(path("next"), path("data")).expect("renamed");
        assert!(!places.have_changed());
        assert!(places.have_changed());
    }
}
