//! Nodes that are added and drained: no step is lost.

use std::process::Stdio;

use kolo::prelude::*;
use kolo::{ClusterInfo, NodeId};
use kolo_harness::TestCluster;

use super::job::Job;
use crate::support::soon;

fn is_on(job: &Job, node: NodeId) -> bool {
    job.watch
        .table()
        .members
        .iter()
        .any(|member| member.node == node)
}

/// Runs `kolo node COMMAND NODE`; gives what the command wrote.
async fn kolo_node(cluster: &TestCluster, command: &str, node: NodeId) -> anyhow::Result<String> {
    let mut kolo = cluster.kolo()?;
    kolo.args(["node", command, &node.to_string()])
        .stdin(Stdio::null());
    let out = soon(tokio::task::spawn_blocking(move || kolo.output())).await??;
    let text = String::from_utf8(out.stdout)?;
    anyhow::ensure!(
        out.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(text)
}

/// Waits until nothing of any job is on a node.
async fn is_left(cluster: &TestCluster, node: NodeId) -> anyhow::Result<()> {
    let is_free = |info: &ClusterInfo| {
        let found = info.nodes.iter().find(|info| info.node == node);
        found.is_some_and(|node| node.jobs.is_empty() && node.available == node.total)
    };
    cluster.wait_until("the job has left", is_free).await?;
    Ok(())
}

/// Counts the ranks, and takes some time.
#[kolo::function]
fn count(ctx: &Context) -> Result<u64> {
    std::thread::sleep(std::time::Duration::from_millis(5));
    let mut one = [1];
    ctx.comm().all_reduce(&mut one, ReduceOp::Sum)?;
    Ok(one[0])
}

#[tokio::test]
async fn a_driver_of_plain_functions_grows_and_leaves_a_node_between_its_calls()
-> anyhow::Result<()> {
    let mut cluster = TestCluster::builder().start().await?;
    let connected = cluster.connect().await?;
    let builder = Executor::builder().workers(1..=2).output(Output::Silent);
    let executor = builder.start(&connected).await?;
    let mut changes = executor.generations();
    assert_eq!(soon(executor.run(count, ())).await?, [1]);
    let index = cluster.add_node_with_slots(1).await?;
    // No call meets the change.
    while soon(executor.run(count, ())).await? != [2, 2] {}
    // Also while there is none.
    kolo_node(&cluster, "drain", cluster.node_id(index)?).await?;
    let sizes: Vec<usize> = [
        soon(changes.next()).await,
        soon(changes.next()).await,
        soon(changes.next()).await,
    ]
    .into_iter()
    .flatten()
    .map(|change| change.table.members.len())
    .collect();
    assert_eq!(sizes, [1, 2, 1]);
    assert_eq!(soon(executor.run(count, ())).await?, [1]);
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn a_drained_node_is_left_at_a_commit_and_taken_again_when_undrained() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().nodes(3).start().await?;
    let mut job = Job::start(&cluster, Executor::builder().workers(1..=3), 3).await?;
    job.works().await;
    let before = job.watch.generations - 1;
    let node = cluster.node_id(1)?;
    let text = kolo_node(&cluster, "drain", node).await?;
    assert!(text.contains("leave the node within 1m"), "{text}");
    let job_id = job.executor.job().to_string();
    assert!(text.contains(&job_id[..8]), "{text}");
    let change = job.watch.next().await;
    assert_eq!((change.left.len(), change.joined.len()), (1, 0));
    assert!(!is_on(&job, node));
    is_left(&cluster, node).await?;
    job.works().await;
    kolo_node(&cluster, "undrain", node).await?;
    let change = job.watch.next().await;
    assert_eq!((change.left.len(), change.joined.len()), (0, 1));
    assert!(is_on(&job, node));
    job.works().await;
    let ended = job.end().await?;
    assert_eq!((ended.size, ended.outcome.steps_redone), (3, 0));
    // Before the loop began, changes interrupted nobody.
    assert!((2..=before + 2).contains(&ended.outcome.interrupts));
    cluster.stop().await?;
    Ok(())
}
