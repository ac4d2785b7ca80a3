//! All that an agent decides, as one state machine.

use std::collections::BTreeMap;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::group::WorkerGroup;
use super::metrics::{Metric, prof, record_metrics};
use super::outcome::{AgentError, ByRank, MonitorResult, RunResult, WorkerFailure, late};
use super::rendezvous::{Barrier, Departure, RendezvousError, RendezvousHandler};
use super::roles::RoleInstance;
use super::spec::{SpecError, WorkerSpec};
use super::state::WorkerState;

/// Where rank 0 listens, in the group's store.
const MASTER_ADDR: &str = "MASTER_ADDR";
/// The port of it.
const MASTER_PORT: &str = "MASTER_PORT";

/// An event in the life of an agent: the answer to its last [`Action`].
#[derive(Debug)]
pub enum Event {
    /// The agent is to run.
    Begin,
    /// The time of [`Action::Wait`] is over, or the rendezvous handler has woken the agent.
    Woken,
    /// The answer to [`Action::FindAddress`].
    Address(Result<(String, u16), String>),
    /// The answer to [`Action::Start`]: the name of each process by local rank.
    Started(Result<BTreeMap<u32, String>, String>),
    /// The answer to [`Action::Monitor`].
    Monitored(MonitorResult),
    /// The answer to [`Action::Stop`]: nothing is left of the workers, or that is not certain.
    Stopped(Result<(), String>),
    /// The agent is to end, and says why. May come at any time.
    End(String),
}

/// The next thing that an agent does. Each is answered by one [`Event`].
#[derive(Debug)]
pub enum Action {
    /// Find an address and a free port for the store of rank 0.
    FindAddress,
    /// Start the workers of the group.
    Start,
    /// End the workers of the group, whatever their state is: by asking first, by force after a while.
    Stop,
    /// Wait until a worker has failed, or all have ended, or the handler wakes the agent; no longer than this.
    Monitor {
        /// The longest wait.
        within: Duration,
    },
    /// Wait until the handler wakes the agent, no longer than this.
    Wait {
        /// The end of the wait.
        until: Instant,
    },
    /// The agent has ended.
    Finish(Box<Result<RunResult, AgentError>>),
}

/// What comes after a stop.
#[derive(Debug)]
enum Next {
    Meet,
    Fail(ByRank<WorkerFailure>),
    End(AgentError),
}

#[derive(Debug)]
enum Phase {
    New,
    Meeting {
        by: Instant,
    },
    /// This agent says where rank 0 listens.
    Naming {
        by: Instant,
    },
    /// Another agent does.
    Hearing {
        by: Instant,
    },
    Starting,
    Running,
    Stopping(Next),
    Barrier {
        by: Instant,
        values: ByRank<Vec<u8>>,
    },
    Over,
}

/// An agent: from the first meeting to the end of its workers.
///
/// [`AgentCore::step`] takes each event and gives the next action. Nothing here waits, does I/O or reads a clock.
/// [`SimpleElasticAgent`](super::SimpleElasticAgent) carries the actions out with workers of any kind.
///
/// The rules:
/// - Workers that fail use up a restart of the job, all of a group together one. Without one left the agent ends.
/// - Agents that come, go or are lost use up none.
/// - Workers that have succeeded wait for those of the other agents, and start anew if these fail.
/// - An agent that has lost track of its workers ends.
#[derive(Debug)]
pub struct AgentCore<H> {
    group: WorkerGroup<H>,
    phase: Phase,
    /// Since when the agent asks for a group.
    since: Instant,
    /// Since when the workers are being started anew.
    restarting: Option<Instant>,
    /// How the workers have ended that ran last, until others run.
    outcome: Option<WorkerState>,
    metrics: Vec<Metric>,
    log: Vec<String>,
}

impl<H: RendezvousHandler> AgentCore<H> {
    /// An agent that has done nothing.
    ///
    /// # Errors
    ///
    /// [`SpecError`] if the blueprint makes no sense.
    pub fn new(now: Instant, spec: WorkerSpec<H>) -> Result<Self, SpecError> {
        spec.check()?;
        Ok(Self {
            group: WorkerGroup::new(spec),
            phase: Phase::New,
            since: now,
            restarting: None,
            outcome: None,
            metrics: Vec::new(),
            log: Vec::new(),
        })
    }

    /// The workers, and the group that they are in.
    #[must_use]
    pub fn group(&self) -> &WorkerGroup<H> {
        &self.group
    }

    /// Where the agents meet.
    pub fn handler(&mut self) -> &mut H {
        &mut self.group.spec.rendezvous
    }

    /// Restarts that the job has left.
    #[must_use]
    pub fn remaining_restarts(&self) -> u32 {
        let spec = &self.group.spec;
        spec.max_restarts.saturating_sub(spec.rendezvous.restarts())
    }

    /// The metrics since the last call.
    pub fn take_metrics(&mut self) -> Vec<Metric> {
        std::mem::take(&mut self.metrics)
    }

    /// The lines for the log since the last call.
    pub fn take_log(&mut self) -> Vec<String> {
        std::mem::take(&mut self.log)
    }

    /// Something has happened; the next thing to do. An event that the agent does not wait for changes nothing.
    pub fn step(&mut self, now: Instant, event: Event) -> Action {
        let phase = std::mem::replace(&mut self.phase, Phase::Over);
        match (phase, event) {
            (Phase::Over, _) => Action::Finish(Box::new(Err(AgentError::Over))),
            (phase, Event::End(why)) => self.end(now, phase, why),
            (Phase::New, Event::Begin) => self.meet(now),
            (Phase::Meeting { by }, Event::Woken) => self.ask(now, by),
            (Phase::Naming { by }, Event::Address(Ok((address, port)))) => {
                if let Some(store) = &self.group.store {
                    store.set(MASTER_ADDR, address.into_bytes());
                    store.set(MASTER_PORT, port.to_string().into_bytes());
                }
                self.hear(now, by)
            }
            (Phase::Hearing { by }, Event::Woken) => self.hear(now, by),
            (Phase::Starting, Event::Started(Ok(ids))) => self.started(now, ids),
            (Phase::Naming { .. }, Event::Address(Err(why)))
            | (Phase::Starting, Event::Started(Err(why))) => self.not_started(now, why),
            (Phase::Running, Event::Monitored(result)) => self.monitored(now, result),
            (Phase::Stopping(next), Event::Stopped(Ok(()))) => self.stopped(now, next),
            (Phase::Stopping(_), Event::Stopped(Err(why))) => {
                self.group.state = WorkerState::Unknown;
                let lost = self.lost(why);
                self.finish(Err(lost))
            }
            (Phase::Barrier { by, values }, Event::Woken) => self.barrier(now, by, values),
            (phase, _) => self.again(phase),
        }
    }

    fn instance(&self) -> RoleInstance {
        let spec = &self.group.spec;
        RoleInstance {
            role: spec.role.clone(),
            local_world_size: spec.local_world_size,
        }
    }

    fn say(&mut self, line: &str) {
        self.log.push(format!("[{}] {line}", self.group.spec.role));
    }

    /// Asks for a place in the next group.
    fn meet(&mut self, now: Instant) -> Action {
        self.since = now;
        self.ask(now, now + self.group.spec.rendezvous_timeout)
    }

    fn ask(&mut self, now: Instant, by: Instant) -> Action {
        let instance = self.instance();
        match self.handler().next_rendezvous(&instance) {
            Poll::Pending if now >= by => self.is_late(now),
            Poll::Pending => {
                self.phase = Phase::Meeting { by };
                Action::Wait { until: by }
            }
            Poll::Ready(Ok(rendezvous)) => {
                self.group.join(rendezvous);
                self.hear(now, by)
            }
            Poll::Ready(Err(RendezvousError::NotNeeded)) => {
                let state = self.group.state;
                self.finish(Ok(ended_in(state)))
            }
            Poll::Ready(Err(error)) => {
                self.has_met(now, false);
                self.finish(Err(error.into()))
            }
        }
    }

    /// Starts the workers, if it is known where rank 0 listens.
    fn hear(&mut self, now: Instant, by: Instant) -> Action {
        let store = self.group.store.as_ref();
        let get = |key| store.and_then(|store| store.get(key));
        let text = |key| get(key).and_then(|value| String::from_utf8(value).ok());
        let port = text(MASTER_PORT).and_then(|port| port.parse().ok());
        if let (Some(address), Some(port)) = (text(MASTER_ADDR), port) {
            self.group.master = Some((address, port));
            self.has_met(now, true);
            self.phase = Phase::Starting;
            return Action::Start;
        }
        if now >= by {
            return self.is_late(now);
        }
        if self.group.group_rank == Some(0) {
            self.phase = Phase::Naming { by };
            return Action::FindAddress;
        }
        if self.handler().num_nodes_waiting() > 0 {
            // The agent that was to say it may be lost.
            self.phase = Phase::Meeting { by };
            return Action::Wait { until: now };
        }
        self.phase = Phase::Hearing { by };
        Action::Wait { until: by }
    }

    fn is_late(&mut self, now: Instant) -> Action {
        self.has_met(now, false);
        let within = self.group.spec.rendezvous_timeout;
        self.finish(Err(late(within)))
    }

    fn has_met(&mut self, now: Instant, is_success: bool) {
        self.prof("_rendezvous", self.since, now, is_success);
        if is_success {
            let group = &self.group;
            let line = format!(
                "the agents have met: round {}, restarts {}, group rank {} of {}, world size {}",
                group.round,
                group.restarts,
                group.group_rank.unwrap_or_default(),
                group.group_world_size.unwrap_or_default(),
                group
                    .workers
                    .first()
                    .and_then(|worker| worker.ranks)
                    .map_or(0, |ranks| ranks.world_size),
            );
            self.say(&line);
        }
    }

    fn prof(&mut self, step: &str, since: Instant, now: Instant, is_success: bool) {
        let took = now.saturating_duration_since(since);
        let name = format!("SimpleElasticAgent.{step}");
        self.metrics.extend(prof(&name, took, is_success));
    }

    fn initialized(&mut self, now: Instant, is_success: bool) {
        self.prof("_initialize_workers", self.since, now, is_success);
        if let Some(since) = self.restarting.take() {
            self.prof("_restart_workers", since, now, is_success);
        }
    }

    fn started(&mut self, now: Instant, mut ids: BTreeMap<u32, String>) -> Action {
        for worker in &mut self.group.workers {
            worker.id = ids.remove(&worker.local_rank);
        }
        self.initialized(now, true);
        self.outcome = None;
        // For now: a look at the workers comes next.
        self.group.state = WorkerState::Healthy;
        self.watch()
    }

    /// Nothing but whole groups run: what was started is stopped. The state stays as it was.
    fn not_started(&mut self, now: Instant, why: String) -> Action {
        self.initialized(now, false);
        let role = self.group.spec.role.clone();
        self.stop(Next::End(AgentError::Start { role, why }))
    }

    fn watch(&mut self) -> Action {
        self.phase = Phase::Running;
        let within = self.group.spec.monitor_interval;
        Action::Monitor { within }
    }

    fn monitored(&mut self, now: Instant, result: MonitorResult) -> Action {
        let state = result.state;
        self.group.state = state;
        let (role, left) = (&self.group.spec.role, self.remaining_restarts());
        let numbers = [("remaining_restarts", i64::from(left)), (state.name(), 1)];
        let numbers =
            numbers.map(|(name, value)| Metric::new(format!("workers.{role}.{name}"), value));
        self.metrics.extend(numbers);
        match state {
            WorkerState::Succeeded => {
                self.outcome = Some(state);
                let by = now + self.group.spec.exit_barrier_timeout;
                self.barrier(now, by, result.return_values)
            }
            WorkerState::Unhealthy | WorkerState::Failed => self.failed(now, result.failures),
            WorkerState::Healthy => {
                let waiting = self.handler().num_nodes_waiting();
                if waiting == 0 {
                    return self.watch();
                }
                self.say(&format!(
                    "the group changes: {waiting} nodes; the workers are started anew"
                ));
                self.restarting = Some(now);
                self.stop(Next::Meet)
            }
            WorkerState::Unknown | WorkerState::Init | WorkerState::Stopped => {
                let lost = self.lost("no agent goes on from there; start it anew".to_owned());
                self.stop(Next::End(lost))
            }
        }
    }

    fn failed(&mut self, now: Instant, failures: ByRank<WorkerFailure>) -> Action {
        let max = self.group.spec.max_restarts;
        let state = self.group.state;
        self.outcome = Some(WorkerState::Failed);
        if self.handler().spend_restart(max) {
            let left = self.remaining_restarts();
            self.say(&format!(
                "the workers are {state}, and are started anew; restarts left: {left} of {max}"
            ));
            self.restarting = Some(now);
            self.stop(Next::Meet)
        } else {
            self.stop(Next::Fail(failures))
        }
    }

    fn lost(&self, why: String) -> AgentError {
        AgentError::Lost {
            role: self.group.spec.role.clone(),
            state: self.group.state,
            why,
        }
    }

    fn stop(&mut self, next: Next) -> Action {
        self.phase = Phase::Stopping(next);
        Action::Stop
    }

    fn stopped(&mut self, now: Instant, next: Next) -> Action {
        match next {
            Next::Meet => {
                self.group.state = WorkerState::Stopped;
                self.meet(now)
            }
            Next::Fail(failures) => {
                self.group.state = WorkerState::Failed;
                self.finish(Ok(RunResult {
                    failures,
                    ..ended_in(WorkerState::Failed)
                }))
            }
            Next::End(error) => {
                if self.group.state.is_running() {
                    self.group.state = WorkerState::Stopped;
                }
                self.finish(Err(error))
            }
        }
    }

    /// The workers here have succeeded: waits for the others.
    fn barrier(&mut self, now: Instant, by: Instant, return_values: ByRank<Vec<u8>>) -> Action {
        match self.handler().exit_barrier() {
            Poll::Pending if now < by => {
                let values = return_values;
                self.phase = Phase::Barrier { by, values };
                return Action::Wait { until: by };
            }
            Poll::Pending => self.say("others run on (exit_barrier_timeout)"),
            Poll::Ready(Ok(Barrier::Done)) => {}
            Poll::Ready(Ok(Barrier::Again)) => {
                self.group.state = WorkerState::Stopped;
                self.restarting = Some(now);
                return self.meet(now);
            }
            Poll::Ready(Err(error)) => self.say(&format!("the others are not waited for: {error}")),
        }
        self.finish(Ok(RunResult {
            return_values,
            ..ended_in(WorkerState::Succeeded)
        }))
    }

    fn end(&mut self, now: Instant, phase: Phase, why: String) -> Action {
        let ended = AgentError::Ended { why };
        match phase {
            Phase::Starting | Phase::Running | Phase::Stopping(_) => {
                if self.restarting.take().is_some() {
                    self.prof("_restart_workers", now, now, false);
                }
                self.stop(Next::End(ended))
            }
            _ => self.finish(Err(ended)),
        }
    }

    fn finish(&mut self, result: Result<RunResult, AgentError>) -> Action {
        self.phase = Phase::Over;
        let (max, left) = (self.group.spec.max_restarts, self.remaining_restarts());
        let role = &self.group.spec.role;
        let departure = match &result {
            Ok(result) if result.is_failed() => Departure::Failed {
                why: format!("[{role}] workers have failed, and max_restarts={max} are used up"),
            },
            Ok(result) if result.state == WorkerState::Succeeded => Departure::Succeeded,
            Ok(_) | Err(_) => Departure::Left,
        };
        // An agent may be ended when its workers have, and before it hears of the others'.
        let is_told = matches!(&result, Ok(_) | Err(AgentError::Ended { .. }));
        if let Some(state) = self.outcome.filter(|_| is_told) {
            let numbers = record_metrics(role, &ended_in(state), max, left);
            self.metrics.extend(numbers);
        }
        self.handler().shutdown(departure);
        Action::Finish(Box::new(result))
    }

    /// The action that the agent waits for, once more.
    fn again(&mut self, phase: Phase) -> Action {
        let within = self.group.spec.monitor_interval;
        let action = match &phase {
            Phase::New | Phase::Over => Action::Wait { until: self.since },
            Phase::Meeting { by } | Phase::Hearing { by } | Phase::Barrier { by, .. } => {
                Action::Wait { until: *by }
            }
            Phase::Naming { .. } => Action::FindAddress,
            Phase::Starting => Action::Start,
            Phase::Running => Action::Monitor { within },
            Phase::Stopping(_) => Action::Stop,
        };
        self.phase = phase;
        action
    }
}

fn ended_in(state: WorkerState) -> RunResult {
    RunResult {
        state,
        return_values: ByRank::new(),
        failures: ByRank::new(),
    }
}
