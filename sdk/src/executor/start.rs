//! From options to a running group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use kolo_transport::frame::{FrameError, InvalidFrame, Limits};
use kolo_transport::ids::{JobId, Rank};
use kolo_transport::session::{Connection, ConnectionLost, Stream};
use kolo_transport::wire::{
    GenerationTable, HeadRequest, JobEvent, JobSpec, NodeReply, NodeRequest, PlacedNode, Program,
    RankFailure, Refusal, RefusalKind, SubmitFrame,
};

use super::job::{Job, JobStatus};
use super::options::Options;
use super::output::{self, Output};
use super::{Executor, program, upload};
use crate::call::{Group, GroupNode};
use crate::cluster::{Cluster, NodeConnectError};
use crate::error::StartError;

/// What the driver waits beyond the start timeout: the head keeps to the timeout too, and knows better what went wrong.
const HEAD_HAS_THE_WORD: Duration = Duration::from_secs(3);

pub(crate) async fn start(
    cluster: Cluster,
    options: Options,
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
    let mut start = Start {
        cluster,
        phase: "connecting to the head",
        program: own.program.clone(),
    };
    let limit = options.start_timeout + HEAD_HAS_THE_WORD;
    let runtime = start.cluster.runtime().clone();
    let Some(ready) = runtime.timeout(limit, start.run(spec)).await else {
        let (after, phase) = (options.start_timeout, start.phase);
        return Err(StartError::TimedOut { after, phase });
    };
    let ready = ready?;
    tracing::info!(
        job = %ready.job,
        workers = ready.table.members.len(),
        nodes = ready.channels.len(),
        seconds = began.elapsed().as_secs_f64(),
        "group started"
    );
    Ok(run(start.cluster, ready, &options, output))
}

/// All that a group has when it is ready.
struct Ready {
    job: JobId,
    table: GenerationTable,
    submit: Stream,
    channels: Vec<(PlacedNode, Connection, Stream)>,
}

struct Start {
    cluster: Cluster,
    phase: &'static str,
    program: Program,
}

impl Start {
    async fn run(&mut self, spec: JobSpec) -> Result<Ready, StartError> {
        let connection = self.cluster.head_connection().await?;
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
        let mut placed = None;
        let mut early = None;
        loop {
            let event = match early.take() {
                Some(event) => event,
                None => self.next(&mut submit).await?,
            };
            match event {
                JobEvent::Placed { job, nodes } => {
                    let connections;
                    (connections, early) = self.prepare(&mut submit, job, &nodes).await?;
                    placed = Some((job, connections));
                    self.phase = "waiting for the workers to be ready";
                }
                JobEvent::Healthy { table, nodes } => {
                    let Some((job, _connections)) = placed.take() else {
                        return Err(self.unexpected(&"healthy before it was placed"));
                    };
                    self.phase = "opening channels to the nodes";
                    let attach = nodes.into_iter().map(|node| self.attach(node, &table));
                    let channels = try_join_all(attach).await?;
                    return Ok(Ready {
                        job,
                        table,
                        submit,
                        channels,
                    });
                }
                // Its job never changes its members.
                event @ JobEvent::Generation { .. } => {
                    return Err(self.unexpected(&format!("{event:?}")));
                }
                JobEvent::Ended {
                    refusal, failure, ..
                } => return Err(refused(refusal, failure)),
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
                head: self.cluster.head(),
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
        let mut work = std::pin::pin!(try_join_all(nodes.iter().map(|node| async move {
            let connection = this.connect(node).await?;
            if !node.has_program {
                upload::upload(&connection, node, &this.program).await?;
            }
            Ok::<_, StartError>(connection)
        })));
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

    async fn connect(&self, node: &PlacedNode) -> Result<Connection, StartError> {
        match self.cluster.node_connection(node.node, node.address).await {
            Ok(connection) => Ok(connection),
            Err(NodeConnectError::Endpoint(error)) => Err(error.into()),
            Err(NodeConnectError::Node(error)) => Err(unreachable(node, &error)),
        }
    }

    /// Opens the channel for calls to a node.
    async fn attach(
        &self,
        node: PlacedNode,
        table: &GenerationTable,
    ) -> Result<(PlacedNode, Connection, Stream), StartError> {
        let connection = self.connect(&node).await?;
        let lost = |error: FrameError| unreachable(&node, &error);
        let mut stream = connection
            .open(Limits::CALLS)
            .await
            .map_err(|error: ConnectionLost| lost(error.into()))?;
        let request = NodeRequest::Attach {
            job: table.job,
            generation: table.generation,
        };
        stream.send.send(&request, &[]).await.map_err(lost)?;
        let expected: Vec<Rank> = table
            .members
            .iter()
            .filter(|member| member.node == node.node)
            .map(|member| member.rank)
            .collect();
        match stream.recv.expect::<NodeReply>().await.map_err(lost)?.head {
            NodeReply::Attached { mut ranks } => {
                ranks.sort_unstable();
                if ranks != expected {
                    let reply = format!("attached to ranks {ranks:?} in place of {expected:?}");
                    return Err(StartError::Unexpected {
                        from: node.hostname,
                        reply,
                    });
                }
                let node = PlacedNode { ranks, ..node };
                Ok((node, connection, stream))
            }
            NodeReply::Refused(refusal) => Err(StartError::NodeRefused {
                hostname: node.hostname,
                what: "calls",
                refusal,
            }),
            other => Err(StartError::Unexpected {
                from: node.hostname,
                reply: format!("{other:?}"),
            }),
        }
    }

    fn head_lost(&self, error: &FrameError) -> StartError {
        StartError::HeadLost {
            head: self.cluster.head(),
            reason: error.to_string(),
        }
    }

    fn unexpected(&self, reply: &dyn std::fmt::Display) -> StartError {
        let from = format!("the head at {}", self.cluster.head());
        StartError::Unexpected {
            from,
            reply: reply.to_string(),
        }
    }
}

fn unreachable(node: &PlacedNode, error: &dyn std::fmt::Display) -> StartError {
    StartError::NodeUnreachable {
        hostname: node.hostname.clone(),
        address: node.address,
        reason: error.to_string(),
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

/// Starts the tasks of a group that is ready.
fn run(cluster: Cluster, ready: Ready, options: &Options, output: Output) -> Executor {
    let Ready {
        job,
        table,
        submit,
        channels,
    } = ready;
    let (mut nodes, mut sinks, mut replies, mut logs) = (vec![], vec![], vec![], vec![]);
    for (node, connection, stream) in channels {
        nodes.push(GroupNode {
            node: node.node,
            hostname: node.hostname,
            ranks: node.ranks,
        });
        sinks.push(stream.send);
        replies.push(stream.recv);
        if !matches!(output, Output::Silent) {
            logs.push(output::follow(connection, job, output.clone()));
        }
    }
    let group = Arc::new(Group::new(
        table.generation,
        nodes,
        sinks,
        options.max_in_flight,
    ));
    let mut tasks = tokio::task::JoinSet::new();
    let runtime = cluster.runtime();
    for (index, replies) in replies.into_iter().enumerate() {
        tasks.spawn(runtime.drive(Arc::clone(&group).read(index, replies)));
        tasks.spawn(Arc::clone(&group).flush(index));
    }
    tasks.spawn(Arc::clone(&group).keep_time());
    let mut printing = tokio::task::JoinSet::new();
    for follow in logs {
        printing.spawn(follow);
    }
    let (status, watch) = tokio::sync::watch::channel(JobStatus::Running);
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let job_task = Job {
        id: job,
        group: Arc::clone(&group),
        cluster: cluster.clone(),
        submit,
        status,
        stop: stopped,
        grace: options.grace,
        tasks,
        printing,
    };
    tokio::spawn(job_task.run());
    Executor::new(cluster, job, table, group, watch, stop, options.grace)
}
