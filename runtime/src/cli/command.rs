//! The command line: all commands, and the options that each of them takes.

use clap::{Parser, Subcommand};

use super::args::{
    Completions, Connect, Format, GLOBAL, Jobs, Login, Logs, Man, Plan, Status, Stop,
};
use super::doctor::Doctor;
use super::down::Down;
use super::interfaces::Interfaces;
use super::node::Node;
use super::trust::{Revoke, Token};
use super::up::Up;
use crate::settings::help_width;

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

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Run a program as workers: here, on a cluster, or on hosts by ssh
    #[command(after_help = super::run::args::EXAMPLES)]
    Run(Box<super::run::args::Run>),
    /// Show the cluster and its nodes
    #[command(
        after_help = "CPUS, GPUS and OTHER FREE are what is free of what there is. A node is alive, draining (it takes no new work, and jobs are still there), drained (none is), left (it was stopped), lost (it is not heard), or revoked.\n\nExamples:\n  kolo status --watch"
    )]
    Status(Status),
    /// Show all jobs, or the workers of one
    #[command(
        after_help = "READY is how many members take calls, of how many, and +N the spares beside them. SUBMITTED and ENDED are how long ago that was; `kolo jobs JOB` has the time of day (in UTC), and how long the job lasted. `-` stands for nothing: a job that has ended has no ready members, and one that runs has no end.\n\nExamples:\n  kolo jobs\n  kolo jobs job-3f0a --watch"
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
}
