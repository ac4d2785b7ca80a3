//! One job on a whole cluster: what it costs the head, for clusters of growing size.
//!
//! The core of the head is real. Nodes are as short as can be: they answer at once, and nothing goes wrong but the loss of some.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use kolo_core::fence::Fence;
use kolo_core::head::HeadCore;
use kolo_core::head::job::{JobConfig, Reply};
use kolo_core::head::messages::{AskId, Caller, Input, Output, Question, RequestId, Settings};
use kolo_core::head::registry::Session;
use kolo_core::ranks::MAX_WORLD_SIZE;
use kolo_wire::head::Beat;
use kolo_wire::identity::{Identity, Role};
use kolo_wire::ids::{DriverId, Generation, Incarnation, JobId, NodeId, Rank, Slot};
use kolo_wire::{
    Elastic, Exit, GenerationTable, HeadRequest, JobEvent, Kept, Milli, NodeEvent,
    NodeRegistration, NodeReply, NodeRequest, OnChange, Placement, RankFailure, Resources,
    SubmitFrame, frame,
};
use rustix::time::{ClockId, clock_gettime};

use crate::memory;
use crate::world::{CLUSTER, spec};

const JOB: JobId = JobId(1);
const DRIVER: Session = Session(1);
const HEARTBEAT: Duration = Duration::from_millis(250);
/// The time between two looks of everybody at what has come.
const ROUND: Duration = Duration::from_millis(1);
/// Everything is over long before.
const LIMIT: Duration = Duration::from_secs(300);
/// Per node, the larger of two clusters costs at most so many times what the smaller one does.
const MOST_GROWTH: f64 = 2.0;

/// A cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shape {
    /// Its nodes.
    pub nodes: u32,
    /// The ranks of the job on each node.
    pub slots: u32,
}

impl Shape {
    /// The largest cluster with at most so many slots on each node whose job is not too large.
    #[must_use]
    pub fn legal(self) -> Self {
        let nodes = self.nodes.min(MAX_WORLD_SIZE);
        let slots = self.slots.min(MAX_WORLD_SIZE / nodes.max(1));
        Self { nodes, slots }
    }

    fn ranks(self) -> u32 {
        self.nodes * self.slots
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.nodes, self.slots)
    }
}

/// What a job has cost the head, from the first node to the end.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// The cluster.
    pub shape: Shape,
    /// Messages to and from the head.
    pub messages: u64,
    /// Their bytes, without tables of members.
    pub bytes: u64,
    /// Bytes of the tables of members. Each node gets the whole table of each generation.
    pub tables: u64,
    /// Processor time of the core.
    pub cpu: Duration,
    /// The most memory that was in use at once, with the little that the nodes here need.
    pub memory: u64,
    /// The time on the virtual clock.
    pub took: Duration,
}

impl Cost {
    /// Whether each node of the larger cluster costs about what a node of this one does. Tables are left out, since they grow
    /// with the number of members.
    ///
    /// # Errors
    ///
    /// What grows faster than the number of nodes, and how much.
    pub fn is_linear(&self, larger: &Self) -> Result<(), String> {
        let per_node = |cost: &Self, what: f64| what / f64::from(cost.shape.nodes);
        for (name, of) in [
            (
                "messages",
                (|cost| cost.messages as f64) as fn(&Self) -> f64,
            ),
            ("bytes", |cost| cost.bytes as f64),
            ("cpu", |cost| cost.cpu.as_secs_f64()),
            ("memory", |cost| cost.memory as f64),
        ] {
            let growth = per_node(larger, of(larger)) / per_node(self, of(self));
            if growth > MOST_GROWTH {
                return Err(format!(
                    "{name}: each node of {} costs {growth:.1} times what each of {} does; allowed is {MOST_GROWTH}",
                    larger.shape, self.shape
                ));
            }
        }
        Ok(())
    }
}

/// Forms one job on all nodes, loses one node in a hundred, gets them back, and ends the job.
///
/// # Errors
///
/// A phase that did not come to its end.
pub fn scale(shape: Shape) -> Result<Cost, String> {
    let before = memory::reset_peak();
    let mut bed = Bed::new(shape);
    let all = shape.ranks();
    for node in 0..shape.nodes {
        bed.join(node);
    }
    bed.submit();
    bed.until("the first generation", |bed| bed.is_whole(all))?;
    let lost: Vec<u32> = (0..shape.nodes).step_by(100).collect();
    for node in &lost {
        bed.lose(*node);
    }
    let rest = all - lost.len() as u32 * shape.slots;
    bed.until("a generation without them", |bed| bed.is_whole(rest))?;
    for node in &lost {
        bed.join(*node);
    }
    bed.until("a generation with all of them", |bed| bed.is_whole(all))?;
    bed.inbox.push(Input::Frame(JOB, SubmitFrame::Done));
    bed.until("the end", |bed| bed.has_ended)?;
    bed.cost.memory = memory::peak().saturating_sub(before);
    bed.cost.took = bed.now;
    Ok(bed.cost)
}

/// A node and the workers that it has started.
#[derive(Debug, Default)]
struct Node {
    /// `None` if it is lost.
    session: Option<Session>,
    workers: BTreeMap<Slot, Incarnation>,
}

struct Bed {
    head: HeadCore,
    base: Instant,
    now: Duration,
    /// What the head hears in the next round.
    inbox: Vec<Input>,
    nodes: Vec<Node>,
    sessions: BTreeMap<Session, u32>,
    asks: u64,
    /// The size of the generation that the driver was told of last.
    told: u32,
    has_ended: bool,
    /// The last table and its length.
    table: Option<(Arc<GenerationTable>, u64)>,
    buffer: BytesMut,
    cost: Cost,
}

impl Bed {
    fn new(shape: Shape) -> Self {
        let base = Instant::now();
        let settings = Settings {
            cluster: CLUSTER,
            lease: HEARTBEAT * 4,
            heartbeat: HEARTBEAT,
            job: JobConfig::default(),
        };
        Self {
            head: HeadCore::new(base, settings),
            base,
            now: Duration::ZERO,
            inbox: Vec::new(),
            nodes: (0..shape.nodes).map(|_| Node::default()).collect(),
            sessions: BTreeMap::new(),
            asks: 0,
            told: 0,
            has_ended: false,
            table: None,
            buffer: BytesMut::new(),
            cost: Cost {
                shape,
                ..Cost::default()
            },
        }
    }

    fn connect(&mut self, session: Session, role: Role, name: String) {
        let peer = Identity {
            cluster: CLUSTER,
            role,
            name,
        };
        self.inbox.push(Input::Connected {
            session,
            peer,
            remote: IpAddr::V4(Ipv4Addr::LOCALHOST),
            local: None,
        });
    }

    fn join(&mut self, node: u32) {
        let session = Session(DRIVER.0 + 1 + self.sessions.len() as u64);
        self.sessions.insert(session, node);
        let id = NodeId(u64::from(node) + 1);
        self.connect(session, Role::Node, id.to_string());
        self.nodes[node as usize].session = Some(session);
        let registration = NodeRegistration {
            node: id,
            hostname: format!("host-{}", id.0),
            address: SocketAddr::from(((0x0a00_0000 + node).to_be_bytes(), 1)),
            resources: Resources {
                cpus: Milli::units(u64::from(self.cost.shape.slots)),
                ..Resources::default()
            },
            version: "1".to_owned(),
            jobs: Vec::new(),
            network: None,
            instance: session.0,
            seal: None,
            draining: false,
        };
        self.ask(session, HeadRequest::Register(registration));
    }

    fn lose(&mut self, node: u32) {
        let lost = std::mem::take(&mut self.nodes[node as usize]);
        self.inbox
            .extend(lost.session.map(|session| Input::Disconnected {
                session,
                reason: "the network is gone".to_owned(),
                fence: Fence::Lease,
            }));
    }

    fn submit(&mut self) {
        self.connect(DRIVER, Role::Driver, DriverId(1).to_string());
        let workers = self.cost.shape.ranks();
        let mut spec = spec(JOB, Placement::Pack { workers });
        spec.elastic = Some(Box::new(Elastic {
            min: workers / 2,
            max: workers,
            spares: 0,
            max_resets: None,
            restarts_within: None,
            restarts_without_progress: workers,
            cooldown: None,
            join_window_ms: 1000,
            ack_timeout_ms: 10_000,
            filters: Vec::new(),
            health_check: None,
            on_change: OnChange::default(),
            hosts: None,
        }));
        self.count(&spec);
        self.inbox.push(Input::Submit {
            session: DRIVER,
            job: JOB,
            spec: Box::new(spec),
            dry_run: false,
        });
    }

    fn ask(&mut self, session: Session, request: HeadRequest) {
        self.count(&request);
        self.asks += 1;
        self.inbox.push(Input::Asked {
            ask: AskId(self.asks),
            question: Question::Request(Caller::Peer(session), Box::new(request)),
        });
    }

    fn length(&mut self, message: &impl serde::Serialize) -> u64 {
        self.buffer.clear();
        match frame::encode_head(&mut self.buffer, message, 0) {
            Ok(()) => self.buffer.len() as u64,
            Err(_) => 0,
        }
    }

    fn count(&mut self, message: &impl serde::Serialize) {
        self.cost.messages += 1;
        self.cost.bytes += self.length(message);
    }

    /// All nodes get the same table.
    fn count_table(&mut self, table: &Arc<GenerationTable>) {
        let length = match &self.table {
            Some((known, length)) if Arc::ptr_eq(known, table) => *length,
            _ => {
                let length = self.length(&NodeRequest::Membership(Arc::clone(table)));
                self.table = Some((Arc::clone(table), length));
                length
            }
        };
        self.cost.messages += 1;
        self.cost.tables += length;
    }

    /// A generation of this size is active.
    fn is_whole(&self, size: u32) -> bool {
        self.told == size
    }

    fn until(&mut self, what: &str, is_there: impl Fn(&Self) -> bool) -> Result<(), String> {
        while !is_there(self) || !self.inbox.is_empty() {
            if self.now > LIMIT {
                let told = self.told;
                return Err(format!(
                    "{what} has not come within {LIMIT:?}: the last one has {told} members"
                ));
            }
            self.round();
        }
        Ok(())
    }

    fn round(&mut self) {
        self.now += ROUND;
        let period = HEARTBEAT.as_millis();
        let now = self.base + self.now;
        let phase = self.now.as_millis() % period;
        let nodes = (0..).zip(&self.nodes);
        let beating = nodes.filter(|(node, _)| node % period == phase);
        let sessions = beating.filter_map(|(_, node)| node.session);
        let beats: Vec<_> = sessions.map(|session| (session, now)).collect();
        for _ in &beats {
            let beat = Beat {
                seq: self.now.as_millis() as u64,
            };
            self.count(&beat);
            self.count(&beat);
        }
        let mut inputs = std::mem::take(&mut self.inbox);
        inputs.push(Input::Heard(beats));
        let begin = clock_gettime(ClockId::ThreadCPUTime);
        let mut outputs = Vec::new();
        if self.head.deadline().is_some_and(|at| at <= now) {
            outputs.extend(self.head.step(now, Input::Tick));
        }
        for input in inputs {
            outputs.extend(self.head.step(now, input));
        }
        let end = clock_gettime(ClockId::ThreadCPUTime);
        let seconds = (end.tv_sec - begin.tv_sec) as f64;
        let spent = seconds + (end.tv_nsec - begin.tv_nsec) as f64 / 1e9;
        self.cost.cpu += Duration::from_secs_f64(spent.max(0.0));
        for output in outputs {
            self.hear(output);
        }
    }

    fn hear(&mut self, output: Output) {
        match output {
            Output::Send(id, request, _) => {
                if let NodeRequest::Membership(table) = request.as_ref() {
                    self.count_table(table);
                } else {
                    self.count(&*request);
                }
                let node = self.sessions.get(&id.session).copied();
                let is_there = |node: &u32| self.nodes[*node as usize].session == Some(id.session);
                if let Some(node) = node.filter(is_there) {
                    self.order(node, id, *request);
                }
            }
            Output::Answer(_, reply) => self.count(&*reply),
            Output::Tell(_, event) => self.tell(*event),
            _ => {}
        }
    }

    fn tell(&mut self, event: JobEvent) {
        self.count(&event);
        match event {
            JobEvent::Placed { .. } => {
                let frame = SubmitFrame::ProgramReady;
                self.count(&frame);
                self.inbox.push(Input::Frame(JOB, frame));
            }
            JobEvent::Generation { table, .. } => {
                self.told = table.world_size();
                let members = table.members.iter();
                let nodes: BTreeSet<u32> = members.map(|it| it.node.0 as u32 - 1).collect();
                let generation = table.generation;
                for node in &nodes {
                    self.report(*node, |slot, incarnation| NodeEvent::Committed {
                        job: JOB,
                        slot,
                        incarnation,
                        generation,
                        commit: generation.0,
                        kept: Kept::Made,
                    });
                }
            }
            JobEvent::Ended { .. } => self.has_ended = true,
            _ => {}
        }
    }

    /// A node says something of each of its workers.
    fn report(&mut self, node: u32, event: impl Fn(Slot, Incarnation) -> NodeEvent) {
        let Node { session, workers } = &self.nodes[node as usize];
        let events: Vec<NodeEvent> = workers
            .iter()
            .map(|(slot, incarnation)| event(*slot, *incarnation))
            .collect();
        if let Some(session) = session.filter(|_| !events.is_empty()) {
            self.ask(session, HeadRequest::Events(events));
        }
    }

    /// A node does what it is asked to do.
    fn order(&mut self, node: u32, id: RequestId, request: NodeRequest) {
        let mut reply = NodeReply::Done;
        match request {
            NodeRequest::Reserve { .. } => {
                reply = NodeReply::Reserved {
                    has_program: false,
                    free_port: 1,
                    problem: None,
                };
            }
            NodeRequest::Start(start) => {
                let members = start.slots.iter().map(|slot| &slot.member);
                let started: BTreeMap<_, _> = members
                    .map(|member| (member.slot, member.incarnation))
                    .collect();
                let pids = started.keys().map(|slot| (*slot, slot.0 + 1)).collect();
                reply = NodeReply::Started { pids };
                let workers = &mut self.nodes[node as usize].workers;
                workers.extend(&started);
                self.report(node, |slot, incarnation| NodeEvent::WorkerReady {
                    job: JOB,
                    slot,
                    incarnation,
                    address: Some(SocketAddr::from(([10, 0, 0, 1], 1000))),
                });
            }
            NodeRequest::Membership(table) => {
                let generation = table.generation;
                self.report(node, |slot, incarnation| NodeEvent::Taken {
                    job: JOB,
                    slot,
                    incarnation,
                    generation,
                });
            }
            NodeRequest::Hold { generation, .. } => {
                self.report(node, |slot, incarnation| NodeEvent::Holding {
                    job: JOB,
                    slot,
                    incarnation,
                    generation,
                    commit: generation.0 + 1,
                    failed: None,
                });
            }
            NodeRequest::Stop { .. } | NodeRequest::Kill { .. } => {
                let id = NodeId(u64::from(node) + 1);
                self.report(node, |slot, incarnation| NodeEvent::WorkerExited {
                    job: JOB,
                    slot,
                    incarnation,
                    generation: Generation(0),
                    failure: RankFailure {
                        rank: Rank(0),
                        node: id,
                        hostname: String::new(),
                        pid: slot.0 + 1,
                        exit: Exit::Signal(15),
                        reason: None,
                        stderr_tail: Vec::new(),
                        account: None,
                    },
                    expected: true,
                });
                self.nodes[node as usize].workers.clear();
            }
            _ => {}
        }
        self.count(&reply);
        self.inbox.push(Input::Replied(id, Reply::Answer(reply)));
    }
}
