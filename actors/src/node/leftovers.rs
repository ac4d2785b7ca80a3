//! The leftovers of a process that has ended: its last output, and the processes that it has started.

use std::time::Duration;

use kolo_core::node::colocator::KILLED;
use kolo_process::{Child, Signal, SignalError};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::ports::CallsEnd;

/// How long to wait for the last output and results of a process that has ended, and that was not asked to. What still holds
/// its pipes open then is killed, or is a process that left its group on purpose.
pub(super) const DRAIN: Duration = Duration::from_millis(250);

/// How far the stop of a worker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stopping {
    /// It is not to end.
    No,
    /// It was told over its control socket, and what it has started was not told.
    Told,
    /// It and everything below it had a signal.
    Signalled,
}

/// Sees to the end of what a process that has ended has left behind. If the process was asked to end, that has time until it
/// is killed. Otherwise it is killed after `limit`, or when nobody holds the output any more: in `exec > >(tee log)` it is
/// `tee` that writes the last lines.
pub(super) async fn see_off(
    child: &Child,
    stopping: &watch::Sender<Stopping>,
    limit: Duration,
    readers: &mut [JoinHandle<()>],
) {
    let signal = |signal: Signal| match child.signal(signal) {
        // Between its end and the news of it.
        Ok(()) | Err(SignalError::Ended { .. }) => {}
        Err(error) => tracing::error!(pid = child.pid(), %error, "what is left was not signalled"),
    };
    let mut stop = stopping.subscribe();
    // What this gives must not be kept: as long as it is, the sender can't send.
    let stopped = async { drop(stop.wait_for(|stopping| *stopping > Stopping::No).await) };
    tokio::select! {
        biased;
        _ = child.gone() => return,
        () = stopped => {
            if *stopping.borrow() == Stopping::Told {
                signal(Signal::Terminate);
            }
            child.gone().await;
            return;
        }
        () = read_to_end(readers), if limit > Duration::ZERO => {}
        () = tokio::time::sleep(limit) => {
            tracing::debug!(pid = child.pid(), "what a worker has left behind is killed");
        }
    }
    signal(Signal::Kill);
    if tokio::time::timeout(KILLED, child.gone()).await.is_err() {
        tracing::error!(pid = child.pid(), after = ?KILLED, "what a worker has left behind was killed and has not ended");
    }
}

/// Waits for the end of all output.
async fn read_to_end(readers: &mut [JoinHandle<()>]) {
    for reader in readers.iter_mut().filter(|reader| !reader.is_finished()) {
        // A reader that panicked has nothing more to give.
        drop(reader.await);
    }
}

/// Waits for the last output and results of a process that has ended, for a short time.
pub(super) async fn drain(readers: &mut [JoinHandle<()>], calls: Option<CallsEnd>) {
    let all = async {
        read_to_end(readers).await;
        if let Some(calls) = calls {
            drop(calls.await);
        }
    };
    if tokio::time::timeout(DRAIN, all).await.is_err() {
        tracing::debug!("a worker's pipes are held open by another process");
    }
}
