//! The reserved group as one of the groups of its rank: what comes to it from outside.

use std::sync::Arc;
use std::time::Instant;

use kolo_transport::ids::{CallId, Rank};

use super::{Command, Negotiation, SHOWN};
use crate::error::CollectiveError;
use crate::lane::LaneError;
use crate::link::Link;
use crate::operation::Tag;
use crate::rank_shared::{GroupId, Member};

impl Member for Negotiation {
    fn lane(
        self: Arc<Self>,
        rank: u32,
        lane: Result<Box<Link>, LaneError>,
        _theirs: bool,
    ) -> Result<(), LaneError> {
        let Some(member) = self.linked(rank) else {
            let own = self.job_rank(self.me);
            return Err(LaneError::Refused {
                reason: format!("rank {rank} has no link for named operations to rank {own}"),
            });
        };
        let lane = lane.and_then(|link| {
            link.into_lane().ok_or_else(|| LaneError::Unreachable {
                reason: "its link for named operations ended before this rank had any".to_owned(),
            })
        });
        self.tell(Command::Arrived { member, lane });
        Ok(())
    }

    fn connecting(&self, rank: u32) {
        if self.linked(rank).is_some() {
            self.tell(Command::Connecting);
        }
    }

    fn not_asked(self: Arc<Self>, rank: u32, error: LaneError) {
        if let Some(member) = self.linked(rank) {
            self.tell(Command::NotAsked { member, error });
        }
    }

    fn requested(self: Arc<Self>, rank: u32) {
        if self.linked(rank).is_some() {
            self.tell(Command::Requested);
        }
    }

    /// Messages have no numbers.
    fn has_yet_to_begin(&self, _tag: Tag) -> bool {
        false
    }

    fn make_child(self: Arc<Self>, _group: GroupId, _rank: u32) {}

    fn waits(&self) -> Option<(Instant, String)> {
        let state = self.lock();
        let pending = state.pending.iter();
        let ((_, name), first) = pending.min_by_key(|(_, pending)| pending.started)?;
        let more = match state.pending.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let name: String = name.chars().take(SHOWN).collect();
        let text = format!("{} named `{name}`{more}", first.operation);
        Some((first.started, text))
    }

    fn begin_call(self: Arc<Self>, call: CallId) {
        let old = {
            let mut state = self.lock();
            state.failed_call = None;
            state.joining.begin_call(call.0);
            std::mem::replace(&mut state.call, call.0)
        };
        if old == call.0 {
            return;
        }
        let reason = format!("call {call} has begun");
        self.end_calls(call.0, reason, |rank, reason| CollectiveError::PeerLeft {
            rank,
            reason,
        });
    }

    fn abort_call(self: Arc<Self>, call: u64, reason: &str) {
        {
            let mut state = self.lock();
            if state.call != call || state.failed_call.is_some() {
                return;
            }
            let reason = reason.to_owned();
            state.failed_call = Some((call, CollectiveError::Aborted { reason }));
        }
        let reason = reason.to_owned();
        self.end_calls(call + 1, reason, |rank, reason| {
            CollectiveError::PeerFailed {
                rank,
                call: CallId(call),
                reason,
            }
        });
    }

    fn revoke(self: Arc<Self>, reason: &str) {
        let error = CollectiveError::Revoked {
            reason: reason.to_owned(),
        };
        self.give_up(&error);
        self.tell(Command::Revoked(error));
    }

    fn rank_lost(self: Arc<Self>, rank: u32, reason: &str) {
        self.lose(rank, reason);
    }
}

impl Negotiation {
    /// A rank (one of all) is lost: nothing with a name works any more, if the rank is a member.
    pub(super) fn lose(&self, rank: u32, reason: &str) {
        let Some(member) = self.position(rank) else {
            return;
        };
        let lost = |rank| CollectiveError::PeerLost {
            rank: Rank(rank),
            reason: reason.to_owned(),
        };
        self.give_up(&lost(rank));
        self.tell(Command::Lost(lost(member)));
    }

    /// Calls before this one are over on this rank, for this reason. The others are told the cause.
    fn end_calls(
        &self,
        before: u64,
        reason: String,
        cause: impl FnOnce(Rank, String) -> CollectiveError,
    ) {
        let cause = cause(Rank(self.me), reason.clone());
        let error = CollectiveError::Aborted { reason };
        self.fail_with(self.take_before(before), &error);
        self.tell(Command::Over {
            before,
            cause,
            error,
        });
    }
}
