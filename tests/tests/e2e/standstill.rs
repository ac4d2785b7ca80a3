//! Processes that stand still, or hardly ever have a turn: nothing is lost by impatience.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kolo::prelude::*;
use kolo_harness::TestCluster;
use kolo_transport::wire::{JobInfo, JobState};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::support::{soon, start, whoami};

const LEASE: Duration = Duration::from_secs(3);

#[kolo::function]
fn sum(ctx: &Context, step: f64) -> anyhow::Result<f64> {
    let mut sum = [step];
    ctx.comm().all_reduce(&mut sum, ReduceOp::Sum)?;
    Ok(sum[0])
}

async fn cluster() -> anyhow::Result<TestCluster> {
    let cluster = TestCluster::builder().nodes(2).slots(2).lease(LEASE);
    Ok(cluster.start().await?)
}

/// No daemon has lost another one, not even for a moment.
fn nothing_was_lost(cluster: &TestCluster) {
    for (name, log) in cluster.logs() {
        for word in ["is lost", "registered again", "a worker was lost"] {
            assert!(!log.contains(word), "{name} says `{word}`");
        }
    }
}

#[tokio::test]
async fn a_head_or_a_node_that_stands_still_for_less_than_a_lease_loses_nothing()
-> anyhow::Result<()> {
    let cluster = cluster().await?;
    let executor = start(&cluster, 2, 2).await?;
    assert_eq!(soon(executor.run(sum, (1.0,))).await?, [4.0; 4]);
    let pause = LEASE * 3 / 5;

    cluster.pause_head()?;
    tokio::time::sleep(pause).await;
    cluster.resume_head()?;
    assert_eq!(soon(executor.run(sum, (1.0,))).await?, [4.0; 4]);

    for node in 0..2 {
        cluster.pause_node(node)?;
        // It is in the node's socket when that goes on.
        let call = tokio::spawn(executor.run(sum, (1.0,)).into_future());
        tokio::time::sleep(pause).await;
        cluster.resume_node(node)?;
        assert_eq!(soon(call).await??, [4.0; 4]);
    }
    soon(executor.shutdown()).await?;
    nothing_was_lost(&cluster);
    cluster.stop().await?;
    Ok(())
}

/// A child that leads a process group. It is killed at the end, whatever happens.
struct Killed(Child);

impl Killed {
    /// `kolo run` is two processes.
    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.0.id().try_into().unwrap()).unwrap();
        kill_process_group(pid, signal).unwrap();
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// As when a laptop is closed, or a virtual machine is paused.
#[tokio::test]
async fn a_whole_cluster_may_stand_still_for_longer_than_its_leases() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let folder = tempfile::tempdir()?;
    let go = folder.path().join("go");
    let mut run = cluster.kolo()?;
    let script = "while [ ! -e \"$GO\" ]; do sleep 0.05; done";
    run.args(["run", "-n", "4", "--env"]);
    run.arg(format!("GO={}", go.display()));
    run.args(["--", "sh", "-c", script]);
    run.stdin(Stdio::null()).stderr(Stdio::piped());
    let mut run = Killed(run.process_group(0).spawn()?);
    let running = |jobs: &[JobInfo]| jobs.iter().any(|job| job.state == JobState::Healthy);
    cluster.wait_for_jobs("the job runs", running).await?;
    cluster.pause_head()?;
    (0..2).try_for_each(|node| cluster.pause_node(node))?;
    run.signal(Signal::STOP);
    tokio::time::sleep(LEASE * 2).await;
    // One after the other, those first who may miss the others.
    run.signal(Signal::CONT);
    (0..2).try_for_each(|node| cluster.resume_node(node))?;
    cluster.resume_head()?;
    std::fs::write(&go, "")?;
    let ended = tokio::task::spawn_blocking(move || {
        let mut said = String::new();
        let read = run.0.stderr.take().unwrap().read_to_string(&mut said);
        (run.0.wait(), read, said)
    });
    let (status, read, said) = soon(ended).await?;
    read?;
    assert!(status?.success(), "{said}");
    nothing_was_lost(&cluster);
    cluster.stop().await?;
    Ok(())
}

const LIMIT: Duration = Duration::from_secs(5);

/// Rank 1 comes when a file is there.
#[kolo::function]
fn meet(ctx: &Context, waits: String, go: String) -> anyhow::Result<()> {
    ctx.comm().set_timeout(LIMIT);
    if ctx.rank() == 1 {
        while !std::fs::exists(&go)? {
            std::thread::sleep(Duration::from_millis(10));
        }
    } else {
        std::fs::write(waits, "")?;
    }
    Ok(ctx.comm().barrier()?)
}

/// As Ctrl-Z does it to the ranks of a job on this machine.
#[tokio::test]
async fn ranks_that_were_stopped_together_are_not_late() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().nodes(2).slots(3).lease(LEASE);
    let cluster = cluster.start().await?;
    // At the same time, since all of it is waiting.
    tokio::try_join!(stopped_together(&cluster, 1), stopped_together(&cluster, 2))?;
    cluster.stop().await?;
    Ok(())
}

async fn stopped_together(cluster: &TestCluster, hosts: u32) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (waits, go) = (folder.path().join("waits"), folder.path().join("go"));
    let executor = start(cluster, hosts, 2 / hosts).await?;
    let arguments = (waits.display().to_string(), go.display().to_string());
    let call = tokio::spawn(executor.run(meet, arguments).into_future());
    soon(async {
        while !waits.exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let signal = async |signal| {
        for rank in [Rank(0), Rank(1)] {
            let job = executor.job();
            cluster.signal_worker(job, rank, signal).await?;
        }
        anyhow::Ok(())
    };
    signal(Signal::STOP).await?;
    tokio::time::sleep(LIMIT * 5 / 4).await;
    signal(Signal::CONT).await?;
    // Longer than one that was late on the real clock would be asked for.
    tokio::time::sleep(LIMIT / 4).await;
    std::fs::write(&go, "")?;
    assert_eq!(soon(call).await??, [(), ()]);
    soon(executor.shutdown()).await?;
    Ok(())
}

/// Spins on all processors, several times over, until it is dropped.
struct Load {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    fn start() -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let spin = |_| {
            let over = Arc::clone(&over);
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let threads = (0..cores * 4).map(spin).collect();
        Self { over, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

#[tokio::test]
async fn jobs_live_on_a_machine_with_many_times_too_much_to_do() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let load = Load::start();
    let begun = Instant::now();
    while begun.elapsed() < LEASE * 2 {
        let executor = start(&cluster, 2, 2).await?;
        for _ in 0..10 {
            assert_eq!(soon(executor.run(sum, (1.0,))).await?, [4.0; 4]);
        }
        assert_eq!(soon(executor.run(whoami, ())).await?, [0, 1, 2, 3]);
        soon(executor.shutdown()).await?;
    }
    nothing_was_lost(&cluster);
    drop(load);
    cluster.stop().await?;
    Ok(())
}
