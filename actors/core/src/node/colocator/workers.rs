//! What workers do and say.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kolo_wire::ids::{Generation, Rank, Slot};
use kolo_wire::worker::LOCAL_PROTOCOL;
use kolo_wire::{Exit, FromWorker, NodeEvent, RankFailure, Refusal, ToWorker};

use super::stopping::{KILLED, StopStep};
use super::{Colocator, Entry, Phase, SlotState, millis};
use crate::node::messages::{Link, Loss, Output, Signal, WorkerEvent, WorkerId};

/// How long a process may live on after it has closed a socket to the node.
pub(super) const HANG_UP: Duration = Duration::from_secs(2);

impl Colocator {
    /// Something happened to a worker. Events of processes that are not here, or are over, change nothing.
    pub fn worker(&mut self, now: Instant, worker: WorkerId, event: WorkerEvent) -> Vec<Output> {
        let mut outputs = Vec::new();
        let slot = worker.slot;
        let Some(entry) = self.entry_mut(worker).filter(|entry| entry.is_present()) else {
            return outputs;
        };
        match event {
            WorkerEvent::Spawned { pid } => self.spawned(now, slot, pid, &mut outputs),
            WorkerEvent::SpawnFailed { exit, reason } => {
                entry.condemned.get_or_insert(reason);
                self.exited(slot, exit, Vec::new(), &mut outputs);
            }
            WorkerEvent::Exited { exit, stderr_tail } => {
                self.exited(slot, exit, stderr_tail, &mut outputs);
            }
            WorkerEvent::Ended => entry.ended = true,
            WorkerEvent::Accounted(account) => entry.account = Some(Box::new(account)),
            // After it was condemned nothing that it says matters.
            _ if entry.condemned.is_some() => {}
            WorkerEvent::Said(message) => self.said(now, slot, message, &mut outputs),
            WorkerEvent::Closed { socket } => {
                entry.hang_up.get_or_insert((socket, now + HANG_UP));
            }
            WorkerEvent::Fault { reason } => self.kill(now, slot, reason, &mut outputs),
        }
        self.attend(now, &mut outputs);
        outputs
    }

    /// The control conversation: hello, then ready, then anything else.
    fn said(&mut self, now: Instant, slot: Slot, message: FromWorker, outputs: &mut Vec<Output>) {
        let Some(entry) = self.slots.get_mut(&slot) else {
            return;
        };
        let (worker, listens) = (entry.worker, entry.listens());
        match message {
            FromWorker::Hello {
                protocol,
                pid,
                registry,
            } => match self.check_hello(slot, protocol, pid, registry) {
                Ok(()) => self.greet(slot, outputs),
                Err(reason) => self.kill(now, slot, reason, outputs),
            },
            FromWorker::Sign { csr } if listens => {
                if entry.signatures.take(now) {
                    outputs.push(Output::Sign(worker, csr));
                } else {
                    let reason = "it asked for one certificate after the other; a renewal is due when most of a \
                                  certificate's life is over";
                    self.kill(now, slot, reason.to_owned(), outputs);
                }
            }
            FromWorker::Ready { address } if entry.state == SlotState::Greeted => {
                self.ready(slot, address);
            }
            FromWorker::ConnectPeer { rank, generation } if listens => {
                self.connect(now, slot, rank, generation, outputs);
            }
            FromWorker::RequestLink {
                rank,
                generation,
                group,
            } if listens => self.request_link(now, slot, (rank, generation, group), outputs),
            FromWorker::Sign { .. } => self.kill(now, slot, out_of_turn("a certificate"), outputs),
            FromWorker::Ready { .. } => self.kill(now, slot, out_of_turn("calls"), outputs),
            FromWorker::ConnectPeer { .. } => self.kill(now, slot, out_of_turn("a peer"), outputs),
            FromWorker::RequestLink { .. } => self.kill(now, slot, out_of_turn("a link"), outputs),
            // The members of a static job don't change, so nobody waits for these.
            FromWorker::Taken { .. }
            | FromWorker::Committed { .. }
            | FromWorker::Holding { .. }
                if !entry.start.is_elastic() => {}
            FromWorker::Taken { generation } if listens => {
                let taken = self.present.taken(worker, generation);
                if taken.is_ok() {
                    // Those that it was told before come late, in order.
                    entry.taken = entry.taken.max(generation);
                }
                self.pass_on(now, slot, taken, outputs);
            }
            FromWorker::Committed {
                generation,
                commit,
                kept,
            } if listens => {
                let committed = self.present.committed(worker, (generation, commit), kept);
                self.pass_on(now, slot, committed, outputs);
            }
            FromWorker::Holding {
                generation,
                commit,
                failed,
            } if listens => {
                let holds = self.present.holds(worker, (generation, commit), failed);
                self.pass_on(now, slot, holds, outputs);
            }
            FromWorker::Taken { .. }
            | FromWorker::Committed { .. }
            | FromWorker::Holding { .. } => {
                self.kill(now, slot, out_of_turn("a generation"), outputs);
            }
        }
    }

    /// The head hears what a worker has said. One that can't have said it is killed.
    fn pass_on(
        &mut self,
        now: Instant,
        slot: Slot,
        said: Result<NodeEvent, String>,
        outputs: &mut Vec<Output>,
    ) {
        match said {
            Ok(event) => self.reports.push(event),
            Err(reason) => self.kill(now, slot, reason, outputs),
        }
    }

    /// The head has signed a worker's request, or not.
    pub fn signed(
        &mut self,
        now: Instant,
        worker: WorkerId,
        signed: Result<Vec<u8>, Refusal>,
    ) -> Vec<Output> {
        let slot = worker.slot;
        let Some(state) = self.entry_mut(worker).map(|entry| entry.state) else {
            return Vec::new();
        };
        match signed {
            Ok(certificate) => {
                let message = ToWorker::Certificate {
                    certificate,
                    authority: self.here.authority.clone(),
                };
                vec![Output::Tell(worker, message)]
            }
            // It has one that is good for a while, and asks again.
            Err(refusal) if state == SlotState::Ready => {
                vec![Output::Warn(format!(
                    "the certificate of slot {slot} of {} was not renewed: {refusal}",
                    self.job
                ))]
            }
            Err(refusal) => {
                let reason = format!("the head gave it no certificate: {refusal}");
                self.worker(now, worker, WorkerEvent::Fault { reason })
            }
        }
    }

    fn spawned(&mut self, now: Instant, slot: Slot, pid: u32, outputs: &mut Vec<Output>) {
        let interrupted = self.interrupted;
        if let Some(entry) = self.slots.get_mut(&slot)
            && entry.state == SlotState::Spawning
        {
            entry.pid = pid;
            entry.state = if entry.start.installed.is_some() {
                SlotState::Running
            } else {
                SlotState::Booting {
                    hello_by: now + millis(entry.start.hello_timeout_ms),
                }
            };
            let signal = match &mut entry.stop {
                _ if entry.condemned.is_some() => {
                    entry.gone_by = Some(now + KILLED);
                    Some(Signal::Kill)
                }
                Some(stop) if stop.step == StopStep::Kill => {
                    // Its end is waited for from now on.
                    stop.next = stop.next.max(now + KILLED);
                    Some(Signal::Kill)
                }
                Some(stop) if stop.step == StopStep::Notice && interrupted => {
                    Some(Signal::Interrupt)
                }
                Some(_) => Some(Signal::Terminate),
                None => None,
            };
            outputs.extend(signal.map(|signal| Output::Signal(entry.worker, signal)));
        }
        self.answer_starts(outputs);
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
        let name = if entry.start.is_elastic() {
            format!("slot {slot}")
        } else {
            format!("rank {}", entry.rank)
        };
        let (first, digest) = self.registry.get_or_insert((name, registry));
        if *digest == registry {
            return Ok(());
        }
        Err(format!(
            "its program registers other functions and types ({registry:016x}) than that of {first} \
             ({digest:016x}); all ranks must run the same build"
        ))
    }

    fn greet(&mut self, slot: Slot, outputs: &mut Vec<Output>) {
        let Some(entry) = self.slots.get_mut(&slot) else {
            return;
        };
        let Some(member) = entry.seat().map(|seat| seat.member.clone()) else {
            return;
        };
        entry.state = SlotState::Greeted;
        let (start, worker) = (&entry.start, entry.worker);
        let welcome = ToWorker::Welcome {
            cluster: self.here.cluster,
            job: self.job,
            generation: start.generation,
            member,
            world_size: start.world_size,
            needs_data_plane: start.needs_data_plane,
            next_within_ms: start.next_within_ms,
        };
        let messages = [welcome].into_iter().chain(self.present.so_far());
        outputs.extend(messages.map(|message| Output::Tell(worker, message)));
    }

    fn ready(&mut self, slot: Slot, address: Option<SocketAddr>) {
        let Some(entry) = self.slots.get_mut(&slot) else {
            return;
        };
        entry.state = SlotState::Ready;
        let worker = entry.worker;
        if self.phase == Phase::Running {
            self.reports.push(NodeEvent::WorkerReady {
                job: self.job,
                slot,
                address,
                incarnation: worker.incarnation,
            });
        }
    }

    fn connect(
        &mut self,
        now: Instant,
        slot: Slot,
        rank: Rank,
        generation: Generation,
        outputs: &mut Vec<Output>,
    ) {
        let Some((own, peer)) = self.other_rank(now, slot, rank, generation, outputs) else {
            return;
        };
        // Two ranks have a link in each group that they are in.
        outputs.push(Output::Link(Link {
            first: own,
            second: (peer, rank),
            generation,
        }));
    }

    fn request_link(
        &mut self,
        now: Instant,
        slot: Slot,
        (rank, generation, group): (Rank, Generation, u64),
        outputs: &mut Vec<Output>,
    ) {
        let Some(((_, own), peer)) = self.other_rank(now, slot, rank, generation, outputs) else {
            return;
        };
        // Before that it has nothing to make links with.
        if self.slots.get(&peer.slot).is_some_and(Entry::listens) {
            let message = ToWorker::LinkRequested {
                rank: own,
                generation,
                group,
            };
            outputs.push(Output::Tell(peer, message));
        }
    }

    /// The worker in a slot with its rank, and the worker that has another rank of this node, for which it asks.
    fn other_rank(
        &mut self,
        now: Instant,
        slot: Slot,
        rank: Rank,
        generation: Generation,
        outputs: &mut Vec<Output>,
    ) -> Option<((WorkerId, Rank), WorkerId)> {
        // A stale request is from before the worker learnt of the new generation (G-1).
        if generation != self.present.number {
            return None;
        }
        let entry = self.slots.get(&slot)?;
        let own = (entry.worker, entry.rank);
        if let Some(loss) = self.present.loss(rank) {
            outputs.push(Output::Tell(own.0, loss));
            return None;
        }
        let peer = self.present.ranks.get(&rank).filter(|peer| **peer != slot);
        let peer = peer.and_then(|peer| self.slots.get(peer));
        let peer = peer.map(|entry| entry.worker);
        if peer.is_none() {
            let reason =
                format!("it asked for a link to rank {rank}, which is no other rank of this node");
            self.kill(now, slot, reason, outputs);
        }
        Some((own, peer?))
    }

    fn kill(&mut self, now: Instant, slot: Slot, reason: String, outputs: &mut Vec<Output>) {
        if let Some(entry) = self.slots.get_mut(&slot) {
            entry.condemn(now, reason);
            outputs.push(Output::Signal(entry.worker, Signal::Kill));
        }
    }

    pub(super) fn exited(
        &mut self,
        slot: Slot,
        exit: Exit,
        stderr_tail: Vec<String>,
        outputs: &mut Vec<Output>,
    ) {
        let entry = self.slots.get_mut(&slot);
        let Some(entry) = entry.filter(|entry| entry.is_present()) else {
            return;
        };
        let early = matches!(entry.state, SlotState::Spawning | SlotState::Booting { .. });
        entry.state = SlotState::Exited;
        let expected = entry.stop.is_some();
        let account = entry.account.take();
        let reason = if let Some(reason) = &entry.condemned {
            Some(reason.clone())
        } else if let Some(stop) = &entry.stop {
            let what = match self.phase {
                Phase::Running => "it",
                _ => "the job",
            };
            Some(format!("{what} was stopped: {}", stop.reason))
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
            account,
        };
        let (worker, generation) = (entry.worker, entry.taken);
        if let Some(agent) = &mut self.agent {
            agent.has_ended((slot, worker.incarnation), &failure, expected);
        }
        outputs.push(Output::Lost(Loss {
            job: self.job,
            slot,
            incarnation: worker.incarnation,
            failure: failure.clone(),
            stopping: self.phase != Phase::Running,
        }));
        // A process in no generation is no rank that somebody could miss.
        if self.present.ranks.get(&failure.rank) == Some(&slot) {
            self.present.ranks.remove(&failure.rank);
            let lost = self.present.lose(failure.clone());
            self.tell_loss(lost, outputs);
        }
        self.reports.push(NodeEvent::WorkerExited {
            job: self.job,
            slot,
            failure,
            expected,
            incarnation: worker.incarnation,
            generation,
        });
        self.succeed(slot, outputs);
        self.answer_starts(outputs);
        self.close_if_empty(outputs);
    }
}

fn out_of_turn(what: &str) -> String {
    format!("it asked for {what} out of turn; the order is hello, then ready, then anything else")
}
