//! What an operation has still to do with whom.

use kolo_transport::ids::Rank;

use super::{Mode, Run};
use crate::engine::next_transfer;
use crate::schedule::Action;

impl Run<'_> {
    /// Whether anything is left to exchange with a peer.
    pub(super) fn needs(&self, peer: u32) -> bool {
        match self.mode {
            Mode::Links => {}
            Mode::Form => return true,
            Mode::Shared => return self.engine.lacks(peer),
        }
        self.awaits(peer) || self.needs_to_send(peer)
    }

    /// Whether anything is left to receive from a peer.
    pub(super) fn awaits(&self, peer: u32) -> bool {
        self.awaits_consent(peer)
            || self.next(peer, false).is_some()
            || self
                .later()
                .any(|action| action.receive().is_some_and(|(other, _)| other == peer))
    }

    pub(super) fn next(&self, peer: u32, sends: bool) -> Option<usize> {
        let step = self.engine.schedule.step(self.step);
        next_transfer(step, &self.engine.progress, peer, sends)
    }

    fn later(&self) -> impl Iterator<Item = &Action> {
        self.engine.schedule.steps().skip(self.step + 1).flatten()
    }

    /// The peer can't be written to any more, and it should be: only what it said before is of interest.
    pub(super) fn is_draining(&self, peer: u32) -> bool {
        self.engine.links[peer as usize].write_error.is_some() && self.needs_to_send(peer)
    }

    pub(super) fn needs_to_send(&self, peer: u32) -> bool {
        self.owes_consent(peer)
            || self.next(peer, true).is_some()
            || self
                .later()
                .any(|action| matches!(action, Action::Send { peer: other, .. } if *other == peer))
    }

    /// The peers that the present step waits for; or that have not shared memory so far.
    pub(super) fn waited_for(&self) -> Vec<Rank> {
        match self.mode {
            Mode::Links => {}
            Mode::Form => return self.not_attached(),
            Mode::Shared => return self.engine.late_in_shared(),
        }
        let step = self.engine.schedule.step(self.step);
        let open = step.iter().zip(&self.engine.progress);
        let mut ranks: Vec<Rank> = open
            .filter(|(_, progress)| !progress.done)
            .filter_map(|(action, _)| action.transfer())
            .map(|(peer, _)| Rank(peer))
            .collect();
        if ranks.is_empty()
            && let Some(consent) = &self.consent
        {
            let (me, world) = (self.engine.me, self.engine.world);
            let unlinked = |peer: &u32| !self.engine.links[*peer as usize].is_up();
            let owed = consent.owed(me, world).filter(unlinked);
            ranks.extend(consent.awaited(me, world).chain(owed).map(Rank));
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}
