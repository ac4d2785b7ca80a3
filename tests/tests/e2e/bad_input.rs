//! What is wrong from outside: values that do not fit, credentials of others, processes that stand still. Each
//! is a clear error in bounded time, other calls and jobs go on, and nothing is left.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::time::Duration;

use kolo::prelude::*;
use kolo_harness::{Mode, TestCluster};
use kolo_transport::identity::Role;
use kolo_transport::{Credentials, RandomId as _};
use rustix::process::Signal;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::support::{gone, group, pid, soon, whoami};

/// Goes out as a number and is read as a text.
#[derive(Debug)]
struct Lopsided;

impl Serialize for Lopsided {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(7)
    }
}

impl<'de> Deserialize<'de> for Lopsided {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|_| Self)
    }
}

/// A gibibyte and one byte: the limit is passed before a page of it is touched.
#[derive(Debug, Deserialize)]
struct Huge;

impl Serialize for Huge {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&vec![0; (1 << 30) + 1])
    }
}

#[kolo::function]
fn takes_lopsided(_first: u32, _lopsided: Lopsided) {}

#[kolo::function]
fn gives_lopsided() -> Lopsided {
    Lopsided
}

#[kolo::function]
fn gives_huge() -> Huge {
    Huge
}

#[kolo::function]
fn takes_huge(_first: u8, _huge: Huge) {}

struct Taker;

#[kolo::executable]
impl Taker {
    fn new() -> Self {
        Self
    }

    #[expect(clippy::unused_self, reason = "methods of an executable have it")]
    fn take(&self, _first: u8, _huge: Huge) {}
}

/// Lines that are no UTF-8, and many of them.
#[kolo::function]
fn babble(lines: usize) -> anyhow::Result<()> {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    for line in 0..lines {
        out.write_all(b"\xff\xfe\0 line ")?;
        writeln!(out, "{line}")?;
    }
    out.flush()?;
    Ok(())
}

#[tokio::test]
async fn what_does_not_decode_or_is_too_long_fails_its_call_only() -> anyhow::Result<()> {
    let (cluster, executor) = group(1, 2).await?;
    let error = soon(executor.run(takes_lopsided, (1, Lopsided))).await;
    let error = error.unwrap_err().to_string();
    for part in ["takes_lopsided", "argument", "Lopsided"] {
        assert!(error.contains(part), "no `{part}` in: {error}");
    }
    let error = soon(executor.run(gives_lopsided, ())).await.unwrap_err();
    assert!(error.to_string().contains("gives_lopsided"), "{error}");
    let error = soon(executor.run(gives_huge, ())).await.unwrap_err();
    assert!(error.rank().is_some(), "{error}");
    for part in ["gives_huge", &*(1_u64 << 30).to_string()] {
        assert!(error.to_string().contains(part), "no `{part}` in: {error}");
    }
    // What is too long is not even sent.
    let taker = soon(executor.create::<Taker>(())).await?;
    let error = soon(executor.run(takes_huge, (1, Huge))).await.unwrap_err();
    let also = soon(taker.take(1, Huge)).await.unwrap_err();
    for (error, name) in [(error, "takes_huge"), (also, "Taker::take")] {
        assert_eq!(error.kind(), CallErrorKind::Arguments);
        let text = error.to_string();
        for part in [name, "Huge", "takes more than 1073741824 bytes"] {
            assert!(text.contains(part), "no `{part}` in: {text}");
        }
    }
    drop(taker);
    a_worker_that_stands_still_is_late_and_ends_with_its_group(&cluster, executor).await?;
    a_group_whose_description_is_too_long_is_refused_with_the_lengths(&cluster).await?;
    a_worker_killed_after_a_call_does_not_take_its_result_back(&cluster).await?;
    cluster.stop().await?;
    Ok(())
}

async fn a_worker_that_stands_still_is_late_and_ends_with_its_group(
    cluster: &TestCluster,
    executor: Executor,
) -> anyhow::Result<()> {
    let pids = soon(executor.run(pid, ())).await?;
    let job = executor.job();
    cluster.signal_worker(job, Rank(1), Signal::STOP).await?;
    let call = executor.run(whoami, ());
    let error = soon(call.deadline(Duration::from_millis(200))).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rank 1"), "{error}");
    assert_eq!(soon(executor.on(Rank(0)).run(whoami, ())).await?, 0);
    soon(executor.shutdown()).await?;
    for pid in pids {
        gone(pid).await;
    }
    Ok(())
}

async fn a_group_whose_description_is_too_long_is_refused_with_the_lengths(
    cluster: &TestCluster,
) -> anyhow::Result<()> {
    let driver = cluster.connect().await?;
    let before = driver.jobs().await?.len();
    let with = |name: &str, bytes: usize| {
        let builder = Executor::builder().workers(1);
        builder.env(name, "x".repeat(bytes)).start(&driver)
    };
    // What one message holds the head refuses, what it does not hold is not sent.
    for (bytes, given, allowed) in [
        (3 << 20, "3145730", "131071"),
        (5 << 20, "5242881", "4194304"),
    ] {
        let error = soon(with("V", bytes)).await.map(drop).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(given) && text.contains(allowed), "{text}");
        assert!(!error.is_retryable(), "{text}");
    }
    assert_eq!(driver.jobs().await?.len(), before);
    let executor = soon(with("V", 100_000)).await?;
    assert_eq!(soon(executor.run(whoami, ())).await?, [0]);
    executor.shutdown().await?;
    Ok(())
}

async fn a_worker_killed_after_a_call_does_not_take_its_result_back(
    cluster: &TestCluster,
) -> anyhow::Result<()> {
    let builder = Executor::builder().workers(2).output(Output::Silent);
    let executor = builder.start(&cluster.connect().await?).await?;
    let pending = executor.submit(whoami, ());
    // The later call has its answer, so the earlier one has too, though nobody has looked at it yet.
    let pids = soon(executor.run(pid, ())).await?;
    cluster.kill_worker(executor.job(), Rank(1)).await?;
    gone(pids[1]).await;
    let error = soon(executor.on(Rank(1)).run(whoami, ())).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("SIGKILL"), "{error}");
    for (rank, call) in pending.into_iter().enumerate() {
        assert_eq!(soon(call).await?, rank);
    }
    executor.shutdown().await.ok();
    Ok(())
}

#[tokio::test]
async fn a_job_whose_workers_die_leaves_the_other_job_alone() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().nodes(2).slots(2).start().await?;
    let driver = cluster.connect().await?;
    let builder = || Executor::builder().hosts(2).slots(1).output(Output::Silent);
    let (first, second) = tokio::try_join!(builder().start(&driver), builder().start(&driver))?;
    let pids = soon(first.run(pid, ())).await?;
    for rank in [0, 1] {
        cluster.kill_worker(first.job(), Rank(rank)).await?;
    }
    assert!(soon(first.run(whoami, ())).await.is_err());
    assert_eq!(soon(second.run(whoami, ())).await?, [0, 1]);
    first.shutdown().await.ok();
    for pid in pids {
        gone(pid).await;
    }
    // What it held is free for a third.
    cluster
        .wait_until("one job is left", |info| info.running_jobs == 1)
        .await?;
    let third = soon(builder().start(&driver)).await?;
    assert_eq!(soon(third.run(whoami, ())).await?, [0, 1]);
    assert_eq!(soon(second.run(whoami, ())).await?, [0, 1]);
    third.shutdown().await?;
    second.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn credentials_of_another_cluster_or_role_open_nothing() -> anyhow::Result<()> {
    let start = || TestCluster::builder().mode(Mode::InProcess).start();
    let (ours, theirs) = tokio::try_join!(start(), start())?;
    let error = soon(Cluster::connect(ours.address()?, theirs.credentials()?))
        .await
        .map(drop)
        .expect_err("of another cluster")
        .to_string();
    assert!(error.contains("not a member of this cluster"), "{error}");

    let authority = kolo_transport::Authority::create(kolo_transport::ids::ClusterId::random())?;
    let node: Credentials = authority.issue(Role::Node, "node-0000000000000001")?;
    let error = soon(Cluster::connect(ours.address()?, node))
        .await
        .map(drop)
        .expect_err("of a node")
        .to_string();
    assert!(error.contains("a driver's are needed"), "{error}");

    let driver = ours.connect().await?;
    let executor = Executor::builder().workers(1).output(Output::Silent);
    let executor = executor.start(&driver).await?;
    assert_eq!(soon(executor.run(whoami, ())).await?, [0]);
    executor.shutdown().await?;
    tokio::try_join!(ours.stop(), theirs.stop())?;
    Ok(())
}

#[tokio::test]
async fn output_of_any_bytes_and_any_amount_holds_up_no_call() -> anyhow::Result<()> {
    const LINES: usize = 50_000;
    let cluster = TestCluster::builder().start().await?;
    let (sender, mut last) = tokio::sync::mpsc::unbounded_channel();
    let output = Output::callback(move |line| {
        let end = format!(" line {}", LINES - 1);
        if line.text.ends_with(end.as_bytes()) {
            // The test may have ended; then nobody wants it.
            drop(sender.send(line.text.clone()));
        }
    });
    let executor = Executor::builder().workers(1).output(output);
    let executor = executor.start(&cluster.connect().await?).await?;
    soon(executor.run(babble, (LINES,))).await?;
    assert_eq!(soon(executor.run(whoami, ())).await?, [0]);
    let text = soon(last.recv()).await.expect("the last line comes");
    assert!(text.starts_with(b"\xff\xfe\0 line "), "{text:?}");
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

/// Set in the process that runs the test below by itself.
const ALONE: &str = "KOLO_E2E_ALONE";

#[test]
fn twenty_jobs_leave_nothing_in_driver_head_and_node() {
    // Descriptors belong to a process, so this needs one in which no other test runs.
    if std::env::var_os(ALONE).is_some() {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        runtime.block_on(twenty_jobs()).expect("twenty jobs");
        return;
    }
    let name = "bad_input::twenty_jobs_leave_nothing_in_driver_head_and_node";
    let output = std::process::Command::new("/proc/self/exe")
        .args([name, "--exact", "--nocapture"])
        .env(ALONE, "1")
        .output()
        .expect("this program starts again");
    assert!(
        output.status.success() && String::from_utf8_lossy(&output.stdout).contains("1 passed"),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

async fn twenty_jobs() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().slots(2).start().await?;
    let driver = cluster.connect().await?;
    let job = async |calls: usize| -> anyhow::Result<()> {
        let executor = Executor::builder().workers(2).output(Output::Silent);
        let executor = soon(executor.start(&driver)).await?;
        for _ in 0..calls {
            assert_eq!(soon(executor.run(whoami, ())).await?, [0, 1]);
        }
        soon(executor.shutdown()).await?;
        Ok(())
    };
    // What is made at first use and kept: connections, threads, caches.
    for _ in 0..3 {
        job(3).await?;
    }
    let daemons = children(std::process::id());
    assert_eq!(daemons.len(), 2, "a head and a node");
    let members: Vec<u32> = [std::process::id()].into_iter().chain(daemons).collect();
    let before: Vec<usize> = members.iter().map(|pid| open_files(*pid)).collect();
    for _ in 0..20 {
        job(3).await?;
    }
    soon(async {
        loop {
            let after: Vec<usize> = members.iter().map(|pid| open_files(*pid)).collect();
            let left: usize = members[1..].iter().map(|pid| children(*pid).len()).sum();
            // A few more than before may be a connection that is just being closed; twenty jobs that leave one
            // each are not.
            let few = after
                .iter()
                .zip(&before)
                .all(|(after, before)| *after <= before + 5);
            if few && left == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    cluster.stop().await?;
    Ok(())
}

fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// The processes, zombies included, that a process has started and not buried.
fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|text| {
            text.split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .collect::<Vec<u32>>()
        })
        .collect()
}
