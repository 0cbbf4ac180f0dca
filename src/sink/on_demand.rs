//! Creates a sink only when it is needed, which saves threads: each Kafka client has several
//! threads, and if a process runs hundreds of pipelines, most of the pipelines are idle.

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
const IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// A sink that may not have been created yet, and the function that creates it.
pub(crate) struct OnDemand<S, M> {
    sink: Option<S>,
    /// `None` if the sink always exists.
    make: Option<M>,
    /// Whether a record has been produced since the last call to [`Sink::tend`].
    is_used: bool,
    /// Set while a topic is being prepared. The preparation holds the `Arc`, so this reference can
    /// be upgraded until the preparation ends. The sink is not dropped during a preparation,
    /// because dropping the sink would cancel the preparation.
    preparing: Weak<()>,
    used_at: Instant,
    idle_timeout: Duration,
}

impl<S: Sink, M: Fn() -> Result<S, SinkError>> OnDemand<S, M> {
    /// Wraps an existing sink, which is never dropped, even if it is idle.
    pub(crate) fn eager(sink: S) -> Self {
        Self::with_sink(Some(sink), None)
    }

    /// Creates a wrapper that calls `make` for the first record, and again after the sink was
    /// dropped because it was idle. Must not be used for transactional sinks, because their state
    /// would be lost with the sink.
    pub(crate) fn lazy(make: M) -> Self {
        Self::with_sink(None, Some(make))
    }

    fn with_sink(sink: Option<S>, make: Option<M>) -> Self {
        Self {
            sink,
            make,
            is_used: false,
            preparing: Weak::new(),
            used_at: Instant::now(),
            idle_timeout: IDLE_TIMEOUT,
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
            // The topic must be prepared first. The preparation also creates the sink.
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
        let in_progress = Arc::new(());
        self.preparing = Arc::downgrade(&in_progress);
        Box::pin(async move {
            let prepared = preparation.await;
            drop(in_progress);
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
        let is_idle =
            self.preparing.strong_count() == 0 && self.used_at.elapsed() >= self.idle_timeout;
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

    /// A fake sink that accepts records once any topic has been prepared. Tests set `at_rest` to
    /// simulate a sink with or without work in progress.
    #[derive(Default)]
    struct Fake {
        is_prepared: bool,
        at_rest: Rc<Cell<bool>>,
        calls: Rc<RefCell<Vec<String>>>,
    }

    impl Fake {
        fn record_call(&self, call: impl Into<String>) {
            self.calls.borrow_mut().push(call.into());
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
            self.record_call(format!("flush {busy}"));
            match busy {
                true => Err(SinkError::Broken("the sink is full".to_owned())),
                false => Ok(()),
            }
        }

        fn read_more(&mut self) {
            self.record_call("read_more");
        }

        fn wait_for_response(&mut self) -> Answer {
            self.record_call("wait_for_response");
            Box::pin(std::future::ready(()))
        }

        fn tend(&mut self) {
            self.record_call("tend");
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
    async fn creates_the_sink_for_the_first_record_and_again_after_an_idle_period() {
        let (made, at_rest) = (Cell::new(0), Rc::new(Cell::new(false)));
        let mut sink = OnDemand::lazy(|| {
            made.set(made.get() + 1);
            let (is_prepared, at_rest) = (false, Rc::clone(&at_rest));
            Ok(Fake {
                is_prepared,
                at_rest,
                ..Fake::default()
            })
        });
        sink.idle_timeout = Duration::ZERO;
        for count in 1..4 {
            sink.flush(false).expect("nothing to flush");
            sink.tend();
            assert_eq!(made.get(), count - 1, "created before the first record");
            assert_eq!(
                sink.produce(&record(), Tag::from_word(1)),
                Ok(Produced::NewTopic)
            );
            at_rest.set(true);
            // The sink is kept while a topic is being prepared, however long that takes.
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
                // The sink is kept, because dropping it would lose the records in flight.
                sink.tend();
            }
            assert_eq!(made.get(), count);
            at_rest.set(true);
            sink.idle_timeout = IDLE_TIMEOUT;
            sink.tend();
            assert_eq!(
                sink.produce(&record(), Tag::from_word(1)),
                Ok(Produced::Taken)
            );
            sink.idle_timeout = Duration::ZERO;
            sink.tend();
        }
    }

    #[tokio::test]
    async fn keeps_the_sink_until_the_idle_timeout_after_the_last_record() {
        let mut sink = OnDemand::lazy(|| {
            Ok(Fake {
                is_prepared: true,
                at_rest: Rc::new(Cell::new(true)),
                ..Fake::default()
            })
        });
        let long_ago = || {
            Instant::now()
                .checked_sub(IDLE_TIMEOUT)
                .expect("an instant")
        };
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
        let mut sink = OnDemand::lazy(|| {
            Ok(Fake {
                calls: Rc::clone(&calls),
                ..Fake::default()
            })
        });
        sink.prepare("t", Vec::new).await.expect("a topic");
        let broken = Err(SinkError::Broken("the sink is full".to_owned()));
        assert_eq!(sink.flush(true), broken);
        assert_eq!(sink.flush(false), Ok(()));
        sink.read_more();
        sink.wait_for_response().await;
        sink.tend();
        let expected = [
            "flush true",
            "flush false",
            "read_more",
            "wait_for_response",
            "tend",
        ];
        assert_eq!(*calls.borrow(), expected);
    }

    #[tokio::test]
    async fn drops_an_idle_sink_after_its_topic_preparation_is_canceled() {
        let mut sink = OnDemand::lazy(|| {
            Ok(Fake {
                at_rest: Rc::new(Cell::new(true)),
                ..Fake::default()
            })
        });
        sink.idle_timeout = Duration::ZERO;
        // A preparation is dropped if the connection to PostgreSQL is lost.
        drop(sink.prepare("t", Vec::new));
        sink.tend();
        assert!(sink.sink.is_none());
    }

    #[tokio::test]
    async fn never_drops_a_sink_that_was_passed_at_creation() {
        let fake = Fake {
            is_prepared: true,
            at_rest: Rc::new(Cell::new(true)),
            ..Fake::default()
        };
        let mut sink = OnDemand::<_, fn() -> Result<Fake, SinkError>>::eager(fake);
        sink.idle_timeout = Duration::ZERO;
        sink.tend();
        assert_eq!(
            sink.produce(&record(), Tag::from_word(1)),
            Ok(Produced::Taken)
        );
    }

    #[tokio::test]
    async fn reports_why_the_sink_could_not_be_created() {
        let error = || SinkError::Configuration("unknown property".to_owned());
        let mut sink = OnDemand::<Fake, _>::lazy(|| Err(error()));
        assert_eq!(
            sink.produce(&record(), Tag::from_word(1)),
            Ok(Produced::NewTopic)
        );
        assert_eq!(sink.prepare("t", Vec::new).await, Err(error()));
    }
}
