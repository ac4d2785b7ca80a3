//! Where groups go.

use std::collections::BTreeMap;

use kolo::prelude::*;
use kolo_harness::{Mode, TestCluster};

use crate::support::{ranks, soon};

async fn cluster(nodes: usize, slots: u32) -> anyhow::Result<(TestCluster, Cluster)> {
    let cluster = TestCluster::builder()
        .mode(Mode::InProcess)
        .nodes(nodes)
        .slots(slots)
        .resource("fpga", 1.0)
        .start()
        .await?;
    let driver = cluster.connect().await?;
    Ok((cluster, driver))
}

fn workers_by_node(executor: &Executor) -> Vec<usize> {
    let mut counts = BTreeMap::new();
    for member in &executor.table().members {
        *counts.entry(member.node).or_insert(0) += 1;
    }
    let mut counts: Vec<usize> = counts.into_values().collect();
    counts.sort_unstable();
    counts
}

#[tokio::test]
async fn workers_are_packed_on_few_nodes_and_hosts_are_distinct() -> anyhow::Result<()> {
    let (cluster, driver) = cluster(3, 4).await?;
    let packed = Executor::builder()
        .workers(4)
        .output(Output::Silent)
        .start(&driver)
        .await?;
    assert_eq!(workers_by_node(&packed), [4]);
    let seen = soon(packed.run(ranks, ())).await?;
    assert_eq!(seen[3], [3, 4, 3, 4, 0, 1]);
    packed.shutdown().await?;
    let spread = Executor::builder()
        .hosts(3)
        .slots(2)
        .output(Output::Silent)
        .start(&driver)
        .await?;
    assert_eq!(workers_by_node(&spread), [2, 2, 2]);
    spread.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn what_is_missing_is_named() -> anyhow::Result<()> {
    let (cluster, driver) = cluster(2, 2).await?;
    let builder = || Executor::builder().output(Output::Silent);
    let error = soon(builder().hosts(3).slots(1).start(&driver))
        .await
        .map(drop)
        .expect_err("3 of 2")
        .to_string();
    assert!(error.contains('3') && error.contains('2'), "{error}");
    let error = soon(builder().workers(2).resource("fpga", 2.0).start(&driver))
        .await
        .map(drop)
        .expect_err("no fpga")
        .to_string();
    assert!(error.contains("fpga"), "{error}");
    let error = soon(builder().workers(1).use_gpu(true).start(&driver))
        .await
        .map(drop)
        .expect_err("no gpu")
        .to_string();
    assert!(error.contains("gpu"), "{error}");
    let fits = builder()
        .workers(2)
        .resource("fpga", 1.0)
        .start(&driver)
        .await?;
    assert_eq!(workers_by_node(&fits), [1, 1]);
    fits.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}
