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
    text.iter()
        .map(|(host, slots)| ((*host).to_owned(), *slots))
        .collect()
}

fn assigned(
    list: &[(&str, u32)],
    min: u32,
    max: Option<u32>,
) -> Result<Vec<(String, Row)>, AssignmentError> {
    Ok(host_assignments(&hosts(list), min, max)?
        .iter()
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
    let list = [("a", 2), ("b", 1), ("c", 3)];
    assert_eq!(
        assigned(&list, 7, None).unwrap_err().to_string(),
        "requested at least 7 workers, available are 6 slots on 3 hosts"
    );
    assert_eq!(assigned(&list, 2, Some(0)), Err(AssignmentError::Zero));
    assert_eq!(assigned(&list, 0, None), Err(AssignmentError::Zero));
    assert_eq!(
        assigned(&list, 3, Some(2)),
        Err(AssignmentError::Limits { min: 3, max: 2 })
    );
    assert_eq!(
        assigned(&[("a", 2), ("a", 2)], 2, None),
        Err(AssignmentError::DuplicateHost {
            host: "a".to_owned()
        })
    );
    assert!(assigned(&[], 1, None).is_err());
    let huge = [("a", u32::MAX), ("b", u32::MAX)];
    assert_eq!(
        assigned(&huge, 1, None),
        Err(AssignmentError::TooLarge {
            available: 2 * u64::from(u32::MAX)
        })
    );
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
        assert_eq!(info.group_rank, info.rank.0 % 3);
        assert_eq!(info.group_size, 3);
    }
}

/// Horovod's `test_cross_rank`, on hosts with one name and with different names: 5, 4 and 3 workers.
#[test]
fn cross_rank_is_keyed_by_node_not_by_hostname() {
    for one_name in [true, false] {
        let mut registration = Registration::new();
        let nodes = [0_u64; 5].iter().chain(&[1; 4]).chain(&[2; 3]);
        for (rank, node) in (0..).zip(nodes) {
            let name = if one_name {
                "host".to_owned()
            } else {
                format!("host{node}")
            };
            registration
                .register(NodeId(*node), &name, Rank(rank))
                .unwrap();
        }
        let infos = registration.finalize().unwrap();
        let of_size = |size| {
            let mut ranks: Vec<_> = infos
                .iter()
                .filter(|info| info.cross_size == size)
                .map(|info| info.cross_rank.0)
                .collect();
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
    registration.register(NodeId(1), "a", Rank(0)).unwrap();
    assert_eq!(
        registration
            .register(NodeId(2), "b", Rank(0))
            .unwrap_err()
            .to_string(),
        "rank 0 is registered twice, on a and on b; every rank must be registered once"
    );
    assert!(matches!(
        registration.register(NodeId(1), "c", Rank(1)),
        Err(RegistrationError::Renamed { .. })
    ));
    assert_eq!(registration.len(), 1);
    registration.register(NodeId(1), "a", Rank(3)).unwrap();
    assert_eq!(
        registration.finalize().unwrap_err().to_string(),
        "2 members are registered, the highest rank is 3, and 2 ranks are missing: 1, 2; \
         ranks must be exactly 0..2"
    );
    registration
        .register(NodeId(1), "a", Rank(u32::MAX))
        .unwrap();
    let error = registration.finalize().unwrap_err().to_string();
    assert!(
        error.contains("missing: 1, 2, 4, 5, 6, 7, 8, 9, ..."),
        "{error}"
    );
    assert_eq!(
        Registration::<NodeId>::new().finalize(),
        Err(RegistrationError::Empty)
    );
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
            prop_assert_eq!(info.group_size as usize, local.len());
        }
    }
}
