//! How much a rank has done and moved.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kolo_transport::ids::Rank;

use super::{LANES, place};
use crate::operation::OperationKind;

/// How often, how much and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct OperationCount {
    /// Operations that ended well.
    pub done: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Bytes of the buffers of those that ended well.
    pub bytes: u64,
    /// Time that all took, from their turns on.
    pub time: Duration,
}

/// What moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Moved {
    /// Bytes that went out, headers included.
    pub sent: u64,
    /// Bytes that came in.
    pub received: u64,
}

impl Moved {
    pub(super) fn add(&mut self, other: Self) {
        self.sent += other.sent;
        self.received += other.received;
    }
}

/// What moves in memory that ranks share. One thread at a time writes it, the one that runs the operation.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Tally {
    #[inline]
    pub(crate) fn sent(&self, bytes: usize) {
        grow(&self.sent, bytes);
    }

    #[inline]
    pub(crate) fn received(&self, bytes: usize) {
        grow(&self.received, bytes);
    }

    fn moved(&self) -> Moved {
        Moved {
            sent: self.sent.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
        }
    }
}

/// Not in one step, which would take as long as all else in the shortest operations.
#[inline]
fn grow(count: &AtomicU64, bytes: usize) {
    count.store(
        count.load(Ordering::Relaxed) + bytes as u64,
        Ordering::Relaxed,
    );
}

/// Counters of one rank, of all its groups, since its first communicator was made. They only grow.
///
/// What goes through shared memory (`shm`) counts as received from the peer in whose memory this rank reads it. It counts as sent
/// when this rank writes it: to a peer, if it is that one's memory, and otherwise once for all that may read it, and to no peer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// By kind of operation; those that did not happen are left out.
    pub operations: Vec<(OperationKind, OperationCount)>,
    /// By kind of lane; those that moved nothing are left out.
    pub lanes: Vec<(&'static str, Moved)>,
    /// By peer, of all ranks of the job; those with which nothing was exchanged are left out.
    pub peers: Vec<(Rank, Moved)>,
}

/// Memory that a group shares.
#[derive(Debug)]
pub(super) struct SharedMemory {
    moved: Arc<[Tally]>,
    /// By their ranks in the job.
    members: Vec<u32>,
    me: u32,
}

impl SharedMemory {
    /// `members` are the group's ranks in the job, and `me` is this one.
    pub(super) fn new(moved: Arc<[Tally]>, members: Vec<u32>, me: u32) -> Self {
        Self { moved, members, me }
    }

    /// Whether nobody uses it any more, so that it does not grow.
    pub(super) fn is_gone(&self) -> bool {
        Arc::strong_count(&self.moved) == 1
    }

    pub(super) fn add_to(&self, lanes: &mut [Moved; LANES.len()], peers: &mut [Moved]) {
        let lane = &mut lanes[place("shm")];
        for (tally, member) in self.moved.iter().zip(&self.members) {
            let moved = tally.moved();
            if *member == self.me {
                // Its own memory: what it reads there nobody has sent.
                lane.sent += moved.sent;
                continue;
            }
            lane.add(moved);
            if let Some(peer) = peers.get_mut(*member as usize) {
                peer.add(moved);
            }
        }
    }
}
