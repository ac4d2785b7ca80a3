//! Networks as they are, by example.

use kolo_wire::{NetworkChoice, RefusalKind};

use super::*;
use crate::interfaces::refusal;

fn one(name: &str) -> NetworkChoice {
    NetworkChoice::Interface(name.to_owned())
}

/// Hosts 1 to `count` with an address in each of these networks: `10.1.0.`.
fn hosts(count: u64, networks: &[(&str, &str)]) -> Vec<Host> {
    (1..=count)
        .map(|number| {
            let interfaces: Vec<String> = networks
                .iter()
                .map(|(name, network)| format!("{name} {network}{number}"))
                .collect();
            let interfaces: Vec<&str> = interfaces.iter().map(String::as_str).collect();
            host(number, &interfaces)
        })
        .collect()
}

/// The example of Horovod's own test: {lo, eth0} and {eth0, eth1} have eth0 in common.
#[test]
fn the_intersection_is_what_all_have() {
    let hosts = [
        host(1, &["eth0 10.1.0.1"]),
        host(2, &["eth0 10.1.0.2", "eth1 10.2.0.2"]),
    ];
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(*outcome.choice(), one("eth0"));
    assert_eq!(outcome.why("127.0.0.1"), "loopback");
    assert!(outcome.why("10.2.0.2").contains("a: no route"));
}

#[test]
fn one_to_two_hundred_hosts_are_a_ring_of_one_round() {
    for count in [2, 3, 5, 50, 200] {
        let hosts = hosts(count, &[("eth0", "10.1.0."), ("ib0", "10.2.0.")]);
        let outcome = discover(&World::default(), &hosts);
        assert_eq!(*outcome.choice(), one("eth0"), "{count} hosts");
        // Every address once, by the host before it.
        assert_eq!(outcome.probes.len() as u64, count * 2);
        assert_eq!(outcome.rounds, 1);
        let network = outcome.result.unwrap();
        for host in &hosts {
            assert_eq!(network.interface(host.node), Some("eth0"));
            let listen = network.listen(host.node);
            assert_eq!(listen.len(), 1);
            assert_eq!(listen[0].ip, ip(&format!("10.1.0.{}", host.node.0)));
        }
    }
}

#[test]
fn a_single_host_and_several_nodes_on_it_use_the_loopback_without_a_probe() {
    let alone = [host(1, &["eth0 10.1.0.1"])];
    let mut together = hosts(3, &[("eth0", "10.1.0.")]);
    for host in &mut together {
        host.network.as_mut().unwrap().host = "the-same".to_owned();
    }
    for hosts in [&alone[..], &together] {
        let outcome = discover(&World::default(), hosts);
        assert_eq!(*outcome.choice(), NetworkChoice::Local);
        assert!(outcome.probes.is_empty());
        let network = outcome.result.unwrap();
        assert_eq!(network.interface(NodeId(1)), Some("lo"));
        assert_eq!(network.listen(NodeId(1))[0].ip, ip("127.0.0.1"));
    }
}

#[test]
fn nodes_that_do_not_report_are_reached_where_they_registered() {
    let mut hosts = hosts(2, &[("eth0", "10.1.0.")]);
    hosts[1].network = None;
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(*outcome.choice(), NetworkChoice::Registered);
    let network = outcome.result.unwrap();
    assert_eq!(network.interface(NodeId(1)), None);
    assert!(network.listen(NodeId(1)).is_empty());
    let error = plan(hosts, &select(&["eth0"], &[]), false).unwrap_err();
    assert_eq!(error.kind, RefusalKind::Network);
    assert!(error.message.contains("b (node-"), "{error}");
}

#[test]
fn an_interface_that_is_broken_on_one_host_drops_out() {
    let mut hosts = hosts(3, &[("eth0", "10.1.0."), ("eth1", "10.2.0.")]);
    hosts[1].network.as_mut().unwrap().interfaces[1].up = false;
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(*outcome.choice(), one("eth1"));
    assert_eq!(outcome.why("10.1.0.2"), "down");
    assert_eq!(
        outcome.why("10.1.0.1"),
        "does not connect all: not a to b, b to c"
    );
    // Down is known, so it is not even tried.
    assert!(!outcome.tried().any(|tried| tried == "10.1.0.2"));

    // A firewall is found out by trying.
    let world = World {
        dropped: vec![ip("10.2.0.3")],
        ..World::default()
    };
    let hosts = super::cases::hosts(3, &[("eth0", "10.1.0."), ("eth1", "10.2.0.")]);
    let outcome = discover(&world, &hosts);
    assert_eq!(*outcome.choice(), one("eth0"));
    assert_eq!(outcome.why("10.2.0.3"), "b: no answer within 2s");
}

#[test]
fn an_interface_whose_packets_are_translated_drops_out() {
    let hosts = hosts(3, &[("eth0", "10.1.0."), ("nat0", "10.2.0.")]);
    // It would come first otherwise: it is as good, and has a larger MTU.
    let mut better = hosts.clone();
    for host in &mut better {
        host.network.as_mut().unwrap().interfaces[2].mtu = 9000;
    }
    assert_eq!(*discover(&World::default(), &better).choice(), one("nat0"));
    let world = World {
        translated: BTreeMap::from([(ip("10.2.0.2"), ip("192.168.0.1"))]),
        ..World::default()
    };
    let outcome = discover(&world, &better);
    assert_eq!(*outcome.choice(), one("eth0"));
    let why = outcome.why("10.2.0.3");
    assert_eq!(
        why,
        "b comes from 192.168.0.1, which is none of its addresses (NAT)"
    );
}

#[test]
fn an_answer_from_another_interface_does_not_count() {
    // Host 2 reaches 10.2.0.3, but from its eth0: Horovod's match_intf.
    let hosts = hosts(3, &[("eth0", "10.1.0."), ("eth1", "10.2.0.")]);
    let world = World {
        routed: BTreeMap::from([((2, ip("10.2.0.3")), "eth0".to_owned())]),
        rtt: BTreeMap::from([1, 2, 3].map(|n| (ip(&format!("10.1.0.{n}")), 50_000))),
        ..World::default()
    };
    let outcome = discover(&world, &hosts);
    assert_eq!(*outcome.choice(), one("eth0"));
    assert_eq!(outcome.why("10.2.0.3"), "b comes from its eth0");
}

#[test]
fn an_address_that_all_hosts_have_is_not_tried_and_does_not_count() {
    let hosts: Vec<Host> = (1..=4)
        .map(|n| {
            host(
                n,
                &["docker0 172.17.0.1 mtu=9000", &format!("eth0 10.1.0.{n}")],
            )
        })
        .collect();
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(*outcome.choice(), one("eth0"));
    assert!(outcome.tried().all(|tried| tried.starts_with("10.1.0.")));
    assert_eq!(
        outcome.why("172.17.0.1"),
        "d has the same address on docker0 and would reach itself"
    );
}

#[test]
fn names_that_differ_are_one_interface_on_each_node() {
    let hosts = [
        host(1, &["eth0 10.1.0.1"]),
        host(2, &["ens3 10.1.0.2"]),
        host(3, &["enp1s0 10.1.0.3", "eth0 10.9.0.3"]),
    ];
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(*outcome.choice(), NetworkChoice::PerNode);
    assert_eq!(outcome.rounds, 2, "the ring, then the pairs that it lacks");
    // Nothing is probed twice.
    let mut all = outcome.probes.clone();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), outcome.probes.len());
    let network = outcome.result.unwrap();
    let names: Vec<_> = hosts
        .iter()
        .map(|host| network.interface(host.node).unwrap())
        .collect();
    assert_eq!(names, ["eth0", "ens3", "enp1s0"]);
    assert_eq!(network.check_one_interface(), Ok(()));
    assert_eq!(network.listen(NodeId(3))[0].ip, ip("10.1.0.3"));
}

#[test]
fn a_network_for_each_pair_is_a_choice_by_pair() {
    let hosts = triangle();
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(*outcome.choice(), NetworkChoice::PerPair);
    let listens = outcome.listens();
    assert_eq!(listens[&NodeId(1)], ["10.12.0.1%ab", "10.13.0.1%ac"]);
    assert_eq!(listens[&NodeId(3)], ["10.13.0.3%ac", "10.23.0.3%bc"]);
    let network = outcome.result.unwrap();
    assert_eq!(network.interface(NodeId(1)), None);
    for (of, by, address) in [
        (1, 2, "10.12.0.1"),
        (1, 3, "10.13.0.1"),
        (2, 1, "10.12.0.2"),
        (2, 3, "10.23.0.2"),
        (3, 1, "10.13.0.3"),
        (3, 2, "10.23.0.3"),
    ] {
        assert_eq!(network.address(NodeId(of), NodeId(by)), Some(ip(address)));
    }
    let error = network.check_one_interface().unwrap_err();
    assert_eq!(error.kind, RefusalKind::Network);
    for part in ["GLOO_SOCKET_IFNAME", "NODE", "10.23.0.3"] {
        assert!(error.message.contains(part), "{error}");
    }
}

#[test]
fn a_host_without_a_route_to_its_neighbour_is_an_error_that_says_who_reached_whom() {
    let hosts = [
        host(1, &["eth0 10.1.0.1"]),
        host(2, &["eth0 10.2.0.2"]),
        host(3, &["eth0 10.1.0.3"]),
    ];
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(*outcome.choice(), NetworkChoice::None);
    let message = refusal(outcome.report()).unwrap().message;
    for part in [
        "no network interface connects a and b, b and c.",
        "UDP port 7420",
        "--interfaces",
        "NODE  INTERFACE",
        "no: a: no route",
    ] {
        assert!(message.contains(part), "{message}");
    }
    // a and c do reach each other, and that is said as well.
    let line = message
        .lines()
        .find(|line| line.contains("10.1.0.3"))
        .unwrap();
    assert!(line.contains("0.20 ms"), "{message}");
}

#[test]
fn a_host_that_nobody_reaches_and_one_that_does_not_answer_are_named() {
    let hosts = hosts(3, &[("eth0", "10.1.0.")]);
    let world = World {
        apart: vec![(1, 3), (2, 3)],
        ..World::default()
    };
    let outcome = discover(&world, &hosts);
    let message = refusal(outcome.report()).unwrap().message;
    assert!(message.contains("connects a and c, b and c."), "{message}");
    let world = World {
        silent: vec![2],
        ..World::default()
    };
    let outcome = discover(&world, &hosts);
    let message = refusal(outcome.report()).unwrap().message;
    assert!(message.contains("connects a and b, b and c."), "{message}");
    assert!(
        outcome
            .why("10.1.0.3")
            .contains("b: it did not try: it does not answer the head")
    );
    // One direction is not enough: the one makes links, and the other asks for them.
    let world = World {
        dropped: vec![ip("10.1.0.2")],
        ..World::default()
    };
    let outcome = discover(&world, &hosts[..2]);
    let message = refusal(outcome.report()).unwrap().message;
    assert!(message.contains("connects a and b."), "{message}");
}

#[test]
fn ipv6_alone_is_enough_and_link_local_addresses_have_a_scope() {
    let hosts = [
        host(1, &["eth0 fd00::1 fe80::1"]),
        host(2, &["eth0 fd00::2 fe80::2"]),
    ];
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(*outcome.choice(), one("eth0"));
    assert_eq!(outcome.listens()[&NodeId(1)], ["fd00::1%eth0"]);
    assert!(outcome.why("fe80::2").contains("link-local"));

    let hosts = [
        host(1, &["eth0 fe80::1"]),
        host(2, &["eth0 fe80::2"]),
        host(3, &["eth0 fe80::3"]),
    ];
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(*outcome.choice(), one("eth0"));
    assert!(
        outcome
            .probes
            .iter()
            .all(|(_, target)| target.scope.as_deref() == Some("eth0"))
    );

    // Cables of containers have nothing else either; they are not tried on a host that has.
    let hosts = [
        host(1, &["eth0 10.1.0.1", "veth0 fe80::1"]),
        host(2, &["eth0 10.1.0.2", "veth0 fe80::2"]),
    ];
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(outcome.probes.len(), 2);
    assert!(outcome.why("fe80::2").contains("link-local"));
    let outcome = discover_with(&World::default(), &hosts, &select(&["veth0"], &[]), |_| ());
    assert_eq!(*outcome.choice(), one("veth0"));

    let hosts = [host(1, &["eth0 fe80::1"]), host(2, &["ens3 fe80::2"])];
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(
        outcome.why("fe80::2"),
        "link-local, and a has no ens3 to reach it over"
    );
}

#[test]
fn a_daemon_that_listens_on_one_address_or_family_is_reached_only_there() {
    let mut hosts = hosts(2, &[("eth0", "10.1.0."), ("eth1", "10.2.0.")]);
    hosts[0].network.as_mut().unwrap().listen = "10.2.0.1:7420".parse().unwrap();
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(*outcome.choice(), one("eth1"));
    assert!(outcome.why("10.1.0.1").contains("--listen"));

    let hosts = [
        host(1, &["eth0 10.1.0.1"]),
        host(2, &["eth0 fd00::2 10.1.0.2"]),
    ];
    let mut hosts = hosts.to_vec();
    hosts[0].network.as_mut().unwrap().listen = "0.0.0.0:7420".parse().unwrap();
    let outcome = discover(&World::default(), &hosts);
    assert_eq!(outcome.listens()[&NodeId(2)], ["10.1.0.2%eth0"]);
    assert_eq!(
        outcome.why("fd00::2"),
        "a does not speak to it: its daemon listens on 0.0.0.0:7420"
    );

    hosts[0].network.as_mut().unwrap().listen = "127.0.0.1:7420".parse().unwrap();
    let error = plan(hosts, &InterfaceSelection::default(), false).unwrap_err();
    assert_eq!(error.kind, RefusalKind::Network);
    assert!(error.message.contains("--listen [::]:PORT"), "{error}");
}

#[test]
fn the_nearest_then_the_largest_then_the_fastest_then_the_first_is_chosen() {
    // What each of the two has, the round trips, what is chosen, why not the other.
    let table = [
        (
            "",
            "",
            [200, 200],
            "eth0",
            "as good as eth0, which comes first",
        ),
        (
            "",
            "speed=100000",
            [200, 200],
            "eth1",
            "slower than eth1: unknown to 100000 Mbit/s",
        ),
        (
            "speed=100000",
            "speed=25000",
            [200, 200],
            "eth0",
            "slower than eth0: 25000 Mbit/s to 100000 Mbit/s",
        ),
        (
            "speed=100000",
            "mtu=9000",
            [200, 200],
            "eth1",
            "smaller packets than eth1: MTU 1500 to 9000",
        ),
        (
            "",
            "mtu=9000",
            [200, 30_000],
            "eth0",
            "farther than eth0: 30.00 ms to 0.20 ms",
        ),
        // As near as makes no difference: what does not vary decides.
        (
            "",
            "mtu=9000",
            [200, 5100],
            "eth1",
            "smaller packets than eth1: MTU 1500 to 9000",
        ),
        (
            "",
            "mtu=9000",
            [40_000, 70_000],
            "eth1",
            "smaller packets than eth1: MTU 1500 to 9000",
        ),
        (
            "",
            "mtu=9000",
            [40_000, 90_000],
            "eth0",
            "farther than eth0: 90.00 ms to 40.00 ms",
        ),
    ];
    for (eth0, eth1, rtt, chosen, why) in table {
        let hosts: Vec<Host> = (1..=3)
            .map(|n| {
                host(
                    n,
                    &[
                        &format!("eth0 10.1.0.{n} {eth0}"),
                        &format!("eth1 10.2.0.{n} {eth1}"),
                    ],
                )
            })
            .collect();
        let mut world = World::default();
        for n in 1..=3 {
            // The worst of the ring counts, which is that of one link.
            let far = if n == 2 { 1 } else { 2 };
            world.rtt.insert(ip(&format!("10.1.0.{n}")), rtt[0] / far);
            world.rtt.insert(ip(&format!("10.2.0.{n}")), rtt[1] / far);
        }
        let outcome = discover(&world, &hosts);
        assert_eq!(*outcome.choice(), one(chosen), "{eth0} {eth1} {rtt:?}");
        let other = if chosen == "eth0" {
            "10.2.0.1"
        } else {
            "10.1.0.1"
        };
        assert_eq!(outcome.why(other), why);
    }
}

#[test]
fn what_is_asked_for_is_verified() {
    let hosts = hosts(3, &[("eth0", "10.1.0."), ("eth1", "10.2.0.")]);
    let with = |world: &World, selection| discover_with(world, &hosts, &selection, |_| ());
    let outcome = with(&World::default(), select(&["eth1"], &[]));
    assert_eq!(*outcome.choice(), one("eth1"));
    assert!(outcome.tried().all(|tried| tried.starts_with("10.2.")));
    assert_eq!(
        outcome.why("10.1.0.1"),
        "not among the interfaces that were asked for"
    );

    let world = World {
        dropped: [1, 2, 3].map(|n| ip(&format!("10.2.0.{n}"))).to_vec(),
        ..World::default()
    };
    let outcome = with(&world, select(&["eth1"], &[]));
    let message = refusal(outcome.report()).unwrap().message;
    assert!(
        message.starts_with("none of the interfaces that were asked for connects"),
        "{message}"
    );
    // Another of the list that does.
    let outcome = with(&world, select(&["eth1", "eth0"], &[]));
    assert_eq!(*outcome.choice(), one("eth0"));

    for (selection, kind, part) in [
        (
            select(&["ib0"], &[]),
            RefusalKind::Network,
            "has none of the interfaces ib0 that were asked for, or they are down; it has lo, eth0, eth1",
        ),
        (
            select(&[], &[("z", &["eth0"])]),
            RefusalKind::Invalid,
            "the host `z`, which has no part here; hosts are a, b, c",
        ),
        (
            select(&["eth 0"], &[]),
            RefusalKind::Invalid,
            "`eth 0` can't be the name",
        ),
        (
            select(&[], &[("a", &[""])]),
            RefusalKind::Invalid,
            "`` can't be the name",
        ),
    ] {
        let error = plan(hosts.clone(), &selection, false).unwrap_err();
        assert_eq!(error.kind, kind);
        assert!(error.message.contains(part), "{error}");
    }
}

#[test]
fn interfaces_by_host_may_differ_and_the_loopback_may_be_asked_for() {
    let hosts = [
        host(1, &["eth0 10.1.0.1", "eth1 10.2.0.1"]),
        host(2, &["eth0 10.9.0.2", "ens3 10.2.0.2"]),
    ];
    let selection = select(&["eth1"], &[("b", &["ens3"])]);
    let outcome = discover_with(&World::default(), &hosts, &selection, |_| ());
    assert_eq!(*outcome.choice(), NetworkChoice::PerNode);
    assert_eq!(outcome.listens()[&NodeId(1)], ["10.2.0.1%eth1"]);
    assert_eq!(outcome.listens()[&NodeId(2)], ["10.2.0.2%ens3"]);

    let alone = [host(1, &["eth0 10.1.0.1"])];
    let outcome = discover_with(&World::default(), &alone, &select(&["eth0"], &[]), |_| ());
    assert_eq!(*outcome.choice(), one("eth0"));
    assert_eq!(outcome.rounds, 0);
    let outcome = discover_with(&World::default(), &alone, &select(&["lo"], &[]), |_| ());
    assert_eq!(*outcome.choice(), one("lo"));
}

#[test]
fn a_table_is_aligned_and_cut_where_it_is_long() {
    let outcome = discover(&World::default(), &hosts(3, &[("eth0", "10.1.0.")]));
    let text = crate::interfaces::table(outcome.report(), 64);
    assert_eq!(
        text,
        "NODE  INTERFACE  ADDRESS    MTU    REACHED BY  ROUND TRIP  CHOSEN\n\
         a     lo         127.0.0.1  65536  -           -           no: loopback\n\
         a     lo         ::1        65536  -           -           no: loopback\n\
         a     eth0       10.1.0.1   1500   c           0.20 ms     yes\n\
         b     lo         127.0.0.1  65536  -           -           no: loopback\n\
         b     lo         ::1        65536  -           -           no: loopback\n\
         b     eth0       10.1.0.2   1500   a           0.20 ms     yes\n\
         c     lo         127.0.0.1  65536  -           -           no: loopback\n\
         c     lo         ::1        65536  -           -           no: loopback\n\
         c     eth0       10.1.0.3   1500   b           0.20 ms     yes\n"
    );
    let short = crate::interfaces::table(outcome.report(), 2);
    assert_eq!(short.lines().count(), 4, "{short}");
    assert!(short.ends_with("... and 1 more rows\n"), "{short}");
}
