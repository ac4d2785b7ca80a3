//! Results on their way out: one write for many short calls, and none kept back by a long one.
//!
//! While more calls are waiting, results of short calls are collected and written together. But the next
//! call may take long, or wait for something that the driver only does once it has a result. So a helper
//! thread writes what is older than a tick. It exists once there was something to collect, and sleeps when
//! there is not.

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// What is written even if more is to come, in bytes.
const FULL: usize = 64 << 10;

/// How long a result may be kept back is between one and two of these.
const TICK: Duration = Duration::from_millis(1);

/// Ticks without anything to do after which the helper sleeps.
const IDLE_TICKS: u32 = 10;

#[derive(Debug)]
struct Pending<W> {
    writer: W,
    bytes: Vec<u8>,
    /// Counts the times that `bytes` was written.
    batch: u64,
    /// The helper ticks.
    awake: bool,
    closed: bool,
    /// What a write of the helper failed with.
    failed: Option<io::Error>,
}

impl<W: Write> Pending<W> {
    fn write(&mut self) -> io::Result<()> {
        self.batch += 1;
        let done = self.writer.write_all(&self.bytes);
        if self.bytes.capacity() > 4 * FULL {
            self.bytes = Vec::new();
        }
        self.bytes.clear();
        done
    }
}

#[derive(Debug)]
struct Shared<W> {
    pending: Mutex<Pending<W>>,
    changed: Condvar,
}

impl<W> Shared<W> {
    fn lock(&self) -> MutexGuard<'_, Pending<W>> {
        // Every state between two statements is fine.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The writing end of the call socket.
#[derive(Debug)]
pub(crate) struct Outbox<W> {
    shared: Arc<Shared<W>>,
    helper: Option<JoinHandle<()>>,
}

impl<W: Write + Send + 'static> Outbox<W> {
    pub(crate) fn new(writer: W) -> Self {
        Self {
            shared: Arc::new(Shared {
                pending: Mutex::new(Pending {
                    writer,
                    bytes: Vec::new(),
                    batch: 0,
                    awake: false,
                    closed: false,
                    failed: None,
                }),
                changed: Condvar::new(),
            }),
            helper: None,
        }
    }

    /// Writes what was collected, and these frames.
    pub(crate) fn send(&mut self, frames: &[u8]) -> io::Result<()> {
        let mut pending = self.shared.lock();
        if let Some(error) = pending.failed.take() {
            return Err(error);
        }
        if pending.bytes.is_empty() {
            // Nothing to write is no write.
            return pending.writer.write_all(frames);
        }
        pending.bytes.extend_from_slice(frames);
        pending.write()
    }

    /// Writes what was collected.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.send(&[])
    }

    /// Collects these frames; they are written with the next ones, or within two milliseconds.
    pub(crate) fn collect(&mut self, frames: &[u8]) -> io::Result<()> {
        let mut pending = self.shared.lock();
        if let Some(error) = pending.failed.take() {
            return Err(error);
        }
        pending.bytes.extend_from_slice(frames);
        if pending.bytes.len() >= FULL {
            return pending.write();
        }
        if !pending.awake {
            pending.awake = true;
            drop(pending);
            if self.helper.is_none() {
                let shared = Arc::clone(&self.shared);
                self.helper = Some(
                    std::thread::Builder::new()
                        .name("kolo-results".to_owned())
                        .spawn(move || help(&shared))?,
                );
            }
            self.shared.changed.notify_one();
        }
        Ok(())
    }
}

impl<W> Drop for Outbox<W> {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_one();
        if let Some(helper) = self.helper.take()
            && helper.join().is_err()
        {
            tracing::error!("the thread that writes collected results panicked");
        }
    }
}

fn help<W: Write>(shared: &Shared<W>) {
    let mut pending = shared.lock();
    let mut seen = None;
    let mut idle = 0;
    while !pending.closed {
        if !pending.awake {
            (seen, idle) = (None, 0);
            pending = shared
                .changed
                .wait(pending)
                .unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        (pending, _) = shared
            .changed
            .wait_timeout(pending, TICK)
            .unwrap_or_else(PoisonError::into_inner);
        if pending.bytes.is_empty() {
            idle += u32::from(seen == Some(pending.batch));
            pending.awake = idle < IDLE_TICKS;
        } else if seen == Some(pending.batch) {
            if let Err(error) = pending.write() {
                pending.failed = Some(error);
            }
            idle = 0;
        }
        seen = Some(pending.batch);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn collected_frames_go_out_with_the_next_and_in_order() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let mut outbox = Outbox::new(here);
        outbox.send(b"a").unwrap();
        outbox.collect(b"b").unwrap();
        outbox.collect(b"c").unwrap();
        outbox.send(b"d").unwrap();
        outbox.collect(b"e").unwrap();
        outbox.flush().unwrap();
        outbox.flush().unwrap();
        drop(outbox);
        let mut all = String::new();
        there.read_to_string(&mut all).unwrap();
        assert_eq!(all, "abcde");
    }

    #[test]
    fn what_is_collected_goes_out_by_itself() {
        let (here, mut there) = UnixStream::pair().unwrap();
        there
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let mut outbox = Outbox::new(here);
        for round in 0..20_u8 {
            outbox.collect(&[round]).unwrap();
            let mut byte = [0];
            there.read_exact(&mut byte).unwrap();
            assert_eq!(byte, [round]);
        }
    }

    #[test]
    fn a_failed_write_of_the_helper_is_told() {
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        let mut outbox = Outbox::new(here);
        let error = loop {
            if let Err(error) = outbox.collect(b"x") {
                break error;
            }
            std::thread::yield_now();
        };
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
