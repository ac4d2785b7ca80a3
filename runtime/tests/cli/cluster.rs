//! `kolo status`, `kolo jobs`, `kolo stop` and `kolo login`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime};

use kolo_transport::identity::Role;
use kolo_transport::ids::{DriverId, JobId, NodeId};
use kolo_transport::wire::{
    Exit, JobState, LeftOut, MembershipInfo, Milli, NetworkChoice, NetworkReport, NodeInfo,
    Resources, RevokedMember, WorkerState,
};
use serde_json::json;

use crate::fake::{Fake, Logs, job, node_info, placed};
use crate::kolo::{Ran, command};

#[test]
fn a_cluster_is_shown_as_a_table_and_as_json() {
    let fake = Fake::new();
    fake.change(|state| {
        let mut first = node_info(NodeId(30), true);
        first.total = Resources {
            cpus: Milli(4000),
            gpus: 2,
            custom: BTreeMap::from([("fpga".to_owned(), Milli(1500))]),
        };
        first.available.cpus = Milli(2500);
        first.available.gpus = 1;
        first.jobs = vec![JobId(20)];
        let mut draining = node_info(NodeId(32), true);
        draining.draining = true;
        let mut drained = draining.clone();
        drained.node = NodeId(33);
        draining.jobs = vec![JobId(20)];
        let mut lost = node_info(NodeId(31), false);
        lost.jobs = vec![JobId(20)];
        let left = NodeInfo {
            draining: true,
            ..node_info(NodeId(35), false)
        };
        state.cluster.nodes = vec![
            first,
            lost,
            draining,
            drained,
            left,
            node_info(NodeId(34), false),
        ];
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        state.cluster.revoked = vec![RevokedMember {
            role: Role::Node,
            name: NodeId(34).to_string(),
            since_unix: now.unwrap().as_secs() - 2 * 86_400 - 5 * 3600 - 60,
            reason: "stolen".to_owned(),
        }];
        state.cluster.running_jobs = 1;
    });
    let address = fake.address();
    assert_eq!(
        fake.kolo(&["status"]).good(),
        format!(
            "\
cluster-0000000000000001: head 9.9.9 at {address}, up 3m 12s, 1 running job

NODE                   HOSTNAME  ADDRESS        STATE        CPUS FREE  GPUS FREE  JOBS  OTHER FREE
node-000000000000001e  box       10.0.0.1:4000  alive        2.5 of 4   1 of 2     1     fpga 0 of 1.5
node-000000000000001f  box       10.0.0.1:4000  lost 4s ago  -          -          -
node-0000000000000020  box       10.0.0.1:4000  draining     0 of 0     0 of 0     1
node-0000000000000021  box       10.0.0.1:4000  drained      0 of 0     0 of 0     0
node-0000000000000023  box       10.0.0.1:4000  left 4s ago  -          -          -
node-0000000000000022  box       10.0.0.1:4000  revoked      -          -          -

REVOKED                SINCE      REASON
node-0000000000000022  2d 5h ago  stolen
"
        )
    );
    let found = fake.kolo(&["status", "--format", "json"]).json();
    assert_eq!(found["cluster"], "cluster-0000000000000001");
    assert_eq!(found["nodes"][0]["available"]["cpus"], 2.5);
    let states = found["nodes"].as_array().unwrap().iter();
    let states: Vec<_> = states.map(|node| &node["state"]).collect();
    assert_eq!(
        states,
        ["alive", "lost", "draining", "drained", "left", "revoked"]
    );
}

#[test]
fn a_cluster_without_nodes_says_how_to_start_one() {
    let text = Fake::new().kolo(&["status"]).good();
    assert!(text.contains("0 running jobs"), "{text}");
    assert!(
        text.contains("no nodes have registered; start one by `kolo-node"),
        "{text}"
    );
}

#[test]
fn jobs_are_shown_as_a_table_and_as_json() {
    let fake = Fake::new();
    assert_eq!(fake.kolo(&["jobs"]).good(), "there are no jobs\n");
    assert_eq!(fake.kolo(&["jobs", "--format", "json"]).json(), json!([]));

    let nodes = || {
        let at = ([10, 0, 0, 1], 4000).into();
        vec![
            placed(NodeId(30), at, &[0, 1]),
            placed(NodeId(31), at, &[2]),
        ]
    };
    fake.change(|state| {
        let mut failed = job(0xab, JobState::Failed, nodes());
        failed.name = "bad\x1b[2Jname".to_owned();
        failed.reason = Some("node-000000000000001e has ended rank 1".to_owned());
        failed.rendezvous = Some(([10, 0, 0, 9], 80).into());
        failed.ended_ms = Some(65_000);
        failed.workers[1].state = WorkerState::Exited;
        failed.workers[1].exit = Some(Exit::Signal(9));
        let mut succeeded = job(0xef << 56, JobState::Succeeded, nodes());
        succeeded.reason = Some("all workers exited with code 0".to_owned());
        succeeded.ended_ms = Some(0);
        let mut ending = job(0xde << 56, JobState::Healthy, nodes());
        ending.reason = Some("rank 1 failed".to_owned());
        for worker in &mut ending.workers {
            worker.state = WorkerState::Stopping;
        }
        state.jobs = vec![
            job(0xcd << 56, JobState::Healthy, nodes()),
            failed,
            job(0xce << 56, JobState::Pending, Vec::new()),
            succeeded,
            ending,
        ];
    });
    assert_eq!(
        fake.kolo(&["jobs"]).good(),
        "\
JOB       NAME              STATE      READY  NODES  OWNER        SUBMITTED  ENDED   REASON
job-cd00  digits            healthy    3/3    2      driver-0000  1m ago     -
job-0000  bad\\u{1b}[2Jname  failed     -      2      driver-0000  2m ago     1m ago  node-0000 has ended rank 1
job-ce00  digits            pending    -      -      driver-0000  1m ago     -
job-ef00  digits            succeeded  -      2      driver-0000  1m ago     0s ago
job-de00  digits            ending     0/3    2      driver-0000  1m ago     -       rank 1 failed
"
    );
    let job = fake.kolo(&["jobs", "00"]).good();
    let (before, after) = job.split_once("submitted at ").unwrap();
    let (time, after) = after.split_once(" by ").unwrap();
    assert!(time.starts_with("20") && time.ends_with('Z'), "{time}");
    assert_eq!(
        format!("{before}submitted by {after}"),
        "\
job-00000000000000ab (bad\\u{1b}[2Jname): failed, generation 1, 3 workers on 2 nodes
  node-000000000000001e has ended rank 1
  submitted by driver-000000000000000a; lasted 1m 1s, ended 1m 5s ago
  rendezvous for other systems at http://10.0.0.9:80

RANK  LOCAL  CROSS  NODE                   HOSTNAME  PID  STATE   EXIT
0     0/2    0/2    node-000000000000001e  box       100  ready
1     1/2    0/2    node-000000000000001e  box       101  exited  signal 9 (SIGKILL)
2     0/1    1/2    node-000000000000001f  box       102  ready
"
    );
    let found = fake.kolo(&["jobs", "--format", "json"]).json();
    assert_eq!(found[1]["workers"][1]["exit"]["signal"], 9);
    assert_eq!(found[1]["ended_ms"], 65_000);
    let found = fake.kolo(&["jobs", "job-cd", "--format", "json"]).json();
    assert_eq!(found["job"], "job-cd00000000000000");
}

#[test]
fn a_page_is_shown_again_and_again() {
    let fake = Fake::new();
    let mut watching = fake.command(&["jobs", "--watch=20ms"]).spawn().unwrap();
    let lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let lines: Vec<String> = lines.take(3).map(Result::unwrap).collect();
    assert_eq!(lines, ["there are no jobs", "", "there are no jobs"]);
    watching.kill().unwrap();
    watching.wait().unwrap();
}

#[test]
fn a_job_is_stopped_by_the_start_of_its_id() {
    let fake = Fake::new();
    fake.change(|state| {
        state.jobs = vec![
            job(0xab00 << 48, JobState::Healthy, Vec::new()),
            job(0xabcd << 48, JobState::Failed, Vec::new()),
        ];
    });
    let stopped = fake.kolo(&["stop", "job-ab0"]).good();
    assert_eq!(stopped, "job-ab00 has ended: stopped\n");
    let ended = fake.kolo(&["stop", "abc"]).good();
    assert_eq!(ended, "job-abcd has ended already: failed\n");
    let found = fake.kolo(&["stop", "ab0", "--format", "json"]).json();
    assert_eq!(found["state"], "stopped");
    // The one that had ended was left alone.
    assert_eq!(
        fake.change(|state| state.stopped.clone()),
        [JobId(0xab00 << 48)]
    );

    let line = fake.kolo(&["stop", "job-ab"]).bad(2);
    assert!(
        line.contains("is the start of 2 jobs: job-ab00, job-abcd;"),
        "{line}"
    );
    for args in [
        &["stop", "job-"][..],
        &["jobs", "job-"],
        &["logs", "job-"],
        &["interfaces", "--job", "job-"],
        &["revoke", "driver-"],
        &["revoke", "node-"],
        &["node", "drain", "node-"],
    ] {
        let line = fake.kolo(args).bad(2);
        assert!(line.contains("is the start of every id of a"), "{line}");
    }
    let line = fake.kolo(&["stop", "job-7"]).bad(3);
    assert!(line.contains("there is no job `job-7`"), "{line}");
}

#[test]
fn a_stop_that_takes_too_long_is_told() {
    let fake = Fake::new();
    fake.change(|state| {
        state.jobs = vec![job(1, JobState::Healthy, Vec::new())];
        state.stop_hangs = true;
    });
    let line = fake.kolo(&["stop", "0", "--timeout", "0.3"]).bad(1);
    assert!(
        line.starts_with("job-0")
            && line.contains(" has not ended within 300ms; it is being stopped"),
        "{line}"
    );
}

#[test]
fn a_head_that_is_not_there_is_one_clear_line_in_bounded_time() {
    let fake = Fake::new();
    // A socket that is open, and never answers.
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    for args in [
        &["status"][..],
        &["jobs"],
        &["stop", "job-1"],
        &["logs", "job-1"],
    ] {
        let began = Instant::now();
        let args = [args, &["--head", &address, "--connect-timeout", "0.5"]].concat();
        let line = fake.kolo(&args).bad(4);
        assert_eq!(
            line,
            format!(
                "the head at {address} did not answer in time; look whether kolo-head runs there, and whether firewalls let UDP \
                 through to its port (--connect-timeout waits longer)"
            )
        );
        assert!(
            began.elapsed() < Duration::from_secs(5),
            "{:?}",
            began.elapsed()
        );
    }
    let token = fake.token_file(&fake.token(Role::Driver).to_string());
    for args in [
        &["status"][..],
        &["jobs"],
        &["stop", "job-1"],
        &["logs", "job-1"],
        &["login", "--token-file", &token, "--replace"],
        &["token", "list"],
        &["revoke", "driver-1"],
        &["interfaces"],
        &["run", "true"],
        &["run", "--dry-run", "true"],
        &["up", "-H", "localhost:1"],
    ] {
        // A name that is not found is a head that is not reached; an address that is none is a wrong command line.
        let head = |head| fake.kolo(&[&["--head", head], args].concat());
        let line = head("nowhere.invalid:7700").bad(4);
        assert!(
            line.contains("the head `nowhere.invalid:7700` can't be found"),
            "{args:?}: {line}"
        );
        let line = head("localhost").bad(2);
        assert!(line.contains("is no HOST:PORT"), "{args:?}: {line}");
    }
}

#[test]
fn somebody_else_at_the_address_is_not_believed() {
    let fake = Fake::new();
    let node = fake.node(NodeId(30), Logs::Kept(Vec::new()));
    let address = node.endpoint.local_addr().to_string();
    let line = fake.kolo(&["status", "--head", &address]).bad(4);
    assert!(line.contains(" is node-0000, "), "{line}");

    let other = Fake::new();
    let line = fake.kolo(&["status", "--head", &other.address()]).bad(5);
    assert!(line.contains("is not a member of this cluster"), "{line}");
}

#[test]
fn credentials_that_are_missing_or_bad_are_told() {
    let fake = Fake::new();
    let nowhere = fake.home().join("nowhere");
    let nowhere = nowhere.to_str().unwrap();
    let line = fake.kolo(&["status", "--credentials", nowhere]).bad(5);
    assert!(line.contains("there are no credentials in"), "{line}");
    assert!(line.contains("kolo login"), "{line}");

    let line = Ran::of(
        &fake
            .command(&["status", "--credentials", nowhere])
            .env_remove("KOLO_HEAD")
            .output()
            .unwrap(),
    )
    .bad(2);
    assert!(
        line.contains("kolo login --head HOST:PORT --token-file FILE"),
        "{line}"
    );

    let key = fake.credentials_dir().join("identity.pem");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    let line = fake.kolo(&["status"]).bad(5);
    assert!(line.contains("identity.pem"), "{line}");
    assert!(line.contains("chmod 600"), "{line}");
}

#[test]
fn a_login_keeps_credentials_and_head_for_later_commands() {
    let fake = Fake::new();
    let file = fake.token_file(&format!("{}\n", fake.token(Role::Driver)));
    let dir = fake.home().join("fresh");
    let dir = dir.to_str().unwrap();
    let done = fake
        .kolo(&["login", "--token-file", &file, "--credentials", dir])
        .good();
    assert_eq!(
        done,
        format!(
            "joined cluster-0000000000000001 at {} as driver-000000000000000a; the credentials are in {dir}\n",
            fake.address()
        )
    );
    let identity = std::fs::metadata(format!("{dir}/identity.pem")).unwrap();
    assert_eq!(identity.permissions().mode() & 0o777, 0o600);
    // Nothing but the folder is needed now.
    let mut status = command(fake.home(), &["status"]);
    status.env("KOLO_CREDENTIALS", dir);
    let text = Ran::of(&status.output().unwrap()).good();
    assert!(text.starts_with("cluster-0000000000000001"), "{text}");
    // Another login neither: the head is remembered.
    let mut login = command(fake.home(), &["login", "--token-file", &file]);
    login.env("KOLO_CREDENTIALS", dir);
    let line = Ran::of(&login.output().unwrap()).bad(5);
    assert!(line.starts_with("the head refused: "), "{line}");
    let mut login = command(fake.home(), &["login", "--token-file", &file]);
    let nowhere = login.env("KOLO_CREDENTIALS", format!("{dir}/nowhere"));
    assert_eq!(
        Ran::of(&nowhere.output().unwrap()).err,
        "\
kolo: no head is given, and none is remembered from a login
      give --head HOST:PORT, set KOLO_HEAD=HOST:PORT, or log in by `kolo login --head HOST:PORT --token-file FILE`
"
    );

    // The token was for one use.
    let line = fake.kolo(&["login", "--token-file", &file]).bad(5);
    assert!(line.starts_with("the head refused: "), "{line}");
}

#[test]
fn a_token_may_come_by_standard_input_and_the_answer_be_json() {
    let fake = Fake::new();
    let mut login = fake.command(&["login", "--token-file", "-", "--format", "json"]);
    let mut login = login.stdin(Stdio::piped()).spawn().unwrap();
    let token = fake.token(Role::Driver).to_string();
    login
        .stdin
        .take()
        .unwrap()
        .write_all(token.as_bytes())
        .unwrap();
    let found = Ran::of(&login.wait_with_output().unwrap()).json();
    assert_eq!(found["driver"], DriverId(10).to_string());
    assert_eq!(found["head"], fake.address());
}

#[test]
fn a_login_that_can_not_work_is_told_without_the_secret() {
    let fake = Fake::new();
    let login = |text: &str| {
        let file = fake.token_file(text);
        fake.kolo(&["login", "--replace", "--token-file", &file])
    };
    let line = login(&fake.token(Role::Node).to_string()).bad(2);
    assert!(line.contains("this is a token for a node"), "{line}");
    let line = login("kolo1.driver.hush").bad(2);
    assert!(line.contains("not a join token"), "{line}");
    assert!(!line.contains("hush"), "{line}");

    // A token of another cluster: the head is not given the secret.
    let other = Fake::new();
    let line = login(&other.token(Role::Driver).to_string()).bad(5);
    assert!(
        line.contains("does not belong to the cluster of the token"),
        "{line}"
    );

    let missing = fake.home().join("missing");
    let line = fake
        .kolo(&["login", "--token-file", missing.to_str().unwrap()])
        .bad(1);
    assert!(line.contains("missing"), "{line}");

    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let file = fake.token_file(&fake.token(Role::Driver).to_string());
    let args = [
        "login",
        "--token-file",
        &file,
        "--head",
        &address,
        "--connect-timeout",
        "0.5",
    ];
    let line = fake.kolo(&args).bad(4);
    assert!(line.contains("did not answer in time"), "{line}");
}

#[test]
fn a_job_shows_what_connects_its_nodes() {
    let fake = Fake::new();
    fake.change(|state| {
        let mut info = job(0xab << 56, JobState::Healthy, Vec::new());
        info.network = Some(NetworkReport {
            choice: NetworkChoice::Interface("eth1".to_owned()),
            rows: Vec::new(),
            cached: false,
            took_ms: 3,
            problem: None,
        });
        state.jobs = vec![info];
    });
    let text = fake.kolo(&["jobs", "ab"]).good();
    assert!(
        text.contains("  network: eth1 on every node; `kolo interfaces --job job-ab"),
        "{text}"
    );
    let found = fake.kolo(&["jobs", "ab", "--format", "json"]).json();
    assert_eq!(found["network"]["interface"], "eth1");
}

#[test]
fn a_node_is_drained_and_takes_work_again() {
    let fake = Fake::new();
    assert_eq!(
        fake.kolo(&["node", "drain", "box", "--deadline", "10m"])
            .good(),
        "\
box (node-000000000000001e) takes no new work
  to leave the node within 10m: job-0000000000000014
  to stay until their end: job-0000000000000015, job-0000000000000016; `kolo stop` ends a job
"
    );
    let json = fake.kolo(&["node", "drain", "box", "--format", "json"]);
    let drained = json.json();
    assert_eq!(drained["leaving"], json!(["job-0000000000000014"]));
    fake.change(|state| {
        let mut node = node_info(NodeId(30), true);
        node.jobs = vec![JobId(20)];
        state.cluster.nodes = vec![node];
    });
    assert_eq!(
        fake.kolo(&["node", "undrain", "box"]).good(),
        "box (node-0000) takes new work\n"
    );
    // One that is lost stays drained until it is back.
    fake.change(|state| state.cluster.nodes = vec![node_info(NodeId(30), false)]);
    assert_eq!(
        fake.kolo(&["node", "drain", "node-0000"]).good(),
        "box (node-0000) is not there, as `kolo status` shows; if it comes back, it takes no new work\n"
    );
    fake.change(|state| {
        let mut node = node_info(NodeId(30), true);
        node.jobs = vec![JobId(20)];
        state.cluster.nodes = vec![node];
    });
    // The same shape, and the job stays.
    let again = fake.kolo(&["node", "undrain", "box", "--format", "json"]);
    let again = again.json();
    let keys = |of: &serde_json::Value| of.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&again), keys(&drained));
    assert_eq!(again["staying"], json!(["job-0000000000000014"]));
    let id = "node-000000000000001e";
    let drained = [
        ("box", Some(600_000)),
        ("box", Some(60_000)),
        (id, None),
        (id, Some(60_000)),
        (id, None),
    ];
    let drained = drained.map(|(name, ms)| (name.to_owned(), ms));
    assert_eq!(fake.change(|state| state.drained.clone()), drained);
    for bad in ["0s", "25h", "x"] {
        let ran = fake.kolo(&["node", "drain", "box", "--deadline", bad]);
        assert_eq!(ran.code, 2, "{bad}");
    }
}

#[test]
fn an_elastic_job_says_why_its_members_are_these() {
    let fake = Fake::new();
    let mut elastic = job(0xab, JobState::Healthy, Vec::new());
    elastic.membership = Some(Box::new(MembershipInfo {
        cause: Some("3 -> 2 members: rank 1 is lost".to_owned()),
        decision: "members: 2 of at most 4".to_owned(),
        left_out: vec![LeftOut {
            hostname: "box".to_owned(),
            for_ms: 1001,
            why: "its health check has failed".to_owned(),
        }],
    }));
    fake.change(|state| state.jobs = vec![elastic]);
    let text = fake.kolo(&["jobs", "00000000000000ab"]).good();
    let lines = "  members: 3 -> 2 members: rank 1 is lost\n  decision: members: 2 of at most 4\n  \
                 left out for 2s: box: its health check has failed\n";
    assert!(text.contains(lines), "{text}");
}
