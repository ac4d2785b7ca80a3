//! Jobs of Horovod's elastic workers, message by message.

use std::net::SocketAddr;
use std::time::Duration;

use kolo_wire::ids::Incarnation;
use kolo_wire::{Elastic, Exit, Installed, JobState, OnChange};

use super::fixtures::elastic;
use super::tests::{Run, submit};
use super::*;
use crate::membership::Process;
use crate::rendezvous::DoorNews;

fn process(slot: u32, incarnation: u64) -> Process {
    Process {
        slot: Slot(slot),
        incarnation: Incarnation(incarnation),
    }
}

fn horovod(workers: &[u32]) -> Run {
    let most = workers.iter().sum();
    submit(workers, |spec| {
        spec.rendezvous = true;
        spec.installed = Some(Installed {
            program: "train".to_owned(),
            ..Installed::default()
        });
        spec.elastic = Some(Box::new(Elastic {
            on_change: OnChange::Horovod,
            ..elastic(1, most)
        }));
    })
}

impl Run {
    fn door(&mut self, slot: u32, incarnation: u64, news: DoorNews) {
        self.step(Event::Door(process(slot, incarnation), news));
    }

    fn opened(&mut self, slot: u32, incarnation: u64) {
        let address = SocketAddr::from(([10, 0, 0, 9], 8000 + slot as u16));
        self.door(slot, incarnation, DoorNews::Opened(Ok(address)));
    }

    /// The nodes that are to end the connections of a generation's members.
    fn ends_connections(&mut self) -> Vec<(u64, u64)> {
        let pushed = std::mem::take(&mut self.pushed);
        let ends = pushed
            .into_iter()
            .filter_map(|(node, request)| match request {
                NodeRequest::Revoke { generation, .. } => Some((node.0, generation.0)),
                _ => None,
            });
        ends.collect()
    }

    /// The members that were let in last, as (slot, incarnation), and the generation.
    fn admitted(&mut self) -> Option<(u64, Vec<(u32, u64)>)> {
        let taken = std::mem::take(&mut self.actions);
        let mut admitted = taken.iter().rev().filter_map(|action| match action {
            Action::Admit(table) => Some(table),
            _ => None,
        });
        let table = admitted.next()?;
        let members = table.members.iter();
        let members = members.map(|member| (member.slot.0, member.incarnation.0));
        Some((table.generation.0, members.collect()))
    }

    /// Two workers on two nodes are in the first group.
    fn both(&mut self) {
        self.reserve_all(2, false);
        self.opened(0, 1);
        self.opened(1, 1);
        for (node, slot) in [(1, 0), (2, 1)] {
            self.started(node, &[(slot, 40 + slot)]);
            self.door(slot, 1, DoorNews::Arrived);
        }
        assert_eq!(self.admitted(), Some((1, vec![(0, 1), (1, 1)])));
        self.pushed.clear();
    }
}

#[test]
fn a_process_starts_when_its_door_is_open_and_all_are_let_in_together() {
    let mut run = horovod(&[1, 1]);
    run.reserve_all(2, false);
    let asked = run.asked();
    assert!(asked.contains(&"open door 0".to_owned()), "{asked:?}");
    assert!(asked.contains(&"open door 1".to_owned()), "{asked:?}");
    assert!(!asked.contains(&"1:start".to_owned()), "{asked:?}");
    run.opened(1, 1);
    let starts = run.starts();
    assert_eq!(starts.len(), 1);
    for (name, value) in [
        ("HOROVOD_ELASTIC", "1"),
        ("HOROVOD_RANK", "1"),
        ("HOROVOD_HOSTNAME", "host2"),
        ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.9"),
        ("HOROVOD_GLOO_RENDEZVOUS_PORT", "8001"),
    ] {
        assert_eq!(starts[0].1.slots[0].env[name], value, "{name}");
    }
    run.opened(0, 1);
    run.door(0, 1, DoorNews::Arrived);
    assert_eq!(run.admitted(), None, "the other one has not come");
    run.door(1, 1, DoorNews::Arrived);
    assert_eq!(run.admitted(), Some((1, vec![(0, 1), (1, 1)])));
    assert_eq!(run.job.base.state, JobState::Healthy);
}

#[test]
fn a_door_that_does_not_open_is_a_failure_of_its_process() {
    let mut run = horovod(&[1, 1]);
    run.reserve_all(2, false);
    run.asked();
    run.opened(1, 1);
    run.door(0, 1, DoorNews::Opened(Err("no more ports".to_owned())));
    let asked = run.asked();
    assert_eq!(asked, ["2:start", "close door 0", "close door 1"]);
    // Its group can't be formed: the other one begins again, too.
    run.started(2, &[(1, 41)]);
    run.asked();
    run.ends(2, 1, 1, Exit::Signal(9), false);
    assert_eq!(run.asked(), ["open door 0", "open door 1"]);
}

#[test]
fn survivors_are_let_in_when_they_have_asked_whichever_is_heard_first() {
    for asks_first in [true, false] {
        let mut run = horovod(&[1, 1]);
        run.both();
        let asked = DoorNews::Asked(Generation(1));
        if asks_first {
            run.door(0, 1, asked.clone());
            assert_eq!(run.admitted(), None, "the reason is heard in a moment");
        }
        run.ends(2, 1, 1, Exit::Signal(9), false);
        run.taken(1);
        run.taken(2);
        if !asks_first {
            assert_eq!(run.admitted(), None, "it is in its old group still");
            run.door(0, 1, asked);
        }
        let doors = run.actions.iter();
        let closed = doors.filter(|action| **action == Action::CloseDoor(process(1, 1)));
        // The actions before were looked at above.
        assert_eq!(closed.count(), usize::from(asks_first));
        assert_eq!(run.admitted(), Some((2, vec![(0, 1)])));
        // What its door says later is of nobody.
        run.door(1, 1, DoorNews::Arrived);
        assert_eq!(run.admitted(), None);
    }
}

/// Three workers on as many nodes. One that has asked keeps its connections, so another one that waits for it can't ask.
#[test]
fn a_loss_ends_the_connections_of_all_survivors_before_any_is_let_in() {
    for is_node_lost in [false, true] {
        let mut run = horovod(&[1, 1, 1]);
        run.reserve_all(3, false);
        for slot in 0..3 {
            run.opened(slot, 1);
        }
        for slot in 0..3 {
            run.started(u64::from(slot) + 1, &[(slot, 40 + slot)]);
            run.door(slot, 1, DoorNews::Arrived);
        }
        let first = Some((1, vec![(0, 1), (1, 1), (2, 1)]));
        assert_eq!(run.admitted(), first);
        run.pushed.clear();
        run.door(0, 1, DoorNews::Asked(Generation(1)));
        run.ends(2, 1, 1, Exit::Signal(9), false);
        assert_eq!(run.ends_connections(), [(1, 1), (2, 1), (3, 1)]);
        run.taken(3);
        run.door(2, 1, DoorNews::Asked(Generation(1)));
        assert_eq!(run.admitted(), None, "node 1 may still end connections");
        run.taken(1);
        assert_eq!(run.admitted(), None, "a new process may follow on node 2");
        if is_node_lost {
            run.step(Event::NodeLost {
                node: NodeId(2),
                reason: "cable".to_owned(),
                fence: crate::fence::Fence::Ended,
            });
        } else {
            run.taken(2);
        }
        assert_eq!(run.admitted(), Some((2, vec![(0, 1), (2, 1)])));
        assert_eq!(run.ends_connections(), []);
    }
}

#[test]
fn members_are_given_notice_when_a_new_process_has_come() {
    let mut run = horovod(&[1, 1]);
    run.both();
    run.door(0, 1, DoorNews::Hears);
    run.ends(2, 1, 1, Exit::Signal(9), false);
    run.taken(1);
    run.taken(2);
    run.door(0, 1, DoorNews::Asked(Generation(1)));
    assert_eq!(run.admitted(), Some((2, vec![(0, 1)])));
    run.opened(1, 2);
    assert!(!run.asked().iter().any(|what| what.starts_with("notice")));
    run.door(1, 2, DoorNews::Arrived);
    assert!(run.asked().contains(&"notice 1 to 0".to_owned()));
    // It is not given again while nobody has answered, nor when it was taken a moment ago.
    run.now += Duration::from_secs(1);
    run.step(Event::Tick);
    run.door(0, 1, DoorNews::Noticed(1, Ok(())));
    run.now += Duration::from_secs(1);
    run.step(Event::Tick);
    assert!(run.asked().is_empty());
    run.now += Duration::from_secs(10);
    run.step(Event::Tick);
    assert_eq!(run.asked(), ["notice 2 to 0"]);
    run.door(0, 1, DoorNews::Noticed(2, Err("refused".to_owned())));
    run.now += Duration::from_secs(1);
    run.step(Event::Tick);
    assert_eq!(
        run.asked(),
        ["notice 3 to 0"],
        "a notice that was lost is repeated"
    );
    run.door(0, 1, DoorNews::Asked(Generation(2)));
    assert_eq!(run.admitted(), Some((3, vec![(0, 1), (1, 2)])));
}
