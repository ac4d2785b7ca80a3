//! G-2: a group runs whole or not at all, and resources are conserved: at the end nothing is left of any job, and head and
//! nodes agree on that.

use kolo_core::head::messages::{AskId, Caller, Input, Output, Question};
use kolo_wire::{GenerationTable, HeadReply, HeadRequest};

use crate::worker::Name;
use crate::world::World;

/// A driver is told that a group is whole: each member has been there.
pub(crate) fn whole(world: &World, table: &GenerationTable) -> Result<(), String> {
    let elastic = world.is_elastic(table.job);
    let unknown = table.members.iter().find(|member| {
        let process = world.process_of(&Name::of(table.job, member));
        process.is_none_or(|it| elastic && it.model.newest() < table.generation)
    });
    match unknown {
        Some(member) => Err(format!(
            "{} has generation {}, which rank {} has not taken",
            table.job, table.generation, member.rank
        )),
        None => Ok(()),
    }
}

/// Nothing is left.
pub(crate) fn conserved(world: &mut World) -> Result<(), String> {
    if let Some((pid, process)) = world.processes.iter().find(|(_, process)| process.alive) {
        let (job, host) = (process.model.name.job, process.node + 1);
        return Err(format!("process {pid} of {job} is left on host-{host}"));
    }
    let mut there = 0;
    for node in &world.nodes {
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
    let now = world.instant(world.now);
    let Some(core) = &mut world.head.core else {
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
