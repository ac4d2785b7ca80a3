//! What signals to `kolo run` mean. They come from its front: see [`kolo_process::divide`].

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use kolo_transport::awake::{AwakeClock, TICK};
use kolo_transport::wire::WorkerSignal;
use tokio::net::unix::pipe::Receiver;
use tokio::runtime::Handle;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::signals::{Turn, Turns, name};

pub(crate) const SIGINT: i32 = 2;
const SIGUSR1: i32 = 10;
const SIGUSR2: i32 = 12;
const SIGCONT: i32 = 18;
const SIGTSTP: i32 = 20;
const SIGTTIN: i32 = 21;
const SIGTTOU: i32 = 22;
const SIGXCPU: i32 = 24;

/// How long the work may take that is left when somebody is in a hurry: enough for a report that is read.
const AT_ONCE: Duration = Duration::from_millis(100);

/// What a signal means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    /// The job is to end.
    End,
    /// The workers are to have it.
    Workers(WorkerSignal),
}

/// Everything that would kill a process ends the job.
fn meaning(number: i32) -> Meaning {
    Meaning::Workers(match number {
        SIGUSR1 => WorkerSignal::User1,
        SIGUSR2 => WorkerSignal::User2,
        SIGTSTP | SIGTTIN | SIGTTOU => WorkerSignal::Stop,
        SIGCONT => WorkerSignal::Continue,
        _ => return Meaning::End,
    })
}

/// A signal came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// End the job with care.
    First(i32),
    /// End at once.
    Second,
    /// For the workers.
    Workers(WorkerSignal),
}

/// Signals, from now on.
#[derive(Debug)]
pub(crate) struct Signals {
    front: Receiver,
    /// It comes to whoever uses the CPU, and that is this process.
    cpu_time: Signal,
    numbers: VecDeque<u8>,
    turns: Turns,
    clock: AwakeClock,
    hurried: bool,
    still: bool,
}

impl Signals {
    /// Those that the front tells of.
    pub(crate) fn take(front: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            front: Receiver::from_owned_fd(front)?,
            cpu_time: signal(SignalKind::from_raw(SIGXCPU))?,
            numbers: VecDeque::new(),
            turns: Turns::default(),
            clock: AwakeClock::start(&Handle::current(), TICK),
            hurried: false,
            still: false,
        })
    }

    /// The next one. Cancel safe.
    pub(crate) async fn next(&mut self) -> Heard {
        loop {
            let number = self.number().await;
            match meaning(number) {
                Meaning::Workers(signal) => {
                    match signal {
                        WorkerSignal::Stop => self.still = true,
                        WorkerSignal::Continue => self.still = false,
                        WorkerSignal::User1 | WorkerSignal::User2 => {}
                    }
                    return Heard::Workers(signal);
                }
                Meaning::End => match self.turns.hear(number, self.clock.now()) {
                    Turn::First => return Heard::First(number),
                    Turn::Echo => {}
                    Turn::Second => {
                        self.hurried = true;
                        return Heard::Second;
                    }
                },
            }
        }
    }

    async fn number(&mut self) -> i32 {
        loop {
            if let Some(number) = self.numbers.pop_front() {
                return number.into();
            }
            tokio::select! {
                ready = self.front.readable() => {
                    let mut numbers = [0; 16];
                    let read = ready.and_then(|()| self.front.try_read(&mut numbers));
                    match read {
                        Ok(length @ 1..) => self.numbers.extend(&numbers[..length]),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        // The front is gone, and the kernel ends this process.
                        Ok(_) | Err(_) => std::future::pending().await,
                    }
                }
                Some(()) = self.cpu_time.recv() => return SIGXCPU,
            }
        }
    }

    /// Whether the front stands still.
    pub(crate) fn is_still(&self) -> bool {
        self.still
    }

    /// Does some work after the job, for a moment only if somebody is or comes to be in a hurry. The first signal is noted.
    pub(crate) async fn unless_hurried<T>(
        &mut self,
        first: &mut Option<i32>,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        tokio::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Some(done),
                heard = self.next(), if !self.hurried => if let Heard::First(signal) = heard {
                    super::say::say(&format!(
                        "{}: the job has ended; another signal, or the same after a second, does not wait for the rest",
                        name(signal)
                    ));
                    *first = Some(signal);
                },
                () = tokio::time::sleep(AT_ONCE), if self.hurried => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_signal_that_would_kill_ends_the_job_and_others_are_for_the_workers() {
        for (number, signal) in [
            (10, WorkerSignal::User1),
            (12, WorkerSignal::User2),
            (20, WorkerSignal::Stop),
            (21, WorkerSignal::Stop),
            (22, WorkerSignal::Stop),
            (18, WorkerSignal::Continue),
        ] {
            assert_eq!(meaning(number), Meaning::Workers(signal), "{number}");
        }
        for number in [1, 2, 3, 6, 14, 15, 16, 24, 25, 26, 27, 29, 30, 34, 64] {
            assert_eq!(meaning(number), Meaning::End, "{number}");
        }
    }

    #[tokio::test]
    async fn signals_come_in_order_and_a_hurry_lasts() {
        let (front, words) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        let mut signals = Signals::take(front).unwrap();
        rustix::io::write(&words, &[20, 10, 15, 15, 18, 2]).unwrap();
        assert_eq!(signals.next().await, Heard::Workers(WorkerSignal::Stop));
        assert!(signals.is_still());
        let mut first = None;
        let done = signals
            .unless_hurried(&mut first, std::future::pending::<()>())
            .await;
        assert_eq!((done, first), (None, Some(15)));
        assert!(!signals.is_still());
        // Whoever waits afterwards does not wait.
        let mut first = None;
        let done = signals
            .unless_hurried(&mut first, std::future::pending::<()>())
            .await;
        assert_eq!((done, first), (None, None));
        let done = signals.unless_hurried(&mut first, async { 7 }).await;
        assert_eq!(done, Some(7));
    }
}
