//! What workers do and say.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kolo_wire::ids::{Generation, Incarnation, Rank, Slot};
use kolo_wire::worker::LOCAL_PROTOCOL;
use kolo_wire::{Exit, FromWorker, NodeEvent, NodeReply, RankFailure, Refusal, ToWorker};

use super::{Colocator, Entry, Phase, SlotState, StopStep, millis};
use crate::node::messages::{Link, Output, Signal, WorkerEvent};

/// How long a process may live on after it has closed a socket to the node.
pub(super) const HANG_UP: Duration = Duration::from_secs(2);

impl Colocator {
    /// Something happened to a worker. Events of slots that are not here, or are over, change nothing.
    pub fn worker(&mut self, now: Instant, slot: Slot, event: WorkerEvent) -> Vec<Output> {
        let mut outputs = Vec::new();
        let Some(entry) = self.slots.get_mut(&slot) else {
            return outputs;
        };
        if entry.state == SlotState::Exited {
            return outputs;
        }
        match event {
            WorkerEvent::Spawned { pid } => self.spawned(now, slot, pid, &mut outputs),
            WorkerEvent::SpawnFailed { exit, reason } => {
                self.condemn(slot, reason);
                self.exited(slot, exit, Vec::new(), &mut outputs);
            }
            WorkerEvent::Exited { exit, stderr_tail } => {
                self.exited(slot, exit, stderr_tail, &mut outputs);
            }
            WorkerEvent::Ended => entry.ended = true,
            // After it was condemned nothing that it says matters.
            _ if entry.condemned.is_some() => {}
            WorkerEvent::Said(message) => self.said(now, slot, message, &mut outputs),
            WorkerEvent::Closed { socket } => {
                entry.hang_up.get_or_insert((socket, now + HANG_UP));
            }
            WorkerEvent::Fault { reason } => self.kill(slot, reason, &mut outputs),
        }
        outputs
    }

    /// The control conversation: hello, then ready, then anything else.
    fn said(&mut self, now: Instant, slot: Slot, message: FromWorker, outputs: &mut Vec<Output>) {
        let Some(entry) = self.slots.get_mut(&slot) else {
            return;
        };
        let listens = entry.listens();
        match message {
            FromWorker::Hello {
                protocol,
                pid,
                registry,
            } => match self.check_hello(slot, protocol, pid, registry) {
                Ok(()) => self.greet(slot, outputs),
                Err(reason) => self.kill(slot, reason, outputs),
            },
            FromWorker::Sign { csr } if listens => {
                if entry.signatures.take(now) {
                    outputs.push(Output::Sign(self.stay.worker(slot), csr));
                } else {
                    let reason = "it asked for one certificate after the other; a renewal is due when most of a \
                                  certificate's life is over";
                    self.kill(slot, reason.to_owned(), outputs);
                }
            }
            FromWorker::Ready { address } if entry.state == SlotState::Greeted => {
                self.ready(slot, address);
            }
            FromWorker::ConnectPeer { rank, generation } if listens => {
                self.connect(slot, rank, generation, outputs);
            }
            FromWorker::RequestLink {
                rank,
                generation,
                group,
            } if listens => self.request_link(slot, (rank, generation, group), outputs),
            FromWorker::Sign { .. } => self.kill(slot, out_of_turn("a certificate"), outputs),
            FromWorker::Ready { .. } => self.kill(slot, out_of_turn("calls"), outputs),
            FromWorker::ConnectPeer { .. } => self.kill(slot, out_of_turn("a peer"), outputs),
            FromWorker::RequestLink { .. } => self.kill(slot, out_of_turn("a link"), outputs),
            // The members of a static job don't change, so nobody waits for these.
            FromWorker::Taken { .. }
            | FromWorker::Committed { .. }
            | FromWorker::Holding { .. } => {}
        }
    }

    /// The head has signed a worker's request, or not.
    pub fn signed(
        &mut self,
        now: Instant,
        slot: Slot,
        signed: Result<Vec<u8>, Refusal>,
    ) -> Vec<Output> {
        match signed {
            Ok(certificate) => {
                let message = ToWorker::Certificate {
                    certificate,
                    authority: self.here.authority.clone(),
                };
                vec![Output::Tell(self.stay.worker(slot), message)]
            }
            // It has one that is good for a while, and asks again.
            Err(refusal) if self.slot(slot) == Some(SlotState::Ready) => {
                vec![Output::Warn(format!(
                    "the certificate of slot {slot} of {} was not renewed: {refusal}",
                    self.job
                ))]
            }
            Err(refusal) => {
                let reason = format!("the head gave it no certificate: {refusal}");
                self.worker(now, slot, WorkerEvent::Fault { reason })
            }
        }
    }

    fn spawned(&mut self, now: Instant, slot: Slot, pid: u32, outputs: &mut Vec<Output>) {
        let timeout = millis(
            self.start
                .as_ref()
                .map_or(0, |start| start.hello_timeout_ms),
        );
        let installed = self.runs_installed();
        if let Some(entry) = self.slots.get_mut(&slot)
            && entry.state == SlotState::Spawning
        {
            entry.pid = pid;
            entry.state = if installed {
                SlotState::Running
            } else {
                SlotState::Booting {
                    hello_by: now + timeout,
                }
            };
            let signal = match self.phase {
                _ if entry.condemned.is_some() => Some(Signal::Kill),
                Phase::Stopping { step, .. } => Some(match step {
                    StopStep::Kill => Signal::Kill,
                    StopStep::Notice if self.interrupted => Signal::Interrupt,
                    StopStep::Notice | StopStep::Term => Signal::Terminate,
                }),
                _ => None,
            };
            outputs.extend(signal.map(|signal| Output::Signal(self.stay.worker(slot), signal)));
        }
        self.answer_start(outputs);
    }

    /// Answers the request to start once every slot has a process or has failed to get one.
    fn answer_start(&mut self, outputs: &mut Vec<Output>) {
        let spawning = |entry: &Entry| entry.state == SlotState::Spawning;
        let Some(start) = &self.start else { return };
        if self.slots.values().any(spawning) {
            return;
        }
        let Some(ask) = self.asked.take() else { return };
        let pids = start
            .slots
            .iter()
            .filter_map(|slot| {
                let slot = slot.member.slot;
                self.slots.get(&slot).map(|entry| (slot, entry.pid))
            })
            .collect();
        outputs.push(Output::Answer {
            ask,
            reply: NodeReply::Started { pids },
        });
    }

    fn check_hello(
        &mut self,
        slot: Slot,
        protocol: u32,
        pid: u32,
        registry: u64,
    ) -> Result<(), String> {
        let Some(entry) = self.slots.get(&slot) else {
            return Ok(());
        };
        if !matches!(entry.state, SlotState::Booting { .. }) {
            return Err("it said hello twice".to_owned());
        }
        if protocol != LOCAL_PROTOCOL {
            return Err(format!(
                "it speaks version {protocol} of the local protocol and this node version \
                 {LOCAL_PROTOCOL}; build the program with the node's version of kolo"
            ));
        }
        if pid != entry.pid {
            return Err(format!(
                "process {pid} said hello in place of process {}, which was started; a worker must not \
                 hand its sockets to another process",
                entry.pid
            ));
        }
        match self.registry {
            Some((rank, digest)) if digest != registry => Err(format!(
                "its program registers other functions and types ({registry:016x}) than that of rank \
                 {rank} ({digest:016x}); all ranks must run the same build"
            )),
            Some(_) => Ok(()),
            None => {
                self.registry = Some((entry.rank, registry));
                Ok(())
            }
        }
    }

    fn greet(&mut self, slot: Slot, outputs: &mut Vec<Output>) {
        let Some(start) = &self.start else { return };
        let Some(started) = start.slots.iter().find(|other| other.member.slot == slot) else {
            return;
        };
        outputs.push(Output::Tell(
            self.stay.worker(slot),
            ToWorker::Welcome {
                cluster: self.here.cluster,
                job: self.job,
                generation: self.generation,
                member: started.member.clone(),
                world_size: start.world_size,
                needs_data_plane: start.needs_data_plane,
                next_within_ms: None,
            },
        ));
        for failure in self.losses.values() {
            outputs.push(Output::Tell(
                self.stay.worker(slot),
                ToWorker::RankLost {
                    generation: self.generation,
                    failure: failure.clone(),
                },
            ));
        }
        if let Some(entry) = self.slots.get_mut(&slot) {
            entry.state = SlotState::Greeted;
        }
    }

    fn ready(&mut self, slot: Slot, address: Option<SocketAddr>) {
        if let Some(entry) = self.slots.get_mut(&slot) {
            entry.state = SlotState::Ready;
        }
        if self.phase == Phase::Running {
            self.reports.push(NodeEvent::WorkerReady {
                job: self.job,
                slot,
                address,
                incarnation: Incarnation::FIRST,
            });
        }
    }

    fn connect(
        &mut self,
        slot: Slot,
        rank: Rank,
        generation: Generation,
        outputs: &mut Vec<Output>,
    ) {
        let Some((own, peer)) = self.other_rank(slot, rank, generation, outputs) else {
            return;
        };
        // Two ranks have a link in each group that they are in.
        outputs.push(Output::Link(Link {
            first: (self.stay.worker(slot), own),
            second: (self.stay.worker(peer), rank),
            generation,
        }));
    }

    fn request_link(
        &mut self,
        slot: Slot,
        (rank, generation, group): (Rank, Generation, u64),
        outputs: &mut Vec<Output>,
    ) {
        let Some((own, peer)) = self.other_rank(slot, rank, generation, outputs) else {
            return;
        };
        // Before that it has nothing to make links with.
        if self.slots.get(&peer).is_some_and(super::Entry::listens) {
            outputs.push(Output::Tell(
                self.stay.worker(peer),
                ToWorker::LinkRequested {
                    rank: own,
                    generation,
                    group,
                },
            ));
        }
    }

    /// The rank in a slot, and the slot of another rank of this node, which it asks for.
    fn other_rank(
        &mut self,
        slot: Slot,
        rank: Rank,
        generation: Generation,
        outputs: &mut Vec<Output>,
    ) -> Option<(Rank, Slot)> {
        // A stale request is from before the worker learnt of the new generation (G-1).
        if generation != self.generation {
            return None;
        }
        let own = self.slots.get(&slot)?.rank;
        if let Some(failure) = self.losses.get(&rank) {
            let failure = failure.clone();
            outputs.push(Output::Tell(
                self.stay.worker(slot),
                ToWorker::RankLost {
                    generation,
                    failure,
                },
            ));
            return None;
        }
        let peer = self.ranks.get(&rank).copied().filter(|peer| *peer != slot);
        if peer.is_none() {
            let reason =
                format!("it asked for a link to rank {rank}, which is no other rank of this node");
            self.kill(slot, reason, outputs);
        }
        Some((own, peer?))
    }

    pub(super) fn condemn(&mut self, slot: Slot, reason: String) {
        if let Some(entry) = self.slots.get_mut(&slot) {
            entry.condemned.get_or_insert(reason);
        }
    }

    fn kill(&mut self, slot: Slot, reason: String, outputs: &mut Vec<Output>) {
        self.condemn(slot, reason);
        outputs.push(Output::Signal(self.stay.worker(slot), Signal::Kill));
    }

    pub(super) fn exited(
        &mut self,
        slot: Slot,
        exit: Exit,
        stderr_tail: Vec<String>,
        outputs: &mut Vec<Output>,
    ) {
        let expected = self.phase != Phase::Running;
        let Some(entry) = self.slots.get_mut(&slot) else {
            return;
        };
        if entry.state == SlotState::Exited {
            return;
        }
        let early = matches!(entry.state, SlotState::Spawning | SlotState::Booting { .. });
        entry.state = SlotState::Exited;
        let reason = if let Some(reason) = &entry.condemned {
            Some(reason.clone())
        } else if expected {
            let reason = self.stop_reason.as_deref().unwrap_or_default();
            Some(format!("the job was stopped: {reason}"))
        } else if early {
            Some(
                "it ended before it said hello; its program must call `kolo::main` or \
                 `run_if_worker`"
                    .to_owned(),
            )
        } else if exit == Exit::Unknown {
            Some(
                "the warden of the job on this node (the process above its workers) was killed, and its workers with it"
                    .to_owned(),
            )
        } else {
            None
        };
        let failure = RankFailure {
            rank: entry.rank,
            node: self.here.node,
            hostname: self.here.hostname.clone(),
            pid: entry.pid,
            exit,
            reason,
            stderr_tail,
        };
        self.lose(failure.clone(), outputs);
        self.reports.push(NodeEvent::WorkerExited {
            job: self.job,
            slot,
            failure,
            expected,
            incarnation: Incarnation::FIRST,
            generation: Generation(0),
        });
        self.answer_start(outputs);
        self.close_if_empty(outputs);
    }
}

fn out_of_turn(what: &str) -> String {
    format!("it asked for {what} out of turn; the order is hello, then ready, then anything else")
}
