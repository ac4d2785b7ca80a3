//! Daemons that are killed, in clusters whose lease is so long that nothing else can tell of it.

use std::time::{Duration, Instant};

use kolo::prelude::*;
use kolo_harness::TestCluster;

use crate::support::soon;

/// One sum over all ranks.
#[kolo::function]
fn add_up(ctx: &Context) -> anyhow::Result<u64> {
    let mut one = [1_u64];
    ctx.comm().all_reduce(&mut one, ReduceOp::Sum)?;
    Ok(one[0])
}

/// The sums of the first step that no change of the group ends.
async fn step(executor: &Executor) -> anyhow::Result<Vec<u64>> {
    loop {
        match soon(executor.run(add_up, ())).await {
            Ok(sums) => return Ok(sums),
            Err(error) => anyhow::ensure!(error.is_retryable(), "{error}"),
        }
        soon(executor.recovered()).await?;
    }
}

#[tokio::test]
async fn g3_half_of_an_elastic_job_goes_on_at_once_when_the_daemon_of_the_other_half_is_killed()
-> anyhow::Result<()> {
    let lease = Duration::from_secs(600);
    let cluster = TestCluster::builder().nodes(2).slots(2).lease(lease);
    let mut cluster = cluster.start().await?;
    let connected = cluster.connect().await?;
    let elastic = Executor::builder().workers(1..=4).output(Output::Silent);
    let executor = elastic.start(&connected).await?;
    // The slower node's workers may come later.
    while step(&executor).await? != [4; 4] {}
    cluster.kill_node(1)?;
    let killed = Instant::now();
    assert_eq!(step(&executor).await?, [2, 2]);
    eprintln!("the next step has ended after {:?}", killed.elapsed());
    assert_eq!(
        connected
            .status()
            .await?
            .nodes
            .iter()
            .filter(|node| node.alive)
            .count(),
        1
    );
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}
