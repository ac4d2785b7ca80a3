//! Drivers and heads that die, and a rank that stands still.

use std::time::Duration;

use kolo::JobId;
use kolo::prelude::*;
use kolo_harness::TestCluster;
use rustix::process::Signal;

use super::job::{Job, nothing_left, pid_of, processes};
use crate::support::{Driver, gone, is_running};

/// No test: a driver that is killed.
#[tokio::test]
async fn driver_process() -> anyhow::Result<()> {
    let Some(cluster) = Driver::connect().await? else {
        return Ok(());
    };
    let job = Job::with(&cluster, Executor::builder().workers(1..=2), 2, 1).await?;
    job.works().await;
    Driver::says(&job.executor.job().to_string());
    std::future::pending().await
}

#[tokio::test]
async fn a_job_whose_driver_is_killed_ends_and_leaves_nothing() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().nodes(2).start().await?;
    let (driver, job) = Driver::start(&cluster, "elastic::faults::driver_process").await?;
    let job: JobId = job.parse()?;
    assert_eq!(processes(job).len(), 2);
    drop(driver);
    nothing_left(job).await;
    let is_idle = |info: &kolo::ClusterInfo| {
        let mut nodes = info.nodes.iter();
        info.running_jobs == 0 && nodes.all(|node| node.available == node.total)
    };
    cluster.wait_until("the cluster is idle", is_idle).await?;
    cluster.stop().await?;
    Ok(())
}

/// A node without a head can't know whether another group goes on, so the workers end after a lease (G-3).
#[tokio::test]
async fn without_a_head_the_workers_end_after_a_lease_and_the_driver_is_told() -> anyhow::Result<()>
{
    let lease = Duration::from_secs(5);
    let cluster = TestCluster::builder().nodes(2).lease(lease);
    let mut cluster = cluster.start().await?;
    let job = Job::start(&cluster, Executor::builder().workers(1..=2), 2).await?;
    job.works().await;
    let pids = processes(job.executor.job());
    assert_eq!(pids.len(), 2);
    cluster.kill_head()?;
    // Well within the lease they work on.
    job.works().await;
    assert!(pids.iter().all(|pid| is_running(*pid)));
    let (error, _executor) = job.failure().await?;
    let text = error.to_string();
    assert!(text.contains("head"), "{text}");
    for pid in pids {
        gone(pid).await;
    }
    Ok(())
}

/// The others end their operation when their patience is over, and the head gives up the rank that takes no generation.
#[tokio::test]
async fn a_rank_that_stands_still_is_given_up_and_replaced() -> anyhow::Result<()> {
    let lease = Duration::from_secs(3);
    let cluster = TestCluster::builder().slots(3).lease(lease);
    let cluster = cluster.start().await?;
    // A rank that stands still does not hear that it is to end.
    let builder = Executor::builder()
        .workers(3..=3)
        .grace(Duration::from_millis(500));
    let patience = (1, Duration::from_secs(2));
    let mut job = Job::patient(&cluster.connect().await?, builder, 3, patience).await?;
    job.works().await;
    let stopped = job.watch.table().members[1].clone();
    let pid = pid_of(&cluster, job.executor.job(), &stopped).await?;
    cluster
        .signal_worker(job.executor.job(), Rank(1), Signal::STOP)
        .await?;
    let change = job.watch.until_size(3).await;
    assert_eq!(
        (change.left.len(), change.joined.len()),
        (1, 1),
        "{change:?}"
    );
    gone(pid).await;
    job.works().await;
    cluster.stop().await?;
    Ok(())
}
