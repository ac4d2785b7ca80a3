//! What goes out.

use std::sync::Arc;
use std::time::Instant;

use kolo_wire::ids::{self, Rank, Slot};

use super::end::End;
use super::generation::Generation;
use super::policy::Purpose;
use super::seat::{Host, Location, Process};

/// Something to do. Actions are done in order.
///
/// The messages behind them may be lost, repeated and reordered. Membership itself repeats [`Action::Publish`] and
/// [`Action::Hold`] until they have had their effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Find a node for each of these seats, and answer with one [`Fact::Reserved`](super::Fact::Reserved) or
    /// [`Fact::Refused`](super::Fact::Refused) for each. What a seat held before is given back when it is reserved anew.
    Reserve {
        /// The seats.
        slots: Vec<Slot>,
        /// The use of them.
        purpose: Purpose,
        /// Failure domains that cool down and get no process now.
        avoid: Vec<Host>,
    },
    /// Give back what nodes hold for these seats: no process is started there before they are reserved anew.
    GiveBack {
        /// The seats.
        slots: Vec<Slot>,
    },
    /// Start a process. The node ends an older process of the same seat first.
    Start {
        /// The process.
        process: Process,
        /// The node that holds its seat.
        location: Location,
    },
    /// End a process: a notice first, if it can take one.
    Stop {
        /// The process.
        process: Process,
        /// The reason.
        why: String,
    },
    /// End all waits in a generation at once, with an error that has the cause and the lost ranks (F-1).
    Revoke {
        /// The number of the generation.
        generation: ids::Generation,
        /// The ranks that are lost, in that generation.
        lost: Vec<Rank>,
        /// The reason.
        cause: String,
    },
    /// A generation that is started anew is over, or is not started after all: what is to come of it is void.
    Fall {
        /// The reason.
        why: String,
        /// A process has failed, so that a restart is used up, if no lost node is behind it.
        is_failure: bool,
        /// Processes that are being stopped.
        stopped: u32,
    },
    /// Give the generation to these processes. Each leaves what older generation it is in, and answers with one
    /// [`Fact::Acknowledged`](super::Fact::Acknowledged). A process that is not a member idles.
    Publish {
        /// The generation.
        generation: Arc<Generation>,
        /// The processes that have not answered yet.
        to: Vec<Process>,
    },
    /// The generation is going to be published once its new processes are ready, with this or a later number. Those are started
    /// next, and get their ranks in it.
    Plan(Arc<Generation>),
    /// All members have taken the generation. The ones before are over.
    Active(Arc<Generation>),
    /// Ask the members to hold at their next commit, the same on all ranks, and the driver to hold between two calls. Whoever does
    /// first says [`Fact::Holding`](super::Fact::Holding).
    Hold {
        /// The number of the generation.
        generation: ids::Generation,
        /// The reason.
        why: String,
    },
    /// Come back at that time, with a step without facts. Replaces the wake-up that was asked for before.
    Wake(Instant),
    /// For logs and people: why something is done, or is not done yet.
    Tell(String),
    /// The job ends. Membership asks for nothing more.
    End {
        /// How.
        how: End,
        /// The reason.
        why: String,
    },
}
