//! Chromium without a window.

use std::path::Path;
use std::process::{Command, Stdio};

use super::reaper;
use super::secrets::{self, Stream};

fn run(url: &str, arguments: &[&str]) -> String {
    let profile = reaper::folder("browser");
    let said = Command::new("chromium")
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ])
        .args([
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
        ])
        // So long the page believes to have run, however slow the machine is.
        .arg("--virtual-time-budget=6000")
        .arg(format!("--user-data-dir={}", profile.display()))
        .args(arguments)
        .arg(url)
        .stdin(Stdio::null())
        .output()
        .expect("chromium: ./dev setup");
    assert!(said.status.success(), "{said:?}");
    String::from_utf8(said.stdout).unwrap()
}

/// What the page at `url` has become after some seconds, as HTML.
pub(crate) fn document(url: &str) -> String {
    let document = run(url, &["--dump-dom"]);
    secrets::expect_none(Stream::Error, &document);
    document
}

/// How it looks, as a PNG of that size.
pub(crate) fn screenshot(url: &str, file: &Path, width: u32, height: u32, dark: bool) {
    let size = format!("--window-size={width},{height}");
    let file = format!("--screenshot={}", file.display());
    let mut arguments = vec![&*size, &*file];
    if dark {
        arguments.push("--blink-settings=preferredColorScheme=0");
    }
    run(url, &arguments);
}
