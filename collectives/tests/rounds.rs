//! All-reduces so long that ranks with a processor each do them in rounds, in the caller's buffer. (On a machine with one processor they are
//! done otherwise, and everything here holds as well.)

#![allow(clippy::unwrap_used, clippy::float_cmp, clippy::cast_sign_loss)]

mod common;

use std::pin::pin;
use std::task::{Context, Waker};

use common::{Group, Kind};
use kolo_collectives::{Communicator, Options, ReduceOp};
use kolo_transport::ids::Rank;

/// Bytes from which on it is so.
const FROM: usize = 12 << 20;
/// Elements of f32.
const LENGTH: usize = FROM / size_of::<f32>() + 70_001;

/// Whole numbers: sums are exact.
fn values(rank: u32, length: usize) -> Vec<f32> {
    let pattern: Vec<f32> = (0..997).map(|at| (at * (rank + 1)) as f32).collect();
    let mut values = pattern.repeat(length.div_ceil(pattern.len()));
    values.truncate(length);
    values
}

/// Of two ranks' values.
fn sum(length: usize) -> Vec<f32> {
    // (0 + 1) + (1 + 1) times what rank 0 has.
    values(2, length)
}

#[test]
fn every_form_gives_all_ranks_the_sum() {
    let group = Group::new(Kind::Shared, 2);
    group.run(|comm| {
        let me = comm.rank().0;
        for length in [FROM / size_of::<f32>() - 1, FROM / size_of::<f32>(), LENGTH] {
            let mut data = values(me, length);
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data == sum(length), "{length}");
        }
        let expected = sum(LENGTH);
        let input = values(me, LENGTH);
        let mut data = vec![0.0; LENGTH];
        comm.all_reduce_into(&input, &mut data, ReduceOp::Sum)
            .unwrap();
        assert!(data == expected && input == values(me, LENGTH));

        let (mut first, mut second) = (values(me, LENGTH), [me as f32; 5]);
        comm.all_reduce_grouped(&mut [&mut first, &mut second], ReduceOp::Sum)
            .unwrap();
        assert!(first == expected && second == [1.0; 5]);

        let handle = comm.start().all_reduce(values(me, LENGTH), ReduceOp::Sum);
        assert!(handle.wait().unwrap() == expected);
        let handle = comm
            .named("long")
            .all_reduce(values(me, LENGTH), ReduceOp::Sum);
        assert!(handle.wait().unwrap() == expected);

        let mut data = values(me, LENGTH);
        comm.with(Options::new().postscale(4.0))
            .all_reduce(&mut data, ReduceOp::Average)
            .unwrap();
        assert!(
            data.iter()
                .zip(&expected)
                .all(|(got, sum)| *got == 2.0 * sum)
        );
        let mut data = values(me, LENGTH);
        comm.all_reduce(&mut data, ReduceOp::Max).unwrap();
        assert!(data == values(1, LENGTH));
        let reduced = comm.named("reduce");
        let reduced = reduced.reduce(values(me, LENGTH), ReduceOp::Sum, Rank(0));
        let root_has = if me == 0 { expected } else { values(1, LENGTH) };
        assert!(reduced.wait().unwrap() == root_has);
        let mut data: Vec<u8> = values(me, FROM + 5)
            .iter()
            .map(|value| *value as u8)
            .collect();
        comm.all_reduce(&mut data, ReduceOp::BitXor).unwrap();
        let (zero, one) = (values(0, FROM + 5), values(1, FROM + 5));
        let mut both = zero.iter().zip(&one);
        assert!(data.iter().all(|got| {
            let (zero, one) = both.next().unwrap();
            *got == *zero as u8 ^ *one as u8
        }));
    });
}

/// Begins an all-reduce, drops it in the middle, and says what is in the buffer then.
fn dropped(comm: &Communicator, polls: usize) -> Vec<f32> {
    let mut data = values(comm.rank().0, LENGTH);
    {
        let mut future = pin!(comm.all_reduce_async(&mut data, ReduceOp::Sum));
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..polls {
            if future.as_mut().poll(&mut cx).is_ready() {
                break;
            }
            std::thread::yield_now();
        }
    }
    data
}

#[test]
fn a_rank_that_gives_up_in_the_middle_leaves_everybodys_input_as_it_was() {
    let group = Group::new(Kind::Shared, 2);
    group.run(|comm| comm.barrier().unwrap());
    let mut failed = 0;
    let all = || (0..12).map(|round| 1 + round * round);
    // Who is fast enough gets through before it is dropped: then once more.
    for polls in all().cycle().take(20 * all().count()) {
        if polls == 1 && failed > 0 {
            break;
        }
        for dropper in [0, 1] {
            let results = group.run(|comm| {
                if comm.rank() == Rank(dropper) {
                    return (None, dropped(comm, polls));
                }
                let mut data = values(comm.rank().0, LENGTH);
                (Some(comm.all_reduce(&mut data, ReduceOp::Sum)), data)
            });
            for (rank, (result, data)) in (0..).zip(results) {
                let is_input = data == values(rank, LENGTH);
                match result {
                    Some(Ok(())) => assert!(data == sum(LENGTH)),
                    Some(Err(_)) => {
                        failed += 1;
                        assert!(is_input, "rank {rank}, after {polls} polls of the other");
                    }
                    // It may have been through.
                    None => assert!(
                        is_input || data == sum(LENGTH),
                        "rank {rank}, {polls} polls"
                    ),
                }
            }
        }
    }
    assert!(failed > 0, "nobody gave up in the middle");
    group.run(|comm| {
        let mut data = values(comm.rank().0, LENGTH);
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert!(data == sum(LENGTH));
    });
}

#[test]
fn a_buffer_of_another_communicator_is_reduced_as_any_memory() {
    let group = Group::new(Kind::Shared, 2);
    group.run(|comm| {
        let other = comm.group(&[Rank(0), Rank(1)]).unwrap().unwrap();
        for length in [3, 1000, 100_000, LENGTH] {
            let mut buffer = comm.buffer::<f32>(length).unwrap();
            buffer.copy_from_slice(&values(comm.rank().0, length));
            other.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
            assert!(*buffer == *sum(length), "{length}");
            // And it is the first one's still.
            comm.all_reduce_buffer(&mut buffer, ReduceOp::Max).unwrap();
            assert!(*buffer == *sum(length), "{length}");
        }
    });
}
