//! Prevents each pipeline's rows from being routed to any pipeline's checkpoint or dead-letter
//! topic, so that a row of one pipeline can't forge another pipeline's checkpoint.
//!
//! If pipelines are defined by the rows of a query's result, every topic name that matches the
//! template of a checkpoint or dead-letter topic is reserved, even if no row produces that name.
//! Otherwise, the topics would not be reserved while the query fails, and each added row would
//! restart other pipelines.

use std::collections::{BTreeMap, BTreeSet};

use super::Definition;
use super::error::ConfigError;
use super::file::{File, FilePipeline, Origin};
use super::reader::Reader;
use super::row_values;
use crate::outbox::reserved_topics::{ReservedTopics, TopicPattern, TopicUse, collision_key};
use crate::outbox::settings::{OutboxSettings, Topic};
use crate::outbox::template::Template;
use crate::pipeline::settings::PipelineSettings;
use crate::supervisor::definitions::Defined;

/// The topics that the configuration files name, both in pipelines and in the templates of sources.
#[derive(Default)]
pub(super) struct NamedTopics {
    /// The checkpoint and dead-letter topics of the pipelines in the files, keyed by
    /// [`collision_key`].
    own: BTreeMap<String, TopicUse>,
    /// The checkpoint and dead-letter topics in the templates of sources.
    patterns: Vec<TopicPattern>,
    /// The [`collision_key`]s of event topics that have a fixed name, which does not depend on a
    /// row's values or table.
    constant: BTreeSet<String>,
    /// The topics in `own` and `patterns`.
    reserved: ReservedTopics,
}

impl NamedTopics {
    /// Collects the topics of all pipelines and sources in the files, including pipelines that were
    /// not selected. Ignores pipelines defined by rows, whose topics match a template.
    pub(super) fn from_files(file: &File) -> Self {
        let pipelines = file.pipeline.iter();
        let pipelines = pipelines.filter(|pipeline| !pipeline.origin.is_row());
        let named = pipelines.fold(Self::default(), Self::with_topics_of);
        let templates = file.queries().map(|source| &source.template);
        let patterns: Vec<_> = templates.flat_map(topic_patterns).collect();
        Self {
            reserved: ReservedTopics::new(named.own.clone()).with_patterns(patterns.clone()),
            patterns,
            ..named
        }
    }

    fn with_topics_of(mut self, pipeline: &FilePipeline) -> Self {
        let checkpoints = pipeline.checkpoint.as_ref();
        let checkpoints = checkpoints.and_then(|checkpoint| checkpoint.topic.clone());
        let checkpoints = checkpoints.map(|topic| (topic, TopicUse::Checkpoints));
        let dead_letters = pipeline.dead_letter_topic.clone();
        let dead_letters = dead_letters.map(|topic| (topic, TopicUse::DeadLetters));
        let own = checkpoints.into_iter().chain(dead_letters);
        self.own
            .extend(own.map(|(topic, usage)| (collision_key(&topic), usage)));
        let template = pipeline.topic.as_deref().map(str::parse::<Template>);
        let template = template.and_then(Result::ok);
        let constant = template.as_ref().and_then(Template::constant);
        self.constant.extend(constant.map(collision_key));
        self
    }

    /// Returns an error message if a pipeline defined by a row conflicts with the pipelines in the
    /// files, or if all its events would be written to reserved topics.
    pub(super) fn conflict(&self, row_pipeline: &PipelineSettings) -> Option<String> {
        let mut own = row_pipeline.own_topics();
        if let Some((topic, usage)) =
            own.find(|(topic, _)| self.constant.contains(&collision_key(topic)))
        {
            return Some(format!(
                "topic {topic:?} is used for {usage}, but another pipeline writes its events to this topic; choose another topic"
            ));
        }
        constant_topic_error(&row_pipeline.outbox.topic, &self.reserved)
    }

    /// Rejects a pipeline's checkpoint or dead-letter topic if a source's template reserves the
    /// topic for a different purpose. Otherwise, a dead letter of the pipeline could be read as a
    /// checkpoint by a pipeline that the source defines.
    ///
    /// # Errors
    /// Returns an error that names the setting and the template.
    fn reject_reserved_for_others(&self, settings: &PipelineSettings) -> Result<(), ConfigError> {
        let defaults = ReservedTopics::default();
        for (topic, usage) in settings.own_topics() {
            let is_reserved_for_others =
                |pattern: &&TopicPattern| pattern.usage() != usage && pattern.matches(topic);
            let pattern = self.patterns.iter().find(is_reserved_for_others);
            let Some(pattern) = pattern.filter(|_| defaults.find(topic).is_none()) else {
                continue;
            };
            let key = match usage {
                TopicUse::Checkpoints => "checkpoint",
                TopicUse::DeadLetters | TopicUse::KafkaInternal => "dead_letter_topic",
            };
            let reason = format!(
                "topic {topic:?} is used for {usage}, but topics that match {:?} in the template of a fleet.source are reserved \
                 for {}; choose another topic",
                pattern.text(),
                pattern.usage()
            );
            return Err(reader(settings).error(key, reason));
        }
        Ok(())
    }
}

fn reader(settings: &PipelineSettings) -> Reader {
    Reader {
        pipeline: settings.name.clone(),
    }
}

/// Reserves the topics in `named` and the checkpoint and dead-letter topics of each pipeline, so
/// that no pipeline's events can be routed to them.
///
/// # Errors
/// Returns an error if a pipeline would write all its events to reserved topics, or if its
/// checkpoint or dead-letter topic is reserved for a different purpose.
pub(super) fn reserve(
    named: &NamedTopics,
    defined: &mut [Defined<Definition>],
) -> Result<(), ConfigError> {
    // Skip topics that match a template, because the template already reserves them. If they were
    // added here, each new row would restart other pipelines.
    let is_covered = |topic: &str| {
        let mut patterns = named.patterns.iter();
        patterns.any(|pattern| pattern.matches(topic))
    };
    let mut own = named.own.clone();
    for pipeline in &*defined {
        let topics = pipeline.settings.own_topics();
        let topics = topics.filter(|(topic, _)| !is_covered(topic));
        own.extend(topics.map(|(topic, usage)| (collision_key(topic), usage)));
    }
    let all = ReservedTopics::new(own).with_patterns(named.patterns.clone());
    for pipeline in defined {
        let outbox = &mut pipeline.settings.outbox;
        outbox.reserved_topics = all.clone();
        // The definition contains only those reserved topics that the pipeline's rows could be
        // routed to, so that changes to other topics don't restart the pipeline.
        pipeline.definition.reserved = outbox.topic.reachable(&all);
        // If a row of a query's result specifies a reserved topic, the file as a whole remains
        // valid, and the events of that row's pipeline are treated as unroutable.
        if !pipeline.definition.pipeline.origin.is_row() {
            let settings = &pipeline.settings;
            reject_constant_topic(&reader(settings), &settings.outbox)?;
            named.reject_reserved_for_others(settings)?;
        }
    }
    Ok(())
}

/// Rejects settings that route all events to reserved topics.
///
/// # Errors
/// Returns an error if all events would be written to reserved topics.
pub(super) fn reject_constant_topic(
    reader: &Reader,
    outbox: &OutboxSettings,
) -> Result<(), ConfigError> {
    match constant_topic_error(&outbox.topic, &outbox.reserved_topics) {
        None => Ok(()),
        Some(reason) => Err(reader.error("topic", reason)),
    }
}

/// Returns an error message if all events would be written to reserved topics.
fn constant_topic_error(topic: &Topic, reserved: &ReservedTopics) -> Option<String> {
    if let Some(pattern) = topic
        .outline()
        .and_then(|outline| reserved.find_pattern(&outline))
    {
        return Some(format!(
            "\"{topic}\" always produces topics that match {:?} in the template of a fleet.source and are therefore reserved for \
             {}; choose another topic, or add text to the template",
            pattern.text(),
            pattern.usage()
        ));
    }
    let constant = topic.constant()?;
    let usage = reserved.find(constant)?;
    Some(format!(
        "topic {constant:?} is reserved for {usage}; choose another topic"
    ))
}

/// Returns patterns for all checkpoint and dead-letter topics that a source's template can produce,
/// regardless of the rows that the source's query returns.
fn topic_patterns(template: &toml::Table) -> impl Iterator<Item = TopicPattern> {
    let topics = row_values::own_topics(template).into_iter();
    topics.filter_map(|(_, usage, text)| {
        // If the template contains unmatched braces, no row is valid.
        let literals = row_values::literals(text).ok()?;
        Some(TopicPattern::new(text, usage, &literals))
    })
}

impl Origin {
    fn is_row(&self) -> bool {
        matches!(self, Self::Row { .. })
    }
}
