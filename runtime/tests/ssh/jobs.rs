//! What becomes of a running job when something of its hosts goes, or when they are taken down: nothing of it is left, on any
//! host.

use std::io::{BufRead, BufReader};
use std::process::{ChildStdout, Command};

use rustix::process::Signal;
use serde_json::Value;

use crate::servers::{Launched, Servers, gone, is_running, node_pids, on, texts};

/// Tells its process and that of a child that has left its session, and is deaf to `TERM`.
const STAYS: &str = "trap '' TERM; setsid sh -c 'trap \"\" TERM; echo pid $$; while :; do sleep 0.1; done' & \
                     echo pid $$; while :; do sleep 0.1; done";

/// A job that does not end by itself.
pub(crate) struct Job {
    pub(crate) kolo: Launched,
    /// Of its workers, and of their children.
    pub(crate) pids: Vec<u32>,
    _out: BufReader<ChildStdout>,
}

impl Job {
    /// `kolo run OPTIONS -- sh -c STAYS`, whose workers have all begun.
    pub(crate) fn start(mut kolo: Command, workers: usize) -> Self {
        kolo.args(["--grace", "1", "--", "/bin/sh", "-c", STAYS]);
        let mut kolo = Launched::start(kolo);
        let mut out = BufReader::new(kolo.child.stdout.take().unwrap());
        let mut pids = Vec::new();
        while pids.len() < 2 * workers {
            let mut line = String::new();
            let read = out.read_line(&mut line).unwrap();
            assert!(read > 0, "it ended: {}", kolo.stderr());
            let (_, pid) = line.trim().split_once("pid ").expect(&line);
            pids.push(pid.parse().unwrap());
        }
        assert!(pids.iter().all(|pid| is_running(*pid)));
        Self {
            kolo,
            pids,
            _out: out,
        }
    }

    /// On the cluster that a launch tells of.
    pub(crate) fn on(servers: &Servers, up: &Value, workers: usize) -> Self {
        let mut kolo = servers.kolo(&["run", "-n", &workers.to_string()]);
        on(&mut kolo, up);
        Self::start(kolo, workers)
    }
}

/// All is up, and runs on.
fn up(servers: &Servers) -> Value {
    let hosts = servers.hosts();
    let output = servers
        .up(&["--detach", "--hosts", &hosts])
        .output()
        .unwrap();
    let (out, err) = texts(&output);
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"))
}

#[track_caller]
fn goes_down(servers: &Servers, args: &[&str]) {
    let output = servers.kolo(&["down"]).args(args).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    servers.nothing_is_left();
}

#[test]
fn hosts_that_are_taken_down_leave_nothing_of_the_job_that_runs_there() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    // The job is deaf, so it outlives its drain, and is killed after its grace or at once.
    for args in [&[][..], &["--drain-timeout", "0.2"], &["--force"]] {
        let job = Job::on(&servers, &up(&servers), 3);
        goes_down(&servers, args);
        let mut job = job;
        assert_ne!(job.kolo.wait(), Some(0), "{args:?}");
        for pid in &job.pids {
            assert!(!is_running(*pid), "{args:?}");
        }
    }
}

#[test]
fn one_host_that_is_taken_down_ends_the_job_on_the_other_too() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    let up = up(&servers);
    let mut job = Job::on(&servers, &up, 3);
    let output = servers.kolo(&["down", "--hosts", "127.0.0.3:1"]).output();
    assert!(output.as_ref().unwrap().status.success(), "{output:?}");
    assert_eq!(job.kolo.wait(), Some(1), "{}", job.kolo.stderr());
    for pid in &job.pids {
        gone(*pid);
    }
    assert!(is_running(node_pids(&up)[0]));
    goes_down(&servers, &[]);
}

/// `kolo run` on hosts of its own, of which the second is the one that goes.
fn run_on_hosts(servers: &Servers) -> Job {
    let mut kolo = servers.kolo(&["run", "-H", &servers.hosts()]);
    kolo.args(["--remote-program", env!("CARGO_BIN_EXE_kolo-node")]);
    Job::start(kolo, 3)
}

#[test]
fn a_killed_launcher_of_a_job_on_hosts_of_its_own_leaves_nothing() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    let mut job = run_on_hosts(&servers);
    job.kolo.signal(Signal::KILL);
    job.kolo.wait();
    for pid in &job.pids {
        gone(*pid);
    }
    servers.nothing_is_left();
}
