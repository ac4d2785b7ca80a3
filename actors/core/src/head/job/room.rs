//! What the head must know of a job to find room for it.

use kolo_wire::ids::NodeId;
use kolo_wire::{JobHost, Refusal, RefusalKind};

use super::Job;
use super::messages::Site;
use super::parts::Hold;
use crate::placement::MAX_PER_NODE;

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

/// Whether a node is called so: by its hostname, whose case and last dot do not count, or by its id.
fn is_called(name: &str, node: NodeId, hostname: &str) -> bool {
    let plain = |name: &'_ str| name.trim_end_matches('.').to_ascii_lowercase();
    plain(name) == plain(hostname) || name == node.to_string()
}

/// How many workers of a job that names these hosts a node takes at most.
pub(in crate::head) fn most_on(hosts: Option<&[JobHost]>, node: NodeId, hostname: &str) -> u32 {
    let Some(hosts) = hosts else {
        return MAX_PER_NODE;
    };
    let mut known = hosts.iter();
    let host = known.find(|host| is_called(&host.name, node, hostname));
    host.map_or(0, |host| host.slots)
}

impl Job {
    /// Whether the job may be given nodes while it runs: it is elastic, and does not end.
    #[must_use]
    pub fn may_grow(&self) -> bool {
        self.base.is_elastic() && self.base.ending.is_none()
    }

    /// Whether the job has been refused seats, or waits for the answers of nodes, so that news of room may change something.
    #[must_use]
    pub fn wants_room(&self) -> bool {
        let elastic = self.elastic().filter(|_| self.may_grow());
        elastic.is_some_and(super::Elastic::wants_room)
    }

    /// Whether the job waits for more room than it has.
    #[must_use]
    pub fn is_short(&self) -> bool {
        let elastic = self.elastic().filter(|_| self.may_grow());
        let waits = elastic.is_some_and(super::Elastic::waits_for_room);
        let held: u32 = self.held().map(|(_, workers)| workers).sum();
        let needed = self
            .spec()
            .elastic
            .as_ref()
            .map_or(0, |elastic| elastic.min);
        waits && held < needed
    }

    /// The hosts that the job may use; `None` are all.
    #[must_use]
    pub fn hosts(&self) -> Option<&[JobHost]> {
        self.spec().elastic.as_ref()?.hosts.as_deref()
    }

    /// The nodes that hold something of the job and are not being left, with the number of seats on each.
    pub fn held(&self) -> impl Iterator<Item = (NodeId, u32)> {
        let parts = self.base.parts.iter();
        let there = parts.filter(|part| !part.hold.is_over() && part.hold != Hold::Undoing);
        there.map(|part| (part.site.node, part.site.workers))
    }

    /// Whether seats on this node can be given to the job now. Not while the job leaves the node, or waits for an answer of an
    /// earlier stay there.
    #[must_use]
    pub fn takes_seats(&self, node: NodeId) -> bool {
        let elastic = self.elastic();
        elastic.is_some_and(|elastic| elastic.takes_seats(&self.base, node))
    }

    /// Looks whether seats on these sites fit into the job's messages.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Invalid`] if the hostnames are too long.
    pub fn check_sites<'a>(
        &'a self,
        new: impl Iterator<Item = &'a Site> + Clone,
    ) -> Result<(), Refusal> {
        check_table(self.base.parts.iter().map(|part| &part.site).chain(new))
    }
}
