//! Losses, and the end: undo on every node what was done there.

use std::time::Duration;

use kolo_wire::ids::{NodeId, Slot};
use kolo_wire::{
    Exit, JobEvent, JobState, NodeReply, NodeRequest, RankFailure, Refusal, RefusalKind,
    WorkerState,
};

use crate::fence::Fence;

use super::{
    Action, Ending, Hold, Job, MAX_CAUSE, MAX_MESSAGE, MAX_REASON, MAX_TAIL, MAX_TAIL_BYTES,
    Manner, Phase, Push, Rendezvous, Reply, Seat,
};

impl Job {
    pub(super) fn worker_exited(
        &mut self,
        node: NodeId,
        slot: Slot,
        failure: RankFailure,
        expected: bool,
    ) {
        let mut failure = bounded(failure);
        let Some(seat) = self.seat_mut(node, slot) else {
            return self.note(format!(
                "slot {slot} ended on {node}, which does not have it"
            ));
        };
        if seat.exit.is_some() {
            return;
        }
        // What the head knows itself it does not take from a report.
        failure.rank = seat.member.rank;
        failure.node = node;
        failure.hostname.clone_from(&seat.member.hostname);
        if failure.pid == 0 {
            failure.pid = seat.pid;
        }
        seat.stopped = expected && failure.pid > 0;
        self.exited(slot, failure, expected);
        self.all_gone();
    }

    /// A worker has ended or is lost, as is told to everybody who may wait for it (F-1).
    fn exited(&mut self, slot: Slot, failure: RankFailure, expected: bool) {
        if self.is_installed() {
            self.installed_ready(slot);
        }
        if let Some(seat) = self.seats.get_mut(&slot) {
            seat.state = WorkerState::Exited;
            seat.exit = Some(failure.exit);
            self.gone += 1;
        }
        if self.ending.is_some() {
            return;
        }
        // The first cause is the first that came; the others may be its echoes. That a node was asked to stop
        // a worker of a job that nobody stops is as bad as any other end.
        if self.first_failure.is_none() && (expected || !failure.exit.is_success()) {
            self.first_failure = Some(failure.clone());
        }
        if self.is_installed() {
            return self.installed_exited(&failure, expected);
        }
        if self.phase < Phase::Up {
            let message = format!("a worker ended before the group was ready: {failure}");
            self.first_failure = Some(failure);
            self.fail(RefusalKind::Worker, message);
            return;
        }
        if expected {
            self.note(format!("{failure}; its node had been asked to stop it"));
        }
        self.actions.push(Action::Tell(JobEvent::RankLost {
            generation: self.generation,
            failure: failure.clone(),
        }));
        // Nodes pass it on to workers, which read no last words.
        let mut short = failure;
        short.stderr_tail.clear();
        for part in 0..self.parts.len() {
            let entry = &self.parts[part];
            if entry.hold == Hold::Running && entry.site.node != short.node {
                let request = NodeRequest::RankLost {
                    job: self.id,
                    generation: self.generation,
                    failure: short.clone(),
                };
                self.push(part, Push::order(request));
            }
        }
    }

    /// Ends the job if no worker is left.
    fn all_gone(&mut self) {
        if self.ending.is_some() || self.gone < self.seats.len() {
            return;
        }
        if let Some(failure) = self.first_failure.clone() {
            self.end(Ending {
                state: JobState::Failed,
                refusal: Some(Refusal::new(
                    RefusalKind::Worker,
                    format!("all workers have ended; the first cause: {failure}"),
                )),
                reason: first_line(&failure),
            });
        } else {
            self.end(Ending {
                state: JobState::Succeeded,
                refusal: None,
                reason: "all workers exited with code 0".to_owned(),
            });
        }
    }

    /// Workers that ran and were ended with the job. What a node has ended and not told of one by one is gone, too.
    fn stopped(&self) -> u32 {
        let cause = self.first_failure.as_ref().map(|failure| failure.rank);
        let was_stopped = |seat: &&Seat| {
            let told = seat.exit.is_some();
            Some(seat.member.rank) != cause && (seat.stopped || (!told && seat.pid > 0))
        };
        self.seats.values().filter(was_stopped).count() as u32
    }

    pub(super) fn node_lost(&mut self, node: NodeId, reason: String, fence: Fence) {
        let Some(part) = self.part(node) else {
            return;
        };
        if self.parts[part].hold.is_over() {
            return;
        }
        if self.is_elastic() {
            return self.part_lost(part, reason, fence);
        }
        self.parts[part].hold = Hold::Lost;
        self.parts[part].pushes.queue.clear();
        let at = self.place_name(part);
        if self.phase < Phase::Up {
            self.fail(
                RefusalKind::NodeLost,
                format!("{at} was lost before the group was ready: {reason}"),
            );
        }
        self.lose_seats(part, &format!("its node was lost: {reason}"));
    }

    /// The node says that nothing is left of the job.
    pub(super) fn job_gone(&mut self, part: usize) {
        let at = self.place_name(part);
        match self.parts[part].hold {
            Hold::Reserved => {
                self.free(part);
                self.fail(
                    RefusalKind::Timeout,
                    format!("{at} gave up its reservation before the group was ready"),
                );
            }
            Hold::Running => {
                self.free(part);
                if self.phase < Phase::Up {
                    self.fail(
                        RefusalKind::Worker,
                        format!("{at} ended its workers before the group was ready"),
                    );
                }
                self.lose_seats(part, "its node has ended it");
            }
            Hold::Undoing => self.free(part),
            // Its answer is still to come, and says more; or it has none to give any more.
            Hold::Reserving | Hold::Starting | Hold::Free | Hold::Abandoned | Hold::Lost => {}
        }
    }

    fn lose_seats(&mut self, part: usize, reason: &str) {
        for slot in self.parts[part].slots.clone() {
            let Some(seat) = self.seats.get(&slot).filter(|seat| seat.exit.is_none()) else {
                continue;
            };
            let failure = RankFailure {
                rank: seat.member.rank,
                node: seat.member.node,
                hostname: seat.member.hostname.clone(),
                pid: seat.pid,
                exit: Exit::Unknown,
                reason: Some(reason.to_owned()),
                stderr_tail: Vec::new(),
            };
            self.exited(slot, failure, false);
        }
        self.all_gone();
    }

    pub(super) fn fail(&mut self, kind: RefusalKind, message: String) {
        self.end(Ending {
            state: JobState::Failed,
            reason: message.clone(),
            refusal: Some(Refusal::new(kind, message)),
        });
    }

    /// Ends the job because its driver has what it wanted. With a worker lost, or before the group was whole, that is
    /// a stop like any other.
    pub(super) fn done(&mut self) {
        let reason = "its driver has ended it".to_owned();
        if self.phase < Phase::Up || self.first_failure.is_some() {
            return self.stop(reason, true);
        }
        self.end(Ending {
            state: JobState::Succeeded,
            refusal: None,
            reason,
        });
    }

    /// Ends the job because someone asks for it.
    pub(super) fn stop(&mut self, reason: String, own: bool) {
        // A driver that ends its own healthy job knows why.
        let refusal = (!own || self.phase < Phase::Up).then(|| {
            Refusal::new(
                RefusalKind::Stopped,
                format!("the job was stopped: {reason}"),
            )
        });
        let reason = match &self.first_failure {
            Some(failure) => format!("{reason}; before that, {}", first_line(failure)),
            None => reason,
        };
        self.end(Ending {
            state: JobState::Stopped,
            refusal,
            reason,
        });
    }

    /// Begins the end, unless it has begun.
    pub(super) fn end(&mut self, mut ending: Ending) {
        if self.ending.is_some() {
            return;
        }
        // What a worker said at last is in the message and the failure.
        let line = ending.reason.find('\n').unwrap_or(ending.reason.len());
        cut(&mut ending.reason, line.min(MAX_REASON));
        if let Some(refusal) = &mut ending.refusal {
            cut(&mut refusal.message, MAX_MESSAGE);
        }
        self.note(format!("the job ends: {}", ending.reason));
        self.ending = Some(ending);
        for seat in self.seats.values_mut() {
            if seat.exit.is_none() && self.phase >= Phase::Boot {
                seat.state = WorkerState::Stopping;
            }
        }
        for part in 0..self.parts.len() {
            // A node that has not answered yet is released when it has: a release must not overtake a reserve.
            if matches!(self.parts[part].hold, Hold::Reserved | Hold::Running) {
                self.undo(part);
            }
        }
    }

    pub(super) fn undo(&mut self, part: usize) {
        let grace = Duration::from_millis(self.spec.grace_ms);
        let entry = &mut self.parts[part];
        entry.hold = Hold::Undoing;
        if entry.started && self.manner == Manner::Kill {
            let request = NodeRequest::Kill { job: self.id };
            self.request(part, request, self.config.stop_margin);
        } else if entry.started {
            let going_on = || "the job goes on without this node".to_owned();
            let ending = self.ending.as_ref();
            let reason = ending.map_or_else(going_on, |ending| ending.reason.clone());
            let request = NodeRequest::Stop {
                job: self.id,
                reason,
                interrupt: self.manner == Manner::Interrupt,
            };
            self.request(part, request, grace * 2 + self.config.stop_margin);
        } else {
            let request = NodeRequest::Release { job: self.id };
            self.request(part, request, self.config.request_timeout);
        }
    }

    pub(super) fn undone(&mut self, part: usize, reply: Reply) {
        match reply {
            Reply::Answer(NodeReply::Done) => self.free(part),
            Reply::Refused(refusal) if refusal.kind == RefusalKind::NotFound => self.free(part),
            Reply::Answer(_) | Reply::Refused(_) | Reply::Unknown(_) => {
                self.parts[part].hold = Hold::Abandoned;
                self.mark_over();
                let node = self.parts[part].site.node;
                self.note(format!("{node} did not confirm the end: {reply:?}"));
                self.actions.push(Action::Abandon(node));
            }
        }
    }

    pub(super) fn free(&mut self, part: usize) {
        self.parts[part].hold = Hold::Free;
        self.mark_over();
        self.actions.push(Action::Free(self.parts[part].site.node));
    }

    /// Tells the end when nothing is under way any more.
    pub(super) fn finish(&mut self) {
        let Some(ending) = &self.ending else {
            return;
        };
        if self.finished
            || self.rendezvous == Rendezvous::Opening
            || !self.parts.iter().all(|part| part.hold.is_over())
        {
            return;
        }
        self.finished = true;
        self.state = ending.state;
        for seat in self.seats.values_mut() {
            seat.state = WorkerState::Exited;
        }
        if matches!(self.rendezvous, Rendezvous::Open(_)) {
            self.actions.push(Action::CloseRendezvous);
        }
        self.actions.push(Action::Tell(JobEvent::Ended {
            state: ending.state,
            refusal: ending.refusal.clone(),
            failure: self.first_failure.clone(),
            stopped: Some(self.stopped()),
        }));
        self.actions.push(Action::Finished);
    }
}

/// What a node tells of a worker's end, without what is too long of it.
pub(super) fn bounded(mut failure: RankFailure) -> RankFailure {
    if let Some(reason) = &mut failure.reason {
        cut(reason, MAX_CAUSE);
    }
    cut_tail(&mut failure.stderr_tail);
    failure
}

/// Takes off what is over `limit` bytes, and no half of a character.
pub(super) fn cut(text: &mut String, limit: usize) {
    let end = (0..=limit.min(text.len()))
        .rev()
        .find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
}

/// Keeps the last lines, and of a line that is too long by itself the start.
fn cut_tail(tail: &mut Vec<String>) {
    let mut left = MAX_TAIL_BYTES;
    let mut kept = 0;
    for line in tail.iter_mut().rev().take(MAX_TAIL) {
        if kept == 0 {
            cut(line, left);
        }
        let Some(rest) = left.checked_sub(line.len()) else {
            break;
        };
        left = rest;
        kept += 1;
    }
    tail.drain(..tail.len() - kept);
}

pub(super) fn first_line(failure: &RankFailure) -> String {
    let mut short = failure.clone();
    short.stderr_tail.clear();
    short.to_string()
}
