//! What cannot be right is an error on all ranks, and the next operation works.

use std::time::Duration;

use super::*;
use crate::common::{LONG, bodies};

/// Horovod: `test_horovod_alltoall_equal_split_length_error`, `_alltoall_splits_error`, `_reducescatter_scalar_error`,
/// `_grouped_reducescatter_scalar_error` and `_reducescatter_adasum`.
#[test]
fn arguments_that_cannot_be_right_name_what_is_wrong_and_the_next_operation_works() {
    const SUM: ReduceOp = ReduceOp::Sum;
    let wrong = bodies! { comm:
        comm.reduce_scatter(&[1_u8; 7], 2, SUM) => "reduce_scatter of 7 elements in 2 rows";
        comm.reduce_scatter_into(&[1_u8; 4], 4, &mut [0; 3], SUM) => "a buffer of 3 elements: it must have 2";
        comm.reduce_scatter(&[1_u8], 0, SUM) => "reduce_scatter of 1 elements in 0 rows";
        comm.reduce_scatter_grouped(&[(&[1.0_f32; 4][..], 4), (&[1.0][..], 0)], SUM) => "reduce_scatter of 1 elements in 0 rows";
        comm.reduce_scatter(&[1.0_f32; 4], 4, ReduceOp::Adasum) => "reduce_scatter with adasum: it is defined for all_reduce only";
        comm.reduce(&mut [1.0_f32], ReduceOp::Adasum, Rank(0)) => "reduce with adasum: it is defined for all_reduce only";
        comm.all_reduce_into(&[1_u8; 2], &mut [0], SUM) => "a buffer of 1 elements: it must have 2";
        comm.all_to_all(&[1_u8; 7]) => "not a whole number for each of 2 ranks";
        comm.all_to_all_varcount(&[1_u8; 7], &[1]) => "the splits of all_to_all_varcount on 2 ranks into a buffer of 1 elements: it must have 2";
        comm.all_to_all_varcount(&[1_u8; 7], &[1, 1, 0]) => "into a buffer of 3 elements: it must have 2";
        comm.all_to_all_varcount(&[1_u8; 7], &[4, 4]) => "splits [4, 4] of 7 elements";
        comm.all_to_all_varcount(&[1_u8; 7], &[usize::MAX, 1]) => "splits [18446744073709551615, 1] of 7 elements";
        comm.scatter(&[1_u8; 5], 2, comm.rank()) => "the root gave 5 elements, which is not 2 for each of 2 ranks";
        comm.scatter_varcount(&[1_u8; 5], &[2, 2], comm.rank()) => "the root gave 5 elements in all";
        comm.all_reduce(&mut [1.0_f32], ReduceOp::BitAnd) => "f32 allows average, sum";
        comm.all_reduce(&mut [true], SUM) => "sum of bool";
        comm.with(Options::new().prescale(2.0)).all_reduce(&mut [true], ReduceOp::Max) => "leave it at 1";
        // It would be combined as it travels.
        comm.with(Options::new().compression(Compression::Bf16)).all_reduce(&mut [1.0_f32], ReduceOp::Adasum) => "sent as bf16: adasum of bf16 is not defined";
        comm.gather(&[1_u8], Rank(2)) => "gather to root 2: a world of 2 has ranks 0 to 1";
    };
    let group = Group::new(Kind::Memory, 2);
    for group in [&group, &Group::new(Kind::Shared, 2)] {
        for (body, text) in wrong {
            for result in group.run(body) {
                let error = result.unwrap_err().to_string();
                assert!(error.contains(text), "{error}\n{text}");
            }
            group.run(|comm| comm.barrier().unwrap());
        }
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

/// However many values are sent: what comes along with their number, what a link holds, and more than that.
#[test]
fn a_receiver_with_another_buffer_type_or_shape_fails_on_both_sides() {
    type Receive<'a> = &'a (dyn Fn(&Communicator) -> Result<(), CollectiveError> + Sync);
    let plain = Options::new();
    for kind in [Kind::Memory, Kind::Ring, Kind::Tls] {
        let group = Group::new(kind, 2);
        for length in [1, 250, 2_000, 100_000] {
            let values = vec![1.0_f32; length];
            // Rank 0 sends, rank 1 receives.
            let both = |sends: Options, receive: Receive<'_>, text: &str| {
                let results = group.run(|comm| match comm.rank() {
                    Rank(0) => comm.with(sends).send(&values, Rank(1)),
                    _ => receive(comm),
                });
                let errors: Vec<_> = results.into_iter().map(Result::unwrap_err).collect();
                for error in &errors {
                    assert!(error.to_string().contains(text), "{text}: {error}");
                }
                errors
            };
            for room in [length + 1, length - 1] {
                let into =
                    |comm: &Communicator| comm.receive_into(&mut vec![0.0_f32; room], Rank(0));
                let errors = both(plain, &into, &format!("rank 0 sends {length} f32"));
                let [
                    CollectiveError::PeerFailed { rank: Rank(1), .. },
                    CollectiveError::Invalid { .. },
                ] = errors[..]
                else {
                    panic!("{errors:?}");
                };
            }
            let receives = |options: Options| {
                move |comm: &Communicator| comm.with(options).receive::<f32>(Rank(0)).map(drop)
            };
            let (shape, short) = (
                plain.shape(&[length, 1]),
                plain.compression(Compression::F16),
            );
            let says_shape = format!("shape [{length}, 1]");
            let other_type = |comm: &Communicator| comm.receive::<f64>(Rank(0)).map(drop);
            let cases: [(Options, Receive<'_>, &str); 5] = [
                (plain, &other_type, "send f64 from rank 0"),
                (plain, &receives(shape), &says_shape),
                (shape, &receives(plain), &says_shape),
                (plain, &receives(short), "sent as f16"),
                (short, &receives(plain), "sent as f16"),
            ];
            for (sends, receive, text) in cases {
                for error in both(sends, receive, text) {
                    let is_mismatch = matches!(error, CollectiveError::Mismatch { .. });
                    assert!(is_mismatch, "{error:?}");
                }
            }
            for options in [shape, short] {
                group.run(|comm| {
                    let comm = comm.with(options);
                    match comm.rank() {
                        Rank(0) => comm.send(&values, Rank(1)).unwrap(),
                        _ => assert_eq!(comm.receive(Rank(0)), Ok(values.clone())),
                    }
                });
            }
        }
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

#[test]
fn adasum_of_other_than_a_power_of_two_of_ranks_is_refused_on_every_rank() {
    for kind in [Kind::Memory, Kind::Shared] {
        Group::new(kind, 6).run(|comm| {
            let mut data = vec![1.0_f32];
            let named = comm.named("a").all_reduce(data.clone(), ReduceOp::Adasum);
            let errors = [
                comm.all_reduce(&mut data, ReduceOp::Adasum).unwrap_err(),
                named.wait().unwrap_err(),
            ];
            for error in errors {
                let text = error.to_string();
                assert!(text.contains("power of two of ranks (such as 8)"), "{text}");
            }
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [6.0]);
        });
    }
}
