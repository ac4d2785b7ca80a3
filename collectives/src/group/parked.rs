//! Links for groups that this rank has not made yet. Their peers wait for it: they are told what it does instead.

use std::sync::Weak;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

use super::{Family, GroupId, State};
use crate::header::SENDER;
use crate::lane::LaneError;
use crate::link::Link;
use crate::listen::{Answers, Told};
use crate::operation::Tag;

/// Links that wait. More are refused: of all ranks, and of one rank (at least [`LEAST`]).
const MOST: usize = 4096;
const LEAST: usize = 64;

/// A request that was made before its link was there comes in this time.
const NEW: Duration = Duration::from_secs(1);

/// Most bytes of one that are held to look what its peer asks for.
const AHEAD: usize = 8 * 1024;

/// A link, or why there is none, for a group and from a rank.
pub(super) struct Parked {
    group: GroupId,
    rank: u32,
    serial: u64,
    since: Instant,
    /// `None` while its peer is being answered.
    link: Option<Result<Box<Link>, LaneError>>,
    told: Told,
    /// Who answers.
    task: Option<AbortHandle>,
}

impl Parked {
    /// Whether it is a link that has not ended.
    fn is_up(&self) -> bool {
        match &self.link {
            Some(Ok(link)) => !link.has_ended(),
            Some(Err(_)) => false,
            // Its peer is being answered.
            None => true,
        }
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

/// Where links wait for their groups.
#[derive(Default)]
pub(super) struct Room {
    parked: Vec<Parked>,
    next: u64,
}

impl Room {
    /// Whether there is room for one more link of a rank, of which so many are being made.
    pub(super) fn check(
        &mut self,
        (me, world): (u32, u32),
        rank: u32,
        coming: usize,
    ) -> Result<(), LaneError> {
        let share = (MOST / world as usize).max(LEAST);
        let count = |room: &Self| {
            let of_rank = room.parked.iter().filter(|parked| parked.rank == rank);
            (room.parked.len(), of_rank.count() + coming)
        };
        let fits = |(all, mine): (usize, usize)| all < MOST.max(share) && mine < share;
        if fits(count(self)) {
            return Ok(());
        }
        // Whoever has ended it may have given the group up.
        self.parked.retain(Parked::is_up);
        let (all, mine) = count(self);
        if fits((all, mine)) {
            return Ok(());
        }
        Err(LaneError::Refused {
            reason: format!(
                "rank {me} has {all} links already that wait for groups which it has not made, {mine} of them from rank \
                 {rank}"
            ),
        })
    }

    /// Keeps a link in place of one that waits already; a link counts more than that there is none. Returns its number.
    pub(super) fn park(
        &mut self,
        ranks: (u32, u32),
        (group, rank): (GroupId, u32),
        link: Result<Box<Link>, LaneError>,
    ) -> Result<Option<u64>, LaneError> {
        if link.is_err() && self.has_link(group, rank) {
            return Ok(None);
        }
        self.forget(group, rank);
        self.check(ranks, rank, 0)?;
        let serial = self.next;
        self.next += 1;
        self.parked.push(Parked {
            group,
            rank,
            serial,
            since: Instant::now(),
            link: Some(link),
            told: Told::default(),
            task: None,
        });
        Ok(Some(serial))
    }

    /// This task answers the peer of a link.
    pub(super) fn attended(&mut self, serial: u64, task: AbortHandle) {
        match self.find(serial) {
            Some(parked) => parked.task = Some(task),
            None => task.abort(),
        }
    }

    /// What waits for a group goes there. Links whose peers are being answered come right after that.
    pub(super) fn take(&mut self, group: GroupId) -> Vec<(u32, Result<Box<Link>, LaneError>)> {
        let is_here = |parked: &mut Parked| parked.group == group && parked.link.is_some();
        self.parked
            .extract_if(.., is_here)
            .filter_map(|mut parked| Some((parked.rank, parked.link.take()?)))
            .collect()
    }

    /// The ranks whose links wait for a group.
    pub(super) fn ranks_of(&self, group: GroupId) -> impl Iterator<Item = u32> {
        let of_group = self
            .parked
            .iter()
            .filter(move |parked| parked.group == group);
        of_group.map(|parked| parked.rank)
    }

    /// There is another link.
    pub(super) fn forget(&mut self, group: GroupId, rank: u32) {
        self.parked
            .retain(|parked| (parked.group, parked.rank) != (group, rank));
    }

    /// Whether a link from this rank waits, and has not ended.
    pub(super) fn has_link(&self, group: GroupId, rank: u32) -> bool {
        self.parked
            .iter()
            .any(|parked| (parked.group, parked.rank) == (group, rank) && parked.is_up())
    }

    /// As [`Room::has_link`], one that has just come.
    pub(super) fn has_new_link(&self, group: GroupId, rank: u32) -> bool {
        let is_it = |parked: &Parked| (parked.group, parked.rank) == (group, rank);
        let is_new = |parked: &Parked| parked.is_up() && parked.since.elapsed() < NEW;
        (self.parked.iter()).any(|parked| is_it(parked) && is_new(parked))
    }

    /// The groups for which links wait, and from whom.
    pub(super) fn wanted(&self) -> Vec<(GroupId, u32)> {
        let places = self.parked.iter();
        places.map(|parked| (parked.group, parked.rank)).collect()
    }

    fn find(&mut self, serial: u64) -> Option<&mut Parked> {
        self.parked
            .iter_mut()
            .find(|parked| parked.serial == serial)
    }
}

impl Family {
    /// Answers the peer of a link until the group is made. Ready when there is nothing to be answered any more.
    fn poll_answer(&self, serial: u64, cx: &mut Context<'_>) -> Poll<()> {
        let (group, rank, mut link, mut told) = {
            let mut state = self.lock();
            let Some(parked) = state.room.find(serial) else {
                return Poll::Ready(());
            };
            match parked.link.take() {
                Some(Ok(link)) => (parked.group, parked.rank, link, parked.told),
                other => {
                    parked.link = other;
                    return Poll::Ready(());
                }
            }
        };
        let answers = Answers {
            family: self,
            group,
            me: SENDER,
            next: Tag::default(),
            is_settled: false,
            ahead: AHEAD,
            before: "it has not made this group; ",
        };
        answers.give(rank, &mut link, &mut told, cx);
        if let Poll::Ready(Err(error)) = link.poll_backlog(cx) {
            // What the peer said before is for the group, which also finds the end.
            link.write_error = Some(error.to_string());
        }
        // It may wait for long, and nothing more will come.
        link.let_go();
        let member = {
            let mut state = self.lock();
            let is_gone = state.gone.contains(&group);
            let State { room, members, .. } = &mut *state;
            let Some(parked) = room.find(serial) else {
                // A newer one has come.
                return Poll::Ready(());
            };
            // The last to know a group must not let it go while the state is locked: it leaves that.
            let Some(member) = members.get(&group).and_then(Weak::upgrade) else {
                (parked.link, parked.told) = (Some(Ok(link)), told);
                if is_gone {
                    room.forget(group, rank);
                    return Poll::Ready(());
                }
                return Poll::Pending;
            };
            room.forget(group, rank);
            member
        };
        if let Err(error) = member.lane(rank, Ok(link), true) {
            tracing::debug!(rank, %error, "a link that came early is of no use");
        }
        Poll::Ready(())
    }
}

/// Answers on a link that waits.
pub(super) async fn attend(family: Weak<Family>, serial: u64) {
    std::future::poll_fn(|cx| match family.upgrade() {
        Some(family) => family.poll_answer(serial, cx),
        None => Poll::Ready(()),
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::MemoryLane;

    fn link() -> Box<Link> {
        let (lane, _) = MemoryLane::pair(8);
        Box::new(Link::over(Box::new(lane)))
    }

    /// One whose peer is there.
    fn held(far: &mut Vec<MemoryLane>) -> Link {
        let (lane, other) = MemoryLane::pair(8);
        far.push(other);
        Link::over(Box::new(lane))
    }

    fn none() -> Result<Box<Link>, LaneError> {
        let reason = "it can't be made".to_owned();
        Err(LaneError::Unreachable { reason })
    }

    #[test]
    fn the_last_link_of_a_rank_waits_and_one_counts_more_than_none() {
        let mut room = Room::default();
        let mut park = |group, link| room.park((0, 3), (GroupId(group), 1), link).unwrap();
        assert_eq!(park(7, none()), Some(0));
        assert_eq!(park(7, Ok(link())), Some(1));
        assert_eq!(park(7, none()), None);
        assert_eq!(park(7, Ok(link())), Some(2));
        assert_eq!(park(8, Ok(link())), Some(3));
        assert!(room.has_link(GroupId(7), 1) && !room.has_link(GroupId(7), 2));
        assert!(room.find(1).is_none());
        let taken = room.take(GroupId(7));
        assert!(matches!(&taken[..], [(1, Ok(_))]));
        assert!(!room.has_link(GroupId(7), 1) && room.has_link(GroupId(8), 1));
        room.forget(GroupId(8), 1);
        assert!(room.take(GroupId(8)).is_empty());
    }

    /// Whoever has made the group takes it in when the answer is written.
    #[test]
    fn a_link_whose_peer_is_being_answered_is_not_given_away() {
        let mut room = Room::default();
        let serial = room
            .park((0, 2), (GroupId(7), 1), Ok(link()))
            .unwrap()
            .unwrap();
        let link = room.find(serial).unwrap().link.take();
        assert!(room.has_link(GroupId(7), 1));
        assert!(room.take(GroupId(7)).is_empty());
        // It is not to be made again.
        assert_eq!(room.ranks_of(GroupId(7)).collect::<Vec<_>>(), [1]);
        assert_eq!(room.ranks_of(GroupId(8)).count(), 0);
        room.find(serial).unwrap().link = link;
        assert_eq!(room.take(GroupId(7)).len(), 1);
    }

    #[test]
    fn a_rank_has_its_share_of_the_room() {
        for (world, share) in [(2, MOST / 2), (1 << 16, LEAST)] {
            let (mut room, mut far) = (Room::default(), Vec::new());
            for group in 0..share as u64 {
                let link = Ok(Box::new(held(&mut far)));
                room.park((0, world), (GroupId(group), 1), link).unwrap();
            }
            let error = room.check((0, world), 1, 0).unwrap_err();
            assert!(matches!(error, LaneError::Refused { .. }), "{error}");
            assert!(error.to_string().contains("from rank 1"), "{error}");
            room.check((0, world), 2, 0).unwrap();
            assert!(room.check((0, world), 2, share).is_err());
            // One takes the place of another one, and of one that is none any more.
            let link = Ok(Box::new(held(&mut far)));
            room.park((0, world), (GroupId(0), 1), link).unwrap();
            room.find(share as u64).unwrap().link = Some(none());
            room.check((0, world), 1, 0).unwrap();
        }
    }
}
