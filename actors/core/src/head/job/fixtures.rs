//! What the tests of this module share.

use std::collections::BTreeMap;

use kolo_wire::ids::{Incarnation, Rank};
use kolo_wire::{
    Account, Elastic, Exit, Milli, NodeEvent, OnChange, Placement, Program, ProgramHash,
    RankFailure, Resources, WorkerError,
};

use super::parts::Push;
use super::*;

pub(crate) fn spec(placement: Placement) -> JobSpec {
    JobSpec {
        name: "test".to_owned(),
        program: Program {
            hash: ProgramHash([7; 32]),
            size: 1,
            name: "program".to_owned(),
        },
        args: vec!["--flag".to_owned()],
        placement,
        per_worker: Resources {
            cpus: Milli::units(1),
            ..Resources::default()
        },
        env: BTreeMap::from([("USER".to_owned(), "me".to_owned())]),
        start_timeout_ms: 30_000,
        grace_ms: 1000,
        rendezvous: false,
        installed: None,
        layout: Vec::new(),
        interfaces: kolo_wire::InterfaceSelection::default(),
        no_cache: false,
        elastic: None,
    }
}

/// A job of these bounds, with the default of everything else.
pub(crate) fn elastic(min: u32, max: u32) -> Elastic {
    Elastic {
        min,
        max,
        spares: 0,
        max_resets: None,
        restarts_within: None,
        restarts_without_progress: 3,
        cooldown: None,
        join_window_ms: 1000,
        ack_timeout_ms: 10_000,
        filters: Vec::new(),
        health_check: None,
        on_change: OnChange::default(),
        hosts: None,
    }
}

/// One site for every entry, with so many workers; the first is node 1.
pub(crate) fn sites(workers: &[u32]) -> Vec<Site> {
    (1..)
        .zip(workers)
        .map(|(node, workers)| Site {
            node: NodeId(node),
            hostname: format!("host{node}"),
            address: format!("10.0.0.{node}:4433").parse().unwrap(),
            workers: *workers,
        })
        .collect()
}

/// The requests that a step has given nodes to deliver, in order. Actions are left out for which nothing is to be delivered any
/// more, because a request of the same step has taken their place.
pub(crate) fn pushed(job: &Job, actions: &mut Vec<Action>) -> Vec<(NodeId, NodeRequest)> {
    let mut left: BTreeMap<NodeId, usize> = BTreeMap::new();
    for action in actions.iter() {
        if let Action::Push(node) = action {
            *left.entry(*node).or_default() += 1;
        }
    }
    let mut requests = Vec::new();
    actions.retain(|action| {
        let Action::Push(node) = action else {
            return true;
        };
        let part = job.base.parts.find(*node).unwrap();
        let queue = &job.base.parts[part].pushes.queue;
        let left = left.get_mut(node).unwrap();
        let push = queue.len().checked_sub(*left).map(|place| &queue[place]);
        *left -= 1;
        requests.extend(push.map(|push| match push {
            Push::Membership(_) => {
                let table = job.base.table_for(part).unwrap();
                (*node, NodeRequest::Membership(table))
            }
            Push::Order(request) => (*node, (**request).clone()),
        }));
        push.is_some()
    });
    requests
}

pub(crate) fn failure(exit: Exit) -> RankFailure {
    RankFailure {
        rank: Rank(0),
        node: NodeId(0),
        hostname: String::new(),
        pid: 0,
        exit,
        reason: None,
        stderr_tail: vec!["last words".to_owned()],
        account: None,
    }
}

/// A failure with the clock of its host at the exit, and with the second of its error file.
pub(crate) fn accounted(exit: Exit, at_ms: u64, second: Option<u64>) -> RankFailure {
    let error = second.map(|second| WorkerError {
        message: "ValueError: bad batch".to_owned(),
        place: Some("train.py:12".to_owned()),
        callstack: vec!["raise ValueError".to_owned()],
        at_s: Some(second),
    });
    RankFailure {
        account: Some(Box::new(Account {
            at_ms,
            age_ms: 0,
            error,
        })),
        ..failure(exit)
    }
}

pub(crate) fn exited(job: JobId, slot: u32, exit: Exit) -> NodeEvent {
    ended(job, slot, failure(exit), false)
}

/// The first process of a slot has ended.
pub(crate) fn ended(job: JobId, slot: u32, failure: RankFailure, expected: bool) -> NodeEvent {
    NodeEvent::WorkerExited {
        job,
        slot: Slot(slot),
        failure,
        expected,
        incarnation: Incarnation::FIRST,
        generation: Generation(0),
    }
}

pub(crate) fn ready(job: JobId, slot: u32) -> NodeEvent {
    NodeEvent::WorkerReady {
        job,
        slot: Slot(slot),
        address: Some(format!("10.0.0.9:{}", 5000 + slot).parse().unwrap()),
        incarnation: Incarnation::FIRST,
    }
}
