//! A whole cluster: its parts, and what happens next.

use std::collections::BTreeMap;
use std::time::Instant;

use kolo_wire::ids::{Generation, JobId};

use crate::driver::Driver;
use crate::group::Group;
use crate::head::Head;
use crate::invariants::Oracle;
use crate::knobs::Knobs;
use crate::link::{Link, Peer, Side};
use crate::mutation::Mutation;
use crate::node::Node;
use crate::process::Process;
use crate::queue::{Event, MS, Queue, Time};
use crate::random::Random;
use crate::run::{Counts, Options, Outcome, Violation};
use crate::trace::Trace;
use crate::worker::{Name, Saved};

/// Everything.
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
    pub(crate) mutation: Option<Mutation>,
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
            head: Head::new(),
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
            mutation: options.mutation,
            violation: None,
        }
    }

    /// Plays a whole run.
    pub(crate) fn play(mut self) -> Outcome {
        self.head_starts();
        self.plan();
        while self.violation.is_none() {
            let Some((at, event)) = self.queue.pop() else {
                break;
            };
            if at > crate::knobs::QUIET {
                break;
            }
            self.now = self.now.max(at);
            self.counts.events += 1;
            self.happens(event);
        }
        self.counts.generations = self.oracle.generations.count();
        Outcome {
            counts: self.counts,
            violation: self.violation,
            hash: self.trace.hash(),
            lines: self.trace.into_lines(),
        }
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
            | Event::Fault(crate::faults::Fault::NodeLeaves(index)) => node(*index),
            Event::Said(pid, _) => self.processes.get(pid).map_or(0, |it| node(it.node)),
            _ => 0,
        };
        (until > self.now + MS).then_some(until)
    }

    fn happens(&mut self, event: Event) {
        if let Some(until) = self.stands_still(&event) {
            return self.queue.push(until, event);
        }
        match event {
            Event::Arrive(session, to, mail) => self.arrive(session, to, mail),
            Event::Idle(session, side) => self.look_for_silence(session, side),
            Event::HeadTick(life) => self.head_ticks(life),
            Event::HeadHears(life, input) => {
                if life == self.head.life {
                    self.head_step(*input);
                }
            }
            Event::HeadLost(life, session, reason) => {
                if life == self.head.life {
                    self.head_lost(session, reason);
                }
            }
            Event::NodeTick(node, life) => self.node_ticks(node, life),
            Event::Beat(node, session) => self.beat(node, session),
            Event::Connect(node, life) => self.node_connects(node, life),
            Event::Unanswered(node, life, tag, number) => self.unanswered(node, life, tag, number),
            Event::Shell(node, life, input) => self.shell(node, life, *input),
            Event::Orphans(node, life) => self.orphans(node, life),
            Event::Kill(node, life, job, ask) => self.kill_job(node, life, job, ask),
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
