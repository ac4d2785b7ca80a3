//! One job at a time, step by step.

mod ends;
mod installed;
mod run;

use std::time::Duration;

use kolo_wire::ids::{Incarnation, Rank};
use kolo_wire::{
    Exit, JobEvent, JobState, NodeEvent, NodeReply, Placement, RankFailure, StartWorkers,
    SubmitFrame,
};

pub(super) use self::run::{JOB, Run, healthy, submit, submit_on};
use super::fixtures::{ended, exited, failure, ready};
use super::*;
use crate::fence::Fence;

#[test]
fn a_group_starts_whole_or_not_at_all() {
    let mut run = submit(&[2, 1], |_| ());
    assert_eq!(run.asked(), ["1:reserve", "2:reserve"]);
    run.reserve(2, false);
    assert!(run.asked().is_empty());
    run.reserve(1, true);
    assert_eq!(run.asked(), ["tell:placed"]);
    run.step(Event::Driver(SubmitFrame::ProgramReady));
    assert_eq!(run.asked(), ["1:start", "2:start"]);
    run.start(1);
    run.report(1, ready(JOB, 0));
    // Workers may be faster than the answer that they were started.
    run.report(2, ready(JOB, 2));
    run.start(2);
    assert!(run.asked().is_empty());
    run.report(1, ready(JOB, 1));
    assert_eq!(run.asked(), ["1:membership", "2:membership"]);
    run.taken(2);
    assert!(run.asked().is_empty());
    run.taken(1);
    let Some(Action::Tell(JobEvent::Healthy { table, nodes })) = run.actions.last() else {
        panic!("{:?}", run.actions);
    };
    assert_eq!(table.generation, Generation(1));
    let addresses: Vec<_> = table
        .members
        .iter()
        .map(|member| member.address.unwrap().port())
        .collect();
    assert_eq!(addresses, [5000, 5001, 5002]);
    assert_eq!(nodes[1].ranks, [Rank(2)]);
    assert_eq!(run.job.info(Duration::ZERO).state, JobState::Healthy);
    assert_eq!(run.job.deadline(), None);
}

#[test]
fn start_carries_all_that_a_node_needs() {
    let mut run = submit(&[2, 1], |spec| spec.rendezvous = true);
    run.reserve_all(2, true);
    assert_eq!(
        run.asked(),
        ["1:reserve", "2:reserve", "tell:placed", "open 3"]
    );
    run.step(Event::Rendezvous(Ok("10.0.0.7:80".parse().unwrap())));
    let starts: Vec<_> = run
        .actions
        .iter()
        .filter_map(|action| match action {
            Action::Request { request, .. } => match &**request {
                NodeRequest::Start(start) => Some(start),
                _ => None,
            },
            _ => None,
        })
        .collect();
    assert_eq!(starts.len(), 2);
    let second = starts[1];
    assert_eq!(second.env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], "10.0.0.7");
    assert_eq!(second.env["MASTER_ADDR"], "10.0.0.1");
    assert_eq!(second.env["MASTER_PORT"], "29001");
    assert!(!second.env.contains_key("HOROVOD_GLOO_IFACE"));
    assert_eq!(second.user_env["USER"], "me");
    assert_eq!(second.slots.len(), 1);
    assert_eq!(second.slots[0].member.slot, Slot(2));
    assert_eq!(second.slots[0].env["RANK"], "2");
    assert_eq!(second.slots[0].env["GROUP_RANK"], "1");
    assert!(second.needs_data_plane);
    assert_eq!(second.world_size, 3);
    assert_eq!(second.owner, DriverId(1));
    assert!(second.hello_timeout_ms <= 30_000 && second.hello_timeout_ms > 0);
    assert_eq!(
        run.job.info(Duration::ZERO).rendezvous,
        Some("10.0.0.7:80".parse().unwrap())
    );
}

#[test]
fn g2_a_refused_reservation_releases_all_others() {
    let mut run = submit(&[1, 1, 1], |_| ());
    run.reserve(1, true);
    run.asked();
    run.step(Event::Replied {
        node: NodeId(2),
        reply: Reply::Refused(Refusal::new(RefusalKind::Unplaceable, "no cpus")),
    });
    // Node 3 has not answered: its release must not overtake the reserve.
    assert_eq!(run.asked(), ["2:free", "1:release"]);
    run.answer(1, NodeReply::Done);
    assert_eq!(run.asked(), ["1:free"]);
    run.reserve(3, true);
    assert_eq!(run.asked(), ["3:release"]);
    run.answer(3, NodeReply::Done);
    let (state, refusal, failure) = run.ended();
    assert_eq!((state, failure), (JobState::Failed, None));
    let refusal = refusal.unwrap();
    assert_eq!(refusal.kind, RefusalKind::Unplaceable);
    assert_eq!(
        refusal.message,
        "host2 (node-0000000000000002) did not reserve: no cpus"
    );
    assert_eq!(run.asked(), ["3:free", "tell:failed", "finished"]);
}

#[test]
fn g2_a_node_that_vanishes_between_reserve_and_start_ends_the_job() {
    let mut run = submit(&[1, 1], |_| ());
    run.reserve(1, false);
    run.reserve(2, true);
    run.asked();
    run.step(Event::NodeLost {
        node: NodeId(2),
        reason: "no heartbeat for 3 s".to_owned(),
        fence: Fence::Lease,
    });
    assert_eq!(run.asked(), ["1:release"]);
    run.answer(1, NodeReply::Done);
    let refusal = run.ended().1.unwrap();
    assert_eq!(refusal.kind, RefusalKind::NodeLost);
    assert_eq!(
        refusal.message,
        "host2 (node-0000000000000002) was lost before the group was ready: no heartbeat for 3 s"
    );
    assert_eq!(run.asked(), ["1:free", "tell:failed", "finished"]);
}

#[test]
fn what_was_waited_for_is_named_at_the_start_timeout_even_if_it_comes_just_then() {
    type Step = fn(&mut Run);
    let tick: Step = |run| run.step(Event::Tick);
    let none: Step = |_| ();
    let held: Step = |run| run.reserve(1, false);
    let booting: Step = |run| {
        run.reserve(1, true);
        run.report(1, ready(JOB, 0));
    };
    let whole: Step = |run| {
        run.reserve(1, true);
        run.start(1);
        run.report(1, ready(JOB, 0));
    };
    let brought: Step = |run| run.step(Event::Driver(SubmitFrame::ProgramReady));
    let no_reservation = "no answer to the reservation from host1 (node-0000000000000001)";
    let no_program = "its driver did not bring the program to all nodes";
    let cases: [(Step, Step, &str); 8] = [
        (none, tick, no_reservation),
        (none, held, no_reservation),
        (held, tick, no_program),
        (held, brought, no_program),
        (
            booting,
            |run| run.start(1),
            "no answer to the start from host1 (node-0000000000000001)",
        ),
        (
            |run| {
                run.reserve(1, true);
                run.started(1, &[(0, 77)]);
            },
            tick,
            "1 of 1 worker did not come: rank 0 on host1 (node-0000000000000001; pid 77 said no hello)",
        ),
        (
            |run| run.reserve(1, true),
            tick,
            "1 of 1 worker did not come: rank 0 on host1 (node-0000000000000001; no process yet)",
        ),
        (
            whole,
            tick,
            "the membership was not taken by host1 (node-0000000000000001)",
        ),
    ];
    for (before, then, expected) in cases {
        let mut run = submit(&[1], |spec| spec.start_timeout_ms = 500);
        before(&mut run);
        let deadline = run.now + Duration::from_millis(500);
        assert_eq!(run.job.deadline(), Some(deadline));
        run.now = deadline;
        then(&mut run);
        assert_eq!(
            run.job.info(Duration::ZERO).reason.unwrap(),
            format!("the group was not ready within its start timeout of 500ms: {expected}")
        );
        // What comes then is given back.
        let asked = run.asked();
        let is_undone = |asked: &String| asked == "1:release" || asked == "1:stop";
        // A node that has not answered is asked when it has.
        let is_unanswered =
            expected == no_reservation && asked.len() == 1 || expected.ends_with("no process yet)");
        assert!(asked.iter().any(is_undone) || is_unanswered, "{asked:?}");
    }
}

#[test]
fn only_workers_that_were_ended_with_the_job_count_as_stopped() {
    let stopped = |run: &Run| {
        run.actions.iter().find_map(|action| match action {
            Action::Tell(JobEvent::Ended { stopped, .. }) => Some(stopped.unwrap()),
            _ => None,
        })
    };
    let stop_on = |run: &mut Run, node: u64, slot: u32| {
        let failure = RankFailure {
            pid: 70 + slot,
            ..failure(Exit::Signal(15))
        };
        run.report(node, ended(JOB, slot, failure, true));
    };
    let mut run = submit(&[2, 2], |_| ());
    for node in [1, 2] {
        run.reserve(node, true);
    }
    for (node, slots) in [(1, [0, 1]), (2, [2, 3])] {
        let pids = slots.map(|slot| (Slot(slot), 70 + slot)).to_vec();
        run.answer(node, NodeReply::Started { pids });
        for slot in slots {
            run.report(node, ready(JOB, slot));
        }
    }
    // One ends by itself, one fails, one is ended, and of one nothing is told.
    run.report(1, exited(JOB, 0, Exit::Code(0)));
    run.report(1, exited(JOB, 1, Exit::Code(3)));
    run.step(Event::Driver(SubmitFrame::Stop));
    stop_on(&mut run, 2, 2);
    run.all_done(2);
    assert_eq!(stopped(&run), Some(2));

    let mut run = healthy();
    for slot in [0, 1] {
        run.report(1, exited(JOB, slot, Exit::Code(0)));
    }
    run.report(2, exited(JOB, 2, Exit::Code(0)));
    run.report(2, exited(JOB, 3, Exit::Code(3)));
    run.all_done(2);
    assert_eq!(stopped(&run), Some(0));
}

#[test]
fn a_worker_that_ends_while_starting_fails_the_job_with_its_last_words() {
    let mut run = submit(&[2], |_| ());
    run.reserve(1, true);
    run.report(1, ready(JOB, 0));
    run.report(1, exited(JOB, 1, Exit::Code(0)));
    run.report(1, exited(JOB, 0, Exit::Signal(9)));
    // Start is under way; stop follows its answer.
    assert_eq!(run.asked(), ["1:reserve", "tell:placed", "1:start"]);
    run.start(1);
    assert_eq!(run.asked(), ["1:stop"]);
    run.answer(1, NodeReply::Done);
    let (state, refusal, failure) = run.ended();
    assert_eq!(state, JobState::Failed);
    assert_eq!(failure.unwrap().rank, Rank(1));
    let message = refusal.unwrap().message;
    assert!(
        message.starts_with(
            "a worker ended before the group was ready: rank 1 on host1 (pid 0) ended with exit code 0"
        ) && message.contains("last words"),
        "{message}"
    );
}

#[test]
fn f1_a_lost_worker_is_told_to_the_driver_and_to_the_other_nodes() {
    let mut run = healthy();
    run.report(2, exited(JOB, 2, Exit::Signal(9)));
    assert_eq!(run.asked(), ["tell:lost 2", "1:lost"]);
    // The job stays: the others still answer calls.
    assert_eq!(run.job.info(Duration::ZERO).state, JobState::Healthy);
    // Once.
    run.report(2, exited(JOB, 2, Exit::Code(1)));
    assert!(run.asked().is_empty());
    run.step(Event::Driver(SubmitFrame::Stop));
    assert_eq!(run.asked(), ["1:stop", "2:stop"]);
    run.all_done(2);
    let (state, refusal, failure) = run.ended();
    assert_eq!((state, refusal), (JobState::Stopped, None));
    assert_eq!(failure.unwrap().rank, Rank(2));
    assert_eq!(
        run.job.info(Duration::ZERO).reason.unwrap(),
        "its driver has ended it; before that, rank 2 on host2 (pid 0) ended with signal 9 (SIGKILL)"
    );
}

#[test]
fn a_rendezvous_that_opens_late_is_closed_and_one_that_does_not_open_fails_the_job() {
    let mut run = submit(&[1], |spec| spec.rendezvous = true);
    run.reserve(1, true);
    run.step(Event::DriverGone);
    run.answer(1, NodeReply::Done);
    assert_eq!(
        run.asked(),
        ["1:reserve", "tell:placed", "open 1", "1:release", "1:free"]
    );
    run.step(Event::Rendezvous(Ok("10.0.0.7:80".parse().unwrap())));
    assert_eq!(run.asked(), ["close", "tell:stopped", "finished"]);

    let mut run = submit(&[1], |spec| spec.rendezvous = true);
    run.reserve(1, true);
    run.step(Event::Rendezvous(Err("no port".to_owned())));
    run.answer(1, NodeReply::Done);
    assert_eq!(run.ended().1.unwrap().kind, RefusalKind::Internal);
}

#[test]
fn s2_only_the_node_of_a_running_worker_may_have_its_certificate() {
    let mut run = submit(&[1, 1], |_| ());
    assert!(run.job.may_sign(NodeId(1), Slot(0)).is_err());
    run.reserve_all(2, true);
    assert_eq!(run.job.may_sign(NodeId(1), Slot(0)), Ok(Generation(1)));
    for (node, slot) in [(1, 1), (2, 0), (1, 2), (3, 0)] {
        let refusal = run.job.may_sign(NodeId(node), Slot(slot)).unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Forbidden);
    }
    run.report(1, exited(JOB, 0, Exit::Code(1)));
    assert!(run.job.may_sign(NodeId(1), Slot(0)).is_err());
}

#[test]
fn reports_of_what_a_node_does_not_have_change_nothing() {
    let mut run = healthy();
    for node in [1, 3] {
        run.report(node, exited(JOB, 2, Exit::Code(1)));
        run.report(node, exited(JOB, 99, Exit::Code(1)));
        run.report(node, ready(JOB, 2));
    }
    run.step(Event::NodeLost {
        node: NodeId(3),
        reason: String::new(),
        fence: Fence::Lease,
    });
    run.step(Event::Rendezvous(Ok("10.0.0.7:80".parse().unwrap())));
    run.start(1);
    assert!(run.asked().is_empty());
    assert_eq!(run.job.info(Duration::ZERO).state, JobState::Healthy);
}

#[test]
fn a_job_on_several_nodes_needs_addresses() {
    let without = |slot| NodeEvent::WorkerReady {
        job: JOB,
        slot: Slot(slot),
        address: None,
        incarnation: Incarnation::FIRST,
    };
    let mut run = submit(&[1, 1], |_| ());
    run.reserve_all(2, true);
    run.report(1, without(0));
    assert!(
        run.job
            .info(Duration::ZERO)
            .reason
            .unwrap()
            .contains("rank 0 is ready without an address")
    );

    let mut run = submit(&[2], |_| ());
    run.reserve(1, true);
    run.start(1);
    run.report(1, without(0));
    run.report(1, without(1));
    assert_eq!(run.asked().last().unwrap(), "1:membership");
}
