//! How the ranks of a host come to share memory, or agree not to.
//!
//! Rank 0 makes the memory and passes it over its links. Each rank that has mapped it and has a link to every other one says
//! so, in the memory; the one that is last finds that all have, and changes one word there from *open* to *used*. Who can't
//! have the memory changes it to *refused*, or says so to the others. Only one of the two can happen, and a rank that never
//! mapped the memory is never waited for in vain after it said so: all ranks that have it read the same word, and who
//! does not have it is a reason for the word not to be *used*.
//!
//! An operation that ends before that is settled (a deadline, an abort) settles nothing: the attempt goes on with the next
//! operation. What a rank has done for it, and what the others have seen of that, has nothing to do with the operation.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::arena::Arena;
use super::map::{MOST_RANKS, Map, Owner};
use super::rules;
use crate::blocking::processors;

const OPEN: u64 = 0;
const USED: u64 = 1;
const REFUSED: u64 = 2;

/// Whether a communicator shares memory.
#[derive(Debug)]
pub(crate) enum Sharing {
    /// Nobody has asked yet.
    Unknown,
    /// It is asked whether all ranks are on this host.
    Asked,
    Forming(Forming),
    Off,
    Active(Box<Arena>),
}

/// An attempt to share memory.
#[derive(Debug)]
pub(crate) struct Forming {
    me: u32,
    owner: Owner,
    is_over: Arc<AtomicBool>,
    map: Option<Arc<Map>>,
    descriptor: Option<OwnedFd>,
    /// By rank, on rank 0: it has the offer. On others, for rank 0 alone: it was asked.
    pub(crate) served: Vec<bool>,
    attached: bool,
    refused: bool,
}

impl Sharing {
    pub(crate) fn active(&mut self) -> Option<&mut Arena> {
        match self {
            Self::Active(arena) => Some(arena),
            _ => None,
        }
    }

    pub(crate) fn is_unsettled(&self) -> bool {
        !matches!(self, Self::Off | Self::Active(_))
    }

    pub(crate) fn forming(&mut self) -> Option<&mut Forming> {
        match self {
            Self::Forming(forming) => Some(forming),
            _ => None,
        }
    }

    /// Begins to make or await the memory. `is_over` says later that something else ends operations.
    pub(crate) fn form(&mut self, me: u32, owner: Owner, is_over: Arc<AtomicBool>) {
        *self = if owner.world < 2 || owner.world > MOST_RANKS {
            Self::Off
        } else {
            Self::Forming(Forming::new(me, owner, is_over))
        };
    }

    /// Ends the attempt. Returns whether the memory is used.
    pub(crate) fn settle(&mut self) -> bool {
        let Self::Forming(forming) = self else {
            return matches!(self, Self::Active(_));
        };
        let used = forming.state() == USED;
        *self = match forming.map.take().filter(|_| used) {
            Some(map) => {
                tracing::debug!(rank = forming.me, "memory is shared");
                Self::Active(Box::new(Arena::new(
                    map,
                    forming.me,
                    Arc::clone(&forming.is_over),
                )))
            }
            None => Self::Off,
        };
        used
    }
}

impl Forming {
    fn new(me: u32, owner: Owner, is_over: Arc<AtomicBool>) -> Self {
        let mut forming = Self {
            me,
            owner,
            is_over,
            map: None,
            descriptor: None,
            served: vec![false; owner.world as usize],
            attached: false,
            refused: false,
        };
        if me == 0 {
            let crowded = owner.world as usize > processors();
            match Map::create(owner, crowded) {
                Ok((map, descriptor)) => {
                    forming.map = Some(Arc::new(map));
                    forming.descriptor = Some(descriptor);
                }
                Err(error) => {
                    tracing::info!(%error, "the ranks of this host share no memory");
                    forming.refused = true;
                }
            }
        }
        forming
    }

    /// What rank 0 passes on.
    pub(crate) fn descriptor(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.descriptor.as_ref().map(AsFd::as_fd)
    }

    /// Maps what rank 0 passed.
    pub(crate) fn offered(&mut self, descriptor: Option<OwnedFd>) {
        let Some(descriptor) = descriptor else {
            tracing::info!("an offer of shared memory came without a descriptor");
            self.refused = true;
            return;
        };
        match Map::open(descriptor.as_fd(), self.owner) {
            Ok(map) => self.map = Some(Arc::new(map)),
            Err(error) => {
                tracing::info!(%error, "this rank shares no memory");
                self.refused = true;
            }
        }
    }

    /// There will be none: says so to all that have it.
    pub(crate) fn refuse(&mut self) {
        self.refused = true;
        if let Some(map) = &self.map {
            // If it is used by now, it is used.
            let _was =
                map.state()
                    .compare_exchange(OPEN, REFUSED, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    fn state(&self) -> u64 {
        match &self.map {
            Some(map) => map.state().load(Ordering::SeqCst),
            None => REFUSED,
        }
    }

    /// Whether it is clear what becomes of it.
    pub(crate) fn is_settled(&self) -> bool {
        match &self.map {
            Some(map) => map.state().load(Ordering::SeqCst) != OPEN,
            None => self.refused,
        }
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.refused || (self.map.is_some() && self.state() == REFUSED)
    }

    /// This rank has links to all. If it has the memory, it says so, and uses it if all have it. Returns whether that is
    /// settled by it.
    pub(crate) fn attach(&mut self) -> bool {
        let Some(map) = self.map.as_ref().filter(|_| !self.attached) else {
            return false;
        };
        self.attached = true;
        let all = (0..map.world()).map(|rank| map.attached(rank));
        rules::attach(map.attached(self.me as usize), all)
            && map
                .state()
                .compare_exchange(OPEN, USED, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
    }

    /// The ranks that have not mapped it.
    pub(crate) fn missing(&self) -> Vec<u32> {
        let Some(map) = &self.map else {
            return vec![0];
        };
        let is_missing = |rank: &u32| !rules::is_attached(map.attached(*rank as usize));
        (0..self.owner.world).filter(is_missing).collect()
    }
}
