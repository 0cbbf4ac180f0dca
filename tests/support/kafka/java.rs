//! Java virtual machines for brokers and for Kafka's command-line tools.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use super::super::postgres::dependencies;
use super::Broker;

/// Options for tests: a small heap, and only one of the two JIT compilers, because the machine may
/// have only two cores.
pub(super) const JVM_OPTIONS: [&str; 3] =
    ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"];

/// An option that makes a Java virtual machine archive its loaded classes when it exits.
pub(super) const ARCHIVE_OPTION: &str = "-XX:ArchiveClassesAtExit=";

/// Returns the option that loads classes archived by an earlier broker, which nearly halves the CPU
/// time of startup. Other versions of Java ignore the archive.
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

/// Returns a `java` command with Kafka's jars in its class path and the logging configuration from
/// `folder`.
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
    // A killed broker leaves unpacked files in its temporary directory, so place that directory
    // inside `folder`, which is removed after the test.
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
