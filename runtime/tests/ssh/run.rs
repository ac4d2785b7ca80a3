//! `kolo run` on hosts by ssh: nodes are there for the job, and gone with it.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::Output;

use rustix::process::Signal;

use super::servers::{Launched, Servers, on};

fn run(servers: &Servers, script: &str) -> Output {
    let hosts = servers.hosts();
    let node = env!("CARGO_BIN_EXE_kolo-node");
    let mut kolo = servers.kolo(&["run", "-H", &hosts, "--remote-program", node]);
    kolo.args(["--pass-env", "*", "--", "sh", "-c", script]);
    // Of the launcher's own group.
    kolo.envs([("RANK", "5"), ("WORLD_SIZE", "9"), ("SLURM_PROCID", "7")]);
    kolo.env("MINE", "yes").output().unwrap()
}

#[test]
fn a_program_runs_on_hosts_in_their_order_and_no_node_is_left() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    let tell = "echo $GROUP_RANK $LOCAL_RANK/$LOCAL_WORLD_SIZE $KOLO_HOSTNAME $RANK/$WORLD_SIZE $MINE ${SLURM_PROCID-none}";
    let out = run(&servers, tell);
    assert!(out.status.success(), "{out:?}");
    let out = String::from_utf8(out.stdout).unwrap();
    let mut lines: Vec<&str> = out.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "[0]<stdout>:0 0/1 127.0.0.2 0/3 yes none",
            "[1]<stdout>:1 0/2 127.0.0.3 1/3 yes none",
            "[2]<stdout>:1 1/2 127.0.0.3 2/3 yes none"
        ]
    );
    let fails = "[ $RANK != 2 ] && sleep 1000; echo why >&2; exit 4";
    let out = run(&servers, fails);
    let err = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(4), "{err}");
    assert!(err.contains("kolo: rank 2 on 127.0.0.3 (pid "), "{err}");
    servers.nothing_is_left();
}

#[test]
fn a_dry_run_asks_the_hosts_refuses_what_a_run_refuses_and_leaves_nothing() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    let hosts = servers.hosts();
    let kolo = |args: &[&str]| {
        let node = env!("CARGO_BIN_EXE_kolo-node");
        let all = [&["run", "-H", &hosts, "--remote-program", node], args].concat();
        let out = servers.kolo(&all).output().unwrap();
        servers.nothing_is_left();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (out.status.code(), text(out.stdout), text(out.stderr))
    };
    let (code, shown, err) = kolo(&["--dry-run", "-n", "2", "true"]);
    assert_eq!((code, err.as_str()), (Some(0), ""), "{shown}");
    let rows: Vec<Vec<&str>> = shown
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows[1], ["0", "127.0.0.2", "0", "1", "0", "2"], "{shown}");
    assert_eq!(rows[2], ["1", "127.0.0.3", "0", "1", "1", "2"], "{shown}");
    assert!(shown.contains("\non hosts, in "), "{shown}");
    let refused = |args: &[&str], expected| {
        // The nodes of a run have ids that are drawn.
        let words = |(code, out, err): (Option<i32>, String, String)| {
            let plain = err.split("node-").enumerate().map(|(at, part)| match at {
                0 => part,
                _ => part.trim_start_matches(|c: char| c.is_ascii_hexdigit()),
            });
            (code, out, plain.collect::<String>())
        };
        let run = words(kolo(args));
        assert_eq!((run.0, run.1.as_str()), (Some(expected), ""), "{run:?}");
        assert_eq!(words(kolo(&[&["--dry-run"], args].concat())), run);
        run.2
    };
    let err = refused(&["no-such-program"], 127);
    assert!(
        err.contains("127.0.0.2") && err.contains("127.0.0.3"),
        "{err}"
    );
    refused(&["--", "/etc/passwd"], 126);
    refused(&["--cwd", "/no/such/folder", "true"], 126);
    refused(&["--interfaces", "nosuch0", "true"], 1);
    servers.lose(1);
    let err = refused(&["true"], 4);
    assert!(err.contains("127.0.0.3"), "{err}");
}

#[test]
fn hosts_that_a_script_tells_join_and_leave_while_the_job_runs() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    let hosts = servers.dir().join("hosts");
    let put = |text: &str| {
        let new = servers.dir().join("hosts.new");
        fs::write(&new, text).unwrap();
        fs::rename(new, &hosts).unwrap();
    };
    put("127.0.0.2\n");
    let node = env!("CARGO_BIN_EXE_kolo-node");
    let look = format!("cat {}", hosts.display());
    let mut command = servers.kolo(&["run", "--remote-program", node, "--prefix", "none"]);
    command.args(["--host-discovery-script", &look, "--slots-per-host", "1"]);
    command.args(["--min-np", "1", "--max-np", "4", "--timeout", "100s", "--"]);
    command.args([
        "sh",
        "-c",
        "echo $RANK/$WORLD_SIZE $KOLO_HOSTNAME; [ $KOLO_GENERATION = 3 ] || exec sleep 1000",
    ]);
    let mut launch = Launched::start(command);
    let mut out = BufReader::new(launch.child.stdout.take().unwrap());
    let mut lines = |count: usize| {
        let mut lines: Vec<String> = out
            .by_ref()
            .lines()
            .take(count)
            .map(Result::unwrap)
            .collect();
        lines.sort();
        lines
    };
    assert_eq!(lines(1), ["0/1 127.0.0.2"]);
    // Nobody listens on the last one.
    put("127.0.0.3:2\n127.0.0.2:1\n127.0.0.99:1\n");
    assert_eq!(
        lines(3),
        ["0/3 127.0.0.2", "1/3 127.0.0.3", "2/3 127.0.0.3"]
    );
    put("127.0.0.3:2\n");
    assert_eq!(lines(2), ["0/2 127.0.0.3", "1/2 127.0.0.3"]);
    assert_eq!(lines(1), Vec::<String>::new());
    assert_eq!(launch.wait(), Some(0));
    let err = launch.stderr();
    let told: Vec<&str> = err
        .lines()
        .filter(|line| line.starts_with("kolo: 127.0.0.99: ssh: "))
        .collect();
    assert_eq!(told.len(), 1, "{err}");
    assert!(
        told[0].contains("Connection refused") && told[0].ends_with("as long as it is on the list"),
        "{err}"
    );
    assert!(
        err.contains("127.0.0.2 is not on the list of hosts any more"),
        "{err}"
    );
    servers.nothing_is_left();
}

#[test]
fn hosts_are_nodes_of_the_cluster_that_is_given_in_their_order() {
    let Some(servers) = Servers::start(2) else {
        return;
    };
    let mut launch = servers.launch(&["--hosts", &servers.hosts()]);
    let up = launch.ready();
    let run = |args: &[&str]| {
        let mut kolo = servers.kolo(&[&["run", "--prefix", "none"], args].concat());
        let out = on(&mut kolo, &up).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let mut lines: Vec<String> = text(out.stdout).lines().map(str::to_owned).collect();
        lines.sort();
        (out.status.code(), lines, text(out.stderr))
    };
    let tell = ["sh", "-c", "echo $RANK $KOLO_HOSTNAME $HOROVOD_HOSTNAME"];
    for (given, expected) in [
        (
            &["-H", "127.0.0.3:1,127.0.0.2:1"][..],
            &["0 127.0.0.3 127.0.0.3", "1 127.0.0.2 127.0.0.2"][..],
        ),
        (
            &["-H", "127.0.0.3:2", "-n", "1"],
            &["0 127.0.0.3 127.0.0.3"],
        ),
        // Without hosts by their names.
        (
            &["-n", "2", "--nnodes", "2"],
            &["0 127.0.0.2 127.0.0.2", "1 127.0.0.3 127.0.0.3"],
        ),
    ] {
        let (code, lines, err) = run(&[given, &tell].concat());
        assert_eq!((code, err.as_str()), (Some(0), ""), "{given:?}");
        assert_eq!(lines, expected, "{given:?}");
    }
    // What a dry run shows is what a run does.
    let (code, lines, err) = run(&["-H", "127.0.0.3:1,127.0.0.2:1", "--dry-run", "true"]);
    assert_eq!(code, Some(0), "{err}");
    let host = |line: &String| line.split_whitespace().nth(1).unwrap().to_owned();
    assert_eq!(host(&lines[0]), "127.0.0.3", "{lines:?}");
    for (args, part) in [
        (
            &["-H", "nowhere:1", "true"][..],
            "no node of the cluster is called `nowhere`; there are 127.0.0.2, 127.0.0.3 ",
        ),
        // The host has one slot, and so its node has one CPU.
        (
            &["-H", "127.0.0.2:2", "true"],
            "requested 2 workers with 1 cpu each on 127.0.0.2 (node-",
        ),
        (&["-n", "9", "true"], "requested 9 workers"),
    ] {
        for dry in [&[][..], &["--dry-run"]] {
            let (code, _, err) = run(&[dry, args].concat());
            assert_eq!(code, Some(2), "{err}");
            assert!(err.contains(part), "{err}");
        }
    }
    launch.signal(Signal::TERM);
    launch.wait();
    servers.nothing_is_left();
}
