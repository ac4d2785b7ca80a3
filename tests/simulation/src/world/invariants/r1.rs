//! world ranks are exactly `0..n`; local and cross ranks are those of Horovod, uneven hosts included.

use std::collections::BTreeMap;

use kolo_wire::GenerationTable;
use kolo_wire::ids::NodeId;

pub(crate) fn ranks(table: &GenerationTable) -> Result<(), String> {
    let (job, generation) = (table.job, table.generation);
    // In order of the first rank of each.
    let mut hosts: Vec<NodeId> = Vec::new();
    let mut sizes: BTreeMap<NodeId, u32> = BTreeMap::new();
    for member in &table.members {
        if !hosts.contains(&member.node) {
            hosts.push(member.node);
        }
        *sizes.entry(member.node).or_default() += 1;
    }
    let mut local: BTreeMap<NodeId, u32> = BTreeMap::new();
    for (rank, member) in (0..).zip(&table.members) {
        let next = local.entry(member.node).or_default();
        let local_rank = *next;
        *next += 1;
        let with = hosts
            .iter()
            .filter(|host| sizes.get(host).is_some_and(|size| *size > local_rank));
        let cross_size = with.clone().count() as u32;
        let cross_rank = with.clone().position(|host| *host == member.node);
        let expected = (
            rank,
            local_rank,
            sizes[&member.node],
            cross_rank.unwrap_or_default() as u32,
            cross_size,
        );
        let given = (
            member.rank.0,
            member.local_rank.0,
            member.local_size,
            member.cross_rank.0,
            member.cross_size,
        );
        if expected != given {
            return Err(format!(
                "slot {} of {job} has (rank, local rank and size, cross rank and size) {given:?} in generation \
                 {generation}, and should have {expected:?}",
                member.slot
            ));
        }
    }
    Ok(())
}
