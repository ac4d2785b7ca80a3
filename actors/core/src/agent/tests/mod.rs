//! What the tests of agents share: workers and a rendezvous that do as a script says, and a clock that stands still.

mod api_test;
mod local;
mod roles;

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use kolo_wire::Exit;

use super::*;

/// A rendezvous with nobody else, or with others that come and go by a script.
#[derive(Debug, Default)]
pub(crate) struct Alone {
    round: u64,
    restarts: u32,
    /// The answers of `num_nodes_waiting`; then 0.
    waiting: VecDeque<u32>,
    /// The answer of the exit barrier.
    barrier: Option<Result<Barrier, RendezvousError>>,
    departures: Vec<Departure>,
}

impl RendezvousHandler for Alone {
    fn wake_with(&mut self, _: Waker) {}

    fn next_rendezvous(
        &mut self,
        instance: &RoleInstance,
    ) -> Poll<Result<Rendezvous, RendezvousError>> {
        self.round += 1;
        let ranks = assign_worker_ranks(std::slice::from_ref(instance))[0];
        Poll::Ready(Ok(Rendezvous {
            round: self.round,
            restarts: self.restarts,
            group_rank: 0,
            group_world_size: 1,
            workers: (0..instance.local_world_size)
                .map(|local| ranks.worker(local))
                .collect(),
            store: Arc::new(MapStore::default()),
        }))
    }

    fn num_nodes_waiting(&mut self) -> u32 {
        self.waiting.pop_front().unwrap_or_default()
    }

    fn restarts(&self) -> u32 {
        self.restarts
    }

    fn spend_restart(&mut self, max_restarts: u32) -> bool {
        let is_left = self.restarts < max_restarts;
        self.restarts += u32::from(is_left);
        is_left
    }

    fn exit_barrier(&mut self) -> Poll<Result<Barrier, RendezvousError>> {
        self.barrier.clone().map_or(Poll::Pending, Poll::Ready)
    }

    fn shutdown(&mut self, departure: Departure) {
        self.departures.push(departure);
    }
}

/// Workers whose states are a script. Each wait takes as long as it may.
#[derive(Debug)]
pub(crate) struct Script {
    now: Cell<Instant>,
    states: VecDeque<MonitorResult>,
    starts: u32,
    stops: u32,
    monitors: u32,
    start_fails: bool,
    stop_fails: bool,
    /// The end comes at this look at the workers.
    ends_at: Option<u32>,
}

impl Script {
    pub(crate) fn new(states: impl IntoIterator<Item = MonitorResult>) -> Self {
        Self {
            now: Cell::new(Instant::now()),
            states: states.into_iter().collect(),
            starts: 0,
            stops: 0,
            monitors: 0,
            start_fails: false,
            stop_fails: false,
            ends_at: None,
        }
    }
}

impl<H> Workers<H> for Script {
    const CLASS: &'static str = "Script";

    fn now(&self) -> Instant {
        self.now.get()
    }

    fn waker(&self) -> Waker {
        Waker::noop().clone()
    }

    fn master_address(&mut self, spec: &WorkerSpec<H>) -> Result<(String, u16), String> {
        let address = spec
            .master_address
            .clone()
            .unwrap_or_else(|| "here".to_owned());
        Ok((address, spec.master_port.unwrap_or(29_500)))
    }

    fn start(&mut self, group: &WorkerGroup<H>) -> Result<BTreeMap<u32, String>, String> {
        self.starts += 1;
        if self.start_fails {
            return Err("no such program".to_owned());
        }
        let ids = group.workers.iter().map(|worker| worker.local_rank);
        Ok(ids.map(|rank| (rank, format!("p{rank}"))).collect())
    }

    fn stop(&mut self, _: &WorkerGroup<H>) -> Result<(), String> {
        self.stops += 1;
        if self.stop_fails {
            return Err("process 7 can't be killed".to_owned());
        }
        Ok(())
    }

    fn monitor(&mut self, _: &WorkerGroup<H>, within: Duration) -> MonitorResult {
        self.monitors += 1;
        self.now.set(self.now.get() + within);
        // The last state of a script lasts.
        match self.states.len() {
            1 => self.states[0].clone(),
            _ => self.states.pop_front().expect("a state"),
        }
    }

    fn wait(&mut self, until: Instant) {
        self.now.set(self.now.get().max(until));
    }

    fn ended(&self) -> Option<String> {
        let is_over = self.ends_at.is_some_and(|at| self.monitors >= at);
        is_over.then(|| "SIGTERM".to_owned())
    }
}

/// Keeps all that it is told.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    metrics: Vec<Metric>,
    lines: Vec<String>,
}

impl MetricHandler for Kept {
    fn put_metric(&mut self, group: &str, metric: &Metric) {
        assert_eq!(group, "torchelastic");
        self.metrics.push(metric.clone());
    }

    fn log(&mut self, line: &str) {
        self.lines.push(line.to_owned());
    }
}

impl Kept {
    /// The values of a metric, in order.
    fn values(&self, name: &str) -> Vec<i64> {
        let metrics = self.metrics.iter().filter(|metric| metric.name == name);
        metrics.map(|metric| metric.value).collect()
    }

    /// The same of a metric of the workers, and of the agent.
    fn of_workers(&self, name: &str) -> Vec<i64> {
        self.values(&format!("workers.test_trainer.{name}"))
    }

    fn of_agent(&self, name: &str) -> Vec<i64> {
        self.values(&format!("SimpleElasticAgent.{name}"))
    }
}

pub(crate) type Agent = SimpleElasticAgent<Alone, Script, Kept>;

pub(crate) fn states(states: &[WorkerState]) -> Script {
    Script::new(states.iter().copied().map(MonitorResult::of))
}

pub(crate) fn spec(max_restarts: u32) -> WorkerSpec<Alone> {
    let alone = Alone {
        barrier: Some(Ok(Barrier::Done)),
        ..Alone::default()
    };
    WorkerSpec {
        max_restarts,
        role: "test_trainer".to_owned(),
        ..WorkerSpec::new("train", 8, alone)
    }
}

pub(crate) fn agent(spec: WorkerSpec<Alone>, script: Script) -> Agent {
    SimpleElasticAgent::new(spec, script, Kept::default()).expect("a spec that makes sense")
}

pub(crate) fn failure(local_rank: u32) -> WorkerFailure {
    WorkerFailure {
        local_rank,
        id: Some("77".to_owned()),
        exit: Exit::Code(1),
        message: "boom".to_owned(),
    }
}
