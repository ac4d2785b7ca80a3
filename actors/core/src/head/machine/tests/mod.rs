//! A head whose nodes are closures, on a virtual clock.

mod drain;
mod elastic;
mod hosts;
mod jobs;
mod network;
mod nodes;
mod obituary;
mod pushes;
mod restart;
mod room;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use kolo_wire::identity::{Identity, Role};
use kolo_wire::ids::{ClusterId, DriverId};
use kolo_wire::{
    HeadRequest, JobEvent, JobSpec, JobState, Milli, NodeNetwork, NodeReply, Placement, Resources,
    Seal, SubmitFrame,
};

use super::*;
use crate::head::job::JobConfig;
use crate::head::job::fixtures::{exited, ready, spec};
use crate::head::messages::{Caller, Question};
use crate::interfaces::tests::host;

const CLUSTER: ClusterId = ClusterId(1);
const LEASE: Duration = Duration::from_secs(60);
const HTTP: Caller = Caller::Http;

type Script = Box<dyn FnMut(&NodeRequest) -> Option<Reply>>;

/// A node, or a driver, which has nothing to reply.
struct Fake {
    script: Script,
    seen: Vec<NodeRequest>,
    closed: Option<LinkEnd>,
}

struct World {
    head: HeadCore,
    start: Instant,
    now: Instant,
    peers: BTreeMap<Session, Fake>,
    /// Requests without a reply.
    open: BTreeSet<RequestId>,
    cancelled: Vec<RequestId>,
    told: BTreeMap<JobId, Vec<JobEvent>>,
    answers: BTreeMap<AskId, HeadReply>,
    alive: usize,
    asked: u64,
    /// All outputs in words.
    trace: Vec<String>,
}

#[allow(clippy::unnecessary_wraps)] // it is a script
fn good(request: &NodeRequest) -> Option<Reply> {
    Some(Reply::Answer(match request {
        NodeRequest::Reserve { .. } => NodeReply::Reserved {
            has_program: true,
            free_port: 1,
            problem: None,
        },
        NodeRequest::Start(_) => NodeReply::Started { pids: Vec::new() },
        _ => NodeReply::Done,
    }))
}

/// A node that has no room, whatever it says of itself.
fn full(request: &NodeRequest) -> Option<Reply> {
    match request {
        NodeRequest::Reserve { .. } => {
            let refusal = Refusal::new(RefusalKind::Unplaceable, "it is full");
            Some(Reply::Refused(refusal))
        }
        other => good(other),
    }
}

/// Of the obituary of a node's daemon.
fn seal(node: u64) -> Seal {
    Seal([node as u8; 32])
}

fn introduction(node: u64, cpus: u64) -> NodeRegistration {
    NodeRegistration {
        node: NodeId(node),
        hostname: format!("host{node}"),
        address: format!("10.0.0.{node}:1").parse().unwrap(),
        resources: Resources {
            cpus: Milli::units(cpus),
            ..Resources::default()
        },
        version: String::new(),
        jobs: Vec::new(),
        network: None,
        instance: 0,
        seal: Some(seal(node)),
        draining: false,
    }
}

impl World {
    fn new() -> Self {
        let start = Instant::now();
        let settings = Settings {
            cluster: CLUSTER,
            lease: LEASE,
            heartbeat: Duration::from_secs(1),
            job: JobConfig::default(),
        };
        let mut world = Self {
            head: HeadCore::new(start, settings),
            start,
            now: start,
            peers: BTreeMap::new(),
            open: BTreeSet::new(),
            cancelled: Vec::new(),
            told: BTreeMap::new(),
            answers: BTreeMap::new(),
            alive: 0,
            asked: 0,
            trace: Vec::new(),
        };
        world.connect(Role::Driver, DriverId(1), |_| None);
        world
    }

    fn input(&mut self, input: Input) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            for output in self.head.step(self.now, input) {
                self.trace.push(format!("{output:?}"));
                match output {
                    Output::Send(request, message, _) => {
                        let peer = self.peers.get_mut(&request.session).unwrap();
                        let reply = (peer.script)(&message);
                        peer.seen.push(*message);
                        self.open.insert(request);
                        if let Some(reply) = reply {
                            inputs.push_back(Input::Replied(request, reply));
                        }
                    }
                    Output::Cancel(request) => {
                        assert!(self.open.remove(&request), "{request:?}");
                        self.cancelled.push(request);
                    }
                    Output::CloseLink(session, end, _) => {
                        self.peers.get_mut(&session).unwrap().closed = Some(end);
                    }
                    Output::Tell(job, event) => self.told.entry(job).or_default().push(*event),
                    Output::Answer(ask, reply) => {
                        assert!(self.answers.insert(ask, *reply).is_none(), "{ask:?}");
                    }
                    Output::OpenRendezvous(opening) => {
                        let opened = Err("there is none".to_owned());
                        inputs.push_back(Input::RendezvousOpened(opening.job, opened));
                    }
                    Output::Alive(count) => self.alive = count,
                    Output::CloseRendezvous(_)
                    | Output::OpenDoor(_)
                    | Output::Admit(_)
                    | Output::Notice(..)
                    | Output::CloseDoor(..)
                    | Output::Log(_) => {}
                }
            }
            if let Some(Input::Replied(request, _)) = inputs.front() {
                self.open.remove(request);
            }
        }
    }

    /// Lets time pass, with a tick whenever one is due.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(at) = self.head.deadline().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.input(Input::Tick);
        }
        self.now = end;
    }

    fn connect(
        &mut self,
        role: Role,
        name: impl Display,
        script: impl FnMut(&NodeRequest) -> Option<Reply> + 'static,
    ) -> Session {
        let session = Session(self.peers.len() as u64 + 1);
        let fake = Fake {
            script: Box::new(script),
            seen: Vec::new(),
            closed: None,
        };
        self.peers.insert(session, fake);
        self.input(Input::Connected {
            session,
            peer: Identity::new(CLUSTER, role, name.to_string()).unwrap(),
            remote: IpAddr::from([10, 0, 0, 77]),
            local: None,
        });
        session
    }

    fn disconnect(&mut self, session: Session) {
        let reason = "closed".to_owned();
        self.input(Input::Disconnected {
            session,
            reason,
            fence: Fence::Lease,
        });
    }

    fn ask_later(&mut self, question: Question) -> AskId {
        self.asked += 1;
        let ask = AskId(self.asked);
        self.input(Input::Asked { ask, question });
        ask
    }

    fn request_later(&mut self, caller: Caller, request: HeadRequest) -> AskId {
        self.ask_later(Question::Request(caller, Box::new(request)))
    }

    /// The answer, which comes at once.
    fn request(&mut self, caller: Caller, request: HeadRequest) -> HeadReply {
        let ask = self.request_later(caller, request);
        self.answers.remove(&ask).expect("it is answered at once")
    }

    fn refused(&mut self, caller: Caller, request: HeadRequest) -> Refusal {
        match self.request(caller, request) {
            HeadReply::Refused(refusal) => refusal,
            other => panic!("not refused: {other:?}"),
        }
    }

    fn register(
        &mut self,
        registration: NodeRegistration,
        script: impl FnMut(&NodeRequest) -> Option<Reply> + 'static,
    ) -> Session {
        let session = self.connect(Role::Node, registration.node, script);
        let request = HeadRequest::Register(registration);
        let reply = self.request(Caller::Peer(session), request);
        assert!(matches!(reply, HeadReply::Registered { .. }), "{reply:?}");
        session
    }

    fn node(
        &mut self,
        node: u64,
        cpus: u64,
        script: impl FnMut(&NodeRequest) -> Option<Reply> + 'static,
    ) -> Session {
        self.register(introduction(node, cpus), script)
    }

    fn submit_as(&mut self, job: u64, change: impl FnOnce(&mut JobSpec)) -> JobId {
        let mut spec = spec(Placement::Pack { workers: 1 });
        spec.grace_ms = 0;
        change(&mut spec);
        self.input(Input::Submit {
            session: Session(1),
            job: JobId(job),
            spec: Box::new(spec),
            dry_run: false,
        });
        JobId(job)
    }

    fn submit(&mut self, job: u64, workers: u32) -> JobId {
        self.submit_as(job, |spec| spec.placement = Placement::Pack { workers })
    }

    fn report(&mut self, node: Session, events: Vec<NodeEvent>) {
        let reply = self.request(Caller::Peer(node), HeadRequest::Events(events));
        assert_eq!(reply, HeadReply::Done);
    }

    /// A job of one worker on a node, up.
    fn healthy(&mut self, job: u64, node: Session) -> JobId {
        let job = self.submit(job, 1);
        self.report(node, vec![ready(job, 0)]);
        job
    }

    fn frame(&mut self, job: JobId, frame: SubmitFrame) {
        self.input(Input::Frame(job, frame));
    }

    fn stop_later(&mut self, job: JobId) -> AskId {
        self.request_later(HTTP, HeadRequest::Stop { job })
    }

    fn is_healthy(&self, job: JobId) -> bool {
        self.told[&job]
            .iter()
            .any(|event| matches!(event, JobEvent::Healthy { .. }))
    }

    /// How the job has ended, if it has.
    fn end(&self, job: JobId) -> Option<(JobState, Option<Refusal>)> {
        match self.told.get(&job)?.last()? {
            JobEvent::Ended { state, refusal, .. } => Some((*state, refusal.clone())),
            _ => None,
        }
    }

    fn refusal(&self, job: JobId) -> Refusal {
        self.end(job).unwrap().1.unwrap()
    }

    fn seen(&self, session: Session, is: impl Fn(&NodeRequest) -> bool) -> usize {
        let seen = &self.peers[&session].seen;
        seen.iter().filter(|request| is(request)).count()
    }

    fn stops(&self, session: Session, of: JobId) -> usize {
        self.seen(
            session,
            |request| matches!(request, NodeRequest::Stop { job, .. } if *job == of),
        )
    }

    fn free_cpus(&mut self) -> Vec<u64> {
        let HeadReply::Cluster(cluster) = self.request(HTTP, HeadRequest::Cluster) else {
            panic!("no cluster");
        };
        let nodes = cluster.nodes.iter();
        nodes.map(|node| node.available.cpus.0 / 1000).collect()
    }
}

/// The interfaces of a node on a host of its own, in a network of this number.
fn on_own_host(node: u64, network: u8) -> Option<NodeNetwork> {
    host(node, &[&format!("eth0 10.0.{network}.{node}")]).network
}
