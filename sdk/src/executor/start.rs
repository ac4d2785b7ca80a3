//! From options to a running group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use kolo_transport::frame::{FrameError, InvalidFrame, Limits};
use kolo_transport::ids::JobId;
use kolo_transport::session::{Connection, Stream};
use kolo_transport::wire::{
    HeadRequest, JobEvent, JobSpec, PlacedNode, RankFailure, Refusal, RefusalKind, SubmitFrame,
};
use tokio::task::JoinSet;

use super::Executor;
use super::changes::Changes;
use super::job::{Job, JobStatus};
use super::nodes::{self, Channels, Nodes, is_stale};
use super::output::{Output, Printing};
use crate::call::{Generations, InFlight, Target};
use crate::cluster::Cluster;
use crate::error::StartError;
use crate::options::Options;
use crate::program;

/// What the driver waits beyond the start timeout: the head keeps to the timeout too, and knows better what went wrong.
const HEAD_HAS_THE_WORD: Duration = Duration::from_secs(3);

pub(crate) async fn start(
    cluster: Cluster,
    mut options: Options,
    output: Output,
) -> Result<Executor, StartError> {
    let began = Instant::now();
    crate::entry::may_start()?;
    let own = match tokio::task::spawn_blocking(program::own).await {
        Ok(own) => own?,
        Err(error) => {
            return Err(StartError::Program {
                path: "/proc/self/exe".into(),
                reason: error.to_string(),
            });
        }
    };
    // Workers on other hosts show the same events as those on this one.
    if let Ok(level) = std::env::var("RUST_LOG") {
        options.env.entry("RUST_LOG".to_owned()).or_insert(level);
    }
    let spec = options.spec(own.program.clone())?;
    #[cfg(feature = "local")]
    for name in spec.env.keys() {
        if kolo_runtime::local::tells_workers_apart(name) {
            tracing::warn!(
                variable = name,
                "all workers have the value that was given in place of what kolo sets; they may not find each other"
            );
        }
    }
    let is_elastic = spec.elastic.is_some();
    let mut start = Start {
        nodes: Nodes {
            cluster,
            program: own.program.clone(),
            progress: Arc::default(),
        },
        phase: "connecting to the head",
        is_elastic,
    };
    let limit = options.start_timeout + HEAD_HAS_THE_WORD;
    let runtime = start.nodes.cluster.runtime().clone();
    let Some(ready) = runtime.timeout(limit, start.run(spec)).await else {
        let (after, phase) = (options.start_timeout, start.phase);
        return Err(StartError::TimedOut { after, phase });
    };
    #[cfg(feature = "local")]
    let ready = match start.nodes.cluster.local_members() {
        Some(_) => ready.map_err(with_remedy),
        None => ready,
    };
    let ready = ready?;
    tracing::debug!(
        job = %ready.job,
        workers = ready.channels.table.members.len(),
        nodes = ready.channels.nodes.len(),
        seconds = began.elapsed().as_secs_f64(),
        "group started"
    );
    Ok(run(start.nodes, ready, &options, output))
}

/// All that a group has when it is ready.
struct Ready {
    job: JobId,
    submit: Stream,
    placed: Vec<PlacedNode>,
    channels: Channels,
    is_elastic: bool,
}

struct Start {
    nodes: Nodes,
    phase: &'static str,
    is_elastic: bool,
}

impl Start {
    async fn run(&mut self, spec: JobSpec) -> Result<Ready, StartError> {
        let connection = self.nodes.cluster.head_connection().await?;
        self.phase = "waiting for a place on the nodes";
        let mut submit = match connection.open(Limits::CONTROL).await {
            Ok(stream) => stream,
            Err(lost) => return Err(self.head_lost(&lost.into())),
        };
        if let Err(error) = submit.send.send(&HeadRequest::Submit(spec), &[]).await {
            // A head that refuses may say why before it has read everything.
            return Err(match self.next(&mut submit).await {
                Ok(JobEvent::Ended {
                    refusal, failure, ..
                }) => refused(refusal, failure),
                _ => self.head_lost(&error),
            });
        }
        let mut job = None;
        // Held until the channels are open.
        let mut connections = Vec::new();
        let mut early = None;
        loop {
            let event = match early.take() {
                Some(event) => event,
                None => self.next(&mut submit).await?,
            };
            match event {
                JobEvent::Placed { job: id, nodes } => {
                    let more;
                    (more, early) = self.prepare(&mut submit, id, &nodes).await?;
                    connections.extend(more);
                    job = Some(id);
                    self.phase = "waiting for the workers to be ready";
                }
                JobEvent::Healthy { table, nodes } | JobEvent::Generation { table, nodes, .. } => {
                    let Some(job) = job else {
                        return Err(self.unexpected(&"a generation before it was placed"));
                    };
                    self.phase = "opening channels to the nodes";
                    let channels = match self.nodes.attach_all(table, &nodes).await {
                        Ok(channels) => channels,
                        // The next generation has come meanwhile, or is about to.
                        Err(error) if self.is_elastic && is_stale(&error) => continue,
                        Err(error) => return Err(error),
                    };
                    return Ok(Ready {
                        job,
                        submit,
                        placed: nodes,
                        channels,
                        is_elastic: self.is_elastic,
                    });
                }
                JobEvent::Ended {
                    refusal, failure, ..
                } => return Err(refused(refusal, failure)),
                // Of a generation that is over, or of a job of another kind.
                JobEvent::Hold { .. } | JobEvent::Fell { .. } | JobEvent::Waits { .. } => {}
                // The end follows, and says what it means.
                JobEvent::RankLost { failure, .. } => {
                    tracing::debug!(%failure, "lost while starting");
                }
            }
        }
    }

    async fn next(&self, submit: &mut Stream) -> Result<JobEvent, StartError> {
        match submit.recv.next::<JobEvent>().await {
            Ok(Some(frame)) => Ok(frame.head),
            Ok(None) => Err(StartError::HeadLost {
                head: self.nodes.cluster.head(),
                reason: "it ended the stream".to_owned(),
            }),
            Err(error @ FrameError::Invalid(InvalidFrame::Malformed { .. })) => {
                Err(self.unexpected(&error))
            }
            Err(error) => Err(self.head_lost(&error)),
        }
    }

    /// Connects to all nodes and gives the program to those that lack it. Also gives what the head said meanwhile: where
    /// no node lacks it, the head does not wait.
    async fn prepare(
        &mut self,
        submit: &mut Stream,
        job: JobId,
        nodes: &[PlacedNode],
    ) -> Result<(Vec<Connection>, Option<JobEvent>), StartError> {
        self.phase = "sending the program to the nodes";
        tracing::debug!(%job, nodes = nodes.len(), "placed");
        let this = &*self;
        let prepare = nodes.iter().map(|node| this.nodes.prepare(node));
        let mut work = std::pin::pin!(try_join_all(prepare));
        let (connections, early) = tokio::select! {
            done = work.as_mut() => (done?, None),
            event = this.next(submit) => match event? {
                // There is no group any more to prepare for.
                JobEvent::Ended { refusal, failure, .. } => return Err(refused(refusal, failure)),
                event => (work.await?, Some(event)),
            },
        };
        match submit.send.send(&SubmitFrame::ProgramReady, &[]).await {
            Ok(()) => Ok((connections, early)),
            Err(error) => Err(self.head_lost(&error)),
        }
    }

    fn head_lost(&self, error: &FrameError) -> StartError {
        StartError::HeadLost {
            head: self.nodes.cluster.head(),
            reason: error.to_string(),
        }
    }

    fn unexpected(&self, reply: &dyn std::fmt::Display) -> StartError {
        let from = format!("the head at {}", self.nodes.cluster.head());
        StartError::Unexpected {
            from,
            reply: reply.to_string(),
        }
    }
}

fn refused(refusal: Option<Refusal>, failure: Option<RankFailure>) -> StartError {
    let refusal = refusal.unwrap_or_else(|| {
        let kind = if failure.is_some() {
            RefusalKind::Worker
        } else {
            RefusalKind::Stopped
        };
        let message = match kind {
            RefusalKind::Worker => "a worker was lost while it was starting",
            _ => "the job was stopped while it was starting",
        };
        Refusal::new(kind, message)
    });
    StartError::Refused {
        refusal,
        failure: failure.map(Box::new),
    }
}

/// What to do about too little room in a cluster of this process, which nobody else can give any.
#[cfg(feature = "local")]
fn with_remedy(error: StartError) -> StartError {
    match error {
        StartError::Refused {
            mut refusal,
            failure,
        } if refusal.kind == RefusalKind::Unplaceable => {
            refusal.message.push_str(
                "; this cluster is in the program itself: give it more by LocalCluster::builder(), as .slots(N), or use a cluster \
                 of machines by KOLO_HEAD",
            );
            StartError::Refused { refusal, failure }
        }
        other => other,
    }
}

/// Starts the tasks of a group that is ready.
fn run(nodes: Nodes, ready: Ready, options: &Options, output: Output) -> Executor {
    let Ready {
        job,
        submit,
        placed,
        channels,
        is_elastic,
    } = ready;
    let cluster = nodes.cluster.clone();
    let in_flight = InFlight::new(options.max_in_flight);
    let mut printing = Printing::new(job, output);
    printing.follow(&channels, &placed);
    let runtime = cluster.runtime();
    let (target, changes, tasks);
    if is_elastic {
        let mut replies = Vec::new();
        let generations = Generations::new(options.elastic.waits, |all| {
            let group;
            (group, replies) = channels.into_group(in_flight.clone(), Some(all.clone()));
            group
        });
        let first = nodes::serve(runtime, &generations.now(), replies, printing.say());
        tasks = JoinSet::new();
        target = Target::Elastic(Arc::clone(&generations));
        changes = Some(Changes::new(nodes, generations, in_flight, first));
    } else {
        let (group, replies) = channels.into_group(in_flight, None);
        let group = Arc::new(group);
        tasks = nodes::serve(runtime, &group, replies, printing.say());
        (target, changes) = (Target::Fixed(group), None);
    }
    let (status, watch) = tokio::sync::watch::channel(JobStatus::Running);
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let job_task = Job {
        id: job,
        target: target.clone(),
        cluster: cluster.clone(),
        submit,
        status,
        stop: stopped,
        grace: options.grace,
        tasks,
        changes,
        printing,
    };
    tokio::spawn(job_task.run());
    Executor::new(cluster, job, target, watch, stop, options.grace)
}
