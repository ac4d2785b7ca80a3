//! What `kolo-head` and `kolo-node` do in the same way: how they begin, say that they are ready, and end.

use std::fmt::Display;
use std::future::Future;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{CommandFactory, FromArgMatches, ValueEnum};
use kolo_transport::descriptors;
use serde::Serialize;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;

use crate::health::Health;
use crate::notify::Notifier;
use crate::settings::logging::{Log, LogArgs};
use crate::settings::{self, Daemon};
use crate::signals::{Ends, name};
use crate::{Head, Node};

/// Descriptors that a daemon needs, some members or workers included.
const DESCRIPTORS: u64 = 48;

/// How a daemon prints the line that says that it is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// One line of names and values.
    Text,
    /// One JSON object.
    Json,
}

impl Format {
    /// The line. `line` displays itself as names and values.
    ///
    /// # Errors
    ///
    /// If it can't be written as JSON.
    pub fn line(self, daemon: Daemon, line: &(impl Serialize + Display)) -> Result<String> {
        Ok(match self {
            Self::Json => serde_json::to_string(line)?,
            Self::Text => format!("{}: {line}", daemon.name),
        })
    }
}

/// The arguments of a daemon.
pub trait DaemonArgs: CommandFactory + FromArgMatches {
    /// The daemon.
    const DAEMON: Daemon;

    /// How it logs.
    fn log(&self) -> &LogArgs;

    /// Looks at what no single setting shows.
    ///
    /// # Errors
    ///
    /// What is wrong, in words.
    fn check(&self) -> Result<(), String>;
}

/// A daemon that ends in order.
pub trait Leaves {
    /// Takes no more jobs, and waits up to `limit` until those that are there have ended by themselves. Whether they have.
    fn drain(&self, limit: Duration) -> impl Future<Output = bool>;

    /// Ends all jobs, and itself.
    fn stop(self) -> impl Future<Output = ()>;
}

impl Leaves for Head {
    fn drain(&self, limit: Duration) -> impl Future<Output = bool> {
        Head::drain(self, limit)
    }

    fn stop(self) -> impl Future<Output = ()> {
        Head::stop(self)
    }
}

impl Leaves for Node {
    fn drain(&self, limit: Duration) -> impl Future<Output = bool> {
        Node::drain(self, limit)
    }

    fn stop(self) -> impl Future<Output = ()> {
        Node::stop(self)
    }
}

/// Says on standard error why a daemon fails, and gives its exit code.
pub fn complain(daemon: Daemon, message: &str) -> ExitCode {
    // Nobody may be there to read it.
    writeln!(std::io::stderr(), "{}: {message}", daemon.name).ok();
    ExitCode::FAILURE
}

/// Reads the settings of this process, starts its log, and makes sure that it has descriptors enough.
///
/// # Errors
///
/// The exit code, if there is nothing to run. Why is said.
pub fn begin<A: DaemonArgs>() -> Result<(A, Log), ExitCode> {
    let failed = |error: &dyn Display| complain(A::DAEMON, &error.to_string());
    let args = settings::start(A::DAEMON, A::check)?;
    let log = args.log().start().map_err(|error| failed(&error))?;
    descriptors::raise();
    descriptors::make_room(A::DAEMON.name, DESCRIPTORS).map_err(|error| failed(&error))?;
    Ok((args, log))
}

/// Reads the level of the log again. What can't be read is logged, and all is as it was.
pub fn reload_log<A: DaemonArgs>(log: &Log) {
    let read = settings::reload::<A>(A::DAEMON).and_then(|loaded| {
        let filter = loaded.args.log().log.clone();
        log.set(&filter).map(|()| filter)
    });
    match read {
        Ok(filter) => tracing::info!(filter, "the log level is read again"),
        Err(error) => tracing::error!(error, "the log level was not read again"),
    }
}

/// The signals that a daemon listens to, and the service manager that it tells.
#[derive(Debug)]
pub struct Service {
    /// What ends the daemon.
    pub ends: Ends,
    hangup: Signal,
    notifier: Arc<Notifier>,
    /// What it says of itself.
    status: String,
    watchdog: Option<JoinHandle<()>>,
}

impl Drop for Service {
    fn drop(&mut self) {
        if let Some(watchdog) = &self.watchdog {
            watchdog.abort();
        }
    }
}

impl Service {
    /// From here on no signal is lost, also while the daemon starts.
    ///
    /// # Errors
    ///
    /// If signals can't be watched.
    pub fn new(ends: &[SignalKind]) -> Result<Self> {
        Ok(Self {
            ends: Ends::take(ends)?,
            hangup: signal(SignalKind::hangup()).context("SIGHUP can't be watched")?,
            notifier: Arc::new(Notifier::from_env()),
            status: String::new(),
            watchdog: None,
        })
    }

    /// Prints the line, and tells the service manager that the daemon is ready, now and, as long as it is healthy, again and
    /// again.
    ///
    /// # Errors
    ///
    /// If the line can't be printed.
    pub fn ready(&mut self, line: &str, status: String, health: Health) -> Result<()> {
        writeln!(std::io::stdout(), "{line}")
            .context("the line that says that it is ready can't be printed")?;
        self.notifier.ready(&status);
        self.status = status;
        let notifier = Arc::clone(&self.notifier);
        self.watchdog = Some(tokio::spawn(async move {
            notifier.watchdog(|limit| health.is_good(limit)).await;
        }));
        Ok(())
    }

    /// The number of the signal that ends the daemon. At each `SIGHUP` before it `reload` is called.
    pub async fn end(&mut self, reload: impl Fn()) -> i32 {
        loop {
            tokio::select! {
                signal = self.ends.next() => return signal,
                _ = self.hangup.recv() => {
                    self.notifier.reloading();
                    reload();
                    self.notifier.ready(&self.status);
                }
            }
        }
    }

    /// Ends the daemon: its jobs may first end by themselves, for at most `limit`, if a signal has asked for that. False if a second
    /// signal came before the end; then the daemon is dropped.
    pub async fn stop(
        &mut self,
        daemon: impl Leaves,
        signal: Option<i32>,
        limit: Duration,
    ) -> bool {
        let notifier = &self.notifier;
        let end = async {
            if let Some(signal) = signal {
                let signal = name(signal);
                tracing::info!(
                    signal,
                    ?limit,
                    "waiting for jobs to end; a second signal ends all at once"
                );
                notifier.stopping("waiting for jobs to end");
                if !daemon.drain(limit).await {
                    tracing::warn!(
                        ?limit,
                        "not all jobs have ended by themselves; they are ended"
                    );
                }
            }
            tracing::info!("stopping; a second signal ends all at once");
            notifier.stopping("stopping");
            daemon.stop().await;
        };
        tokio::select! {
            () = end => true,
            _ = self.ends.next() => false,
        }
    }
}
