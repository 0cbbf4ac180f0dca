//! Describes the machine and the programs used for a measurement.

use std::fs;
use std::process::Command;

use procfs::{CpuInfo, Current, Meminfo};
use serde::{Deserialize, Serialize};

use crate::bed::TestBed;
use crate::support::postgres::dependencies;
use crate::support::walpost::Invocation;

/// The machine's hardware and operating system.
#[derive(PartialEq, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) system: String,
    pub(crate) kernel: String,
}

/// The versions of all programs involved. A version is empty if the program is not installed.
#[derive(PartialEq, Serialize, Deserialize)]
pub(crate) struct Versions {
    pub(crate) walpost: String,
    pub(crate) librdkafka: String,
    pub(crate) postgres: String,
    pub(crate) kafka: String,
    pub(crate) java: String,
    pub(crate) debezium: String,
}

impl Machine {
    pub(crate) fn current() -> Self {
        let processors = CpuInfo::current().unwrap();
        Self {
            processor: processors.model_name(0).unwrap_or("unknown").to_owned(),
            cores: processors.num_cores(),
            memory_bytes: Meminfo::current().unwrap().mem_total,
            system: system(),
            kernel: procfs::sys::kernel::Version::current().map_or_else(
                |_| "unknown".to_owned(),
                |kernel| format!("Linux {}.{}.{}", kernel.major, kernel.minor, kernel.patch),
            ),
        }
    }
}

impl Versions {
    pub(crate) fn query(bed: &TestBed) -> Self {
        let walpost = Invocation::new(["--version"]).finish().stdout;
        let commit = first_line(Command::new("git").args(["describe", "--always", "--dirty"]));
        Self {
            walpost: format!("{} {commit}", walpost.trim()).trim().to_owned(),
            librdkafka: rdkafka::util::get_rdkafka_version().1,
            postgres: bed.db.value("SHOW server_version").unwrap(),
            kafka: kafka(),
            // Java prints its version to standard error.
            java: first_line(Command::new("sh").args(["-c", "java -version 2>&1"])),
            debezium: fs::read_to_string(dependencies().join("debezium/VERSION"))
                .unwrap_or_default()
                .trim()
                .to_owned(),
        }
    }
}

fn system() -> String {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.unwrap_or("unknown").trim_matches('"').to_owned()
}

/// Returns Kafka's version, taken from the file name of the broker's JAR.
fn kafka() -> String {
    let jars = fs::read_dir(dependencies().join("kafka/lib")).unwrap();
    let version = jars.filter_map(|jar| {
        let name = jar.ok()?.file_name().into_string().ok()?;
        let (_, version) = name.strip_prefix("kafka_")?.split_once('-')?;
        Some(version.strip_suffix(".jar")?.to_owned())
    });
    version.min().expect("Kafka's jar")
}

fn first_line(command: &mut Command) -> String {
    let output = command.output();
    let text = output.map_or_else(
        |_| String::new(),
        |output| String::from_utf8_lossy(&output.stdout).into_owned(),
    );
    text.lines().next().unwrap_or_default().to_owned()
}
