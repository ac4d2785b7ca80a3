//! What the head must know of an elastic job to find room for it.

use kolo_wire::Refusal;
use kolo_wire::ids::NodeId;

use super::super::{Hold, Job, Site, check_table};
use super::Elastic;
use crate::membership::State;

impl Job {
    /// Whether the job may be given nodes while it runs: it is elastic, and does not end.
    #[must_use]
    pub fn may_grow(&self) -> bool {
        self.is_elastic() && self.ending.is_none()
    }

    /// Whether the job has been refused seats, or waits for the answers of nodes, so that news of room may change something.
    #[must_use]
    pub fn wants_room(&self) -> bool {
        let elastic = self.elastic.as_deref().filter(|_| self.ending.is_none());
        elastic.is_some_and(Elastic::wants_room)
    }

    /// The nodes that hold something of the job and are not being left, with the number of seats on each.
    pub fn held(&self) -> impl Iterator<Item = (NodeId, u32)> {
        let there = self
            .parts
            .iter()
            .filter(|part| !part.hold.is_over() && part.hold != Hold::Undoing);
        there.map(|part| (part.site.node, part.site.workers))
    }

    /// Whether seats on this node can be given to the job now. Not while the job leaves the node, or waits for an answer of an
    /// earlier stay there.
    #[must_use]
    pub fn takes_seats(&self, node: NodeId) -> bool {
        let elastic = self.elastic.as_deref();
        let is_unseen = elastic.is_some_and(|elastic| elastic.unseen.contains(&node));
        !is_unseen
            && self.part(node).is_none_or(|part| {
                let part = &self.parts[part];
                part.hold != Hold::Undoing && !(part.hold.is_over() && part.flow.is_owed)
            })
    }

    /// Looks whether seats on these sites fit into the job's messages.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Invalid`](kolo_wire::RefusalKind::Invalid) if the hostnames are too long.
    pub fn check_sites<'a>(
        &'a self,
        new: impl Iterator<Item = &'a Site> + Clone,
    ) -> Result<(), Refusal> {
        check_table(self.parts.iter().map(|part| &part.site).chain(new))
    }
}

impl Elastic {
    fn wants_room(&self) -> bool {
        let roster = self.membership.roster();
        roster.refused().is_some() || roster.count(State::Reserving) > 0
    }
}
