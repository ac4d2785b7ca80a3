//! A host that is cut off while its worker is a member of an elastic group.

use std::net::SocketAddr;
use std::time::Duration;

use kolo::prelude::*;
use kolo_harness::TestCluster;
use kolo_harness::netns::Host;

use crate::job::{Job, pid_of};
use crate::needs_namespaces;
use crate::support::{gone, is_running, soon};
use crate::world::{World, sum};

/// All packets to and from the host are dropped without a word.
pub(crate) fn cut(host: &Host) -> anyhow::Result<()> {
    for (chain, side) in [("input", "iifname"), ("output", "oifname")] {
        host.nft(&format!("add rule inet test {chain} {side} eth0 drop"))?;
    }
    Ok(())
}

pub(crate) fn heal(host: &Host) -> anyhow::Result<()> {
    for chain in ["input", "output"] {
        host.nft(&format!("flush chain inet test {chain}"))?;
    }
    Ok(())
}

/// All packets between the host and the driver are dropped. The head, which is on the driver's host, is still reached at its port.
fn cut_off_driver(host: &Host, driver: &str, head: SocketAddr) -> anyhow::Result<()> {
    let port = head.port();
    host.nft(&format!(
        "add rule inet test input ip saddr {driver} udp sport != {port} drop"
    ))?;
    host.nft(&format!(
        "add rule inet test output ip daddr {driver} udp dport != {port} drop"
    ))?;
    Ok(())
}

/// The head hears of the driver that a generation can't be called, so that `recovered` ends.
#[test]
fn f1_a_driver_that_is_cut_off_from_a_node_gets_another_generation() -> anyhow::Result<()> {
    needs_namespaces!(Ok(()));
    let world = World::new(&["a", "b"])?;
    world.network("eth0", "10.1.0.", 1500)?;
    world.run_with(
        "10.1.0.100",
        TestCluster::builder().slots(1),
        async |cluster| {
            let executor = Executor::builder().workers(2..=2);
            let executor = executor.start(&cluster.connect().await?).await?;
            let first = executor.recovered().await?.generation;
            cut_off_driver(&world.hosts[1], "10.1.0.100", cluster.address()?)?;
            let error = soon(executor.run(sum, (1,))).await.unwrap_err();
            assert!(error.is_retryable(), "{error}");
            heal(&world.hosts[1])?;
            let next = soon(executor.recovered()).await?;
            assert!(next.generation > first && next.world_size == 2, "{next:?}");
            assert!(next.cause.contains("channel to node-"), "{next:?}");
            assert_eq!(soon(executor.run(sum, (1,))).await?, [3.0, 3.0]);
            executor.shutdown().await?;
            Ok(())
        },
    )
}

/// The first process stays, so it must have listened where the second host reaches it.
#[test]
fn a_group_on_one_host_grows_to_another() -> anyhow::Result<()> {
    needs_namespaces!(Ok(()));
    let world = World::new(&["a", "b"])?;
    world.network("eth0", "10.1.0.", 1500)?;
    let builder = TestCluster::builder().slots(1);
    world.run_with("10.1.0.100", builder, async |cluster| {
        let second = cluster.node_id(1)?.to_string();
        let node = |what: &str| -> anyhow::Result<()> {
            let status = cluster.kolo()?.args(["node", what, &second]).status()?;
            anyhow::ensure!(status.success(), "kolo node {what}: {status}");
            Ok(())
        };
        node("drain")?;
        let mut job = Job::start(cluster, Executor::builder().workers(1..=2), 1).await?;
        node("undrain")?;
        let change = job.watch.until_size(2).await;
        assert_eq!((change.left.len(), change.joined.len()), (0, 1));
        job.works().await;
        let ended = job.end().await?;
        assert_eq!((ended.size, ended.outcome.generations), (2, 2));
        Ok(())
    })
}

#[test]
fn a_host_that_is_cut_off_ends_its_workers_and_the_rest_goes_on() -> anyhow::Result<()> {
    needs_namespaces!(Ok(()));
    let world = World::new(&["a", "b", "c"])?;
    world.network("eth0", "10.1.0.", 1500)?;
    let builder = TestCluster::builder()
        .slots(1)
        .lease(Duration::from_secs(3));
    world.run_with("10.1.0.100", builder, async |cluster| {
        let mut job = Job::start(cluster, Executor::builder().workers(1..=3), 3).await?;
        job.works().await;
        let node = cluster.node_id(2)?;
        let table = job.watch.table();
        let member = table.members.iter().find(|member| member.node == node);
        let member = member.expect("a worker is there").clone();
        let pid = pid_of(cluster, job.executor.job(), &member).await?;

        let before = job.executor.generation().0;
        cut(&world.hosts[2])?;
        let change = job.watch.until_size(2).await;
        assert_eq!(
            (&change.left[..], change.joined.len()),
            (&[member.rank][..], 0)
        );
        let cause = &change.table.cause;
        assert!(cause.contains("lost"), "{cause}");
        job.works().await;
        gone(pid).await;
        let logs = cluster.logs();
        let log = logs
            .iter()
            .find(|(name, _)| name.contains(&node.to_string()));
        let log = &log.expect("the daemon lives on").1;
        assert!(log.contains("cut off from the head for 3s"), "{log}");

        // Back again, the host gets a new process, which takes the state of the others.
        heal(&world.hosts[2])?;
        let change = job.watch.until_size(3).await;
        let new = change
            .table
            .members
            .last()
            .expect("there are three")
            .clone();
        assert_eq!((new.node, change.joined.len()), (node, 1));
        assert_ne!(
            (new.slot, new.incarnation),
            (member.slot, member.incarnation)
        );
        assert!(!is_running(pid));
        job.works().await;
        let ended = job.end().await?;
        assert_eq!((ended.size, ended.outcome.generations), (3, before + 2));
        Ok(())
    })
}
