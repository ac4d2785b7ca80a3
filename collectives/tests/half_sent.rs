//! A rank that sends from its caller's buffer, and gives up in the middle of a frame: the frame still ends as it began.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{Group, Kind, LONG};
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_collectives::{CollectiveError, Communicator, ReduceOp};
use kolo_transport::ids::Rank;

/// More than a frame, and much more than a link holds.
const LENGTH: usize = (1 << 20) / size_of::<u64>();
/// Holds lengths, and a part of a frame.
const NARROW: Kind = Kind::Narrow(10_000);

/// In a buffer for a result: nothing has come.
const NOTHING: u64 = u64::MAX;
/// In a buffer of an input: it is the caller's again. No sum with it looks like anything else.
const OVERWRITTEN: u64 = 1 << 60;

/// Other values at every place of every rank.
fn values(rank: Rank) -> Vec<u64> {
    let first = u64::from(rank.0) << 32;
    (0..2 * LENGTH as u64).map(|at| first + at).collect()
}

/// An operation in which rank 0 sends to rank 1, from a part of the first buffer to a part of the second one.
type Moves = fn(&Communicator, &[u64], &mut [u64]) -> Result<(), CollectiveError>;

const OPERATIONS: [(Algorithm, Moves); 5] = [
    (Algorithm::Linear, |comm, input, result| match comm.rank() {
        Rank(0) => comm.send(&input[..LENGTH], Rank(1)),
        _ => comm.receive_into(&mut result[..LENGTH], Rank(0)),
    }),
    (Algorithm::Linear, |comm, input, result| {
        let result = &mut result[..2 * LENGTH * comm.rank().index()];
        comm.gather_into(&input[..LENGTH], result, Rank(1))
    }),
    (Algorithm::Linear, |comm, input, result| {
        let input = &input[..2 * LENGTH * (1 - comm.rank().index())];
        comm.scatter_into(input, &mut result[..LENGTH], Rank(0))
    }),
    (Algorithm::Linear, |comm, input, result| {
        comm.all_to_all_into(input, result)
    }),
    (Algorithm::Ring, |comm, input, result| {
        comm.reduce_scatter_into(input, input.len(), &mut result[..LENGTH], ReduceOp::Sum)
    }),
];

/// Rank 0 gives up before rank 1 comes, which hears of it behind what was under way: that is what the caller gave, and not what is in its
/// buffer by then.
#[test]
fn a_frame_half_sent_from_the_callers_buffer_ends_as_it_began() {
    for (number, (algorithm, moves)) in OPERATIONS.into_iter().enumerate() {
        let group = Group::new(NARROW, 2);
        let results = || {
            group.run(|comm| {
                let mut result = vec![NOTHING; 2 * LENGTH];
                moves(comm, &values(comm.rank()), &mut result).unwrap();
                result
            })
        };
        group.run(|comm| {
            comm.set_tuning(Tuning {
                force: Some(algorithm),
                ..Tuning::default()
            });
        });
        // All links are there from here on.
        let expected = results();
        let [zero, one] = &group.members[..] else {
            unreachable!("there are two");
        };
        let (mut input, mut result) = (values(Rank(0)), vec![NOTHING; 2 * LENGTH]);
        zero.set_timeout(Duration::from_millis(100));
        let error = moves(zero, &input, &mut result).unwrap_err();
        assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
        assert!(input == values(Rank(0)), "{number}: another input");
        input.fill(OVERWRITTEN);
        zero.set_timeout(LONG);

        let own = values(Rank(1));
        let mut result = vec![NOTHING; 2 * LENGTH];
        let error = moves(one, &own, &mut result).unwrap_err();
        let is_protocol = matches!(error, CollectiveError::Protocol { .. });
        assert!(!is_protocol, "{number}: {error}");
        let mut came = 0;
        for (got, given) in result.iter().zip(&expected[1]) {
            let is_own = (own[0]..=own[own.len() - 1]).contains(got);
            assert!(
                got == given || *got == NOTHING || is_own,
                "{number}: {got:x} for {given:x}"
            );
            came += usize::from(got == given && *got != NOTHING && !is_own);
        }
        assert!(came > 10_000, "{number}: {came}");
        for _ in 0..2 {
            assert!(results() == expected, "{number}");
        }
    }
}
