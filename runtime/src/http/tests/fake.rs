//! A head of which the test decides what it says.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kolo_transport::identity::Identity;
use kolo_transport::ids::{
    ClusterId, CrossRank, DriverId, Generation, Incarnation, JobId, LocalRank, NodeId, Rank, Slot,
};
use kolo_transport::wire::{
    ClusterInfo, Exit, JobInfo, JobState, Member, MetricSum, Milli, NodeDrain, NodeInfo,
    PlacedNode, Refusal, RefusalKind, Resources, WorkerInfo, WorkerState,
};

use tokio::sync::oneshot;

use crate::http::{BoxFuture, HeadApi};

pub(super) const CLUSTER: ClusterId = ClusterId(1);
pub(super) const OWNER: DriverId = DriverId(10);
pub(super) const ADMIN: DriverId = DriverId(12);
pub(super) const JOB: JobId = JobId(20);
pub(super) const OTHER_JOB: JobId = JobId(21);

#[derive(Debug)]
pub(super) struct Known {
    pub(super) ready: bool,
    pub(super) jobs: Vec<JobInfo>,
    /// What every question is answered with, if set.
    pub(super) refusal: Option<Refusal>,
    pub(super) stopped: Vec<JobId>,
    /// What the next stop of a job waits for, if set.
    pub(super) held: Option<oneshot::Receiver<()>>,
    /// Nodes that were drained, by what deadline, or undrained.
    pub(super) drained: Vec<(String, Option<Duration>)>,
}

#[derive(Debug)]
pub(super) struct FakeHead {
    known: Mutex<Known>,
}

pub(super) fn worker(rank: u32, state: WorkerState, exit: Option<Exit>) -> WorkerInfo {
    let node = NodeId(u64::from(rank) / 2 + 30);
    WorkerInfo {
        member: Member {
            rank: Rank(rank),
            local_rank: LocalRank(rank % 2),
            local_size: 2,
            cross_rank: CrossRank(rank / 2),
            cross_size: 2,
            slot: Slot(rank),
            node,
            hostname: "box".to_owned(),
            address: Some(([127, 0, 0, 1], 5000 + rank as u16).into()),
            incarnation: Incarnation::FIRST,
        },
        state,
        pid: 1000 + rank,
        exit,
    }
}

/// Four ranks on two nodes of one hostname.
pub(super) fn job(id: JobId, state: JobState) -> JobInfo {
    JobInfo {
        state,
        generation: Generation(1),
        workers: (0..4)
            .map(|rank| worker(rank, WorkerState::Ready, None))
            .collect(),
        nodes: vec![PlacedNode {
            node: NodeId(30),
            hostname: "box".to_owned(),
            address: ([127, 0, 0, 1], 4000).into(),
            ranks: vec![Rank(0), Rank(1)],
            has_program: true,
        }],
        age_ms: 1234,
        ..JobInfo::new(id, "digits", OWNER)
    }
}

impl FakeHead {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            known: Mutex::new(Known {
                ready: true,
                jobs: vec![
                    job(OTHER_JOB, JobState::Healthy),
                    job(JOB, JobState::Healthy),
                ],
                refusal: None,
                stopped: Vec::new(),
                held: None,
                drained: Vec::new(),
            }),
        })
    }

    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Known) -> T) -> T {
        change(&mut self.known.lock().unwrap())
    }

    pub(super) fn change_job(&self, id: JobId, change: impl FnOnce(&mut JobInfo)) {
        self.change(|known| {
            let job = known.jobs.iter_mut().find(|job| job.job == id).unwrap();
            change(job);
        });
    }

    fn answer<T: Send + 'static>(
        &self,
        answer: impl FnOnce(&mut Known) -> Result<T, Refusal>,
    ) -> BoxFuture<'_, Result<T, Refusal>> {
        let answer = self.change(|known| match &known.refusal {
            Some(refusal) => Err(refusal.clone()),
            None => answer(known),
        });
        Box::pin(std::future::ready(answer))
    }
}

fn unknown(job: JobId) -> Refusal {
    Refusal::new(RefusalKind::NotFound, format!("there is no job {job}"))
}

impl HeadApi for FakeHead {
    fn ready(&self) -> bool {
        self.change(|known| known.ready)
    }

    fn cluster(&self) -> BoxFuture<'_, Result<ClusterInfo, Refusal>> {
        self.answer(|_| {
            let total = Resources {
                cpus: Milli(1500),
                gpus: 2,
                custom: BTreeMap::from([("fpga".to_owned(), Milli(1000))]),
            };
            Ok(ClusterInfo {
                cluster: CLUSTER,
                version: "0.1.0".to_owned(),
                uptime_ms: 99,
                nodes: vec![NodeInfo {
                    node: NodeId(30),
                    hostname: "box".to_owned(),
                    address: ([127, 0, 0, 1], 4000).into(),
                    alive: true,
                    total,
                    available: Resources::default(),
                    last_seen_ms: 12,
                    jobs: vec![JOB],
                    draining: false,
                }],
                running_jobs: 2,
                revoked: Vec::new(),
                time_ms: 0,
            })
        })
    }

    fn jobs(&self) -> BoxFuture<'_, Result<Vec<JobInfo>, Refusal>> {
        self.answer(|known| Ok(known.jobs.clone()))
    }

    fn job(&self, job: JobId) -> BoxFuture<'_, Result<JobInfo, Refusal>> {
        self.answer(|known| {
            let found = known.jobs.iter().find(|info| info.job == job);
            found.cloned().ok_or_else(|| unknown(job))
        })
    }

    fn stop(&self, job: JobId) -> BoxFuture<'_, Result<(), Refusal>> {
        let held = self.change(|known| known.held.take());
        let stopped = self.answer(move |known| {
            let found = known.jobs.iter_mut().find(|info| info.job == job);
            let found = found.ok_or_else(|| unknown(job))?;
            found.state = JobState::Stopped;
            known.stopped.push(job);
            Ok(())
        });
        Box::pin(async move {
            if let Some(held) = held {
                let _ = held.await;
            }
            stopped.await
        })
    }

    fn metrics(&self) -> Vec<MetricSum> {
        Vec::new()
    }

    fn is_administrator(&self, member: &Identity) -> bool {
        member.driver() == Some(ADMIN)
    }

    fn drain(&self, node: String, deadline: Duration) -> BoxFuture<'_, Result<NodeDrain, Refusal>> {
        self.answer(|known| {
            known.drained.push((node, Some(deadline)));
            Ok(NodeDrain {
                node: NodeId(30),
                hostname: "box".to_owned(),
                leaving: vec![JOB],
                staying: vec![OTHER_JOB],
            })
        })
    }

    fn undrain(&self, node: String) -> BoxFuture<'_, Result<(), Refusal>> {
        self.answer(|known| {
            known.drained.push((node, None));
            Ok(())
        })
    }
}
