//! Daemon processes: started, listened to, killed.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::oneshot;

use crate::error::HarnessError;
use crate::member::{Ready, TASK, Task};
use crate::netns::Host;

/// What a daemon wrote to standard error so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }

    fn append(&self, bytes: &[u8]) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend_from_slice(bytes);
    }
}

/// A daemon that runs.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    /// Its end asks the daemon to stop.
    stdin: Option<ChildStdin>,
    pub(crate) log: Log,
    pub(crate) ready: Ready,
}

impl Daemon {
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) -> Result<(), HarnessError> {
        kill_process(self.pid(), signal).map_err(|error| HarnessError::Fault(error.to_string()))
    }

    /// Kills it and waits until it is gone.
    pub(crate) fn kill(mut self) {
        self.end();
    }

    /// Asks it to stop and waits for its end.
    pub(crate) async fn stop(mut self) -> Result<(), HarnessError> {
        drop(self.stdin.take());
        self.end_by_itself().await
    }

    /// Waits for its end.
    pub(crate) async fn end_by_itself(mut self) -> Result<(), HarnessError> {
        let ended =
            tokio::task::spawn_blocking(move || self.child.wait().map(|status| (status, self)));
        match ended.await {
            Ok(Ok((status, _))) if status.success() => Ok(()),
            Ok(Ok((status, daemon))) => Err(HarnessError::Daemon(format!(
                "a daemon ended with {status}:\n{}",
                daemon.log.text()
            ))),
            Ok(Err(error)) => Err(HarnessError::Daemon(error.to_string())),
            Err(error) => Err(HarnessError::Daemon(error.to_string())),
        }
    }

    fn end(&mut self) {
        // An error means that it has ended already; `wait` then only fetches its status.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end();
    }
}

type Order = (
    Task,
    Option<Host>,
    oneshot::Sender<Result<Daemon, HarnessError>>,
);

/// Starts daemons, from one thread that lives as long as they do: they end with the thread that
/// started them, so that a test process that is killed leaves none behind.
#[derive(Debug)]
pub(crate) struct Spawner {
    orders: Option<mpsc::Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Spawner {
    pub(crate) fn start() -> Self {
        let (orders, queue) = mpsc::channel::<Order>();
        let thread = std::thread::spawn(move || {
            for (task, host, answer) in queue {
                // A receiver that is gone drops the daemon, which ends it.
                drop(answer.send(spawn(&task, host.as_ref())));
            }
        });
        Self {
            orders: Some(orders),
            thread: Some(thread),
        }
    }

    /// Starts a daemon, on a host of a lab or on this machine.
    pub(crate) async fn spawn(
        &self,
        task: Task,
        host: Option<Host>,
    ) -> Result<Daemon, HarnessError> {
        let (answer, daemon) = oneshot::channel();
        let gone = || HarnessError::Daemon("the spawner thread is gone".to_owned());
        self.orders
            .as_ref()
            .ok_or_else(gone)?
            .send((task, host, answer))
            .map_err(|_| gone())?;
        daemon.await.map_err(|_| gone())?
    }
}

impl Drop for Spawner {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn spawn(task: &Task, host: Option<&Host>) -> Result<Daemon, HarnessError> {
    let fault = |error: &dyn std::fmt::Display| HarnessError::Daemon(error.to_string());
    let mut command = match host {
        // `ip` becomes the daemon, so it is a child of this thread all the same. Its own `/proc/self/exe` is another.
        Some(host) => host.command(std::env::current_exe().map_err(|error| fault(&error))?),
        None => Command::new("/proc/self/exe"),
    };
    let mut child = command
        .env(
            TASK,
            serde_json::to_string(task).map_err(|error| fault(&error))?,
        )
        // GPUs are declared, whatever whoever runs the tests may see.
        .env_remove("CUDA_VISIBLE_DEVICES")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| fault(&error))?;
    let log = Log::default();
    if let Some(mut stderr) = child.stderr.take() {
        let log = log.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = stderr.read(&mut buffer) {
                log.append(&buffer[..count]);
            }
        });
    }
    let stdin = child.stdin.take();
    let stdout = child.stdout.take();
    let mut daemon = Daemon {
        child,
        stdin,
        log,
        ready: Ready::Failed {
            error: "it ended before it was ready".to_owned(),
        },
    };
    let mut line = String::new();
    if let Some(stdout) = stdout {
        BufReader::new(stdout)
            .read_line(&mut line)
            .map_err(|error| fault(&error))?;
    }
    if !line.is_empty() {
        daemon.ready = serde_json::from_str(&line).map_err(|error| fault(&error))?;
    }
    match &daemon.ready {
        Ready::Failed { error } => Err(HarnessError::Daemon(format!(
            "{error}\n{}",
            daemon.log.text()
        ))),
        _ => Ok(daemon),
    }
}
