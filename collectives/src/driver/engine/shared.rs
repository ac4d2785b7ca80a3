//! What an engine knows of the memory that its ranks share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::Waker;
use std::time::Instant;

use kolo_transport::ids::{JobId, Rank};

use super::Engine;
use crate::header::{Header, Share};
use crate::operation::Operation;
use crate::shm::map::Owner;
use crate::shm::setup::Sharing;

impl Engine {
    /// Begins to make or await shared memory. `is_over` says later that something else ends operations.
    pub(crate) fn form(&mut self, job: JobId, is_over: Arc<AtomicBool>) {
        let owner = Owner {
            job,
            generation: self.generation,
            world: self.world,
        };
        self.shm.form(self.me, owner, is_over);
    }

    /// Says something about shared memory to all that are linked. Returns the frame.
    pub(crate) fn say(&mut self, share: Share) -> Vec<u8> {
        let generation = self.generation;
        let frame = Header::Share { generation, share }.encode();
        for link in &mut self.links {
            link.notify(&frame);
        }
        frame.to_vec()
    }

    /// What wakes a thread in [`Engine::sleep_shared`].
    pub(crate) fn shared_waker(&self) -> Waker {
        match &self.shm {
            Sharing::Active(arena) => arena.waker(),
            _ => Waker::noop().clone(),
        }
    }

    /// Looks for what is awaited in shared memory for a while, and sleeps until it may be there.
    pub(crate) fn sleep_shared(&mut self, until: Instant) {
        let hasty = self.is_hasty;
        if let Some(arena) = self.shm.active()
            && (hasty || !arena.linger())
        {
            arena.sleep(until);
        }
    }

    /// Whether an operation is under way in shared memory.
    pub(crate) fn is_in_shared(&self) -> bool {
        matches!(&self.shm, Sharing::Active(arena) if arena.is_open())
    }

    /// Whether operations may be done in shared memory.
    pub(crate) fn may_share(&self) -> bool {
        !matches!(self.shm, Sharing::Off)
    }

    /// Whether an operation only begins in shared memory. Then its algorithm counts.
    pub(crate) fn goes_over_links(&self, operation: &Operation, forced: bool) -> bool {
        matches!(&self.shm, Sharing::Active(arena) if arena.only_agrees(operation, forced, &self.offsets))
    }

    /// Whether nobody wakes this rank when it can go on in shared memory.
    pub(crate) fn must_poll(&self) -> bool {
        matches!(&self.shm, Sharing::Active(arena) if arena.must_poll())
    }

    /// Whether the operation in shared memory can't end without a rank.
    pub(crate) fn lacks(&self, rank: u32) -> bool {
        matches!(&self.shm, Sharing::Active(arena) if arena.lacks(rank))
    }

    /// The ranks that are waited for in shared memory.
    pub(crate) fn late_in_shared(&self) -> Vec<Rank> {
        match &self.shm {
            Sharing::Active(arena) => arena.late(),
            _ => Vec::new(),
        }
    }

    /// Gives the operation in shared memory up. `result` is what it began with.
    pub(crate) fn leave_shared(&mut self, result: &mut [u8]) {
        if let Some(arena) = self.shm.active() {
            arena.ignore();
            arena.undo(result);
            arena.leave();
        }
    }
}
