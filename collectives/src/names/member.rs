//! Named operations as one of the groups of their rank: what comes to them from outside.

use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, channel};
use std::time::Instant;

use kolo_transport::ids::{CallId, Rank};

use super::loss::Loss;
use super::{Command, Names, SHOWN};
use crate::cause::Cause;
use crate::error::CollectiveError;
use crate::group::{GroupId, Member, Saying};
use crate::lane::LaneError;
use crate::link::Link;
use crate::operation::Tag;

impl Member for Names {
    fn lane(
        self: Arc<Self>,
        rank: u32,
        lane: Result<Box<Link>, LaneError>,
        _theirs: bool,
    ) -> Result<(), LaneError> {
        let Some(member) = self.linked(rank) else {
            return Err(LaneError::Refused {
                reason: format!(
                    "rank {rank} has no link for names to rank {}",
                    self.members[self.me as usize]
                ),
            });
        };
        let lane = lane.and_then(|link| {
            link.into_lane().ok_or_else(|| LaneError::Unreachable {
                reason: "its link for names ended before this rank had any".to_owned(),
            })
        });
        self.tell(Command::Arrived { rank: member, lane });
        Ok(())
    }

    fn connecting(&self, rank: u32) {
        if self.linked(rank).is_some() {
            self.tell(Command::Connecting);
        }
    }

    fn requested(self: Arc<Self>, rank: u32) {
        if self.linked(rank).is_some() {
            self.tell(Command::Requested);
        }
    }

    /// Names have no numbers.
    fn has_yet_to_begin(&self, _tag: Tag) -> bool {
        false
    }

    fn make_child(self: Arc<Self>, _group: GroupId, _rank: u32) {}

    fn waits(&self) -> Option<(Instant, String)> {
        let state = self.lock();
        let ((_, name), first) =
            (state.pending.iter()).min_by_key(|(_, pending)| pending.started)?;
        let more = match state.pending.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let name: String = name.chars().take(SHOWN).collect();
        Some((
            first.started,
            format!("{} named `{name}`{more}", first.operation),
        ))
    }

    fn begin_call(self: Arc<Self>, call: CallId) {
        let old = {
            let mut state = self.lock();
            state.over = None;
            state.joining.begin_call(call.0);
            std::mem::replace(&mut state.call, call.0)
        };
        if old == call.0 {
            return;
        }
        let reason = format!("call {call} has begun");
        let error = CollectiveError::Aborted {
            reason: reason.clone(),
        };
        self.fail_all(call.0, &error);
        self.tell(Command::Over {
            before: call.0,
            cause: Cause::Left {
                rank: Rank(self.me),
                reason,
            },
        });
    }

    fn abort_call(self: Arc<Self>, call: u64, reason: &str) {
        let own = CollectiveError::Aborted {
            reason: reason.to_owned(),
        };
        {
            let mut state = self.lock();
            if state.call != call || state.over.is_some() {
                return;
            }
            state.over = Some((call, own.clone()));
        }
        self.fail_all(call + 1, &own);
        self.tell(Command::Over {
            before: call + 1,
            cause: Cause::Failed {
                rank: Rank(self.me),
                reason: reason.to_owned(),
            },
        });
    }

    fn lost_elsewhere(self: Arc<Self>, rank: u32, reason: &str) -> Option<Saying> {
        let loss = Loss {
            rank: self.position(rank)?,
            reason: reason.to_owned(),
            for_good: false,
        };
        let (told, is_told) = channel();
        self.tell(Command::LostInTurn { loss, told });
        Some(Box::new(move || {
            is_told.try_recv() != Err(TryRecvError::Empty)
        }))
    }

    fn revoke(self: Arc<Self>, reason: &str) {
        let error = CollectiveError::Revoked {
            reason: reason.to_owned(),
        };
        let error = self.lock().lost.get_or_insert(error).clone();
        self.fail_all(u64::MAX, &error);
    }

    fn rank_lost(self: Arc<Self>, rank: u32, reason: &str) {
        if let Some(rank) = self.position(rank) {
            self.tell(Command::Lost(Loss {
                rank,
                reason: reason.to_owned(),
                for_good: true,
            }));
        }
    }
}
