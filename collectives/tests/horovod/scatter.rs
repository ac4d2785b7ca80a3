//! Reductions of which each rank gets its rows.

use super::*;

/// 17 rows: rank 0 gets one more than the others.
pub(super) fn scatters<T: Value>(comm: &Communicator, op: ReduceOp, length: usize) {
    let part = comm
        .reduce_scatter(&mine::<T>(comm, length), 17, op)
        .unwrap();
    let expected = part_of(comm, &combined::<T>(op, members(comm), length));
    assert_eq!(part, expected, "{op} of {length} {}", T::DTYPE);
}

/// This rank's of 17 rows.
fn part_of<T: Element>(comm: &Communicator, whole: &[T]) -> Vec<T> {
    let (rows, width) = (comm.rows_of(17, comm.rank()), whole.len() / 17);
    whole[rows.start * width..rows.end * width].to_vec()
}

fn starts_scatter<T: Value>(comm: &Communicator, start: &Start, length: usize) -> Started {
    let handle = start.reduce_scatter(mine::<T>(comm, length), 17, ReduceOp::Sum);
    let expected = part_of(comm, &combined::<T>(ReduceOp::Sum, 0..SIZE, length));
    Started::new(handle, expected)
}

/// Five buffers, as Horovod's tests have it.
pub(super) fn scatters_group<T: Value>(comm: &Communicator, op: ReduceOp, length: usize) {
    let lengths = (length..).step_by(3 * 17).take(5);
    let buffers: Vec<(Vec<T>, usize)> = lengths
        .clone()
        .map(|length| (mine(comm, length), 17))
        .collect();
    let expected: Vec<Vec<T>> = lengths
        .map(|length| part_of(comm, &combined::<T>(op, members(comm), length)))
        .collect();
    let group: Vec<(&[T], usize)> = buffers
        .iter()
        .map(|(data, rows)| (&data[..], *rows))
        .collect();
    let parts = comm.reduce_scatter_grouped(&group, op).unwrap();
    assert_eq!(parts, expected, "{op} of {length} {}", T::DTYPE);
    let started = comm.start().reduce_scatter_grouped(buffers, op);
    assert_eq!(started.wait().unwrap(), expected);
}

fn scales<T: Element>(comm: &Communicator, value: T, expected: T) {
    let part = comm.reduce_scatter(&[value; 16], 8, ReduceOp::Sum).unwrap();
    assert_eq!(part, [expected; 4], "{}", T::DTYPE);
}

fn scales_group<T: Element>(comm: &Communicator, value: T, expected: T) {
    let buffers: [(&[T], usize); 2] = [(&[value; 16], 8), (&[value; 4], 4)];
    let parts = comm
        .reduce_scatter_grouped(&buffers, ReduceOp::Sum)
        .unwrap();
    assert_eq!(parts, [vec![expected; 4], vec![expected]], "{}", T::DTYPE);
}

fn refuses_adasum<T: Value>(comm: &Communicator, length: usize) {
    let data = mine::<T>(comm, length);
    let result = comm.reduce_scatter(&data, 17, ReduceOp::Adasum);
    all_invalid(vec![result.map(drop)], "adasum");
}

#[test]
fn test_horovod_reducescatter() {
    on_all(|comm| {
        each(of_numbers!(scatters), |check, length| {
            check(comm, ReduceOp::Sum, length);
        });
    });
}

#[test]
fn test_horovod_reducescatter_average() {
    on_all(|comm| {
        each(of_numbers!(scatters), |check, length| {
            check(comm, ReduceOp::Average, length);
        });
    });
}

#[test]
fn test_horovod_grouped_reducescatter() {
    on_all(|comm| {
        each(of_numbers!(scatters_group), |check, length| {
            check(comm, ReduceOp::Sum, length);
        });
    });
}

#[test]
fn test_horovod_grouped_reducescatter_average() {
    on_all(|comm| {
        each(of_numbers!(scatters_group), |check, length| {
            check(comm, ReduceOp::Average, length);
        });
    });
}

/// Of integers, the scaled input is truncated.
#[test]
fn test_horovod_grouped_reducescatter_prescale() {
    on_all(|comm| {
        let half = comm.with(Options::new().prescale(0.5));
        with_numbers!(scales_group(&half), 3, 4, 6.0);
    });
}

#[test]
fn test_horovod_grouped_reducescatter_postscale() {
    on_all(|comm| {
        let half = comm.with(Options::new().postscale(0.5));
        with_numbers!(scales_group(&half), 3, 6, 6.0);
    });
}

#[test]
fn test_horovod_grouped_reducescatter_scalar_error() {
    on_all(|comm| {
        // A value has no rows.
        let buffers: [(&[f32], usize); 2] = [(&[1.0; 4], 4), (&[1.0], 0)];
        let result = comm.reduce_scatter_grouped(&buffers, ReduceOp::Sum);
        all_invalid(vec![result.map(drop)], "1 elements in 0 rows");
    });
}

/// Of integers, the scaled input is truncated.
#[test]
fn test_horovod_reducescatter_prescale() {
    on_all(|comm| {
        let half = comm.with(Options::new().prescale(0.5));
        with_numbers!(scales(&half), 3, 4, 6.0);
    });
}

/// Of integers, the scaled result is truncated.
#[test]
fn test_horovod_reducescatter_postscale() {
    on_all(|comm| {
        let eighth = comm.with(Options::new().postscale(0.125));
        with_numbers!(scales(&eighth), 3, 1, 1.5);
    });
}

/// Any number of them may be under way; those with names are fused.
#[test]
fn test_horovod_reducescatter_async_fused() {
    async_fused(of_numbers!(starts_scatter));
}

#[test]
fn test_horovod_reducescatter_type_error() {
    let results = on_all(|comm| {
        if comm.rank().0 % 2 == 0 {
            comm.reduce_scatter(&[1_i32; 17], 17, ReduceOp::Sum)
                .map(drop)
        } else {
            comm.reduce_scatter(&[1_f32; 17], 17, ReduceOp::Sum)
                .map(drop)
        }
    });
    all_mismatch(results, &["i32", "f32"]);
}

#[test]
fn test_horovod_reducescatter_adasum() {
    on_all(|comm| {
        each(of_numbers!(refuses_adasum), |check, length| {
            check(comm, length);
        });
        scatters::<f32>(comm, ReduceOp::Sum, 17);
    });
}

#[test]
fn test_horovod_reducescatter_duplicate_name_error() {
    duplicate_name(
        |start| start.reduce_scatter(vec![0.0_f32, 1.0, 2.0, 3.0], 4, ReduceOp::Sum),
        |rank| vec![4.0 * rank.0 as f32],
    );
}

/// The first ranks get one row more, those that come last perhaps none.
#[test]
fn test_horovod_reducescatter_uneven() {
    on_all(|comm| {
        for rows in [0, 1, 2, 3, 5, 17] {
            let part = comm
                .reduce_scatter(&vec![1_u32; rows * 3], rows, ReduceOp::Sum)
                .unwrap();
            let mine = rows / 4 + usize::from(comm.rank().index() < rows % 4);
            assert_eq!(part, vec![4; mine * 3], "{rows}");
        }
    });
}

#[test]
fn test_horovod_reducescatter_error() {
    let results = on_all(|comm| {
        // Other rows, another length, and the same of both in another shape.
        let odd = comm.rank().index() % 2;
        let shape = [&[17, 3 * 5][..], &[17, 3, 5]][odd];
        let scatter = |comm: &Communicator, length, rows| {
            let part = comm.reduce_scatter(&vec![1.0_f32; length], rows, ReduceOp::Sum);
            part.map(drop)
        };
        let shaped = comm.with(Options::new().shape(shape));
        [
            scatter(comm, 16, 2 + 2 * odd),
            scatter(comm, 17 + odd, 1),
            scatter(&shaped, 255, 17),
        ]
    });
    each_mismatch(
        &results,
        [
            ["in 2 rows", "in 4 rows"],
            ["of 17 f32", "of 18 f32"],
            ["[17, 15]", "[17, 3, 5]"],
        ],
    );
}

/// A number by itself has no first dimension to split.
#[test]
fn test_horovod_reducescatter_scalar_error() {
    let results = on_all(|comm| comm.reduce_scatter(&[1_u8], 0, ReduceOp::Sum).map(drop));
    all_invalid(results, "in 0 rows");
}
