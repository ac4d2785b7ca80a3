//! One rank's state becomes that of all.

use kolo_collectives::{CollectiveError, Communicator, Rank};

use super::StateError;
use super::parts::Elastic;
use super::snapshot::CommitId;
use super::state::State;
use crate::Context;

/// The ranks at the beginning of a generation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Meeting {
    /// The lowest rank that has the last commit.
    root: Rank,
    last: CommitId,
    /// Some rank has no commit, or another one.
    differ: bool,
    /// Some rank was in the loop before.
    pub(super) resumes: bool,
}

/// What a rank says of itself, and the number of words for that.
const WORDS: usize = 3;

impl Meeting {
    /// From what each rank has said.
    fn of(said: &[u64]) -> Self {
        let (ranks, _) = said.as_chunks::<WORDS>();
        let ids = || {
            ranks.iter().map(|[generation, number, _]| CommitId {
                generation: *generation,
                number: *number,
            })
        };
        let last = ids().max().unwrap_or_default();
        let root = ids().position(|id| id == last).unwrap_or_default();
        Self {
            root: Rank(root as u32),
            last,
            differ: last.number == 0 || ids().any(|id| id != last),
            resumes: ranks.iter().any(|[_, _, resumes]| *resumes == 1),
        }
    }
}

impl<T: Elastic> State<T> {
    /// Gives the state of one rank to all, and commits it. All ranks must call this at the same place: at the start of a loop, say, so that
    /// all begin with the first values of rank 0.
    ///
    /// The state is that of the lowest rank which has the latest commit: rank 0, if all have committed equally often. So a rank that
    /// is new never passes its first values on to those that have worked already. What that rank has done since its commit is
    /// sent, too. If no rank has a commit, rank 0 takes up its newest checkpoint first: see [`Checkpoints`](super::Checkpoints).
    ///
    /// Values travel in one message, buffers one by one over the data plane, into the memory of the next commit. The state of this
    /// rank changes when all has come.
    ///
    /// # Errors
    ///
    /// [`StateError::Differs`] on all ranks, with what is wrong where, if the parts do not fit those of that rank, or rank 0 refuses its
    /// checkpoints;
    /// [`StateError::Collective`] if a rank is lost, late or failed. The state and its last commit are as before then.
    pub fn sync(&mut self, ctx: &Context) -> Result<(), StateError> {
        let (meeting, resumed) = self.gather(ctx, false)?;
        self.receive(ctx, &meeting, resumed)
    }

    /// Begins a generation: all ranks get the last commit, if some do not have it. Whether they do is told by all of
    /// them together: a rank that skipped this alone would leave new ranks waiting (Horovod's #3494).
    pub(crate) fn begin(&mut self, ctx: &Context, resumes: bool) -> Result<Meeting, StateError> {
        let (meeting, resumed) = self.gather(ctx, resumes)?;
        if meeting.differ {
            self.receive(ctx, &meeting, resumed)?;
        }
        Ok(meeting)
    }

    /// Hears which commits the ranks have. If none has the last one, rank 0 looks for a checkpoint first. The inner result is that of
    /// this rank alone.
    fn gather(
        &mut self,
        ctx: &Context,
        resumes: bool,
    ) -> Result<(Meeting, Result<(), StateError>), StateError> {
        let meeting = self.meet(ctx, resumes)?;
        // One that keeps no checkpoints leaves the restore to one that does.
        let must = self.keeper.is_some() && ctx.take_restore();
        if meeting.last.number > 0 && !must {
            return Ok((meeting, Ok(())));
        }
        let resumed = match ctx.rank() {
            0 => self.resume(ctx, must),
            _ => Ok(()),
        };
        let mut meeting = self.meet(ctx, resumes)?;
        // All ranks hear whether that went well.
        meeting.differ = true;
        Ok((meeting, resumed))
    }

    fn meet(&self, ctx: &Context, resumes: bool) -> Result<Meeting, StateError> {
        let CommitId { generation, number } = self.id;
        let said: [u64; WORDS] = [generation, number, u64::from(resumes)];
        Ok(Meeting::of(&ctx.comm().all_gather(&said)?))
    }

    fn receive(
        &mut self,
        ctx: &Context,
        meeting: &Meeting,
        resumed: Result<(), StateError>,
    ) -> Result<(), StateError> {
        let (comm, root) = (ctx.comm(), meeting.root);
        let complaint = self.share_values(comm, root, resumed)?.err();
        let complaint = complaint.map(|error| error.to_string());
        // A rank that does not go on says so: the others would wait for it.
        let complaints: Vec<(Rank, String)> = (0..)
            .zip(comm.all_gather_object(&complaint)?)
            .filter_map(|(rank, complaint)| Some((Rank(rank), complaint?)))
            .collect();
        if !complaints.is_empty() {
            return Err(StateError::Differs { complaints });
        }
        for buffer in &mut self.spare().buffers {
            buffer.broadcast(comm, root)?;
        }
        if let Some(keeper) = &mut self.keeper {
            keeper.synced();
        }
        self.keep(ctx, meeting.last.number + 1);
        ctx.received(meeting.last.number + 1, meeting.last.number > 0);
        if comm.rank() == root {
            Ok(())
        } else {
            self.load_committed()
        }
    }

    /// Copies the state of the root. Sends its parts and values to all, and looks whether they fit there. The inner result is that
    /// of this rank alone.
    fn share_values(
        &mut self,
        comm: &Communicator,
        root: Rank,
        resumed: Result<(), StateError>,
    ) -> Result<Result<(), StateError>, CollectiveError> {
        let mut message = Vec::new();
        let mut lengths = [0_u64; 2];
        if comm.rank() == root {
            if let Err(error) = resumed.and_then(|()| self.copy_live()) {
                // Two lengths of 0 say that nothing comes; the complaint says why.
                comm.broadcast(&mut lengths, root)?;
                return Ok(Err(error));
            }
            let spare = self.spare();
            message = spare.manifest()?;
            lengths = [message.len(), spare.values.len()].map(|length| length as u64);
            message.extend_from_slice(&spare.values);
            comm.broadcast(&mut lengths, root)?;
            comm.broadcast(&mut message, root)?;
            return Ok(Ok(()));
        }
        comm.broadcast(&mut lengths, root)?;
        if lengths == [0; 2] {
            return Ok(resumed);
        }
        let length = usize::try_from(lengths[0].saturating_add(lengths[1])).unwrap_or(usize::MAX);
        if message.try_reserve_exact(length).is_err() {
            let reason =
                format!("the values of a state take {length} bytes: more than there is memory for");
            return Err(CollectiveError::Invalid { reason });
        }
        message.resize(length, 0);
        comm.broadcast(&mut message, root)?;
        let (manifest, values) = message.split_at(lengths[0] as usize);
        self.spare().take_message(manifest, values, root)?;
        Ok(resumed.and_then(|()| self.check_spare(&format!("on rank {root}"))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meeting(said: &[[u64; WORDS]]) -> Meeting {
        Meeting::of(said.as_flattened())
    }

    #[test]
    fn the_lowest_rank_with_the_latest_commit_gives_its_state() {
        let root = |said| meeting(said).root;
        // At the start; in the middle; with a new rank 0.
        assert_eq!(root(&[[0, 0, 0], [0, 0, 0]]), Rank(0));
        assert_eq!(root(&[[1, 5, 1], [1, 5, 1]]), Rank(0));
        assert_eq!(root(&[[0, 0, 0], [1, 5, 1]]), Rank(1));
        // A commit that only some ranks saw the end of: that one, for the ranks that did have gone on from there (E-1).
        assert_eq!(root(&[[1, 5, 1], [1, 6, 1], [1, 6, 1]]), Rank(1));
        // A later generation counts for more than a higher number.
        assert_eq!(root(&[[1, 9, 1], [2, 6, 1]]), Rank(1));
    }

    #[test]
    fn the_state_is_sent_if_any_rank_lacks_the_last_commit() {
        let sent = |said| meeting(said).differ;
        assert!(sent(&[[0, 0, 0], [0, 0, 0]]));
        assert!(sent(&[[1, 5, 1], [0, 0, 0]]));
        assert!(sent(&[[1, 5, 1], [1, 6, 1]]));
        assert!(sent(&[[1, 5, 1], [2, 5, 1]]));
        assert!(!sent(&[[1, 5, 1], [1, 5, 1]]));
        assert!(!sent(&[[1, 5, 1]]));
    }

    #[test]
    fn a_loop_is_resumed_if_any_rank_was_in_it() {
        assert!(!meeting(&[[0, 0, 0], [0, 0, 0]]).resumes);
        assert!(meeting(&[[1, 5, 1], [0, 0, 0]]).resumes);
        // A second loop of the same ranks begins anew, with a state of its own.
        assert!(!meeting(&[[3, 2, 0], [3, 2, 0]]).resumes);
    }
}
