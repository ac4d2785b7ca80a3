//! Lost workers are replaced, or the job ends and says why.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use kolo::elastic::Value;
use kolo::prelude::*;
use kolo_harness::TestCluster;
use kolo_transport::wire::WorkerState;

use super::job::{Job, kill, nothing_left, pid_of, processes, wait_for_job};
use crate::support::{gone, soon};

/// 16 MiB of `f32`.
const LARGE: usize = 4 << 20;

/// Kills a member of the group.
async fn kill_rank(cluster: &TestCluster, job: &Job, rank: usize) -> anyhow::Result<u32> {
    let member = &job.watch.table().members[rank];
    let pid = pid_of(cluster, job.executor.job(), member).await?;
    kill(pid)?;
    gone(pid).await;
    Ok(pid)
}

#[tokio::test]
async fn what_is_lost_is_replaced() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().nodes(2).slots(2).start().await?;
    a_killed_rank_comes_back_as_a_new_process_with_the_state(&cluster).await?;
    a_killed_warden_costs_its_workers_and_another_starts_theirs(&cluster).await?;
    a_whole_host_leaves_with_a_lost_worker_and_joins_again(&cluster).await?;
    a_spare_takes_over_without_a_new_process(&cluster).await?;
    cluster.stop().await?;
    Ok(())
}

async fn a_killed_rank_comes_back_as_a_new_process_with_the_state(
    cluster: &TestCluster,
) -> anyhow::Result<()> {
    let builder = Executor::builder().workers(2..=2);
    let mut job = Job::with(&cluster.connect().await?, builder, 2, LARGE).await?;
    // Rank 0 as well: the state comes from whoever has it.
    for rank in [1, 0] {
        job.works().await;
        let before = job.steps();
        let old = kill_rank(cluster, &job, rank).await?;
        let change = job.watch.next().await;
        assert_eq!(change.left, [Rank(rank as u32)]);
        // The survivor is rank 0 from now on.
        assert_eq!(change.joined, [Rank(1)]);
        let new = pid_of(cluster, job.executor.job(), &change.table.members[1]).await?;
        assert_ne!(old, new);
        job.works().await;
        assert!(job.steps() > before, "no work is lost");
    }
    let ended = job.end().await?;
    assert_eq!((ended.size, ended.outcome.generations), (2, 3));
    assert!(ended.outcome.steps_redone <= 2, "{:?}", ended.outcome);
    Ok(())
}

/// User code can kill its parent, and so can the system when memory is short.
async fn a_killed_warden_costs_its_workers_and_another_starts_theirs(
    cluster: &TestCluster,
) -> anyhow::Result<()> {
    let mut job = Job::start(cluster, Executor::builder().workers(4..=4), 4).await?;
    job.works().await;
    let member = job.watch.table().members[3].clone();
    let worker = pid_of(cluster, job.executor.job(), &member).await?;
    let stat = std::fs::read_to_string(format!("/proc/{worker}/stat"))?;
    // State and parent follow the name.
    let warden = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.split(' ').nth(2));
    kill(warden.context("a process has a parent")?.parse()?)?;
    gone(worker).await;
    while job.watch.table().members.len() < 4 || job.watch.table().members.contains(&member) {
        job.watch.next().await;
    }
    job.works().await;
    let node = |member: &kolo_transport::wire::Member| member.node;
    let nodes: Vec<_> = job.watch.table().members.iter().map(node).collect();
    assert_eq!(nodes.iter().filter(|its| **its == member.node).count(), 2);
    job.end().await?;
    Ok(())
}

async fn a_whole_host_leaves_with_a_lost_worker_and_joins_again(
    cluster: &TestCluster,
) -> anyhow::Result<()> {
    let builder = Executor::builder().hosts(1..=2).slots(2);
    let mut job = Job::start(cluster, builder, 4).await?;
    job.works().await;
    let host = job.watch.table().members[0].node;
    kill_rank(cluster, &job, 0).await?;
    let change = job.watch.next().await;
    let members = &change.table.members;
    assert_eq!(members.len(), 2);
    assert!(members.iter().all(|member| member.node != host));
    let change = job.watch.until_size(4).await;
    let back = change
        .table
        .members
        .iter()
        .filter(|member| member.node == host);
    assert_eq!(back.count(), 2);
    job.works().await;
    assert_eq!(job.end().await?.size, 4);
    Ok(())
}

async fn a_spare_takes_over_without_a_new_process(cluster: &TestCluster) -> anyhow::Result<()> {
    let builder = Executor::builder().workers(2..=2).spares(1);
    let mut job = Job::start(cluster, builder, 2).await?;
    let id = job.executor.job();
    wait_for_job(cluster, id, |info| {
        let spares = info
            .workers
            .iter()
            .filter(|worker| worker.state == WorkerState::Spare);
        spares.count() == 1
    })
    .await?;
    job.works().await;
    let before: BTreeSet<u32> = processes(id).into_iter().collect();
    assert_eq!(before.len(), 3);
    kill_rank(cluster, &job, 0).await?;
    let change = job.watch.next().await;
    assert_eq!(
        (&change.left[..], &change.joined[..]),
        (&[Rank(0)][..], &[Rank(1)][..])
    );
    let taken = pid_of(cluster, id, &change.table.members[1]).await?;
    assert!(before.contains(&taken), "{taken} is new: {before:?}");
    job.works().await;
    let ended = job.end().await?;
    assert_eq!(ended.outcome.generations, 2);
    Ok(())
}

/// Says something and fails, if the file is there.
#[kolo::function]
fn fail_when_told(ctx: &Context, file: String) -> anyhow::Result<()> {
    let mut state = State::new(Value(0_u64));
    ctx.elastic(&mut state, |ctx, state| {
        loop {
            std::thread::sleep(Duration::from_millis(1));
            ctx.comm().barrier()?;
            state.0 += 1;
            state.commit(ctx)?;
            if ctx.rank() == 1 && state.0 > 2 && std::fs::exists(&file)? {
                eprintln!("the disk is on fire");
                std::process::exit(7);
            }
        }
    })
}

#[tokio::test]
async fn a_group_below_its_minimum_ends_after_the_start_timeout_with_the_last_words()
-> anyhow::Result<()> {
    let cluster = TestCluster::builder().slots(2).start().await?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("fail");
    // With the program there already, workers start at once.
    let driver = cluster.connect().await?;
    let first = Executor::builder().workers(1).start(&driver).await?;
    soon(first.shutdown()).await?;
    // The host gets no new worker after a failure.
    let long = Duration::from_secs(600);
    let timeout = Duration::from_secs(4);
    let executor = Executor::builder()
        .workers(2..=2)
        .cooldown(long..=long)
        .start_timeout(timeout)
        .output(Output::Silent)
        .start(&driver)
        .await?;
    let run = executor.run(fail_when_told, (file.display().to_string(),));
    let run = tokio::spawn(run.into_future());
    std::fs::write(&file, "")?;
    let begun = Instant::now();
    let error = soon(run).await?.unwrap_err();
    assert!(begun.elapsed() >= timeout / 2, "{error}");
    let text = error.to_string();
    assert!(
        text.contains("min_workers") && text.contains("start timeout of 4s"),
        "{text}"
    );
    assert!(text.contains("exit code 7"), "{text}");
    assert_eq!(error.stderr_tail(), ["the disk is on fire"], "{text}");
    assert!(executor.recovered().await.is_err());
    nothing_left(executor.job()).await;
    executor.shutdown().await.ok();
    cluster.stop().await?;
    Ok(())
}
