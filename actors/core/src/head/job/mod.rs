//! The life of a job, as a state machine without I/O and clock: the core of the Coordinator.
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

mod elastic;
mod end;
mod fall;
#[cfg(test)]
pub(crate) mod fixtures;
mod installed;
#[cfg(test)]
mod limits;
mod messages;
mod network;
mod push;
mod report;
mod start;
mod table;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_horovod;
#[cfg(test)]
mod tests_network;
#[cfg(test)]
mod tests_restart;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::{DriverId, Generation, JobId, NodeId, Rank, Slot};
use kolo_wire::span::Span;
use kolo_wire::{
    Exit, GenerationTable, JobSpec, JobState, Member, RankFailure, Refusal, RefusalKind,
    SubmitFrame, WorkerSignal, WorkerState,
};

pub(super) use self::elastic::most_on;
use self::elastic::{Elastic, Flow};
use self::fall::Fall;
pub use self::messages::{Action, Event, GroupState, JobConfig, Reply, Seating, Site};
use self::network::Net;
pub use self::push::Next;
use self::push::{Push, Pushes};
use self::table::check_table;
use crate::head::limits::limits;
use crate::interfaces::Network;
use crate::ranks::{Registration, RegistrationError};

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
    /// The seats that the node holds.
    slots: Vec<Slot>,
    hold: Hold,
    /// Start was sent, so release is not enough.
    started: bool,
    has_program: bool,
    free_port: u16,
    has_membership: bool,
    /// Why an installed program can't run there.
    problem: Option<Refusal>,
    signals: Signals,
    /// What is delivered to it.
    pushes: Pushes,
    /// Of an elastic job: what is under way.
    flow: Flow,
}

impl Part {
    /// The reservation is sent next.
    fn new(site: Site) -> Self {
        Self {
            site,
            slots: Vec::new(),
            hold: Hold::Reserving,
            started: false,
            has_program: false,
            free_port: 0,
            has_membership: false,
            problem: None,
            signals: Signals::default(),
            pushes: Pushes::default(),
            flow: Flow::default(),
        }
    }
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

impl Seat {
    fn new(member: Member) -> Self {
        Self {
            member,
            state: WorkerState::Starting,
            pid: 0,
            exit: None,
            stopped: false,
        }
    }

    /// The process has ended, as its node tells. What the head knows itself it does not take from a report.
    fn end(&mut self, failure: &mut RankFailure, expected: bool) {
        failure.rank = self.member.rank;
        failure.node = self.member.node;
        failure.hostname.clone_from(&self.member.hostname);
        if failure.pid == 0 {
            failure.pid = self.pid;
        }
        self.stopped = expected && failure.pid > 0;
        self.state = WorkerState::Exited;
        self.exit = Some(failure.exit);
    }

    /// The process is not there any more, for this reason. Nothing if its end is known.
    fn lose(&mut self, reason: String) -> Option<RankFailure> {
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
    /// Workers have ended it. Which failed first may be known better when all have ended.
    blame: Option<Blame>,
}

/// What stands before the first cause in the words for an end.
#[derive(Debug)]
struct Blame {
    message: String,
    /// Nothing if the reason has no first cause.
    reason: Option<String>,
}

/// The state machine.
#[derive(Debug)]
pub struct Job {
    id: JobId,
    owner: DriverId,
    spec: JobSpec,
    config: JobConfig,
    /// The time of the step that is under way.
    now: Instant,
    start_deadline: Instant,
    state: JobState,
    phase: Phase,
    parts: Vec<Part>,
    by_node: BTreeMap<NodeId, usize>,
    /// The place of each worker, and the last process there. Of a job that never changes its members they are in rank order.
    seats: BTreeMap<Slot, Seat>,
    /// The generation that is being formed for the first time, or that was active last. 0 if an elastic job had none.
    generation: Generation,
    /// What nodes were told last, or are being told.
    published: Option<Arc<GenerationTable>>,
    /// Of a job whose members come and go.
    elastic: Option<Box<Elastic>>,
    /// Seats that became ready. Before the group is whole none is lost without the end of the job.
    ready: usize,
    /// Seats of a job that never changes its members whose worker has ended.
    gone: usize,
    rendezvous: Rendezvous,
    net: Net,
    /// The network before that of the last nodes that have joined.
    before: Option<Arc<Network>>,
    program_ready: bool,
    /// It ends where its workers would start.
    dry_run: bool,
    /// The failures since the group was whole, or in all if it never changes.
    fall: Fall,
    ending: Option<Ending>,
    manner: Manner,
    /// Signals that were pushed.
    signals: u64,
    finished: bool,
    actions: Vec<Action>,
}

impl Job {
    /// A job with a placement. The actions are the reservations on all nodes.
    ///
    /// The sites of an elastic job have as many workers as there is room for, and at most the most that it may have.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Internal`] if the sites don't make a group; [`crate::placement::place`] gives none such.
    /// [`RefusalKind::Invalid`] if their hostnames are too long, or the limits of an elastic job make no sense.
    pub fn submit(
        now: Instant,
        id: JobId,
        owner: DriverId,
        spec: JobSpec,
        sites: Vec<Site>,
        config: JobConfig,
    ) -> Result<(Self, Vec<Action>), Refusal> {
        check_table(&sites)?;
        let mut job = Self {
            id,
            owner,
            config,
            now,
            start_deadline: now + Duration::from_millis(spec.start_timeout_ms),
            state: JobState::Placing,
            phase: Phase::Reserve,
            parts: Vec::new(),
            by_node: BTreeMap::new(),
            seats: BTreeMap::new(),
            generation: Generation(0),
            published: None,
            elastic: None,
            ready: 0,
            gone: 0,
            rendezvous: if spec.rendezvous {
                Rendezvous::Wanted
            } else {
                Rendezvous::NotWanted
            },
            net: Net::Registered,
            before: None,
            program_ready: spec.installed.is_some(),
            dry_run: false,
            fall: Fall::default(),
            ending: None,
            manner: Manner::Careful,
            signals: 0,
            finished: false,
            actions: Vec::new(),
            spec,
        };
        if let Some(elastic) = &job.spec.elastic {
            let limits = limits(elastic, &job.spec);
            // Ids of jobs are random.
            let (elastic, first) = Elastic::new(now, limits, id.0)
                .map_err(|error| Refusal::new(RefusalKind::Invalid, error.to_string()))?;
            job.elastic = Some(Box::new(elastic));
            job.begin(first, sites);
        } else {
            job.generation = Generation(1);
            job.take_seats(sites)?;
            for part in 0..job.parts.len() {
                job.reserve(part);
            }
        }
        let actions = std::mem::take(&mut job.actions);
        Ok((job, actions))
    }

    /// All seats of a job that never changes its members. Slots are ranks.
    fn take_seats(&mut self, sites: Vec<Site>) -> Result<(), Refusal> {
        let internal =
            |error: RegistrationError| Refusal::new(RefusalKind::Internal, error.to_string());
        let mut registration = Registration::new();
        let mut ranks = (0..).map(Rank);
        for site in sites {
            let mut part = Part::new(site);
            for rank in ranks.by_ref().take(part.site.workers as usize) {
                registration
                    .register(part.site.node, &part.site.hostname, rank)
                    .map_err(internal)?;
                part.slots.push(Slot(rank.0));
            }
            self.by_node.insert(part.site.node, self.parts.len());
            self.parts.push(part);
        }
        for info in registration.finalize().map_err(internal)? {
            let slot = Slot(info.rank.0);
            self.seats.insert(slot, Seat::new(info.member(slot)));
        }
        Ok(())
    }

    /// What to do now that `event` has happened.
    pub fn step(&mut self, now: Instant, event: Event) -> Vec<Action> {
        self.now = now;
        // Before the event counts: what comes too late is what was waited for, and is named.
        if self.ending.is_none()
            && !self.is_elastic()
            && self.phase < Phase::Up
            && now >= self.start_deadline
        {
            self.start_timed_out();
        }
        match event {
            Event::Replied { node, reply } => self.replied(node, reply),
            Event::Pushed { node, answer } => self.pushed(node, answer),
            Event::Node { node, event } => self.node_event(node, event),
            Event::NodeLost {
                node,
                reason,
                fence,
            } => self.node_lost(node, reason, fence),
            Event::Fenced { node, reason } => self.fenced(node, reason),
            Event::Discovered(found) => self.discovered(found),
            Event::Rendezvous(opened) => self.rendezvous_opened(opened),
            Event::Door(process, news) => self.door_news(process, news),
            Event::Driver(frame) => self.driver_says(frame),
            Event::Placed {
                seated,
                without,
                why,
            } if self.is_elastic() => self.placed(seated, without, &why),
            Event::Contended => self.contended(),
            Event::Offered => self.offered(),
            Event::Drain { node, reason } => self.drain(node, reason),
            Event::Evict { node, reason } => self.evict(node, &reason),
            Event::Undrain { node } => self.undrain(node),
            Event::Placed { .. } => self.note("nodes were found that nobody asked for".to_owned()),
            Event::DriverGone => self.stop("its driver is gone".to_owned(), false),
            Event::Stop { reason } => self.stop(reason, false),
            Event::Tick => {}
        }
        if self.is_elastic() {
            self.settle();
        } else {
            self.advance();
        }
        self.finish();
        std::mem::take(&mut self.actions)
    }

    fn driver_says(&mut self, frame: SubmitFrame) {
        match frame {
            SubmitFrame::ProgramReady => self.program_is_there(),
            SubmitFrame::Stop => self.stop("its driver has ended it".to_owned(), true),
            SubmitFrame::Overran { limit_ms } => {
                let limit = Span(Duration::from_millis(limit_ms));
                self.stop(
                    format!("it has run for {limit}, which is its --timeout"),
                    true,
                );
            }
            SubmitFrame::Interrupt => self.interrupt(),
            SubmitFrame::Signal(signal) => self.signal(signal),
            SubmitFrame::Unreachable { generation, why } => self.driver_is_cut_off(generation, why),
            SubmitFrame::Holding { generation } => self.driver_holds(generation),
            SubmitFrame::Kill => self.kill(),
            SubmitFrame::Done => self.done(),
            SubmitFrame::Hosts(hosts) => self.use_hosts(hosts),
        }
    }

    /// Lets the job, which never changes its members, end where its workers would start, as a success if they could. No program of
    /// its driver is waited for. To be said before the first [`Job::step`].
    pub fn run_dry(&mut self) {
        (self.dry_run, self.program_ready) = (true, true);
    }

    /// Whether no worker of it ever starts.
    #[must_use]
    pub fn is_dry_run(&self) -> bool {
        self.dry_run
    }

    /// When to give [`Event::Tick`] at the latest, if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        if self.ending.is_some() {
            return None;
        }
        match &self.elastic {
            Some(elastic) => elastic.wake_at(),
            None => (self.phase < Phase::Up).then_some(self.start_deadline),
        }
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> JobId {
        self.id
    }

    /// What was submitted.
    #[must_use]
    pub fn spec(&self) -> &JobSpec {
        &self.spec
    }

    /// Who submitted it.
    #[must_use]
    pub fn owner(&self) -> DriverId {
        self.owner
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
        Ok(self.generation)
    }

    fn seat(&self, node: NodeId, slot: Slot) -> Result<&Seat, String> {
        self.seats
            .get(&slot)
            .filter(|seat| seat.member.node == node)
            .ok_or_else(|| format!("{} has no slot {slot} on {node}", self.id))
    }

    fn seat_mut(&mut self, node: NodeId, slot: Slot) -> Option<&mut Seat> {
        self.seats
            .get_mut(&slot)
            .filter(|seat| seat.member.node == node)
    }

    fn part(&self, node: NodeId) -> Option<usize> {
        self.by_node.get(&node).copied()
    }

    fn note(&mut self, text: String) {
        self.actions.push(Action::Note(text));
    }
}
