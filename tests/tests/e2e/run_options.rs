//! `kolo run`: hosts that a script tells, and jobs that wait for room.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kolo_harness::TestCluster;
use kolo_transport::wire::{JobInfo, JobState};

use crate::run::{code, output, script, sorted, text, words};

/// A command that runs, with its errors in a file.
struct Running {
    child: Child,
    out: BufReader<ChildStdout>,
    err: PathBuf,
}

impl Running {
    fn start(mut command: Command, err: &Path) -> Self {
        command.stdout(Stdio::piped());
        command.stderr(File::create(err).unwrap());
        let mut child = command.spawn().unwrap();
        Self {
            out: BufReader::new(child.stdout.take().unwrap()),
            child,
            err: err.to_owned(),
        }
    }

    /// The next lines of output, sorted. None at its end.
    fn lines(&mut self, count: usize) -> Vec<String> {
        let lines = self.out.by_ref().lines().take(count);
        let mut lines: Vec<String> = lines.map(Result::unwrap).collect();
        lines.sort();
        lines
    }

    fn err(&self) -> String {
        fs::read_to_string(&self.err).unwrap()
    }

    /// Waits until the errors have this text.
    fn says(&self, part: &str) {
        let begin = Instant::now();
        while !self.err().contains(part) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{}", self.err());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn end(mut self) -> (Option<i32>, String) {
        let status = self.child.wait().unwrap();
        (status.code(), self.err())
    }
}

/// Puts another text in a file, at once.
fn put(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

async fn cluster(names: &[&str]) -> TestCluster {
    let builder = TestCluster::builder().nodes(names.len()).slots(2);
    let named = builder.hostnames(names.iter().copied());
    named.start().await.unwrap()
}

async fn blocking<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(run).await.unwrap()
}

/// As Horovod's elastic_common has it: `hosts_added_and_removed`, on nodes of a cluster.
#[tokio::test]
async fn hosts_added_and_removed() {
    let mut cluster = cluster(&["a", "b", "c"]).await;
    let dir = tempfile::tempdir().unwrap();
    let hosts = dir.path().join("hosts");
    put(&hosts, "# those that are there\na\n");
    let look = format!("cat {}", hosts.display());
    let options = words("--slots-per-host 1 --min-np 1 --max-np 4 --timeout 100 --prefix none");
    let command = script(
        cluster.kolo().unwrap(),
        &[&["--host-discovery-script", &look][..], &options].concat(),
        "echo $RANK/$WORLD_SIZE $KOLO_HOSTNAME; [ $KOLO_GENERATION = 3 ] || exec sleep 1000",
    );
    let err = dir.path().join("err");
    let (code, err) = blocking(move || {
        let mut run = Running::start(command, &err);
        assert_eq!(run.lines(1), ["0/1 a"], "{}", run.err());
        // A script that fails is told once, and the hosts stay.
        fs::remove_file(&hosts).unwrap();
        run.says("kolo: the host discovery script fails, and the hosts stay as they are: it ended with exit status: 1: ");
        put(&hosts, "b:2\na:1\nc:0\n");
        let lines = run.lines(3);
        // Who was there first has the lowest rank, and a host without slots is not used.
        assert_eq!(lines, ["0/3 a", "1/3 b", "2/3 b"], "{}", run.err());
        put(&hosts, "b:2\n");
        assert_eq!(run.lines(2), ["0/2 b", "1/2 b"], "{}", run.err());
        assert_eq!(run.lines(1), Vec::<String>::new());
        run.end()
    })
    .await;
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(err.matches("discovery script fails").count(), 1, "{err}");
    assert!(
        err.contains(
            "kolo: the hosts are a:1,b:2,c:0 now; new or larger: b:2,c:0, gone or smaller: none\n"
        ),
        "{err}"
    );
    assert!(
        err.contains("a is not on the list of hosts any more"),
        "{err}"
    );
    a_job_that_goes_on_uses_the_nodes_that_are_given_and_no_others(&mut cluster).await;
    cluster.stop().await.unwrap();
}

async fn a_job_that_goes_on_uses_the_nodes_that_are_given_and_no_others(cluster: &mut TestCluster) {
    let options = "-H c:1,b:2 --min-np 1 --max-np 3 --prefix none --timeout 100";
    let program = "echo $RANK/$WORLD_SIZE $KOLO_HOSTNAME; [ $WORLD_SIZE = 1 ] || exec sleep 1000";
    let command = script(cluster.kolo().unwrap(), &words(options), program);
    let dir = tempfile::tempdir().unwrap();
    let err = dir.path().join("err");
    let (mut run, first) = blocking(move || {
        let mut run = Running::start(command, &err);
        let lines = run.lines(3);
        (run, lines)
    })
    .await;
    assert_eq!(first, ["0/3 b", "1/3 b", "2/3 c"], "{}", run.err());
    let is_healthy = |jobs: &[JobInfo]| jobs.iter().any(|job| job.state == JobState::Healthy);
    let healthy = cluster.wait_for_jobs("the job is healthy", is_healthy);
    healthy.await.unwrap();
    cluster.kill_node(1).unwrap();
    blocking(move || {
        assert_eq!(run.lines(2), ["0/1 c"], "{}", run.err());
        assert_eq!(run.end().0, Some(0));
    })
    .await;
}

async fn shutdown_on_initial_discovery_failure(cluster: &TestCluster) {
    for (look, message) in [
        ("echo why >&2; exit 3", "exit status: 3: why\n"),
        ("echo a", "`a`, has no number of slots; expected HOST:SLOTS"),
    ] {
        let args = ["--host-discovery-script", look, "-n", "1"];
        let command = script(cluster.kolo().unwrap(), &args, "true");
        let out = blocking(move || output(command)).await;
        let err = text(&out.stderr);
        assert_eq!((code(&out), err.lines().count()), (1, 1), "{err}");
        let start = format!("kolo: --host-discovery-script {look}: ");
        assert!(err.starts_with(&start) && err.contains(message), "{err}");
    }
}

#[tokio::test]
async fn a_job_waits_for_room_and_not_for_longer_than_it_may() {
    let cluster = cluster(&["a"]).await;
    shutdown_on_initial_discovery_failure(&cluster).await;
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let kolo = || cluster.kolo().unwrap();
    let wait = format!(
        "echo ready; until [ -e {} ]; do sleep 0.01; done",
        go.display()
    );
    let first = script(kolo(), &["-n", "2", "--prefix", "none"], &wait);
    let late = script(kolo(), &["-n", "2", "--wait", "1"], "true");
    let second = words("-n 2 --wait 1m --prefix none");
    let second = script(kolo(), &second, "echo there");
    let errs: Vec<PathBuf> = (0..3)
        .map(|number| dir.path().join(format!("err{number}")))
        .collect();
    blocking(move || {
        let mut first = Running::start(first, &errs[0]);
        assert_eq!(first.lines(2), ["ready", "ready"], "{}", first.err());
        let (code, err) = Running::start(late, &errs[1]).end();
        assert_eq!(code, Some(2), "{err}");
        let lines: Vec<&str> = err.lines().collect();
        assert!(
            lines[0].starts_with("kolo: waiting at most 1s for room: requested 2 workers"),
            "{err}"
        );
        assert!(lines[1].starts_with("kolo: requested 2 workers"), "{err}");
        let mut second = Running::start(second, &errs[2]);
        second.says(
            "kolo: waiting at most 1m for room: requested 2 workers with 1 cpu each: room for 0",
        );
        fs::write(&go, "").unwrap();
        assert_eq!(second.lines(2), ["there", "there"], "{}", second.err());
        let (code, err) = second.end();
        assert_eq!(
            (code, err.matches("waiting").count()),
            (Some(0), 1),
            "{err}"
        );
        assert_eq!(first.end().0, Some(0));
    })
    .await;
    let free = cluster.status().await.unwrap();
    assert!(
        free.nodes.iter().all(|node| node.available == node.total),
        "{free:?}"
    );
    cluster.stop().await.unwrap();
}

#[tokio::test]
async fn as_many_workers_as_a_node_has_cpus_or_gpus() {
    let builder = TestCluster::builder().nodes(2).slots(2).gpus(1);
    let cluster = builder.hostnames(["a", "b"]).start().await.unwrap();
    for (args, expected) in [
        (&["--nproc-per-node", "cpu"][..], &["0 0", "1 0"][..]),
        (
            &["--nproc-per-node", "gpu", "--nnodes", "2"],
            &["0 0", "1 1"],
        ),
        (&["--nproc-per-node", "auto"], &["0 0"]),
        (
            &["--nproc-per-node", "cpu", "-H", "a:2,b:2"],
            &["0 0", "1 0", "2 1", "3 1"],
        ),
    ] {
        let args = [&["--prefix", "none"], args].concat();
        let command = script(cluster.kolo().unwrap(), &args, "echo $RANK $GROUP_RANK");
        let out = blocking(move || output(command)).await;
        assert_eq!(code(&out), 0, "{out:?}");
        assert_eq!(sorted(&out.stdout), expected, "{args:?}");
    }
    cluster.stop().await.unwrap();
}
