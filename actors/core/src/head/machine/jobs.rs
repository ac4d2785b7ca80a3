//! Jobs: each has its nodes and its [`Job`], whose actions are carried out here.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kolo_wire::ids::{DriverId, JobId, NodeId, Slot};
use kolo_wire::{
    Followers, HeadReply, JobEvent, JobSpec, JobState, NodeReply, NodeRequest, OnChange, Placement,
    Refusal, RefusalKind,
};

use super::fit::{allowed, as_it_begins, at_most, missing};
use super::running::{Contact, Running, Trials};
use super::{Due, HeadCore, Timer};
use crate::head::history::MAX_JOBS;
use crate::head::job::{Action, Event, Job, Next, Reply, Seating, Site};
use crate::head::messages::{Level, Line, Opening, Output};
use crate::head::outbox::{Outbox, Tables};
use crate::head::probes::Waiter;
use crate::head::registry::Session;
use crate::head::requests::Purpose;
use crate::head::validate::validate;
use crate::placement::{Offer, PlacementError, Share, lay_out, place};
use crate::rendezvous::DoorOpening;

/// How long a node may take for one push before it is tried again.
const PUSH_LIMIT: Duration = Duration::from_secs(5);

/// Whether nodes may come to the job, while its processes go on.
fn keeps_processes(spec: &JobSpec) -> bool {
    let elastic = spec.elastic.as_deref();
    elastic.is_some_and(|elastic| elastic.on_change != OnChange::Restart)
}

impl HeadCore {
    pub(super) fn submit(&mut self, session: Session, job: JobId, spec: JobSpec, dry_run: bool) {
        let owner = self.peers.driver_of(session);
        let taken = owner.and_then(|owner| self.place(job, owner, spec, dry_run));
        match taken {
            Ok(actions) => self.act(job, actions),
            Err(refusal) => {
                let level = match refusal.kind {
                    RefusalKind::Internal => Level::Error,
                    _ => Level::Info,
                };
                let text = format!("a job is refused: {}", refusal.message);
                self.log(level, (job, None), text);
                let ended = JobEvent::Ended {
                    state: JobState::Failed,
                    refusal: Some(refusal),
                    failure: None,
                    stopped: None,
                    followers: Followers::default(),
                };
                self.tell(job, ended);
            }
        }
    }

    /// The refusal of a job that has no room. `any_node`: the head was to choose the nodes.
    fn no_room(&self, error: PlacementError, any_node: bool) -> Refusal {
        let waits = error.fits_when_idle();
        let mut refusal = Refusal::from(error);
        if waits {
            let remedy = ": wait for that (`kolo run` does with --wait DURATION), or ask for less";
            refusal.message.push_str(remedy);
        }
        let drained = self.registry.drained();
        if any_node && !drained.is_empty() {
            let names = drained.join(", ");
            refusal.message.extend([
                "\n  drained, so left out: ",
                &names,
                "; kolo node undrain NODE",
            ]);
        }
        refusal
    }

    /// Checks a job, chooses its nodes, and books what it wants there. The first actions.
    fn place(
        &mut self,
        id: JobId,
        owner: DriverId,
        mut spec: JobSpec,
        dry_run: bool,
    ) -> Result<Vec<Action>, Refusal> {
        if let Some(reason) = &self.drains.stopping {
            return Err(Refusal::new(RefusalKind::Stopped, reason.clone()));
        }
        validate(&spec)?;
        if self.jobs.len() >= MAX_JOBS {
            return Err(Refusal::new(
                RefusalKind::Busy,
                format!("{MAX_JOBS} jobs run, which is the most; try again when one has ended"),
            ));
        }
        if self.jobs.contains_key(&id) || self.history.find(id).is_some() {
            return Err(internal("the id of the job is taken"));
        }
        let offers = self.registry.offers();
        if dry_run {
            as_it_begins(&mut spec, &offers)?;
        }
        let shares = if let Some(elastic) = &spec.elastic {
            // It waits for the rest, as for a rank that is lost later.
            let most = elastic.max.saturating_add(elastic.spares);
            let offers = allowed(offers, elastic.hosts.as_deref(), |_| 0);
            at_most(most, &spec, &offers, |_| 0)
        } else if spec.layout.is_empty() {
            place(spec.placement, &spec.per_worker, &offers)
                .map_err(|error| self.no_room(error, true))?
        } else {
            lay_out(&spec.layout, &spec.per_worker, &offers)
                .map_err(|error| self.no_room(error, false))?
        };
        let mut sites = Vec::with_capacity(shares.len());
        let mut contacts = BTreeMap::new();
        for share in &shares {
            let Some((site, contact)) = self.site(*share) else {
                return Err(internal("the placement chose a node that is lost"));
            };
            sites.push(site);
            contacts.insert(share.node, contact);
        }
        let wanted: Vec<_> = shares
            .iter()
            .map(|share| (share.node, spec.per_worker.times(share.workers)))
            .collect();
        let nodes: Vec<NodeId> = shares.iter().map(|share| share.node).collect();
        // An elastic job may have no node yet.
        let network = if nodes.is_empty() {
            None
        } else {
            let may_grow = keeps_processes(&spec);
            Some(self.plan_network(&nodes, &spec.interfaces, spec.no_cache, may_grow)?)
        };
        let (mut job, actions) =
            Job::submit(self.now.awake, id, owner, spec, sites, self.settings.job)?;
        if let Some(plan) = network {
            job.connect_by(plan);
        }
        if dry_run {
            job.run_dry();
        }
        if !self.registry.hold(id, &wanted) {
            return Err(internal("the placement chose what is not free"));
        }
        let what = if dry_run { "dry run" } else { "job" };
        let text = format!("a {what} of {owner} is placed on {} nodes", nodes.len());
        self.log(Level::Info, (id, None), text);
        self.jobs.count += 1;
        let mut trials = Trials::default();
        for node in nodes {
            trials.begin(node);
        }
        let running = Running {
            job,
            number: self.jobs.count,
            since: self.now.real,
            contacts,
            outboxes: BTreeMap::new(),
            tables: Tables::default(),
            trials,
            stops: Vec::new(),
        };
        self.jobs.insert(id, running);
        Ok(actions)
    }

    /// Something has happened to a job. Nothing happens to those that have ended.
    pub(super) fn step_job(&mut self, id: JobId, event: Event) {
        if let Some(running) = self.jobs.get_mut(&id) {
            let actions = running.job.step(self.now.awake, event);
            self.act(id, actions);
        }
    }

    fn act(&mut self, id: JobId, actions: Vec<Action>) {
        for action in actions {
            match action {
                // It has the node for itself: pushes of before are pointless now.
                Action::Request {
                    node,
                    request,
                    deadline,
                } => {
                    self.drop_outbox(id, node);
                    if let (NodeRequest::Start(_), Some(running)) =
                        (&*request, self.jobs.get_mut(&id))
                    {
                        running.trials.passed(node);
                    }
                    let session = self.session_of(id, node);
                    let purpose = Purpose::Job(id, node);
                    debug_assert!(!self.requests.has(session, purpose), "one at a time");
                    self.send(session, *request, deadline, purpose);
                }
                Action::Push(node) => {
                    if let Some(running) = self.jobs.get_mut(&id) {
                        let outbox = running.outboxes.entry(node);
                        outbox.or_insert_with(Outbox::new);
                    }
                    self.deliver(id, node);
                }
                Action::Tell(event) => self.tell(id, event),
                Action::Discover(discovery) => {
                    if let Some(running) = self.jobs.get(&id) {
                        let anew = running.job.spec().no_cache;
                        self.find_network(*discovery, anew, Waiter::Job(id));
                    }
                }
                Action::OpenRendezvous(members) => {
                    if let Some(running) = self.jobs.get(&id) {
                        let contacts = running.contacts.values();
                        let opening = Opening {
                            job: id,
                            members,
                            peers: contacts.map(|contact| contact.ip).collect(),
                            local: running.local_ip(),
                        };
                        self.outputs.push(Output::OpenRendezvous(opening));
                    }
                }
                Action::OpenDoor(process, node, hostname) => {
                    if let Some(running) = self.jobs.get(&id) {
                        let contact = running.contacts.get(&node);
                        self.outputs.push(Output::OpenDoor(DoorOpening {
                            job: id,
                            process,
                            node,
                            hostname,
                            peers: contact.map(|contact| contact.ip).into_iter().collect(),
                            local: running.local_ip(),
                        }));
                    }
                }
                Action::Admit(table) => self.outputs.push(Output::Admit(table)),
                Action::Notice(process, number) => {
                    self.outputs.push(Output::Notice(id, process, number));
                }
                Action::CloseDoor(process) => self.outputs.push(Output::CloseDoor(id, process)),
                Action::CloseRendezvous => self.outputs.push(Output::CloseRendezvous(id)),
                Action::Place { slots, avoid } => {
                    self.due.push_back(Due::Seat(id, slots, avoid));
                }
                Action::GiveBack { node, workers } => self.give_back(id, node, workers),
                Action::Free(node) => self.free(id, node),
                Action::Abandon(node) => {
                    if let Some(running) = self.jobs.get_mut(&id) {
                        running.trials.passed(node);
                    }
                    if let Some((_, session)) = self.registry.alive(node) {
                        self.clean_up(session, node, id);
                    }
                }
                Action::Note(text) => self.log(Level::Info, (id, None), text),
                Action::Group(group) => self.outputs.push(Output::Log(Line {
                    level: Level::Info,
                    job: Some(id),
                    node: None,
                    text: format!("the group is {}", group.state),
                    group: Some(group),
                })),
                Action::Finished => self.finished(id),
            }
        }
        let deadline = self
            .jobs
            .get(&id)
            .and_then(|running| running.job.deadline());
        self.agenda.set(Timer::Job(id), deadline);
        // After the driver was told: it may want what is free now.
        self.settle_drains();
    }

    fn finished(&mut self, id: JobId) {
        let Some(running) = self.jobs.remove(&id) else {
            return;
        };
        for (node, outbox) in &running.outboxes {
            self.agenda.set(Timer::Push(id, *node), None);
            if let Some(request) = outbox.under_way() {
                self.cancel(request);
            }
        }
        self.leave_probes(Waiter::Job(id));
        let info = running.info(self.now);
        let reason = info.reason.as_deref().unwrap_or_default();
        let text = format!("a job has ended: {}, {reason}", info.state);
        self.log(Level::Info, (id, None), text);
        if !running.job.is_dry_run() {
            self.history.push(running.number, self.now.real, info);
        }
        // Whoever asked for a rendezvous while the job ran has been told so before.
        self.outputs.push(Output::CloseRendezvous(id));
        for ask in running.stops {
            self.answer(ask, HeadReply::Done);
        }
    }

    fn tell(&mut self, job: JobId, event: JobEvent) {
        self.outputs.push(Output::Tell(job, Box::new(event)));
    }

    fn session_of(&self, id: JobId, node: NodeId) -> Session {
        let running = self.jobs.get(&id);
        let contact = running.and_then(|running| running.contacts.get(&node));
        contact.map_or(Session::NONE, |contact| contact.session)
    }

    /// Delivers the next thing to a node, unless something is under way there.
    fn deliver(&mut self, id: JobId, node: NodeId) {
        let Some(running) = self.jobs.get_mut(&id) else {
            return;
        };
        if !running.outboxes.get(&node).is_some_and(Outbox::is_idle) {
            return;
        }
        let request = match running.job.next_push(node) {
            Some(Next::Order(request)) => Some(*request),
            Some(Next::Membership) if running.tables.admit(node) => running.job.membership(node),
            Some(Next::Membership) | None => None,
        };
        let Some(request) = request else {
            return;
        };
        let session = self.session_of(id, node);
        let request = self.send(session, request, PUSH_LIMIT, Purpose::Push(id, node));
        if let Some(outbox) = self.outbox(id, node) {
            outbox.sent(request);
        }
    }

    /// Delivers the table to nodes that wait for their turn.
    fn deliver_tables(&mut self, id: JobId) {
        while let Some(node) = (self.jobs.get_mut(&id)).and_then(|it| it.tables.next()) {
            self.deliver(id, node);
        }
    }

    fn outbox(&mut self, id: JobId, node: NodeId) -> Option<&mut Outbox> {
        self.jobs.get_mut(&id)?.outboxes.get_mut(&node)
    }

    /// A delivery has come to its end.
    pub(super) fn pushed(&mut self, id: JobId, node: NodeId, reply: Reply) {
        let Some(running) = self.jobs.get_mut(&id) else {
            return;
        };
        running.tables.over(node);
        let Some(outbox) = running.outboxes.get_mut(&node) else {
            return;
        };
        let answer = match reply {
            Reply::Unknown(reason) => {
                let first = outbox.failures() == 0;
                let pause = outbox.failed();
                // Once: its end is logged too.
                if first {
                    let text = format!("a push does not work; it is tried until it does: {reason}");
                    self.log(Level::Warn, (id, node), text);
                }
                self.set_timer(Timer::Push(id, node), pause);
                return self.deliver_tables(id);
            }
            Reply::Answer(answer) => Ok(answer),
            Reply::Refused(refusal) => Err(refusal),
        };
        let failures = outbox.taken();
        if failures > 0 {
            let text = format!("a push works again; it had failed {failures} times");
            self.log(Level::Info, (id, node), text);
        }
        self.step_job(id, Event::Pushed { node, answer });
        self.deliver(id, node);
        self.deliver_tables(id);
    }

    /// The pause after a push that did not work is over.
    pub(super) fn resume(&mut self, id: JobId, node: NodeId) {
        if let Some(outbox) = self.outbox(id, node) {
            outbox.resume();
            self.deliver(id, node);
        }
    }

    /// What was to be delivered to a node is pointless now.
    pub(super) fn drop_outbox(&mut self, id: JobId, node: NodeId) {
        let Some(running) = self.jobs.get_mut(&id) else {
            return;
        };
        running.tables.over(node);
        let Some(outbox) = running.outboxes.remove(&node) else {
            return;
        };
        self.agenda.set(Timer::Push(id, node), None);
        if let Some(request) = outbox.under_way() {
            self.cancel(request);
        }
        let failures = outbox.failures();
        if failures > 0 {
            let text =
                format!("a push that failed {failures} times is given up: it is pointless now");
            self.log(Level::Info, (id, node), text);
        }
        self.deliver_tables(id);
    }

    // Room for elastic jobs: seats are found while a job runs.

    /// Where a job's workers are reached.
    pub(super) fn site(&self, share: Share) -> Option<(Site, Contact)> {
        let (registration, session) = self.registry.alive(share.node)?;
        let site = Site {
            node: share.node,
            hostname: registration.hostname.clone(),
            address: registration.address,
            workers: share.workers,
        };
        let contact = Contact {
            session,
            ip: registration.address.ip(),
            local: self.peers.get(&session).and_then(|peer| peer.local),
        };
        Some((site, contact))
    }

    /// Finds nodes for seats of an elastic job, books what they need, and tells the job.
    pub(super) fn seat(&mut self, id: JobId, slots: &[Slot], avoid: &[String]) {
        let Some(running) = self.jobs.get(&id).filter(|running| running.job.may_grow()) else {
            return;
        };
        let held: BTreeMap<NodeId, u32> = running.job.held().collect();
        let offers = self.offers_to(id, running, &held, avoid);
        let spec = running.job.spec();
        let there = |node| held.get(&node).copied().unwrap_or_default();
        let wanted = u32::try_from(slots.len()).unwrap_or(u32::MAX);
        let mut shares = at_most(wanted, spec, &offers, there);
        let mut why = self.jobs.give_way(id, &mut shares);
        if why.is_empty() && shares.iter().map(|share| share.workers).sum::<u32>() < wanted {
            why = missing(running, wanted, offers, there, avoid);
        }
        if let Err(refusal) = self.book(id, &mut shares) {
            why = refusal;
        }
        let mut slots = slots.iter().copied();
        let mut seated = Vec::with_capacity(shares.len());
        for share in shares {
            let Some((site, contact)) = self.site(share) else {
                continue;
            };
            if let Some(running) = self.jobs.get_mut(&id) {
                running.contacts.insert(share.node, contact);
            }
            let slots = slots.by_ref().take(share.workers as usize).collect();
            seated.push(Seating { site, slots });
        }
        if !seated.is_empty() {
            let seats: usize = seated.iter().map(|seating| seating.slots.len()).sum();
            let text = format!(
                "an elastic job gets {seats} seats on {} nodes",
                seated.len()
            );
            self.log(Level::Info, (id, None), text);
        }
        let event = Event::Placed {
            seated,
            without: slots.collect(),
            why,
        };
        self.step_job(id, event);
        if let Some(job) = self.jobs.youngest_of_several(id) {
            self.due.push_back(Due::Job(job, Event::Contended));
        }
    }

    /// The nodes that may take seats of a job.
    fn offers_to(
        &self,
        id: JobId,
        running: &Running,
        held: &BTreeMap<NodeId, u32>,
        avoid: &[String],
    ) -> Vec<Offer> {
        let is_spread = matches!(running.job.spec().placement, Placement::Spread { .. });
        let may = |offer: &Offer| {
            let node = offer.node;
            let is_taken = is_spread && held.contains_key(&node);
            if is_taken || avoid.contains(&offer.hostname) || !running.job.takes_seats(node) {
                return false;
            }
            // What is left of an earlier stay there is stopped by the name of the job.
            let is_stale = || {
                let stay = self.registry.alive(node);
                let is_asked = |(_, session)| self.cleaning.is_asked(session, id);
                self.registry.holds(id, node) || stay.is_some_and(is_asked)
            };
            held.contains_key(&node) || !(is_stale() || running.trials.unfit.contains(&node))
        };
        let mut offers = self.registry.offers();
        offers.retain(may);
        allowed(offers, running.job.hosts(), |node| {
            held.get(&node).copied().unwrap_or_default()
        })
    }

    /// Books shares for a job that runs, and finds out what connects new nodes with the others. Shares that can't be had are
    /// taken off; the reason is the error.
    fn book(&mut self, id: JobId, shares: &mut Vec<Share>) -> Result<(), String> {
        let Some(running) = self.jobs.get(&id) else {
            return Ok(());
        };
        let job = &running.job;
        let sites: Vec<Site> = shares
            .iter()
            .filter_map(|share| self.site(*share))
            .map(|(site, _)| site)
            .collect();
        if let Err(refusal) = job.check_sites(sites.iter()) {
            shares.clear();
            return Err(refusal.message);
        }
        let mut nodes: Vec<NodeId> = job.held().map(|(node, _)| node).collect();
        let old: BTreeSet<NodeId> = nodes.iter().copied().collect();
        let new = shares.iter().map(|share| share.node);
        let new: Vec<NodeId> = new.filter(|node| !old.contains(node)).collect();
        nodes.extend(&new);
        let mut refused = Ok(());
        let mut plan = None;
        if !new.is_empty() {
            let spec = job.spec();
            let may_grow = keeps_processes(spec);
            match self.plan_network(&nodes, &spec.interfaces, spec.no_cache, may_grow) {
                Ok(found) => plan = Some(found),
                Err(refusal) => {
                    shares.retain(|share| old.contains(&share.node));
                    refused = Err(refusal.message);
                }
            }
        }
        let per_worker = &job.spec().per_worker;
        let wanted: Vec<_> = shares
            .iter()
            .map(|share| (share.node, per_worker.times(share.workers)))
            .collect();
        if !self.registry.hold(id, &wanted) {
            shares.clear();
            let text = "the placement chose what is not free";
            self.log(Level::Error, (id, None), text);
            return Err(text.to_owned());
        }
        if let Some(plan) = plan {
            // A probe without the new nodes is of no use any more.
            self.leave_probes(Waiter::Job(id));
            if let Some(running) = self.jobs.get_mut(&id) {
                running.job.connect_by(plan);
                for node in new {
                    running.trials.begin(node);
                }
            }
        }
        refused
    }

    /// A node has answered a request of a job, or not in time: it may have been slow for a moment. The host of a node that is not healthy
    /// cools down.
    pub(super) fn tried(&mut self, id: JobId, node: NodeId, reply: &Reply) {
        let is_no_refusal = match reply {
            Reply::Answer(NodeReply::Reserved { problem, .. }) => problem.is_some(),
            Reply::Unknown(_) => true,
            Reply::Answer(_) | Reply::Refused(_) => false,
        };
        let running = self.jobs.get_mut(&id).filter(|_| is_no_refusal);
        if let Some(running) = running {
            running.trials.passed(node);
        }
    }
}

fn internal(message: &str) -> Refusal {
    Refusal::new(RefusalKind::Internal, message)
}
