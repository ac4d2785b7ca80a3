//! Examples, and that nothing leaks.

use kolo_wire::Milli;
use proptest::prelude::*;

use super::*;

const PACE: Pace = Pace::new(Duration::from_secs(1), Duration::from_secs(2));
/// With the time to the next heartbeat.
const LEASE: Duration = Duration::from_secs(3);

fn cpus(units: u64) -> Resources {
    Resources {
        cpus: Milli::units(units),
        ..Resources::default()
    }
}

fn introduction(node: u64, units: u64) -> NodeRegistration {
    NodeRegistration {
        node: NodeId(node),
        hostname: "host".to_owned(),
        address: "127.0.0.1:1".parse().unwrap(),
        resources: cpus(units),
        version: "0".to_owned(),
        jobs: Vec::new(),
        network: None,
        instance: 0,
        seal: None,
        draining: false,
    }
}

fn free(registry: &NodeRegistry) -> Vec<u64> {
    registry
        .offers()
        .iter()
        .map(|offer| offer.available.cpus.0 / 1000)
        .collect()
}

#[test]
fn a_lease_runs_out_on_the_given_clock() {
    let start = Instant::now();
    let mut registry = NodeRegistry::new(PACE);
    assert_eq!(registry.next_expiry(), None);
    let (one, two) = (Session(1), Session(2));
    registry.register(start, one, introduction(1, 4)).unwrap();
    let later = start + Duration::from_secs(1);
    registry.register(later, two, introduction(2, 4)).unwrap();
    assert_eq!(registry.next_expiry(), Some(start + LEASE));
    assert_eq!(registry.expired(start + LEASE), [(NodeId(1), one, LEASE)]);
    registry.beat(later, NodeId(1), one);
    // One that comes late changes nothing.
    registry.beat(start, NodeId(1), one);
    assert!(registry.expired(start + LEASE).is_empty());
    assert_eq!(registry.lose(NodeId(1), one), Some(vec![]));
    assert_eq!(registry.lose(NodeId(1), one), None);
    registry.beat(start + LEASE, NodeId(1), one);
    assert_eq!(registry.alive_count(), 1);
    registry.beat(later, NodeId(2), two);
    let info = registry.info(start + Duration::from_secs(2));
    assert_eq!((info[0].alive, info[1].alive), (false, true));
    assert_eq!(info[1].last_seen_ms, 1000);
}

#[test]
fn two_jobs_hold_disjoint_resources() {
    let now = Instant::now();
    let mut registry = NodeRegistry::new(PACE);
    for node in 1..3 {
        let introduction = introduction(node, 4);
        registry.register(now, Session(node), introduction).unwrap();
    }
    assert!(registry.hold(JobId(1), &[(NodeId(1), cpus(4)), (NodeId(2), cpus(2))]));
    assert_eq!(free(&registry), [0, 2]);
    // All or nothing.
    assert!(!registry.hold(JobId(2), &[(NodeId(2), cpus(2)), (NodeId(1), cpus(1))]));
    assert!(!registry.hold(JobId(2), &[(NodeId(2), cpus(2)), (NodeId(3), cpus(1))]));
    assert_eq!(free(&registry), [0, 2]);
    assert!(registry.hold(JobId(2), &[(NodeId(2), cpus(2))]));
    registry.free(JobId(1), NodeId(1));
    registry.free(JobId(1), NodeId(1));
    assert_eq!(free(&registry), [4, 0]);
}

#[test]
fn a_node_that_comes_back_offers_only_what_is_confirmed_free() {
    let now = Instant::now();
    let mut registry = NodeRegistry::new(PACE);
    let (first, second) = (Session(1), Session(2));
    registry.register(now, first, introduction(1, 4)).unwrap();
    assert!(registry.hold(JobId(1), &[(NodeId(1), cpus(3))]));
    let again = registry.register(now, second, introduction(1, 2)).unwrap();
    assert_eq!(again.stale, [JobId(1)]);
    assert_eq!(again.replaced, Some(first));
    // The message of the old stay changes nothing.
    assert_eq!(registry.lose(NodeId(1), first), None);
    assert_eq!(free(&registry), [0]);
    registry.free(JobId(1), NodeId(1));
    assert_eq!(free(&registry), [2]);
    assert!(!registry.is_current(NodeId(1), first) && registry.is_current(NodeId(1), second));
    assert_eq!(registry.lose(NodeId(1), second), Some(vec![]));
    assert!(!registry.is_current(NodeId(1), second));
    assert!(free(&registry).is_empty());
    let third = registry.register(now, Session(3), introduction(1, 2));
    assert_eq!(third.unwrap().replaced, None);
}

#[test]
fn a_node_that_is_to_stop_offers_nothing_however_often_it_registers() {
    let now = Instant::now();
    let mut registry = NodeRegistry::new(PACE);
    let daemon = |draining| NodeRegistration {
        draining,
        ..introduction(1, 4)
    };
    registry.register(now, Session(1), daemon(false)).unwrap();
    registry.leave(NodeId(1), Session(1));
    for session in [2, 3] {
        let again = registry.register(now, Session(session), daemon(true));
        again.unwrap();
        assert!(registry.offers().is_empty() && registry.is_leaving(NodeId(1)));
    }
    // Nor does it to a head that has started anew.
    let mut anew = NodeRegistry::new(PACE);
    anew.register(now, Session(1), daemon(true)).unwrap();
    assert!(anew.offers().is_empty() && anew.info(now)[0].draining);
    // The next daemon does.
    registry.register(now, Session(4), daemon(false)).unwrap();
    assert_eq!(free(&registry), [4]);
}

#[test]
fn g2_a_node_with_jobs_that_nobody_knows_offers_nothing_until_they_are_gone() {
    let now = Instant::now();
    let mut registry = NodeRegistry::new(PACE);
    let node = NodeId(1);
    let with = |jobs: &[u64]| NodeRegistration {
        jobs: jobs.iter().copied().map(JobId).collect(),
        ..introduction(1, 4)
    };
    let admission = registry.register(now, Session(1), with(&[7, 8])).unwrap();
    assert_eq!(admission.stale, [JobId(7), JobId(8)]);
    assert!(!registry.hold(JobId(1), &[(node, cpus(1))]));
    registry.free(JobId(7), node);
    assert_eq!(free(&registry), [0]);
    assert!(!registry.is_idle(node));
    assert_eq!(registry.info(now)[0].jobs, [JobId(8)]);
    registry.free(JobId(8), node);
    assert_eq!(free(&registry), [4]);
    assert!(registry.is_idle(node));
    // What is booked is known, and what the node has no more is no matter.
    assert!(registry.hold(JobId(1), &[(node, cpus(1))]));
    registry.register(now, Session(2), with(&[1, 9])).unwrap();
    assert_eq!(free(&registry), [0]);
    registry.register(now, Session(3), with(&[1])).unwrap();
    assert_eq!(free(&registry), [3]);
}

#[test]
fn a_copy_of_a_node_is_refused_as_long_as_the_node_is_heard() {
    let start = Instant::now();
    let mut registry = NodeRegistry::new(PACE);
    let daemon = |instance| NodeRegistration {
        instance,
        ..introduction(1, 4)
    };
    let (first, second, third) = (Session(1), Session(2), Session(3));
    registry.register(start, first, daemon(10)).unwrap();
    let soon = start + Duration::from_millis(1499);
    let refusal = registry.register(soon, second, daemon(20)).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Duplicate);
    assert!(refusal.is_retryable());
    assert_eq!(
        refusal.message,
        "another daemon is registered as node-0000000000000001: on host host at 127.0.0.1:1, heard 1499 ms ago; \
         each node needs an identity of its own: stop one of the two, or give this one a state folder of its own \
         and a token to join with"
    );
    // It changed nothing: the first is still heard, and comes back over a new connection at once.
    registry.beat(soon, NodeId(1), first);
    let again = registry.register(soon, second, daemon(10)).unwrap();
    assert_eq!(again.replaced, Some(first));
    // One that was killed and started again has only to wait for half the lease.
    let later = soon + LEASE / 2;
    let next = registry.register(later, third, daemon(20)).unwrap();
    assert_eq!(next.replaced, Some(second));
    // And one that has said goodbye does not count.
    registry.lose(NodeId(1), third);
    registry.register(later, Session(4), daemon(30)).unwrap();
    // Who does not say which it is is taken for the same, as always.
    registry.register(later, Session(5), daemon(0)).unwrap();
    registry.register(later, Session(6), daemon(40)).unwrap();
}

#[test]
fn introductions_that_can_not_be_true_are_refused() {
    let mut registry = NodeRegistry::new(PACE);
    for change in [
        (|node| node.hostname = String::new()) as fn(&mut NodeRegistration),
        |node| node.hostname = "a\nb".to_owned(),
        |node| node.hostname = "x".repeat(300),
        |node| node.version = "x".repeat(300),
        |node| node.resources.cpus = Milli(u64::MAX),
        |node| node.address.set_port(0),
        |node| node.address = "0.0.0.0:1".parse().unwrap(),
    ] {
        let mut node = introduction(1, 4);
        change(&mut node);
        let refusal = registry
            .register(Instant::now(), Session(1), node)
            .unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Invalid, "{refusal}");
    }
    assert_eq!(registry.alive_count(), 0);
}

#[test]
fn lost_nodes_are_forgotten_in_time_and_living_ones_never() {
    let start = Instant::now();
    let mut registry = NodeRegistry::new(PACE);
    registry
        .register(start, Session(0), introduction(0, 1))
        .unwrap();
    for node in 1..600 {
        let now = start + Duration::from_secs(node);
        let session = Session(node);
        registry
            .register(now, session, introduction(node, 1))
            .unwrap();
        registry.lose(NodeId(node), session);
    }
    assert!(registry.info(start).len() <= MAX_LOST + 2);
    assert!(registry.alive(NodeId(0)).is_some());
    assert!(
        registry
            .info(start)
            .iter()
            .any(|info| info.node == NodeId(599))
    );
}

proptest! {
    /// Whatever happens, what is free and what is held make up the total of every living node.
    #[test]
    fn nothing_leaks(steps in proptest::collection::vec((0_u8..6, 0_u64..3, 0_u64..4, 1_u64..4), 1..80)) {
        let mut registry = NodeRegistry::new(PACE);
        let mut now = Instant::now();
        let mut booked: BTreeMap<(u64, u64), u64> = BTreeMap::new();
        for (session, (kind, node, job, units)) in (1..).zip(steps) {
            now += Duration::from_millis(500);
            match kind {
                0 => { registry.register(now, Session(session), introduction(node, 6)).unwrap(); }
                1 | 2 => if registry.hold(JobId(job), &[(NodeId(node), cpus(units))]) {
                    *booked.entry((node, job)).or_default() += units;
                },
                5 => {
                    registry.give_back(JobId(job), NodeId(node), &cpus(units));
                    if let Some(booked) = booked.get_mut(&(node, job)).filter(|booked| **booked >= units) {
                        *booked -= units;
                    }
                }
                3 => { registry.free(JobId(job), NodeId(node)); booked.remove(&(node, job)); }
                _ => for (node, session, _) in registry.expired(now) {
                    prop_assert!(registry.lose(node, session).is_some());
                },
            }
            prop_assert_eq!(registry.alive_count(), registry.living().count());
            for offer in registry.offers() {
                let held: u64 = booked.iter()
                    .filter(|((node, _), _)| *node == offer.node.0)
                    .map(|(_, units)| units)
                    .sum();
                prop_assert!(held <= 6);
                prop_assert_eq!(offer.available, cpus(6 - held));
            }
        }
    }
}
