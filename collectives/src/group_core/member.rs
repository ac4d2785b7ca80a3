//! A communicator as one of the groups of its rank: what comes to it from outside.

use std::sync::Arc;
use std::task::Context;
use std::time::Instant;

use kolo_transport::ids::{CallId, Rank};

use super::GroupCore;
use crate::lane::LaneError;
use crate::link::Link;
use crate::operation::Tag;
use crate::rank_shared::listener::{Answers, Idle, Told};
use crate::rank_shared::{GroupId, Member};
use crate::shm::setup::Sharing;

impl Member for GroupCore {
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

    fn not_asked(self: Arc<Self>, rank: u32, error: LaneError) {
        if let Some(member) = self.position(rank) {
            self.arrive(member, Err(error), false);
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
        if self.rank_shared.is_pair(self.id) {
            return;
        }
        if group == self.named_id() {
            // Ranks that wait for a name are told what this rank does.
            self.named();
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
        GroupCore::abort_call(&self, call, reason);
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

/// Most bytes of a link that are held to look what its peer asks for.
const AHEAD: usize = 64 * 1024;

impl Idle for GroupCore {
    fn answer(self: Arc<Self>, told: &mut Vec<Told>, cx: &mut Context<'_>) -> bool {
        let Ok(mut engine) = self.engine.try_lock() else {
            return false;
        };
        let (arrivals, notices, next) = {
            let mut state = self.signals.lock();
            (state.take_links(), state.notices.frames(), state.next_tag())
        };
        for arrival in arrivals {
            // One that this rank could not make is made again when it is needed.
            drop(engine.arrive(arrival, &notices));
        }
        let answers = Answers {
            rank_shared: &self.rank_shared,
            group: self.id,
            me: Rank(self.me),
            next,
            is_settled: matches!(engine.shm, Sharing::Active(_)),
            ahead: AHEAD,
            before: "",
        };
        told.resize(engine.links.len(), Told::default());
        for ((peer, link), told) in (0..).zip(&mut engine.links).zip(told) {
            answers.give(self.job_rank(peer), link, told, cx);
        }
        for peer in engine.poll_renewals(cx) {
            self.connect(peer);
        }
        // Of failed operations, too, the rest for peers that have not read before.
        if engine.poll_flush(cx).is_pending() {
            tracing::trace!("a peer does not read yet");
        }
        drop(engine);
        if self.signals.lock().needs_attendant() {
            self.attend();
        }
        true
    }
}
