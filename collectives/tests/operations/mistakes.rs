//! What cannot be right is an error on all ranks, and the next operation works.

use std::time::Duration;

use super::*;
use crate::common::LONG;

/// Horovod: `test_horovod_alltoall_equal_split_length_error`, `_alltoall_splits_error`, `_reducescatter_scalar_error`,
/// `_grouped_reducescatter_scalar_error` and `_reducescatter_adasum`.
#[test]
fn arguments_that_cannot_be_right_name_what_is_wrong_and_the_next_operation_works() {
    type Body = fn(&Communicator) -> Result<(), CollectiveError>;
    let wrong: [(Body, &str); 15] = [
        (
            |comm| comm.reduce_scatter(&[1_u8; 7], 2, ReduceOp::Sum).map(drop),
            "reduce_scatter of 7 elements in 2 rows",
        ),
        (
            |comm| comm.reduce_scatter_into(&[1_u8; 4], 4, &mut [0; 3], ReduceOp::Sum),
            "a buffer of 3 elements: it must have 2",
        ),
        (
            |comm| comm.all_to_all(&[1_u8; 7]).map(drop),
            "not a whole number for each of 2 ranks",
        ),
        (
            |comm| comm.all_to_all_varcount(&[1_u8; 7], &[1]).map(drop),
            "the splits of all_to_all_varcount on 2 ranks into a buffer of 1 elements: it must have 2",
        ),
        (
            |comm| comm.all_to_all_varcount(&[1_u8; 7], &[4, 4]).map(drop),
            "splits [4, 4] of 7 elements",
        ),
        (
            |comm| {
                let splits = [usize::MAX, 1];
                comm.all_to_all_varcount(&[1_u8; 7], &splits).map(drop)
            },
            "splits [18446744073709551615, 1] of 7 elements",
        ),
        (
            |comm| comm.all_to_all_varcount(&[1_u8; 7], &[1, 1, 0]).map(drop),
            "into a buffer of 3 elements: it must have 2",
        ),
        (
            |comm| comm.reduce_scatter(&[1_u8], 0, ReduceOp::Sum).map(drop),
            "reduce_scatter of 1 elements in 0 rows",
        ),
        (
            |comm| {
                let buffers: [(&[f32], usize); 2] = [(&[1.0; 4], 4), (&[1.0], 0)];
                comm.reduce_scatter_grouped(&buffers, ReduceOp::Sum)
                    .map(drop)
            },
            "reduce_scatter of 1 elements in 0 rows",
        ),
        (
            |comm| {
                comm.reduce_scatter(&[1.0_f32; 4], 4, ReduceOp::Adasum)
                    .map(drop)
            },
            "reduce_scatter with adasum: it is defined for all_reduce only",
        ),
        (
            |comm| comm.scatter(&[1_u8; 5], 2, comm.rank()).map(drop),
            "the root gave 5 elements, which is not 2 for each of 2 ranks",
        ),
        (
            |comm| {
                comm.scatter_varcount(&[1_u8; 5], &[2, 2], comm.rank())
                    .map(drop)
            },
            "the root gave 5 elements in all",
        ),
        (
            |comm| comm.gather(&[1_u8], Rank(2)).map(drop),
            "gather to root 2: a world of 2 has ranks 0 to 1",
        ),
        (
            |comm| comm.all_reduce_into(&[1_u8; 2], &mut [0], ReduceOp::Sum),
            "a buffer of 1 elements: it must have 2",
        ),
        (
            |comm| comm.reduce(&mut [1.0_f32], ReduceOp::Adasum, Rank(0)),
            "reduce with adasum: it is defined for all_reduce only",
        ),
    ];
    let group = Group::new(Kind::Memory, 2);
    for (body, text) in wrong {
        for result in group.run(body) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(text), "{error}\n{text}");
        }
        group.run(|comm| comm.barrier().unwrap());
    }
    // One rank alone is wrong: the others hear of it.
    let results = group.run(|comm| {
        let length = 6 + comm.rank().index();
        comm.all_to_all(&vec![0_u8; length]).map(drop)
    });
    assert!(matches!(
        results[0],
        Err(CollectiveError::PeerFailed { rank: Rank(1), .. })
    ));
    assert!(matches!(results[1], Err(CollectiveError::Invalid { .. })));
    for (error, to) in [
        (group.members[0].send(&[1_u8], Rank(0)), 0),
        (group.members[0].send(&[1_u8], Rank(2)), 2),
    ] {
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains(&format!("rank 0 can't send to rank {to}")),
            "{error}"
        );
    }
}

/// How many values are sent: what comes along with its number, what a link holds, and more than that.
const SENT: [usize; 4] = [1, 250, 2_000, 100_000];

/// Rank 0 sends, rank 1 receives. What both get, of which the receiver's is an error that says this.
fn fail_both(
    group: &Group,
    send: impl Fn(&Communicator) -> Result<(), CollectiveError> + Sync,
    receive: impl Fn(&Communicator) -> Result<(), CollectiveError> + Sync,
    text: &str,
) -> [CollectiveError; 2] {
    let results = group.run(|comm| match comm.rank() {
        Rank(0) => send(comm),
        _ => receive(comm),
    });
    let errors: Vec<_> = results.into_iter().map(Result::unwrap_err).collect();
    for error in &errors {
        assert!(error.to_string().contains(text), "{text}: {error}");
    }
    errors.try_into().unwrap()
}

#[test]
fn a_receiver_with_another_buffer_type_or_shape_fails_on_both_sides() {
    let plain = Options::new();
    for kind in [Kind::Memory, Kind::Ring, Kind::Tls] {
        let group = Group::new(kind, 2);
        for length in SENT {
            let values = vec![1.0_f32; length];
            let sends = |options| {
                let values = &values;
                move |comm: &Communicator| comm.with(options).send(values, Rank(1))
            };
            let text = format!("rank 0 sends {length} f32");
            let mut room = length + 1;
            for _ in 0..2 {
                let into =
                    |comm: &Communicator| comm.receive_into(&mut vec![0.0_f32; room], Rank(0));
                let errors = fail_both(&group, sends(plain), into, &text);
                let [
                    CollectiveError::PeerFailed { rank: Rank(1), .. },
                    CollectiveError::Invalid { .. },
                ] = errors
                else {
                    panic!("{errors:?}");
                };
                room = length - 1;
            }
            let is_mismatch = |errors: [CollectiveError; 2]| {
                for error in errors {
                    let is_mismatch = matches!(error, CollectiveError::Mismatch { .. });
                    assert!(is_mismatch, "{error:?}");
                }
            };
            is_mismatch(fail_both(
                &group,
                sends(plain),
                |comm| comm.receive::<f64>(Rank(0)).map(drop),
                "send f64 from rank 0",
            ));
            let shape = [length, 1];
            let others = [
                (plain.shape(&shape), format!("shape {shape:?}")),
                (
                    plain.compression(Compression::F16),
                    "sent as f16".to_owned(),
                ),
            ];
            for (other, text) in others {
                for (sends, receives) in [(sends(plain), other), (sends(other), plain)] {
                    let receive =
                        |comm: &Communicator| comm.with(receives).receive::<f32>(Rank(0)).map(drop);
                    is_mismatch(fail_both(&group, sends, receive, &text));
                }
                let results = group.run(|comm| {
                    let comm = comm.with(other);
                    match comm.rank() {
                        Rank(0) => comm.send(&values, Rank(1)).map(|()| vec![]),
                        _ => comm.receive::<f32>(Rank(0)),
                    }
                });
                assert_eq!(results, [Ok(vec![]), Ok(values.clone())]);
            }
        }
        group.run(|comm| comm.barrier().unwrap());
    }
}

/// However little it is, and though the links would hold it.
#[test]
fn ranks_that_both_send_first_are_told_who_is_late() {
    let late = |group: &Group, length: usize| {
        let errors = group.run(|comm| {
            let other = Rank(1 - comm.rank().0);
            comm.set_timeout(Duration::from_millis(100));
            let error = comm.send(&vec![1_u8; length], other).unwrap_err();
            comm.set_timeout(LONG);
            error
        });
        for (other, error) in [Rank(1), Rank(0)].iter().zip(&errors) {
            assert!(
                matches!(error, CollectiveError::Deadline { late, .. } if late == &[*other]),
                "{length}: {error:?}"
            );
        }
    };
    std::thread::scope(|scope| {
        for kind in [Kind::Memory, Kind::Ring, Kind::Tls] {
            scope.spawn(move || {
                let group = Group::new(kind, 2);
                for length in [1, 2_000] {
                    // From the second round on all links are there.
                    for _ in 0..2 {
                        late(&group, length);
                        group.run(|comm| {
                            if comm.rank() == Rank(0) {
                                comm.send(&[3_u8], Rank(1)).unwrap();
                            } else {
                                // That of the send that has failed, though its values are here.
                                assert!(comm.receive::<u8>(Rank(0)).is_err());
                                assert_eq!(comm.receive::<u8>(Rank(0)).unwrap(), [3]);
                            }
                        });
                    }
                }
            });
        }
    });
}

/// What an operator can't do is an error on every rank, and the communicator stays usable.
#[test]
fn what_is_not_defined_is_refused_on_every_rank() {
    for (kind, world) in [
        (Kind::Memory, 3_u32),
        (Kind::Unix, 5),
        (Kind::Shared, 3),
        (Kind::Shared, 6),
        (Kind::Memory, 2),
        (Kind::Shared, 4),
    ] {
        let group = Group::new(kind, world);
        group.run(|comm| {
            let mut data = [1.0_f32];
            let error = comm.all_reduce(&mut data, ReduceOp::BitAnd).unwrap_err();
            assert!(
                error.to_string().contains("f32 allows average, sum"),
                "{error}"
            );
            if !world.is_power_of_two() {
                let error = comm.all_reduce(&mut data, ReduceOp::Adasum).unwrap_err();
                let next = world.next_power_of_two();
                let says = format!("power of two of ranks (such as {next})");
                assert!(error.to_string().contains(&says), "{error}");
                let named = comm.named("a").all_reduce(vec![1.0_f64], ReduceOp::Adasum);
                let error = named.wait().unwrap_err();
                assert!(error.to_string().contains(&says), "{error}");
            }
            let error = comm
                .reduce(&mut data, ReduceOp::Adasum, Rank(0))
                .unwrap_err();
            assert!(error.to_string().contains("for all_reduce only"), "{error}");
            // It would be combined as it travels.
            let short = comm.with(Options::new().compression(Compression::Bf16));
            let error = short.all_reduce(&mut data, ReduceOp::Adasum).unwrap_err();
            let says = if world.is_power_of_two() {
                "sent as bf16: adasum of bf16 is not defined"
            } else {
                "power of two"
            };
            assert!(error.to_string().contains(says), "{error}");
            let error = comm.all_reduce(&mut [true], ReduceOp::Sum).unwrap_err();
            assert!(error.to_string().contains("sum of bool"), "{error}");
            let scaled = comm.with(Options::new().prescale(2.0));
            let error = scaled.all_reduce(&mut [true], ReduceOp::Max).unwrap_err();
            assert!(error.to_string().contains("leave it at 1"), "{error}");
            assert_eq!(data, [1.0]);
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [world as f32]);
        });
    }
}
