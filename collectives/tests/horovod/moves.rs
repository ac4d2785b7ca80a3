//! What moves values and combines none.

use super::*;

pub(super) fn gathers<T: Value>(comm: &Communicator, length: usize) {
    let all = comm.all_gather(&mine::<T>(comm, length)).unwrap();
    let ranks = members(comm);
    let expected: Vec<T> = ranks.iter().flat_map(|rank| input(*rank, length)).collect();
    assert_eq!(all, expected, "{length} {}", T::DTYPE);
}

fn starts_gather<T: Value>(comm: &Communicator, start: &Start, length: usize) -> Started {
    let handle = start.all_gather(mine::<T>(comm, length));
    let expected = (0..SIZE).flat_map(|rank| input(rank, length)).collect();
    Started::new(handle, expected)
}

fn gathers_varcount<T: Value>(comm: &Communicator, length: usize) {
    let sizes = [17, 32, 81, 12].map(|rows| rows * length / 17);
    let own = input::<T>(comm.rank().0, sizes[comm.rank().index()]);
    let all = comm.all_gather_varcount(&own).unwrap();
    assert_eq!(all.counts, sizes);
    for (rank, size) in (0..).zip(sizes) {
        assert_eq!(all.of(Rank(rank)), input::<T>(rank, size), "{}", T::DTYPE);
    }
}

pub(super) fn broadcasts<T: Value>(comm: &Communicator, length: usize) {
    for (root, of_job) in (0..).zip(members(comm)) {
        let mut data = mine::<T>(comm, length);
        let place = data.as_ptr();
        comm.broadcast(&mut data, Rank(root)).unwrap();
        assert_eq!(data, input::<T>(of_job, length), "{}", T::DTYPE);
        let data = comm.start().broadcast(data, Rank(root)).wait().unwrap();
        assert_eq!((data.as_ptr(), data), (place, input::<T>(of_job, length)));
    }
}

/// Rank i gets i + 1 rows from each.
pub(super) fn exchanges<T: Value>(comm: &Communicator, length: usize) {
    let width = length / 17;
    let (me, world) = (comm.rank().index(), comm.world_size() as usize);
    let splits: Vec<usize> = (1..=world).map(|rows| rows * width).collect();
    let total = splits.iter().sum();
    let received = comm
        .all_to_all_varcount(&mine::<T>(comm, total), &splits)
        .unwrap();
    assert_eq!(received.counts, vec![splits[me]; world]);
    let start: usize = splits[..me].iter().sum();
    for (rank, of_job) in (0..).zip(members(comm)) {
        let theirs = input::<T>(of_job, total);
        let part = &theirs[start..start + splits[me]];
        assert_eq!(received.of(Rank(rank)), part, "{length} {}", T::DTYPE);
    }
}

fn exchanges_equal_parts<T: Value>(comm: &Communicator, length: usize) {
    let received = comm.all_to_all(&mine::<T>(comm, 4 * length)).unwrap();
    let part = comm.rank().index() * length..(comm.rank().index() + 1) * length;
    let expected: Vec<T> = (0..SIZE)
        .flat_map(|rank| input::<T>(rank, 4 * length)[part.clone()].to_vec())
        .collect();
    assert_eq!(received, expected, "{length} {}", T::DTYPE);
}

#[test]
fn test_horovod_allgather() {
    on_all(|comm| each(of_all!(gathers), |check, length| check(comm, length)));
}

#[test]
fn test_horovod_allgather_variable_size() {
    on_all(|comm| {
        each(of_all!(gathers_varcount), |check, length| {
            check(comm, length);
        });
    });
}

/// Five buffers, as Horovod's tests have it, of lengths that differ from rank to rank.
pub(super) fn gathers_group<T: Value>(comm: &Communicator, length: usize) {
    let lengths = |rank: u32| (length..).step_by(3 + rank as usize).take(5);
    let buffers: Vec<Vec<T>> = lengths(members(comm)[comm.rank().index()])
        .map(|length| mine(comm, length))
        .collect();
    let started = comm.start().all_gather_grouped(buffers.clone());
    let group: Vec<&[T]> = buffers.iter().map(Vec::as_slice).collect();
    let gathered = comm.all_gather_grouped(&group).unwrap();
    assert_eq!(gathered.len(), 5);
    for (index, gathered) in gathered.iter().enumerate() {
        let of = |rank| lengths(rank).nth(index).unwrap();
        let counts: Vec<usize> = members(comm).into_iter().map(of).collect();
        let parts = members(comm).into_iter();
        let values: Vec<T> = parts.flat_map(|rank| input(rank, of(rank))).collect();
        assert_eq!(gathered.counts, counts, "{length} {}", T::DTYPE);
        assert_eq!(gathered.values, values, "{length} {}", T::DTYPE);
    }
    assert_eq!(started.wait().unwrap(), gathered);
}

#[test]
fn test_horovod_grouped_allgather() {
    on_all(|comm| {
        each(of_all!(gathers_group), |check, length| check(comm, length));
    });
}

/// Any number of them may be under way; those with names are fused.
#[test]
fn test_horovod_allgather_async_fused() {
    async_fused(of_all!(starts_gather));
}

/// Of a gather the shape is that of a row: how many there are need not agree.
#[test]
fn test_horovod_allgather_error() {
    let results = on_all(|comm| {
        let second = 10 * (1 + comm.rank().index() % 2);
        let shaped = comm.with(Options::new().shape(&[second, 17]));
        let rows = vec![1.0_f32; 17 * second * 17];
        [
            shaped.all_gather_varcount(&rows).map(drop),
            shaped.all_gather(&[1.0_f32; 340]).map(drop),
            shaped.named("x").all_gather(rows).wait().map(drop),
            comm.all_gather(&vec![1.0_f32; second]).map(drop),
        ]
    });
    let shapes = ["shape [10, 17]", "shape [20, 17]"];
    each_mismatch(
        &results,
        [shapes, shapes, shapes, ["of 10 f32", "of 20 f32"]],
    );
}

#[test]
fn test_horovod_allgather_type_error() {
    let results = on_all(|comm| {
        if comm.rank().0 % 2 == 0 {
            comm.all_gather_varcount(&[1_i32; 17]).map(drop)
        } else {
            comm.all_gather_varcount(&[1_f32; 17]).map(drop)
        }
    });
    all_mismatch(results, &["i32", "f32"]);
}

#[test]
fn test_horovod_allgather_duplicate_name_error() {
    duplicate_name(
        |start| start.all_gather(vec![1.0_f32; 17]),
        |_| vec![1.0; 68],
    );
}

#[test]
fn test_horovod_broadcast() {
    on_all(|comm| each(of_all!(broadcasts), |check, length| check(comm, length)));
}

/// Every broadcast is in place: the buffer stays where it is, and the root's keeps its values.
#[test]
fn test_horovod_broadcast_inplace() {
    on_all(|comm| {
        for root in 0..SIZE {
            let mut buffer = mine::<f16>(comm, cube(2));
            let before = buffer.clone();
            let (left, right) = buffer.split_at_mut(17);
            comm.broadcast(right, Rank(root)).unwrap();
            assert_eq!(left, &before[..17], "what is beside it stays");
            assert_eq!(right, &input::<f16>(root, cube(2))[17..]);
            assert!(comm.rank() != Rank(root) || buffer == before);
        }
    });
}

#[test]
fn test_horovod_broadcast_error() {
    let results = on_all(|comm| {
        let mut data = vec![1_u8; 17 + comm.rank().index() % 2];
        comm.broadcast(&mut data, Rank(0))
    });
    all_mismatch(results, &["of 17 u8", "of 18 u8"]);
}

#[test]
fn test_horovod_broadcast_type_error() {
    let results = on_all(|comm| {
        if comm.rank().0 % 2 == 0 {
            comm.broadcast(&mut [1_i32; 17], Rank(0))
        } else {
            comm.broadcast(&mut [1_f32; 17], Rank(0))
        }
    });
    all_mismatch(results, &["i32", "f32"]);
}

/// Every rank thinks that it is the root.
#[test]
fn test_horovod_broadcast_rank_error() {
    let results = on_all(|comm| comm.broadcast(&mut [1_u8; 17], comm.rank()));
    all_mismatch(results, &["from root"]);
}

#[test]
fn test_horovod_broadcast_duplicate_name_error() {
    duplicate_name(
        |start| start.broadcast(vec![1.0_f32], Rank(0)),
        |_| vec![1.0],
    );
}

#[test]
fn test_horovod_alltoall() {
    on_all(|comm| each(of_all!(exchanges), |check, length| check(comm, length)));
}

#[test]
fn test_horovod_alltoall_equal_split() {
    on_all(|comm| {
        each(of_all!(exchanges_equal_parts), |check, length| {
            check(comm, length);
        });
    });
}

#[test]
fn test_horovod_alltoall_zero_splits() {
    on_all(|comm| {
        let splits = if comm.rank().0 == 0 {
            [0, 0, 0, 0]
        } else {
            [1, 0, 1, 0]
        };
        let data = [comm.rank().0; 2];
        let received = comm.all_to_all_varcount(&data, &splits).unwrap();
        let expected: &[u32] = if comm.rank().0 % 2 == 0 {
            &[1, 2, 3]
        } else {
            &[]
        };
        assert_eq!(received.values, expected);
    });
}

#[test]
fn test_horovod_alltoall_equal_split_length_error() {
    let results = on_all(|comm| comm.all_to_all(&[1_u8; 5]).map(drop));
    all_invalid(results, "give splits");
}

#[test]
fn test_horovod_alltoall_splits_error() {
    // The last two are too few and too many splits.
    for splits in [
        &[1, 1, 1, 2][..],
        &[usize::MAX, 1, 1, 1],
        &[1, 1, 1],
        &[1, 1, 1, 1, 0],
    ] {
        let results = on_all(|comm| comm.all_to_all_varcount(&[1_u8; 4], splits).map(drop));
        all_invalid(results, "splits");
    }
}

#[test]
fn test_horovod_alltoall_type_error() {
    let results = on_all(|comm| {
        if comm.rank().0 % 2 == 0 {
            comm.all_to_all(&[1_i32; 4]).map(drop)
        } else {
            comm.all_to_all(&[1_f32; 4]).map(drop)
        }
    });
    all_mismatch(results, &["i32", "f32"]);
}

/// As of a gather, the shape is that of a row.
#[test]
fn test_horovod_alltoall_rank_error() {
    let results = on_all(|comm| {
        let second = 10 * (1 + comm.rank().index() % 2);
        let shaped = comm.with(Options::new().shape(&[second, 8]));
        let rows = vec![1.0_f32; 8 * second * 8];
        let with_splits = shaped.all_to_all_varcount(&rows, &[2 * second * 8; 4]);
        let equal = shaped.all_to_all(&[1.0_f32; 320]);
        [with_splits.map(drop), equal.map(drop)]
    });
    each_mismatch(&results, [["shape [10, 8]", "shape [20, 8]"]; 2]);
}

#[test]
fn test_broadcast_object() {
    on_all(|comm| {
        let mine = (comm.rank() == Rank(0))
            .then(|| vec![("hello".to_owned(), 123), ("0".to_owned(), 456)]);
        let all = comm.broadcast_object(mine, Rank(0)).unwrap();
        assert_eq!(all, [("hello".to_owned(), 123), ("0".to_owned(), 456)]);
    });
}

#[test]
fn test_allgather_object() {
    on_all(|comm| {
        let all = comm
            .all_gather_object(&(comm.rank().0, comm.rank().to_string()))
            .unwrap();
        let expected: Vec<(u32, String)> = (0..4).map(|rank| (rank, rank.to_string())).collect();
        assert_eq!(all, expected);
    });
}
