//! What `kolo-head` and `kolo-node` have in common: arguments, log, signals, end.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// How a daemon logs and prints.
#[derive(Debug, Args)]
pub(crate) struct Reporting {
    /// What to log, to standard error: a level, or directives like `info,kolo_actors=debug`
    #[arg(long, value_name = "FILTER", env = "KOLO_LOG", default_value = "info", value_parser = filter)]
    log: String,

    /// How to log
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,

    /// How to print the line that says that it is ready
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub(crate) format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// The daemon's name and `name=value` for each of its words.
    Text,
    /// One JSON object.
    Json,
}

impl Reporting {
    /// Logs from here on.
    pub(crate) fn start(&self) {
        let log = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::new(&self.log))
            .with_writer(std::io::stderr)
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
        match self.log_format {
            LogFormat::Text => log.init(),
            LogFormat::Json => log.json().init(),
        }
    }
}

fn filter(text: &str) -> Result<String, String> {
    EnvFilter::try_new(text)
        .map(|_| text.to_owned())
        .map_err(|error| {
            format!("{error}; expected a level such as `info`, or `info,kolo_actors=debug`")
        })
}

/// Reads `250ms`, `3s`, `10m`, `24h` or `7d`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || {
        format!(
            "`{text}` is not a duration; expected a whole number and ms, s, m, h or d, like 250ms or 3s"
        )
    };
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let factor = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wrong()),
    };
    // A thousand years is more than any of these may be.
    let limit = 1000 * 366 * 86_400_000;
    number
        .checked_mul(factor)
        .filter(|ms| *ms <= limit)
        .map(Duration::from_millis)
        .ok_or_else(wrong)
}

/// The signals that end a daemon. None is lost from the moment when it is made.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(crate) fn watch() -> Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate()).context("SIGTERM can't be watched")?,
            interrupt: signal(SignalKind::interrupt()).context("SIGINT can't be watched")?,
        })
    }

    /// The name of the next one.
    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Prints a line for whoever started the daemon.
pub(crate) fn print(line: &str) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").context("the line with the address can't be printed")
}

/// The daemon's exit code, and its error for people.
pub(crate) fn end(name: &str, result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody may be there to read it.
            writeln!(std::io::stderr(), "{name}: {error:#}").ok();
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("24h"), Ok(Duration::from_secs(86_400)));
        assert_eq!(duration("0s"), Ok(Duration::ZERO));
        for wrong in [
            "",
            "3",
            "s",
            "-3s",
            "1.5s",
            "NaNs",
            "3 s",
            "99999999999999999999s",
            "9999999999d",
        ] {
            let error = duration(wrong).unwrap_err();
            assert!(error.contains("like 250ms or 3s"), "{wrong}: {error}");
        }
    }

    #[test]
    fn what_is_logged_is_checked_before_anything_runs() {
        assert!(filter("info,kolo_actors=debug").is_ok());
        let error = filter("kolo=loud").unwrap_err();
        assert!(error.contains("expected a level"), "{error}");
    }
}
