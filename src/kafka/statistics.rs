//! librdkafka's statistics, which it emits every `statistics.interval.ms`. The format is described
//! in librdkafka's STATISTICS.md.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::model::statistics::Statistics;

#[derive(Deserialize)]
struct StatisticsDocument {
    #[serde(default)]
    msg_cnt: u64,
    #[serde(default)]
    tx_bytes: u64,
    #[serde(default)]
    brokers: BTreeMap<String, Broker>,
}

#[derive(Deserialize)]
struct ProducerStatistics {
    eos: Option<Eos>,
}

#[derive(Deserialize)]
struct Eos {
    idemp_state: String,
}

#[derive(Deserialize)]
struct Broker {
    #[serde(default)]
    txretries: u64,
    rtt: Option<Rtt>,
}

#[derive(Deserialize)]
struct Rtt {
    #[serde(default)]
    p99: i64,
    #[serde(default)]
    cnt: i64,
}

/// Parses librdkafka's JSON document. Returns `None` if the document is not valid.
pub(super) fn read(document: &[u8]) -> Option<Statistics> {
    let document: StatisticsDocument = serde_json::from_slice(document).ok()?;
    let brokers = document.brokers.values();
    Some(Statistics {
        queued_records: document.msg_cnt,
        retries: brokers.clone().map(|broker| broker.txretries).sum(),
        sent_bytes: document.tx_bytes,
        round_trip_p99_micros: brokers
            .filter_map(|broker| broker.rtt.as_ref())
            .filter(|rtt| rtt.cnt > 0)
            .filter_map(|rtt| u64::try_from(rtt.p99).ok())
            .max(),
    })
}

/// Returns whether a broker has assigned the producer ID that idempotence requires.
pub(super) fn is_identified(document: &[u8]) -> bool {
    let document: Option<ProducerStatistics> = serde_json::from_slice(document).ok();
    let state = document.and_then(|document| document.eos);
    state.is_some_and(|state| state.idemp_state == "Assigned")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_totals_and_aggregates_the_statistics_of_all_brokers() {
        let document = br#"{"name": "x", "msg_cnt": 7, "tx_bytes": 1000, "brokers": {
            "a": {"txretries": 1, "rtt": {"p99": 900, "cnt": 3}},
            "b": {"txretries": 2, "rtt": {"p99": 1500, "cnt": 1}},
            "c": {"txretries": 0, "rtt": {"p99": 9999, "cnt": 0}}}}"#;
        let expected = Statistics {
            queued_records: 7,
            retries: 3,
            sent_bytes: 1000,
            round_trip_p99_micros: Some(1500),
        };
        assert_eq!(read(document), Some(expected));
        assert_eq!(read(b"{}"), Some(Statistics::default()));
        assert_eq!(read(b"no"), None);
    }

    #[test]
    fn detects_that_a_producer_id_has_been_assigned() {
        let document = |state| format!("{{\"eos\": {{\"idemp_state\": \"{state}\"}}}}");
        assert!(is_identified(document("Assigned").as_bytes()));
        assert!(!is_identified(document("WaitPID").as_bytes()));
        assert!(!is_identified(b"{}"));
        assert!(!is_identified(b"no"));
    }
}
