//! Jobs that are started anew at each change, with the head around them.

use kolo_wire::ids::{Generation, Incarnation, Slot};
use kolo_wire::{Exit, Installed, OnChange};

use super::*;
use crate::head::job::fixtures::{elastic, failure};

/// A node that does at once what it is told.
fn node(request: &NodeRequest) -> Option<Reply> {
    match request {
        NodeRequest::Start(start) => {
            let slots = start.slots.iter().map(|slot| slot.member.slot);
            let pids = slots.map(|slot| (slot, 40 + slot.0)).collect();
            Some(Reply::Answer(NodeReply::Started { pids }))
        }
        NodeRequest::FreePort { .. } => Some(Reply::Answer(NodeReply::FreePort(7))),
        request => good(request),
    }
}

fn submit(world: &mut World, job: u64, (min, max): (u32, u32), seconds: u64) -> JobId {
    world.submit_as(job, |spec| {
        spec.placement = Placement::Pack { workers: max };
        spec.start_timeout_ms = seconds * 1000;
        spec.installed = Some(Installed {
            program: "train".to_owned(),
            ..Installed::default()
        });
        let mut limits = elastic(min, max);
        limits.on_change = OnChange::Restart;
        spec.elastic = Some(Box::new(limits));
    })
}

impl World {
    fn starts(&self, session: Session, of: JobId) -> usize {
        self.seen(
            session,
            |request| matches!(request, NodeRequest::Start(start) if start.job == of),
        )
    }
}

#[test]
fn two_jobs_that_wait_do_not_keep_each_other_from_their_room() {
    let mut world = World::new();
    world.node(1, 3, node);
    let large = submit(&mut world, 1, (5, 5), 600);
    assert_eq!(world.free_cpus(), [0], "nobody else wants it");
    let small = submit(&mut world, 2, (4, 4), 600);
    assert_eq!(world.free_cpus(), [3]);
    let two = world.node(2, 1, node);
    world.pass(Duration::from_secs(1));
    assert_eq!(world.free_cpus(), [0, 0]);
    assert_eq!((world.starts(two, small), world.starts(two, large)), (1, 0));
    let three = world.node(3, 5, node);
    world.pass(Duration::from_secs(1));
    assert_eq!(world.starts(three, large), 1);
}

#[test]
fn room_that_a_job_has_itself_is_not_that_of_other_jobs() {
    let mut world = World::new();
    world.node(1, 3, node);
    let job = submit(&mut world, 1, (5, 5), 1);
    world.pass(Duration::from_secs(2));
    let message = world.refusal(job).message;
    assert!(
        message.starts_with(
            "there is room for 3 workers; needed are at least 5, and no more came within 1s"
        ),
        "{message}"
    );
    assert!(
        message.contains("beside those that it has, requested 2 workers")
            && message.contains("other jobs take none of the room"),
        "{message}"
    );
}

#[test]
fn g3_a_node_that_comes_back_and_has_stopped_its_workers_is_not_waited_for() {
    let mut world = World::new();
    let one = world.node(1, 1, node);
    let two = world.node(2, 1, node);
    let job = submit(&mut world, 1, (1, 2), 600);
    assert_eq!((world.starts(one, job), world.starts(two, job)), (1, 1));
    world.disconnect(two);
    world.report(
        one,
        vec![NodeEvent::WorkerExited {
            job,
            slot: Slot(0),
            incarnation: Incarnation(1),
            generation: Generation(1),
            failure: failure(Exit::Signal(15)),
            expected: true,
        }],
    );
    world.pass(Duration::from_secs(1));
    assert_eq!(world.starts(one, job), 1, "the others may run");
    let registration = NodeRegistration {
        jobs: vec![job],
        ..introduction(2, 1)
    };
    let two = world.register(registration, node);
    assert_eq!(world.stops(two, job), 1);
    world.pass(Duration::from_secs(2));
    assert_eq!(world.starts(one, job), 2);
}

#[test]
fn a_reservation_that_ends_while_the_group_waits_is_made_again() {
    let mut world = World::new();
    let one = world.node(1, 1, node);
    let job = submit(&mut world, 1, (2, 2), 600);
    let reserves = |world: &World| {
        world.seen(one, |request| {
            matches!(request, NodeRequest::Reserve { .. })
        })
    };
    assert_eq!(reserves(&world), 1);
    // Its lease is over, and nothing else has changed there.
    world.report(one, vec![NodeEvent::JobGone { job }]);
    assert_eq!(reserves(&world), 2);
    let two = world.node(2, 1, node);
    world.pass(Duration::from_secs(1));
    assert_eq!((world.starts(one, job), world.starts(two, job)), (1, 1));
}
