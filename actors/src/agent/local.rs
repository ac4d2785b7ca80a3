//! Workers that are processes below a warden.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use kolo_core::agent::{
    ByRank, MonitorResult, WorkerFailure, WorkerGroup, WorkerSpec, WorkerState, Workers,
};
use kolo_core::env;
use kolo_process::{Child, Signal, SpawnError, SpawnRequest, Warden};
use kolo_transport::wire::Exit;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;
use tokio::time::{sleep_until, timeout};

/// How long processes may take to end once they were killed.
const KILLED: Duration = Duration::from_secs(5);

/// How workers of a local agent are run.
#[derive(Debug, Clone)]
pub struct LocalOptions {
    /// The program that becomes the warden; its `main` begins with [`kolo_process::run_if_warden`]. This program by default.
    pub warden_exe: PathBuf,
    /// How long workers may take to end once they were asked to; then they are killed. 30 s by default, 0 is allowed.
    pub shutdown_timeout: Duration,
    /// A name for the whole run, for `TORCHELASTIC_RUN_ID`. `none` by default, as torch has it.
    pub run_id: String,
    /// Variables for the workers, over those of this process and under torch's.
    pub env: BTreeMap<String, String>,
}

impl Default for LocalOptions {
    fn default() -> Self {
        Self {
            warden_exe: "/proc/self/exe".into(),
            shutdown_timeout: Duration::from_secs(30),
            run_id: "none".to_owned(),
            env: BTreeMap::new(),
        }
    }
}

#[derive(Debug, Default)]
struct Bell {
    rung: Notify,
    ended: Mutex<Option<String>>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.rung.notify_one();
    }
}

/// Tells an agent, from any thread, that it is to end.
#[derive(Debug, Clone)]
pub struct Ender(Arc<Bell>);

impl Ender {
    /// The agent is to end: it stops its workers and leaves. The first reason counts.
    pub fn end(&self, why: &str) {
        let ended = self.0.ended.lock();
        let mut ended = ended.unwrap_or_else(PoisonError::into_inner);
        ended.get_or_insert_with(|| why.to_owned());
        drop(ended);
        self.0.rung.notify_one();
    }
}

/// The warden, and the runtime on which it is watched.
#[derive(Debug)]
struct Host {
    runtime: Runtime,
    warden: Warden,
}

/// Workers that are processes on this host, with this process's standard output and error.
///
/// They are below a warden of their own: when this value is dropped, or this process dies, all of them and all that they have
/// started is ended. All functions block; call them on a thread that runs no asynchronous tasks.
#[derive(Debug)]
pub struct LocalWorkers {
    options: LocalOptions,
    /// There until the end.
    host: Option<Host>,
    /// The processes of the present group, by local rank.
    children: BTreeMap<u32, Child>,
    bell: Arc<Bell>,
    /// Holds the port of rank 0's store until the workers are started.
    port: Option<TcpListener>,
}

impl LocalWorkers {
    /// Starts the warden. Workers come later.
    ///
    /// # Errors
    ///
    /// [`SpawnError`] if there is no warden.
    pub fn start(options: LocalOptions) -> Result<Self, SpawnError> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| SpawnError::Resources {
            path: options.warden_exe.clone(),
            reason: error.to_string(),
        })?;
        let owner = format!("agent-{}", std::process::id());
        let warden = runtime.block_on(Warden::start(&options.warden_exe, &owner))?;
        Ok(Self {
            options,
            host: Some(Host { runtime, warden }),
            children: BTreeMap::new(),
            bell: Arc::default(),
            port: None,
        })
    }

    /// Ends the agent that has these workers, from any thread.
    #[must_use]
    pub fn ender(&self) -> Ender {
        Ender(self.bell.clone())
    }

    /// Waits until something has happened, the bell has rung, or that time has come.
    fn block_until(&self, until: Instant, happened: impl Future<Output = ()>) {
        let Some(Host { runtime, .. }) = &self.host else {
            return;
        };
        runtime.block_on(async {
            tokio::select! {
                () = happened => {}
                () = self.bell.rung.notified() => {}
                () = sleep_until(until.into()) => {}
            }
        });
    }

    /// The environment of a worker; none if the worker has no ranks.
    fn environment<H>(
        &self,
        group: &WorkerGroup<H>,
        rank: u32,
    ) -> Option<Vec<(OsString, OsString)>> {
        let own = |(name, value): (String, String)| (name.into(), value.into());
        let mut all: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        all.extend(self.options.env.clone().into_iter().map(own));
        for (name, value) in env::defaults(group.workers.len() as u32) {
            all.entry(name.into()).or_insert_with(|| value.into());
        }
        all.extend(group.environment(rank)?.into_iter().map(own));
        let run_id = self.options.run_id.clone();
        all.insert("TORCHELASTIC_RUN_ID".into(), run_id.into());
        Some(all.into_iter().collect())
    }

    fn request<H>(&self, group: &WorkerGroup<H>, rank: u32) -> Result<SpawnRequest, String> {
        let environment = self.environment(group, rank);
        let copy =
            |fd: std::io::Result<OwnedFd>| fd.map_err(|error| format!("its output: {error}"));
        Ok(SpawnRequest {
            program: group.spec.entry.clone().into(),
            argv0: group.spec.entry.clone(),
            args: group.spec.arguments.clone(),
            env: environment.ok_or("nobody knows where rank 0 listens")?,
            cwd: None,
            fds: Vec::new(),
            stdin: None,
            stdout: copy(std::io::stdout().as_fd().try_clone_to_owned())?,
            stderr: copy(std::io::stderr().as_fd().try_clone_to_owned())?,
        })
    }

    /// How the workers are, without a wait.
    fn look<H>(&self, group: &WorkerGroup<H>) -> MonitorResult {
        if self.children.len() != group.workers.len() {
            return MonitorResult::of(WorkerState::Unknown);
        }
        let mut failures = ByRank::new();
        let mut running = false;
        for (worker, child) in group.workers.iter().zip(self.children.values()) {
            let exit = match child.exit() {
                None => {
                    running = true;
                    continue;
                }
                Some(Exit::Unknown) => return MonitorResult::of(WorkerState::Unknown),
                Some(exit) if exit.is_success() => continue,
                Some(exit) => exit,
            };
            let global_rank = worker
                .ranks
                .map_or(worker.local_rank, |ranks| ranks.global_rank);
            let failure = WorkerFailure {
                local_rank: worker.local_rank,
                id: worker.id.clone(),
                exit,
                message: String::new(),
            };
            failures.insert(global_rank, failure);
        }
        match (failures.is_empty(), running) {
            (false, _) => MonitorResult::failed(failures),
            (true, true) => MonitorResult::of(WorkerState::Healthy),
            (true, false) => MonitorResult::of(WorkerState::Succeeded),
        }
    }
}

/// Until a process has failed, or all have ended.
async fn decided(children: &BTreeMap<u32, Child>) {
    let mut exits: FuturesUnordered<_> = children.values().map(Child::wait).collect();
    while let Some(exit) = exits.next().await {
        if !exit.is_success() {
            return;
        }
    }
}

impl<H> Workers<H> for LocalWorkers {
    const CLASS: &'static str = "LocalElasticAgent";

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn waker(&self) -> Waker {
        self.bell.clone().into()
    }

    fn master_address(&mut self, spec: &WorkerSpec<H>) -> Result<(String, u16), String> {
        let loopback = || Ipv4Addr::LOCALHOST.to_string();
        let address = spec.master_address.clone().unwrap_or_else(loopback);
        if let Some(port) = spec.master_port {
            return Ok((address, port));
        }
        // On all addresses: workers choose the one that they listen on.
        let failed = |error: std::io::Error| format!("no free port for rank 0: {error}");
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        self.port = Some(listener);
        Ok((address, port))
    }

    fn start(&mut self, group: &WorkerGroup<H>) -> Result<BTreeMap<u32, String>, String> {
        self.children.clear();
        let Some(Host { runtime, warden }) = &self.host else {
            return Err("the warden is closed".to_owned());
        };
        let requests = group.workers.iter().map(|worker| {
            let request = self.request(group, worker.local_rank)?;
            Ok((worker.local_rank, request))
        });
        let requests: Vec<(u32, SpawnRequest)> = requests.collect::<Result<_, String>>()?;
        self.port = None;
        let starts = requests
            .into_iter()
            .map(|(local_rank, request)| async move { (local_rank, warden.spawn(request).await) });
        let mut ids = BTreeMap::new();
        let mut problem = None;
        for (local_rank, started) in runtime.block_on(join_all(starts)) {
            match started {
                Ok(child) => {
                    ids.insert(local_rank, child.pid().to_string());
                    self.children.insert(local_rank, child);
                }
                Err(error) => {
                    problem.get_or_insert_with(|| format!("local rank {local_rank}: {error}"));
                }
            }
        }
        problem.map_or(Ok(ids), Err)
    }

    fn stop(&mut self, _: &WorkerGroup<H>) -> Result<(), String> {
        self.port = None;
        let children = std::mem::take(&mut self.children);
        let Some(Host { runtime, .. }) = &self.host else {
            return Ok(());
        };
        let all_gone = || join_all(children.values().map(Child::gone));
        let grace = self.options.shutdown_timeout;
        runtime.block_on(async {
            for (signal, within) in [(Signal::Terminate, grace), (Signal::Kill, KILLED)] {
                for child in children.values() {
                    // A process that has ended needs none.
                    child.signal(signal).ok();
                }
                if timeout(within, all_gone()).await.is_ok() {
                    return Ok(());
                }
            }
            let left = children.values().filter(|child| child.exit().is_none());
            let left: Vec<String> = left.map(|child| child.pid().to_string()).collect();
            Err(format!(
                "processes did not end within {KILLED:?} after their KILL: {}",
                left.join(", ")
            ))
        })
    }

    fn monitor(&mut self, group: &WorkerGroup<H>, within: Duration) -> MonitorResult {
        self.block_until(Instant::now() + within, decided(&self.children));
        self.look(group)
    }

    fn wait(&mut self, until: Instant) {
        self.block_until(until, std::future::pending());
    }

    fn ended(&self) -> Option<String> {
        let ended = self.bell.ended.lock();
        ended.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for LocalWorkers {
    fn drop(&mut self) {
        let Some(Host { runtime, warden }) = self.host.take() else {
            return;
        };
        if Handle::try_current().is_err() {
            runtime.block_on(warden.close());
        } else {
            // Where asynchronous tasks run nothing may block. The warden ends by itself, with all that is left.
            drop(warden);
            runtime.shutdown_background();
        }
    }
}
