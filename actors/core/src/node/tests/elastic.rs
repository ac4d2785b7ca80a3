//! The orders of a job whose members come and go, and what it holds.

use kolo_wire::ids::Incarnation;

use super::*;
use crate::node::messages::WorkerId;
use crate::node::testing::{of, start_of, table_of};

impl Node {
    pub(super) fn elastic(&mut self, processes: &[(u32, u64)]) -> Vec<Output> {
        self.order(NodeRequest::Start(start_of(processes)));
        self.found(Found::Here)
    }

    pub(super) fn of(&mut self, worker: WorkerId, event: WorkerEvent) -> Vec<Output> {
        self.step(Input::Worker { worker, event })
    }

    fn runs(&mut self, worker: WorkerId) -> Vec<Output> {
        self.of(worker, WorkerEvent::Spawned { pid: 1 })
    }

    fn ends(&mut self, worker: WorkerId) -> Vec<Output> {
        let (exit, stderr_tail) = (Exit::Signal(9), Vec::new());
        self.of(worker, WorkerEvent::Exited { exit, stderr_tail })
    }
}

/// The GPUs of each process that is to be started.
fn devices(outputs: &[Output]) -> Vec<(WorkerId, Vec<String>)> {
    let spawns = outputs.iter().filter_map(|output| match output {
        Output::Spawn(spawning) => Some((spawning.worker, spawning.devices.clone())),
        _ => None,
    });
    spawns.collect()
}

#[test]
fn each_worker_holds_its_own_and_gives_it_back_when_its_slot_is_empty() {
    let mut node = node();
    node.reserves(2);
    // Fewer than were reserved: the rest is free.
    let outputs = node.elastic(&[(0, 1)]);
    let gpu = |name: &str| vec![name.to_owned()];
    assert_eq!(devices(&outputs), [(of(0, 1), gpu("a"))]);
    assert_eq!(node.core.free().gpus, 1);
    node.runs(of(0, 1));
    assert_eq!(node.wait(), [Output::Signal(of(0, 1), Signal::Kill)]);
    // More than were reserved, as far as there is room.
    let outputs = node.elastic(&[(5, 1)]);
    assert_eq!(devices(&outputs), [(of(5, 1), gpu("b"))]);
    let outputs = node.elastic(&[(6, 1), (7, 1)]);
    assert_eq!(refused(&outputs), RefusalKind::Unplaceable);
    // Nothing of the refused part.
    assert_eq!(node.core.free().cpus, Milli::units(2));
    // The next process of a slot needs no more room, however often it is asked for.
    for _ in 0..2 {
        assert_eq!(devices(&node.elastic(&[(0, 2)])), []);
    }
    let outputs = node.ends(of(0, 1));
    assert_eq!(devices(&outputs), [(of(0, 2), gpu("a"))]);
    let answered = answers(&node.runs(of(0, 2)));
    assert_eq!(answered.len(), 2);
    assert_eq!(node.core.free().gpus, 0);
    node.ends(of(0, 2));
    assert_eq!(node.core.free().gpus, 1);
    let outputs = node.elastic(&[(6, 1)]);
    assert_eq!(devices(&outputs), [(of(6, 1), gpu("a"))]);
    node.order(stop());
    node.ends(of(6, 1));
    node.ends(of(5, 1));
    node.step(Input::Closed(STAY));
    assert!(node.is_free());
}

#[test]
fn a_start_that_is_refused_leaves_the_reservation() {
    let mut node = node();
    node.reserves(1);
    let outputs = node.elastic(&[(0, 1), (1, 1), (2, 1)]);
    assert_eq!(refused(&outputs), RefusalKind::Unplaceable);
    let mut wrong = start_of(&[(0, 1)]);
    wrong.args.push("a\0b".to_owned());
    node.order(NodeRequest::Start(wrong));
    assert_eq!(refused(&node.found(Found::Here)), RefusalKind::Invalid);
    node.order(NodeRequest::Start(start_of(&[(0, 1)])));
    assert_eq!(refused(&node.found(Found::NotSent)), RefusalKind::NotFound);
    assert_eq!(node.core.free().gpus, 1);
    // Its lease goes on.
    let end = node.now + LEASE;
    assert_eq!(node.core.deadline(), Some(end));
    assert_eq!(devices(&node.elastic(&[(0, 1)])).len(), 1);
    // The lease of another one has ended.
    let mut node = super::node();
    node.order(reserve(JOB, 1));
    node.warden(STAY);
    node.wait();
    assert_eq!(refused(&node.elastic(&[(0, 1)])), RefusalKind::NotFound);
}

#[test]
fn orders_for_what_is_over_are_done_and_for_what_is_not_here_refused() {
    let mut node = node();
    let revoke = |generation| NodeRequest::Revoke {
        job: JOB,
        generation: Generation(generation),
        lost: Vec::new(),
        cause: "rank 1 is lost".to_owned(),
    };
    let hold = |generation| NodeRequest::Hold {
        job: JOB,
        generation: Generation(generation),
        why: "room".to_owned(),
    };
    let stop_worker = |slot| NodeRequest::StopWorker {
        job: JOB,
        slot: Slot(slot),
        incarnation: Incarnation(1),
        why: "it leaves".to_owned(),
    };
    let told = |node: &Node, outputs: &[Output]| {
        assert_eq!(answers(outputs), done(AskId(node.asks)));
        outputs.len() - 1
    };
    assert_eq!(refused(&node.order(revoke(1))), RefusalKind::NotFound);
    assert_eq!(refused(&node.order(hold(1))), RefusalKind::NotFound);
    let outputs = node.order(stop_worker(0));
    assert_eq!(told(&node, &outputs), 0);

    node.order(reserve(JOB, 1));
    node.warden(STAY);
    node.elastic(&[(0, 1)]);
    node.of(of(0, 1), WorkerEvent::Spawned { pid: 100 });
    let hello = FromWorker::Hello {
        protocol: LOCAL_PROTOCOL,
        pid: 100,
        registry: 1,
    };
    node.of(of(0, 1), WorkerEvent::Said(hello));
    node.order(NodeRequest::Membership(table_of(2, &[(0, 1)]).into()));
    for (request, count) in [
        (revoke(1), 0),
        (hold(1), 0),
        (revoke(2), 1),
        (hold(2), 1),
        (stop_worker(9), 0),
        (stop_worker(0), 1),
        (stop_worker(0), 0),
    ] {
        let outputs = node.order(request);
        assert_eq!(told(&node, &outputs), count, "{outputs:?}");
    }
}

/// A node that is registered, with one process.
fn one() -> Node {
    let mut node = node();
    node.reserves(1);
    node.elastic(&[(0, 1)]);
    node.runs(of(0, 1));
    node.registered();
    node
}

#[test]
fn a_node_that_stops_waits_for_the_head_to_take_elastic_jobs_away() {
    let mut node = one();
    let ask = node.ask();
    let reason = "the node is stopping".to_owned();
    let outputs = node.step(Input::StopAll { ask, reason });
    assert!(matches!(
        sent(&outputs).1[..],
        [NodeEvent::JobLeft { job: JOB, .. }]
    ));
    assert_eq!(outputs.len(), 1, "nothing ends yet");
    assert_eq!(refused(&node.elastic(&[(1, 1)])), RefusalKind::Stopped);
    node.taken(1);
    // The head is done with it before the time is over.
    node.order(stop());
    node.ends(of(0, 1));
    node.step(Input::Closed(STAY));
    node.taken(1);
    let answered = answers(&node.taken(1));
    assert!(answered.contains(&(ask, NodeReply::Done)), "{answered:?}");
}

#[test]
fn a_node_that_is_to_stop_says_so_before_it_tells_of_workers_that_end() {
    let mut node = one();
    let ask = node.ask();
    let left = sent(&node.step(Input::Drain { ask })).1;
    assert!(matches!(left[..], [NodeEvent::JobLeft { job: JOB, .. }]));
    node.ends(of(0, 1));
    let ended = sent(&node.taken(1)).1;
    assert!(matches!(ended[..], [NodeEvent::WorkerExited { .. }]));
}

/// A reservation whose node is to be checked first.
fn checked_reserve(job: JobId) -> NodeRequest {
    let mut request = reserve(job, 1);
    if let NodeRequest::Reserve { health_check, .. } = &mut request {
        *health_check = Some(kolo_wire::HealthCheck {
            program: "check".to_owned(),
            args: Vec::new(),
            timeout_ms: 1000,
        });
    }
    request
}

fn check_of(outputs: &[Output]) -> Option<AskId> {
    outputs.iter().find_map(|output| match output {
        Output::Check { ask, .. } => Some(*ask),
        _ => None,
    })
}

#[test]
fn a_reservation_is_answered_when_the_node_was_checked() {
    let failed = "its health check has failed: no GPU";
    let no_gpu = Err("no GPU".to_owned());
    for (checked, expected) in [(Ok(()), None), (no_gpu, Some(failed))] {
        let mut node = node();
        node.order(checked_reserve(JOB));
        let found = node.found(Found::Here);
        assert_eq!((answers(&found), check_of(&found)), (Vec::new(), None));
        // Its process is below the warden, so that it ends with the job.
        let ask = check_of(&node.warden(STAY)).unwrap();
        let outputs = node.step(Input::Checked { ask, checked });
        let [(_, NodeReply::Reserved { problem, .. })] = &answers(&outputs)[..] else {
            panic!("{outputs:?}");
        };
        let problem = problem.as_ref().map(|problem| problem.message.as_str());
        assert_eq!(problem, expected);
        // The head gives it back.
        assert_eq!(node.core.jobs().count(), 1);
    }
}

#[test]
fn a_job_that_is_released_while_its_node_is_checked_is_over() {
    let mut node = node();
    node.order(checked_reserve(JOB));
    node.warden(STAY);
    let ask = check_of(&node.found(Found::Here)).unwrap();
    let stopped = node.order(NodeRequest::Release { job: JOB });
    assert!(stopped.contains(&Output::CloseWarden(STAY)), "{stopped:?}");
    node.step(Input::Closed(STAY));
    assert!(node.is_free());
    let late = Err("killed".to_owned());
    let outputs = node.step(Input::Checked { ask, checked: late });
    assert_eq!(refused(&outputs), RefusalKind::Stopped);
}

#[test]
fn a_check_without_a_warden_is_said_to_have_failed() {
    let mut node = node();
    node.order(checked_reserve(JOB));
    node.found(Found::Here);
    let started = Err("no more processes".to_owned());
    let outputs = node.step(Input::Warden {
        stay: STAY,
        started,
    });
    assert!(check_of(&outputs).is_some(), "{outputs:?}");
}
