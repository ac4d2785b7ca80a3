//! Questions, and the right to ask them (S-2).

use std::collections::BTreeMap;
use std::time::Duration;

use kolo_wire::ids::{DriverId, JobId, NodeId};
use kolo_wire::{
    ClusterInfo, HeadReply, HeadRequest, JobInfo, NodeRegistration, Refusal, RefusalKind,
};

use super::running::Running;
use super::{Due, HeadCore, Peer, disconnected, unknown_job};
use crate::head::history::{MAX_LISTED, Remembered, take};
use crate::head::job::Event;
use crate::head::messages::{AskId, Caller, Level, Now, Question};
use crate::head::milliseconds;
use crate::head::registry::Session;

impl HeadCore {
    /// The answer to a question, if it has one at once.
    pub(super) fn asked(&mut self, ask: AskId, question: Question) -> Option<HeadReply> {
        match question {
            Question::Request(caller, request) => self
                .request(ask, caller, *request)
                .unwrap_or_else(|refusal| Some(HeadReply::Refused(refusal))),
            Question::Drain { reason } => {
                self.leave(ask, reason);
                None
            }
            Question::Shutdown { reason } => {
                let jobs: Vec<_> = self.jobs.keys().copied().collect();
                for job in jobs {
                    let reason = reason.clone();
                    self.due.push_back(Due::Job(job, Event::Stop { reason }));
                }
                self.leave(ask, reason);
                None
            }
        }
    }

    /// The head takes no more jobs.
    fn leave(&mut self, ask: AskId, reason: String) {
        self.stopping = Some(reason);
        self.drains.add_head(ask);
        self.settle_drains();
    }

    fn request(
        &mut self,
        ask: AskId,
        caller: Caller,
        request: HeadRequest,
    ) -> Result<Option<HeadReply>, Refusal> {
        match request {
            HeadRequest::Register(registration) => {
                let session = session(caller)?;
                return self.register(session, registration).map(Some);
            }
            HeadRequest::Heartbeats => {
                let (node, session) = self.node(caller)?;
                self.registry.beat(self.now.awake, node, session);
            }
            HeadRequest::Events(events) => {
                let (node, session) = self.node(caller)?;
                self.report(node, session, events);
            }
            // The head's daemon keeps what is in it.
            HeadRequest::Metrics(_) => {
                self.node(caller)?;
            }
            HeadRequest::SignWorker { job, slot, .. } => {
                let (node, _) = self.node(caller)?;
                let running = self.jobs.get(&job).ok_or_else(|| unknown_job(job))?;
                return Ok(Some(HeadReply::Signed {
                    certificate: Vec::new(),
                    generation: running.job.may_sign(node, slot)?,
                }));
            }
            HeadRequest::Network(network) => {
                let (node, session) = self.node(caller)?;
                let text = format!(
                    "a node's network interfaces have changed: there are {}",
                    network.interfaces.len()
                );
                self.registry.set_network(node, session, network)?;
                self.offer(node, None);
                self.log(Level::Info, (None, node), text);
            }
            HeadRequest::Drain => {
                let (node, session) = self.node(caller)?;
                self.registry.leave(node, session);
                self.log(Level::Info, (None, node), "a node takes no more jobs");
                self.leave_node(node, "the daemon of the node is stopping");
                self.drains.add_node(node, session, ask);
                self.settle_drains();
                return Ok(None);
            }
            request => {
                let driver = self.driver(caller)?;
                return self.query(ask, driver, request);
            }
        }
        Ok(Some(HeadReply::Done))
    }

    /// A request of a driver, or of the HTTP API for somebody.
    fn query(
        &mut self,
        ask: AskId,
        driver: Option<DriverId>,
        request: HeadRequest,
    ) -> Result<Option<HeadReply>, Refusal> {
        Ok(Some(match request {
            HeadRequest::Cluster => HeadReply::Cluster(self.cluster()),
            HeadRequest::Jobs => HeadReply::Jobs(self.list()),
            HeadRequest::Job { job } => HeadReply::Job(self.job(job)?),
            HeadRequest::Stop { job } => {
                let reason = match driver {
                    Some(driver) => format!("{driver} asked for it"),
                    None => "it was asked for over HTTP".to_owned(),
                };
                return self.stop(ask, job, reason);
            }
            HeadRequest::Interfaces(query) => return self.interfaces(ask, &query),
            HeadRequest::DrainNode { node, deadline_ms } => {
                self.drain_node(driver, &node, Duration::from_millis(deadline_ms))?
            }
            HeadRequest::UndrainNode { node } => self.undrain_node(&node)?,
            _ => {
                return Err(Refusal::new(
                    RefusalKind::Internal,
                    "the request was routed wrongly",
                ));
            }
        }))
    }

    fn cluster(&self) -> ClusterInfo {
        let uptime = self.now.real.saturating_duration_since(self.started);
        ClusterInfo {
            cluster: self.settings.cluster,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: milliseconds(uptime),
            nodes: self.registry.info(self.now.awake),
            running_jobs: u32::try_from(self.jobs.len()).unwrap_or(u32::MAX),
            revoked: Vec::new(),
            time_ms: 0,
        }
    }

    /// All jobs, the newest first. The workers and nodes of older ones are left out where they would be too many.
    fn list(&self) -> Vec<JobInfo> {
        let ended = self.history.all();
        let ended = ended.map(|ended| (ended.number, Listed::Ended(ended)));
        let running = self.jobs.values();
        let running = running.map(|running| (running.number, Listed::Running(running)));
        let all: BTreeMap<u64, Listed<'_>> = ended.chain(running).collect();
        let mut left = MAX_LISTED;
        let listed = all.into_values().rev().map(|job| {
            let whole = take(&mut left, job.size());
            JobInfo {
                // Large, and to be had for each job by itself.
                network: None,
                membership: None,
                ..job.info(self.now, whole)
            }
        });
        listed.collect()
    }

    pub(super) fn job(&self, job: JobId) -> Result<JobInfo, Refusal> {
        if let Some(ended) = self.history.find(job) {
            return Ok(ended.info(self.now.real, true));
        }
        let running = self.jobs.get(&job).ok_or_else(|| unknown_job(job))?;
        Ok(running.info(self.now))
    }

    /// Stops a job. Answered when it has ended.
    fn stop(
        &mut self,
        ask: AskId,
        job: JobId,
        reason: String,
    ) -> Result<Option<HeadReply>, Refusal> {
        if let Some(running) = self.jobs.get_mut(&job) {
            running.stops.push(ask);
            self.due.push_back(Due::Job(job, Event::Stop { reason }));
            Ok(None)
        } else if self.history.find(job).is_some() {
            Ok(Some(HeadReply::Done))
        } else {
            Err(unknown_job(job))
        }
    }

    fn peer(&self, session: Session) -> Result<&Peer, Refusal> {
        self.peers.get(&session).ok_or_else(disconnected)
    }

    /// The driver that asks; `None` for the HTTP API.
    fn driver(&self, caller: Caller) -> Result<Option<DriverId>, Refusal> {
        match caller {
            Caller::Http => Ok(None),
            Caller::Peer(session) => self.driver_of(session).map(Some),
        }
    }

    pub(super) fn driver_of(&self, session: Session) -> Result<DriverId, Refusal> {
        let peer = self.peer(session)?;
        let driver = peer.identity.driver();
        driver.ok_or_else(|| forbidden(peer, "driver"))
    }

    /// The node that introduces itself, if it may.
    pub(super) fn introduced(
        &self,
        session: Session,
        registration: &NodeRegistration,
    ) -> Result<NodeId, Refusal> {
        let peer = self.peer(session)?;
        let node = peer.identity.node();
        let node = node.ok_or_else(|| forbidden(peer, "node"))?;
        if registration.node != node {
            return Err(Refusal::new(
                RefusalKind::Forbidden,
                format!(
                    "a certificate for {node} can't register {}",
                    registration.node
                ),
            ));
        }
        if peer.registered {
            return Err(Refusal::new(
                RefusalKind::Invalid,
                format!("{node} is registered over this connection already"),
            ));
        }
        Ok(node)
    }

    /// The node that asks, and its stay, which lasts.
    fn node(&self, caller: Caller) -> Result<(NodeId, Session), Refusal> {
        let session = session(caller)?;
        let peer = self.peer(session)?;
        let node = peer.identity.node();
        let node = node.ok_or_else(|| forbidden(peer, "node"))?;
        let problem = if !peer.registered {
            "must register over this connection first"
        } else if !self.registry.is_current(node, session) {
            "is not registered, or counts as lost; register again"
        } else {
            return Ok((node, session));
        };
        Err(Refusal::new(
            RefusalKind::Forbidden,
            format!("{node} {problem}"),
        ))
    }
}

/// A job of a list.
enum Listed<'a> {
    Ended(&'a Remembered),
    Running(&'a Running),
}

impl Listed<'_> {
    fn size(&self) -> usize {
        match self {
            Self::Ended(ended) => ended.size(),
            Self::Running(running) => running.job.size(),
        }
    }

    fn info(&self, now: Now, whole: bool) -> JobInfo {
        match self {
            Self::Ended(ended) => ended.info(now.real, whole),
            Self::Running(running) if whole => running.info(now),
            Self::Running(running) => running.outline(now.real),
        }
    }
}

fn session(caller: Caller) -> Result<Session, Refusal> {
    match caller {
        Caller::Peer(session) => Ok(session),
        Caller::Http => Err(Refusal::new(
            RefusalKind::Forbidden,
            "only a node may ask for this",
        )),
    }
}

fn forbidden(peer: &Peer, needed: &str) -> Refusal {
    Refusal::new(
        RefusalKind::Forbidden,
        format!(
            "only a {needed} may ask for this, and {} is none",
            peer.identity
        ),
    )
}
