//! Reserves the checkpoint and dead-letter topics of all pipelines of the process in each of its
//! pipelines: a row of one pipeline must not forge a checkpoint of another.

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

/// The checkpoint and dead-letter topics of pipelines, and the constant topics of their events, as
/// [`collision_key`]s.
#[derive(Default)]
pub(super) struct NamedTopics {
    own: BTreeMap<String, TopicUse>,
    fixed: BTreeSet<String>,
}

impl NamedTopics {
    /// Collects the topics that the files contain, whether or not their pipelines were selected.
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
        let checkpoints = pipeline.checkpoint.as_ref().and_then(|of| of.topic.clone());
        let checkpoints = checkpoints.map(|topic| (topic, TopicUse::Checkpoints));
        let dead_letters = pipeline.dead_letter_topic.clone();
        let dead_letters = dead_letters.map(|topic| (topic, TopicUse::DeadLetters));
        let own = checkpoints.into_iter().chain(dead_letters);
        self.own
            .extend(own.map(|(topic, usage)| (collision_key(&topic), usage)));
        let template = pipeline.topic.as_deref().map(str::parse::<Template>);
        let fixed = template.and_then(Result::ok);
        let fixed = fixed.as_ref().and_then(Template::constant);
        self.fixed.extend(fixed.map(collision_key));
        self
    }

    /// Returns why a pipeline that a row defines conflicts with those of the files.
    pub(super) fn conflict(&self, of_row: &PipelineSettings) -> Option<String> {
        let mut own = of_row.own_topics();
        if let Some((topic, usage)) =
            own.find(|(topic, _)| self.fixed.contains(&collision_key(topic)))
        {
            return Some(format!(
                "topic {topic:?}, which is for {usage}, is the topic of another pipeline's events; name another"
            ));
        }
        let fixed = of_row.outbox.topic.constant()?;
        let usage = self.own.get(&collision_key(fixed))?;
        Some(reserved(fixed, *usage))
    }
}

/// Reserves `named` and the pipelines' own topics in each pipeline.
///
/// # Errors
/// Returns an error if the constant topic of a pipeline is one of them.
pub(super) fn reserve(
    named: NamedTopics,
    defined: &mut [Defined<Definition>],
) -> Result<(), ConfigError> {
    let mut own = named.own;
    for of in &*defined {
        let topics = of.settings.own_topics();
        own.extend(topics.map(|(topic, usage)| (topic.to_owned(), usage)));
    }
    let all = ReservedTopics::new(own);
    for of in defined {
        let outbox = &mut of.settings.outbox;
        outbox.reserved_topics = all.clone();
        // The definition contains only the reserved topics that the pipeline's own rows could use,
        // so that other changes don't restart the pipeline.
        of.definition.reserved = outbox.topic.reachable(&all);
        // A topic in a row can't make the pipelines of a file invalid. Their events are unroutable
        // then.
        if !of.definition.pipeline.origin.is_row() {
            let reader = Reader {
                pipeline: of.settings.name.clone(),
            };
            refuse_fixed(&reader, &of.settings.outbox)?;
        }
    }
    Ok(())
}

/// # Errors
/// Returns an error if all events would be written to a reserved topic.
pub(super) fn refuse_fixed(reader: &Reader, outbox: &OutboxSettings) -> Result<(), ConfigError> {
    let Some(topic) = outbox.topic.constant() else {
        return Ok(());
    };
    match outbox.reserved_topics.find(topic) {
        None => Ok(()),
        Some(usage) => Err(reader.error("topic", reserved(topic, usage))),
    }
}

fn reserved(topic: &str, usage: TopicUse) -> String {
    format!("topic {topic:?} is reserved for {usage}; name another")
}

impl Origin {
    fn is_row(&self) -> bool {
        matches!(self, Self::Row { .. })
    }
}
