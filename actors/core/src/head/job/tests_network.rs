//! A job and the network between its nodes.

use std::sync::Arc;
use std::time::Duration;

use kolo_wire::{InterfaceSelection, JobState, NetworkChoice, NetworkReport, SubmitFrame};

use super::fixtures::ready;
use super::tests::{JOB, Run, submit};
use super::*;
use crate::interfaces::tests::{World, discover, host, triangle};
use crate::interfaces::{Host, Network, Plan, plan};

fn probe(hosts: &[Host]) -> Plan {
    let plan = plan(hosts.to_vec(), &InterfaceSelection::default(), false).unwrap();
    assert!(matches!(plan, Plan::Probe(_)), "{plan:?}");
    plan
}

/// What comes of it if each address is reached from the same network, and from no other.
fn find(hosts: &[Host]) -> Result<Arc<Network>, NetworkReport> {
    discover(&World::default(), hosts).result.map(Arc::new)
}

/// Two hosts in one network.
fn pair() -> [Host; 2] {
    [
        host(1, &["eth0 10.1.0.1 mtu=9000"]),
        host(2, &["eth0 10.1.0.2 mtu=9000"]),
    ]
}

fn starts(run: &Run) -> Vec<kolo_wire::StartWorkers> {
    run.actions
        .iter()
        .filter_map(|action| match action {
            Action::Request { request, .. } => match &**request {
                NodeRequest::Start(start) => Some(start.clone()),
                _ => None,
            },
            _ => None,
        })
        .collect()
}

#[test]
fn the_nodes_are_probed_between_placing_and_starting() {
    let hosts = pair();
    let mut run = submit(&[1, 1], |_| ());
    run.job.connect_by(probe(&hosts));
    run.asked();
    run.reserve(1, true);
    assert_eq!(run.job.info(Duration::ZERO).state, JobState::Placing);
    run.reserve(2, true);
    assert_eq!(run.asked(), ["tell:placed", "discover"]);
    assert_eq!(run.job.info(Duration::ZERO).state, JobState::Probing);
    assert_eq!(run.job.info(Duration::ZERO).network, None);
    // The program may come meanwhile; it is not enough.
    run.step(Event::Driver(SubmitFrame::ProgramReady));
    assert!(run.asked().is_empty());
    run.step(Event::Discovered(find(&hosts)));
    let info = run.job.info(Duration::ZERO);
    assert_eq!(info.state, JobState::Starting);
    let choice = info.network.unwrap().choice;
    assert_eq!(choice, NetworkChoice::Interface("eth0".to_owned()));
    let starts = starts(&run);
    assert_eq!(run.asked(), ["1:start", "2:start"]);
    let env = &starts[1].slots[0].env;
    for (name, value) in [
        ("HOROVOD_GLOO_IFACE", "eth0"),
        ("GLOO_SOCKET_IFNAME", "eth0"),
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("KOLO_NODE_IP", "10.1.0.2"),
        ("KOLO_LISTEN", "10.1.0.2%eth0"),
        ("KOLO_MTU", "9000"),
    ] {
        assert_eq!(env[name], value, "{name}");
    }
    assert_eq!(starts[1].env["MASTER_ADDR"], "10.1.0.1");
}

#[test]
fn what_is_known_is_not_asked_for_and_a_second_answer_changes_nothing() {
    let network = find(&pair()).unwrap();
    let mut run = submit(&[1, 1], |_| ());
    run.job.connect_by(Plan::Known(Arc::clone(&network)));
    run.asked();
    run.reserve_all(2, true);
    assert_eq!(run.asked(), ["tell:placed", "1:start", "2:start"]);
    run.step(Event::Discovered(Ok(network)));
    assert!(run.asked().is_empty());
}

#[test]
fn nodes_that_nothing_connects_are_released_with_the_table() {
    let apart = [host(1, &["eth0 10.1.0.1"]), host(2, &["eth0 10.2.0.2"])];
    let mut run = submit(&[1, 1], |_| ());
    run.job.connect_by(probe(&apart));
    run.reserve_all(2, true);
    run.asked();
    run.step(Event::Discovered(find(&apart)));
    assert_eq!(run.asked(), ["1:release", "2:release"]);
    run.all_done(2);
    let refusal = run.ended().1.unwrap();
    assert_eq!(refusal.kind, RefusalKind::Network);
    assert!(refusal.message.contains("connects a and b"));
    assert!(refusal.message.contains("NODE"), "{refusal}");
    let info = run.job.info(Duration::ZERO);
    assert_eq!(info.network.unwrap().choice, NetworkChoice::None);
}

#[test]
fn a_job_that_ends_while_it_is_probed_takes_no_answer() {
    let hosts = pair();
    let mut run = submit(&[1, 1], |_| ());
    run.job.connect_by(probe(&hosts));
    run.reserve_all(2, true);
    run.asked();
    run.step(Event::Driver(SubmitFrame::Stop));
    assert_eq!(run.asked(), ["1:release", "2:release"]);
    run.step(Event::Discovered(find(&hosts)));
    run.all_done(2);
    assert!(run.asked().iter().all(|what| !what.contains("start")));
    assert!(run.job.base.is_finished());

    // And one whose time is over says what it waited for.
    let mut run = submit(&[1, 1], |_| ());
    run.job.connect_by(probe(&hosts));
    run.reserve_all(2, true);
    run.now += Duration::from_secs(31);
    run.step(Event::Tick);
    run.all_done(2);
    let message = run.ended().1.unwrap().message;
    assert!(
        message.contains("probe of their network interfaces"),
        "{message}"
    );
}

#[test]
fn by_pair_each_node_has_its_own_view_of_the_others() {
    let network = find(&triangle()).unwrap();
    assert_eq!(*network.choice(), NetworkChoice::PerPair);
    let mut run = submit(&[1, 1, 1], |_| ());
    run.job.connect_by(Plan::Known(Arc::clone(&network)));
    run.reserve_all(3, true);
    let starts = starts(&run);
    assert!(!starts[0].slots[0].env.contains_key("GLOO_SOCKET_IFNAME"));
    let listen = &starts[0].slots[0].env["KOLO_LISTEN"];
    assert_eq!(listen, "10.12.0.1%ab,10.13.0.1%ac");
    for node in 1..=3 {
        run.start(node);
        run.report(node, ready(JOB, node as u32 - 1));
    }
    let tables: Vec<_> = run
        .pushed
        .iter()
        .filter_map(|(node, request)| match request {
            NodeRequest::Membership(table) => Some((node.0, table.clone())),
            _ => None,
        })
        .collect();
    // Who sees whom where; the port is the worker's own.
    for (by, of, seen) in [
        (2, 0, "10.12.0.1:5000"),
        (3, 0, "10.13.0.1:5000"),
        (3, 1, "10.23.0.2:5001"),
        (1, 2, "10.13.0.3:5002"),
    ] {
        let table = &tables.iter().find(|(node, _)| *node == by).unwrap().1;
        assert_eq!(table.members[of].address, Some(seen.parse().unwrap()));
    }

    let mut run = submit(&[1, 1, 1], |spec| spec.rendezvous = true);
    run.job.connect_by(Plan::Known(network));
    run.reserve_all(3, true);
    run.all_done(3);
    let message = run.ended().1.unwrap().message;
    assert!(message.contains("no single interface"), "{message}");
}
