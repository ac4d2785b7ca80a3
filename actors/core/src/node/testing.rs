//! What the tests of this module share.

use std::collections::BTreeMap;
use std::sync::Arc;

use kolo_wire::ids::{
    ClusterId, CrossRank, DriverId, Generation, Incarnation, JobId, LocalRank, NodeId, Rank, Slot,
};
use kolo_wire::{
    GenerationTable, Handover, Member, OnChange, Program, ProgramHash, SlotStart, StartWorkers,
};

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
        next_within_ms: None,
        on_change: OnChange::InPlace,
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

/// How long a worker waits for the next generation, in milliseconds.
pub(crate) const NEXT_WITHIN: u64 = 60_000;

/// A process of a job whose members come and go.
pub(crate) fn of(slot: u32, incarnation: u64) -> WorkerId {
    STAY.worker(Slot(slot), Incarnation(incarnation))
}

/// A start of these processes.
pub(crate) fn start_of(processes: &[(u32, u64)]) -> StartWorkers {
    let mut start = start(0);
    start.generation = Generation(0);
    start.next_within_ms = Some(NEXT_WITHIN);
    start.slots = processes
        .iter()
        .map(|(slot, incarnation)| {
            let mut member = member(*slot, 1);
            member.incarnation = Incarnation(*incarnation);
            SlotStart {
                member,
                env: BTreeMap::new(),
            }
        })
        .collect();
    start
}

/// A generation with these processes, the first of which is rank 0.
pub(crate) fn table_of(generation: u64, processes: &[(u32, u64)]) -> GenerationTable {
    let mut table = table(0, generation);
    table.members = (0..)
        .zip(processes)
        .map(|(rank, (slot, incarnation))| {
            let mut member = member(rank, 1);
            member.slot = Slot(*slot);
            member.incarnation = Incarnation(*incarnation);
            member
        })
        .collect();
    table
}
