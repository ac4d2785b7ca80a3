//! Workers that run a program which was sent here: with a control socket, a call socket, and pipes for their output.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::node::messages::WorkerEvent;
use kolo_process::{Child, SpawnRequest};
use kolo_transport::FrameError;
use kolo_transport::local::ControlSocket;
use kolo_transport::wire::{Account, FromWorker, Stdio};
use tokio::task::JoinHandle;

use super::author::now_ms;
use super::launch::ProgramFile;
use super::leftovers::{drain, see_off};
use super::ports::{CallsEnd, ControlReceiver};
use super::supervisor::{NotStarted, STDERR_TAIL, Supervisor, WorkerPlan};
use super::warden::JobWarden;

/// The call socket's number in the worker; the control socket follows. See
/// [`kolo_core::node::environment::WORKER_FD_NUMBERS`].
const CALL_FD: i32 = 3;

/// A process that was started, and the node's ends of its sockets and pipes.
struct Launched {
    child: Child,
    control: Arc<ControlSocket>,
    calls: UnixStream,
    readers: Vec<JoinHandle<()>>,
}

impl Supervisor {
    /// A worker's life, from its start to its end.
    pub(super) async fn run_sent(
        self,
        warden: JobWarden,
        mut plan: WorkerPlan,
        program: Arc<ProgramFile>,
    ) {
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
        let readers = vec![
            self.read(plan, stdout_reader, Stdio::Stdout),
            self.read(plan, stderr_reader, Stdio::Stderr),
        ];
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
