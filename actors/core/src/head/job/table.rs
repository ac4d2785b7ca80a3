//! The members of a job, as others see them.

use kolo_wire::ids::Rank;
use kolo_wire::{GenerationTable, Handover, PlacedNode, Refusal, RefusalKind};

use super::{Job, Site};

/// Bytes of a group's table for each worker, without its hostname. At most that, in any message that holds the table.
const SEAT_BYTES: usize = 192;

/// Most bytes of a group's table. With the longest hostnames that Linux has (64 bytes) the largest group fits.
const MAX_TABLE: usize = 4 << 20;

/// Refuses a group whose table is too long for a message.
pub(super) fn check_table<'a>(
    sites: impl IntoIterator<Item = &'a Site, IntoIter: Clone>,
) -> Result<(), Refusal> {
    let sites = sites.into_iter();
    let names = |site: &Site| site.workers as usize * site.hostname.len();
    let workers: usize = sites.clone().map(|site| site.workers as usize).sum();
    let names: usize = sites.clone().map(names).sum();
    let room = MAX_TABLE.saturating_sub(workers * SEAT_BYTES);
    if names <= room {
        return Ok(());
    }
    let longest = sites.map(|site| &site.hostname);
    let longest = longest
        .max_by_key(|name| name.len())
        .map_or("", |name| name);
    Err(Refusal::new(
        RefusalKind::Invalid,
        format!(
            "the hostnames of {workers} workers have {names} bytes together; allowed are {room} for so many workers, \
             {} for each; the longest is {longest}: start nodes with shorter ones by --hostname, or ask for fewer workers",
            room / workers.max(1)
        ),
    ))
}

impl Job {
    /// The members: of an elastic job those of the generation that was published last.
    pub(super) fn table(&self) -> GenerationTable {
        let published = self.published.as_deref();
        published.cloned().unwrap_or_else(|| GenerationTable {
            job: self.id,
            generation: self.generation,
            members: self
                .seats
                .values()
                .map(|seat| seat.member.clone())
                .collect(),
            cause: String::new(),
            handover: Handover::None,
        })
    }

    pub(super) fn placed_nodes(&self) -> Vec<PlacedNode> {
        (0..self.parts.len())
            .map(|part| self.placed_node(part))
            .collect()
    }

    pub(super) fn placed_node(&self, part: usize) -> PlacedNode {
        let part = &self.parts[part];
        let seats = part.slots.iter().filter_map(|slot| self.seats.get(slot));
        let mut ranks: Vec<Rank> = seats.map(|seat| seat.member.rank).collect();
        ranks.sort_unstable();
        PlacedNode {
            node: part.site.node,
            hostname: part.site.hostname.clone(),
            address: part.site.address,
            ranks,
            has_program: part.has_program,
        }
    }
}
