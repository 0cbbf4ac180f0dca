//! A pipeline's Kafka properties, and its credentials for the brokers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::Given;
use super::error::ConfigError;
use super::file::{self, FilePipeline, Origin};
use super::reader::Reader;
use super::selection::read_again;
use super::values::{KAFKA_VARIABLE_PREFIX, TOKEN_COMMAND};
use crate::kafka::credentials::Credentials;
use crate::kafka::properties::{self, Properties, PropertyError, client_config};
use crate::kafka::token_endpoint::{self, Endpoint};
use crate::pipeline::settings::SinkSettings;
use crate::program::Program;

/// Returns the properties set by environment variables. For example, `WALPOST_KAFKA_SASL_PASSWORD`
/// sets `sasl.password`.
pub(super) fn kafka_properties(vars: impl Iterator<Item = (String, String)>) -> Properties {
    vars.filter_map(|(name, value)| {
        let name = name.strip_prefix(KAFKA_VARIABLE_PREFIX)?;
        Some((name.to_lowercase().replace('_', "."), value))
    })
    .collect()
}

pub(super) fn sink(
    reader: &Reader,
    file: &FilePipeline,
    path: Option<&Path>,
    kafka: &BTreeMap<String, file::Scalar>,
    from_env: &Properties,
    given: &Given<'_>,
) -> Result<SinkSettings, ConfigError> {
    let mut overrides = from_env.clone();
    if let Some(records) = given.records {
        if let Some(brokers) = &records.kafka {
            overrides.insert("bootstrap.servers".to_owned(), brokers.clone());
        }
        for property in &records.kafka_property {
            let (name, value) = property.split_once('=').ok_or_else(|| {
                // Quote only the name in the error, because the text that follows may be a
                // password.
                let is_name = |c: &char| c.is_ascii_alphanumeric() || ".-_".contains(*c);
                let name: String = property.chars().take_while(is_name).collect();
                ConfigError::Flag(format!("--kafka-property {name:?}: expected NAME=VALUE"))
            })?;
            overrides.insert(name.trim().to_owned(), value.to_owned());
        }
    }
    let mut properties = file_properties(kafka, file);
    properties.extend(overrides.clone());
    let secrets = path.map(|path| SecretFile {
        path: path.to_owned(),
        origin: file.origin.clone(),
        pipeline: reader.pipeline.clone(),
        overrides: overrides.clone(),
        recipients: recipients(&properties),
    });
    let program = token_command(reader, file, &properties)?;
    let endpoint = match token_endpoint::is_named(&properties) {
        true => Some(endpoint(
            reader,
            secrets.clone(),
            &overrides,
            &mut properties,
        )?),
        false => None,
    };
    // Only a flag can allow properties that run code, because a user who may edit the file is not
    // necessarily allowed to run programs as Walpost's user.
    let may_run_code = given
        .records
        .is_some_and(|records| records.allow_code_in_kafka_properties);
    let checked = match may_run_code {
        true => properties::check_with_code(&properties),
        false => properties::check(&properties),
    };
    let checked = checked.and_then(|()| {
        match properties::check_files(&client_config(&properties, "walpost")) {
            // Ignore missing files here; an error is reported when the connection is opened.
            Err(error) if error.is_untrusted() => Err(PropertyError::File(error)),
            _ => Ok(()),
        }
    });
    checked.map_err(|error| {
        let text = error.to_string();
        let variable = from_env.keys().find(|name| text.contains(*name));
        ConfigError::Kafka {
            pipeline: reader.pipeline.clone(),
            error,
            origin: variable.map_or_else(String::new, |name| {
                let variable = name.to_uppercase().replace('.', "_");
                format!(
                    ". The property comes from the environment variable {KAFKA_VARIABLE_PREFIX}{variable}"
                )
            }),
        }
    })?;
    if let Some(create) = &file.create_topics
        && (create.partitions < 1 || create.replication == 0 || create.replication < -1)
    {
        return Err(reader.error(
            "create_topics",
            "expected at least 1 partition and 1 replica",
        ));
    }
    let credentials = match (program, endpoint) {
        (Some(program), _) => {
            let (pipeline, path) = (&reader.pipeline, program.path());
            let origin = format!("{TOKEN_COMMAND} of pipeline {pipeline:?}: {path}");
            Credentials::from_program(origin, program)
        }
        (None, Some(endpoint)) => Credentials::from_endpoint(endpoint),
        (None, None) => credentials(secrets, &overrides),
    };
    Ok(SinkSettings::Kafka {
        properties,
        create_topics: file.create_topics,
        credentials,
    })
}

/// Returns the program that prints tokens for SASL/OAUTHBEARER. The program is required if that
/// mechanism is used without another source of tokens, and rejected otherwise.
fn token_command(
    reader: &Reader,
    file: &FilePipeline,
    properties: &Properties,
) -> Result<Option<Program>, ConfigError> {
    let error = |reason: String| reader.error(TOKEN_COMMAND, reason);
    let property = |names: &[&str]| {
        let mut found = names.iter().filter_map(|name| properties.get(*name));
        found.next().map_or("", |value| value.trim())
    };
    let mechanism = property(&["sasl.mechanisms", "sasl.mechanism"]);
    let protocol = property(&["security.protocol"]).to_ascii_lowercase();
    let is_used = mechanism == "OAUTHBEARER" && protocol.starts_with("sasl_");
    let is_fetched = token_endpoint::is_named(properties);
    let unused = || {
        format!(
            "tokens are used only with SASL/OAUTHBEARER, but sasl.mechanisms is {mechanism:?} and security.protocol is \
             {protocol:?}. Set \"sasl.mechanisms\" = \"OAUTHBEARER\" and \"security.protocol\" = \"sasl_ssl\", or remove \
             this key"
        )
    };
    if is_fetched && !is_used {
        return Err(reader.error(token_endpoint::METHOD, unused()));
    }
    let Some(argv) = &file.kafka_token_command else {
        // No program is needed if librdkafka generates unsecured tokens, which are meant for
        // testing.
        let is_given =
            is_fetched || properties.contains_key("enable.sasl.oauthbearer.unsecure.jwt");
        if is_used && !is_given {
            return Err(error(
                "sasl.mechanisms is OAUTHBEARER, but no token source is configured. Specify a program that prints a \
                 token, like [\"/usr/bin/...\", \"...\"], or set \"sasl.oauthbearer.method\" = \"oidc\" in [kafka] to \
                 use a token endpoint"
                    .to_owned(),
            ));
        }
        return Ok(None);
    };
    if is_fetched {
        return Err(error(
            "sasl.oauthbearer.method is oidc, so tokens come from a token endpoint. Remove either \
             sasl.oauthbearer.method or kafka_token_command"
                .to_owned(),
        ));
    }
    if !is_used {
        return Err(error(unused()));
    }
    Program::new(argv).map(Some).map_err(error)
}

/// Creates the token endpoint from the properties that configure it, and removes these properties.
/// The client secret is read from the file again for each token, unless `overrides` contains it:
/// overrides take precedence over the file.
fn endpoint(
    reader: &Reader,
    secrets: Option<SecretFile>,
    overrides: &Properties,
    properties: &mut Properties,
) -> Result<Endpoint, ConfigError> {
    let secret = |properties: &Properties| {
        let mut found = token_endpoint::SECRETS
            .iter()
            .filter_map(|name| properties.get(*name));
        found.next().cloned()
    };
    let fixed = match secrets {
        Some(_) => secret(overrides),
        None => secret(properties),
    };
    let loaded = secret(properties);
    let read_secret = move || match (&fixed, &secrets) {
        (None, Some(secrets)) => match secrets.reread()? {
            Reread::Current(properties) => Ok(secret(&properties)),
            Reread::ForOtherServers(_) => Ok(loaded.clone()),
        },
        (fixed, _) => Ok(fixed.clone()),
    };
    let endpoint = Endpoint::from_properties(properties, read_secret);
    endpoint.map_err(|reason| reader.error("kafka", reason))
}

/// Returns the pipeline's properties from the file, including properties that apply to all
/// pipelines.
fn file_properties(kafka: &BTreeMap<String, file::Scalar>, pipeline: &FilePipeline) -> Properties {
    let own = pipeline.kafka.iter().flatten();
    kafka
        .iter()
        .chain(own)
        .map(|(name, value)| (name.clone(), value.to_string()))
        .collect()
}

/// The properties that determine which servers receive a secret, and how these servers are
/// authenticated.
const RECIPIENT_PROPERTIES: [&str; 14] = [
    "bootstrap.servers",
    "metadata.broker.list",
    "security.protocol",
    "sasl.mechanism",
    "sasl.mechanisms",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.endpoint.identification.algorithm",
    "enable.ssl.certificate.verification",
    "sasl.oauthbearer.token.endpoint.url",
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.id",
    "https.ca.location",
    "https.ca.pem",
];

fn recipients(properties: &Properties) -> Properties {
    let is_recipient =
        |(name, _): &(&String, &String)| RECIPIENT_PROPERTIES.contains(&name.as_str());
    let found = properties.iter().filter(is_recipient);
    found
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// A configuration file from which a pipeline's secrets are read again, because they may have
/// changed since the file was last read.
#[derive(Clone)]
struct SecretFile {
    path: PathBuf,
    origin: Origin,
    pipeline: String,
    /// Properties that take precedence over the file.
    overrides: Properties,
    /// The values of [`RECIPIENT_PROPERTIES`] that the pipeline currently uses.
    recipients: Properties,
}

impl SecretFile {
    /// Reads the file again, and returns the pipeline's current properties. If the file now names
    /// different servers, its secrets are for these servers and must not be sent to the servers in
    /// use, so this returns the name of the changed property in [`Reread::ForOtherServers`].
    fn reread(&self) -> Result<Reread, String> {
        let current = read_again(&self.path, &self.origin, &self.pipeline);
        let (kafka, current) = current.map_err(|error| error.to_string())?;
        let mut current = file_properties(&kafka, &current);
        current.extend(self.overrides.clone());
        let now = recipients(&current);
        let mut names = self.recipients.keys().chain(now.keys());
        match names.find(|name| self.recipients.get(*name) != now.get(*name)) {
            None => Ok(Reread::Current(current)),
            Some(name) => Ok(Reread::ForOtherServers(name.clone())),
        }
    }
}

/// The result of reading a [`SecretFile`] again.
enum Reread {
    Current(Properties),
    ForOtherServers(String),
}

/// Returns the credentials for the brokers. The file is read again, because the credentials may
/// have changed since it was last read. The properties in `overrides` take precedence over the file
/// and are not read again.
fn credentials(secrets: Option<SecretFile>, overrides: &Properties) -> Credentials {
    let secrets = match secrets {
        Some(secrets) if !overrides.contains_key("sasl.password") => secrets,
        _ => {
            return Credentials::fixed(format!(
                "the flag -X sasl.password or the environment variable {KAFKA_VARIABLE_PREFIX}SASL_PASSWORD; both are read \
                 only at startup"
            ));
        }
    };
    let place = format!("\"sasl.password\" in {}", secrets.path.display());
    Credentials::kept(place, move || match secrets.reread()? {
        Reread::Current(properties) => Ok(properties),
        Reread::ForOtherServers(name) => Err(format!(
            "property {name} was changed too, so the password in the file may be for other brokers. All changes to the \
             file take effect when the configuration is reloaded"
        )),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rereads_secrets_only_for_the_servers_in_use() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("walpost.toml");
        let write = |brokers: &str, password: &str| {
            let text = format!(
                "[kafka]\n\"bootstrap.servers\" = \"{brokers}\"\n\"sasl.password\" = \"{password}\"\n\
                 [[pipeline]]\nname = \"a\"\npostgres = \"postgresql://r@h/d\"\n"
            );
            std::fs::write(&path, text).expect("written");
        };
        let property = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let file = |overrides: Properties, brokers: &str| SecretFile {
            path: path.clone(),
            origin: Origin::File(path.clone()),
            pipeline: "a".to_owned(),
            overrides,
            recipients: Properties::from([property("bootstrap.servers", brokers)]),
        };
        let password = |secrets: &SecretFile| match secrets.reread().expect("a valid file") {
            Reread::Current(properties) => Ok(properties["sasl.password"].clone()),
            Reread::ForOtherServers(name) => Err(name),
        };
        let in_use = file(Properties::new(), "a:1");
        write("a:1", "old");
        assert_eq!(password(&in_use), Ok("old".to_owned()));
        write("a:1", "new");
        assert_eq!(password(&in_use), Ok("new".to_owned()));
        write("b:1", "for b");
        assert_eq!(password(&in_use), Err("bootstrap.servers".to_owned()));
        // If the environment sets the brokers, a change of the brokers in the file has no effect.
        let overrides = Properties::from([property("bootstrap.servers", "c:1")]);
        assert_eq!(password(&file(overrides, "c:1")), Ok("for b".to_owned()));
    }
}
