//! The system calls for which there is no safe function. All `unsafe` of this crate is here.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal};

use serde::{Deserialize, Serialize};

/// The steps of a start that can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Step {
    /// Taking over the descriptors in the warden.
    Descriptors,
    /// `fork` and what the warden needs to watch the process.
    Fork,
    /// `setsid`, `prctl`, placing descriptors.
    Prepare,
    /// `chdir`.
    Directory,
    /// `execve`.
    Exec,
}

impl Step {
    /// As a byte, for the pipe between a child and the warden.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    /// The step of a byte; what is not known counts as [`Step::Prepare`].
    pub(crate) fn from_code(code: u8) -> Self {
        let all = [Self::Descriptors, Self::Fork, Self::Directory, Self::Exec];
        let known = all.into_iter().find(|step| step.code() == code);
        known.unwrap_or(Self::Prepare)
    }
}

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
}

/// What the child of a fork works on: made before, because it may not allocate.
struct Prepared<'a> {
    exec: &'a Exec<'a>,
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    parent: Pid,
    /// Where it writes what failed: the step's code and the `errno`. Close-on-exec, and none of the numbers.
    errors: BorrowedFd<'a>,
}

impl<'a> Prepared<'a> {
    fn new(exec: &'a Exec<'a>, errors: BorrowedFd<'a>) -> io::Result<Self> {
        Ok(Self {
            exec,
            argv: pointers(exec.argv)?,
            env: pointers(exec.env)?,
            parent: rustix::process::getpid(),
            errors,
        })
    }
}

/// Forks a child that executes the program as [`SpawnRequest`](crate::SpawnRequest) says. Returns its process id; whether
/// it got to run the program shows on `errors`, which is close-on-exec and none of the numbers: 5 bytes (the step's code and
/// the `errno`) or, when it did, the end.
///
/// Must be called by a process with one thread, from which the child inherits standard input and in which no other
/// descriptor lacks close-on-exec.
///
/// # Errors
///
/// As `fork(2)`; `InvalidInput` if the strings are not ended by zero bytes.
pub(crate) fn spawn(exec: &Exec<'_>, errors: BorrowedFd<'_>) -> io::Result<Pid> {
    let prepared = Prepared::new(exec, errors)?;
    // SAFETY: the process has one thread, so the child's memory is in a consistent state. The child only makes
    // system calls on memory prepared above.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: this is the child of a fork, and it will not return from here.
            unsafe { child(&prepared) }
        }
        pid => forked(pid),
    }
}

fn forked(pid: c_int) -> io::Result<Pid> {
    Pid::from_raw(pid).ok_or_else(|| io::Error::other("fork returned no process id"))
}

/// As [`spawn`], in a process of any size with any number of threads, and returns when the program runs. The child dies with
/// the *thread* that calls this, unless it decides otherwise. Standard error is inherited too.
///
/// The child borrows this process's memory until then, so nothing is copied, as `posix_spawn` does it; that can't set what is
/// to happen at a parent's death.
///
/// # Errors
///
/// The step that failed and how. Nothing is left then.
pub(crate) fn spawn_and_wait(exec: &Exec<'_>) -> Result<Pid, (Step, io::Error)> {
    /// What the child needs of its own; it calls nothing deep.
    const STACK: usize = 64 << 10;
    extern "C" fn start(prepared: *mut c_void) -> c_int {
        // SAFETY: the pointer is that which is given to `clone` below; the thread that has lent it stands still until the
        // child is gone or runs another program.
        unsafe { child(&*prepared.cast::<Prepared<'_>>()) }
    }
    let at = |step: Step| move |error: io::Error| (step, error);
    let flags = rustix::pipe::PipeFlags::CLOEXEC;
    let (errors, child_errors) = rustix::pipe::pipe_with(flags)
        .and_then(|(read, write)| Ok((read, rustix::io::fcntl_dupfd_cloexec(write, 3)?)))
        .map_err(|error| (Step::Descriptors, error.into()))?;
    let prepared = Prepared::new(exec, child_errors.as_fd()).map_err(at(Step::Prepare))?;
    let mut stack = vec![MaybeUninit::<u128>::uninit(); STACK / size_of::<u128>()];
    let pid = {
        let mut all = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: the child has a stack of its own, and what it reads was prepared above and stays: this thread goes on only
        // when it is done. It makes plain system calls, writes nothing but its own stack and `errno`, and runs no handler of
        // a signal: all are blocked until it has set them to their defaults.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            let top = stack.as_mut_ptr().add(stack.len()).cast::<c_void>();
            let argument = (&raw const prepared).cast_mut().cast::<c_void>();
            let pid = libc::clone(start, top, flags, argument);
            let error = io::Error::last_os_error();
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
            if pid == -1 { Err(error) } else { forked(pid) }
        }
    };
    let pid = pid.map_err(at(Step::Fork))?;
    drop(child_errors);
    let mut report = [0; 5];
    // Nothing in it and closed means that `execve` closed it.
    match rustix::io::retry_on_intr(|| rustix::io::read(&errors, &mut report)) {
        Ok(length) if length == report.len() => {
            rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).ok();
            let [code, errno @ ..] = report;
            let error = io::Error::from_raw_os_error(i32::from_ne_bytes(errno));
            Err((Step::from_code(code), error))
        }
        _ => Ok(pid),
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

/// Default action for every signal.
fn default_signals() {
    /// A kernel's `struct sigaction` of zeros, and some more: the default action, no flags, no mask.
    static DEFAULT: [u64; 8] = [0; 8];
    /// The size of the kernel's signal set.
    const SET: usize = 8;
    for number in 1..=64_i64 {
        // Not by `sigaction`, which does not touch 32 and 33, left ignored by `posix_spawn`: glibc keeps them for
        // itself. `SIGKILL` and `SIGSTOP` can't be changed.
        let none = std::ptr::null_mut::<u64>();
        // SAFETY: `rt_sigaction` reads a structure that is shorter than `DEFAULT`, and the default action installs no code.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, number, DEFAULT.as_ptr(), none, SET) };
    }
}

/// The child's side of [`spawn`] and [`spawn_and_wait`].
///
/// # Safety
///
/// To be called in a forked child only, in which all signals are blocked or have their default action.
unsafe fn child(prepared: &Prepared<'_>) -> ! {
    let exec = prepared.exec;
    // SAFETY: plain system calls on this process's own state, and on strings and lists that `pointers` has made.
    unsafe {
        let fail = |step: Step| -> ! {
            let errno = *libc::__errno_location();
            let [a, b, c, d] = errno.to_ne_bytes();
            let report = [step.code(), a, b, c, d];
            // If this fails the parent is gone, and so is the need to tell it.
            libc::write(
                prepared.errors.as_raw_fd(),
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
        if libc::getppid() != prepared.parent.as_raw_nonzero().get() {
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
        default_signals();
        let mut none = MaybeUninit::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        if libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut()) == -1 {
            fail(Step::Prepare);
        }
        for attempt in 0..=BUSY_RETRIES {
            libc::execve(
                exec.program.as_ptr(),
                prepared.argv.as_ptr(),
                prepared.env.as_ptr(),
            );
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
    default_signals();
    // SAFETY: the sets are initialised before they are used; the descriptor is new and owned by nobody else.
    unsafe {
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

/// This process does not die with its parent any more.
pub(crate) fn outlive_parent() -> io::Result<()> {
    let none: libc::c_ulong = 0;
    // SAFETY: the call takes two numbers.
    match unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, none) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
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

/// A set of these signals.
fn set_of(numbers: &[c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the set is initialised by the first call; numbers that are none change nothing.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for number in numbers {
            libc::sigaddset(set.as_mut_ptr(), *number);
        }
        set.assume_init()
    }
}

/// Changes the signals that this thread blocks; gives those from before.
fn block(how: c_int, set: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    let mut before = MaybeUninit::uninit();
    // SAFETY: both sets are valid places, and the second is initialised if the call works.
    unsafe {
        match libc::pthread_sigmask(how, set, before.as_mut_ptr()) {
            0 => Ok(before.assume_init()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Signals that are blocked, and read from a descriptor.
pub(crate) struct Held {
    before: libc::sigset_t,
    signals: OwnedFd,
}

impl Held {
    /// Where the signals are read, a `struct signalfd_siginfo` each. Blocks.
    pub(crate) fn signals(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }

    /// Blocks what was blocked before, and `more`.
    ///
    /// # Errors
    ///
    /// None that a process can cause.
    pub(crate) fn release(self, more: &[c_int]) -> io::Result<()> {
        block(libc::SIG_SETMASK, &self.before)?;
        block(libc::SIG_BLOCK, &set_of(more))?;
        Ok(())
    }
}

/// Blocks signals of a process that has one thread, to be read. `SIGCHLD` gets its default action, so that it comes.
///
/// # Errors
///
/// As `signalfd(2)`.
pub(crate) fn hold_signals(numbers: &[c_int]) -> io::Result<Held> {
    let set = set_of(numbers);
    // SAFETY: the default action installs no code.
    if unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    let before = block(libc::SIG_BLOCK, &set)?;
    // SAFETY: the set is valid; the descriptor is new and owned by nobody else.
    let signals = unsafe {
        match libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) {
            -1 => return Err(io::Error::last_os_error()),
            fd => OwnedFd::from_raw_fd(fd),
        }
    };
    Ok(Held { before, signals })
}

/// Nothing is done at these signals from now on. Programs that this one executes have the default action for them, which they
/// would not have for signals that are ignored or blocked.
///
/// # Errors
///
/// `EINVAL` for a signal that nothing can be done about.
pub(crate) fn lose_signals(numbers: &[c_int]) -> io::Result<()> {
    extern "C" fn nothing(_: c_int) {}
    let handler: extern "C" fn(c_int) = nothing;
    // SAFETY: a `sigaction` of zeros is a valid one, and the function that is installed touches nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        for number in numbers {
            if libc::sigaction(*number, &raw const action, std::ptr::null_mut()) == -1 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

/// Has the default action of a signal that this process, which has one thread, blocks. Returns when it goes on.
///
/// # Errors
///
/// None that a process can cause.
pub(crate) fn obey(number: c_int) -> io::Result<()> {
    let set = set_of(&[number]);
    // SAFETY: a signal to this very thread, whose action is the default.
    if unsafe { libc::raise(number) } != 0 {
        return Err(io::Error::last_os_error());
    }
    block(libc::SIG_UNBLOCK, &set)?;
    block(libc::SIG_BLOCK, &set)?;
    Ok(())
}

/// Forks. The child, or `None` in the child.
///
/// # Errors
///
/// As `fork(2)`; and if this process has more than one thread, of which the child would have one only.
pub(crate) fn fork() -> io::Result<Option<Pid>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other(
            "this process has more than one thread, so it can't be divided",
        ));
    }
    // SAFETY: the process has one thread, so the child's memory is in a consistent state.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(Pid::from_raw(pid)),
    }
}

/// See [`give_back_memory`](crate::give_back_memory).
pub(crate) fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes a number and may be called at any time by any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
