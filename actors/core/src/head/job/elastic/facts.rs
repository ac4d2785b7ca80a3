//! Facts that the membership has not heard yet.

use kolo_wire::Exit;
use kolo_wire::ids::{Generation, Slot};

use super::super::Base;
use crate::membership::{Fact, Process};

/// Facts that come together make one change.
#[derive(Debug, Default)]
pub(super) struct Facts(Vec<Fact>);

impl Facts {
    pub(super) fn push(&mut self, fact: Fact) {
        self.0.push(fact);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn take(&mut self) -> Vec<Fact> {
        std::mem::take(&mut self.0)
    }

    /// A process that tells no address can do its work.
    pub(super) fn ready(&mut self, process: Process) {
        let addresses = [].into();
        self.push(Fact::Ready { process, addresses });
    }

    /// Seats have no node.
    pub(super) fn refuse(&mut self, slots: impl IntoIterator<Item = Slot>, why: &str) {
        for slot in slots {
            let why = why.to_owned();
            self.push(Fact::Refused { slot, why });
        }
    }

    /// The seats that a node was to hold have no node.
    pub(super) fn refuse_all(&mut self, job: &mut Base, part: usize, why: &str) {
        let asking = std::mem::take(&mut job.parts[part].flow.asking);
        self.refuse(asking, why);
    }

    /// These processes do not run.
    pub(super) fn not_started(&mut self, job: &mut Base, processes: &[Process], why: &str) {
        for process in processes.iter().copied() {
            if let Some(seat) = job.last(process) {
                seat.vanish(Exit::Unknown);
                let node = seat.member.node;
                job.parts.touch(node);
            }
            self.push(Fact::Exited {
                process,
                exit: Exit::Unknown,
                generation: Generation(0),
                said: why.to_owned(),
            });
        }
    }
}
