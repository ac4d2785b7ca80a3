//! The system calls for which there is no safe function. All `unsafe` of this crate is here.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal};

use crate::protocol::Step;

/// How often an `execve` of a file that is open for writing is tried again: after 1, 2, 4 .. 128 ms. A process that
/// somebody else forks holds its parent's files until it executes something, so a program that was written and
/// closed just now can be busy for a moment.
const BUSY_RETRIES: u32 = 8;

/// Exit code of a child that did not get to run its program. Nobody sees it.
const NOT_STARTED: c_int = 127;

/// What to execute.
#[derive(Debug)]
pub(crate) struct Exec<'a> {
    /// Path.
    pub(crate) program: &'a CStr,
    /// Arguments, each with a zero byte behind it.
    pub(crate) argv: &'a [u8],
    /// `NAME=value`, each with a zero byte behind it.
    pub(crate) env: &'a [u8],
    /// Directory.
    pub(crate) cwd: Option<&'a CStr>,
    /// Descriptors and their numbers in the child. No descriptor is one of the numbers.
    pub(crate) fds: &'a [(BorrowedFd<'a>, RawFd)],
    /// Where the child writes what failed: the step's code and the `errno`. Close-on-exec, and none of the numbers.
    pub(crate) errors: BorrowedFd<'a>,
}

/// Forks a child that executes the program as [`SpawnRequest`](crate::SpawnRequest) says. Returns its process id; whether
/// it got to run the program shows on `errors`: 5 bytes or, when it did, the end.
///
/// Must be called by a process with one thread, from which the child inherits standard input and in which no other
/// descriptor lacks close-on-exec.
///
/// # Errors
///
/// As `fork(2)`; `InvalidInput` if the strings are not ended by zero bytes.
pub(crate) fn spawn(exec: &Exec<'_>) -> io::Result<Pid> {
    let argv = pointers(exec.argv)?;
    let env = pointers(exec.env)?;
    let parent = rustix::process::getpid();
    // SAFETY: the process has one thread, so the child's memory is in a consistent state. The child only makes
    // system calls on memory prepared above.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: this is the child of a fork, and it will not return from here.
            unsafe { child(exec, &argv, &env, parent) }
        }
        pid => Pid::from_raw(pid).ok_or_else(|| io::Error::other("fork returned no process id")),
    }
}

/// Pointers to the strings in `blob` and a null pointer.
fn pointers(blob: &[u8]) -> io::Result<Vec<*const c_char>> {
    if blob.last().is_some_and(|byte| *byte != 0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let strings = blob.split_inclusive(|byte| *byte == 0);
    Ok(strings
        .map(|string| string.as_ptr().cast())
        .chain([std::ptr::null()])
        .collect())
}

/// The child's side of [`spawn`].
///
/// # Safety
///
/// To be called in a forked child only; `argv` and `env` are pointers to strings that end in a zero byte, and a null
/// pointer.
unsafe fn child(exec: &Exec<'_>, argv: &[*const c_char], env: &[*const c_char], parent: Pid) -> ! {
    // SAFETY: plain system calls on this process's own state and on memory that the caller vouches for.
    unsafe {
        let fail = |step: Step| -> ! {
            let errno = *libc::__errno_location();
            let [a, b, c, d] = errno.to_ne_bytes();
            let report = [step.code(), a, b, c, d];
            // If this fails the parent is gone, and so is the need to tell it.
            libc::write(
                exec.errors.as_raw_fd(),
                report.as_ptr().cast(),
                report.len(),
            );
            libc::_exit(NOT_STARTED)
        };
        if libc::setsid() == -1
            || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) == -1
        {
            fail(Step::Prepare);
        }
        // A parent that died before the line above sends no signal.
        if libc::getppid() != parent.as_raw_nonzero().get() {
            libc::_exit(NOT_STARTED);
        }
        for (source, number) in exec.fds {
            // The copy is not close-on-exec, which is what is wanted.
            if libc::dup2(source.as_raw_fd(), *number) == -1 {
                fail(Step::Prepare);
            }
        }
        if let Some(cwd) = exec.cwd
            && libc::chdir(cwd.as_ptr()) == -1
        {
            fail(Step::Directory);
        }
        let mut none = MaybeUninit::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        if libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut()) == -1 {
            fail(Step::Prepare);
        }
        for attempt in 0..=BUSY_RETRIES {
            libc::execve(exec.program.as_ptr(), argv.as_ptr(), env.as_ptr());
            if *libc::__errno_location() != libc::ETXTBSY || attempt == BUSY_RETRIES {
                break;
            }
            let pause = libc::timespec {
                tv_sec: 0,
                tv_nsec: 1_000_000 << attempt,
            };
            libc::nanosleep(&raw const pause, std::ptr::null_mut());
        }
        fail(Step::Exec)
    }
}

/// Default action for every signal, all of them blocked, and a non-blocking descriptor that is readable when a child
/// has ended.
///
/// # Errors
///
/// As `signalfd(2)`.
pub(crate) fn take_signals() -> io::Result<OwnedFd> {
    /// A kernel's `struct sigaction` of zeros, and some more: the default action, no flags, no mask.
    static DEFAULT: [u64; 8] = [0; 8];
    /// The size of the kernel's signal set.
    const SET: usize = 8;
    // SAFETY: `rt_sigaction` reads a structure that is shorter than `DEFAULT`, and the default action installs no code;
    // the sets are initialised before they are used; the descriptor is new and owned by nobody else.
    unsafe {
        for number in 1..=64_i64 {
            // Not by `sigaction`, which does not touch 32 and 33, left ignored by `posix_spawn`: glibc keeps them for
            // itself. `SIGKILL` and `SIGSTOP` can't be changed.
            let none = std::ptr::null_mut::<u64>();
            libc::syscall(libc::SYS_rt_sigaction, number, DEFAULT.as_ptr(), none, SET);
        }
        let mut all = MaybeUninit::uninit();
        libc::sigfillset(all.as_mut_ptr());
        if libc::sigprocmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut()) == -1 {
            return Err(io::Error::last_os_error());
        }
        let mut children = MaybeUninit::uninit();
        libc::sigemptyset(children.as_mut_ptr());
        libc::sigaddset(children.as_mut_ptr(), libc::SIGCHLD);
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        match libc::signalfd(-1, children.as_ptr(), flags) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// Closes every descriptor but 0, 1, 2 and `keep`. For a process that has just begun and in which nothing else was
/// opened: what is open was inherited by mistake.
pub(crate) fn close_inherited(keep: BorrowedFd<'_>) {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else {
        return;
    };
    let open: Vec<RawFd> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|fd| *fd > 2 && *fd != keep.as_raw_fd())
        .collect();
    for fd in open {
        // SAFETY: no value in this process owns the descriptor, as the caller vouches. The one that listed the
        // folder is closed already and there is only one thread, so its number is not in use again.
        unsafe { libc::close(fd) };
    }
}

/// What [`peek_dead`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dead {
    /// This child has ended and is not reaped yet.
    Child(Pid),
    /// All children run.
    NoneYet,
    /// There are no children.
    NoChildren,
}

/// A child that has ended; it stays unreaped, so that its process id is not given to another process.
pub(crate) fn peek_dead() -> Dead {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is a valid place for the answer. It is zeroed, which is a valid `siginfo_t`, and `si_pid` may
    // be read after a successful `waitid`.
    let pid = unsafe {
        if libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), options) == -1 {
            // With these arguments only ECHILD is possible.
            return Dead::NoChildren;
        }
        info.assume_init().si_pid()
    };
    Pid::from_raw(pid).map_or(Dead::NoneYet, Dead::Child)
}

/// Sends a signal to the process group that the process behind `pidfd` leads, also after that process has ended.
///
/// # Errors
///
/// `ESRCH` if nobody is left in the group, `EPERM`.
pub(crate) fn signal_group(pidfd: BorrowedFd<'_>, pid: Pid, signal: Signal) -> io::Result<()> {
    /// `PIDFD_SIGNAL_PROCESS_GROUP`, since Linux 6.9.
    const GROUP: libc::c_uint = 1 << 2;
    let null = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the system call takes a descriptor, a number, no information and flags.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            signal.as_raw(),
            null,
            GROUP,
        )
    };
    if sent == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() != Some(libc::EINVAL) {
        return Err(error);
    }
    // An older kernel. By number, as long as the leader lives; the time between the two calls is too short for the
    // number to come round.
    let mut leader = [PollFd::new(&pidfd, PollFlags::IN)];
    if rustix::event::poll(&mut leader, Some(&Timespec::default()))? > 0 {
        return Err(rustix::io::Errno::SRCH.into());
    }
    Ok(rustix::process::kill_process_group(pid, signal)?)
}

/// See [`give_back_memory`](crate::give_back_memory).
pub(crate) fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes a number and may be called at any time by any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
