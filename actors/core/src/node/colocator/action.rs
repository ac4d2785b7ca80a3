//! What goes into the state machine and what comes out.

use std::net::SocketAddr;

use kolo_wire::ids::{Generation, Rank, Slot};
use kolo_wire::{Exit, GenerationTable, NodeEvent, RankFailure, ToWorker, WorkerSignal};

/// What happens to one worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerEvent {
    /// Its process runs.
    Spawned {
        /// The process id.
        pid: u32,
    },
    /// Its process could not be started.
    SpawnFailed {
        /// What it counts as ended with.
        exit: Exit,
        /// Why.
        reason: String,
    },
    /// It said hello.
    Hello {
        /// The version of the local protocol that it speaks.
        protocol: u32,
        /// The process id that it gives.
        pid: u32,
        /// Digest of its registered functions and types.
        registry: u64,
        /// Whether it runs the job's program; what it runs instead.
        program: Result<(), String>,
    },
    /// It wants a certificate.
    Sign {
        /// The signing request.
        csr: Vec<u8>,
    },
    /// It takes calls.
    Ready {
        /// Where its data plane listens.
        address: Option<SocketAddr>,
    },
    /// It wants a socket to a rank of this node.
    ConnectPeer {
        /// To whom.
        rank: Rank,
        /// For which generation.
        generation: Generation,
    },
    /// It waits for the link that a rank of this node is to make.
    RequestLink {
        /// Of whom.
        rank: Rank,
        /// For which generation.
        generation: Generation,
        /// In which group of ranks.
        group: u64,
    },
    /// It closed a socket to the node, and its process did not end.
    Closed {
        /// `call` or `control`.
        socket: &'static str,
    },
    /// It broke a rule of the protocol or can't be served; it has to go.
    Fault {
        /// What it did.
        reason: String,
    },
    /// Its process ended, and its last output is read.
    Exited {
        /// How.
        exit: Exit,
        /// Its last lines of standard error.
        stderr_tail: Vec<String>,
    },
}

/// What the shell has to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Start the process of this slot.
    Spawn(Slot),
    /// Answer the head's request to start: the process id of every slot, 0 for one that did not start.
    Started(Vec<(Slot, u32)>),
    /// Tell the head.
    Report(NodeEvent),
    /// Send a message over a worker's control socket.
    Tell(Slot, ToWorker),
    /// Connect two workers with a socket pair and send each its end with [`ToWorker::Peer`].
    Link {
        /// One of them.
        first: (Slot, Rank),
        /// The other.
        second: (Slot, Rank),
        /// For which generation.
        generation: Generation,
    },
    /// Have a worker's signing request signed by the head.
    Sign(Slot, Vec<u8>),
    /// Send INT to a worker and everything below it.
    Interrupt(Slot),
    /// Send a signal that does not end it to a worker and what is below it.
    Signal(Slot, WorkerSignal),
    /// Send TERM to a worker and everything below it.
    Terminate(Slot),
    /// Send KILL to a worker and everything below it.
    Kill(Slot),
    /// Callers must learn that a rank is gone.
    Lost {
        /// The generation that had it.
        generation: Generation,
        /// What is known.
        failure: RankFailure,
        /// Whether the job is being stopped here.
        stopping: bool,
    },
    /// A generation is complete: calls are for it from now on.
    Complete(GenerationTable),
    /// Kill whatever is left, and say [`Colocator::closed`](super::Colocator::closed) when nothing is.
    Close,
    /// Nothing of the job is left: free what it held, and only then tell the head, if it is to be told, and
    /// those who wait for it. Last action.
    Gone {
        /// Whether to report [`NodeEvent::JobGone`]; not for what the head itself released unused.
        report: bool,
    },
}
