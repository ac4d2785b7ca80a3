//! Nodes and drivers that do what a test says.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kolo_transport::frame::Limits;
use kolo_transport::identity::Role;
use kolo_transport::ids::{DriverId, Incarnation, JobId, NodeId, Slot};
use kolo_transport::wire::head::Beat;
use kolo_transport::wire::{
    HeadReply, HeadRequest, JobEvent, JobSpec, JobState, Milli, NodeEvent, NodeRegistration,
    NodeReply, NodeRequest, Placement, Program, ProgramHash, Refusal, Resources, SubmitFrame,
};
use kolo_transport::{
    CloseCode, Connection, Credentials, Endpoint, EndpointConfig, Expect, FrameReceiver,
    FrameSender, RandomId as _, Stream,
};
use tokio::sync::mpsc;

use crate::head::{Head, HeadConfig};

/// Longer than any wait here takes, and shorter than anybody's patience.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what)
        .await
        .expect("it happens in time")
}

/// A head whose leases a busy machine does not break.
pub(super) fn config() -> HeadConfig {
    HeadConfig {
        lease: Duration::from_secs(20),
        threads: 1,
        ..HeadConfig::default()
    }
}

pub(super) fn pack(workers: u32) -> JobSpec {
    JobSpec {
        name: "test".to_owned(),
        program: Program {
            hash: ProgramHash([1; 32]),
            size: 1,
            name: "test".to_owned(),
        },
        args: Vec::new(),
        placement: Placement::Pack { workers },
        per_worker: Resources {
            cpus: Milli::units(1),
            ..Resources::default()
        },
        env: BTreeMap::new(),
        start_timeout_ms: 60_000,
        grace_ms: 0,
        rendezvous: false,
        installed: None,
        layout: Vec::new(),
        interfaces: kolo_transport::wire::InterfaceSelection::default(),
        no_cache: false,
        elastic: None,
    }
}

/// An authenticated connection to a head.
pub(super) struct Member {
    pub(super) endpoint: Endpoint,
    pub(super) connection: Connection,
}

impl Member {
    pub(super) async fn new(head: &Head, role: Role, name: &str) -> Self {
        let credentials = head.authority().issue(role, name).unwrap();
        Self::with(head, credentials).await
    }

    pub(super) async fn with(head: &Head, credentials: Credentials) -> Self {
        let config = EndpointConfig {
            idle_timeout: Duration::from_secs(20),
            ..EndpointConfig::towards(head.address())
        };
        let endpoint = Endpoint::bind(head.runtime(), credentials, config).unwrap();
        let connection = endpoint
            .connect(head.address(), Expect::head())
            .await
            .unwrap();
        Self {
            endpoint,
            connection,
        }
    }

    pub(super) async fn ask(&self, request: &HeadRequest) -> HeadReply {
        self.connection.request(request, PATIENCE).await.unwrap()
    }

    pub(super) async fn refused(&self, request: &HeadRequest) -> Refusal {
        match self.ask(request).await {
            HeadReply::Refused(refusal) => refusal,
            other => panic!("not refused: {other:?}"),
        }
    }

    /// Ends the connection as a process that is gone does, but at once.
    pub(super) fn vanish(&self) {
        self.endpoint.close(CloseCode::Done, "");
    }
}

type Script = Box<dyn FnMut(&NodeRequest) -> Option<NodeReply> + Send>;

pub(super) struct FakeNode {
    pub(super) id: NodeId,
    pub(super) member: Arc<Member>,
    seen: mpsc::UnboundedReceiver<NodeRequest>,
}

pub(super) fn introduction(id: NodeId, cpus: u64) -> NodeRegistration {
    NodeRegistration {
        node: id,
        hostname: "host".to_owned(),
        address: "127.0.0.1:9".parse().unwrap(),
        resources: Resources {
            cpus: Milli::units(cpus),
            ..Resources::default()
        },
        version: "test".to_owned(),
        jobs: Vec::new(),
        network: None,
        instance: 0,
        seal: None,
        draining: false,
    }
}

/// What a node answers that is well.
#[allow(clippy::unnecessary_wraps)] // it is a script
pub(super) fn good(request: &NodeRequest) -> Option<NodeReply> {
    Some(match request {
        NodeRequest::Reserve { .. } => NodeReply::Reserved {
            has_program: true,
            free_port: 29_500,
            problem: None,
        },
        NodeRequest::Start(_) => NodeReply::Started { pids: Vec::new() },
        _ => NodeReply::Done,
    })
}

impl FakeNode {
    pub(super) async fn good(head: &Head, cpus: u64) -> Self {
        Self::new(head, cpus, good).await
    }

    /// A node that answers by `script`; `None` is no answer at all.
    pub(super) async fn new(
        head: &Head,
        cpus: u64,
        script: impl FnMut(&NodeRequest) -> Option<NodeReply> + Send + 'static,
    ) -> Self {
        let id = NodeId::random();
        let member = Arc::new(Member::new(head, Role::Node, &id.to_string()).await);
        let register = HeadRequest::Register(introduction(id, cpus));
        let heartbeat = match member.ask(&register).await {
            HeadReply::Registered { heartbeat_ms, .. } => Duration::from_millis(heartbeat_ms),
            other => panic!("{other:?}"),
        };
        tokio::spawn(beat(member.connection.clone(), heartbeat));
        let (sender, seen) = mpsc::unbounded_channel();
        tokio::spawn(answer(
            member.connection.clone(),
            Arc::new(Mutex::new(Box::new(script))),
            sender,
        ));
        Self { id, member, seen }
    }

    /// The next request that `is` what is waited for.
    pub(super) async fn sees(&mut self, is: impl Fn(&NodeRequest) -> bool) -> NodeRequest {
        soon(async {
            loop {
                let request = self.seen.recv().await.expect("the connection is there");
                if is(&request) {
                    return request;
                }
            }
        })
        .await
    }

    pub(super) async fn ready(&self, job: JobId, slot: u32) {
        let ready = NodeEvent::WorkerReady {
            job,
            slot: Slot(slot),
            address: Some("127.0.0.1:9".parse().unwrap()),
            incarnation: Incarnation::FIRST,
        };
        let told = self.member.ask(&HeadRequest::Events(vec![ready])).await;
        assert_eq!(told, HeadReply::Done);
    }
}

async fn beat(connection: Connection, every: Duration) {
    let Ok(mut stream) = connection.open(Limits::CONTROL).await else {
        return;
    };
    let opened = stream.send.send(&HeadRequest::Heartbeats, &[]).await;
    let mut seq = 0;
    while opened.is_ok() {
        seq += 1;
        if stream.send.send(&Beat { seq }, &[]).await.is_err() {
            return;
        }
        match stream.recv.expect::<Beat>().await {
            Ok(frame) => assert_eq!(frame.head.seq, seq),
            Err(_) => return,
        }
        tokio::time::sleep(every).await;
    }
}

async fn answer(
    connection: Connection,
    script: Arc<Mutex<Script>>,
    seen: mpsc::UnboundedSender<NodeRequest>,
) {
    while let Ok(mut stream) = connection.accept(Limits::CONTROL).await {
        let (script, seen) = (Arc::clone(&script), seen.clone());
        tokio::spawn(async move {
            let Ok(frame) = stream.recv.expect::<NodeRequest>().await else {
                return;
            };
            let reply = (script.lock().unwrap())(&frame.head);
            seen.send(frame.head).ok();
            match reply {
                Some(reply) => {
                    stream.send.send(&reply, &[]).await.ok();
                }
                None => {
                    stream.send.stopped().await;
                }
            }
        });
    }
}

pub(super) struct Driver {
    pub(super) member: Member,
}

impl Driver {
    pub(super) async fn new(head: &Head) -> Self {
        let name = DriverId::random().to_string();
        Self {
            member: Member::new(head, Role::Driver, &name).await,
        }
    }

    pub(super) async fn submit(&self, spec: JobSpec) -> Submission {
        submit(&self.member, spec).await
    }
}

pub(super) async fn submit(member: &Member, spec: JobSpec) -> Submission {
    let Stream { mut send, recv } = member.connection.open(Limits::CONTROL).await.unwrap();
    send.send(&HeadRequest::Submit(spec), &[]).await.unwrap();
    Submission { send, recv }
}

/// A job, as its driver sees it.
pub(super) struct Submission {
    send: FrameSender,
    recv: FrameReceiver,
}

impl Submission {
    pub(super) async fn next(&mut self) -> JobEvent {
        soon(self.recv.expect::<JobEvent>()).await.unwrap().head
    }

    pub(super) async fn until(&mut self, is: impl Fn(&JobEvent) -> bool) -> JobEvent {
        loop {
            let event = self.next().await;
            if is(&event) {
                return event;
            }
        }
    }

    pub(super) async fn placed(&mut self) -> (JobId, Vec<NodeId>) {
        match self.next().await {
            JobEvent::Placed { job, nodes } => (job, nodes.iter().map(|node| node.node).collect()),
            other => panic!("{other:?}"),
        }
    }

    pub(super) async fn ended(&mut self) -> (JobState, Option<Refusal>) {
        let event = self
            .until(|event| matches!(event, JobEvent::Ended { .. }))
            .await;
        // Nothing follows, and the stream ends.
        assert!(soon(self.recv.next::<JobEvent>()).await.unwrap().is_none());
        match event {
            JobEvent::Ended { state, refusal, .. } => (state, refusal),
            _ => unreachable!(),
        }
    }

    pub(super) async fn say(&mut self, frame: SubmitFrame) {
        self.send.send(&frame, &[]).await.unwrap();
    }
}
