//! A generation as a message.

use kolo_wire::{GenerationTable, Handover, Member};

use super::super::Base;
use crate::membership;
use crate::ranks::Registration;

/// R-1 holds whatever the hosts are.
pub(super) fn table_of(
    job: &Base,
    generation: &membership::Generation,
) -> Result<GenerationTable, String> {
    let mut registration = Registration::new();
    for member in generation.members() {
        let node = member.location.node;
        let part = job.parts.find(node).map(|part| &job.parts[part].site);
        let hostname = part.map_or(&*member.location.host.0, |site| &site.hostname);
        registration
            .register(node, hostname, member.rank)
            .map_err(|error| error.to_string())?;
    }
    let ranks = registration.finalize().map_err(|error| error.to_string())?;
    let members = ranks.iter().zip(generation.members());
    Ok(GenerationTable {
        job: job.id,
        generation: generation.number(),
        members: members
            .map(|(info, member)| Member {
                incarnation: member.process.incarnation,
                address: member.addresses.first().copied(),
                ..info.member(member.process.slot)
            })
            .collect(),
        cause: generation.cause().to_owned(),
        handover: if generation.needs_restore() {
            Handover::Restore
        } else if generation.needs_sync() {
            Handover::Sync
        } else {
            Handover::None
        },
    })
}
