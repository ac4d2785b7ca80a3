//! The daemon's side of a warden.
//!
//! One task (the *attendant*) reads what the warden says, for as long as it lives, and cleans up after it. Requests are
//! written by whoever makes them and answered through the table of what is open.

mod attendant;
mod child;
mod failure;
mod host;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kolo_transport::frame::FrameError;
use kolo_transport::local::ControlSocket;
use kolo_transport::wire::span::Span;
use rustix::event::{PollFd, PollFlags, Timespec};
use serde_bytes::ByteBuf;
use tokio::sync::{Notify, OnceCell, oneshot, watch};
use tokio::time::timeout;

use self::attendant::Attendant;
pub use self::child::{Child, SignalError};
use self::child::{Life, Process};
use self::failure::Subject;
use self::host::Host;
use crate::error::SpawnError;
use crate::folder;
use crate::protocol::{FromWarden, PROTOCOL, ToWarden, Will};
use crate::request::SpawnRequest;
use crate::signal::Signal;
use crate::sweep;

/// How long a program may take to show that it is a warden.
const START_DEADLINE: Duration = Duration::from_secs(10);

/// How long the start of a process may take, from request to running program.
const SPAWN_DEADLINE: Duration = Duration::from_secs(30);

/// How long [`Warden::close`] waits in all. The attendant's own deadlines are shorter.
const CLOSE_DEADLINE: Duration = Duration::from_secs(40);

/// Signals to one process that may wait for the warden to read them.
const MAX_ORDERS: usize = 64;

/// A handle to a warden and so to all processes that it started. See the [crate's text](crate).
///
/// Dropping it kills them without waiting; [`Warden::close`] waits. The handle works on any tokio runtime with I/O and
/// time; it belongs to that on which it was started, and when that ends the processes end.
#[derive(Debug)]
pub struct Warden {
    shared: Arc<Shared>,
    gone: watch::Receiver<bool>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    socket: ControlSocket,
    table: Mutex<Table>,
    /// Told when there is an order.
    ordered: Notify,
    pid: u32,
    /// In the environment of the warden and of everything that it starts.
    mark: String,
    /// The directory of its processes, once there is one.
    folder: OnceCell<PathBuf>,
    /// Set when the handle is closed or dropped.
    closing: watch::Sender<bool>,
}

/// What the daemon waits for.
#[derive(Debug, Default)]
struct Table {
    next: u64,
    starting: HashMap<u64, Starting>,
    running: HashMap<u64, Running>,
    /// Signals that the warden has not been told yet, and to whom.
    orders: VecDeque<(u64, Signal)>,
    /// Nothing more comes from the warden.
    lost: bool,
}

#[derive(Debug)]
struct Starting {
    subject: Subject,
    reply: oneshot::Sender<Result<Child, SpawnError>>,
}

#[derive(Debug)]
struct Running {
    process: Arc<Process>,
    life: watch::Sender<Life>,
    /// How many orders wait.
    orders: usize,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        // No code that holds the lock can leave the table half changed.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the warden has closed its end.
    fn is_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Has the warden send a signal to a process.
    pub(crate) fn order(&self, id: u64, pid: u32, signal: Signal) -> Result<(), SignalError> {
        let mut table = self.table();
        let Some(running) = table.running.get_mut(&id) else {
            return Err(SignalError::Ended { pid });
        };
        if running.orders >= MAX_ORDERS {
            let reason = format!("{MAX_ORDERS} signals wait for the warden, which reads none");
            return Err(SignalError::Refused { pid, reason });
        }
        running.orders += 1;
        table.orders.push_back((id, signal));
        drop(table);
        self.ordered.notify_one();
        Ok(())
    }

    fn next_order(&self) -> Option<ToWarden> {
        let mut table = self.table();
        let (id, signal) = table.orders.pop_front()?;
        if let Some(running) = table.running.get_mut(&id) {
            running.orders -= 1;
        }
        Some(ToWarden::Signal { id, signal })
    }

    /// Passes on orders. Never ends.
    async fn pass_on(&self) {
        loop {
            while let Some(order) = self.next_order() {
                // A warden that is gone has killed everything.
                if let Err(error) = self.socket.send(&order, &[]).await {
                    tracing::debug!(pid = self.pid, %error, "a signal was not passed on");
                }
            }
            self.ordered.notified().await;
        }
    }

    /// Tells the warden to kill everything and to exit.
    fn close(&self) {
        self.closing.send_replace(true);
        // An error means that the warden is gone already.
        self.socket.shutdown().ok();
    }
}

/// Takes a request out of the table when nobody waits for its answer any more.
#[derive(Debug)]
struct Entry<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.shared.table().starting.remove(&self.id);
    }
}

impl Warden {
    /// Starts `exe` as a warden. The program's `main` must begin with [`run_if_warden`](crate::run_if_warden). The usual `exe` is
    /// `/proc/self/exe`: this program, even if its file was replaced meanwhile.
    ///
    /// `owner` names the daemon: on one machine no two at a time have the same name. It begins the mark that everything below
    /// the warden has in its environment, by which [`sweep_left_by`](crate::sweep_left_by) finds what the daemon has left.
    ///
    /// Takes as long as the program needs to start, at most 10 s; the program dies with this process until it has shown that
    /// it is a warden. Cancel safe: nothing is left then.
    ///
    /// # Errors
    ///
    /// [`SpawnError::NotAWarden`], when nothing of what the program started is left, and those of starting a program.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime with I/O and time.
    pub async fn start(exe: &Path, owner: &str) -> Result<Self, SpawnError> {
        let subject = Subject::warden(exe);
        let (socket, theirs) =
            ControlSocket::pair().map_err(|error| subject.system("socket", &error))?;
        let mark = sweep::mark(owner);
        let mut host = Host::start(exe, theirs, mark.clone())
            .await
            .map_err(|failed| subject.failure_of_start(failed))?;
        let hello = timeout(START_DEADLINE, socket.recv::<FromWarden>()).await;
        let reason = match hello {
            Ok(Ok(Some((FromWarden::Up { protocol }, _)))) if protocol == PROTOCOL => None,
            Ok(Ok(Some((FromWarden::Up { protocol }, _)))) => Some(format!(
                "is one of another version of kolo (protocol {protocol}, needed is {PROTOCOL})"
            )),
            Ok(Ok(Some(_)) | Err(_)) => Some("said something else".to_owned()),
            Ok(Ok(None)) => Some(host.how_it_ended().await),
            Err(_) => Some(format!("said nothing for {}", Span(START_DEADLINE))),
        };
        if let Some(reason) = reason {
            host.kill();
            host.reap().await;
            let path = exe.to_owned();
            return Err(SpawnError::NotAWarden { path, reason });
        }
        host.is_a_warden();
        let shared = Arc::new(Shared {
            socket,
            table: Mutex::default(),
            ordered: Notify::new(),
            pid: host.pid(),
            mark,
            folder: OnceCell::new(),
            closing: watch::Sender::new(false),
        });
        let (gone_tx, gone) = watch::channel(false);
        tokio::spawn(Attendant::new(shared.clone(), host, gone_tx).run());
        Ok(Self { shared, gone })
    }

    /// Gives the warden a datagram to send when this process has died, as soon as nothing is left of what the warden has started.
    /// It is sent three times, for datagrams get lost. A warden that was closed or dropped sends nothing, nor does one that could
    /// not kill everything. A later will takes the place of an earlier one.
    ///
    /// # Errors
    ///
    /// If the warden is gone, or the datagram is longer than a frame.
    pub async fn will(&self, to: SocketAddr, datagram: Vec<u8>) -> Result<(), FrameError> {
        let datagram = ByteBuf::from(datagram);
        let will = ToWarden::Will(Will { to, datagram });
        self.shared.socket.send(&will, &[]).await
    }

    /// A directory for files of the warden's processes, which this user alone can enter. It is made at the first call, where
    /// temporary files are (`TMPDIR`), and is gone with the warden, whether the warden or this process is killed first.
    ///
    /// # Errors
    ///
    /// If the warden is gone, or the directory can't be made.
    pub async fn folder(&self) -> io::Result<&Path> {
        let making = async || {
            let path = folder::path(&self.shared.mark);
            // First, so that nothing is left of a daemon that dies now.
            let keep = ToWarden::Folder(ByteBuf::from(path.as_os_str().as_bytes()));
            let kept = self.shared.socket.send(&keep, &[]).await;
            kept.map_err(io::Error::other)?;
            folder::make(&path)?;
            Ok(path)
        };
        let made = self.shared.folder.get_or_try_init(making).await;
        made.map(PathBuf::as_path)
    }

    /// The warden's own process id.
    pub fn pid(&self) -> u32 {
        self.shared.pid
    }

    /// Whether the warden is gone, and with it all its processes. [`Warden::spawn`] fails then.
    pub fn is_lost(&self) -> bool {
        self.shared.table().lost
    }

    /// Waits until the warden is gone, and with it all its processes.
    pub fn gone(&self) -> impl Future<Output = ()> + use<> {
        let mut gone = self.gone.clone();
        async move {
            // An error means that the runtime of the attendant is gone, and it with it.
            gone.wait_for(|gone| *gone).await.ok();
        }
    }

    /// Starts a process, and returns when its program runs.
    ///
    /// Many may be called at once (join their futures): each sends its request without waiting for the answers to those
    /// before. The request's descriptors are closed here as soon as the warden has them. Takes at most 30 s. Cancel
    /// safe: a process that still starts later is killed.
    ///
    /// # Errors
    ///
    /// [`SpawnError`].
    pub async fn spawn(&self, request: SpawnRequest) -> Result<Child, SpawnError> {
        let (reply, answer) = oneshot::channel();
        let id = {
            let mut table = self.shared.table();
            table.next += 1;
            table.next
        };
        let packed = request.pack(id, &self.shared.mark)?;
        let subject = Subject::worker(&request, packed.argv.len() + packed.env.len());
        {
            let mut table = self.shared.table();
            if table.lost {
                return Err(subject.warden_lost());
            }
            let subject = subject.clone();
            table.starting.insert(id, Starting { subject, reply });
        }
        let entry = Entry {
            shared: &self.shared,
            id,
        };
        let done = timeout(SPAWN_DEADLINE, async {
            self.send(&ToWarden::Spawn(packed), request, &subject)
                .await?;
            // The sender is dropped without an answer only together with the attendant.
            answer.await.unwrap_or_else(|_| Err(subject.warden_lost()))
        })
        .await;
        drop(entry);
        done.unwrap_or_else(|_| Err(subject.timed_out(SPAWN_DEADLINE)))
    }

    async fn send(
        &self,
        packed: &ToWarden,
        request: SpawnRequest,
        subject: &Subject,
    ) -> Result<(), SpawnError> {
        let fds: Vec<BorrowedFd<'_>> = [request.stdout.as_fd(), request.stderr.as_fd()]
            .into_iter()
            .chain(request.fds.iter().map(|(fd, _)| fd.as_fd()))
            .chain(request.stdin.as_ref().map(AsFd::as_fd))
            .collect();
        match self.shared.socket.send(packed, &fds).await {
            Ok(()) => Ok(()),
            Err(_) if self.shared.is_hung_up() => Err(subject.warden_lost()),
            Err(FrameError::Io(reason)) => Err(subject.resources(reason)),
            Err(error) => Err(subject.resources(error.to_string())),
        }
    }

    /// Kills what is left, and returns when nothing is left and the warden itself has ended.
    ///
    /// Takes milliseconds; at most 40 s if a process can't be killed because it is in an uninterruptible wait. Dropped
    /// half-way it goes on in the background.
    pub async fn close(self) {
        self.shared.close();
        if timeout(CLOSE_DEADLINE, self.gone()).await.is_err() {
            tracing::error!(pid = self.pid(), "the warden has not ended");
        }
    }
}

impl Drop for Warden {
    fn drop(&mut self) {
        self.shared.close();
    }
}
