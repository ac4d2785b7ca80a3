//! What moves values and combines none.

use super::*;

#[test]
fn test_horovod_allgather() {
    on_all(|comm| {
        for dimensions in 1..=3 {
            let all = comm
                .all_gather(&vec![comm.rank().0 as i16; cube(dimensions)])
                .unwrap();
            for rank in 0..4 {
                let share = &all[rank * cube(dimensions)..][..cube(dimensions)];
                assert!(share.iter().all(|value| *value == rank as i16));
            }
        }
    });
}

#[test]
fn test_horovod_allgather_variable_size() {
    on_all(|comm| {
        let sizes = [17, 32, 81, 12];
        let mine = vec![comm.rank().0 as u8; sizes[comm.rank().index()] * 17];
        let all = comm.all_gather_varcount(&mine).unwrap();
        for (rank, size) in (0..).zip(sizes) {
            assert_eq!(all.of(Rank(rank)), vec![rank as u8; size * 17]);
        }
    });
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
fn test_horovod_broadcast() {
    on_all(|comm| {
        for root in 0..SIZE {
            let mut data = vec![f16::from_f32(comm.rank().0 as f32); cube(2)];
            comm.broadcast(&mut data, Rank(root)).unwrap();
            assert_eq!(data, vec![f16::from_f32(root as f32); cube(2)]);
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
fn test_horovod_alltoall() {
    on_all(|comm| {
        let me = comm.rank().index();
        // Rank i gets i + 1 rows from each.
        let data: Vec<i64> = (0..4).flat_map(|to| vec![to as i64; to + 1]).collect();
        let received = comm.all_to_all_varcount(&data, &[1, 2, 3, 4]).unwrap();
        assert_eq!(received.values, vec![me as i64; 4 * (me + 1)]);
        assert_eq!(received.counts, [me + 1; 4]);
    });
}

#[test]
fn test_horovod_alltoall_equal_split() {
    on_all(|comm| {
        let data: Vec<f64> = (0..4).flat_map(|to| vec![f64::from(to); 17]).collect();
        let received = comm.all_to_all(&data).unwrap();
        assert_eq!(received, vec![f64::from(comm.rank().0); 4 * 17]);
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
    for result in results {
        assert!(
            matches!(result, Err(CollectiveError::Invalid { .. })),
            "{result:?}"
        );
    }
}

#[test]
fn test_horovod_alltoall_splits_error() {
    let results = on_all(|comm| {
        comm.all_to_all_varcount(&[1_u8; 4], &[1, 1, 1, 2])
            .map(drop)
    });
    for result in results {
        assert!(
            matches!(result, Err(CollectiveError::Invalid { .. })),
            "{result:?}"
        );
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

#[test]
fn test_broadcast_object() {
    on_all(|comm| {
        let mine = (comm.rank() == Rank(0))
            .then(|| vec![("hello".to_owned(), 123), ("0".to_owned(), 456)]);
        let all = comm.broadcast_object(mine, Rank(0)).unwrap();
        assert_eq!(all[0].1, 123);
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
