//! The life of a job, as a state machine without I/O and clock.
//!
//! ```text
//! reserve on all nodes -> programs, rendezvous -> start on all -> all ready -> membership to all -> healthy
//!        |                       |                    |                            |                 |
//!        +-----------------------+---- undo what was done: release or stop on every node <-----------+
//! ```
//!
//! [`Job::step`] takes what happened and gives what to do. Whoever drives it answers every
//! [`Action::Request`] with one [`Event::Replied`] within its deadline; then every job ends, and every node that
//! was asked to hold something is released, or named in [`Action::Abandon`], or lost (G-2).

mod end;
#[cfg(test)]
pub(crate) mod fixtures;
mod installed;
#[cfg(test)]
mod limits;
mod network;
mod report;
#[cfg(test)]
mod simulation;
mod start;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_network;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::{DriverId, Generation, JobId, NodeId, Rank, Slot};
use kolo_wire::{
    Exit, GenerationTable, Handover, JobEvent, JobSpec, JobState, Member, NetworkReport, NodeEvent,
    NodeReply, NodeRequest, PlacedNode, RankFailure, Refusal, RefusalKind, SubmitFrame,
    WorkerSignal, WorkerState,
};

pub use self::installed::problem_on;
use self::network::Net;
pub use self::network::NetworkPlan;
use crate::interfaces::{Discovery, Network};
use crate::ranks::Registration;

/// The generation of a job that never changes its members.
const FIRST: Generation = Generation(1);

/// Lines of a dead worker's output that are kept.
const MAX_TAIL: usize = 200;
/// Bytes of a dead worker's output that are kept.
const MAX_TAIL_BYTES: usize = 256 << 10;
/// Longest reason of a failure, as a node tells it, in bytes.
const MAX_CAUSE: usize = 4 << 10;
/// Longest reason of a job's end, in bytes: a list of all jobs has one of each, and is one frame.
pub(super) const MAX_REASON: usize = 1 << 10;
/// Longest message to a driver, in bytes. With a failure beside it, it fits into a frame.
const MAX_MESSAGE: usize = 1 << 20;

/// A part of the placement: a node and its workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// The node.
    pub node: NodeId,
    /// Its hostname.
    pub hostname: String,
    /// Where its daemon listens.
    pub address: SocketAddr,
    /// How many workers it gets; their ranks follow those of the site before.
    pub workers: u32,
}

/// What the head decides about all jobs.
#[derive(Debug, Clone, Copy)]
pub struct JobConfig {
    /// How long a node may take to answer reserve, start and release.
    pub request_timeout: Duration,
    /// How long a node may take to answer stop, over two grace periods.
    pub stop_margin: Duration,
    /// How long an address may take to answer a probe.
    pub probe_limit: Duration,
}

impl Default for JobConfig {
    /// 10 s, 5 s, and 2 s.
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(10),
            stop_margin: Duration::from_secs(5),
            probe_limit: Duration::from_secs(2),
        }
    }
}

/// How a node answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// With this.
    Answer(NodeReply),
    /// No; nothing was done.
    Refused(Refusal),
    /// Not in time, or the connection ended. It may be done or not.
    Unknown(String),
}

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Answer to the [`Action::Request`] for this node.
    Replied {
        /// The node.
        node: NodeId,
        /// Its answer.
        reply: Reply,
    },
    /// The node took an [`Action::Push`], or refused it.
    Pushed {
        /// The node.
        node: NodeId,
        /// Whether it was the membership.
        membership: bool,
        /// Its refusal, if it did not take it.
        refusal: Option<Refusal>,
    },
    /// A node reports.
    Node {
        /// The node.
        node: NodeId,
        /// What happened on it.
        event: NodeEvent,
    },
    /// The node's session has ended or its lease has run out.
    NodeLost {
        /// The node.
        node: NodeId,
        /// How that was seen.
        reason: String,
    },
    /// Answer to [`Action::Discover`].
    Discovered(Result<Arc<Network>, NetworkReport>),
    /// Answer to [`Action::OpenRendezvous`].
    Rendezvous(Result<SocketAddr, String>),
    /// The driver says something.
    Driver(SubmitFrame),
    /// The driver's connection or stream has ended.
    DriverGone,
    /// Somebody else asks for the end.
    Stop {
        /// Who and why.
        reason: String,
    },
    /// Time has passed: see [`Job::deadline`].
    Tick,
}

/// Something to do. Actions are done in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send a request to a node, and answer with one [`Event::Replied`] within the deadline. There is never
    /// more than one for a node at a time.
    Request {
        /// The node.
        node: NodeId,
        /// The request.
        request: Box<NodeRequest>,
        /// The longest wait for its answer.
        deadline: Duration,
    },
    /// Deliver to a node, after what was pushed to it before, and try again until it takes or refuses it: one
    /// [`Event::Pushed`]. A later [`Action::Request`] for the node or its loss ends the attempts.
    Push {
        /// The node.
        node: NodeId,
        /// The request.
        request: Box<NodeRequest>,
    },
    /// Tell the driver.
    Tell(JobEvent),
    /// Find out what connects the nodes, each address for at most this time, and answer with one
    /// [`Event::Discovered`].
    Discover(Box<Discovery>, Duration),
    /// Open the plain HTTP rendezvous for these members and answer with one [`Event::Rendezvous`].
    OpenRendezvous(Vec<Member>),
    /// Close it again.
    CloseRendezvous,
    /// Nothing of the job is left on the node.
    Free(NodeId),
    /// Something of the job may be left on the node, which lives and does not say. Go on asking it to stop.
    Abandon(NodeId),
    /// For the log.
    Note(String),
    /// The job has ended and asks for nothing more.
    Finished,
}

/// What of the job is on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hold {
    /// Reserve was sent.
    Reserving,
    /// Resources are held.
    Reserved,
    /// Start was sent.
    Starting,
    /// Workers are or were there.
    Running,
    /// Release or stop was sent.
    Undoing,
    /// Nothing, as the node says.
    Free,
    /// Unknown, and not our concern any more.
    Abandoned,
    /// Unknown: the node is lost.
    Lost,
}

impl Hold {
    fn is_over(self) -> bool {
        matches!(self, Self::Free | Self::Abandoned | Self::Lost)
    }
}

#[derive(Debug)]
struct Part {
    site: Site,
    first_rank: u32,
    hold: Hold,
    /// Start was sent, so release is not enough.
    started: bool,
    has_program: bool,
    free_port: u16,
    has_membership: bool,
    /// Why an installed program can't run there.
    problem: Option<Refusal>,
    signals: Signals,
}

/// Signals on their way to a node: one at a time is pushed, and of those that wait there is one of each kind at most, as
/// of signals that are pending for a process.
#[derive(Debug, Default)]
struct Signals {
    under_way: bool,
    waiting: Vec<WorkerSignal>,
}

#[derive(Debug)]
struct Seat {
    member: Member,
    state: WorkerState,
    pid: u32,
    exit: Option<Exit>,
    /// Its node had been asked to stop it.
    stopped: bool,
}

/// How far a job came before it began to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// Waits for reservations.
    Reserve,
    /// Waits for the program on all nodes and the rendezvous.
    Prepare,
    /// Waits for all workers to be ready.
    Boot,
    /// Waits for all nodes to take the membership.
    Publish,
    /// Everybody is or was there.
    Up,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rendezvous {
    NotWanted,
    Wanted,
    Opening,
    Open(SocketAddr),
}

/// With what the end begins where workers run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// A notice, or `SIGTERM`.
    Careful,
    /// `SIGINT`.
    Interrupt,
    /// `SIGKILL`.
    Kill,
}

/// Why and how the job ends.
#[derive(Debug)]
struct Ending {
    state: JobState,
    refusal: Option<Refusal>,
    reason: String,
}

/// The state machine.
#[derive(Debug)]
pub struct Job {
    id: JobId,
    owner: DriverId,
    spec: JobSpec,
    config: JobConfig,
    start_deadline: Instant,
    state: JobState,
    phase: Phase,
    parts: Vec<Part>,
    /// In rank order; slots of the first generation are ranks.
    seats: Vec<Seat>,
    /// Seats that became ready. Before the group is whole none is lost without the end of the job.
    ready: usize,
    rendezvous: Rendezvous,
    net: Net,
    program_ready: bool,
    first_failure: Option<RankFailure>,
    ending: Option<Ending>,
    manner: Manner,
    /// Signals that were pushed.
    signals: u64,
    finished: bool,
    actions: Vec<Action>,
}

/// Bytes of a group's table for each worker, without its hostname. At most that, in any message that holds the table.
const SEAT_BYTES: usize = 192;

/// Most bytes of a group's table. With the longest hostnames that Linux has (64 bytes) the largest group fits.
const MAX_TABLE: usize = 4 << 20;

/// Refuses a group whose table is too long for a message.
fn check_table(sites: &[Site]) -> Result<(), Refusal> {
    let names = |site: &Site| site.workers as usize * site.hostname.len();
    let workers: usize = sites.iter().map(|site| site.workers as usize).sum();
    let names: usize = sites.iter().map(names).sum();
    let room = MAX_TABLE.saturating_sub(workers * SEAT_BYTES);
    if names <= room {
        return Ok(());
    }
    let longest = sites.iter().map(|site| &site.hostname);
    let longest = longest
        .max_by_key(|name| name.len())
        .map_or("", |name| name);
    Err(Refusal::new(
        RefusalKind::Invalid,
        format!(
            "the hostnames of {workers} workers have {names} bytes together; allowed are {room} for so many workers, \
             {} for each; the longest is {longest}: start nodes with shorter ones by --hostname, or ask for fewer workers",
            room / workers.max(1)
        ),
    ))
}

impl Job {
    /// A job with a placement. The actions are the reservations on all nodes.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Internal`] if the sites don't make a group; [`crate::placement::place`] gives none such.
    pub fn submit(
        now: Instant,
        id: JobId,
        owner: DriverId,
        spec: JobSpec,
        sites: Vec<Site>,
        config: JobConfig,
    ) -> Result<(Self, Vec<Action>), Refusal> {
        check_table(&sites)?;
        let mut registration = Registration::new();
        let mut rank = 0;
        let mut parts = Vec::with_capacity(sites.len());
        for site in sites {
            let first_rank = rank;
            for _ in 0..site.workers {
                registration
                    .register(site.node, &site.hostname, Rank(rank))
                    .map_err(|error| Refusal::new(RefusalKind::Internal, error.to_string()))?;
                rank += 1;
            }
            parts.push(Part {
                site,
                first_rank,
                hold: Hold::Reserving,
                started: false,
                has_program: false,
                free_port: 0,
                has_membership: false,
                problem: None,
                signals: Signals::default(),
            });
        }
        let seats = registration
            .finalize()
            .map_err(|error| Refusal::new(RefusalKind::Internal, error.to_string()))?
            .iter()
            .map(|info| Seat {
                member: info.member(Slot(info.rank.0)),
                state: WorkerState::Starting,
                pid: 0,
                exit: None,
                stopped: false,
            })
            .collect();
        let mut job = Self {
            id,
            owner,
            config,
            start_deadline: now + Duration::from_millis(spec.start_timeout_ms),
            state: JobState::Placing,
            phase: Phase::Reserve,
            parts,
            seats,
            ready: 0,
            rendezvous: if spec.rendezvous {
                Rendezvous::Wanted
            } else {
                Rendezvous::NotWanted
            },
            net: Net::Registered,
            program_ready: spec.installed.is_some(),
            first_failure: None,
            ending: None,
            manner: Manner::Careful,
            signals: 0,
            finished: false,
            actions: Vec::new(),
            spec,
        };
        job.reserve_all();
        let actions = std::mem::take(&mut job.actions);
        Ok((job, actions))
    }

    /// What to do now that `event` has happened.
    pub fn step(&mut self, now: Instant, event: Event) -> Vec<Action> {
        // Before the event counts: what comes too late is what was waited for, and is named.
        if self.ending.is_none() && self.phase < Phase::Up && now >= self.start_deadline {
            self.start_timed_out();
        }
        match event {
            Event::Replied { node, reply } => self.replied(node, reply),
            Event::Pushed {
                node,
                membership,
                refusal,
            } => self.pushed(node, membership, refusal),
            Event::Node { node, event } => self.node_event(node, event),
            Event::NodeLost { node, reason } => self.node_lost(node, &reason),
            Event::Discovered(found) => self.discovered(found),
            Event::Rendezvous(opened) => self.rendezvous_opened(opened),
            Event::Driver(frame) => self.driver_says(frame),
            Event::DriverGone => self.stop("its driver is gone".to_owned(), false),
            Event::Stop { reason } => self.stop(reason, false),
            Event::Tick => {}
        }
        self.advance(now);
        self.finish();
        std::mem::take(&mut self.actions)
    }

    fn driver_says(&mut self, frame: SubmitFrame) {
        match frame {
            SubmitFrame::ProgramReady => self.program_ready = true,
            SubmitFrame::Stop => self.stop("its driver has ended it".to_owned(), true),
            SubmitFrame::Interrupt => self.interrupt(),
            SubmitFrame::Signal(signal) => self.signal(signal),
            SubmitFrame::Kill => self.kill(),
            SubmitFrame::Done => self.done(),
        }
    }

    /// When to give [`Event::Tick`] at the latest, if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        (self.ending.is_none() && self.phase < Phase::Up).then_some(self.start_deadline)
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> JobId {
        self.id
    }

    /// Whether [`Action::Finished`] was given.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Whether the node may have a certificate made for the worker in `slot`, and for which generation (S-2).
    ///
    /// # Errors
    ///
    /// A refusal if the slot is not on that node, or its worker is not running.
    pub fn may_sign(&self, node: NodeId, slot: Slot) -> Result<Generation, Refusal> {
        let seat = self
            .seat(node, slot)
            .map_err(|problem| Refusal::new(RefusalKind::Forbidden, problem))?;
        if self.phase < Phase::Boot || seat.exit.is_some() || self.ending.is_some() {
            return Err(Refusal::new(
                RefusalKind::Forbidden,
                format!("slot {slot} of {} runs no worker", self.id),
            ));
        }
        Ok(FIRST)
    }

    fn seat(&self, node: NodeId, slot: Slot) -> Result<&Seat, String> {
        self.seats
            .get(slot.0 as usize)
            .filter(|seat| seat.member.node == node)
            .ok_or_else(|| format!("{} has no slot {slot} on {node}", self.id))
    }

    fn seat_mut(&mut self, node: NodeId, slot: Slot) -> Option<&mut Seat> {
        self.seats
            .get_mut(slot.0 as usize)
            .filter(|seat| seat.member.node == node)
    }

    fn part(&self, node: NodeId) -> Option<usize> {
        self.parts.iter().position(|part| part.site.node == node)
    }

    fn note(&mut self, text: String) {
        self.actions.push(Action::Note(text));
    }

    fn table(&self) -> GenerationTable {
        GenerationTable {
            job: self.id,
            generation: FIRST,
            members: self.seats.iter().map(|seat| seat.member.clone()).collect(),
            cause: String::new(),
            handover: Handover::None,
        }
    }

    fn placed_nodes(&self) -> Vec<PlacedNode> {
        self.parts
            .iter()
            .map(|part| PlacedNode {
                node: part.site.node,
                hostname: part.site.hostname.clone(),
                address: part.site.address,
                ranks: (part.first_rank..part.first_rank + part.site.workers)
                    .map(Rank)
                    .collect(),
                has_program: part.has_program,
            })
            .collect()
    }
}
