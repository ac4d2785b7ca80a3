//! The cache, and answers that make no sense.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::interfaces::{Key, ProbeCache, TTL};

#[test]
fn a_result_is_kept_for_its_nodes_and_their_interfaces() {
    let mut hosts = vec![host(1, &["eth0 10.1.0.1"]), host(2, &["eth0 10.1.0.2"])];
    let any = InterfaceSelection::default();
    let key = |hosts: &[Host]| Key::new(hosts.iter(), &any);
    let ours = key(&hosts);
    let network = Arc::new(discover(&World::default(), &hosts).result.unwrap());
    let mut cache = ProbeCache::default();
    let now = Instant::now();
    cache.put(now, ours.clone(), Arc::clone(&network));
    assert_eq!(cache.get(now, &ours), Some(Arc::clone(&network)));
    let almost = TTL.saturating_sub(Duration::from_millis(1));
    assert!(cache.get(now + almost, &ours).is_some());
    assert_eq!(cache.get(now + TTL, &ours), None);

    // In whatever order.
    hosts.reverse();
    assert_eq!(key(&hosts), ours);
    let mut others = vec![
        key(&hosts[..1]),
        Key::new(hosts.iter(), &select(&["eth0"], &[])),
    ];
    let changes: [fn(&mut NodeNetwork); 9] = [
        |it| it.interfaces[1].up = false,
        |it| it.interfaces[1].loopback = true,
        |it| it.interfaces[1].mtu = 9000,
        |it| it.interfaces[1].speed = Some(10_000),
        |it| it.interfaces[1].name.push('0'),
        |it| it.interfaces[1].addresses[0].prefix = 25,
        |it| drop(it.interfaces.pop()),
        |it| it.listen.set_port(1),
        |it| it.host.push('0'),
    ];
    for change in changes {
        let mut changed = hosts.clone();
        change(changed[0].network.as_mut().unwrap());
        others.push(key(&changed));
    }
    for other in others {
        assert_eq!(cache.get(now, &other), None, "{other:?}");
    }
}

#[test]
fn the_cache_does_not_grow_without_end() {
    let network = Arc::new(
        discover(&World::default(), &[host(1, &["eth0 10.1.0.1"])])
            .result
            .unwrap(),
    );
    let mut cache = ProbeCache::default();
    let now = Instant::now();
    let key = |number| {
        let host = host(number, &["eth0 10.1.0.1"]);
        Key::new([host].iter(), &InterfaceSelection::default())
    };
    for number in 0..1000 {
        let at = now + Duration::from_millis(number);
        cache.put(at, key(number), Arc::clone(&network));
    }
    let kept = (0..1000)
        .filter(|number| cache.get(now, &key(*number)).is_some())
        .count();
    assert_eq!(kept, 256);
    assert!(cache.get(now, &key(999)).is_some());
}

#[test]
fn answers_that_make_no_sense_end_in_an_error_and_not_in_a_wait() {
    let hosts = [host(1, &["eth0 10.1.0.1"]), host(2, &["eth0 10.1.0.2"])];
    let Ok(Plan::Probe(mut discovery)) =
        plan(hosts.to_vec(), &InterfaceSelection::default(), false)
    else {
        panic!("two hosts are probed");
    };
    let Step::Probe(orders) = discovery.start() else {
        panic!("it asks");
    };
    assert_eq!(orders.len(), 2);
    // From one that was not asked.
    assert_eq!(discovery.answered(NodeId(9), Ok(Vec::new())), Step::Wait);
    // Too few.
    assert_eq!(discovery.answered(NodeId(1), Ok(Vec::new())), Step::Wait);
    // Twice.
    assert_eq!(discovery.answered(NodeId(1), Ok(Vec::new())), Step::Wait);
    let Step::Done(result) = discovery.answered(NodeId(2), Err("gone".to_owned())) else {
        panic!("it ends");
    };
    let report = result.unwrap_err();
    let text = crate::interfaces::table(&report, 64);
    assert!(
        text.contains("it answered 0 of 1 probes") && text.contains("gone"),
        "{text}"
    );
}

#[test]
fn a_deadline_is_that_of_all_waves() {
    let order = |count| Order {
        node: NodeId(1),
        targets: vec![
            ProbeTarget {
                node: NodeId(2),
                address: "10.0.0.1:1".parse().unwrap(),
                scope: None,
            };
            count
        ],
    };
    let limit = Duration::from_secs(2);
    for (count, seconds) in [(0, 7), (1, 7), (256, 7), (257, 9), (8000, 69)] {
        assert_eq!(order(count).deadline(limit), Duration::from_secs(seconds));
    }
}

#[test]
fn so_many_nodes_that_not_all_pairs_can_be_tried_are_told_what_they_need() {
    let hosts = |name: &dyn Fn(u64) -> String| -> Vec<Host> {
        (1..=800)
            .map(|number| {
                let address = format!("10.1.{}.{}", number / 200, number % 200 + 1);
                host(number, &[&format!("{} {address}", name(number))])
            })
            .collect()
    };
    let world = World {
        gateway: true,
        ..World::default()
    };
    let differ = hosts(&|number| format!("eth{}", number % 2));
    let found = discover(&world, &differ);
    assert_eq!((found.rounds, found.probes.len()), (1, 800));
    let problem = found.result.unwrap_err().problem.unwrap();
    assert!(
        problem.message.contains("one name on all 800 nodes"),
        "{problem}"
    );
    // As long as one name does, there may be as many as there are.
    assert!(
        discover(&world, &hosts(&|_| "eth0".to_owned()))
            .result
            .is_ok()
    );
}
