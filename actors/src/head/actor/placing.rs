//! A job that was submitted gets its nodes and its Coordinator, or is refused.

use std::collections::HashMap;
use std::sync::Arc;

use actix::{Actor, AsyncContext, Context};
use kolo_core::head::history::MAX_JOBS;
use kolo_core::head::job::{Job, Site};
use kolo_core::head::validate::validate;
use kolo_core::placement::{lay_out, place};
use kolo_transport::RandomId as _;
use kolo_transport::ids::{JobId, NodeId};
use kolo_transport::wire::{Refusal, RefusalKind};

use super::{HeadActor, RunningJob};
use crate::head::coordinator::{Contact, Coordinator, Sharing};
use crate::head::messages::{Submit, Submitted};

impl HeadActor {
    /// Checks a job, chooses its nodes, books what it wants there, and starts its Coordinator.
    pub(super) fn place_job(
        &mut self,
        ctx: &mut Context<Self>,
        submit: Submit,
    ) -> Result<Submitted, Refusal> {
        if let Some(reason) = &self.stopping {
            return Err(Refusal::new(RefusalKind::Stopped, reason.clone()));
        }
        validate(&submit.spec)?;
        if self.jobs.len() >= MAX_JOBS {
            return Err(Refusal::new(
                RefusalKind::Busy,
                format!("{MAX_JOBS} jobs run, which is the most; try again when one has ended"),
            ));
        }
        let Submit {
            spec,
            owner,
            events,
        } = submit;
        let offers = self.registry.offers();
        let placed = if spec.layout.is_empty() {
            place(spec.placement, &spec.per_worker, &offers)
        } else {
            lay_out(&spec.layout, &spec.per_worker, &offers)
        };
        let shares = placed?;
        let mut sites = Vec::with_capacity(shares.len());
        let mut contacts = HashMap::with_capacity(shares.len());
        for share in &shares {
            let known = self
                .registry
                .alive(share.node)
                .zip(self.links.get(&share.node));
            let Some(((registration, _), (_, link))) = known else {
                return Err(internal("the placement chose a node that is lost"));
            };
            sites.push(Site {
                node: share.node,
                hostname: registration.hostname.clone(),
                address: registration.address,
                workers: share.workers,
            });
            contacts.insert(
                share.node,
                Contact {
                    link: Arc::clone(link),
                    ip: registration.address.ip(),
                },
            );
        }
        let id = JobId::random();
        let wanted: Vec<_> = shares
            .iter()
            .map(|share| (share.node, spec.per_worker.times(share.workers)))
            .collect();
        let nodes: Vec<NodeId> = shares.iter().map(|share| share.node).collect();
        let anew = spec.no_cache;
        let (key, plan) = self.plan_network(&nodes, &spec.interfaces, anew)?;
        let mut job = Job::submit(self.clock.now(), id, owner, spec, sites, self.settings.job)?;
        job.0.connect_by(plan);
        if !self.registry.hold(id, &wanted) {
            return Err(internal("the placement chose what is not free"));
        }
        tracing::info!(job = %id, %owner, nodes = shares.len(), "a job is placed");
        let coordinator = Coordinator::new(
            job,
            self.clock.clone(),
            contacts,
            ctx.address(),
            events,
            Arc::clone(&self.settings.rendezvous),
            Sharing {
                probes: self.probes.clone(),
                key: key.clone(),
                anew,
            },
        )
        .start();
        self.jobs.insert(
            id,
            RunningJob {
                key,
                number: self.next_number,
                coordinator: coordinator.clone(),
            },
        );
        self.next_number += 1;
        Ok(Submitted {
            job: id,
            coordinator,
        })
    }
}

fn internal(message: &str) -> Refusal {
    tracing::error!(message, "a job was not taken");
    Refusal::new(RefusalKind::Internal, message)
}
