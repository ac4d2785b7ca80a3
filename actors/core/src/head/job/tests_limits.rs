//! The largest job.

use std::time::Duration;

use kolo_wire::frame::{Limits, PREFIX, encode_head};
use kolo_wire::ids::{Incarnation, Rank};
use kolo_wire::{Exit, JobEvent, NodeEvent, NodeReply, Placement, RankFailure};

use super::end::{MAX_TAIL, MAX_TAIL_BYTES};
use super::fixtures::{ended, sites, spec};
use super::tests::{JOB, healthy, submit, submit_on};
use super::*;
use crate::head::validate::{MAX_ENTRIES_BYTES, MAX_ENTRY, MAX_START_TIMEOUT, validate};
use crate::placement::MAX_PER_NODE;
use crate::ranks::MAX_WORLD_SIZE;

fn check(message: &impl serde::Serialize) {
    let mut frame = bytes::BytesMut::new();
    encode_head(&mut frame, message, 0).unwrap();
    let length = frame.len() - PREFIX;
    assert!(length <= Limits::CONTROL.head as usize, "{length} bytes");
}

/// In bytes, on Linux. A node may be given a longer one.
const LONGEST_HOSTNAME: usize = 64;

/// One node for every entry, with hostnames of this length.
fn named(workers: &[u32], hostname: usize) -> Vec<Site> {
    let mut sites = sites(workers);
    for site in &mut sites {
        site.hostname = format!("{:x>hostname$}", site.node.0);
    }
    sites
}

#[test]
fn hostnames_that_are_too_long_for_the_largest_job_are_refused() {
    let nodes = vec![MAX_PER_NODE; (MAX_WORLD_SIZE / MAX_PER_NODE) as usize];
    let refusal = submit_on(named(&nodes, LONGEST_HOSTNAME + 1), |_| {});
    let refusal = refusal.err().unwrap();
    assert_eq!(refusal.kind, RefusalKind::Invalid);
    let start = "the hostnames of 16384 workers have 1064960 bytes together; allowed are 1048576 for so many workers, \
                 64 for each; the longest is xxx";
    assert!(refusal.message.starts_with(start), "{refusal}");
    // Half as many may have longer ones.
    submit_on(named(&nodes[..2], 256), |_| {}).unwrap();
}

/// What a limit is for: no message of the largest job is over the largest frame.
#[test]
fn the_largest_job_fits_into_frames() {
    let nodes = vec![MAX_PER_NODE; (MAX_WORLD_SIZE / MAX_PER_NODE) as usize];
    let mut run = submit_on(named(&nodes, LONGEST_HOSTNAME), |spec| {
        for index in 0..MAX_ENTRIES_BYTES / MAX_ENTRY {
            spec.env
                .insert(format!("V{index}"), "x".repeat(MAX_ENTRY - 64));
        }
    })
    .unwrap();
    for (node, _) in (1..).zip(&nodes) {
        run.reserve(node, true);
    }
    for (node, _) in (1..).zip(&nodes) {
        run.start(node);
    }
    for slot in 0..MAX_WORLD_SIZE {
        let report = NodeEvent::WorkerReady {
            job: JOB,
            slot: Slot(slot),
            address: Some(
                "[2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]:65535"
                    .parse()
                    .unwrap(),
            ),
            incarnation: Incarnation::FIRST,
        };
        run.report(1 + u64::from(slot / MAX_PER_NODE), report);
    }
    for (node, _) in (1..).zip(&nodes) {
        run.taken(node);
    }
    // All nodes get the same.
    assert_eq!(run.pushed.len(), nodes.len());
    check(&run.pushed[0].1);
    for action in &run.actions {
        match action {
            Action::Request { request, .. } => check(request),
            Action::Tell(event) => check(event),
            _ => {}
        }
    }
    let healthy = run.actions.last();
    assert!(matches!(
        healthy,
        Some(Action::Tell(JobEvent::Healthy { .. }))
    ));
    let mut info = run.job.info(Duration::ZERO);
    for worker in &mut info.workers {
        worker.pid = u32::MAX;
        worker.exit = Some(Exit::Code(i32::MIN));
    }
    check(&info);
}

/// A worker may say anything, and a node may report anything.
#[test]
fn the_longest_last_words_fit_into_frames() {
    let mut run = submit(&[1], |_| {});
    run.reserve(1, true);
    run.start(1);
    let mut failure = super::fixtures::failure(Exit::Code(1));
    failure.reason = Some("\u{fffd}".repeat(1 << 20));
    failure.stderr_tail = vec!["\u{fffd}".repeat(64 << 10); 20];
    failure.stderr_tail.push("x".repeat(1 << 20));
    run.report(1, ended(JOB, 0, failure, false));
    run.step(Event::Replied {
        node: NodeId(1),
        reply: Reply::Answer(NodeReply::Done),
    });
    let end = run
        .actions
        .iter()
        .find_map(|action| match action {
            Action::Tell(event @ JobEvent::Ended { .. }) => Some(event),
            _ => None,
        })
        .unwrap();
    check(end);
    let JobEvent::Ended {
        failure: Some(failure),
        ..
    } = end
    else {
        panic!("{end:?}");
    };
    // The end of a process is told by its last line, even by a part of it.
    assert_eq!(failure.stderr_tail, ["x".repeat(MAX_TAIL_BYTES)]);
    let reason = run.job.info(Duration::ZERO).reason.unwrap();
    assert!(reason.starts_with("a worker ended before"), "{reason}");
    assert!(reason.len() <= MAX_REASON);
}

#[test]
fn nodes_give_the_lease_that_the_longest_start_timeout_needs() {
    let mut spec = spec(Placement::Pack { workers: 1 });
    spec.start_timeout_ms = MAX_START_TIMEOUT.as_millis() as u64;
    validate(&spec).unwrap();
    let (now, config) = (Instant::now(), JobConfig::default());
    let (_, actions) = Job::submit(now, JOB, DriverId(1), spec, sites(&[1]), config).unwrap();
    let [Action::Request { request, .. }] = &actions[..] else {
        panic!("{actions:?}");
    };
    let NodeRequest::Reserve { lease_ms, .. } = **request else {
        panic!("{request:?}");
    };
    assert!(Duration::from_millis(lease_ms) <= crate::node::inventory::MAX_LEASE);
}

#[test]
fn the_tail_of_a_dead_worker_is_cut_and_its_identity_is_the_head_s() {
    let mut run = healthy();
    let mut failure = fixtures::failure(Exit::Code(1));
    failure.rank = Rank(0);
    failure.stderr_tail = (0..1000).map(|line| line.to_string()).collect();
    run.report(2, ended(JOB, 3, failure, false));
    let [
        Action::Tell(JobEvent::RankLost { failure, .. }),
        Action::Push(_),
    ] = &run.actions[..]
    else {
        panic!("{:?}", run.actions);
    };
    let is_short = |failure: &RankFailure| failure.stderr_tail.is_empty();
    assert!(
        matches!(&run.pushed.back().unwrap().1, NodeRequest::RankLost { failure, .. } if is_short(failure)),
        "workers do without: {:?}",
        run.pushed
    );
    assert_eq!((failure.rank, failure.node), (Rank(3), NodeId(2)));
    assert_eq!(failure.stderr_tail.len(), MAX_TAIL);
    assert_eq!(failure.stderr_tail.last().unwrap(), "999");
}
