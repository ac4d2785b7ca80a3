//! A whole cluster: its parts, and what happens next.

mod driver;
mod faults;
mod head;
mod invariants;
mod mutate;
mod net;
mod node;
mod process;
mod program;
mod uplink;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kolo_wire::ids::{ClusterId, Generation, JobId};
use kolo_wire::{GenerationTable, JobState, Refusal};

use self::driver::Driver;
pub(crate) use self::driver::spec;
use self::head::Head;
use self::invariants::{Oracle, answers, d2, e2, partition, r1};
use self::node::Node;
use self::process::Process;
use crate::group::Group;
use crate::knobs::{Knobs, MS, QUIET, Time};
use crate::link::{Link, Peer, Side};
use crate::queue::{Event, Fault, Queue};
use crate::random::Random;
use crate::run::{Counts, Options, Outcome, Violation};
use crate::trace::Trace;
use crate::worker::{Name, Progress, Saved};

pub(crate) const CLUSTER: ClusterId = ClusterId(1);

/// Plays the run of a seed, and keeps its trace if `traced`.
#[must_use]
pub fn play(seed: u64, options: Options, traced: bool) -> Outcome {
    World::new(seed, options, traced).play()
}

/// Everything that is simulated. The fields are many because a step of any part may reach all others, as in a cluster. For the same
/// reason the methods of each part are in a file of its own.
pub(crate) struct World {
    pub(crate) options: Options,
    pub(crate) random: Random,
    pub(crate) knobs: Knobs,
    /// Where the virtual clock begins.
    pub(crate) base: Instant,
    pub(crate) now: Time,
    pub(crate) queue: Queue,
    pub(crate) trace: Trace,
    pub(crate) head: Head,
    pub(crate) nodes: Vec<Node>,
    pub(crate) drivers: Vec<Driver>,
    pub(crate) links: BTreeMap<u64, Link>,
    pub(crate) sessions: u64,
    pub(crate) administrators: u64,
    pub(crate) processes: BTreeMap<u32, Process>,
    pub(crate) pids: u32,
    pub(crate) names: BTreeMap<Name, u32>,
    pub(crate) groups: BTreeMap<(JobId, Generation), Group>,
    /// What rank 0 of each group of installed programs has on a disk that all hosts share.
    pub(crate) checkpoints: BTreeMap<JobId, Saved>,
    pub(crate) oracle: Oracle,
    pub(crate) counts: Counts,
    violation: Option<Violation>,
}

impl World {
    pub(crate) fn new(seed: u64, options: Options, traced: bool) -> Self {
        let mut random = Random::new(seed);
        let knobs = Knobs::draw(&mut random, options.nodes, options.slots);
        let nodes = (0..knobs.nodes)
            .map(|index| Node::new(index, knobs.slots[index]))
            .collect();
        let mut trace = Trace::new(traced);
        trace.note(0, || format!("{knobs:?}"));
        Self {
            options,
            random,
            knobs,
            base: Instant::now(),
            now: 0,
            queue: Queue::default(),
            trace,
            head: Head::default(),
            nodes,
            drivers: Vec::new(),
            links: BTreeMap::new(),
            sessions: 0,
            administrators: 0,
            processes: BTreeMap::new(),
            pids: 0,
            names: BTreeMap::new(),
            groups: BTreeMap::new(),
            checkpoints: BTreeMap::new(),
            oracle: Oracle::default(),
            counts: Counts::default(),
            violation: None,
        }
    }

    fn play(mut self) -> Outcome {
        self.head_starts();
        self.plan();
        while self.violation.is_none() {
            let Some((at, event)) = self.queue.pop() else {
                break;
            };
            if at > QUIET {
                break;
            }
            self.now = self.now.max(at);
            self.counts.events += 1;
            self.happens(event);
        }
        Outcome {
            counts: self.counts,
            violation: self.violation,
            hash: self.trace.hash(),
            lines: self.trace.into_lines(),
        }
    }

    pub(crate) fn instant(&self, at: Time) -> Instant {
        self.base + Duration::from_micros(at)
    }

    /// The first microsecond at which this instant is over.
    pub(crate) fn time(&self, at: Instant) -> Time {
        at.saturating_duration_since(self.base)
            .as_nanos()
            .div_ceil(1000) as Time
    }

    pub(crate) fn later(&mut self, after: Time, event: Event) {
        self.queue.push(self.now + after, event);
    }

    /// A check has failed: the run ends.
    pub(crate) fn violation(&mut self, invariant: &'static str, text: String) {
        self.trace
            .note(self.now, || format!("VIOLATION of {invariant}: {text}"));
        self.violation.get_or_insert(Violation { invariant, text });
    }

    pub(crate) fn hold(&mut self, invariant: &'static str, checked: Result<(), String>) {
        if let Err(text) = checked {
            self.violation(invariant, text);
        }
    }

    // Checks of what drivers, nodes and processes do, at which the checks look.

    fn check_end(&mut self, driver: usize, state: JobState, refusal: Option<&Refusal>) {
        let checked = answers::end(self, &self.drivers[driver], state, refusal);
        self.hold("answers", checked);
    }

    fn check_stop(&mut self, node: usize, job: JobId) {
        self.hold("D-2", d2::stop(self, node, job));
    }

    fn check_fence(&mut self, job: JobId, node: usize) {
        self.hold("partition", partition::fenced(self, job, node));
    }

    fn check_ranks(&mut self, table: &GenerationTable) {
        self.hold("R-1", r1::ranks(table));
    }

    fn check_epoch(&mut self, progress: Progress) {
        self.hold("E-2", e2::epoch(progress));
    }

    /// The process that an event is for stands still until then.
    fn stands_still(&self, event: &Event) -> Option<Time> {
        let head = self.head.paused;
        let node = |node: usize| self.nodes[node].paused;
        let side = |session: u64, side: Side| match (side, self.links.get(&session)) {
            (Side::Head, _) => head,
            (Side::Peer, Some(link)) => match link.peer {
                Peer::Node(index, _) => node(index),
                Peer::Driver(_) => 0,
            },
            (Side::Peer, None) => 0,
        };
        let until = match event {
            Event::Arrive(session, to, _) => side(*session, *to),
            // It reads before it judges.
            Event::Idle(session, to) => side(*session, *to) + MS,
            Event::HeadTick(_) => head + MS,
            Event::HeadHears(..) | Event::HeadLost(..) => head,
            Event::NodeTick(index, _) | Event::Beat(index, _) | Event::Unanswered(index, ..) => {
                node(*index) + MS
            }
            Event::Connect(index, _)
            | Event::Shell(index, ..)
            | Event::Orphans(index, _)
            | Event::Kill(index, ..)
            | Event::Fault(Fault::NodeLeaves(index)) => node(*index),
            Event::Said(pid, _) => self.processes.get(pid).map_or(0, |it| node(it.node)),
            _ => 0,
        };
        (until > self.now + MS).then_some(until)
    }

    /// The head, the daemon or the process that an event is for is gone.
    fn is_over(&self, event: &Event) -> bool {
        match event {
            Event::HeadTick(life) | Event::HeadHears(life, _) | Event::HeadLost(life, ..) => {
                *life != self.head.life
            }
            Event::NodeTick(node, life)
            | Event::Connect(node, life)
            | Event::Unanswered(node, life, ..)
            | Event::Shell(node, life, _)
            | Event::Orphans(node, life)
            | Event::Kill(node, life, ..) => !self.is_alive(*node, *life),
            Event::Tell(pid, _)
            | Event::Begins(pid)
            | Event::Worked(pid, ..)
            | Event::Operation(pid, ..)
            | Event::Waited(pid, _) => !self.processes.get(pid).is_some_and(|it| it.alive),
            _ => false,
        }
    }

    pub(crate) fn process_of(&self, name: &Name) -> Option<&Process> {
        self.processes.get(self.names.get(name)?)
    }

    fn happens(&mut self, event: Event) {
        if self.is_over(&event) {
            return;
        }
        if let Some(until) = self.stands_still(&event) {
            return self.queue.push(until, event);
        }
        match event {
            Event::Arrive(session, to, mail) => self.arrive(session, to, mail),
            Event::Idle(session, side) => self.look_for_silence(session, side),
            Event::HeadTick(_) => self.head_ticks(),
            Event::HeadHears(_, input) => self.head_step(*input),
            Event::HeadLost(_, session, reason) => self.head_lost(session, reason),
            Event::NodeTick(node, _) => self.node_ticks(node),
            Event::Beat(node, session) => self.beat(node, session),
            Event::Connect(node, life) => self.node_connects(node, life),
            Event::Unanswered(node, _, tag, number) => self.unanswered(node, tag, number),
            Event::Shell(node, _, input) => self.node_step(node, *input),
            Event::Orphans(node, _) => self.look_for_orphans(node),
            Event::Kill(node, _, job, ask) => self.kill_job(node, job, ask),
            Event::Tell(pid, message) => self.process_hears(pid, &message),
            Event::Said(pid, message) => self.process_said(pid, *message),
            Event::Begins(pid) => self.program_begins(pid),
            Event::Worked(pid, generation, operation) => self.worked(pid, generation, operation),
            Event::Operation(pid, generation, operation, ending) => {
                self.operation_ends(pid, generation, operation, ending);
            }
            Event::Patience(job, generation, operation) => {
                self.patience_ends(job, generation, operation);
            }
            Event::Waited(pid, generation) => self.process_waited(pid, generation),
            Event::Exit(pid, exit) => self.process_ends(pid, exit),
            Event::Driver(driver, errand) => self.errand(driver, errand),
            Event::Fault(fault) => self.fault(fault),
        }
    }
}
