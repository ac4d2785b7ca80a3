//! What a daemon tells the service manager (`sd_notify` of systemd).
//!
//! Without `NOTIFY_SOCKET` in the environment all of it does nothing. Workers don't get these variables.

use std::future::Future;
use std::io;
use std::time::Duration;

use sd_notify::NotifyState;

/// The daemon serves; `status` is a line for people.
pub(crate) fn ready(status: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(&line(status))]);
}

/// The daemon reads its settings again; [`ready`] ends that.
pub(crate) fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => failed(&error),
    }
}

/// The daemon leaves.
pub(crate) fn stopping(status: &str) {
    tell(&[NotifyState::Stopping, NotifyState::Status(&line(status))]);
}

/// Tells the watchdog that all is well, for as long as `is_good` says so within the time that `is_good` is given. Else
/// the watchdog is told nothing, and the service manager ends the daemon. Returns at once if the service manager has no watchdog.
pub(crate) async fn watchdog<F: Future<Output = bool>>(is_good: impl Fn(Duration) -> F) {
    let Some(interval) = sd_notify::watchdog_enabled().filter(|interval| !interval.is_zero())
    else {
        return;
    };
    // A third each for the pause, for the answer, and to be late.
    let share = interval / 3;
    let mut was_good = true;
    loop {
        let good = is_good(share).await;
        if good {
            tell(&[NotifyState::Watchdog]);
        } else if was_good {
            tracing::error!(
                ?interval,
                "the daemon does not do its work; the watchdog is not told any more"
            );
        }
        was_good = good;
        tokio::time::sleep(share).await;
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        failed(&error);
    }
}

fn failed(error: &io::Error) {
    tracing::warn!(%error, "the service manager was not told");
}

/// A status is one line.
fn line(status: &str) -> String {
    status.replace(['\n', '\r'], " ")
}
