//! Logs of daemons.

use std::fs::OpenOptions;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::process::{HEAD, KOLO, NODE, command};

/// A daemon that does not outlive its test, and whose standard error takes nothing, as on a full disk.
struct Mute(Child);

impl Mute {
    /// Starts it, and waits for the line that says that it is ready.
    fn start(mut daemon: Command) -> (Self, serde_json::Value) {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut child = daemon
            .args(["--format", "json", "--log", "debug"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(full)
            .spawn()
            .unwrap();
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        let this = Self(child);
        BufReader::new(stdout).read_line(&mut line).unwrap();
        (this, serde_json::from_str(&line).unwrap())
    }

    fn end(mut self) {
        let pid = Pid::from_raw(self.0.id().cast_signed()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        let status = self.0.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Mute {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn a_log_that_can_not_be_written_stops_nothing() {
    let dir = tempfile::TempDir::with_prefix("kolo-test-").unwrap();
    let at = |name: &str| dir.path().join(name);
    let mut head = command(HEAD);
    head.arg("--state-dir").arg(at("head"));
    head.args(["--listen", "127.0.0.1:0", "--node-token-file"]);
    head.arg(at("token"));
    let (head, ready) = Mute::start(head);
    let address = ready["address"].as_str().unwrap();
    let mut node = command(NODE);
    node.args(["--head", address, "--cpus", "2", "--gpus", "0"]);
    node.arg("--token-file").arg(at("token"));
    node.arg("--state-dir").arg(at("node"));
    let (node, _) = Mute::start(node);
    for _ in 0..3 {
        let mut run = command(KOLO);
        run.args(["--head", address, "--connect-timeout", "30"]);
        run.arg("--credentials").arg(at("head").join("admin"));
        let run = run.args(["run", "-n", "2", "--", "true"]).output().unwrap();
        assert!(run.status.success(), "{run:?}");
    }
    node.end();
    head.end();
}
