//! Finds the topics of events that were received but not yet passed to the sink, so that missing
//! topics can be created together.

use std::collections::HashSet;

use super::Core;
use super::source::{Meaning, Source};
use crate::model::lsn::Position;
use crate::outbox::columns::{COLUMNS_MAX, Mapping, Row};
use crate::outbox::envelope::Texts;
use crate::outbox::route::Router;
use crate::postgres::wire::copy_text::Lines;
use crate::postgres::wire::frame::Frame;
use crate::postgres::wire::pgoutput::Message;

impl Core {
    /// Returns the topics of the events in `bodies`, in order. `bodies` are the next `CopyData`
    /// messages of the stream. Stops at the first message that can't be interpreted yet, and
    /// returns no topics if the next events may already have been delivered.
    pub(in crate::pipeline) fn topics_ahead<'b>(
        &self,
        bodies: impl Iterator<Item = &'b [u8]>,
    ) -> Vec<String> {
        let mut topics = TopicsAhead::default();
        let Some(at) = self.position.filter(|at| !self.may_omit(*at)) else {
            return topics.ahead;
        };
        for body in bodies {
            let Ok(Frame::XLogData { data, .. }) = Frame::decode(body) else {
                continue;
            };
            let Ok(message) = Message::decode(data) else {
                break;
            };
            match self.source.meaning(&message) {
                Meaning::Row {
                    source,
                    relation,
                    tuple,
                } => {
                    let mut row = [None; COLUMNS_MAX];
                    let table = source.row(at, relation, tuple, &self.others, &mut row);
                    match table {
                        Ok(Some(table)) => topics.add_topic(table.mapping(), &row),
                        Ok(None) => {}
                        Err(_) => break,
                    }
                }
                Meaning::Published {
                    source, content, ..
                } => {
                    if let Ok(envelope) = source.event(content) {
                        let mut texts = Texts::default();
                        let mapping = source.mapping();
                        topics.add_topic(mapping, &envelope.row(mapping, &mut texts));
                    }
                }
                // Rows that follow a relation message may have different columns, so they can't be
                // mapped yet.
                Meaning::Relation(_) => break,
                _ => {}
            }
        }
        topics.ahead
    }

    /// Like [`Core::topics_ahead`], but for lines of the snapshot's `COPY` output.
    pub(in crate::pipeline) fn snapshot_topics_ahead<'l>(
        &self,
        lines: impl Iterator<Item = &'l [u8]>,
    ) -> Vec<String> {
        let mut topics = TopicsAhead::default();
        if let Some(snapshot) = &self.snapshot {
            let mut values = Lines::default();
            for line in lines {
                let Ok((mapping, row)) = snapshot.read(line, &mut values) else {
                    break;
                };
                topics.add_topic(mapping, &row);
            }
        }
        topics.ahead
    }

    /// Returns whether rows at this position or later may already have been delivered.
    fn may_omit(&self, at: Position) -> bool {
        let is_copied = match &self.source {
            Source::Table(source) => {
                let copied = source.copied.as_deref();
                copied.is_some_and(|copied| at.commit < copied.last_snapshot_lsn())
            }
            Source::Messages(_) => false,
        };
        is_copied || !self.is_verified()
    }
}

#[derive(Default)]
struct TopicsAhead {
    router: Router,
    seen: HashSet<String>,
    ahead: Vec<String>,
}

impl TopicsAhead {
    fn add_topic(&mut self, mapping: &Mapping, row: &Row<'_>) {
        // The position can be empty here, because it is written only to a header and doesn't affect
        // the topic.
        if let Ok(record) = self.router.route(mapping, row, b"")
            && !self.seen.contains(record.topic)
        {
            self.seen.insert(record.topic.to_owned());
            self.ahead.push(record.topic.to_owned());
        }
    }
}
