//! Where groups go.

use std::collections::BTreeMap;

use kolo::prelude::*;
use kolo_harness::{Mode, TestCluster};

use crate::support::{ranks, soon};

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
async fn workers_are_packed_on_few_nodes_hosts_are_distinct_and_what_is_missing_is_named()
-> anyhow::Result<()> {
    let cluster = TestCluster::builder().mode(Mode::InProcess).nodes(3);
    let cluster = cluster.slots(4).resource("fpga", 1.0).start().await?;
    let driver = cluster.connect().await?;
    let builder = || Executor::builder().output(Output::Silent);
    let packed = builder().workers(4).start(&driver).await?;
    assert_eq!(workers_by_node(&packed), [4]);
    let seen = soon(packed.run(ranks, ())).await?;
    assert_eq!(seen[3], [3, 4, 3, 4, 0, 1]);
    packed.shutdown().await?;
    let spread = builder().hosts(3).slots(2).start(&driver).await?;
    assert_eq!(workers_by_node(&spread), [2, 2, 2]);
    spread.shutdown().await?;
    for (refused, parts) in [
        (builder().hosts(4).slots(1), ["4", "3"]),
        (builder().workers(2).resource("fpga", 2.0), ["fpga", ""]),
        (builder().workers(1).use_gpu(true), ["gpu", ""]),
    ] {
        let error = soon(refused.start(&driver)).await.map(drop);
        let error = error.expect_err("there is no room").to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    let fits = builder().workers(2).resource("fpga", 1.0);
    let fits = fits.start(&driver).await?;
    assert_eq!(workers_by_node(&fits), [1, 1]);
    fits.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}
