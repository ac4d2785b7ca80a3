//! The stream of a job: events to its driver, frames from it.

use std::sync::Arc;
use std::time::Duration;

use kolo_actors::head::messages::{Happened, Way, stopping};
use kolo_core::head::messages::Input;
use kolo_core::head::registry::Session;
use kolo_core::ranks::MAX_WORLD_SIZE;
use kolo_transport::frame::InvalidFrame;
use kolo_transport::ids::JobId;
use kolo_transport::wire::{
    Followers, HeadReply, JobEvent, JobSpec, JobState, Refusal, RefusalKind,
};
use kolo_transport::{
    CloseCode, Flood, FrameError, FrameReceiver, FrameSender, RandomId as _, Stream,
    TransportRuntime,
};
use tokio::sync::mpsc;

use super::shared::{REPLY_TIMEOUT, Shared};

/// How long a driver may take to read an event.
const EVENT_TIMEOUT: Duration = Duration::from_secs(30);

/// Events that may wait for the driver of a job, beside those of its workers.
const EVENTS: usize = 64;

/// Submits a job, and serves its driver until the job has ended.
pub(super) async fn serve(shared: &Arc<Shared>, session: Session, spec: JobSpec, stream: Stream) {
    let farewell = shared.farewell();
    let (job, receiver) = submit(shared, session, spec, false).await;
    let Stream { send, recv } = stream;
    let frames = follow(shared, job, recv);
    let told = report(shared, job, receiver, send);
    // The job's last event ends both.
    tokio::select! {
        () = told => {}
        never = frames => match never {},
    }
    drop(farewell);
}

/// Finds out whether a job would start. It ends by itself, also if nobody waits for it any more.
pub(super) async fn dry_run(
    shared: &Shared,
    session: Session,
    spec: JobSpec,
) -> Result<HeadReply, Refusal> {
    let (_, mut events) = submit(shared, session, spec, true).await;
    let mut placed = Vec::new();
    while let Some(event) = events.recv().await {
        match event {
            JobEvent::Placed { nodes, .. } => placed = nodes,
            JobEvent::Ended { refusal, .. } => {
                return refusal.map_or(Ok(HeadReply::Placed(placed)), Err);
            }
            JobEvent::Healthy { .. }
            | JobEvent::Generation { .. }
            | JobEvent::Fell { .. }
            | JobEvent::Waits { .. }
            | JobEvent::Hold { .. }
            | JobEvent::RankLost { .. } => {}
        }
    }
    Err(stopping())
}

/// Gives a job to the head. Its id, and its events.
async fn submit(
    shared: &Shared,
    session: Session,
    spec: JobSpec,
    dry_run: bool,
) -> (JobId, mpsc::Receiver<JobEvent>) {
    // All workers may be lost at the same time.
    let workers = spec.placement.workers().unwrap_or(0).min(MAX_WORLD_SIZE);
    let (events, receiver) = mpsc::channel(2 * workers as usize + EVENTS);
    let job = JobId::random();
    let submit = Happened {
        input: Input::Submit {
            session,
            job,
            spec: Box::new(spec),
            dry_run,
        },
        way: Some(Way::Driver(job, events)),
    };
    if shared.actor.send(submit).await.is_err() {
        tracing::debug!(%job, "the head stops");
    }
    (job, receiver)
}

/// Passes the job's events on until the last.
async fn report(
    shared: &Shared,
    job: JobId,
    mut events: mpsc::Receiver<JobEvent>,
    mut send: FrameSender,
) {
    let room = events.max_capacity();
    let mut is_over = false;
    while !is_over {
        let event = match events.recv().await {
            Some(event) => event,
            None if shared.actor.connected() => ended(unread(room)),
            None => ended(stopping()),
        };
        is_over = matches!(event, JobEvent::Ended { .. });
        if !tell(&shared.runtime, &mut send, &event).await {
            send.reset(CloseCode::Deadline);
            happened(shared, Input::DriverGone(job)).await;
            return;
        }
    }
    finish(&shared.runtime, send).await;
}

/// The driver of a job has let its queue run full.
fn unread(room: usize) -> Refusal {
    let message = format!(
        "the driver did not read the events of its job, of which at most {room} may wait; the job was stopped"
    );
    Refusal::new(RefusalKind::Stopped, message)
}

/// The end that the head did not tell.
fn ended(refusal: Refusal) -> JobEvent {
    JobEvent::Ended {
        state: JobState::Failed,
        refusal: Some(refusal),
        failure: None,
        stopped: None,
        followers: Followers::default(),
    }
}

async fn tell(runtime: &TransportRuntime, send: &mut FrameSender, event: &JobEvent) -> bool {
    matches!(
        runtime.timeout(EVENT_TIMEOUT, send.send(event, &[])).await,
        Some(Ok(()))
    )
}

/// Waits until the driver has read all, so that a head that stops does not cut it off.
async fn finish(runtime: &TransportRuntime, mut send: FrameSender) {
    send.finish();
    if runtime
        .timeout(REPLY_TIMEOUT, send.stopped())
        .await
        .is_none()
    {
        tracing::debug!("a driver did not read the end of its job");
    }
}

/// Never happens.
enum Never {}

/// Takes what the driver says. When its stream ends it is gone, and so is the job.
async fn follow(shared: &Shared, job: JobId, mut recv: FrameReceiver) -> Never {
    let unknown = Flood::new("frames of a driver were not known", 1);
    loop {
        match recv.next().await {
            Ok(Some(frame)) => happened(shared, Input::Frame(job, frame.head)).await,
            // A frame of a later version.
            Err(error @ FrameError::Invalid(InvalidFrame::Malformed { .. })) => {
                unknown.line(
                    || tracing::warn!(%error, "a driver sent what this version does not know"),
                );
            }
            Ok(None) | Err(_) => {
                happened(shared, Input::DriverGone(job)).await;
                // The job's end is still to come.
                std::future::pending::<()>().await;
            }
        }
    }
}

async fn happened(shared: &Shared, input: Input) {
    if shared.actor.send(Happened::from(input)).await.is_err() {
        tracing::debug!("the head stops");
    }
}
