//! Four worker processes find the clusters in points that none of them has as a whole (k-means, with `ndarray`).
//!
//! ```text
//! cargo run --release --example kmeans
//! cargo run --release --example kmeans -- --workers 2 --points 2000000
//! ```
//!
//! Each rank makes its own points, as it would read its own files: none of them travel. In each round a rank assigns its points
//! to the nearest center and adds them up. One all-reduce of `CLUSTERS * (DIMENSIONS + 1)` numbers gives all ranks the sums of
//! all, and so the same new centers. The points are made around known centers, so the program can say how many it has told right.

// `pub` says here what other files of this program use.
#![allow(unreachable_pub)]

#[path = "../digits/rng.rs"]
#[allow(dead_code)]
mod rng;

use std::time::Instant;

use anyhow::ensure;
use clap::Parser;
use kolo::prelude::*;
use ndarray::{Array1, Array2, ArrayView1, Axis};
use serde::{Deserialize, Serialize};

use rng::Rng;

const CLUSTERS: usize = 8;
const DIMENSIONS: usize = 16;
const MOST_ROUNDS: u32 = 100;

/// Find the clusters in generated points, with one worker process per slot.
#[derive(Debug, Parser)]
struct Args {
    /// Workers in all.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    workers: u32,
    /// Points of all ranks together.
    #[arg(long, default_value_t = 200_000)]
    points: usize,
    /// Decides all points.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// What every rank knows at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Found {
    rounds: u32,
    /// Share of all points whose cluster is the one around which the point was made.
    accuracy: f64,
    /// The centers that were found, row by row: the same bits on all ranks.
    centers: Vec<f64>,
}

/// The rank's own points, and the number of the center around which each was made.
fn points(seed: u64, rank: usize, count: usize) -> (Array2<f64>, Vec<usize>) {
    let mut rng = Rng::new(seed);
    let centers =
        Array2::from_shape_simple_fn((CLUSTERS, DIMENSIONS), || 10.0 * f64::from(rng.uniform()));
    // Other numbers on each rank, around the same centers.
    let mut rng = Rng::new(seed ^ (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let made_of: Vec<usize> = (0..count).map(|point| point % CLUSTERS).collect();
    let mut points = centers.select(Axis(0), &made_of);
    // A sum of three uniform numbers is nearly normal.
    points.mapv_inplace(|at| at + (0..3).map(|_| f64::from(rng.uniform())).sum::<f64>());
    (points, made_of)
}

fn distance(a: ArrayView1<'_, f64>, b: ArrayView1<'_, f64>) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum()
}

fn nearest(point: ArrayView1<'_, f64>, centers: &Array2<f64>) -> usize {
    let distances = centers.outer_iter().map(|center| distance(point, center));
    let least = distances.enumerate().min_by(|a, b| a.1.total_cmp(&b.1));
    least.map_or(0, |(center, _)| center)
}

/// Points that lie far from each other: each is the one that is farthest from all before it.
fn first_centers(points: &Array2<f64>) -> Array2<f64> {
    let mut picked = vec![0];
    let mut far = Array1::from_elem(points.nrows(), f64::MAX);
    while picked.len() < CLUSTERS {
        let last = points.row(picked[picked.len() - 1]);
        far.zip_mut_with(
            &points.map_axis(Axis(1), |point| distance(point, last)),
            |far, new| *far = far.min(*new),
        );
        let farthest = far.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        picked.push(farthest.map_or(0, |(point, _)| point));
    }
    points.select(Axis(0), &picked)
}

#[kolo::function]
fn find(ctx: &Context, seed: u64, all_points: usize) -> anyhow::Result<Found> {
    let count = all_points / ctx.world_size();
    ensure!(
        count >= CLUSTERS,
        "{all_points} points are too few for {} ranks: each needs {CLUSTERS}",
        ctx.world_size()
    );
    let (points, made_of) = points(seed, ctx.rank(), count);

    // Rank 0 picks the first centers among its own points, and all begin with these.
    let mut first = vec![0.0; CLUSTERS * DIMENSIONS];
    if ctx.rank() == 0 {
        first = first_centers(&points).into_raw_vec_and_offset().0;
    }
    ctx.comm().broadcast(&mut first, Rank(0))?;
    let mut centers = Array2::from_shape_vec((CLUSTERS, DIMENSIONS), first)?;

    let mut rounds = 0;
    loop {
        rounds += 1;
        // In each row the sum of a cluster's points, and behind it their number.
        let mut sums = Array2::<f64>::zeros((CLUSTERS, DIMENSIONS + 1));
        for point in points.outer_iter() {
            let mut sum = sums.row_mut(nearest(point, &centers));
            sum.iter_mut()
                .zip(&point)
                .for_each(|(sum, value)| *sum += value);
            sum[DIMENSIONS] += 1.0;
        }
        let mut sums = sums.into_raw_vec_and_offset().0;
        ctx.comm().all_reduce(&mut sums, ReduceOp::Sum)?;

        let before = centers.clone();
        for (mut center, sum) in centers
            .outer_iter_mut()
            .zip(sums.chunks_exact(DIMENSIONS + 1))
        {
            // A cluster without points stays where it is.
            let (sum, points) = sum.split_at(DIMENSIONS);
            if points[0] > 0.0 {
                center
                    .iter_mut()
                    .zip(sum)
                    .for_each(|(at, sum)| *at = sum / points[0]);
            }
        }
        if centers == before || rounds == MOST_ROUNDS {
            break;
        }
    }

    Ok(Found {
        rounds,
        accuracy: accuracy(ctx, &points, &made_of, &centers)?,
        centers: centers.into_raw_vec_and_offset().0,
    })
}

/// The share of all points that are told right: those that were made around one center should be in one cluster.
fn accuracy(
    ctx: &Context,
    points: &Array2<f64>,
    made_of: &[usize],
    centers: &Array2<f64>,
) -> anyhow::Result<f64> {
    let mut table = vec![0_u64; CLUSTERS * CLUSTERS];
    for (point, made) in points.outer_iter().zip(made_of) {
        table[made * CLUSTERS + nearest(point, centers)] += 1;
    }
    ctx.comm().all_reduce(&mut table, ReduceOp::Sum)?;
    // A cluster stands for the center that most of its points were made around.
    let right: u64 = (0..CLUSTERS)
        .filter_map(|cluster| table.iter().skip(cluster).step_by(CLUSTERS).max())
        .sum();
    Ok(right as f64 / table.iter().sum::<u64>() as f64)
}

#[kolo::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let begun = Instant::now();
    let cluster = Cluster::connect_or_local().await?;
    let executor = Executor::builder()
        .workers(args.workers)
        .start(&cluster)
        .await?;
    let found = executor.run(find, (args.seed, args.points)).await?;
    executor.shutdown().await?;
    ensure!(
        found.windows(2).all(|pair| pair[0] == pair[1]),
        "the ranks have found other centers"
    );
    println!(
        "kmeans: accuracy={:.3} rounds={} clusters={CLUSTERS} points={} workers={} seconds={:.1}",
        found[0].accuracy,
        found[0].rounds,
        args.points,
        args.workers,
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}
