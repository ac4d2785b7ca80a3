//! Generations: which one is present here, and which workers have said to be in it.

use std::collections::BTreeMap;
use std::sync::Arc;

use kolo_wire::ids::{Generation, Rank, Slot};
use kolo_wire::{
    FailedOperation, GenerationTable, Kept, NodeEvent, OnChange, RankFailure, Refusal, RefusalKind,
    ToWorker,
};

use super::{Colocator, Phase, SlotState, refuse};
use crate::node::messages::{Output, WorkerId};

/// Longest words of a worker about an operation that failed, in characters.
const MAX_WORDS: usize = 256;

impl Colocator {
    /// A generation is complete. All workers that have said hello are told; in an elastic job not again if they have taken it.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Stale`] if it is older than the newest one or has a process that another one has followed, others if it
    /// does not fit this job.
    pub fn membership(
        &mut self,
        table: impl Into<Arc<GenerationTable>>,
    ) -> Result<Vec<Output>, Refusal> {
        let table = table.into();
        if self.phase != Phase::Running {
            return refuse(RefusalKind::Stopped, self.over());
        }
        if table.job != self.job {
            return refuse(
                RefusalKind::Invalid,
                format!("{} is not {}", table.job, self.job),
            );
        }
        if table.generation < self.generation {
            return refuse(RefusalKind::Stale, self.stale(table.generation));
        }
        let ranks = self.ranks_here(&table)?;
        if table.generation > self.generation {
            self.generation = table.generation;
            self.losses.clear();
        }
        self.ranks.clear();
        for (rank, slot) in ranks {
            if let Some(entry) = self.slots.get_mut(&slot) {
                entry.rank = rank;
                if entry.is_present() {
                    self.ranks.insert(rank, slot);
                }
            }
        }
        let mut outputs = vec![Output::Complete(table.clone())];
        let elastic = self.is_elastic();
        let is_told = |entry: &&super::Entry| {
            entry.listens() && !(elastic && entry.taken == table.generation)
        };
        let told = self.slots.values().filter(is_told);
        let message = ToWorker::Membership(table.clone());
        outputs.extend(told.map(|entry| Output::Tell(entry.worker, message.clone())));
        self.table = elastic.then_some(table);
        Ok(outputs)
    }

    /// The slots of a table's ranks on this node.
    fn ranks_here(&self, table: &GenerationTable) -> Result<BTreeMap<Rank, Slot>, Refusal> {
        let mut ranks = BTreeMap::new();
        for (index, member) in table.members.iter().enumerate() {
            if member.rank.index() != index {
                return refuse(
                    RefusalKind::Invalid,
                    format!("member {index} of the table has rank {}", member.rank),
                );
            }
            if member.node != self.here.node {
                continue;
            }
            let Some(entry) = self.slots.get(&member.slot) else {
                return refuse(
                    RefusalKind::Invalid,
                    format!("slot {} was not started on this node", member.slot),
                );
            };
            let newest = entry.worker.incarnation;
            if member.incarnation != newest {
                return refuse(
                    RefusalKind::Stale,
                    format!(
                        "the table has process {} of slot {}, and process {newest} is the newest one on this node",
                        member.incarnation, member.slot
                    ),
                );
            }
            ranks.insert(member.rank, member.slot);
        }
        Ok(ranks)
    }

    /// A rank is gone on some node. Callers hear of the loss from that node.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Stale`] if it is of another generation.
    pub fn rank_lost(
        &mut self,
        generation: Generation,
        failure: RankFailure,
    ) -> Result<Vec<Output>, Refusal> {
        if generation != self.generation {
            return refuse(RefusalKind::Stale, self.stale(generation));
        }
        let mut outputs = Vec::new();
        self.lose(failure, &mut outputs);
        Ok(outputs)
    }

    pub(super) fn stale(&self, given: Generation) -> String {
        format!(
            "generation {given} of {} is not the current one, {}",
            self.job, self.generation
        )
    }

    /// Passes something on to the members of a generation here. Nobody is left in one that is not the newest.
    pub fn tell_members(&self, generation: Generation, message: &ToWorker) -> Vec<Output> {
        if generation != self.generation {
            return Vec::new();
        }
        let members = self.ranks.values().filter_map(|slot| self.slots.get(slot));
        members
            .filter(|entry| entry.listens())
            .map(|entry| Output::Tell(entry.worker, message.clone()))
            .collect()
    }

    /// A generation is over. Its members are told, or lose their connections to each other if they can't be told: Horovod's know no
    /// generation here, and the head lets none into a later one before the answer.
    pub fn revoke(&self, generation: Generation, message: &ToWorker) -> Vec<Output> {
        let mut outputs = self.tell_members(generation, message);
        let cut = self.slots.values().filter(|entry| {
            entry.state == SlotState::Running && entry.start.on_change == OnChange::Horovod
        });
        let pids: Vec<u32> = cut.map(|entry| entry.pid).collect();
        if !pids.is_empty() {
            outputs.push(Output::HangUp { pids });
        }
        outputs
    }

    /// A worker has taken a generation. It takes only what it was told.
    pub(super) fn taken(&mut self, worker: WorkerId, generation: Generation) -> Result<(), String> {
        let newest = self.generation;
        let Some(entry) = self.entry_mut(worker).filter(|_| generation <= newest) else {
            return Err(unknown(generation));
        };
        // Those that it was told before come late, in order.
        entry.taken = entry.taken.max(generation);
        self.reports.push(NodeEvent::Taken {
            job: worker.stay.job,
            slot: worker.slot,
            incarnation: worker.incarnation,
            generation,
        });
        Ok(())
    }

    /// A worker has a commit in a generation.
    pub(super) fn committed(
        &mut self,
        worker: WorkerId,
        (generation, commit): (Generation, u64),
        kept: Kept,
    ) -> Result<(), String> {
        if generation > self.generation {
            return Err(unknown(generation));
        }
        self.reports.push(NodeEvent::Committed {
            job: worker.stay.job,
            slot: worker.slot,
            incarnation: worker.incarnation,
            generation,
            commit,
            kept,
        });
        Ok(())
    }

    /// A worker waits for the generation after this one, at a commit.
    pub(super) fn holds(
        &mut self,
        worker: WorkerId,
        (generation, commit): (Generation, u64),
        mut failed: Option<FailedOperation>,
    ) -> Result<(), String> {
        if generation > self.generation {
            return Err(unknown(generation));
        }
        if let Some(failed) = &mut failed {
            failed.reason = failed.reason.chars().take(MAX_WORDS).collect();
        }
        self.reports.push(NodeEvent::Holding {
            job: worker.stay.job,
            slot: worker.slot,
            incarnation: worker.incarnation,
            generation,
            commit,
            failed,
        });
        Ok(())
    }
}

fn unknown(generation: Generation) -> String {
    format!("it spoke of generation {generation}, of which it was never told")
}
