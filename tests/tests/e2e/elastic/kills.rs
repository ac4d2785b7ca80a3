//! Many losses in a row.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kolo::prelude::*;
use kolo_harness::TestCluster;

use super::job::{Job, kill, pid_of, processes};
use crate::support::gone;

const KILLS: usize = 10;

/// What the open descriptors of a process are.
fn descriptors(pid: u32) -> anyhow::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd"))?;
    // One that was closed meanwhile is none.
    let links = entries
        .flatten()
        .map(|entry| std::fs::read_link(entry.path()));
    Ok(links.flatten().collect())
}

/// Descriptors that a daemon may hold for moments, fewer than what a leak at each kill of the second half would be.
const PASSING: usize = 3;

/// Waits until a daemon has no more descriptors than it had, but for some that pass.
async fn keeps(pid: u32, before: &[PathBuf]) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        let now = descriptors(pid)?;
        if now.len() <= before.len() + PASSING {
            return Ok(());
        }
        anyhow::ensure!(
            begun.elapsed() < Duration::from_secs(60),
            "before: {before:?}\nnow: {now:?}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn ten_workers_and_nodes_are_killed_in_a_row_and_nothing_is_lost_or_left()
-> anyhow::Result<()> {
    let mut cluster = TestCluster::builder().nodes(3).slots(2).start().await?;
    let builder = Executor::builder()
        .workers(1..=6)
        .restarts_without_progress(100);
    let mut job = Job::start(&cluster, builder, 6).await?;
    let id = job.executor.job();
    let first = job.watch.generations - 1;
    let mut formed = job.watch.generations;
    let joined_late = job.watch.joined;
    let mut seen: BTreeSet<u32> = processes(id).into_iter().collect();
    assert_eq!(seen.len(), 6);
    let daemons = [cluster.head_pid()?, cluster.node_pid(0)?];
    // In the first half.
    let mut most = [Vec::new(), Vec::new()];
    let mut lost = 0;
    for round in 0..KILLS {
        job.works().await;
        let rank = (round * 5) % 6;
        if round % 2 == 0 {
            let member = job.watch.table().members[rank].clone();
            let pid = pid_of(&cluster, id, &member).await?;
            kill(pid)?;
            gone(pid).await;
            lost += 1;
        } else {
            // Nodes 1 and 2 by turns: the daemon of node 0 sees all of it.
            cluster.restart_node(1 + round / 2 % 2).await?;
            lost += 2;
        }
        while job.watch.left < lost || job.watch.table().members.len() < 6 {
            job.watch.next().await;
            formed += 1;
        }
        seen.extend(processes(id));
        if round < KILLS / 2 {
            for (most, pid) in most.iter_mut().zip(daemons) {
                let now = descriptors(pid)?;
                if now.len() > most.len() {
                    *most = now;
                }
            }
        }
    }
    job.works().await;
    for (pid, before) in daemons.into_iter().zip(&most) {
        keeps(pid, before).await?;
    }
    let ended = job.end().await?;
    assert_eq!(ended.size, 6);
    assert_eq!(
        (ended.watch.left, ended.watch.joined),
        (lost, joined_late + lost)
    );
    // The call may have been made after some of the first.
    let worked = ended.outcome.generations;
    assert!(
        (formed - first..=formed).contains(&worked),
        "{worked} of {formed}"
    );
    // A kill costs one step at most.
    assert!(ended.outcome.steps_redone <= formed, "{:?}", ended.outcome);
    for pid in seen {
        gone(pid).await;
    }
    cluster.stop().await?;
    Ok(())
}
