//! The warden: a process with one thread that forks workers, watches them and leaves none behind.
//!
//! One loop over the socket to the daemon, a descriptor that tells of ended children, and one pipe for each
//! child that has not got to its program yet. No request is waited for, so forks overlap with the `execve`s of
//! those before.

mod hunt;
mod notice;
mod outbox;
mod parent;

use std::collections::{HashMap, HashSet};
use std::ffi::{CString, OsStr};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use kolo_transport::local::FdReceiver;
use kolo_transport::wire::Exit;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use self::outbox::Outbox;
use self::parent::Parent;
use crate::protocol::{FromWarden, PROTOCOL, Spawn, ToWarden, WARDEN_FD_VAR};
use crate::signal::Signal;
use crate::sys::{self, Dead, Step};

/// Messages to the daemon that may wait. While there are more, no request is read.
const MAX_WAITING: usize = 256;

/// If this process was started as a warden, be it, and never return. Otherwise do nothing.
///
/// The first line of every `main` that may host a node: before threads are started, files are opened and arguments
/// are read.
pub fn run_if_warden() {
    let Some(value) = std::env::var_os(WARDEN_FD_VAR) else {
        return;
    };
    let code = match Warden::begin(&value) {
        Ok(mut warden) => {
            warden.run();
            let is_abandoned = warden.parent.has_hung_up(warden.socket.as_fd());
            let is_over = warden.kill_everything();
            if let Some(folder) = &warden.folder {
                crate::folder::remove(folder);
            }
            if is_abandoned && is_over {
                warden.parent.publish();
            }
            0
        }
        Err(reason) => {
            // Standard error is the daemon's. If it is closed there is nowhere left to say it.
            writeln!(io::stderr(), "kolo warden: {reason}").ok();
            2
        }
    };
    std::process::exit(code);
}

/// A child that was forked for a request.
#[derive(Debug)]
struct Worker {
    id: u64,
    /// It was to be killed with everything below it.
    killed: bool,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Between `fork` and the end of `execve`.
    Starting { errors: OwnedFd, pidfd: OwnedFd },
    /// Its program runs, and the daemon was told so.
    Running,
    /// It could not run its program. The daemon is told when it is gone.
    Failed { step: Step, errno: i32 },
}

#[derive(Debug)]
struct Warden {
    pid: Pid,
    socket: OwnedFd,
    signals: OwnedFd,
    parent: Parent,
    /// To be removed at the end.
    folder: Option<PathBuf>,
    inbox: FdReceiver,
    outbox: Outbox,
    /// By process id.
    workers: HashMap<u32, Worker>,
    /// Workers that have ended and have left others behind: requests by process id.
    ended: HashMap<u32, u64>,
    /// Who has been asked to end, and by which signal: process id and start.
    noticed: HashSet<(u32, u64, Signal)>,
}

/// A worker that was just reaped.
#[derive(Debug)]
struct Buried {
    pid: u32,
    worker: Worker,
    exit: Exit,
}

impl Warden {
    /// Turns this process into a warden.
    fn begin(value: &OsStr) -> Result<Self, String> {
        use rustix::net::{AddressFamily, sockopt};
        if value != "0" {
            return Err(format!(
                "{WARDEN_FD_VAR} is {}, allowed is 0; it is set by kolo alone, unset it",
                value.display()
            ));
        }
        let what = |what: &'static str| move |error: Errno| format!("{what}: {error}");
        let stdin = rustix::stdio::stdin();
        if sockopt::socket_domain(stdin) != Ok(AddressFamily::UNIX) {
            return Err(format!(
                "{WARDEN_FD_VAR} is set but standard input is no Unix socket; it is set by kolo alone, unset it"
            ));
        }
        // From here on the end of the socket says that the daemon is gone.
        sys::outlive_parent().map_err(|error| format!("parent-death signal: {error}"))?;
        let socket = rustix::io::fcntl_dupfd_cloexec(stdin, 3).map_err(what("socket"))?;
        sys::close_inherited(socket.as_fd());
        let parent = Parent::find();
        // Children inherit this one.
        let null =
            std::fs::File::open("/dev/null").map_err(|error| format!("/dev/null: {error}"))?;
        rustix::stdio::dup2_stdin(&null).map_err(what("standard input"))?;
        drop(null);
        rustix::io::ioctl_fionbio(&socket, true).map_err(what("socket"))?;
        // Away from the terminal: its Ctrl-C is for the daemon. Fails if it leads a group already, which is as good.
        rustix::process::setsid().ok();
        let signals = sys::take_signals().map_err(|error| format!("signals: {error}"))?;
        let pid = rustix::process::getpid();
        rustix::process::set_child_subreaper(Some(pid)).map_err(what("subreaper"))?;
        rustix::thread::set_name(c"kolo-warden").map_err(what("name"))?;
        let mut warden = Self {
            pid,
            socket,
            signals,
            parent,
            folder: None,
            inbox: FdReceiver::new(),
            outbox: Outbox::default(),
            workers: HashMap::new(),
            ended: HashMap::new(),
            noticed: HashSet::new(),
        };
        warden.tell(&FromWarden::Up { protocol: PROTOCOL }, None);
        Ok(warden)
    }

    /// Works until the socket ends.
    fn run(&mut self) {
        loop {
            self.outbox.flush(self.socket.as_fd());
            let ready = self.wait();
            for pid in ready.settled {
                self.settle(pid);
            }
            if ready.signals {
                self.reap();
            }
            if ready.socket && !self.receive() {
                return;
            }
        }
    }

    fn wait(&self) -> Ready {
        // The end of the stream is seen even while nothing else is read.
        let mut interest = PollFlags::RDHUP;
        interest.set(PollFlags::IN, self.outbox.len() < MAX_WAITING);
        interest.set(PollFlags::OUT, !self.outbox.is_empty());
        let mut fds = vec![
            PollFd::new(&self.signals, PollFlags::IN),
            PollFd::new(&self.socket, interest),
        ];
        let mut pids = Vec::new();
        for (pid, worker) in &self.workers {
            if let State::Starting { errors, .. } = &worker.state {
                fds.push(PollFd::new(errors, PollFlags::IN));
                pids.push(*pid);
            }
        }
        // All signals are blocked, so an error can only be a shortage of memory: look at everything then.
        let all = rustix::event::poll(&mut fds, None).is_err();
        let ready = |fd: &PollFd<'_>| all || !fd.revents().is_empty();
        let readable = PollFlags::IN | PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        Ready {
            signals: ready(&fds[0]),
            socket: all || fds[1].revents().intersects(readable),
            settled: fds[2..]
                .iter()
                .zip(pids)
                .filter(|(fd, _)| ready(fd))
                .map(|(_, pid)| pid)
                .collect(),
        }
    }

    /// Reads what the daemon sent; `false` at the end.
    fn receive(&mut self) -> bool {
        match self.inbox.fill(self.socket.as_fd()) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
        }
        let mut signals: Vec<(Signal, HashSet<u64>)> = Vec::new();
        let goes_on = loop {
            match self.inbox.next::<ToWarden>() {
                Ok(Some((ToWarden::Spawn(request), fds))) => self.spawn(&request, fds),
                Ok(Some((ToWarden::Will(will), _))) => self.parent.keep(will),
                Ok(Some((ToWarden::Folder(path), _))) => {
                    self.folder = Some(OsStr::from_bytes(&path).into());
                }
                // Those that came together go out together, because each look at all processes takes a while.
                Ok(Some((ToWarden::Signal { id, signal }, _))) => match signals.last_mut() {
                    Some((last, ids)) if *last == signal => {
                        ids.insert(id);
                    }
                    _ => signals.push((signal, [id].into())),
                },
                Ok(None) => break true,
                // Not what this version says: nothing more can be understood.
                Err(error) => {
                    let reason = error.to_string();
                    self.tell(&FromWarden::Fault { reason }, None);
                    break false;
                }
            }
        };
        for (signal, ids) in signals {
            self.signal(signal, &ids);
        }
        goes_on
    }

    fn spawn(&mut self, request: &Spawn, fds: Vec<OwnedFd>) {
        let id = request.id;
        match start(request, fds) {
            Ok((pid, errors, pidfd)) => {
                let state = State::Starting { errors, pidfd };
                let pid = pid.as_raw_nonzero().get().unsigned_abs();
                // The number is free, so nothing is left of an earlier process of this number.
                if let Some(id) = self.ended.remove(&pid) {
                    self.tell(&FromWarden::Gone { id }, None);
                }
                let killed = false;
                self.workers.insert(pid, Worker { id, killed, state });
            }
            Err((step, error)) => {
                let errno = error.raw_os_error().unwrap_or(Errno::INVAL.raw_os_error());
                self.tell(&FromWarden::Failed { id, step, errno }, None);
            }
        }
    }

    /// Finds out whether a starting child got to its program. Called when its pipe may be readable and when it has ended.
    fn settle(&mut self, pid: u32) {
        let Some(worker) = self.workers.get_mut(&pid) else {
            return;
        };
        let id = worker.id;
        let (errors, pidfd) = match std::mem::replace(&mut worker.state, State::Running) {
            State::Starting { errors, pidfd } => (errors, pidfd),
            settled => {
                worker.state = settled;
                return;
            }
        };
        let mut report = [0; 5];
        // The pipe does not block. Nothing in it and closed means that `execve` closed it.
        match rustix::io::read(&errors, &mut report) {
            Ok(length) if length == report.len() => {
                let [code, errno @ ..] = report;
                worker.state = State::Failed {
                    step: Step::from_code(code),
                    errno: i32::from_ne_bytes(errno),
                };
            }
            Err(Errno::AGAIN) => worker.state = State::Starting { errors, pidfd },
            _ => self.tell(&FromWarden::Spawned { id, pid }, Some(pidfd)),
        }
    }

    /// Buries every child that has ended.
    fn reap(&mut self) {
        let mut told = [0; 128];
        // Empties the descriptor; one signal may stand for many children.
        while rustix::io::read(&self.signals, &mut told).is_ok() {}
        let mut buried = Vec::new();
        while let Dead::Child(pid) = sys::peek_dead() {
            if !self.bury(pid, &mut buried) {
                break;
            }
        }
        self.report(buried);
    }

    /// Reaps one child that has ended; `false` if that is not possible.
    fn bury(&mut self, pid: Pid, buried: &mut Vec<Buried>) -> bool {
        let number = pid.as_raw_nonzero().get().unsigned_abs();
        self.settle(number);
        let reaped = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
        let Ok(Some((_, status))) = reaped else {
            return false;
        };
        let exit = status
            .exit_status()
            .map(Exit::Code)
            .or_else(|| status.terminating_signal().map(Exit::Signal))
            .unwrap_or(Exit::Unknown);
        if let Some(worker) = self.workers.remove(&number) {
            let pid = number;
            buried.push(Buried { pid, worker, exit });
        }
        true
    }

    /// Tells how workers have ended, and of which nothing is left any more.
    fn report(&mut self, buried: Vec<Buried>) {
        if buried.is_empty() && self.ended.is_empty() {
            return;
        }
        let killed: HashSet<u32> = buried
            .iter()
            .filter(|buried| buried.worker.killed)
            .map(|buried| buried.pid)
            .collect();
        if !killed.is_empty() && self.has_strangers() {
            // What it has started since it was hunted.
            self.hunt(&killed, |owner| {
                owner.is_some_and(|owner| killed.contains(&owner))
            });
        }
        let fresh = buried.iter().map(|buried| buried.pid);
        let left = self.left(&fresh.chain(self.ended.keys().copied()).collect());
        let gone: Vec<u32> = self
            .ended
            .keys()
            .filter(|pid| !left.contains(pid))
            .copied()
            .collect();
        for id in gone
            .iter()
            .filter_map(|pid| self.ended.remove(pid))
            .collect::<Vec<_>>()
        {
            self.tell(&FromWarden::Gone { id }, None);
        }
        for Buried { pid, worker, exit } in buried {
            let id = worker.id;
            let message = match worker.state {
                State::Failed { step, errno } => FromWarden::Failed { id, step, errno },
                State::Starting { .. } | State::Running => {
                    let left = !worker.killed && left.contains(&pid);
                    if left {
                        self.ended.insert(pid, id);
                    }
                    FromWarden::Exited { id, exit, left }
                }
            };
            self.tell(&message, None);
        }
        self.kill_strangers_of_nobody();
        self.notice_the_deaf();
    }

    fn tell(&mut self, message: &FromWarden, fd: Option<OwnedFd>) {
        self.outbox.push(message, fd);
    }
}

/// What there is to do.
#[derive(Debug)]
struct Ready {
    signals: bool,
    socket: bool,
    settled: Vec<u32>,
}

/// Forks. Returns the child, the read end of its error pipe and its pidfd.
fn start(request: &Spawn, fds: Vec<OwnedFd>) -> Result<(Pid, OwnedFd, OwnedFd), (Step, io::Error)> {
    let at = |step: Step| move |error: io::Error| (step, error);
    let descriptors = |error: Errno| (Step::Descriptors, io::Error::from(error));
    if fds.len() != request.numbers.len() + 2 {
        // This process has no room for them.
        return Err(descriptors(Errno::MFILE));
    }
    let numbers = [1, 2].into_iter().chain(request.numbers.iter().copied());
    let mut placed: Vec<(OwnedFd, RawFd)> = fds.into_iter().zip(numbers).collect();
    // Above all numbers, so that placing one does not overwrite another.
    let above = placed
        .iter()
        .map(|(_, number)| number.saturating_add(1))
        .max()
        .unwrap_or(3);
    let lift = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, above);
    for (fd, _) in &mut placed {
        *fd = lift(fd).map_err(descriptors)?;
    }
    let (errors, child_errors) = rustix::pipe::pipe_with(
        rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK,
    )
    .map_err(descriptors)?;
    let child_errors = lift(&child_errors).map_err(descriptors)?;
    let invalid = |_| (Step::Prepare, io::Error::from(Errno::INVAL));
    let program = CString::new(request.program.as_slice()).map_err(invalid)?;
    let cwd = request
        .cwd
        .as_ref()
        .map(|cwd| CString::new(cwd.as_slice()))
        .transpose()
        .map_err(invalid)?;
    let borrowed: Vec<(BorrowedFd<'_>, RawFd)> = placed
        .iter()
        .map(|(fd, number)| (fd.as_fd(), *number))
        .collect();
    let exec = sys::Exec {
        program: &program,
        argv: &request.argv,
        env: &request.env,
        cwd: cwd.as_deref(),
        fds: &borrowed,
    };
    let pid = sys::spawn(&exec, child_errors.as_fd()).map_err(at(Step::Fork))?;
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Ok((pid, errors, pidfd)),
        Err(error) => {
            // It is no worker; it is reaped like an orphan.
            hunt::kill(pid);
            Err((Step::Fork, error.into()))
        }
    }
}
