//! What nodes say of an elastic job's processes: facts for its membership.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kolo_wire::ids::{Generation, NodeId};
use kolo_wire::{
    Exit, FailedOperation, JobEvent, Kept, NodeEvent, NodeRequest, RankFailure, WorkerState,
};

use super::super::end::{bounded, cut, own_failure};
use super::super::parts::{Hold, Push};
use super::super::seat::Seat;
use super::super::{Action, Base};
use super::{Elastic, MAX_WORDS};
use crate::fence::{self, Fence};
use crate::membership::{Fact, Process};

impl Elastic {
    /// A node reports what happened to its part of the job.
    pub(super) fn news(&mut self, job: &mut Base, node: NodeId, event: NodeEvent) {
        let Some(part) = job.reports(node) else {
            return;
        };
        match event {
            NodeEvent::WorkerReady {
                slot,
                incarnation,
                address,
                ..
            } => {
                let process = Process { slot, incarnation };
                if is_current(job, node, process, "ready") {
                    self.worker_ready(job, part, process, address);
                }
            }
            NodeEvent::WorkerExited {
                slot,
                incarnation,
                generation,
                failure,
                expected,
                ..
            } => {
                let process = Process { slot, incarnation };
                self.member_exited(job, node, (process, generation), failure, expected);
            }
            NodeEvent::WorkerUnseen {
                slot, incarnation, ..
            } if job.starts_anew() => {
                let process = Process { slot, incarnation };
                self.end_not_seen(job, node, process);
            }
            // Nobody lets it into a later generation.
            NodeEvent::WorkerUnseen { .. } => {}
            NodeEvent::Taken {
                slot,
                incarnation,
                generation,
                ..
            } => {
                let process = Process { slot, incarnation };
                if is_current(job, node, process, "in a generation") {
                    self.facts.push(Fact::Acknowledged {
                        generation,
                        process,
                    });
                }
            }
            NodeEvent::Committed {
                slot,
                incarnation,
                generation,
                commit,
                kept,
                ..
            } => {
                let process = Process { slot, incarnation };
                self.committed(job, node, (process, generation), (commit, kept));
            }
            NodeEvent::Holding {
                slot,
                incarnation,
                generation,
                commit,
                failed,
                ..
            } => {
                let process = Process { slot, incarnation };
                self.holds(job, node, (process, generation), commit, failed);
            }
            // Ends are told in their order: those of this stay's processes would have come before.
            NodeEvent::JobGone { .. } if has_processes(job, part) => {
                job.note(format!("ignored: an earlier stay on {node} is over"));
            }
            NodeEvent::JobGone { .. } => match job.parts[part].hold {
                Hold::Reserved | Hold::Running => {
                    let (now, why) = (job.now, "its node has ended it".to_owned());
                    self.processes_are_gone(job, part, why, now);
                    // The word may be of an earlier stay there: only an answer says that nothing is left.
                    job.undo(part);
                }
                // Its answer is still to come, and says more.
                _ => {}
            },
            NodeEvent::JobLeft { mut reason, .. } => {
                cut(&mut reason, MAX_WORDS);
                self.drain(job, node, reason);
            }
        }
    }

    /// A process was killed, and may run all the same. Its node is left: what is there ends with the stay of the job, and nothing of the
    /// job starts there any more.
    fn end_not_seen(&mut self, job: &mut Base, node: NodeId, process: Process) {
        let seat = job.last(process);
        let Some(seat) = seat.filter(|seat| seat.member.node == node && seat.exit.is_none()) else {
            return;
        };
        let (rank, host, pid) = (seat.member.rank, &seat.member.hostname, seat.pid);
        let why = format!(
            "rank {rank} on {host} (pid {pid}) was killed, and its end was not seen: the job leaves {host}"
        );
        seat.vanish(Exit::Unknown);
        self.leaving.unseen.insert(node);
        job.note(why.clone());
        job.parts.touch(node);
        let drained = why.clone();
        self.facts.push(Fact::Unseen { process, why });
        self.facts.push(Fact::Drain { node, why: drained });
    }

    fn worker_ready(
        &mut self,
        job: &mut Base,
        part: usize,
        process: Process,
        address: Option<SocketAddr>,
    ) {
        let seat = job.last(process).filter(|seat| seat.exit.is_none());
        let Some(seat) = seat else {
            return;
        };
        let Some(address) = address else {
            let why = "it is ready without an address, which a job that may grow needs".to_owned();
            let request = NodeRequest::StopWorker {
                job: job.id,
                slot: process.slot,
                incarnation: process.incarnation,
                why: why.clone(),
            };
            job.push(part, request);
            return self.facts.not_started(job, &[process], &why);
        };
        if seat.state == WorkerState::Starting {
            seat.member.address = Some(address);
            seat.state = WorkerState::Spare;
        }
        self.facts.push(Fact::Ready {
            process,
            addresses: [address].into(),
        });
    }

    fn member_exited(
        &mut self,
        job: &mut Base,
        node: NodeId,
        (process, generation): (Process, Generation),
        failure: RankFailure,
        expected: bool,
    ) {
        let last = job.seats.get(&process.slot).map(|seat| &seat.member);
        let Some(last) = last.filter(|last| process.incarnation <= last.incarnation) else {
            return job.note(format!(
                "ignored: {process} has ended on {node}, and was never started"
            ));
        };
        if last.incarnation == process.incarnation && last.node != node {
            return job.note(format!(
                "ignored: {process} has ended on {node}, where it never was"
            ));
        }
        let mut failure = bounded(failure);
        let (exit, said) = (failure.exit, words(&failure));
        if let Some(seat) = job.last(process) {
            if seat.exit.is_some() {
                return;
            }
            let was_stopping = seat.state == WorkerState::Stopping;
            seat.end(&mut failure, expected);
            job.parts.touch(node);
            if job.ending.is_some() {
                job.fell_too(failure, expected);
            } else if !was_stopping {
                self.tell_lost(job, process, failure);
            } else if job.fall.is_open()
                && let Some(failure) = own_failure(failure, expected)
            {
                // It has failed with the others, before it could be stopped.
                self.fell(job, failure);
            }
        }
        self.facts.push(Fact::Exited {
            process,
            // A worker that its node was asked to stop has not returned, whatever its exit code.
            exit: if expected && exit.is_success() {
                Exit::Unknown
            } else {
                exit
            },
            generation,
            said,
        });
    }

    /// A process has ended of itself, or is lost with its node. The driver hears of members, unless they have done their work, and of
    /// new processes that were started for a later generation.
    fn tell_lost(&mut self, job: &mut Base, process: Process, failure: RankFailure) {
        if job.ending.is_some() || failure.exit.is_success() {
            return;
        }
        let is_member = self.members.contains(&process);
        let may_leave = self.membership.roster().may_leave(job.now, process);
        let is_new = job.is_horovod() && !is_member;
        if is_new {
            // It has failed on its own.
            job.fall.close();
        }
        // A worker that was to leave, and has left, is no failure.
        if !may_leave {
            self.fell(job, failure.clone());
        }
        if is_member || (is_new && !may_leave) {
            let generation = Generation(job.generation.0 + u64::from(is_new));
            job.actions.push(Action::Tell(JobEvent::RankLost {
                generation,
                failure,
            }));
        }
    }

    /// A process has failed. Of failures that come together the first cause is told, if it is heard of later.
    fn fell(&mut self, job: &mut Base, failure: RankFailure) {
        let (rank, hostname, exit) = (failure.rank, &failure.hostname, failure.exit);
        let mut why = format!("rank {rank} on {hostname}: {exit}");
        let said = words(&failure);
        if !said.is_empty() {
            why.push_str(": ");
            why.push_str(&said);
        }
        if job.fall.add(job.now, failure) {
            self.facts.push(Fact::Explained { why });
        }
    }

    fn committed(
        &mut self,
        job: &mut Base,
        node: NodeId,
        (process, generation): (Process, Generation),
        (commit, kept): (u64, Kept),
    ) {
        if !self.is_counted(job, node, process, generation) {
            return;
        }
        let tally = self.tallies.get_mut(&generation);
        if let Some(common) = tally.and_then(|tally| tally.committed(process, commit, kept)) {
            self.facts.push(Fact::Committed {
                generation,
                commit: common.commit,
                kept: common.kept,
            });
        }
    }

    fn holds(
        &mut self,
        job: &mut Base,
        node: NodeId,
        (process, generation): (Process, Generation),
        commit: u64,
        failed: Option<FailedOperation>,
    ) {
        if !self.is_counted(job, node, process, generation) {
            return;
        }
        if let Some(FailedOperation {
            culprit,
            reason: mut why,
        }) = failed
        {
            cut(&mut why, MAX_WORDS);
            self.facts.push(Fact::Broken {
                generation,
                culprit,
                why,
            });
        }
        let tally = self.tallies.get_mut(&generation);
        if let Some(commit) = tally.and_then(|tally| tally.holds(process, commit)) {
            let commit = Some(commit);
            self.facts.push(Fact::Holding { generation, commit });
        }
    }

    /// The process is a member of the generation, and that may still count.
    fn is_counted(
        &self,
        job: &mut Base,
        node: NodeId,
        process: Process,
        generation: Generation,
    ) -> bool {
        if !is_current(job, node, process, "at a commit") {
            return false;
        }
        let is_open = self.tallies.contains_key(&generation);
        if !is_open {
            job.note(format!(
                "ignored: a commit of {process} in generation {generation}, which is over"
            ));
        }
        is_open
    }

    /// A node is lost.
    pub(super) fn node_lost(&mut self, job: &mut Base, node: NodeId, reason: String, fence: Fence) {
        let Some(part) = job.parts.there(node) else {
            return;
        };
        let entry = &mut job.parts[part];
        entry.flow.is_owed = matches!(entry.hold, Hold::Reserving | Hold::Starting | Hold::Undoing);
        entry.pushes.queue.clear();
        job.parts.end(part, Hold::Lost);
        let why = format!("{node} is lost: {reason}");
        self.facts.refuse_all(job, part, &why);
        let left = match fence {
            Fence::Lease | Fence::Left => job.config.fence,
            Fence::Wardens => fence::of_death().min(job.config.fence),
            Fence::Ended => Duration::ZERO,
        };
        let fenced = job.now + left;
        self.processes_are_gone(job, part, reason, fenced);
    }

    /// None of the node's processes is there any more, for certain from `fenced` on.
    pub(super) fn processes_are_gone(
        &mut self,
        job: &mut Base,
        part: usize,
        why: String,
        fenced: Instant,
    ) {
        let entry = &mut job.parts[part];
        let node = entry.site.node;
        entry.flow.queue.clear();
        entry.starting.clear();
        self.leaving.drained.remove(&node);
        self.leaving.unlisted.remove(&node);
        for slot in std::mem::take(&mut entry.slots) {
            self.holders.remove(&slot);
            let Some(seat) = job.seats.get_mut(&slot) else {
                continue;
            };
            let process = seat.process();
            if let Some(failure) = seat.lose(format!("its node was lost: {why}")) {
                self.tell_lost(job, process, failure);
            }
        }
        self.facts.push(Fact::NodeLost { node, why, fenced });
    }
}

/// Whether a process was started there, or is on its way, whose end was not told.
fn has_processes(job: &Base, part: usize) -> bool {
    let part = &job.parts[part];
    let runs = |seat: &Seat| seat.pid != 0 && seat.exit.is_none();
    let mut seats = part.slots.iter().filter_map(|slot| job.seats.get(slot));
    seats.any(runs) || part.pushes.queue.iter().any(Push::is_start)
}

/// The process is the last one of its seat, and the node holds that seat.
fn is_current(job: &mut Base, node: NodeId, process: Process, what: &str) -> bool {
    let seat = job.seat(node, process.slot);
    let text = match seat.map(|seat| seat.member.incarnation) {
        Ok(incarnation) if incarnation == process.incarnation => return true,
        Ok(incarnation) => {
            format!("ignored: {process} is {what}, and process {incarnation} is the last one there")
        }
        Err(problem) => format!("ignored: {process} is {what}: {problem}"),
    };
    job.note(text);
    false
}

/// Why a process ended: as its node or the process itself says, or else its last line.
fn words(failure: &RankFailure) -> String {
    let error = failure.error().map(ToString::to_string);
    let line = failure.reason.clone().or(error);
    let line = line.or_else(|| failure.stderr_tail.last().cloned());
    let mut line = line.unwrap_or_default();
    cut(&mut line, MAX_WORDS);
    line
}
