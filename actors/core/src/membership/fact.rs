//! What comes in.

use std::time::Instant;

use kolo_wire::ids::{self, NodeId, Rank, Slot};
use kolo_wire::{Exit, Kept};

use super::seat::{Addresses, Host, Location, Process};

/// Something has happened. A fact may come twice, and late: membership ignores what is over or not waited for, and says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fact {
    /// A node holds the seat: one of the two answers to [`Action::Reserve`](super::Action::Reserve). Not of a node that
    /// was said to be lost.
    Reserved {
        /// The seat.
        slot: Slot,
        /// The node.
        location: Location,
    },
    /// No node has room for the seat: the other answer.
    Refused {
        /// The seat.
        slot: Slot,
        /// What is missing where.
        why: String,
    },
    /// A host is not fit for the job: its health check has failed. It gets no process until it has cooled down.
    Unhealthy {
        /// The host.
        host: Host,
        /// How the check failed.
        why: String,
    },
    /// There may be room now: a node has joined, or another job has ended.
    Offered,
    /// Another job waits for room, too, and there is too little for this one: room for fewer than it needs is to be given back.
    /// Of a group that is started anew.
    Contended,
    /// A process has said hello, and can take part in a generation.
    Ready {
        /// The process.
        process: Process,
        /// Where it listens for its peers.
        addresses: Addresses,
    },
    /// A process has ended. Its node says so.
    Exited {
        /// The process.
        process: Process,
        /// How it ended.
        exit: Exit,
        /// The last generation that it had taken. 0 if it had taken none.
        generation: ids::Generation,
        /// The last lines of its output. May be empty.
        said: String,
    },
    /// The group that is over has ended for another reason than was known first. Only of a group that is started anew.
    Explained {
        /// The reason.
        why: String,
    },
    /// All processes that are there were told to prepare for their end. Those that end until then leave, whatever their exit,
    /// and are no failures. Only of a group that is started anew.
    Noticed {
        /// Until when.
        until: Instant,
    },
    /// A process was killed, and its end was not seen: it may still run. Of a group that is started anew.
    Unseen {
        /// The process.
        process: Process,
        /// How that was seen.
        why: String,
    },
    /// A node is not there any more, and none of its processes.
    NodeLost {
        /// The node.
        node: NodeId,
        /// How that was seen.
        why: String,
        /// When its processes have ended for certain. In the past if the node's end was seen, and not just its
        /// silence. A later fact may say an earlier time.
        fenced: Instant,
    },
    /// A node is to be left: no process starts there, and those that run go at the next safe point.
    Drain {
        /// The node.
        node: NodeId,
        /// The reason.
        why: String,
    },
    /// A node need not be left after all.
    Undrain {
        /// The node.
        node: NodeId,
    },
    /// A process has taken a published generation, and is in no older one any more.
    Acknowledged {
        /// The number of the generation.
        generation: ids::Generation,
        /// The process.
        process: Process,
    },
    /// All members of a generation have the state of a commit: they have committed, or they have been given the last one. A
    /// later report makes up for one that was lost; only what is reported is known to be worth keeping.
    Committed {
        /// The number of the generation.
        generation: ids::Generation,
        /// The number of the commit.
        commit: u64,
        /// How they have it.
        kept: Kept,
    },
    /// A member can't go on in a generation, though all members may be there: a link has broken, or one stands still.
    Broken {
        /// The number of the generation.
        generation: ids::Generation,
        /// The rank that the member blames, if any.
        culprit: Option<Rank>,
        /// What has happened.
        why: String,
    },
    /// All members hold until a new generation is published: at a commit, or between two calls of the driver.
    Holding {
        /// The number of the generation.
        generation: ids::Generation,
        /// The number of the commit, if they hold at one that is known.
        commit: Option<u64>,
    },
}
