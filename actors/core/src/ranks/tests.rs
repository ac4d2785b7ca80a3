//! Ranks against what Horovod gives.

use proptest::prelude::*;

use super::*;

type Row = (u32, u32, u32, u32, u32, u32);

fn row<K>(info: &RankInfo<K>) -> Row {
    (
        info.rank.0,
        info.size,
        info.local_rank.0,
        info.local_size,
        info.cross_rank.0,
        info.cross_size,
    )
}

fn hosts(text: &[(&str, u32)]) -> Vec<(String, u32)> {
    let owned = |(host, slots): &(&str, u32)| ((*host).to_owned(), *slots);
    text.iter().map(owned).collect()
}

fn assigned(
    list: &[(&str, u32)],
    min: u32,
    max: Option<u32>,
) -> Result<Vec<(String, Row)>, AssignmentError> {
    let infos = host_assignments(&hosts(list), min, max)?;
    let infos = infos.iter();
    Ok(infos
        .map(|info| (info.hostname.clone(), row(info)))
        .collect())
}

fn expected(rows: &[(&str, Row)]) -> Vec<(String, Row)> {
    rows.iter()
        .map(|(host, row)| ((*host).to_owned(), *row))
        .collect()
}

/// horovod.md section 2, measured on Horovod.
#[test]
fn host_assignments_are_those_measured_on_horovod() {
    let list = [("a", 2), ("b", 1), ("c", 3)];
    assert_eq!(
        assigned(&list, 6, None).unwrap(),
        expected(&[
            ("a", (0, 6, 0, 2, 0, 3)),
            ("a", (1, 6, 1, 2, 0, 2)),
            ("b", (2, 6, 0, 1, 1, 3)),
            ("c", (3, 6, 0, 3, 2, 3)),
            ("c", (4, 6, 1, 3, 1, 2)),
            ("c", (5, 6, 2, 3, 0, 1)),
        ])
    );
    assert_eq!(
        assigned(&list, 2, Some(4)).unwrap(),
        expected(&[
            ("a", (0, 4, 0, 2, 0, 3)),
            ("a", (1, 4, 1, 2, 0, 1)),
            ("b", (2, 4, 0, 1, 1, 3)),
            ("c", (3, 4, 0, 1, 2, 3)),
        ])
    );
    assert_eq!(
        assigned(&[("a", 0), ("b", 2)], 2, None).unwrap(),
        expected(&[("b", (0, 2, 0, 2, 0, 1)), ("b", (1, 2, 1, 2, 0, 1))])
    );
    // More slots than the minimum, no maximum: all are used.
    assert_eq!(assigned(&[("localhost", 4)], 2, None).unwrap().len(), 4);
}

#[test]
fn what_horovod_refuses_is_refused_and_duplicate_hosts_too() {
    use AssignmentError::{DuplicateHost, Limits, TooLarge, Zero};
    let list = [("a", 2), ("b", 1), ("c", 3)];
    let huge = [("a", u32::MAX), ("b", u32::MAX)];
    let (host, available) = ("a".to_owned(), 2 * u64::from(u32::MAX));
    for (list, min, max, why) in [
        (&list[..], 2, Some(0), Zero),
        (&list, 0, None, Zero),
        (&list, 3, Some(2), Limits { min: 3, max: 2 }),
        (&[("a", 2), ("a", 2)], 2, None, DuplicateHost { host }),
        (&huge, 1, None, TooLarge { available }),
    ] {
        assert_eq!(assigned(list, min, max), Err(why));
    }
    let why = "requested at least 7 workers, available: 6 slots on 3 hosts";
    assert_eq!(assigned(&list, 7, None).unwrap_err().to_string(), why);
    assert!(assigned(&[], 1, None).is_err());
    assert_eq!(assigned(&huge, 1, Some(3)).unwrap().len(), 3);
}

fn register(order: &[u64]) -> Vec<RankInfo<NodeId>> {
    let mut registration = Registration::new();
    for (rank, node) in order.iter().enumerate() {
        registration
            .register(NodeId(*node), &format!("host{node}"), Rank(rank as u32))
            .unwrap();
    }
    registration.finalize().unwrap()
}

/// Horovod's test_coordinator_registration.
#[test]
fn coordinator_registration() {
    let order: Vec<u64> = (0..12).map(|rank| rank % 3).collect();
    for info in register(&order) {
        assert_eq!((info.size, info.local_size, info.cross_size), (12, 4, 3));
        assert_eq!(info.local_rank.0, info.rank.0 / 3);
        assert_eq!(info.cross_rank.0, info.rank.0 % 3);
    }
}

/// Horovod's `test_cross_rank`, on hosts with one name and with different names: 5, 4 and 3 workers.
#[test]
fn cross_rank_is_keyed_by_node_not_by_hostname() {
    for one_name in [true, false] {
        let mut registration = Registration::new();
        let nodes = [0_u64; 5].iter().chain(&[1; 4]).chain(&[2; 3]);
        for (rank, node) in (0..).zip(nodes) {
            let name = format!("host{}", if one_name { 0 } else { *node });
            registration
                .register(NodeId(*node), &name, Rank(rank))
                .unwrap();
        }
        let infos = registration.finalize().unwrap();
        let of_size = |size| {
            let infos = infos.iter().filter(|info| info.cross_size == size);
            let mut ranks: Vec<_> = infos.map(|info| info.cross_rank.0).collect();
            ranks.sort_unstable();
            ranks
        };
        assert_eq!(of_size(1), [0]);
        assert_eq!(of_size(2), [0, 1]);
        assert_eq!(of_size(3), [0, 0, 0, 1, 1, 1, 2, 2, 2]);
    }
}

#[test]
fn interleaved_and_uneven_nodes() {
    let rows: Vec<_> = register(&[1, 2, 1, 3, 1, 3]).iter().map(row).collect();
    assert_eq!(
        rows,
        [
            (0, 6, 0, 3, 0, 3),
            (1, 6, 0, 1, 1, 3),
            (2, 6, 1, 3, 0, 2),
            (3, 6, 0, 2, 2, 3),
            (4, 6, 2, 3, 0, 1),
            (5, 6, 1, 2, 1, 2),
        ]
    );
}

#[test]
fn duplicates_gaps_and_renamed_nodes_are_refused() {
    let mut registration = Registration::new();
    let mut register =
        |node, name: &str, rank| registration.register(NodeId(node), name, Rank(rank));
    register(1, "a", 0).unwrap();
    let twice = register(2, "b", 0).unwrap_err().to_string();
    let why = "rank 0 is registered twice, on a and on b; every rank must be registered once";
    assert_eq!(twice, why);
    let renamed = register(1, "c", 1);
    assert!(matches!(renamed, Err(RegistrationError::Renamed { .. })));
    register(1, "a", 3).unwrap();
    assert_eq!(
        registration.finalize().unwrap_err().to_string(),
        "2 members are registered, the highest rank is 3, and 2 ranks are missing: 1, 2; \
         ranks must be exactly 0..2"
    );
    registration
        .register(NodeId(1), "a", Rank(u32::MAX))
        .unwrap();
    let error = registration.finalize().unwrap_err().to_string();
    let why = "missing: 1, 2, 4, 5, 6, 7, 8, 9, ...";
    assert!(error.contains(why), "{error}");
    let none = Registration::<NodeId>::new();
    assert_eq!(none.finalize(), Err(RegistrationError::Empty));
}

proptest! {
    /// R-1 for any order: world ranks are 0..n, local ranks of a node 0..local_size, cross ranks of a
    /// local rank 0..cross_size, one for each node.
    #[test]
    fn ranks_are_dense(order in proptest::collection::vec(0_u64..6, 1..60)) {
        let infos = register(&order);
        prop_assert_eq!(infos.len(), order.len());
        let mut local: BTreeMap<NodeId, Vec<u32>> = BTreeMap::new();
        let mut cross: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (rank, info) in infos.iter().enumerate() {
            prop_assert_eq!(info.rank.index(), rank);
            prop_assert_eq!(info.node.0, order[rank]);
            local.entry(info.node).or_default().push(info.local_rank.0);
            cross.entry(info.local_rank.0).or_default().push(info.cross_rank.0);
        }
        for info in &infos {
            let ranks = &local[&info.node];
            prop_assert_eq!(ranks, &(0..info.local_size).collect::<Vec<_>>());
            let mut ranks = cross[&info.local_rank.0].clone();
            ranks.sort_unstable();
            prop_assert_eq!(ranks, (0..info.cross_size).collect::<Vec<_>>());
        }
    }
}
