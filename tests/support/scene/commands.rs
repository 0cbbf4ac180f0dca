//! Walpost's subcommands, for the scene's database and broker.

use std::fs;
use std::path::PathBuf;

use super::super::event::Writer;
use super::super::reaper;
use super::super::walpost::{Invocation, Walpost};
use super::Scene;

impl Scene<'_> {
    /// `walpost init` for this database, without a role: roles belong to the whole server.
    pub(crate) fn init(&self) -> Invocation {
        self.invoke("init").arg("--no-role")
    }

    pub(crate) fn check(&self) -> Invocation {
        self.invoke_with_kafka("check", &self.conninfo())
    }

    pub(crate) fn verify(&self) -> Invocation {
        self.deliver_as("verify", &self.conninfo())
    }

    pub(crate) fn run(&self) -> Invocation {
        self.run_as(&self.conninfo())
    }

    /// As [`Scene::run`], with the database reached in another way.
    pub(crate) fn run_as(&self, conninfo: &str) -> Invocation {
        self.deliver_as("run", conninfo)
    }

    /// `walpost skip` to a place in WAL.
    pub(crate) fn skip(&self, to: &str) -> Invocation {
        self.deliver_as("skip", &self.conninfo())
            .arg(format!("--to={to}"))
    }

    pub(crate) fn replay(&self, arguments: &[&str]) -> Invocation {
        self.invoke_with_kafka("replay", &self.conninfo())
            .args(arguments)
    }

    /// `walpost checkpoint` with one of its words.
    pub(crate) fn checkpoint(&self, word: &str) -> Invocation {
        self.checkpoint_as(word, &self.conninfo())
    }

    /// As [`Scene::checkpoint`], with the database reached in another way.
    pub(crate) fn checkpoint_as(&self, word: &str, conninfo: &str) -> Invocation {
        let subcommand = Invocation::new(["checkpoint", word]);
        self.with_kafka(self.with_pipeline(subcommand, conninfo))
    }

    /// A subcommand with the database and the pipeline's name.
    pub(crate) fn invoke(&self, subcommand: &str) -> Invocation {
        self.invoke_as(subcommand, &self.conninfo())
    }

    /// As [`Scene::invoke`], with the database reached in another way.
    pub(crate) fn invoke_as(&self, subcommand: &str, conninfo: &str) -> Invocation {
        self.with_pipeline(Invocation::new([subcommand]), conninfo)
    }

    /// As [`Scene::invoke_as`], with the broker.
    pub(crate) fn invoke_with_kafka(&self, subcommand: &str, conninfo: &str) -> Invocation {
        self.with_kafka(self.invoke_as(subcommand, conninfo))
    }

    /// A subcommand that has to know how events are delivered.
    fn deliver_as(&self, subcommand: &str, conninfo: &str) -> Invocation {
        let mode = self.is_exactly_once().then_some("--exactly-once");
        self.invoke_with_kafka(subcommand, conninfo).args(mode)
    }

    fn with_pipeline(&self, invocation: Invocation, conninfo: &str) -> Invocation {
        let outbox: &[&str] = match self.events {
            Writer::Table(_) => &[],
            Writer::Messages(_) => &["--outbox", "messages"],
        };
        invocation
            .args(["--pipeline", &self.name, "--postgres", conninfo])
            .args(outbox)
    }

    fn with_kafka(&self, invocation: Invocation) -> Invocation {
        invocation.args(["--kafka", &self.broker.address()])
    }

    /// `walpost run`, already streaming.
    pub(crate) fn start(&self) -> Walpost {
        self.start_with(&[])
    }

    /// As [`Scene::start`], with more arguments.
    pub(crate) fn start_with(&self, arguments: &[&str]) -> Walpost {
        self.run().args(arguments).start_streaming()
    }

    /// Walpost that has delivered and confirmed one event.
    pub(crate) fn start_and_confirm_one(&self, aggregate: &str, key: &str) -> Walpost {
        let walpost = self.start();
        self.insert(aggregate, key);
        self.wait_for_records(1);
        self.wait_until_confirmed();
        walpost
    }

    /// walpost.toml with the pipeline, and more settings of it.
    pub(crate) fn file(&self, settings: &str) -> PathBuf {
        let outbox = match self.events {
            Writer::Table(_) => "table",
            Writer::Messages(_) => "messages",
        };
        let text = format!(
            "[kafka]\n\"bootstrap.servers\" = \"{}\"\n[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\n\
             outbox = \"{outbox}\"\n{settings}",
            self.broker.address(),
            self.name,
            self.conninfo(),
        );
        let file = reaper::folder("config").join("walpost.toml");
        fs::write(&file, text).unwrap();
        file
    }

    /// Walpost with its settings and more of them in walpost.toml, already streaming.
    pub(crate) fn start_with_file(&self, settings: &str) -> Walpost {
        let file = self.file(settings);
        Invocation::new(["run", "--config"])
            .arg(file)
            .start_streaming()
    }
}
