//! Many losses in a row.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kolo::prelude::*;
use kolo_harness::TestCluster;

use super::job::{Job, kill, pid_of, processes};
use crate::support::gone;

/// `KOLO_TEST_KILLS=300` in the environment makes more of them.
const KILLS: usize = 8;

/// What a daemon holds.
#[derive(Debug, Default)]
struct Held {
    descriptors: Vec<PathBuf>,
    kib: u64,
}

impl Held {
    fn of(pid: u32) -> anyhow::Result<Self> {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd"))?;
        // One that was closed meanwhile is none.
        let links = entries
            .flatten()
            .map(|entry| std::fs::read_link(entry.path()));
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = resident.and_then(|text| text.trim().strip_suffix(" kB")?.parse().ok());
        Ok(Self {
            descriptors: links.flatten().collect(),
            kib: kib.ok_or_else(|| anyhow::anyhow!("a process has a size: {status}"))?,
        })
    }

    /// Takes over what is more in another one.
    fn grow(&mut self, other: Self) {
        if other.descriptors.len() > self.descriptors.len() {
            self.descriptors = other.descriptors;
        }
        self.kib = self.kib.max(other.kib);
    }
}

/// Descriptors that a daemon may hold for moments, fewer than what a leak at each kill of the second half would be.
const PASSING: usize = 3;
/// Memory that a daemon may have more in the second half than it had in the first.
const SLACK_KIB: u64 = 4096;

/// Waits until a daemon has no more descriptors than it had, but for some that pass. It has not much more memory then.
async fn keeps(pid: u32, before: &Held) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        let now = Held::of(pid)?;
        if now.descriptors.len() <= before.descriptors.len() + PASSING {
            println!(
                "process {pid} has {} descriptors and {} KiB, and had {} and {} KiB in the first half",
                now.descriptors.len(),
                now.kib,
                before.descriptors.len(),
                before.kib
            );
            anyhow::ensure!(now.kib <= before.kib + SLACK_KIB, "{before:?} {now:?}");
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
async fn workers_and_nodes_are_killed_in_a_row_and_nothing_is_lost_or_left() -> anyhow::Result<()> {
    let kills = match std::env::var("KOLO_TEST_KILLS") {
        Ok(given) => given.parse()?,
        Err(_) => KILLS,
    };
    let begun = Instant::now();
    let mut cluster = TestCluster::builder().nodes(3).slots(2).start().await?;
    let builder = Executor::builder()
        .workers(1..=6)
        .restarts_without_progress(100);
    let mut job = Job::start(&cluster, builder, 6).await?;
    let id = job.executor.job();
    let first = job.watch.generations - 1;
    let mut formed = job.watch.generations;
    let joined_late = job.watch.joined;
    assert_eq!(processes(id).len(), 6);
    let daemons = [cluster.head_pid()?, cluster.node_pid(0)?];
    // In the first half.
    let mut most = [Held::default(), Held::default()];
    let mut lost = 0;
    for round in 0..kills {
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
        if round < kills / 2 {
            for (most, pid) in most.iter_mut().zip(daemons) {
                most.grow(Held::of(pid)?);
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
    println!(
        "kills={kills} generations={formed} lost={lost} samples=exact steps={} steps_redone={} seconds={:.0}",
        ended.outcome.steps,
        ended.outcome.steps_redone,
        begun.elapsed().as_secs_f64()
    );
    cluster.stop().await?;
    Ok(())
}
