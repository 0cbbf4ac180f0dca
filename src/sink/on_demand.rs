//! A sink that is created when it is needed. If a process runs hundreds of pipelines, most are
//! idle, and each Kafka client has several threads.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{
    Answer, Commit, Preparation, Prepared, Produced, Sink, SinkError, TakeOver,
    transactions_unsupported,
};
use crate::delivery::checkpoint::Checkpoint;
use crate::delivery::watermark::Tag;
use crate::outbox::Record;

/// How long an unused sink is kept.
const IDLE: Duration = Duration::from_secs(300);

/// A sink, or the function that creates it.
pub(crate) struct OnDemand<S, M> {
    sink: Option<S>,
    /// `None` for a sink that always exists.
    make: Option<M>,
    /// Whether a record was produced since the last call of [`Sink::tend`].
    is_used: bool,
    /// The `Arc` is held by a preparation that is in progress, which would be canceled if the sink
    /// were dropped.
    preparing: Weak<()>,
    used_at: Instant,
    idle: Duration,
}

impl<S: Sink, M: Fn() -> Result<S, SinkError>> OnDemand<S, M> {
    /// Creates a wrapper for a sink that already exists, and is never dropped for being idle.
    pub(crate) fn at_once(sink: S) -> Self {
        Self::with_sink(Some(sink), None)
    }

    /// Creates a wrapper that calls `make` for the first record, and again after the sink was
    /// dropped for being idle. Not for sinks with transactions, because these depend on what was
    /// produced before.
    pub(crate) fn later(make: M) -> Self {
        Self::with_sink(None, Some(make))
    }

    fn with_sink(sink: Option<S>, make: Option<M>) -> Self {
        Self {
            sink,
            make,
            is_used: false,
            preparing: Weak::new(),
            used_at: Instant::now(),
            idle: IDLE,
        }
    }

    fn get_or_make(&mut self) -> Result<&mut S, SinkError> {
        if self.sink.is_none()
            && let Some(make) = &self.make
        {
            self.sink = Some(make()?);
        }
        self.sink.as_mut().ok_or_else(transactions_unsupported)
    }
}

impl<S: Sink, M: Fn() -> Result<S, SinkError>> Sink for OnDemand<S, M> {
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError> {
        self.is_used = true;
        match &mut self.sink {
            Some(sink) => sink.produce(record, tag),
            // The sink is created when its topic is prepared.
            None => Ok(Produced::NewTopic),
        }
    }

    fn flush(&mut self, busy: bool) -> Result<(), SinkError> {
        self.sink.as_mut().map_or(Ok(()), |sink| sink.flush(busy))
    }

    fn prepare(&mut self, topic: &str, ahead: impl FnOnce() -> Vec<String>) -> Preparation {
        let preparation = match self.get_or_make() {
            Ok(sink) => sink.prepare(topic, ahead),
            Err(error) => return Box::pin(std::future::ready(Err(error))),
        };
        let waits = Arc::new(());
        self.preparing = Arc::downgrade(&waits);
        Box::pin(async move {
            let prepared = preparation.await;
            drop(waits);
            prepared
        })
    }

    fn prepared(&mut self, topic: &str, prepared: Prepared) -> Result<(), SinkError> {
        self.get_or_make()?.prepared(topic, prepared)
    }

    fn read_more(&mut self) {
        if let Some(sink) = &mut self.sink {
            sink.read_more();
        }
    }

    fn take_over(&mut self) -> TakeOver<'_> {
        match &mut self.sink {
            Some(sink) => sink.take_over(),
            None => Box::pin(std::future::ready(Err(transactions_unsupported()))),
        }
    }

    fn commit(&mut self, checkpoint: &mut Checkpoint) -> Commit {
        match &mut self.sink {
            Some(sink) => sink.commit(checkpoint),
            None => Box::pin(std::future::ready(Err(transactions_unsupported()))),
        }
    }

    fn wait_for_response(&mut self) -> Answer {
        match &mut self.sink {
            Some(sink) => sink.wait_for_response(),
            None => Box::pin(std::future::ready(())),
        }
    }

    fn tend(&mut self) {
        if std::mem::take(&mut self.is_used) {
            self.used_at = Instant::now();
        }
        let Some(sink) = &mut self.sink else { return };
        sink.tend();
        let is_idle = self.preparing.strong_count() == 0 && self.used_at.elapsed() >= self.idle;
        if self.make.is_some() && is_idle && sink.is_at_rest() {
            self.sink = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use super::*;
    use crate::outbox::headers::Headers;

    /// A sink that accepts records once any topic was prepared, and is at rest when the test says
    /// so.
    #[derive(Default)]
    struct Fake {
        is_prepared: bool,
        at_rest: Rc<Cell<bool>>,
        calls: Rc<RefCell<Vec<String>>>,
    }

    impl Fake {
        fn is_called(&self, what: impl Into<String>) {
            self.calls.borrow_mut().push(what.into());
        }
    }

    impl Sink for Fake {
        fn produce(&mut self, _: &Record<'_>, _: Tag) -> Result<Produced, SinkError> {
            Ok(match self.is_prepared {
                true => Produced::Taken,
                false => Produced::NewTopic,
            })
        }

        fn flush(&mut self, busy: bool) -> Result<(), SinkError> {
            self.is_called(format!("flush {busy}"));
            match busy {
                true => Err(SinkError::Broken("it is full".to_owned())),
                false => Ok(()),
            }
        }

        fn read_more(&mut self) {
            self.is_called("read_more");
        }

        fn wait_for_response(&mut self) -> Answer {
            self.is_called("answers");
            Box::pin(std::future::ready(()))
        }

        fn tend(&mut self) {
            self.is_called("tend");
        }

        fn prepared(&mut self, _: &str, _: Prepared) -> Result<(), SinkError> {
            self.is_prepared = true;
            Ok(())
        }

        fn is_at_rest(&self) -> bool {
            self.at_rest.get()
        }
    }

    fn record() -> Record<'static> {
        Record {
            topic: "t",
            partition: None,
            timestamp_millis: None,
            key: None,
            payload: None,
            headers: Headers::default(),
        }
    }

    #[tokio::test]
    async fn sink_is_made_for_the_first_record_and_again_after_it_was_idle() {
        let (made, at_rest) = (Cell::new(0), Rc::new(Cell::new(false)));
        let mut sink = OnDemand::later(|| {
            made.set(made.get() + 1);
            let (is_prepared, at_rest) = (false, Rc::clone(&at_rest));
            Ok(Fake {
                is_prepared,
                at_rest,
                ..Fake::default()
            })
        });
        sink.idle = Duration::ZERO;
        for lives in 1..4 {
            sink.flush(false).expect("nothing to flush");
            sink.tend();
            assert_eq!(made.get(), lives - 1, "nothing has come yet");
            assert_eq!(
                sink.produce(&record(), Tag::from_word(1)),
                Ok(Produced::NewTopic)
            );
            at_rest.set(true);
            // Preparing a topic may take a long time.
            let preparation = sink.prepare("t", Vec::new);
            sink.tend();
            assert!(sink.sink.is_some());
            preparation.await.expect("a topic");
            sink.prepared("t", Prepared::Usable { partitions: 1 })
                .expect("a topic");
            at_rest.set(false);
            for _ in 0..3 {
                assert_eq!(
                    sink.produce(&record(), Tag::from_word(1)),
                    Ok(Produced::Taken)
                );
                // The sink is kept: records in flight would be lost with it.
                sink.tend();
            }
            assert_eq!(made.get(), lives);
            at_rest.set(true);
            sink.idle = IDLE;
            sink.tend();
            assert_eq!(
                sink.produce(&record(), Tag::from_word(1)),
                Ok(Produced::Taken)
            );
            sink.idle = Duration::ZERO;
            sink.tend();
        }
    }

    #[tokio::test]
    async fn sink_is_kept_for_its_time_after_the_last_record() {
        let mut sink = OnDemand::later(|| {
            Ok(Fake {
                is_prepared: true,
                at_rest: Rc::new(Cell::new(true)),
                ..Fake::default()
            })
        });
        let long_ago = || Instant::now().checked_sub(IDLE).expect("an instant");
        sink.prepare("t", Vec::new).await.expect("a topic");
        sink.used_at = long_ago();
        assert_eq!(
            sink.produce(&record(), Tag::from_word(1)),
            Ok(Produced::Taken)
        );
        sink.tend();
        assert!(sink.sink.is_some());
        sink.used_at = long_ago();
        sink.tend();
        assert!(sink.sink.is_none());
    }

    #[tokio::test]
    async fn forwards_every_call_to_an_existing_sink() {
        let calls = Rc::new(RefCell::new(Vec::new()));
        let mut sink = OnDemand::later(|| {
            Ok(Fake {
                calls: Rc::clone(&calls),
                ..Fake::default()
            })
        });
        sink.prepare("t", Vec::new).await.expect("a topic");
        let broken = Err(SinkError::Broken("it is full".to_owned()));
        assert_eq!(sink.flush(true), broken);
        assert_eq!(sink.flush(false), Ok(()));
        sink.read_more();
        sink.wait_for_response().await;
        sink.tend();
        let expected = ["flush true", "flush false", "read_more", "answers", "tend"];
        assert_eq!(*calls.borrow(), expected);
    }

    #[tokio::test]
    async fn sink_whose_topic_nobody_waits_for_any_more_is_idle() {
        let mut sink = OnDemand::later(|| {
            Ok(Fake {
                at_rest: Rc::new(Cell::new(true)),
                ..Fake::default()
            })
        });
        sink.idle = Duration::ZERO;
        // This happens if the connection to PostgreSQL breaks meanwhile.
        drop(sink.prepare("t", Vec::new));
        sink.tend();
        assert!(sink.sink.is_none());
    }

    #[tokio::test]
    async fn sink_that_is_there_from_the_beginning_stays() {
        let fake = Fake {
            is_prepared: true,
            at_rest: Rc::new(Cell::new(true)),
            ..Fake::default()
        };
        let mut sink = OnDemand::<_, fn() -> Result<Fake, SinkError>>::at_once(fake);
        sink.idle = Duration::ZERO;
        sink.tend();
        assert_eq!(
            sink.produce(&record(), Tag::from_word(1)),
            Ok(Produced::Taken)
        );
    }

    #[tokio::test]
    async fn sink_that_can_not_be_created_reports_the_reason() {
        let why = || SinkError::Configuration("no such property".to_owned());
        let mut sink = OnDemand::<Fake, _>::later(|| Err(why()));
        assert_eq!(
            sink.produce(&record(), Tag::from_word(1)),
            Ok(Produced::NewTopic)
        );
        assert_eq!(sink.prepare("t", Vec::new).await, Err(why()));
    }
}
