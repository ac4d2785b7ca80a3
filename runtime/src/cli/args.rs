//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

use kolo_core::ranks::MAX_WORLD_SIZE;
use kolo_transport::wire::span::{Span, duration};

use super::client::ClientConfig;
use super::doctor::Doctor;
use super::down::Down;
use super::interfaces::Interfaces;
use super::node::Node;
use super::trust::{Revoke, Token};
use super::up::Up;
use crate::settings::help_width;

/// The heading of options that all commands have.
const GLOBAL: &str = "Global options";

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  failed; the message says why
  2  the command line is wrong, or what is planned can't be placed
  3  no such job or node
  4  the head, or a node that is needed, can't be reached
  5  no credentials, or they do not allow this

Environment:
  KOLO_HEAD         HOST:PORT of the head
  KOLO_CREDENTIALS  folder of the credentials
  NO_COLOR          no colours, not even on a terminal

Durations are written as 250ms, 5s, 1h30m or 7d; a number alone is in seconds. An id may be cut to its first digits.

Examples:
  kolo run -n 4 python3 train.py
  kolo login --head head:7700 --token-file driver.token
  kolo status";

/// Run any program on many machines as one group; see what the cluster does, read logs, stop jobs.
#[derive(Debug, Parser)]
#[command(name = "kolo", version, after_help = EXIT_CODES, term_width = help_width())]
pub(super) struct Args {
    #[command(subcommand)]
    pub(super) command: Command,
    /// How results are written: as tables for people, or as JSON for programs
    #[arg(long, global = true, value_enum, default_value_t = Format::Table, value_name = "FORMAT", help_heading = GLOBAL)]
    pub(super) format: Format,
    #[command(flatten)]
    pub(super) connect: Connect,
}

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

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Run a program as workers: here, on a cluster, or on hosts by ssh
    #[command(after_help = super::run::args::EXAMPLES)]
    Run(Box<super::run::args::Run>),
    /// Show the cluster and its nodes
    #[command(
        after_help = "CPUS, GPUS and OTHER FREE are what is free of what there is. A node is alive, draining (it takes no new work, and jobs are\nstill there), drained (none is), lost (it is not heard), or revoked.\n\nExamples:\n  kolo status --watch"
    )]
    Status(Status),
    /// Show all jobs, or the workers of one
    #[command(
        after_help = "READY is how many members take calls, of how many, and +N the spares beside them. SUBMITTED and ENDED are how long\nago that was; `kolo jobs JOB` has the time of day (in UTC), and how long the job lasted. `-` stands for nothing: a job\nthat has ended has no ready members, and one that runs has no end.\n\nExamples:\n  kolo jobs\n  kolo jobs job-3f0a --watch"
    )]
    Jobs(Jobs),
    /// Print what a job's workers have written
    #[command(
        after_help = "Examples:\n  kolo logs job-3f0a --rank 0 --rank 2 --tail 20 --follow\n  kolo logs job-3f0a --since 10m --timestamps"
    )]
    Logs(Logs),
    /// Stop a job and wait until it has ended
    #[command(after_help = "Examples:\n  kolo stop job-3f0a")]
    Stop(Stop),
    /// Join a cluster with a driver's token, and keep the credentials and the head's address
    #[command(after_help = "Examples:\n  kolo login --head head:7700 --token-file driver.token")]
    Login(Login),
    /// Bring nodes up on hosts over ssh, and keep them until Ctrl-C
    #[command(
        after_help = "The nodes join the cluster of KOLO_HEAD or of the last login; without one a head is started on this machine for the time of the launch. Host keys are verified as ssh_config says; nobody is asked for passwords.\n\nExamples:\n  kolo up --hosts a:4,b:4\n  kolo up --hostfile hosts.txt --detach"
    )]
    Up(Up),
    /// End what `kolo up --detach` has started
    #[command(
        after_help = "Examples:\n  kolo down\n  kolo down --hosts b:4 --force\n  kolo down --give-up      # a host is gone for good: revoke its node and forget it"
    )]
    Down(Down),
    /// Make, list and revoke tokens for joining (for administrators)
    #[command(
        disable_help_subcommand = true,
        after_help = "Examples:\n  kolo token create --role driver --uses 1 --out driver.token"
    )]
    Token(Token),
    /// Shut out a node or driver, or let it in (for administrators)
    #[command(
        after_help = "Examples:\n  kolo revoke driver-3f0a9b1200c4d5e6 --reason 'laptop lost'\n  kolo revoke driver-3f0a9b1200c4d5e6 --undo"
    )]
    Revoke(Revoke),
    /// Drain a node, or let it take work again (for administrators)
    #[command(
        disable_help_subcommand = true,
        after_help = "Examples:\n  kolo node drain host7 --deadline 10m\n  kolo node undrain host7"
    )]
    Node(Node),
    /// Show the nodes' network interfaces, and which of them are used
    #[command(after_help = super::interfaces::EXAMPLES)]
    Interfaces(Interfaces),
    /// Find what is wrong here and towards the cluster, and what to do
    #[command(after_help = super::doctor::EXAMPLES)]
    Doctor(Doctor),
    /// Print the ranks that a group would have, and start nothing
    #[command(
        after_help = "Examples:\n  kolo plan --hosts a:2,b:1,c:3 --min 2 --max 4\n  kolo plan --registration a,b,a,c --format json"
    )]
    Plan(Plan),
    /// Print completions for a shell
    #[command(
        after_help = "Examples:\n  kolo completions bash > /etc/bash_completion.d/kolo\n  kolo completions fish > ~/.config/fish/completions/kolo.fish"
    )]
    Completions(Completions),
    /// Write the manual pages of kolo and its daemons into a folder
    #[command(after_help = "Examples:\n  kolo man /usr/local/share/man")]
    Man(Man),
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

/// Reads a whole number.
pub(super) fn number(text: &str) -> Result<u32, String> {
    number_within(text, 0, u32::MAX)
}

/// Reads a whole number that is not 0.
pub(super) fn count(text: &str) -> Result<u32, String> {
    number_within(text, 1, u32::MAX)
}

/// Reads a number of workers of a job.
pub(super) fn workers(text: &str) -> Result<u32, String> {
    number_within(text, 1, MAX_WORLD_SIZE)
}

/// Reads a whole number that has limits.
pub(super) fn number_within(text: &str, least: u32, most: u32) -> Result<u32, String> {
    let given = text.parse().ok();
    given
        .filter(|number| (least..=most).contains(number))
        .ok_or_else(|| format!("expected a whole number from {least} to {most}, such as 4"))
}

/// The longest that a wait on the command line may be.
const LONGEST: Duration = Duration::from_secs(86_400);

/// Reads a time to wait.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    time_within(text, Duration::from_millis(1), LONGEST)
}

/// Reads a duration that has limits.
pub(super) fn time_within(text: &str, least: Duration, most: Duration) -> Result<Duration, String> {
    let given = duration(text)?;
    if (least..=most).contains(&given) {
        return Ok(given);
    }
    Err(format!(
        "{} is out of range; allowed is {} to {}",
        Span(given),
        Span(least),
        Span(most)
    ))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_help_of_every_command_shows_an_example() {
        let mut command = Args::command();
        let commands = command
            .get_subcommands()
            .map(|sub| sub.get_name().to_owned());
        let names: Vec<String> = commands.collect();
        assert_eq!(names[0], "run");
        let help = command.render_long_help().to_string();
        assert!(help.contains("Examples:\n  kolo run"), "{help}");
        for name in names {
            let sub = command.find_subcommand_mut(&name).unwrap();
            let help = sub.render_long_help().to_string();
            assert!(
                help.contains(&format!("Examples:\n  kolo {name}")),
                "{help}"
            );
        }
    }

    #[test]
    fn numbers_say_what_is_allowed() {
        assert_eq!(
            (number("0"), count("7"), workers("16384")),
            (Ok(0), Ok(7), Ok(16384))
        );
        for bad in ["abc", "-1", "1.5", "", "4294967296"] {
            assert!(number(bad).unwrap_err().contains("from 0 to"), "{bad}");
            assert!(count(bad).unwrap_err().contains("from 1 to"), "{bad}");
        }
        assert!(count("0").is_err());
        for bad in ["0", "16385"] {
            let error = workers(bad).unwrap_err();
            assert!(error.contains("from 1 to 16384"), "{error}");
        }
    }

    #[test]
    fn times_have_limits_which_an_error_names() {
        assert_eq!(time("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(time("24h"), Ok(LONGEST));
        for bad in ["0", "25h"] {
            let error = time(bad).unwrap_err();
            assert!(error.ends_with("allowed is 1ms to 1d"), "{error}");
        }
    }
}
