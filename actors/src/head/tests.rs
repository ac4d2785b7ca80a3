//! The actor, with nodes that are closures. Its decisions are tested in `kolo-core`.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use actix::{Actor, Addr};
use kolo_core::head::job::{JobConfig, Reply};
use kolo_core::head::messages::{Caller, Input, Opening, Question, Settings};
use kolo_core::head::registry::Session;
use kolo_core::membership::Process;
use kolo_core::rendezvous::DoorOpening;
use kolo_transport::CloseCode;
use kolo_transport::identity::{Identity, Role};
use kolo_transport::ids::{ClusterId, DriverId, Incarnation, JobId, NodeId, Slot};
use kolo_transport::wire::{
    GenerationTable, HeadReply, HeadRequest, JobEvent, JobSpec, JobState, Milli, NodeEvent,
    NodeRegistration, NodeReply, NodeRequest, Placement, Program, ProgramHash, RefusalKind,
    Resources, SubmitFrame,
};
use tokio::sync::{mpsc, watch};

use super::ask;
use super::link::{LocalFuture, NodeLink, RendezvousHost, SendFuture, TellNews};
use super::messages::{Happened, Way};
use super::{Beats, Coordinator};

/// Longer than any of these tests takes, and shorter than anybody's patience.
const PATIENCE: Duration = Duration::from_secs(20);
const CLUSTER: ClusterId = ClusterId(1);
const DRIVER: Session = Session(100);

/// Tells which jobs it was to close.
struct Rendezvous(mpsc::UnboundedSender<JobId>);

impl RendezvousHost for Rendezvous {
    fn open(&self, _: Opening) -> LocalFuture<Result<SocketAddr, String>> {
        Box::pin(async { Ok(([127, 0, 0, 1], 9).into()) })
    }

    fn close(&self, job: JobId) -> LocalFuture<()> {
        self.0.send(job).ok();
        Box::pin(async {})
    }

    fn open_door(&self, _: DoorOpening, _: TellNews) {}

    fn admit(&self, _: Arc<GenerationTable>) {}

    fn notice(&self, _: JobId, _: Process, _: u64) {}

    fn close_door(&self, _: JobId, _: Process) {}
}

type Script = Box<dyn FnMut(&NodeRequest) -> Option<Reply> + Send>;

/// A node that answers by a script; `None` is no answer at all.
struct Fake {
    script: Mutex<Script>,
    seen: mpsc::UnboundedSender<NodeRequest>,
    closed: mpsc::UnboundedSender<CloseCode>,
    /// Told of each request that is given up.
    dropped: mpsc::UnboundedSender<()>,
}

struct OnDrop(mpsc::UnboundedSender<()>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.send(()).ok();
    }
}

impl NodeLink for Fake {
    fn request(&self, request: NodeRequest, _: Duration) -> SendFuture<Reply> {
        let reply = (self.script.lock().unwrap())(&request);
        self.seen.send(request).ok();
        let dropped = OnDrop(self.dropped.clone());
        Box::pin(async move {
            match reply {
                Some(reply) => {
                    std::mem::forget(dropped);
                    reply
                }
                None => std::future::pending().await,
            }
        })
    }

    fn close(&self, code: CloseCode, _: &str) {
        self.closed.send(code).ok();
    }
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

struct Node {
    session: Session,
    seen: mpsc::UnboundedReceiver<NodeRequest>,
    closed: mpsc::UnboundedReceiver<CloseCode>,
    dropped: mpsc::UnboundedReceiver<()>,
}

struct World {
    head: Addr<Coordinator>,
    beats: Beats,
    alive: watch::Receiver<usize>,
    closed: mpsc::UnboundedReceiver<JobId>,
}

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what)
        .await
        .expect("it happens in time")
}

fn spec() -> JobSpec {
    JobSpec {
        elastic: None,
        name: "test".to_owned(),
        program: Program {
            hash: ProgramHash([7; 32]),
            size: 1,
            name: "program".to_owned(),
        },
        args: Vec::new(),
        placement: Placement::Pack { workers: 1 },
        per_worker: Resources {
            cpus: Milli::units(1),
            ..Resources::default()
        },
        env: std::collections::BTreeMap::new(),
        start_timeout_ms: 30_000,
        grace_ms: 0,
        rendezvous: true,
        installed: None,
        layout: Vec::new(),
        interfaces: kolo_transport::wire::InterfaceSelection::default(),
        no_cache: false,
    }
}

impl World {
    async fn new(lease: Duration) -> Self {
        let (alive, receiver) = watch::channel(0);
        let (close, closed) = mpsc::unbounded_channel();
        let settings = Settings {
            cluster: CLUSTER,
            lease,
            heartbeat: Duration::ZERO,
            job: JobConfig::default(),
        };
        let head = Coordinator::new(settings, Arc::new(Rendezvous(close)), alive);
        let world = Self {
            beats: head.beats(),
            head: head.start(),
            alive: receiver,
            closed,
        };
        let driver = DriverId(1).to_string();
        world.connect(DRIVER, Role::Driver, driver, |_| None).await;
        world
    }

    async fn happened(&self, input: Input, way: Option<Way>) {
        self.head.send(Happened { input, way }).await.unwrap();
    }

    async fn ask(&self, caller: Caller, request: HeadRequest) -> HeadReply {
        let question = Question::Request(caller, Box::new(request));
        soon(ask(&self.head, question)).await
    }

    async fn connect(
        &self,
        session: Session,
        role: Role,
        name: String,
        script: impl FnMut(&NodeRequest) -> Option<Reply> + Send + 'static,
    ) -> Node {
        let (seen, requests) = mpsc::unbounded_channel();
        let (closed, closes) = mpsc::unbounded_channel();
        let (dropped, drops) = mpsc::unbounded_channel();
        let link = Arc::new(Fake {
            script: Mutex::new(Box::new(script)),
            seen,
            closed,
            dropped,
        });
        let connected = Input::Connected {
            session,
            peer: Identity::new(CLUSTER, role, name).unwrap(),
            remote: IpAddr::from([10, 0, 0, 1]),
            local: None,
        };
        self.happened(connected, Some(Way::Link(session, link)))
            .await;
        Node {
            session,
            seen: requests,
            closed: closes,
            dropped: drops,
        }
    }

    async fn node(
        &self,
        script: impl FnMut(&NodeRequest) -> Option<Reply> + Send + 'static,
    ) -> Node {
        let registration = NodeRegistration {
            node: NodeId(1),
            hostname: "host".to_owned(),
            address: "10.0.0.1:1".parse().unwrap(),
            resources: Resources {
                cpus: Milli::units(1),
                ..Resources::default()
            },
            version: String::new(),
            jobs: Vec::new(),
            network: None,
            instance: 0,
            seal: None,
            draining: false,
        };
        let name = registration.node.to_string();
        let node = self.connect(Session(1), Role::Node, name, script).await;
        let request = HeadRequest::Register(registration);
        let reply = self.ask(Caller::Peer(node.session), request).await;
        assert!(matches!(reply, HeadReply::Registered { .. }), "{reply:?}");
        node
    }

    async fn submit(&self, job: JobId) -> mpsc::Receiver<JobEvent> {
        self.submit_with(job, 64).await
    }

    async fn submit_with(&self, job: JobId, room: usize) -> mpsc::Receiver<JobEvent> {
        let (events, receiver) = mpsc::channel(room);
        let submit = Input::Submit {
            session: DRIVER,
            job,
            spec: Box::new(spec()),
            dry_run: false,
        };
        self.happened(submit, Some(Way::Driver(job, events))).await;
        receiver
    }
}

async fn told(events: &mut mpsc::Receiver<JobEvent>, is: impl Fn(&JobEvent) -> bool) -> JobEvent {
    soon(async {
        loop {
            let event = events.recv().await.expect("the job has not ended");
            if is(&event) {
                return event;
            }
        }
    })
    .await
}

fn run(test: impl Future<Output = ()>) {
    actix::System::new().block_on(test);
}

const LONG: Duration = Duration::from_secs(60);
const JOB: JobId = JobId(7);

#[test]
fn a_job_runs_from_its_submission_to_its_stop() {
    run(async {
        let mut world = World::new(LONG).await;
        let mut node = world.node(good).await;
        let mut events = world.submit(JOB).await;
        let start = soon(async {
            loop {
                if let NodeRequest::Start(start) = node.seen.recv().await.unwrap() {
                    return start;
                }
            }
        });
        assert_eq!(start.await.job, JOB);
        let ready = NodeEvent::WorkerReady {
            incarnation: Incarnation::FIRST,
            job: JOB,
            slot: Slot(0),
            address: None,
        };
        let report = HeadRequest::Events(vec![ready]);
        let reply = world.ask(Caller::Peer(node.session), report).await;
        assert_eq!(reply, HeadReply::Done);
        told(&mut events, |event| {
            matches!(event, JobEvent::Healthy { .. })
        })
        .await;
        let stop = HeadRequest::Stop { job: JOB };
        let reply = world.ask(Caller::Peer(DRIVER), stop).await;
        assert_eq!(reply, HeadReply::Done);
        // It was told before, and nothing follows.
        let ended = events.try_recv().unwrap();
        assert!(matches!(ended, JobEvent::Ended { state, .. } if state == JobState::Stopped));
        assert!(soon(events.recv()).await.is_none());
        assert_eq!(soon(world.closed.recv()).await, Some(JOB));
    });
}

#[test]
fn a_driver_is_told_why_its_job_is_refused() {
    run(async {
        let world = World::new(LONG).await;
        let mut events = world.submit(JOB).await;
        let ended = told(&mut events, |_| true).await;
        let JobEvent::Ended { refusal, .. } = ended else {
            panic!("{ended:?}");
        };
        assert_eq!(refusal.unwrap().kind, RefusalKind::Unplaceable);
        assert!(soon(events.recv()).await.is_none());
    });
}

#[test]
fn a_driver_that_does_not_read_counts_as_gone() {
    run(async {
        let mut world = World::new(LONG).await;
        let mut node = world.node(good).await;
        let mut events = world.submit_with(JOB, 1).await;
        let ready = NodeEvent::WorkerReady {
            incarnation: Incarnation::FIRST,
            job: JOB,
            slot: Slot(0),
            address: None,
        };
        // Where it is placed is in the queue, and that it is healthy has no room.
        let report = HeadRequest::Events(vec![ready]);
        world.ask(Caller::Peer(node.session), report).await;
        soon(async {
            while !matches!(node.seen.recv().await.unwrap(), NodeRequest::Stop { .. }) {}
        })
        .await;
        assert_eq!(soon(world.closed.recv()).await, Some(JOB));
        let placed = soon(events.recv()).await;
        assert!(matches!(placed, Some(JobEvent::Placed { .. })));
        assert!(soon(events.recv()).await.is_none());
    });
}

#[test]
fn a_request_that_is_cancelled_is_dropped() {
    run(async {
        let world = World::new(LONG).await;
        let mut node = world
            .node(|request| {
                good(request).filter(|_| !matches!(request, NodeRequest::Membership(_)))
            })
            .await;
        let mut events = world.submit(JOB).await;
        let ready = NodeEvent::WorkerReady {
            incarnation: Incarnation::FIRST,
            job: JOB,
            slot: Slot(0),
            address: None,
        };
        let report = HeadRequest::Events(vec![ready]);
        world.ask(Caller::Peer(node.session), report).await;
        soon(async {
            while !matches!(node.seen.recv().await.unwrap(), NodeRequest::Membership(_)) {}
        })
        .await;
        world
            .happened(Input::Frame(JOB, SubmitFrame::Stop), None)
            .await;
        assert_eq!(soon(node.dropped.recv()).await, Some(()));
        told(&mut events, |event| matches!(event, JobEvent::Ended { .. })).await;
    });
}

#[test]
fn nodes_are_heard_while_the_head_has_no_turn_for_them() {
    run(async {
        let lease = Duration::from_millis(200);
        let mut world = World::new(lease).await;
        let mut node = world.node(good).await;
        let (beats, session) = (world.beats.clone(), node.session);
        let start = Instant::now();
        let beating = std::thread::spawn(move || {
            while start.elapsed() < lease * 5 {
                beats.heard(session);
                std::thread::sleep(lease / 20);
            }
        });
        while start.elapsed() < lease * 4 {
            assert_eq!(*world.alive.borrow_and_update(), 1);
            tokio::time::sleep(lease / 20).await;
        }
        soon(world.alive.wait_for(|alive| *alive == 0))
            .await
            .unwrap();
        assert_eq!(
            soon(node.closed.recv()).await,
            Some(CloseCode::LeaseExpired)
        );
        beating.join().unwrap();
    });
}

/// Its nodes have said nothing, for all that it has heard.
#[test]
fn a_head_that_stood_still_takes_nobody_for_lost() {
    run(async {
        let lease = Duration::from_millis(400);
        let mut world = World::new(lease).await;
        let mut node = world.node(good).await;
        for _ in 0..3 {
            // Actors and timers are on this thread.
            std::thread::sleep(lease * 3);
            let caller = Caller::Peer(node.session);
            let reply = world.ask(caller, HeadRequest::Heartbeats).await;
            assert_eq!(reply, HeadReply::Done);
        }
        // And then it says nothing while the head listens.
        soon(world.alive.wait_for(|alive| *alive == 0))
            .await
            .unwrap();
        let code = soon(node.closed.recv()).await;
        assert_eq!(code, Some(CloseCode::LeaseExpired));
    });
}
