//! The Java virtual machine that runs brokers and Kafka's tools.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use super::super::postgres::dependencies;
use super::Broker;

/// Options for tests: a small heap, and no second compiler that would compete for two cores.
pub(super) const JVM_OPTIONS: [&str; 3] =
    ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"];

/// Option that makes a Java virtual machine archive its loaded classes when it exits.
pub(super) const ARCHIVE_OPTION: &str = "-XX:ArchiveClassesAtExit=";

/// Returns the option that loads the archived classes of an earlier broker, which nearly halves the
/// CPU time of startup. A different version of Java ignores the archive.
pub(super) fn shared_classes() -> String {
    static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
        let kafka = dependencies().join("kafka");
        let file = kafka.join("classes.jsa");
        if !file.exists() {
            let unfinished = kafka.join(format!("classes.{}", std::process::id()));
            let option = format!("{ARCHIVE_OPTION}{}", unfinished.display());
            let broker = Broker::with(&[&JVM_OPTIONS[..], &[&option]].concat(), "");
            broker.stop();
            fs::rename(unfinished, &file).expect("the classes of a broker");
        }
        file
    });
    format!("-XX:SharedArchiveFile={}", FILE.display())
}

/// Returns a Java command with Kafka's jars that uses the logging configuration in `folder`.
pub(super) fn java(folder: &Path, options: &[&str]) -> Command {
    let library = dependencies().join("kafka/lib");
    assert!(
        library.is_dir(),
        "Kafka is not in {}: run ./dev setup",
        library.display()
    );
    let mut class_path = library.into_os_string();
    class_path.push("/*");
    let mut logging = std::ffi::OsString::from("-Dlog4j2.configurationFile=");
    logging.push(folder.join("log4j2.properties"));
    let mut command = Command::new("java");
    // Brokers that are killed leave unpacked files in this directory.
    let mut scratch = std::ffi::OsString::from("-Djava.io.tmpdir=");
    scratch.push(folder);
    command
        .process_group(0)
        .args(options)
        .arg(logging)
        .arg(scratch)
        .arg("-cp")
        .arg(class_path);
    command
}
