//! A communicator as one of the groups of its rank: what comes to it from outside.

use std::sync::Arc;
use std::time::Instant;

use kolo_transport::ids::CallId;

use super::Inner;
use crate::group::{GroupId, Member};
use crate::lane::LaneError;
use crate::link::Link;
use crate::negotiation::Negotiation;
use crate::operation::Tag;

impl Member for Inner {
    fn lane(
        self: Arc<Self>,
        rank: u32,
        lane: Result<Box<Link>, LaneError>,
        theirs: bool,
    ) -> Result<(), LaneError> {
        let Some(member) = self.position(rank).filter(|member| *member != self.me) else {
            return Err(LaneError::Refused {
                reason: format!("rank {rank} is not in {}", self.id),
            });
        };
        self.arrive(member, lane, theirs);
        Ok(())
    }

    fn connecting(&self, rank: u32) {
        // Nobody has the links of a group that is being made.
        if let (Some(member), Ok(mut engine)) = (self.position(rank), self.engine.try_lock()) {
            engine.links[member as usize].connecting = true;
        }
    }

    fn requested(self: Arc<Self>, rank: u32) {
        let Some(member) = self.position(rank) else {
            return;
        };
        self.signals.change(|state| {
            if !state.requests.contains(&member) {
                state.requests.push(member);
            }
        });
        // An operation that is under way sees to it, too.
        self.attend();
    }

    fn begin_call(self: Arc<Self>, call: CallId) {
        self.signals.begin_call(call);
    }

    fn has_yet_to_begin(&self, tag: Tag) -> bool {
        tag >= self.signals.lock().next_tag()
    }

    fn make_child(self: Arc<Self>, group: GroupId, rank: u32) {
        let Some(peer) = self.position(rank).filter(|peer| *peer != self.me) else {
            return;
        };
        if self.family.is_pair(self.id) {
            return;
        }
        if group == Negotiation::id_in(&self) {
            // Whoever waits for a name is told what this rank does.
            self.negotiation();
            return;
        }
        let own = self.job_rank(self.me);
        if group == self.pair_id([rank, own]) {
            self.pair(peer, self.me);
        } else if group == self.pair_id([own, rank]) {
            self.pair(self.me, peer);
        }
    }

    fn waits(&self) -> Option<(Instant, String)> {
        None
    }

    fn abort_call(self: Arc<Self>, call: u64, reason: &str) {
        Inner::abort_call(&self, call, reason);
    }

    fn revoke(self: Arc<Self>, reason: &str) {
        self.signals.change(|state| state.lost.revoke(reason));
    }

    fn rank_lost(self: Arc<Self>, rank: u32, reason: &str) {
        let Some(member) = self.position(rank) else {
            return;
        };
        self.signals.change(|state| state.lost.add(member, reason));
    }
}
