//! Jobs side by side, and what a start refuses.

use std::time::Duration;

use kolo::prelude::*;
use kolo_harness::{Mode, TestCluster};

use crate::support::{environment, soon, whoami};

#[tokio::test]
async fn two_jobs_at_once_hold_disjoint_resources() -> anyhow::Result<()> {
    let cluster = TestCluster::builder()
        .nodes(2)
        .slots(2)
        .gpus(2)
        .start()
        .await?;
    let driver = cluster.connect().await?;
    let builder = || {
        Executor::builder()
            .hosts(2)
            .slots(1)
            .use_gpu(true)
            .output(Output::Silent)
    };
    let (first, second) = tokio::join!(builder().start(&driver), builder().start(&driver));
    let (first, second) = (first?, second?);
    let devices = |envs: Vec<std::collections::BTreeMap<String, String>>| {
        envs.into_iter()
            .map(|env| env["CUDA_VISIBLE_DEVICES"].clone())
            .collect::<Vec<_>>()
    };
    let (ours, theirs) = (
        devices(soon(first.run(environment, ())).await?),
        devices(soon(second.run(environment, ())).await?),
    );
    for (mine, other) in ours.iter().zip(&theirs) {
        assert_ne!(mine, other, "the same device on one node");
    }
    let third = soon(builder().start(&driver)).await;
    assert!(third.is_err(), "nothing is left for a third job");
    second.shutdown().await?;
    assert_eq!(soon(first.run(whoami, ())).await?, [0, 1]);
    first.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_before_anything_starts() -> anyhow::Result<()> {
    let cluster = TestCluster::builder()
        .mode(Mode::InProcess)
        .slots(2)
        .start()
        .await?;
    let driver = cluster.connect().await?;
    let builder = || Executor::builder().output(Output::Silent);
    for (what, bad) in [
        ("nothing asked for", builder()),
        ("both ways", builder().workers(2).hosts(1)),
        ("no workers", builder().workers(0)),
        ("no hosts", builder().hosts(0).slots(1)),
        ("too many", builder().hosts(u32::MAX).slots(u32::MAX)),
        ("NaN", builder().workers(1).cpus_per_worker(f64::NAN)),
        ("negative", builder().workers(1).cpus_per_worker(-1.0)),
        (
            "infinite",
            builder().workers(1).resource("fpga", f64::INFINITY),
        ),
        (
            "gpus without use_gpu",
            builder().workers(1).gpus_per_worker(1),
        ),
        (
            "no gpu with use_gpu",
            builder().workers(1).use_gpu(true).gpus_per_worker(0),
        ),
        ("a variable's name", builder().workers(1).env("A=B", "c")),
    ] {
        let error = soon(bad.start(&driver))
            .await
            .err()
            .unwrap_or_else(|| panic!("{what} must be refused"));
        assert!(!error.is_retryable(), "{what}: {error}");
    }
    assert_eq!(cluster.status().await?.running_jobs, 0);
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn output_comes_with_rank_and_stream() -> anyhow::Result<()> {
    #[kolo::function]
    fn speak(ctx: &Context) {
        println!("out of {}", ctx.rank());
        eprintln!("err of {}", ctx.rank());
    }
    let cluster = TestCluster::builder().nodes(2).slots(1).start().await?;
    let (sender, mut lines) = tokio::sync::mpsc::unbounded_channel();
    let output = Output::callback(move |line| {
        // The test may have ended; then nobody wants it.
        drop(sender.send((
            line.rank,
            line.stream,
            String::from_utf8_lossy(&line.text).into_owned(),
        )));
    });
    let executor = Executor::builder()
        .workers(2)
        .output(output)
        .start(&cluster.connect().await?)
        .await?;
    soon(executor.run(speak, ())).await?;
    let mut seen = Vec::new();
    while seen.len() < 4 {
        seen.push(soon(lines.recv()).await.expect("the lines end"));
    }
    seen.sort_by_key(|(rank, stream, _)| (*rank, *stream == Stdio::Stderr));
    let expected: Vec<_> = (0..2)
        .flat_map(|rank| {
            [
                (Rank(rank), Stdio::Stdout, format!("out of {rank}")),
                (Rank(rank), Stdio::Stderr, format!("err of {rank}")),
            ]
        })
        .collect();
    assert_eq!(seen, expected);
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn a_start_timeout_names_the_ranks_that_did_not_come() -> anyhow::Result<()> {
    let cluster = TestCluster::builder()
        .nodes(2)
        .slots(1)
        .lease(Duration::from_secs(60))
        .start()
        .await?;
    let driver = cluster.connect().await?;
    cluster.pause_node(1)?;
    let executor = Executor::builder()
        .hosts(2)
        .slots(1)
        .start_timeout(Duration::from_secs(2))
        .output(Output::Silent);
    let error = soon(executor.start(&driver))
        .await
        .map(drop)
        .expect_err("one node is silent");
    assert!(error.is_retryable(), "{error}");
    cluster.resume_node(1)?;
    // Nothing may stay reserved on the node that did answer, nor on the one that comes late (G-2).
    cluster
        .wait_until("all is free again", |info| {
            info.running_jobs == 0 && info.nodes.iter().all(|node| node.available == node.total)
        })
        .await?;
    cluster.stop().await?;
    Ok(())
}

#[kolo::function]
fn sums(ctx: &Context, rounds: usize) -> anyhow::Result<()> {
    for _ in 0..rounds {
        ctx.comm().all_reduce(&mut [1.0_f32], ReduceOp::Sum)?;
    }
    Ok(())
}

/// Whatever the ranks are at when the notice comes, between two calls or in one that would never end: it is the
/// stop that is told, and not the first worker that followed it. The program is sent to each node once.
#[tokio::test]
async fn a_job_that_is_stopped_by_somebody_else_says_so() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().nodes(0).slots(2);
    let mut cluster = cluster.start().await?;
    for _ in 0..2 {
        // Added, and so without the program.
        cluster.add_node().await?;
    }
    for rounds in [10, usize::MAX] {
        let executor = Executor::builder()
            .hosts(2)
            .slots(2)
            .grace(Duration::from_secs(3))
            .output(Output::Silent)
            .start(&cluster.connect().await?)
            .await?;
        soon(executor.run(sums, (10,))).await?;
        let other = cluster.connect().await?;
        let calls = async {
            loop {
                if let Err(error) = executor.run(sums, (rounds,)).await {
                    break error;
                }
            }
        };
        let (error, stopped) =
            soon(async { tokio::join!(calls, other.stop_job(executor.job())) }).await;
        stopped?;
        let later = soon(executor.run(sums, (1,))).await.unwrap_err();
        for error in [error, later] {
            assert_eq!(error.kind(), CallErrorKind::Ended, "{error}");
            let text = error.to_string();
            assert!(text.contains("the job was stopped: "), "{text}");
        }
        soon(executor.ended()).await;
    }
    let logs = cluster.logs();
    let uploads = logs
        .iter()
        .map(|(_, log)| log.matches("a program has come").count());
    assert_eq!(uploads.sum::<usize>(), 2, "one for each node");
    cluster.stop().await?;
    Ok(())
}
