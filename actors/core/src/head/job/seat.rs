//! The places of a job's workers, each with the last process there.

use kolo_wire::{Exit, Member, RankFailure, WorkerInfo, WorkerState};

use crate::membership::Process;

#[derive(Debug)]
pub(super) struct Seat {
    pub(super) member: Member,
    pub(super) state: WorkerState,
    pub(super) pid: u32,
    pub(super) exit: Option<Exit>,
    /// Its node had been asked to stop it.
    pub(super) stopped: bool,
}

impl Seat {
    pub(super) fn new(member: Member) -> Self {
        Self {
            member,
            state: WorkerState::Starting,
            pid: 0,
            exit: None,
            stopped: false,
        }
    }

    /// The last process of the seat.
    pub(super) fn process(&self) -> Process {
        process_of(&self.member)
    }

    /// The process has not ended, and nobody has asked for its end.
    pub(super) fn is_wanted(&self) -> bool {
        self.exit.is_none() && self.state != WorkerState::Stopping
    }

    /// The process has ended, as its node tells. What the head knows itself it does not take from a report.
    pub(super) fn end(&mut self, failure: &mut RankFailure, expected: bool) {
        failure.rank = self.member.rank;
        failure.node = self.member.node;
        failure.hostname.clone_from(&self.member.hostname);
        if failure.pid == 0 {
            failure.pid = self.pid;
        }
        self.stopped = expected && failure.pid > 0;
        self.vanish(failure.exit);
    }

    /// The process is not there any more, and nothing is told of that.
    pub(super) fn vanish(&mut self, exit: Exit) {
        self.state = WorkerState::Exited;
        self.exit = Some(exit);
    }

    /// The process is not there any more, for this reason. Nothing if its end is known.
    pub(super) fn lose(&mut self, reason: String) -> Option<RankFailure> {
        if self.exit.is_some() {
            return None;
        }
        let mut failure = RankFailure {
            rank: self.member.rank,
            node: self.member.node,
            hostname: String::new(),
            pid: 0,
            exit: Exit::Unknown,
            reason: Some(reason),
            stderr_tail: Vec::new(),
            account: None,
        };
        self.end(&mut failure, false);
        Some(failure)
    }

    /// The worker, as people see it.
    pub(super) fn info(&self) -> WorkerInfo {
        WorkerInfo {
            member: self.member.clone(),
            state: self.state,
            pid: self.pid,
            exit: self.exit,
        }
    }
}

pub(super) fn process_of(member: &Member) -> Process {
    Process {
        slot: member.slot,
        incarnation: member.incarnation,
    }
}
