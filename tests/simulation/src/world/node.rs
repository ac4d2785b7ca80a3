//! The shell of a node daemon: [`NodeCore`] on the virtual clock, its way to the head, its wardens and processes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kolo_core::head::job::Reply;
use kolo_core::head::messages::RequestId;
use kolo_core::node::NodeCore;
use kolo_core::node::colocator::Here;
use kolo_core::node::inventory::Inventory;
use kolo_core::node::messages::{AskId, Found, Input, Output, Signal, Stay, Wanted, WorkerId};
use kolo_core::node::orphans::Orphans;
use kolo_wire::ids::NodeId;
use kolo_wire::{
    Exit, HeadRequest, Milli, NodeReply, ProgramHash, Resources, StartWorkers, ToWorker,
};

use crate::knobs::{MS, SECOND, Time};
use crate::link::{Mail, Side, Tag};
use crate::mutation::Mutation;
use crate::queue::{Event, Fault};
use crate::world::{CLUSTER, World};

/// Pauses between attempts to connect, as the daemon makes them.
pub(crate) const PAUSES: (Time, Time) = (50 * MS, 2 * SECOND);

/// Where a daemon that stops is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaving {
    No,
    /// It waits until the head says that no job is left.
    Draining,
    /// It ends its jobs.
    Stopping(AskId),
    /// It waits until the head knows.
    Flushing(AskId),
}

/// A node daemon.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) core: NodeCore,
    pub(crate) instance: u64,
    pub(crate) session: Option<u64>,
    pub(crate) registered: bool,
    pub(crate) pause: Time,
    /// Since when a heartbeat has no answer.
    pub(crate) asked: Option<Time>,
    tick: Option<Time>,
    /// Questions to the head without an answer.
    pub(crate) questions: BTreeMap<u64, Tag>,
    next: u64,
    /// Orders without an answer, and the way back.
    pub(crate) orders: BTreeMap<AskId, Option<(u64, RequestId)>>,
    next_ask: u64,
    pub(crate) processes: BTreeMap<WorkerId, u32>,
    pub(crate) starts: BTreeMap<Stay, Arc<StartWorkers>>,
    pub(crate) orphans: Orphans,
    pub(crate) leaving: Leaving,
}

/// A host that may have a daemon.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: NodeId,
    pub(crate) slots: u32,
    /// Counts its daemons.
    pub(crate) life: u64,
    pub(crate) daemon: Option<Daemon>,
    pub(crate) paused: Time,
    pub(crate) frozen: Time,
    /// Nothing passes to this side of its connections to the head.
    pub(crate) cut: [bool; 2],
    /// Since when its data plane reaches no other host.
    pub(crate) isolated: bool,
    /// Elastic jobs are to leave it.
    pub(crate) drained: bool,
    pub(crate) programs: BTreeSet<ProgramHash>,
    /// Ports that it has given away.
    ports: u16,
    /// Since when it is not registered with a head.
    pub(crate) alone_since: Option<Time>,
}

impl Node {
    pub(crate) fn new(index: usize, slots: u32) -> Self {
        Self {
            id: NodeId(index as u64 + 1),
            slots,
            life: 0,
            daemon: None,
            paused: 0,
            frozen: 0,
            cut: [false; 2],
            isolated: false,
            drained: false,
            programs: BTreeSet::new(),
            ports: 0,
            alone_since: None,
        }
    }

    pub(crate) fn hostname(&self) -> String {
        format!("host-{}", self.id.0)
    }
}

impl Daemon {
    pub(crate) fn question(&mut self, tag: Tag) -> u64 {
        self.next += 1;
        self.questions.insert(self.next, tag);
        self.next
    }

    pub(crate) fn ask(&mut self, back: Option<(u64, RequestId)>) -> AskId {
        self.next_ask += 1;
        self.orders.insert(AskId(self.next_ask), back);
        AskId(self.next_ask)
    }
}

impl World {
    pub(crate) fn daemon(&mut self, node: usize) -> Option<&mut Daemon> {
        self.nodes[node].daemon.as_mut()
    }

    pub(crate) fn is_alive(&self, node: usize, life: u64) -> bool {
        self.nodes[node].life == life && self.nodes[node].daemon.is_some()
    }

    pub(crate) fn node_starts(&mut self, node: usize) {
        if self.nodes[node].daemon.is_some() {
            return;
        }
        let instance = self.random.number() | 1;
        let orphan = Duration::from_micros(self.knobs.orphan);
        let entry = &mut self.nodes[node];
        entry.life += 1;
        entry.alone_since = Some(self.now);
        let here = Here {
            cluster: CLUSTER,
            node: entry.id,
            hostname: entry.hostname(),
            authority: vec![1],
        };
        let total = Resources {
            cpus: Milli::units(u64::from(entry.slots)),
            ..Resources::default()
        };
        entry.daemon = Some(Daemon {
            core: NodeCore::new(here, Inventory::new(total, Vec::new())),
            instance,
            session: None,
            registered: false,
            pause: PAUSES.0,
            asked: None,
            tick: None,
            questions: BTreeMap::new(),
            next: 0,
            orders: BTreeMap::new(),
            next_ask: 0,
            processes: BTreeMap::new(),
            starts: BTreeMap::new(),
            orphans: Orphans::new(orphan),
            leaving: Leaving::No,
        });
        let (id, life) = (entry.id, entry.life);
        self.trace.note(self.now, || format!("{id}: starts"));
        self.later(MS, Event::Connect(node, life));
    }

    /// A daemon ends, however. Its processes are gone within a second (O-1).
    pub(crate) fn node_dies(&mut self, node: usize) {
        let entry = &mut self.nodes[node];
        let Some(daemon) = entry.daemon.take() else {
            return;
        };
        entry.life += 1;
        let id = entry.id;
        self.trace.note(self.now, || format!("{id}: is gone"));
        if let Some(session) = daemon.session
            && let Some(link) = self.links.get_mut(&session)
        {
            link.is_open[Side::Peer as usize] = false;
        }
        for pid in daemon.processes.into_values() {
            let after = self.random.below(SECOND);
            self.later(after, Event::Exit(pid, Exit::Signal(9)));
        }
    }

    pub(crate) fn node_step(&mut self, node: usize, input: Input) {
        let now = self.instant(self.now.saturating_sub(self.nodes[node].frozen));
        let Some(daemon) = self.nodes[node].daemon.as_mut() else {
            return;
        };
        for output in daemon.core.step(now, input) {
            self.node_does(node, output);
        }
        self.node_wakes(node);
    }

    pub(crate) fn node_wakes(&mut self, node: usize) {
        let (life, frozen) = (self.nodes[node].life, self.nodes[node].frozen);
        let Some(daemon) = &self.nodes[node].daemon else {
            return;
        };
        let at = (daemon.core.deadline()).map(|at| (self.time(at) + frozen).max(self.now));
        let now = self.now;
        if let Some(at) = at
            && let Some(daemon) = self.daemon(node)
            && daemon.tick.is_none_or(|tick| at < tick || tick < now)
        {
            daemon.tick = Some(at);
            self.queue.push(at, Event::NodeTick(node, life));
        }
    }

    pub(crate) fn node_ticks(&mut self, node: usize) {
        let (now, awake) = (self.now, self.now.saturating_sub(self.nodes[node].frozen));
        let awake = self.instant(awake);
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        if daemon.tick.is_some_and(|tick| tick <= now) {
            daemon.tick = None;
        }
        if daemon.core.deadline().is_some_and(|at| at <= awake) {
            self.node_step(node, Input::Tick);
        } else {
            self.node_wakes(node);
        }
    }

    fn shell_later(&mut self, node: usize, after: Time, input: Input) {
        let life = self.nodes[node].life;
        self.later(after, Event::Shell(node, life, Box::new(input)));
    }

    // The end of a daemon that is asked to end.

    pub(crate) fn node_leaves(&mut self, node: usize) {
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        if daemon.leaving != Leaving::No {
            return;
        }
        daemon.leaving = Leaving::Draining;
        let registered = daemon.registered;
        let ask = daemon.ask(None);
        let id = self.nodes[node].id;
        self.trace.note(self.now, || format!("{id}: is to leave"));
        self.node_step(node, Input::Drain { ask });
        if registered {
            self.node_asks(node, Tag::Drain, HeadRequest::Drain);
        } else {
            self.stop_jobs(node);
        }
    }

    pub(crate) fn stop_jobs(&mut self, node: usize) {
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        if daemon.leaving != Leaving::Draining {
            return;
        }
        let ask = daemon.ask(None);
        daemon.leaving = Leaving::Stopping(ask);
        let reason = "the node is being stopped".to_owned();
        self.node_step(node, Input::StopAll { ask, reason });
    }

    fn goes_on_leaving(&mut self, node: usize, ask: AskId) {
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        if daemon.leaving == Leaving::Stopping(ask) {
            let flush = daemon.ask(None);
            daemon.leaving = Leaving::Flushing(flush);
            // The daemon waits for this for a while only.
            self.later(
                5 * SECOND,
                Event::Fault(Fault::Gone(node, self.nodes[node].life)),
            );
            self.node_step(node, Input::Flush { ask: flush });
        } else if daemon.leaving == Leaving::Flushing(ask) {
            self.leave_head(node, "the node is done");
            self.node_dies(node);
        }
    }

    // What the core wants.

    fn node_does(&mut self, node: usize, output: Output) {
        match output {
            Output::Answer { ask, reply } => self.node_answers(node, ask, reply),
            Output::Find { ask, program, port } => {
                let program = match program {
                    Wanted::Sent(hash) if !self.nodes[node].programs.contains(&hash) => {
                        Found::NotSent
                    }
                    Wanted::Sent(_) | Wanted::Installed(_) => Found::Here,
                };
                let after = self.moment();
                let free_port = if port { self.free_port(node) } else { 0 };
                let found = Input::Found {
                    ask,
                    program,
                    free_port,
                };
                self.shell_later(node, after, found);
            }
            Output::Check { ask, .. } => {
                let checked = if self.has_mishap() {
                    Err("no GPU".to_owned())
                } else {
                    Ok(())
                };
                let after = self.moment();
                self.shell_later(node, after, Input::Checked { ask, checked });
            }
            Output::FindPort { ask } => {
                let after = self.moment();
                let found = Input::Found {
                    ask,
                    program: Found::NotSent,
                    free_port: self.free_port(node),
                };
                self.shell_later(node, after, found);
            }
            Output::StartWarden(stay) => {
                let started = if self.has_mishap() {
                    Err("no more processes".to_owned())
                } else {
                    Ok(())
                };
                let after = self.moment() * 2;
                self.shell_later(node, after, Input::Warden { stay, started });
            }
            Output::CloseWarden(stay) => self.close_warden(node, stay),
            Output::Open(opening) => {
                if let Some(daemon) = self.daemon(node) {
                    daemon.starts.insert(opening.stay, opening.start);
                    // The daemon looks at each change of its jobs.
                    let life = self.nodes[node].life;
                    self.later(0, Event::Orphans(node, life));
                }
            }
            Output::Spawn(spawning) => {
                self.spawn(node, &spawning);
                if self.mutates(Mutation::SpawnTwice) {
                    self.spawn(node, &spawning);
                }
            }
            Output::Tell(worker, message) => {
                if matches!(message, ToWorker::Stop { .. }) {
                    self.check_stop(node, worker.stay.job);
                }
                if let Some(pid) = self.pid(node, worker) {
                    self.tell(pid, message);
                }
            }
            Output::Sign(worker, _) => self.sign(node, worker),
            Output::Signal(worker, signal) => {
                if let Some(pid) = self.pid(node, worker) {
                    self.signal(pid, signal);
                }
            }
            Output::Send { session, events } => {
                self.node_asks(node, Tag::Events(session), HeadRequest::Events(events));
            }
            Output::Leave { reason } => self.leave_head(node, &reason),
            Output::Warn(text) => {
                let id = self.nodes[node].id;
                self.trace.note(self.now, || format!("{id}: {text}"));
            }
            // Calls and output are not here.
            _ => {}
        }
    }

    fn pid(&self, node: usize, worker: WorkerId) -> Option<u32> {
        let daemon = self.nodes[node].daemon.as_ref()?;
        daemon.processes.get(&worker).copied()
    }

    fn node_answers(&mut self, node: usize, ask: AskId, reply: NodeReply) {
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        match daemon.orders.remove(&ask) {
            Some(Some((session, id))) => {
                let reply = match reply {
                    NodeReply::Refused(refusal) => Reply::Refused(refusal),
                    other => Reply::Answer(other),
                };
                self.trace.note(self.now, || {
                    format!("{}: answers {reply:?}", NodeId(node as u64 + 1))
                });
                let mail = Mail::Reply(id, Box::new(reply));
                self.send(session, Side::Head, mail);
            }
            Some(None) => self.goes_on_leaving(node, ask),
            None => {
                let id = self.nodes[node].id;
                self.violation("answers", format!("{id} answers {ask:?} twice"));
            }
        }
    }

    /// A port that is free, and that nobody was given before.
    fn free_port(&mut self, node: usize) -> u16 {
        let is_new = self.options.mutation != Some(Mutation::SamePort);
        let entry = &mut self.nodes[node];
        entry.ports += u16::from(is_new);
        4321 + entry.ports
    }

    pub(crate) fn signal(&mut self, pid: u32, signal: Signal) {
        if self.options.mutation == Some(Mutation::LeaveProcesses)
            || matches!(signal, Signal::Pass(_))
        {
            return;
        }
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        process.is_ending = true;
        let is_stubborn = process.stubborn;
        let (mut after, mut exit) = (self.random.below(5 * MS), Exit::Signal(9));
        if signal != Signal::Kill {
            if process.model.is_program() {
                process.model.ends();
                if self.options.mutation == Some(Mutation::EarlyEnd) {
                    self.warden_tells(pid, Exit::Signal(15));
                }
                // It may save something first, and end as it likes.
                after = self.random.below(200 * MS);
                exit = self
                    .random
                    .pick(&[Exit::Signal(15), Exit::Code(0), Exit::Code(1)]);
            } else {
                exit = Exit::Signal(15);
            }
            if is_stubborn {
                return;
            }
        }
        self.later(after, Event::Exit(pid, exit));
    }

    /// Kills what is left below a warden.
    fn close_warden(&mut self, node: usize, stay: Stay) {
        let leaves = self.options.mutation == Some(Mutation::LeaveProcesses);
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        daemon.starts.remove(&stay);
        let mut left = Vec::new();
        daemon.processes.retain(|worker, pid| {
            let goes = worker.stay == stay;
            if goes {
                left.push(*pid);
            }
            !goes
        });
        if !leaves {
            for pid in left {
                self.process_ends(pid, Exit::Signal(9));
            }
        }
        let after = self.moment();
        self.shell_later(node, after, Input::Closed(stay));
    }
}
