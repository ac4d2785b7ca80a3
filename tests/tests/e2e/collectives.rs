//! Collectives among real worker processes, inside a node and between nodes.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use kolo::prelude::*;
use kolo_harness::TestCluster;

use crate::support::{soon, start, whoami};

/// Sums over every kind of length, broadcasts from every root, gathers, and a barrier.
#[kolo::function]
fn everything(ctx: &Context) -> anyhow::Result<u64> {
    let (rank, size) = (ctx.rank(), ctx.world_size());
    let comm = ctx.comm();
    let mut checked = 0;
    for len in [0, 1, 2, 3, 17, 1000, 70_001] {
        let mut sums: Vec<f64> = (0..len).map(|i| (rank * 1000 + i) as f64).collect();
        comm.all_reduce(&mut sums, ReduceOp::Sum)?;
        let base = (size * (size - 1) / 2 * 1000) as f64;
        anyhow::ensure!(
            sums.iter()
                .enumerate()
                .all(|(i, sum)| *sum == base + (size * i) as f64)
        );

        let mut largest: Vec<i32> = (0..len).map(|i| (rank + i) as i32).collect();
        comm.all_reduce(&mut largest, ReduceOp::Max)?;
        anyhow::ensure!(
            largest
                .iter()
                .enumerate()
                .all(|(i, max)| *max == (size - 1 + i) as i32)
        );

        for root in 0..size {
            let mut values = vec![if rank == root { root as i64 + 5 } else { -1 }; len];
            comm.broadcast(&mut values, Rank(root as u32))?;
            anyhow::ensure!(values.iter().all(|value| *value == root as i64 + 5));
        }

        let gathered = comm.all_gather(&vec![rank as f32; len])?;
        anyhow::ensure!(
            gathered
                == (0..size)
                    .flat_map(|r| vec![r as f32; len])
                    .collect::<Vec<_>>()
        );
        comm.barrier()?;
        checked += 1;
    }
    Ok(checked)
}

/// Over which lanes the last operation went.
#[kolo::function]
fn lanes(ctx: &Context) -> anyhow::Result<String> {
    ctx.comm().barrier()?;
    ctx.comm().barrier()?;
    let records = ctx.comm().records();
    Ok(records
        .last()
        .map_or_else(String::new, |record| record.lanes.to_string()))
}

/// Two ranks that are linked already get links of their own in groups, for names and for messages, several at once.
#[kolo::function]
async fn many_links(ctx: &Context) -> anyhow::Result<u32> {
    let (comm, me) = (ctx.comm(), ctx.rank() as u32);
    comm.barrier()?;
    let all: Vec<u32> = (0..comm.world_size()).collect();
    let groups = [ctx.local()?.clone(), comm.local()?, comm.local()?];
    let gathers: Vec<_> = groups
        .iter()
        .map(|group| group.start().all_gather(vec![me]))
        .collect();
    let named = comm.named("one").all_reduce(vec![me], ReduceOp::Max);
    for gather in gathers {
        anyhow::ensure!(gather.await? == all);
    }
    Ok(named.await?[0])
}

/// A sum inside each node, then across nodes, then inside again. Returns the members of both groups, too.
#[kolo::function]
fn by_levels(ctx: &Context) -> anyhow::Result<(Vec<u32>, Vec<u32>, u64)> {
    let (local, cross) = (ctx.local()?, ctx.cross()?);
    anyhow::ensure!(local.rank().index() == ctx.local_rank());
    anyhow::ensure!(local.world_size() as usize == ctx.local_size());
    anyhow::ensure!(cross.rank().index() == ctx.cross_rank());
    anyhow::ensure!(cross.world_size() as usize == ctx.cross_size());
    let mut data = vec![ctx.rank() as u64 + 1; 10_000];
    local.reduce(&mut data, ReduceOp::Sum, kolo::Rank(0))?;
    if ctx.local_rank() == 0 {
        cross.all_reduce(&mut data, ReduceOp::Sum)?;
    }
    local.broadcast(&mut data, kolo::Rank(0))?;
    anyhow::ensure!(data.iter().all(|value| *value == data[0]));
    // The same groups again, not new ones.
    anyhow::ensure!(ctx.local()?.group_id() == local.group_id());
    let numbers = |members: Vec<kolo::Rank>| members.into_iter().map(|rank| rank.0).collect();
    Ok((numbers(local.members()), numbers(cross.members()), data[0]))
}

#[kolo::function]
fn sum_unless(ctx: &Context, rank: usize) -> anyhow::Result<f32> {
    anyhow::ensure!(ctx.rank() != rank, "rank {rank} does not come");
    let mut value = [1.0_f32];
    ctx.comm().all_reduce(&mut value, ReduceOp::Sum)?;
    Ok(value[0])
}

#[kolo::function]
fn disagree(ctx: &Context) -> anyhow::Result<()> {
    let mut values = vec![1.0_f32; 4 + ctx.rank()];
    Ok(ctx.comm().all_reduce(&mut values, ReduceOp::Sum)?)
}

#[tokio::test]
async fn groups_of_every_shape_do_collectives() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().nodes(3).slots(3).start().await?;
    for (hosts, slots) in [(1, 1), (1, 3), (2, 2), (3, 1)] {
        let size = (hosts * slots) as usize;
        let executor = start(&cluster, hosts, slots).await?;
        assert_eq!(soon(executor.run(everything, ())).await?, vec![7; size]);
        // Workers of one node share memory; workers of two nodes do not, even if these are on one host.
        if slots == 3 || hosts == 3 {
            for lanes in soon(executor.run(lanes, ())).await? {
                assert_eq!(lanes == "shm", hosts == 1, "{lanes}");
            }
        }
        // In a second call, too: groups stay, and calls number their operations anew.
        if slots == 3 {
            for _ in 0..2 {
                assert_eq!(soon(executor.run(many_links, ())).await?, [2; 3]);
            }
        }
        if slots == 2 {
            a_rank_that_fails_ends_the_wait_of_the_others(&executor).await?;
        }
        executor.shutdown().await?;
    }
    let executor = start(&cluster, 2, 3).await?;
    for _ in 0..2 {
        let seen = soon(executor.run(by_levels, ())).await?;
        for (rank, (local, cross, sum)) in (0..).zip(seen) {
            let mates: [u32; 3] = if rank < 3 { [0, 1, 2] } else { [3, 4, 5] };
            assert_eq!(local, mates);
            assert_eq!(cross, [rank % 3, rank % 3 + 3]);
            assert_eq!(sum, 21);
        }
    }
    executor.shutdown().await?;

    let executor = start(&cluster, 1, 2).await?;
    for result in executor.submit(disagree, ()) {
        let error = soon(result).await.unwrap_err().to_string();
        assert!(error.contains('4') && error.contains('5'), "{error}");
    }
    assert_eq!(soon(executor.run(whoami, ())).await?, [0, 1]);
    assert_eq!(soon(executor.run(sum_unless, (99,))).await?, [2.0; 2]);
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

/// One rank's function fails before its collective: the others are not left to wait, the error is that rank's, and the next call works.
async fn a_rank_that_fails_ends_the_wait_of_the_others(four: &Executor) -> anyhow::Result<()> {
    assert_eq!(soon(four.run(sum_unless, (99,))).await?, [4.0; 4]);
    let error = soon(four.run(sum_unless, (2,))).await.unwrap_err();
    assert_eq!(error.rank(), Some(Rank(2)), "{error}");
    let text = error.to_string();
    assert!(text.contains("rank 2 does not come"), "{text}");
    let echoes = four.submit(sum_unless, (1,));
    assert_eq!(echoes.len(), 4);
    for (rank, result) in echoes.into_iter().enumerate() {
        let error = soon(result).await.unwrap_err().to_string();
        assert!(error.contains("rank 1"), "rank {rank}: {error}");
    }
    assert_eq!(soon(four.run(sum_unless, (99,))).await?, [4.0; 4]);
    Ok(())
}
