//! The end of a job while its ranks wait for each other: they hear of it at once.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::time::Duration;

use kolo::prelude::*;
use kolo_harness::TestCluster;
use kolo_transport::ids::JobId;
use kolo_transport::wire::{Exit, JobInfo};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{gone, pid, soon};

/// Nobody waits so long: who is not through with its collective when it gets the notice holds up the job's end beyond what
/// [`soon`] has patience for.
const GRACE: Duration = Duration::from_secs(900);

#[kolo::function]
fn sum(ctx: &Context) -> anyhow::Result<f64> {
    let mut sum = [ctx.rank() as f64];
    ctx.comm().set_timeout(GRACE);
    ctx.comm().all_reduce(&mut sum, ReduceOp::Sum)?;
    Ok(sum[0])
}

/// Rank 0 is through at once, so that none of this can end.
#[kolo::function]
fn waits_in_vain(ctx: &Context, what: String) -> anyhow::Result<()> {
    let comm = ctx.comm();
    comm.set_timeout(GRACE);
    if ctx.rank() == 0 {
        return Ok(());
    }
    match what.as_str() {
        "the world" => comm.barrier()?,
        // Ranks 1 and 3 wait for 0 and 2 on their nodes.
        "a node" if ctx.local_rank() == 1 => ctx.local()?.clone().with_timeout(GRACE).barrier()?,
        "across nodes" if ctx.cross_rank() == 1 && ctx.local_rank() == 0 => {
            ctx.cross()?.clone().with_timeout(GRACE).barrier()?;
        }
        "a message" => drop(comm.receive::<u8>(Rank(0))?),
        "a name" => drop(
            comm.named("sum")
                .all_reduce(vec![1], ReduceOp::Sum)
                .wait()?,
        ),
        "handles" => {
            let start = |_| comm.start().all_reduce(vec![1], ReduceOp::Sum);
            let handles: Vec<_> = (0..100).map(start).collect();
            for handle in handles {
                handle.wait()?;
            }
        }
        _ => {}
    }
    Ok(())
}

async fn cluster() -> anyhow::Result<(TestCluster, Cluster)> {
    let cluster = TestCluster::builder().nodes(2).slots(2).start().await?;
    let driver = cluster.connect().await?;
    Ok((cluster, driver))
}

async fn four(driver: &Cluster) -> anyhow::Result<Executor> {
    let executor = Executor::builder().hosts(2).slots(2).grace(GRACE);
    Ok(executor.output(Output::Silent).start(driver).await?)
}

/// All workers but the one that was killed have ended by themselves, as the notice asks them to.
async fn by_notice(cluster: &TestCluster, job: JobId, killed: Option<Rank>) -> anyhow::Result<()> {
    let has_ended = |jobs: &[JobInfo]| {
        jobs.iter()
            .any(|one| one.job == job && one.state.is_final())
    };
    cluster
        .wait_for_jobs("the job has ended", has_ended)
        .await?;
    for worker in cluster.job(job).await?.workers {
        if Some(worker.member.rank) != killed {
            assert_eq!(worker.exit, Some(Exit::Code(0)), "{worker:?}");
        }
    }
    Ok(())
}

/// A rank is killed at some moment of the first call, in which links are made, and the driver ends the job because of it: the
/// notice is often with the other node before the news of the loss.
#[tokio::test]
async fn nobody_waits_out_the_grace_when_a_rank_is_killed_in_the_first_call() -> anyhow::Result<()>
{
    let (cluster, driver) = cluster().await?;
    for round in 0..8_u32 {
        let executor = soon(four(&driver)).await?;
        let victim = Rank(round % 4);
        let pids: Vec<u32> = {
            let info = cluster.job(executor.job()).await?;
            info.workers.iter().map(|worker| worker.pid).collect()
        };
        let call = executor.run(sum, ()).submit();
        tokio::time::sleep(Duration::from_micros(500) * (round / 4)).await;
        let process = Pid::from_raw(pids[victim.index()].try_into()?).unwrap();
        kill_process(process, Signal::KILL)?;
        if round % 2 == 0 {
            // As a program does that has the error.
            for result in call {
                soon(result).await.ok();
            }
        }
        // Not well, for it has lost a worker.
        soon(executor.shutdown()).await.ok();
        for pid in pids {
            gone(pid).await;
        }
        by_notice(&cluster, executor.job(), Some(victim)).await?;
    }
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn every_end_of_a_job_ends_the_collectives_that_its_ranks_wait_in() -> anyhow::Result<()> {
    let (cluster, driver) = cluster().await?;
    let waits = [
        "the world",
        "a node",
        "across nodes",
        "a message",
        "a name",
        "handles",
    ];
    for (round, what) in waits.into_iter().enumerate() {
        let executor = soon(four(&driver)).await?;
        let pids = soon(executor.run(pid, ())).await?;
        let mut call = executor
            .run(waits_in_vain, (what.to_owned(),))
            .submit()
            .into_iter();
        // The others have begun, or will begin after the notice, in which case they don't.
        soon(call.next().unwrap()).await?;
        let job = executor.job();
        match round % 3 {
            0 => drop(executor),
            1 => drop(soon(executor.shutdown()).await?),
            _ => {
                let mut kolo = cluster.kolo()?;
                kolo.args(["stop", &job.to_string()]);
                let stopping = tokio::task::spawn_blocking(move || kolo.output());
                let output = soon(stopping).await??;
                assert!(output.status.success(), "{output:?}");
            }
        }
        for pid in pids {
            gone(pid).await;
        }
        by_notice(&cluster, job, None).await?;
        for (rank, result) in (1..).zip(call) {
            // A rank that had nothing to wait for has its result, the others say why.
            if let Err(error) = soon(result).await {
                let text = error.to_string();
                assert!(!text.contains("SIG"), "{what}, rank {rank}: {text}");
            }
        }
    }
    cluster.stop().await?;
    Ok(())
}
