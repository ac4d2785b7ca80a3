//! The state that every job has, whether its members may change or not.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::{DriverId, Generation, JobId, NodeId, Slot};
use kolo_wire::{
    GenerationTable, Handover, InstalledHere, JobSpec, JobState, NodeReply, NodeRequest, OnChange,
    PlacedNode, Refusal, RefusalKind, SlotStart, StartWorkers,
};

use super::end::Ending;
use super::fall::Fall;
use super::messages::{Action, JobConfig, Reply};
use super::network::Net;
use super::parts::{Hold, Part, Parts};
use super::seat::{Seat, process_of};
use crate::env::{self, JobEnv};
use crate::head::milliseconds;
use crate::interfaces::Network;
use crate::membership::Process;

/// How far a job came before it began to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
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
pub(super) enum Rendezvous {
    NotWanted,
    Wanted,
    Opening,
    Open(SocketAddr),
}

/// The state that every job has. It has more than fifteen fields, for each is of the job as a whole: the state of a node, of a seat
/// and of the end have types of their own.
#[derive(Debug)]
pub(super) struct Base {
    pub(super) id: JobId,
    pub(super) owner: DriverId,
    pub(super) spec: JobSpec,
    pub(super) config: JobConfig,
    /// The time of the step that is under way.
    pub(super) now: Instant,
    pub(super) state: JobState,
    pub(super) phase: Phase,
    pub(super) parts: Parts,
    /// The place of each worker, and the last process there. Of a job that never changes its members they are in rank order.
    pub(super) seats: BTreeMap<Slot, Seat>,
    /// The generation that is being formed for the first time, or that was active last. 0 if an elastic job had none.
    pub(super) generation: Generation,
    /// The table that nodes were told last, or are being told.
    pub(super) published: Option<Arc<GenerationTable>>,
    pub(super) rendezvous: Rendezvous,
    pub(super) net: Net,
    /// The network before that of the last nodes that have joined.
    pub(super) before: Option<Arc<Network>>,
    /// The failures since the group was whole, or in all if it never changes.
    pub(super) fall: Fall,
    pub(super) ending: Option<Ending>,
    pub(super) actions: Vec<Action>,
}

impl Base {
    pub(super) fn new(
        now: Instant,
        id: JobId,
        owner: DriverId,
        spec: JobSpec,
        config: JobConfig,
    ) -> Self {
        Self {
            id,
            owner,
            config,
            now,
            state: JobState::Placing,
            phase: Phase::Reserve,
            parts: Parts::default(),
            seats: BTreeMap::new(),
            generation: Generation(0),
            published: None,
            rendezvous: if spec.rendezvous {
                Rendezvous::Wanted
            } else {
                Rendezvous::NotWanted
            },
            net: Net::Registered,
            before: None,
            fall: Fall::default(),
            ending: None,
            actions: Vec::new(),
            spec,
        }
    }

    pub(super) fn note(&mut self, text: String) {
        self.actions.push(Action::Note(text));
    }

    pub(super) fn is_elastic(&self) -> bool {
        self.spec.elastic.is_some()
    }

    /// Its program is any executable on the hosts, whose workers say no hello.
    pub(super) fn is_installed(&self) -> bool {
        self.spec.installed.is_some()
    }

    /// The fate of the processes at a change of members.
    pub(super) fn on_change(&self) -> OnChange {
        let elastic = self.spec.elastic.as_ref();
        elastic.map(|elastic| elastic.on_change).unwrap_or_default()
    }

    /// All processes are stopped at a change, and the next ones started.
    pub(super) fn starts_anew(&self) -> bool {
        self.on_change() == OnChange::Restart
    }

    /// Its processes speak Horovod's elastic protocol.
    pub(super) fn is_horovod(&self) -> bool {
        self.on_change() == OnChange::Horovod
    }

    pub(super) fn seat(&self, node: NodeId, slot: Slot) -> Result<&Seat, String> {
        self.seats
            .get(&slot)
            .filter(|seat| seat.member.node == node)
            .ok_or_else(|| format!("{} has no slot {slot} on {node}", self.id))
    }

    /// The last process of a seat, if it is this one.
    pub(super) fn last(&mut self, process: Process) -> Option<&mut Seat> {
        let seat = self.seats.get_mut(&process.slot);
        seat.filter(|seat| seat.process() == process)
    }

    /// Whether the node may have a certificate made for the worker in `slot`, and for which generation (S-2).
    pub(super) fn may_sign(&self, node: NodeId, slot: Slot) -> Result<Generation, Refusal> {
        let forbidden = |problem| Refusal::new(RefusalKind::Forbidden, problem);
        let seat = self.seat(node, slot).map_err(forbidden)?;
        if self.phase < Phase::Boot || seat.exit.is_some() || self.ending.is_some() {
            let problem = format!("slot {slot} of {} runs no worker", self.id);
            return Err(forbidden(problem));
        }
        Ok(self.generation)
    }

    /// The members: of an elastic job those of the generation that was published last.
    pub(super) fn table(&self) -> GenerationTable {
        let published = self.published.as_deref();
        published.cloned().unwrap_or_else(|| GenerationTable {
            job: self.id,
            generation: self.generation,
            members: self
                .seats
                .values()
                .map(|seat| seat.member.clone())
                .collect(),
            cause: String::new(),
            handover: Handover::None,
        })
    }

    pub(super) fn placed_nodes(&self) -> Vec<PlacedNode> {
        (0..self.parts.len())
            .map(|part| self.placed_node(part))
            .collect()
    }

    pub(super) fn placed_node(&self, part: usize) -> PlacedNode {
        let part = &self.parts[part];
        let seats = part.slots.iter().filter_map(|slot| self.seats.get(slot));
        let mut ranks: Vec<_> = seats.map(|seat| seat.member.rank).collect();
        ranks.sort_unstable();
        PlacedNode {
            node: part.site.node,
            hostname: part.site.hostname.clone(),
            address: part.site.address,
            ranks,
            has_program: part.has_program,
        }
    }

    /// Reserves on a node what its site asks for.
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

    /// The node that reports something, if the job still has anything there.
    pub(super) fn reports(&mut self, node: NodeId) -> Option<usize> {
        if self.parts.find(node).is_none() {
            self.note(format!("{node} reports and has no part in the job"));
        }
        self.parts.there(node)
    }

    /// A node has answered a request. What it was asked for.
    pub(super) fn answered(&mut self, node: NodeId) -> Option<(usize, Hold)> {
        let Some(part) = self.parts.find(node) else {
            self.note(format!("answer of {node}, which has no part in the job"));
            return None;
        };
        let entry = &mut self.parts[part];
        entry.flow.is_owed = false;
        let hold = entry.hold;
        if hold.is_over() {
            self.parts.mark_over();
        }
        Some((part, hold))
    }

    /// A node has answered a reservation. The result is a problem of the node, or why it does not hold what it was asked for.
    pub(super) fn reserved(
        &mut self,
        part: usize,
        reply: Reply,
    ) -> Result<Option<Refusal>, Refusal> {
        let Refusal { kind, message } = match reply {
            Reply::Answer(NodeReply::Reserved {
                has_program,
                free_port,
                problem,
            }) => {
                let is_installed = self.is_installed();
                let entry = &mut self.parts[part];
                entry.hold = Hold::Reserved;
                // Of an installed program there is nothing to send.
                entry.has_program = has_program || is_installed;
                entry.free_port = free_port;
                if self.ending.is_some() {
                    self.undo(part);
                }
                return Ok(problem);
            }
            Reply::Refused(refusal) => {
                self.free(part);
                refusal
            }
            // It may hold the reservation all the same.
            Reply::Answer(_) | Reply::Unknown(_) => {
                self.undo(part);
                Refusal::new(RefusalKind::Timeout, reply.unexpected())
            }
        };
        let at = self.parts[part].name();
        let text = format!("{at} did not reserve: {message}");
        Err(Refusal::new(kind, text))
    }

    /// The environment that all workers of a job of this size have in common.
    pub(super) fn common_env(&self, world_size: u32) -> JobEnv {
        let is_loopback = |part: &Part| part.site.address.ip().is_loopback();
        JobEnv {
            job: self.id,
            generation: self.generation,
            world_size,
            nodes: self.parts.len() as u32,
            master: self.ip_of(0),
            master_port: self.parts[0].free_port,
            rendezvous: match self.rendezvous {
                Rendezvous::Open(address) => Some(address),
                Rendezvous::NotWanted | Rendezvous::Wanted | Rendezvous::Opening => None,
            },
            loopback: self.net.is_unknown() && self.parts.iter().all(is_loopback),
            restarts: 0,
            max_restarts: 0,
            // Horovod's programs are installed ones. The names are as many as the nodes, and this is asked for each node.
            hostnames: match self.spec.installed {
                Some(_) => env::horovod_hostnames(self.seats.values().map(|seat| &seat.member)),
                None => BTreeMap::new(),
            },
        }
    }

    /// These processes of a node, which has this number among the nodes, as they are started.
    pub(super) fn slots(
        &self,
        processes: &[Process],
        common: &JobEnv,
        number: u32,
    ) -> Vec<SlotStart> {
        let seats = processes
            .iter()
            .filter_map(|process| self.seats.get(&process.slot));
        let slot = |seat: &Seat| SlotStart {
            member: seat.member.clone(),
            env: self.slot_env(common, &seat.member, number),
        };
        seats.map(slot).collect()
    }

    /// Starts these processes on a node that holds their seats. They have this time to say hello.
    pub(super) fn start(
        &mut self,
        part: usize,
        generation: Generation,
        common: &JobEnv,
        slots: Vec<SlotStart>,
        left: Duration,
    ) {
        self.phase = self.phase.max(Phase::Boot);
        let processes = slots.iter().map(|slot| process_of(&slot.member)).collect();
        let elastic = self.spec.elastic.as_deref();
        let request = NodeRequest::Start(StartWorkers {
            job: self.id,
            generation,
            owner: self.owner,
            program: self.spec.program.clone(),
            args: self.spec.args.clone(),
            env: env::job(common),
            user_env: self.spec.env.clone(),
            slots,
            world_size: common.world_size,
            // The next node of an elastic job may be the second.
            needs_data_plane: !self.is_installed() && (elastic.is_some() || self.parts.len() > 1),
            hello_timeout_ms: milliseconds(left).max(1),
            grace_ms: self.spec.grace_ms,
            installed: self.spec.installed.clone(),
            next_within_ms: elastic.map(|elastic| {
                // Room may come as late as this, then processes, others to go with them, and their word.
                let start = self.spec.start_timeout_ms.saturating_mul(2);
                let form = elastic
                    .join_window_ms
                    .saturating_add(elastic.ack_timeout_ms);
                start.saturating_add(form)
            }),
            on_change: self.on_change(),
        });
        let entry = &mut self.parts[part];
        entry.started = true;
        if entry.hold == Hold::Reserved {
            entry.hold = Hold::Starting;
            entry.starting = processes;
            self.request(part, request, self.config.request_timeout);
        } else {
            self.push(part, request);
        }
    }

    /// These processes were to be started on a node, and some have been. The seats of those that run.
    pub(super) fn run(&mut self, part: usize, of: &[Process], pids: Vec<(Slot, u32)>) -> Vec<Slot> {
        let node = self.parts[part].site.node;
        let mut running = Vec::with_capacity(pids.len());
        for (slot, pid) in pids {
            let seat = self.seats.get_mut(&slot);
            match seat.filter(|seat| seat.member.node == node) {
                Some(seat) if !of.contains(&seat.process()) => {}
                // 0: it could not be started; its exit tells why.
                Some(_) if pid == 0 => {}
                Some(seat) => {
                    seat.pid = pid;
                    running.push(slot);
                }
                None => self.note(format!(
                    "{node} started slot {slot}, which it does not have"
                )),
            }
        }
        running
    }

    /// A node has answered a request to start processes. It is left if the job ends, and else gets what has waited for that answer.
    pub(super) fn after_start(&mut self, part: usize) {
        let entry = &self.parts[part];
        if self.ending.is_none() {
            let (node, waiting) = (entry.site.node, entry.pushes.queue.len());
            let pushes = (0..waiting).map(|_| Action::Push(node));
            self.actions.extend(pushes);
            self.parts.pend(node);
        } else if entry.hold == Hold::Running {
            self.undo(part);
        }
    }
}
