use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::sync::mpsc;
use std::time::Duration;

use tempfile::TempDir;

use super::*;

/// A temporary folder that the current user owns, inside a sticky folder.
struct Fixture(TempDir);

impl Fixture {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn folder(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).expect("a folder");
        path
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).expect("a file");
        set_mode(&path, 0o644);
        path
    }

    fn link(&self, target: impl AsRef<Path>, name: &str) -> PathBuf {
        let path = self.path(name);
        symlink(target, &path).expect("a link");
        path
    }

    /// Returns the path of the file with all links resolved.
    fn real(&self, name: &str) -> PathBuf {
        self.0.path().canonicalize().expect("a folder").join(name)
    }
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("a mode");
}

/// Asserts that the file is rejected because other users can write to a component of its path.
/// Returns the path of the component, and the command that fixes its permissions.
fn expect_writable(path: &Path) -> (PathBuf, String) {
    match read(path) {
        Err(PathError::Writable { place, remedy, .. }) => (place.into(), remedy),
        other => panic!("{}: {other:?}", path.display()),
    }
}

fn expect_text(path: &Path, text: &str) {
    assert_eq!(
        read(path).as_deref(),
        Ok(text.as_bytes()),
        "{}",
        path.display()
    );
}

/// Runs `work` on another thread, and fails if opening a file blocks that thread.
fn run_with_timeout<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    receiver
        .recv_timeout(Duration::from_secs(30))
        .expect("the check blocks")
}

#[test]
fn rejects_files_and_folders_that_other_users_can_write_to() {
    let fixture = Fixture::new();
    let folder = fixture.folder("inner");
    let file = fixture.file("inner/walpost.toml", "text");
    for (file_mode, folder_mode, expected) in [
        (0o600, 0o700, None),
        (0o644, 0o755, None),
        (0o664, 0o755, Some("inner/walpost.toml")),
        (0o646, 0o755, Some("inner/walpost.toml")),
        (0o644, 0o775, Some("inner")),
        (0o644, 0o777, Some("inner")),
        (0o644, 0o1777, None),
    ] {
        set_mode(&file, file_mode);
        set_mode(&folder, folder_mode);
        match expected {
            None => expect_text(&file, "text"),
            Some(name) => {
                let (place, remedy) = expect_writable(&file);
                assert_eq!(place, fixture.real(name));
                assert_eq!(remedy, format!("chmod go-w {}", place.display()));
            }
        }
    }
}

/// The layout is `/opt/app/current -> /opt/releases/1`. Other users can write to `/opt/app`, so
/// they can replace the link.
#[test]
fn rejects_a_link_in_a_folder_that_other_users_can_write_to() {
    for target in ["../releases/1", "ABSOLUTE"] {
        let fixture = Fixture::new();
        fixture.folder("releases/1");
        let app = fixture.folder("app");
        fixture.file("releases/1/password", "text");
        match target {
            "ABSOLUTE" => fixture.link(fixture.path("releases/1"), "app/current"),
            target => fixture.link(target, "app/current"),
        };
        let path = fixture.path("app/current/password");
        expect_text(&path, "text");
        set_mode(&app, 0o777);
        assert_eq!(expect_writable(&path).0, fixture.real("app"));
        set_mode(&app, 0o755);
        // In this chain of links, other users can replace only the last link.
        let first = fixture.link("app/current/password", "first");
        let second = fixture.link(&first, "second");
        expect_text(&second, "text");
        set_mode(&app, 0o775);
        assert_eq!(expect_writable(&second).0, fixture.real("app"));
        // Components before `..` are examined too.
        set_mode(&app, 0o755);
        let through = fixture.path("app/current/../1/./password");
        expect_text(&through, "text");
        set_mode(&fixture.path("releases"), 0o777);
        assert_eq!(expect_writable(&through).0, fixture.real("releases"));
    }
}

#[test]
fn rejects_links_and_files_owned_by_other_users() {
    if own() != 0 {
        // Only root can change the owner of a file. Another test checks how `fault` handles owners.
        return;
    }
    let fixture = Fixture::new();
    let file = fixture.file("file", "text");
    let shared = fixture.folder("shared");
    let link = fixture.link("../file", "shared/link");
    lchown(&link, Some(12345), None).expect("an owner");
    // The folder is not sticky and only root can write to it, so only root can replace the link.
    expect_text(&link, "text");
    // In a sticky folder, the link's owner can replace the link.
    set_mode(&shared, 0o1777);
    let (place, remedy) = expect_writable(&link);
    assert_eq!(place, fixture.real("shared/link"));
    assert!(remedy.starts_with("chown -h 0 "), "{remedy}");
    lchown(&link, Some(0), None).expect("an owner");
    expect_text(&link, "text");
    lchown(&file, Some(12345), None).expect("an owner");
    let (place, remedy) = expect_writable(&link);
    assert_eq!(place, fixture.real("file"));
    assert!(remedy.ends_with("Walpost as uid 12345"), "{remedy}");
    lchown(&file, Some(0), None).expect("an owner");
    lchown(&shared, Some(12345), None).expect("an owner");
    assert_eq!(expect_writable(&link).0, fixture.real("shared"));
}

#[test]
fn trusts_root_and_the_current_user() {
    let fixture = Fixture::new();
    let stat = rustix::fs::stat(fixture.0.path()).expect("a folder");
    let user = stat.st_uid;
    assert_eq!(fault(&stat, user), None);
    match user {
        0 => assert_eq!(fault(&stat, 1), None),
        user => assert!(matches!(fault(&stat, user + 1), Some(Fault::Owner { .. }))),
    }
}

#[test]
fn quotes_names_in_commands() {
    let fixture = Fixture::new();
    let file = fixture.file("a;id.toml", "text");
    set_mode(&file, 0o666);
    let (place, remedy) = expect_writable(&file);
    assert_eq!(remedy, format!("chmod go-w '{}'", place.display()));
}

#[test]
fn rejects_special_files_and_folders_without_opening_them() {
    let fixture = Fixture::new();
    let fifo = fixture.path("fifo");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a FIFO");
    let endless = fixture.link("/dev/zero", "endless");
    let socket = fixture.path("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    set_mode(&socket, 0o700);
    for (path, expected) in [
        (fifo, "is a FIFO, expected"),
        (socket, "is a socket, expected"),
        (fixture.folder("folder"), "is a folder, expected"),
        // The device's mode, which allows all users to write, is checked before its type.
        (endless, "/dev/zero is writable by other users"),
    ] {
        type Check = fn(&Path) -> Result<(), PathError>;
        let checks: [Check; 3] = [|path| read(path).map(drop), check, check_program];
        for check in checks {
            let path = path.clone();
            let error = run_with_timeout(move || check(&path)).expect_err("not a regular file");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}

#[test]
fn limits_the_size_of_a_file() {
    let fixture = Fixture::new();
    let file = fixture.file("large", "");
    let handle = fs::OpenOptions::new()
        .write(true)
        .open(&file)
        .expect("a file");
    handle.set_len(MAX_FILE_BYTES).expect("a size");
    assert_eq!(
        read(&file).map(|bytes| bytes.len() as u64),
        Ok(MAX_FILE_BYTES)
    );
    handle.set_len(MAX_FILE_BYTES + 1).expect("a size");
    assert!(matches!(read(&file), Err(PathError::TooLarge { .. })));
}

/// The file that is read must be the file that was examined.
#[test]
fn rejects_a_file_that_is_replaced_between_the_check_and_the_open() {
    let fixture = Fixture::new();
    let file = fixture.file("password", "text");
    let with_replacement = |replacement: PathBuf| {
        let resolved = resolve(&file).expect("a file");
        resolved.expect_file().expect("a regular file");
        fs::rename(replacement, &file).expect("renamed");
        let error = run_with_timeout(move || resolved.open().map(drop)).expect_err("replaced");
        let expected = "the file was replaced while it was being opened";
        assert!(error.to_string().contains(expected), "{error}");
    };
    with_replacement(fixture.file("other", "other"));
    let file = fixture.file("password", "text");
    expect_text(&file, "text");
    let fifo = fixture.path("fifo");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a FIFO");
    with_replacement(fifo);
    fs::remove_file(&file).expect("removed");
    // A link in place of the file is not followed.
    let file = fixture.file("password", "text");
    let resolved = resolve(&file).expect("a file");
    fs::rename(fixture.link("/etc/hostname", "link"), &file).expect("renamed");
    assert!(matches!(resolved.open(), Err(PathError::Io { .. })));
}

#[test]
fn reports_missing_files_and_circular_links() {
    let fixture = Fixture::new();
    let missing = read(&fixture.path("none/file")).expect_err("a missing file");
    assert!(missing.is_not_found(), "{missing}");
    let dangling = fixture.link("nowhere", "dangling");
    assert!(read(&dangling).expect_err("a missing file").is_not_found());
    let circle = fixture.link("circle", "circle");
    let error = read(&circle).expect_err("a circle");
    assert!(error.to_string().contains("symbolic links"), "{error}");
    let file = fixture.file("file", "");
    let error = read(&file.join("below")).expect_err("no folder");
    assert!(error.to_string().contains("Not a directory"), "{error}");
}

/// In a Kubernetes ConfigMap, each file is a link through `..data`. Kubernetes replaces that link
/// when the ConfigMap changes.
#[test]
fn follows_the_symlinks_of_a_kubernetes_config_map() {
    let fixture = Fixture::new();
    fixture.folder("..2026_11_27");
    fixture.file("..2026_11_27/walpost.toml", "text");
    fixture.link("..2026_11_27", "..data");
    expect_text(&fixture.link("..data/walpost.toml", "walpost.toml"), "text");
}

#[test]
fn checks_every_file_in_a_folder() {
    let fixture = Fixture::new();
    let folder = fixture.folder("certificates");
    let file = fixture.file("certificates/a.pem", "");
    fixture.link("a.pem", "certificates/0f3a.0");
    fixture.link("gone.pem", "certificates/0f3b.0");
    assert_eq!(check_all(&folder), Ok(()));
    assert_eq!(check_all(&file), Ok(()));
    set_mode(&file, 0o666);
    assert!(
        check_all(&folder)
            .expect_err("writable by other users")
            .is_untrusted()
    );
    set_mode(&file, 0o644);
    set_mode(&folder, 0o777);
    for found in [check_all(&folder), check_folder(&folder)] {
        assert!(found.expect_err("writable by other users").is_untrusted());
    }
}

/// Files may be used long after the check: a library looks up a certificate authority's file at
/// each handshake, and a reload lists the files in a folder again.
#[test]
fn rejects_a_folder_in_which_other_users_can_create_files_later() {
    let fixture = Fixture::new();
    let folder = fixture.folder("certificates");
    set_mode(&folder, 0o1777);
    for found in [check_all(&folder), check_folder(&folder)] {
        assert!(
            matches!(found, Err(PathError::Shared { mode: 0o1777, .. })),
            "{found:?}"
        );
    }
    set_mode(&folder, 0o755);
    assert_eq!(check_all(&folder), Ok(()));
    let shared = fixture.folder("shared");
    set_mode(&shared, 0o1777);
    let file = fixture.file("shared/there.pem", "");
    fixture.link(&file, "certificates/0f3a.0");
    assert_eq!(check_all(&folder), Ok(()));
    for target in ["later.pem", "folder/later.pem"] {
        let link = fixture.link(shared.join(target), "certificates/0f3b.0");
        let found = check_all(&folder);
        assert!(
            matches!(found, Err(PathError::Shared { .. })),
            "{target}: {found:?}"
        );
        fs::remove_file(link).expect("a link");
    }
}

#[test]
fn requires_a_private_folder_owned_by_the_current_user_for_new_files() {
    let fixture = Fixture::new();
    let folder = fixture.folder("run");
    for (mode, is_private) in [
        (0o700, true),
        (0o755, true),
        (0o1777, false),
        (0o777, false),
    ] {
        set_mode(&folder, mode);
        let found = check_private_folder(&folder);
        assert_eq!(found.is_ok(), is_private, "{mode:o}: {found:?}");
    }
    set_mode(&folder, 0o755);
    let file = fixture.file("file", "");
    assert!(matches!(
        check_private_folder(&file),
        Err(PathError::Kind { .. })
    ));
}

#[test]
fn returns_the_owner_of_a_socket_folder_unless_other_users_can_replace_it() {
    let fixture = Fixture::new();
    let own = own();
    let folder = fixture.folder("run/postgresql");
    let link = fixture.link("run/postgresql", "link");
    // Other users may be able to create sockets in the folder. `socket_folder_owner` does not check
    // which user listens on a socket.
    for mode in [0o700, 0o2775, 0o1777, 0o777] {
        set_mode(&folder, mode);
        assert_eq!(socket_folder_owner(&folder), Ok(own), "{mode:o}");
        assert_eq!(socket_folder_owner(&link), Ok(own), "{mode:o}");
    }
    set_mode(&fixture.path("run"), 0o777);
    socket_folder_owner(&folder).expect_err("other users can replace the folder");
    set_mode(&fixture.path("run"), 0o755);
    let missing =
        socket_folder_owner(&fixture.path("missing")).expect_err("the folder does not exist");
    assert!(missing.is_not_found(), "{missing}");
    socket_folder_owner(&fixture.file("file", "")).expect_err("a file");

    // Only root can change the owner of a folder.
    let other = own + 7;
    if lchown(&folder, Some(other), None).is_err() {
        return;
    }
    assert_eq!(socket_folder_owner(&folder), Ok(other));
    assert_eq!(socket_folder_owner(&link), Ok(other));
    lchown(fixture.path("run"), Some(other), None).expect("root");
    assert_eq!(socket_folder_owner(&folder), Ok(other));
    lchown(fixture.path("run"), Some(other + 1), None).expect("root");
    socket_folder_owner(&folder).expect_err("another user can replace the folder");
    lchown(fixture.path("run"), Some(own), None).expect("root");
    // In a sticky folder like /tmp, any user can create a folder with this name.
    set_mode(&fixture.path("run"), 0o1777);
    socket_folder_owner(&folder).expect_err("any user may have created the folder");
    lchown(&folder, Some(own), None).expect("root");
    assert_eq!(socket_folder_owner(&folder), Ok(own));
}

#[test]
fn checks_the_interpreter_of_a_script() {
    let fixture = Fixture::new();
    let interpreter = fixture.file("interpreter", "#! /bin/sh -e\n");
    let first_line = format!("#!{}\n", interpreter.display());
    let script = fixture.file("script", &first_line);
    assert_eq!(check_program(&script), Ok(()));
    set_mode(&interpreter, 0o777);
    let error = check_program(&script).expect_err("writable by other users");
    assert!(error.is_untrusted(), "{error}");
    let text = format!("#!{}\n", fixture.path("circle").display());
    let circle = fixture.file("circle", &text);
    check_program(&circle).expect_err("the script is its own interpreter");
    for (line, expected) in [
        (&b"#!/bin/sh\necho"[..], Some("/bin/sh")),
        (b"#! /usr/bin/env python3", Some("/usr/bin/env")),
        (b"#!", None),
        (b"\x7fELF", None),
        (b"", None),
    ] {
        assert_eq!(super::interpreter(line), expected.map(PathBuf::from));
    }
}
