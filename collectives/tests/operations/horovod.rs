//! The rows of Horovod's parallel tests, by their names: `test_torch.py`, `test_process_sets_static.py`, `test_adasum_pytorch.py`,
//! and of `test_tensorflow.py` uneven rows and splits of 0. What Horovod does and has no test for has a name of the same form.
//!
//! Rows of other tests have their names beside these: values, of process sets as well, in the tables of `main.rs` and `special.rs`,
//! process sets and barriers in `groups.rs`, ranks without data in `joins.rs`, timelines and barriers beside others in `negotiation`,
//! wrong arguments in `mistakes.rs`, most of what ranks disagree about in `tests/disagreement`.
//!
//! No counterpart here have: gradients, optimizers, layers and models (they are the framework's), GPUs (buffers are in the host's
//! memory), sparse tensors (no such type), `alltoall_splits_type_error` (splits are `&[usize]`: the compiler refuses others), `reinit`
//! and `is_initialized` (no global state). `test_horovod_rank` and `_size` are in every test, `test_compression_fp16` is in
//! `compressed_values_arrive_as_they_are_rounded`.

use std::fmt::Debug;

use kolo_collectives::Handle;

use super::*;

const WORLD: u32 = 4;

/// 17 in each of one to three dimensions, as Horovod's tests have it.
const LENGTHS: [usize; 3] = [17, 17 * 17, 17 * 17 * 17];

/// Whether a rank disagrees with those of even rank.
fn is_odd(comm: &Communicator) -> bool {
    comm.rank().0 % 2 == 1
}

/// `test_horovod_reducescatter_uneven` and `test_horovod_alltoall_zero_splits`.
#[test]
fn some_ranks_get_less_than_others_or_nothing() {
    Group::new(Kind::Unix, WORLD).run(|comm| {
        for rows in [0, 1, 2, 3, 5, 17] {
            let part = comm
                .reduce_scatter(&vec![1_u32; rows * 3], rows, ReduceOp::Sum)
                .unwrap();
            let mine = rows / 4 + usize::from(comm.rank().index() < rows % 4);
            assert_eq!(part, vec![4; mine * 3], "{rows}");
        }
        let splits = [[0; 4], [1, 0, 1, 0]][usize::from(comm.rank().0 > 0)];
        let received = comm.all_to_all_varcount(&[comm.rank().0; 2], &splits);
        let expected: &[u32] = if is_odd(comm) { &[] } else { &[1, 2, 3] };
        assert_eq!(received.unwrap().values, expected);
    });
}

/// `test_horovod_allreduce_inplace`, `test_horovod_grouped_allreduce_inplace` and `test_horovod_broadcast_inplace`: buffers stay where
/// they are, and what is beside them as it is.
#[test]
fn operations_in_place_leave_buffers_where_they_are() {
    Group::new(Kind::Unix, WORLD).run(|comm| {
        let (me, sum) = (comm.rank().0, combined::<f16>(ReduceOp::Sum, 0..WORLD, 289));
        let mut data = input::<f16>(me, 289);
        let place = data.as_ptr();
        comm.all_reduce(&mut data[17..], ReduceOp::Sum).unwrap();
        assert_eq!(data[..17], input::<f16>(me, 289)[..17]);
        assert_eq!(data[17..], sum[17..]);
        let started = comm.start().broadcast(data, Rank(1));
        let data = started.wait().unwrap();
        assert_eq!(data, [&input::<f16>(1, 17)[..], &sum[17..]].concat());
        let buffers = vec![data, vec![f16::ONE; 3]];
        let named = comm
            .named("group")
            .all_reduce_grouped(buffers, ReduceOp::Max);
        let buffers = named.wait().unwrap();
        assert_eq!(buffers[1], [f16::ONE; 3]);
        assert_eq!(buffers[0].as_ptr(), place);
    });
}

/// The rows with `prescale` and `postscale` of all-reduces, reduce-scatters and grouped reduce-scatters. Of integers the scaled value
/// is truncated: the input, or the result.
#[test]
fn factors_are_applied_to_every_type() {
    fn scales<T: Element>(comm: &Communicator, value: T, expected: T) {
        let mut data = [value; 17];
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [expected; 17], "{}", T::DTYPE);
        let part = comm.reduce_scatter(&[value; 16], 8, ReduceOp::Sum).unwrap();
        assert_eq!(part, [expected; 4], "{}", T::DTYPE);
        let buffers: [(&[T], usize); 2] = [(&[value; 16], 8), (&[value; 4], 4)];
        let parts = comm.reduce_scatter_grouped(&buffers, ReduceOp::Sum);
        assert_eq!(parts.unwrap(), [vec![expected; 4], vec![expected]]);
    }
    macro_rules! each_scales {
        ($comm:expr, $value:expr, $whole:expr, $real:expr, $($integer:ty)*) => {
            $(scales($comm, $value as $integer, $whole as $integer);)*
            scales($comm, f16::from_f32($value), f16::from_f32($real));
            scales($comm, bf16::from_f32($value), bf16::from_f32($real));
            scales($comm, $value, $real);
            scales($comm, f64::from($value), f64::from($real));
        };
    }
    Group::new(Kind::Unix, WORLD).run(|comm| {
        for (options, whole, real) in [
            (Options::new().prescale(0.5), 4, 6.0),
            (Options::new().postscale(0.125), 1, 1.5),
        ] {
            let scaled = &comm.with(options);
            each_scales!(scaled, 3.0_f32, whole, real, u8 i8 u16 i16 u32 i32 u64 i64);
        }
    });
}

/// 17 on the even ranks, 18 on the odd ranks.
fn length(comm: &Communicator) -> usize {
    17 + usize::from(is_odd(comm))
}

/// With one shape on the even ranks, and another one on the odd ranks.
fn shaped(comm: &Communicator, shapes: [&[usize]; 2]) -> Communicator {
    comm.with(Options::new().shape(shapes[usize::from(is_odd(comm))]))
}

/// Of a gather and an all-to-all the shape is that of a row: how many there are need not agree.
#[test]
fn ranks_that_disagree_are_told_what_both_asked_for() {
    type Body = fn(&Communicator) -> Result<(), CollectiveError>;
    const SUM: ReduceOp = ReduceOp::Sum;
    const ROWS: [&[usize]; 2] = [&[10, 17], &[20, 17]];

    let shapes = ["shape [10, 17]", "shape [20, 17]"];
    let lengths = ["of 17 f32", "of 18 f32"];
    let types = ["i32", "f32"];
    let rows: [(&str, Body, [&str; 2]); 11] = [
        (
            "allreduce_op_error",
            |comm| {
                let op = [SUM, ReduceOp::Max][usize::from(is_odd(comm))];
                comm.named("x").all_reduce(vec![1], op).wait().map(drop)
            },
            ["sum", "max"],
        ),
        (
            "allgather_error",
            |comm| shaped(comm, ROWS).all_gather(&[1.0_f32; 340]).map(drop),
            shapes,
        ),
        (
            "allgather_error",
            |comm| {
                let rows = vec![1.0_f32; 340 * length(comm)];
                shaped(comm, ROWS).all_gather_varcount(&rows).map(drop)
            },
            shapes,
        ),
        (
            "allgather_error",
            |comm| {
                let named = shaped(comm, ROWS).named("x");
                named.all_gather(vec![1.0_f32; 340]).wait().map(drop)
            },
            shapes,
        ),
        (
            "broadcast_error",
            |comm| comm.broadcast(&mut vec![1_f32; length(comm)], Rank(0)),
            lengths,
        ),
        (
            "broadcast_type_error",
            |comm| match comm.rank().0 % 2 {
                0 => comm.broadcast(&mut [1_i32; 17], Rank(0)),
                _ => comm.broadcast(&mut [1_f32; 17], Rank(0)),
            },
            types,
        ),
        (
            "alltoall_rank_error",
            |comm| shaped(comm, ROWS).all_to_all(&[1.0_f32; 680]).map(drop),
            shapes,
        ),
        (
            "alltoall_rank_error",
            |comm| {
                let width = 170 * (1 + usize::from(is_odd(comm)));
                let rows = vec![1.0_f32; 4 * width];
                let shaped = shaped(comm, ROWS);
                shaped.all_to_all_varcount(&rows, &[width; 4]).map(drop)
            },
            shapes,
        ),
        (
            "reducescatter_error",
            |comm| {
                let data = vec![1.0_f32; length(comm)];
                comm.reduce_scatter(&data, 1, SUM).map(drop)
            },
            lengths,
        ),
        (
            "reducescatter_error",
            |comm| {
                let shaped = shaped(comm, [&[17, 15], &[17, 3, 5]]);
                shaped.reduce_scatter(&[1.0_f32; 255], 17, SUM).map(drop)
            },
            ["[17, 15]", "[17, 3, 5]"],
        ),
        (
            "reducescatter_type_error",
            |comm| match comm.rank().0 % 2 {
                0 => comm.reduce_scatter(&[1_i32; 17], 17, SUM).map(drop),
                _ => comm.reduce_scatter(&[1_f32; 17], 17, SUM).map(drop),
            },
            types,
        ),
    ];
    let group = Group::new(Kind::Unix, WORLD);
    for (name, body, words) in rows {
        for result in group.run(body) {
            let error = result.unwrap_err();
            let is_mismatch = matches!(error, CollectiveError::Mismatch { .. });
            assert!(is_mismatch, "test_horovod_{name}: {error}");
            let text = error.to_string();
            let says_both = words.iter().all(|word| text.contains(word));
            assert!(says_both, "test_horovod_{name}: {error}");
        }
        group.run(|comm| comm.barrier().unwrap());
    }
}

/// What was started, and what is to come of it.
struct Started {
    was_done: bool,
    check: Box<dyn FnOnce()>,
}

impl Started {
    fn new<R: PartialEq + Debug + 'static>(handle: Handle<R>, expected: R) -> Self {
        Self {
            was_done: handle.poll(),
            check: Box::new(move || assert_eq!(handle.wait().unwrap(), expected)),
        }
    }
}

/// `test_horovod_allreduce_async_fused`, and those of allgather and reducescatter: all types and lengths are under way at once, started
/// in another order on each rank.
#[test]
fn operations_of_all_types_are_under_way_at_once() {
    type Starts = fn(&Communicator, &Start, usize) -> Started;
    fn reduces<T: Value>(comm: &Communicator, start: &Start, length: usize) -> Started {
        let handle = start.all_reduce(input::<T>(comm.rank().0, length), ReduceOp::Max);
        Started::new(handle, combined::<T>(ReduceOp::Max, 0..WORLD, length))
    }
    fn gathers<T: Value>(comm: &Communicator, start: &Start, length: usize) -> Started {
        let handle = start.all_gather(input::<T>(comm.rank().0, length));
        let all = (0..WORLD).flat_map(|rank| input(rank, length)).collect();
        Started::new(handle, all)
    }
    fn scatters<T: Value>(comm: &Communicator, start: &Start, length: usize) -> Started {
        let handle = start.reduce_scatter(input::<T>(comm.rank().0, length), length, ReduceOp::Max);
        let whole = combined::<T>(ReduceOp::Max, 0..WORLD, length);
        Started::new(handle, whole[comm.rows_of(length, comm.rank())].to_vec())
    }
    let starts: [[Starts; 13]; 3] = [
        for_each_type!(reduces),
        for_each_type!(gathers),
        for_each_type!(scatters),
    ];
    let starts = starts.concat();
    Group::new(Kind::Unix, WORLD).run(|comm| {
        if comm.rank() != Rank(0) {
            comm.barrier().unwrap();
        }
        let mut numbers: Vec<usize> = (0..3 * starts.len()).collect();
        numbers.rotate_left(5 * comm.rank().index());
        let start = |number: usize| {
            let named = comm.named(format!("noname.{number}"));
            starts[number / 3](comm, &named, LENGTHS[number % 3])
        };
        let started: Vec<Started> = numbers.into_iter().map(start).collect();
        if comm.rank() == Rank(0) {
            // Nobody else has started any yet.
            assert!(started.iter().all(|started| !started.was_done));
            comm.barrier().unwrap();
        }
        for started in started {
            (started.check)();
        }
    });
}

/// `test_horovod_allreduce_duplicate_name_error`, those of allgather, broadcast and reducescatter, and `test_duplicate_names`: a rank
/// uses a name twice, which fails there and leaves the first use alone.
#[test]
fn a_name_that_is_under_way_is_refused_and_goes_on() {
    type Named = fn(&Start) -> Handle<Vec<f32>>;
    type Expected = fn(Rank) -> Vec<f32>;
    let rows: [(&str, Named, Expected); 4] = [
        (
            "allreduce",
            |start| start.all_reduce(vec![1.0], ReduceOp::Sum),
            |_| vec![4.0],
        ),
        (
            "allgather",
            |start| start.all_gather(vec![1.0; 17]),
            |_| vec![1.0; 68],
        ),
        (
            "broadcast",
            |start| start.broadcast(vec![1.0], Rank(0)),
            |_| vec![1.0],
        ),
        (
            "reducescatter",
            |start| start.reduce_scatter(vec![0.0, 1.0, 2.0, 3.0], 4, ReduceOp::Sum),
            |rank| vec![4.0 * rank.0 as f32],
        ),
    ];
    Group::new(Kind::Unix, WORLD).run(|comm| {
        let named = comm.named("duplicate_name");
        for ((name, start, expected), hasty) in rows.into_iter().zip(0..) {
            let _row = Case(name);
            let first = (comm.rank() == Rank(hasty)).then(|| start(&named));
            if first.is_some() {
                // Another operation has this one's name as well.
                for again in [start(&named), named.all_to_all(vec![0.0; 4])] {
                    let error = again.wait().unwrap_err().to_string();
                    assert!(error.contains("under way on this rank already"), "{error}");
                }
            }
            // The first can't end before that rank has tried again.
            comm.barrier().unwrap();
            let first = first.unwrap_or_else(|| start(&named));
            assert_eq!(first.wait().unwrap(), expected(comm.rank()));
        }
    });
}

/// Adasum of values that are given as `f64` and rounded to this type.
fn adasum<T: Element + Into<f64>>(
    comm: &Communicator,
    round: fn(f64) -> T,
    values: impl IntoIterator<Item = f64>,
) -> Vec<f64> {
    let mut data: Vec<T> = values.into_iter().map(round).collect();
    comm.all_reduce(&mut data, ReduceOp::Adasum).unwrap();
    data.into_iter().map(Into::into).collect()
}

/// `test_orthogonal` and `test_parallel`: of values that each rank has in a place of its own the sum, of values that are alike the
/// average.
#[test]
fn adasum_of_orthogonal_and_of_parallel_values() {
    Group::new(Kind::Unix, WORLD).run(|comm| {
        for (length, is_parallel) in [4, 17, 4096]
            .into_iter()
            .flat_map(|length| [(length, true), (length, false)])
        {
            let values = || {
                (0..length).map(|index| {
                    let has_value = is_parallel || index % 4 == comm.rank().index();
                    if has_value { 1.25 } else { 0.0 }
                })
            };
            for got in [
                adasum(comm, f16::from_f64, values()),
                adasum(comm, |value| value as f32, values()),
                adasum(comm, |value| value, values()),
            ] {
                assert!(got.iter().all(|got| (got - 1.25).abs() < 1e-6), "{got:?}");
            }
        }
    });
}

/// `test_stability`: tiny and large values, and nothing at all. No NaN comes out.
#[test]
fn adasum_of_extreme_values_is_no_nan() {
    Group::new(Kind::Unix, WORLD).run(|comm| {
        for value in [1e-30, 1e18, 0.0] {
            let mine = value * (1.0 + f64::from(comm.rank().0));
            let average = value * 2.5;
            for got in adasum(comm, |value| value as f32, [mine; 64]) {
                assert!((got - average).abs() <= 1e-6 * average, "{value}: {got}");
            }
        }
    });
}

/// `test_stability_2`: parallel values of which the ranks' sizes span what the type holds (its square root, as they are multiplied).
/// The average comes out.
fn averages_far_apart<T: Element + Into<f64>>(
    comm: &Communicator,
    round: fn(f64) -> T,
    (least, most): (f64, f64),
    tolerance: f64,
) {
    let size = |place: u32| {
        let share = f64::from(place + 1) / f64::from(WORLD);
        most.sqrt().powf(share) * least.powf(1.0 - share)
    };
    let values = |place: u32| {
        let directions = (0..1024).map(|index| f64::from(index % 13 - 6) + 0.5);
        let size = size(place);
        directions.map(move |direction| size * direction / 8.0)
    };
    let rounded = |place| values(place).map(|value| round(value).into());
    let all: Vec<Vec<f64>> = (0..WORLD).map(|place| rounded(place).collect()).collect();
    // Which rank has the largest ones, and who is paired with whom.
    for first in 0..WORLD {
        let got = adasum(comm, round, values((comm.rank().0 + first) % WORLD));
        for (index, got) in got.into_iter().enumerate() {
            let expected = all.iter().map(|values| values[index]).sum::<f64>() / f64::from(WORLD);
            assert!(
                (got - expected).abs() <= tolerance * expected.abs(),
                "{index} of {}, {first}: {got}, not {expected}",
                T::DTYPE
            );
        }
    }
}

#[test]
fn adasum_of_values_far_apart_is_their_average() {
    Group::new(Kind::Unix, WORLD).run(|comm| {
        let halves = (f16::MIN_POSITIVE.to_f64(), f16::MAX.to_f64());
        averages_far_apart(comm, f16::from_f64, halves, 1e-2);
        let singles = (f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX));
        averages_far_apart(comm, |value| value as f32, singles, 1e-5);
        // What is so small that its square is 0 counts as orthogonal. (Horovod's limit is higher.)
        let doubles = (f64::MIN_POSITIVE.sqrt(), f64::MAX);
        averages_far_apart(comm, |value| value, doubles, 1e-12);
    });
}
