//! What Horovod's tests of elastic jobs assert, by their names: those of the driver (`test_elastic_driver.py`), of the Ray adapter
//! (`test_ray_elastic.py`) and with real processes (`elastic_common.py`), those that are skipped there included. The table with all of
//! them, and with what differs, is in `tests/README.md`.

use std::time::{Duration, Instant};

use kolo::elastic::Value;
use kolo::prelude::*;
use kolo::{Executor, ExecutorBuilder};
use kolo_harness::TestCluster;

use crate::elastic::job::{Job, kill, nothing_left, pid_of};
use crate::support::{gone, ranks, soon, whoami};

async fn cluster(nodes: usize, slots: u32) -> anyhow::Result<TestCluster> {
    let cluster = TestCluster::builder().nodes(nodes).slots(slots);
    Ok(cluster.start().await?)
}

/// A job that has come to this size and works.
async fn job(cluster: &TestCluster, builder: ExecutorBuilder, size: usize) -> anyhow::Result<Job> {
    let job = Job::start(cluster, builder, size).await?;
    job.works().await;
    Ok(job)
}

async fn kill_rank(cluster: &TestCluster, job: &Job, rank: usize) -> anyhow::Result<()> {
    let member = &job.watch.table().members[rank];
    let pid = pid_of(cluster, job.executor.job(), member).await?;
    kill(pid)?;
    gone(pid).await;
    Ok(())
}

#[tokio::test]
async fn test_rank_and_size() -> anyhow::Result<()> {
    let cluster = cluster(2, 2).await?;
    let builder = Executor::builder().workers(4..=4).output(Output::Silent);
    let executor = builder.start(&cluster.connect().await?).await?;
    for _ in 0..2 {
        let all = soon(executor.run(ranks, ())).await?;
        let expected: Vec<[usize; 6]> = (0..4)
            .map(|rank| [rank, 4, rank % 2, 2, rank / 2, 2])
            .collect();
        assert_eq!(all, expected);
    }
    assert_eq!(executor.generation().0, 1);
    soon(executor.shutdown()).await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn test_rank_and_size_with_host_failure() -> anyhow::Result<()> {
    let mut cluster = cluster(1, 2).await?;
    cluster.add_node_with_slots(1).await?;
    let mut job = job(&cluster, Executor::builder().workers(2..=3), 3).await?;
    cluster.kill_node(1)?;
    job.watch.until_size(2).await;
    let members = &job.watch.table().members;
    assert!(
        members
            .iter()
            .all(|member| member.cross_size == 1 && member.local_size == 2)
    );
    job.works().await;
    assert_eq!(job.end().await?.size, 2);
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn test_rank_and_size_with_host_added() -> anyhow::Result<()> {
    let mut cluster = cluster(1, 2).await?;
    let mut job = job(&cluster, Executor::builder().workers(2..=4), 2).await?;
    let old = job.watch.table().members.clone();
    let added = cluster.add_node().await?;
    job.watch.until_size(4).await;
    let members = &job.watch.table().members;
    for (rank, old) in old.iter().enumerate() {
        let new = &members[rank];
        assert_eq!((new.slot, new.incarnation), (old.slot, old.incarnation));
    }
    let node = cluster.node_id(added)?;
    assert!(members[2..].iter().all(|member| member.node == node));
    job.works().await;
    assert_eq!(job.end().await?.size, 4);
    cluster.stop().await?;
    Ok(())
}

/// Also `test_min_num_proc` of the Ray adapter.
#[tokio::test]
async fn test_wait_for_available_slots() -> anyhow::Result<()> {
    let mut cluster = cluster(1, 1).await?;
    let driver = cluster.connect().await?;
    let builder = Executor::builder().workers(3..=4).output(Output::Silent);
    let starting = tokio::spawn(async move { builder.start(&driver).await });
    let waits = |jobs: &[kolo::JobInfo]| !jobs.is_empty();
    cluster.wait_for_jobs("the job waits", waits).await?;
    cluster.add_node().await?;
    assert!(!starting.is_finished());
    cluster.add_node().await?;
    let executor = soon(starting).await??;
    assert_eq!(soon(executor.run(whoami, ())).await?, [0, 1, 2]);
    soon(executor.shutdown()).await?;
    cluster.stop().await?;
    Ok(())
}

/// Room for all workers on one host is not enough.
#[tokio::test]
async fn test_wait_for_min_hosts() -> anyhow::Result<()> {
    let mut cluster = cluster(1, 4).await?;
    let driver = cluster.connect().await?;
    let builder = Executor::builder().hosts(2..=3).slots(2);
    let builder = builder.output(Output::Silent);
    let starting = tokio::spawn(async move { builder.start(&driver).await });
    let waits = |jobs: &[kolo::JobInfo]| !jobs.is_empty();
    cluster.wait_for_jobs("the job waits", waits).await?;
    cluster.add_node_with_slots(1).await?;
    assert!(!starting.is_finished());
    cluster.add_node_with_slots(2).await?;
    let executor = soon(starting).await??;
    let all = soon(executor.run(ranks, ())).await?;
    let expected: Vec<[usize; 6]> = (0..4)
        .map(|rank| [rank, 4, rank % 2, 2, rank / 2, 2])
        .collect();
    assert_eq!(all, expected);
    soon(executor.shutdown()).await?;
    cluster.stop().await?;
    Ok(())
}

/// All ranks fail in the same step.
#[kolo::function]
fn fail_together(ctx: &Context) -> anyhow::Result<()> {
    let mut state = State::new(Value(0_u64));
    ctx.elastic(&mut state, |ctx, state| {
        state.commit(ctx)?;
        eprintln!("rank {} fails", ctx.rank());
        std::process::exit(1);
    })
}

/// Also `test_all_ranks_failure`.
#[tokio::test]
async fn test_all_workers_fail() -> anyhow::Result<()> {
    let cluster = cluster(2, 2).await?;
    let builder = Executor::builder().workers(4..=4).output(Output::Silent);
    let executor = builder.start(&cluster.connect().await?).await?;
    let error = soon(executor.run(fail_together, ())).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("exit code 1"), "{text}");
    assert!(
        error
            .stderr_tail()
            .iter()
            .any(|line| line.ends_with("fails"))
    );
    nothing_left(executor.job()).await;
    executor.shutdown().await.ok();
    cluster.stop().await?;
    Ok(())
}

/// Rank 0 returns at once, the others when the file is there.
#[kolo::function]
fn return_first(ctx: &Context, returned: String, go: String) -> anyhow::Result<usize> {
    let mut state = State::new(Value(0_u64));
    ctx.elastic(&mut state, |ctx, _| {
        ctx.comm().barrier()?;
        if ctx.rank() == 0 {
            std::fs::write(&returned, "")?;
        } else {
            while !std::fs::exists(&go)? {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(ctx.rank())
    })
}

/// There the others are stopped; here they end, and nobody joins them any more.
#[tokio::test]
async fn test_shutdown_on_success() -> anyhow::Result<()> {
    let mut cluster = cluster(1, 2).await?;
    let folder = tempfile::tempdir()?;
    let file = |name: &str| folder.path().join(name).display().to_string();
    let builder = Executor::builder().workers(1..=3).output(Output::Silent);
    let executor = builder.start(&cluster.connect().await?).await?;
    while executor.world_size() < 2 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let run = executor.run(return_first, (file("returned"), file("go")));
    let run = tokio::spawn(run.into_future());
    soon(async {
        while !folder.path().join("returned").exists() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    cluster.add_node().await?;
    assert!(!run.is_finished());
    std::fs::write(file("go"), "")?;
    assert_eq!(soon(run).await??, [0, 1]);
    soon(executor.shutdown()).await?;
    cluster.stop().await?;
    Ok(())
}

/// There the host's other workers end, and the host is excluded; here they stay. Also `test_single_rank_failure` with `kill`,
/// which is skipped there for PyTorch.
#[tokio::test]
async fn test_host_shutdown_on_worker_failure() -> anyhow::Result<()> {
    let cluster = cluster(2, 2).await?;
    let mut job = job(&cluster, Executor::builder().workers(4..=4), 4).await?;
    let old = job.watch.table().members.clone();
    kill_rank(&cluster, &job, 0).await?;
    let change = job.watch.until_size(4).await;
    assert_eq!(
        (&change.left[..], &change.joined[..]),
        (&[Rank(0)][..], &[Rank(3)][..])
    );
    let members = &change.table.members;
    let stayed = members[..3]
        .iter()
        .map(|member| (member.slot, member.incarnation));
    assert!(
        stayed.eq(old[1..]
            .iter()
            .map(|member| (member.slot, member.incarnation)))
    );
    // The new one is on the host of the one that has failed.
    assert_eq!(members[3].node, old[0].node);
    job.works().await;
    assert_eq!(job.end().await?.outcome.generations, 2);
    cluster.stop().await?;
    Ok(())
}

/// Rank 1 ends by itself, once.
#[kolo::function]
fn fail_once(ctx: &Context, mark: String) -> anyhow::Result<(usize, u64)> {
    let mut state = State::new(Value(0_u64));
    ctx.elastic(&mut state, |ctx, state| {
        while state.0 < 20 {
            ctx.comm().barrier()?;
            state.0 += 1;
            state.commit(ctx)?;
            if ctx.rank() == 1 && state.0 == 10 && !std::fs::exists(&mark)? {
                std::fs::write(&mark, "")?;
                std::process::exit(1);
            }
        }
        Ok((ctx.rank(), state.0))
    })
}

/// `test_single_rank_failure` with `exception`, which is skipped there for PyTorch.
#[tokio::test]
async fn test_single_rank_failure() -> anyhow::Result<()> {
    let cluster = cluster(1, 2).await?;
    let folder = tempfile::tempdir()?;
    let mark = folder.path().join("mark").display().to_string();
    let builder = Executor::builder().workers(2..=2).output(Output::Silent);
    let executor = builder.start(&cluster.connect().await?).await?;
    let ends = soon(executor.run(fail_once, (mark,))).await?;
    assert_eq!(ends, [(0, 20), (1, 20)]);
    assert_eq!(executor.generation().0, 2);
    soon(executor.shutdown()).await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn test_max_num_proc() -> anyhow::Result<()> {
    let cluster = cluster(2, 2).await?;
    let job = job(&cluster, Executor::builder().workers(1..=2), 2).await?;
    let ended = job.end().await?;
    assert_eq!((ended.size, ended.watch.left), (2, 0));
    cluster.stop().await?;
    Ok(())
}

/// The host of rank 0 changes, and no step is lost. Skipped in the Ray adapter.
#[tokio::test]
async fn test_hosts_added_and_removed() -> anyhow::Result<()> {
    let mut cluster = cluster(1, 1).await?;
    let mut job = job(&cluster, Executor::builder().workers(1..=2), 1).await?;
    let added = cluster.add_node().await?;
    job.watch.until_size(2).await;
    job.works().await;
    let added = cluster.node_id(added)?;
    cluster.terminate_node(0).await?;
    job.watch.until_size(1).await;
    assert_eq!(job.watch.table().members[0].node, added);
    job.works().await;
    let ended = job.end().await?;
    let outcome = ended.outcome;
    assert_eq!((outcome.generations, outcome.interrupts), (3, 2));
    assert_eq!(outcome.steps_redone, 0);
    cluster.stop().await?;
    Ok(())
}

/// `test_remove_and_add` of the Ray adapter, skipped there.
#[tokio::test]
async fn test_remove_and_add() -> anyhow::Result<()> {
    let mut cluster = cluster(3, 1).await?;
    let mut job = job(&cluster, Executor::builder().workers(2..=3), 3).await?;
    let before = job.executor.generation().0;
    for node in [1, 2] {
        cluster.kill_node(node)?;
        job.watch.until_size(2).await;
        cluster.restart_node(node).await?;
        job.watch.until_size(3).await;
        job.works().await;
    }
    let ended = job.end().await?;
    assert_eq!((ended.size, ended.outcome.generations), (3, before + 4));
    cluster.stop().await?;
    Ok(())
}

/// `test_remove_and_add_cooldown` of the Ray adapter, skipped there, and hosts that come back after a back-off.
#[tokio::test]
async fn test_remove_and_add_cooldown() -> anyhow::Result<()> {
    let cluster = cluster(1, 2).await?;
    let (least, most) = (Duration::from_secs(1), Duration::from_secs(2));
    let builder = Executor::builder().workers(1..=2).cooldown(least..=most);
    let mut job = job(&cluster, builder, 2).await?;
    kill_rank(&cluster, &job, 0).await?;
    let begun = Instant::now();
    job.watch.until_size(1).await;
    job.works().await;
    job.watch.until_size(2).await;
    assert!(begun.elapsed() >= least, "{:?}", begun.elapsed());
    job.works().await;
    assert_eq!(job.end().await?.outcome.generations, 3);
    cluster.stop().await?;
    Ok(())
}
