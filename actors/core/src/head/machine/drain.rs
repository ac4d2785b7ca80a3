//! Nodes that an operator drains: they take nothing new, and elastic jobs leave them.

use std::time::Duration;

use kolo_wire::ids::{DriverId, JobId, NodeId};
use kolo_wire::{HeadReply, NodeDrain, NodeRegistration, Refusal, RefusalKind};

use super::{Due, HeadCore, Timer};
use crate::head::job::Event;
use crate::head::messages::Level;
use crate::head::validate::MAX_DRAIN;

impl HeadCore {
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
                    "the deadline of the drain is {deadline:?}; allowed are 0 s to {MAX_DRAIN:?}"
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
        self.log(Level::Info, (None, node), "the node takes work again");
        self.offer(node, None);
        Ok(HeadReply::Done)
    }

    /// No job need leave a node any more. All are told: a job may have been told to leave and have nothing there now.
    pub(super) fn undrained(&mut self, node: NodeId) {
        let elastic = self
            .jobs
            .iter()
            .filter(|(_, running)| running.job.may_grow());
        let jobs = elastic.map(|(id, _)| *id);
        let events = jobs.map(|job| Due::Job(job, Event::Undrain { node }));
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
}
