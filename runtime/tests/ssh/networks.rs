//! ssh servers on hosts with networks of their own: IPv6 alone, IPv4 alone, and a cut cable.

use std::process::Command;

use kolo_harness::netns::{self, Host, Lab};
use serde_json::Value;

use crate::jobs::Job;
use crate::servers::{Servers, gone, is_running, node_pids, on, texts};

/// A launcher and hosts `a` and `b`, each with an ssh server, in one network.
struct World {
    servers: Servers,
    hosts: Vec<Host>,
    /// As they are called, with slots: the first by its name, the second by its address.
    list: String,
    // Dropped last.
    _lab: Lab,
}

impl World {
    /// `prefix` is `10.1.0.` or `fd01::`. Nothing if it can't be made here, which is told.
    fn new(prefix: &str) -> Option<Self> {
        if let Err(reason) = netns::available() {
            eprintln!("skipped: {reason}");
            return None;
        }
        let lab = Lab::new().unwrap();
        let wire = lab.segment("wire").unwrap();
        let bits = if prefix.contains(':') { 64 } else { 24 };
        let join = |host: &Host, number: u32| {
            if bits == 24 {
                // As where it is switched off: the kernel has it, no interface does.
                host.set_sysctl("net/ipv6/conf/all/disable_ipv6", "1")
                    .unwrap();
            }
            let address = format!("{prefix}{number}/{bits}");
            host.attach("eth0", &wire, &[&address]).unwrap();
        };
        let launcher = lab.host("launcher").unwrap();
        join(&launcher, 100);
        let (mut hosts, mut places) = (Vec::new(), Vec::new());
        for (number, name) in (1..).zip(["a", "b"]) {
            let host = lab.host(name).unwrap();
            join(&host, number);
            places.push((host.clone(), format!("{prefix}{number}")));
            hosts.push(host);
        }
        let names: Vec<(&str, &str)> = places
            .iter()
            .map(|(host, address)| (address.as_str(), host.name()))
            .collect();
        lab.name_hosts(&names).unwrap();
        let servers = Servers::on_lab(&launcher, &places)?;
        let b = &places[1].1;
        let list = if bits == 64 {
            format!("a:1,[{b}]:2")
        } else {
            format!("a:1,{b}:2")
        };
        Some(Self {
            servers,
            hosts,
            list,
            _lab: lab,
        })
    }

    fn up(&self, args: &[&str]) -> Command {
        let mut command = self.servers.up(&["--hosts", &self.list]);
        command.args(args);
        command
    }

    /// `kolo` on the cluster that a launch tells of.
    fn on(&self, up: &Value, args: &[&str]) -> Command {
        let mut command = self.servers.kolo(args);
        on(&mut command, up);
        command
    }
}

#[track_caller]
fn succeeds(mut command: Command) -> String {
    let output = command.output().unwrap();
    let (out, err) = texts(&output);
    assert!(output.status.success(), "{out}{err}");
    out
}

/// What the ranks say, in order, when they tell where they are and where they meet.
const TELLS: &str = "echo $KOLO_HOSTNAME $MASTER_ADDR ${HOROVOD_GLOO_RENDEZVOUS_ADDR:-none}";

fn sorted(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn hosts_of_either_family_come_up_run_a_job_and_go_down() {
    for prefix in ["fd01::", "10.1.0."] {
        let Some(world) = World::new(prefix) else {
            return;
        };
        let up: Value = serde_json::from_str(&succeeds(world.up(&["--detach"]))).unwrap();
        for (number, node) in (1..).zip(up["nodes"].as_array().unwrap()) {
            let ip = |key: &str| {
                let address: std::net::SocketAddr = node[key].as_str().unwrap().parse().unwrap();
                address.ip().to_string()
            };
            assert_eq!(ip("address"), format!("{prefix}{number}"));
            assert_eq!(ip("head"), format!("{prefix}100"));
        }
        // Which of the two has rank 0 is the cluster's choice.
        let tells = "echo $KOLO_HOSTNAME $MASTER_ADDR";
        let run = [
            "run", "-n", "3", "--prefix", "none", "--", "sh", "-c", tells,
        ];
        let lines = sorted(&succeeds(world.on(&up, &run)));
        let on_b = format!("{prefix}2 {prefix}");
        assert!(
            lines.iter().filter(|line| line.starts_with(&on_b)).count() == 2,
            "{lines:?}"
        );
        assert!(
            lines
                .iter()
                .any(|line| line.starts_with(&format!("a {prefix}"))),
            "{lines:?}"
        );
        let meet: Vec<_> = lines
            .iter()
            .map(|line| line.split_once(' ').unwrap().1)
            .collect();
        assert!(meet.iter().all(|address| *address == meet[0]), "{lines:?}");
        let pids = node_pids(&up);
        assert!(pids.iter().all(|pid| is_running(*pid)));
        let rows: Value =
            serde_json::from_str(&succeeds(world.servers.kolo(&["--format", "json", "down"])))
                .unwrap();
        assert_eq!(
            rows.as_array().unwrap().len(),
            3,
            "two hosts and the head: {rows}"
        );
        world.servers.nothing_is_left();

        // And a program on hosts of its own.
        let mut run = world.servers.kolo(&["run", "-H", &world.list]);
        run.args(["--remote-program", env!("CARGO_BIN_EXE_kolo-node")]);
        run.args(["--", "sh", "-c", TELLS]);
        assert_eq!(
            sorted(&succeeds(run)),
            [
                format!("[0]<stdout>:a {prefix}1 {prefix}100"),
                format!("[1]<stdout>:{prefix}2 {prefix}1 {prefix}100"),
                format!("[2]<stdout>:{prefix}2 {prefix}1 {prefix}100"),
            ]
        );
        world.servers.nothing_is_left();
    }
}

#[test]
fn a_host_that_was_given_up_while_its_cable_was_cut_ends_its_node_when_it_is_back() {
    let Some(world) = World::new("fd01::") else {
        return;
    };
    let up: Value = serde_json::from_str(&succeeds(world.up(&["--detach"]))).unwrap();
    let mut job = Job::start(world.on(&up, &["run", "-n", "3"]), 3);
    let b = &world.hosts[1];
    b.ip("link set eth0 down").unwrap();
    assert_eq!(job.kolo.wait(), Some(1));
    let quick = ["--ssh-connect-timeout", "1", "--give-up"];
    let mut down = world.servers.kolo(&["--format", "json", "down"]);
    down.args(["--hosts", "[fd01::2]:2"]).args(quick);
    let rows: Value = serde_json::from_str(&succeeds(down)).unwrap();
    let left = rows[0]["given_up"].as_str().unwrap();
    let node = up["nodes"][1]["node"].as_str().unwrap();
    assert!(left.contains(&format!("{node} is revoked")), "{left}");
    // Nobody could tell it, so its part of the job is still there.
    assert!(is_running(node_pids(&up)[1]));
    assert!(job.pids.iter().any(|pid| is_running(*pid)));
    b.ip("link set eth0 up").unwrap();
    b.ip("addr add fd01::2/64 dev eth0 nodad").unwrap();
    gone(node_pids(&up)[1]);
    for pid in &job.pids {
        gone(*pid);
    }
    assert!(is_running(node_pids(&up)[0]));
    let rows: Value =
        serde_json::from_str(&succeeds(world.servers.kolo(&["--format", "json", "down"]))).unwrap();
    assert_eq!(
        rows.as_array().unwrap().len(),
        2,
        "a host and the head: {rows}"
    );
    world.servers.nothing_is_left();
}
