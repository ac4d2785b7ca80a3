//! `kolo run`: any program as the workers.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kolo_harness::{TestCluster, kolo};
use kolo_transport::wire::{JobInfo, JobState, NodeInfo};
use rustix::process::{Pid, Signal, kill_process};

/// `kolo run OPTIONS -- sh -c SCRIPT`.
pub fn script(mut command: Command, options: &[&str], script: &str) -> Command {
    command
        .arg("run")
        .args(options)
        .args(["--", "sh", "-c", script]);
    // What kolo says of threads is not what these tests are about.
    command.env("OMP_NUM_THREADS", "1");
    command.stdin(Stdio::null());
    command
}

/// Options without spaces in them.
pub fn words(options: &str) -> Vec<&str> {
    options.split_whitespace().collect()
}

pub fn output(mut command: Command) -> Output {
    command.output().expect("kolo can be started")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("{output:?}"))
}

pub fn sorted(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = text(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

pub fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id().try_into().unwrap()).unwrap()
}

/// Starts a command and reads lines of its output until one ends with `ready` for every rank.
pub fn start(
    mut command: Command,
    ranks: usize,
) -> (Child, BufReader<std::process::ChildStdout>, Vec<String>) {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let mut lines = Vec::new();
    while lines
        .iter()
        .filter(|line: &&String| line.ends_with("ready"))
        .count()
        < ranks
    {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap() == 0 {
            let mut err = String::new();
            child
                .stderr
                .take()
                .unwrap()
                .read_to_string(&mut err)
                .unwrap();
            panic!("it ended: {lines:?} {err}");
        }
        lines.push(line.trim_end().to_owned());
    }
    (child, reader, lines)
}

#[test]
fn every_worker_has_its_ranks_and_its_lines_have_a_prefix() {
    let out = output(script(
        kolo(),
        &["-n", "3"],
        "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $HOROVOD_RANK/$HOROVOD_SIZE \
         $HOROVOD_CROSS_RANK $KOLO_RANK; echo bad >&2",
    ));
    assert_eq!(code(&out), 0, "{out:?}");
    assert_eq!(
        sorted(&out.stdout),
        [
            "[0]<stdout>:0/3 0/3 0/3 0 0",
            "[1]<stdout>:1/3 1/3 1/3 0 1",
            "[2]<stdout>:2/3 2/3 2/3 0 2"
        ]
    );
    assert_eq!(
        sorted(&out.stderr),
        ["[0]<stderr>:bad", "[1]<stderr>:bad", "[2]<stderr>:bad"]
    );
}

#[test]
fn the_first_failure_ends_the_others_and_is_the_exit_code_and_the_report() {
    let began = Instant::now();
    let out = output(script(
        kolo(),
        &["-n", "4"],
        "if [ $RANK = 2 ]; then echo last words >&2; exit 7; fi; sleep 100",
    ));
    assert_eq!(code(&out), 7, "{out:?}");
    let err = text(&out.stderr);
    assert!(err.contains("kolo: rank 2 on "), "{err}");
    assert!(
        err.contains("ended with exit code 7\n  [2]<stderr>:last words\n"),
        "{err}"
    );
    assert!(err.contains("the other 3 workers were ended"), "{err}");
    assert!(began.elapsed() < Duration::from_secs(30));

    let out = output(script(
        kolo(),
        &["-n", "2"],
        "[ $RANK = 1 ] && kill -SEGV $$; sleep 100",
    ));
    assert_eq!(code(&out), 128 + 11, "{out:?}");
    assert!(text(&out.stderr).contains("signal 11 (SIGSEGV)"));

    let mut json = kolo();
    json.args(["--format", "json"]);
    let out = output(script(json, &["-n", "2"], "exit $((RANK * 5))"));
    let err = text(&out.stderr);
    assert!(
        err.contains("\"exit_code\":5") && err.contains("\"rank\":1"),
        "{err}"
    );
}

#[test]
fn the_others_get_term_and_after_the_grace_kill() {
    let dir = tempfile::tempdir().unwrap();
    let script_text = format!(
        "cd {}; case $RANK in \
         0) trap 'echo term > polite; exit 0' TERM; touch r0; while :; do sleep 0.05; done;; \
         1) trap '' TERM; touch r1; while :; do sleep 0.05; done;; \
         2) while [ ! -e r0 ] || [ ! -e r1 ]; do sleep 0.05; done; exit 3;; esac",
        dir.path().display()
    );
    let began = Instant::now();
    let out = output(script(kolo(), &["-n", "3", "--grace", "1"], &script_text));
    assert_eq!(code(&out), 3, "{out:?}");
    assert_eq!(
        std::fs::read_to_string(dir.path().join("polite")).unwrap(),
        "term\n"
    );
    assert!(
        began.elapsed() >= Duration::from_secs(1),
        "the other had its grace"
    );
}

#[test]
fn output_files_have_the_very_bytes_and_are_never_written_over() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("out");
    let options = format!("-n 2 --output-dir {} --ranks 1", folder.display());
    let script_text = r"printf 'a\377\r\nno end %s' $RANK; printf 'err' >&2";
    for _ in 0..2 {
        let out = output(script(kolo(), &words(&options), script_text));
        assert_eq!(code(&out), 0, "{out:?}");
        assert_eq!(out.stdout, b"[1]<stdout>:a\xff\r\n[1]<stdout>:no end 1");
    }
    let jobs: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(jobs.len(), 2);
    for job in jobs {
        let names: BTreeSet<String> = std::fs::read_dir(&job)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let expected = [
            "rank-0.gen-1.stderr",
            "rank-0.gen-1.stdout",
            "rank-1.gen-1.stderr",
            "rank-1.gen-1.stdout",
        ];
        assert_eq!(names, expected.map(str::to_owned).into());
        let read = |name: &str| std::fs::read(job.join(name)).unwrap();
        assert_eq!(read("rank-0.gen-1.stdout"), b"a\xff\r\nno end 0");
        assert_eq!(read("rank-0.gen-1.stderr"), b"err");
    }
}

#[test]
fn input_goes_to_rank_0_and_to_nobody_else() {
    let input: Vec<u8> = (0..400_000_u32).flat_map(u32::to_le_bytes).collect();
    let mut command = script(
        kolo(),
        &["-n", "3", "--prefix", "none", "--ranks", "0"],
        "[ $RANK = 0 ] || { [ -z \"$(cat)\" ]; exit; }; cat",
    );
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let feeding = std::thread::spawn({
        let input = input.clone();
        move || stdin.write_all(&input).unwrap()
    });
    let mut got = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut got).unwrap();
    feeding.join().unwrap();
    assert!(child.wait().unwrap().success());
    assert!(got == input, "{} of {} bytes", got.len(), input.len());

    let mut command = script(kolo(), &["-n", "1", "--no-stdin"], "cat; echo nothing");
    let out = command.stdin(Stdio::piped()).output().unwrap();
    assert_eq!(text(&out.stdout), "[0]<stdout>:nothing\n");
}

/// 100 MB from four ranks, to a reader that begins late: every line whole, in order, none twice.
#[test]
fn a_flood_of_output_comes_whole() {
    const LINES: u64 = 250_000;
    let script_text = format!("seq -f \"rank $RANK line %085.0f\" {LINES}");
    let mut command = script(kolo(), &["-n", "4"], &script_text);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut reader = BufReader::with_capacity(1 << 20, child.stdout.take().unwrap());
    // Everything is full before the first byte is read.
    std::thread::sleep(Duration::from_millis(500));
    let mut next = [1_u64; 4];
    let mut hashes = [0_u64; 4];
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).unwrap() > 0 {
        let rank = usize::from(line[1] - b'0');
        let expected = format!("[{rank}]<stdout>:rank {rank} line {:085}\n", next[rank]);
        assert!(line == expected.as_bytes(), "{}", text(&line));
        hashes[rank] = hashes[rank].wrapping_mul(31).wrapping_add(next[rank]);
        next[rank] += 1;
        line.clear();
    }
    assert_eq!(next, [LINES + 1; 4]);
    assert!(hashes.iter().all(|hash| *hash == hashes[0]));
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_reader_that_has_enough_ends_the_job() {
    let mut command = script(kolo(), &["-n", "2"], "yes");
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 100];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(141), "{out:?}");
    assert_eq!(text(&out.stderr), "");
}

#[test]
fn the_port_for_rank_0_is_free() {
    let (mut child, _out, lines) = start(
        script(
            kolo(),
            &["-n", "2"],
            "echo $MASTER_ADDR $MASTER_PORT; echo ready; sleep 1000",
        ),
        2,
    );
    let told: BTreeSet<&str> = lines
        .iter()
        .filter(|line| !line.ends_with("ready"))
        .map(|line| line.split_once(':').unwrap().1)
        .collect();
    assert_eq!(told.len(), 1, "all are told the same: {lines:?}");
    let (address, port) = told.first().unwrap().split_once(' ').unwrap();
    let port: u16 = port.parse().unwrap();
    drop(std::net::TcpListener::bind((address, port)).unwrap());
    kill_process(pid(&child), Signal::TERM).unwrap();
    child.wait().unwrap();
}

#[test]
fn a_dry_run_and_options_of_a_file_and_of_other_launchers() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    std::fs::write(
        &file,
        "num-proc = 3\nprogram = [\"echo\", \"from file\"]\n[env]\nA = \"1\"\n",
    )
    .unwrap();
    let run = |args: &[&str]| {
        let mut command = kolo();
        command.arg("run").args(args);
        output(command)
    };
    let file = file.to_str().unwrap();
    let out = run(&["--config-file", file, "--dry-run"]);
    let shown = text(&out.stdout);
    assert_eq!(code(&out), 0, "{out:?}");
    let rows: Vec<Vec<&str>> = shown
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        (rows[3][0], &rows[3][2..]),
        ("2", &["2", "3", "0", "1"][..]),
        "{shown}"
    );
    assert!(shown.contains(": echo 'from file'\n  A=1"), "{shown}");
    let out = run(&["--config-file", file, "-np", "2", "echo", "-np", "9"]);
    assert_eq!(
        sorted(&out.stdout),
        ["[0]<stdout>:-np 9", "[1]<stdout>:-np 9"]
    );
    std::fs::write(file, "num-porc = 3\n").unwrap();
    let out = run(&["--config-file", file, "true"]);
    assert_eq!(code(&out), 2);
    assert!(text(&out.stderr).contains("no option `num-porc`; did you mean `num-proc`?"));
    let out = run(&["-H", "localhost:2", "--timestamps", "true"]);
    assert_eq!(code(&out), 0, "{out:?}");
}

#[tokio::test]
async fn on_a_cluster_ranks_are_spread_a_dry_run_refuses_as_a_run_and_a_killed_node_is_the_cause() {
    let builder = TestCluster::builder().nodes(2).slots(2);
    let mut cluster = builder.hostnames(["one", "two"]).start().await.unwrap();
    ranks_are_spread_over_its_nodes(&cluster).await;
    a_dry_run_asks_its_nodes_and_refuses_what_a_run_refuses(&cluster).await;

    let command = script(
        cluster.kolo().unwrap(),
        &["-n", "4"],
        "echo ready; sleep 1000",
    );
    let starting = tokio::task::spawn_blocking(|| start(command, 4));
    let (child, _out, _) = starting.await.unwrap();
    // The programs may be there before the head has heard of all of them: until then the loss would be one of the start.
    let is_healthy = |jobs: &[JobInfo]| jobs.iter().any(|job| job.state == JobState::Healthy);
    let healthy = cluster.wait_for_jobs("the job is healthy", is_healthy);
    healthy.await.unwrap();
    cluster.kill_node(1).unwrap();
    let ended = tokio::task::spawn_blocking(move || child.wait_with_output());
    let out = ended.await.unwrap().unwrap();
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{err}");
    for part in ["kolo: rank 2 on two ", "its node was lost"] {
        assert!(err.contains(part), "{err}");
    }
}

async fn ranks_are_spread_over_its_nodes(cluster: &TestCluster) {
    let run = async |options: &str, program: &str| {
        let mut command = script(cluster.kolo().unwrap(), &words(options), program);
        command.env("MINE_TOO", "passed");
        let running = tokio::task::spawn_blocking(move || output(command));
        running.await.unwrap()
    };
    let options = "--nnodes 2 --nproc-per-node 2 --pass-env MINE*";
    let tell = "echo $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MINE_TOO; cat";
    let out = run(options, tell).await;
    assert_eq!(code(&out), 0, "{out:?}");
    assert_eq!(
        sorted(&out.stdout),
        [
            "[0]<stdout>:0/2 0 passed",
            "[1]<stdout>:1/2 0 passed",
            "[2]<stdout>:0/2 1 passed",
            "[3]<stdout>:1/2 1 passed"
        ]
    );
    let out = run("-n 4", "exit $((RANK == 3 ? 9 : 0))").await;
    assert_eq!(code(&out), 9, "{out:?}");
    let out = run("-n 5", "true").await;
    let err = text(&out.stderr);
    assert!(err.contains("requested 5 workers"), "{err}");
}

async fn a_dry_run_asks_its_nodes_and_refuses_what_a_run_refuses(cluster: &TestCluster) {
    let dir = tempfile::tempdir().unwrap();
    let damaged = dir.path().join("damaged");
    std::fs::write(&damaged, b"\x7fELFxxxx").unwrap();
    std::fs::set_permissions(&damaged, Permissions::from_mode(0o755)).unwrap();
    let run = async |args: &[&str]| {
        let mut command = cluster.kolo().unwrap();
        command.arg("run").args(args);
        let out = tokio::task::spawn_blocking(move || output(command));
        let out = out.await.unwrap();
        (code(&out), text(&out.stdout), text(&out.stderr))
    };
    for (args, expected) in [
        (&["-n", "4", damaged.to_str().unwrap()][..], 126),
        (&["--cwd", "/no/such/folder", "true"], 126),
        (&["-n", "4", "no-such-program"], 127),
        (&["-n", "5", "true"], 2),
        (&["-n", "4", "--interfaces", "nosuch0", "true"], 1),
    ] {
        let (code, out, err) = run(args).await;
        assert_eq!((code, out.as_str()), (expected, ""), "{args:?}: {err}");
        let dry = run(&[&["--dry-run"], args].concat()).await;
        assert_eq!(dry, (code, out, err), "{args:?}");
    }
    let args = ["--dry-run", "-n", "3", "--name", "rehearsal", "true"];
    let (code, shown, err) = run(&args).await;
    assert_eq!((code, err.as_str()), (0, ""), "{shown}");
    let ranks: Vec<Vec<&str>> = shown
        .lines()
        .skip(1)
        .take(3)
        .map(|line| line.split_whitespace().collect())
        .collect();
    let hosts: Vec<&str> = ranks.iter().map(|row| row[1]).collect();
    assert_eq!(hosts, ["one", "one", "two"], "{shown}");
    assert_eq!(ranks[2][2..], ["0", "1", "1", "2"], "{shown}");
    // The nodes are as free as before, and nobody takes it for a job that ran.
    let free = cluster.status().await.unwrap();
    let is_free = |node: &NodeInfo| node.available == node.total;
    assert!(free.nodes.iter().all(is_free), "{free:?}");
    let mut command = cluster.kolo().unwrap();
    command.arg("jobs");
    let listed = tokio::task::spawn_blocking(move || output(command));
    let listed = text(&listed.await.unwrap().stdout);
    assert!(listed.contains("no-such-program"), "{listed}");
    assert!(!listed.contains("rehearsal"), "{listed}");
}
