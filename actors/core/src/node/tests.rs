//! The node as a whole, rule by rule.

mod elastic;

use std::time::{Duration, Instant};

use kolo_wire::ids::{DriverId, Generation, JobId, NodeId, Rank, Slot};
use kolo_wire::worker::LOCAL_PROTOCOL;
use kolo_wire::{
    Exit, FromWorker, Installed, InstalledHere, Milli, NodeEvent, NodeReply, NodeRequest,
    ProgramHash, RankFailure, Refusal, RefusalKind, Resources, ToWorker, WorkerSignal,
};

use super::NodeCore;
use super::inventory::Inventory;
use super::messages::{AskId, Delivery, Found, Input, Output, Signal, Stay, Wanted, WorkerEvent};
use super::testing::{self, STAY, at, signal};

const JOB: JobId = STAY.job;
const LEASE: Duration = Duration::from_secs(5);

/// What ends a stay when no worker is left.
const CLOSE: [Output; 2] = [Output::CloseCalls(JOB), Output::CloseWarden(STAY)];

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

/// The answer to a reservation of a job whose program is not here.
fn reserved(problem: Option<Refusal>) -> NodeReply {
    NodeReply::Reserved {
        has_program: false,
        free_port: 7,
        problem,
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
    let answers = outputs.iter().filter_map(|output| match output {
        Output::Answer { ask, reply } => Some((*ask, reply.clone())),
        _ => None,
    });
    answers.collect()
}

/// That this question alone is answered, with no more than that it is done.
fn done(ask: AskId) -> [(AskId, NodeReply); 1] {
    [(ask, NodeReply::Done)]
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
        self.found_for(AskId(self.asks), program)
    }

    fn found_for(&mut self, ask: AskId, program: Found) -> Vec<Output> {
        let free_port = 7;
        self.step(Input::Found {
            ask,
            program,
            free_port,
        })
    }

    /// A reservation with a warden.
    fn reserves(&mut self, workers: u32) {
        self.order(reserve(JOB, workers));
        self.found(Found::Here);
        self.warden(STAY);
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
        self.reserves(workers);
        self.order(NodeRequest::Start(testing::start(workers)));
        self.found(Found::Here);
        for slot in 0..workers {
            self.worker(slot, WorkerEvent::Spawned { pid: 100 + slot });
        }
    }

    fn exits(&mut self, slot: u32) -> Vec<Output> {
        let (exit, stderr_tail) = (Exit::Code(0), Vec::new());
        self.worker(slot, WorkerEvent::Exited { exit, stderr_tail })
    }

    fn is_free(&self) -> bool {
        self.core.free() == self.core.total()
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
    let answered = node.found(Found::NotSent);
    assert_eq!(answers(&answered), [(AskId(1), reserved(None))]);
    assert_eq!(node.core.jobs().collect::<Vec<_>>(), [JOB]);
    assert_eq!(node.core.free().cpus, Milli::units(2));

    assert_eq!(node.warden(STAY), []);
    let start = NodeRequest::Start(testing::start(2));
    assert_eq!(node.order(start.clone()), [find(2, false)]);
    assert_eq!(refused(&node.found(Found::NotSent)), RefusalKind::NotFound);
    node.order(start);
    let begun = node.found(Found::Here);
    assert!(matches!(&begun[0], Output::Open(open) if (open.stay, open.ask) == (STAY, AskId(3))));
    let spawned = begun[1..].iter().map(|output| match output {
        Output::Spawn(spawning) => (spawning.worker, spawning.devices.concat()),
        other => panic!("{other:?}"),
    });
    let expected = [0, 1].map(|slot| (at(slot), "ab".to_owned()));
    assert_eq!(spawned.collect::<Vec<_>>(), expected);
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
        let [Output::Tell(_, ToWorker::Welcome { .. })] = welcome[..] else {
            panic!("{welcome:?}");
        };
    }
    let ready = WorkerEvent::Said(FromWorker::Ready { address: None });
    let told = sent(&node.worker(0, ready)).1;
    assert!(matches!(
        told[..],
        [NodeEvent::WorkerReady { slot: Slot(0), .. }]
    ));
    node.taken(1);
    let table = NodeRequest::Membership(testing::table(2, 1).into());
    let complete = node.order(table);
    assert!(matches!(complete[0], Output::Complete(_)));
    assert_eq!(answers(&complete), done(AskId(4)));

    assert_eq!(answers(&node.order(stop())), []);
    let first = sent(&node.exits(0)).1;
    assert!(matches!(first[..], [NodeEvent::WorkerExited { .. }]));
    let last = node.exits(1);
    assert_eq!(last[last.len() - 2..], CLOSE);
    // It holds what it had until it is gone.
    assert_eq!(node.core.free().cpus, Milli::units(2));
    let closed = node.step(Input::Closed(STAY));
    assert_eq!(closed, [Output::EndOutput(JOB)]);
    assert!(node.is_free());
    assert_eq!(node.core.jobs().count(), 0);
    // The head must know how the workers ended before it takes the job for ended.
    let more = node.taken(1);
    assert_eq!(answers(&more), []);
    let events = sent(&more).1;
    assert!(matches!(events[0], NodeEvent::WorkerExited { .. }));
    assert_eq!(events[1..], [NodeEvent::JobGone { job: JOB }]);
    assert_eq!(answers(&node.taken(1)), done(AskId(5)));
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
    assert_eq!(answers(&late), done(ask));
    // Who waits for the events alone has a limit of its own.
    let ask = node.ask();
    assert_eq!(node.step(Input::Flush { ask }), []);
    assert_eq!(node.core.deadline(), None);
    let (session, events) = sent(&node.registered());
    assert_eq!(events.len(), 2);
    assert_eq!(answers(&node.taken(session)), done(ask));
    let ask = node.ask();
    let now = node.step(Input::Flush { ask });
    assert_eq!(answers(&now), done(ask));
}

fn user_signal() -> NodeRequest {
    NodeRequest::Signal {
        job: JOB,
        signal: WorkerSignal::User1,
        seq: 1,
    }
}

#[test]
fn orders_for_a_job_that_is_not_here_are_refused_or_done() {
    let mut node = node();
    let table = NodeRequest::Membership(testing::table(1, 1).into());
    for request in [table, user_signal()] {
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
        assert_eq!(answers(&outputs), done(AskId(node.asks)));
    }
    for (request, kind) in [
        (NodeRequest::Echo, RefusalKind::Internal),
        (reserve(JOB, 5), RefusalKind::Unplaceable),
    ] {
        assert_eq!(refused(&node.order(request)), kind);
    }
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
    let Output::Find {
        program: wanted, ..
    } = &outputs[1]
    else {
        panic!("{outputs:?}");
    };
    assert_eq!(*wanted, Wanted::Installed(program.clone()));
    let problem = Refusal::new(RefusalKind::NoProgram, "there is none");
    let outputs = node.found(Found::Unusable(problem.clone()));
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
    let outputs = node.found_for(late, Found::Here);
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
        (&outputs[1], &outputs[2..]),
        (&Output::EndOutput(JOB), &CLOSE[..])
    );
    assert_eq!(node.core.jobs().count(), 0);
    assert!(node.is_free());
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
    assert_eq!(outputs, CLOSE);
    let outputs = node.step(Input::Closed(STAY));
    assert_eq!(refused(&outputs), RefusalKind::Invalid);
    assert!(node.is_free());
}

#[test]
fn a_start_is_of_the_reservation_that_was_there_when_it_came() {
    let mut node = node();
    node.reserves(2);
    node.order(NodeRequest::Start(testing::start(2)));
    let ask = AskId(node.asks);
    // The job leaves and comes again while its program is looked for.
    node.order(stop());
    node.step(Input::Closed(STAY));
    node.order(reserve(JOB, 2));
    node.found(Found::Here);
    let outputs = node.found_for(ask, Found::Here);
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
    let left = sent(&outputs).1.into_iter().map(|event| match event {
        NodeEvent::JobLeft { job, .. } => job,
        event => panic!("{event:?}"),
    });
    assert_eq!(left.collect::<Vec<_>>(), [JOB, other.job]);
    let refusal = refused(&node.order(reserve(JobId(9), 1)));
    assert_eq!(refusal, RefusalKind::Stopped);
    node.step(Input::Closed(other));
    node.exits(0);
    node.taken(1);
    assert_eq!(answers(&node.step(Input::Closed(STAY))), []);
    node.taken(1);
    assert_eq!(answers(&node.taken(1)), done(ask));
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
    assert_eq!(answers(&release), done(first));
    // The head has still to hear of the exit, which takes no job's time.
    assert_eq!(node.core.jobs().next(), Some(JOB));
    let (second, outputs) = drain(&mut node);
    assert_eq!(answers(&outputs), done(second));
}

#[test]
fn signals_and_losses_go_to_the_workers_of_their_job() {
    let mut node = node();
    node.start(2);
    assert_eq!(refused(&node.order(user_signal())), RefusalKind::Invalid);
    let failure = RankFailure {
        rank: Rank(5),
        node: NodeId(9),
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
    start.program.name = "a\nb".to_owned();
    node.order(NodeRequest::Start(start));
    let outputs = node.found(Found::NotSent);
    let [(_, NodeReply::Refused(refusal))] = &answers(&outputs)[..] else {
        panic!("{outputs:?}");
    };
    assert!(refusal.message.starts_with("the program `a\\nb` ("));
    assert!(refusal.message.contains("must be sent before job-"));
}
