//! Workers and nodes that die: what the driver is told, and what is left behind.

use std::time::{Duration, Instant};

use kolo::prelude::*;
use kolo_harness::TestCluster;

use crate::support::{Driver, exit_with, gone, hang, is_running, pid, soon, start, whoami};

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
async fn workers_that_are_killed_or_exit_are_named_with_their_end() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().nodes(2).slots(2).start().await?;
    // During a call, of which each rank tells,
    let executor = start(&cluster, 2, 2).await?;
    soon(executor.run(wait_for_all, ())).await?;
    let pending = executor.run(hang_or_wait, (2,)).submit();
    // The others are in their barrier by the time this call of rank 2 would begin; it is dead by then.
    cluster.kill_worker(executor.job(), Rank(2)).await?;
    for (rank, result) in pending.into_iter().enumerate() {
        let error = soon(result).await.unwrap_err().to_string();
        assert!(error.contains("rank 2"), "rank {rank}: {error}");
        assert!(rank != 2 || error.contains("SIGKILL"), "{error}");
    }
    executor.shutdown().await.ok();

    // and of which the whole tells: the first cause, not the echo.
    let executor = start(&cluster, 2, 2).await?;
    soon(executor.run(wait_for_all, ())).await?;
    let call = tokio::spawn(executor.run(hang_or_wait, (1,)).into_future());
    cluster.kill_worker(executor.job(), Rank(1)).await?;
    let error = soon(call).await?.unwrap_err();
    assert_eq!(error.rank(), Some(Rank(1)), "{error}");
    assert!(error.to_string().contains("SIGKILL"), "{error}");
    executor.shutdown().await.ok();

    // Before a call, which the others answer.
    let executor = start(&cluster, 2, 2).await?;
    let pids = soon(executor.run(pid, ())).await?;
    cluster.kill_worker(executor.job(), Rank(0)).await?;
    gone(pids[0]).await;
    let error = soon(executor.on(Rank(0)).run(whoami, ())).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rank 0"), "{error}");
    assert_eq!(soon(executor.on(Rank(1)).run(whoami, ())).await?, 1);
    executor.shutdown().await.ok();

    // By itself.
    let executor = start(&cluster, 2, 2).await?;
    let error = soon(executor.run(exit_with, (1, 3))).await.unwrap_err();
    assert_eq!(error.rank(), Some(Rank(1)), "{error}");
    for part in ["exit code 3", "about to exit with 3"] {
        assert!(error.to_string().contains(part), "{error}");
    }
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
    let executor = start(&cluster, 2, 2).await?;
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

const ORPHAN_TIMEOUT: Duration = Duration::from_millis(500);

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
    // The nodes find out after 3 s at the most, and wait for half a second then.
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
