//! Real PostgreSQL servers of versions 14 to 18.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex, OnceLock};
use std::time::Duration;

use super::certificates::{Authority, Identity, write_private};
use super::disk::Disk;
use super::process::{account, effective_user, free_port, signal, try_signal, wait_for_exit};
use super::reaper::{self, Ending};
use super::session::Session;
use super::wait::{WAIT_TIMEOUT, wait_for, wait_until};

/// Every major version that Walpost supports.
pub(crate) const MAJORS: [u32; 5] = [14, 15, 16, 17, 18];

/// The major version for tests that don't depend on the version. It is the version that Debian 12
/// packages.
pub(crate) const MAJOR: u32 = 15;

/// The certificate authority for the servers' certificates, which are valid for `localhost` but not
/// for its IP address.
pub(crate) static AUTHORITY: LazyLock<Authority> =
    LazyLock::new(|| Authority::new("Walpost test CA"));

static SERVER_IDENTITY: LazyLock<Identity> =
    LazyLock::new(|| AUTHORITY.sign("localhost", &["localhost"]));

/// Settings for tests. Because fsync is off, data survives a crash of the server but not of the
/// machine.
const SETTINGS: &str = "
wal_level = logical
fsync = off
autovacuum = off
dynamic_shared_memory_type = mmap
listen_addresses = '127.0.0.1'
max_connections = 200
max_logical_replication_workers = 0
max_prepared_transactions = 20
max_replication_slots = 200
max_wal_senders = 100
shared_buffers = 64MB
ssl = on
ssl_cert_file = 'server.pem'
ssl_key_file = 'server.key'
";

/// The contents of pg_hba.conf. A role's name determines how it authenticates.
const HBA_RULES: &str = "
local   all,replication all trust
hostssl all cert_only   127.0.0.1/32 cert
host    all md5_user    127.0.0.1/32 md5
host    all scram_user  127.0.0.1/32 scram-sha-256
host    all plain_user  127.0.0.1/32 password
hostssl all tls_user    127.0.0.1/32 scram-sha-256
host    all tls_user    127.0.0.1/32 reject
host    all postgres    127.0.0.1/32 trust
host    all all         127.0.0.1/32 scram-sha-256
";

/// How to stop a server. The variants are named after the shutdown modes of `pg_ctl`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StopMode {
    /// Ends all sessions, lets walsenders send the remaining WAL, and writes a checkpoint.
    Fast,
    /// Stops without a checkpoint, so that the next start performs crash recovery.
    Immediate,
}

/// A PostgreSQL server that is either private to a test or shared by several tests.
pub(crate) struct Server {
    pub(crate) major: u32,
    /// The directory that contains the Unix-domain socket.
    pub(crate) socket: PathBuf,
    pub(crate) port: u16,
    folder: PathBuf,
    postmaster: Mutex<Option<Child>>,
}

impl Server {
    /// Returns the server of this version that all tests share. It is never stopped.
    pub(crate) fn shared(major: u32) -> &'static Server {
        static SHARED: [OnceLock<Server>; MAJORS.len()] = [const { OnceLock::new() }; MAJORS.len()];
        let index = MAJORS
            .iter()
            .position(|known| *known == major)
            .expect("a known version");
        // The shared server is never killed, so full page images are not needed. They would be
        // costly: each test's CREATE DATABASE causes checkpoints, and after a checkpoint, the first
        // change of each page would write an image of the page to WAL, which every walsender would
        // have to read.
        SHARED[index].get_or_init(|| Server::private(major, "full_page_writes = off\n"))
    }

    /// Starts a server that a test may stop or break. It is removed when dropped. `settings` are
    /// additional lines of postgresql.conf.
    pub(crate) fn private(major: u32, settings: &str) -> Server {
        let server = Self::initialised(major, settings);
        server.start();
        server
    }

    /// Starts a private server whose system identifier is unique. Other private servers are copies
    /// of one cluster, so they share its identifier.
    pub(crate) fn with_new_cluster(major: u32, settings: &str) -> Server {
        let server = Self::configured(major, &initialise(major), settings);
        server.start();
        server
    }

    /// Starts a private server with one of its directories on `disk`, either `pg_wal` or
    /// `pg_replslot`.
    pub(crate) fn on_disk(disk: &Disk, name: &str, major: u32, settings: &str) -> Server {
        let server = Self::initialised(major, settings);
        let (here, there) = (server.data().join(name), disk.path().join(name));
        copy_owned(&here, &there);
        fs::remove_dir_all(&here).unwrap();
        symlink(there, here).unwrap();
        server.start();
        server
    }

    /// Starts a hot standby of this private server, which streams through the physical slot `name`.
    /// Restarts this server, because the standby is created from a cold copy.
    pub(crate) fn standby(&self, name: &str, settings: &str) -> Server {
        self.session("postgres").run(&format!(
            "SELECT pg_create_physical_replication_slot('{name}', true)"
        ));
        self.stop(StopMode::Fast);
        let standby = Self::copied(self.major, &self.data(), "");
        self.start();
        for slot in fs::read_dir(standby.data().join("pg_replslot")).unwrap() {
            fs::remove_dir_all(slot.unwrap().path()).unwrap();
        }
        let own = format!(
            "primary_conninfo = '{}'\nprimary_slot_name = '{name}'\n{settings}",
            self.conninfo("postgres")
        );
        // Use postgresql.auto.conf, because it takes precedence over postgresql.conf.
        let file = standby.data().join("postgresql.auto.conf");
        fs::write(&file, fs::read_to_string(&file).unwrap() + &own).unwrap();
        fs::write(standby.data().join("standby.signal"), "").unwrap();
        chown_to_server(&standby.data().join("standby.signal"), server_account());
        standby.start();
        standby
    }

    /// Copies the data directory of this private server, which must be stopped. Any earlier copy is
    /// replaced.
    pub(crate) fn copy_data(&self) -> PathBuf {
        let copy = self.folder.join("copy");
        if copy.exists() {
            fs::remove_dir_all(&copy).unwrap();
        }
        copy_owned(&self.data(), &copy);
        copy
    }

    /// Restores a copy of the data directory, as if it were a disk snapshot. The server must be
    /// stopped.
    pub(crate) fn restore_data(&self, copy: &Path) {
        fs::remove_dir_all(self.data()).unwrap();
        copy_owned(copy, &self.data());
    }

    /// Stops this private server, runs pg_upgrade, and returns the upgraded server. It has the same
    /// version but belongs to a different cluster.
    pub(crate) fn upgraded(&self) -> Server {
        self.stop(StopMode::Fast);
        let upgraded = Self::configured(self.major, &initialise(self.major), "");
        let programs = debian_binaries(self.major);
        let mut command = Command::new(programs.join("pg_upgrade"));
        for (flag, folder) in [
            ("-b", &programs),
            ("-B", &programs),
            ("-d", &self.data()),
            ("-D", &upgraded.data()),
            ("-s", &upgraded.socket),
        ] {
            command.arg(flag).arg(folder);
        }
        let output = as_server_account(&mut command)
            .args(["-U", "postgres"])
            .current_dir(&upgraded.socket)
            .output()
            .expect("pg_upgrade runs");
        assert!(output.status.success(), "{output:?}");
        upgraded.start();
        upgraded
    }

    /// Creates a server from a copy of a new cluster, without starting it.
    fn initialised(major: u32, settings: &str) -> Server {
        Self::configured(major, &cluster(major), settings)
    }

    /// Creates a server from a copy of `cluster`, with the settings common to all tests and the
    /// given additional ones.
    fn configured(major: u32, cluster: &Path, settings: &str) -> Server {
        let server = Self::copied(major, cluster, &format!("{SETTINGS}{settings}"));
        let (data, owner) = (server.data(), server_account());
        fs::write(data.join("pg_hba.conf"), HBA_RULES).unwrap();
        let identity = &*SERVER_IDENTITY;
        fs::copy(&identity.certificate, data.join("server.pem")).unwrap();
        write_private(&data.join("server.key"), &fs::read(&identity.key).unwrap());
        chown_to_server(&data.join("server.key"), owner);
        fs::copy(&AUTHORITY.root, data.join("root.pem")).unwrap();
        let client_root = "ssl_ca_file = 'root.pem'\n";
        fs::write(data.join("postgresql.auto.conf"), client_root).unwrap();
        chown_to_server(&data.join("postgresql.auto.conf"), owner);
        server
    }

    /// Creates a server from a copy of a data directory, with its own port and socket, without
    /// starting it. `settings` are additional lines of postgresql.conf.
    fn copied(major: u32, from: &Path, settings: &str) -> Server {
        let folder = reaper::folder(&format!("pg{major}-"));
        let owner = server_account();
        copy_owned(from, &folder.join("data"));
        let socket = folder.join("s");
        fs::create_dir(&socket).unwrap();
        chown_to_server(&socket, owner);
        chown_to_server(&folder, owner);
        let port = free_port();
        let file = folder.join("data/postgresql.conf");
        let mut config = fs::read_to_string(&file).unwrap();
        config.push_str(settings);
        writeln!(config, "port = {port}").unwrap();
        writeln!(config, "unix_socket_directories = '{}'", socket.display()).unwrap();
        fs::write(file, config).unwrap();
        Server {
            major,
            socket,
            port,
            folder,
            postmaster: Mutex::new(None),
        }
    }

    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// Starts the server and waits until it accepts connections.
    pub(crate) fn start(&self) {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.log_file())
            .unwrap();
        let mut command = Command::new(binaries(self.major).join("postgres"));
        command.arg("-D").arg(self.folder.join("data"));
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let child = as_server_account(&mut command)
            .spawn()
            .expect("postgres starts");
        reaper::register(child.id(), Ending::Quit);
        *self.postmaster.lock().unwrap() = Some(child);
        wait_for("PostgreSQL to accept connections", || {
            let mut postmaster = self.postmaster.lock().unwrap();
            if let Some(status) = postmaster.as_mut().unwrap().try_wait().unwrap() {
                panic!("PostgreSQL exited with {status}:\n{}", self.log());
            }
            Session::connect(&self.conninfo("postgres")).ok()
        });
    }

    /// Replaces the server's certificate, and waits until the server uses the new one.
    pub(crate) fn present_certificate(&self, identity: &Identity) {
        let data = self.folder.join("data");
        fs::copy(&identity.certificate, data.join("server.pem")).unwrap();
        fs::write(data.join("server.key"), fs::read(&identity.key).unwrap()).unwrap();
        let loaded = || self.session("postgres").value("SELECT pg_conf_load_time()");
        let before = loaded();
        self.session("postgres")
            .run("SELECT pg_catalog.pg_reload_conf()");
        wait_until("the server to read its certificate", || loaded() != before);
    }

    /// Requests a shutdown and returns immediately.
    pub(crate) fn begin_stop(&self, how: StopMode) {
        let postmaster = self.postmaster.lock().unwrap();
        let name = match how {
            StopMode::Fast => "INT",
            StopMode::Immediate => "QUIT",
        };
        signal(postmaster.as_ref().expect("a running server").id(), name);
    }

    /// Promotes a standby to primary.
    pub(crate) fn promote(&self) {
        let session = self.session("postgres");
        assert!(session.is_true("SELECT pg_promote()"), "{}", self.log());
    }

    /// Waits until the server has stopped. Returns false if that takes longer than `within`.
    pub(crate) fn has_stopped(&self, within: Duration) -> bool {
        let mut postmaster = self.postmaster.lock().unwrap();
        let Some(child) = postmaster.as_mut() else {
            return true;
        };
        if wait_for_exit(child, within).is_none() {
            return false;
        }
        *postmaster = None;
        true
    }

    /// Stops the server.
    ///
    /// # Panics
    /// Panics if the server takes longer than [`WAIT_TIMEOUT`] to stop.
    pub(crate) fn stop(&self, how: StopMode) {
        self.begin_stop(how);
        assert!(
            self.has_stopped(WAIT_TIMEOUT),
            "PostgreSQL does not stop:\n{}",
            self.log()
        );
    }

    /// Returns the process ID of the postmaster.
    pub(crate) fn process_id(&self) -> u32 {
        let postmaster = self.postmaster.lock().unwrap();
        postmaster.as_ref().expect("a running server").id()
    }

    /// Returns the superuser's connection string for the Unix-domain socket.
    pub(crate) fn conninfo(&self, database: &str) -> String {
        let socket = self.socket.display();
        format!(
            "host={socket} port={} user=postgres dbname={database}",
            self.port
        )
    }

    /// Like [`Server::conninfo`], but for another role, which needs no password on the Unix-domain
    /// socket.
    pub(crate) fn conninfo_as(&self, role: &str, database: &str) -> String {
        let user = format!("user={role}");
        self.conninfo(database).replace("user=postgres", &user)
    }

    /// Returns the superuser's connection string for loopback TCP without TLS.
    pub(crate) fn tcp_conninfo(&self, database: &str) -> String {
        tcp_conninfo(self.port, database)
    }

    /// Opens a superuser session.
    pub(crate) fn session(&self, database: &str) -> Session {
        let conninfo = self.conninfo(database);
        Session::connect(&conninfo)
            .unwrap_or_else(|error| panic!("{conninfo}: {error}\n{}", self.log()))
    }

    /// Opens a session as another role, which needs no password on the Unix-domain socket.
    pub(crate) fn session_as(&self, role: &str, database: &str) -> Session {
        let conninfo = self.conninfo_as(role, database);
        Session::connect(&conninfo).unwrap_or_else(|error| panic!("{conninfo}: {error}"))
    }

    /// Returns the server's log.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// Returns the size of the server's log in bytes.
    pub(crate) fn log_length(&self) -> u64 {
        fs::metadata(self.log_file()).map_or(0, |file| file.len())
    }

    /// Returns the server's log without its first `length` bytes. The whole log of a shared server
    /// would be long.
    pub(crate) fn log_after(&self, length: u64) -> String {
        let mut file = fs::File::open(self.log_file()).unwrap();
        file.seek(SeekFrom::Start(length)).unwrap();
        let mut log = String::new();
        file.read_to_string(&mut log).unwrap();
        log
    }

    fn log_file(&self) -> PathBuf {
        self.folder.join("log")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let postmaster = self
            .postmaster
            .get_mut()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(mut child) = postmaster.take() {
            try_signal(child.id(), "QUIT");
            if wait_for_exit(&mut child, WAIT_TIMEOUT).is_some() {
                let _ = fs::remove_dir_all(&self.folder);
            }
        }
    }
}

/// Returns the superuser's connection string for loopback TCP without TLS, for the server or proxy
/// that listens on `port`.
pub(super) fn tcp_conninfo(port: u16, database: &str) -> String {
    format!("host=127.0.0.1 port={port} user=postgres dbname={database} sslmode=disable")
}

/// Returns the directory for downloaded dependencies: `WALPOST_TEST_DEPS` if set, otherwise the
/// target directory.
pub(crate) fn dependencies() -> PathBuf {
    std::env::var_os("WALPOST_TEST_DEPS").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("target"),
        PathBuf::from,
    )
}

/// Returns the directory in which Debian installs the server and client programs of this version.
pub(crate) fn debian_binaries(major: u32) -> PathBuf {
    PathBuf::from(format!("/usr/lib/postgresql/{major}/bin"))
}

/// Returns the directory that contains `postgres` and `initdb`.
pub(crate) fn binaries(major: u32) -> PathBuf {
    static COPIES: Mutex<Option<HashMap<u32, PathBuf>>> = Mutex::new(None);
    let debian = debian_binaries(major);
    if debian.join("postgres").exists() {
        return debian;
    }
    let folder = dependencies().join(format!("postgres/{major}"));
    assert!(
        folder.join("bin/postgres").exists(),
        "PostgreSQL {major} is not in {}: run ./dev setup",
        folder.display()
    );
    if effective_user() != 0 || is_open_to_all(&folder) {
        return folder.join("bin");
    }
    let mut copies = COPIES.lock().unwrap();
    copies
        .get_or_insert_default()
        .entry(major)
        .or_insert_with(|| {
            let copy = reaper::folder("binaries").join("postgres");
            copy_owned(&folder, &copy);
            copy.join("bin")
        })
        .clone()
}

/// Returns whether every user can access the directory.
fn is_open_to_all(folder: &Path) -> bool {
    let folder = folder.canonicalize().unwrap();
    folder
        .ancestors()
        .all(|part| fs::metadata(part).is_ok_and(|found| found.mode() & 0o001 != 0))
}

/// Returns an initialized data directory of this version to copy from, because copying takes less
/// time than initdb.
fn cluster(major: u32) -> PathBuf {
    static CLUSTERS: [OnceLock<PathBuf>; MAJORS.len()] = [const { OnceLock::new() }; MAJORS.len()];
    let index = MAJORS
        .iter()
        .position(|known| *known == major)
        .expect("a known version");
    CLUSTERS[index].get_or_init(|| initialise(major)).clone()
}

/// Runs initdb, and returns the new data directory.
fn initialise(major: u32) -> PathBuf {
    let folder = reaper::folder("cluster");
    chown_to_server(&folder, server_account());
    let data = folder.join("data");
    let mut initdb = Command::new(binaries(major).join("initdb"));
    initdb
        .arg("-D")
        .arg(&data)
        .args(["-U", "postgres", "-A", "trust", "-N"]);
    initdb.args(["--encoding=UTF8", "--locale=C"]);
    let output = as_server_account(&mut initdb)
        .output()
        .expect("initdb runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    data
}

/// If the tests run as root, returns the user and group that run the servers, because PostgreSQL
/// refuses to run as root. PostgreSQL's package creates this user.
fn server_account() -> Option<(u32, u32)> {
    (effective_user() == 0).then(|| account("postgres").expect("an account postgres"))
}

fn as_server_account(command: &mut Command) -> &mut Command {
    command
        .current_dir(reaper::scratch())
        .process_group(0)
        .env("LC_ALL", "C");
    match server_account() {
        Some((uid, gid)) => command.uid(uid).gid(gid),
        None => command,
    }
}

fn chown_to_server(path: &Path, owner: Option<(u32, u32)>) {
    if let Some((uid, gid)) = owner {
        chown(path, Some(uid), Some(gid)).unwrap();
    }
}

/// Copies a directory, preserving owners and modes.
pub(crate) fn copy_owned(from: &Path, to: &Path) {
    // Require that the target does not exist, because cp would otherwise create the copy inside it.
    assert!(!to.exists(), "{} exists", to.display());
    let status = Command::new("cp")
        .arg("-a")
        .arg(from)
        .arg(to)
        .status()
        .expect("cp runs");
    assert!(
        status.success(),
        "could not copy {} to {}",
        from.display(),
        to.display()
    );
}
