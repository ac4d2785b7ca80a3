//! Interfaces that connect hosts, and those that do not.

use kolo::LaneChoice;
use kolo::prelude::*;
use kolo_transport::wire::NetworkChoice;

use crate::needs_namespaces;
use crate::world::{Group, World, why};

/// The port of a node's daemon, for firewalls.
fn port(report: &kolo_transport::wire::ClusterInfo, host: &str) -> u16 {
    let node = report.nodes.iter().find(|node| node.hostname == host);
    node.expect("the node is there").address.port()
}

#[test]
fn three_hosts_with_two_networks_of_which_one_breaks_on_one_host() {
    needs_namespaces!();
    let world = World::new(&["a", "b", "c"]).unwrap();
    world.network("eth0", "10.1.0.", 1500).unwrap();
    world.network("eth1", "10.2.0.", 9000).unwrap();
    world
        .run("10.1.0.100", async |cluster| {
            // The larger packets win.
            let group = Group::start(cluster, 3).await?;
            assert_eq!(group.interface(), Some("eth1"));
            assert!(why(group.report(), "10.1.0.2").contains("than eth1"));
            group.check().await?;
            for (number, told) in (1..).zip(group.told().await?) {
                assert_eq!(told["HOROVOD_GLOO_IFACE"], "eth1");
                assert_eq!(told["GLOO_SOCKET_IFNAME"], "eth1");
                assert_eq!(told["NCCL_SOCKET_IFNAME"], "eth1");
                assert_eq!(told["KOLO_NODE_IP"], format!("10.2.0.{number}"));
                assert_eq!(told["MASTER_ADDR"], "10.2.0.1");
            }
            // The data plane is there and nowhere else.
            for (number, listens) in (1..).zip(group.listens().await?) {
                assert_eq!(listens, [format!("10.2.0.{number}")]);
            }
            group.stop().await?;

            // Known from before.
            let group = Group::start(cluster, 3).await?;
            assert!(group.report().cached);
            group.stop().await?;
            let fresh = Executor::builder().hosts(3).slots(1).no_cache(true);
            let group = Group::with(cluster, fresh).await?;
            assert!(!group.report().cached);
            group.stop().await?;

            // It breaks: what is known is not valid any more, as soon as the head knows of the change.
            world.hosts[1].ip("link set eth1 down")?;
            let mut group = Group::start(cluster, 3).await?;
            for _ in 0..100 {
                if !group.report().cached {
                    break;
                }
                group.stop().await?;
                group = Group::start(cluster, 3).await?;
            }
            assert_eq!(group.interface(), Some("eth0"));
            assert_eq!(why(group.report(), "10.2.0.2"), "down");
            group.check().await?;
            // A user's own value wins.
            group.stop().await?;
            let own = Executor::builder()
                .hosts(3)
                .slots(1)
                .env("NCCL_SOCKET_IFNAME", "mine");
            let group = Group::with(cluster, own).await?;
            assert_eq!(group.told().await?[2]["NCCL_SOCKET_IFNAME"], "mine");
            group.stop().await
        })
        .unwrap();
}

#[test]
fn an_interface_behind_nat_drops_out() {
    needs_namespaces!();
    let world = World::new(&["a", "b", "c"]).unwrap();
    world.network("eth0", "10.1.0.", 1500).unwrap();
    // It would be preferred.
    world.network("eth1", "10.2.0.", 9000).unwrap();
    let b = &world.hosts[1];
    b.nft("add table ip nat").unwrap();
    b.nft("add chain ip nat out { type nat hook postrouting priority 100; }")
        .unwrap();
    b.nft("add rule ip nat out oifname eth1 snat to 192.168.77.1")
        .unwrap();
    for other in [&world.hosts[0], &world.hosts[2], &world.boss] {
        other.ip("route add 192.168.77.1/32 via 10.2.0.2").unwrap();
    }
    world
        .run("10.1.0.100", async |cluster| {
            let group = Group::start(cluster, 3).await?;
            assert_eq!(group.interface(), Some("eth0"));
            assert_eq!(
                why(group.report(), "10.2.0.3"),
                "b comes from 192.168.77.1, which is none of its addresses (NAT)"
            );
            group.check().await?;
            group.stop().await
        })
        .unwrap();
}

#[test]
fn names_that_differ_are_used_by_node() {
    needs_namespaces!();
    let world = World::new(&["a", "b", "c"]).unwrap();
    let wire = world.lab.segment("wire").unwrap();
    world
        .boss
        .attach("eth0", &wire, &["10.1.0.100/24"])
        .unwrap();
    let names = ["eth0", "ens3", "enp1s0"];
    for (number, (host, name)) in (1..).zip(world.hosts.iter().zip(names)) {
        host.attach(name, &wire, &[&format!("10.1.0.{number}/24")])
            .unwrap();
    }
    world
        .run("10.1.0.100", async |cluster| {
            let group = Group::start(cluster, 3).await?;
            assert_eq!(group.report().choice, NetworkChoice::PerNode);
            group.check().await?;
            let told = group.told().await?;
            for (told, name) in told.iter().zip(names) {
                assert_eq!(told["GLOO_SOCKET_IFNAME"], name);
            }
            group.stop().await
        })
        .unwrap();
}

/// Three hosts, each pair with a cable of its own, and a boss who is on all of them.
fn triangle() -> anyhow::Result<World> {
    let world = World::new(&["a", "b", "c"])?;
    let (a, b, c) = (&world.hosts[0], &world.hosts[1], &world.hosts[2]);
    for (name, net, ends) in [
        ("ab", 12, [(a, 1), (b, 2)]),
        ("ac", 13, [(a, 1), (c, 3)]),
        ("bc", 23, [(b, 2), (c, 3)]),
    ] {
        let wire = world.lab.segment(name)?;
        world
            .boss
            .attach(name, &wire, &[&format!("10.{net}.0.100/24")])?;
        for (host, number) in ends {
            host.attach(name, &wire, &[&format!("10.{net}.0.{number}/24")])?;
        }
    }
    c.ip("route add 10.12.0.100/32 via 10.13.0.100")?;
    Ok(world)
}

#[test]
fn a_cable_for_each_pair_is_used_by_pair_and_is_an_error_for_programs_that_take_one_name() {
    needs_namespaces!();
    let world = triangle().unwrap();
    world
        .run("10.12.0.100", async |cluster| {
            let group = Group::start(cluster, 3).await?;
            assert_eq!(group.report().choice, NetworkChoice::PerPair);
            assert_eq!(
                group.listens().await?,
                [
                    ["10.12.0.1", "10.13.0.1"],
                    ["10.12.0.2", "10.23.0.2"],
                    ["10.13.0.3", "10.23.0.3"]
                ]
            );
            group.check().await?;
            assert!(!group.told().await?[0].contains_key("GLOO_SOCKET_IFNAME"));
            group.stop().await?;

            let horovod = Executor::builder().hosts(3).slots(1).rendezvous(true);
            let error = Group::with(cluster, horovod)
                .await
                .err()
                .unwrap()
                .to_string();
            for part in [
                "no single interface",
                "HOROVOD_GLOO_IFACE",
                "NODE",
                "10.23.0.3",
            ] {
                assert!(error.contains(part), "{error}");
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_firewall_that_drops_costs_two_seconds_at_most() {
    needs_namespaces!();
    let world = World::new(&["a", "b", "c"]).unwrap();
    world.network("eth0", "10.1.0.", 1500).unwrap();
    world.network("eth1", "10.2.0.", 9000).unwrap();
    world.network("eth2", "10.3.0.", 9000).unwrap();
    world
        .run("10.1.0.100", async |cluster| {
            let ports = port(&cluster.status().await?, "b");
            for subnet in ["10.2.0.0/24", "10.3.0.0/24"] {
                world.hosts[1].nft(&format!(
                    "add rule inet test input ip saddr {subnet} udp dport {ports} drop"
                ))?;
            }
            let group = Group::start(cluster, 3).await?;
            assert_eq!(group.interface(), Some("eth0"));
            assert_eq!(why(group.report(), "10.2.0.2"), "a: no answer within 2s");
            assert_eq!(why(group.report(), "10.3.0.2"), "a: no answer within 2s");
            let took = group.report().took_ms;
            assert!((1900..4000).contains(&took), "{took} ms");
            group.check().await?;
            group.stop().await
        })
        .unwrap();
}

#[test]
fn link_local_addresses_are_enough_between_nodes() {
    needs_namespaces!();
    let world = World::new(&["a", "b"]).unwrap();
    // The head is reached over a network on which nodes do not speak with each other.
    world.network("ctl", "10.1.0.", 1500).unwrap();
    let wire = world.lab.segment("wire").unwrap();
    for host in &world.hosts {
        host.attach("eth0", &wire, &[]).unwrap();
    }
    world
        .run("10.1.0.100", async |cluster| {
            let only = Executor::builder().hosts(2).slots(1).interfaces(["eth0"]);
            let group = Group::with(cluster, only).await?;
            assert_eq!(group.interface(), Some("eth0"));
            group.check().await?;
            let told = group.told().await?;
            assert!(told[0]["KOLO_LISTEN"].starts_with("fe80::"), "{told:?}");
            assert!(told[0]["KOLO_LISTEN"].ends_with("%eth0"), "{told:?}");
            group.stop().await
        })
        .unwrap();
}

#[test]
fn jumbo_frames_on_a_switch_without_pass_over_quic() {
    needs_namespaces!();
    let world = World::new(&["a", "b"]).unwrap();
    let segment = world.network("eth0", "10.1.0.", 9000).unwrap();
    segment.mtu(1500).unwrap();
    world
        .run("10.1.0.100", async |cluster| {
            // QUIC finds out which packets pass.
            let builder = Executor::builder().hosts(2).slots(1);
            let group = Group::with(cluster, builder.lane(LaneChoice::Quic)).await?;
            assert_eq!(group.told().await?[0]["KOLO_MTU"], "9000");
            group.check().await?;
            group.stop().await?;
            Ok(())
        })
        .unwrap();
}

#[test]
fn the_command_shows_the_matrix_and_the_doctor_finds_the_cluster_well() {
    needs_namespaces!();
    let world = World::new(&["a", "b", "c"]).unwrap();
    world.network("eth0", "10.1.0.", 1500).unwrap();
    world.network("eth1", "10.2.0.", 1500).unwrap();
    world.hosts[2].ip("link set eth1 down").unwrap();
    world
        .run("10.1.0.100", async |cluster| {
            let kolo = |args: &[&str]| -> anyhow::Result<(Option<i32>, String)> {
                let output = cluster.kolo()?.args(args).output()?;
                let text = String::from_utf8([output.stdout, output.stderr].concat())?;
                Ok((output.status.code(), text))
            };
            let (code, text) = kolo(&["interfaces"])?;
            assert_eq!(code, Some(0), "{text}");
            assert!(text.starts_with("NODE  INTERFACE  ADDRESS"), "{text}");
            assert!(
                text.contains("chosen: eth0 on every node (found in"),
                "{text}"
            );
            assert!(text.contains("no: down"), "{text}");

            let (code, text) = kolo(&["interfaces", "--format", "json"])?;
            assert_eq!(code, Some(0), "{text}");
            let document: serde_json::Value = serde_json::from_str(&text)?;
            assert_eq!(document["choice"], "interface");
            assert_eq!(document["interface"], "eth0");
            assert_eq!(document["cached"], true);
            let rows = document["interfaces"].as_array().unwrap();
            let row = rows
                .iter()
                .find(|row| row["address"] == "10.1.0.2")
                .unwrap();
            assert_eq!(
                (&row["hostname"], &row["chosen"]),
                (&"b".into(), &true.into())
            );
            assert_eq!(row["reached_by"][0]["hostname"], "a");
            assert!(row["reached_by"][0]["round_trip_us"].as_u64().unwrap() > 0);

            // Two of them have eth1 in common; all three do not.
            let (code, text) = kolo(&["interfaces", "--nodes", "a,b", "--interfaces", "eth1"])?;
            assert_eq!(code, Some(0), "{text}");
            assert!(text.contains("chosen: eth1 on every node"), "{text}");
            let (code, text) = kolo(&["interfaces", "--interfaces", "eth1"])?;
            assert_eq!(code, Some(1), "{text}");
            assert!(text.contains("c (node-"), "{text}");
            let (code, text) = kolo(&["interfaces", "--nodes", "a,z"])?;
            assert_eq!(code, Some(2), "{text}");
            assert!(text.contains("`z`"), "{text}");

            let group = Group::start(cluster, 3).await?;
            let job = group.info.job.to_string();
            let (code, text) = kolo(&["interfaces", "--job", &job])?;
            assert_eq!(code, Some(0), "{text}");
            assert!(
                text.contains("chosen: eth0 on every node (known from before"),
                "{text}"
            );
            group.stop().await?;

            let (code, text) = kolo(&["doctor"])?;
            assert_eq!(code, Some(0), "{text}");
            for part in [
                "udp buffers",
                "gpus",
                "open files",
                "shared memory",
                "certificate",
                "connected by eth0",
                "answers in",
            ] {
                assert!(text.contains(part), "no {part} in {text}");
            }
            assert!(text.contains("that of b "), "{text}");
            Ok(())
        })
        .unwrap();
}
