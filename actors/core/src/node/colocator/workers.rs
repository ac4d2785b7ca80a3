//! What workers do and say.

use std::net::SocketAddr;
use std::time::Instant;

use kolo_wire::ids::{Generation, Rank, Slot};
use kolo_wire::worker::LOCAL_PROTOCOL;
use kolo_wire::{Exit, NodeEvent, RankFailure, ToWorker};

use super::{Action, Colocator, Entry, Phase, SlotState, StopStep, WorkerEvent, millis};

impl Colocator {
    /// Something happened to a worker. Events of slots that are not here, or are over, change nothing.
    pub fn worker(&mut self, now: Instant, slot: Slot, event: WorkerEvent) -> Vec<Action> {
        let mut actions = Vec::new();
        let Some(entry) = self.slots.get_mut(&slot) else {
            return actions;
        };
        if entry.state == SlotState::Exited {
            return actions;
        }
        match event {
            WorkerEvent::Spawned { pid } => self.spawned(now, slot, pid, &mut actions),
            WorkerEvent::SpawnFailed { exit, reason } => {
                self.condemn(slot, reason);
                self.exited(slot, exit, Vec::new(), &mut actions);
            }
            WorkerEvent::Exited { exit, stderr_tail } => {
                self.exited(slot, exit, stderr_tail, &mut actions);
            }
            // What it still says after it was condemned does not matter.
            _ if entry.condemned.is_some() => {}
            WorkerEvent::Hello {
                protocol,
                pid,
                registry,
                program,
            } => match self.check_hello(slot, protocol, pid, registry, program) {
                Ok(()) => self.greet(slot, &mut actions),
                Err(reason) => self.kill(slot, reason, &mut actions),
            },
            WorkerEvent::Sign { csr } => {
                if !entry.listens() {
                    self.kill(slot, out_of_turn("a certificate"), &mut actions);
                } else if entry.signatures.take(now) {
                    actions.push(Action::Sign(slot, csr));
                } else {
                    let reason = "it asked for one certificate after the other; a renewal is due when most of a \
                                  certificate's life is over";
                    self.kill(slot, reason.to_owned(), &mut actions);
                }
            }
            WorkerEvent::Ready { address } => {
                if entry.state == SlotState::Greeted {
                    self.ready(slot, address, &mut actions);
                } else {
                    self.kill(slot, out_of_turn("calls"), &mut actions);
                }
            }
            WorkerEvent::ConnectPeer { rank, generation } => {
                if entry.listens() {
                    self.connect(slot, rank, generation, &mut actions);
                } else {
                    self.kill(slot, out_of_turn("a peer"), &mut actions);
                }
            }
            WorkerEvent::RequestLink {
                rank,
                generation,
                group,
            } => {
                if entry.listens() {
                    self.request_link(slot, (rank, generation, group), &mut actions);
                } else {
                    self.kill(slot, out_of_turn("a link"), &mut actions);
                }
            }
            // While stopping it may close its sockets before it ends.
            WorkerEvent::Closed { socket } => {
                if self.phase == Phase::Running {
                    let reason = format!("it closed its {socket} socket and went on running");
                    self.kill(slot, reason, &mut actions);
                }
            }
            WorkerEvent::Fault { reason } => self.kill(slot, reason, &mut actions),
        }
        actions
    }

    fn spawned(&mut self, now: Instant, slot: Slot, pid: u32, actions: &mut Vec<Action>) {
        let timeout = millis(
            self.start
                .as_ref()
                .map_or(0, |start| start.hello_timeout_ms),
        );
        let installed = self.runs_installed();
        let stopping = matches!(self.phase, Phase::Stopping { .. });
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
            if entry.condemned.is_some() {
                actions.push(Action::Kill(slot));
            } else if stopping {
                actions.push(match self.phase {
                    Phase::Stopping {
                        step: StopStep::Kill,
                        ..
                    } => Action::Kill(slot),
                    Phase::Stopping {
                        step: StopStep::Notice,
                        ..
                    } if self.interrupted => Action::Interrupt(slot),
                    _ => Action::Terminate(slot),
                });
            }
        }
        self.answer_start(actions);
    }

    /// Answers the request to start once every slot has a process or has failed to get one.
    fn answer_start(&mut self, actions: &mut Vec<Action>) {
        let spawning = |entry: &Entry| entry.state == SlotState::Spawning;
        let Some(start) = &self.start else { return };
        if self.answered || self.slots.values().any(spawning) {
            return;
        }
        self.answered = true;
        let pids = start
            .slots
            .iter()
            .filter_map(|slot| {
                let slot = slot.member.slot;
                self.slots.get(&slot).map(|entry| (slot, entry.pid))
            })
            .collect();
        actions.push(Action::Started(pids));
    }

    fn check_hello(
        &mut self,
        slot: Slot,
        protocol: u32,
        pid: u32,
        registry: u64,
        program: Result<(), String>,
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
        program?;
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

    fn greet(&mut self, slot: Slot, actions: &mut Vec<Action>) {
        let Some(start) = &self.start else { return };
        let Some(started) = start.slots.iter().find(|other| other.member.slot == slot) else {
            return;
        };
        actions.push(Action::Tell(
            slot,
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
            actions.push(Action::Tell(
                slot,
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

    fn ready(&mut self, slot: Slot, address: Option<SocketAddr>, actions: &mut Vec<Action>) {
        if let Some(entry) = self.slots.get_mut(&slot) {
            entry.state = SlotState::Ready;
        }
        if self.phase == Phase::Running {
            actions.push(Action::Report(NodeEvent::WorkerReady {
                job: self.job,
                slot,
                address,
            }));
        }
    }

    fn connect(
        &mut self,
        slot: Slot,
        rank: Rank,
        generation: Generation,
        actions: &mut Vec<Action>,
    ) {
        let Some((own, peer)) = self.other_rank(slot, rank, generation, actions) else {
            return;
        };
        // Two ranks have a link in each group that they are in.
        actions.push(Action::Link {
            first: (slot, own),
            second: (peer, rank),
            generation,
        });
    }

    fn request_link(
        &mut self,
        slot: Slot,
        (rank, generation, group): (Rank, Generation, u64),
        actions: &mut Vec<Action>,
    ) {
        let Some((own, peer)) = self.other_rank(slot, rank, generation, actions) else {
            return;
        };
        // Before that it has nothing to make links with.
        if self.slots.get(&peer).is_some_and(super::Entry::listens) {
            actions.push(Action::Tell(
                peer,
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
        actions: &mut Vec<Action>,
    ) -> Option<(Rank, Slot)> {
        // A stale request is from before the worker learnt of the new generation (G-1).
        if generation != self.generation {
            return None;
        }
        let own = self.slots.get(&slot)?.rank;
        if let Some(failure) = self.losses.get(&rank) {
            let failure = failure.clone();
            actions.push(Action::Tell(
                slot,
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
            self.kill(slot, reason, actions);
        }
        Some((own, peer?))
    }

    pub(super) fn condemn(&mut self, slot: Slot, reason: String) {
        if let Some(entry) = self.slots.get_mut(&slot) {
            entry.condemned.get_or_insert(reason);
        }
    }

    fn kill(&mut self, slot: Slot, reason: String, actions: &mut Vec<Action>) {
        self.condemn(slot, reason);
        actions.push(Action::Kill(slot));
    }

    pub(super) fn exited(
        &mut self,
        slot: Slot,
        exit: Exit,
        stderr_tail: Vec<String>,
        actions: &mut Vec<Action>,
    ) {
        let expected = self.phase != Phase::Running;
        let Some(entry) = self.slots.get_mut(&slot) else {
            return;
        };
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
        self.lose(failure.clone(), actions);
        actions.push(Action::Report(NodeEvent::WorkerExited {
            job: self.job,
            slot,
            failure,
            expected,
        }));
        self.answer_start(actions);
        self.close_if_empty(actions);
    }
}

fn out_of_turn(what: &str) -> String {
    format!("it asked for {what} out of turn; the order is hello, then ready, then anything else")
}
