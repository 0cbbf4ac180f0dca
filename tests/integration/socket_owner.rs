//! Another user of the machine may be listening on PostgreSQL's Unix-domain socket. In these tests,
//! Walpost runs as root, and the user that runs the servers acts as the other user.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, StopMode};
use crate::support::process::effective_user;
use crate::support::reaper;
use crate::support::secrets::SECRET;
use crate::support::walpost::Invocation;

const ACCESS: &str = "
local all plain_user password
local all,replication md5_user md5
local all,replication scram_user scram-sha-256
local all,replication all trust
host  all all 127.0.0.1/32 trust
";

/// A server with three sockets: one in the server's own directory, one in a directory that is
/// writable by any user, and an abstract one.
struct Sockets {
    server: Server,
    shared: PathBuf,
}

impl Sockets {
    fn new() -> Self {
        let server = Server::private(MAJOR, "");
        let shared = reaper::folder("shared");
        fs::set_permissions(&shared, Permissions::from_mode(0o1777)).unwrap();
        let access = server.socket.join("hba");
        fs::write(&access, ACCESS).unwrap();
        let session = server.session("postgres");
        for role in ["plain_user", "md5_user", "scram_user"] {
            let method = role.replace("_user", "").replace("plain", "md5");
            let method = method.replace("scram", "scram-sha-256");
            session.run(&format!(
                "SET password_encryption = '{method}'; CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{SECRET}'"
            ));
        }
        let folders = format!(
            "'{}', '{}', '@walpost-{}'",
            server.socket.display(),
            shared.display(),
            server.port
        );
        session.run(&format!(
            "ALTER SYSTEM SET unix_socket_directories = {folders}"
        ));
        session.run(&format!(
            "ALTER SYSTEM SET hba_file = '{}'",
            access.display()
        ));
        server.stop(StopMode::Fast);
        server.start();
        Self { server, shared }
    }

    fn conninfo(&self, folder: &Path, role: &str, parameters: &str) -> String {
        format!(
            "host={} port={} user={role} dbname=postgres password={SECRET} {parameters}",
            folder.display(),
            self.server.port
        )
    }

    /// Returns the output of `check` for a connection through the given socket directory.
    fn check(&self, folder: &Path, role: &str, parameters: &str) -> String {
        let conninfo = self.conninfo(folder, role, parameters);
        let words = ["check", "--postgres", &conninfo, "--kafka", "127.0.0.1:9"];
        Invocation::new(words).finish().stdout
    }
}

const ACCEPTED: &str = "accepts SQL";
const WARNING: &str = "uses a Unix-domain socket that any user on this machine could have created";

/// Walpost does not send a password in clear text to a server that another local user could be
/// impersonating.
#[test]
fn sends_no_password_to_a_socket_owned_by_another_user() {
    if effective_user() != 0 {
        return;
    }
    let sockets = Sockets::new();
    let abstract_name = PathBuf::from(format!("@walpost-{}", sockets.server.port));
    for (role, method) in [("plain_user", "password"), ("md5_user", "md5")] {
        for folder in [&sockets.shared, &abstract_name] {
            let found = sockets.check(folder, role, "");
            for text in [
                WARNING,
                "was not sent",
                "Set requirepeer",
                "scram-sha-256",
                &format!("require_auth={method}"),
            ] {
                assert!(found.contains(text), "{text}: {found}");
            }
            assert!(!found.contains(ACCEPTED), "{found}");

            for (parameters, is_warned) in [
                ("requirepeer=postgres", false),
                (&*format!("require_auth={method}"), true),
            ] {
                let found = sockets.check(folder, role, parameters);
                assert!(found.contains(ACCEPTED), "{parameters}: {found}");
                assert_eq!(found.contains(WARNING), is_warned, "{parameters}: {found}");
            }
        }
        // Only the server's own user can create sockets in this directory.
        let found = sockets.check(&sockets.server.socket, role, "");
        assert!(
            found.contains(ACCEPTED) && !found.contains(WARNING),
            "{found}"
        );
    }
    let found = sockets.check(&sockets.shared, "scram_user", "");
    assert!(
        found.contains(ACCEPTED) && found.contains(WARNING),
        "{found}"
    );
}

#[test]
fn requirepeer_prevents_sending_data_to_another_user() {
    if effective_user() != 0 {
        return;
    }
    let sockets = Sockets::new();
    for (required, text) in [
        ("nobody", "but requirepeer is nobody"),
        ("4000000000", "but requirepeer is 4000000000"),
        (
            "no-such-user",
            "requirepeer=no-such-user is not a user in /etc/passwd",
        ),
    ] {
        for folder in [&sockets.shared, &sockets.server.socket] {
            let found = sockets.check(folder, "postgres", &format!("requirepeer={required}"));
            assert!(found.contains(text) && !found.contains(ACCEPTED), "{found}");
        }
    }

    let broker = Broker::shared();
    let fixture = Fixture::on_servers(&sockets.server, broker);
    let conninfo = format!("{} requirepeer=nobody", fixture.conninfo());
    let mut walpost = fixture.with_conninfo(&conninfo).run().start();
    walpost.wait_for_logs("but requirepeer is nobody", 1);
    walpost.terminate().expect_code(0);
}
