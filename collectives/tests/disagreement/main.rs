//! Ranks that ask for different things.

#![allow(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    clippy::unwrap_used
)]

#[path = "../common/mod.rs"]
mod common;
mod deadlines;

use std::time::{Duration, Instant};

use common::{Body, Group, Kind, LONG, at_once, done, sum};
use kolo_collectives::stall::Missing;
use kolo_collectives::{CollectiveError, Communicator, Compression, Options, ReduceOp};
use kolo_transport::ids::Rank;

/// What most ranks do, what one does, and how both read.
type Case = (Body, &'static str, Body, &'static str);

const SUM: ReduceOp = ReduceOp::Sum;

macro_rules! cases {
    ($comm:ident: $($most:expr => $most_ask:expr, $one:expr => $one_asks:expr;)*) => {
        [$((|$comm| done($most), $most_ask, |$comm| done($one), $one_asks)),*]
    };
}

fn with(comm: &Communicator, options: Options) -> Result<(), CollectiveError> {
    comm.with(options).all_reduce(&mut [1_f32; 4], SUM)
}

fn rows(comm: &Communicator, shape: &[usize]) -> Communicator {
    comm.with(Options::new().shape(shape))
}

/// So many for each rank.
fn each<T: Clone>(comm: &Communicator, count: usize, value: T) -> Vec<T> {
    vec![value; count * comm.world_size() as usize]
}

fn scatter_rows(comm: &Communicator, rows: [usize; 2]) -> Result<(), CollectiveError> {
    let buffers: [(&[u8], usize); 2] = [(&[1; 4], rows[0]), (&[1; 4], rows[1])];
    comm.reduce_scatter_grouped(&buffers, SUM).map(drop)
}

/// Horovod: `test_horovod_allreduce_error`, `_type_error`, `_op_error` and `_scale_error`, `test_horovod_allgather_error` and `_type_error`,
/// `test_horovod_broadcast_error`, `_type_error` and `_rank_error`, `test_horovod_alltoall_rank_error` and `_type_error`,
/// `test_horovod_reducescatter_error` and `_type_error`. Of a gather and an all-to-all the shape is that of a row.
const CASES: &[Case] = &cases! { comm:
    comm.barrier() => "barrier",
    comm.all_reduce(&mut [1_f32], SUM) => "all_reduce(sum) of 1 f32";

    comm.all_reduce(&mut [1_f32; 4], SUM) => "all_reduce(sum) of 4 f32",
    comm.all_reduce(&mut [1_f32; 5], SUM) => "all_reduce(sum) of 5 f32";

    comm.all_reduce(&mut [1_f32; 4], SUM) => "all_reduce(sum) of 4 f32",
    comm.all_reduce(&mut [1_f32; 4], ReduceOp::Max) => "all_reduce(max) of 4 f32";

    comm.all_reduce(&mut [1_i32; 4], SUM) => "all_reduce(sum) of 4 i32",
    comm.all_reduce(&mut [1_f32; 4], SUM) => "all_reduce(sum) of 4 f32";

    // The lengths of one are beyond what goes another way.
    comm.all_reduce(&mut [1_u8; 4], SUM) => "all_reduce(sum) of 4 u8",
    comm.all_reduce(&mut vec![1_u8; 4 << 20], SUM) => "all_reduce(sum) of 4194304 u8";

    with(comm, Options::new()) => "all_reduce(sum) of 4 f32",
    with(comm, Options::new().prescale(0.5)) => "all_reduce(sum) of 4 f32, prescale 0.5";

    with(comm, Options::new()) => "all_reduce(sum) of 4 f32",
    with(comm, Options::new().postscale(2.0)) => "all_reduce(sum) of 4 f32, postscale 2";

    with(comm, Options::new().compression(Compression::F16)) => "sent as f16",
    with(comm, Options::new().compression(Compression::Bf16)) => "sent as bf16";

    with(comm, Options::new().shape(&[4, 1])) => "shape [4, 1]",
    with(comm, Options::new().shape(&[2, 2])) => "shape [2, 2]";

    comm.all_reduce_grouped(&mut [&mut [1_u8; 3], &mut [1; 2]], SUM) => "shape [3, 2]",
    comm.all_reduce_grouped(&mut [&mut [1_u8; 2], &mut [1; 3]], SUM) => "shape [2, 3]";

    comm.all_gather_grouped(&[&[1_u8; 3], &[1; 2]]) => "all_gather_varcount u8 in 2 buffers",
    comm.all_gather_grouped(&[&[1_u8; 3], &[1; 2], &[]]) => "all_gather_varcount u8 in 3 buffers";

    scatter_rows(comm, [4, 2]) => "shape [4, 4, 4, 2]",
    scatter_rows(comm, [2, 4]) => "shape [4, 2, 4, 4]";

    comm.broadcast(&mut [1_f64; 4], Rank(1)) => "broadcast of 4 f64 from root 1",
    comm.broadcast(&mut [1_f64; 4], Rank(0)) => "broadcast of 4 f64 from root 0";

    comm.broadcast(&mut [1_f32; 4], Rank(0)) => "broadcast of 4 f32 from root 0",
    comm.broadcast(&mut [1_f32; 5], Rank(0)) => "broadcast of 5 f32 from root 0";

    comm.reduce(&mut [1_u16; 4], SUM, Rank(0)) => "reduce(sum) of 4 u16 to root 0",
    comm.reduce(&mut [1_u16; 4], SUM, Rank(1)) => "reduce(sum) of 4 u16 to root 1";

    comm.reduce(&mut [1_u16; 4], ReduceOp::Min, Rank(0)) => "reduce(min) of 4 u16 to root 0",
    comm.reduce(&mut [1_u16; 4], ReduceOp::BitXor, Rank(0)) => "reduce(bit_xor) of 4 u16 to root 0";

    // Each of them only sends, or needs nobody.
    comm.reduce(&mut [1_u8; 3], SUM, Rank(0)) => "reduce(sum) of 3 u8 to root 0",
    comm.broadcast(&mut [1_u8; 3], Rank(0)) => "broadcast of 3 u8 from root 0";

    comm.reduce_scatter(&[1_u64; 12], 12, SUM) => "reduce_scatter(sum) of 12 u64 in 12 rows",
    comm.reduce_scatter(&[1_u64; 12], 6, SUM) => "reduce_scatter(sum) of 12 u64 in 6 rows";

    comm.all_gather(&[1_i64; 2]) => "all_gather of 2 i64",
    comm.all_gather(&[1_i64; 3]) => "all_gather of 3 i64";

    rows(comm, &[10, 17]).all_gather(&[1_u8; 340]) => "shape [10, 17]",
    rows(comm, &[20, 17]).all_gather(&[1_u8; 340]) => "shape [20, 17]";

    comm.all_gather_varcount(&[1_i64; 2]) => "all_gather_varcount i64",
    comm.all_gather_varcount(&[1_f32; 2]) => "all_gather_varcount f32";

    rows(comm, &[10, 17]).all_gather_varcount(&[1_u8; 170]) => "shape [10, 17]",
    rows(comm, &[20, 17]).all_gather_varcount(&[1_u8; 340]) => "shape [20, 17]";

    comm.gather(&[1_i64; 2], Rank(0)) => "gather of 2 i64 to root 0",
    comm.gather(&[1_i64; 2], Rank(1)) => "gather of 2 i64 to root 1";

    comm.gather(&[1_i64; 2], Rank(0)) => "gather of 2 i64 to root 0",
    comm.gather(&[1_i64; 3], Rank(0)) => "gather of 3 i64 to root 0";

    comm.gather_varcount(&[true], Rank(0)) => "gather_varcount bool to root 0",
    comm.gather_varcount(&[1_u8], Rank(0)) => "gather_varcount u8 to root 0";

    comm.scatter(&each(comm, 3, 1_i64), 3, Rank(0)) => "scatter of 3 i64 from root 0",
    comm.scatter(&each(comm, 2, 1_i64), 2, Rank(0)) => "scatter of 2 i64 from root 0";

    comm.scatter_varcount(&each(comm, 1, 1_u8), &each(comm, 1, 1), Rank(0)) => "scatter_varcount u8 from root 0",
    comm.gather_varcount(&[1_u8], Rank(0)) => "gather_varcount u8 to root 0";

    comm.all_to_all(&each(comm, 1, 1_u8)) => "all_to_all of 1 u8",
    comm.all_to_all(&each(comm, 1, 1_i8)) => "all_to_all of 1 i8";

    rows(comm, &[10]).all_to_all(&each(comm, 1, 1_u8)) => "shape [10]",
    rows(comm, &[20]).all_to_all(&each(comm, 1, 1_u8)) => "shape [20]";

    comm.broadcast_object(Some(5), Rank(0)) => "broadcast_object from root 0",
    comm.all_gather_object(&5) => "all_gather_object";

    // Operations of several parts (lengths, then values) have one number as all others: afterwards all are in step.
    comm.all_gather_varcount(&[1_u8]) => "all_gather_varcount u8",
    comm.all_gather(&[1_u8]) => "all_gather of 1 u8";

    comm.broadcast_object(Some(5), Rank(0)) => "broadcast_object from root 0",
    comm.broadcast(&mut [1_u8], Rank(0)) => "broadcast of 1 u8 from root 0";

    comm.all_to_all_varcount(&each(comm, 1, 1_u8), &each(comm, 1, 1)) => "all_to_all_varcount u8",
    comm.all_to_all(&each(comm, 1, 1_u8)) => "all_to_all of 1 u8";
};

/// On every rank, whoever it is that asks for something else, long before the deadline, whether there are links already or
/// not; and the communicator stays usable.
fn check(kind: Kind) {
    // What is compared is the same over all links: they have few ranks, and those between hosts take long to make.
    let (worlds, with_cold) = match kind {
        Kind::Memory => (&[2, 3, 4, 7][..], true),
        Kind::Shared => (&[2, 4][..], true),
        _ => (&[2, 3][..], false),
    };
    for &world in worlds {
        let warm = Group::new(kind, world);
        warm.run(|comm| sum(comm, 10).unwrap());
        for odd in [0, world - 1, world / 2] {
            for (most, most_ask, one, one_asks) in CASES {
                let cold = with_cold.then(|| Group::new(kind, world));
                for group in std::iter::once(&warm).chain(&cold) {
                    let begun = Instant::now();
                    let results = group.run(|comm| {
                        if comm.rank() == Rank(odd) {
                            one(comm)
                        } else {
                            most(comm)
                        }
                    });
                    let place = format!("{kind:?} world {world} odd {odd} {most_ask}");
                    assert!(begun.elapsed() < LONG / 2, "{place}: by the deadline");
                    for result in results {
                        let error = result.expect_err(&place);
                        let text = error.to_string();
                        assert!(
                            matches!(error, CollectiveError::Mismatch { .. })
                                && text.contains(most_ask)
                                && text.contains(one_asks)
                                && text.contains(&format!("rank {odd}")),
                            "{place}: {text}"
                        );
                        assert_eq!(error.culprit_rank(), None);
                    }
                    for length in [100, 1] {
                        group.run(|comm| sum(comm, length).unwrap());
                    }
                }
            }
        }
    }
}

#[test]
fn ranks_that_disagree_all_hear_who_asked_for_what() {
    use Kind::{Memory, Quic, Shared, Tls, Unix};
    at_once([Memory, Unix, Shared, Tls, Quic], check);
}

/// An Adasum of several buffers is done one by one; none is no reason to say nothing.
#[test]
fn an_adasum_of_no_buffers_is_an_operation_too() {
    for kind in [Kind::Memory, Kind::Shared] {
        let group = Group::new(kind, 2);
        group.run(|comm| {
            let mut none: [&mut [f32]; 0] = [];
            assert_eq!(comm.all_reduce_grouped(&mut none, ReduceOp::Adasum), Ok(()));
            let (mut one, mut other) = ([1_f32; 3], [2_f32; 5]);
            let mut both: [&mut [f32]; 2] = [&mut one, &mut other];
            let buffers = if comm.rank() == Rank(0) {
                &mut both[..]
            } else {
                &mut none[..]
            };
            let error = comm.all_reduce_grouped(buffers, ReduceOp::Adasum);
            let error = error.unwrap_err();
            assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
            assert_eq!((one, other), ([1_f32; 3], [2_f32; 5]));
            comm.barrier().unwrap();
        });
    }
}
