//! Calls to librdkafka that rdkafka does not provide, or provides only in a slower form.
//!
//! For every record, rdkafka's `send` allocates the topic's name as a C string, looks the topic up
//! by name and builds a result. Here, each topic is opened only once, and producing a record
//! allocates nothing in Rust. The functions are declared as in `src/rdkafka.h` of librdkafka 2.12.
#![expect(unsafe_code, reason = "calls librdkafka, which is a C library")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::bindings::{
    RD_KAFKA_MSG_F_COPY, rd_kafka_AclOperation_t as AclOperation, rd_kafka_AdminOptions_destroy,
    rd_kafka_AdminOptions_new, rd_kafka_AdminOptions_set_include_authorized_operations,
    rd_kafka_AdminOptions_set_operation_timeout, rd_kafka_AdminOptions_set_request_timeout,
    rd_kafka_ConfigEntry_name, rd_kafka_ConfigEntry_value, rd_kafka_ConfigResource_configs,
    rd_kafka_ConfigResource_destroy, rd_kafka_ConfigResource_error, rd_kafka_ConfigResource_new,
    rd_kafka_ConfigResource_t, rd_kafka_CreateTopics, rd_kafka_CreateTopics_result_topics,
    rd_kafka_DescribeCluster, rd_kafka_DescribeCluster_result_cluster_id, rd_kafka_DescribeConfigs,
    rd_kafka_DescribeConfigs_result_resources, rd_kafka_DescribeTopics,
    rd_kafka_DescribeTopics_result_topics, rd_kafka_NewTopic_destroy, rd_kafka_NewTopic_new,
    rd_kafka_NewTopic_set_config, rd_kafka_NewTopic_t, rd_kafka_ResourceType_t as ResourceType,
    rd_kafka_TopicCollection_destroy, rd_kafka_TopicCollection_of_topic_names,
    rd_kafka_TopicDescription_authorized_operations, rd_kafka_TopicDescription_error,
    rd_kafka_TopicDescription_name, rd_kafka_TopicDescription_partitions,
    rd_kafka_TopicDescription_t, rd_kafka_TopicDescription_topic_id,
    rd_kafka_Uuid_least_significant_bits, rd_kafka_Uuid_most_significant_bits,
    rd_kafka_admin_op_t as AdminOp, rd_kafka_brokers_add, rd_kafka_brokers_learned_ids,
    rd_kafka_clusterid, rd_kafka_error_code, rd_kafka_error_destroy,
    rd_kafka_event_CreateTopics_result, rd_kafka_event_DescribeCluster_result,
    rd_kafka_event_DescribeConfigs_result, rd_kafka_event_DescribeTopics_result,
    rd_kafka_event_destroy, rd_kafka_event_error, rd_kafka_event_t, rd_kafka_flush,
    rd_kafka_get_watermark_offsets, rd_kafka_header_add, rd_kafka_header_get_all,
    rd_kafka_headers_destroy, rd_kafka_headers_new, rd_kafka_headers_t, rd_kafka_last_error,
    rd_kafka_mem_free, rd_kafka_message_headers, rd_kafka_metadata, rd_kafka_metadata_destroy,
    rd_kafka_producev, rd_kafka_queue_destroy, rd_kafka_queue_new, rd_kafka_queue_poll,
    rd_kafka_topic_destroy, rd_kafka_topic_new, rd_kafka_topic_result_error,
    rd_kafka_topic_result_error_string, rd_kafka_topic_result_name, rd_kafka_vtype_t as Vtype,
};
use rdkafka::client::{Client, ClientContext};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::BorrowedMessage;
use rdkafka::producer::{BaseProducer, Producer};
use rdkafka::types::{RDKafkaRespErr, RDKafkaTopic};

use super::context::Context;
use crate::delivery::watermark::Tag;
use crate::outbox::Record;

/// Maximum length of a broker's message; longer messages are truncated.
pub(super) const BROKER_TEXT_CHARS_MAX: usize = 500;

/// `RD_KAFKA_PARTITION_UA`: the partitioner chooses the partition.
const PARTITION_UNASSIGNED: i32 = -1;

/// A producer's handle to a topic.
pub(super) struct Topic {
    handle: NonNull<RDKafkaTopic>,
    /// A reference that keeps the client alive, because the client owns the handle.
    producer: Arc<BaseProducer<Context>>,
}

// SAFETY: librdkafka's topic handles may be used from any thread.
unsafe impl Send for Topic {}

impl Topic {
    /// Opens the topic, without checking whether it exists.
    ///
    /// # Errors
    /// Returns an error if librdkafka does not accept the name.
    pub(super) fn open(
        producer: &Arc<BaseProducer<Context>>,
        name: &str,
    ) -> Result<Self, RDKafkaErrorCode> {
        let name = CString::new(name).map_err(|_| RDKafkaErrorCode::InvalidTopic)?;
        // SAFETY: the client lives as long as `producer`, and the name is copied.
        let handle = unsafe {
            rd_kafka_topic_new(producer.client().native_ptr(), name.as_ptr(), null_mut())
        };
        match NonNull::new(handle) {
            Some(handle) => Ok(Self {
                handle,
                producer: producer.clone(),
            }),
            // SAFETY: this only reads the current thread's last error.
            None => Err(unsafe { rd_kafka_last_error() }.into()),
        }
    }

    /// Copies a record into librdkafka's queue. If a `tag` is given, it is returned with the
    /// record's delivery report.
    ///
    /// # Errors
    /// Returns an error if the record was not queued.
    pub(super) fn produce(
        &self,
        record: &Record<'_>,
        tag: Option<Tag>,
    ) -> Result<(), RDKafkaErrorCode> {
        let headers = NativeHeaders::from_record(record)?;
        let (key, key_len) = parts(record.key);
        let (value, value_len) = parts(record.payload);
        // SAFETY: each type tag is followed by arguments of the types that rdkafka.h specifies for
        // it, and the list is terminated. The pointers are valid for the call, which copies the
        // data they point to (F_COPY; keys are always copied). An absent key or value is a null
        // pointer.
        let code = unsafe {
            rd_kafka_producev(
                self.producer.client().native_ptr(),
                Vtype::RD_KAFKA_VTYPE_RKT as c_int,
                self.handle.as_ptr(),
                Vtype::RD_KAFKA_VTYPE_PARTITION as c_int,
                record.partition.unwrap_or(PARTITION_UNASSIGNED),
                Vtype::RD_KAFKA_VTYPE_MSGFLAGS as c_int,
                RD_KAFKA_MSG_F_COPY as c_int,
                Vtype::RD_KAFKA_VTYPE_VALUE as c_int,
                value,
                value_len,
                Vtype::RD_KAFKA_VTYPE_KEY as c_int,
                key,
                key_len,
                // A timestamp of zero means the current time.
                Vtype::RD_KAFKA_VTYPE_TIMESTAMP as c_int,
                record.timestamp_millis.unwrap_or(0),
                Vtype::RD_KAFKA_VTYPE_OPAQUE as c_int,
                tag.map_or(0, Tag::to_word) as *mut c_void,
                Vtype::RD_KAFKA_VTYPE_HEADERS as c_int,
                headers.0.as_ptr(),
                Vtype::RD_KAFKA_VTYPE_END as c_int,
            )
        };
        result(code)?;
        // librdkafka owns the headers now.
        std::mem::forget(headers);
        Ok(())
    }
}

impl Drop for Topic {
    fn drop(&mut self) {
        // SAFETY: `self` owns the handle, and the producer is still valid.
        unsafe { rd_kafka_topic_destroy(self.handle.as_ptr()) };
    }
}

/// Sends all queued records without lingering, including those queued during the call. Waits until
/// no record is in flight, and returns false if this takes longer than `within`.
pub(super) fn flush(producer: &BaseProducer<Context>, within: Duration) -> bool {
    let millis = c_int::try_from(within.as_millis()).unwrap_or(c_int::MAX);
    // SAFETY: the producer is valid.
    let code = unsafe { rd_kafka_flush(producer.client().native_ptr(), millis) };
    result(code).is_ok()
}

/// Waits up to `within` for a broker to respond.
pub(super) fn wait_for_broker(producer: &BaseProducer<Context>, within: Duration) {
    let millis = c_int::try_from(within.as_millis()).unwrap_or(c_int::MAX);
    let mut metadata = null();
    // SAFETY: the producer is valid, no topic is passed, and the caller owns the result.
    unsafe {
        let client = producer.client().native_ptr();
        // Ignore the result: if the request failed, the caller's next request fails for the same
        // reason.
        let _ = rd_kafka_metadata(client, 0, null_mut(), &raw mut metadata, millis);
        if !metadata.is_null() {
            rd_kafka_metadata_destroy(metadata);
        }
    }
}

/// Returns whether the producer has received the ID of any broker in a metadata response.
pub(super) fn knows_brokers(producer: &BaseProducer<Context>) -> bool {
    let mut count = 0;
    // SAFETY: the producer is valid, and the list of IDs is freed with librdkafka's function.
    unsafe {
        let client = producer.client().native_ptr();
        let ids = rd_kafka_brokers_learned_ids(client, &raw mut count);
        rd_kafka_mem_free(client, ids.cast());
    }
    count > 0
}

/// Adds brokers that the producer may connect to. `servers` has the format of `bootstrap.servers`.
pub(super) fn add_brokers(producer: &BaseProducer<Context>, servers: &str) {
    // A list that contains NUL would already have been rejected in the producer's configuration.
    if let Ok(servers) = CString::new(servers) {
        // SAFETY: the producer is valid, and the string is copied.
        unsafe { rd_kafka_brokers_add(producer.client().native_ptr(), servers.as_ptr()) };
    }
}

/// Returns the partition's end offset, as reported by the broker in response to the consumer's last
/// fetch.
///
/// # Errors
/// Returns an error if the consumer is not reading the partition.
pub(super) fn end_known_to_reader<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    topic: &str,
    partition: i32,
) -> KafkaResult<i64> {
    let topic = CString::new(topic)?;
    let (mut low, mut high) = (-1, -1);
    // SAFETY: the consumer is valid, the name is valid for the call, and the offsets are local
    // variables.
    let code = unsafe {
        rd_kafka_get_watermark_offsets(
            consumer.client().native_ptr(),
            topic.as_ptr(),
            partition,
            &raw mut low,
            &raw mut high,
        )
    };
    result(code).map_err(KafkaError::MetadataFetch)?;
    Ok(high)
}

/// Queries settings of a topic. The value is `None` for each setting that the brokers do not
/// return.
///
/// For this request, rdkafka would use a separate client, which would have to connect first. This
/// function uses the connections of `client` instead. Blocks until a broker responds or the request
/// times out.
///
/// # Errors
/// Returns an error if no broker responds in time, or if the response is an error.
pub(super) fn topic_settings<C: ClientContext, const N: usize>(
    client: &Client<C>,
    topic: &str,
    settings: [&str; N],
    within: Duration,
) -> Result<[Option<String>; N], RDKafkaErrorCode> {
    let name = CString::new(topic).map_err(|_| RDKafkaErrorCode::InvalidTopic)?;
    let millis = c_int::try_from(within.as_millis()).unwrap_or(c_int::MAX);
    // SAFETY: the client is valid for the whole call. librdkafka copies the name, and the request
    // contains copies of the resource and the options. The queue is destroyed after the wait, and a
    // later response is discarded.
    let event = unsafe {
        let native = client.native_ptr();
        let mut resource =
            rd_kafka_ConfigResource_new(ResourceType::RD_KAFKA_RESOURCE_TOPIC, name.as_ptr());
        if resource.is_null() {
            return Err(RDKafkaErrorCode::InvalidTopic);
        }
        let options = rd_kafka_AdminOptions_new(native, AdminOp::RD_KAFKA_ADMIN_OP_DESCRIBECONFIGS);
        rd_kafka_AdminOptions_set_request_timeout(options, millis, null_mut(), 0);
        let queue = rd_kafka_queue_new(native);
        rd_kafka_DescribeConfigs(native, &raw mut resource, 1, options, queue);
        rd_kafka_AdminOptions_destroy(options);
        rd_kafka_ConfigResource_destroy(resource);
        let event = rd_kafka_queue_poll(queue, millis);
        rd_kafka_queue_destroy(queue);
        event
    };
    let event = NonNull::new(event).ok_or(RDKafkaErrorCode::OperationTimedOut)?;
    AdminEvent(event).settings(settings)
}

struct AdminEvent(NonNull<rd_kafka_event_t>);

impl AdminEvent {
    fn descriptions(&self) -> Result<Vec<(String, Description)>, RDKafkaErrorCode> {
        let event = self.0.as_ptr();
        let mut found = Vec::new();
        // SAFETY: the event is valid. The arrays read here have the lengths that librdkafka
        // returns, and live as long as the event.
        unsafe {
            result(rd_kafka_event_error(event))?;
            let response = rd_kafka_event_DescribeTopics_result(event);
            let mut count = 0;
            let topics = rd_kafka_DescribeTopics_result_topics(response, &raw mut count);
            for &topic in array(topics, count) {
                let topic: *const rd_kafka_TopicDescription_t = topic;
                if topic.is_null() {
                    continue;
                }
                let Some(name) = text(rd_kafka_TopicDescription_name(topic)) else {
                    continue;
                };
                let error = rd_kafka_TopicDescription_error(topic);
                let code = match error.is_null() {
                    true => Ok(()),
                    false => result(rd_kafka_error_code(error)),
                };
                let description = match code {
                    Ok(()) if !may_write(topic) => Err(RDKafkaErrorCode::TopicAuthorizationFailed),
                    code => code.map(|()| {
                        let mut partitions = 0;
                        rd_kafka_TopicDescription_partitions(topic, &raw mut partitions);
                        TopicFacts {
                            partitions,
                            id: topic_id(topic),
                        }
                    }),
                };
                found.push((name, description));
            }
        }
        Ok(found)
    }

    fn cluster_id(&self) -> Option<String> {
        let event = self.0.as_ptr();
        // SAFETY: the event is valid, and the string lives as long as the event.
        unsafe {
            result(rd_kafka_event_error(event)).ok()?;
            let response = rd_kafka_event_DescribeCluster_result(event);
            text(rd_kafka_DescribeCluster_result_cluster_id(response))
        }
    }

    fn creations(&self) -> Result<Vec<Creation>, RDKafkaErrorCode> {
        let event = self.0.as_ptr();
        // SAFETY: the event is valid. The array read here has the length that librdkafka returns,
        // and lives as long as the event.
        unsafe {
            result(rd_kafka_event_error(event))?;
            let response = rd_kafka_event_CreateTopics_result(event);
            let mut count = 0;
            let topics = rd_kafka_CreateTopics_result_topics(response, &raw mut count);
            let read = |&topic: &*const _| {
                let name = text(rd_kafka_topic_result_name(topic))?;
                let made = result(rd_kafka_topic_result_error(topic)).map_err(|code| Refusal {
                    code,
                    reason: text(rd_kafka_topic_result_error_string(topic))
                        .map(|reason| reason.chars().take(BROKER_TEXT_CHARS_MAX).collect()),
                });
                Some((name, made))
            };
            Ok(array(topics.cast_const(), count)
                .iter()
                .filter_map(read)
                .collect())
        }
    }

    fn settings<const N: usize>(
        &self,
        names: [&str; N],
    ) -> Result<[Option<String>; N], RDKafkaErrorCode> {
        let mut found = [const { None }; N];
        let event = self.0.as_ptr();
        // SAFETY: the event is valid. The arrays read here have the lengths that librdkafka
        // returns, and live as long as the event.
        unsafe {
            result(rd_kafka_event_error(event))?;
            let answer = rd_kafka_event_DescribeConfigs_result(event);
            let mut count = 0;
            let resources = rd_kafka_DescribeConfigs_result_resources(answer, &raw mut count);
            for &resource in array(resources, count) {
                let resource: *const rd_kafka_ConfigResource_t = resource;
                result(rd_kafka_ConfigResource_error(resource))?;
                let mut count = 0;
                let entries = rd_kafka_ConfigResource_configs(resource, &raw mut count);
                for &entry in array(entries, count) {
                    let name = text(rd_kafka_ConfigEntry_name(entry));
                    if let Some(at) = names
                        .iter()
                        .position(|wanted| name.as_deref() == Some(wanted))
                    {
                        found[at] = text(rd_kafka_ConfigEntry_value(entry));
                    }
                }
            }
        }
        Ok(found)
    }
}

impl Drop for AdminEvent {
    fn drop(&mut self) {
        // SAFETY: `self` owns the event.
        unsafe { rd_kafka_event_destroy(self.0.as_ptr()) };
    }
}

/// Returns whether the principal may write to the topic. Also returns true if the broker does not
/// report permissions, as is the case for brokers older than Apache Kafka 2.3 (KIP-430).
///
/// # Safety
/// `topic` must point to a valid description.
unsafe fn may_write(topic: *const rd_kafka_TopicDescription_t) -> bool {
    let mut count = 0;
    // SAFETY: guaranteed by the caller. The operations are read as integers, because brokers may
    // return operations that are not in the enumeration.
    let operations: &[u32] = unsafe {
        let operations = rd_kafka_TopicDescription_authorized_operations(topic, &raw mut count);
        array(operations.cast(), count)
    };
    operations.is_empty()
        || operations.contains(&(AclOperation::RD_KAFKA_ACL_OPERATION_WRITE as u32))
}

/// Properties of a topic, as returned by a broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TopicFacts {
    pub(super) partitions: usize,
    /// The topic's ID; `None` if the broker is older than Apache Kafka 2.8 (KIP-516).
    pub(super) id: Option<TopicId>,
}

/// A topic's ID, which changes if the topic is deleted and re-created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TopicId(pub(super) i64, pub(super) i64);

/// # Safety
/// `topic` must point to a valid description.
unsafe fn topic_id(topic: *const rd_kafka_TopicDescription_t) -> Option<TopicId> {
    // SAFETY: guaranteed by the caller; the ID lives as long as the description.
    unsafe {
        let id = rd_kafka_TopicDescription_topic_id(topic);
        if id.is_null() {
            return None;
        }
        let id = TopicId(
            rd_kafka_Uuid_most_significant_bits(id),
            rd_kafka_Uuid_least_significant_bits(id),
        );
        (id != TopicId(0, 0)).then_some(id)
    }
}

/// The properties of a topic, or the error that a broker returned for the topic. If the principal
/// may describe the topic but not write to it, the error is `TopicAuthorizationFailed`.
pub(super) type Description = Result<TopicFacts, RDKafkaErrorCode>;

/// The reason why a broker did not create a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) code: RDKafkaErrorCode,
    /// The broker's error message, which rdkafka's admin client omits. For example, the message
    /// names the existing topic that the new name collides with.
    reason: Option<String>,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.reason {
            Some(reason) => write!(f, "{}: {}", self.code, reason.trim_end_matches('.')),
            None => write!(f, "{}", self.code),
        }
    }
}

/// The name of a topic, and the result of the request to create it.
type Creation = (String, Result<(), Refusal>);

/// A topic to create.
pub(super) struct NewTopic {
    pub(super) name: String,
    pub(super) partitions: i32,
    /// Replication factor; -1 selects the brokers' default.
    pub(super) replication: i32,
    /// Topic settings.
    pub(super) settings: &'static [(&'static CStr, &'static CStr)],
}

/// How long the controller may wait for a new topic to be fully created.
const CREATION_MILLIS: c_int = 5000;

/// Creates topics with one request, and returns a result for each topic. Blocks until a broker
/// responds or the request times out.
///
/// # Errors
/// Returns an error if no broker responds within `within`, or if the request fails as a whole.
pub(super) fn create_topics<C: ClientContext>(
    client: &Client<C>,
    topics: &[NewTopic],
    within: Duration,
) -> Result<Vec<Creation>, RDKafkaErrorCode> {
    let millis = c_int::try_from(within.as_millis()).unwrap_or(c_int::MAX);
    let mut error: [c_char; 256] = [0; 256];
    let mut created: Vec<*mut rd_kafka_NewTopic_t> = Vec::new();
    let mut is_valid = true;
    for topic in topics {
        // SAFETY: the name is copied, and `error` has the given length.
        let new = CString::new(topic.name.as_str()).map(|name| unsafe {
            rd_kafka_NewTopic_new(
                name.as_ptr(),
                topic.partitions,
                topic.replication,
                error.as_mut_ptr(),
                error.len(),
            )
        });
        match new {
            Ok(new) if !new.is_null() => created.push(new),
            _ => {
                is_valid = false;
                continue;
            }
        }
        for (name, value) in topic.settings {
            // SAFETY: the topic was created above, and the strings are copied.
            unsafe {
                rd_kafka_NewTopic_set_config(
                    created[created.len() - 1],
                    name.as_ptr(),
                    value.as_ptr(),
                );
            }
        }
    }
    // SAFETY: the client outlives the call. Topics and options are copied into the request. The
    // queue is destroyed after the wait; a later response is discarded.
    let event = unsafe {
        let native = client.native_ptr();
        let options = rd_kafka_AdminOptions_new(native, AdminOp::RD_KAFKA_ADMIN_OP_CREATETOPICS);
        rd_kafka_AdminOptions_set_request_timeout(options, millis, null_mut(), 0);
        let operation = millis.min(CREATION_MILLIS);
        rd_kafka_AdminOptions_set_operation_timeout(options, operation, null_mut(), 0);
        let queue = rd_kafka_queue_new(native);
        let mut event = null_mut();
        if is_valid {
            rd_kafka_CreateTopics(native, created.as_mut_ptr(), created.len(), options, queue);
            event = rd_kafka_queue_poll(queue, millis);
        }
        rd_kafka_AdminOptions_destroy(options);
        rd_kafka_queue_destroy(queue);
        for new in created {
            rd_kafka_NewTopic_destroy(new);
        }
        event
    };
    if !is_valid {
        return Err(RDKafkaErrorCode::InvalidTopic);
    }
    let event = NonNull::new(event).ok_or(RDKafkaErrorCode::OperationTimedOut)?;
    AdminEvent(event).creations()
}

/// Returns the cluster ID from the last metadata response, or `None` if there has been no response.
/// Does not block.
pub(super) fn cluster_id<C: ClientContext>(client: &Client<C>) -> Option<String> {
    // SAFETY: the client is valid. The returned string is copied and then freed, as the API
    // requires.
    unsafe {
        let native = client.native_ptr();
        let id = rd_kafka_clusterid(native, 0);
        let found = text(id.cast_const());
        if !id.is_null() {
            rd_kafka_mem_free(native, id.cast());
        }
        found
    }
}

/// Queries the brokers for the cluster ID. Unlike a metadata request, this query does not update
/// the topic metadata that `client` caches. Returns `None` if no broker responds within the given
/// time. Blocks.
pub(super) fn query_cluster_id<C: ClientContext>(
    client: &Client<C>,
    within: Duration,
) -> Option<String> {
    let millis = c_int::try_from(within.as_millis()).unwrap_or(c_int::MAX);
    // SAFETY: the client outlives the call. The options are copied into the request. The queue is
    // destroyed after the wait; a later response is discarded.
    let event = unsafe {
        let native = client.native_ptr();
        let options = rd_kafka_AdminOptions_new(native, AdminOp::RD_KAFKA_ADMIN_OP_DESCRIBECLUSTER);
        rd_kafka_AdminOptions_set_request_timeout(options, millis, null_mut(), 0);
        let queue = rd_kafka_queue_new(native);
        rd_kafka_DescribeCluster(native, options, queue);
        rd_kafka_AdminOptions_destroy(options);
        let event = rd_kafka_queue_poll(queue, millis);
        rd_kafka_queue_destroy(queue);
        event
    };
    AdminEvent(NonNull::new(event)?).cluster_id()
}

/// Queries the metadata of several topics with one request. Topics that the response omits are
/// omitted from the result. Blocks until a broker responds or the request times out.
///
/// Unlike a metadata request, this request does not create topics, and does not store the names in
/// `client` for the rest of the client's lifetime.
///
/// # Errors
/// Returns an error if no broker responds in time, or if the request fails as a whole.
pub(super) fn describe_topics<C: ClientContext>(
    client: &Client<C>,
    topics: &[String],
    within: Duration,
) -> Result<Vec<(String, Description)>, RDKafkaErrorCode> {
    let names: Result<Vec<_>, _> = topics
        .iter()
        .map(|topic| CString::new(topic.as_str()))
        .collect();
    let names = names.map_err(|_| RDKafkaErrorCode::InvalidTopic)?;
    let mut pointers: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
    let millis = c_int::try_from(within.as_millis()).unwrap_or(c_int::MAX);
    // SAFETY: the client outlives the call. The names are copied into the collection, and the
    // collection and options into the request. The queue is destroyed after the wait; a later
    // response is discarded.
    let event = unsafe {
        let native = client.native_ptr();
        let collection =
            rd_kafka_TopicCollection_of_topic_names(pointers.as_mut_ptr(), pointers.len());
        let options = rd_kafka_AdminOptions_new(native, AdminOp::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS);
        rd_kafka_AdminOptions_set_request_timeout(options, millis, null_mut(), 0);
        // Ignore an error: the call fails only if the options belong to a different kind of
        // request.
        let failed = rd_kafka_AdminOptions_set_include_authorized_operations(options, 1);
        if !failed.is_null() {
            rd_kafka_error_destroy(failed);
        }
        let queue = rd_kafka_queue_new(native);
        rd_kafka_DescribeTopics(native, collection, options, queue);
        rd_kafka_AdminOptions_destroy(options);
        rd_kafka_TopicCollection_destroy(collection);
        let event = rd_kafka_queue_poll(queue, millis);
        rd_kafka_queue_destroy(queue);
        event
    };
    let event = NonNull::new(event).ok_or(RDKafkaErrorCode::OperationTimedOut)?;
    AdminEvent(event).descriptions()
}

/// Returns the names and values of a record's headers, in order. Omits headers whose names are not
/// UTF-8, because no header that Walpost reads has such a name. rdkafka would panic on such a name,
/// and any producer can send one.
pub(super) fn headers<'r>(
    record: &'r BorrowedMessage<'r>,
) -> impl Iterator<Item = (&'r str, Option<&'r [u8]>)> {
    let mut list = null_mut();
    // SAFETY: the record is valid. It owns the list, which stays null if there are no headers. The
    // call returns only librdkafka's own codes, all of which are in the enumeration.
    let code = unsafe { rd_kafka_message_headers(record.ptr(), &raw mut list) };
    let list = NonNull::new(list).filter(|_| result(code).is_ok());
    let all = list.into_iter().flat_map(move |list| {
        (0..).map_while(move |index| {
            let (mut name, mut value, mut value_len) = (null(), null(), 0);
            // SAFETY: the record, which is borrowed for `'r`, owns the list. The name is terminated
            // by NUL. The value is null or has the returned length. Both live as long as the list.
            // If the index is after the last header, the call returns librdkafka's own code
            // `_NOENT`.
            unsafe {
                let code = rd_kafka_header_get_all(
                    list.as_ptr(),
                    index,
                    &raw mut name,
                    &raw mut value,
                    &raw mut value_len,
                );
                result(code).ok()?;
                let value = (!value.is_null()).then(|| array(value.cast::<u8>(), value_len));
                Some((CStr::from_ptr(name), value))
            }
        })
    });
    all.filter_map(|(name, value)| Some((name.to_str().ok()?, value)))
}

/// Converts a C array to a slice. librdkafka may return a null pointer for an empty array.
///
/// # Safety
/// `first` must be null, or point to `count` values that live for `'a`.
unsafe fn array<'a, T>(first: *const T, count: usize) -> &'a [T] {
    match first.is_null() {
        true => &[],
        // SAFETY: guaranteed by the caller.
        false => unsafe { slice::from_raw_parts(first, count) },
    }
}

/// Copies a C string; returns `None` if the pointer is null.
///
/// # Safety
/// `string` must be null, or point to a NUL-terminated string.
unsafe fn text(string: *const c_char) -> Option<String> {
    (!string.is_null()).then(|| {
        // SAFETY: guaranteed by the caller.
        unsafe { CStr::from_ptr(string) }
            .to_string_lossy()
            .into_owned()
    })
}

/// A list of headers that has not been passed to librdkafka yet.
struct NativeHeaders(NonNull<rd_kafka_headers_t>);

impl NativeHeaders {
    fn from_record(record: &Record<'_>) -> Result<Self, RDKafkaErrorCode> {
        let named = record.headers.iter();
        // SAFETY: this creates an empty list.
        let list = unsafe { rd_kafka_headers_new(named.len()) };
        let headers = Self(NonNull::new(list).ok_or(RDKafkaErrorCode::CriticalSystemResource)?);
        for (name, value) in named {
            let (value, value_len) = parts(value);
            // SAFETY: the name and the value are valid for the call, which copies them.
            let code = unsafe {
                rd_kafka_header_add(
                    headers.0.as_ptr(),
                    name.as_ptr().cast(),
                    name.len().cast_signed(),
                    value,
                    value_len.cast_signed(),
                )
            };
            result(code)?;
        }
        Ok(headers)
    }
}

impl Drop for NativeHeaders {
    fn drop(&mut self) {
        // SAFETY: `self` owns the list.
        unsafe { rd_kafka_headers_destroy(self.0.as_ptr()) };
    }
}

fn parts(bytes: Option<&[u8]>) -> (*const c_void, usize) {
    bytes.map_or((std::ptr::null(), 0), |bytes| {
        (bytes.as_ptr().cast(), bytes.len())
    })
}

fn result(code: RDKafkaRespErr) -> Result<(), RDKafkaErrorCode> {
    match code {
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR => Ok(()),
        code => Err(code.into()),
    }
}
