//! Workers and nodes that die: what the driver is told, and what is left behind.

use std::time::{Duration, Instant};

use kolo::prelude::*;
use kolo_harness::TestCluster;

use crate::support::{Driver, exit_with, gone, group, hang, is_running, pid, soon, whoami};

#[kolo::function]
fn wait_for_all(ctx: &Context) -> anyhow::Result<()> {
    Ok(ctx.comm().barrier()?)
}

#[kolo::function]
fn hang_or_wait(ctx: &Context, rank: usize) -> anyhow::Result<()> {
    if ctx.rank() == rank {
        loop {
            std::thread::park();
        }
    }
    Ok(ctx.comm().barrier()?)
}

#[tokio::test]
async fn a_worker_killed_during_a_call_is_named_with_its_signal() -> anyhow::Result<()> {
    let (cluster, executor) = group(2, 2).await?;
    soon(executor.run(wait_for_all, ())).await?;
    let pending = executor.run(hang_or_wait, (2,)).submit();
    // The others are in their barrier by the time this call of rank 2 would begin; it is dead by then.
    cluster.kill_worker(executor.job(), Rank(2)).await?;
    for (rank, result) in pending.into_iter().enumerate() {
        let error = soon(result).await.unwrap_err().to_string();
        assert!(error.contains("rank 2"), "rank {rank}: {error}");
        if rank == 2 {
            assert!(error.contains("SIGKILL"), "{error}");
        }
    }
    executor.shutdown().await.ok();
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn the_error_of_a_whole_call_names_the_first_cause_not_the_echo() -> anyhow::Result<()> {
    let (cluster, executor) = group(2, 2).await?;
    soon(executor.run(wait_for_all, ())).await?;
    let call = tokio::spawn(executor.run(hang_or_wait, (1,)).into_future());
    cluster.kill_worker(executor.job(), Rank(1)).await?;
    let error = soon(call).await?.unwrap_err();
    assert_eq!(error.rank(), Some(Rank(1)), "{error}");
    assert!(error.to_string().contains("SIGKILL"), "{error}");
    executor.shutdown().await.ok();
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn a_worker_killed_before_a_call_fails_that_call_and_others_answer() -> anyhow::Result<()> {
    let (cluster, executor) = group(1, 2).await?;
    let pids = soon(executor.run(pid, ())).await?;
    cluster.kill_worker(executor.job(), Rank(0)).await?;
    gone(pids[0]).await;
    let error = soon(executor.on(Rank(0)).run(whoami, ()))
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("rank 0"), "{error}");
    assert_eq!(soon(executor.on(Rank(1)).run(whoami, ())).await?, 1);
    executor.shutdown().await.ok();
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn a_worker_that_exits_is_told_with_code_and_last_words() -> anyhow::Result<()> {
    let (cluster, executor) = group(1, 2).await?;
    let error = soon(executor.run(exit_with, (1, 3))).await.unwrap_err();
    assert_eq!(error.rank(), Some(Rank(1)), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("exit code 3") && text.contains("about to exit with 3"),
        "{text}"
    );
    executor.shutdown().await.ok();
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn a_killed_node_takes_its_workers_along_and_is_told() -> anyhow::Result<()> {
    let mut cluster = TestCluster::builder()
        .nodes(2)
        .slots(2)
        .lease(Duration::from_secs(2))
        .start()
        .await?;
    let executor = Executor::builder().hosts(2).slots(2).output(Output::Silent);
    let executor = executor.start(&cluster.connect().await?).await?;
    let pids = soon(executor.run(pid, ())).await?;
    let table = executor.table();
    let lost = cluster.node_id(1)?;
    let pending = executor.run(hang, ()).submit();
    cluster.kill_node(1)?;
    for member in &table.members {
        if member.node == lost {
            gone(pids[member.rank.index()]).await;
        } else {
            assert!(is_running(pids[member.rank.index()]));
        }
    }
    for (member, call) in table.members.iter().zip(pending) {
        if member.node == lost {
            let error = soon(call).await.unwrap_err().to_string();
            assert!(error.contains(&format!("rank {}", member.rank)), "{error}");
        }
    }
    executor.shutdown().await.ok();
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn the_cluster_works_again_with_a_new_node() -> anyhow::Result<()> {
    let mut cluster = TestCluster::builder()
        .nodes(2)
        .slots(1)
        .lease(Duration::from_secs(2))
        .start()
        .await?;
    cluster.restart_node(1).await?;
    let old_gone = |info: &kolo_transport::wire::ClusterInfo| {
        info.nodes.iter().filter(|node| node.alive).count() == 2
    };
    cluster
        .wait_until("the old node's lease ends", old_gone)
        .await?;
    let executor = Executor::builder().hosts(2).slots(1).output(Output::Silent);
    let executor = executor.start(&cluster.connect().await?).await?;
    assert_eq!(soon(executor.run(whoami, ())).await?, [0, 1]);
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

/// No test: a driver that is killed.
#[tokio::test]
async fn driver_process() -> anyhow::Result<()> {
    let Some(cluster) = Driver::connect().await? else {
        return Ok(());
    };
    let executor = Executor::builder().hosts(2).slots(2).output(Output::Silent);
    let executor = executor.start(&cluster).await?;
    let pids = executor.run(pid, ()).await?;
    let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
    Driver::says(&pids.join(" "));
    // Calls go on, so that it is seen whether there are workers.
    while executor.run(whoami, ()).await.is_ok() {}
    Ok(())
}

/// A driver in a process of its own, and the process ids of its workers.
async fn driver(cluster: &TestCluster) -> anyhow::Result<(Driver, Vec<u32>)> {
    let (driver, pids) = Driver::start(cluster, "deaths::driver_process").await?;
    let pids: Result<_, _> = pids.split(' ').map(str::parse).collect();
    Ok((driver, pids?))
}

const ORPHAN_TIMEOUT: Duration = Duration::from_secs(1);

async fn two_nodes() -> anyhow::Result<TestCluster> {
    let cluster = TestCluster::builder().nodes(2).slots(2);
    Ok(cluster.orphan_timeout(ORPHAN_TIMEOUT).start().await?)
}

#[tokio::test]
async fn workers_whose_head_and_driver_are_both_killed_are_ended_by_their_nodes()
-> anyhow::Result<()> {
    let mut cluster = two_nodes().await?;
    let (mut driver, pids) = driver(&cluster).await?;
    assert_eq!(pids.len(), 4);
    cluster.kill_head()?;
    assert!(pids.iter().all(|pid| is_running(*pid)));
    driver.kill();
    for pid in pids {
        gone(pid).await;
    }
    Ok(())
}

#[tokio::test]
async fn d2_workers_live_on_without_a_head_as_long_as_their_driver_is_there() -> anyhow::Result<()>
{
    let mut cluster = two_nodes().await?;
    let (mut driver, pids) = driver(&cluster).await?;
    cluster.kill_head()?;
    // The nodes find out after 3 s at the most, and wait for a second then.
    let end = Instant::now() + Duration::from_secs(3) + ORPHAN_TIMEOUT * 3;
    while Instant::now() < end {
        assert!(pids.iter().all(|pid| is_running(*pid)));
        assert!(driver.child.try_wait()?.is_none(), "a call of its failed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    driver.kill();
    for pid in pids {
        gone(pid).await;
    }
    Ok(())
}

#[tokio::test]
async fn a_dropped_executor_stops_its_workers() -> anyhow::Result<()> {
    let (cluster, executor) = group(1, 2).await?;
    let pids = soon(executor.run(pid, ())).await?;
    drop(executor);
    for pid in pids {
        gone(pid).await;
    }
    cluster
        .wait_until("the job ends", |info| info.running_jobs == 0)
        .await?;
    cluster.stop().await?;
    Ok(())
}
