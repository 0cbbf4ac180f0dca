//! Tests pages in a headless Chromium.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use serde_json::{Value, json};

use super::reaper::{self, Ending};
use super::secrets::{self, OutputStream};
use super::wait::{WAIT_TIMEOUT, wait_until};

const ARGUMENTS: [&str; 7] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
];

fn run(url: &str, arguments: &[&str]) -> String {
    let profile = reaper::folder("browser");
    let result = Command::new("chromium")
        .args(ARGUMENTS)
        // Advance the page's virtual clock by six seconds, regardless of how fast the machine is.
        .arg("--virtual-time-budget=6000")
        .arg(format!("--user-data-dir={}", profile.display()))
        .args(arguments)
        .arg(url)
        .stdin(Stdio::null())
        .output()
        .expect("chromium: ./dev setup");
    assert!(result.status.success(), "{result:?}");
    String::from_utf8(result.stdout).unwrap()
}

/// Returns the HTML of the page at `url` after its script has run for several seconds of virtual
/// time.
pub(crate) fn document(url: &str) -> String {
    let document = run(url, &["--dump-dom"]);
    secrets::expect_none(OutputStream::Error, &document);
    document
}

/// Saves a screenshot of the page as a PNG file with the given dimensions.
pub(crate) fn screenshot(url: &str, file: &Path, width: u32, height: u32, dark: bool) {
    let size = format!("--window-size={width},{height}");
    let file = format!("--screenshot={}", file.display());
    let mut arguments = vec![&*size, &*file];
    if dark {
        arguments.push("--blink-settings=preferredColorScheme=0");
    }
    run(url, &arguments);
}

/// A page that stays open, so that a test can evaluate expressions in it, resize it and press keys.
/// The browser exits when this value is dropped.
pub(crate) struct Tab {
    child: Child,
    commands: File,
    answers: Receiver<Value>,
    session: Option<String>,
    commands_sent: u64,
}

impl Tab {
    /// Opens `url` in a window of the given size, and waits until the page's script has displayed a
    /// pipeline.
    pub(crate) fn open(url: &str, width: u32, height: u32) -> Self {
        let folder = reaper::folder("browser");
        let (commands, answers) = (folder.join("commands"), folder.join("answers"));
        let made = Command::new("mkfifo").args([&commands, &answers]).status();
        assert!(made.unwrap().success());
        // With `--remote-debugging-pipe`, Chromium reads DevTools protocol commands from descriptor
        // 3 and writes responses to descriptor 4.
        let child = Command::new("sh")
            .args(["-c", r#"exec 3<"$0" 4>"$1"; shift; exec chromium "$@""#])
            .args([&commands, &answers])
            .args(ARGUMENTS)
            .arg("--remote-debugging-pipe")
            .arg(format!("--user-data-dir={}", folder.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell");
        reaper::register(child.id(), Ending::Kill);
        let commands = OpenOptions::new().write(true).open(commands).unwrap();
        let mut tab = Self {
            child,
            commands,
            answers: answers_from(File::open(answers).unwrap()),
            session: None,
            commands_sent: 0,
        };
        let blank = json!({"url": "about:blank"});
        let target = tab.command("Target.createTarget", blank).unwrap();
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = tab.command("Target.attachToTarget", attach).unwrap();
        tab.session = attached["sessionId"].as_str().map(str::to_owned);
        tab.resize(width, height);
        tab.command("Page.navigate", json!({"url": url})).unwrap();
        let shown = "document.querySelector('[data-pipeline] .state b')?.textContent";
        // Evaluation can fail until the requested page has replaced the initial blank page.
        wait_until("the page to show a pipeline", || {
            tab.try_evaluate(shown).is_ok_and(|text| text != "")
        });
        tab
    }

    /// Sends a DevTools protocol command, and returns its result or error.
    fn command(&mut self, method: &str, parameters: Value) -> Result<Value, Value> {
        self.commands_sent += 1;
        let id = self.commands_sent;
        let mut command = json!({"id": id, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        write!(self.commands, "{command}\0").expect("chromium: ./dev setup");
        loop {
            let answer = self.answers.recv_timeout(WAIT_TIMEOUT);
            let answer = answer.unwrap_or_else(|error| panic!("{method}: {error}"));
            if answer["id"] == id {
                return match answer["error"].is_null() {
                    true => Ok(answer["result"].clone()),
                    false => Err(answer),
                };
            }
        }
    }

    /// Evaluates a JavaScript expression in the page. Returns its value as JSON, or `""` if it is
    /// undefined.
    pub(crate) fn evaluate(&mut self, expression: &str) -> Value {
        self.try_evaluate(expression).unwrap()
    }

    fn try_evaluate(&mut self, expression: &str) -> Result<Value, Value> {
        let parameters = json!({"expression": expression, "returnByValue": true});
        let answer = self.command("Runtime.evaluate", parameters)?;
        assert!(answer["exceptionDetails"].is_null(), "{answer}");
        let value = answer["result"].get("value").cloned();
        let value = value.unwrap_or_else(|| json!(""));
        secrets::expect_none(OutputStream::Error, &value.to_string());
        Ok(value)
    }

    /// Resizes the window. If it is narrow, emulates a mobile device.
    pub(crate) fn resize(&mut self, width: u32, height: u32) {
        let size = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600
        });
        self.command("Emulation.setDeviceMetricsOverride", size)
            .unwrap();
    }

    /// Presses and releases a key.
    pub(crate) fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            _ => panic!("unsupported key: {key}"),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({
                "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code
            });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = json!(text);
            }
            self.command("Input.dispatchKeyEvent", event).unwrap();
        }
    }
}

/// Starts a thread that reads the browser's messages, which are terminated by NUL, and returns them
/// through a channel.
fn answers_from(file: File) -> Receiver<Value> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for message in BufReader::new(file).split(0) {
            let Ok(message) = message else { return };
            let message = serde_json::from_slice(&message).expect("a message of DevTools");
            if sender.send(message).is_err() {
                return;
            }
        }
    });
    receiver
}

impl Drop for Tab {
    fn drop(&mut self) {
        // The browser may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        reaper::forget(self.child.id());
    }
}
