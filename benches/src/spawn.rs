//! From `start()` to all workers ready, beside bare spawns of the same binary.

use std::time::Instant;

use kolo::prelude::*;

use crate::raw::child::RawChild;
use crate::raw::echo::HELLO;
use crate::report::Figure;
use crate::stats::median;

const SIZES: [u32; 2] = [4, 64];

/// All children started, then a hello awaited from each: what starting them costs at least.
fn bare(count: u32) -> anyhow::Result<f64> {
    let start = Instant::now();
    let mut children = (0..count)
        .map(|_| RawChild::spawn(HELLO, &[]))
        .collect::<anyhow::Result<Vec<_>>>()?;
    children.iter_mut().try_for_each(RawChild::wait_hello)?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

async fn kolo(cluster: &Cluster, count: u32) -> anyhow::Result<f64> {
    let start = Instant::now();
    let executor = Executor::builder().workers(count).start(cluster).await?;
    let time = start.elapsed().as_secs_f64() * 1e3;
    executor.shutdown().await?;
    Ok(time)
}

/// Measures both in turn, `rounds` times, on an idle local cluster of one node.
pub(crate) fn run(rounds: u32) -> anyhow::Result<Vec<Figure>> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let cluster = runtime.block_on(async {
        let cluster = LocalCluster::builder().nodes(1).slots(64).start().await?;
        kolo(&cluster, 1).await?; // the program is hashed once
        anyhow::Ok(cluster)
    })?;
    let mut figures = Vec::new();
    for size in SIZES {
        eprintln!("{size} workers");
        let (mut ours, mut bares) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            ours.push(runtime.block_on(kolo(&cluster, size))?);
            bares.push(bare(size)?);
        }
        let figure = Figure::new(
            "spawn",
            format!("{size} workers"),
            "p50",
            "ms",
            median(&ours),
        );
        figures.push(figure.beside("bare spawn", median(&bares)));
    }
    Ok(figures)
}
