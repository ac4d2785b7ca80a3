//! What torchelastic's `api_test.py` asserts of its agents. Tests that have a model there have its name.

use super::WorkerState::{Failed, Healthy, Init, Stopped, Succeeded, Unhealthy, Unknown};
use super::*;

const ROLE: &str = "test_trainer";

fn run(agent: &mut Agent) -> Result<RunResult, AgentError> {
    agent.run(ROLE)
}

fn fails(agent: &mut Agent) -> String {
    run(agent).unwrap_err().to_string()
}

fn group(agent: &Agent) -> &WorkerGroup<Alone> {
    agent.get_worker_group(ROLE).unwrap()
}

fn state(agent: &Agent) -> WorkerState {
    group(agent).state
}

fn departures(agent: &Agent) -> &[Departure] {
    &group(agent).spec.rendezvous.departures
}

#[test]
fn test_is_running() {
    for state in WorkerState::ALL {
        assert_eq!(state.is_running(), matches!(state, Healthy | Unhealthy));
    }
    let values = WorkerState::ALL.map(WorkerState::value);
    assert_eq!(values, [0, 1, 2, 4, 8, 16, 32]);
}

#[test]
fn test_worker_group_constructor() {
    let group = WorkerGroup::new(spec(1));
    assert_eq!(group.state, Init);
    assert_eq!((group.group_rank, group.group_world_size), (None, None));
    assert!(group.store.is_none());
    assert_eq!(group.workers.len(), 8);
    for (local_rank, worker) in (0..).zip(&group.workers) {
        assert_eq!(worker.local_rank, local_rank);
        assert_eq!((&worker.id, worker.ranks), (&None, None));
    }
    assert_eq!(group.environment(0), None, "no ranks yet");
}

#[test]
fn test_agent_constructor() {
    let agent = agent(spec(5), Script::new([]));
    assert_eq!(agent.remaining_restarts(), 5);
    assert_eq!(state(&agent), Init);
}

#[test]
fn a_spec_that_makes_no_sense_is_refused_in_words() {
    let changes: [fn(&mut WorkerSpec<Alone>); 9] = [
        |s| s.role = "a b".to_owned(),
        |s| s.local_world_size = 0,
        |s| s.local_world_size = 16_385,
        |s| s.entry.clear(),
        |s| s.entry = "a\0".to_owned(),
        |s| s.arguments.push("\0".to_owned()),
        |s| s.monitor_interval = Duration::ZERO,
        |s| s.rendezvous_timeout = Duration::ZERO,
        |s| s.master_port = Some(0),
    ];
    let said = changes.map(|change| {
        let mut spec = spec(0);
        change(&mut spec);
        let refused = SimpleElasticAgent::new(spec, Script::new([]), ()).unwrap_err();
        refused.to_string()
    });
    let expected = [
        "role `a b` is given; a role is 1 to 64 letters, digits, `-` and `_`",
        "local_world_size=0 is given; allowed are 1 to 16384 workers",
        "local_world_size=16385 is given; allowed are 1 to 16384 workers",
        "no entry is given; an entry is the program that each worker runs",
        "entry `a\\0` has a NUL byte, which no process can be given",
        "argument `\\0` has a NUL byte, which no process can be given",
        "monitor_interval=0 is given; it must be longer than 0",
        "rendezvous_timeout=0 is given; it must be longer than 0",
        "master_port=0 is given; give a port from 1 to 65535, or none for a free one",
    ];
    assert_eq!(said, expected);
    assert_eq!(spec(0).check(), Ok(()), "0 restarts are fine");
}

#[test]
fn test_rendezvous() {
    let mut spec = spec(0);
    spec.master_address = Some("trainer-0".to_owned());
    spec.master_port = Some(1234);
    let mut agent = agent(spec, states(&[Succeeded]));
    run(&mut agent).unwrap();
    let group = group(&agent);
    let place = (group.group_rank, group.group_world_size);
    assert_eq!(place, (Some(0), Some(1)));
    for (rank, worker) in (0..).zip(&group.workers) {
        let expected = WorkerRanks {
            global_rank: rank,
            role_rank: rank,
            world_size: 8,
            role_world_size: 8,
        };
        assert_eq!(worker.ranks, Some(expected));
    }
    // All workers read what rank 0 has written.
    let store = group.store.as_ref().unwrap();
    assert_eq!(store.get("MASTER_ADDR"), Some(b"trainer-0".to_vec()));
    assert_eq!(store.get("MASTER_PORT"), Some(b"1234".to_vec()));
    assert_eq!(group.master, Some(("trainer-0".to_owned(), 1234)));
}

/// The variables of a worker are those that a worker of a node daemon has, by the same names.
#[test]
fn a_worker_has_torch_s_variables() {
    let mut agent = agent(spec(2), states(&[Failed, Succeeded]));
    run(&mut agent).unwrap();
    let group = group(&agent);
    let env = group.environment(3).unwrap();
    for (name, value) in [
        ("LOCAL_RANK", "3"),
        ("RANK", "3"),
        ("GROUP_RANK", "0"),
        ("ROLE_RANK", "3"),
        ("ROLE_NAME", ROLE),
        ("LOCAL_WORLD_SIZE", "8"),
        ("WORLD_SIZE", "8"),
        ("GROUP_WORLD_SIZE", "1"),
        ("ROLE_WORLD_SIZE", "8"),
        ("MASTER_ADDR", "here"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RESTART_COUNT", "1"),
        ("TORCHELASTIC_MAX_RESTARTS", "2"),
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
    ] {
        assert_eq!(env.get(name).map(String::as_str), Some(value), "{name}");
    }
    assert_eq!(env.len(), 14);
    assert_eq!(group.environment(8), None);
    for name in env.keys() {
        assert!(crate::env::assigned(name).is_some(), "{name}");
    }
}

#[test]
fn test_initialize_workers() {
    let mut agent = agent(spec(0), states(&[Healthy, Succeeded]));
    run(&mut agent).unwrap();
    let group = group(&agent);
    assert!(group.workers.iter().all(|worker| worker.id.is_some()));
    let kept = agent.metrics();
    assert_eq!(kept.of_workers("healthy"), [1]);
    assert_eq!(kept.of_agent("_rendezvous.success"), [1]);
    assert_eq!(kept.of_agent("_initialize_workers.success"), [1]);
    assert_eq!(kept.values("Script._start_workers.success"), [1]);
    let looks = kept.values("Script._monitor_workers.duration.ms");
    assert_eq!(looks, [5000, 5000]);
}

#[test]
fn test_restart_workers() {
    let mut agent = agent(spec(3), states(&[Failed, Unhealthy, Failed, Succeeded]));
    assert_eq!(run(&mut agent).unwrap().state, Succeeded);
    let script = agent.workers();
    assert_eq!((script.starts, script.stops), (4, 3));
    let kept = agent.metrics();
    assert_eq!(kept.of_agent("_restart_workers.success"), [1, 1, 1]);
    assert_eq!(kept.of_workers("remaining_restarts"), [3, 2, 1, 0]);
    let line = "[test_trainer] the workers are failed, and are started anew; restarts left: 2 of 3";
    assert_eq!(kept.lines[1], line);
}

#[test]
fn test_run_happy_path() {
    let mut agent = agent(spec(1), states(&[Healthy, Healthy, Succeeded]));
    assert_eq!(run(&mut agent).unwrap().state, Succeeded);
    assert_eq!(agent.remaining_restarts(), 1);
    assert_eq!(agent.workers().monitors, 3);
    assert_eq!(departures(&agent), [Departure::Succeeded]);
    assert_eq!(run(&mut agent), Err(AgentError::Over), "an agent runs once");
}

#[test]
fn test_run_initialization_failure() {
    let mut script = Script::new([]);
    script.start_fails = true;
    let mut agent = agent(spec(3), script);
    let why = "[test_trainer] the workers could not be started: no such program";
    assert_eq!(fails(&mut agent), why);
    assert_eq!(state(&agent), Init, "the state is left as it was");
    // Nothing of a part that was started is left.
    assert_eq!(agent.workers().stops, 1);
    assert_eq!(departures(&agent), [Departure::Left]);
    let failures = agent.metrics().of_agent("_initialize_workers.failure");
    assert_eq!(failures, [1]);
}

fn max_retries_exceeded(bad: WorkerState) {
    for max_restarts in [0, 1, 2, 100] {
        let failures: ByRank<_> = [(3, failure(3))].into();
        let result = MonitorResult {
            state: bad,
            ..MonitorResult::failed(failures.clone())
        };
        let mut agent = agent(spec(max_restarts), Script::new([result]));
        let result = run(&mut agent).unwrap();
        assert_eq!((state(&agent), result.state), (Failed, Failed));
        assert_eq!(agent.remaining_restarts(), 0);
        let script = agent.workers();
        let starts = max_restarts + 1;
        let done = [script.monitors, script.starts, script.stops];
        assert_eq!(done, [starts; 3]);
        let why = format!(
            "[test_trainer] workers have failed, and max_restarts={max_restarts} are used up"
        );
        assert_eq!(departures(&agent), [Departure::Failed { why }]);
        // The first agents of torchelastic raise this.
        let error = result.into_values().unwrap_err();
        assert_eq!(error.worker_errors(), &failures);
        let text = "workers have failed: 1, and no restart is left; the first: rank 3 (local rank 3, process 77: exit code 1: boom)";
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn test_run_max_retries_exceeded() {
    max_retries_exceeded(Failed);
}

#[test]
fn test_run_max_retries_exceeded_unhealthy() {
    max_retries_exceeded(Unhealthy);
}

#[test]
fn test_run_membership_change() {
    let mut spec = spec(1);
    spec.rendezvous.waiting = [1, 1, 0].into();
    let mut agent = agent(spec, states(&[Healthy, Healthy, Healthy, Succeeded]));
    assert_eq!(run(&mut agent).unwrap().state, Succeeded);
    assert_eq!(agent.remaining_restarts(), 1, "a change uses up no restart");
    let script = agent.workers();
    assert_eq!((script.starts, script.stops), (3, 2));
}

#[test]
fn test_run_unknown_state() {
    for lost in [Unknown, Init, Stopped] {
        let mut agent = agent(spec(3), states(&[lost]));
        let error = run(&mut agent).unwrap_err();
        assert!(
            matches!(error, AgentError::Lost { state, .. } if state == lost),
            "{error}"
        );
        assert_eq!(agent.workers().monitors, 1);
        assert_eq!(agent.remaining_restarts(), 3);
        assert_eq!(state(&agent), lost);
        assert_eq!(agent.workers().stops, 1, "what is left is ended");
        assert_eq!(departures(&agent), [Departure::Left]);
    }
}

#[test]
fn a_stop_that_is_not_certain_ends_the_agent() {
    let mut script = states(&[Failed, Succeeded]);
    script.stop_fails = true;
    let mut agent = agent(spec(3), script);
    let why = "[test_trainer] the workers are in the state unknown: process 7 can't be killed";
    assert_eq!(fails(&mut agent), why);
    assert_eq!(state(&agent), Unknown);
    // No second group beside the first.
    assert_eq!(agent.workers().starts, 1);
}

/// torch: `SignalException` leads to a stop, and the rendezvous is not closed.
#[test]
fn test_agent_process_signal_exception() {
    let mut script = states(&[Healthy]);
    script.ends_at = Some(2);
    let mut agent = agent(spec(3), script);
    let why = "the agent was told to end: SIGTERM";
    assert_eq!(fails(&mut agent), why);
    assert_eq!((agent.workers().monitors, agent.workers().stops), (2, 1));
    assert_eq!(state(&agent), Stopped);
    // The others may go on.
    assert_eq!(departures(&agent), [Departure::Left]);
}

#[test]
fn return_values_are_by_global_rank() {
    let mut values = MonitorResult::of(Succeeded);
    values.return_values = (0..8).map(|rank| (rank, vec![2 * rank as u8])).collect();
    let expected = values.return_values.clone();
    let mut agent = agent(spec(0), Script::new([values]));
    assert_eq!(run(&mut agent).unwrap().into_values(), Ok(expected));
}

#[test]
fn a_role_that_is_another_agent_s_is_refused() {
    let mut agent = agent(spec(0), Script::new([]));
    let error = agent.run("ps").unwrap_err();
    let why = "role `ps` is given; this agent runs `test_trainer`";
    assert_eq!(error.to_string(), why);
    assert_eq!(agent.get_worker_group("ps").unwrap_err(), error);
}

#[test]
fn test_barrier_failed() {
    let failed = RendezvousError::Refused("no store".to_owned());
    let late = "others run on (exit_barrier_timeout)";
    for (barrier, timeout, line) in [
        (
            Some(Err(failed)),
            None,
            "the others are not waited for: no store",
        ),
        (None, Some(Duration::ZERO), late),
        (None, None, late),
    ] {
        let mut spec = spec(0);
        spec.rendezvous.barrier = barrier;
        spec.exit_barrier_timeout = timeout.unwrap_or(spec.exit_barrier_timeout);
        let mut agent = agent(spec, states(&[Succeeded]));
        // It fails nothing.
        assert_eq!(run(&mut agent).unwrap().state, Succeeded);
        let line = format!("[test_trainer] {line}");
        assert_eq!(agent.metrics().lines.last(), Some(&line));
    }
}

#[test]
fn test_record_flakiness_metric() {
    assert_eq!(flakiness(10, 10, false), 0);
    assert_eq!(flakiness(10, 3, false), 63);
    assert_eq!(flakiness(0, 0, false), 0);
    assert_eq!(flakiness(10, 10, true), 100);
    assert_eq!(flakiness(3, u32::MAX, false), 0);
}

#[test]
fn test_record_metrics() {
    for (script, max_restarts, expected) in [
        (vec![Failed, Succeeded], 2, "run_success_with_retries"),
        (vec![Succeeded], 2, "run_success_no_retries"),
        (vec![Failed, Failed], 1, "run_failed_with_retries"),
        (vec![Failed], 0, "run_failed_no_retries"),
    ] {
        let mut agent = agent(spec(max_restarts), states(&script));
        run(&mut agent).unwrap();
        let kept = agent.metrics();
        assert_eq!(kept.of_workers("run_total"), [1]);
        for name in [
            "run_success_with_retries",
            "run_success_no_retries",
            "run_failed_with_retries",
            "run_failed_no_retries",
        ] {
            let values = kept.of_workers(name);
            assert_eq!(values, [i64::from(name == expected)], "{name}");
        }
    }
}
