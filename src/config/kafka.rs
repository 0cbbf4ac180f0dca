//! The brokers, and the credentials for them.

use std::collections::BTreeMap;
use std::path::Path;

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

/// Returns the properties set by environment variables: `WALPOST_KAFKA_SASL_PASSWORD` is
/// `sasl.password`.
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
    let mut over = from_env.clone();
    if let Some(records) = given.records {
        if let Some(brokers) = &records.kafka {
            over.insert("bootstrap.servers".to_owned(), brokers.clone());
        }
        for property in &records.kafka_property {
            let (name, value) = property.split_once('=').ok_or_else(|| {
                // The text after the name may be a password.
                let is_name = |c: &char| c.is_ascii_alphanumeric() || ".-_".contains(*c);
                let name: String = property.chars().take_while(is_name).collect();
                ConfigError::Flag(format!("--kafka-property {name:?}: expected NAME=VALUE"))
            })?;
            over.insert(name.trim().to_owned(), value.to_owned());
        }
    }
    let mut properties = properties_of_file(kafka, file);
    properties.extend(over.clone());
    let program = token_command(reader, file, &properties)?;
    let endpoint = match token_endpoint::is_named(&properties) {
        true => Some(endpoint(
            reader,
            path,
            &file.origin,
            &over,
            &mut properties,
        )?),
        false => None,
    };
    // A user who may write the file is not necessarily allowed to run programs as Walpost's user.
    let may_run_code = given
        .records
        .is_some_and(|records| records.allow_code_in_kafka_properties);
    let checked = match may_run_code {
        true => properties::check_with_code(&properties),
        false => properties::check(&properties),
    };
    let checked = checked.and_then(|()| {
        match properties::check_files(&client_config(&properties, "walpost")) {
            // A missing file is reported by the command that connects.
            Err(error) if error.is_distrust() => Err(PropertyError::File(error)),
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
                    ". It comes from the environment variable {KAFKA_VARIABLE_PREFIX}{variable}"
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
        (None, None) => credentials(path, &file.origin, &reader.pipeline, over),
    };
    Ok(SinkSettings::Kafka {
        properties,
        create_topics: file.create_topics,
        credentials,
    })
}

/// Returns the program that prints tokens for SASL/OAUTHBEARER. It must be configured if that
/// mechanism is used without another source of tokens, and must not be configured otherwise.
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
            "tokens are for SASL/OAUTHBEARER, and sasl.mechanisms is {mechanism:?} with security.protocol {protocol:?}. Set \
             \"sasl.mechanisms\" = \"OAUTHBEARER\" and \"security.protocol\" = \"sasl_ssl\"; or leave it out"
        )
    };
    if is_fetched && !is_used {
        return Err(reader.error(token_endpoint::METHOD, unused()));
    }
    let Some(argv) = &file.kafka_token_command else {
        // librdkafka has another way to create tokens, for tests.
        let is_given =
            is_fetched || properties.contains_key("enable.sasl.oauthbearer.unsecure.jwt");
        if is_used && !is_given {
            return Err(error(
                "sasl.mechanisms is OAUTHBEARER, and nothing gives a token: name a program that prints one, as \
                 [\"/usr/bin/...\", \"...\"], or set \"sasl.oauthbearer.method\" = \"oidc\" in [kafka] for a token endpoint"
                    .to_owned(),
            ));
        }
        return Ok(None);
    };
    if is_fetched {
        return Err(error(
            "sasl.oauthbearer.method is oidc, with which tokens come from a token endpoint. Leave one of the two out".to_owned(),
        ));
    }
    if !is_used {
        return Err(error(unused()));
    }
    Program::new(argv).map(Some).map_err(error)
}

/// Returns the token endpoint that the properties configure, and removes these properties. The
/// client's secret is read again for each token, unless `over`, which overrides the file, contains
/// it.
fn endpoint(
    reader: &Reader,
    path: Option<&Path>,
    origin: &Origin,
    over: &Properties,
    properties: &mut Properties,
) -> Result<Endpoint, ConfigError> {
    let secret = |of: &Properties| {
        let mut found = token_endpoint::SECRETS
            .iter()
            .filter_map(|name| of.get(*name));
        found.next().cloned()
    };
    let fixed = match path {
        Some(_) => secret(over),
        None => secret(properties),
    };
    let (path, origin) = (path.map(Path::to_owned), origin.clone());
    let pipeline = reader.pipeline.clone();
    let read_secret = move || match (&fixed, &path) {
        (None, Some(path)) => Ok(secret(&properties_again(path, &origin, &pipeline)?)),
        (fixed, _) => Ok(fixed.clone()),
    };
    let taken = Endpoint::from_properties(properties, read_secret);
    taken.map_err(|reason| reader.error("kafka", reason))
}

/// Returns the properties that the file contains for a pipeline.
fn properties_of_file(
    kafka: &BTreeMap<String, file::Scalar>,
    pipeline: &FilePipeline,
) -> Properties {
    let own = pipeline.kafka.iter().flatten();
    kafka
        .iter()
        .chain(own)
        .map(|(name, value)| (name.clone(), value.to_string()))
        .collect()
}

/// Returns the properties that the file now contains for a pipeline.
fn properties_again(path: &Path, origin: &Origin, pipeline: &str) -> Result<Properties, String> {
    let again = read_again(path, origin, pipeline);
    let (kafka, now) = again.map_err(|error| error.to_string())?;
    Ok(properties_of_file(&kafka, &now))
}

/// Returns the credentials for the brokers, which may change in the file. Properties in `over`
/// override the file and don't change.
fn credentials(
    path: Option<&Path>,
    origin: &Origin,
    pipeline: &str,
    over: Properties,
) -> Credentials {
    let path = match path {
        Some(path) if !over.contains_key("sasl.password") => path.to_owned(),
        _ => {
            return Credentials::fixed(format!(
                "-X sasl.password or the environment variable {KAFKA_VARIABLE_PREFIX}SASL_PASSWORD, which are read at the start only"
            ));
        }
    };
    let place = format!("\"sasl.password\" in {}", path.display());
    let (origin, pipeline) = (origin.clone(), pipeline.to_owned());
    Credentials::kept(place, move || {
        let mut now = properties_again(&path, &origin, &pipeline)?;
        now.extend(over.clone());
        Ok(now)
    })
}
