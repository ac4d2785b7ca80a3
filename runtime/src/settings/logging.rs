//! The log of a daemon, whose level may change while it runs.

use std::fmt;

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;

/// The settings of a daemon's log, the same for all daemons.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// What to log, to standard error: a level, or directives like `info,kolo_actors=debug`
    #[arg(long, value_name = "FILTER", env = "KOLO_LOG", default_value = "info", value_parser = filter)]
    pub log: String,

    /// How to log
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// What a line of a daemon's log looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

impl LogArgs {
    /// Starts the log as it was asked for.
    ///
    /// # Errors
    ///
    /// As [`Log::start`].
    pub fn start(&self) -> Result<Log, String> {
        Log::start(&self.log, self.log_format == LogFormat::Json)
    }
}

fn filter(text: &str) -> Result<String, String> {
    EnvFilter::try_new(text)
        .map(|_| text.to_owned())
        .map_err(|error| {
            format!("{error}; expected a level such as `info`, or `info,kolo_actors=debug`")
        })
}

type Change = dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync;

/// The log.
pub struct Log(Box<Change>);

impl Log {
    /// Writes the log of this process to standard error from now on, as JSON or for people. `filter` is a level, or
    /// directives like `info,kolo_actors=debug`.
    ///
    /// # Errors
    ///
    /// If the filter is wrong, or there is a log already.
    pub fn start(filter: &str, json: bool) -> Result<Self, String> {
        let wrong = |error: &dyn fmt::Display| format!("the log can't be started: {error}");
        let filter = EnvFilter::try_new(filter).map_err(|error| wrong(&error))?;
        let log = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
        if json {
            let log = log.json().with_filter_reloading();
            let handle = log.reload_handle();
            log.try_init().map_err(|error| wrong(&error))?;
            Ok(Self(Box::new(move |filter| {
                handle.reload(filter).map_err(|error| error.to_string())
            })))
        } else {
            let log = log.with_filter_reloading();
            let handle = log.reload_handle();
            log.try_init().map_err(|error| wrong(&error))?;
            Ok(Self(Box::new(move |filter| {
                handle.reload(filter).map_err(|error| error.to_string())
            })))
        }
    }

    /// Logs what this filter lets through from now on.
    ///
    /// # Errors
    ///
    /// If the filter is wrong; all is as it was then.
    pub fn set(&self, filter: &str) -> Result<(), String> {
        let filter = EnvFilter::try_new(filter).map_err(|error| error.to_string())?;
        (self.0)(filter)
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").finish_non_exhaustive()
    }
}
