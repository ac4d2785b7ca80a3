//! Operations that fail. A link that has ended is a suspicion first, and the others are told before anything ends here.

use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use super::Taken;
use super::book::Failed;
use super::line::Line;
use super::messages::{self, BATCH, Down};
use crate::error::CollectiveError;
use crate::times::TOLD;

/// A link has ended or could not be made, and nobody has said yet which rank is lost.
pub(super) struct Suspicion {
    pub(super) member: u32,
    /// The cause if nobody says anything.
    pub(super) cause: CollectiveError,
    /// The member is not expected to come back.
    pub(super) is_final: bool,
    /// What waited on the other ranks, on the coordinator.
    pub(super) failed: Vec<Failed>,
    /// What waited on this rank.
    pub(super) own: Taken,
}

/// Operations of this rank that have failed and have not ended yet, and until when they may wait.
pub(super) struct Endings {
    patience: Duration,
    /// These wait for a word on who is lost.
    suspicions: Vec<(Instant, Suspicion)>,
    /// These wait until the others have been told.
    untold: Vec<(Instant, Taken, CollectiveError)>,
}

impl Endings {
    /// The end of a link is a suspicion for so long: the word of the node or the head may come.
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            patience,
            suspicions: Vec::new(),
            untold: Vec::new(),
        }
    }

    pub(super) fn suspect(&mut self, now: Instant, suspicion: Suspicion) {
        self.suspicions.push((now + self.patience, suspicion));
    }

    /// Takes the suspicions that this picks by when they end.
    fn take(&mut self, mut pick: impl FnMut(Instant, &Suspicion) -> bool) -> Vec<Suspicion> {
        let picked = (self.suspicions).extract_if(.., |(until, one)| pick(*until, one));
        picked.map(|(_, suspicion)| suspicion).collect()
    }

    pub(super) fn take_all(&mut self) -> Vec<Suspicion> {
        self.take(|_, _| true)
    }

    pub(super) fn take_those_of(&mut self, member: u32) -> Vec<Suspicion> {
        self.take(|_, suspicion| suspicion.member == member)
    }

    /// Takes the suspicions whose time is over.
    pub(super) fn take_old(&mut self, now: Instant) -> Vec<Suspicion> {
        self.take(|until, _| now >= until)
    }

    /// These end when the others have been told.
    pub(super) fn end_later(&mut self, now: Instant, own: Taken, cause: CollectiveError) {
        self.untold.push((now + TOLD, own, cause));
    }

    /// Takes what ends now. `is_said` tells that nothing waits to be written.
    pub(super) fn take_told(
        &mut self,
        now: Instant,
        is_said: bool,
    ) -> Vec<(Taken, CollectiveError)> {
        let is_told =
            |(until, ..): &mut (Instant, Taken, CollectiveError)| is_said || now >= *until;
        let told = self.untold.extract_if(.., is_told);
        told.map(|(_, own, cause)| (own, cause)).collect()
    }

    /// Takes what waits on this rank of calls before this one.
    pub(super) fn take_own(&mut self, before: u64) -> Taken {
        let suspected = self.suspicions.iter_mut().map(|(_, one)| &mut one.own);
        let untold = self.untold.iter_mut().map(|(_, own, _)| own);
        let own = suspected.chain(untold);
        own.flat_map(|own| own.extract_if(.., |((call, _), _)| *call < before))
            .collect()
    }

    /// When to look again.
    pub(super) fn alarm(&self) -> Option<Instant> {
        let suspicions = self.suspicions.iter().map(|(until, _)| *until);
        let untold = self.untold.iter().map(|(until, ..)| *until);
        suspicions.chain(untold).min()
    }
}

/// Puts the word that operations are given up on the lines of the members that have asked.
pub(super) fn tell(lines: &mut [Line], failed: &Failed, cause: &CollectiveError) {
    let asked = lines.iter_mut().zip(&failed.asked).zip(&*failed.heard);
    for ((line, _), heard) in asked.filter(|((line, asked), _)| line.lane.is_some() && **asked) {
        for names in failed.names.chunks(BATCH) {
            let fail = Down::Fail {
                call: failed.call,
                heard: *heard,
                names: names.to_vec(),
                cause: cause.clone(),
            };
            messages::put(&mut line.out, &fail);
        }
    }
}

/// The cause that the link of a member has ended.
pub(super) fn lost(member: u32, reason: String) -> CollectiveError {
    CollectiveError::PeerLost {
        rank: Rank(member),
        reason,
    }
}
