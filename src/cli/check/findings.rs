//! The findings of `walpost check` and their output.

use serde::Serialize;

use super::super::SHORT_LIST_MAX;
use super::super::out::{self, Tone, say};
use crate::model::exit::Exit;
use crate::pipeline::recovery::Remedy;

/// The outcome of a check, from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    /// The requirement is met.
    Ok,
    /// `run` works, but data may be lost or repeated later.
    Warning,
    /// The server is unreachable or not responding.
    Unreachable,
    /// `run` fails.
    Failure,
}

impl Outcome {
    fn mark(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "WARNING",
            Self::Unreachable => "UNREACHABLE",
            Self::Failure => "FAILED",
        }
    }

    fn tone(self) -> Tone {
        match self {
            Self::Ok => Tone::Good,
            Self::Warning => Tone::Warning,
            Self::Unreachable | Self::Failure => Tone::Bad,
        }
    }
}

const WORST_FIRST: [Outcome; 4] = [
    Outcome::Failure,
    Outcome::Unreachable,
    Outcome::Warning,
    Outcome::Ok,
];

/// The result of one check.
#[derive(Debug, Serialize)]
pub(super) struct Finding {
    pub(super) pipeline: String,
    pub(super) check: &'static str,
    pub(super) outcome: Outcome,
    /// A description of the finding, with the remedy if there is a problem.
    pub(super) message: String,
}

/// The check name used for findings that don't belong to a single pipeline.
pub(super) const SOURCE: &str = "source";

/// Prints the findings.
pub(super) fn print_findings(findings: &[Finding], json: bool) -> Exit {
    let any = |outcome| findings.iter().any(|finding| finding.outcome == outcome);
    let exit = if any(Outcome::Failure) {
        Exit::Halted
    } else if any(Outcome::Unreachable) {
        Exit::Failed
    } else {
        Exit::Done
    };
    if json {
        out::json(&serde_json::json!({ "ok": exit == Exit::Done, "checks": findings }));
    } else {
        match pipeline_outcomes(findings) {
            pipelines if pipelines.len() > SHORT_LIST_MAX => summary(&pipelines, findings),
            _ => {
                for finding in findings {
                    print(finding, &finding.pipeline);
                }
                let outcomes = findings.iter().map(|finding| finding.outcome);
                say!("{} checks: {}", findings.len(), counts(outcomes));
            }
        }
    }
    exit
}

fn print(finding: &Finding, pipelines: &str) {
    let outcome = finding.outcome;
    let text = format!("{pipelines}: {}: {}", finding.check, finding.message);
    out::marked(outcome.tone(), &format!("{:7}", outcome.mark()), &text);
}

/// Formats the number of findings per outcome, starting with the worst outcome.
fn counts(outcomes: impl Iterator<Item = Outcome> + Clone) -> String {
    let counts = WORST_FIRST.map(|outcome| {
        let count = outcomes.clone().filter(|other| *other == outcome).count();
        (count > 0).then(|| format!("{count} {}", outcome.mark()))
    });
    let counts: Vec<_> = counts.into_iter().flatten().collect();
    counts.join(", ")
}

/// Returns each pipeline with its worst outcome. The pipelines are in the order of their first
/// occurrence in the findings.
fn pipeline_outcomes(findings: &[Finding]) -> Vec<(&str, Outcome)> {
    let mut pipelines: Vec<(&str, Outcome)> = Vec::new();
    for finding in findings.iter().filter(|finding| finding.check != SOURCE) {
        match pipelines
            .iter_mut()
            .find(|(name, _)| *name == finding.pipeline)
        {
            Some((_, worst)) => *worst = finding.outcome.max(*worst),
            None => pipelines.push((&finding.pipeline, finding.outcome)),
        }
    }
    pipelines
}

/// Prints the number of pipelines with each outcome, then all findings that are not ok, worst
/// first. A finding shared by several pipelines is printed once.
fn summary(pipelines: &[(&str, Outcome)], findings: &[Finding]) {
    let outcomes = pipelines.iter().map(|(_, outcome)| *outcome);
    say!("{} pipelines: {}", pipelines.len(), counts(outcomes));
    for outcome in &WORST_FIRST[..3] {
        let mut groups: Vec<(&Finding, Vec<&str>)> = Vec::new();
        for finding in findings
            .iter()
            .filter(|finding| finding.outcome == *outcome)
        {
            let same = groups.iter_mut().find(|(first, _)| {
                (first.check, &first.message) == (finding.check, &finding.message)
            });
            match same {
                Some((_, names)) => names.push(&finding.pipeline),
                None => groups.push((finding, vec![&finding.pipeline])),
            }
        }
        for (first, names) in groups {
            print(first, &format_names(&names));
        }
    }
    say!("To print all checks for one pipeline, use --pipeline NAME");
}

/// Joins the first few names with commas and replaces the rest with a count.
fn format_names(names: &[&str]) -> String {
    match names.split_at_checked(SHORT_LIST_MAX) {
        Some((first, others @ [_, _, ..])) => {
            format!("{} and {} others", first.join(", "), others.len())
        }
        _ => names.join(", "),
    }
}

pub(super) struct Report<'f> {
    pub(super) pipeline: String,
    pub(super) findings: &'f mut Vec<Finding>,
}

impl Report<'_> {
    pub(super) fn add(&mut self, check: &'static str, outcome: Outcome, message: impl ToString) {
        let (pipeline, message) = (self.pipeline.clone(), message.to_string());
        self.findings.push(Finding {
            pipeline,
            check,
            outcome,
            message,
        });
    }
}

/// Returns the outcome with which to report an error, given the error's remedy.
pub(super) fn outcome_of(remedy: Remedy) -> Outcome {
    match remedy {
        Remedy::Halt => Outcome::Failure,
        Remedy::Reconnect | Remedy::RebuildSink | Remedy::StandBy => Outcome::Unreachable,
    }
}
