//! A job whose members come and go, with real processes.

use kolo_transport::ids::{Generation, Incarnation, Slot};
use kolo_transport::wire::{
    Exit, GenerationTable, Handover, NodeEvent, NodeReply, NodeRequest, StartWorkers,
};

use crate::bed::{Bed, is_running};
use crate::logs::{logs, rest};

/// A process, as slot and incarnation name it.
type Name = (u32, u64);

/// The start of these processes of a job.
fn start_of(job: &StartWorkers, processes: &[Name]) -> StartWorkers {
    let mut start = job.clone();
    start.slots = processes
        .iter()
        .map(|(slot, incarnation)| {
            let mut slot = job.slots[*slot as usize].clone();
            slot.member.incarnation = Incarnation(*incarnation);
            slot
        })
        .collect();
    start
}

/// A generation of these processes, in the order of their ranks.
fn table_of(job: &StartWorkers, generation: u64, processes: &[Name]) -> NodeRequest {
    let starts = start_of(job, processes).slots;
    let members = (0..).zip(starts).map(|(rank, start)| {
        let mut member = start.member;
        member.rank = kolo_transport::ids::Rank(rank);
        member
    });
    let table = GenerationTable {
        job: job.job,
        generation: Generation(generation),
        members: members.collect(),
        cause: String::new(),
        handover: Handover::None,
    };
    NodeRequest::Membership(table.into())
}

impl Bed {
    async fn more(&self, start: StartWorkers) -> Vec<u32> {
        match self.head.ask(NodeRequest::Start(start)).await {
            NodeReply::Started { pids } => pids.into_iter().map(|(_, pid)| pid).collect(),
            other => panic!("{other:?}"),
        }
    }

    /// The names in the next events, in order of slots.
    async fn names(&self, count: usize, of: fn(NodeEvent) -> (Slot, Incarnation)) -> Vec<Name> {
        let mut names = Vec::new();
        for _ in 0..count {
            let (slot, incarnation) = of(self.head.event().await);
            names.push((slot.0, incarnation.0));
        }
        names.sort_unstable();
        names
    }

    async fn ready(&self, count: usize) -> Vec<Name> {
        let of = |event| match event {
            NodeEvent::WorkerReady {
                slot, incarnation, ..
            } => (slot, incarnation),
            other => panic!("{other:?}"),
        };
        self.names(count, of).await
    }

    async fn taken(&self, count: usize) -> Vec<Name> {
        let of = |event| match event {
            NodeEvent::Taken {
                slot, incarnation, ..
            } => (slot, incarnation),
            other => panic!("{other:?}"),
        };
        self.names(count, of).await
    }
}

#[tokio::test]
async fn processes_come_go_and_follow_each_other() {
    let bed = Bed::start().await;
    let mut job = bed.job(3, "");
    job.generation = Generation(0);
    job.next_within_ms = Some(60_000);
    let first = start_of(&job, &[(0, 1), (1, 1)]);
    let pids = bed.launch(&first).await;
    assert_eq!(bed.more(first).await, pids, "each is started once");
    assert_eq!(bed.ready(2).await, [(0, 1), (1, 1)]);
    let table = table_of(&job, 1, &[(0, 1), (1, 1)]);
    assert_eq!(bed.head.ask(table).await, NodeReply::Done);
    assert_eq!(bed.taken(2).await, [(0, 1), (1, 1)]);

    // One is asked to go.
    let stop = NodeRequest::StopWorker {
        job: job.job,
        slot: Slot(1),
        incarnation: Incarnation(1),
        why: "it leaves".to_owned(),
    };
    assert_eq!(bed.head.ask(stop).await, NodeReply::Done);
    let exit = |slot, exit| {
        move |event: NodeEvent| match event {
            NodeEvent::WorkerExited {
                slot: of,
                incarnation: Incarnation(1),
                generation: Generation(1),
                failure,
                expected: true,
                ..
            } => assert_eq!((of, failure.exit), (Slot(slot), exit)),
            other => panic!("{other:?}"),
        }
    };
    exit(1, Exit::Code(0))(bed.head.event().await);
    assert!(!is_running(pids[1]));

    // The next ones of both slots come, and one in a new slot. The one that is there ends first.
    let second = start_of(&job, &[(0, 2), (1, 2), (2, 1)]);
    let more = bed.more(second).await;
    assert!(more.iter().all(|pid| is_running(*pid)));
    assert!(!is_running(pids[0]));
    let (mut ready, mut taken) = (Vec::new(), Vec::new());
    for _ in 0..7 {
        match bed.head.event().await {
            NodeEvent::WorkerReady {
                slot, incarnation, ..
            } => ready.push((slot.0, incarnation.0)),
            // They get the generation that is there, though they are not in it.
            NodeEvent::Taken {
                slot,
                incarnation,
                generation: Generation(1),
                ..
            } => taken.push((slot.0, incarnation.0)),
            event => exit(0, Exit::Signal(9))(event),
        }
    }
    ready.sort_unstable();
    taken.sort_unstable();
    assert_eq!(ready, [(0, 2), (1, 2), (2, 1)]);
    assert_eq!(taken, ready);
    let table = table_of(&job, 2, &[(2, 1), (0, 2)]);
    assert_eq!(bed.head.ask(table).await, NodeReply::Done);
    let all = bed.taken(3).await;
    assert_eq!(all, [(0, 2), (1, 2), (2, 1)], "the spare, too");

    let connection = bed.connect().await;
    bed.stop(job.job).await;
    let mut stream = logs(&connection, job.job, &[], None, true).await.unwrap();
    let lines = rest(&mut stream).await;
    let ranks = |text: &str| {
        let lines = lines.iter().filter(|line| line.text == text.as_bytes());
        let mut ranks: Vec<u32> = lines.map(|line| line.rank.0).collect();
        ranks.sort_unstable();
        ranks
    };
    assert_eq!(ranks("stop: it leaves"), [1]);
    // Ranks 0 and 1, and the spare with the number of its slot.
    assert_eq!(ranks("stop: the test is over"), [0, 1, 1]);
    bed.end().await;
}
