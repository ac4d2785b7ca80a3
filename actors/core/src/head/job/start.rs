//! From the reservations to a whole group.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kolo_wire::ids::{Generation, NodeId, Slot};
use kolo_wire::{
    GenerationTable, InstalledHere, JobEvent, JobState, NodeEvent, NodeReply, NodeRequest,
    RefusalKind, SlotStart, StartWorkers,
};

use super::elastic::Elastic;
use super::{Action, Ending, Hold, Job, Phase, Push, Rendezvous, Reply, Seat};
use crate::env::{self, Env, JobEnv};
use crate::head::milliseconds;
use crate::membership::Process;

impl Job {
    /// Asks a node for something. What was on its way there is pointless now.
    pub(super) fn request(&mut self, part: usize, request: NodeRequest, deadline: Duration) {
        self.parts[part].pushes.queue.clear();
        self.actions.push(Action::Request {
            node: self.parts[part].site.node,
            request: Box::new(request),
            deadline,
        });
    }

    pub(super) fn reserve(&mut self, part: usize) {
        let elastic = self.spec.elastic.as_deref();
        let health_check = elastic.and_then(|elastic| elastic.health_check.clone());
        // The answer waits for the check.
        let limit = health_check.as_ref().map_or(0, |check| check.timeout_ms);
        let limit = self.config.request_timeout + Duration::from_millis(limit);
        let request = NodeRequest::Reserve {
            job: self.id,
            per_worker: self.spec.per_worker.clone(),
            workers: self.parts[part].site.workers,
            // Start is sent before the start timeout is over, and answered within a request's timeout.
            lease_ms: self
                .spec
                .start_timeout_ms
                .saturating_add(milliseconds(limit)),
            program: self.spec.program.hash,
            installed: self.spec.installed.clone().map(|program| InstalledHere {
                owner: self.owner,
                program,
            }),
            health_check,
        };
        self.request(part, request, limit);
    }

    /// A node has answered a request.
    pub(super) fn replied(&mut self, node: NodeId, reply: Reply) {
        let Some(part) = self.part(node) else {
            return self.note(format!("answer of {node}, which has no part in the job"));
        };
        self.parts[part].flow.is_owed = false;
        if self.parts[part].hold.is_over() {
            self.mark_over();
        }
        self.has_answered(node);
        match self.parts[part].hold {
            Hold::Reserving => self.reserved(part, reply),
            Hold::Starting => self.started(part, reply),
            Hold::Undoing => {
                self.undone(part, reply);
                if self.ending.is_none() {
                    self.left(part, node);
                }
            }
            // It was lost, or said that all is gone, while the request was under way.
            Hold::Reserved | Hold::Running | Hold::Free | Hold::Abandoned | Hold::Lost => {}
        }
    }

    fn reserved(&mut self, part: usize, reply: Reply) {
        let (kind, why) = match reply {
            Reply::Answer(NodeReply::Reserved {
                has_program,
                free_port,
                problem,
            }) => {
                // Of an installed program there is nothing to send.
                let has_program = has_program || self.is_installed();
                let entry = &mut self.parts[part];
                entry.hold = Hold::Reserved;
                entry.has_program = has_program;
                entry.free_port = free_port;
                if self.ending.is_some() {
                    self.undo(part);
                } else if self.is_elastic() {
                    self.node_joins(part, problem);
                } else {
                    self.parts[part].problem = problem;
                }
                return;
            }
            Reply::Refused(refusal) => {
                self.free(part);
                (refusal.kind, refusal.message)
            }
            // It may hold the reservation all the same.
            Reply::Answer(_) | Reply::Unknown(_) => {
                self.parts[part].hold = Hold::Reserved;
                (RefusalKind::Timeout, reply.unexpected())
            }
        };
        let text = format!("{} did not reserve: {why}", self.place_name(part));
        if self.is_elastic() {
            self.note(text);
            self.refuse_seats(part);
        } else {
            self.fail(kind, text);
        }
        if self.parts[part].hold == Hold::Reserved {
            self.undo(part);
        }
    }

    fn started(&mut self, part: usize, reply: Reply) {
        let at = self.place_name(part);
        let starting = std::mem::take(&mut self.parts[part].flow.starting);
        self.parts[part].hold = Hold::Running;
        match reply {
            Reply::Answer(NodeReply::Started { pids }) => {
                let node = self.parts[part].site.node;
                for (slot, pid) in pids {
                    let process = self.seats.get(&slot).map(Seat::process);
                    if process.is_none_or(|process| starting.contains(&process)) {
                        self.worker_started(node, slot, pid);
                    }
                }
            }
            _ if self.ending.is_some() => {}
            reply if self.is_elastic() => self.node_did_not_start(part, starting, reply),
            reply => {
                let kind = match &reply {
                    Reply::Refused(refusal) => refusal.kind,
                    Reply::Answer(_) | Reply::Unknown(_) => RefusalKind::Timeout,
                };
                let why = reply.unexpected();
                self.fail(kind, format!("{at} did not start its workers: {why}"));
            }
        }
        if self.ending.is_some() {
            if self.parts[part].hold == Hold::Running {
                self.undo(part);
            }
            return;
        }
        let node = self.parts[part].site.node;
        for _ in 0..self.parts[part].pushes.queue.len() {
            self.actions.push(Action::Push(node));
        }
        self.pend(node);
    }

    pub(super) fn rendezvous_opened(&mut self, opened: Result<std::net::SocketAddr, String>) {
        if self.rendezvous != Rendezvous::Opening {
            return self.note("a rendezvous was opened that nobody asked for".to_owned());
        }
        match opened {
            Ok(address) => {
                self.rendezvous = Rendezvous::Open(address);
                // Of a group that is started anew: it may be that of one that was given up.
                self.open_for_group();
                self.start_group();
            }
            Err(reason) if self.starts_anew() => self.group_meets_nowhere(&reason),
            Err(reason) => {
                self.rendezvous = Rendezvous::NotWanted;
                self.fail(
                    RefusalKind::Internal,
                    format!("the head could not open the job's rendezvous: {reason}"),
                );
            }
        }
    }

    /// Goes on to the next phase as soon as everything for it is there.
    pub(super) fn advance(&mut self) {
        if self.ending.is_some() {
            return;
        }
        if self.phase == Phase::Reserve && self.parts.iter().all(|part| part.hold == Hold::Reserved)
        {
            self.check_installed();
            if self.ending.is_some() {
                return;
            }
            self.phase = Phase::Prepare;
            self.program_ready |= self.parts.iter().all(|part| part.has_program);
            self.actions.push(Action::Tell(JobEvent::Placed {
                job: self.id,
                nodes: self.placed_nodes(),
            }));
            self.discover();
            if self.ending.is_some() {
                return;
            }
            if self.rendezvous == Rendezvous::Wanted {
                self.rendezvous = Rendezvous::Opening;
                self.actions
                    .push(Action::OpenRendezvous(self.table().members));
            }
        }
        if self.phase == Phase::Prepare
            && self.program_ready
            && self.rendezvous != Rendezvous::Opening
            && !self.net.is_open()
        {
            if self.dry_run {
                return self.end(Ending {
                    state: JobState::Succeeded,
                    refusal: None,
                    reason: "its workers could start, and a dry run starts none".to_owned(),
                    blame: None,
                });
            }
            self.start_all();
        }
        if self.phase == Phase::Boot
            && self.ready == self.seats.len()
            && self.parts.iter().all(|part| part.hold == Hold::Running)
        {
            self.phase = Phase::Publish;
            self.published = Some(Arc::new(self.table()));
            for part in 0..self.parts.len() {
                if self.is_installed() {
                    // There is nobody to tell.
                    self.parts[part].has_membership = true;
                    continue;
                }
                self.push(part, Push::Membership(self.generation));
            }
        }
        if self.phase == Phase::Publish && self.parts.iter().all(|part| part.has_membership) {
            self.phase = Phase::Up;
            self.state = JobState::Healthy;
            self.actions.push(Action::Tell(JobEvent::Healthy {
                table: self.table(),
                nodes: self.placed_nodes(),
            }));
        }
    }

    fn start_all(&mut self) {
        self.state = JobState::Starting;
        let left = self.start_deadline.saturating_duration_since(self.now);
        let common = self.common_env();
        for part in 0..self.parts.len() {
            let seats = self.parts[part].slots.iter();
            let seats = seats.filter_map(|slot| self.seats.get(slot));
            let processes = seats.map(Seat::process).collect();
            self.start_processes(part, processes, &common, left);
        }
    }

    /// Starts these processes on a node that holds their seats.
    pub(super) fn start_processes(
        &mut self,
        part: usize,
        processes: Vec<Process>,
        common: &JobEnv,
        left: Duration,
    ) {
        self.phase = self.phase.max(Phase::Boot);
        let seats = processes
            .iter()
            .filter_map(|process| self.seats.get(&process.slot));
        let slots = seats
            .map(|seat| SlotStart {
                member: seat.member.clone(),
                env: self.slot_env(common, &seat.member, part),
            })
            .collect();
        let request = self.start_request(env::job(common), slots, left);
        let entry = &mut self.parts[part];
        entry.started = true;
        if entry.hold == Hold::Reserved {
            entry.hold = Hold::Starting;
            entry.flow.starting = processes;
            self.request(part, request, self.config.request_timeout);
        } else {
            self.push(part, Push::order(request));
        }
    }

    /// The order to start these workers, which have this time to say hello.
    fn start_request(&self, env: Env, slots: Vec<SlotStart>, left: Duration) -> NodeRequest {
        let elastic = self.is_elastic();
        NodeRequest::Start(StartWorkers {
            job: self.id,
            generation: match elastic {
                true if self.starts_anew() => self.group_number(),
                // That of the last plan; a job whose members start without ranks has none.
                true => self
                    .planned_table()
                    .map_or(Generation(0), |table| table.generation),
                false => self.generation,
            },
            owner: self.owner,
            program: self.spec.program.clone(),
            args: self.spec.args.clone(),
            env,
            user_env: self.spec.env.clone(),
            slots,
            world_size: self.world_size(),
            // The next node of an elastic job may be the second.
            needs_data_plane: !self.is_installed() && (elastic || self.parts.len() > 1),
            hello_timeout_ms: milliseconds(left).max(1),
            grace_ms: self.spec.grace_ms,
            installed: self.spec.installed.clone(),
            next_within_ms: self.spec.elastic.as_ref().map(|elastic| {
                // Room may come as late as this, then processes, others to go with them, and their word.
                let start = self.spec.start_timeout_ms.saturating_mul(2);
                let form = elastic
                    .join_window_ms
                    .saturating_add(elastic.ack_timeout_ms);
                start.saturating_add(form)
            }),
            on_change: self.on_change(),
        })
    }

    /// The number of ranks. Before there is a generation those of an elastic job are the numbers of its seats.
    fn world_size(&self) -> u32 {
        if self.starts_anew() {
            let table = self.published.as_deref();
            return table.map_or(0, GenerationTable::world_size);
        }
        if let Some(table) = self.planned_table() {
            return table.world_size();
        }
        let of_members = self.seats.len() as u32;
        self.elastic.as_deref().map_or(of_members, Elastic::seats)
    }

    pub(super) fn common_env(&self) -> JobEnv {
        let master = &self.parts[0];
        let common = JobEnv {
            job: self.id,
            generation: self.generation,
            world_size: self.world_size(),
            nodes: self.parts.len() as u32,
            master: self.ip_of(0),
            master_port: master.free_port,
            rendezvous: match self.rendezvous {
                Rendezvous::Open(address) => Some(address),
                Rendezvous::NotWanted | Rendezvous::Wanted | Rendezvous::Opening => None,
            },
            loopback: self.net.is_unknown()
                && self
                    .parts
                    .iter()
                    .all(|part| part.site.address.ip().is_loopback()),
            restarts: self.elastic.as_deref().map_or(0, Elastic::resets),
            max_restarts: 0,
            // Horovod's programs are installed ones. The names are as many as the nodes, and this is asked for each node.
            hostnames: match self.spec.installed {
                Some(_) => env::horovod_hostnames(self.seats.values().map(|seat| &seat.member)),
                None => BTreeMap::new(),
            },
        };
        if self.is_planned() {
            self.planned_env(common)
        } else {
            self.group_env(common)
        }
    }

    pub(super) fn worker_started(&mut self, node: NodeId, slot: Slot, pid: u32) {
        match self.seat_mut(node, slot) {
            // 0: it could not be started; its exit tells why.
            Some(seat) if pid > 0 => {
                seat.pid = pid;
                if self.starts_anew() {
                    self.process_runs(slot);
                } else if self.is_installed() && !self.is_planned() {
                    self.installed_ready(slot);
                }
            }
            Some(_) => {}
            None => self.note(format!(
                "{node} started slot {slot}, which it does not have"
            )),
        }
    }

    pub(super) fn node_event(&mut self, node: NodeId, event: NodeEvent) {
        let Some(part) = self.part(node) else {
            return self.note(format!("{node} reports and has no part in the job"));
        };
        if self.parts[part].hold.is_over() {
            return;
        }
        self.news(part, event);
    }

    pub(super) fn place_name(&self, part: usize) -> String {
        let site = &self.parts[part].site;
        format!("{} ({})", site.hostname, site.node)
    }
}
