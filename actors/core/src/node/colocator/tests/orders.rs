//! Every order of events ends well.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Event(u32, u8),
    Tick(u64),
    Stop,
    Lost(u32),
    Table,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0_u32..4, 0_u8..11).prop_map(|(slot, kind)| Step::Event(slot, kind)),
        1 => (0_u64..8).prop_map(Step::Tick),
        1 => Just(Step::Stop),
        1 => (0_u32..6).prop_map(Step::Lost),
        1 => Just(Step::Table),
    ]
}

proptest! {
    /// Whatever workers and head do: messages go only to workers that were welcomed and are there, every
    /// loss is told once, every worker's exit is reported once, and a stop always ends with one
    /// report of it.
    #[test]
    fn every_order_of_events_ends_well(steps in proptest::collection::vec(step(), 0..80)) {
        let mut job = Job::reserved();
        let mut log = job.begin(testing::start(4)).unwrap();
        for step in steps {
            log.extend(match step {
                Step::Event(slot, kind) => {
                    let event = match kind {
                        0 => WorkerEvent::Spawned { pid: 100 + slot },
                        1 => WorkerEvent::Said(hello_of(LOCAL_PROTOCOL, 100 + slot, 9)),
                        2 => WorkerEvent::Said(FromWorker::Ready { address: None }),
                        3 => WorkerEvent::Said(FromWorker::ConnectPeer { rank: Rank(3 - slot), generation: FIRST }),
                        8 => WorkerEvent::Said(FromWorker::RequestLink { rank: Rank(3 - slot), generation: FIRST, group: 0 }),
                        4 => WorkerEvent::Fault { reason: "x".to_owned() },
                        5 => WorkerEvent::Said(FromWorker::Sign { csr: Vec::new() }),
                        7 => WorkerEvent::Closed { socket: "call" },
                        9 => WorkerEvent::Ended,
                        6 => WorkerEvent::SpawnFailed { exit: Exit::Unknown, reason: "x".to_owned() },
                        _ => WorkerEvent::Exited { exit: Exit::Code(0), stderr_tail: Vec::new() },
                    };
                    job.has(at(slot), event)
                }
                Step::Tick(seconds) => job.pass(Duration::from_secs(seconds)),
                Step::Stop => job.stop(),
                Step::Lost(rank) => job.core.rank_lost(FIRST, failure(rank)).unwrap(),
                Step::Table => job.core.membership(testing::table(4, 1)).unwrap_or_default(),
            });
        }
        log.extend(job.stop());
        log.extend(job.pass(GRACE * 3));
        for slot in 0..4 {
            log.extend(job.ends(at(slot), Exit::Signal(9)));
        }
        prop_assert_eq!(log.iter().filter(|output| **output == Output::CloseWarden(STAY)).count(), 1);
        log.extend(job.core.closed());
        prop_assert!(job.core.is_gone());

        let mut welcome = [false; 4];
        let mut ended = [0; 4];
        let mut lost = BTreeSet::new();
        let mut answered = 0;
        for output in &log {
            match output {
                Output::Tell(worker, ToWorker::Welcome { .. }) => {
                    prop_assert!(!std::mem::replace(&mut welcome[worker.slot.0 as usize], true));
                }
                Output::Tell(worker, _) => {
                    let slot = worker.slot;
                    prop_assert!(welcome[slot.0 as usize], "{slot} was told before its welcome");
                }
                Output::Lost(Loss { failure, .. }) => prop_assert!(lost.insert(failure.rank)),
                Output::Answer { reply, .. } => {
                    answered += 1;
                    if let NodeReply::Started { pids } = reply {
                        prop_assert_eq!(pids.len(), 4);
                    }
                }
                _ => {}
            }
        }
        prop_assert_eq!(answered, 1);
        let reports = job.core.take_reports();
        for event in &reports {
            if let NodeEvent::WorkerExited { slot, .. } = event {
                ended[slot.0 as usize] += 1;
            }
        }
        prop_assert_eq!(ended, [1; 4]);
        let gone = NodeEvent::JobGone { job: STAY.job };
        prop_assert_eq!(reports.iter().filter(|event| **event == gone).count(), 1);
    }
}
