//! A job, and the events of its workers.

use std::collections::BTreeMap;

use kolo_transport::ids::{JobId, NodeId, Rank, Slot};
use kolo_transport::wire::{
    Exit, JobSpec, Milli, NodeEvent, Placement, Program, ProgramHash, RankFailure, Resources,
};

pub(super) fn spec(placement: Placement) -> JobSpec {
    JobSpec {
        name: "test".to_owned(),
        program: Program {
            hash: ProgramHash([7; 32]),
            size: 1,
            name: "program".to_owned(),
        },
        args: Vec::new(),
        placement,
        per_worker: Resources {
            cpus: Milli::units(1),
            ..Resources::default()
        },
        env: BTreeMap::new(),
        start_timeout_ms: 30_000,
        grace_ms: 1000,
        rendezvous: false,
        installed: None,
        layout: Vec::new(),
        interfaces: kolo_transport::wire::InterfaceSelection::default(),
        no_cache: false,
    }
}

pub(super) fn exited(job: JobId, slot: u32, exit: Exit) -> NodeEvent {
    NodeEvent::WorkerExited {
        job,
        slot: Slot(slot),
        failure: RankFailure {
            rank: Rank(0),
            node: NodeId(0),
            hostname: String::new(),
            pid: 0,
            exit,
            reason: None,
            stderr_tail: Vec::new(),
        },
        expected: false,
    }
}

pub(super) fn ready(job: JobId, slot: u32) -> NodeEvent {
    NodeEvent::WorkerReady {
        job,
        slot: Slot(slot),
        address: Some(format!("10.0.0.9:{}", 5000 + slot).parse().unwrap()),
    }
}
