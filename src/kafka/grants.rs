//! Commands that grant the principal the permissions it needs. The commands do not grant Describe,
//! because Kafka's Read and Write permissions imply it.

use rdkafka::config::ClientConfig;

use super::properties::brokers;
use crate::escape::shell_word_on_one_line;

/// The arguments of the `kafka-acls.sh` commands that grant permissions: the bootstrap servers, the
/// principal and its transactional ID.
#[derive(Clone, Debug)]
pub(crate) struct Grants {
    brokers: String,
    user: Option<String>,
    transactional_id: String,
}

impl Grants {
    /// Creates commands for the principal that connects with `config`.
    #[must_use]
    pub(crate) fn for_config(config: &ClientConfig) -> Self {
        let get = |name| config.get(name).map(str::to_owned);
        Self {
            brokers: brokers(config),
            user: get("sasl.username").filter(|user| !user.is_empty()),
            transactional_id: get("transactional.id").unwrap_or_default(),
        }
    }

    /// Returns the bootstrap servers, for use in other commands.
    #[must_use]
    pub(crate) fn brokers(&self) -> &str {
        &self.brokers
    }

    /// Returns the command that allows writing to a topic.
    #[must_use]
    pub(crate) fn topic(&self, topic: &str) -> String {
        self.command("--operation Write", "--topic", topic)
    }

    /// Returns the command that allows reading from a topic.
    #[must_use]
    pub(crate) fn read(&self, topic: &str) -> String {
        self.command("--operation Read", "--topic", topic)
    }

    /// Returns the command that allows creating a topic and writing to it.
    #[must_use]
    pub(crate) fn create(&self, topic: &str) -> String {
        self.command("--operation Create --operation Write", "--topic", topic)
    }

    /// Returns the command that grants the permissions to store checkpoints in a topic.
    #[must_use]
    pub(crate) fn checkpoints(&self, topic: &str) -> String {
        let operations = "--operation Read --operation Write --operation DescribeConfigs";
        self.command(operations, "--topic", topic)
    }

    /// Returns the command that allows using transactions.
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

    /// The user name may come from a row of a registry table. Administrators paste the command into
    /// a shell, so the name must not be able to run other commands.
    #[test]
    fn quotes_command_arguments_for_the_shell() {
        let mut config = ClientConfig::new();
        config.set("sasl.username", "x;touch /tmp/f;#");
        config.set("bootstrap.servers", "kafka:9092,$(id)");
        assert_eq!(
            Grants::for_config(&config).topic("orders"),
            "kafka-acls.sh --bootstrap-server 'kafka:9092,$(id)' --add --allow-principal 'User:x;touch /tmp/f;#' --operation Write \
             --topic orders"
        );
    }
}
