//! The head as one state machine.
//!
//! [`HeadCore::step`] takes an [`Input`] and gives the [`Output`]s that follow from it. Equal inputs give equal outputs.

mod fit;
mod jobs;
mod network;
mod peers;
mod questions;
mod running;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt::Display;
use std::time::{Duration, Instant};

use kolo_wire::ids::{JobId, NodeId, Slot};
use kolo_wire::span::Span;
use kolo_wire::{
    HeadReply, NodeEvent, NodeRegistration, NodeRequest, Obituary, Refusal, RefusalKind,
};

use self::peers::{Peer, Peers, disconnected};
use self::running::Jobs;
use super::agenda::Agenda;
use super::cleaning::{self, Cleaning, is_confirmed};
use super::drains::Drains;
use super::history::History;
use super::job::{Event, Reply};
use super::messages::{AskId, Input, Level, Line, LinkEnd, Now, Output, RequestId, Settings};
use super::probes::{Probes, Waiter};
use super::registry::{NodeRegistry, Session};
use super::requests::{OVERTIME, Open, Purpose, Requests};
use crate::fence::{self, Fence};
use crate::head::milliseconds;
use crate::pace::Pace;

/// Something that is to be done at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// Look for leases that have run out.
    Leases,
    /// Give a request up.
    Request(RequestId),
    /// Try a push again.
    Push(JobId, NodeId),
    /// Ask a node again to stop a job.
    Clean(Session, NodeId, JobId),
    /// Let a job look at its own deadline.
    Job(JobId),
    /// The drain of a node has lasted long enough.
    Evict(NodeId),
    /// Tell jobs that there may be room.
    Offers,
}

/// Something that follows from a step and must not interrupt it.
#[derive(Debug)]
enum Due {
    Job(JobId, Event),
    /// Find nodes for seats, not on these hosts.
    Seat(JobId, Vec<Slot>, Vec<String>),
    Replied(RequestId, Reply),
}

/// The state machine.
#[derive(Debug)]
pub struct HeadCore {
    settings: Settings,
    started: Instant,
    now: Now,
    peers: Peers,
    registry: NodeRegistry,
    cleaning: Cleaning,
    jobs: Jobs,
    history: History,
    probes: Probes,
    drains: Drains,
    requests: Requests,
    agenda: Agenda<Timer>,
    due: VecDeque<Due>,
    /// The number of living nodes may have changed in this step.
    count_alive: bool,
    outputs: Vec<Output>,
}

impl HeadCore {
    /// A head without nodes and jobs.
    #[must_use]
    pub fn new(now: impl Into<Now>, mut settings: Settings) -> Self {
        let now = now.into();
        let slowest = Pace::new(settings.heartbeat, settings.lease).of(usize::MAX);
        let fence = fence::of_head(slowest.lease, slowest.heartbeat);
        settings.job.fence = settings.job.fence.max(fence);
        Self {
            registry: NodeRegistry::new(Pace::new(settings.heartbeat, settings.lease)),
            settings,
            started: now.real,
            now,
            peers: Peers::default(),
            cleaning: Cleaning::default(),
            jobs: Jobs::default(),
            history: History::default(),
            probes: Probes::default(),
            drains: Drains::default(),
            requests: Requests::default(),
            agenda: Agenda::default(),
            due: VecDeque::new(),
            count_alive: false,
            outputs: Vec::new(),
        }
    }

    /// Tells what to do now that `input` has come.
    #[must_use]
    pub fn step(&mut self, now: impl Into<Now>, input: Input) -> Vec<Output> {
        self.now = now.into();
        match input {
            Input::Connected {
                session,
                peer,
                remote,
                local,
            } => {
                let peer = Peer {
                    identity: peer,
                    remote,
                    local,
                    registered: false,
                };
                self.peers.insert(session, peer);
            }
            Input::Disconnected {
                session,
                reason,
                fence,
            } => {
                let peer = self.peers.remove(&session);
                if let Some(node) = peer.and_then(|peer| peer.identity.node()) {
                    self.lose(node, session, &reason, fence);
                }
            }
            Input::Heard(beats) => self.heard(beats),
            Input::Obituary(obituary) => self.bury(obituary),
            Input::Asked { ask, question } => {
                if let Some(reply) = self.asked(ask, question) {
                    self.answer(ask, reply);
                }
            }
            Input::Forget(ask) => self.forget(ask),
            Input::Submit {
                session,
                job,
                spec,
                dry_run,
            } => self.submit(session, job, *spec, dry_run),
            Input::Frame(job, frame) => self.step_job(job, Event::Driver(frame)),
            Input::DriverGone(job) => self.step_job(job, Event::DriverGone),
            Input::Replied(request, reply) => self.replied(request, reply),
            Input::Door(job, process, news) => self.step_job(job, Event::Door(process, news)),
            Input::RendezvousOpened(job, opened) => self.step_job(job, Event::Rendezvous(opened)),
            Input::Tick => self.tick(),
        }
        self.run_due();
        if std::mem::take(&mut self.count_alive) {
            let alive = Output::Alive(self.registry.alive_count());
            self.outputs.push(alive);
        }
        std::mem::take(&mut self.outputs)
    }

    /// When to give [`Input::Tick`], if nothing comes before. By [`Now::awake`].
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.agenda.next()
    }

    fn run_due(&mut self) {
        loop {
            while let Some(due) = self.due.pop_front() {
                match due {
                    Due::Job(job, event) => self.step_job(job, event),
                    Due::Seat(job, slots, avoid) => self.seat(job, &slots, &avoid),
                    Due::Replied(request, reply) => self.replied(request, reply),
                }
            }
            // Once for all that was freed meanwhile.
            if !self.tell_offered() {
                return;
            }
        }
    }

    fn tick(&mut self) {
        while let Some(timer) = self.agenda.take_due(self.now.awake) {
            match timer {
                Timer::Leases => self.check_leases(),
                Timer::Request(request) => self.give_up(request),
                Timer::Push(job, node) => self.resume(job, node),
                Timer::Clean(session, node, job) => self.ask_to_stop(session, node, job),
                Timer::Job(job) => self.step_job(job, Event::Tick),
                Timer::Evict(node) => self.evict(node),
                Timer::Offers => self.tell_all_offered(),
            }
            self.run_due();
        }
    }

    fn log(
        &mut self,
        level: Level,
        (job, node): (impl Into<Option<JobId>>, impl Into<Option<NodeId>>),
        text: impl Into<String>,
    ) {
        self.outputs.push(Output::Log(Line {
            level,
            job: job.into(),
            node: node.into(),
            text: text.into(),
            group: None,
        }));
    }

    fn answer(&mut self, ask: AskId, reply: HeadReply) {
        self.outputs.push(Output::Answer(ask, Box::new(reply)));
    }

    fn forget(&mut self, ask: AskId) {
        self.drains.forget(ask);
        for running in self.jobs.values_mut() {
            running.stops.retain(|other| *other != ask);
        }
        self.leave_probes(Waiter::Ask(ask));
    }

    fn set_timer(&mut self, timer: Timer, after: Duration) {
        // A time that no clock has never comes.
        self.agenda.set(timer, self.now.awake.checked_add(after));
    }

    // Nodes.

    fn heard(&mut self, beats: Vec<(Session, Instant)>) {
        for (session, at) in beats {
            let peer = self.peers.get(&session);
            if let Some(node) = peer.and_then(|peer| peer.identity.node()) {
                self.registry.beat(at, node, session);
            }
        }
    }

    fn check_leases(&mut self) {
        for (node, session, silent) in self.registry.expired(self.now.awake) {
            let reason = format!("no heartbeat for {}", Span::rough(silent));
            self.lose(node, session, &reason, Fence::Lease);
        }
        self.agenda.set(Timer::Leases, self.registry.next_expiry());
    }

    /// A node introduces itself over the connection `session`.
    fn register(
        &mut self,
        session: Session,
        mut registration: NodeRegistration,
    ) -> Result<HeadReply, Refusal> {
        let node = self.peers.introduced(session, &registration)?;
        let Some(peer) = self.peers.get_mut(&session) else {
            return Err(disconnected());
        };
        // A daemon that listens on all interfaces is reached where it comes from.
        if registration.address.ip().is_unspecified() {
            registration.address.set_ip(peer.remote.to_canonical());
        }
        let (hostname, resources) = (&registration.hostname, &registration.resources);
        let text = format!("a node has registered: {hostname}, {resources}");
        let admission = self
            .registry
            .register(self.now.awake, session, registration)?;
        peer.registered = true;
        self.log(Level::Info, (None, node), text);
        if !self.agenda.has(Timer::Leases) {
            self.agenda.set(Timer::Leases, self.registry.next_expiry());
        }
        if let Some(old) = admission.replaced {
            let reason = "the node has registered again";
            let end = (LinkEnd::Replaced, Fence::Lease);
            self.end_stay(node, old, end, &admission.stale, reason);
        }
        for job in admission.stale {
            self.clean_up(session, node, job);
        }
        self.undrained(node);
        self.jobs.offer(node, None);
        self.count_alive = true;
        Ok(HeadReply::Registered {
            heartbeat_ms: milliseconds(admission.pace.heartbeat),
            lease_ms: milliseconds(admission.pace.lease),
            revoked: kolo_wire::RevocationList::default(),
        })
    }

    /// The stay of a node is over, unless it was over before.
    fn lose(&mut self, node: NodeId, session: Session, reason: &str, fence: Fence) {
        let has_left = fence == Fence::Left;
        if has_left {
            self.registry.say_goodbye(node, session);
        }
        let Some(jobs) = self.registry.lose(node, session) else {
            return;
        };
        if has_left && jobs.is_empty() {
            self.log(Level::Info, (None, node), "a node has left");
        } else {
            let text = format!("a node is lost, with {} jobs: {reason}", jobs.len());
            self.log(Level::Warn, (None, node), text);
        }
        self.end_stay(node, session, (LinkEnd::Lost, fence), &jobs, reason);
        self.count_alive = true;
    }

    /// A warden says that its daemon is dead and has left nothing of a job, or somebody who knows no secret of that daemon.
    fn bury(&mut self, obituary: Obituary) {
        let Obituary { node, job, seal } = obituary;
        let Some(stay) = self.registry.sealed(node, seal) else {
            return;
        };
        let reason = "its daemon has died";
        if let Some(session) = stay {
            self.lose(node, session, reason, Fence::Wardens);
        }
        let reason = reason.to_owned();
        self.step_job(job, Event::Fenced { node, reason });
    }

    fn end_stay(
        &mut self,
        node: NodeId,
        session: Session,
        (end, fence): (LinkEnd, Fence),
        jobs: &[JobId],
        reason: &str,
    ) {
        let close = Output::CloseLink(session, end, reason.to_owned());
        self.outputs.push(close);
        for job in self.cleaning.end(session) {
            self.agenda.set(Timer::Clean(session, node, job), None);
        }
        for job in jobs {
            self.drop_outbox(*job, node);
            if let Some(running) = self.jobs.get_mut(job) {
                running.trials.passed(node);
            }
            let reason = reason.to_owned();
            let event = Event::NodeLost {
                node,
                reason,
                fence,
            };
            self.due.push_back(Due::Job(*job, event));
        }
        for request in self.requests.of(session) {
            self.outputs.push(Output::Cancel(request));
            let reply = Reply::Unknown(reason.to_owned());
            self.due.push_back(Due::Replied(request, reply));
        }
        self.run_due();
        self.settle_drains();
    }

    /// A node says what has happened there.
    fn report(&mut self, node: NodeId, session: Session, events: Vec<NodeEvent>) {
        for event in events {
            let job = event.job();
            if matches!(event, NodeEvent::JobLeft { .. }) {
                // It leaves with all its jobs, and would refuse others.
                self.registry.leave(node, session);
            }
            if let Some(running) = self.jobs.get_mut(&job) {
                if matches!(event, NodeEvent::JobGone { .. }) {
                    running.trials.passed(node);
                }
                self.due
                    .push_back(Due::Job(job, Event::Node { node, event }));
                self.run_due();
            } else if matches!(event, NodeEvent::JobGone { .. }) {
                self.free(job, node);
                self.settle_drains();
            } else if self.history.find(job).is_none() {
                self.report_of_unknown(node, session, job);
            }
        }
    }

    fn report_of_unknown(&mut self, node: NodeId, session: Session, job: JobId) {
        if !self.cleaning.is_full(session) {
            self.clean_up(session, node, job);
        } else if self.cleaning.complains(self.now.awake) {
            let text = "a node reports too many jobs that nobody knows";
            self.log(Level::Warn, (job, node), text);
        }
    }

    /// Answers those whose wait for the end of jobs is over.
    fn settle_drains(&mut self) {
        for ask in self.drains.settle(&self.registry, !self.jobs.is_empty()) {
            self.answer(ask, HeadReply::Done);
        }
    }

    // Jobs that a node should not have.

    /// Asks a node to stop a job, until the node confirms or its stay is over.
    fn clean_up(&mut self, session: Session, node: NodeId, job: JobId) {
        if self.cleaning.begin(session, job) {
            self.ask_to_stop(session, node, job);
        }
    }

    fn ask_to_stop(&mut self, session: Session, node: NodeId, job: JobId) {
        let request = NodeRequest::Stop {
            job,
            reason: "the head does not count on it any more".to_owned(),
            interrupt: false,
        };
        let purpose = Purpose::Clean(node, job);
        self.send(session, request, cleaning::LIMIT, purpose);
    }

    fn cleaned(&mut self, session: Session, node: NodeId, job: JobId, reply: &Reply) {
        if is_confirmed(reply) {
            self.cleaning.confirmed(session, job);
            self.log(
                Level::Info,
                (job, node),
                "a node has stopped a job of before",
            );
            self.free(job, node);
            // A daemon that does not know of the job knows nothing of its workers either.
            let stay = self.registry.alive(node);
            if stay.is_some_and(|(stay, of)| of == session && stay.jobs.contains(&job)) {
                let reason = "its node has stopped what was left there".to_owned();
                self.step_job(job, Event::Fenced { node, reason });
            }
            self.settle_drains();
        } else if let Some((failures, pause)) = self.cleaning.failed(session, job) {
            // Once: it goes on until it works or the node is lost, both of which are logged.
            if failures == 0 {
                let text =
                    format!("a node does not stop a job; it is asked until it does: {reply:?}");
                self.log(Level::Warn, (job, node), text);
            }
            self.set_timer(Timer::Clean(session, node, job), pause);
        }
    }

    // Room.

    /// Seats of a job are not needed on a node any more.
    pub(super) fn give_back(&mut self, id: JobId, node: NodeId, workers: u32) {
        let Some(running) = self.jobs.get(&id) else {
            return;
        };
        let resources = running.job.spec().per_worker.times(workers);
        self.registry.give_back(id, node, &resources);
        if let Some(running) = self.jobs.get_mut(&id) {
            running.trials.passed(node);
        }
        // The job itself has left them on purpose.
        self.jobs.offer(node, Some(id));
    }

    /// Nothing of a job is left on a node.
    pub(super) fn free(&mut self, id: JobId, node: NodeId) {
        self.registry.free(id, node);
        let running = self.jobs.get_mut(&id);
        let has_failed = running.is_some_and(|running| running.trials.left(node));
        if has_failed {
            // It looks elsewhere: there may have been room all the time.
            self.jobs.tell(id);
        }
        self.jobs.offer(node, has_failed.then_some(id));
    }

    /// Tells those that wait for room. False if there is nobody to tell now. In a large cluster a look for room takes as long as the
    /// cluster is large, and nodes seldom come one by one: they are told a microsecond for each node later.
    pub(super) fn tell_offered(&mut self) -> bool {
        const LARGE: usize = 1000;
        let nodes = self.registry.alive_count();
        if self.jobs.offered.is_empty() {
            return false;
        }
        if nodes >= LARGE {
            if !self.agenda.has(Timer::Offers) {
                self.set_timer(Timer::Offers, Duration::from_micros(nodes as u64));
            }
            return false;
        }
        self.tell_all_offered();
        true
    }

    /// The oldest job is told first.
    pub(super) fn tell_all_offered(&mut self) {
        for (_, id) in std::mem::take(&mut self.jobs.offered) {
            self.due.push_back(Due::Job(id, Event::Offered));
        }
    }

    // Requests.

    fn send(
        &mut self,
        session: Session,
        message: NodeRequest,
        deadline: Duration,
        purpose: Purpose,
    ) -> RequestId {
        let request = self.requests.open(session, purpose, deadline);
        if self.peers.contains_key(&session) {
            self.set_timer(Timer::Request(request), deadline.saturating_add(OVERTIME));
            let send = Output::Send(request, Box::new(message), deadline);
            self.outputs.push(send);
        } else {
            let reply = Reply::Unknown("there is no connection to it".to_owned());
            self.due.push_back(Due::Replied(request, reply));
        }
        request
    }

    fn cancel(&mut self, request: RequestId) {
        if self.requests.close(request).is_some() {
            self.agenda.set(Timer::Request(request), None);
            self.outputs.push(Output::Cancel(request));
        }
    }

    /// A request has no reply in time.
    fn give_up(&mut self, request: RequestId) {
        if let Some(Open { deadline, .. }) = self.requests.get(request) {
            let reply = Reply::Unknown(format!("no answer within {deadline:?}"));
            self.outputs.push(Output::Cancel(request));
            self.due.push_back(Due::Replied(request, reply));
        }
    }

    fn replied(&mut self, request: RequestId, reply: Reply) {
        // One that was cancelled may have been replied at the same time.
        let Some(Open { purpose, .. }) = self.requests.close(request) else {
            return;
        };
        self.agenda.set(Timer::Request(request), None);
        match purpose {
            Purpose::Job(job, node) => {
                self.tried(job, node, &reply);
                self.step_job(job, Event::Replied { node, reply });
            }
            Purpose::Push(job, node) => self.pushed(job, node, reply),
            Purpose::Clean(node, job) => self.cleaned(request.session, node, job, &reply),
            Purpose::Probe(probe, node) => {
                let step = self.probes.replied(probe, request, node, reply);
                self.go_on(probe, step);
            }
        }
    }
}

fn unknown_job(job: impl Display) -> Refusal {
    Refusal::new(
        RefusalKind::NotFound,
        format!("the head knows no {job}; `kolo jobs` lists those that it knows"),
    )
}
