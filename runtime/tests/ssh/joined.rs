//! Nodes that join a cluster which was there before.

use std::fs;
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;

use crate::detached::{down, json, stuck};
use crate::servers::{Launched, Servers, gone, is_running, node_pids, soon, texts};

/// A cluster that is there before any launch.
struct Cluster {
    head: Launched,
    named: String,
    admin: std::path::PathBuf,
}

impl Cluster {
    fn start(servers: &Servers) -> Self {
        let state = servers.dir().join("head");
        let mut head = Launched::start({
            let mut command = Command::new(env!("CARGO_BIN_EXE_kolo-head"));
            command
                .arg("--state-dir")
                .arg(&state)
                .args(["--listen", "0.0.0.0:0", "--format", "json"])
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped());
            command
        });
        let line = {
            use std::io::BufRead as _;
            let mut line = String::new();
            std::io::BufReader::new(head.child.stdout.take().unwrap())
                .read_line(&mut line)
                .unwrap();
            serde_json::from_str::<Value>(&line).unwrap()
        };
        let address: std::net::SocketAddr = line["address"].as_str().unwrap().parse().unwrap();
        Self {
            head,
            named: format!("127.0.0.1:{}", address.port()),
            admin: state.join("admin"),
        }
    }

    /// A command for this cluster.
    fn with(&self, mut command: Command) -> Command {
        command.env("KOLO_HEAD", &self.named);
        command.env("KOLO_CREDENTIALS", &self.admin);
        command
    }

    fn status(&self, servers: &Servers) -> Value {
        json(&mut self.with(servers.kolo(&["--format", "json", "status"])))
    }

    /// The node that a host has, when it has one that lives.
    fn alive(&self, servers: &Servers, hostname: &str) -> Option<String> {
        let status = self.status(servers);
        let nodes = status["nodes"].as_array().unwrap();
        let node = nodes
            .iter()
            .find(|node| node["hostname"] == hostname && node["state"] == "alive");
        Some(node?["node"].as_str().unwrap().to_owned())
    }
}

#[test]
fn nodes_join_a_cluster_that_is_there() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    let mut cluster = Cluster::start(&servers);
    // One stays for as long as its launcher, one runs on.
    let mut launch = Launched::start(cluster.with(servers.up(&["--hosts", "127.0.0.2:1"])));
    let first = launch.ready();
    assert_eq!(first["head"], cluster.named.as_str());
    let second = json(&mut cluster.with(servers.up(&["--detach", "--hosts", &servers.hosts()])));
    assert_eq!(second["cluster"], first["cluster"]);
    let nodes = &second["nodes"];
    assert_eq!(
        (&nodes[0]["existing"], &nodes[1]["existing"]),
        (&true.into(), &false.into())
    );
    let pid = u32::try_from(nodes[1]["pid"].as_u64().unwrap()).unwrap();
    launch.signal(Signal::INT);
    assert_eq!(launch.wait(), Some(0));
    assert!(is_running(pid));
    let ended = json(&mut cluster.with(down(&servers, &[])));
    assert_eq!(
        ended.as_array().unwrap().len(),
        1,
        "the head is not the launch's: {ended}"
    );
    assert!(!is_running(pid));
    assert_eq!(cluster.head.child.try_wait().unwrap(), None);
    servers.nothing_is_left();
}

#[test]
fn a_launch_on_a_cluster_that_fails_leaves_the_record_as_it_was() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    let cluster = Cluster::start(&servers);
    json(&mut cluster.with(servers.up(&["--detach", "--hosts", "127.0.0.2:1"])));
    let hosts = format!("{},127.0.0.99:1", servers.hosts());
    let output = cluster
        .with(servers.up(&["--detach", "--hosts", &hosts]))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    let ended = json(&mut cluster.with(down(&servers, &[])));
    let hosts: Vec<&Value> = ended
        .as_array()
        .unwrap()
        .iter()
        .map(|row| &row["host"])
        .collect();
    assert_eq!(hosts, ["127.0.0.2"]);
    servers.nothing_is_left();
}

#[test]
fn a_node_that_can_not_be_ended_when_its_launch_fails_stays_on_record() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    let cluster = Cluster::start(&servers);
    let stuck = stuck(&servers);
    let mut launch = Launched::start(cluster.with(servers.up(&[
        "--detach",
        "--ssh-connect-timeout",
        "600",
        "--ssh-stall-timeout",
        "600",
        "--hosts",
        &format!("{},stuck:1", servers.hosts()),
    ])));
    soon("the first node to be up", || {
        cluster.alive(&servers, "127.0.0.2")
    });
    servers.lose(0);
    drop(stuck);
    assert_eq!(launch.wait(), Some(4));
    let err = launch.stderr();
    assert!(
        err.contains("127.0.0.2: it came up, and could not be ended again"),
        "{err}"
    );
    servers.find(0);
    let ended = json(&mut cluster.with(down(&servers, &[])));
    assert_eq!(ended.as_array().unwrap().len(), 1, "{ended}");
    assert_eq!(ended[0]["host"], "127.0.0.2");
    servers.nothing_is_left();
    // Where nothing came up there is nothing to end.
    let output = cluster
        .with(servers.up(&["--detach", "--hosts", "127.0.0.99:1"]))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
}

#[test]
fn a_host_that_can_not_be_reached_any_more_is_given_up_and_its_node_is_out() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    let cluster = Cluster::start(&servers);
    let up = json(&mut cluster.with(servers.up(&["--detach", "--hosts", &servers.hosts()])));
    let node = up["nodes"][1]["node"].as_str().unwrap();
    let pid = node_pids(&up)[1];
    servers.lose(1);
    let rows = |args: &[&str], code| {
        let output = cluster.with(down(&servers, args)).output().unwrap();
        let (out, err) = texts(&output);
        assert_eq!(output.status.code(), Some(code), "{out}{err}");
        assert_eq!(err.contains("forget it with --give-up"), code == 1, "{err}");
        serde_json::from_str::<Value>(&out).unwrap()
    };
    // It stays on record until somebody gives it up.
    for left in [2, 1] {
        let rows = rows(&[], 1);
        assert_eq!(rows.as_array().unwrap().len(), left, "{rows}");
        let last = &rows[left - 1];
        assert_eq!(last["host"], "127.0.0.3");
        let error = last["error"].as_str().unwrap();
        assert!(error.contains("Connection refused"), "{error}");
        assert!(is_running(pid));
    }
    let given_up = rows(&["--give-up"], 0);
    let left = given_up[0]["given_up"].as_str().unwrap();
    for part in [
        format!("{node} is revoked"),
        format!("process {pid} (kolo-node)"),
        up["nodes"][1]["state"].as_str().unwrap().to_owned(),
    ] {
        assert!(left.contains(&part), "{left}");
    }
    // It can reach the head, so it learns of it, and ends.
    gone(pid);
    servers.nothing_is_left();
    let status = cluster.status(&servers).to_string();
    assert!(status.contains("its host was given up"), "{status}");
    // A new node of the same host may come.
    servers.find(1);
    let again = json(&mut cluster.with(servers.up(&["--detach", "--hosts", "127.0.0.3:2"])));
    assert_ne!(again["nodes"][0]["node"], node);
    rows(&[], 0);
    servers.nothing_is_left();
}

#[test]
fn a_node_can_not_be_given_up_while_the_head_is_away() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    let mut cluster = Cluster::start(&servers);
    let up = json(&mut cluster.with(servers.up(&["--detach", "--hosts", &servers.hosts()])));
    servers.lose(0);
    cluster.head.signal(Signal::KILL);
    cluster.head.wait();
    let args = ["--give-up"];
    let mut command =
        cluster.with(servers.kolo(&["--connect-timeout", "1", "--format", "json", "down"]));
    let output = command.args(args).output().unwrap();
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{out}{err}");
    assert!(out.contains("it can't be given up, since"), "{out}");
    // Its head would let it in again, so it is still known here.
    let record = servers.dir().join("launcher/.local/state/kolo/launches");
    let node = up["nodes"][0]["node"].as_str().unwrap();
    let known = fs::read_dir(record).unwrap().any(|entry| {
        fs::read_to_string(entry.unwrap().path())
            .unwrap()
            .contains(node)
    });
    assert!(known);
}
