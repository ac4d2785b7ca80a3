//! What nodes say of a job's processes: of an elastic job these are facts for its membership.

use std::time::{Duration, Instant};

use kolo_wire::ids::{Generation, NodeId, Rank};
use kolo_wire::{
    Exit, FailedOperation, JobEvent, Kept, NodeEvent, NodeRequest, RankFailure, RefusalKind,
    WorkerState,
};

use super::super::end::{bounded, cut, own_failure};
use super::super::{Action, Hold, Job, Push};
use crate::fence::{self, Fence};
use crate::membership::{Fact, Process};

/// Longest last words of a process in a reason, in bytes. All of them are in the failure.
const MAX_WORDS: usize = 256;

impl Job {
    /// A node reports what happened to its part of the job.
    pub(in crate::head::job) fn news(&mut self, part: usize, event: NodeEvent) {
        let node = self.parts[part].site.node;
        match event {
            NodeEvent::WorkerReady {
                slot,
                incarnation,
                address,
                ..
            } => {
                let process = Process { slot, incarnation };
                if self.is_current(node, process, "ready") {
                    self.worker_ready(part, process, address);
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
                self.member_exited(node, process, generation, failure, expected);
            }
            NodeEvent::WorkerUnseen {
                slot, incarnation, ..
            } if self.starts_anew() => {
                let process = Process { slot, incarnation };
                self.end_not_seen(node, process);
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
                if self.is_current(node, process, "in a generation") {
                    self.fact(Fact::Acknowledged {
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
                self.committed(node, process, generation, (commit, kept));
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
                self.holds(node, process, (generation, commit), failed);
            }
            NodeEvent::JobGone { .. } if !self.is_elastic() => self.job_gone(part),
            // Ends are told in their order: those of this stay's processes would have come before.
            NodeEvent::JobGone { .. } if self.has_processes(part) => {
                self.note(format!("ignored: an earlier stay on {node} is over"));
            }
            NodeEvent::JobGone { .. } => match self.parts[part].hold {
                Hold::Reserved | Hold::Running => {
                    let now = self.now;
                    let why = "its node has ended it".to_owned();
                    self.processes_are_gone(node, why, now);
                    // The word may be of an earlier stay there: only an answer says that nothing is left.
                    self.undo(part);
                }
                // Its answer is still to come, and says more.
                _ => {}
            },
            // All ranks get their notice at the same time: they may have to save together.
            NodeEvent::JobLeft { reason, .. } if !self.is_elastic() => {
                let at = self.place_name(part);
                self.stop(format!("{at} leaves: {reason}"), false);
            }
            NodeEvent::JobLeft { mut reason, .. } => {
                cut(&mut reason, MAX_WORDS);
                self.drain(node, reason);
            }
        }
    }

    /// Whether a process was started there, or is on its way, whose end was not told.
    fn has_processes(&self, part: usize) -> bool {
        let part = &self.parts[part];
        let runs = |slot| {
            let seat = self.seats.get(slot);
            seat.is_some_and(|seat| seat.pid != 0 && seat.exit.is_none())
        };
        part.slots.iter().any(runs) || part.pushes.queue.iter().any(Push::is_start)
    }

    /// The process is the last one of its seat, and the node holds that seat.
    fn is_current(&mut self, node: NodeId, process: Process, what: &str) -> bool {
        let last = self
            .seat(node, process.slot)
            .map(|seat| seat.member.incarnation);
        match last {
            Ok(incarnation) if incarnation == process.incarnation => return true,
            Ok(incarnation) => self.note(format!(
                "ignored: {process} is {what}, and process {incarnation} is the last one there"
            )),
            Err(problem) => self.note(format!("ignored: {process} is {what}: {problem}")),
        }
        false
    }

    /// A process was killed, and may run all the same. Its node is left: what is there ends with the stay of the job, and nothing of the
    /// job starts there any more.
    fn end_not_seen(&mut self, node: NodeId, process: Process) {
        let Ok(seat) = self.seat(node, process.slot) else {
            return;
        };
        if seat.member.incarnation != process.incarnation || seat.exit.is_some() {
            return;
        }
        let (rank, host, pid) = (seat.member.rank, &seat.member.hostname, seat.pid);
        let why = format!(
            "rank {rank} on {host} (pid {pid}) was killed, and its end was not seen: the job leaves {host}"
        );
        if let Some(seat) = self.seats.get_mut(&process.slot) {
            seat.state = WorkerState::Exited;
            seat.exit = Some(Exit::Unknown);
        }
        if let Some(elastic) = &mut self.elastic {
            elastic.unseen.insert(node);
        }
        self.note(why.clone());
        self.touch(node);
        let drained = why.clone();
        self.fact(Fact::Unseen { process, why });
        self.fact(Fact::Drain { node, why: drained });
    }

    fn worker_ready(
        &mut self,
        part: usize,
        process: Process,
        address: Option<std::net::SocketAddr>,
    ) {
        let (is_elastic, has_peers) = (self.is_elastic(), self.parts.len() > 1);
        let seat = self.seats.get_mut(&process.slot);
        let Some(seat) = seat.filter(|seat| seat.exit.is_none()) else {
            return;
        };
        if address.is_none() && (is_elastic || has_peers) {
            let rank = seat.member.rank;
            return self.has_no_address(part, process, rank);
        }
        if seat.state == WorkerState::Starting {
            seat.member.address = address;
            seat.state = if is_elastic {
                WorkerState::Spare
            } else {
                WorkerState::Ready
            };
            self.ready += 1;
        }
        self.fact(Fact::Ready {
            process,
            addresses: address.into_iter().collect(),
        });
    }

    /// A worker can't be reached by others, and there are or may be some on other nodes.
    fn has_no_address(&mut self, part: usize, process: Process, rank: Rank) {
        if !self.is_elastic() {
            let text = format!(
                "rank {rank} is ready without an address, which a job on several nodes needs"
            );
            return self.fail(RefusalKind::Worker, text);
        }
        let why = "it is ready without an address, which a job that may grow needs".to_owned();
        let request = NodeRequest::StopWorker {
            job: self.id,
            slot: process.slot,
            incarnation: process.incarnation,
            why: why.clone(),
        };
        self.push(part, Push::order(request));
        self.not_started(&[process], &why);
    }

    fn member_exited(
        &mut self,
        node: NodeId,
        process: Process,
        generation: Generation,
        failure: RankFailure,
        expected: bool,
    ) {
        let last = self.seats.get(&process.slot).map(|seat| &seat.member);
        let Some(last) = last.filter(|last| process.incarnation <= last.incarnation) else {
            return self.note(format!(
                "ignored: {process} has ended on {node}, and was never started"
            ));
        };
        let is_last = last.incarnation == process.incarnation;
        if is_last && last.node != node {
            return self.note(format!(
                "ignored: {process} has ended on {node}, where it never was"
            ));
        }
        let mut failure = bounded(failure);
        let (exit, said) = (failure.exit, words(&failure));
        if self.is_installed() && !self.is_elastic() {
            self.installed_ready(process.slot);
        }
        if is_last && let Some(seat) = self.seats.get_mut(&process.slot) {
            if seat.exit.is_some() {
                return;
            }
            let was_stopping = seat.state == WorkerState::Stopping;
            seat.end(&mut failure, expected);
            if !self.is_elastic() {
                self.exited(failure, expected);
                return self.all_gone();
            }
            self.touch(node);
            if self.ending.is_some() {
                self.fell_too(failure, expected);
            } else if !was_stopping {
                self.tell_lost(process, failure);
            } else if self.fall.is_open()
                && let Some(failure) = own_failure(failure, expected)
            {
                // It has failed with the others, before it could be stopped.
                self.fell(failure);
            }
        }
        self.fact(Fact::Exited {
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
    fn tell_lost(&mut self, process: Process, failure: RankFailure) {
        let Some(elastic) = self.elastic.as_deref().filter(|_| self.ending.is_none()) else {
            return;
        };
        if failure.exit.is_success() {
            return;
        }
        let is_member = elastic.is_member(process);
        let may_leave = elastic.membership.roster().may_leave(self.now, process);
        let is_new = self.is_planned() && !is_member;
        if is_new {
            // It has failed on its own.
            self.fall.close();
        }
        // A worker that was to leave, and has left, is no failure.
        if !may_leave {
            self.fell(failure.clone());
        }
        if is_member || (is_new && !may_leave) {
            let generation = Generation(self.generation.0 + u64::from(is_new));
            self.actions.push(Action::Tell(JobEvent::RankLost {
                generation,
                failure,
            }));
        }
    }

    /// A process has failed. Of failures that come together the first cause is told, if it is heard of later.
    fn fell(&mut self, failure: RankFailure) {
        let (rank, hostname, exit) = (failure.rank, &failure.hostname, failure.exit);
        let mut why = format!("rank {rank} on {hostname}: {exit}");
        let said = words(&failure);
        if !said.is_empty() {
            why.push_str(": ");
            why.push_str(&said);
        }
        if self.fall.add(self.now, failure) {
            self.fact(Fact::Explained { why });
        }
    }

    fn committed(
        &mut self,
        node: NodeId,
        process: Process,
        generation: Generation,
        (commit, kept): (u64, Kept),
    ) {
        if !self.is_counted(node, process, generation) {
            return;
        }
        let tally = self.elastic.as_mut();
        let tally = tally.and_then(|elastic| elastic.tallies.get_mut(&generation));
        if let Some(common) = tally.and_then(|tally| tally.committed(process, commit, kept)) {
            self.fact(Fact::Committed {
                generation,
                commit: common.commit,
                kept: common.kept,
            });
        }
    }

    fn holds(
        &mut self,
        node: NodeId,
        process: Process,
        (generation, commit): (Generation, u64),
        failed: Option<FailedOperation>,
    ) {
        if !self.is_counted(node, process, generation) {
            return;
        }
        if let Some(FailedOperation {
            culprit,
            mut reason,
        }) = failed
        {
            cut(&mut reason, MAX_WORDS);
            self.fact(Fact::Broken {
                generation,
                culprit,
                why: reason,
            });
        }
        let tally = self.elastic.as_mut();
        let tally = tally.and_then(|elastic| elastic.tallies.get_mut(&generation));
        if let Some(commit) = tally.and_then(|tally| tally.holds(process, commit)) {
            let commit = Some(commit);
            self.fact(Fact::Holding { generation, commit });
        }
    }

    /// The driver holds between two calls.
    pub(in crate::head::job) fn driver_holds(&mut self, generation: Generation) {
        if self.elastic.is_none() || self.starts_anew() {
            return;
        }
        let commit = None;
        self.fact(Fact::Holding { generation, commit });
    }

    /// The driver does not reach a node with members of a generation.
    pub(in crate::head::job) fn driver_is_cut_off(
        &mut self,
        generation: Generation,
        mut why: String,
    ) {
        if self.elastic.is_none() || self.starts_anew() {
            return;
        }
        cut(&mut why, MAX_WORDS);
        self.fact(Fact::Broken {
            generation,
            culprit: None,
            why,
        });
    }

    /// The process is a member of the generation, and that may still count.
    fn is_counted(&mut self, node: NodeId, process: Process, generation: Generation) -> bool {
        if !self.is_current(node, process, "at a commit") {
            return false;
        }
        let elastic = self.elastic.as_deref();
        let is_open = elastic.is_some_and(|elastic| elastic.tallies.contains_key(&generation));
        if !is_open {
            self.note(format!(
                "ignored: a commit of {process} in generation {generation}, which is over"
            ));
        }
        is_open
    }

    /// A node is lost.
    pub(in crate::head::job) fn part_lost(&mut self, part: usize, reason: String, fence: Fence) {
        self.mark_over();
        let entry = &mut self.parts[part];
        entry.flow.is_owed = matches!(entry.hold, Hold::Reserving | Hold::Starting | Hold::Undoing);
        entry.hold = Hold::Lost;
        entry.pushes.queue.clear();
        let node = entry.site.node;
        let waiting = std::mem::take(&mut entry.flow.asking);
        self.has_answered(node);
        for slot in waiting {
            let why = format!("{node} is lost: {reason}");
            self.fact(Fact::Refused { slot, why });
        }
        let left = match fence {
            Fence::Lease | Fence::Left => self.config.fence,
            Fence::Wardens => fence::of_death().min(self.config.fence),
            Fence::Ended => Duration::ZERO,
        };
        self.processes_are_gone(node, reason, self.now + left);
    }

    /// Nothing of the job is left on a node that is lost.
    pub(in crate::head::job) fn fenced(&mut self, node: NodeId, why: String) {
        // A later stay there knows more.
        let is_over = |part: usize| self.parts[part].hold.is_over();
        if self.is_elastic() && self.part(node).is_none_or(is_over) {
            let fenced = self.now;
            self.fact(Fact::NodeLost { node, why, fenced });
        }
    }

    /// None of the node's processes is there any more, for certain from `fenced` on.
    pub(super) fn processes_are_gone(&mut self, node: NodeId, why: String, fenced: Instant) {
        let Some(part) = self.part(node) else {
            return;
        };
        self.parts[part].flow.forget_processes();
        if let Some(elastic) = &mut self.elastic {
            elastic.drained.remove(&node);
            elastic.unlisted.remove(&node);
        }
        for slot in std::mem::take(&mut self.parts[part].slots) {
            if let Some(elastic) = &mut self.elastic {
                elastic.holders.remove(&slot);
            }
            let Some(seat) = self.seats.get_mut(&slot) else {
                continue;
            };
            let process = seat.process();
            if let Some(failure) = seat.lose(format!("its node was lost: {why}")) {
                self.tell_lost(process, failure);
            }
        }
        self.fact(Fact::NodeLost { node, why, fenced });
    }
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
