//! The rows of Horovod's `test/single/test_ray.py`, by name. Those with `parametrized` in a comment run
//! with `num_workers=4` and with `num_hosts=1, num_workers_per_host=4` there, and do so here.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kolo::prelude::*;
use kolo_harness::{Mode, TestCluster};
use serde::{Deserialize, Serialize};

use crate::support::{environment, ranks, soon, whoami};

/// Both parametrizations.
async fn both(cluster: &Cluster, cpus: f64) -> anyhow::Result<[Executor; 2]> {
    let packed = Executor::builder()
        .workers(4)
        .cpus_per_worker(cpus)
        .output(Output::Silent);
    let spread = Executor::builder()
        .hosts(1)
        .slots(4)
        .cpus_per_worker(cpus)
        .output(Output::Silent);
    Ok([packed.start(cluster).await?, spread.start(cluster).await?])
}

async fn one_node(slots: u32) -> anyhow::Result<(TestCluster, Cluster)> {
    let cluster = TestCluster::builder()
        .mode(Mode::InProcess)
        .slots(slots)
        .start()
        .await?;
    let driver = cluster.connect().await?;
    Ok((cluster, driver))
}

/// 12 ranks on 3 nodes: local sizes 4, cross sizes 3.
#[tokio::test]
async fn coordinator_registration() -> anyhow::Result<()> {
    let cluster = TestCluster::builder()
        .mode(Mode::InProcess)
        .nodes(3)
        .slots(4)
        .start()
        .await?;
    let executor = Executor::builder()
        .hosts(3)
        .slots(4)
        .output(Output::Silent)
        .start(&cluster.connect().await?)
        .await?;
    let seen = soon(executor.run(ranks, ())).await?;
    let mut by_cross: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for (rank, [world, size, local_rank, local_size, cross_rank, cross_size]) in
        seen.into_iter().enumerate()
    {
        assert_eq!((world, size, local_size, cross_size), (rank, 12, 4, 3));
        by_cross.entry(cross_rank).or_default().insert(local_rank);
    }
    let all: BTreeSet<usize> = (0..4).collect();
    assert_eq!(
        by_cross,
        BTreeMap::from([(0, all.clone()), (1, all.clone()), (2, all)])
    );
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

/// 5, 4 and 3 workers: one rank has cross size 1, two have 2, nine have 3. Nodes are told apart by id, so
/// the same hostname on all makes no difference.
async fn cross_rank(hostnames: &[&str]) -> anyhow::Result<()> {
    let mut cluster = TestCluster::builder()
        .mode(Mode::InProcess)
        .nodes(1)
        .slots(5)
        .hostnames(hostnames.iter().copied())
        .start()
        .await?;
    cluster.add_node_with_slots(4).await?;
    cluster.add_node_with_slots(3).await?;
    let driver = cluster.connect().await?;
    let executor = Executor::builder()
        .workers(12)
        .output(Output::Silent)
        .start(&driver)
        .await?;
    let mut cross: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for [_, _, _, _, cross_rank, cross_size] in soon(executor.run(ranks, ())).await? {
        cross.entry(cross_size).or_default().push(cross_rank);
    }
    assert_eq!(cross[&1], [0]);
    assert_eq!(
        cross[&2].iter().copied().collect::<BTreeSet<_>>(),
        BTreeSet::from([0, 1])
    );
    assert_eq!((cross[&2].len(), cross[&3].len()), (2, 9));
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn cross_rank_same_host() -> anyhow::Result<()> {
    cross_rank(&["host", "host", "host"]).await
}

#[tokio::test]
async fn cross_rank_other_hosts() -> anyhow::Result<()> {
    cross_rank(&["host-1", "host-2", "host-3"]).await
}

/// 4 workers on 2 CPUs: refused, and shutdown is still fine. (There it is a timeout of 5 s; here at once.)
#[tokio::test]
async fn infeasible_placement() -> anyhow::Result<()> {
    let (cluster, driver) = one_node(2).await?;
    let builder = || Executor::builder().output(Output::Silent);
    for builder in [builder().workers(4), builder().hosts(1).slots(4)] {
        let error = soon(builder.start(&driver)).await.unwrap_err().to_string();
        assert!(
            error.contains("4 workers") && error.contains("has room for 2"),
            "{error}"
        );
    }
    cluster.stop().await?;
    Ok(())
}

/// All workers of a node see the same 4 devices. (`gpu_ids` and `gpu_ids_num_workers`.)
#[tokio::test]
async fn gpu_ids() -> anyhow::Result<()> {
    let cluster = TestCluster::builder()
        .mode(Mode::InProcess)
        .slots(4)
        .gpus(4)
        .start()
        .await?;
    let driver = cluster.connect().await?;
    let builder = || {
        Executor::builder()
            .use_gpu(true)
            .gpus_per_worker(1)
            .output(Output::Silent)
    };
    for builder in [builder().workers(4), builder().hosts(1).slots(4)] {
        let executor = builder.start(&driver).await?;
        let seen = soon(executor.run(environment, ())).await?;
        let devices: Vec<&str> = seen[0]["CUDA_VISIBLE_DEVICES"].split(',').collect();
        assert_eq!(devices.iter().collect::<BTreeSet<_>>().len(), 4);
        for (rank, env) in seen.iter().enumerate() {
            assert_eq!(env["CUDA_VISIBLE_DEVICES"], seen[0]["CUDA_VISIBLE_DEVICES"]);
            assert_eq!(env["HOROVOD_LOCAL_RANK"], rank.to_string());
        }
        executor.shutdown().await?;
    }
    // Two for each worker, which trips an assertion there.
    let executor = Executor::builder()
        .workers(2)
        .use_gpu(true)
        .gpus_per_worker(2)
        .output(Output::Silent);
    let executor = executor.start(&driver).await?;
    assert_eq!(
        soon(executor.run(environment, ())).await?[1]["CUDA_VISIBLE_DEVICES"]
            .split(',')
            .count(),
        4
    );
    executor.shutdown().await?;
    // And none where no GPU is asked for.
    let executor = Executor::builder()
        .workers(1)
        .output(Output::Silent)
        .start(&driver)
        .await?;
    assert_eq!(
        soon(executor.run(environment, ())).await?[0]["CUDA_VISIBLE_DEVICES"],
        ""
    );
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

/// Numbers reach the environment as text.
#[tokio::test]
async fn horovod_mixin() -> anyhow::Result<()> {
    let (cluster, driver) = one_node(1).await?;
    let executor = Executor::builder()
        .workers(1)
        .env("NUMBER", 42.to_string())
        .output(Output::Silent);
    let executor = executor.start(&driver).await?;
    let env = soon(executor.run(environment, ())).await?.remove(0);
    assert_eq!(
        (
            env["NUMBER"].as_str(),
            env["HOROVOD_RANK"].as_str(),
            env["HOROVOD_SIZE"].as_str()
        ),
        ("42", "0", "1")
    );
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

/// All workers of one node have one hostname. Parametrized.
#[tokio::test]
async fn local() -> anyhow::Result<()> {
    let (cluster, driver) = one_node(8).await?;
    for executor in both(&driver, 1.0).await? {
        let names: BTreeSet<String> = soon(executor.run(environment, ()))
            .await?
            .into_iter()
            .map(|env| env["HOROVOD_HOSTNAME"].clone())
            .collect();
        assert_eq!(names.len(), 1);
        executor.shutdown().await?;
    }
    cluster.stop().await?;
    Ok(())
}

/// Four distinct ranks. Parametrized.
#[tokio::test]
async fn ray_init() -> anyhow::Result<()> {
    let (cluster, driver) = one_node(8).await?;
    for executor in both(&driver, 1.0).await? {
        assert_eq!(soon(executor.run(whoami, ())).await?, [0, 1, 2, 3]);
        executor.shutdown().await?;
    }
    cluster.stop().await?;
    Ok(())
}

#[kolo::function]
fn times(ctx: &Context, factor: usize, text: String) -> (usize, String) {
    (ctx.rank() * factor, text)
}

/// Arguments are passed. Parametrized.
#[tokio::test]
async fn exec_func() -> anyhow::Result<()> {
    let (cluster, driver) = one_node(8).await?;
    for executor in both(&driver, 1.0).await? {
        let seen = soon(executor.run(times, (10, "a".to_owned()))).await?;
        assert_eq!(seen, [0, 10, 20, 30].map(|n| (n, "a".to_owned())));
        executor.shutdown().await?;
    }
    cluster.stop().await?;
    Ok(())
}

/// One future for each rank, usable by itself. Parametrized.
#[tokio::test]
async fn exec_remote_func() -> anyhow::Result<()> {
    let (cluster, driver) = one_node(8).await?;
    for executor in both(&driver, 1.0).await? {
        let pending = executor.submit(times, (2, String::new()));
        assert_eq!(pending.len(), 4);
        for (rank, result) in pending.into_iter().enumerate().rev() {
            assert_eq!(soon(result).await?.0, 2 * rank);
        }
        executor.shutdown().await?;
    }
    cluster.stop().await?;
    Ok(())
}

#[derive(Serialize, Deserialize)]
struct Options {
    step: usize,
}

struct Executable {
    step: usize,
    rank: usize,
}

#[kolo::executable]
impl Executable {
    fn new(ctx: &Context, options: Options) -> Self {
        Self {
            step: options.step,
            rank: ctx.rank(),
        }
    }

    fn rank_steps(&self) -> usize {
        self.rank * self.step
    }
}

/// A stateful type with arguments: {0, 2, 4, 6}. Parametrized.
#[tokio::test]
async fn ray_executable() -> anyhow::Result<()> {
    let (cluster, driver) = one_node(8).await?;
    for executor in both(&driver, 1.0).await? {
        let object = soon(executor.create::<Executable>((Options { step: 2 },))).await?;
        assert_eq!(soon(object.rank_steps()).await?, [0, 2, 4, 6]);
        drop(object);
        executor.shutdown().await?;
    }
    cluster.stop().await?;
    Ok(())
}

#[kolo::function]
fn simple_fn(ctx: &Context) -> anyhow::Result<usize> {
    let mut ones = [1.0_f32; 8];
    ctx.comm().all_reduce(&mut ones, ReduceOp::Sum)?;
    anyhow::ensure!(ones == [ctx.world_size() as f32; 8], "the sum is {ones:?}");
    Ok(ctx.local_rank())
}

/// A collective on all: local ranks {0..3}. Parametrized.
#[tokio::test]
async fn horovod_train() -> anyhow::Result<()> {
    let (cluster, driver) = one_node(8).await?;
    for executor in both(&driver, 1.0).await? {
        assert_eq!(soon(executor.run(simple_fn, ())).await?, [0, 1, 2, 3]);
        executor.shutdown().await?;
    }
    cluster.stop().await?;
    Ok(())
}

/// What runs on a group uses the group's reservation and makes no other. (There: an existing placement group
/// is reused.)
#[tokio::test]
async fn train_in_pg() -> anyhow::Result<()> {
    let (cluster, driver) = one_node(4).await?;
    let executor = Executor::builder()
        .workers(4)
        .output(Output::Silent)
        .start(&driver)
        .await?;
    let before = cluster.status().await?;
    assert_eq!(before.nodes[0].available.cpus.as_f64(), 0.0);
    let object = soon(executor.create::<Executable>((Options { step: 1 },))).await?;
    assert_eq!(soon(executor.run(simple_fn, ())).await?, [0, 1, 2, 3]);
    let after = cluster.status().await?;
    assert_eq!(
        (after.running_jobs, &after.nodes[0].available),
        (1, &before.nodes[0].available)
    );
    drop(object);
    executor.shutdown().await?;
    let free = cluster
        .wait_until("the resources are back", |info| {
            info.nodes[0].available.cpus.as_f64() == 4.0
        })
        .await?;
    assert_eq!(free.running_jobs, 0);
    cluster.stop().await?;
    Ok(())
}

/// Through a connection to daemons in other processes.
#[tokio::test]
async fn remote_client_train() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().slots(4).start().await?;
    let driver = cluster.connect().await?;
    let executor = Executor::builder()
        .workers(4)
        .start_timeout(Duration::from_secs(60))
        .output(Output::Silent)
        .start(&driver)
        .await?;
    assert_eq!(soon(executor.run(simple_fn, ())).await?, [0, 1, 2, 3]);
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}
