//! The nodes of an elastic job: they join, get orders, and are freed when nothing of the job is left there.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kolo_wire::ids::{CrossRank, Generation, LocalRank, NodeId, Rank, Slot};
use kolo_wire::{
    JobHost, Member, NetworkReport, NodeReply, NodeRequest, Refusal, RefusalKind, WorkerState,
};

use super::super::network::Net;
use super::super::parts::{Hold, Part, Push};
use super::super::seat::{Seat, process_of};
use super::super::{Action, Base, Phase, Reply, Seating, Site, check_table, most_on};
use super::Elastic;
use crate::head::validate;
use crate::interfaces::{self, Network};
use crate::membership::{Fact, Host, Location, Process, State};

/// The member that a process is before there is a generation. Its rank is the number of its slot and its local rank its place
/// on the node: they tell workers apart, and nothing else.
fn provisional(process: Process, part: &Part, parts: usize, index: usize) -> Member {
    let local = part.slots.iter().position(|slot| *slot == process.slot);
    Member {
        rank: Rank(process.slot.0),
        local_rank: LocalRank(local.unwrap_or_default() as u32),
        local_size: part.slots.len() as u32,
        cross_rank: CrossRank(index as u32),
        cross_size: parts as u32,
        slot: process.slot,
        incarnation: process.incarnation,
        node: part.site.node,
        hostname: part.site.hostname.clone(),
        address: None,
    }
}

/// The failure domain of a site.
fn host(site: &Site) -> Host {
    Host(site.hostname.as_str().into())
}

/// A process is to be started in a seat that the node holds.
pub(super) fn queue(job: &mut Base, process: Process, node: NodeId) {
    let Some(part) = job.parts.find(node) else {
        return job.note(format!("{process} has no node to start on"));
    };
    let member = provisional(process, &job.parts[part], job.parts.len(), part);
    job.seats.insert(process.slot, Seat::new(member));
    job.parts.queue(part, process);
}

/// Some seats on a node are not needed any more, though other ones there are.
fn give_back(job: &mut Base, node: NodeId, workers: usize) {
    let workers = workers as u32;
    job.actions.push(Action::GiveBack { node, workers });
}

/// Asks what connects the nodes, once it is known which nodes there are.
pub(super) fn connect(job: &mut Base) {
    let mut parts = job.parts.iter();
    if job.net.is_wanted() && !parts.any(|part| part.hold == Hold::Reserving) {
        job.discover();
    }
}

impl Elastic {
    /// The head has looked for nodes.
    pub(super) fn placed(
        &mut self,
        job: &mut Base,
        seated: Vec<Seating>,
        without: Vec<Slot>,
        why: &str,
    ) {
        self.facts.refuse(without, why);
        let new = seated.iter().map(|seating| &seating.site);
        let sites = job.parts.iter().map(|part| &part.site).chain(new);
        let fits = check_table(sites).is_ok();
        for Seating { mut site, slots } in seated {
            if slots.is_empty() {
                continue;
            }
            let node = site.node;
            site.workers = slots.len() as u32;
            if !fits || !self.takes_seats(job, node) {
                let why = format!("{node} can't take more seats of the job now");
                give_back(job, node, slots.len());
                self.facts.refuse(slots, &why);
                job.note(why);
                continue;
            }
            if let Some(part) = job.parts.there(node) {
                let part = &mut job.parts[part];
                part.site.workers += site.workers;
                part.flow.asking.extend(slots);
            } else {
                let mut part = Part::new(site);
                part.flow.asking = slots;
                let part = job.parts.add(part);
                job.reserve(part);
            }
            job.parts.pend(node);
        }
    }

    /// Whether seats on this node can be given to the job now. Not while the job leaves the node, or waits for an answer of an
    /// earlier stay there.
    pub(in crate::head::job) fn takes_seats(&self, job: &Base, node: NodeId) -> bool {
        let part = job.parts.find(node).map(|part| &job.parts[part]);
        !self.leaving.unseen.contains(&node)
            && part.is_none_or(|part| {
                part.hold != Hold::Undoing && !(part.hold.is_over() && part.flow.is_owed)
            })
    }

    /// A node has answered a request.
    pub(super) fn replied(&mut self, job: &mut Base, node: NodeId, reply: Reply) {
        let Some((part, hold)) = job.answered(node) else {
            return;
        };
        match hold {
            Hold::Reserving => match job.reserved(part, reply) {
                Ok(_) if job.ending.is_some() => {}
                Ok(None) => {
                    self.bringing.joins(node);
                    job.parts.pend(node);
                }
                Ok(Some(problem)) => self.has_problem(job, part, problem),
                Err(refusal) => {
                    job.note(refusal.message);
                    let why = "its node did not reserve it";
                    self.facts.refuse_all(job, part, why);
                }
            },
            Hold::Starting => self.started(job, part, reply),
            Hold::Undoing => {
                job.undone(part, reply);
                if job.ending.is_none() {
                    self.left(job, part);
                }
            }
            // It was lost, or said that all is gone, while the request was under way.
            Hold::Reserved | Hold::Running | Hold::Free | Hold::Abandoned | Hold::Lost => {}
        }
    }

    /// A node can't run the program, or is not healthy.
    fn has_problem(&mut self, job: &mut Base, part: usize, problem: Refusal) {
        let is_of_program = job.is_installed() && problem.kind != RefusalKind::Unplaceable;
        // Before the first group that is an error of the job, as in one that never changes; later the job goes on without the node.
        if is_of_program && job.generation == Generation(0) {
            job.parts[part].problem = Some(problem);
            return job.check_installed();
        }
        let at = job.parts[part].name();
        job.note(format!("{at} is not used: {problem}"));
        let (host, why) = (host(&job.parts[part].site), problem.message);
        self.facts.push(Fact::Unhealthy { host, why });
        job.undo(part);
        self.facts
            .refuse_all(job, part, "its node did not reserve it");
    }

    /// A node has answered the request to start processes.
    fn started(&mut self, job: &mut Base, part: usize, reply: Reply) {
        job.parts[part].hold = Hold::Running;
        let starting = std::mem::take(&mut job.parts[part].starting);
        let at = job.parts[part].name();
        match reply {
            Reply::Answer(NodeReply::Started { pids }) => self.run(job, part, &starting, pids),
            _ if job.ending.is_some() => {}
            Reply::Refused(refusal) => {
                // It holds its reservation all the same.
                job.parts[part].hold = Hold::Reserved;
                job.parts[part].pushes.queue.clear();
                let text = format!("{at} did not start its workers: {refusal}");
                if refusal.kind == RefusalKind::NotFound {
                    // The lease of the reservation may have ended, because the group waited for other nodes for longer.
                    job.note(text);
                    job.undo(part);
                } else {
                    let why = format!("{at} did not start it: {refusal}");
                    self.facts.not_started(job, &starting, &why);
                }
            }
            // The workers may come all the same. Membership waits for them, and not for ever.
            Reply::Answer(_) | Reply::Unknown(_) => {
                let why = reply.unexpected();
                job.note(format!("{at} may not have started its workers: {why}"));
            }
        }
        job.after_start(part);
    }

    fn run(&mut self, job: &mut Base, part: usize, of: &[Process], pids: Vec<(Slot, u32)>) {
        let running = job.run(part, of, pids);
        // Of a process of a group that is started anew there is nothing else to wait for.
        for slot in running.into_iter().filter(|_| job.starts_anew()) {
            let seat = job.seats.get(&slot).filter(|seat| seat.exit.is_none());
            if let Some(process) = seat.map(Seat::process) {
                self.facts.ready(process);
            }
        }
    }

    /// A node has taken or refused what was delivered to it.
    pub(super) fn pushed(
        &mut self,
        job: &mut Base,
        node: NodeId,
        answer: Result<NodeReply, Refusal>,
    ) {
        let Some((part, push)) = job.pushed(node) else {
            return;
        };
        let at = job.parts[part].name();
        let request = match push {
            Push::Order(request) => *request,
            Push::Membership(generation) => {
                // It is repeated, and its members are late in the end.
                if let Err(refusal) = answer {
                    job.note(format!(
                        "{at} did not take generation {generation}: {refusal}"
                    ));
                }
                return;
            }
        };
        match (request, answer) {
            (NodeRequest::Start(start), answer) => {
                let members = start.slots.iter().map(|slot| &slot.member);
                let processes: Vec<Process> = members.map(process_of).collect();
                match answer {
                    Ok(NodeReply::Started { pids }) => self.run(job, part, &processes, pids),
                    Ok(_) => {}
                    Err(refusal) => {
                        let why = format!("{at} did not start it: {refusal}");
                        self.facts.not_started(job, &processes, &why);
                    }
                }
            }
            (NodeRequest::FreePort { .. }, answer) => {
                (self.anew).port_answered(job, &mut self.facts, part, answer);
            }
            (request, answer) => job.ordered(part, &request, answer),
        }
    }

    /// It is known what connects the nodes, or that nothing does.
    pub(super) fn discovered(
        &mut self,
        job: &mut Base,
        found: Result<Arc<Network>, NetworkReport>,
    ) {
        match found {
            found if !matches!(job.net, Net::Asked) => job.discovered(found),
            Ok(network) => {
                job.net = Net::Known(network);
                job.parts.pend_all();
            }
            Err(report) => {
                let no_result = || Refusal::new(RefusalKind::Internal, "the probe gave no result");
                let refusal = interfaces::refusal(&report).unwrap_or_else(no_result);
                self.unconnected(job, refusal);
            }
        }
    }

    /// Nothing connects new nodes with the others.
    fn unconnected(&mut self, job: &mut Base, refusal: Refusal) {
        if job.phase < Phase::Boot {
            return job.fail(refusal.kind, refusal.message);
        }
        job.note(format!("new nodes are not taken: {}", refusal.message));
        job.net = job.before.take().map_or(Net::Registered, Net::Known);
        job.parts.pend_all();
        for part in job.parts.pending() {
            if job.parts[part].hold == Hold::Reserved && !job.parts[part].started {
                self.facts
                    .refuse_all(job, part, "its node did not reserve it");
                job.undo(part);
            }
        }
    }

    /// Tells membership which seats nodes hold.
    pub(super) fn confirm(&mut self, job: &mut Base) {
        if job.net.is_open() {
            return;
        }
        let mut is_checked = false;
        for part in job.parts.pending() {
            let entry = &job.parts[part];
            if !matches!(entry.hold, Hold::Reserved | Hold::Running) || entry.flow.asking.is_empty()
            {
                continue;
            }
            if !entry.started && !is_checked {
                is_checked = true;
                if let Err(refusal) = job.check_network() {
                    return self.unconnected(job, refusal);
                }
            }
            let location = Location {
                node: job.parts[part].site.node,
                host: host(&job.parts[part].site),
            };
            for slot in std::mem::take(&mut job.parts[part].flow.asking) {
                // This node holds the seat from now on, and no other.
                self.leave_seat(job, slot);
                self.holders.insert(slot, location.node);
                job.parts[part].slots.push(slot);
                let location = location.clone();
                self.facts.push(Fact::Reserved { slot, location });
            }
        }
    }

    /// No node holds the seat any more.
    pub(super) fn leave_seat(&mut self, job: &mut Base, slot: Slot) {
        let old = self.holders.remove(&slot);
        if let Some(old) = old.and_then(|old| job.parts.find(old)) {
            let entry = &mut job.parts[old];
            entry.slots.retain(|other| *other != slot);
            entry.site.workers -= 1;
            let node = entry.site.node;
            if !entry.hold.is_over() {
                give_back(job, node, 1);
                job.parts.touch(node);
            }
        }
    }

    /// Starts what can be started.
    pub(super) fn start_queued(&mut self, job: &mut Base) {
        // It is as large as the group, and the same for all nodes.
        let mut group = None;
        let left = Duration::from_millis(job.spec.start_timeout_ms);
        for part in job.parts.pending() {
            let entry = &mut job.parts[part];
            let can_start =
                entry.has_program && matches!(entry.hold, Hold::Reserved | Hold::Running);
            if can_start && !entry.flow.queue.is_empty() {
                let processes = std::mem::take(&mut entry.flow.queue);
                let number = self.anew.number(entry.site.node);
                let (generation, common) = group.get_or_insert_with(|| self.group(job));
                let number = number.unwrap_or(part as u32);
                let mut slots = job.slots(&processes, common, number);
                for slot in &mut slots {
                    slot.env.extend(self.doors.env(&slot.member));
                }
                job.start(part, *generation, common, slots, left);
            }
        }
        // All others wait for an answer of their node, for the driver, or for the network.
        job.parts.pending.clear();
    }

    /// Delivers to the nodes of a generation's members, unless the same is on its way there.
    pub(super) fn send_to_members(
        &mut self,
        job: &mut Base,
        generation: Generation,
        request: &NodeRequest,
    ) {
        let active = self.active.as_deref();
        let mut tables = job.published.as_deref().into_iter().chain(active);
        let table = tables.find(|table| table.generation == generation);
        let members = table.into_iter().flat_map(|table| &table.members);
        let nodes: BTreeSet<NodeId> = members.map(|member| member.node).collect();
        let is_over = matches!(request, NodeRequest::Revoke { .. });
        for node in nodes {
            let Some(part) = job.parts.find(node) else {
                continue;
            };
            // Where nobody has heard of it, there is nothing to revoke.
            if !(is_over && job.parts[part].pushes.take_back(generation)) {
                job.push_once(part, request.clone());
            }
        }
    }

    /// A process is given up.
    pub(super) fn stop_worker(&mut self, job: &mut Base, process: Process, why: String) {
        let node = job.last(process).map(|seat| seat.member.node);
        let part = node.and_then(|node| job.parts.find(node));
        let Some(part) = part.filter(|_| !self.doors.waits(process)) else {
            return self.facts.not_started(job, &[process], &why);
        };
        let queue = &mut job.parts[part].flow.queue;
        if let Some(at) = queue.iter().position(|other| *other == process) {
            queue.remove(at);
            return self.facts.not_started(job, &[process], &why);
        }
        if let Some(seat) = job.last(process) {
            seat.state = WorkerState::Stopping;
        }
        job.parts.touch(job.parts[part].site.node);
        let request = NodeRequest::StopWorker {
            job: job.id,
            slot: process.slot,
            incarnation: process.incarnation,
            why,
        };
        job.push(part, request);
    }

    /// A node is to be left.
    pub(super) fn drain(&mut self, job: &mut Base, node: NodeId, why: String) {
        job.parts.touch(node);
        self.leaving.drained.insert(node);
        self.leaving.unlisted.remove(&node);
        self.facts.push(Fact::Drain { node, why });
    }

    /// The time to leave a node is over.
    pub(super) fn evict(&mut self, job: &mut Base, node: NodeId, why: &str) {
        let slots = job.parts.find(node).map(|part| &job.parts[part].slots);
        let seats = slots.into_iter().flatten();
        let seats = seats.filter_map(|slot| job.seats.get(slot));
        let there = seats.filter(|seat| seat.is_wanted());
        for process in there.map(Seat::process).collect::<Vec<_>>() {
            self.stop_worker(job, process, why.to_owned());
        }
    }

    /// The driver names the hosts that the job may use from now on.
    pub(super) fn use_hosts(&mut self, job: &mut Base, hosts: Vec<JobHost>) {
        if let Err(refusal) = validate::hosts(&hosts) {
            return job.note(format!("ignored: a list of hosts: {}", refusal.message));
        }
        if let Some(spec) = &mut job.spec.elastic {
            spec.hosts = Some(hosts);
        }
        let there = job.parts.iter().filter(|part| !part.hold.is_over());
        for node in there.map(|part| part.site.node).collect::<Vec<_>>() {
            self.check_host(job, node);
        }
        self.facts.push(Fact::Offered);
    }

    /// Leaves a node that the list of hosts does not allow as it is used, or stays if it does again.
    pub(super) fn check_host(&mut self, job: &mut Base, node: NodeId) {
        let Some(part) = job.parts.find(node) else {
            return;
        };
        let site = &job.parts[part].site;
        let elastic = job.spec.elastic.as_ref();
        let hosts = elastic.and_then(|elastic| elastic.hosts.as_deref());
        let most = most_on(hosts, node, &site.hostname);
        if self.leaving.drained.contains(&node) {
            // It is left anyway.
        } else if most >= site.workers {
            if self.leaving.unlisted.remove(&node) {
                self.facts.push(Fact::Undrain { node });
            }
        } else if self.leaving.unlisted.insert(node) {
            let hostname = &site.hostname;
            let why = match most {
                0 => format!("{hostname} is not on the list of hosts any more"),
                most => format!("{hostname} has fewer slots on the list of hosts: {most}"),
            };
            job.parts.touch(node);
            self.facts.push(Fact::Drain { node, why });
        }
    }

    /// Undoes on nodes where nothing of the job is wanted any more.
    pub(super) fn leave_nodes(&mut self, job: &mut Base) {
        for node in std::mem::take(&mut job.parts.touched) {
            let Some(part) = job.parts.find(node) else {
                continue;
            };
            let entry = &job.parts[part];
            let is_wanted = !entry.flow.asking.is_empty()
                || !entry.flow.queue.is_empty()
                || entry.slots.iter().any(|slot| self.is_held(*slot, node));
            if is_wanted {
                continue;
            }
            match entry.hold {
                Hold::Reserved | Hold::Running => job.undo(part),
                // Looked at again when it has answered.
                Hold::Reserving | Hold::Starting => job.parts.touch(node),
                _ => {}
            }
        }
    }

    /// A seat that a node holds, whether a process is there now or not.
    fn is_held(&self, slot: Slot, node: NodeId) -> bool {
        let Some(seat) = self.membership.roster().seat(slot) else {
            return false;
        };
        let location = seat.location.as_ref();
        let is_there = location.is_some_and(|location| location.node == node);
        let is_empty = matches!(
            seat.state,
            State::Vacant | State::Reserving | State::Held | State::Lost
        );
        is_there && !(seat.leaving && is_empty)
    }

    /// Whatever the job held on the node is given back, and nothing runs there. If the node does not say so, it has time.
    fn left(&mut self, job: &mut Base, part: usize) {
        let why = "nothing of the job is left there".to_owned();
        let fenced = match job.parts[part].hold {
            Hold::Free => job.now,
            _ => job.now + job.config.fence,
        };
        self.processes_are_gone(job, part, why, fenced);
    }
}
