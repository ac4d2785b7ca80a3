//! G-2: a group runs whole or not at all, and resources are conserved: at the end nothing is left of any job, and head and
//! nodes agree on that.

use kolo_core::head::messages::{AskId, Caller, Input, Output, Question};
use kolo_wire::{GenerationTable, HeadReply, HeadRequest};

use crate::worker::Name;
use crate::world::World;

impl World {
    /// A driver is told that a group is whole: each member has been there.
    pub(crate) fn check_whole(&mut self, table: &GenerationTable) {
        for member in &table.members {
            let process = self.process_of(&Name::of(table.job, member));
            let elastic = self.is_elastic(table.job);
            let there = process
                .is_some_and(|process| !elastic || process.model.newest() >= table.generation);
            if !there {
                let text = format!(
                    "{} has generation {}, which rank {} has not taken",
                    table.job, table.generation, member.rank
                );
                return self.violation("G-2", text);
            }
        }
    }

    /// Nothing is left.
    pub(crate) fn check_conserved(&mut self) {
        if let Some((pid, process)) = self.processes.iter().find(|(_, process)| process.alive) {
            let job = process.model.name.job;
            let text = format!(
                "process {pid} of {job} is left on host-{}",
                process.node + 1
            );
            return self.violation("G-2", text);
        }
        for node in &self.nodes {
            let Some(daemon) = &node.daemon else {
                continue;
            };
            let (free, total) = (daemon.core.free(), daemon.core.total());
            let jobs = daemon.core.jobs().count();
            if free != total || jobs > 0 {
                let text = format!(
                    "{} has {free} free of {total}, and {jobs} jobs, at the end",
                    node.id
                );
                return self.violation("G-2", text);
            }
        }
        let ask = AskId(u64::MAX);
        let now = self.instant(self.now);
        let request = Box::new(HeadRequest::Cluster);
        let question = Question::Request(Caller::Http, request);
        let Some(core) = &mut self.head.core else {
            return;
        };
        let outputs = core.step(now, Input::Asked { ask, question });
        for output in outputs {
            let Output::Answer(_, reply) = output else {
                continue;
            };
            let HeadReply::Cluster(cluster) = *reply else {
                continue;
            };
            if cluster.running_jobs > 0 {
                let text = format!("the head has {} jobs at the end", cluster.running_jobs);
                return self.violation("G-2", text);
            }
            for node in cluster.nodes.iter().filter(|node| node.alive) {
                if node.available != node.total {
                    let text = format!(
                        "the head has {} booked at the end: {} free of {}",
                        node.node, node.available, node.total
                    );
                    return self.violation("G-2", text);
                }
            }
            let alive = cluster.nodes.iter().filter(|node| node.alive).count();
            let there = (self.nodes.iter())
                .filter(|node| node.daemon.is_some())
                .count();
            if alive != there {
                let text = format!("the head knows {alive} living nodes of {there}");
                return self.violation("G-2", text);
            }
        }
    }
}
