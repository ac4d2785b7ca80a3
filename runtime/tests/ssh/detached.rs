//! Nodes that run on without their launcher.

use std::fs;
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;

use crate::servers::{Launched, Servers, gone, is_running, node_pids, on, soon, texts};

/// Runs a command that ends by itself with success; what it prints as JSON.
#[track_caller]
pub(crate) fn json(command: &mut Command) -> Value {
    let output = command.output().unwrap();
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(0), "{out}{err}");
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"))
}

pub(crate) fn down(servers: &Servers, args: &[&str]) -> Command {
    let mut command = servers.kolo(&["--format", "json", "down"]);
    command.args(args);
    command
}

fn head_pid(servers: &Servers) -> u32 {
    let launches = servers.dir().join("launcher/.local/state/kolo/launches");
    let record = fs::read_dir(launches)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some())
        .unwrap();
    let record: Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    u32::try_from(record["head_pid"].as_u64().unwrap()).unwrap()
}

#[test]
fn a_node_is_one_by_whatever_name_its_host_is_given() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    let config = servers.dir().join("config");
    let text = fs::read_to_string(&config).unwrap();
    let other = text.replace(
        "Host 127.0.0.2 alias2",
        "Host 127.0.0.2 alias2 Alias2. other",
    );
    assert_ne!(text, other);
    fs::write(&config, other).unwrap();
    let up = json(&mut servers.up(&["--detach", "--hosts", "alias2:1"]));
    let pid = node_pids(&up)[0];
    let again = |hosts: &str| {
        let mut again = servers.up(&["--detach", "--hosts", hosts]);
        on(&mut again, &up);
        again
    };
    // It is the same by its spelling, and by what its host says.
    let same = json(&mut again("Alias2.:1"));
    assert_eq!(same["nodes"][0]["existing"], true);
    assert_eq!(same["nodes"][0]["node"], up["nodes"][0]["node"]);
    let refused = again("other:1").output().unwrap();
    let err = texts(&refused).1;
    assert_eq!(refused.status.code(), Some(4), "{err}");
    assert!(
        err.contains(&format!(
            "runs on this machine already, as alias2 (process {pid})"
        )),
        "{err}"
    );
    assert!(is_running(pid));
    let ended = json(&mut down(&servers, &["--hosts", "other"]));
    assert_eq!(ended[0]["down"], true, "{ended}");
    gone(pid);
    json(&mut down(&servers, &[]));
    servers.nothing_is_left();
}

#[test]
fn a_detached_launch_runs_on_until_it_is_taken_down() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    let up = json(&mut servers.up(&["--detach", "--hosts", &servers.hosts()]));
    let (pids, head) = (node_pids(&up), head_pid(&servers));
    assert!(pids.iter().all(|pid| is_running(*pid)) && is_running(head));
    // A second time nothing is started.
    let mut again = servers.up(&["--detach", "--hosts", &servers.hosts()]);
    on(&mut again, &up);
    let second = json(&mut again);
    for (first, second) in up["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .zip(second["nodes"].as_array().unwrap())
    {
        assert_eq!(second["existing"], true);
        assert_eq!(first["node"], second["node"]);
    }
    // One host first, then the rest and the head.
    let ended = json(&mut down(&servers, &["--hosts", "127.0.0.3:1"]));
    assert_eq!(ended[0]["down"], true);
    assert!(!is_running(pids[1]) && is_running(pids[0]) && is_running(head));
    assert_eq!(servers.node_dirs(1), 0);
    let ended = json(&mut down(&servers, &[]));
    let hosts: Vec<&str> = ended
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["host"].as_str().unwrap())
        .collect();
    assert_eq!(hosts, ["127.0.0.2", "head"]);
    assert!(!is_running(pids[0]) && !is_running(head));
    assert_eq!(servers.node_dirs(0), 0);
    let output = down(&servers, &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(texts(&output).1.contains("nothing is up"), "{output:?}");
    let heads = servers.dir().join("launcher/.local/state/kolo/heads");
    assert_eq!(fs::read_dir(heads).unwrap().count(), 0);
}

#[test]
fn a_node_that_hangs_is_ended_by_force() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    let up = json(&mut servers.up(&["--detach", "--hosts", &servers.hosts()]));
    let pid = node_pids(&up)[0];
    crate::servers::signal(pid, Signal::STOP);
    let args = ["--stop-timeout", "1", "--drain-timeout", "0.1"];
    let output = down(&servers, &args).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let (out, _) = texts(&output);
    assert!(out.contains("has not ended in time"), "{out}");
    assert!(is_running(pid));
    let ended = json(&mut down(&servers, &["--force"]));
    assert_eq!(ended[0]["down"], true, "{ended}");
    assert!(!is_running(pid));
}

/// In `sh`, on a cluster that is up, after it has made the file `started`.
fn job(servers: &Servers, up: &Value, started: &std::path::Path, script: &str) -> Launched {
    let script = format!("touch '{}'; {script}", started.display());
    let mut command = servers.kolo(&["run", "-n", "1", "--", "/bin/sh", "-c", &script]);
    on(&mut command, up);
    let job = Launched::start(command);
    soon("the job to run", || started.exists().then_some(()));
    job
}

#[test]
fn jobs_are_stopped_at_once_or_waited_for_if_that_is_asked_for() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    let (started, go) = (servers.dir().join("started"), servers.dir().join("go"));
    let up = || json(&mut servers.up(&["--detach", "--hosts", &servers.hosts()]));
    let first = up();
    let mut stopped = job(&servers, &first, &started, "exec sleep 600");
    let begin = std::time::Instant::now();
    json(&mut down(&servers, &[]));
    assert!(begin.elapsed().as_secs() < 25, "{:?}", begin.elapsed());
    assert_ne!(stopped.wait(), Some(0));

    fs::remove_file(&started).unwrap();
    let second = up();
    let script = format!("while [ ! -e '{}' ]; do sleep 0.05; done", go.display());
    let mut waited_for = job(&servers, &second, &started, &script);
    let mut ending = Launched::start(down(&servers, &["--drain-timeout", "600"]));
    soon("the node to take no more jobs", || {
        let mut status = servers.kolo(&["--format", "json", "status"]);
        on(&mut status, &second);
        let text = texts(&status.output().unwrap()).0;
        text.contains("\"state\": \"draining\"").then_some(())
    });
    assert_eq!(waited_for.child.try_wait().unwrap(), None);
    fs::write(&go, "").unwrap();
    assert_eq!(waited_for.wait(), Some(0));
    assert_eq!(ending.wait(), Some(0));
    assert!(node_pids(&second).iter().all(|pid| !is_running(*pid)));
}

/// A host that takes connections and then says nothing, so that a launch goes on until it is given up.
pub(crate) fn stuck(servers: &Servers) -> std::net::TcpListener {
    use std::io::Write as _;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let config = servers.dir().join("config");
    let mut config = fs::OpenOptions::new().append(true).open(config).unwrap();
    let port = listener.local_addr().unwrap().port();
    write!(
        config,
        "\nHost stuck\n  HostName 127.0.0.1\n  Port {port}\n"
    )
    .unwrap();
    listener
}

fn stuck_launch(servers: &Servers) -> Launched {
    let hosts = format!("{},stuck:1", servers.hosts());
    let launch = servers.launch(&[
        "--detach",
        "--ssh-connect-timeout",
        "600",
        "--ssh-stall-timeout",
        "600",
        "--hosts",
        &hosts,
    ]);
    let heads = servers.dir().join("launcher/.local/state/kolo/heads");
    soon("the first node to be up", || {
        let head = fs::read_dir(&heads).ok()?.next()?.ok()?.path();
        let log = fs::read_to_string(head.join("log")).ok()?;
        log.contains("a node has registered").then_some(())
    });
    launch
}

#[test]
fn a_detached_launch_that_is_interrupted_ends_what_it_has_started() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    let _stuck = stuck(&servers);
    let mut launch = stuck_launch(&servers);
    let head = head_pid(&servers);
    launch.signal(Signal::INT);
    assert_ne!(launch.wait(), Some(0));
    let err = launch.stderr();
    assert!(err.contains("what was started has ended"), "{err}");
    assert_eq!(servers.node_dirs(0), 0);
    soon("the head to end", || (!is_running(head)).then_some(()));
    let output = down(&servers, &[]).output().unwrap();
    assert!(texts(&output).1.contains("nothing is up"), "{output:?}");
}

/// Processes with this on their command lines.
fn with_argument(part: &str) -> usize {
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
        .filter(|line| String::from_utf8_lossy(line).contains(part))
        .count()
}

#[test]
fn a_head_whose_launcher_is_killed_before_it_is_on_record_ends() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    // Beside this kolo is a head that never gets to tell that it is ready.
    let bin = servers.dir().join("bin");
    fs::create_dir(&bin).unwrap();
    let kolo = bin.join("kolo");
    let original = env!("CARGO_BIN_EXE_kolo");
    if fs::hard_link(original, &kolo).is_err() {
        fs::copy(original, &kolo).unwrap();
    }
    let ready = servers.dir().join("ready");
    crate::servers::executable(
        &bin.join("kolo-head"),
        &format!(
            "#!/bin/sh\n{} \"$@\" | {{ read -r line; touch {}; cat >/dev/null; }}\n",
            env!("CARGO_BIN_EXE_kolo-head"),
            ready.display()
        ),
    );
    let hosts = servers.hosts();
    let launch = servers.kolo_at(&kolo, &["up", "--detach", "--hosts", &hosts]);
    let mut launch = Launched::start(launch);
    soon("the head to be ready", || ready.exists().then_some(()));
    let heads = servers.dir().join("launcher/.local/state/kolo/heads");
    assert_eq!(fs::read_dir(&heads).unwrap().count(), 1);
    assert!(with_argument(heads.to_str().unwrap()) > 0);
    launch.signal(Signal::KILL);
    launch.wait();
    soon("the head to end", || {
        (with_argument(heads.to_str().unwrap()) == 0).then_some(())
    });
    assert_eq!(fs::read_dir(&heads).unwrap().count(), 0);
}

#[test]
fn what_a_killed_detached_launch_has_left_is_on_record() {
    let Some(servers) = Servers::start(1) else {
        return;
    };
    let _stuck = stuck(&servers);
    let mut launch = stuck_launch(&servers);
    let head = head_pid(&servers);
    launch.signal(Signal::KILL);
    launch.wait();
    let hosts = servers.hosts();
    let ended = json(&mut down(&servers, &["--hosts", &hosts]));
    assert_eq!(ended[0]["down"], true, "{ended}");
    assert_eq!(servers.node_dirs(0), 0);
    // The other host can't be reached, so its node counts as left, and the head stays.
    assert!(is_running(head));
    let args = ["--ssh-connect-timeout", "1", "--give-up"];
    let ended = json(&mut down(&servers, &args));
    let left = ended[0]["given_up"].as_str().unwrap();
    assert!(left.contains("the head knows no node of it"), "{left}");
    assert_eq!(ended[1]["host"], "head");
    gone(head);
    servers.nothing_is_left();
}
