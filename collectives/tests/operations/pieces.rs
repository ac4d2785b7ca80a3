//! Lengths around those from which shared memory passes data piece by piece, or sums go round by round.

use kolo_collectives::operation::Operation;
use kolo_collectives::way_in_shared_memory;

use super::*;

const SIZE: usize = size_of::<u64>();
/// From here on two ranks sum in slices, and not everything at once.
const AT_ONCE: usize = (4 << 20) + SIZE;
/// Not a divisor of any piece or part, so that a piece in another's place is seen.
const PERIOD: usize = 1021;

/// So many values that repeat: tests are not optimized, and these are many.
fn repeated(length: usize, value: impl Fn(u64) -> u64) -> Vec<u64> {
    let period: Vec<u64> = (0..PERIOD as u64).map(value).collect();
    let mut values = period.repeat(length / PERIOD + 1);
    values.truncate(length);
    values
}

fn of_rank(rank: u32, length: usize) -> Vec<u64> {
    repeated(length, |at| at * (u64::from(rank) + 3) + u64::from(rank))
}

/// The first count of values for each of so many ranks with as many bytes in all, and its neighbours.
fn around(bytes: usize, ranks: usize) -> [usize; 3] {
    let first = bytes.div_ceil(SIZE * ranks);
    [first - 1, first, first + 1]
}

fn check_pieces(comm: &Communicator) {
    let (me, world) = (comm.rank().0, comm.world_size());
    let ranks = world as usize;
    let root = Rank(world - 1);
    let is_root = comm.rank() == root;
    for length in around(512 << 10, 1) {
        let mut data = of_rank(me, length);
        comm.broadcast(&mut data, root).unwrap();
        assert!(data == of_rank(root.0, length), "broadcast of {length}");
        let mine = of_rank(me, length);
        let all: Vec<u64> = (0..world).flat_map(|rank| of_rank(rank, length)).collect();
        assert!(comm.all_gather(&mine).unwrap() == all, "gather {length}");
        let gathered = comm.gather(&mine, root).unwrap();
        assert!(gathered == is_root.then_some(all), "gather of {length}");
    }
    for each in around(512 << 10, ranks) {
        let all = of_rank(7, each * ranks);
        let given = if is_root { &all[..] } else { &[] };
        let part = comm.scatter(given, each, root).unwrap();
        let mine = &all[each * me as usize..][..each];
        assert!(part == mine, "scatter of {each}");
    }
    for each in around(6 << 20, ranks) {
        let received = comm.all_to_all(&of_rank(me, each * ranks)).unwrap();
        assert_eq!(received.len(), each * ranks);
        for (from, got) in (0..).zip(received.chunks_exact(each)) {
            let sent = of_rank(from, each * ranks);
            let mine = &sent[each * me as usize..][..each];
            assert!(got == mine, "all_to_all of {each} from {from}");
        }
    }
}

fn check_sums(comm: &Communicator) {
    let (me, world) = (comm.rank().0, comm.world_size());
    let sums = |length| {
        repeated(length, |at| {
            let of = |rank: u64| at * (rank + 3) + rank;
            (0..u64::from(world)).map(of).sum()
        })
    };
    for length in around(6 << 20, 1) {
        let mine = of_rank(me, length);
        let part = comm.reduce_scatter(&mine, length, ReduceOp::Sum).unwrap();
        let expected = &sums(length)[comm.rows_of(length, comm.rank())];
        assert!(part == expected, "reduce_scatter of {length}");
    }
    for length in [AT_ONCE, 12 << 20]
        .into_iter()
        .flat_map(|bytes| around(bytes, 1))
    {
        let mut data = of_rank(me, length);
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert!(data == sums(length), "all_reduce of {length}");
        let mut data = of_rank(me, length);
        comm.reduce(&mut data, ReduceOp::Sum, Rank(1)).unwrap();
        let expected = if me == 1 {
            sums(length)
        } else {
            of_rank(me, length)
        };
        assert!(data == expected, "reduce of {length}");
    }
}

/// The lengths above are those from which it is done in another way.
#[test]
fn what_is_long_in_shared_memory_is_where_the_tests_look() {
    use OperationKind as K;

    for (kind, bytes, ranks) in [
        (K::Broadcast, 512 << 10, 1),
        (K::AllGather, 512 << 10, 1),
        (K::Gather, 512 << 10, 1),
        (K::Scatter, 512 << 10, 2),
        (K::AllToAll, 6 << 20, 2),
        (K::ReduceScatter, 6 << 20, 1),
        (K::AllReduce, AT_ONCE, 1),
        (K::AllReduce, 12 << 20, 1),
        (K::Reduce, 12 << 20, 1),
    ] {
        let reduces = matches!(kind, K::ReduceScatter | K::AllReduce | K::Reduce);
        let way = |count: usize| {
            let operation = Operation {
                rows: if kind == K::ReduceScatter {
                    count as u64
                } else {
                    0
                },
                reduce: reduces.then_some(ReduceOp::Sum),
                root: matches!(kind, K::Broadcast | K::Gather | K::Scatter | K::Reduce)
                    .then_some(1),
                ..Operation::new(kind, Some(DType::U64), count as u64)
            };
            way_in_shared_memory(&operation, 2, 2)
        };
        let [before, first, _] = around(bytes, ranks).map(way);
        assert_ne!(before, first, "{kind} of {bytes} bytes");
    }
}

#[test]
fn long_data_in_shared_memory_are_right_around_every_switch() {
    // The second has more ranks than processors where this usually runs.
    for world in [2, 5] {
        let group = Group::new(Kind::Shared, world);
        group.run(|comm| {
            check_pieces(comm);
            check_sums(comm);
        });
    }
}
