//! A process in front of the one that works.
//!
//! A process that stands still (Ctrl-Z) can't keep its connections, whose other ends take it for lost after seconds. So a
//! launcher that may be stopped divides itself: what was started is the *front*, which takes the signals, passes them on,
//! and stands still when it is told to; its child is the *runner*, which works and does not.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kolo_transport::wire::Exit;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, Signal, WaitOptions};

use crate::procfs::mask;
use crate::sys;

/// Signals that the front leaves alone: `SIGKILL` and `SIGSTOP` can't be had, what glibc keeps for itself, and what does
/// nothing by default. Of `SIGCONT` the kernel has done what there is to do.
const LEFT: [i32; 7] = [
    libc::SIGKILL,
    libc::SIGSTOP,
    libc::SIGCONT,
    libc::SIGURG,
    libc::SIGWINCH,
    32,
    33,
];

/// What a runner has for itself: the ends of its children, its limit of CPU time, its own mistakes.
const OWN: [i32; 9] = [
    libc::SIGCHLD,
    libc::SIGXCPU,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGSYS,
];

/// A terminal's to those in its background: what is blocked is an error (`EIO`) when they read, and nothing when they write.
const BACKGROUND: [i32; 2] = [libc::SIGTTIN, libc::SIGTTOU];

/// The length of what the kernel says about one signal.
const INFO: usize = 128;

/// Which of the two processes this is.
#[derive(Debug)]
pub enum Side {
    /// The front, and the runner has ended like this.
    Front(Exit),
    /// The runner. The descriptor does not block; it gives the numbers of signals to the front, a byte each: what asks to
    /// stand still, and `SIGCONT` when the front goes on.
    Runner(OwnedFd),
}

/// Divides this process in front and runner. Returns at once in the runner, and in the front when the runner has ended.
///
/// The runner has the same process group and terminal, and dies with the front. Signals to the group count once: the
/// runner's own are lost, but for `SIGKILL`, `SIGSTOP`, `SIGXCPU` (it is the runner that uses the CPU) and those of its own
/// mistakes. Signals that were ignored stay ignored, and are not passed on.
///
/// # Errors
///
/// If this process has more than one thread, or the system has no room for another process.
pub fn divide() -> io::Result<Side> {
    let taken = taken(mask(&fs::read_to_string("/proc/self/status")?, "SigIgn:"));
    let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK;
    let (words, writer) = rustix::pipe::pipe_with(flags)?;
    let held = sys::hold_signals(&taken)?;
    let front = rustix::process::getpid();
    match sys::fork() {
        Err(error) => {
            held.release(&[])?;
            Err(error)
        }
        Ok(None) => {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            if rustix::process::getppid() != Some(front) {
                // It died before the line above.
                std::process::exit(1);
            }
            let of_the_front: Vec<i32> = taken
                .into_iter()
                .filter(|number| !BACKGROUND.contains(number) && !OWN.contains(number))
                .collect();
            sys::lose_signals(&of_the_front)?;
            held.release(&BACKGROUND)?;
            Ok(Side::Runner(words))
        }
        Ok(Some(runner)) => {
            drop(words);
            stand_in_front(runner, held.signals(), writer.as_fd()).map(Side::Front)
        }
    }
}

fn stand_in_front(runner: Pid, signals: BorrowedFd<'_>, words: BorrowedFd<'_>) -> io::Result<Exit> {
    let mut info = [0; INFO];
    loop {
        match rustix::io::read(signals, &mut info) {
            Ok(INFO) => {}
            Ok(_) | Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let [a, b, c, d, ..] = info;
        match i32::from_ne_bytes([a, b, c, d]) {
            libc::SIGCHLD => {
                let reaped = rustix::process::waitpid(Some(runner), WaitOptions::NOHANG)?;
                if let Some((_, status)) = reaped {
                    let code = status.exit_status().map(Exit::Code);
                    let signal = status.terminating_signal().map(Exit::Signal);
                    return Ok(code.or(signal).unwrap_or(Exit::Unknown));
                }
            }
            number @ (libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU) => {
                tell(words, number);
                // The kernel knows whether there is a shell that could make it go on; without one it does not stop.
                sys::obey(number)?;
                tell(words, libc::SIGCONT);
            }
            number => tell(words, number),
        }
    }
}

/// If there is no room the runner has enough to read.
fn tell(words: BorrowedFd<'_>, number: i32) {
    if let Ok(word) = u8::try_from(number) {
        rustix::io::write(words, &[word]).ok();
    }
}

/// Whether this process ignores a signal, as under `nohup` and in the background of a script. If in doubt, no.
#[must_use]
pub fn ignores(number: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    contains(mask(&status, "SigIgn:"), number)
}

/// Whether signal `number` is in a mask.
fn contains(mask: u64, number: i32) -> bool {
    (1..=64).contains(&number) && mask & (1 << (number - 1)) != 0
}

/// The signals that the front takes. How its child ends it wants to know in any case.
fn taken(ignored: u64) -> Vec<i32> {
    (1..=64)
        .filter(|number| !LEFT.contains(number))
        .filter(|number| !contains(ignored, *number) || *number == libc::SIGCHLD)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ignored_stays_so_and_what_would_kill_or_stop_is_taken() {
        let all = taken(0);
        for number in [
            1, 2, 3, 10, 12, 14, 15, 17, 20, 21, 22, 24, 26, 27, 29, 30, 34, 64,
        ] {
            assert!(all.contains(&number), "{number}");
        }
        for number in [9, 18, 19, 23, 28] {
            assert!(!all.contains(&number), "{number}");
        }
        let nohup = taken(0b1);
        assert!(!nohup.contains(&1) && nohup.contains(&2));
        // Some parents ignore the ends of their children, which is inherited.
        assert!(taken(u64::MAX).contains(&libc::SIGCHLD));
    }
}
