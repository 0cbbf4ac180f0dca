//! The chain of transforms: the position of the outbox event router, the records that reach it, and
//! the effects of the other transforms.

use super::java_regex::{self, Pattern};
use super::report::Report;
use super::source::{ImportError, Source, Taken};

const ROUTER: &str = "io.debezium.transforms.outbox.EventRouter";

/// The outbox event router and the transforms around it.
#[derive(Debug)]
pub(super) struct Chain {
    /// The prefix of the router's properties: `transforms.outbox.`.
    pub(super) prefix: String,
    /// The condition under which records reach the router, if there is one.
    pub(super) filter: Option<Filter>,
    others: Vec<Other>,
}

/// A predicate.
#[derive(Debug)]
pub(super) struct Filter {
    pub(super) written: String,
    /// The pattern for the topics of change events, in Java's syntax.
    pub(super) java: String,
    pattern: Pattern,
    negate: bool,
}

impl Filter {
    /// Returns whether the change events of the topic are accepted.
    #[must_use]
    pub(super) fn lets_through(&self, topic: &str) -> bool {
        self.pattern.matches_whole(topic) != self.negate
    }

    #[must_use]
    pub(super) fn is_negated(&self) -> bool {
        self.negate
    }
}

/// A transform other than the router.
#[derive(Debug)]
struct Other {
    written: String,
    class: String,
    is_before: bool,
    when: When,
}

#[derive(Debug)]
enum When {
    Always,
    /// For null values only.
    Tombstones,
    Matches(Filter),
    /// The condition is unknown, which was reported.
    NotKnown,
}

/// # Errors
/// Returns an error if there is no router.
pub(super) fn read(source: &mut Source, report: &mut Report) -> Result<Chain, ImportError> {
    let names = source.take_property("transforms", report);
    let names = names.map(|names| names.list()).unwrap_or_default();
    let mut router = None;
    let mut others = Vec::new();
    for name in names {
        let prefix = format!("transforms.{name}.");
        let class = source.take_property(&format!("{prefix}type"), report);
        let when = when(&prefix, source, report);
        let Some(class) = class else {
            let says = "is in the list of transforms but has no type, which Kafka Connect rejects";
            report.unknown(&format!("transforms.{name}"), says);
            continue;
        };
        if class.value.trim() == ROUTER && router.is_none() {
            report.carried(&class.written, "the keys of this file");
            router = Some((prefix, when));
            continue;
        }
        if class.value.trim() == ROUTER {
            let says = "is a second outbox event router, and only one is imported: import this one separately, from a copy of \
             the file without the first, and append its [[pipeline]] to this file";
            report.unsupported(&class.written, says);
        } else {
            others.push(Other {
                written: class.written,
                class: class.value,
                is_before: router.is_none(),
                when,
            });
        }
        while let Some(rest) = source.next_with_prefix(&prefix) {
            source.raw(&format!("{prefix}{rest}"));
        }
    }
    let (prefix, when) = router.ok_or(ImportError::NoRouter)?;
    let filter = match when {
        When::Matches(filter) => Some(filter),
        _ => None,
    };
    source.raw("predicates");
    // Properties of transforms and predicates that are not in use.
    let idle = source.unrequested().filter(|(name, _)| {
        name.starts_with("predicates.")
            || name.starts_with("transforms.") && !name.starts_with(&prefix)
    });
    for name in idle.map(|(name, _)| name.to_owned()).collect::<Vec<_>>() {
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

/// Returns when a transform is applied.
fn when(prefix: &str, source: &mut Source, report: &mut Report) -> When {
    let predicate = source.take_property(&format!("{prefix}predicate"), report);
    let negate = source.take_property(&format!("{prefix}negate"), report);
    let negate = negate.is_some_and(|negate| negate.is("true"));
    let Some(predicate) = predicate else {
        return When::Always;
    };
    let of = format!("predicates.{}.", predicate.value.trim());
    let class = source.take_property(&format!("{of}type"), report);
    let class = class.map(|class| class.value).unwrap_or_default();
    let when = match class.trim().rsplit('.').next().unwrap_or_default() {
        "TopicNameMatches" => matches(&of, &predicate, negate, source, report),
        // The router discards tombstones itself.
        "RecordIsTombstone" if negate => When::Always,
        "RecordIsTombstone" => When::Tombstones,
        _ => {
            let says = "is a predicate for which Walpost has no equivalent: all rows of the table are delivered. If some rows \
             must not be, change the service so that it writes them to another table";
            report.unsupported(&predicate.written, says);
            When::NotKnown
        }
    };
    while let Some(rest) = source.next_with_prefix(&of) {
        source.raw(&format!("{of}{rest}"));
    }
    when
}

fn matches(
    of: &str,
    predicate: &Taken,
    negate: bool,
    source: &mut Source,
    report: &mut Report,
) -> When {
    let Some(java) = source.take_property(&format!("{of}pattern"), report) else {
        report.unknown(
            &format!("{of}pattern"),
            "is missing, which Kafka Connect rejects",
        );
        return When::NotKnown;
    };
    match java_regex::pattern(&java.value) {
        Ok(pattern) => When::Matches(Filter {
            written: predicate.written.clone(),
            java: java.value,
            pattern,
            negate,
        }),
        Err(reason) => {
            let says = format!(
                "can't be read: {reason}. Write the table that it accepts into walpost.toml"
            );
            report.unsupported(&java.written, says);
            When::NotKnown
        }
    }
}

impl Chain {
    /// Reports the effects of the other transforms. `topics` are the topics of the outbox's change
    /// events before the router.
    pub(super) fn others(&self, topics: &[String], report: &mut Report) {
        for other in &self.others {
            let short = other.class.rsplit('.').next().unwrap_or_default();
            let touches_outbox = match &other.when {
                When::Always | When::NotKnown => true,
                When::Tombstones => !other.is_before,
                // The router changes the topic.
                When::Matches(filter) if other.is_before => {
                    topics.iter().any(|topic| filter.lets_through(topic))
                }
                When::Matches(_) => true,
            };
            // The router sets the topic regardless of its previous value.
            let only_topic = other.is_before
                && ["RegexRouter", "ByLogicalTableRouter", "TimestampRouter"].contains(&short);
            if !touches_outbox || only_topic {
                report.without_effect(&other.written);
                continue;
            }
            let says = match (short, other.is_before) {
                ("RegexRouter" | "TimestampRouter" | "ByLogicalTableRouter", _) => format!(
                    "{short} changes the topic after the router. Walpost has a single rule for topics: include this change in \
                     topic or route"
                ),
                ("InsertHeader" | "HeaderFrom" | "DropHeaders", _) => {
                    format!("{short} changes headers: write them into headers, which accepts templates and fixed texts")
                }
                ("Filter", _) => "Filter omits records, and Walpost delivers every row: change the service so that it writes \
                 rows that must not be delivered to another table"
                    .to_owned(),
                ("ActivateTracingSpan", _) => "ActivateTracingSpan creates its own spans, and Walpost creates none: the header \
                 traceparent is read from a column"
                    .to_owned(),
                _ => format!(
                    "{short} is a transform for which Walpost has no equivalent: change the service so that it writes events as \
                     consumers expect them"
                ),
            };
            report.unsupported(&other.written, says);
        }
    }
}
