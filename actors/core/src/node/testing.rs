//! What the tests of this module share.

use std::collections::BTreeMap;
use std::sync::Arc;

use kolo_wire::ids::{
    ClusterId, CrossRank, DriverId, Generation, Incarnation, JobId, LocalRank, NodeId, Rank, Slot,
};
use kolo_wire::{GenerationTable, Handover, Member, Program, ProgramHash, SlotStart, StartWorkers};

use super::colocator::Here;
use super::messages::{Output, Signal, Spawning, Stay, WorkerId};

/// The node of the tests.
pub(crate) const NODE: NodeId = NodeId(1);

/// The stay of the tests' job.
pub(crate) const STAY: Stay = Stay {
    job: JobId(7),
    number: 1,
};

/// What the node knows of itself.
pub(crate) fn here() -> Here {
    Here {
        cluster: ClusterId(5),
        node: NODE,
        hostname: "here".to_owned(),
        authority: vec![9],
    }
}

/// The worker in a slot.
pub(crate) fn at(slot: u32) -> WorkerId {
    STAY.worker(Slot(slot), Incarnation::FIRST)
}

/// The start of the process in a slot of that job.
pub(crate) fn spawn(slot: u32, start: &StartWorkers) -> Output {
    Output::Spawn(Spawning {
        worker: at(slot),
        start: Arc::new(start.clone()),
        devices: Vec::new(),
    })
}

/// A signal for the worker in a slot.
pub(crate) fn signal(slot: u32, signal: Signal) -> Output {
    Output::Signal(at(slot), signal)
}

/// A member of a job with `local` members on [`NODE`].
pub(crate) fn member(rank: u32, local: u32) -> Member {
    Member {
        rank: Rank(rank),
        local_rank: LocalRank(rank),
        local_size: local,
        cross_rank: CrossRank(0),
        cross_size: 1,
        slot: Slot(rank),
        node: NODE,
        hostname: "here".to_owned(),
        address: None,
        incarnation: Incarnation::FIRST,
    }
}

/// A job of `workers` workers, all here.
pub(crate) fn start(workers: u32) -> StartWorkers {
    StartWorkers {
        job: JobId(7),
        generation: Generation(1),
        owner: DriverId(3),
        program: Program {
            hash: ProgramHash([1; 32]),
            size: 10,
            name: "program".to_owned(),
        },
        args: Vec::new(),
        env: BTreeMap::new(),
        user_env: BTreeMap::new(),
        slots: (0..workers)
            .map(|rank| SlotStart {
                member: member(rank, workers),
                env: BTreeMap::new(),
            })
            .collect(),
        world_size: workers,
        needs_data_plane: false,
        hello_timeout_ms: 10_000,
        grace_ms: 5000,
        installed: None,
        elastic: false,
        next_within_ms: None,
    }
}

/// The table of that job.
pub(crate) fn table(workers: u32, generation: u64) -> GenerationTable {
    GenerationTable {
        job: JobId(7),
        generation: Generation(generation),
        members: (0..workers).map(|rank| member(rank, workers)).collect(),
        cause: String::new(),
        handover: Handover::None,
    }
}
