//! Polls librdkafka's events: delivery reports, errors and log lines.
//!
//! rdkafka's `poll` allocates a list, a reference count and a result for every delivery report, and
//! can't be interrupted. This module reads each event in place and forwards all its delivery
//! reports at once. The functions are declared as in `src/rdkafka.h` of librdkafka 2.12.
#![expect(unsafe_code, reason = "calls librdkafka, which is a C library")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, Weak};
use std::thread;

use rdkafka::bindings::{
    RD_KAFKA_EVENT_DR, RD_KAFKA_EVENT_ERROR, RD_KAFKA_EVENT_LOG,
    RD_KAFKA_EVENT_OAUTHBEARER_TOKEN_REFRESH, RD_KAFKA_EVENT_STATS, RD_KAFKA_OFFSET_INVALID,
    rd_kafka_error_destroy, rd_kafka_event_destroy, rd_kafka_event_error,
    rd_kafka_event_error_string, rd_kafka_event_log, rd_kafka_event_message_next,
    rd_kafka_event_stats, rd_kafka_event_t, rd_kafka_event_type, rd_kafka_header_get_last,
    rd_kafka_message_headers, rd_kafka_message_produce_errstr, rd_kafka_queue_destroy,
    rd_kafka_queue_get_main, rd_kafka_queue_poll, rd_kafka_queue_t, rd_kafka_queue_yield,
    rd_kafka_sasl_set_credentials, rd_kafka_topic_name,
};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::producer::{BaseProducer, Producer};
use rdkafka::types::{RDKafkaMessage, RDKafkaRespErr};

use super::context::{Context, UndeliveredRecord, is_refusal};
use super::credentials::Login;
use super::native::BROKER_TEXT_CHARS_MAX;
use super::oauthbearer;
use super::token::Tokens;
use super::unknown_codes;
use crate::delivery::failure::content;
use crate::delivery::watermark::Tag;
use crate::outbox::headers::POSITION_HEADER;

/// Poll timeout for waiting indefinitely, until an event arrives or [`Events::wake`] is called.
const NO_TIMEOUT: c_int = -1;

/// The event queue of a producer.
pub(super) struct Events {
    queue: NonNull<rd_kafka_queue_t>,
    /// A reference that keeps the client alive, because the client owns the queue.
    producer: Arc<BaseProducer<Context>>,
}

// SAFETY: librdkafka's queues may be used from any thread.
unsafe impl Send for Events {}
// SAFETY: librdkafka's queues may be used from several threads at once, because each has its own
// lock.
unsafe impl Sync for Events {}

impl Events {
    /// Opens the event queue of `producer`. From then on, events are processed only by
    /// [`Events::serve`].
    pub(super) fn open(producer: Arc<BaseProducer<Context>>) -> Self {
        // SAFETY: the producer is valid.
        let queue = unsafe { rd_kafka_queue_get_main(producer.client().native_ptr()) };
        let queue = NonNull::new(queue).expect("every producer has a main queue");
        Self { queue, producer }
    }

    /// Waits for an event and passes it to the producer's [`Context`].
    pub(super) fn serve(&self) {
        // SAFETY: the queue lives as long as `self`.
        let event = unsafe { rd_kafka_queue_poll(self.queue.as_ptr(), NO_TIMEOUT) };
        if let Some(event) = NonNull::new(event) {
            Event(event).dispatch(&self.producer);
        }
    }

    /// Interrupts the current call to [`Events::serve`], or the next call if none is in progress.
    pub(super) fn wake(&self) {
        // SAFETY: the queue lives as long as `self`.
        unsafe { rd_kafka_queue_yield(self.queue.as_ptr()) };
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // SAFETY: `self` owns this reference to the queue, and the producer is still valid.
        unsafe { rd_kafka_queue_destroy(self.queue.as_ptr()) };
    }
}

struct Event(NonNull<rd_kafka_event_t>);

impl Event {
    fn dispatch(mut self, producer: &Arc<BaseProducer<Context>>) {
        let context = producer.context();
        // SAFETY: the event is valid.
        match unsafe { rd_kafka_event_type(self.0.as_ptr()) } {
            RD_KAFKA_EVENT_DR => {
                context.record_deliveries(std::iter::from_fn(|| self.next_delivery(context)));
            }
            RD_KAFKA_EVENT_ERROR => {
                // SAFETY: the event is valid, and the error string lives as long as the event.
                let (code, reason) = unsafe {
                    let code = rd_kafka_event_error(self.0.as_ptr());
                    (code, text(rd_kafka_event_error_string(self.0.as_ptr())))
                };
                let (code, reason) = (code.into(), reason.trim());
                // Discard the original error code, because `reason` already contains it.
                let _ = unknown_codes::take_last();
                context.error(code, reason);
                if is_refusal(code, reason) {
                    if let Some(login) = context.new_login() {
                        set_login(producer, &login);
                    }
                    if let Some(tokens) =
                        context.tokens().filter(|tokens| tokens.discard_rejected())
                    {
                        renew_token(producer, tokens);
                    }
                }
            }
            RD_KAFKA_EVENT_OAUTHBEARER_TOKEN_REFRESH => {
                if let Some(tokens) = context.tokens() {
                    renew_token(producer, tokens);
                }
            }
            RD_KAFKA_EVENT_LOG => {
                let (mut facility, mut message, mut level) = (null(), null(), 0);
                // SAFETY: the event is valid, and the strings live as long as the event.
                unsafe {
                    rd_kafka_event_log(
                        self.0.as_ptr(),
                        &raw mut facility,
                        &raw mut message,
                        &raw mut level,
                    );
                    context.log(level, text(facility).trim(), text(message).trim());
                }
            }
            RD_KAFKA_EVENT_STATS => {
                // SAFETY: the event is valid, and the document lives as long as the event.
                let document = unsafe { text(rd_kafka_event_stats(self.0.as_ptr())) };
                context.statistics(&document);
            }
            _ => {}
        }
    }

    /// Returns the tag of the next delivered record that has a tag. Records that were not delivered
    /// are reported to the context and skipped.
    fn next_delivery(&mut self, context: &Context) -> Option<Tag> {
        loop {
            // SAFETY: the event is valid, and its messages live as long as the event.
            let message = unsafe { rd_kafka_event_message_next(self.0.as_ptr()).as_ref() }?;
            match message.err {
                RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR
                    if message.offset == i64::from(RD_KAFKA_OFFSET_INVALID) =>
                {
                    context.record_unacknowledged(&undelivered_record(message));
                }
                RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR if message._private.is_null() => {}
                RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR => {
                    return Some(Tag::from_word(message._private as u64));
                }
                code => context.record_rejection(code.into(), &undelivered_record(message)),
            }
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: `self` owns the event.
        unsafe { rd_kafka_event_destroy(self.0.as_ptr()) };
    }
}

/// Requests a new token and passes it to the producer, or reports why the token could not be
/// obtained.
///
/// The request runs on a separate thread: a program that prints the token may take seconds, and
/// delivery reports must be processed in the meantime.
fn renew_token(producer: &Arc<BaseProducer<Context>>, tokens: &Tokens) {
    // The thread holds only a weak reference to the producer. With a strong reference, dropping the
    // producer would have to wait for the program to exit.
    let (weak_producer, tokens) = (Arc::downgrade(producer), tokens.clone());
    let renew = move || {
        let token = tokens.get_token();
        let Some(producer) = Weak::upgrade(&weak_producer) else {
            return;
        };
        let set = token.and_then(|token| {
            let is_set = oauthbearer::set_token(producer.client(), &token);
            is_set
                .then_some(())
                .ok_or_else(|| tokens.discard_unusable(&token))
        });
        if let Err(error) = set {
            let reason = error.to_string();
            producer.context().record_no_token(&reason);
            oauthbearer::fail_token(producer.client(), &reason);
        }
    };
    let started = thread::Builder::new()
        .name("kafka-token".to_owned())
        .spawn(renew);
    if let Err(error) = started {
        oauthbearer::fail_token(producer.client(), &error.to_string());
    }
}

/// Sets the login that the producer uses for new connections.
fn set_login(producer: &BaseProducer<Context>, login: &Login) {
    let (Ok(username), Ok(password)) = (
        CString::new(&*login.username),
        CString::new(&*login.password),
    ) else {
        return;
    };
    // SAFETY: the producer is valid, and the strings are copied. The caller owns a returned error.
    unsafe {
        let error = rd_kafka_sasl_set_credentials(
            producer.client().native_ptr(),
            username.as_ptr(),
            password.as_ptr(),
        );
        if !error.is_null() {
            rd_kafka_error_destroy(error);
        }
    }
}

/// Returns the details of a record that was not delivered.
fn undelivered_record(message: &RDKafkaMessage) -> UndeliveredRecord {
    // SAFETY: a delivery report contains the record's topic, which lives as long as the report.
    let topic = unsafe { text(rd_kafka_topic_name(message.rkt)) };
    // SAFETY: a delivery report also contains the record's key and payload.
    let (key, payload) = unsafe {
        (
            bytes(message.key, message.key_len),
            bytes(message.payload, message.len),
        )
    };
    let reason = match unknown_codes::take_last() {
        Some(code) => {
            format!("the broker returned error code {code}, which librdkafka does not define")
        }
        // SAFETY: the message is valid for the call, and the string lives as long as the message.
        None => unsafe { text(rd_kafka_message_produce_errstr(message)) },
    };
    UndeliveredRecord {
        topic,
        partition: message.partition,
        reason: reason.chars().take(BROKER_TEXT_CHARS_MAX).collect(),
        position: position(message),
        bytes: message.len + message.key_len,
        content: content(key, payload),
    }
}

/// # Safety
/// `start` must be null, or point to `len` bytes that live for at least `'b`.
unsafe fn bytes<'b>(start: *const c_void, len: usize) -> Option<&'b [u8]> {
    // SAFETY: guaranteed by the caller.
    (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts(start.cast::<u8>(), len) })
}

/// Returns the WAL position of the record's row, read from the record's header.
fn position(message: &RDKafkaMessage) -> Option<String> {
    let name = CString::new(POSITION_HEADER).ok()?;
    let (mut headers, mut value, mut len) = (null_mut(), null(), 0);
    // SAFETY: the message is valid, its headers live as long as the message, and the value as long
    // as the headers.
    let bytes = unsafe {
        error_if_any(rd_kafka_message_headers(message, &raw mut headers))?;
        error_if_any(rd_kafka_header_get_last(
            headers,
            name.as_ptr(),
            &raw mut value,
            &raw mut len,
        ))?;
        if value.is_null() {
            return None;
        }
        std::slice::from_raw_parts(value.cast::<u8>(), len)
    };
    Some(String::from_utf8_lossy(bytes).into_owned())
}

fn error_if_any(code: RDKafkaRespErr) -> Option<()> {
    (RDKafkaErrorCode::from(code) == RDKafkaErrorCode::NoError).then_some(())
}

/// Copies a C string from librdkafka; null becomes an empty string.
///
/// # Safety
/// `text` must be null, or point to a NUL-terminated string.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}
