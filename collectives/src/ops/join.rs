//! Ranks that run out of data.

use std::pin::pin;
use std::time::Instant;

use kolo_transport::ids::Rank;

use super::forms::or_refuse;
use super::{invalid, total};
use crate::blocking::{Alarm, SleepAlarm};
use crate::communicator::Communicator;
use crate::driver::engine::Engine;
use crate::error::CollectiveError;
use crate::group_core::OpGuard;
use crate::negotiation::Negotiation;
use crate::operation::{Operation, OperationKind, Tag};
use crate::shape::Mark;

/// What came of a number that a rank without data took part in.
pub(crate) enum Followed {
    /// All ranks are out of data. Who said so last.
    AllJoined(Rank),
    /// Another operation, or a part of one, with what this rank may give to it; whether more parts follow.
    Done { has_more: bool },
}

impl Communicator {
    /// This rank has no more data: it takes part in what the others do, until all have called `join`. Returns the rank
    /// that called it last (the one that had done most operations; of several the highest).
    ///
    /// | the others do | this rank gives |
    /// |---|---|
    /// | all-reduce, reduce, reduce-scatter | the neutral element of the operator; an average still divides by the world size |
    /// | gathers with counts, also of objects | nothing: a count of 0 |
    /// | broadcast, also of objects, barrier | what a rank that is not the root gives |
    /// | all others, and those with this rank as root | it refuses: the operation fails on all ranks, and they may go on |
    ///
    /// In [named](Communicator::named) operations it takes part as well, until it ends, in whatever way.
    ///
    /// ```
    /// # use kolo_collectives::{ReduceOp, run_local};
    /// # use kolo_collectives::Rank;
    /// run_local(2, |comm| {
    ///     // Rank 1 has a batch more than rank 0.
    ///     for _ in 0..=comm.rank().0 {
    ///         comm.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap();
    ///     }
    ///     assert_eq!(comm.join(), Ok(Rank(1)));
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`] if this rank can't go on: another one is lost or late (each of the others' operations has the
    /// [time limit](Communicator::timeout) anew), or the call was aborted. Operations that only fail are the others'
    /// affair.
    pub fn join(&self) -> Result<Rank, CollectiveError> {
        let next = self.inner.signals.lock().next_tag();
        // However this ends, it is over for named operations, too.
        let joined = Negotiation::of(&self.inner).join(next);
        let (last, tag) = self.join_in_order()?;
        joined.with_all(tag);
        Ok(last)
    }

    /// Returns who joined last, and in which operation that was found.
    fn join_in_order(&self) -> Result<(Rank, Tag), CollectiveError> {
        self.in_turn(OperationKind::AllGather, async |alarm, turn, mut tag| {
            let first = tag;
            loop {
                match self.follow(alarm, turn, tag, first.operation).await {
                    Ok(Followed::AllJoined(last)) => return Ok((last, tag)),
                    Ok(Followed::Done { has_more: true }) => {
                        tag = tag.next_part();
                        turn.renew();
                        continue;
                    }
                    Ok(Followed::Done { .. })
                    | Err(
                        CollectiveError::Mismatch { .. }
                        | CollectiveError::Invalid { .. }
                        | CollectiveError::PeerFailed { .. }
                        | CollectiveError::PeerLeft { .. },
                    ) if turn.call_goes_on(first.call) => {}
                    Ok(Followed::Done { .. }) => {
                        return Err(CollectiveError::Aborted {
                            reason: format!("join: call {} has ended", first.call),
                        });
                    }
                    Err(error) => return Err(error),
                }
                turn.renew();
                tag = turn.next_number();
            }
        })
    }

    /// Takes part in the next operation, whichever it is.
    pub(crate) fn follow_one(&self) -> Result<(), CollectiveError> {
        self.in_turn(OperationKind::AllGather, async |alarm, turn, mut tag| {
            loop {
                let followed = self.follow(alarm, turn, tag, tag.operation);
                let Followed::Done { has_more: true } = followed.await? else {
                    return Ok(());
                };
                tag = tag.next_part();
                turn.renew();
            }
        })
    }

    /// Does not take part in an operation, and tells the others.
    pub(crate) fn give_up(&self, tag: Tag, error: CollectiveError) {
        let given_up =
            Self::blocking(async |alarm, started| self.refuse(alarm, started, tag, error).await);
        log_unsaid(given_up);
    }

    /// As [`Communicator::give_up`], beside what this thread does, which may be the only one that reads the links.
    pub(crate) fn give_up_meanwhile(self, tag: Tag, error: CollectiveError) {
        let runtime = self.inner.rank_shared.handle.clone();
        runtime.spawn(async move {
            let sleep = pin!(self.inner.sleep());
            let (mut alarm, started) = (SleepAlarm(sleep), Instant::now());
            let refused = self.refuse(&mut alarm, started, tag, error);
            log_unsaid(refused.await);
        });
    }

    async fn refuse<A: Alarm>(
        &self,
        alarm: &mut A,
        started: Instant,
        tag: Tag,
        error: CollectiveError,
    ) -> Result<(), CollectiveError> {
        let mut turn = self
            .inner
            .turn_without_number(alarm, started, OperationKind::Barrier.name())
            .await?;
        // Peers that have not heard of a loss yet name the lost rank, and not this one.
        let obstacle = self.inner.signals.lock().obstacle(tag);
        let obstacle = obstacle.filter(|error| !matches!(error, CollectiveError::Aborted { .. }));
        turn.tell_refused(tag, obstacle.unwrap_or(error));
        Ok(())
    }

    /// Takes part in one operation, whichever it is. `since` is the number at which this rank ran out of data.
    pub(crate) async fn follow<A: Alarm>(
        &self,
        alarm: &mut A,
        turn: &mut OpGuard<'_>,
        tag: Tag,
        since: u64,
    ) -> Result<Followed, CollectiveError> {
        let me = self.inner.me;
        let stamp = [since.min(u64::from(u32::MAX)) << 32 | u64::from(me)];
        let load = |engine: &mut Engine, operation: &Operation| {
            engine.load(operation, bytemuck::cast_slice(&stamp));
        };
        let learned = turn.run_with(alarm, tag, Operation::JOIN, load).await?;
        let Some(asked) = learned else {
            let mut stamps = vec![0_u64; self.world()];
            turn.store(&mut stamps);
            let last = stamps.into_iter().max().unwrap_or(0);
            return Ok(Followed::AllJoined(Rank(last as u32)));
        };
        or_refuse(turn, tag, self.may_follow(&asked))?;
        let varcount = matches!(
            asked.kind,
            OperationKind::AllGatherVarcount | OperationKind::GatherVarcount
        );
        if varcount && !turn.engine().is_share_empty(asked.count) {
            let reason = format!("{asked}: its lengths are not those that rank {me} heard of");
            return Err(turn.refuse(tag, invalid(reason)));
        }
        // That not all have data is known to all by now, so it goes over the links.
        turn.run_over_links(alarm, tag, asked, Engine::load_neutral)
            .await?;
        let is_lengths = matches!(
            asked.kind,
            OperationKind::AllGatherCounts | OperationKind::AllGather
        );
        if is_lengths {
            // Several of each rank if it gathers several buffers.
            let of_each = asked.count as usize;
            let mut lengths = vec![0_u64; self.world() * of_each];
            turn.store(&mut lengths);
            let counts = (0..self.world()).map(|rank| total(&lengths[rank * of_each..][..of_each]));
            turn.engine().set_offsets(counts);
        }
        // A peer may claim parts without end.
        let has_more = asked.has_more() && tag.part < u16::MAX;
        Ok(Followed::Done { has_more })
    }

    /// Whether a rank without data can take part in this operation.
    fn may_follow(&self, asked: &Operation) -> Result<(), CollectiveError> {
        let (me, wants_all) = (self.inner.me, asked.wants_all());
        if !wants_all && !asked.is_sound(self.inner.world) {
            let reason = format!("{asked}: it is asked for by a peer, and nobody can do that");
            return Err(invalid(reason));
        }
        let is_root = asked.root == Some(me);
        let possible = match asked.kind {
            OperationKind::AllReduce
            | OperationKind::ReduceScatter
            | OperationKind::Barrier
            | OperationKind::AllGatherCounts => true,
            OperationKind::Reduce
            | OperationKind::Broadcast
            | OperationKind::AllGatherVarcount
            | OperationKind::GatherVarcount => !is_root,
            // The lengths of a gather.
            OperationKind::AllGather => {
                matches!(Mark::of(asked.shape), Some(Mark::Lengths { .. })) && !is_root
            }
            _ => false,
        };
        if possible && !wants_all {
            return Ok(());
        }
        Err(invalid(format!(
            "{asked} is not possible: rank {me} has joined and has no data"
        )))
    }
}

fn log_unsaid(given_up: Result<(), CollectiveError>) {
    if let Err(error) = given_up {
        tracing::debug!(%error, "an operation was given up, and nobody could be told");
    }
}
