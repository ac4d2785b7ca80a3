//! The stream of a job: events to its driver, frames from it.

use std::sync::Arc;
use std::time::Duration;

use actix::Addr;
use kolo_actors::head::Coordinator;
use kolo_actors::head::messages::{Happened, Submit};
use kolo_core::head::job::Event;
use kolo_transport::frame::InvalidFrame;
use kolo_transport::ids::DriverId;
use kolo_transport::wire::{JobEvent, JobSpec, JobState, Refusal, SubmitFrame};
use kolo_transport::{
    CloseCode, Flood, FrameError, FrameReceiver, FrameSender, Stream, TransportRuntime,
};
use tokio::sync::mpsc;

use super::serve::{REPLY_TIMEOUT, Shared, stopped};

/// How long a driver may take to read an event.
const EVENT_TIMEOUT: Duration = Duration::from_secs(30);

/// Tells a driver that its job is not taken.
pub(super) async fn refuse(shared: &Shared, mut stream: Stream, refusal: Refusal) {
    let ended = JobEvent::Ended {
        state: JobState::Failed,
        refusal: Some(refusal),
        failure: None,
        stopped: None,
    };
    if tell(&shared.runtime, &mut stream.send, &ended).await {
        finish(&shared.runtime, stream.send).await;
    }
}

/// Submits a job, and serves its driver until it has ended.
pub(super) async fn serve(shared: &Arc<Shared>, owner: DriverId, spec: JobSpec, stream: Stream) {
    let farewell = shared.farewell();
    let (events, receiver) = mpsc::channel(Submit::capacity(&spec));
    let submit = Submit {
        spec,
        owner,
        events,
    };
    let answer = shared
        .actor
        .send(submit)
        .await
        .unwrap_or_else(|error| Err(stopped(error)));
    match answer {
        Ok(submitted) => {
            let Stream { send, recv } = stream;
            let frames = follow(submitted.coordinator.clone(), recv);
            let told = report(shared, &submitted.coordinator, receiver, send);
            // The job's last event ends both.
            tokio::select! {
                () = told => {}
                never = frames => match never {},
            }
        }
        Err(refusal) => {
            tracing::info!(%owner, reason = %refusal.message, "a job is refused");
            refuse(shared, stream, refusal).await;
        }
    }
    drop(farewell);
}

/// Passes the job's events on until the last.
async fn report(
    shared: &Shared,
    coordinator: &Addr<Coordinator>,
    mut events: mpsc::Receiver<JobEvent>,
    mut send: FrameSender,
) {
    while let Some(event) = events.recv().await {
        if !tell(&shared.runtime, &mut send, &event).await {
            send.reset(CloseCode::Deadline);
            happened(coordinator, Event::DriverGone).await;
            return;
        }
    }
    finish(&shared.runtime, send).await;
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
async fn follow(coordinator: Addr<Coordinator>, mut recv: FrameReceiver) -> Never {
    let unknown = Flood::new("frames of a driver were not known", 1);
    loop {
        let event = match recv.next().await {
            Ok(Some(frame)) => match frame.head {
                SubmitFrame::ProgramReady => Event::ProgramReady,
                SubmitFrame::Stop => Event::DriverStop,
                SubmitFrame::Kill => Event::DriverKill,
                SubmitFrame::Done => Event::DriverDone,
                SubmitFrame::Interrupt => Event::DriverInterrupt,
                SubmitFrame::Signal(signal) => Event::DriverSignal(signal),
            },
            // A frame of a later version.
            Err(error @ FrameError::Invalid(InvalidFrame::Malformed { .. })) => {
                unknown.line(
                    || tracing::warn!(%error, "a driver sent what this version does not know"),
                );
                continue;
            }
            Ok(None) | Err(_) => {
                happened(&coordinator, Event::DriverGone).await;
                // The job's end is still to come.
                std::future::pending::<()>().await;
                continue;
            }
        };
        happened(&coordinator, event).await;
    }
}

async fn happened(coordinator: &Addr<Coordinator>, event: Event) {
    if coordinator.send(Happened(event)).await.is_err() {
        tracing::debug!("the job has ended already");
    }
}
