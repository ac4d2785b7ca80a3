//! What cannot be right is an error on all ranks, and the next operation works.

use super::*;

#[test]
fn arguments_that_cannot_be_right_name_what_is_wrong_and_the_next_operation_works() {
    type Body = fn(&Communicator) -> Result<(), CollectiveError>;
    let wrong: [(Body, &str); 10] = [
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

#[test]
fn a_receiver_with_another_buffer_or_type_fails_on_both_sides() {
    let group = Group::new(Kind::Unix, 2);
    let results = group.run(|comm| {
        if comm.rank() == Rank(0) {
            comm.send(&vec![1.0_f32; 100_000], Rank(1))
        } else {
            comm.receive_into(&mut [0.0_f32; 9], Rank(0))
        }
    });
    let text = results[1].as_ref().unwrap_err().to_string();
    assert!(text.contains("rank 0 sends 100000 f32"), "{text}");
    assert!(results[0].is_err());
    let results = group.run(|comm| {
        if comm.rank() == Rank(0) {
            comm.send(&vec![1.0_f32; 100_000], Rank(1))
        } else {
            comm.receive::<f64>(Rank(0)).map(drop)
        }
    });
    for result in results {
        let text = result.unwrap_err().to_string();
        assert!(
            text.contains("send f32 from rank 0") && text.contains("send f64"),
            "{text}"
        );
    }
    let results = group.run(|comm| match comm.rank() {
        Rank(0) => comm.send(&[5_u8], Rank(1)).map(|()| vec![]),
        _ => comm.receive::<u8>(Rank(0)),
    });
    assert_eq!(results[1], Ok(vec![5]));
}

/// Few values come along with their number, and the sender may be done before the receiver has said what it wants.
#[test]
fn a_receiver_that_asks_for_something_else_than_few_values_says_so() {
    let group = Group::new(Kind::Memory, 2);
    let plain = Options::new();
    let others = [
        (plain.shape(&[2, 4]), "shape [2, 4]"),
        (plain.compression(Compression::F16), "sent as f16"),
    ];
    for (other, text) in others {
        // And the other way round, where the sender has to wait.
        for (sends, receives) in [(plain, other), (other, plain)] {
            let results = group.run(|comm| {
                if comm.rank() == Rank(0) {
                    comm.with(sends).send(&[1.0_f32; 8], Rank(1))
                } else {
                    comm.with(receives).receive::<f32>(Rank(0)).map(drop)
                }
            });
            let error = results[1].as_ref().unwrap_err();
            assert!(
                matches!(error, CollectiveError::Mismatch { .. }),
                "{error:?}"
            );
            assert!(error.to_string().contains(text), "{error}");
        }
        let results = group.run(|comm| {
            let comm = comm.with(other);
            if comm.rank() == Rank(0) {
                comm.send(&[1.0_f32; 8], Rank(1)).map(|()| vec![])
            } else {
                comm.receive::<f32>(Rank(0))
            }
        });
        assert_eq!(results[1], Ok(vec![1.0; 8]));
    }
    let results = group.run(|comm| {
        if comm.rank() == Rank(0) {
            comm.send(&[true; 3], Rank(1))
        } else {
            comm.receive_into(&mut [false; 2], Rank(0))
        }
    });
    let error = results[1].as_ref().unwrap_err().to_string();
    assert!(error.contains("rank 0 sends 3 bool"), "{error}");
    group.run(|comm| comm.barrier().unwrap());
}
