//! The driver's end of a job: the stream on which the head tells what becomes of it.

use std::time::Duration;

use kolo_transport::frame::{FrameError, InvalidFrame};
use kolo_transport::ids::JobId;
use kolo_transport::session::Stream;
use kolo_transport::wire::{JobEvent, JobState, RankFailure, SubmitFrame};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::changes::{Change, Changes};
use super::output::Printing;
use crate::call::Target;
use crate::cluster::Cluster;

/// What is known of a job.
#[derive(Debug, Clone)]
pub(crate) enum JobStatus {
    Running,
    /// The head is gone. The workers may live on.
    HeadLost {
        reason: String,
    },
    Ended(JobEnd),
}

/// How a job ended.
#[derive(Debug, Clone)]
pub(crate) struct JobEnd {
    pub(crate) state: JobState,
    pub(crate) reason: String,
    pub(crate) failure: Option<RankFailure>,
}

/// How long the last lines of output may take after the end.
const LAST_LINES: Duration = Duration::from_secs(2);

/// How long a job may take to end: notice, TERM and KILL, each with the grace time, and some more for the way.
pub(crate) fn stop_limit(grace: Duration) -> Duration {
    grace * 3 + Duration::from_secs(10)
}

/// The task that owns all others of a group.
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) target: Target,
    /// Keeps connections, and a local cluster, until the job has ended.
    pub(crate) cluster: Cluster,
    pub(crate) submit: Stream,
    pub(crate) status: watch::Sender<JobStatus>,
    /// Becomes true when the job is to stop. Its sender goes with the last executor.
    pub(crate) stop: watch::Receiver<bool>,
    pub(crate) grace: Duration,
    /// Channels and timer; they end with this.
    pub(crate) tasks: JoinSet<()>,
    /// Of an elastic group: what its generations need, and their channels.
    pub(super) changes: Option<Changes>,
    /// Output; it ends by itself when the workers have.
    pub(super) printing: Printing,
}

impl Job {
    pub(crate) async fn run(mut self) {
        let status = self.follow().await;
        match &status {
            JobStatus::Ended(end) => {
                tracing::debug!(job = %self.id, state = %end.state, reason = end.reason, "job ended");
                self.target.finish(&end.reason, end.failure.clone());
                let last_lines = self.printing.ended();
                if tokio::time::timeout(LAST_LINES, last_lines).await.is_err() {
                    tracing::warn!(job = %self.id, "the last output of some workers did not come in time");
                }
            }
            JobStatus::HeadLost { reason } => self.target.finish(reason, None),
            JobStatus::Running => {
                self.target
                    .finish("it was stopped, and did not end in time", None);
            }
        }
        self.status.send_replace(status);
        self.tasks.abort_all();
        drop(self.changes);
        // Only now may a local cluster end.
        drop(self.cluster);
    }

    /// Takes the head's events until the end, and the driver's wish to stop.
    async fn follow(&mut self) -> JobStatus {
        let mut stopping = false;
        let clock = self.cluster.runtime().clock().clone();
        let mut late = None;
        loop {
            tokio::select! {
                event = self.submit.recv.next::<JobEvent>() => match event {
                    Ok(Some(frame)) => {
                        if let Some(end) = self.event(frame.head, stopping) {
                            return JobStatus::Ended(end);
                        }
                    }
                    Ok(None) => return self.without_head("it ended the job's stream").await,
                    // An event of a later version.
                    Err(error @ FrameError::Invalid(InvalidFrame::Malformed { .. })) => {
                        tracing::warn!(job = %self.id, %error, "the head tells something that is not known here");
                    }
                    Err(error) => return self.without_head(&error.to_string()).await,
                },
                change = change(&mut self.changes, &mut self.printing) => self.changed(change).await,
                wish = wanted(&mut self.stop), if !stopping => {
                    stopping = true;
                    late = Some(clock.now() + stop_limit(self.grace));
                    if let Err(error) = self.ask_to_stop(wish).await {
                        // The stream's end stops the job as well; the other half says what happened.
                        tracing::debug!(job = %self.id, %error, "the stop was not sent");
                    }
                }
                () = clock.sleep_until(late.unwrap_or_else(|| clock.now())), if late.is_some() => return JobStatus::Running,
            }
        }
    }

    async fn changed(&mut self, change: Change) {
        let frame = match change {
            Change::Prepared => SubmitFrame::ProgramReady,
            Change::Unreachable(generation, why) => SubmitFrame::Unreachable { generation, why },
            Change::Holding(generation) => SubmitFrame::Holding { generation },
            Change::Done => return,
        };
        if let Err(error) = self.submit.send.send(&frame, &[]).await {
            tracing::debug!(job = %self.id, ?frame, %error, "the head was not told of a change");
        }
    }

    async fn ask_to_stop(&mut self, wish: Wish) -> Result<(), FrameError> {
        let send = &mut self.submit.send;
        // The head may not know yet of a worker that this driver saw go.
        if wish == Wish::Shutdown && self.target.is_whole() {
            send.send(&SubmitFrame::Done, &[]).await?;
        }
        // A head that knows `Done` ends the job already; for an older one this is the word.
        send.send(&SubmitFrame::Stop, &[]).await
    }

    fn event(&mut self, event: JobEvent, stopping: bool) -> Option<JobEnd> {
        match event {
            JobEvent::RankLost {
                generation,
                failure,
            } => {
                // The driver's own wish is no loss.
                if !stopping {
                    tracing::warn!(job = %self.id, %failure, "a worker was lost");
                }
                self.target.reported_lost(generation, failure);
                None
            }
            JobEvent::Ended {
                state,
                refusal,
                failure,
                ..
            } => {
                let reason = match (&refusal, &failure, state) {
                    (Some(refusal), _, _) => refusal.message.clone(),
                    (None, Some(failure), _) => failure.to_string(),
                    (None, None, JobState::Stopped | JobState::Succeeded) if stopping => {
                        "the group was shut down".to_owned()
                    }
                    (None, None, state) => format!("the group has ended: {state}"),
                };
                // A worker that died of the stop is not the cause of anything.
                let failure = failure.filter(|_| state == JobState::Failed);
                Some(JobEnd {
                    state,
                    reason,
                    failure,
                })
            }
            JobEvent::Placed { nodes, .. } if self.changes.is_some() => {
                self.changes.as_mut()?.placed(nodes);
                None
            }
            JobEvent::Generation { table, nodes, .. } if self.changes.is_some() => {
                self.changes.as_mut()?.generation(table, nodes);
                None
            }
            JobEvent::Hold { generation } if self.changes.is_some() => {
                self.changes.as_ref()?.hold(generation);
                None
            }
            event => {
                tracing::warn!(job = %self.id, ?event, "an event that this version does not know what to do with");
                None
            }
        }
    }

    /// The head is gone, the workers may not be: calls go on (D-2) until the driver has enough, or until a rank of an elastic group
    /// is lost: nobody makes another generation.
    async fn without_head(&mut self, reason: &str) -> JobStatus {
        let reason = format!("the head at {} is gone: {reason}", self.cluster.head());
        tracing::warn!(job = %self.id, reason, "calls go on without the head");
        self.status.send_replace(JobStatus::HeadLost {
            reason: reason.clone(),
        });
        tokio::select! {
            _ = wanted(&mut self.stop) => {}
            () = self.target.ends_without_head() => {
                tracing::warn!(job = %self.id, "a rank is lost, and without the head the group can't go on");
            }
        }
        JobStatus::HeadLost { reason }
    }
}

/// Waits for something of an elastic group. Cancel safe.
async fn change(changes: &mut Option<Changes>, printing: &mut Printing) -> Change {
    match changes {
        Some(changes) => changes.next(printing).await,
        None => std::future::pending().await,
    }
}

/// Why a job is to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    /// The program is through with it.
    Shutdown,
    /// The last executor is gone: by the way, or by an error or a panic.
    Dropped,
}

/// Waits until the job is to stop.
async fn wanted(stop: &mut watch::Receiver<bool>) -> Wish {
    match stop.wait_for(|stop| *stop).await {
        Ok(_) => Wish::Shutdown,
        Err(_) => Wish::Dropped,
    }
}
