//! The commands that give the principal the rights it needs. To read or to write implies to describe.

use rdkafka::config::ClientConfig;

use super::properties::brokers;
use crate::escape::shell_word_on_one_line;

/// Whom to give rights, and where.
#[derive(Clone, Debug)]
pub(crate) struct Grants {
    brokers: String,
    user: Option<String>,
    transactional_id: String,
}

impl Grants {
    /// For who connects with `config`.
    #[must_use]
    pub(crate) fn of(config: &ClientConfig) -> Self {
        let get = |name| config.get(name).map(str::to_owned);
        Self {
            brokers: brokers(config),
            user: get("sasl.username").filter(|user| !user.is_empty()),
            transactional_id: get("transactional.id").unwrap_or_default(),
        }
    }

    /// The brokers' addresses, for other commands.
    #[must_use]
    pub(crate) fn brokers(&self) -> &str {
        &self.brokers
    }

    /// To write records to a topic.
    #[must_use]
    pub(crate) fn topic(&self, topic: &str) -> String {
        self.command("--operation Write", "--topic", topic)
    }

    /// To read records of a topic.
    #[must_use]
    pub(crate) fn read(&self, topic: &str) -> String {
        self.command("--operation Read", "--topic", topic)
    }

    /// To make a topic.
    #[must_use]
    pub(crate) fn create(&self, topic: &str) -> String {
        self.command("--operation Create --operation Write", "--topic", topic)
    }

    /// To keep checkpoints in a topic.
    #[must_use]
    pub(crate) fn checkpoints(&self, topic: &str) -> String {
        let operations = "--operation Read --operation Write --operation DescribeConfigs";
        self.command(operations, "--topic", topic)
    }

    /// To use transactions.
    #[must_use]
    pub(crate) fn transactions(&self) -> String {
        self.command(
            "--operation Write",
            "--transactional-id",
            &self.transactional_id,
        )
    }

    fn command(&self, operations: &str, kind: &str, name: &str) -> String {
        format!(
            "kafka-acls.sh --bootstrap-server {} --add --allow-principal {} {operations} {kind} {}",
            shell_word_on_one_line(&self.brokers),
            shell_word_on_one_line(&format!("User:{}", self.user.as_deref().unwrap_or("NAME"))),
            shell_word_on_one_line(name)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A registry's row chooses the user, and administrators paste the command.
    #[test]
    fn commands_are_made_of_words_of_a_shell() {
        let mut config = ClientConfig::new();
        config.set("sasl.username", "x;touch /tmp/f;#");
        config.set("bootstrap.servers", "kafka:9092,$(id)");
        assert_eq!(
            Grants::of(&config).topic("orders"),
            "kafka-acls.sh --bootstrap-server 'kafka:9092,$(id)' --add --allow-principal 'User:x;touch /tmp/f;#' --operation Write \
             --topic orders"
        );
    }
}
