//! What the two sides of a new link say to each other before anything else.

use std::future::poll_fn;
use std::io::IoSlice;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use kolo_transport::ids::{Generation, JobId, Rank};
use kolo_transport::wire::span::Span;

use super::{Lane, LaneError};
use crate::group_id::GroupId;
use crate::header::{HEADER, Header, Refusal, cut};

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
    let said = tokio::time::timeout(limit, speak(lane, own, peer)).await;
    said.unwrap_or_else(|_| {
        Err(LaneError::Timeout {
            reason: format!("no hello came within {}", Span(limit)),
        })
    })
}

async fn speak<L: Lane + ?Sized>(
    lane: &mut L,
    own: &LinkHello,
    peer: Option<Rank>,
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
    let verdict = check(own, &theirs, peer);
    match &verdict {
        Ok(()) => out.extend_from_slice(&Header::Welcome.encode()),
        Err(error) => {
            let why = match error {
                LaneError::StaleGeneration { .. } => Refusal::Stale,
                _ => Refusal::Other,
            };
            let text = error.to_string();
            let text = cut(&text);
            let refusal = Header::Refusal {
                why,
                length: text.len() as u32,
            };
            out.extend_from_slice(&refusal.encode());
            out.extend_from_slice(text.as_bytes());
        }
    }
    let answer = read_answer(lane, &mut out).await;
    write(lane, &mut out).await;
    // What this side saw itself is the better reason.
    verdict.and(answer).map(|()| theirs)
}

async fn read_answer<L: Lane + ?Sized>(lane: &mut L, out: &mut Vec<u8>) -> Result<(), LaneError> {
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

    #[test]
    fn a_side_wants_a_link_or_says_why_not() {
        let own = hello(1, 2, 5);
        let of_two = own.of_world(2);
        for (own, theirs, peer, expected) in [
            (own, hello(1, 2, 0), None, ""),
            (own, hello(1, 2, 0).of_group(GroupId(77)), Some(0), ""),
            // A number of ranks is compared if both sides say one.
            (own, hello(1, 2, 0).of_world(3), None, ""),
            (of_two, hello(1, 2, 0), None, ""),
            (of_two, hello(1, 2, 0).of_world(2), None, ""),
            (
                of_two,
                hello(1, 2, 0).of_world(3),
                None,
                "the link was refused: rank 0 is one of 3 ranks, and rank 5 one of 2; give all ranks the same table or world size",
            ),
            (
                own,
                hello(9, 2, 0),
                None,
                "the link was refused: rank 0 of job-0000000000000009 called job-0000000000000001",
            ),
            (
                own,
                hello(1, 3, 0),
                None,
                "the link is of another generation: rank 0 is in generation 3, rank 5 in generation 2",
            ),
            (
                own,
                hello(1, 2, 0),
                Some(1),
                "the link was refused: rank 0 answered in place of rank 1",
            ),
            (
                own,
                own,
                None,
                "the link was refused: both sides say that they are rank 5",
            ),
        ] {
            let found = check(&own, &theirs, peer.map(Rank));
            let said = found.err().map_or(String::new(), |error| error.to_string());
            assert_eq!(said, expected);
        }
        let behind = check(&own, &hello(1, 1, 0), None).unwrap_err();
        let ahead = check(&own, &hello(1, 3, 0), None).unwrap_err();
        assert!(behind.is_behind(&own) && !ahead.is_behind(&own));
    }

    #[tokio::test]
    async fn both_sides_learn_who_the_other_is_or_that_there_is_no_link() {
        let caller = hello(1, 2, 5).of_group(GroupId(77));
        for (callee, agree) in [(hello(1, 2, 0), true), (hello(1, 3, 0), false)] {
            // A capacity of a few bytes: nothing may depend on a header going out in one write.
            let (mut one, mut two) = MemoryLane::pair(7);
            let (one, two) = tokio::join!(
                greet(&mut one, &caller, Some(Rank(0)), LIMIT),
                greet(&mut two, &callee, None, LIMIT)
            );
            if agree {
                assert_eq!((one, two), (Ok(callee), Ok(caller)));
                continue;
            }
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
    }

    #[tokio::test]
    async fn what_is_no_hello_ends_the_link() {
        for sent in [&[b'G'; HEADER][..], &Header::Welcome.encode(), &[]] {
            let (mut one, mut two) = MemoryLane::pair(1000);
            write(&mut two, &mut sent.to_vec()).await;
            drop(two);
            let error = greet(&mut one, &hello(1, 1, 0), None, LIMIT).await;
            match error {
                Err(LaneError::Protocol { .. }) => assert!(!sent.is_empty()),
                Err(LaneError::Ended { .. }) => assert!(sent.is_empty()),
                other => panic!("{other:?}"),
            }
        }
        let (mut one, _silent) = MemoryLane::pair(1000);
        let limit = Duration::from_millis(30);
        let error = greet(&mut one, &hello(1, 1, 0), None, limit).await;
        assert!(matches!(error, Err(LaneError::Timeout { .. })), "{error:?}");
    }
}
