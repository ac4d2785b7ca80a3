//! A rank that sends from its caller's buffer, and gives up in the middle of a frame: the frame still ends as it began.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{Group, Kind, LONG, run};
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_collectives::{CollectiveError, Communicator, ReduceOp};
use kolo_transport::ids::Rank;

/// More than a frame, and much more than a link holds.
const LENGTH: usize = (1 << 20) / size_of::<u64>();
/// Holds lengths, and a part of a frame.
const NARROW: Kind = Kind::Narrow(10_000);

/// In a buffer for a result: nothing has come.
const NOTHING: u64 = u64::MAX;
/// In a buffer of an input: it is the caller's again.
const OVERWRITTEN: u64 = u64::MAX - 1;

/// Other values at every place of every rank.
fn values(rank: u32, length: usize) -> Vec<u64> {
    let first = u64::from(rank) << 32;
    (0..length as u64).map(|at| first + at).collect()
}

/// An operation on a rank that sends these or receives in them.
type Moves = fn(&Communicator, &[u64], &mut [u64]) -> Result<(), CollectiveError>;

fn send(comm: &Communicator, input: &[u64], result: &mut [u64]) -> Result<(), CollectiveError> {
    if comm.rank() == Rank(0) {
        comm.send(input, Rank(1))
    } else {
        comm.receive_into(result, Rank(0))
    }
}

fn gather(comm: &Communicator, input: &[u64], result: &mut [u64]) -> Result<(), CollectiveError> {
    comm.gather_into(input, result, Rank(0))
}

fn scatter(comm: &Communicator, input: &[u64], result: &mut [u64]) -> Result<(), CollectiveError> {
    comm.scatter_into(input, result, Rank(0))
}

fn all_to_all(
    comm: &Communicator,
    input: &[u64],
    result: &mut [u64],
) -> Result<(), CollectiveError> {
    comm.all_to_all_into(input, result)
}

fn reduce_scatter(
    comm: &Communicator,
    input: &[u64],
    result: &mut [u64],
) -> Result<(), CollectiveError> {
    comm.reduce_scatter_into(input, input.len(), result, ReduceOp::Sum)
}

/// Who sends gives up before the others come. They hear of it behind what was under way, which is what the caller gave, and
/// not what is in its buffer by then.
///
/// `sizes`: how many values a rank gives, and how many it gets. `before`: what may be where nothing has come, if it is not what was
/// there.
fn ends_as_it_began(
    world: u32,
    (moves, algorithm): (Moves, Algorithm),
    sends: impl Fn(u32) -> bool,
    sizes: impl Fn(u32) -> (usize, usize) + Sync,
    expected: impl Fn(u32) -> Vec<u64> + Sync,
    before: impl Fn(u32, usize) -> u64 + Sync,
) {
    let group = Group::new(NARROW, world);
    let works = |comm: &Communicator| {
        let me = comm.rank().0;
        let (gives, gets) = sizes(me);
        let mut result = vec![NOTHING; gets];
        moves(comm, &values(me, gives), &mut result).unwrap();
        assert!(result == expected(me), "rank {me} gets something else");
    };
    group.run(|comm| {
        comm.set_tuning(Tuning {
            force: Some(algorithm),
            ..Tuning::default()
        });
        // All links are there from here on.
        works(comm);
    });
    let (senders, late): (Vec<_>, Vec<_>) =
        group.members.iter().partition(|comm| sends(comm.rank().0));
    run(senders, |comm| {
        let me = comm.rank().0;
        let (gives, gets) = sizes(me);
        let (mut input, mut result) = (values(me, gives), vec![NOTHING; gets]);
        comm.set_timeout(Duration::from_millis(100));
        let error = moves(comm, &input, &mut result).unwrap_err();
        assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
        assert!(input == values(me, gives), "rank {me} has another input");
        input.fill(OVERWRITTEN);
        comm.set_timeout(LONG);
    });
    let came = run(late, |comm| {
        let me = comm.rank().0;
        let (gives, gets) = sizes(me);
        let mut result = vec![NOTHING; gets];
        let error = moves(comm, &values(me, gives), &mut result).unwrap_err();
        let is_protocol = matches!(error, CollectiveError::Protocol { .. });
        assert!(!is_protocol, "{error}");
        let expected = expected(me);
        let mut came = 0;
        for (at, (got, given)) in result.iter().zip(&expected).enumerate() {
            let before = before(me, at);
            let is_there = *got == NOTHING || *got == before;
            assert!(got == given || is_there, "{got:x} for {given:x}");
            came += usize::from(got == given && *given != before);
        }
        came
    });
    // A frame at least, of which a link holds a part.
    assert!(came.iter().any(|count| *count > 10_000), "{came:?}");
    for _ in 0..2 {
        group.run(works);
    }
}

#[test]
fn a_frame_half_sent_from_the_callers_buffer_ends_as_it_began() {
    let is_root = |rank| rank == 0;
    ends_as_it_began(
        2,
        (send, Algorithm::Linear),
        is_root,
        |rank| {
            if is_root(rank) {
                (LENGTH, 0)
            } else {
                (0, LENGTH)
            }
        },
        |rank| {
            if is_root(rank) {
                vec![]
            } else {
                values(0, LENGTH)
            }
        },
        |_, _| NOTHING,
    );
    ends_as_it_began(
        3,
        (gather, Algorithm::Linear),
        |rank| !is_root(rank),
        |rank| (LENGTH, if is_root(rank) { 3 * LENGTH } else { 0 }),
        |rank| {
            let all = (0..3).flat_map(|rank| values(rank, LENGTH));
            if is_root(rank) { all.collect() } else { vec![] }
        },
        // Its own share.
        |rank, at| {
            if at < LENGTH {
                u64::from(rank) << 32 | at as u64
            } else {
                NOTHING
            }
        },
    );
    ends_as_it_began(
        3,
        (scatter, Algorithm::Linear),
        is_root,
        |rank| (if is_root(rank) { 3 * LENGTH } else { 0 }, LENGTH),
        |rank| values(0, 3 * LENGTH)[rank as usize * LENGTH..][..LENGTH].to_vec(),
        |_, _| NOTHING,
    );
    let of_rank =
        |from, rank: u32| values(from, 3 * LENGTH)[rank as usize * LENGTH..][..LENGTH].to_vec();
    ends_as_it_began(
        3,
        (all_to_all, Algorithm::Linear),
        |rank| !is_root(rank),
        |_| (3 * LENGTH, 3 * LENGTH),
        |rank| (0..3).flat_map(|from| of_rank(from, rank)).collect(),
        |rank, at| {
            if at / LENGTH == rank as usize {
                u64::from(rank) << 32 | (rank as usize * LENGTH + at % LENGTH) as u64
            } else {
                NOTHING
            }
        },
    );
    ends_as_it_began(
        2,
        (reduce_scatter, Algorithm::Ring),
        |rank| !is_root(rank),
        |_| (2 * LENGTH, LENGTH),
        |rank| {
            let start = (rank as usize * LENGTH) as u64;
            (0..LENGTH as u64)
                .map(|at| (1 << 32) + 2 * (start + at))
                .collect()
        },
        // What it adds to.
        |rank, at| u64::from(rank) << 32 | (rank as usize * LENGTH + at) as u64,
    );
}
