//! Calls between drivers and workers. Runs on the transport runtime and not through mailboxes: a call
//! costs two wake-ups here, one each way, and those that come together share them.
//!
//! ```text
//! driver --- channel (one QUIC stream) ---> Job ---> Link (call socket) ---> worker
//!        <-- Channel (results, losses) <----------- Incoming <-------------
//! ```
//!
//! A channel belongs to one generation, and to the processes of that one for ever: a call on it never reaches a later process of
//! the same slot. Calls of one channel reach each rank in the order in which they came (C-2), and at most once (C-1):
//! nothing is ever sent again. A worker that does not read holds up the channels that call it once its
//! queue is full; a driver that does not read holds up the workers that answer it.

mod channel;
mod job;
mod link;
mod queue;
mod router;

use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dashmap::DashMap;
use kolo_actors::node::{CallPlane, CallsEnd, ControlSender};
use kolo_core::membership::Process;
use kolo_core::node::messages::{Loss as LostWorker, WorkerId};
use kolo_core::node::orphans::Present as PresentJob;
use kolo_transport::ids::{DriverId, Generation, JobId};
use kolo_transport::wire::{GenerationTable, NodeReply, Refusal, RefusalKind, StartWorkers};
use kolo_transport::{CloseCode, Connection, FrameError, Stream};
use tokio::runtime::Handle;
use tokio::sync::watch;

use self::channel::Channel;
use self::job::{Job, Loss};
use self::link::Link;
use self::router::Router;

/// All jobs whose workers can be called here.
#[derive(Debug)]
pub(crate) struct Calls {
    runtime: Handle,
    jobs: DashMap<JobId, Arc<Job>>,
    /// Counts the changes of [`Calls::present_jobs`].
    changes: watch::Sender<u64>,
}

/// What an admitted [`NodeRequest::Attach`](kolo_transport::wire::NodeRequest::Attach) says, and who said it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attach {
    pub(crate) driver: DriverId,
    pub(crate) job: JobId,
    pub(crate) generation: Generation,
}

/// As long as it lives, the driver of a job counts as being there.
#[derive(Debug)]
pub(crate) struct Present<'a> {
    calls: &'a Calls,
    job: Arc<Job>,
}

impl Drop for Present<'_> {
    fn drop(&mut self) {
        self.job.present.fetch_sub(1, Ordering::AcqRel);
        self.calls.changed();
    }
}

impl Calls {
    /// Calls that are carried on `runtime`.
    pub(crate) fn new(runtime: Handle) -> Arc<Self> {
        Arc::new(Self {
            runtime,
            jobs: DashMap::new(),
            changes: watch::Sender::new(0),
        })
    }

    fn changed(&self) {
        self.changes
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Changes whenever [`Calls::present_jobs`] does.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The jobs with workers here.
    pub(crate) fn present_jobs(&self) -> Vec<PresentJob> {
        let jobs = self.jobs.iter();
        jobs.map(|entry| PresentJob {
            job: *entry.key(),
            driver: entry.present.load(Ordering::Acquire) > 0,
            elastic: entry.elastic,
        })
        .collect()
    }

    /// The driver of the job is there; `None` if it is another one's job, or not here.
    pub(crate) fn present(&self, job: JobId, driver: DriverId) -> Option<Present<'_>> {
        let job = self.job(job).filter(|job| job.owner == driver)?;
        job.present.fetch_add(1, Ordering::AcqRel);
        self.changed();
        Some(Present { calls: self, job })
    }

    fn job(&self, job: JobId) -> Option<Arc<Job>> {
        self.jobs.get(&job).map(|entry| entry.value().clone())
    }

    /// Turns a stream of `connection` into a channel of calls, and serves it until it ends. A refusal is sent on the
    /// stream.
    pub(crate) async fn attach(
        &self,
        mut stream: Stream,
        connection: &Connection,
        attach: Attach,
    ) -> Result<(), FrameError> {
        let Attach {
            driver,
            job,
            generation,
        } = attach;
        let admitted = self
            .job(job)
            .ok_or_else(|| {
                Refusal::new(
                    RefusalKind::NotFound,
                    format!("{job} has no workers on this node"),
                )
            })
            .and_then(|job| job.admit(driver, generation).map(|routes| (job, routes)));
        let (job, routes) = match admitted {
            Ok(admitted) => admitted,
            Err(refusal) => {
                stream.send.send(&NodeReply::Refused(refusal), &[]).await?;
                stream.send.finish();
                return Ok(());
            }
        };
        let present = self.present(job.id, driver);
        let ranks = routes.iter().map(|(rank, _)| *rank).collect();
        stream
            .send
            .send(&NodeReply::Attached { ranks }, &[])
            .await?;
        let channel = Channel::new(stream.send);
        if job.add(&channel, &routes) {
            channel.flush();
            let mut router = Router::new(&job, &channel, connection, generation, &routes);
            router.run(&mut stream.recv).await;
            job.remove(&channel);
        }
        drop(present);
        stream.recv.stop(CloseCode::Done);
        channel.finish().await;
        Ok(())
    }

    /// Takes over the call socket of a process.
    fn link(
        &self,
        job: JobId,
        process: Process,
        socket: StdUnixStream,
        control: ControlSender,
    ) -> std::io::Result<CallsEnd> {
        let job = self
            .job(job)
            .ok_or_else(|| std::io::Error::other(format!("{job} takes no calls here")))?;
        let (link, incoming) = {
            let _entered = self.runtime.enter();
            Link::new(process, socket, control)?
        };
        job.put(link.clone());
        self.runtime.spawn(link.clone().serve());
        let task = self.runtime.spawn(async move {
            let result = incoming.run().await;
            link.close();
            result
        });
        Ok(Box::pin(async move {
            task.await
                .unwrap_or_else(|error| Err(format!("its results could not be read: {error}")))
        }))
    }
}

impl CallPlane for Calls {
    fn open(&self, start: &StartWorkers) {
        // More workers of an elastic job join those that are here.
        if !start.is_elastic() || !self.jobs.contains_key(&start.job) {
            self.jobs.insert(start.job, Arc::new(Job::new(start)));
            self.changed();
        }
    }

    fn connect(
        &self,
        worker: WorkerId,
        socket: StdUnixStream,
        control: ControlSender,
    ) -> std::io::Result<CallsEnd> {
        let process = Process {
            slot: worker.slot,
            incarnation: worker.incarnation,
        };
        self.link(worker.stay.job, process, socket, control)
    }

    fn complete(&self, table: &GenerationTable) {
        if let Some(job) = self.job(table.job) {
            job.complete(table);
        }
    }

    fn lost(&self, lost: &LostWorker) {
        let LostWorker {
            job,
            slot,
            incarnation,
            failure,
            stopping,
        } = lost;
        let process = Process {
            slot: *slot,
            incarnation: *incarnation,
        };
        kolo_actors::news!(%job, %process, stopping, %failure, "a worker is gone");
        let Some(job) = self.job(*job) else { return };
        let loss = Loss {
            failure: failure.clone(),
            stopping: *stopping,
        };
        for channel in job.lose(process, loss) {
            let _entered = self.runtime.enter();
            channel.flush();
        }
    }

    fn close(&self, job: JobId) {
        let Some((_, job)) = self.jobs.remove(&job) else {
            return;
        };
        self.changed();
        for channel in job.close() {
            self.runtime.spawn(async move { channel.finish().await });
        }
    }
}

#[cfg(test)]
mod tests;
