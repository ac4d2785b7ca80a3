//! Daemons that are told to leave while a job runs on them.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;

use crate::process::{Daemon, KOLO, PATIENCE, Site, command};

/// A job with one worker that runs until a file is there, and then prints its environment.
pub(crate) struct Job {
    pub(crate) kolo: Daemon,
    end: std::path::PathBuf,
}

impl Job {
    fn start(site: &Site, name: &str) -> Self {
        Self::with(site, name, "env")
    }

    /// One that does something else at its end. It takes a tenth of a CPU.
    pub(crate) fn with(site: &Site, name: &str, last: &str) -> Self {
        let end = site.path(name);
        let script = format!(
            "echo begun; until [ -e {} ]; do sleep 0.02; done; {last}",
            end.display()
        );
        let mut kolo = command(KOLO);
        kolo.args(["--head", &site.address.to_string()])
            .arg("--credentials")
            .arg(site.admin())
            .args(["--connect-timeout", "30"])
            .args(["run", "-n", "1", "--cpus-per-worker", "0.1"])
            .args(["--", "sh", "-c", &script]);
        let kolo = Daemon::spawn(kolo);
        kolo.says("begun");
        Self { kolo, end }
    }

    pub(crate) fn end(&self) {
        std::fs::write(&self.end, "").unwrap();
    }
}

pub(crate) fn site_with_node(args: &[&str], node_args: &[&str]) -> (Site, Daemon) {
    let site = Site::new(args);
    let token = site.token("token", &[]);
    let token = token.to_str().unwrap();
    let node = site.node("node", &[&["--token-file", token], node_args].concat());
    node.ready();
    (site, node)
}

#[test]
fn a_node_that_is_terminated_takes_no_more_jobs_and_waits_for_its_last() {
    for signal in [Signal::TERM, Signal::USR1] {
        let (site, mut node) = site_with_node(&[], &[]);
        let ready = node.ready();
        let name = ready["node"].as_str().unwrap();
        let mut job = Job::start(&site, "end");
        // As `timeout` does it: the same again is no second signal.
        node.signal(signal);
        node.signal(signal);
        node.says("waiting for jobs to end");
        site.wait_for(name, "draining");
        assert!(site.operator(&["status"]).contains("draining"));
        let refused = site.kolo(&site.admin(), &["run", "-n", "1", "--", "true"]);
        assert!(!refused.status.success(), "{refused:?}");
        job.end();
        assert!(job.kolo.end().success(), "{}", job.kolo.printed.text());
        assert!(node.end().success(), "{}", node.printed.text());
    }
}

#[test]
fn a_node_does_not_wait_for_ever_and_not_at_all_if_told_twice_or_by_ctrl_c() {
    let limits = ["--drain-timeout", "100ms", "--stop-timeout", "20s"];
    let (site, mut node) = site_with_node(&[], &limits);
    let mut job = Job::start(&site, "never");
    node.signal(Signal::TERM);
    node.says("not all jobs have ended by themselves");
    assert!(node.end().success(), "{}", node.printed.text());
    assert!(!job.kolo.end().success());

    for signals in [&[Signal::INT][..], &[Signal::TERM, Signal::INT]] {
        let mut node = site.node("node", &["--drain-timeout", "1h"]);
        node.ready();
        let mut job = Job::start(&site, "never");
        for (index, signal) in signals.iter().enumerate() {
            if index > 0 {
                node.says("waiting for jobs to end");
            }
            node.signal(*signal);
        }
        assert_eq!(node.end().success(), signals.len() == 1);
        assert!(!job.kolo.end().success());
    }
}

#[test]
fn workers_see_nothing_of_what_the_daemon_is_told() {
    let site = Site::new(&[]);
    let token = site.token("token", &[]);
    let secret = std::fs::read_to_string(&token).unwrap();
    let socket = site.path("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&socket).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut node = command(crate::process::NODE);
    node.args(["--head", &site.address.to_string(), "--format", "json"])
        .args(["--cpus", "1", "--gpus", "0"])
        .arg("--state-dir")
        .arg(site.path("node"))
        .env("KOLO_NODE_TOKEN_FILE", &token)
        .env("KOLO_NODE_STOP_TIMEOUT", "20s")
        .env("NOTIFY_SOCKET", &socket)
        .env(
            "WATCHDOG_USEC",
            Duration::from_secs(60).as_micros().to_string(),
        )
        .env("CREDENTIALS_DIRECTORY", "/run/credentials/kolo-node")
        .env("A_VARIABLE_OF_THE_HOST", "is passed on");
    let node = Daemon::spawn(node);
    node.ready();
    let mut job = Job::start(&site, "end");
    job.end();
    assert!(job.kolo.end().success());
    let seen = job.kolo.printed.text();
    assert!(
        seen.contains("A_VARIABLE_OF_THE_HOST=is passed on"),
        "{seen}"
    );
    for hidden in [
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "CREDENTIALS_DIRECTORY",
        "KOLO_NODE_TOKEN_FILE",
        "KOLO_NODE_STOP_TIMEOUT",
        secret.trim().rsplit('.').next().unwrap(),
        path(&token),
    ] {
        assert!(!seen.contains(hidden), "{hidden} in {seen}");
    }
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}
