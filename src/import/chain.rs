//! Reads the chain of transforms: the outbox event router, its predicate, and the other transforms.

use super::java_regex::{self, Pattern};
use super::report::Report;
use super::source::{ImportError, Source, Taken};

const ROUTER: &str = "io.debezium.transforms.outbox.EventRouter";

/// The chain of transforms: the outbox event router, and the transforms before and after it.
#[derive(Debug)]
pub(super) struct Chain {
    /// The prefix of the router's properties: `transforms.outbox.`.
    pub(super) prefix: String,
    /// The predicate that selects the records to which the router is applied, if there is one.
    pub(super) filter: Option<Filter>,
    others: Vec<OtherTransform>,
}

/// A predicate that selects change events by topic.
#[derive(Debug)]
pub(super) struct Filter {
    /// The name of the property that sets the predicate, as written in the file.
    pub(super) written: String,
    /// The regular expression that topics must match, in Java's syntax.
    pub(super) java: String,
    pattern: Pattern,
    negate: bool,
}

impl Filter {
    /// Returns whether the predicate accepts change events in this topic.
    #[must_use]
    pub(super) fn accepts(&self, topic: &str) -> bool {
        self.pattern.matches_whole(topic) != self.negate
    }

    #[must_use]
    pub(super) fn is_negated(&self) -> bool {
        self.negate
    }
}

/// A transform in the chain other than the outbox event router.
#[derive(Debug)]
struct OtherTransform {
    written: String,
    class: String,
    is_before: bool,
    condition: Condition,
}

/// The condition under which a transform is applied.
#[derive(Debug)]
enum Condition {
    Always,
    /// The transform is applied only to tombstones, which are records whose value is null.
    Tombstones,
    Matches(Filter),
    /// The condition can't be determined, and the reason has already been reported.
    Unknown,
}

/// Reads the chain of transforms.
///
/// # Errors
/// Returns an error if the chain does not contain the outbox event router.
pub(super) fn read(source: &mut Source, report: &mut Report) -> Result<Chain, ImportError> {
    let names = source.take_property("transforms", report);
    let names = names.map(|names| names.list()).unwrap_or_default();
    let mut router = None;
    let mut others = Vec::new();
    for name in names {
        let prefix = format!("transforms.{name}.");
        let class = source.take_property(&format!("{prefix}type"), report);
        let condition = condition(&prefix, source, report);
        let Some(class) = class else {
            let message = "this transform is in the list of transforms but has no type, which Kafka Connect rejects";
            report.unknown(&format!("transforms.{name}"), message);
            continue;
        };
        if class.value.trim() == ROUTER && router.is_none() {
            report.carried(
                &class.written,
                "the router's properties become keys of walpost.toml",
            );
            router = Some((prefix, condition));
            continue;
        }
        if class.value.trim() == ROUTER {
            let message = "this transform is a second outbox event router, but only one can be imported at a time: import this \
             router separately, from a copy of the file without the first router, and append its [[pipeline]] to this file";
            report.unsupported(&class.written, message);
        } else {
            others.push(OtherTransform {
                written: class.written,
                class: class.value,
                is_before: router.is_none(),
                condition,
            });
        }
        while let Some(rest) = source.next_with_prefix(&prefix) {
            source.raw(&format!("{prefix}{rest}"));
        }
    }
    let (prefix, condition) = router.ok_or(ImportError::NoRouter)?;
    let filter = match condition {
        Condition::Matches(filter) => Some(filter),
        _ => None,
    };
    source.raw("predicates");
    // Transforms that are not in the chain, and predicates that no transform uses, have no effect.
    let unused = source.unrequested().filter(|(name, _)| {
        name.starts_with("predicates.")
            || name.starts_with("transforms.") && !name.starts_with(&prefix)
    });
    for name in unused.map(|(name, _)| name.to_owned()).collect::<Vec<_>>() {
        if let Some(taken) = source.raw(&name) {
            report.without_effect(&taken.written);
        }
    }
    Ok(Chain {
        prefix,
        filter,
        others,
    })
}

/// Reads the condition under which a transform is applied.
fn condition(prefix: &str, source: &mut Source, report: &mut Report) -> Condition {
    let predicate = source.take_property(&format!("{prefix}predicate"), report);
    let negate = source.take_property(&format!("{prefix}negate"), report);
    let negate = negate.is_some_and(|negate| negate.is("true"));
    let Some(predicate) = predicate else {
        return Condition::Always;
    };
    let properties = format!("predicates.{}.", predicate.value.trim());
    let class = source.take_property(&format!("{properties}type"), report);
    let class = class.map(|class| class.value).unwrap_or_default();
    let condition = match class.trim().rsplit('.').next().unwrap_or_default() {
        "TopicNameMatches" => topic_condition(&properties, &predicate, negate, source, report),
        // The router discards tombstones, so it makes no difference that the transform skips them.
        "RecordIsTombstone" if negate => Condition::Always,
        "RecordIsTombstone" => Condition::Tombstones,
        _ => {
            let message = "Walpost has no equivalent for this predicate: all rows of the table are delivered. If some rows must \
             not be delivered, change the service so that it writes them to another table";
            report.unsupported(&predicate.written, message);
            Condition::Unknown
        }
    };
    while let Some(rest) = source.next_with_prefix(&properties) {
        source.raw(&format!("{properties}{rest}"));
    }
    condition
}

/// Reads a predicate that matches topic names. `prefix` is the prefix of the predicate's
/// properties.
fn topic_condition(
    prefix: &str,
    predicate: &Taken,
    negate: bool,
    source: &mut Source,
    report: &mut Report,
) -> Condition {
    let Some(java) = source.take_property(&format!("{prefix}pattern"), report) else {
        report.unknown(
            &format!("{prefix}pattern"),
            "this property is missing, which Kafka Connect rejects",
        );
        return Condition::Unknown;
    };
    match java_regex::pattern(&java.value) {
        Ok(pattern) => Condition::Matches(Filter {
            written: predicate.written.clone(),
            java: java.value,
            pattern,
            negate,
        }),
        Err(reason) => {
            let message = format!(
                "this pattern can't be converted: {reason}. Find the connector's table that the pattern matches, and set table in \
                 walpost.toml to the name of this table"
            );
            report.unsupported(&java.written, message);
            Condition::Unknown
        }
    }
}

impl Chain {
    /// Reports which of the transforms other than the router Walpost can replace. `topics` are the
    /// topics of the outbox's change events before the router is applied.
    pub(super) fn report_others(&self, topics: &[String], report: &mut Report) {
        for other in &self.others {
            let short = other.class.rsplit('.').next().unwrap_or_default();
            let applies_to_outbox = match &other.condition {
                Condition::Always | Condition::Unknown => true,
                Condition::Tombstones => !other.is_before,
                // The topic names are known only for transforms before the router, because the
                // router changes the topic.
                Condition::Matches(filter) if other.is_before => {
                    topics.iter().any(|topic| filter.accepts(topic))
                }
                Condition::Matches(_) => true,
            };
            // A transform that only changes the topic has no effect if it precedes the router,
            // because the router sets the topic regardless of its previous value.
            let only_topic = other.is_before
                && ["RegexRouter", "ByLogicalTableRouter", "TimestampRouter"].contains(&short);
            if !applies_to_outbox || only_topic {
                report.without_effect(&other.written);
                continue;
            }
            let message = match (short, other.is_before) {
                ("RegexRouter" | "TimestampRouter" | "ByLogicalTableRouter", _) => format!(
                    "{short} changes the topic that the outbox event router has chosen. In Walpost, the topic or route setting \
                     alone determines the topic: include this change in that setting"
                ),
                ("InsertHeader" | "HeaderFrom" | "DropHeaders", _) => {
                    format!("{short} changes headers: make these changes in the headers setting, which accepts templates and \
                         constant values")
                }
                ("Filter", _) => "Filter drops records, but Walpost delivers every row: if some rows must not be \
                 delivered, change the service so that it writes them to another table"
                    .to_owned(),
                ("ActivateTracingSpan", _) => "ActivateTracingSpan creates spans, but Walpost does not: the header \
                 traceparent is read from a column"
                    .to_owned(),
                _ => format!(
                    "Walpost has no equivalent for the transform {short}: change the service so that it writes events as \
                     consumers expect them"
                ),
            };
            report.unsupported(&other.written, message);
        }
    }
}
