//! Ranks that leave because of a loss in another group, as they have said.

use std::task::Context;
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use super::Run;
use super::late::{Fault, WhyLate};
use crate::error::CollectiveError;
use crate::operation::Tag;

/// The ends of one rank's links are seen at different times. In this one all are, as a rule.
const ALL_ENDS: Duration = Duration::from_millis(200);

/// A peer that is gone, and may not be the one with whom it began.
#[derive(Debug)]
pub(super) struct Postponed {
    peer: u32,
    /// If no link to it could be made: the error of that.
    unlinked: Option<CollectiveError>,
    pub(super) until: Instant,
}

impl Postponed {
    pub(super) fn is_of(&self, peer: u32) -> bool {
        self.peer == peer
    }
}

impl Run<'_> {
    /// A peer that this rank needs is gone, or its link.
    ///
    /// # Errors
    ///
    /// With the rank that is to be named, if that is certain.
    pub(super) fn lose_peer(&mut self, peer: u32) -> Result<(), CollectiveError> {
        if !self.may_hear_more(peer) {
            return Err(self.lost(peer));
        }
        self.postpone(peer, None);
        Ok(())
    }

    /// As [`Run::lose_peer`], of one to which no link could be made.
    pub(super) fn lack_peer(
        &mut self,
        peer: u32,
        unlinked: CollectiveError,
    ) -> Result<(), CollectiveError> {
        if !self.may_hear_more(peer) {
            return Err(self.lost_or(peer, Some(unlinked)));
        }
        self.postpone(peer, Some(unlinked));
        Ok(())
    }

    fn postpone(&mut self, peer: u32, unlinked: Option<CollectiveError>) {
        if !self.is_postponed(peer) {
            self.postponed.push(Postponed {
                peer,
                unlinked,
                until: Instant::now() + ALL_ENDS,
            });
        }
    }

    /// Whether it is not clear yet what it means that a peer is gone. Another link to it is no use in this operation.
    pub(super) fn is_postponed(&self, peer: u32) -> bool {
        self.postponed.iter().any(|one| one.is_of(peer))
    }

    /// What it means that a peer is gone, after all links were read.
    pub(super) fn judge_postponed(&mut self, cx: &mut Context<'_>) -> Result<(), CollectiveError> {
        let Some(Postponed { peer, until, .. }) = self.postponed.first() else {
            return Ok(());
        };
        let (peer, until) = (*peer, *until);
        let mut last = peer;
        // They may have lost each other.
        for _ in 0..self.engine.world {
            let Some(culprit) = self.blamed_by(last) else {
                break;
            };
            // Why it goes, and its end, may stand behind what it has sent for later.
            self.look_behind(culprit.0, cx)?;
            if self.engine.links[culprit.index()].is_alive() {
                if Instant::now() < until {
                    return Ok(());
                }
                break;
            }
            last = culprit.0;
        }
        self.end_postponed()
    }

    /// Whatever may still be heard of it: a peer is gone that this rank needs.
    pub(super) fn end_postponed(&mut self) -> Result<(), CollectiveError> {
        if self.postponed.is_empty() {
            return Ok(());
        }
        let Postponed { peer, unlinked, .. } = self.postponed.remove(0);
        Err(self.lost_or(peer, unlinked))
    }

    /// The error of a rank that is gone, where `unlinked` counts if it is not known because of whom it may have left.
    fn lost_or(&mut self, peer: u32, unlinked: Option<CollectiveError>) -> CollectiveError {
        match unlinked {
            Some(error) if !self.left_because_of_loss(peer) => error,
            _ => self.lost(peer),
        }
    }

    /// Whether the rank because of which a peer has left may be there, or has said more than was taken in; or the one because of
    /// which that one has left, and so on.
    fn may_hear_more(&self, peer: u32) -> bool {
        let mut last = peer;
        // They may have lost each other.
        for _ in 0..self.engine.world {
            match self.blamed_by(last) {
                Some(culprit) if self.engine.links[culprit.index()].is_up() => return true,
                Some(culprit) => last = culprit.0,
                None => break,
            }
        }
        false
    }

    /// The rank because of which a peer that is gone may have left.
    fn blamed_by(&self, rank: u32) -> Option<Rank> {
        let is_gone = !self.engine.links[rank as usize].is_alive();
        let lost = self.lost_before_by(Rank(rank)).filter(|_| is_gone);
        lost.or_else(|| self.mourned_by(rank))
    }

    /// The rank that a peer which is gone has lost in another group, if it came to no operation here since it said so.
    fn mourned_by(&self, rank: u32) -> Option<Rank> {
        let is_gone = !self.engine.links[rank as usize].is_alive();
        self.lost_elsewhere_by(rank).filter(|_| is_gone)
    }

    /// The rank that a peer has lost in another group, if it came to no operation here since it said so.
    fn lost_elsewhere_by(&self, rank: u32) -> Option<Rank> {
        let link = &self.engine.links[rank as usize];
        let (tag, culprit, _) = link.mourns.as_ref()?;
        let is_after = |other: Tag| other > *tag && !other.is_part_of(*tag);
        let came = link.came.is_some_and(|(came, _)| is_after(came))
            || is_after(self.tag) && self.has_come(Rank(rank));
        let has_passed = self.engine.passed.is_some_and(is_after);
        (!came && !has_passed && culprit.0 != self.engine.me).then_some(*culprit)
    }

    /// The rank because of which a peer may not come to this operation, if that one is gone: the peer is there, and has lost it in
    /// another group. It may have done its part here, but not be done: nobody is before all have come.
    pub(super) fn may_not_come_for(&self, rank: Rank) -> Option<Rank> {
        self.lost_elsewhere_by(rank.0)
            .filter(|_| self.is_absent(rank))
    }

    /// As a reason why that peer does not come: not if the other one is there.
    pub(super) fn why_mourning(&self, rank: Rank) -> Option<WhyLate> {
        let culprit = self.mourned_by(rank.0)?;
        let (tag, ..) = self.engine.links[rank.index()].mourns.as_ref()?;
        let link = &self.engine.links[culprit.index()];
        // That it is there shows only on some kinds of links.
        link.is_silent().then_some(WhyLate {
            culprit,
            tag: *tag,
            fault: Fault::LostElsewhere,
        })
    }

    /// A rank that is gone, or another one because of which it has left, and which may have left because of one that it had lost
    /// itself: the last one of those that have said so.
    pub(super) fn who_began(&self, peer: u32) -> u32 {
        let mut path = vec![peer];
        let mut last = peer;
        loop {
            let why = self.why_late(Rank(last));
            let next = why.filter(|why| self.leads_on(why));
            let Some(next) = next.map(|why| why.culprit.0) else {
                return last;
            };
            if let Some(from) = path.iter().position(|rank| *rank == next) {
                // They have lost each other. All ranks name the same one.
                return path[from..].iter().copied().min().unwrap_or(peer);
            }
            path.push(next);
            last = next;
        }
    }

    /// Whether a rank that is lost has left because of a loss itself. If it has got over that since it is another story: it was lost
    /// in a later operation then.
    fn leads_on(&self, why: &WhyLate) -> bool {
        let next = self.why_late(why.culprit);
        let is_no_older = |tag: Tag| match why.fault {
            Fault::LostElsewhere => true,
            _ => tag >= why.tag || tag.is_part_of(why.tag),
        };
        why.fault.is_loss()
            && next.is_some_and(|next| next.fault.is_loss() && is_no_older(next.tag))
    }
}
