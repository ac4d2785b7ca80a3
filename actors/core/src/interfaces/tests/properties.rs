//! What holds for all networks.

use proptest::prelude::*;

use super::*;

/// Hosts with up to three networks, some interfaces down, some names swapped, and a world with drops.
fn cases() -> impl Strategy<Value = (Vec<Host>, World, u64)> {
    let one = (0_u8..8, any::<bool>(), 0_u8..10);
    (
        proptest::collection::vec(one, 2..7),
        proptest::collection::vec((0_u64..7, 0_u8..3), 0..5),
        any::<u64>(),
    )
        .prop_map(|(list, drops, seed)| {
            let hosts: Vec<Host> = (1..)
                .zip(list)
                .map(|(number, (has, swapped, down))| {
                    let mut texts = Vec::new();
                    for net in 0..3_u8 {
                        if has & (1 << net) != 0 || net == 0 {
                            let name = if swapped { (net + 1) % 3 } else { net };
                            let down = if down == net + 1 { "down" } else { "" };
                            texts.push(format!("eth{name} 10.{net}.0.{number} {down}"));
                        }
                    }
                    // One is always fit.
                    if texts.iter().all(|text| text.ends_with("down")) {
                        texts.push(format!("ib0 10.7.0.{number}"));
                    }
                    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                    host(number, &texts)
                })
                .collect();
            let world = World {
                dropped: drops
                    .iter()
                    .map(|(number, net)| ip(&format!("10.{net}.0.{}", number + 1)))
                    .collect(),
                ..World::default()
            };
            (hosts, world, seed)
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn what_is_chosen_connects_and_what_does_not_connect_is_an_error((hosts, world, seed) in cases()) {
        let outcome = discover(&world, &hosts);
        // Nothing is probed twice, and only two rounds are made.
        let mut all = outcome.probes.clone();
        all.sort_unstable();
        let before = all.len();
        all.dedup();
        prop_assert_eq!(all.len(), before);
        prop_assert!(outcome.rounds <= 2);

        // The order of the answers changes nothing.
        let turned = discover_with(&world, &hosts, &InterfaceSelection::default(), |orders| {
            let count = orders.len();
            orders.rotate_left((seed % count as u64) as usize);
        });
        prop_assert_eq!(outcome.report(), turned.report());

        let reaches = |by: &Host, of: &Host, address| {
            let target = ProbeTarget { node: of.node, address: SocketAddr::new(address, 1), scope: None };
            matches!(world.probe(&hosts, by.node, &target), ProbeResult::Reached { .. })
        };
        match &outcome.result {
            Ok(network) => {
                for host in &hosts {
                    prop_assert!(!network.listen(host.node).is_empty());
                    let own = host.network.as_ref().unwrap();
                    for listen in network.listen(host.node) {
                        let interface = own.interface_of(listen.ip).unwrap();
                        prop_assert!(interface.up && interface.name == listen.interface);
                    }
                }
                for (of, by) in hosts.iter().flat_map(|a| hosts.iter().map(move |b| (a, b))) {
                    if of.node == by.node || *network.choice() == NetworkChoice::Local {
                        continue;
                    }
                    if matches!(network.choice(), NetworkChoice::PerPair | NetworkChoice::PerNode) {
                        let address = network.address(of.node, by.node).unwrap();
                        prop_assert!(reaches(by, of, address), "{} to {}", by.hostname, address);
                    }
                }
                if let NetworkChoice::Interface(name) = network.choice() {
                    for host in &hosts {
                        prop_assert_eq!(network.interface(host.node), Some(name.as_str()));
                    }
                    for (index, by) in hosts.iter().enumerate() {
                        let of = &hosts[(index + 1) % hosts.len()];
                        let address = network.listen(of.node)[0].ip;
                        prop_assert!(reaches(by, of, address));
                    }
                }
            }
            Err(report) => {
                prop_assert_eq!(&report.choice, &NetworkChoice::None);
                // There is a host that another one reaches at no address.
                let apart = hosts.iter().flat_map(|a| hosts.iter().map(move |b| (a, b))).any(|(a, b)| {
                    let any = |by: &Host, of: &Host| {
                        of.network.as_ref().unwrap().interfaces.iter()
                            .filter(|interface| interface.up && !interface.loopback)
                            .flat_map(|interface| &interface.addresses)
                            .any(|address| reaches(by, of, address.ip))
                    };
                    a.node != b.node && !any(a, b)
                });
                prop_assert!(apart);
                prop_assert!(report.rows.iter().all(|row| !row.chosen && row.why_not.is_some()));
            }
        }
    }
}
