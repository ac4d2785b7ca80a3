//! Generations: which one is present here, and which workers have said to be in it.

use std::collections::BTreeMap;
use std::sync::Arc;

use kolo_wire::ids::{Generation, NodeId, Rank, Slot};
use kolo_wire::{
    FailedOperation, GenerationTable, Kept, NodeEvent, OnChange, RankFailure, Refusal, RefusalKind,
    ToWorker,
};

use super::entry::Slots;
use super::{SlotState, refuse};
use crate::node::messages::{Output, Stay, WorkerId};

/// Longest words of a worker about an operation that failed, in characters.
const MAX_WORDS: usize = 256;

/// The newest generation, as far as it is known here.
#[derive(Debug)]
pub(super) struct Present {
    stay: Stay,
    /// Its number; 0 before the first one of an elastic job.
    pub(super) number: Generation,
    /// Its table, once that is here; not of a static job.
    table: Option<Arc<GenerationTable>>,
    /// The slot of each of its ranks on this node whose process has not ended.
    pub(super) ranks: BTreeMap<Rank, Slot>,
    /// Ranks that are gone, on any node.
    losses: BTreeMap<Rank, RankFailure>,
}

impl Present {
    pub(super) fn new(stay: Stay) -> Self {
        Self {
            stay,
            number: Generation(0),
            table: None,
            ranks: BTreeMap::new(),
            losses: BTreeMap::new(),
        }
    }

    /// A generation is complete. All workers that have said hello are told; in an elastic job not again if they have taken it.
    pub(super) fn complete(
        &mut self,
        table: Arc<GenerationTable>,
        node: NodeId,
        slots: &mut Slots,
        elastic: bool,
    ) -> Result<Vec<Output>, Refusal> {
        if table.generation < self.number {
            return self.stale(table.generation);
        }
        let ranks = ranks_on(&table, node, slots)?;
        if table.generation > self.number {
            self.number = table.generation;
            self.losses.clear();
        }
        self.ranks.clear();
        for (rank, slot) in ranks {
            if let Some(entry) = slots.get_mut(&slot) {
                entry.rank = rank;
                if entry.is_present() {
                    self.ranks.insert(rank, slot);
                }
            }
        }
        let mut outputs = vec![Output::Complete(table.clone())];
        let told = slots
            .values()
            .filter(|entry| entry.listens() && !(elastic && entry.taken == table.generation));
        let message = ToWorker::Membership(table.clone());
        outputs.extend(told.map(|entry| Output::Tell(entry.worker, message.clone())));
        self.table = elastic.then_some(table);
        Ok(outputs)
    }

    /// A rank is gone. What workers are to be told of it, once and without last words.
    pub(super) fn lose(&mut self, mut failure: RankFailure) -> Option<ToWorker> {
        if self.losses.contains_key(&failure.rank) {
            return None;
        }
        failure.stderr_tail.clear();
        self.losses.insert(failure.rank, failure.clone());
        let generation = self.number;
        Some(ToWorker::RankLost {
            generation,
            failure,
        })
    }

    /// A rank of another node is gone. Callers hear of the loss from that node.
    pub(super) fn lose_other(
        &mut self,
        generation: Generation,
        failure: RankFailure,
    ) -> Result<Option<ToWorker>, Refusal> {
        if generation != self.number {
            return self.stale(generation);
        }
        Ok(self.lose(failure))
    }

    /// The loss of a rank.
    pub(super) fn loss(&self, rank: Rank) -> Option<ToWorker> {
        let failure = self.losses.get(&rank)?.clone();
        let generation = self.number;
        Some(ToWorker::RankLost {
            generation,
            failure,
        })
    }

    /// What a worker that comes now is told: the generation before anything else of it.
    pub(super) fn so_far(&self) -> impl Iterator<Item = ToWorker> {
        let table = self.table.clone().map(ToWorker::Membership);
        let losses = self.losses.keys().filter_map(|rank| self.loss(*rank));
        table.into_iter().chain(losses)
    }

    pub(super) fn stale<T>(&self, given: Generation) -> Result<T, Refusal> {
        refuse(
            RefusalKind::Stale,
            format!(
                "generation {given} of {} is not the current one, {}",
                self.stay.job, self.number
            ),
        )
    }

    /// Passes something on to the members of a generation here. Nobody is left in one that is not the newest.
    pub(super) fn tell_members(
        &self,
        slots: &Slots,
        generation: Generation,
        message: &ToWorker,
    ) -> Vec<Output> {
        if generation != self.number {
            return Vec::new();
        }
        let members = self.ranks.values().filter_map(|slot| slots.get(slot));
        members
            .filter(|entry| entry.listens())
            .map(|entry| Output::Tell(entry.worker, message.clone()))
            .collect()
    }

    /// A generation is over. Its members are told, or lose their connections to each other if they can't be told: Horovod's know no
    /// generation here, and the head lets none into a later one before the answer.
    pub(super) fn revoke(
        &self,
        slots: &Slots,
        generation: Generation,
        message: &ToWorker,
    ) -> Vec<Output> {
        let mut outputs = self.tell_members(slots, generation, message);
        let cut = slots.values().filter(|entry| {
            entry.state == SlotState::Running && entry.start.on_change == OnChange::Horovod
        });
        let pids: Vec<u32> = cut.map(|entry| entry.pid).collect();
        if !pids.is_empty() {
            outputs.push(Output::HangUp { pids });
        }
        outputs
    }

    /// A worker speaks of a generation. It knows only those that it was told of; older ones come late, in order.
    fn knows(&self, generation: Generation) -> Result<(), String> {
        if generation > self.number {
            return Err(format!(
                "it spoke of generation {generation}, of which it was never told"
            ));
        }
        Ok(())
    }

    /// A worker has taken a generation.
    pub(super) fn taken(
        &self,
        worker: WorkerId,
        generation: Generation,
    ) -> Result<NodeEvent, String> {
        self.knows(generation)?;
        Ok(NodeEvent::Taken {
            job: self.stay.job,
            slot: worker.slot,
            incarnation: worker.incarnation,
            generation,
        })
    }

    /// A worker has a commit in a generation.
    pub(super) fn committed(
        &self,
        worker: WorkerId,
        (generation, commit): (Generation, u64),
        kept: Kept,
    ) -> Result<NodeEvent, String> {
        self.knows(generation)?;
        Ok(NodeEvent::Committed {
            job: self.stay.job,
            slot: worker.slot,
            incarnation: worker.incarnation,
            generation,
            commit,
            kept,
        })
    }

    /// A worker waits for the generation after this one, at a commit.
    pub(super) fn holds(
        &self,
        worker: WorkerId,
        (generation, commit): (Generation, u64),
        mut failed: Option<FailedOperation>,
    ) -> Result<NodeEvent, String> {
        self.knows(generation)?;
        if let Some(failed) = &mut failed {
            failed.reason = failed.reason.chars().take(MAX_WORDS).collect();
        }
        Ok(NodeEvent::Holding {
            job: self.stay.job,
            slot: worker.slot,
            incarnation: worker.incarnation,
            generation,
            commit,
            failed,
        })
    }
}

/// The slots of a table's ranks on a node.
fn ranks_on(
    table: &GenerationTable,
    node: NodeId,
    slots: &Slots,
) -> Result<BTreeMap<Rank, Slot>, Refusal> {
    let mut ranks = BTreeMap::new();
    for (index, member) in table.members.iter().enumerate() {
        if member.rank.index() != index {
            return refuse(
                RefusalKind::Invalid,
                format!("member {index} of the table has rank {}", member.rank),
            );
        }
        if member.node != node {
            continue;
        }
        let Some(entry) = slots.get(&member.slot) else {
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
