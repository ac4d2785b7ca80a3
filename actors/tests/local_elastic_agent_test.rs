//! What torch's `local_elastic_agent_test.py` asserts, with real processes. Tests that have a model there have its name.
//!
//! Workers are shell scripts. They say in files what they were given, and wait at named pipes. This program is the warden, too.
#![allow(clippy::unwrap_used)] // a failed step is a failed test

mod common;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use common::{Bed, LIMIT, Running, start};
use kolo_actors::agent::{LocalElasticAgent, LocalOptions, LocalWorkers};
use kolo_core::agent::{
    AgentError, ElasticAgent, Metric, MetricHandler, RunResult, WorkerSpec, WorkerState,
};
use kolo_transport::wire::Exit;

fn test_run_happy_function() {
    let bed = Bed::new(1, 1);
    let ended = bed.start(bed.spec(3, "")).join();
    assert_eq!(ended.state(), WorkerState::Succeeded);
    let ranks: BTreeSet<u32> = bed.told().iter().map(|(_, told)| told[0]).collect();
    assert_eq!(ranks, [0, 1, 2].into());
}

/// All fail, as often as is allowed: each worker is started once more than there are restarts.
fn test_run_sad_function() {
    for max_restarts in [0, 2] {
        let bed = Bed::new(1, 1);
        // None ends before all have begun, so that all of a group are seen.
        let script = "read x < $DIR/gate.$TORCHELASTIC_RESTART_COUNT.$RANK; exit $((RANK + 3))";
        for restart in 0..=max_restarts {
            for rank in 0..2 {
                bed.gate(&format!("gate.{restart}.{rank}"));
            }
        }
        let mut spec = bed.spec(2, script);
        spec.max_restarts = max_restarts;
        let running = bed.start(spec);
        for restart in 0..=max_restarts {
            let gates = [0, 1].map(|rank| bed.open(&format!("gate.{restart}.{rank}")));
            drop(gates);
        }
        let ended = running.join();
        assert_eq!(ended.state(), WorkerState::Failed);
        assert_eq!(ended.agent.remaining_restarts(), 0);
        let told = bed.told();
        assert_eq!(told.len(), 2 * (max_restarts as usize + 1), "{told:?}");
        for restart in 0..=max_restarts {
            let of_group = told.iter().filter(|(_, told)| told[5] == restart);
            assert_eq!(of_group.count(), 2, "{told:?}");
        }
        let error = ended.result.unwrap().into_values().unwrap_err();
        let failures = error.worker_errors();
        assert!(!failures.is_empty());
        for (rank, failure) in failures {
            // A worker that the agent has stopped is no failure: both were seen to fail by themselves, or one.
            assert_eq!(failure.exit, Exit::Code(*rank as i32 + 3));
            assert_eq!(failure.local_rank, *rank);
        }
    }
}

/// Some fail, and the others are stopped. These are no failures, as they are under torchrun.
fn test_run_bipolar_function() {
    let bed = Bed::new(1, 1);
    let script = "[ $RANK = 1 ] && exit 7; exec sleep 1000";
    let mut spec = bed.spec(4, script);
    spec.max_restarts = 2;
    // The interval is only the longest wait: the exits are seen at once.
    spec.monitor_interval = Duration::from_secs(1000);
    let ended = bed.start(spec).join();
    assert_eq!(ended.state(), WorkerState::Failed);
    let failures = ended.result.unwrap().failures;
    assert_eq!(failures.keys().copied().collect::<Vec<_>>(), [1]);
    assert_eq!(failures[&1].exit, Exit::Code(7));
    let of_rank_1 = bed.told().iter().filter(|(_, told)| told[0] == 1).count();
    assert_eq!(of_rank_1, 3);
}

fn test_run_check_env() {
    let bed = Bed::new(1, 1);
    let mut spec = bed.spec(1, "env > $DIR/env");
    spec.master_address = Some("127.0.0.1".to_owned());
    spec.master_port = Some(29_501);
    bed.start(spec).join().result.unwrap();
    let env: BTreeSet<String> = bed.lines("env").into_iter().collect();
    for line in "RANK=0 LOCAL_RANK=0 GROUP_RANK=0 ROLE_RANK=0 ROLE_NAME=default WORLD_SIZE=1 \
                 LOCAL_WORLD_SIZE=1 GROUP_WORLD_SIZE=1 ROLE_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 \
                 MASTER_PORT=29501 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 \
                 TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=False \
                 TORCH_NCCL_ASYNC_ERROR_HANDLING=1"
        .split_whitespace()
    {
        assert!(env.contains(line), "{line}: {env:?}");
    }
}

fn test_run_check_nccl_async_error_handling_env() {
    let bed = Bed::new(1, 1);
    let mut options = bed.options();
    let name = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
    options.env.insert(name.to_owned(), "0".to_owned());
    let spec = bed.spec(1, "echo $TORCH_NCCL_ASYNC_ERROR_HANDLING > $DIR/value");
    start(spec, options).join().result.unwrap();
    assert_eq!(bed.lines("value"), ["0"]);
}

/// Each group has a port that is free when its workers are started.
fn workers_may_listen_where_rank_0_is() {
    let bed = Bed::new(1, 1);
    let script = "echo $MASTER_PORT >> $DIR/ports; exit 1";
    let mut spec = bed.spec(1, script);
    spec.max_restarts = 3;
    bed.start(spec).join().result.unwrap();
    let ports: BTreeSet<String> = bed.lines("ports").into_iter().collect();
    assert!(ports.len() > 1, "a group has a port of its own: {ports:?}");
    for port in ports {
        std::net::TcpListener::bind(("127.0.0.1", port.parse::<u16>().unwrap())).unwrap();
    }
}

/// The sum of the ranks of agents with so many workers.
fn sum_of_ranks(sizes: &[u32]) -> u32 {
    let nodes = sizes.len() as u32;
    let bed = Bed::new(nodes, nodes);
    let agents: Vec<Running> = sizes
        .iter()
        .map(|size| bed.start(bed.spec(*size, "")))
        .collect();
    for agent in agents {
        assert_eq!(agent.join().state(), WorkerState::Succeeded);
    }
    let world: u32 = sizes.iter().sum();
    let told = bed.told();
    assert!(told.iter().all(|(_, told)| told[1] == world), "{told:?}");
    told.iter().map(|(_, told)| told[0]).sum()
}

fn test_run_distributed_sum_homogeneous() {
    assert_eq!(sum_of_ranks(&[4, 4]), 28);
}

fn test_run_distributed_sum_heterogeneous() {
    assert_eq!(sum_of_ranks(&[1, 2, 3]), 15);
}

/// The budget is the job's: two agents whose workers fail in turn have as many restarts as one.
fn restarts_are_the_job_s() {
    let bed = Bed::new(2, 2);
    let script = "[ $((TORCHELASTIC_RESTART_COUNT % 2)) = $GROUP_RANK ] && exit 1; exec sleep 1000";
    let agents = [1, 1].map(|workers| {
        let mut spec = bed.spec(workers, script);
        spec.max_restarts = 3;
        bed.start(spec)
    });
    let ended = agents.map(Running::join);
    let failed = ended
        .iter()
        .filter(|ended| ended.result.as_ref().is_ok_and(RunResult::is_failed));
    assert_eq!(failed.count(), 1, "the other agent hears of it");
    let other = ended.iter().find_map(|ended| ended.result.as_ref().err());
    assert_eq!(
        other.unwrap().to_string(),
        "the job is over: [default] workers have failed, and max_restarts=3 are used up"
    );
    let restarts: BTreeSet<u32> = bed.told().iter().map(|(_, told)| told[5]).collect();
    assert_eq!(restarts, (0..=3).collect());
}

/// A gate for each group by its size: `read` there ends when the test opens it.
const WAIT: &str = "read x < $DIR/of.$WORLD_SIZE.$RANK; exit 0";

/// An agent is lost and another takes its place: no restart is used up.
fn test_double_agent_fault_tolerance() {
    let bed = Bed::new(2, 2);
    for gate in ["first.0", "first.1", "then.0", "then.1"] {
        bed.gate(gate);
    }
    // The first group waits for ever; the marker is there for the second.
    let script = "if [ -e $DIR/second ]; then read x < $DIR/then.$RANK; exit 0; else read x < $DIR/first.$RANK; sleep 1000; fi";
    let stays = bed.start(bed.spec(1, script));
    let goes = bed.start(bed.spec(1, script));
    let gates = [bed.open("first.0"), bed.open("first.1")];
    File::create(bed.path().join("second")).unwrap();
    goes.ender.end("its node goes");
    let gone = goes.join();
    assert!(matches!(gone.result, Err(AgentError::Ended { .. })));
    drop(gates);
    let comes = bed.start(bed.spec(1, script));
    drop([bed.open("then.0"), bed.open("then.1")]);
    for agent in [stays, comes] {
        let ended = agent.join();
        assert_eq!(ended.state(), WorkerState::Succeeded);
        assert_eq!(
            ended.agent.remaining_restarts(),
            0,
            "none was allowed, none was needed"
        );
    }
    assert!(bed.told().iter().all(|(_, told)| told[5] == 0));
}

/// Of two agents one is lost; the other goes on alone, and takes another that comes later. All of that is free.
fn test_double_agent_elastic() {
    let bed = Bed::new(1, 2);
    for gate in ["of.1.0", "of.2.0", "of.2.1"] {
        bed.gate(gate);
    }
    let stays = bed.start(bed.spec(1, WAIT));
    let alone = bed.open("of.1.0");
    let goes = bed.start(bed.spec(1, WAIT));
    let both = [bed.open("of.2.0"), bed.open("of.2.1")];
    drop(alone);
    goes.ender.end("its node goes");
    assert!(goes.join().result.is_err());
    drop(bed.open("of.1.0"));
    drop(both);
    let ended = stays.join();
    assert_eq!(ended.state(), WorkerState::Succeeded);
    let sizes: Vec<u32> = bed.told().iter().map(|(_, told)| told[1]).collect();
    assert_eq!(sizes, [1, 2, 2, 1]);
    assert!(
        bed.told().iter().all(|(_, told)| told[5] == 0),
        "no restart is used up"
    );
}

/// An agent whose workers are done early waits for the others.
fn test_workers_drift_success() {
    let bed = Bed::new(2, 2);
    bed.gate("late");
    let script = "[ $RANK = 0 ] && exit 0; read x < $DIR/late; exit 0";
    let agents = [1, 1].map(|workers| bed.start(bed.spec(workers, script)));
    drop(bed.open("late"));
    for agent in agents {
        assert_eq!(agent.join().state(), WorkerState::Succeeded);
    }
}

/// An agent that does not wait for the others fails nothing, and does not disturb them.
fn test_workers_drift_fail() {
    let bed = Bed::new(2, 2);
    bed.gate("late");
    let script = "[ $RANK = 0 ] && exit 0; read x < $DIR/late; exit 0";
    let agents = [1, 1].map(|workers| {
        let mut spec = bed.spec(workers, script);
        spec.exit_barrier_timeout = Duration::ZERO;
        bed.start(spec)
    });
    let late = bed.open("late");
    // Rank 0 is of the handler that was made first.
    let [first, second] = agents;
    assert_eq!(first.join().state(), WorkerState::Succeeded);
    drop(late);
    assert_eq!(second.join().state(), WorkerState::Succeeded);
}

fn test_rank_restart_after_failure() {
    let bed = Bed::new(1, 1);
    let script = "[ $RANK.$TORCHELASTIC_RESTART_COUNT = 1.0 ] && kill -9 $$; \
                  [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 1000";
    let mut spec = bed.spec(3, script);
    spec.max_restarts = 3;
    let ended = bed.start(spec).join();
    assert_eq!(ended.state(), WorkerState::Succeeded);
    assert_eq!(ended.agent.remaining_restarts(), 2);
}

/// A worker that ignores TERM is killed when its time is over, and what it has started, too.
fn a_worker_that_ignores_term_is_killed() {
    let bed = Bed::new(1, 1);
    for gate in ["stubborn", "mate"] {
        bed.gate(gate);
    }
    let script = "if [ $RANK = 0 ]; then trap '' TERM; sleep 1000 & echo $! > $DIR/below; read x < $DIR/stubborn; \
                  while :; do sleep 1000; done; fi; read x < $DIR/mate; exit 5";
    let mut options = bed.options();
    options.shutdown_timeout = Duration::from_millis(200);
    let running = start(bed.spec(2, script), options);
    drop(bed.open("stubborn"));
    drop(bed.open("mate"));
    let ended = running.join();
    assert_eq!(ended.state(), WorkerState::Failed);
    assert!(ended.took >= Duration::from_millis(200), "it had its time");
    let failures = ended.result.unwrap().failures;
    assert_eq!(failures.keys().copied().collect::<Vec<_>>(), [1]);
    let below = bed.lines("below")[0].clone();
    // Its warden may not have taken note of its end yet.
    let stat = fs::read_to_string(Path::new("/proc").join(below).join("stat"));
    let state = stat
        .ok()
        .and_then(|stat| Some(stat.rsplit_once(") ")?.1[..1].to_owned()));
    assert!(state.as_ref().is_none_or(|state| state == "Z"), "{state:?}");
}

/// The time to end may be 0: workers are killed at once.
fn test_shutdown_timeout_of_zero() {
    assert_eq!(
        LocalOptions::default().shutdown_timeout,
        Duration::from_secs(30)
    );
    let bed = Bed::new(1, 1);
    bed.gate("stubborn");
    let script = "[ $RANK = 1 ] && read x < $DIR/stubborn && exit 1; trap '' TERM; read x < $DIR/stubborn; exec sleep 1000";
    let mut options = bed.options();
    options.shutdown_timeout = Duration::ZERO;
    let running = start(bed.spec(2, script), options);
    let mut gate = bed.open("stubborn");
    gate.write_all(b"go\ngo\n").unwrap();
    running.ender.end("enough");
    let ended = running.join();
    assert!(ended.result.is_err() || ended.result.unwrap().is_failed());
    assert!(ended.took < LIMIT / 2);
}

/// Tells of each metric.
struct Told(mpsc::Sender<String>);

impl MetricHandler for Told {
    fn put_metric(&mut self, _: &str, metric: &Metric) {
        self.0.send(metric.name.clone()).ok();
    }
}

/// Nobody has seen how the workers have ended: the agent ends, too, and restarts nothing.
fn a_lost_warden_ends_the_agent() {
    let bed = Bed::new(1, 1);
    for gate in ["gate.0", "gate.1"] {
        bed.gate(gate);
    }
    let script = "read x < $DIR/gate.$RANK; [ $RANK = 0 ] && kill -9 $PPID; exec sleep 1000";
    let mut spec = bed.spec(2, script);
    spec.max_restarts = 5;
    let workers = LocalWorkers::start(bed.options()).unwrap();
    let (teller, told) = mpsc::channel();
    let mut agent = LocalElasticAgent::new(spec, workers, Told(teller)).unwrap();
    let thread = thread::spawn(move || (agent.run("default"), agent.remaining_restarts()));
    let gates = [bed.open("gate.0"), bed.open("gate.1")];
    while told.recv_timeout(LIMIT).expect("they are started")
        != "SimpleElasticAgent._initialize_workers.success"
    {}
    drop(gates);
    while told.recv_timeout(LIMIT).expect("the agent looks") != "workers.default.unknown" {}
    let (result, remaining_restarts) = thread.join().unwrap();
    let error = result.unwrap_err();
    assert!(
        matches!(
            error,
            AgentError::Lost {
                state: WorkerState::Unknown,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(remaining_restarts, 5);
}

/// Workers may be dropped where asynchronous tasks run.
fn workers_may_be_dropped_by_a_task() {
    let workers = LocalWorkers::start(LocalOptions::default()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async move { drop(workers) });
}

fn a_program_that_is_not_there_ends_the_agent() {
    let bed = Bed::new(1, 1);
    let spec = WorkerSpec::new("/no/such/program", 2, bed.place.handler());
    let ended = bed.start(spec).join();
    assert_eq!(
        ended.result.as_ref().unwrap_err().to_string(),
        "[default] the workers could not be started: local rank 0: cannot start /no/such/program: no such file, or its \
         interpreter does not exist"
    );
    let group = ended.agent.get_worker_group("default").unwrap();
    assert_eq!(group.state, WorkerState::Init);
}

fn main() -> ExitCode {
    kolo_process::run_if_warden();
    macro_rules! tests {
        ($($name:ident),* $(,)?) => { [$((stringify!($name), $name as fn())),*] };
    }
    let tests = tests![
        test_run_happy_function,
        test_run_sad_function,
        test_run_bipolar_function,
        test_run_check_env,
        test_run_check_nccl_async_error_handling_env,
        workers_may_listen_where_rank_0_is,
        test_run_distributed_sum_homogeneous,
        test_run_distributed_sum_heterogeneous,
        restarts_are_the_job_s,
        test_double_agent_fault_tolerance,
        test_double_agent_elastic,
        test_workers_drift_success,
        test_workers_drift_fail,
        test_rank_restart_after_failure,
        a_worker_that_ignores_term_is_killed,
        test_shutdown_timeout_of_zero,
        a_lost_warden_ends_the_agent,
        workers_may_be_dropped_by_a_task,
        a_program_that_is_not_there_ends_the_agent,
    ];
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    let is_wanted =
        |name: &str| wanted.is_empty() || wanted.iter().any(|word| name.contains(word.as_str()));
    let running: Vec<_> = tests
        .into_iter()
        .filter(|(name, _)| is_wanted(name))
        .map(|(name, test)| {
            (
                name,
                thread::spawn(move || catch_unwind(AssertUnwindSafe(test))),
            )
        })
        .collect();
    let mut failed = 0;
    for (name, test) in running {
        let passed = matches!(test.join(), Ok(Ok(())));
        failed += u32::from(!passed);
        println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
    }
    println!("failed: {failed}");
    ExitCode::from(u8::from(failed > 0))
}
