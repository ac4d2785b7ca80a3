//! The actors, with nodes that are closures.

mod fixtures;
mod news;

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::{Actor, Addr};
use kolo_core::head::job::{JobConfig, Reply};
use kolo_core::head::registry::Session;
use kolo_transport::ids::{ClusterId, DriverId, JobId, NodeId, Slot};
use kolo_transport::session::CloseCode;
use kolo_transport::wire::{
    Exit, JobEvent, JobState, Member, Milli, NodeEvent, NodeRegistration, NodeReply, NodeRequest,
    Placement, Refusal, RefusalKind, Resources,
};
use tokio::sync::{mpsc, watch};

use self::fixtures::{exited, ready, spec};
use super::actor::MAX_CLEANING;
use super::link::{LocalFuture, NodeLink, RendezvousHost, SendFuture};
use super::messages::{
    GetCluster, GetJob, GetJobs, Gone, Happened, MaySign, Register, Report, Shutdown, StopJob,
    Submit, Submitted,
};
use super::{HeadActor, HeadSettings};

/// Longer than any of these tests takes, and shorter than anybody's patience.
const PATIENCE: Duration = Duration::from_secs(20);

struct NoRendezvous;

impl RendezvousHost for NoRendezvous {
    fn open(
        &self,
        _: JobId,
        _: Vec<Member>,
        _: Vec<IpAddr>,
        _: Option<IpAddr>,
    ) -> LocalFuture<Result<SocketAddr, String>> {
        Box::pin(async { Err("there is none".to_owned()) })
    }

    fn close(&self, _: JobId) -> LocalFuture<()> {
        Box::pin(async {})
    }
}

type Script = Box<dyn FnMut(&NodeRequest) -> Option<Reply> + Send>;

/// A node that answers by a script; `None` is no answer at all.
struct Fake {
    script: Mutex<Script>,
    seen: mpsc::UnboundedSender<NodeRequest>,
    closed: mpsc::UnboundedSender<CloseCode>,
}

impl NodeLink for Fake {
    fn request(&self, request: NodeRequest, _: Duration) -> SendFuture<Reply> {
        let reply = (self.script.lock().unwrap())(&request);
        self.seen.send(request).ok();
        Box::pin(async move {
            match reply {
                Some(reply) => reply,
                None => std::future::pending().await,
            }
        })
    }

    fn local_ip(&self) -> Option<IpAddr> {
        None
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
    id: NodeId,
    session: Session,
    seen: mpsc::UnboundedReceiver<NodeRequest>,
    closed: mpsc::UnboundedReceiver<CloseCode>,
}

struct World {
    head: Addr<HeadActor>,
    alive: watch::Receiver<usize>,
}

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what)
        .await
        .expect("it happens in time")
}

impl World {
    fn new(lease: Duration) -> Self {
        let (alive, receiver) = watch::channel(0);
        let settings = HeadSettings {
            cluster: ClusterId(1),
            lease,
            job: JobConfig {
                request_timeout: Duration::from_millis(300),
                stop_margin: Duration::from_millis(300),
                probe_limit: Duration::from_secs(2),
            },
            rendezvous: Arc::new(NoRendezvous),
            alive,
        };
        Self {
            head: HeadActor::new(settings).start(),
            alive: receiver,
        }
    }

    async fn try_register(
        &self,
        id: u64,
        cpus: u64,
        jobs: Vec<JobId>,
        script: impl FnMut(&NodeRequest) -> Option<Reply> + Send + 'static,
    ) -> Result<Node, Refusal> {
        let (seen, requests) = mpsc::unbounded_channel();
        let (closed, closes) = mpsc::unbounded_channel();
        let registration = NodeRegistration {
            node: NodeId(id),
            hostname: format!("host{id}"),
            address: "10.0.0.1:1".parse().unwrap(),
            resources: Resources {
                cpus: Milli::units(cpus),
                ..Resources::default()
            },
            version: String::new(),
            jobs,
            network: None,
            instance: 0,
        };
        let link = Arc::new(Fake {
            script: Mutex::new(Box::new(script)),
            seen,
            closed,
        });
        let session = self
            .head
            .send(Register { registration, link })
            .await
            .unwrap()?;
        Ok(Node {
            id: NodeId(id),
            session,
            seen: requests,
            closed: closes,
        })
    }

    async fn register(
        &self,
        id: u64,
        cpus: u64,
        script: impl FnMut(&NodeRequest) -> Option<Reply> + Send + 'static,
    ) -> Node {
        self.try_register(id, cpus, Vec::new(), script)
            .await
            .unwrap()
    }

    async fn submit(
        &self,
        placement: Placement,
    ) -> Result<(Submitted, mpsc::Receiver<JobEvent>), Refusal> {
        let mut spec = spec(placement);
        spec.grace_ms = 0;
        let (events, receiver) = mpsc::channel(Submit::capacity(&spec));
        let submit = Submit {
            spec,
            owner: DriverId(1),
            events,
        };
        Ok((self.head.send(submit).await.unwrap()?, receiver))
    }

    async fn report(&self, node: &Node, event: NodeEvent) -> Result<(), Refusal> {
        let report = Report {
            node: node.id,
            session: node.session,
            events: vec![event],
        };
        self.head.send(report).await.unwrap()
    }

    async fn free_cpus(&self) -> Vec<u64> {
        let cluster = self.head.send(GetCluster).await.unwrap();
        cluster
            .nodes
            .iter()
            .map(|node| node.available.cpus.0 / 1000)
            .collect()
    }
}

impl Node {
    async fn sees(&mut self, is: impl Fn(&NodeRequest) -> bool) -> NodeRequest {
        soon(async {
            loop {
                let request = self.seen.recv().await.expect("the head lives");
                if is(&request) {
                    return request;
                }
            }
        })
        .await
    }

    async fn sees_stop(&mut self, of: JobId) {
        self.sees(|request| matches!(request, NodeRequest::Stop { job, .. } if *job == of))
            .await;
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

async fn end(events: &mut mpsc::Receiver<JobEvent>) -> (JobState, Option<Refusal>) {
    match told(events, |event| matches!(event, JobEvent::Ended { .. })).await {
        JobEvent::Ended { state, refusal, .. } => (state, refusal),
        other => panic!("{other:?}"),
    }
}

fn run(test: impl Future<Output = ()>) {
    actix::System::new().block_on(test);
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn two_jobs_run_at_once_on_disjoint_resources() {
    run(async {
        let world = World::new(LONG);
        let mut first = world.register(1, 2, good).await;
        let second = world.register(2, 2, good).await;
        let pack = |workers| Placement::Pack { workers };
        let (one, mut one_events) = world.submit(pack(2)).await.unwrap();
        let (two, mut two_events) = world.submit(pack(2)).await.unwrap();
        assert_eq!(world.free_cpus().await, [0, 0]);

        // What can't be placed fails at once and says what is missing where.
        let refusal = world.submit(pack(1)).await.unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Unplaceable);
        assert!(
            refusal.message.contains(
                "host1 (node-0000000000000001) has room for 0; cpus: requested 1, available 0"
            ),
            "{refusal}"
        );
        assert!(
            refusal
                .message
                .ends_with("it fits when other jobs have ended")
        );

        for (submitted, events, node) in [
            (&one, &mut one_events, &first),
            (&two, &mut two_events, &second),
        ] {
            // Ready reports may come before the node has answered that it has started them.
            told(events, |event| matches!(event, JobEvent::Placed { .. })).await;
            for slot in 0..2 {
                world
                    .report(node, ready(submitted.job, slot))
                    .await
                    .unwrap();
            }
            let healthy = told(events, |event| matches!(event, JobEvent::Healthy { .. })).await;
            let JobEvent::Healthy { table, .. } = healthy else {
                unreachable!()
            };
            assert!(table.members.iter().all(|member| member.node == node.id));
            // S-2: a node signs for its own slots only.
            for (asker, allowed) in [
                (&first, node.id == first.id),
                (&second, node.id == second.id),
            ] {
                let answer = world
                    .head
                    .send(MaySign {
                        node: asker.id,
                        session: asker.session,
                        job: submitted.job,
                        slot: Slot(0),
                    })
                    .await
                    .unwrap();
                assert_eq!(answer.is_ok(), allowed);
            }
        }
        let jobs = world.head.send(GetJobs).await.unwrap();
        assert_eq!(
            jobs.iter().map(|info| info.job).collect::<Vec<_>>(),
            [two.job, one.job]
        );

        one.coordinator
            .send(Happened(kolo_core::head::job::Event::DriverStop))
            .await
            .unwrap();
        assert_eq!(end(&mut one_events).await.0, JobState::Stopped);
        // Whoever is told of the end can have the resources.
        assert_eq!(world.free_cpus().await, [2, 0]);
        first.sees_stop(one.job).await;

        let stop = |job| StopJob {
            job,
            reason: "an operator asked for it".to_owned(),
        };
        soon(
            world
                .head
                .send(stop(two.job))
                .await
                .unwrap()
                .unwrap()
                .wait(),
        )
        .await;
        let (state, refusal) = end(&mut two_events).await;
        assert_eq!(state, JobState::Stopped);
        assert!(refusal.unwrap().message.contains("operator"));
        // A job that has ended is remembered, and stopped already.
        soon(
            world
                .head
                .send(stop(two.job))
                .await
                .unwrap()
                .unwrap()
                .wait(),
        )
        .await;
        let info = world.head.send(GetJob(two.job)).await.unwrap().unwrap();
        assert_eq!(info.state, JobState::Stopped);
        let refusal = world.head.send(stop(JobId(4))).await.unwrap().unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::NotFound);
        assert!(world.head.send(GetJob(JobId(4))).await.unwrap().is_err());
    });
}

/// Its nodes have said nothing, for all that it has heard.
#[test]
fn a_head_that_stood_still_takes_nobody_for_lost() {
    run(async {
        let lease = Duration::from_millis(400);
        let mut world = World::new(lease);
        let node = world.register(1, 1, good).await;
        for _ in 0..3 {
            // Actors and timers are on this thread.
            std::thread::sleep(lease * 3);
            let heard = super::messages::Heard {
                node: node.id,
                session: node.session,
            };
            assert!(world.head.send(heard).await.unwrap());
        }
        // And then it says nothing while the head listens.
        soon(world.alive.wait_for(|alive| *alive == 0))
            .await
            .unwrap();
    });
}

#[test]
fn f1_a_node_that_falls_silent_is_lost_with_its_ranks() {
    run(async {
        let mut world = World::new(Duration::from_millis(200));
        let silent = world.register(1, 1, good).await;
        let mut other = world.register(2, 1, good).await;
        let beats = tokio::task::spawn_local({
            let (head, node, session) = (world.head.clone(), other.id, other.session);
            async move {
                loop {
                    assert!(
                        head.send(super::messages::Heard { node, session })
                            .await
                            .unwrap()
                    );
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        });
        let (job, mut events) = world.submit(Placement::Pack { workers: 2 }).await.unwrap();
        world.report(&silent, ready(job.job, 0)).await.unwrap();
        world.report(&other, ready(job.job, 1)).await.unwrap();
        let lost = told(&mut events, |event| {
            matches!(event, JobEvent::RankLost { .. })
        })
        .await;
        let JobEvent::RankLost { failure, .. } = lost else {
            unreachable!()
        };
        assert_eq!(failure.node, silent.id);
        assert_eq!(failure.exit, Exit::Unknown);
        assert!(failure.reason.unwrap().contains("no heartbeat for"));
        other
            .sees(|request| matches!(request, NodeRequest::RankLost { .. }))
            .await;
        soon(world.alive.wait_for(|alive| *alive == 1))
            .await
            .unwrap();
        // Its stay is over: what it says does not count.
        let refusal = world
            .report(&silent, exited(job.job, 0, Exit::Code(0)))
            .await
            .unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Forbidden);
        beats.abort();
    });
}

#[test]
fn g2_a_node_that_comes_back_must_stop_what_it_still_has() {
    run(async {
        let world = World::new(LONG);
        let mut before = world.register(1, 1, good).await;
        let (job, mut events) = world.submit(Placement::Pack { workers: 1 }).await.unwrap();
        world.report(&before, ready(job.job, 0)).await.unwrap();
        told(&mut events, |event| {
            matches!(event, JobEvent::Healthy { .. })
        })
        .await;

        // It says that it also has a job of which the head never heard. The first answer to a stop is lost.
        let mut stops = 0;
        let mut after = world
            .try_register(1, 1, vec![JobId(77)], move |request| {
                stops += usize::from(matches!(request, NodeRequest::Stop { .. }));
                if stops == 1 {
                    return Some(Reply::Unknown("lost".to_owned()));
                }
                good(request)
            })
            .await
            .unwrap();
        assert_eq!(soon(before.closed.recv()).await, Some(CloseCode::Duplicate));
        let (state, refusal) = end(&mut events).await;
        assert_eq!(state, JobState::Failed);
        assert!(refusal.unwrap().message.contains("registered again"));
        let mut stopped = Vec::new();
        for _ in 0..3 {
            let stop = after
                .sees(|request| matches!(request, NodeRequest::Stop { .. }))
                .await;
            let NodeRequest::Stop { job, .. } = stop else {
                unreachable!()
            };
            stopped.push(job);
        }
        assert!(stopped.contains(&job.job) && stopped.contains(&JobId(77)));
        assert_eq!(world.free_cpus().await, [1]);
    });
}

#[test]
fn g2_a_node_that_does_not_answer_does_not_hold_up_the_others() {
    run(async {
        let world = World::new(LONG);
        let deaf = world.register(1, 1, |_| None).await;
        let mut other = world.register(2, 1, good).await;
        let (job, mut events) = world.submit(Placement::Pack { workers: 2 }).await.unwrap();
        let (state, refusal) = end(&mut events).await;
        assert_eq!(state, JobState::Failed);
        let refusal = refusal.unwrap();
        assert_eq!(refusal.kind, RefusalKind::Timeout);
        assert!(refusal.message.contains("host1"), "{refusal}");
        other
            .sees(|request| matches!(request, NodeRequest::Release { job: of } if *of == job.job))
            .await;
        // Nobody knows what the deaf one holds, until its connection ends.
        assert_eq!(world.free_cpus().await, [0, 1]);
        let gone = Gone {
            node: deaf.id,
            session: deaf.session,
            reason: "closed".to_owned(),
        };
        world.head.send(gone).await.unwrap();
        let back = world.register(1, 1, good).await;
        let mut back = back;
        back.sees_stop(job.job).await;
    });
}

#[test]
fn a_shutdown_stops_all_jobs_and_takes_no_more() {
    run(async {
        let world = World::new(LONG);
        let mut node = world.register(1, 2, good).await;
        let (job, mut events) = world.submit(Placement::Pack { workers: 1 }).await.unwrap();
        let shutdown = Shutdown {
            reason: "the head is stopping".to_owned(),
        };
        soon(world.head.send(shutdown)).await.unwrap();
        let (state, refusal) = end(&mut events).await;
        assert_eq!(state, JobState::Stopped);
        assert!(refusal.unwrap().message.contains("the head is stopping"));
        let request = node
            .sees(|request| {
                matches!(
                    request,
                    NodeRequest::Stop { .. } | NodeRequest::Release { .. }
                )
            })
            .await;
        assert!(matches!(
            request,
            NodeRequest::Stop { job: of, .. } | NodeRequest::Release { job: of } if of == job.job
        ));
        let refusal = world
            .submit(Placement::Pack { workers: 1 })
            .await
            .unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Stopped);
    });
}

#[test]
fn a_job_with_wrong_values_is_refused_before_anything_is_asked() {
    run(async {
        let world = World::new(LONG);
        let mut node = world.register(1, 2, good).await;
        for placement in [
            Placement::Pack { workers: 0 },
            Placement::Spread {
                hosts: u32::MAX,
                slots: u32::MAX,
            },
        ] {
            let refusal = world.submit(placement).await.unwrap_err();
            assert_eq!(refusal.kind, RefusalKind::Invalid);
        }
        assert!(node.seen.try_recv().is_err());
    });
}
