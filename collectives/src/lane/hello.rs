//! What the two sides of a new link say to each other before anything else.

use std::future::poll_fn;
use std::io::IoSlice;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use kolo_transport::ids::{Generation, JobId, Rank};

use super::{Lane, LaneError};
use crate::cause::cut;
use crate::group::GroupId;
use crate::header::{HEADER, Header, Refusal};

/// Who one side of a link is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkHello {
    /// Its job.
    pub job: JobId,
    /// Its generation.
    pub generation: Generation,
    /// Its rank among all ranks of the job.
    pub rank: Rank,
    /// The group that the link is for. Only what the side says counts that makes the link; the other one may not know of
    /// the group yet and says [`GroupId::WORLD`].
    pub group: GroupId,
    /// How many ranks the job has, as far as the side knows; 0 if it does not say it. Two sides that say it must say the same.
    pub world_size: u32,
}

impl LinkHello {
    /// A hello for a link of the group of all ranks, which says nothing of their number.
    #[must_use]
    pub fn new(job: JobId, generation: Generation, rank: Rank) -> Self {
        Self {
            job,
            generation,
            rank,
            group: GroupId::WORLD,
            world_size: 0,
        }
    }

    /// The same of a job with so many ranks.
    #[must_use]
    pub fn of_world(self, world_size: u32) -> Self {
        Self { world_size, ..self }
    }

    /// The same for a link of this group.
    #[must_use]
    pub fn of_group(self, group: GroupId) -> Self {
        Self { group, ..self }
    }
}

/// Says hello on a new link and checks the peer's: the same job, the same generation (G-1), another rank, and
/// the expected one if `peer` is given. Both sides call it; both learn whether the other agrees.
///
/// Returns the peer's hello. Not cancel safe: drop the lane if the future is dropped.
///
/// # Errors
///
/// [`LaneError`]; drop the lane then. [`LaneError::Timeout`] after `limit`.
///
/// # Panics
///
/// Outside a tokio runtime that has time enabled.
pub async fn greet<L: Lane + ?Sized>(
    lane: &mut L,
    own: &LinkHello,
    peer: Option<Rank>,
    limit: Duration,
) -> Result<LinkHello, LaneError> {
    exchange(lane, own, limit, |theirs| check(own, theirs, peer))
        .await
        .1
}

/// As [`greet`] for who takes a link. Also returns the peer's hello if it has come and is right, so that a link that fails after that
/// has a name.
pub(crate) async fn greet_any<L: Lane + ?Sized>(
    lane: &mut L,
    own: &LinkHello,
    limit: Duration,
) -> (Option<LinkHello>, Result<LinkHello, LaneError>) {
    exchange(lane, own, limit, |theirs| check(own, theirs, None)).await
}

/// As [`greet`], on a link that this side can't use: the peer is told that this rank has no descriptor left for `what`.
/// Returns the peer's hello if it was right, and the error that both sides have now, or another one if it did not come to that.
pub(crate) async fn excuse<L: Lane + ?Sized>(
    lane: &mut L,
    own: &LinkHello,
    peer: Option<Rank>,
    what: String,
    limit: Duration,
) -> (Option<LinkHello>, LaneError) {
    let error = LaneError::NoDescriptors {
        rank: own.rank,
        reason: what,
    };
    let judge = |theirs: &LinkHello| {
        check(own, theirs, peer)?;
        Err(error.clone())
    };
    match exchange(lane, own, limit, judge).await {
        (who, Err(error)) => (who, error),
        (who, Ok(_)) => (who, error),
    }
}

/// Returns what the peer said if it came to that and nothing is wrong with it, and whether both sides want the link.
async fn exchange<L: Lane + ?Sized>(
    lane: &mut L,
    own: &LinkHello,
    limit: Duration,
    judge: impl FnOnce(&LinkHello) -> Result<(), LaneError>,
) -> (Option<LinkHello>, Result<LinkHello, LaneError>) {
    let mut who = None;
    let said = tokio::time::timeout(limit, speak(lane, own, judge, &mut who)).await;
    let result = said.unwrap_or_else(|_| {
        Err(LaneError::Timeout {
            reason: format!("no hello came within {} s", limit.as_secs_f64()),
        })
    });
    (who, result)
}

async fn speak<L: Lane + ?Sized>(
    lane: &mut L,
    own: &LinkHello,
    judge: impl FnOnce(&LinkHello) -> Result<(), LaneError>,
    who: &mut Option<LinkHello>,
) -> Result<LinkHello, LaneError> {
    let hello = Header::Hello {
        job: own.job,
        generation: own.generation,
        rank: own.rank,
        group: own.group.0,
        world: own.world_size,
    };
    let mut out = hello.encode().to_vec();
    let theirs = match read_header(lane, &mut out).await? {
        Header::Hello {
            job,
            generation,
            rank,
            group,
            world,
        } => LinkHello {
            job,
            generation,
            rank,
            group: GroupId(group),
            world_size: world,
        },
        other => {
            return Err(LaneError::Protocol {
                reason: format!("a link begins with a hello, not with {other:?}"),
            });
        }
    };
    let verdict = judge(&theirs);
    match &verdict {
        Ok(()) => out.extend_from_slice(&Header::Welcome.encode()),
        Err(error) => {
            let (why, text) = match error {
                // The peer knows who says it.
                LaneError::NoDescriptors { reason, .. } => (Refusal::NoDescriptors, reason.clone()),
                LaneError::StaleGeneration { .. } => (Refusal::Stale, error.to_string()),
                _ => (Refusal::Other, error.to_string()),
            };
            let text = cut(&text);
            let refusal = Header::Refusal {
                why,
                length: text.len() as u32,
            };
            out.extend_from_slice(&refusal.encode());
            out.extend_from_slice(text.as_bytes());
        }
    }
    if matches!(verdict, Ok(()) | Err(LaneError::NoDescriptors { .. })) {
        *who = Some(theirs);
    }
    let answer = read_answer(lane, &mut out, theirs.rank).await;
    write(lane, &mut out).await;
    // What this side saw itself is the better reason.
    verdict.and(answer)?;
    let first = own.rank < theirs.rank;
    poll_fn(|cx| lane.poll_settle(cx, first)).await?;
    Ok(theirs)
}

async fn read_answer<L: Lane + ?Sized>(
    lane: &mut L,
    out: &mut Vec<u8>,
    rank: Rank,
) -> Result<(), LaneError> {
    match read_header(lane, out).await? {
        Header::Welcome => Ok(()),
        Header::Refusal { why, length } => {
            let mut text = vec![0; length as usize];
            read(lane, out, &mut text).await?;
            let reason = String::from_utf8_lossy(&text).into_owned();
            Err(match why {
                Refusal::Other => LaneError::Refused { reason },
                Refusal::Stale => LaneError::StaleGeneration {
                    theirs: None,
                    reason,
                },
                Refusal::NoDescriptors => LaneError::NoDescriptors { rank, reason },
            })
        }
        other => Err(LaneError::Protocol {
            reason: format!("a hello is answered with yes or no, not with {other:?}"),
        }),
    }
}

/// Whether this side wants the link. Pure.
fn check(own: &LinkHello, theirs: &LinkHello, peer: Option<Rank>) -> Result<(), LaneError> {
    if theirs.job != own.job {
        return Err(LaneError::Refused {
            reason: format!("rank {} of {} called {}", theirs.rank, theirs.job, own.job),
        });
    }
    if theirs.generation != own.generation {
        return Err(LaneError::StaleGeneration {
            theirs: Some(theirs.generation),
            reason: format!(
                "rank {} is in generation {}, rank {} in generation {}",
                theirs.rank, theirs.generation, own.rank, own.generation
            ),
        });
    }
    if ![0, own.world_size].contains(&theirs.world_size) && own.world_size != 0 {
        return Err(LaneError::Refused {
            reason: format!(
                "rank {} is one of {} ranks, and rank {} one of {}; give all ranks the same table or world size",
                theirs.rank, theirs.world_size, own.rank, own.world_size
            ),
        });
    }
    if theirs.rank == own.rank {
        return Err(LaneError::Refused {
            reason: format!("both sides say that they are rank {}", own.rank),
        });
    }
    match peer {
        Some(expected) if expected != theirs.rank => Err(LaneError::Refused {
            reason: format!("rank {} answered in place of rank {expected}", theirs.rank),
        }),
        _ => Ok(()),
    }
}

/// Writes some of `out` and takes it off. A peer that takes no more may have said why: that is read, so this is
/// no error.
fn poll_write<L: Lane + ?Sized>(lane: &mut L, cx: &mut Context<'_>, out: &mut Vec<u8>) -> Poll<()> {
    while !out.is_empty() {
        match ready!(lane.poll_write(cx, &[IoSlice::new(out)])) {
            Ok(count) => drop(out.drain(..count)),
            Err(_) => out.clear(),
        }
    }
    // An error is seen by the next read.
    lane.poll_flush(cx).map(|_| ())
}

async fn write<L: Lane + ?Sized>(lane: &mut L, out: &mut Vec<u8>) {
    poll_fn(|cx| poll_write(lane, cx, out)).await;
}

/// Fills `into`, and writes `out` meanwhile: both sides speak at once, and a lane may hold less than they say.
async fn read<L: Lane + ?Sized>(
    lane: &mut L,
    out: &mut Vec<u8>,
    mut into: &mut [u8],
) -> Result<(), LaneError> {
    while !into.is_empty() {
        let count = poll_fn(|cx| {
            // Ready or not, what counts is the read.
            let _written = poll_write(lane, cx, out);
            lane.poll_read(cx, into)
        })
        .await?;
        if count == 0 {
            return Err(LaneError::Ended {
                reason: "the peer closed it before it said who it is".to_owned(),
            });
        }
        into = &mut into[count..];
    }
    Ok(())
}

async fn read_header<L: Lane + ?Sized>(
    lane: &mut L,
    out: &mut Vec<u8>,
) -> Result<Header, LaneError> {
    let mut bytes = [0; HEADER];
    read(lane, out, &mut bytes).await?;
    Header::parse(&bytes).map_err(|error| LaneError::Protocol {
        reason: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::MemoryLane;

    const LIMIT: Duration = Duration::from_secs(20);

    fn hello(job: u64, generation: u64, rank: u32) -> LinkHello {
        LinkHello::new(JobId(job), Generation(generation), Rank(rank))
    }

    async fn meet(
        (a, expects): (LinkHello, Option<u32>),
        (b, also_expects): (LinkHello, Option<u32>),
    ) -> (Result<LinkHello, LaneError>, Result<LinkHello, LaneError>) {
        // A capacity of a few bytes: nothing may depend on a header going out in one write.
        let (mut one, mut two) = MemoryLane::pair(7);
        tokio::join!(
            greet(&mut one, &a, expects.map(Rank), LIMIT),
            greet(&mut two, &b, also_expects.map(Rank), LIMIT)
        )
    }

    #[tokio::test]
    async fn two_members_of_a_generation_learn_each_others_rank() {
        let caller = hello(1, 2, 5).of_group(GroupId(77));
        let (one, two) = meet((caller, Some(0)), (hello(1, 2, 0), None)).await;
        assert_eq!(one.unwrap().rank, Rank(0));
        let two = two.unwrap();
        assert_eq!((two.rank, two.group), (Rank(5), GroupId(77)));
    }

    #[tokio::test]
    async fn ranks_that_disagree_about_their_number_are_refused_on_both_sides() {
        let (two, three) = (hello(1, 2, 5).of_world(2), hello(1, 2, 0).of_world(3));
        let (one, other) = meet((two, Some(0)), (three, None)).await;
        for side in [one, other] {
            let error = side.unwrap_err().to_string();
            assert!(
                error.contains("one of 2") && error.contains("one of 3"),
                "{error}"
            );
        }
        // Who does not say it is not asked.
        for world in [0, 3] {
            let (one, other) = meet((hello(1, 2, 5).of_world(world), None), (three, None)).await;
            assert!(one.is_ok() && other.is_ok());
        }
    }

    #[tokio::test]
    async fn a_stale_generation_is_refused_on_both_sides() {
        let (one, two) = meet((hello(1, 2, 5), Some(0)), (hello(1, 3, 0), None)).await;
        for side in [one, two] {
            let error = side.unwrap_err();
            assert!(
                matches!(error, LaneError::StaleGeneration { .. }),
                "{error:?}"
            );
            let text = error.to_string();
            assert!(
                text.contains("generation 2") && text.contains("generation 3"),
                "{text}"
            );
        }
    }

    #[tokio::test]
    async fn another_job_or_rank_is_refused() {
        let (one, two) = meet((hello(1, 2, 5), None), (hello(9, 2, 0), None)).await;
        assert!(matches!(one, Err(LaneError::Refused { .. })), "{one:?}");
        assert!(matches!(two, Err(LaneError::Refused { .. })), "{two:?}");

        let (one, two) = meet((hello(1, 2, 5), Some(1)), (hello(1, 2, 0), None)).await;
        assert_eq!(
            one.unwrap_err().to_string(),
            "the link was refused: rank 0 answered in place of rank 1"
        );
        assert!(matches!(two, Err(LaneError::Refused { .. })), "{two:?}");

        let (one, two) = meet((hello(1, 2, 5), None), (hello(1, 2, 5), None)).await;
        assert!(matches!(one, Err(LaneError::Refused { .. })), "{one:?}");
        assert!(matches!(two, Err(LaneError::Refused { .. })), "{two:?}");
    }

    #[tokio::test]
    async fn who_has_no_descriptor_is_named_on_both_sides() {
        let (caller, taker) = (hello(1, 2, 5).of_group(GroupId(77)), hello(1, 2, 0));
        let expected = |rank| LaneError::NoDescriptors {
            rank: Rank(rank),
            reason: "this".to_owned(),
        };
        let (mut one, mut two) = MemoryLane::pair(7);
        let (said, (who, heard)) = tokio::join!(
            excuse(&mut one, &caller, Some(Rank(0)), "this".to_owned(), LIMIT),
            greet_any(&mut two, &taker, LIMIT)
        );
        assert_eq!(said, (Some(taker), expected(5)));
        assert_eq!((who, heard), (Some(caller), Err(expected(5))));

        let (mut one, mut two) = MemoryLane::pair(7);
        let (heard, said) = tokio::join!(
            greet(&mut one, &caller, Some(Rank(0)), LIMIT),
            excuse(&mut two, &taker, None, "this".to_owned(), LIMIT)
        );
        assert_eq!(heard, Err(expected(0)));
        assert_eq!(said, (Some(caller), expected(0)));

        // To somebody else it is not said.
        let (mut one, mut two) = MemoryLane::pair(7);
        let ((said, error), (who, heard)) = tokio::join!(
            excuse(&mut one, &caller, Some(Rank(1)), "this".to_owned(), LIMIT),
            greet_any(&mut two, &taker, LIMIT)
        );
        assert_eq!((said, who), (None, Some(caller)));
        assert!(matches!(error, LaneError::Refused { .. }), "{error:?}");
        assert!(matches!(heard, Err(LaneError::Refused { .. })), "{heard:?}");
    }

    #[tokio::test]
    async fn what_is_no_hello_ends_the_link() {
        let (mut one, mut two) = MemoryLane::pair(1000);
        write(&mut two, &mut vec![b'G'; HEADER]).await;
        let error = greet(&mut one, &hello(1, 1, 0), None, LIMIT)
            .await
            .unwrap_err();
        assert!(matches!(error, LaneError::Protocol { .. }), "{error:?}");

        let (mut one, mut two) = MemoryLane::pair(1000);
        write(&mut two, &mut Header::Welcome.encode().to_vec()).await;
        let error = greet(&mut one, &hello(1, 1, 0), None, LIMIT)
            .await
            .unwrap_err();
        assert!(matches!(error, LaneError::Protocol { .. }), "{error:?}");

        let (mut one, two) = MemoryLane::pair(1000);
        drop(two);
        let error = greet(&mut one, &hello(1, 1, 0), None, LIMIT)
            .await
            .unwrap_err();
        assert!(matches!(error, LaneError::Ended { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn a_silent_peer_is_given_up() {
        let (mut one, _two) = MemoryLane::pair(1000);
        let limit = Duration::from_millis(30);
        let error = greet(&mut one, &hello(1, 1, 0), None, limit)
            .await
            .unwrap_err();
        assert!(matches!(error, LaneError::Timeout { .. }), "{error:?}");
    }
}
