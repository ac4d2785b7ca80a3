//! The rows of Horovod's `test/single/test_ray.py`, by name. Those in `parametrized` run with `num_workers=4` and with
//! `num_hosts=1, num_workers_per_host=4` there, and do so here.

use std::collections::{BTreeMap, BTreeSet};

use kolo::prelude::*;
use kolo_harness::{Mode, TestCluster};
use serde::{Deserialize, Serialize};

use crate::support::{environment, ranks, soon, whoami};

async fn one_node() -> anyhow::Result<(TestCluster, Cluster)> {
    let cluster = TestCluster::builder()
        .mode(Mode::InProcess)
        .slots(4)
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

/// `cross_rank`. 5, 4 and 3 workers: one rank has cross size 1, two have 2, nine have 3. Nodes are told apart by id, so
/// the same hostname on all makes no difference.
#[tokio::test]
async fn cross_rank_same_host() -> anyhow::Result<()> {
    let builder = TestCluster::builder().mode(Mode::InProcess).slots(5);
    let mut cluster = builder.hostnames(["host"; 3]).start().await?;
    cluster.add_node_with_slots(4).await?;
    cluster.add_node_with_slots(3).await?;
    let executor = Executor::builder().workers(12).output(Output::Silent);
    let executor = executor.start(&cluster.connect().await?).await?;
    let mut cross: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for [_, _, _, _, cross_rank, cross_size] in soon(executor.run(ranks, ())).await? {
        cross.entry(cross_size).or_default().push(cross_rank);
    }
    assert_eq!(cross[&1], [0]);
    let of_two: BTreeSet<usize> = cross[&2].iter().copied().collect();
    assert_eq!(of_two, BTreeSet::from([0, 1]));
    assert_eq!((cross[&2].len(), cross[&3].len()), (2, 9));
    executor.shutdown().await?;
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

#[kolo::function]
fn times(ctx: &Context, factor: usize, text: String) -> (usize, String) {
    (ctx.rank() * factor, text)
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

#[kolo::function]
fn simple_fn(ctx: &Context) -> anyhow::Result<usize> {
    let mut ones = [1.0_f32; 8];
    ctx.comm().all_reduce(&mut ones, ReduceOp::Sum)?;
    anyhow::ensure!(ones == [ctx.world_size() as f32; 8], "the sum is {ones:?}");
    Ok(ctx.local_rank())
}

/// The rows that run in both parametrizations.
#[tokio::test]
async fn parametrized() -> anyhow::Result<()> {
    let (cluster, driver) = one_node().await?;
    let builder = || Executor::builder().output(Output::Silent);
    for builder in [builder().workers(4), builder().hosts(1).slots(4)] {
        let executor = builder.start(&driver).await?;
        // `local`: all workers of one node have one hostname.
        let names: BTreeSet<String> = soon(executor.run(environment, ()))
            .await?
            .into_iter()
            .map(|env| env["HOROVOD_HOSTNAME"].clone())
            .collect();
        assert_eq!(names.len(), 1);
        // `ray_init`: four distinct ranks.
        assert_eq!(soon(executor.run(whoami, ())).await?, [0, 1, 2, 3]);
        // `exec_func`: arguments are passed.
        let seen = soon(executor.run(times, (10, "a".to_owned()))).await?;
        assert_eq!(seen, [0, 10, 20, 30].map(|n| (n, "a".to_owned())));
        // `exec_remote_func`: one future for each rank, usable by itself.
        let pending = executor.submit(times, (2, String::new()));
        assert_eq!(pending.len(), 4);
        for (rank, result) in pending.into_iter().enumerate().rev() {
            assert_eq!(soon(result).await?.0, 2 * rank);
        }
        // `ray_executable`: a stateful type with arguments.
        let object = soon(executor.create::<Executable>((Options { step: 2 },))).await?;
        assert_eq!(soon(object.rank_steps()).await?, [0, 2, 4, 6]);
        drop(object);
        // `horovod_train`: a collective on all.
        assert_eq!(soon(executor.run(simple_fn, ())).await?, [0, 1, 2, 3]);
        executor.shutdown().await?;
    }
    cluster.stop().await?;
    Ok(())
}

/// What runs on a group uses the group's reservation and makes no other. (There: an existing placement group
/// is reused.) `infeasible_placement`: twice as many are refused. (There it is a timeout of 5 s; here at once.)
#[tokio::test]
async fn train_in_pg() -> anyhow::Result<()> {
    let (cluster, driver) = one_node().await?;
    let builder = || Executor::builder().output(Output::Silent);
    for builder in [builder().workers(8), builder().hosts(1).slots(8)] {
        let error = soon(builder.start(&driver)).await.unwrap_err().to_string();
        for part in ["8 workers", "has room for 4"] {
            assert!(error.contains(part), "{error}");
        }
    }
    let executor = builder().workers(4).start(&driver).await?;
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
    let is_back = |info: &kolo::ClusterInfo| info.nodes[0].available.cpus.as_f64() == 4.0;
    let free = cluster
        .wait_until("the resources are back", is_back)
        .await?;
    assert_eq!(free.running_jobs, 0);
    cluster.stop().await?;
    Ok(())
}
