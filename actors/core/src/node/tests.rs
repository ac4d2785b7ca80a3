//! The node as a whole, rule by rule.

mod elastic;

use std::time::{Duration, Instant};

use kolo_wire::ids::{DriverId, Generation, JobId, Slot};
use kolo_wire::worker::LOCAL_PROTOCOL;
use kolo_wire::{
    Exit, FromWorker, Installed, InstalledHere, Milli, NodeEvent, NodeReply, NodeRequest, Program,
    ProgramHash, Refusal, RefusalKind, Resources, ToWorker,
};

use super::NodeCore;
use super::inventory::Inventory;
use super::messages::{
    AskId, Delivery, Found, Input, Opening, Output, Signal, Spawning, Stay, Wanted, WorkerEvent,
};
use super::testing::{self, STAY, at, signal};

const JOB: JobId = STAY.job;
const LEASE: Duration = Duration::from_secs(5);

/// A node with four CPUs, and how late it is.
struct Node {
    core: NodeCore,
    now: Instant,
    asks: u64,
}

fn node() -> Node {
    let total = Resources {
        cpus: Milli::units(4),
        ..Resources::default()
    };
    let devices = vec!["a".to_owned(), "b".to_owned()];
    Node {
        core: NodeCore::new(testing::here(), Inventory::new(total, devices)),
        now: Instant::now(),
        asks: 0,
    }
}

fn reserve(job: JobId, workers: u32) -> NodeRequest {
    NodeRequest::Reserve {
        job,
        per_worker: Resources {
            cpus: Milli::units(1),
            gpus: 1,
            ..Resources::default()
        },
        workers,
        lease_ms: LEASE.as_millis() as u64,
        program: ProgramHash([1; 32]),
        installed: None,
        health_check: None,
    }
}

fn stop() -> NodeRequest {
    NodeRequest::Stop {
        job: JOB,
        reason: "done".to_owned(),
        interrupt: false,
    }
}

/// The answers among outputs.
fn answers(outputs: &[Output]) -> Vec<(AskId, NodeReply)> {
    outputs
        .iter()
        .filter_map(|output| match output {
            Output::Answer { ask, reply } => Some((*ask, reply.clone())),
            _ => None,
        })
        .collect()
}

/// The kind of the one refusal among outputs.
fn refused(outputs: &[Output]) -> RefusalKind {
    match &answers(outputs)[..] {
        [(_, NodeReply::Refused(refusal))] => refusal.kind,
        others => panic!("{others:?}"),
    }
}

/// The events that go out now, and in which session.
fn sent(outputs: &[Output]) -> (u64, Vec<NodeEvent>) {
    match outputs.last() {
        Some(Output::Send { session, events }) => (*session, events.clone()),
        other => panic!("{other:?}"),
    }
}

impl Node {
    fn step(&mut self, input: Input) -> Vec<Output> {
        self.core.step(self.now, input)
    }

    fn ask(&mut self) -> AskId {
        self.asks += 1;
        AskId(self.asks)
    }

    /// An order without the look for a program.
    fn order(&mut self, request: NodeRequest) -> Vec<Output> {
        let ask = self.ask();
        let request = Box::new(request);
        self.step(Input::Order { ask, request })
    }

    fn found(&mut self, program: Found) -> Vec<Output> {
        let ask = AskId(self.asks);
        let free_port = 7;
        self.step(Input::Found {
            ask,
            program,
            free_port,
        })
    }

    fn worker(&mut self, slot: u32, event: WorkerEvent) -> Vec<Output> {
        let worker = at(slot);
        self.step(Input::Worker { worker, event })
    }

    fn warden(&mut self, stay: Stay) -> Vec<Output> {
        let started = Ok(());
        self.step(Input::Warden { stay, started })
    }

    /// Goes to the next deadline.
    fn wait(&mut self) -> Vec<Output> {
        self.now = self.core.deadline().expect("it waits for something");
        self.step(Input::Tick)
    }

    fn registered(&mut self) -> Vec<Output> {
        self.step(Input::Head { registered: true })
    }

    fn taken(&mut self, session: u64) -> Vec<Output> {
        let delivery = Delivery::Taken;
        self.step(Input::Delivered { session, delivery })
    }

    /// Has a job's workers started up to their processes.
    fn start(&mut self, workers: u32) {
        self.order(reserve(JOB, workers));
        self.found(Found::Here);
        self.warden(STAY);
        self.order(NodeRequest::Start(testing::start(workers)));
        self.found(Found::Here);
        for slot in 0..workers {
            self.worker(slot, WorkerEvent::Spawned { pid: 100 + slot });
        }
    }

    fn exits(&mut self, slot: u32) -> Vec<Output> {
        let exit = Exit::Code(0);
        let stderr_tail = Vec::new();
        self.worker(slot, WorkerEvent::Exited { exit, stderr_tail })
    }
}

#[test]
fn a_job_goes_from_reservation_to_its_end() {
    let mut node = node();
    node.registered();
    let asked = node.order(reserve(JOB, 2));
    let hash = ProgramHash([1; 32]);
    let find = |ask, port| Output::Find {
        ask: AskId(ask),
        program: Wanted::Sent(hash),
        port,
    };
    assert_eq!(asked, [Output::StartWarden(STAY), find(1, true)]);
    let reserved = NodeReply::Reserved {
        has_program: false,
        free_port: 7,
        problem: None,
    };
    let answered = node.found(Found::NotSent);
    assert_eq!(answers(&answered), [(AskId(1), reserved)]);
    assert_eq!(node.core.jobs().collect::<Vec<_>>(), [JOB]);
    assert_eq!(node.core.free().cpus, Milli::units(2));

    assert_eq!(node.warden(STAY), []);
    let start = NodeRequest::Start(testing::start(2));
    assert_eq!(node.order(start.clone()), [find(2, false)]);
    assert_eq!(refused(&node.found(Found::NotSent)), RefusalKind::NotFound);
    node.order(start);
    let begun = node.found(Found::Here);
    assert!(matches!(
        &begun[0],
        Output::Open(Opening {
            stay: STAY,
            ask: AskId(3),
            ..
        })
    ));
    for (slot, output) in (0..).zip(&begun[1..]) {
        assert!(matches!(
            output,
            Output::Spawn(Spawning { worker, devices, .. })
                if *worker == at(slot) && *devices == ["a", "b"]
        ));
    }
    assert_eq!(begun.len(), 3);
    node.worker(0, WorkerEvent::Spawned { pid: 100 });
    let started = NodeReply::Started {
        pids: vec![(Slot(0), 100), (Slot(1), 101)],
    };
    let answered = node.worker(1, WorkerEvent::Spawned { pid: 101 });
    assert_eq!(answers(&answered), [(AskId(3), started)]);
    for slot in 0..2 {
        let hello = FromWorker::Hello {
            protocol: LOCAL_PROTOCOL,
            pid: 100 + slot,
            registry: 1,
        };
        let welcome = node.worker(slot, WorkerEvent::Said(hello));
        assert!(matches!(
            welcome[..],
            [Output::Tell(_, ToWorker::Welcome { .. })]
        ));
    }
    let ready = WorkerEvent::Said(FromWorker::Ready { address: None });
    let told = node.worker(0, ready);
    assert!(matches!(
        sent(&told).1[..],
        [NodeEvent::WorkerReady { slot: Slot(0), .. }]
    ));
    node.taken(1);
    let table = NodeRequest::Membership(testing::table(2, 1).into());
    let complete = node.order(table);
    assert!(matches!(complete[0], Output::Complete(_)));
    assert_eq!(answers(&complete), [(AskId(4), NodeReply::Done)]);

    assert_eq!(answers(&node.order(stop())), []);
    assert!(matches!(
        sent(&node.exits(0)).1[..],
        [NodeEvent::WorkerExited { .. }]
    ));
    let last = node.exits(1);
    assert_eq!(
        last[last.len() - 2..],
        [Output::CloseCalls(JOB), Output::CloseWarden(STAY)]
    );
    assert_eq!(
        node.core.free().cpus,
        Milli::units(2),
        "not before it is gone"
    );
    let closed = node.step(Input::Closed(STAY));
    assert_eq!(closed, [Output::EndOutput(JOB)]);
    assert_eq!(node.core.free(), node.core.total());
    assert_eq!(node.core.jobs().count(), 0);
    // The head must know how the workers ended before it takes the job for ended.
    let more = node.taken(1);
    assert_eq!(answers(&more), []);
    assert!(matches!(
        sent(&more).1[..],
        [
            NodeEvent::WorkerExited { .. },
            NodeEvent::JobGone { job: JOB }
        ]
    ));
    assert_eq!(answers(&node.taken(1)), [(AskId(5), NodeReply::Done)]);
    assert_eq!(node.core.deadline(), None);
}

#[test]
fn the_answer_to_a_stop_does_not_wait_long_for_a_head_that_is_away() {
    let mut node = node();
    node.start(1);
    node.order(stop());
    node.exits(0);
    let ask = AskId(node.asks);
    assert_eq!(answers(&node.step(Input::Closed(STAY))), []);
    let due = node.now + Duration::from_secs(1);
    assert_eq!(node.core.deadline(), Some(due));
    let late = node.wait();
    assert!(matches!(&late[0], Output::Warn(text) if text.contains("exits of the workers")));
    assert_eq!(answers(&late), [(ask, NodeReply::Done)]);
    // Who waits for the events alone has a limit of its own.
    let ask = node.ask();
    assert_eq!(node.step(Input::Flush { ask }), []);
    assert_eq!(node.core.deadline(), None);
    let (session, events) = sent(&node.registered());
    assert_eq!(events.len(), 2);
    assert_eq!(answers(&node.taken(session)), [(ask, NodeReply::Done)]);
    let ask = node.ask();
    let now = node.step(Input::Flush { ask });
    assert_eq!(answers(&now), [(ask, NodeReply::Done)]);
}

#[test]
fn orders_for_a_job_that_is_not_here_are_refused_or_done() {
    let mut node = node();
    for request in [
        NodeRequest::Membership(testing::table(1, 1).into()),
        NodeRequest::Signal {
            job: JOB,
            signal: kolo_wire::WorkerSignal::User1,
            seq: 1,
        },
    ] {
        assert_eq!(refused(&node.order(request)), RefusalKind::NotFound);
    }
    node.order(NodeRequest::Start(testing::start(1)));
    assert_eq!(refused(&node.found(Found::Here)), RefusalKind::NotFound);
    for request in [
        stop(),
        NodeRequest::Kill { job: JOB },
        NodeRequest::Release { job: JOB },
    ] {
        let outputs = node.order(request);
        assert_eq!(answers(&outputs), [(AskId(node.asks), NodeReply::Done)]);
    }
    assert_eq!(
        refused(&node.order(NodeRequest::Echo)),
        RefusalKind::Internal
    );
    assert_eq!(
        refused(&node.order(reserve(JOB, 5))),
        RefusalKind::Unplaceable
    );
}

#[test]
fn an_installed_program_is_looked_for_and_its_output_is_for_its_driver() {
    let program = Installed {
        program: "train".to_owned(),
        stream_output: true,
        ..Installed::default()
    };
    let request = || {
        let mut request = reserve(JOB, 1);
        if let NodeRequest::Reserve { installed, .. } = &mut request {
            *installed = Some(InstalledHere {
                owner: DriverId(3),
                program: program.clone(),
            });
        }
        request
    };
    let mut node = node();
    let outputs = node.order(request());
    assert!(
        matches!(&outputs[1], Output::Find { program: Wanted::Installed(wanted), .. }
        if *wanted == program)
    );
    let problem = Refusal::new(RefusalKind::NoProgram, "there is none");
    let outputs = node.found(Found::Unusable(problem.clone()));
    let reserved = |problem| NodeReply::Reserved {
        has_program: false,
        free_port: 7,
        problem,
    };
    let answer = (AskId(1), reserved(Some(problem)));
    assert_eq!(answers(&outputs), [answer]);
    // The same request again renews the lease.
    node.order(request());
    let open = Output::OpenOutput {
        job: JOB,
        owner: DriverId(3),
        stdin: false,
    };
    let outputs = node.found(Found::Here);
    assert_eq!(outputs[0], open);
    assert_eq!(answers(&outputs), [(AskId(2), reserved(None))]);
    // The reservation ends while the program is looked for: nobody would end the output.
    node.order(request());
    let late = AskId(node.asks);
    node.warden(STAY);
    node.order(stop());
    node.step(Input::Closed(STAY));
    let outputs = node.step(Input::Found {
        ask: late,
        program: Found::Here,
        free_port: 7,
    });
    assert_eq!(outputs.len(), 1);
    assert_eq!(refused(&outputs), RefusalKind::Stopped);
}

#[test]
fn a_job_whose_lease_has_ended_may_come_again_before_its_former_stay_is_cleaned_up() {
    let mut node = node();
    node.order(reserve(JOB, 2));
    node.warden(STAY);
    assert_eq!(node.core.deadline(), Some(node.now + LEASE));
    let outputs = node.wait();
    assert!(matches!(&outputs[0], Output::Warn(text) if text.contains("not committed in time")));
    assert_eq!(
        outputs[1..],
        [
            Output::EndOutput(JOB),
            Output::CloseCalls(JOB),
            Output::CloseWarden(STAY)
        ]
    );
    assert_eq!(node.core.jobs().count(), 0);
    assert_eq!(node.core.free(), node.core.total());
    let again = Stay {
        job: JOB,
        number: 2,
    };
    let outputs = node.order(reserve(JOB, 2));
    assert_eq!(outputs[0], Output::StartWarden(again));
    let outputs = node.step(Input::Closed(STAY));
    assert_eq!(outputs, [], "the output is that of the new stay");
    assert_eq!(node.core.jobs().count(), 1);
    assert_eq!(node.core.free().gpus, 0, "the new stay holds them");
    let events = sent(&node.registered()).1;
    assert_eq!(events, [NodeEvent::JobGone { job: JOB }]);
    // What the former one's worker would say is not for this one.
    assert_eq!(node.exits(0), []);
}

#[test]
fn a_job_that_can_not_be_started_holds_nothing() {
    let mut node = node();
    node.order(reserve(JOB, 2));
    node.warden(STAY);
    let mut start = testing::start(2);
    start.args.push("a\0b".to_owned());
    node.order(NodeRequest::Start(start));
    let outputs = node.found(Found::Here);
    assert_eq!(
        outputs,
        [Output::CloseCalls(JOB), Output::CloseWarden(STAY)]
    );
    let outputs = node.step(Input::Closed(STAY));
    assert_eq!(refused(&outputs), RefusalKind::Invalid);
    assert_eq!(node.core.free(), node.core.total());
}

#[test]
fn a_start_is_of_the_reservation_that_was_there_when_it_came() {
    let mut node = node();
    node.order(reserve(JOB, 2));
    node.found(Found::Here);
    node.warden(STAY);
    node.order(NodeRequest::Start(testing::start(2)));
    let ask = AskId(node.asks);
    // The job leaves and comes again while its program is looked for.
    node.order(stop());
    node.step(Input::Closed(STAY));
    node.order(reserve(JOB, 2));
    node.found(Found::Here);
    let outputs = node.step(Input::Found {
        ask,
        program: Found::Here,
        free_port: 7,
    });
    assert_eq!(outputs.len(), 1, "{outputs:?}");
    assert_eq!(refused(&outputs), RefusalKind::NotFound);
}

#[test]
fn a_node_that_stops_ends_all_jobs_and_takes_no_more() {
    let mut node = node();
    node.start(1);
    let other = Stay {
        job: JobId(8),
        number: 2,
    };
    node.order(reserve(other.job, 1));
    node.warden(other);
    node.registered();
    let ask = node.ask();
    let reason = "the node is stopping".to_owned();
    let outputs = node.step(Input::StopAll { ask, reason });
    assert_eq!(outputs[0], signal(0, Signal::Terminate));
    assert!(outputs.contains(&Output::CloseWarden(other)));
    let events = sent(&outputs).1;
    assert!(matches!(
        events[..],
        [
            NodeEvent::JobLeft { job: JOB, .. },
            NodeEvent::JobLeft { job: JobId(8), .. }
        ]
    ));
    assert_eq!(
        refused(&node.order(reserve(JobId(9), 1))),
        RefusalKind::Stopped
    );
    node.step(Input::Closed(other));
    node.exits(0);
    node.taken(1);
    assert_eq!(answers(&node.step(Input::Closed(STAY))), []);
    node.taken(1);
    assert_eq!(answers(&node.taken(1)), [(ask, NodeReply::Done)]);
}

#[test]
fn a_node_that_is_to_stop_waits_for_all_workers_and_says_so_when_it_registers() {
    let mut node = node();
    node.start(1);
    let drain = |node: &mut Node| {
        let ask = node.ask();
        (ask, node.step(Input::Drain { ask }))
    };
    assert!(!node.core.is_leaving());
    let (first, outputs) = drain(&mut node);
    assert_eq!(outputs, []);
    assert!(node.core.is_leaving());
    // The head had placed it here before it heard, so it is taken.
    node.order(reserve(JobId(8), 1));
    let reserved = answers(&node.found(Found::Here));
    assert!(matches!(reserved[..], [(_, NodeReply::Reserved { .. })]));
    assert_eq!(answers(&node.exits(0)), []);
    let release = node.order(NodeRequest::Release { job: JobId(8) });
    assert_eq!(answers(&release), [(first, NodeReply::Done)]);
    // The head has still to hear of the exit, which takes no job's time.
    assert_eq!(node.core.jobs().next(), Some(JOB));
    let (second, outputs) = drain(&mut node);
    assert_eq!(answers(&outputs), [(second, NodeReply::Done)]);
}

#[test]
fn signals_and_losses_go_to_the_workers_of_their_job() {
    let mut node = node();
    node.start(2);
    let refusal = node.order(NodeRequest::Signal {
        job: JOB,
        signal: kolo_wire::WorkerSignal::User1,
        seq: 1,
    });
    assert_eq!(refused(&refusal), RefusalKind::Invalid);
    let failure = kolo_wire::RankFailure {
        rank: kolo_wire::ids::Rank(5),
        node: kolo_wire::ids::NodeId(9),
        hostname: "there".to_owned(),
        pid: 1,
        exit: Exit::Signal(9),
        reason: None,
        stderr_tail: Vec::new(),
        account: None,
    };
    let lost = |generation| NodeRequest::RankLost {
        job: JOB,
        generation: Generation(generation),
        failure: failure.clone(),
    };
    assert_eq!(refused(&node.order(lost(2))), RefusalKind::Stale);
    // Callers hear it from the rank's own node.
    let outputs = node.order(lost(1));
    assert!(matches!(outputs[..], [Output::Answer { .. }]));
    let killed = node.order(NodeRequest::Kill { job: JOB });
    assert_eq!(killed, [0, 1].map(|slot| signal(slot, Signal::Kill)));
}

#[test]
fn a_program_that_was_not_sent_is_named() {
    let mut node = node();
    node.order(reserve(JOB, 1));
    let mut start = testing::start(1);
    start.program = Program {
        name: "a\nb".to_owned(),
        ..start.program
    };
    node.order(NodeRequest::Start(start));
    let outputs = node.found(Found::NotSent);
    let [(_, NodeReply::Refused(refusal))] = &answers(&outputs)[..] else {
        panic!("{outputs:?}");
    };
    assert!(refusal.message.starts_with("the program `a\\nb` ("));
    assert!(refusal.message.contains("must be sent before job-"));
}
