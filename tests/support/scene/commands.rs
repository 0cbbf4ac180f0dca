//! Walpost's subcommands for the database and broker of a scene.

use std::path::PathBuf;

use super::super::event::Writer;
use super::super::walpost::{Invocation, Walpost, config_file};
use super::Scene;

/// Subcommands for the scene's database, pipeline and broker that use a given connection string.
pub(crate) struct Commands<'s> {
    scene: &'s Scene<'s>,
    conninfo: String,
}

impl Commands<'_> {
    /// Prepares `walpost init` without a role, because roles are shared by the whole server.
    pub(crate) fn init(&self) -> Invocation {
        self.invoke("init").arg("--no-role")
    }

    pub(crate) fn check(&self) -> Invocation {
        self.invoke_with_kafka("check")
    }

    pub(crate) fn verify(&self) -> Invocation {
        self.deliver("verify")
    }

    pub(crate) fn run(&self) -> Invocation {
        self.deliver("run")
    }

    pub(crate) fn skip(&self, to: &str) -> Invocation {
        self.deliver("skip").arg(format!("--to={to}"))
    }

    pub(crate) fn replay(&self, arguments: &[&str]) -> Invocation {
        self.invoke_with_kafka("replay").args(arguments)
    }

    /// Prepares `walpost checkpoint` with one of its subcommands.
    pub(crate) fn checkpoint(&self, word: &str) -> Invocation {
        self.with_kafka(self.with_pipeline(Invocation::new(["checkpoint", word])))
    }

    /// Prepares a subcommand that uses only the database.
    pub(crate) fn invoke(&self, subcommand: &str) -> Invocation {
        self.with_pipeline(Invocation::new([subcommand]))
    }

    pub(crate) fn invoke_with_kafka(&self, subcommand: &str) -> Invocation {
        self.with_kafka(self.invoke(subcommand))
    }

    /// Prepares a subcommand that needs to know the delivery mode.
    fn deliver(&self, subcommand: &str) -> Invocation {
        let mode = self.scene.is_exactly_once().then_some("--exactly-once");
        self.invoke_with_kafka(subcommand).args(mode)
    }

    fn with_pipeline(&self, invocation: Invocation) -> Invocation {
        let outbox: &[&str] = match self.scene.events {
            Writer::Table(_) | Writer::Tables { .. } => &[],
            Writer::Messages(_) => &["--outbox", "messages"],
        };
        let settings = &self.scene.settings;
        let file = (!settings.is_empty()).then(|| self.scene.file(settings));
        let invocation = match file {
            Some(file) => invocation.arg("--config").arg(file),
            None => invocation,
        };
        invocation
            .args(["--pipeline", &self.scene.name])
            .args(["--postgres", &self.conninfo])
            .args(outbox)
    }

    fn with_kafka(&self, invocation: Invocation) -> Invocation {
        invocation.args(["--kafka", self.scene.kafka()])
    }
}

/// The subcommands run as the superuser unless [`Scene::with_conninfo`] is used.
impl Scene<'_> {
    /// Returns the subcommands with another connection string.
    pub(crate) fn with_conninfo(&self, conninfo: &str) -> Commands<'_> {
        Commands {
            scene: self,
            conninfo: conninfo.to_owned(),
        }
    }

    fn commands(&self) -> Commands<'_> {
        self.with_conninfo(&self.conninfo())
    }

    pub(crate) fn init(&self) -> Invocation {
        self.commands().init()
    }

    pub(crate) fn check(&self) -> Invocation {
        self.commands().check()
    }

    pub(crate) fn verify(&self) -> Invocation {
        self.commands().verify()
    }

    pub(crate) fn run(&self) -> Invocation {
        self.commands().run()
    }

    pub(crate) fn skip(&self, to: &str) -> Invocation {
        self.commands().skip(to)
    }

    pub(crate) fn replay(&self, arguments: &[&str]) -> Invocation {
        self.commands().replay(arguments)
    }

    pub(crate) fn checkpoint(&self, word: &str) -> Invocation {
        self.commands().checkpoint(word)
    }

    pub(crate) fn invoke(&self, subcommand: &str) -> Invocation {
        self.commands().invoke(subcommand)
    }

    /// Starts `walpost run` and waits until it streams.
    pub(crate) fn start(&self) -> Walpost {
        self.start_with(&[])
    }

    /// Like [`Scene::start`], with additional arguments.
    pub(crate) fn start_with(&self, arguments: &[&str]) -> Walpost {
        self.run().args(arguments).start_streaming()
    }

    /// Starts Walpost and waits until it has delivered and confirmed one event.
    pub(crate) fn start_and_confirm_one(&self, aggregate: &str, key: &str) -> Walpost {
        let walpost = self.start();
        self.insert(aggregate, key);
        self.wait_for_records(1);
        self.wait_until_confirmed();
        walpost
    }

    /// Writes a walpost.toml with the pipeline and additional settings for it.
    pub(crate) fn file(&self, settings: &str) -> PathBuf {
        let outbox = match self.events {
            Writer::Table(_) | Writer::Tables { .. } => "table",
            Writer::Messages(_) => "messages",
        };
        let text = format!(
            "[kafka]\n\"bootstrap.servers\" = \"{}\"\n[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\n\
             outbox = \"{outbox}\"\n{settings}",
            self.kafka(),
            self.name,
            self.conninfo(),
        );
        config_file(text)
    }

    /// Starts Walpost with a walpost.toml that contains the pipeline and additional settings, and
    /// waits until it streams.
    pub(crate) fn start_with_file(&self, settings: &str) -> Walpost {
        let file = self.file(settings);
        Invocation::new(["run", "--config"])
            .arg(file)
            .start_streaming()
    }
}
