//! Room for elastic jobs: seats are found while a job runs, and news of room go to those that wait for it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kolo_wire::ids::{JobId, NodeId, Slot};
use kolo_wire::{JobHost, JobSpec, NodeReply, Placement};

use super::running::{Contact, Running};
use super::{Due, HeadCore, Timer};
use crate::head::job::{Event, Reply, Seating, Site, most_on};
use crate::head::messages::Level;
use crate::head::probes::Waiter;
use crate::placement::{Offer, Share, place, place_at_most, spread_at_most};

/// Nodes for at most so many workers of an elastic job, which has so many workers on each node already.
pub(super) fn at_most(
    workers: u32,
    spec: &JobSpec,
    offers: &[Offer],
    there: impl Fn(NodeId) -> u32,
) -> Vec<Share> {
    match spec.placement {
        Placement::Pack { .. } => place_at_most(workers, &spec.per_worker, offers, there),
        Placement::Spread { slots, .. } => {
            spread_at_most(workers / slots, slots, &spec.per_worker, offers)
        }
    }
}

/// The same placement for so many workers.
pub(super) fn of_size(placement: Placement, workers: u32) -> Placement {
    match placement {
        Placement::Pack { .. } => Placement::Pack { workers },
        Placement::Spread { slots, .. } => Placement::Spread {
            hosts: workers / slots,
            slots,
        },
    }
}

/// What a job is offered that may use these hosts, and has so many workers on each node already.
pub(super) fn allowed(
    mut offers: Vec<Offer>,
    hosts: Option<&[JobHost]>,
    there: impl Fn(NodeId) -> u32,
) -> Vec<Offer> {
    if hosts.is_some() {
        for offer in &mut offers {
            let most = most_on(hosts, offer.node, &offer.hostname);
            offer.most = offer.most.min(most.saturating_sub(there(offer.node)));
        }
        offers.retain(|offer| offer.most > 0);
    }
    offers
}

impl HeadCore {
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
        let mut why = self.give_way(id, &mut shares);
        if why.is_empty() && shares.iter().map(|share| share.workers).sum::<u32>() < wanted {
            let all = of_size(spec.placement, wanted);
            // What the job has itself is not there when others have ended.
            let mut others = offers.clone();
            for offer in &mut others {
                let own = spec.per_worker.times(there(offer.node));
                if let Some(rest) = offer.total.minus(&own) {
                    offer.total = rest;
                }
            }
            why = match place(all, &spec.per_worker, &others) {
                Err(error) => error.to_string(),
                Ok(_) => "its nodes take no more workers of it".to_owned(),
            };
            if !avoid.is_empty() {
                let hosts = avoid.join(", ");
                why = format!("{why}; left out after a failure there: {hosts}");
            }
            if let Some(hosts) = running.job.hosts() {
                let allowed = match hosts.len() {
                    0 => "its driver allows no host at present".to_owned(),
                    1 => "its driver allows 1 host alone".to_owned(),
                    more => format!("its driver allows {more} hosts and no others"),
                };
                why = format!("{why}; {allowed}");
            }
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
        self.contend(id);
    }

    /// While several jobs wait for room, none takes some that is too little for the job to start. Says so if that is why there is none.
    fn give_way(&self, id: JobId, shares: &mut Vec<Share>) -> String {
        let running = self.jobs.get(&id).filter(|running| running.job.is_short());
        let Some((running, min)) =
            running.and_then(|running| Some((running, running.job.spec().elastic.as_ref()?.min)))
        else {
            return String::new();
        };
        let held: u32 = running.job.held().map(|(_, workers)| workers).sum();
        let more: u32 = shares.iter().map(|share| share.workers).sum();
        let waits = |(other, running): (&JobId, &Running)| *other != id && running.job.is_short();
        if more == 0 || held + more >= min || !self.jobs.iter().any(waits) {
            return String::new();
        }
        shares.clear();
        format!(
            "there is room for {} workers of at least {min}; other jobs wait for room, too",
            held + more
        )
    }

    /// A job has been given all the room that there is. If several wait for more, the youngest gives back what is too little for it.
    fn contend(&mut self, id: JobId) {
        let is_short = |running: &&Running| running.job.is_short();
        if !self.jobs.get(&id).as_ref().is_some_and(is_short)
            || self.jobs.values().filter(is_short).count() < 2
        {
            return;
        }
        let holds = self.jobs.iter().filter(|(_, running)| {
            running.job.is_short() && running.job.held().any(|(_, workers)| workers > 0)
        });
        let youngest = holds.max_by_key(|(_, running)| running.number);
        if let Some(job) = youngest.map(|(job, _)| *job) {
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
            match self.plan_network(&nodes, &job.spec().interfaces, job.spec().no_cache) {
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
        self.offer(node, Some(id));
    }

    /// Nothing of a job is left on a node.
    pub(super) fn free(&mut self, id: JobId, node: NodeId) {
        self.registry.free(id, node);
        let running = self.jobs.get_mut(&id);
        let failed = running.and_then(|running| {
            let number = running.number;
            running.trials.left(node).then_some(number)
        });
        // It looks elsewhere: there may have been room all the time.
        let failed = failed.map(|number| {
            self.offered.insert((number, id));
            id
        });
        self.offer(node, failed);
    }

    /// There may be more room on a node: all jobs that wait for some are told at the end of this step, except one.
    pub(super) fn offer(&mut self, node: NodeId, except: Option<JobId>) {
        for (id, running) in &mut self.jobs {
            if except != Some(*id) {
                running.trials.unfit.remove(&node);
                if running.job.wants_room() {
                    self.offered.insert((running.number, *id));
                }
            }
        }
    }

    /// Tells those that wait for room. False if there is nobody to tell now. In a large cluster a look for room takes as long as the
    /// cluster is large, and nodes seldom come one by one: they are told a microsecond for each node later.
    pub(super) fn tell_offered(&mut self) -> bool {
        const LARGE: usize = 1000;
        let nodes = self.registry.alive_count();
        if self.offered.is_empty() {
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
        for (_, id) in std::mem::take(&mut self.offered) {
            self.due.push_back(Due::Job(id, Event::Offered));
        }
    }
}
