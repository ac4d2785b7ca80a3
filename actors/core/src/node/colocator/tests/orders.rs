//! Every order of events ends well.

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
        6 => (0_u32..4, 0_u8..10).prop_map(|(slot, kind)| Step::Event(slot, kind)),
        1 => (0_u64..8).prop_map(Step::Tick),
        1 => Just(Step::Stop),
        1 => (0_u32..6).prop_map(Step::Lost),
        1 => Just(Step::Table),
    ]
}

proptest! {
    /// Whatever workers and head do: messages go only to workers that were welcomed and are there, every
    /// loss is told once, every worker's exit is reported once, and a stop always ends in `Gone` with one
    /// report.
    #[test]
    fn every_order_of_events_ends_well(steps in proptest::collection::vec(step(), 0..80)) {
        let mut now = Instant::now();
        let mut core = reserved();
        let mut log = core.start(testing::start(4)).unwrap();
        for step in steps {
            log.extend(match step {
                Step::Event(slot, kind) => {
                    let event = match kind {
                        0 => WorkerEvent::Spawned { pid: 100 + slot },
                        1 => hello(slot),
                        2 => WorkerEvent::Ready { address: None },
                        3 => WorkerEvent::ConnectPeer { rank: Rank(3 - slot), generation: Generation(1) },
                        8 => WorkerEvent::RequestLink { rank: Rank(3 - slot), generation: Generation(1), group: 0 },
                        4 => WorkerEvent::Fault { reason: "x".to_owned() },
                        5 => WorkerEvent::Sign { csr: Vec::new() },
                        7 => WorkerEvent::Closed { socket: "call" },
                        6 => WorkerEvent::SpawnFailed { exit: Exit::Unknown, reason: "x".to_owned() },
                        _ => exited(Exit::Code(0)),
                    };
                    core.worker(now, Slot(slot), event)
                }
                Step::Tick(seconds) => {
                    now += Duration::from_secs(seconds);
                    core.tick(now)
                }
                Step::Stop => core.stop(now, "x"),
                Step::Lost(rank) => core.rank_lost(Generation(1), failure(rank)).unwrap(),
                Step::Table => core.membership(testing::table(4, 1)).unwrap_or_default(),
            });
        }
        log.extend(core.stop(now, "end"));
        log.extend(core.tick(now + GRACE * 3));
        for slot in 0..4 {
            log.extend(core.worker(now, Slot(slot), exited(Exit::Signal(9))));
        }
        prop_assert_eq!(log.iter().filter(|action| **action == Action::Close).count(), 1);
        log.extend(core.closed());
        prop_assert!(core.is_gone());

        let mut welcome = [false; 4];
        let mut ended = [0; 4];
        let mut lost = BTreeSet::new();
        let mut gone = 0;
        let mut started = 0;
        for action in &log {
            match action {
                Action::Tell(slot, ToWorker::Welcome { .. }) => {
                    prop_assert!(!std::mem::replace(&mut welcome[slot.0 as usize], true));
                }
                Action::Tell(slot, _) => {
                    prop_assert!(welcome[slot.0 as usize], "{slot} was told before its welcome");
                    prop_assert_eq!(ended[slot.0 as usize], 0);
                }
                Action::Lost { failure, .. } => prop_assert!(lost.insert(failure.rank)),
                Action::Report(NodeEvent::WorkerExited { slot, .. }) => ended[slot.0 as usize] += 1,
                Action::Gone { report: true } => gone += 1,
                Action::Started(pids) => {
                    started += 1;
                    prop_assert_eq!(pids.len(), 4);
                }
                _ => {}
            }
        }
        prop_assert_eq!(ended, [1; 4]);
        prop_assert_eq!(gone, 1);
        prop_assert_eq!(started, 1);
    }
}
