//! Opens files that determine where secrets are sent or which programs run, and rejects files that
//! another user could have written.
//!
//! A user who can replace a configuration file, a certificate authority or a password program can
//! use Walpost's privileges. Therefore, this module does not let the kernel resolve a path, but
//! resolves it one component at a time. Each folder, each symbolic link and the file itself may be
//! writable only by root and by the user that Walpost runs as. The file is then opened in the
//! folder that was examined, and compared with the file that was examined.
//!
//! Programs, and files that a library opens by name, can't be passed as open descriptors: for
//! example, the kernel would pass `/dev/fd/N` to the interpreter of a script. These files are
//! examined immediately before they are used. Between the examination and the use, only trusted
//! users can change a component of the path, so other users can't exploit the delay.
//!
//! There are three exceptions:
//! - In a sticky folder, other users can create files but can't replace files that belong to root
//!   or to the current user. Therefore, a path may lead through a sticky folder, but a sticky
//!   folder is rejected if Walpost lists its files or a library looks up files in it.
//! - In a container, only the administrator of the machine can have mounted a read-only file
//!   system. For example, Kubernetes mounts ConfigMaps read-only, with folders whose mode allows
//!   every user to write. The image therefore sets [`TRUST_READ_ONLY_MOUNTS`]. Outside of
//!   containers, other users may be able to write to the same file system through another mount:
//!   for a service with `ProtectSystem=strict`, systemd mounts all file systems read-only. The
//!   exception never applies to FUSE file systems, because their contents may come from the user
//!   who mounted them.
//! - The owner of a symbolic link matters only in a sticky folder, because in other folders no
//!   other user can replace the link.

mod mounts;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;

use rustix::fs::{
    CWD, FileType, Mode, OFlags, Stat, StatVfsMountFlags, fstat, fstatvfs, openat, readlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use self::mounts::{fuse_user, is_ambiguous, is_fuse};
use crate::escape::shell_word;

/// The environment variable that makes Walpost accept files on read-only mounts if its value is
/// `true`. The variable does not weaken the check, because a user who can set the variable can also
/// choose which program runs.
const TRUST_READ_ONLY_MOUNTS: &str = "WALPOST_TRUST_READ_ONLY_MOUNTS";
/// Maximum size of a file that Walpost reads into memory.
pub(crate) const MAX_FILE_BYTES: u64 = 16 << 20;
/// Maximum number of symbolic links in a path; the same as in the kernel (path_resolution(7)).
const MAX_LINKS: u32 = 40;
/// Maximum number of nested interpreters of a script; the same as in the kernel (execve(2)).
const MAX_INTERPRETERS: u32 = 5;
/// The number of bytes at the start of a script in which the kernel searches for the name of an
/// interpreter.
const INTERPRETER_LINE_BYTES: u64 = 256;
/// The sticky bit. In a folder with this bit, only the owner of a file, or of the folder, can
/// remove or rename the file.
const STICKY: u32 = 0o1000;
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// The reason why a file can't be used or is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// A component of the path can't be opened, or the file can't be read.
    #[error("{reason}")]
    Io {
        /// The kind of error, which distinguishes a missing file from other failures.
        kind: ErrorKind,
        /// The operating system's message.
        reason: String,
    },
    /// The current user may not read the file, or enter a folder in its path.
    #[error(
        "the user with ID {user} may not {action} {place} (owner: user ID {owner}, mode: {mode:04o}). {remedy}"
    )]
    Denied {
        /// The user that Walpost runs as.
        user: u32,
        /// The operation that was denied.
        action: &'static str,
        /// The file or folder to which access was denied.
        place: String,
        /// The owner of the file or folder.
        owner: u32,
        /// The mode of the file or folder.
        mode: u32,
        /// How to fix the problem, including the command.
        remedy: String,
    },
    /// Other users can write to a component of the path.
    #[error(
        "{place} is writable by other users ({found}). Check its contents, then run: {remedy}{read_only}"
    )]
    Writable {
        /// The file, folder or link that other users can write to.
        place: String,
        /// The owner or mode of the component, and the expected owner or mode.
        found: String,
        /// The command that fixes the owner or mode.
        remedy: String,
        /// An additional remedy if the file system is mounted read-only; empty otherwise.
        read_only: &'static str,
    },
    /// A component of the path is on a FUSE file system that another user mounted.
    #[error(
        "{place} is on a FUSE file system mounted by {user}, expected one mounted by {expected}. Move the file to a different file system"
    )]
    Mounted {
        /// The file or folder on the FUSE file system.
        place: String,
        /// The user who mounted the file system.
        user: String,
        /// The users who are allowed to have mounted the file system.
        expected: String,
    },
    /// Other users can create files in the folder.
    #[error(
        "other users can create files in {place}, because it has mode {mode:04o}. Use a folder that only the user running \
         walpost can write to: install -d -m 0700 FOLDER"
    )]
    Shared {
        /// The folder in which other users can create files.
        place: String,
        /// The mode of the folder.
        mode: u32,
    },
    /// The path leads to a file of an unexpected type.
    #[error("{place} is {found}, expected {expected}")]
    Kind {
        /// The resolved path.
        place: String,
        /// The type of file that was found.
        found: &'static str,
        /// The type of file that was expected.
        expected: &'static str,
    },
    /// The file is larger than `MAX_FILE_BYTES`.
    #[error("{place} is larger than {MAX_FILE_BYTES} bytes")]
    TooLarge {
        /// The resolved path.
        place: String,
    },
}

impl PathError {
    /// Returns whether the file does not exist.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { kind, .. } if *kind == ErrorKind::NotFound)
    }

    /// Returns whether the file was rejected because other users could have written it, rather than
    /// because it is missing or unsuitable.
    pub(crate) fn is_untrusted(&self) -> bool {
        matches!(
            self,
            Self::Writable { .. } | Self::Mounted { .. } | Self::Shared { .. }
        )
    }
}

impl From<io::Error> for PathError {
    fn from(error: io::Error) -> Self {
        Self::Io {
            kind: error.kind(),
            reason: error.to_string(),
        }
    }
}

impl From<Errno> for PathError {
    fn from(error: Errno) -> Self {
        io::Error::from(error).into()
    }
}

/// Reads a regular file of at most [`MAX_FILE_BYTES`].
///
/// # Errors
/// Returns a [`PathError`] if the path is not trusted or can't be examined.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, PathError> {
    open(path)?.read()
}

/// Opens a regular file. Unlike a plain open, never blocks on a FIFO.
///
/// # Errors
/// Returns a [`PathError`] if the path is not trusted or can't be examined.
pub(crate) fn open(path: &Path) -> Result<TrustedFile, PathError> {
    let resolved = resolve(path)?;
    resolved.expect_file()?;
    resolved.open()
}

/// Checks a regular file that a library will open by its path.
///
/// # Errors
/// Returns a [`PathError`] if the path is not trusted or can't be examined.
pub(crate) fn check(path: &Path) -> Result<(), PathError> {
    resolve(path)?.expect_file()
}

/// Checks a file, or a folder and all its files, that a library will open by its path. The library
/// may later open new files in the folder, so other users must not be able to create files there.
///
/// # Errors
/// Returns a [`PathError`] if the path is not trusted or can't be examined.
pub(crate) fn check_all(path: &Path) -> Result<(), PathError> {
    resolve(path)?.expect_all(path)
}

/// Like [`check_all`], but accepts a missing file or folder, unless other users could create it.
///
/// # Errors
/// Returns a [`PathError`] if the path is not trusted or can't be examined.
pub(crate) fn check_all_if_present(path: &Path) -> Result<(), PathError> {
    match walk(path)? {
        Walked::Missing(folder) => folder.expect_unshared(),
        Walked::Found(resolved) => resolved.expect_all(path),
    }
}

/// Checks a folder whose files are about to be listed: other users must not be able to add files,
/// even if the folder is sticky.
///
/// # Errors
/// Returns a [`PathError`] if the path is not trusted or can't be examined.
pub(crate) fn check_folder(path: &Path) -> Result<(), PathError> {
    let resolved = resolve(path)?;
    resolved.expect_folder()?;
    resolved.expect_unshared()
}

/// Checks a folder in which Walpost is about to create a file: other users must not be able to
/// create files there, even if the folder is sticky.
///
/// # Errors
/// Returns a [`PathError`] if the path is not trusted or can't be examined.
pub(crate) fn check_private_folder(path: &Path) -> Result<(), PathError> {
    let resolved = resolve(path)?;
    resolved.expect_folder()?;
    match resolved.is_shared() {
        true => Err(resolved.shared()),
        false => Ok(()),
    }
}

/// Checks a folder in which Walpost is about to open one of the current user's files without
/// following a link. Other users must not be able to change where the folder's path leads.
///
/// # Errors
/// Returns a [`PathError`] if the path is not trusted or can't be examined.
pub(crate) fn check_folder_path(path: &Path) -> Result<(), PathError> {
    resolve(path)?.expect_folder()
}

/// Returns the owner of the folder that contains a server's socket. Only root, the current user and
/// the owner can change where the path leads. Other users, such as the members of the folder's
/// group, may be able to create files in the folder itself, so the caller must compare the owner
/// with the user of the process that responds.
///
/// # Errors
/// Returns a [`PathError`] if the path is not trusted or can't be examined.
pub(crate) fn socket_folder_owner(path: &Path) -> Result<u32, PathError> {
    let owner = path.metadata()?.uid();
    let Walked::Found(resolved) = walk_for(path, Some(owner))? else {
        return Err(Errno::NOENT.into());
    };
    resolved.expect_folder()?;
    match resolved.stat.st_uid == owner {
        true => Ok(owner),
        false => {
            Err(io::Error::other("the folder was replaced while it was being examined").into())
        }
    }
}

/// Checks a program that is about to be executed and, if the program is a script, its interpreter.
/// The script's arguments, and programs that the interpreter looks up in PATH, are not checked.
///
/// # Errors
/// Returns a [`PathError`] if the path is not trusted or can't be examined.
pub(crate) fn check_program(path: &Path) -> Result<(), PathError> {
    let mut program = path.to_owned();
    for _ in 0..MAX_INTERPRETERS {
        let resolved = resolve(&program)?;
        resolved.expect_file()?;
        // If the current user can't read a program, the program is not a script, because the
        // interpreter could not read it either.
        let Ok(file) = resolved.open() else {
            return Ok(());
        };
        let mut line = Vec::new();
        file.file
            .take(INTERPRETER_LINE_BYTES)
            .read_to_end(&mut line)?;
        let Some(interpreter) = interpreter(&line) else {
            return Ok(());
        };
        program = interpreter;
    }
    Err(Errno::LOOP.into())
}

/// Returns the interpreter that is named in the first line of a script.
fn interpreter(script: &[u8]) -> Option<PathBuf> {
    let line = script
        .strip_prefix(b"#!")?
        .split(|byte| *byte == b'\n')
        .next()?;
    let mut words = line.split(|byte| byte.is_ascii_whitespace() || *byte == 0);
    let interpreter = words.find(|word| !word.is_empty())?;
    Some(PathBuf::from(OsString::from_vec(interpreter.to_vec())))
}

/// A regular file that only root and the current user could have written.
#[derive(Debug)]
pub(crate) struct TrustedFile {
    file: File,
    stat: Stat,
    place: PathBuf,
}

impl TrustedFile {
    /// Returns the permission bits of the file's mode.
    pub(crate) fn mode(&self) -> u32 {
        self.stat.st_mode & 0o7777
    }

    pub(crate) fn owner(&self) -> u32 {
        self.stat.st_uid
    }

    /// Reads the whole file.
    ///
    /// # Errors
    /// Returns an error if the file can't be read or is too large.
    pub(crate) fn read(self) -> Result<Vec<u8>, PathError> {
        let mut bytes = Vec::new();
        self.file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
        match bytes.len() as u64 > MAX_FILE_BYTES {
            true => Err(PathError::TooLarge {
                place: self.place.display().to_string(),
            }),
            false => Ok(bytes),
        }
    }
}

/// The target of a path whose components have all been examined.
struct Resolved {
    folder: OwnedFd,
    /// The name within `folder`; `.` for the folder itself.
    name: OsString,
    stat: Stat,
    /// The path with all links resolved.
    place: PathBuf,
}

impl Resolved {
    /// Creates the result for a path that leads to a folder.
    fn folder(folder: OwnedFd, stat: Stat, place: PathBuf) -> Self {
        Self {
            folder,
            name: ".".into(),
            stat,
            place,
        }
    }

    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    fn expect_file(&self) -> Result<(), PathError> {
        self.expect(FileType::RegularFile, "a regular file")
    }

    fn expect_folder(&self) -> Result<(), PathError> {
        self.expect(FileType::Directory, "a folder")
    }

    fn expect(&self, kind: FileType, expected: &'static str) -> Result<(), PathError> {
        match self.kind() == kind {
            true => Ok(()),
            false => Err(PathError::Kind {
                place: self.place.display().to_string(),
                found: kind_name(self.kind()),
                expected,
            }),
        }
    }

    /// Returns whether other users can create files in the folder. In this case, the folder has the
    /// sticky bit, because other folders to which other users can write are rejected.
    fn is_shared(&self) -> bool {
        self.stat.st_mode & WRITABLE_BY_OTHERS != 0
    }

    fn shared(&self) -> PathError {
        PathError::Shared {
            place: self.place.display().to_string(),
            mode: self.stat.st_mode & 0o7777,
        }
    }

    /// Checks that other users can't create files in the folder. A folder on a trusted read-only
    /// mount is accepted, because the folders that Kubernetes mounts have mode 1777.
    fn expect_unshared(&self) -> Result<(), PathError> {
        match self.is_shared() && !is_trusted_mount(&self.folder)? {
            true => Err(self.shared()),
            false => Ok(()),
        }
    }

    /// Checks that this is a regular file, or a folder in which other users can neither create nor
    /// change files. `path` is the path that was resolved.
    fn expect_all(&self, path: &Path) -> Result<(), PathError> {
        if self.kind() != FileType::Directory {
            return self.expect_file();
        }
        self.expect_unshared()?;
        #[expect(clippy::disallowed_methods, reason = "the folder was checked")]
        let entries = path.read_dir()?;
        for entry in entries {
            match walk(&entry?.path())? {
                // A link without a target is harmless, unless other users can create the target.
                Walked::Missing(folder) => folder.expect_unshared()?,
                Walked::Found(found) if found.kind() == FileType::Directory => {}
                Walked::Found(found) => found.expect_file()?,
            }
        }
        Ok(())
    }

    fn open(self) -> Result<TrustedFile, PathError> {
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file =
            openat(&self.folder, &self.name, flags, Mode::empty()).map_err(
                |error| match error {
                    Errno::ACCESS => denied("read", &self.place, &self.stat),
                    error => error.into(),
                },
            )?;
        let stat = fstat(&file)?;
        if (stat.st_dev, stat.st_ino) != (self.stat.st_dev, self.stat.st_ino) {
            return Err(io::Error::other("the file was replaced while it was being opened").into());
        }
        Ok(TrustedFile {
            file: file.into(),
            stat,
            place: self.place,
        })
    }
}

fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a folder",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "a special file",
    }
}

/// The result of resolving a path.
enum Walked {
    Found(Resolved),
    /// A component of the path does not exist in this folder.
    Missing(Resolved),
}

/// Resolves the path and its links one component at a time, and examines every component.
fn resolve(path: &Path) -> Result<Resolved, PathError> {
    match walk(path)? {
        Walked::Found(resolved) => Ok(resolved),
        Walked::Missing(_) => Err(Errno::NOENT.into()),
    }
}

fn walk(path: &Path) -> Result<Walked, PathError> {
    walk_for(path, None)
}

/// Like [`walk`], for a path to a folder that may be owned by the user `server`.
fn walk_for(path: &Path, server: Option<u32>) -> Result<Walked, PathError> {
    let absolute = std::path::absolute(path)?;
    let mut pending = Vec::new();
    push_components(&mut pending, &absolute);
    let (mut folder, mut stat) = open_component(CWD, "/")?;
    let mut place = PathBuf::from("/");
    examine(&place, &folder, &stat)?;
    examine_mount(&place, &folder, &stat)?;
    let mut links = 0;
    while let Some(name) = pending.pop() {
        let (entry, found) = match open_component(&folder, &name) {
            Ok(opened) => opened,
            Err(Errno::NOENT) => {
                return Ok(Walked::Missing(Resolved::folder(folder, stat, place)));
            }
            Err(Errno::ACCESS) => return Err(denied("enter", &place, &stat)),
            Err(error) => return Err(error.into()),
        };
        let at = match name.as_bytes() {
            b".." => place.parent().unwrap_or(&place).to_owned(),
            _ => place.join(&name),
        };
        if found.st_dev != stat.st_dev {
            examine_mount(&at, &entry, &found)?;
        }
        match FileType::from_raw_mode(found.st_mode) {
            FileType::Symlink => {
                examine_link(&at, &entry, &found, &stat)?;
                links += 1;
                if links > MAX_LINKS {
                    return Err(Errno::LOOP.into());
                }
                let target = readlinkat(&entry, "", Vec::new())?.into_bytes();
                let target = PathBuf::from(OsString::from_vec(target));
                if target.is_absolute() {
                    (folder, stat) = open_component(CWD, "/")?;
                    place = PathBuf::from("/");
                }
                push_components(&mut pending, &target);
            }
            FileType::Directory => {
                match server {
                    None => examine(&at, &entry, &found)?,
                    Some(server) => {
                        let fault = server_fault(&found, &stat, server, pending.is_empty());
                        distrust(&at, &entry, fault)?;
                    }
                }
                (folder, stat, place) = (entry, found, at);
            }
            _ if !pending.is_empty() => return Err(Errno::NOTDIR.into()),
            _ => {
                examine(&at, &entry, &found)?;
                return Ok(Walked::Found(Resolved {
                    folder,
                    name,
                    stat: found,
                    place: at,
                }));
            }
        }
    }
    Ok(Walked::Found(Resolved::folder(folder, stat, place)))
}

/// Pushes the components onto the stack, so that the first component is on top. The root folder is
/// omitted.
fn push_components(pending: &mut Vec<OsString>, path: &Path) {
    let components = path
        .components()
        .rev()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        });
    pending.extend(components);
}

/// Opens a component without following it if it is a link, and without side effects if it is a
/// device or a FIFO.
fn open_component(
    folder: impl AsFd,
    name: impl rustix::path::Arg,
) -> Result<(OwnedFd, Stat), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let entry = openat(folder, name, flags, Mode::empty())?;
    let stat = fstat(&entry)?;
    Ok((entry, stat))
}

/// Returns the error for a file that the current user may not read, or a folder that the current
/// user may not enter.
fn denied(action: &'static str, place: &Path, stat: &Stat) -> PathError {
    let user = geteuid().as_raw();
    let place = place.display().to_string();
    let word = shell_word(&place);
    PathError::Denied {
        remedy: match action {
            "read" => format!("To allow access: chown {user} {word} && chmod 0600 {word}"),
            // The folder's mode allows members of its group to enter it. For example, the packages
            // create /etc/walpost with the group walpost.
            _ if stat.st_mode & 0o010 != 0 => format!(
                "Run walpost as root or as a member of the group with ID {}, or allow all users to enter the directory: \
                 chmod o+x {word}",
                stat.st_gid
            ),
            _ => format!("To allow access: chmod o+x {word}"),
        },
        user,
        action,
        owner: stat.st_uid,
        mode: stat.st_mode & 0o7777,
        place,
    }
}

fn examine(place: &Path, entry: impl AsFd, stat: &Stat) -> Result<(), PathError> {
    distrust(place, entry, fault(stat, trusted_user()))
}

/// Rejects a FUSE file system that another user mounted, because that user chooses the owner and
/// the mode of its files.
fn examine_mount(place: &Path, entry: impl AsFd, stat: &Stat) -> Result<(), PathError> {
    if !is_fuse(entry)? {
        return Ok(());
    }
    let user = fuse_user(&read_proc("/proc/self/mountinfo")?, stat);
    if user.is_some_and(|user| user == 0 || user == trusted_user()) {
        return Ok(());
    }
    Err(PathError::Mounted {
        place: place.display().to_string(),
        user: user.map_or("an unknown user".to_owned(), |user| format!("uid {user}")),
        expected: expected_owner(trusted_user()),
    })
}

/// Examines a link. A link can't be written to, but users who can write to its folder can replace
/// it. In a sticky folder, only the owner of the link or of the folder can replace the link.
fn examine_link(
    place: &Path,
    entry: impl AsFd,
    link: &Stat,
    folder: &Stat,
) -> Result<(), PathError> {
    let is_shared = folder.st_mode & WRITABLE_BY_OTHERS != 0;
    let fault = is_shared
        .then(|| owner_fault(link, trusted_user()))
        .flatten();
    distrust(place, entry, fault)
}

/// Returns an error if other users can write to the component (`fault`), unless the component is on
/// a read-only mount that is trusted.
fn distrust(place: &Path, entry: impl AsFd, fault: Option<Fault>) -> Result<(), PathError> {
    let Some(fault) = fault else {
        return Ok(());
    };
    if is_trusted_mount(&entry)? {
        return Ok(());
    }
    let word = shell_word(&place.to_string_lossy());
    let (found, remedy) = match fault {
        Fault::Owner { owner, expected } => (
            format!("the owner is uid {owner}, expected {expected}"),
            format!("chown -h {} {word}, or run Walpost as uid {owner}", own()),
        ),
        Fault::Mode(mode) => (
            format!("the mode is {mode:04o}, expected no write permission for group and others"),
            format!("chmod go-w {word}"),
        ),
    };
    Err(PathError::Writable {
        place: place.display().to_string(),
        found,
        remedy,
        read_only: match is_read_only(&entry)? {
            true => {
                ". Alternatively, in a container in which other users can't modify read-only mounts, set the environment \
                 variable WALPOST_TRUST_READ_ONLY_MOUNTS=true"
            }
            false => "",
        },
    })
}

/// Returns `true` if the file is on a read-only mount and [`TRUST_READ_ONLY_MOUNTS`] is set.
fn is_trusted_mount(entry: impl AsFd) -> Result<bool, PathError> {
    static IS_SET: LazyLock<bool> =
        LazyLock::new(|| std::env::var_os(TRUST_READ_ONLY_MOUNTS).is_some_and(|set| set == "true"));
    Ok(*IS_SET && is_read_only(entry)?)
}

/// Returns whether the file is on a file system that is mounted read-only and is not FUSE.
fn is_read_only(entry: impl AsFd) -> Result<bool, PathError> {
    let is_read_only = fstatvfs(entry.as_fd())?
        .f_flag
        .contains(StatVfsMountFlags::RDONLY);
    Ok(is_read_only && !is_fuse(entry)?)
}

/// The reason why other users can write to a file or folder.
#[derive(Debug, PartialEq, Eq)]
enum Fault {
    Owner {
        owner: u32,
        /// The expected owner.
        expected: String,
    },
    /// The file's mode, which allows other users to write.
    Mode(u32),
}

fn fault(stat: &Stat, own: u32) -> Option<Fault> {
    owner_fault(stat, own).or_else(|| mode_fault(stat))
}

/// Like [`fault`], for a folder in the path to the socket of the user `server`. The user `server`
/// may own the folder if other users can't write to the parent folder. In a sticky parent folder,
/// any user could create a folder with the expected name. The last folder in the path may have any
/// mode.
fn server_fault(stat: &Stat, parent: &Stat, server: u32, is_last: bool) -> Option<Fault> {
    let is_server_folder = stat.st_uid == server && parent.st_mode & WRITABLE_BY_OTHERS == 0;
    let owner = match is_server_folder {
        true => None,
        false => owner_fault(stat, trusted_user()),
    };
    owner.or_else(|| mode_fault(stat).filter(|_| !is_last))
}

fn mode_fault(stat: &Stat) -> Option<Fault> {
    let mode = stat.st_mode & 0o7777;
    let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    let is_safe = mode & WRITABLE_BY_OTHERS == 0 || (is_folder && mode & STICKY != 0);
    (!is_safe).then_some(Fault::Mode(mode))
}

fn owner_fault(stat: &Stat, own: u32) -> Option<Fault> {
    let owner = stat.st_uid;
    let expected = expected_owner(own);
    (owner != 0 && owner != own).then_some(Fault::Owner { owner, expected })
}

fn expected_owner(own: u32) -> String {
    match own {
        0 => "root".to_owned(),
        own => format!("root or uid {own}"),
    }
}

#[expect(clippy::disallowed_methods, reason = "only the kernel writes to /proc")]
fn read_proc(path: &str) -> io::Result<String> {
    fs::read_to_string(path)
}

/// Returns the user that Walpost runs as. Returns root instead if files of other users could also
/// appear to belong to that user, because the other users are not mapped in the user namespace.
fn trusted_user() -> u32 {
    static TRUSTED: LazyLock<u32> = LazyLock::new(|| {
        let read = |path| read_proc(path).unwrap_or_default();
        let [overflow, map] = ["/proc/sys/kernel/overflowuid", "/proc/self/uid_map"].map(read);
        match is_ambiguous(own(), &overflow, &map) {
            true => 0,
            false => own(),
        }
    });
    *TRUSTED
}

/// Returns the user that Walpost runs as.
fn own() -> u32 {
    geteuid().as_raw()
}

/// Returns the permission bits that must be clear so that other users can't read the file, and the
/// recommended mode. If the file has another owner, such as root, the current user needs the
/// group's permission to read it.
pub(crate) fn private_mode(owner: u32) -> (u32, &'static str) {
    match owner == own() {
        true => (0o077, "0600"),
        false => (0o007, "0640"),
    }
}

/// If the mode allows more access than [`private_mode`] recommends, returns the file's mode and the
/// command that fixes it.
pub(crate) fn exposure(path: &Path) -> Option<(u32, String)> {
    let found = path.metadata().ok()?;
    let (forbidden, remedy) = private_mode(found.uid());
    let mode = found.mode() & 0o777;
    let word = shell_word(&path.to_string_lossy());
    (mode & forbidden != 0).then(|| (mode, format!("chmod {remedy} {word}")))
}

#[cfg(test)]
mod tests;
