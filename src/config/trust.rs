//! Who could have written the programs that walpost.toml names.
//!
//! Whoever may write the file, or the program itself, has it run with all that Walpost may do. So both have to be in the hands
//! of root or of the user that Walpost runs as, with every folder on the way to them. What is mounted read-only, as Kubernetes
//! mounts its ConfigMaps, was put there by who runs the machine.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{StatVfsMountFlags, statvfs};

use super::error::ConfigError;
use super::file::File;
use super::values::{PASSWORD_COMMAND, TOKEN_COMMAND};

/// Of a folder: what others have put there can't be replaced.
const STICKY: u32 = 0o1000;
const WRITE: u32 = 0o022;

/// Makes sure that nobody else could have written the programs of the file.
///
/// # Errors
/// Somebody could; or a program is not there.
pub(super) fn check(path: &Path, file: &File) -> Result<(), ConfigError> {
    for pipeline in &file.pipeline {
        let whose = format!("pipeline {:?}", pipeline.name());
        let commands = [
            (PASSWORD_COMMAND, &pipeline.password_command),
            (TOKEN_COMMAND, &pipeline.kafka_token_command),
        ];
        for (key, argv) in commands {
            check_program(path, &whose, key, argv.iter().flatten().next())?;
        }
    }
    for source in file.queries() {
        let own = source.password_command.iter().flatten().next();
        check_program(path, "fleet.source", PASSWORD_COMMAND, own)?;
        for key in [PASSWORD_COMMAND, TOKEN_COMMAND] {
            let program = source.program_of_template(key);
            check_program(path, "template of a fleet.source", key, program.as_ref())?;
        }
    }
    Ok(())
}

fn check_program(
    path: &Path,
    whose: &str,
    key: &'static str,
    program: Option<&String>,
) -> Result<(), ConfigError> {
    // One whose place is not certain is refused by who would run it.
    let Some(program) = program.filter(|program| Path::new(program).is_absolute()) else {
        return Ok(());
    };
    for checked in [path, Path::new(program)] {
        let found = trouble(checked).map_err(|error| ConfigError::Program {
            whose: whose.to_owned(),
            key,
            reason: format!("{}: {error}", checked.display()),
        })?;
        if let Some(Trouble {
            place,
            found,
            remedy,
        }) = found
        {
            return Err(ConfigError::Writable {
                whose: whose.to_owned(),
                key,
                place,
                found,
                remedy,
            });
        }
    }
    Ok(())
}

/// What others can write.
struct Trouble {
    place: String,
    found: String,
    remedy: String,
}

/// Where others can put something else in the place of the file.
fn trouble(path: &Path) -> std::io::Result<Option<Trouble>> {
    let target = path.canonicalize()?;
    // A link can be replaced by who can write its folder.
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder.canonicalize()?,
        _ => Path::new(".").canonicalize()?,
    };
    let own = std::fs::metadata("/proc/self")?.uid();
    for place in target.ancestors().chain(folder.ancestors()) {
        let metadata = place.metadata()?;
        let Some((fault, remedy)) = fault(&metadata, own) else {
            continue;
        };
        if statvfs(place)?.f_flag.contains(StatVfsMountFlags::RDONLY) {
            continue;
        }
        return Ok(Some(Trouble {
            place: place.display().to_string(),
            found: fault,
            remedy: format!("{remedy} {}", place.display()),
        }));
    }
    Ok(None)
}

/// Why others than root and the user `own` can write it, and the command that changes that.
fn fault(metadata: &Metadata, own: u32) -> Option<(String, String)> {
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    if owner != 0 && owner != own {
        return Some((format!("its owner is uid {owner}"), format!("chown {own}")));
    }
    let is_safe = mode & WRITE == 0 || (metadata.is_dir() && mode & STICKY != 0);
    (!is_safe).then(|| (format!("its mode is {mode:04o}"), "chmod go-w".to_owned()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn file_or_folder_that_others_can_write_is_named_with_what_changes_that() {
        let folder = tempfile::tempdir().expect("a folder");
        let inner = folder.path().join("inner");
        fs::create_dir(&inner).expect("a folder");
        let file = inner.join("walpost.toml");
        fs::write(&file, "").expect("a file");
        let set = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode");
        };
        let check = |expected: Option<&Path>| {
            let found = trouble(&file).expect("an answer");
            let place = found.as_ref().map(|found| found.place.clone());
            let expected = expected.map(|path| path.canonicalize().expect("a path"));
            assert_eq!(place, expected.map(|path| path.display().to_string()));
            if let Some(found) = found {
                assert!(found.remedy.contains(&found.place), "{}", found.remedy);
            }
        };
        for (of_file, of_folder, is_file, is_folder) in [
            (0o600, 0o700, false, false),
            (0o644, 0o755, false, false),
            (0o664, 0o755, true, false),
            (0o646, 0o755, true, false),
            (0o644, 0o775, false, true),
            (0o644, 0o777, false, true),
            (0o644, 0o1777, false, false),
        ] {
            set(&file, of_file);
            set(&inner, of_folder);
            check(match (is_file, is_folder) {
                (true, _) => Some(&file),
                (_, true) => Some(&inner),
                _ => None,
            });
        }
        fs::remove_file(&file).expect("removed");
        trouble(&file).err().expect("there is none");
    }

    #[test]
    fn file_of_another_user_is_theirs_to_write() {
        let metadata = fs::metadata("/proc/self").expect("a folder");
        let own = metadata.uid();
        assert_eq!(fault(&metadata, own), None);
        match own {
            // Everybody's hands are root's.
            0 => assert_eq!(fault(&metadata, 1), None),
            own => assert!(fault(&metadata, own + 1).is_some()),
        }
    }
}
