//! The changes of the cluster, one after the other.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use kolo::prelude::*;

use crate::report::Report;
use crate::rng::Rng;

/// How long the group learns between two changes.
const PAUSE: Duration = Duration::from_millis(300);

/// A change of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    KillWorker,
    /// All at once.
    KillAll,
    KillNode,
    AddNode,
}

/// The changes that are still to be made, and what has come of the others.
pub struct Script<'a> {
    pub executor: &'a Executor,
    pub report: &'a Report,
    pub rng: Rng,
    pub changes: VecDeque<Change>,
    pub nodes: u32,
    pub slots: u32,
    /// A file that says that all changes are made.
    pub end: PathBuf,
    pub lost: usize,
    pub joined: usize,
}

pub enum Never {}

impl Script<'_> {
    /// Makes one change after the other: the next one when the group is whole again and has learnt for a while.
    pub async fn play(&mut self) -> anyhow::Result<Never> {
        let mut generations = self.executor.generations();
        while let Some(change) = generations.next().await {
            let size = change.table.members.len();
            if change.before > 0 {
                self.lost += change.left.len();
                self.joined += change.joined.len();
            }
            if size != (self.nodes * self.slots) as usize {
                continue;
            }
            let Some(next) = self.changes.pop_front() else {
                std::fs::write(&self.end, "")?;
                continue;
            };
            // After the loss of all workers there must be a checkpoint.
            let durable = u64::from(next == Change::KillAll);
            let generation = change.table.generation.0;
            self.report
                .until(|now| now.generation >= generation && now.durable >= durable)
                .await;
            tokio::time::sleep(PAUSE).await;
            self.make(next).await?;
        }
        // The call of the training says why the group has ended.
        std::future::pending().await
    }

    async fn make(&mut self, change: Change) -> anyhow::Result<()> {
        let cluster = self.executor.cluster();
        let table = self.executor.table();
        let index = self.rng.permutation(table.members.len())[0];
        let member = &table.members[index];
        match change {
            Change::KillWorker | Change::KillAll => {
                let info = cluster.job(self.executor.job()).await?;
                let is_meant = |worker: &&kolo::WorkerInfo| {
                    change == Change::KillAll || worker.member.rank == member.rank
                };
                let meant: Vec<_> = info.workers.iter().filter(is_meant).collect();
                ensure!(
                    !meant.is_empty(),
                    "rank {} is not known to the head",
                    member.rank
                );
                let all: Vec<String> = meant
                    .iter()
                    .map(|worker| worker.member.rank.to_string())
                    .collect();
                println!("-- kill rank {}", all.join(", "));
                self.report.change();
                for worker in meant {
                    kill(worker.pid)?;
                }
            }
            Change::KillNode => {
                println!("-- kill node {} with rank {}", member.node, member.rank);
                self.nodes -= 1;
                self.report.change();
                cluster.kill_local_node(member.node).await?;
            }
            Change::AddNode => {
                println!("-- add a node");
                self.nodes += 1;
                self.report.change();
                cluster.add_local_node().await?;
            }
        }
        Ok(())
    }
}

fn kill(pid: u32) -> anyhow::Result<()> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let pid = pid.context("the worker has no process")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
    Ok(())
}
