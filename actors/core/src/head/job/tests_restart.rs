//! Jobs that are started anew at each change, message by message.

use std::net::SocketAddr;
use std::time::Duration;

use kolo_wire::ids::{Incarnation, Rank};
use kolo_wire::{
    Elastic, Exit, Installed, JobEvent, JobState, NodeEvent, NodeReply, OnChange, SubmitFrame,
    WorkerSignal,
};

use super::fixtures::{accounted, elastic};
use super::tests::{JOB, Run, submit};
use super::*;

fn restarting(workers: &[u32], max_restarts: u32) -> Run {
    restarting_with(workers, max_restarts, 1)
}

fn restarting_with(workers: &[u32], max_restarts: u32, min: u32) -> Run {
    let most = workers.iter().sum();
    submit(workers, |spec| {
        spec.rendezvous = true;
        spec.installed = Some(Installed {
            program: "train".to_owned(),
            ..Installed::default()
        });
        spec.elastic = Some(Box::new(Elastic {
            restarts_without_progress: max_restarts,
            on_change: OnChange::Restart,
            ..elastic(min, most)
        }));
    })
}

impl Run {
    fn has(&self, wanted: impl Fn(&Action) -> bool) -> bool {
        self.actions.iter().any(wanted)
    }

    /// Something that nobody has taken yet is delivered to a node.
    fn delivers(&self, at: u64, wanted: impl Fn(&NodeRequest) -> bool) -> bool {
        let mut pushed = self.pushed.iter();
        pushed.any(|(node, request)| node.0 == at && wanted(request))
    }

    fn opens(&self, members: usize) -> bool {
        self.has(|action| matches!(action, Action::OpenRendezvous(given) if given.len() == members))
    }

    fn lose(&mut self, node: u64) {
        self.step(Event::NodeLost {
            node: NodeId(node),
            reason: "cable".to_owned(),
            fence: crate::fence::Fence::Ended,
        });
        let without: Vec<Slot> = self.placing();
        if !without.is_empty() {
            self.step(Event::Placed {
                seated: Vec::new(),
                without,
                why: "no room".to_owned(),
            });
        }
    }

    /// The seats for which nodes are looked for last.
    fn placing(&self) -> Vec<Slot> {
        let placing = self.actions.iter().rev().find_map(|action| match action {
            Action::Place { slots, .. } => Some(slots.clone()),
            _ => None,
        });
        placing.unwrap_or_default()
    }

    fn meet(&mut self, port: u16) {
        let address = SocketAddr::from(([10, 0, 0, 9], port));
        self.step(Event::Rendezvous(Ok(address)));
    }

    fn pushed_answer(&mut self, node: u64, answer: Result<NodeReply, Refusal>) {
        let node = NodeId(node);
        self.step(Event::Pushed { node, answer });
    }

    fn started_late(&mut self, node: u64, pids: &[(u32, u32)]) {
        let pids = pids.iter().map(|(slot, pid)| (Slot(*slot), *pid)).collect();
        self.pushed_answer(node, Ok(NodeReply::Started { pids }));
    }

    /// The causes of the generations that the driver was told of.
    fn causes(&self) -> Vec<&str> {
        let told = self.actions.iter().filter_map(|action| match action {
            Action::Tell(JobEvent::Generation { table, .. }) => Some(table.cause.as_str()),
            _ => None,
        });
        told.collect()
    }

    /// Two workers on two nodes run.
    fn begin(&mut self) {
        self.reserve_all(2, false);
        self.meet(80);
        self.started(1, &[(0, 40)]);
        self.started(2, &[(1, 41)]);
        assert_eq!(self.causes(), ["the first 2 workers"]);
    }
}

#[test]
fn a_group_has_its_ranks_a_port_and_a_rendezvous_of_its_own() {
    let mut run = restarting(&[1, 1], 2);
    run.reserve(2, false);
    run.reserve(1, false);
    assert!(run.opens(2));
    assert!(run.starts().is_empty(), "the rendezvous is waited for");
    run.meet(80);
    let starts = run.starts();
    assert_eq!(starts.len(), 2);
    for (node, start) in &starts {
        let (rank, env) = (node - 1, &start.slots[0].env);
        assert_eq!((start.generation, start.world_size), (Generation(1), 2));
        assert!(!start.needs_data_plane);
        for (name, value) in [
            ("WORLD_SIZE", "2"),
            ("GROUP_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "29001"),
            ("HOROVOD_GLOO_RENDEZVOUS_PORT", "80"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "2"),
        ] {
            assert_eq!(start.env[name], value, "{name}");
        }
        for name in ["RANK", "GROUP_RANK", "HOROVOD_CROSS_RANK", "ROLE_RANK"] {
            assert_eq!(env[name], rank.to_string(), "{name}");
        }
    }
    run.started(2, &[(1, 41)]);
    assert!(run.causes().is_empty());
    run.started(1, &[(0, 40)]);
    assert_eq!(run.causes(), ["the first 2 workers"]);
    run.starts();

    // Rank 1 fails: rank 0 is stopped, as the driver hears at once, and nothing is started before its end.
    run.ends(2, 1, 1, Exit::Code(3), false);
    let why = "rank 1 on host2 (pid 41) ended with exit code 3".to_owned();
    assert_eq!(falls(&run), [(why, 1, 1, 2)]);
    let stops = |request: &NodeRequest| matches!(request, NodeRequest::StopWorker { slot, .. } if *slot == Slot(0));
    assert!(run.delivers(1, stops));
    assert!(!run.opens(2));
    run.taken(1);
    run.ends(1, 0, 1, Exit::Signal(15), true);
    assert!(run.opens(2));
    assert!(run.delivers(1, |request| matches!(request, NodeRequest::FreePort { .. })));
    assert!(run.starts().is_empty());
    run.meet(81);
    assert!(run.starts().is_empty(), "the port is waited for, too");
    run.pushed_answer(1, Ok(NodeReply::FreePort(29_777)));
    let starts = run.starts();
    assert_eq!(starts.len(), 2);
    for (_, start) in &starts {
        assert_eq!(start.generation, Generation(2));
        assert_eq!(start.slots[0].member.incarnation, Incarnation(2));
        assert_eq!(start.env["MASTER_PORT"], "29777");
        assert_eq!(start.env["HOROVOD_GLOO_RENDEZVOUS_PORT"], "81");
        assert_eq!(start.env["TORCHELASTIC_RESTART_COUNT"], "1");
    }
    run.started_late(1, &[(0, 50)]);
    run.started_late(2, &[(1, 51)]);
    assert_eq!(
        run.causes(),
        ["2 -> 2 workers, failures so far 1 of 2: rank 1 on host2: exit code 3: last words"]
    );
    run.ends(1, 0, 2, Exit::Code(0), false);
    run.ends(2, 1, 2, Exit::Code(0), false);
    run.all_done(2);
    assert_eq!(run.ended(), (JobState::Succeeded, None, None));
}

#[test]
fn the_first_failure_of_the_last_group_is_the_job_s() {
    let mut run = restarting(&[1, 1], 0);
    run.begin();
    run.ends(2, 1, 1, Exit::Code(3), false);
    run.ends(1, 0, 1, Exit::Code(9), false);
    run.all_done(2);
    let (state, refusal, failure) = run.ended();
    assert_eq!(
        (state, failure.unwrap().exit),
        (JobState::Failed, Exit::Code(3))
    );
    let message = refusal.unwrap().message;
    assert!(
        message.starts_with("a worker has failed, and no restart is allowed (--max-restarts 0)"),
        "{message}"
    );
}

#[test]
fn a_failure_that_came_first_and_is_heard_later_is_the_cause() {
    // Rank 0 has said its error two seconds before its exit, and rank 1 has ended of it at once.
    let late = || accounted(Exit::Code(1), 900_000, Some(897));
    for is_stopped in [false, true] {
        let mut run = restarting(&[1, 1], 1);
        run.begin();
        run.fails(2, 1, 1, accounted(Exit::Code(3), 5_000, None), false);
        run.taken(1);
        run.fails(1, 0, 1, late(), is_stopped);
        run.pushed_answer(1, Ok(NodeReply::FreePort(29_777)));
        run.meet(81);
        run.started_late(1, &[(0, 50)]);
        run.started_late(2, &[(1, 51)]);
        let last = run.causes().pop().unwrap();
        assert_eq!(
            last,
            "2 -> 2 workers, failures so far 1 of 1: rank 0 on host1: exit code 1: \
             ValueError: bad batch (train.py:12)"
        );
        let falls = run.actions.iter().filter_map(|action| match action {
            Action::Tell(JobEvent::Generation { fall, .. }) => fall.as_deref(),
            _ => None,
        });
        let falls: Vec<_> = falls.collect();
        assert_eq!(falls.len(), 1);
        assert_eq!(falls[0].cause.rank, Rank(0));
        let follower = &falls[0].followers.first[0];
        assert_eq!((follower.failure.rank, follower.after_ms), (Rank(1), 2000));

        // The same in the last fall: now it is the job's failure.
        run.fails(2, 1, 2, accounted(Exit::Code(3), 5_000, None), false);
        run.fails(1, 0, 2, late(), is_stopped);
        run.all_done(2);
        let (_, refusal, failure) = run.ended();
        assert_eq!(failure.unwrap().exit, Exit::Code(1));
        let states = run.actions.iter().filter_map(|action| match action {
            Action::Group(group) => Some((group.state, group.generation.0, group.restarts)),
            _ => None,
        });
        let expected = [
            ("HEALTHY", 1, 0),
            // The failure counts when nothing of the group is left.
            ("UNHEALTHY", 1, 0),
            ("HEALTHY", 2, 1),
            ("UNHEALTHY", 2, 1),
            ("FAILED", 2, 2),
        ];
        assert_eq!(states.collect::<Vec<_>>(), expected);
        let message = refusal.unwrap().message;
        let last = "; the last failure: rank 0 on host1 (pid 40) ended with exit code 1: ValueError: bad batch \
                    (train.py:12)\n  [0]<callstack>:raise ValueError";
        assert!(message.ends_with(last), "{message}");
    }
}

#[test]
fn a_worker_that_ends_within_the_grace_of_a_user_signal_costs_no_restart() {
    let mut run = restarting(&[1, 1], 0);
    run.begin();
    run.step(Event::Driver(SubmitFrame::Signal(WorkerSignal::User1)));
    run.taken(1);
    run.taken(2);
    run.now += Duration::from_secs(1);
    run.ends(2, 1, 1, Exit::Code(3), false);
    run.taken(1);
    run.ends(1, 0, 1, Exit::Signal(15), true);
    run.pushed_answer(1, Ok(NodeReply::FreePort(29_777)));
    run.meet(81);
    run.started_late(1, &[(0, 50)]);
    run.started_late(2, &[(1, 51)]);
    assert_eq!(
        run.causes()[1],
        "2 -> 2 workers, failures so far 0 of 0: rank 1 on host2: left: exit code 3: \
         last words"
    );

    // The next process has not heard that signal, and another one is too long ago.
    run.step(Event::Driver(SubmitFrame::Signal(WorkerSignal::User2)));
    run.now += Duration::from_millis(1001);
    run.ends(2, 1, 2, Exit::Code(3), false);
    run.taken(1);
    run.ends(1, 0, 2, Exit::Signal(15), true);
    run.all_done(2);
    assert_eq!(run.ended().0, JobState::Failed);
}

#[test]
fn a_rendezvous_that_opens_late_is_not_that_of_the_next_group() {
    let mut run = restarting(&[1, 1], 3);
    run.reserve_all(2, false);
    assert!(run.opens(2));
    run.actions.clear();
    // A node is lost before the rendezvous of the first group is open.
    run.step(Event::NodeLost {
        node: NodeId(2),
        reason: "cable".to_owned(),
        fence: crate::fence::Fence::Ended,
    });
    run.step(Event::Placed {
        seated: Vec::new(),
        without: vec![Slot(1)],
        why: "no room".to_owned(),
    });
    run.step(Event::Tick);
    assert!(run.starts().is_empty());
    run.meet(80);
    assert!(run.opens(1), "it was for two");
    run.meet(81);
    run.pushed_answer(1, Ok(NodeReply::FreePort(29_777)));
    let starts = run.starts();
    assert_eq!(starts.len(), 1);
    assert_eq!(starts[0].1.env["HOROVOD_GLOO_RENDEZVOUS_PORT"], "81");
    assert_eq!(starts[0].1.env["WORLD_SIZE"], "1");
}

#[test]
fn a_host_that_can_not_run_the_program_is_an_error_before_the_first_group() {
    let mut run = restarting(&[1, 1], 3);
    run.answer(
        1,
        NodeReply::Reserved {
            has_program: false,
            free_port: 1,
            problem: Some(Refusal::new(RefusalKind::NoProgram, "no `train` in PATH")),
        },
    );
    run.reserve(2, false);
    run.all_done(2);
    let refusal = run.ended().1.unwrap();
    assert_eq!(refusal.kind, RefusalKind::NoProgram);
    assert_eq!(refusal.message, "no `train` in PATH (on host1)");
}

#[test]
fn a_host_that_can_not_run_the_program_is_left_out_later() {
    let mut run = restarting(&[1, 1], 3);
    run.reserve(1, false);
    // No answer: the group is formed without the node.
    run.step(Event::NodeLost {
        node: NodeId(2),
        reason: "cable".to_owned(),
        fence: crate::fence::Fence::Ended,
    });
    run.meet(80);
    run.started(1, &[(0, 40)]);
    assert_eq!(run.causes(), ["the first worker"]);
    run.starts();
    run.step(Event::Offered);
    let mut site = super::fixtures::sites(&[1, 1, 1]).remove(2);
    site.workers = 1;
    let slots = vec![Slot(1)];
    run.step(Event::Placed {
        seated: vec![Seating { site, slots }],
        without: Vec::new(),
        why: String::new(),
    });
    run.answer(
        3,
        NodeReply::Reserved {
            has_program: false,
            free_port: 1,
            problem: Some(Refusal::new(RefusalKind::NoProgram, "no `train` in PATH")),
        },
    );
    run.answer(3, NodeReply::Done);
    assert_eq!(run.job.base.state, JobState::Healthy);
    assert!(run.starts().is_empty());
}

/// What the driver was told of groups that have fallen.
fn falls(run: &Run) -> Vec<(String, u32, u32, u32)> {
    let told = run.actions.iter().filter_map(|action| match action {
        Action::Tell(JobEvent::Fell {
            failure,
            stopped,
            restart,
            ..
        }) => Some((
            failure
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            *stopped,
            restart.map_or(0, |(restart, _)| restart),
            restart.map_or(0, |(_, most)| most),
        )),
        _ => None,
    });
    told.collect()
}

#[test]
fn the_driver_hears_for_how_many_there_is_room_while_the_job_waits() {
    let mut run = restarting_with(&[1, 1], 2, 2);
    run.begin();
    run.lose(2);
    run.taken(1);
    run.ends(1, 0, 1, Exit::Signal(15), true);
    let is_waiting = |action: &Action| {
        matches!(
            action,
            Action::Tell(JobEvent::Waits {
                room: 1,
                needed: 2,
                ..
            })
        )
    };
    assert_eq!(run.actions.iter().filter(|it| is_waiting(it)).count(), 1);
    run.step(Event::Tick);
    assert_eq!(run.actions.iter().filter(|it| is_waiting(it)).count(), 1);
    assert!(run.job.is_short());
}

#[test]
fn a_group_without_a_port_or_a_rendezvous_is_an_attempt_that_has_failed() {
    let mut run = restarting(&[1, 1], 3);
    run.begin();
    run.ends(1, 0, 1, Exit::Code(3), false);
    run.taken(2);
    run.ends(2, 1, 1, Exit::Signal(15), true);
    run.pushed_answer(1, Ok(NodeReply::FreePort(0)));
    assert!(run.job.base.ending.is_none());
    // That of the group that was given up was on its way.
    run.step(Event::Rendezvous(Err("no port".to_owned())));
    run.now += Duration::from_secs(2);
    run.step(Event::Tick);
    assert!(run.job.base.ending.is_none());
    run.step(Event::Rendezvous(Err("no port".to_owned())));
    run.now += Duration::from_secs(3);
    run.step(Event::Tick);
    assert!(run.job.base.ending.is_none());
    run.step(Event::Rendezvous(Err("no port".to_owned())));
    run.now += Duration::from_secs(5);
    run.step(Event::Tick);
    run.all_done(2);
    let message = run.ended().1.unwrap().message;
    assert!(
        message.starts_with(
            "4 failures, allowed restarts: 3 (--max-restarts); the first: rank 0 on host1: "
        ),
        "{message}"
    );
}

#[test]
fn a_group_that_is_lost_while_its_rendezvous_opens_is_not_started_later() {
    let mut run = restarting(&[1, 1], 3);
    run.reserve_all(2, false);
    assert!(run.opens(2));
    run.lose(1);
    run.lose(2);
    run.meet(80);
    assert!(run.starts().is_empty());
    assert!(!run.has(
        |action| matches!(action, Action::Note(text) if text.contains("no node to start on"))
    ));
}

#[test]
fn g3_the_late_word_of_an_earlier_stay_ends_nothing_of_this_one() {
    let mut run = restarting(&[1, 1], 3);
    run.begin();
    let is_left = |action: &Action| {
        matches!(action, Action::Request { node, request, .. }
            if *node == NodeId(2) && matches!(**request, NodeRequest::Stop { .. }))
    };
    run.report(2, NodeEvent::JobGone { job: JOB });
    assert_eq!(run.job.base.state, JobState::Healthy);
    assert!(!run.has(is_left));
    // After the end of its process it may be of this stay.
    run.ends(2, 1, 1, Exit::Signal(9), true);
    run.report(2, NodeEvent::JobGone { job: JOB });
    assert!(run.has(is_left));
}

#[test]
fn g3_a_node_where_an_end_was_not_seen_is_left_and_gets_nothing_more() {
    let mut run = restarting(&[1, 1], 3);
    run.begin();
    run.ends(2, 1, 1, Exit::Code(3), false);
    run.taken(1);
    run.starts();
    run.report(
        1,
        NodeEvent::WorkerUnseen {
            job: JOB,
            slot: Slot(0),
            incarnation: Incarnation(1),
        },
    );
    run.ends(1, 0, 1, Exit::Unknown, true);
    assert!(run.has(
        |action| matches!(action, Action::Note(text) if text.contains("its end was not seen"))
    ));
    assert!(!run.opens(1), "no group is formed yet");
    assert!(!run.job.takes_seats(NodeId(1)));
    run.step(Event::Placed {
        seated: Vec::new(),
        without: run.placing(),
        why: "no room".to_owned(),
    });
    assert!(!run.opens(1), "it may run");
    // The node ends all that is left of the job, and says so.
    run.answer(1, NodeReply::Done);
    assert!(run.opens(1));
    assert!(!run.job.takes_seats(NodeId(1)));
}
