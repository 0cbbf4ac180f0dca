//! Produces records with arbitrary bytes as header names. rdkafka accepts only UTF-8 names.
#![expect(unsafe_code, reason = "calls librdkafka, which is a C library")]

use std::ffi::CString;

use rdkafka::bindings::{
    RD_KAFKA_MSG_F_COPY, rd_kafka_header_add, rd_kafka_headers_new, rd_kafka_producev,
    rd_kafka_resp_err_t, rd_kafka_vtype_t as Vtype,
};
use rdkafka::producer::{BaseProducer, Producer};

use super::super::wait::WAIT_TIMEOUT;
use super::Broker;

impl Broker {
    /// Produces a record with these names and values as its headers.
    pub(crate) fn produce_with_headers(&self, topic: &str, key: &str, headers: &[(&[u8], &[u8])]) {
        let producer: BaseProducer = self.client().create().unwrap();
        let topic = CString::new(topic).unwrap();
        // SAFETY: the producer is valid. All pointers are valid for the calls, which copy the data
        // they point to. Each type tag is followed by arguments of the types that rdkafka.h
        // specifies for it. `rd_kafka_producev` takes ownership of the headers.
        let code = unsafe {
            let list = rd_kafka_headers_new(headers.len());
            for (name, value) in headers {
                rd_kafka_header_add(
                    list,
                    name.as_ptr().cast(),
                    name.len().cast_signed(),
                    value.as_ptr().cast(),
                    value.len().cast_signed(),
                );
            }
            rd_kafka_producev(
                producer.client().native_ptr(),
                Vtype::RD_KAFKA_VTYPE_TOPIC,
                topic.as_ptr(),
                Vtype::RD_KAFKA_VTYPE_MSGFLAGS,
                RD_KAFKA_MSG_F_COPY,
                Vtype::RD_KAFKA_VTYPE_KEY,
                key.as_ptr(),
                key.len(),
                Vtype::RD_KAFKA_VTYPE_HEADERS,
                list,
                Vtype::RD_KAFKA_VTYPE_END,
            )
        };
        assert_eq!(code, rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR);
        producer
            .flush(WAIT_TIMEOUT)
            .expect("the broker acknowledges the record");
    }
}
