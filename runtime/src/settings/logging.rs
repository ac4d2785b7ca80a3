//! The log of a daemon, whose level may change while it runs.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::{Args, ValueEnum};
use kolo_transport::Flood;
use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

/// Lines of libraries about the same in this time.
const LIBRARY_LINES: u32 = 2;
const LIBRARY_WINDOW: Duration = Duration::from_secs(10);

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
            // A line that can't be written (a full disk, a reader that is gone) is lost. To say so on standard error would panic.
            .log_internal_errors(false)
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
        if json {
            let log = log.json().with_filter_reloading();
            let handle = log.reload_handle();
            let log = log.finish().with(Calm::default());
            log.try_init().map_err(|error| wrong(&error))?;
            Ok(Self(Box::new(move |filter| {
                handle.reload(filter).map_err(|error| error.to_string())
            })))
        } else {
            let log = log.with_filter_reloading();
            let handle = log.reload_handle();
            let log = log.finish().with(Calm::default());
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

/// Keeps warnings and errors of libraries from flooding the log: they write a line for each request that is malformed, and who
/// sends these is anybody. kolo's own lines of that kind have a [`Flood`] each.
struct Calm {
    window: Duration,
    /// By the place in the code, of which there are few.
    floods: Mutex<HashMap<Identifier, Flood>>,
}

impl Default for Calm {
    fn default() -> Self {
        Self {
            window: LIBRARY_WINDOW,
            floods: Mutex::default(),
        }
    }
}

impl Calm {
    fn flood(&self, event: &Event<'_>) -> Flood {
        let metadata = event.metadata();
        let mut floods = self.floods.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Flood::within(self.window, metadata.target(), LIBRARY_LINES);
        floods
            .entry(metadata.callsite())
            .or_insert_with(new)
            .clone()
    }
}

impl<S: Subscriber> Layer<S> for Calm {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        let is_own = metadata.target().starts_with("kolo");
        is_own || *metadata.level() > Level::WARN || self.flood(event).allows()
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn what_libraries_say_of_malformed_requests_is_a_few_lines_and_a_count() {
        let written = Written::default();
        let writer = written.clone();
        let log = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .finish()
            .with(Calm {
                window: Duration::from_secs(1),
                ..Calm::default()
            });
        let _log = tracing::subscriber::set_default(log);
        for number in 0..5000 {
            tracing::error!(target: "actix_http::h1::dispatcher", "stream error {number}");
            tracing::warn!(target: "kolo_runtime::head", "own {number}");
        }
        for number in 0..100 {
            tracing::info!(target: "actix_server", "hello {number}");
        }
        let text = || String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let count = |what: &str| text().lines().filter(|line| line.contains(what)).count();
        // A machine that stands still meanwhile may see the next second.
        assert!((1..100).contains(&count("stream error")), "{}", text());
        assert_eq!(count("own "), 5000, "kolo's own are not counted here");
        assert_eq!(count("hello "), 100, "nor are those that are no warnings");
        let began = std::time::Instant::now();
        while count("actix_http::h1::dispatcher: and ") == 0 {
            assert!(began.elapsed() < LIBRARY_WINDOW);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
