//! The nodes of an elastic job: they join, get orders, and are freed when nothing of the job is left there.

use std::collections::BTreeSet;
use std::time::Duration;

use kolo_wire::ids::{CrossRank, Generation, LocalRank, NodeId, Rank, Slot};
use kolo_wire::{Exit, JobEvent, Member, NodeRequest, Refusal, RefusalKind, WorkerState};

use super::super::network::Net;
use super::super::{Action, Hold, Job, Part, Phase, Push, Reply, Seat, Seating, Site, check_table};
use super::Elastic;
use crate::interfaces;
use crate::membership::{Fact, Host, Location, Process};

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

impl Job {
    /// The head has looked for nodes.
    pub(in crate::head::job) fn placed(
        &mut self,
        seated: Vec<Seating>,
        without: Vec<Slot>,
        why: &str,
    ) {
        for slot in without {
            let why = why.to_owned();
            self.fact(Fact::Refused { slot, why });
        }
        let new = seated.iter().map(|seating| &seating.site);
        let sites = self.parts.iter().map(|part| &part.site).chain(new);
        let fits = check_table(sites).is_ok();
        for Seating { mut site, slots } in seated {
            if slots.is_empty() {
                continue;
            }
            let node = site.node;
            let known = self.part(node);
            site.workers = slots.len() as u32;
            if !fits || !self.takes_seats(node) {
                self.note(format!("{node} can't take more seats of the job now"));
                self.give_back(node, slots.len());
                for slot in slots {
                    let why = format!("{node} can't take more seats of the job now");
                    self.fact(Fact::Refused { slot, why });
                }
                continue;
            }
            if let Some(part) = known.filter(|part| !self.parts[*part].hold.is_over()) {
                let part = &mut self.parts[part];
                part.site.workers += slots.len() as u32;
                part.flow.asking.extend(slots);
            } else {
                let mut part = Part::new(site);
                part.flow.asking = slots;
                let index = known.unwrap_or(self.parts.len());
                if known.is_some() {
                    self.parts[index] = part;
                } else {
                    self.by_node.insert(node, index);
                    self.parts.push(part);
                }
                self.reserve(index);
                if let Some(elastic) = &mut self.elastic {
                    elastic.reserving.insert(node);
                }
            }
            self.pend(node);
        }
    }

    /// Seats on a node are not needed any more, though other ones there are.
    fn give_back(&mut self, node: NodeId, workers: usize) {
        let workers = workers as u32;
        self.actions.push(Action::GiveBack { node, workers });
    }

    pub(in crate::head::job) fn pend(&mut self, node: NodeId) {
        if let Some(elastic) = &mut self.elastic {
            elastic.pending.insert(node);
        }
    }

    pub(super) fn touch(&mut self, node: NodeId) {
        if let Some(elastic) = &mut self.elastic {
            elastic.touched.insert(node);
        }
    }

    /// The nodes where something may come further now.
    fn pending(&self) -> Vec<usize> {
        let nodes = self.elastic.iter().flat_map(|elastic| &elastic.pending);
        nodes.filter_map(|node| self.part(*node)).collect()
    }

    /// The network is another one: what has waited for it may come further.
    pub(in crate::head::job) fn pend_all(&mut self) {
        let waits = self.parts.iter().filter(|part| part.flow.is_waiting());
        if let Some(elastic) = &mut self.elastic {
            elastic.pending.extend(waits.map(|part| part.site.node));
        }
    }

    /// No answer to a reservation is to come any more.
    pub(in crate::head::job) fn has_answered(&mut self, node: NodeId) {
        if let Some(elastic) = &mut self.elastic {
            elastic.reserving.remove(&node);
        }
    }

    /// A node holds what it was asked for. It is left again if it has a problem.
    pub(in crate::head::job) fn node_joins(&mut self, part: usize, problem: Option<Refusal>) {
        let node = self.parts[part].site.node;
        let Some(problem) = problem else {
            if let Some(elastic) = &mut self.elastic {
                elastic.fresh.push(node);
                elastic.pending.insert(node);
            }
            return;
        };
        if self.is_error_of_job(&problem) {
            self.parts[part].problem = Some(problem);
            return self.check_installed();
        }
        let at = self.place_name(part);
        self.note(format!("{at} is not used: {problem}"));
        let (host, why) = (host(&self.parts[part].site), problem.message);
        self.fact(Fact::Unhealthy { host, why });
        self.undo(part);
        self.refuse_seats(part);
    }

    /// The seats that the node was to hold have no node.
    pub(in crate::head::job) fn refuse_seats(&mut self, part: usize) {
        for slot in std::mem::take(&mut self.parts[part].flow.asking) {
            let why = "its node did not reserve it".to_owned();
            self.fact(Fact::Refused { slot, why });
        }
    }

    /// A node has not started processes, or has not said so.
    pub(in crate::head::job) fn node_did_not_start(
        &mut self,
        part: usize,
        starting: Vec<Process>,
        reply: Reply,
    ) {
        let at = self.place_name(part);
        match reply {
            Reply::Refused(refusal) => {
                // It holds its reservation all the same.
                self.parts[part].hold = Hold::Reserved;
                self.parts[part].pushes.queue.clear();
                if refusal.kind == RefusalKind::NotFound {
                    // The lease of the reservation may have ended, because the group waited for other nodes for longer.
                    self.note(format!("{at} did not start its workers: {refusal}"));
                    return self.undo(part);
                }
                self.not_started(&starting, &format!("{at} did not start it: {refusal}"));
            }
            // The workers may come all the same. Membership waits for them, and not for ever.
            Reply::Answer(_) | Reply::Unknown(_) => {
                let why = reply.unexpected();
                self.note(format!("{at} may not have started its workers: {why}"));
            }
        }
    }

    /// These processes do not run.
    pub(super) fn not_started(&mut self, processes: &[Process], why: &str) {
        for process in processes {
            if let Some(seat) = self.seats.get_mut(&process.slot)
                && seat.member.incarnation == process.incarnation
            {
                seat.state = WorkerState::Exited;
                seat.exit = Some(Exit::Unknown);
                let node = seat.member.node;
                self.touch(node);
            }
            self.fact(Fact::Exited {
                process: *process,
                exit: Exit::Unknown,
                generation: Generation(0),
                said: why.to_owned(),
            });
        }
    }

    /// Asks what connects the nodes, once it is known which nodes there are.
    pub(super) fn connect(&mut self) {
        let is_reserving = |elastic: &Elastic| !elastic.reserving.is_empty();
        if self.net.is_wanted() && !self.elastic.as_deref().is_some_and(is_reserving) {
            self.discover();
        }
    }

    /// Nothing connects new nodes with the others.
    pub(in crate::head::job) fn unconnected(&mut self, refusal: Refusal) {
        if self.phase < Phase::Boot {
            return self.fail(refusal.kind, refusal.message);
        }
        self.note(format!("new nodes are not taken: {}", refusal.message));
        self.net = self.before.take().map_or(Net::Registered, Net::Known);
        self.pend_all();
        for part in self.pending() {
            if self.parts[part].hold == Hold::Reserved && !self.parts[part].started {
                self.refuse_seats(part);
                self.undo(part);
            }
        }
    }

    /// Tells membership which seats nodes hold.
    pub(super) fn confirm(&mut self) {
        if self.net.is_open() {
            return;
        }
        let mut is_checked = false;
        for part in self.pending() {
            let entry = &self.parts[part];
            if !matches!(entry.hold, Hold::Reserved | Hold::Running) || entry.flow.asking.is_empty()
            {
                continue;
            }
            if !entry.started && !is_checked {
                is_checked = true;
                if let Err(refusal) = self.check_network() {
                    return self.unconnected(refusal);
                }
            }
            let location = Location {
                node: self.parts[part].site.node,
                host: host(&self.parts[part].site),
            };
            for slot in std::mem::take(&mut self.parts[part].flow.asking) {
                self.move_seat(slot, part);
                let location = location.clone();
                self.fact(Fact::Reserved { slot, location });
            }
        }
    }

    /// The node of this part holds the seat from now on, and no other node.
    fn move_seat(&mut self, slot: Slot, part: usize) {
        self.leave_seat(slot);
        let node = self.parts[part].site.node;
        if let Some(elastic) = &mut self.elastic {
            elastic.holders.insert(slot, node);
        }
        self.parts[part].slots.push(slot);
    }

    /// No node holds the seat any more.
    pub(super) fn leave_seat(&mut self, slot: Slot) {
        let elastic = self.elastic.as_mut();
        let old = elastic.and_then(|elastic| elastic.holders.remove(&slot));
        if let Some(old) = old.and_then(|old| self.part(old)) {
            let entry = &mut self.parts[old];
            entry.slots.retain(|other| *other != slot);
            entry.site.workers -= 1;
            let node = entry.site.node;
            if !entry.hold.is_over() {
                self.give_back(node, 1);
                self.touch(node);
            }
        }
    }

    /// A process is to be started in a seat that the node holds.
    pub(super) fn queue(&mut self, process: Process, node: NodeId) {
        let Some(part) = self.part(node) else {
            return self.note(format!("{process} has no node to start on"));
        };
        let member = provisional(process, &self.parts[part], self.parts.len(), part);
        self.seats.insert(process.slot, Seat::new(member));
        self.parts[part].flow.queue.push(process);
        self.pend(node);
    }

    /// Tells the driver of new nodes, which may lack the program.
    pub(super) fn announce(&mut self) {
        let Some(elastic) = &mut self.elastic else {
            return;
        };
        let fresh = std::mem::take(&mut elastic.fresh);
        if fresh.is_empty() {
            return;
        }
        elastic.told += 1;
        let told = elastic.told;
        let mut nodes = Vec::with_capacity(fresh.len());
        for part in fresh
            .into_iter()
            .filter_map(|node| self.part(node))
            .collect::<Vec<_>>()
        {
            if self.parts[part].hold != Hold::Reserved {
                continue;
            }
            self.parts[part].flow.program = told;
            nodes.push(self.placed_node(part));
        }
        if let Some(elastic) = &mut self.elastic {
            let nodes = nodes.iter().map(|placed| placed.node).collect();
            elastic.awaiting.push_back((told, nodes));
        }
        let job = self.id;
        self.actions
            .push(Action::Tell(JobEvent::Placed { job, nodes }));
    }

    /// Starts what can be started.
    pub(super) fn start_queued(&mut self) {
        let answered = self
            .elastic
            .as_deref()
            .map_or(0, |elastic| elastic.answered);
        // It is as large as the group, and the same for all nodes.
        let mut common = None;
        let left = Duration::from_millis(self.spec.start_timeout_ms);
        for part in self.pending() {
            let entry = &mut self.parts[part];
            entry.has_program |= entry.flow.program > 0 && entry.flow.program <= answered;
            let can_start =
                entry.has_program && matches!(entry.hold, Hold::Reserved | Hold::Running);
            if can_start && !entry.flow.queue.is_empty() {
                let processes = std::mem::take(&mut entry.flow.queue);
                let common = common.get_or_insert_with(|| self.common_env());
                self.start_processes(part, processes, common, left);
            }
        }
        // All others wait for an answer of their node, for the driver, or for the network.
        if let Some(elastic) = &mut self.elastic {
            elastic.pending.clear();
        }
    }

    /// Delivers to the nodes of a generation's members, unless the same is on its way there.
    pub(super) fn send_to_members(&mut self, generation: Generation, request: &NodeRequest) {
        let active = self.elastic.as_deref().and_then(Elastic::active);
        let mut tables = self.published.as_deref().into_iter().chain(active);
        let table = tables.find(|table| table.generation == generation);
        let members = table.into_iter().flat_map(|table| &table.members);
        let nodes: BTreeSet<NodeId> = members.map(|member| member.node).collect();
        let is_over = matches!(request, NodeRequest::Revoke { .. });
        for node in nodes {
            let Some(part) = self.part(node) else {
                continue;
            };
            // Where nobody has heard of it, there is nothing to revoke.
            if !(is_over && self.parts[part].pushes.take_back(generation)) {
                self.push_once(part, Push::order(request.clone()));
            }
        }
    }

    /// A process is given up.
    pub(super) fn stop_worker(&mut self, process: Process, why: String) {
        let seat = self.seats.get_mut(&process.slot);
        let seat = seat.filter(|seat| seat.member.incarnation == process.incarnation);
        let node = seat.as_ref().map(|seat| seat.member.node);
        let part = node.and_then(|node| self.part(node));
        let queued = part.and_then(|part| {
            let queue = &self.parts[part].flow.queue;
            queue.iter().position(|other| *other == process)
        });
        let part = part.filter(|_| !self.waits_for_door(process));
        let (Some(part), None) = (part, queued) else {
            if let (Some(part), Some(at)) = (part, queued) {
                self.parts[part].flow.queue.remove(at);
            }
            return self.not_started(&[process], &why);
        };
        let node = self.parts[part].site.node;
        if let Some(seat) = self.seats.get_mut(&process.slot) {
            seat.state = WorkerState::Stopping;
        }
        self.touch(node);
        let request = NodeRequest::StopWorker {
            job: self.id,
            slot: process.slot,
            incarnation: process.incarnation,
            why,
        };
        self.push(part, Push::order(request));
    }

    /// Undoes on nodes where nothing of the job is wanted any more.
    pub(super) fn leave_nodes(&mut self) {
        let touched = self
            .elastic
            .as_mut()
            .map(|elastic| std::mem::take(&mut elastic.touched));
        for node in touched.unwrap_or_default() {
            let Some(part) = self.part(node) else {
                continue;
            };
            let entry = &self.parts[part];
            let flow = &entry.flow;
            let is_wanted = !flow.asking.is_empty()
                || !flow.queue.is_empty()
                || entry.slots.iter().any(|slot| self.is_held(*slot, node));
            if is_wanted {
                continue;
            }
            match entry.hold {
                Hold::Reserved | Hold::Running => self.undo(part),
                // Looked at again when it has answered.
                Hold::Reserving | Hold::Starting => self.touch(node),
                _ => {}
            }
        }
    }

    /// Whatever the job held on the node is given back, and nothing runs there. If the node does not say so, it has time.
    pub(in crate::head::job) fn left(&mut self, part: usize, node: NodeId) {
        let why = "nothing of the job is left there".to_owned();
        let is_free = self.parts[part].hold == Hold::Free;
        let fenced = if is_free {
            self.now
        } else {
            self.now + self.config.fence
        };
        self.processes_are_gone(node, why, fenced);
    }

    /// A node is over, or the last answer of a node that is over has come.
    pub(in crate::head::job) fn mark_over(&mut self) {
        if let Some(elastic) = &mut self.elastic {
            elastic.has_over = true;
        }
    }

    /// Forgets nodes that are over, so that a job that lives long does not grow.
    pub(super) fn forget_nodes(&mut self) {
        let is_over = |part: &Part| part.hold.is_over() && !part.flow.is_owed;
        let has_over = self.elastic.as_mut();
        let has_over = has_over.map(|elastic| std::mem::take(&mut elastic.has_over));
        if self.ending.is_some() || has_over != Some(true) {
            debug_assert!(self.ending.is_some() || !self.parts.iter().any(is_over));
            return;
        }
        self.parts.retain(|part| !is_over(part));
        let nodes = self.parts.iter().map(|part| part.site.node);
        self.by_node = nodes.zip(0..).collect();
    }

    /// What becomes of a probe of new nodes.
    pub(in crate::head::job) fn not_connected(&mut self, report: &kolo_wire::NetworkReport) {
        let refusal = interfaces::refusal(report)
            .unwrap_or_else(|| Refusal::new(RefusalKind::Internal, "the probe gave no result"));
        self.unconnected(refusal);
    }
}
