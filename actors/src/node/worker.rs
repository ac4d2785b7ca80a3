//! The actor that supervises one worker process.

use std::any::Any;
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use kolo_core::node::colocator::KILLED;
use kolo_core::node::messages::{Input, WorkerEvent, WorkerId};
use kolo_process::{Child, LineReader, Signal, SignalError, SpawnError, SpawnRequest};
use kolo_transport::FrameError;
use kolo_transport::ids::Generation;
use kolo_transport::local::ControlSocket;
use kolo_transport::wire::{Account, Exit, FromWorker, Stdio};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::asks::Happened;
use super::author::{Author, now_ms};
use super::colocator::NodeColocator;
use super::installed::InstalledFile;

use super::ports::{CallsEnd, ControlReceiver, ControlSender, NodeContext};
use super::warden::JobWarden;

/// How long to wait for the last output and results of a process that has ended, and that was not asked to. What still holds
/// its pipes open then is killed, or is a process that left its group on purpose.
pub(super) const DRAIN: Duration = Duration::from_millis(250);

/// Lines of standard error that go with the news of a loss.
pub(super) const STDERR_TAIL: usize = 20;

/// The call socket's number in the worker; the control socket follows. See
/// [`kolo_core::node::environment::WORKER_FD_NUMBERS`].
const CALL_FD: i32 = 3;

/// A program that is here and was verified.
pub struct ProgramFile {
    /// Where it can be executed from.
    pub path: PathBuf,
    /// Device and inode of the file, which a worker must run.
    pub id: (u64, u64),
    /// Dropped when nobody needs the file any more.
    pub hold: Box<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for ProgramFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProgramFile")
            .field("path", &self.path)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// What a job's workers are started from.
#[derive(Debug, Clone)]
pub enum Launch {
    /// A program that was sent here.
    Sent(Arc<ProgramFile>),
    /// A program that is installed here.
    Installed(InstalledFile),
}

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

/// What a worker is made of.
#[derive(Debug)]
pub(super) struct WorkerPlan {
    pub(super) worker: WorkerId,
    pub(super) generation: Generation,
    pub(super) program: Launch,
    pub(super) argv0: String,
    pub(super) args: Vec<String>,
    pub(super) env: Vec<(OsString, OsString)>,
    pub(super) control: ControlSender,
    pub(super) messages: ControlReceiver,
    /// Whose output it is.
    pub(super) author: Arc<Author>,
    /// How long what it has left behind may live on when it has ended well and was not asked to, as long as that holds its
    /// output.
    pub(super) linger: Duration,
    /// Shared with the colocator, which sets it before it tells the worker.
    pub(super) stopping: Arc<watch::Sender<Stopping>>,
}

/// Supervises one worker process: starts it, watches it, tells its colocator, signals it.
pub(super) struct Worker {
    context: Arc<NodeContext>,
    node: Addr<NodeColocator>,
    id: WorkerId,
    plan: Option<(JobWarden, WorkerPlan)>,
    child: Option<Child>,
    stopping: Arc<watch::Sender<Stopping>>,
}

impl Worker {
    pub(super) fn new(
        context: Arc<NodeContext>,
        node: Addr<NodeColocator>,
        warden: JobWarden,
        plan: WorkerPlan,
    ) -> Self {
        Self {
            context,
            node,
            id: plan.worker,
            stopping: plan.stopping.clone(),
            plan: Some((warden, plan)),
            child: None,
        }
    }
}

impl Actor for Worker {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let Some((warden, plan)) = self.plan.take() else {
            return;
        };
        let supervisor = Supervisor {
            context: self.context.clone(),
            node: self.node.clone(),
            actor: ctx.address(),
            worker: self.id,
        };
        let life = async move {
            match plan.program.clone() {
                Launch::Sent(program) => supervisor.run(warden, plan, program).await,
                Launch::Installed(file) => supervisor.run_installed(warden, plan, &file).await,
            }
        };
        ctx.spawn(life.into_actor(self).map(|(), _, ctx| {
            ctx.stop();
        }));
    }
}

/// The process runs.
#[derive(Message)]
#[rtype(result = "()")]
struct Running(Child);

impl Handler<Running> for Worker {
    type Result = ();

    fn handle(&mut self, Running(child): Running, _: &mut Self::Context) {
        self.child = Some(child);
    }
}

/// Send a signal to the process and to what is below it; what reaches whom is said by [`Child::signal`]. The first that asks
/// it to end begins its stop: what it leaves behind from then on has time until the KILL.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(super) struct SignalWorker(pub(super) Signal);

impl Handler<SignalWorker> for Worker {
    type Result = ();

    fn handle(&mut self, SignalWorker(signal): SignalWorker, _: &mut Self::Context) {
        let Some(child) = &self.child else { return };
        // Before the signal: a worker that ends of it at once must be seen to have ended in a stop, or what is below it is killed.
        if signal.is_notice() {
            self.stopping.send_replace(Stopping::Signalled);
        }
        match child.signal(signal) {
            Ok(()) | Err(SignalError::Ended { .. }) => {}
            Err(error) => {
                tracing::error!(slot = %self.id.slot, %error, ?signal, "a worker was not signalled");
            }
        }
    }
}

/// A worker's life, from its start to the last of its output.
pub(super) struct Supervisor {
    pub(super) context: Arc<NodeContext>,
    node: Addr<NodeColocator>,
    actor: Addr<Worker>,
    worker: WorkerId,
}

/// Why a process was not started, and what it counts as ended with: see
/// [`RankFailure::was_not_started`](kolo_transport::wire::RankFailure::was_not_started).
#[derive(Debug)]
pub(super) struct NotStarted {
    exit: Exit,
    reason: String,
}

impl From<String> for NotStarted {
    fn from(reason: String) -> Self {
        let exit = Exit::Code(1);
        Self { exit, reason }
    }
}

impl From<SpawnError> for NotStarted {
    fn from(error: SpawnError) -> Self {
        let code = match error {
            SpawnError::NotFound { .. } => 127,
            SpawnError::NotExecutable { .. }
            | SpawnError::NotAProgram { .. }
            | SpawnError::Busy { .. }
            | SpawnError::BadDirectory { .. }
            | SpawnError::TooLarge { .. } => 126,
            _ => 1,
        };
        Self {
            exit: Exit::Code(code),
            reason: error.to_string(),
        }
    }
}

impl From<NotStarted> for WorkerEvent {
    fn from(NotStarted { exit, reason }: NotStarted) -> Self {
        Self::SpawnFailed { exit, reason }
    }
}

/// A process that was started, and the node's ends of its sockets and pipes.
struct Launched {
    child: Child,
    control: Arc<ControlSocket>,
    calls: UnixStream,
    readers: Vec<JoinHandle<()>>,
}

impl Supervisor {
    pub(super) async fn tell(&self, event: WorkerEvent) {
        let worker = self.worker;
        let happened = Happened(Input::Worker { worker, event });
        // A node that is gone has killed everything and wants to know nothing.
        if self.node.send(happened).await.is_err() {
            tracing::debug!(slot = %worker.slot, "an event of a worker came after the end of the node");
        }
    }

    /// Makes the process known to its actor, before anyone can want it signalled. False if the actor is gone.
    pub(super) async fn introduce(&self, child: &Child) -> bool {
        self.actor.send(Running(child.clone())).await.is_ok()
    }

    async fn run(self, warden: JobWarden, mut plan: WorkerPlan, program: Arc<ProgramFile>) {
        let launched = match self.launch(warden, &mut plan, &program).await {
            Ok(launched) => launched,
            Err(failed) => return self.tell(failed.into()).await,
        };
        let Launched {
            child,
            control,
            calls,
            mut readers,
        } = launched;
        let pid = child.pid();
        if !self.introduce(&child).await {
            return;
        }
        self.tell(WorkerEvent::Spawned { pid }).await;
        let calls = self
            .context
            .calls
            .connect(self.worker, calls, plan.control.clone());
        let mut calls_end = match calls {
            Ok(end) => Some(end),
            Err(error) => {
                let reason = format!("its call socket: {error}");
                self.tell(WorkerEvent::Fault { reason }).await;
                None
            }
        };
        let writer = self
            .context
            .runtime
            .spawn(write_control(control.clone(), plan.messages));
        self.watch(&child, &control, &program, &mut calls_end).await;
        let exit = child.wait().await;
        let account = Account {
            at_ms: now_ms(),
            age_ms: 0,
            error: None,
        };
        self.tell(WorkerEvent::Ended).await;
        self.tell(WorkerEvent::Accounted(account)).await;
        writer.abort();
        see_off(&child, &plan.stopping, Duration::ZERO, &mut readers).await;
        drain(&mut readers, calls_end).await;
        self.tell(WorkerEvent::Exited {
            exit,
            stderr_tail: plan.author.stderr_tail(STDERR_TAIL),
        })
        .await;
    }

    async fn launch(
        &self,
        warden: JobWarden,
        plan: &mut WorkerPlan,
        program: &ProgramFile,
    ) -> Result<Launched, NotStarted> {
        let sockets = |error: std::io::Error| format!("no sockets for a worker: {error}");
        let (control, control_end) = {
            let _entered = self.context.runtime.enter();
            ControlSocket::pair().map_err(sockets)?
        };
        let (calls, calls_end) = UnixStream::pair().map_err(sockets)?;
        let (stdout_reader, stdout) = kolo_process::pipe().map_err(sockets)?;
        let (stderr_reader, stderr) = kolo_process::pipe().map_err(sockets)?;
        let child = warden
            .get()
            .await?
            .spawn(SpawnRequest {
                program: program.path.clone(),
                argv0: std::mem::take(&mut plan.argv0),
                args: std::mem::take(&mut plan.args),
                env: std::mem::take(&mut plan.env),
                cwd: None,
                fds: vec![(calls_end.into(), CALL_FD), (control_end, CALL_FD + 1)],
                stdin: None,
                stdout,
                stderr,
            })
            .await?;
        let readers = [
            (stdout_reader, Stdio::Stdout),
            (stderr_reader, Stdio::Stderr),
        ]
        .into_iter()
        .map(|(pipe, stream)| {
            let author = plan.author.clone();
            self.context
                .runtime
                .spawn(read_output(pipe, author, stream))
        })
        .collect();
        Ok(Launched {
            child,
            control: Arc::new(control),
            calls,
            readers,
        })
    }

    /// Passes on what the worker says, until its process has ended.
    async fn watch(
        &self,
        child: &Child,
        control: &ControlSocket,
        program: &ProgramFile,
        calls_end: &mut Option<CallsEnd>,
    ) {
        let mut control_open = true;
        loop {
            tokio::select! {
                biased;
                _ = child.wait() => return,
                message = control.recv::<FromWorker>(), if control_open => match message {
                    Ok(Some((message, _))) => self.tell(event(message, child, program)).await,
                    Ok(None) | Err(FrameError::Truncated { .. } | FrameError::Io(_)) => {
                        control_open = false;
                        let socket = "control";
                        self.tell(WorkerEvent::Closed { socket }).await;
                    }
                    Err(error) => {
                        control_open = false;
                        let reason = format!("its control socket: {error}");
                        self.tell(WorkerEvent::Fault { reason }).await;
                    }
                },
                end = end_of(calls_end) => {
                    *calls_end = None;
                    self.tell(match end {
                        Ok(()) => WorkerEvent::Closed { socket: "call" },
                        Err(reason) => WorkerEvent::Fault { reason },
                    })
                    .await;
                }
            }
        }
    }
}

async fn end_of(calls: &mut Option<CallsEnd>) -> Result<(), String> {
    match calls {
        Some(end) => end.await,
        None => std::future::pending().await,
    }
}

/// A message of a worker. A hello counts only from the job's program.
fn event(message: FromWorker, child: &Child, program: &ProgramFile) -> WorkerEvent {
    if matches!(message, FromWorker::Hello { .. })
        && let Err(reason) = check_program(child, program)
    {
        return WorkerEvent::Fault { reason };
    }
    WorkerEvent::Said(message)
}

/// A worker must run the very file that was verified.
fn check_program(child: &Child, program: &ProgramFile) -> Result<(), String> {
    match child.executable_id() {
        Ok(id) if id == program.id => Ok(()),
        Ok(_) => {
            let exe = std::fs::read_link(format!("/proc/{}/exe", child.pid())).map_or_else(
                |_| "another file".to_owned(),
                |path| path.display().to_string(),
            );
            Err(format!(
                "its process runs {exe} and not the job's program; a worker must not replace itself \
                 with another program"
            ))
        }
        Err(error) => Err(format!("what its process runs is not known: {error}")),
    }
}

async fn write_control(control: Arc<ControlSocket>, mut messages: ControlReceiver) {
    use std::os::fd::AsFd;
    while let Some((message, fds)) = messages.recv().await {
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        if let Err(error) = control.send(&message, &borrowed).await {
            // The worker is gone or has hung up, which its supervisor sees too.
            tracing::debug!(%error, "a message to a worker was not sent");
            return;
        }
    }
}

pub(super) async fn read_output(pipe: OwnedFd, author: Arc<Author>, stream: Stdio) {
    let mut lines = match LineReader::new(pipe) {
        Ok(lines) => lines,
        Err(error) => {
            tracing::error!(rank = %author.rank(), %error, "a worker's output can't be read");
            return;
        }
    };
    while let Some(first) = lines.next_line().await {
        let mut batch = vec![first];
        while let Some(line) = lines.buffered_line() {
            batch.push(line);
        }
        author.push(stream, batch);
    }
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
