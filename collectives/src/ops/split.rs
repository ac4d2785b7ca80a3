//! Groups of some of the ranks.

use kolo_transport::ids::Rank;

use crate::communicator::Communicator;
use crate::error::CollectiveError;
use crate::group_id::GroupId;
use crate::shape::Mark;

impl Communicator {
    /// A communicator for some of this group's ranks, in the order in which they are given: the first one is rank 0 there.
    /// Ranks that are not named get `None`.
    ///
    /// Nothing is exchanged: links are made at first use. So the named ranks must all call it, as often and in the same
    /// order for the same ranks, and the others need not. A group has links, an order of operations and a progress of its
    /// own: groups work at once, on ranks that overlap, too. It has the settings that this group has now, and goes when its
    /// last clone does; it does not need this communicator any more.
    ///
    /// Ranks in arguments and results are those of the group; ranks in errors are those of the job
    /// ([`Communicator::members`]).
    ///
    /// ```
    /// # use kolo_collectives::{ReduceOp, run_local};
    /// # use kolo_collectives::Rank;
    /// run_local(3, |comm| {
    ///     let Some(ends) = comm.group(&[Rank(0), Rank(2)]).unwrap() else {
    ///         return;
    ///     };
    ///     let mut data = [comm.rank().0];
    ///     ends.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    ///     assert_eq!(data, [2]);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Invalid`] if no rank is named, one twice, or one that is not there.
    pub fn group(&self, ranks: &[Rank]) -> Result<Option<Self>, CollectiveError> {
        let invalid = |reason: String| Err(CollectiveError::Invalid { reason });
        if ranks.is_empty() {
            return invalid("a group of no ranks was asked for: it has at least one".to_owned());
        }
        let world = self.inner.world;
        let mut seen = vec![false; world as usize];
        for rank in ranks {
            match seen.get_mut(rank.index()) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return invalid(format!("a group names rank {rank} twice")),
                None => {
                    return invalid(format!(
                        "a group names rank {rank}: there are ranks 0 to {}",
                        world - 1
                    ));
                }
            }
        }
        let Some(me) = ranks.iter().position(|rank| *rank == self.rank()) else {
            return Ok(None);
        };
        let members: Vec<u32> = ranks
            .iter()
            .map(|rank| self.inner.job_rank(rank.0))
            .collect();
        let id = self.inner.next_id(&members);
        Ok(Some(Self {
            inner: self.inner.group(id, members, me as u32),
            options: self.options,
        }))
    }

    /// Splits the group: ranks of one color are together in a new one, ordered by key, and by rank where keys are equal.
    /// A rank without color is in none of them and gets `None`. All ranks call it; it is an operation.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// run_local(4, |comm| {
    ///     let me = comm.rank().0;
    ///     // Even and odd ranks, the highest first.
    ///     let half = comm.split(Some(me % 2), -i64::from(me)).unwrap().unwrap();
    ///     assert_eq!((half.world_size(), half.rank().0), (2, 1 - me / 2));
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>, CollectiveError> {
        let plain = self.with(crate::Options::new().marked(Mark::Split));
        let all = plain.all_gather(&[color.map_or(-1, i64::from), key])?;
        let Some(color) = color else {
            return Ok(None);
        };
        let mut members: Vec<(i64, u32)> = (0..)
            .zip(all.chunks_exact(2))
            .filter(|(_, theirs)| theirs[0] == i64::from(color))
            .map(|(rank, theirs)| (theirs[1], rank))
            .collect();
        members.sort_unstable();
        let ranks: Vec<Rank> = members.into_iter().map(|(_, rank)| Rank(rank)).collect();
        self.group(&ranks)
    }

    /// The ranks of this host, as [`Communicator::layout`] says, in rank order. A new group at every call.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn local(&self) -> Result<Self, CollectiveError> {
        let layout = self.layout();
        let host = layout.host_of(self.inner.me);
        let ranks: Vec<Rank> = layout.ranks_on(host).iter().copied().map(Rank).collect();
        self.own_group(&ranks)
    }

    /// The ranks that have this rank's place on their hosts, host by host, as [`Communicator::layout`] says. A new group at
    /// every call.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn cross(&self) -> Result<Self, CollectiveError> {
        let layout = self.layout();
        let place = layout.local_of(self.inner.me) as usize;
        let ranks: Vec<Rank> = (0..layout.hosts())
            .filter_map(|host| layout.ranks_on(host).get(place).copied())
            .map(Rank)
            .collect();
        self.own_group(&ranks)
    }

    fn own_group(&self, ranks: &[Rank]) -> Result<Self, CollectiveError> {
        self.group(ranks)?.ok_or_else(|| CollectiveError::Invalid {
            reason: format!("rank {} is not where its layout says", self.inner.me),
        })
    }

    /// This group's members by their ranks in the job, in the order of their ranks here.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// # use kolo_collectives::Rank;
    /// run_local(3, |comm| {
    ///     let even = comm.split(Some(comm.rank().0 % 2), 0).unwrap().unwrap();
    ///     let expected = if comm.rank().0 % 2 == 0 { vec![Rank(0), Rank(2)] } else { vec![Rank(1)] };
    ///     assert_eq!(even.members(), expected);
    ///     assert_eq!(even.rank_of(comm.rank()), Some(even.rank()));
    ///     assert_eq!(even.rank_of(Rank(7)), None);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    pub fn members(&self) -> Vec<Rank> {
        (0..self.inner.world)
            .map(|member| Rank(self.inner.job_rank(member)))
            .collect()
    }

    /// The rank that a rank of the job has here, if it is a member.
    pub fn rank_of(&self, job_rank: Rank) -> Option<Rank> {
        self.inner.position(job_rank.0).map(Rank)
    }

    /// Which group this is, the same on all its members; [`GroupId::WORLD`] for all ranks.
    pub fn group_id(&self) -> GroupId {
        self.inner.id
    }
}
