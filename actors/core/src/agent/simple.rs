//! An agent over workers of any kind.

use std::collections::BTreeMap;
use std::fmt;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::group::WorkerGroup;
use super::machine::{Action, AgentCore, Event};
use super::metrics::{METRICS_GROUP, MetricHandler, prof};
use super::outcome::{AgentError, MonitorResult, RunResult};
use super::rendezvous::RendezvousHandler;
use super::spec::{SpecError, WorkerSpec};
use super::state::WorkerState;

/// Runs workers, and starts them anew when they fail or when their group changes.
///
/// ```
/// use kolo_core::agent::{AgentError, ElasticAgent};
///
/// fn first_value(mut agent: impl ElasticAgent) -> Result<Option<Vec<u8>>, AgentError> {
///     let result = agent.run("default")?;
///     match result.into_values() {
///         Ok(mut values) => Ok(values.remove(&0)),
///         Err(failure) => {
///             println!("{:?}", failure.worker_errors().get(&0));
///             Ok(None)
///         }
///     }
/// }
/// ```
pub trait ElasticAgent {
    /// The place where the agent meets others.
    type Handler: RendezvousHandler;

    /// Runs the workers of a role to their end. Blocks.
    ///
    /// # Errors
    ///
    /// [`AgentError`] for all that is not a failure of workers. Those are in the result.
    fn run(&mut self, role: &str) -> Result<RunResult, AgentError>;

    /// The workers of a role, as they are now.
    ///
    /// # Errors
    ///
    /// [`AgentError::Role`] if the agent runs none of that role.
    fn get_worker_group(&self, role: &str) -> Result<&WorkerGroup<Self::Handler>, AgentError>;
}

/// Workers of one kind: how they are started, stopped and watched. The points to implement for [`SimpleElasticAgent`].
pub trait Workers<H> {
    /// The name of the kind, for metrics: `LocalElasticAgent`.
    const CLASS: &'static str;

    /// The time.
    fn now(&self) -> Instant;

    /// A waker that ends [`Workers::monitor`] and [`Workers::wait`], also the next one if none waits now.
    fn waker(&self) -> Waker;

    /// An address and a free port for the store of rank 0, by which the workers of all agents reach this host.
    ///
    /// # Errors
    ///
    /// The reason in words if there is none.
    fn master_address(&mut self, spec: &WorkerSpec<H>) -> Result<(String, u16), String>;

    /// Starts the workers, each with [`WorkerGroup::environment`]. The name of each process by local rank.
    ///
    /// # Errors
    ///
    /// The reason in words if not all could be started. [`Workers::stop`] comes next then.
    fn start(&mut self, group: &WorkerGroup<H>) -> Result<BTreeMap<u32, String>, String>;

    /// Ends the workers, in whatever state they are: never started, ended, well, stuck. Returns when nothing of them is left.
    ///
    /// # Errors
    ///
    /// The reason in words if something may be left.
    fn stop(&mut self, group: &WorkerGroup<H>) -> Result<(), String>;

    /// Waits until a worker has failed or all have ended, and says how they are. Returns sooner if woken, and after `within`.
    fn monitor(&mut self, group: &WorkerGroup<H>, within: Duration) -> MonitorResult;

    /// Waits until woken, or until that time.
    fn wait(&mut self, until: Instant);

    /// Why the agent is to end, once it is. Whoever says so wakes the agent.
    fn ended(&self) -> Option<String>;
}

/// An agent for the workers of one role.
///
/// All decisions are [`AgentCore`]'s. Workers of any kind will do:
///
/// ```
/// use std::collections::BTreeMap;
/// use std::task::Waker;
/// use std::time::{Duration, Instant};
///
/// use kolo_core::agent::{
///     AgentError, ElasticAgent, LocalRendezvous, MonitorResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState,
///     Workers,
/// };
///
/// struct Nothing;
///
/// impl<H> Workers<H> for Nothing {
///     const CLASS: &'static str = "Nothing";
///
///     fn now(&self) -> Instant {
///         Instant::now()
///     }
///
///     fn waker(&self) -> Waker {
///         Waker::noop().clone()
///     }
///
///     fn master_address(&mut self, _: &WorkerSpec<H>) -> Result<(String, u16), String> {
///         Ok(("localhost".to_owned(), 29_500))
///     }
///
///     fn start(&mut self, group: &WorkerGroup<H>) -> Result<BTreeMap<u32, String>, String> {
///         println!("{:?}", group.environment(0));
///         Ok(BTreeMap::new())
///     }
///
///     fn stop(&mut self, _: &WorkerGroup<H>) -> Result<(), String> {
///         Ok(())
///     }
///
///     fn monitor(&mut self, _: &WorkerGroup<H>, _: Duration) -> MonitorResult {
///         MonitorResult::of(WorkerState::Succeeded)
///     }
///
///     fn wait(&mut self, _: Instant) {}
///
///     fn ended(&self) -> Option<String> {
///         None
///     }
/// }
///
/// let group = LocalRendezvous::new(1..=1).expect("bounds in order");
/// let spec = WorkerSpec::new("train", 2, group.handler());
/// let mut agent = SimpleElasticAgent::new(spec, Nothing, ()).expect("a spec that makes sense");
/// assert_eq!(agent.run("default")?.state, WorkerState::Succeeded);
/// assert_eq!(agent.get_worker_group("default")?.workers.len(), 2);
/// # Ok::<(), AgentError>(())
/// ```
pub struct SimpleElasticAgent<H, W, M = ()> {
    core: AgentCore<H>,
    workers: W,
    metrics: M,
}

impl<H: fmt::Debug, W, M> fmt::Debug for SimpleElasticAgent<H, W, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimpleElasticAgent")
            .field(&self.core)
            .finish()
    }
}

impl<H: RendezvousHandler, W: Workers<H>, M: MetricHandler> SimpleElasticAgent<H, W, M> {
    /// An agent that has done nothing.
    ///
    /// # Errors
    ///
    /// [`SpecError`] if the blueprint makes no sense.
    pub fn new(mut spec: WorkerSpec<H>, workers: W, metrics: M) -> Result<Self, SpecError> {
        spec.rendezvous.wake_with(workers.waker());
        Ok(Self {
            core: AgentCore::new(workers.now(), spec)?,
            workers,
            metrics,
        })
    }

    /// Restarts that the job has left.
    #[must_use]
    pub fn remaining_restarts(&self) -> u32 {
        self.core.remaining_restarts()
    }

    /// The metrics' handler.
    #[must_use]
    pub fn metrics(&self) -> &M {
        &self.metrics
    }

    /// The workers.
    #[must_use]
    pub fn workers(&self) -> &W {
        &self.workers
    }

    fn check(&self, role: &str) -> Result<(), AgentError> {
        let has = &self.core.group().spec.role;
        if has == role {
            return Ok(());
        }
        let (given, has) = (role.to_owned(), has.clone());
        Err(AgentError::Role { given, has })
    }

    /// Does something with the workers, and tells how long that took.
    fn profiled<T>(
        &mut self,
        step: &str,
        act: impl FnOnce(&mut W, &WorkerGroup<H>) -> T,
        is_success: impl FnOnce(&T) -> bool,
    ) -> T {
        let since = self.workers.now();
        let done = act(&mut self.workers, self.core.group());
        let took = self.workers.now().saturating_duration_since(since);
        let name = format!("{}.{step}", W::CLASS);
        for metric in prof(&name, took, is_success(&done)) {
            self.metrics.put_metric(METRICS_GROUP, &metric);
        }
        done
    }

    fn report(&mut self) {
        for metric in self.core.take_metrics() {
            self.metrics.put_metric(METRICS_GROUP, &metric);
        }
        for line in self.core.take_log() {
            self.metrics.log(&line);
        }
    }

    /// Does what the agent wants, until it has ended.
    fn act(&mut self, action: Action) -> Result<Event, Result<RunResult, AgentError>> {
        let event = match action {
            Action::Finish(result) => return Err(*result),
            Action::FindAddress => {
                let spec = &self.core.group().spec;
                Event::Address(self.workers.master_address(spec))
            }
            Action::Start => {
                Event::Started(self.profiled("_start_workers", W::start, Result::is_ok))
            }
            Action::Stop => {
                return Ok(Event::Stopped(self.profiled(
                    "_stop_workers",
                    W::stop,
                    Result::is_ok,
                )));
            }
            Action::Monitor { within } => Event::Monitored(self.profiled(
                "_monitor_workers",
                |workers, group| workers.monitor(group, within),
                |result| result.state != WorkerState::Unknown,
            )),
            Action::Wait { until } => {
                self.workers.wait(until);
                Event::Woken
            }
        };
        // A stop that has begun comes first; all else gives way to the end.
        Ok(self.workers.ended().map_or(event, Event::End))
    }
}

impl<H: RendezvousHandler, W: Workers<H>, M: MetricHandler> ElasticAgent
    for SimpleElasticAgent<H, W, M>
{
    type Handler = H;

    fn run(&mut self, role: &str) -> Result<RunResult, AgentError> {
        self.check(role)?;
        let mut event = Event::Begin;
        loop {
            let action = self.core.step(self.workers.now(), event);
            self.report();
            event = match self.act(action) {
                Ok(event) => event,
                Err(result) => return result,
            };
        }
    }

    fn get_worker_group(&self, role: &str) -> Result<&WorkerGroup<H>, AgentError> {
        self.check(role)?;
        Ok(self.core.group())
    }
}
