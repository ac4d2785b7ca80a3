//! Options of commands, and the forms of their values.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, ValueEnum};

use kolo_core::ranks::MAX_WORLD_SIZE;

use super::client::ClientConfig;
use crate::settings::values::{number, number_within, time_within};

/// The heading of options that all commands have.
pub(super) const GLOBAL: &str = "Global options";

/// How results are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)] // they are called as what they are
pub(super) enum Format {
    Table,
    Json,
}

/// How to reach the head.
#[derive(Debug, Clone, ClapArgs)]
#[allow(clippy::struct_field_names)] // they are the names of the flags
pub(super) struct Connect {
    /// Address of the head [default: that of the last login; `run` needs this option or the variable]
    #[arg(long, global = true, env = "KOLO_HEAD", hide_env_values = true, value_name = "HOST:PORT", help_heading = GLOBAL)]
    pub(super) head: Option<String>,
    /// Folder of the credentials [default: kolo in $XDG_CONFIG_HOME or ~/.config]
    #[arg(long, global = true, env = "KOLO_CREDENTIALS", hide_env_values = true, value_name = "DIR", help_heading = GLOBAL)]
    pub(super) credentials: Option<PathBuf>,
    /// How long to wait for a connection
    #[arg(long, global = true, default_value = "5s", value_parser = time, value_name = "DURATION", help_heading = GLOBAL)]
    pub(super) connect_timeout: Duration,
}

impl Connect {
    pub(super) fn config(&self) -> ClientConfig {
        ClientConfig {
            head: self.head.clone(),
            credentials: self.credentials.clone(),
            connect_timeout: self.connect_timeout,
        }
    }
}

/// A page that is shown once, or again and again.
#[derive(Debug, ClapArgs)]
pub(super) struct Watch {
    /// Show it again and again until Ctrl-C, every 2s or as often as is said
    #[arg(long = "watch", value_name = "DURATION", value_parser = time, num_args = 0..=1, require_equals = true, default_missing_value = "2s")]
    pub(super) every: Option<Duration>,
}

#[derive(Debug, ClapArgs)]
pub(super) struct Status {
    #[command(flatten)]
    pub(super) watch: Watch,
}

#[derive(Debug, ClapArgs)]
pub(super) struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub(super) shell: Shell,
}

/// Shells that complete words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)] // they are called as what they are
pub(super) enum Shell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Debug, ClapArgs)]
pub(super) struct Man {
    /// A folder of manual pages, where they go into man1 and man8; it is made if it is not there
    #[arg(value_name = "DIR")]
    pub(super) dir: PathBuf,
}

#[derive(Debug, ClapArgs)]
pub(super) struct Jobs {
    /// Id of one job, or an unambiguous start of it
    pub(super) job: Option<String>,
    #[command(flatten)]
    pub(super) watch: Watch,
}

#[derive(Debug, ClapArgs)]
pub(super) struct Logs {
    /// Id of the job, or an unambiguous start of it
    pub(super) job: String,
    /// Only this rank; may be given more than once
    #[arg(long = "rank", value_name = "RANK", value_parser = number)]
    pub(super) ranks: Vec<u32>,
    /// Stay and print what comes, until the job has ended
    #[arg(long, short)]
    pub(super) follow: bool,
    /// At most the last N kept lines of each rank
    #[arg(long, value_name = "N", value_parser = number)]
    pub(super) tail: Option<u32>,
    /// Only lines that are no older
    #[arg(long, value_name = "DURATION", value_parser = time)]
    pub(super) since: Option<Duration>,
    /// Begin each line with the time, in UTC
    #[arg(long)]
    pub(super) timestamps: bool,
}

#[derive(Debug, ClapArgs)]
pub(super) struct Stop {
    /// Id of the job, or an unambiguous start of it
    pub(super) job: String,
    /// How long to wait for its end; it is being stopped all the same
    #[arg(long, default_value = "60s", value_parser = time, value_name = "DURATION")]
    pub(super) timeout: Duration,
}

#[derive(Debug, ClapArgs)]
pub(super) struct Login {
    /// File that holds the token, as the head's administrator has given it; `-` reads standard input
    #[arg(
        long,
        env = "KOLO_TOKEN_FILE",
        hide_env_values = true,
        value_name = "FILE"
    )]
    pub(super) token_file: PathBuf,
    /// Take the place of an identity that is there and that a login would not give back: an administrator's, a node's, or one of
    /// another cluster
    #[arg(long)]
    pub(super) replace: bool,
}

#[derive(Debug, ClapArgs)]
pub(super) struct Plan {
    /// Hosts and their slots, filled in this order
    #[arg(
        long,
        value_name = "HOST:SLOTS,...",
        required_unless_present = "registration",
        conflicts_with = "registration"
    )]
    pub(super) hosts: Option<String>,
    /// The host of every rank, in rank order
    #[arg(long, value_name = "HOST,...")]
    pub(super) registration: Option<String>,
    /// The fewest workers that will do [default: 1]
    #[arg(long, conflicts_with = "registration", value_name = "N", value_parser = number)]
    pub(super) min: Option<u32>,
    /// The most workers that are wanted [default: all slots]
    #[arg(long, conflicts_with = "registration", value_name = "N", value_parser = number)]
    pub(super) max: Option<u32>,
}

/// Reads a whole number that is not 0.
pub(super) fn count(text: &str) -> Result<u32, String> {
    number_within(text, 1..=u32::MAX)
}

/// Reads a number of workers of a job.
pub(super) fn workers(text: &str) -> Result<u32, String> {
    number_within(text, 1..=MAX_WORLD_SIZE)
}

/// The longest that a wait on the command line may be.
const LONGEST: Duration = Duration::from_secs(86_400);

/// Reads a time to wait.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    time_within(text, Duration::from_millis(1)..=LONGEST)
}

/// Reads how long a job may run, which may be for weeks.
pub(super) fn run_time(text: &str) -> Result<Duration, String> {
    time_within(text, Duration::from_millis(1)..=365 * LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_say_what_is_allowed() {
        assert_eq!((count("7"), workers("16384")), (Ok(7), Ok(16384)));
        for bad in ["0", "16385"] {
            let error = workers(bad).unwrap_err();
            assert!(error.contains("from 1 to 16384"), "{error}");
        }
    }

    #[test]
    fn times_have_limits_which_an_error_names() {
        assert_eq!(time("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(time("24h"), Ok(LONGEST));
        assert_eq!(run_time("14d"), Ok(14 * LONGEST));
        for bad in ["0", "25h"] {
            let error = time(bad).unwrap_err();
            assert!(error.ends_with("allowed is 1ms to 1d"), "{error}");
        }
    }
}
