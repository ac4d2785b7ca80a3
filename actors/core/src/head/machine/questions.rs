//! Questions, and what is done for them: jobs are stopped, and nodes are drained.
//!
//! A node that an operator drains takes nothing new, and elastic jobs leave it.

use std::collections::BTreeMap;
use std::time::Duration;

use kolo_wire::ids::{DriverId, JobId, NodeId};
use kolo_wire::span::Span;
use kolo_wire::{
    ClusterInfo, HeadReply, HeadRequest, JobInfo, NodeDrain, NodeRegistration, Refusal, RefusalKind,
};

use super::peers::session;
use super::running::Running;
use super::{Due, HeadCore, Timer, unknown_job};
use crate::head::history::{MAX_LISTED, Remembered, take};
use crate::head::job::Event;
use crate::head::messages::{AskId, Caller, Level, Now, Question};
use crate::head::milliseconds;
use crate::head::validate::MAX_DRAIN;

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
        self.drains.stopping = Some(reason);
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
                let (node, session) = self.peers.node(caller, &self.registry)?;
                self.registry.beat(self.now.awake, node, session);
            }
            HeadRequest::Events(events) => {
                let (node, session) = self.peers.node(caller, &self.registry)?;
                self.report(node, session, events);
            }
            // The head's daemon keeps what is in it.
            HeadRequest::Metrics(_) => {
                self.peers.node(caller, &self.registry)?;
            }
            HeadRequest::SignWorker { job, slot, .. } => {
                let (node, _) = self.peers.node(caller, &self.registry)?;
                let running = self.jobs.get(&job).ok_or_else(|| unknown_job(job))?;
                return Ok(Some(HeadReply::Signed {
                    certificate: Vec::new(),
                    generation: running.job.may_sign(node, slot)?,
                }));
            }
            HeadRequest::Network(network) => {
                let (node, session) = self.peers.node(caller, &self.registry)?;
                let text = format!(
                    "a node's network interfaces have changed: there are {}",
                    network.interfaces.len()
                );
                self.registry.set_network(node, session, network)?;
                self.jobs.offer(node, None);
                self.log(Level::Info, (None, node), text);
            }
            HeadRequest::Drain => {
                let (node, session) = self.peers.node(caller, &self.registry)?;
                self.registry.leave(node, session);
                self.log(Level::Info, (None, node), "a node takes no more jobs");
                self.leave_node(node, "the daemon of the node is stopping");
                self.drains.add_node(node, session, ask);
                self.settle_drains();
                return Ok(None);
            }
            request => {
                let driver = self.peers.driver(caller)?;
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

    /// Drains a node: elastic jobs have this time to leave.
    pub(super) fn drain_node(
        &mut self,
        by: Option<DriverId>,
        name: &str,
        deadline: Duration,
    ) -> Result<HeadReply, Refusal> {
        if deadline > MAX_DRAIN {
            return Err(Refusal::new(
                RefusalKind::Invalid,
                format!(
                    "the deadline of the drain is {}; allowed are 0s to {}",
                    Span(deadline),
                    Span(MAX_DRAIN)
                ),
            ));
        }
        let (node, hostname) = self.known_node(name)?;
        self.registry.set_drained(node, true);
        self.set_timer(Timer::Evict(node), deadline);
        let reason = match by {
            Some(driver) => format!("{driver} drains the node"),
            None => "the node is drained, as was asked for over HTTP".to_owned(),
        };
        let leaving = self.leave_node(node, &reason);
        let on_it = self.registry.jobs_on(node);
        let stays = |job: &JobId| self.jobs.contains_key(job) && !leaving.contains(job);
        let staying: Vec<JobId> = on_it.filter(stays).collect();
        let text = format!(
            "{reason}: no new work; jobs that leave within {deadline:?}: {}, jobs that stay until they end: {}",
            leaving.len(),
            staying.len()
        );
        self.log(Level::Info, (None, node), text);
        Ok(HeadReply::Draining(NodeDrain {
            node,
            hostname,
            leaving,
            staying,
        }))
    }

    /// The node takes work again.
    pub(super) fn undrain_node(&mut self, name: &str) -> Result<HeadReply, Refusal> {
        let (node, _) = self.known_node(name)?;
        if self.registry.is_leaving(node) {
            return Err(Refusal::new(
                RefusalKind::Stopped,
                format!("the daemon of {node} is stopping; start the daemon again"),
            ));
        }
        self.registry.set_drained(node, false);
        self.agenda.set(Timer::Evict(node), None);
        self.undrained(node);
        self.log(Level::Info, (None, node), "the node takes new work");
        self.jobs.offer(node, None);
        Ok(HeadReply::Done)
    }

    /// No job need leave a node any more. All are told: a job may have been told to leave and have nothing there now.
    pub(super) fn undrained(&mut self, node: NodeId) {
        let elastic = self.jobs.iter();
        let elastic = elastic.filter(|(_, running)| running.job.may_grow());
        let events = elastic.map(|(job, _)| Due::Job(*job, Event::Undrain { node }));
        self.due.extend(events);
    }

    /// Elastic jobs are to leave a node. Those that are told.
    pub(super) fn leave_node(&mut self, node: NodeId, reason: &str) -> Vec<JobId> {
        let jobs = self.elastic_on(node);
        for job in &jobs {
            let reason = reason.to_owned();
            self.due
                .push_back(Due::Job(*job, Event::Drain { node, reason }));
        }
        jobs
    }

    /// The time to leave a node is over.
    pub(super) fn evict(&mut self, node: NodeId) {
        for job in self.elastic_on(node) {
            let reason = "the deadline of the drain of its node is over".to_owned();
            self.due
                .push_back(Due::Job(job, Event::Evict { node, reason }));
        }
    }

    /// The elastic jobs that have something on a node, and do not leave it already.
    fn elastic_on(&self, node: NodeId) -> Vec<JobId> {
        let may_leave = |id: &JobId| {
            let running = self.jobs.get(id);
            let job = running.map(|running| &running.job);
            job.filter(|job| job.may_grow())
                .is_some_and(|job| job.held().any(|(held, _)| held == node))
        };
        self.registry.jobs_on(node).filter(may_leave).collect()
    }

    /// The node with this id or hostname, a lost one included. Of several with the hostname the one that is there is meant.
    fn known_node(&self, name: &str) -> Result<(NodeId, String), Refusal> {
        let is_meant =
            |node: &&NodeRegistration| node.hostname == name || node.node.to_string() == name;
        let mut found: Vec<&NodeRegistration> = self.registry.known().filter(is_meant).collect();
        let is_there = |node: &&NodeRegistration| self.registry.alive(node.node).is_some();
        if found.iter().any(is_there) {
            found.retain(is_there);
        }
        match found[..] {
            [node] => Ok((node.node, node.hostname.clone())),
            [] => Err(Refusal::new(
                RefusalKind::NotFound,
                format!(
                    "no node has the hostname or id `{}`; `kolo status` lists the nodes",
                    name.escape_debug()
                ),
            )),
            _ => {
                let ids: Vec<String> = found.iter().map(|node| node.node.to_string()).collect();
                Err(Refusal::new(
                    RefusalKind::Invalid,
                    format!(
                        "{} nodes have the hostname `{}`; give the id of one: {}",
                        found.len(),
                        name.escape_debug(),
                        ids.join(", ")
                    ),
                ))
            }
        }
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
