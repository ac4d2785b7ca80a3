//! Examples, and what holds for any cluster.

use proptest::prelude::*;

use super::*;

fn cpus(milli: u64) -> Resources {
    Resources {
        cpus: Milli(milli),
        ..Resources::default()
    }
}

fn offers(free: &[u64]) -> Vec<Offer> {
    (0..)
        .zip(free)
        .map(|(id, cpus_free)| Offer {
            node: NodeId(id),
            hostname: "host".to_owned(),
            available: cpus(*cpus_free),
            total: cpus(8000),
            most: MAX_PER_NODE,
        })
        .collect()
}

fn placed(placement: Placement, per_worker: &Resources, offers: &[Offer]) -> Vec<(u64, u32)> {
    pairs(&place(placement, per_worker, offers).unwrap())
}

fn refused(placement: Placement, per_worker: &Resources, offers: &[Offer]) -> String {
    let refused = place(placement, per_worker, offers).unwrap_err();
    refused.to_string()
}

fn pairs(shares: &[Share]) -> Vec<(u64, u32)> {
    let shares = shares.iter();
    shares.map(|share| (share.node.0, share.workers)).collect()
}

#[test]
fn at_most_so_many_hosts_take_their_workers_as_a_whole() {
    let offers = offers(&[5000, 1000, 2000, 3000]);
    let chosen = |hosts| pairs(&spread_at_most(hosts, 2, &cpus(1000), &offers));
    assert_eq!(chosen(1), [(2, 2)]);
    assert_eq!(chosen(2), [(2, 2), (3, 2)]);
    assert_eq!(chosen(9), [(0, 2), (2, 2), (3, 2)]);
}

#[test]
fn a_layout_is_taken_as_it_is_or_refused_with_what_is_there() {
    let offers = offers(&[4000, 2000]);
    let share = |node, workers| Share {
        node: NodeId(node),
        workers,
    };
    let ask = |layout: &[Share]| lay_out(layout, &cpus(1000), &offers);
    let placed = ask(&[share(1, 2), share(0, 1)]).unwrap();
    assert_eq!(pairs(&placed), [(1, 2), (0, 1)]);
    for (layout, why) in [
        (
            &[share(0, 4), share(1, 3)][..],
            "requested 3 workers with 1 cpu each on host (node-0000000000000001): room for 2; cpus free: 2\n  \
             it fits when other jobs have ended",
        ),
        (&[share(7, 1)], "is lost or takes no new work"),
    ] {
        let error = ask(layout).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn ranks_are_in_the_order_of_names_and_not_of_registrations() {
    let mut offers = offers(&[2000; 4]);
    for (offer, name) in offers.iter_mut().zip(["n10", "n2", "N1", "n2"]) {
        name.clone_into(&mut offer.hostname);
    }
    let one = cpus(1000);
    let pack = |workers| placed(Placement::Pack { workers }, &one, &offers);
    assert_eq!(pack(8), [(2, 2), (1, 2), (3, 2), (0, 2)]);
    assert_eq!(pack(1), [(2, 1)]);
    let spread = Placement::Spread { hosts: 2, slots: 1 };
    assert_eq!(placed(spread, &one, &offers), [(2, 1), (1, 1)]);
}

#[test]
fn pack_takes_few_nodes_and_leaves_the_large_gaps() {
    let pack = |workers| Placement::Pack { workers };
    let one = cpus(1000);
    let offers = offers(&[2000, 4000, 3000, 4000]);
    assert_eq!(placed(pack(1), &one, &offers), [(0, 1)]);
    assert_eq!(placed(pack(3), &one, &offers), [(2, 3)]);
    assert_eq!(placed(pack(4), &one, &offers), [(1, 4)]);
    assert_eq!(placed(pack(6), &one, &offers), [(0, 2), (1, 4)]);
    let all = [(0, 2), (1, 4), (2, 3), (3, 4)];
    assert_eq!(placed(pack(13), &one, &offers), all);
    // What asks for nothing fits anywhere, as often as a node takes workers.
    let none = Resources::default();
    assert_eq!(placed(pack(100), &none, &offers), [(0, 100)]);
    let more = placed(pack(MAX_PER_NODE + 1), &none, &offers);
    assert_eq!(more, [(0, MAX_PER_NODE), (1, 1)]);
    let error = refused(pack(5 * MAX_PER_NODE), &none, &offers);
    let why = "a node takes at most 1024 workers";
    assert!(error.contains(why), "{error}");
}

#[test]
fn as_many_as_there_is_room_for_go_where_the_job_is_first() {
    let one = cpus(1000);
    let offers = offers(&[1000, 4000, 2000]);
    let ask = |workers, there: fn(NodeId) -> u32| {
        let shares = place_at_most(workers, &one, &offers, there);
        pairs(&shares)
    };
    let nowhere = |_: NodeId| 0;
    assert_eq!(ask(2, nowhere), [(2, 2)]);
    assert_eq!(ask(9, nowhere), [(0, 1), (1, 4), (2, 2)]);
    assert_eq!(ask(0, nowhere), []);
    // One has room for one more worker of the job at most.
    let there = |node: NodeId| [1, 0, MAX_PER_NODE - 1][node.0 as usize];
    assert_eq!(ask(1, there), [(0, 1)]);
    assert_eq!(ask(5, there), [(0, 1), (1, 3), (2, 1)]);
    assert_eq!(ask(9, there), [(0, 1), (1, 4), (2, 1)]);
    assert_eq!(place_at_most(3, &one, &[], |_| 0), []);
}

#[test]
fn spread_takes_distinct_nodes() {
    let offers = offers(&[4000, 2000, 1000, 2000]);
    let spread = |hosts, slots| Placement::Spread { hosts, slots };
    let one = cpus(1000);
    assert_eq!(placed(spread(2, 2), &one, &offers), [(1, 2), (3, 2)]);
    let three = [(0, 2), (1, 2), (3, 2)];
    assert_eq!(placed(spread(3, 2), &one, &offers), three);
    assert_eq!(
        refused(spread(4, 2), &one, &offers),
        "requested 4 nodes with 2 workers of 1 cpu each: nodes with room: 3 of 4\n  \
         host (node-0000000000000002) has room for 1; cpus free: 1\n  \
         it fits when other jobs have ended"
    );
}

/// Horovod's `test_infeasible_placement`: 4 workers on 2 CPUs.
#[test]
fn infeasible_placement_names_what_is_missing_where() {
    let mut offers = offers(&[2000]);
    offers[0].total = cpus(2000);
    assert_eq!(
        refused(Placement::Pack { workers: 4 }, &cpus(1000), &offers),
        "requested 4 workers with 1 cpu each: room for 2 on 1 node\n  \
         host (node-0000000000000000) has room for 2; cpus free: 2\n  \
         other jobs take none of the room: add nodes, or ask for less"
    );
    offers[0].total = cpus(3000);
    let error = refused(Placement::Pack { workers: 4 }, &cpus(1000), &offers);
    assert!(
        error.ends_with("without other jobs it would be 3: add nodes, or ask for less"),
        "{error}"
    );
    let error = refused(Placement::Pack { workers: 1 }, &cpus(1000), &[]);
    assert!(error.contains("room for 0 on 0 nodes"), "{error}");
}

#[test]
fn sizes_out_of_range_are_refused() {
    let pack = |workers| Placement::Pack { workers };
    let spread = |hosts, slots| Placement::Spread { hosts, slots };
    for placement in [
        pack(0),
        pack(MAX_WORLD_SIZE + 1),
        spread(0, 3),
        spread(3, 0),
        spread(u32::MAX, u32::MAX),
    ] {
        let error = refused(placement, &cpus(1), &offers(&[8000]));
        let why = "allowed are 1 to 16384";
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_thousand_nodes_are_placed_and_their_shortage_is_summarised() {
    let offers = offers(&[1500; 1000]);
    let shares = place(Placement::Pack { workers: 1000 }, &cpus(1000), &offers).unwrap();
    assert_eq!(shares.len(), 1000);
    let mut need = cpus(1000);
    need.custom.insert("fpga".to_owned(), Milli(1));
    let error = refused(Placement::Pack { workers: 1 }, &need, &offers);
    let why = "\n  992 more nodes with too little of fpga (on 1000 nodes in all)";
    assert!(error.contains(why), "{error}");
    assert!(error.len() < 2000, "{error}");
}

proptest! {
    #[test]
    fn a_placement_fits_and_pack_is_minimal(
        free in proptest::collection::vec(0_u64..7, 0..9),
        workers in 1_u32..20,
        slots in 1_u32..4,
    ) {
        let offers = offers(&free.iter().map(|free| free * 1000).collect::<Vec<_>>());
        let one = cpus(1000);
        let check = |shares: &[Share], total: u32| {
            assert_eq!(shares.iter().map(|share| share.workers).sum::<u32>(), total);
            assert!(shares.is_sorted_by(|a, b| a.node < b.node));
            for share in shares {
                assert!(share.workers > 0);
                assert!(u64::from(share.workers) <= free[share.node.0 as usize]);
            }
        };
        let mut sorted = free.clone();
        sorted.sort_unstable_by_key(|free| std::cmp::Reverse(*free));
        let mut sum = 0;
        let fewest = sorted.iter().position(|free| { sum += free; sum >= u64::from(workers) });
        let packed = place(Placement::Pack { workers }, &one, &offers).ok();
        prop_assert_eq!(packed.as_ref().map(Vec::len), fewest.map(|index| index + 1));
        if let Some(shares) = packed {
            check(&shares, workers);
        }
        let enough = free.iter().filter(|free| **free >= u64::from(slots)).count();
        let spread = place(Placement::Spread { hosts: workers, slots }, &one, &offers).ok();
        prop_assert_eq!(spread.is_some(), enough >= workers as usize);
        if let Some(shares) = spread {
            check(&shares, workers * slots);
            prop_assert_eq!(shares.len(), workers as usize);
        }
    }
}
