//! Links for groups that this rank has not made yet. Their peers wait for it: they are told what it does instead.

use std::sync::Weak;
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::task::AbortHandle;

use super::listener::{Answers, Told};
use super::{GroupId, RankShared};
use crate::header::SENDER;
use crate::lane::LaneError;
use crate::link::Link;
use crate::operation::Tag;
use crate::times::NEW_LINK;

/// Links that wait. More are refused: of all ranks, and of one rank (at least [`LEAST`]).
const MOST: usize = 4096;
const LEAST: usize = 64;

/// Most bytes of one that are held to look what its peer asks for.
const AHEAD: usize = 8 * 1024;

/// A task that ends when this is dropped.
struct Attendant(AbortHandle);

impl Drop for Attendant {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A link for a group and from a rank, or why there is none.
struct EarlyLink {
    group: GroupId,
    rank: u32,
    serial: u64,
    since: Instant,
    link: Result<Box<Link>, LaneError>,
    told: Told,
    /// The task that answers.
    _task: Option<Attendant>,
}

impl EarlyLink {
    fn is_for(&self, group: GroupId, rank: u32) -> bool {
        (self.group, self.rank) == (group, rank)
    }

    /// Whether it is a link that has not ended.
    fn is_up(&self) -> bool {
        matches!(&self.link, Ok(link) if !link.has_ended())
    }
}

/// Where links wait for their groups.
#[derive(Default)]
pub(super) struct EarlyLinks {
    links: Vec<EarlyLink>,
    next: u64,
}

impl EarlyLinks {
    /// Whether there is room for one more link of a rank, of which so many are being made.
    pub(super) fn check(
        &mut self,
        (me, world): (u32, u32),
        rank: u32,
        coming: usize,
    ) -> Result<(), LaneError> {
        let share = (MOST / world as usize).max(LEAST);
        let count = |this: &Self| {
            let of_rank = this.links.iter().filter(|early| early.rank == rank);
            (this.links.len(), of_rank.count() + coming)
        };
        let fits = |(all, mine): (usize, usize)| all < MOST.max(share) && mine < share;
        if fits(count(self)) {
            return Ok(());
        }
        // A peer that has ended its link may have given the group up.
        self.links.retain(EarlyLink::is_up);
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

    /// Keeps a link in place of one that waits already; a link counts more than that there is none. `attend` starts a task that
    /// [answers](attend) on the link with this number.
    pub(super) fn put(
        &mut self,
        ranks: (u32, u32),
        (group, rank): (GroupId, u32),
        link: Result<Box<Link>, LaneError>,
        attend: impl FnOnce(u64) -> Option<AbortHandle>,
    ) -> Result<(), LaneError> {
        if link.is_err() && self.has_link(group, rank) {
            return Ok(());
        }
        self.links.retain(|early| !early.is_for(group, rank));
        self.check(ranks, rank, 0)?;
        let serial = self.next;
        self.next += 1;
        let task = if link.is_ok() { attend(serial) } else { None };
        self.links.push(EarlyLink {
            group,
            rank,
            serial,
            since: Instant::now(),
            link,
            told: Told::default(),
            _task: task.map(Attendant),
        });
        Ok(())
    }

    /// What waits for a group goes there.
    pub(super) fn take(&mut self, group: GroupId) -> Vec<(u32, Result<Box<Link>, LaneError>)> {
        let of_group = self.links.extract_if(.., |early| early.group == group);
        of_group.map(|early| (early.rank, early.link)).collect()
    }

    /// Whether a link from this rank waits, and has not ended.
    pub(super) fn has_link(&self, group: GroupId, rank: u32) -> bool {
        let is_it = |early: &EarlyLink| early.is_for(group, rank) && early.is_up();
        self.links.iter().any(is_it)
    }

    /// As [`EarlyLinks::has_link`], one that has just come.
    pub(super) fn has_new_link(&self, group: GroupId, rank: u32) -> bool {
        let is_new = |early: &EarlyLink| {
            early.is_for(group, rank) && early.is_up() && early.since.elapsed() < NEW_LINK
        };
        self.links.iter().any(is_new)
    }

    /// The groups for which links wait, and from whom.
    pub(super) fn wanted(&self) -> Vec<(GroupId, u32)> {
        let places = self.links.iter();
        places.map(|early| (early.group, early.rank)).collect()
    }
}

impl RankShared {
    /// Answers the peer of a link until the group is made. Ready when there is nothing to be answered any more.
    fn poll_answer(&self, serial: u64, cx: &mut Context<'_>) -> Poll<()> {
        let mut early_links = self.early_links();
        let mut links = early_links.links.iter_mut();
        let Some(early) = links.find(|early| early.serial == serial) else {
            return Poll::Ready(());
        };
        let Ok(link) = &mut early.link else {
            return Poll::Ready(());
        };
        let answers = Answers {
            rank_shared: self,
            group: early.group,
            me: SENDER,
            next: Tag::default(),
            is_settled: false,
            ahead: AHEAD,
            before: "it has not made this group; ",
        };
        answers.give(early.rank, link, &mut early.told, cx);
        if let Poll::Ready(Err(error)) = link.poll_backlog(cx) {
            // What the peer said before is for the group, which also finds the end.
            link.write_error = Some(error.to_string());
        }
        // It may wait for long, and nothing more will come.
        link.let_go();
        Poll::Pending
    }
}

/// Answers on a link that waits.
pub(super) async fn attend(rank_shared: Weak<RankShared>, serial: u64) {
    std::future::poll_fn(|cx| match rank_shared.upgrade() {
        Some(rank_shared) => rank_shared.poll_answer(serial, cx),
        None => Poll::Ready(()),
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::MemoryLane;

    /// A link whose peer is there.
    fn link(far: &mut Vec<MemoryLane>) -> Box<Link> {
        let (lane, other) = MemoryLane::pair(8);
        far.push(other);
        Box::new(Link::over(Box::new(lane)))
    }

    fn none() -> Result<Box<Link>, LaneError> {
        let reason = "it can't be made".to_owned();
        Err(LaneError::Unreachable { reason })
    }

    #[test]
    fn the_last_link_of_a_rank_waits_and_one_counts_more_than_none() {
        let (mut early, mut far) = (EarlyLinks::default(), Vec::new());
        let mut answered = Vec::new();
        for (group, link) in [
            (7, none()),
            (7, Ok(link(&mut far))),
            (7, none()),
            (7, Ok(link(&mut far))),
            (8, Ok(link(&mut far))),
        ] {
            let attend = |serial| {
                answered.push(serial);
                None
            };
            early
                .put((0, 3), (GroupId(group), 1), link, attend)
                .unwrap();
        }
        assert_eq!(answered, [1, 2, 3]);
        assert!(early.has_link(GroupId(7), 1) && !early.has_link(GroupId(7), 2));
        assert_eq!(early.wanted(), [(GroupId(7), 1), (GroupId(8), 1)]);
        assert!(matches!(&early.take(GroupId(7))[..], [(1, Ok(_))]));
        assert!(!early.has_link(GroupId(7), 1) && early.has_link(GroupId(8), 1));
    }

    #[test]
    fn a_rank_has_its_share_of_the_room() {
        for (world, share) in [(2, MOST / 2), (1 << 16, LEAST)] {
            let (mut early, mut far) = (EarlyLinks::default(), Vec::new());
            let mut put = |early: &mut EarlyLinks, group| {
                let link = Ok(link(&mut far));
                early.put((0, world), (GroupId(group), 1), link, |_| None)
            };
            for group in 0..share as u64 {
                put(&mut early, group).unwrap();
            }
            let error = early.check((0, world), 1, 0).unwrap_err();
            assert!(matches!(error, LaneError::Refused { .. }), "{error}");
            assert!(error.to_string().contains("from rank 1"), "{error}");
            early.check((0, world), 2, 0).unwrap();
            assert!(early.check((0, world), 2, share).is_err());
            // One takes the place of another one, and of one that is none any more.
            put(&mut early, 0).unwrap();
            early.links[0].link = none();
            early.check((0, world), 1, 0).unwrap();
        }
    }
}
