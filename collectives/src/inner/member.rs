//! A communicator as one of the groups of its rank: what comes to it from outside.

use std::sync::Arc;
use std::time::Instant;

use kolo_transport::ids::{CallId, Rank};

use super::Inner;
use crate::cause::Cause;
use crate::engine::notice;
use crate::group::{GroupId, Member, Saying};
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

    fn lost_elsewhere(self: Arc<Self>, rank: u32, reason: &str) -> Option<Saying> {
        const OF_TWO: u32 = 2;
        let member = self.position(rank).filter(|_| self.world > OF_TWO)?;
        let frame = {
            let mut state = self.signals.lock();
            let tag = state.last_tag();
            let cause = Cause::LostElsewhere {
                rank: Rank(member),
                reason: reason.to_owned(),
            };
            let frame = notice(self.generation, tag, &cause);
            let is_said = matches!(&state.said_elsewhere, Some((of, after, _)) if (*of, *after) == (member, tag));
            (!is_said).then(|| {
                state.said_elsewhere = Some((member, tag, frame.clone()));
                frame
            })
        };
        if let Some(frame) = frame {
            if let Ok(mut engine) = self.engine.try_lock() {
                engine.notify_all(&frame);
            } else {
                // The operation that is under way says it.
                self.signals
                    .change(|state| state.unsaid.extend_from_slice(&frame));
            }
            // What does not go now, and what is left by an operation that ends at this moment.
            self.attend();
        }
        let mut words = None;
        // Who waits for that does not keep the group.
        let weak = Arc::downgrade(&self);
        Some(Box::new(move || {
            let Some(inner) = weak.upgrade() else {
                return true;
            };
            if !inner.signals.lock().unsaid.is_empty() {
                return false;
            }
            // An operation writes what it has taken at once.
            let Ok(mut engine) = inner.engine.try_lock() else {
                return true;
            };
            let words = words.get_or_insert_with(|| engine.last_words(Some(Rank(member))));
            engine.have_left(words)
        }))
    }

    fn revoke(self: Arc<Self>, reason: &str) {
        self.signals.change(|state| state.lost.revoke(reason));
    }

    fn rank_lost(self: Arc<Self>, rank: u32, reason: &str) {
        let Some(member) = self.position(rank) else {
            return;
        };
        let is_news = self.signals.change(|state| {
            if state.lost.revoked().is_some() {
                return false;
            }
            state.lost.add(member, reason);
            if state.gone_notices.contains_key(&member) {
                return false;
            }
            // Peers may wait for it in an operation that this rank never begins.
            let cause = Cause::Gone {
                rank: Rank(member),
                reason: reason.to_owned(),
            };
            let frame = notice(self.generation, state.next_tag(), &cause);
            state.gone_notices.insert(member, frame.clone());
            state.unsaid.extend_from_slice(&frame);
            true
        });
        if is_news && self.world > 1 {
            self.attend();
        }
    }
}
