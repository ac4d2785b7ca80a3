//! G-2: a group runs whole or not at all, and resources are conserved: at the end nothing is left of any job, and head and
//! nodes agree on that.

use kolo_core::head::messages::{AskId, Caller, Input, Output, Question};
use kolo_wire::{GenerationTable, HeadReply, HeadRequest};

use crate::worker::Name;
use crate::world::World;

impl World {
    /// A driver is told that a group is whole: each member has been there.
    pub(crate) fn check_whole(&mut self, table: &GenerationTable) {
        let elastic = self.is_elastic(table.job);
        let unknown = table.members.iter().find(|member| {
            let process = self.process_of(&Name::of(table.job, member));
            process.is_none_or(|it| elastic && it.model.newest() < table.generation)
        });
        if let Some(member) = unknown {
            let text = format!(
                "{} has generation {}, which rank {} has not taken",
                table.job, table.generation, member.rank
            );
            self.violation("G-2", text);
        }
    }

    /// Nothing is left.
    pub(crate) fn check_conserved(&mut self) {
        let checked = self.is_conserved();
        self.hold("G-2", checked);
    }

    fn is_conserved(&mut self) -> Result<(), String> {
        if let Some((pid, process)) = self.processes.iter().find(|(_, process)| process.alive) {
            let (job, host) = (process.model.name.job, process.node + 1);
            return Err(format!("process {pid} of {job} is left on host-{host}"));
        }
        let mut there = 0;
        for node in &self.nodes {
            let Some(daemon) = &node.daemon else {
                continue;
            };
            there += 1;
            let (free, total) = (daemon.core.free(), daemon.core.total());
            let jobs = daemon.core.jobs().count();
            if free != total || jobs > 0 {
                return Err(format!(
                    "{} has {free} free of {total}, and {jobs} jobs, at the end",
                    node.id
                ));
            }
        }
        let now = self.instant(self.now);
        let Some(core) = &mut self.head.core else {
            return Ok(());
        };
        let ask = AskId(u64::MAX);
        let question = Question::Request(Caller::Http, Box::new(HeadRequest::Cluster));
        for output in core.step(now, Input::Asked { ask, question }) {
            let Output::Answer(_, reply) = output else {
                continue;
            };
            let HeadReply::Cluster(cluster) = *reply else {
                continue;
            };
            if cluster.running_jobs > 0 {
                return Err(format!(
                    "the head has {} jobs at the end",
                    cluster.running_jobs
                ));
            }
            let alive = || cluster.nodes.iter().filter(|node| node.alive);
            if let Some(node) = alive().find(|node| node.available != node.total) {
                return Err(format!(
                    "the head has {} booked at the end: {} free of {}",
                    node.node, node.available, node.total
                ));
            }
            let alive = alive().count();
            if alive != there {
                return Err(format!("the head knows {alive} living nodes of {there}"));
            }
        }
        Ok(())
    }
}
