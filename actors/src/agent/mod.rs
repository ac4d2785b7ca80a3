//! torchelastic's local agent: an agent whose workers are processes on this host.
//!
//! All decisions are [`kolo_core::agent`]'s. [`LocalWorkers`] starts the processes below a warden, so that none is left
//! whatever becomes of the agent.

mod local;
mod tracing_metrics;

pub use local::{Ender, LocalOptions, LocalWorkers};
pub use tracing_metrics::TracingMetrics;

use kolo_core::agent::SimpleElasticAgent;

/// An agent whose workers are processes on this host.
///
/// ```no_run
/// use kolo_actors::agent::{LocalElasticAgent, LocalOptions, LocalWorkers, TracingMetrics};
/// use kolo_core::agent::{ElasticAgent, LocalRendezvous, WorkerSpec};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // A program that may host a warden begins with this.
/// kolo_process::run_if_warden();
/// let group = LocalRendezvous::new(1..=1)?;
/// let mut spec = WorkerSpec::new("/usr/bin/python3", 2, group.handler());
/// spec.arguments = vec!["train.py".to_owned()];
/// spec.max_restarts = 3;
/// let workers = LocalWorkers::start(LocalOptions::default())?;
/// let mut agent = LocalElasticAgent::new(spec, workers, TracingMetrics)?;
/// agent.run("default")?.into_values()?;
/// # Ok(())
/// # }
/// ```
pub type LocalElasticAgent<H, M = TracingMetrics> = SimpleElasticAgent<H, LocalWorkers, M>;
