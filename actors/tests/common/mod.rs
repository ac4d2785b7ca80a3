//! Agents in threads, and a folder in which their workers and the test hear of each other.
#![allow(clippy::unwrap_used)] // a failed step is a failed test

use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kolo_actors::agent::{Ender, LocalElasticAgent, LocalOptions, LocalWorkers, TracingMetrics};
use kolo_core::agent::{
    AgentError, ElasticAgent, LocalHandler, LocalRendezvous, RunResult, WorkerSpec, WorkerState,
};
use tempfile::TempDir;

/// Longer than anything takes on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// What a worker appends to the file `log` first: its numbers, and the restarts.
pub(crate) const TELL: &str = r#"echo "$ROLE_NAME $RANK $WORLD_SIZE $ROLE_RANK $ROLE_WORLD_SIZE $LOCAL_RANK $TORCHELASTIC_RESTART_COUNT" >> $DIR/log; "#;

pub(crate) type Agent = LocalElasticAgent<LocalHandler>;

/// A folder for the files of one test, where agents meet.
pub(crate) struct Bed {
    pub(crate) folder: TempDir,
    pub(crate) place: LocalRendezvous,
}

/// How an agent has ended, and what it was then.
pub(crate) struct Ended {
    pub(crate) role: String,
    pub(crate) result: Result<RunResult, AgentError>,
    pub(crate) agent: Agent,
    pub(crate) took: Duration,
}

impl Ended {
    #[track_caller]
    pub(crate) fn state(&self) -> WorkerState {
        let result = self.result.as_ref().unwrap();
        let group = self.agent.get_worker_group(&self.role).unwrap();
        assert_eq!(group.state, result.state);
        result.state
    }
}

/// An agent that runs in a thread.
pub(crate) struct Running {
    thread: JoinHandle<Ended>,
    ended: mpsc::Receiver<()>,
    pub(crate) ender: Ender,
}

impl Running {
    pub(crate) fn join(self) -> Ended {
        self.ended.recv_timeout(LIMIT).expect("the agent ends");
        self.thread.join().unwrap()
    }
}

impl Bed {
    pub(crate) fn new(min: u32, max: u32) -> Self {
        Self {
            folder: TempDir::new().unwrap(),
            place: LocalRendezvous::new(min..=max).unwrap(),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn options(&self) -> LocalOptions {
        let folder = self.path().to_str().unwrap().to_owned();
        LocalOptions {
            env: [("DIR".to_owned(), folder)].into(),
            ..LocalOptions::default()
        }
    }

    /// Workers that tell of themselves and then run a script.
    pub(crate) fn spec(&self, workers: u32, script: &str) -> WorkerSpec<LocalHandler> {
        WorkerSpec {
            arguments: vec!["-c".to_owned(), format!("{TELL}{script}")],
            max_restarts: 0,
            ..WorkerSpec::new("/bin/sh", workers, self.place.handler())
        }
    }

    pub(crate) fn start(&self, spec: WorkerSpec<LocalHandler>) -> Running {
        start(spec, self.options())
    }

    /// A named pipe, at which workers wait for [`Bed::open`].
    pub(crate) fn gate(&self, name: &str) {
        let made = Command::new("mkfifo").arg(self.path().join(name)).status();
        assert!(made.unwrap().success());
    }

    /// Waits until somebody reads at the gate. Whoever does goes on when the result is dropped.
    pub(crate) fn open(&self, name: &str) -> File {
        let (path, (sender, opened)) = (self.path().join(name), mpsc::channel());
        thread::spawn(move || sender.send(OpenOptions::new().write(true).open(path)));
        opened
            .recv_timeout(LIMIT)
            .expect("somebody comes to the gate")
            .unwrap()
    }

    pub(crate) fn lines(&self, name: &str) -> Vec<String> {
        let text = fs::read_to_string(self.path().join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// What workers have told of themselves: role, rank, world size, role rank, role world size, local rank, restarts.
    pub(crate) fn told(&self) -> Vec<(String, [u32; 6])> {
        let lines = self.lines("log");
        let told = lines.iter().map(|line| {
            let mut words = line.split(' ');
            let role = words.next().unwrap().to_owned();
            let numbers: Vec<u32> = words.map(|word| word.parse().unwrap()).collect();
            (role, numbers.try_into().unwrap())
        });
        told.collect()
    }
}

pub(crate) fn start(spec: WorkerSpec<LocalHandler>, options: LocalOptions) -> Running {
    let (told, ended) = mpsc::channel();
    let workers = LocalWorkers::start(options).unwrap();
    let ender = workers.ender();
    let role = spec.role.clone();
    let mut agent = Agent::new(spec, workers, TracingMetrics).unwrap();
    let thread = thread::spawn(move || {
        let begun = Instant::now();
        let result = agent.run(&role);
        let took = begun.elapsed();
        told.send(()).ok();
        Ended {
            role,
            result,
            agent,
            took,
        }
    });
    Running {
        thread,
        ended,
        ender,
    }
}
