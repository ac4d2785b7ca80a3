//! Launches that end, in good ways and bad.

use std::fs;
use std::time::Instant;

use rustix::process::Signal;

use crate::servers::{Servers, gone, is_running, node_pids, on, soon, texts};

#[test]
fn nodes_are_seen_by_the_head_and_end_with_the_launch() {
    let Some(servers) = Servers::start(3) else {
        return;
    };
    let mut launch = servers.launch(&["--hosts", &servers.hosts()]);
    let up = launch.ready();
    let mut status = servers.kolo(&["--format", "json", "status"]);
    let status = on(&mut status, &up).output().unwrap();
    let (out, err) = texts(&status);
    let status: serde_json::Value = serde_json::from_str(&out).expect(&err);
    let names = |nodes: &serde_json::Value, host: &str| {
        let nodes = nodes.as_array().unwrap().iter();
        let mut names: Vec<(String, String)> = nodes
            .map(|node| {
                let text = |key: &str| node[key].as_str().unwrap().to_owned();
                (text(host), text("node"))
            })
            .collect();
        names.sort();
        names
    };
    assert_eq!(
        names(&status["nodes"], "hostname"),
        names(&up["nodes"], "host")
    );
    let nodes = status["nodes"].as_array().unwrap();
    assert!(
        nodes.iter().all(|node| node["state"] == "alive"),
        "{status}"
    );
    for pid in node_pids(&up) {
        // Nothing that is secret is where others can read it.
        for file in ["cmdline", "environ"] {
            let text = fs::read(format!("/proc/{pid}/{file}")).unwrap();
            assert!(!String::from_utf8_lossy(&text).contains("kolo1."), "{file}");
        }
    }
    launch.signal(Signal::INT);
    assert_eq!(launch.wait(), Some(0));
    for pid in node_pids(&up) {
        assert!(!is_running(pid));
    }
    let err = launch.stderr();
    assert!(err.contains("kolo: 127.0.0.4: down"), "{err}");
    for index in 0..3 {
        assert_eq!(servers.node_dirs(index), 0);
    }
    assert_eq!(heads(&servers), 0);
}

fn heads(servers: &Servers) -> usize {
    fs::read_dir(servers.dir().join("launcher/.local/state/kolo/heads")).map_or(0, Iterator::count)
}

#[test]
fn a_launcher_that_is_killed_leaves_nothing() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    let mut launch = servers.launch(&["--hosts", &servers.hosts()]);
    let up = launch.ready();
    let start = Instant::now();
    launch.signal(Signal::KILL);
    for pid in node_pids(&up) {
        gone(pid);
    }
    let took = start.elapsed();
    assert!(took.as_secs() < 15, "{took:?}");
    for index in 0..2 {
        soon("the node's folder to go", || {
            (servers.node_dirs(index) == 0).then_some(())
        });
    }
    // The head was in the launcher. Its folder goes with the next launch.
    assert_eq!(heads(&servers), 1);
    let mut launch = servers.launch(&["--hosts", &servers.hosts()]);
    launch.ready();
    assert_eq!(heads(&servers), 1);
    launch.signal(Signal::TERM);
    assert_eq!(launch.wait(), Some(0));
    assert_eq!(heads(&servers), 0);
}

#[test]
fn a_node_that_hears_nothing_any_more_leaves_after_its_lease() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    let mut launch = servers.launch(&["--hosts", &servers.hosts(), "--lease", "1"]);
    let pid = node_pids(&launch.ready())[0];
    servers.freeze(0);
    gone(pid);
    drop(launch);
}

#[test]
fn a_node_that_dies_is_told() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    let mut launch = servers.launch(&["--hosts", &servers.hosts()]);
    let pids = node_pids(&launch.ready());
    crate::servers::signal(pids[1], Signal::KILL);
    crate::servers::signal(pids[0], Signal::KILL);
    assert_eq!(launch.wait(), Some(1));
    let err = launch.stderr();
    assert!(
        err.contains("kolo: 127.0.0.2 is lost: it ended while the node was up"),
        "{err}"
    );
    assert!(err.contains("no node is left"), "{err}");
}

#[test]
fn a_launch_that_is_given_up_half_way_leaves_nothing() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    // It never gets to its order: its version takes for ever.
    let slow = servers.dir().join("slow");
    let pidfile = servers.dir().join("slow.pid");
    crate::servers::executable(
        &slow,
        &format!(
            "#!/bin/sh\necho $$ >{}\nexec sleep 1000\n",
            pidfile.display()
        ),
    );
    let mut command = servers.kolo(&["up", "--hosts", &servers.hosts()]);
    command.args(["--remote-program", slow.to_str().unwrap()]);
    command.args(["--ssh-stall-timeout", "600"]);
    let mut launch = crate::servers::Launched::start(command);
    let pid: u32 = soon("the program to run", || {
        fs::read_to_string(&pidfile).ok()?.trim().parse().ok()
    });
    launch.signal(Signal::INT);
    assert_eq!(launch.wait(), Some(1));
    assert!(launch.stderr().contains("given up by SIGINT"));
    assert_eq!(heads(&servers), 0);
    // A program that does not look at its input is sshd's to end; that of this test is ended by it.
    crate::servers::signal(pid, Signal::KILL);
}

#[test]
fn a_host_that_says_nothing_is_given_up() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    let slow = servers.dir().join("slow");
    crate::servers::executable(&slow, "#!/bin/sh\nexec sleep 20\n");
    let mut command = servers.kolo(&["up", "--hosts", &servers.hosts()]);
    command.args(["--remote-program", slow.to_str().unwrap()]);
    command.args(["--ssh-stall-timeout", "6"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    let err = texts(&output).1;
    assert!(
        err.contains("nothing was heard for 6s while looking for kolo-node there"),
        "{err}"
    );
}
