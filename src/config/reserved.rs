//! Prevents each pipeline's rows from being routed to any pipeline's checkpoint or dead-letter
//! topic, so that a row of one pipeline can't forge another pipeline's checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use super::Definition;
use super::error::ConfigError;
use super::file::{FilePipeline, Origin};
use super::reader::Reader;
use crate::outbox::reserved_topics::{ReservedTopics, TopicUse, collision_key};
use crate::outbox::settings::OutboxSettings;
use crate::outbox::template::Template;
use crate::pipeline::settings::PipelineSettings;
use crate::supervisor::definitions::Defined;

/// Topics named in pipelines' settings, keyed by [`collision_key`].
#[derive(Default)]
pub(super) struct NamedTopics {
    /// Topics for checkpoints or dead letters.
    own: BTreeMap<String, TopicUse>,
    /// Event topics whose names depend on neither a row's values nor its table.
    constant: BTreeSet<String>,
}

impl NamedTopics {
    /// Collects the topics of all pipelines in the files, including pipelines that were not
    /// selected.
    pub(super) fn from_files(pipelines: &[FilePipeline]) -> Self {
        let pipelines = pipelines.iter();
        pipelines
            .filter(|pipeline| !pipeline.origin.is_row())
            .fold(Self::default(), Self::with_topics_of)
    }

    /// Collects the topics of all pipelines.
    pub(super) fn from_pipelines(pipelines: &[FilePipeline]) -> Self {
        pipelines.iter().fold(Self::default(), Self::with_topics_of)
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
    /// files.
    pub(super) fn conflict(&self, row_pipeline: &PipelineSettings) -> Option<String> {
        let mut own = row_pipeline.own_topics();
        if let Some((topic, usage)) =
            own.find(|(topic, _)| self.constant.contains(&collision_key(topic)))
        {
            return Some(format!(
                "topic {topic:?} is used for {usage}, but another pipeline writes its events to this topic; choose another topic"
            ));
        }
        let constant = row_pipeline.outbox.topic.constant()?;
        let usage = self.own.get(&collision_key(constant))?;
        Some(reserved_error(constant, *usage))
    }
}

/// Reserves the topics in `named`, and each pipeline's own topics, so that no pipeline's events can
/// be routed to them.
///
/// # Errors
/// Returns an error if a pipeline writes all events to one topic, and this topic is reserved.
pub(super) fn reserve(
    named: NamedTopics,
    defined: &mut [Defined<Definition>],
) -> Result<(), ConfigError> {
    let mut own = named.own;
    for pipeline in &*defined {
        let topics = pipeline.settings.own_topics();
        own.extend(topics.map(|(topic, usage)| (topic.to_owned(), usage)));
    }
    let all = ReservedTopics::new(own);
    for pipeline in defined {
        let outbox = &mut pipeline.settings.outbox;
        outbox.reserved_topics = all.clone();
        // The definition contains only those reserved topics that the pipeline's rows could be
        // routed to, so that changes to other topics don't restart the pipeline.
        pipeline.definition.reserved = outbox.topic.reachable(&all);
        // If the topic comes from a row of a query's result, it must not make the whole file
        // invalid. Instead, the events of that row's pipeline are treated as unroutable.
        if !pipeline.definition.pipeline.origin.is_row() {
            let reader = Reader {
                pipeline: pipeline.settings.name.clone(),
            };
            reject_constant_topic(&reader, &pipeline.settings.outbox)?;
        }
    }
    Ok(())
}

/// Rejects settings that route all events to a reserved topic.
///
/// # Errors
/// Returns an error if all events would be written to a reserved topic.
pub(super) fn reject_constant_topic(
    reader: &Reader,
    outbox: &OutboxSettings,
) -> Result<(), ConfigError> {
    let Some(topic) = outbox.topic.constant() else {
        return Ok(());
    };
    match outbox.reserved_topics.find(topic) {
        None => Ok(()),
        Some(usage) => Err(reader.error("topic", reserved_error(topic, usage))),
    }
}

fn reserved_error(topic: &str, usage: TopicUse) -> String {
    format!("topic {topic:?} is reserved for {usage}; choose another topic")
}

impl Origin {
    fn is_row(&self) -> bool {
        matches!(self, Self::Row { .. })
    }
}
