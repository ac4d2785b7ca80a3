//! A job that never changes its members: it starts whole or not at all, and a worker that is lost is told of.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::counted::Counted;
use kolo_wire::ids::{Generation, NodeId, Rank, Slot};
use kolo_wire::span::Span;
use kolo_wire::{
    JobEvent, JobState, NodeEvent, NodeReply, NodeRequest, RankFailure, Refusal, RefusalKind,
    SubmitFrame, WorkerState,
};

use super::base::{Base, Phase, Rendezvous};
use super::end::{Ending, bounded, listed};
use super::messages::{Action, Event, Reply, Site};
use super::parts::{Hold, Part, Push};
use super::seat::Seat;
use crate::ranks::{Registration, RegistrationError};

/// The state of a job whose members never change, beside the state that every job has.
#[derive(Debug)]
pub(super) struct Fixed {
    start_deadline: Instant,
    pub(super) has_program: bool,
    /// It ends where its workers would start.
    pub(super) is_dry_run: bool,
    /// Seats that became ready.
    ready: usize,
    /// Seats whose worker has ended.
    gone: usize,
}

impl Fixed {
    /// Reserves all nodes. Slots are ranks.
    pub(super) fn begin(job: &mut Base, sites: Vec<Site>) -> Result<Self, Refusal> {
        let internal =
            |error: RegistrationError| Refusal::new(RefusalKind::Internal, error.to_string());
        job.generation = Generation(1);
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
            let part = job.parts.add(part);
            job.reserve(part);
        }
        for info in registration.finalize().map_err(internal)? {
            let slot = Slot(info.rank.0);
            job.seats.insert(slot, Seat::new(info.member(slot)));
        }
        Ok(Self {
            start_deadline: job.now + Duration::from_millis(job.spec.start_timeout_ms),
            has_program: job.is_installed(),
            is_dry_run: false,
            ready: 0,
            gone: 0,
        })
    }

    /// When the start has lasted too long.
    pub(super) fn deadline(&self, job: &Base) -> Option<Instant> {
        (job.phase < Phase::Up && job.ending.is_none()).then_some(self.start_deadline)
    }

    pub(super) fn hear(&mut self, job: &mut Base, event: Event) {
        // Before the event counts: what comes too late is what was waited for, and is named.
        if self.deadline(job).is_some_and(|at| job.now >= at) {
            self.start_timed_out(job);
        }
        match event {
            Event::Replied { node, reply } => self.replied(job, node, reply),
            Event::Pushed { node, answer } => match job.pushed(node) {
                Some((part, Push::Membership(_))) => published(job, part, answer),
                Some((part, Push::Order(request))) => job.ordered(part, &request, answer),
                None => {}
            },
            Event::Node { node, event } => self.news(job, node, event),
            Event::NodeLost { node, reason, .. } => self.node_lost(job, node, &reason),
            Event::Discovered(found) => job.discovered(found),
            Event::Rendezvous(Ok(address)) if job.rendezvous == Rendezvous::Opening => {
                job.rendezvous = Rendezvous::Open(address);
            }
            Event::Rendezvous(Err(reason)) if job.rendezvous == Rendezvous::Opening => {
                job.rendezvous = Rendezvous::NotWanted;
                let text = format!("the head could not open the job's rendezvous: {reason}");
                job.fail(RefusalKind::Internal, text);
            }
            Event::Driver(SubmitFrame::ProgramReady) => self.has_program = true,
            event => job.hear(event),
        }
        self.advance(job);
    }

    fn replied(&mut self, job: &mut Base, node: NodeId, reply: Reply) {
        let Some((part, hold)) = job.answered(node) else {
            return;
        };
        match hold {
            Hold::Reserving => match job.reserved(part, reply) {
                Ok(problem) => job.parts[part].problem = problem,
                Err(Refusal { kind, message }) => job.fail(kind, message),
            },
            Hold::Starting => self.started(job, part, reply),
            Hold::Undoing => job.undone(part, reply),
            // It was lost, or said that all is gone, while the request was under way.
            Hold::Reserved | Hold::Running | Hold::Free | Hold::Abandoned | Hold::Lost => {}
        }
    }

    fn started(&mut self, job: &mut Base, part: usize, reply: Reply) {
        job.parts[part].hold = Hold::Running;
        let starting = std::mem::take(&mut job.parts[part].starting);
        match reply {
            Reply::Answer(NodeReply::Started { pids }) => {
                for slot in job.run(part, &starting, pids) {
                    self.is_there(job, slot);
                }
            }
            reply => {
                let kind = match &reply {
                    Reply::Refused(refusal) => refusal.kind,
                    Reply::Answer(_) | Reply::Unknown(_) => RefusalKind::Timeout,
                };
                let (at, why) = (job.parts[part].name(), reply.unexpected());
                job.fail(kind, format!("{at} did not start its workers: {why}"));
            }
        }
        job.after_start(part);
    }

    /// A worker of an installed program runs, or has run: there is nothing else to wait for.
    fn is_there(&mut self, job: &mut Base, slot: Slot) {
        let seat = job
            .seats
            .get_mut(&slot)
            .filter(|_| job.spec.installed.is_some());
        if let Some(seat) = seat.filter(|seat| seat.state == WorkerState::Starting) {
            seat.state = WorkerState::Ready;
            self.ready += 1;
        }
    }

    /// Goes on to the next phase as soon as everything for it is there.
    fn advance(&mut self, job: &mut Base) {
        if job.phase == Phase::Reserve && all_hold(job, Hold::Reserved) && job.ending.is_none() {
            job.check_installed();
            if job.ending.is_some() {
                return;
            }
            job.phase = Phase::Prepare;
            self.has_program |= job.parts.iter().all(|part| part.has_program);
            job.actions.push(Action::Tell(JobEvent::Placed {
                job: job.id,
                nodes: job.placed_nodes(),
            }));
            job.discover();
            if job.rendezvous == Rendezvous::Wanted && job.ending.is_none() {
                job.rendezvous = Rendezvous::Opening;
                let members = job.table().members;
                job.actions.push(Action::OpenRendezvous(members));
            }
        }
        if job.ending.is_some() {
            return;
        }
        if job.phase == Phase::Prepare
            && self.has_program
            && job.rendezvous != Rendezvous::Opening
            && !job.net.is_open()
        {
            if self.is_dry_run {
                let why = "its workers could start, and a dry run starts none";
                return job.end(Ending::success(why));
            }
            self.start_all(job);
        }
        if job.phase == Phase::Boot && self.ready == job.seats.len() && all_hold(job, Hold::Running)
        {
            job.phase = Phase::Publish;
            job.published = Some(Arc::new(job.table()));
            for part in 0..job.parts.len() {
                // Where the program is an installed one there is nobody to tell.
                job.parts[part].has_membership = job.is_installed();
                if !job.is_installed() {
                    job.push(part, Push::Membership(job.generation));
                }
            }
        }
        if job.phase == Phase::Publish && job.parts.iter().all(|part| part.has_membership) {
            job.phase = Phase::Up;
            job.state = JobState::Healthy;
            job.actions.push(Action::Tell(JobEvent::Healthy {
                table: job.table(),
                nodes: job.placed_nodes(),
            }));
        }
    }

    fn start_all(&mut self, job: &mut Base) {
        job.state = JobState::Starting;
        let left = self.start_deadline.saturating_duration_since(job.now);
        let common = job.common_env(job.seats.len() as u32);
        for part in 0..job.parts.len() {
            let seats = job.parts[part].slots.iter();
            let seats = seats.filter_map(|slot| job.seats.get(slot));
            let processes: Vec<_> = seats.map(Seat::process).collect();
            let slots = job.slots(&processes, &common, part as u32);
            job.start(part, job.generation, &common, slots, left);
        }
    }

    /// A node reports what happened to its part of the job.
    fn news(&mut self, job: &mut Base, node: NodeId, event: NodeEvent) {
        let Some(part) = job.reports(node) else {
            return;
        };
        match event {
            NodeEvent::WorkerReady { slot, address, .. } => {
                let has_peers = job.parts.len() > 1;
                match job.seat(node, slot) {
                    Ok(seat) if seat.exit.is_some() => {}
                    Ok(seat) if address.is_none() && has_peers => {
                        let text = format!(
                            "rank {} is ready without an address, which a job on several nodes needs",
                            seat.member.rank
                        );
                        job.fail(RefusalKind::Worker, text);
                    }
                    Ok(_) => self.is_ready(job, slot, address),
                    Err(problem) => job.note(format!("ignored: a worker is ready: {problem}")),
                }
            }
            NodeEvent::WorkerExited {
                slot,
                failure,
                expected,
                ..
            } => {
                if let Err(problem) = job.seat(node, slot) {
                    return job.note(format!("ignored: a worker has ended: {problem}"));
                }
                let mut failure = bounded(failure);
                self.is_there(job, slot);
                if let Some(seat) = job.seats.get_mut(&slot)
                    && seat.exit.is_none()
                {
                    seat.end(&mut failure, expected);
                    self.exited(job, failure, expected);
                    self.all_gone(job);
                }
            }
            NodeEvent::JobGone { .. } => self.job_gone(job, part),
            // All ranks get their notice at the same time: they may have to save together.
            NodeEvent::JobLeft { reason, .. } => {
                let at = job.parts[part].name();
                job.stop(format!("{at} leaves: {reason}"), false);
            }
            // Of groups that change.
            NodeEvent::WorkerUnseen { .. }
            | NodeEvent::Taken { .. }
            | NodeEvent::Committed { .. }
            | NodeEvent::Holding { .. } => {}
        }
    }

    fn is_ready(&mut self, job: &mut Base, slot: Slot, address: Option<std::net::SocketAddr>) {
        let seat = job.seats.get_mut(&slot);
        if let Some(seat) = seat.filter(|seat| seat.state == WorkerState::Starting) {
            seat.member.address = address;
            seat.state = WorkerState::Ready;
            self.ready += 1;
        }
    }

    /// A worker has ended or is lost, as is told to everybody who may wait for it (F-1).
    fn exited(&mut self, job: &mut Base, failure: RankFailure, expected: bool) {
        self.gone += 1;
        if job.ending.is_some() {
            return job.fell_too(failure, expected);
        }
        // That a node was asked to stop a worker of a job that nobody stops is as bad as any other end, and so is any end before
        // all are there.
        let is_early = !job.is_installed() && job.phase < Phase::Up;
        let is_failure = expected || is_early || !failure.exit.is_success();
        if is_failure {
            job.fall.add(job.now, failure.clone());
        }
        if job.is_installed() {
            if is_failure {
                end_of_workers(job, "");
            }
            return;
        }
        if is_early {
            return end_of_workers(job, "a worker ended before the group was ready: ");
        }
        if expected {
            job.note(format!("{failure}; its node had been asked to stop it"));
        }
        job.actions.push(Action::Tell(JobEvent::RankLost {
            generation: job.generation,
            failure: failure.clone(),
        }));
        // Nodes pass it on to workers, which read no last words.
        let mut short = failure;
        short.stderr_tail.clear();
        for part in 0..job.parts.len() {
            let entry = &job.parts[part];
            if entry.hold == Hold::Running && entry.site.node != short.node {
                let request = NodeRequest::RankLost {
                    job: job.id,
                    generation: job.generation,
                    failure: short.clone(),
                };
                job.push(part, request);
            }
        }
    }

    /// Ends the job if no worker is left.
    fn all_gone(&mut self, job: &mut Base) {
        if self.gone < job.seats.len() {
            return;
        }
        if job.fall.cause().is_some() {
            return end_of_workers(job, "all workers have ended; the first cause: ");
        }
        job.end(Ending::success("all workers exited with code 0"));
    }

    fn node_lost(&mut self, job: &mut Base, node: NodeId, reason: &str) {
        let Some(part) = job.parts.there(node) else {
            return;
        };
        job.parts.end(part, Hold::Lost);
        job.parts[part].pushes.queue.clear();
        if job.phase < Phase::Up {
            let at = job.parts[part].name();
            let text = format!("{at} was lost before the group was ready: {reason}");
            job.fail(RefusalKind::NodeLost, text);
        }
        self.lose_seats(job, part, &format!("its node was lost: {reason}"));
    }

    /// The node says that nothing is left of the job.
    fn job_gone(&mut self, job: &mut Base, part: usize) {
        let at = job.parts[part].name();
        match job.parts[part].hold {
            Hold::Reserved => {
                job.free(part);
                let text = format!("{at} gave up its reservation before the group was ready");
                job.fail(RefusalKind::Timeout, text);
            }
            Hold::Running => {
                job.free(part);
                if job.phase < Phase::Up {
                    let text = format!("{at} ended its workers before the group was ready");
                    job.fail(RefusalKind::Worker, text);
                }
                self.lose_seats(job, part, "its node has ended it");
            }
            Hold::Undoing => job.free(part),
            // Its answer is still to come, and says more; or it has none to give any more.
            Hold::Reserving | Hold::Starting | Hold::Free | Hold::Abandoned | Hold::Lost => {}
        }
    }

    fn lose_seats(&mut self, job: &mut Base, part: usize, reason: &str) {
        for slot in job.parts[part].slots.clone() {
            let seat = job.seats.get_mut(&slot);
            if let Some(failure) = seat.and_then(|seat| seat.lose(reason.to_owned())) {
                self.exited(job, failure, false);
            }
        }
        self.all_gone(job);
    }

    /// Fails the job because of its start timeout, naming those who did not come.
    fn start_timed_out(&self, job: &mut Base) {
        let timeout = Span(Duration::from_millis(job.spec.start_timeout_ms));
        let mut message =
            format!("the group was not ready within its start timeout of {timeout}: ");
        match job.phase {
            Phase::Reserve => {
                let missing = listed(&job.parts.names(|part| part.hold == Hold::Reserving));
                let _ = write!(message, "no answer to the reservation from {missing}");
            }
            Phase::Prepare if !self.has_program => {
                message.push_str("its driver did not bring the program to all nodes");
            }
            Phase::Prepare if job.net.is_open() => message.push_str(
                "its nodes were not done with the probe of their network interfaces; give it more time, or name \
                 interfaces that are probed alone (--interfaces)",
            ),
            Phase::Prepare => message.push_str("the rendezvous did not open"),
            Phase::Boot => message.push_str(&ranks_that_did_not_come(job)),
            Phase::Publish | Phase::Up => {
                let names = listed(&job.parts.names(|part| !part.has_membership));
                let _ = write!(message, "the membership was not taken by {names}");
            }
        }
        job.fail(RefusalKind::Timeout, message);
    }
}

fn all_hold(job: &Base, hold: Hold) -> bool {
    job.parts.iter().all(|part| part.hold == hold)
}

/// A node has taken or refused the membership.
fn published(job: &mut Base, part: usize, answer: Result<NodeReply, Refusal>) {
    match answer {
        Ok(_) => job.parts[part].has_membership = true,
        Err(Refusal { kind, message }) => {
            let at = job.parts[part].name();
            job.fail(kind, format!("{at} did not take the membership: {message}"));
        }
    }
}

/// Ends the job because a worker has failed.
fn end_of_workers(job: &mut Base, before: &str) {
    let refusal = Some(Refusal::new(RefusalKind::Worker, ""));
    let ending = Ending::new(JobState::Failed, refusal, String::new());
    job.end(ending.blame(before.to_owned(), Some(before.to_owned())));
}

fn ranks_that_did_not_come(job: &Base) -> String {
    let late = job.seats.values();
    let late = late.filter(|seat| seat.state != WorkerState::Ready);
    let late = late.map(|seat| {
        let process = match seat.pid {
            0 => "no process yet".to_owned(),
            pid => format!("pid {pid} said no hello"),
        };
        format!(
            "rank {} on {} ({}; {process})",
            seat.member.rank, seat.member.hostname, seat.member.node
        )
    });
    let late: Vec<_> = late.collect();
    if late.is_empty() {
        let missing = listed(&job.parts.names(|part| part.hold == Hold::Starting));
        return format!("no answer to the start from {missing}");
    }
    format!(
        "{} of {} did not come: {}",
        late.len(),
        Counted(job.seats.len(), "worker"),
        listed(&late)
    )
}
