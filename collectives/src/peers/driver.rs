//! The runtime that drives the links of a communicator.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// How long what is on its way may take when the communicator has gone. A lane gives up after two seconds.
const LINGER: Duration = Duration::from_secs(3);

/// How often it is looked whether all is delivered.
const LOOK: Duration = Duration::from_millis(1);

/// How much longer whoever leaves waits for the thread, whose host may be busy.
const MARGIN: Duration = Duration::from_secs(1);

/// A runtime: the caller's, or a thread with one of its own, which ends some time after this.
#[derive(Debug)]
pub(super) struct Driver {
    handle: Handle,
    /// Dropped when the thread shall end.
    _end: Option<oneshot::Sender<()>>,
}

/// Whoever drops this waits for the thread of a [`Driver`] that has gone or is about to.
#[derive(Debug)]
pub(crate) struct Leaving {
    /// Its thread, and what tells of its end.
    thread: Mutex<Option<(JoinHandle<()>, Receiver<()>)>>,
}

impl Driver {
    pub(super) fn start(given: Option<Handle>) -> io::Result<(Self, Leaving)> {
        if let Some(handle) = given {
            let thread = Mutex::new(None);
            return Ok((Self { handle, _end: None }, Leaving { thread }));
        }
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel();
        let (goes, gone) = sync_channel(0);
        let thread = std::thread::Builder::new()
            .name("kolo-peers".to_owned())
            .spawn(move || {
                // Goes last.
                let _goes: SyncSender<()> = goes;
                runtime.block_on(run(ended));
                drop(runtime);
            })?;
        let driver = Self {
            handle,
            _end: Some(end),
        };
        let thread = Mutex::new(Some((thread, gone)));
        Ok((driver, Leaving { thread }))
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }
}

async fn run(ended: oneshot::Receiver<()>) {
    // Nothing is ever sent: the other end goes.
    drop(ended.await);
    let until = Instant::now() + LINGER;
    let metrics = Handle::current().metrics();
    while metrics.num_alive_tasks() > 0 && Instant::now() < until {
        tokio::time::sleep(LOOK).await;
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let thread = self
            .thread
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let Some((thread, gone)) = thread.take() else {
            return;
        };
        // A thread can't wait for itself, and another runtime must not be held up.
        if Handle::try_current().is_ok() {
            return;
        }
        match gone.recv_timeout(LINGER + MARGIN) {
            Err(RecvTimeoutError::Timeout) => {
                tracing::warn!("links of a communicator that has gone are still in use");
            }
            _ if thread.join().is_err() => {
                tracing::error!("the thread that drives links has panicked");
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_under_way_ends_before_the_driver_and_what_hangs_does_not_hold_it_for_ever() {
        let (driver, leaving) = Driver::start(None).unwrap();
        let (sent, received) = std::sync::mpsc::channel();
        driver.handle().spawn(async move {
            tokio::time::sleep(Duration::from_millis(30)).await;
            sent.send(()).unwrap();
        });
        drop((driver, leaving));
        assert_eq!(received.try_recv(), Ok(()));

        let (driver, leaving) = Driver::start(None).unwrap();
        let begun = Instant::now();
        driver.handle().spawn(std::future::pending::<()>());
        drop((driver, leaving));
        assert!(begun.elapsed() < 2 * LINGER);
    }

    #[test]
    fn a_driver_that_goes_later_is_waited_for() {
        let (driver, leaving) = Driver::start(None).unwrap();
        let handle = driver.handle().clone();
        let (sent, received) = std::sync::mpsc::channel();
        handle.spawn(async move {
            tokio::time::sleep(Duration::from_millis(30)).await;
            // As the last task that has a communicator does.
            drop(driver);
            sent.send(()).unwrap();
        });
        drop(leaving);
        assert_eq!(received.try_recv(), Ok(()));
    }

    #[tokio::test]
    async fn it_may_go_inside_of_a_runtime() {
        let started = Driver::start(None).unwrap();
        started.0.handle().spawn(std::future::pending::<()>());
        let begun = Instant::now();
        drop(started);
        assert!(begun.elapsed() < LINGER / 2);
        // And one that is the caller's is left alone.
        drop(Driver::start(Some(Handle::current())).unwrap());
        tokio::task::yield_now().await;
    }
}
