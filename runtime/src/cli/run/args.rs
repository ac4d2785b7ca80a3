//! The options of `kolo run`.

mod elastic;
mod torchrun;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args as ClapArgs;
use kolo_transport::wire::Milli;

use super::super::args::{run_time, time, workers};
use super::prefix::Prefix;
use super::ranks::Ranks;

pub(crate) use self::elastic::{ElasticArg, ElasticArgs, OnChangeArg};
pub(crate) use self::torchrun::TorchArgs;
use crate::settings::values::{amount, number, time_within};

pub(crate) const EXAMPLES: &str = "\
Examples:
  kolo run -n 4 python3 train.py
  kolo run -n 4 --max-restarts 3 -- ./train
  kolo run -n 8 -H a:4,b:4 --pass-env 'NCCL_*' -- ./train --epochs 3
  kolo run --host-discovery-script ./hosts.sh --min 4 --max 16 -- ./train
  kolo run -n 2 --dry-run -- ./train

  export KOLO_HEAD=head:7700      # on a cluster
  kolo run --nnodes 2 --nproc-per-node 4 --output-dir out -- ./train
  kolo run --nnodes 1:4 --nproc-per-node 4 -- ./train
  kolo run -n 8 --wait 10m --timeout 2h -- ./train

Exit codes:
  0        all workers exited with 0
  N        the first worker that failed exited with N; 128+N if signal N ended it
  124      the job was ended by --timeout
  126      the program can't be executed, or its directory is not there
  127      the program is not on all hosts
  128+N    signal N was sent to kolo: 130 for Ctrl-C
  1 to 5   before anything ran: as `kolo --help` says";

/// The options, a field for each.
#[derive(Debug, Clone, ClapArgs)]
#[allow(clippy::struct_excessive_bools, clippy::struct_field_names)] // they are switches, with names of their own
pub(crate) struct Run {
    /// Number of workers [default: one for each slot of the hosts, or 1]; `-np` is the same, as are other long names with one `-`
    #[arg(
        short = 'n',
        long,
        alias = "np",
        value_name = "N",
        value_parser = workers,
        allow_negative_numbers = true,
        help_heading = "How many workers"
    )]
    pub(crate) num_proc: Option<u32>,
    /// Number of workers on each host; cpu, gpu: as many as it has of these; auto: gpu if it has any, else cpu
    #[arg(
        long,
        alias = "npernode",
        value_name = "N|auto|cpu|gpu",
        help_heading = "How many workers"
    )]
    pub(crate) nproc_per_node: Option<String>,
    /// Number of hosts; as many workers on each. MIN:MAX: the job goes on with as many as there are
    #[arg(long, value_name = "N|MIN:MAX", help_heading = "How many workers")]
    pub(crate) nnodes: Option<String>,
    /// Hosts and their slots, filled in this order: nodes of the cluster if KOLO_HEAD or --head gives one, else nodes are
    /// started on them over ssh
    #[arg(
        short = 'H',
        long,
        alias = "host",
        value_name = "HOST:SLOTS,...",
        conflicts_with = "hostfile",
        help_heading = "Where"
    )]
    pub(crate) hosts: Option<String>,
    /// File with `HOST slots=N` on each line; blank lines and `#` comments are skipped
    #[arg(long, aliases = ["host-file", "machinefile"], value_name = "FILE", help_heading = "Where")]
    pub(crate) hostfile: Option<PathBuf>,
    /// On this machine, whatever KOLO_HEAD says
    #[arg(long, conflicts_with_all = ["hosts", "hostfile"], help_heading = "Where")]
    pub(crate) local: bool,
    /// CPUs that each worker holds, on a cluster [default: 1]
    #[arg(long, value_name = "CPUS", value_parser = amount, help_heading = "How many workers")]
    pub(crate) cpus_per_worker: Option<Milli>,
    /// GPUs that each worker holds; the workers of a host see all of theirs [default: on a cluster none, else all are seen]
    #[arg(long, value_name = "GPUS", value_parser = number, help_heading = "How many workers")]
    pub(crate) gpus_per_worker: Option<u32>,
    /// Set a variable for all workers, over all that kolo sets but KOLO_*; may be repeated
    #[arg(
        short = 'e',
        long,
        value_name = "NAME=VALUE",
        help_heading = "What workers find"
    )]
    pub(crate) env: Vec<String>,
    /// Pass variables of this environment to the workers, but none that kolo sets; `*` and `?` as in file names; may be
    /// repeated
    #[arg(long, value_name = "PATTERN", help_heading = "What workers find")]
    pub(crate) pass_env: Vec<String>,
    /// Directory that the workers start in [default: this one]
    #[arg(
        long,
        alias = "wdir",
        value_name = "DIR",
        help_heading = "What workers find"
    )]
    pub(crate) cwd: Option<PathBuf>,
    /// What stands before each line: text with {rank}, {local_rank}, {host}, {stream}, {time}; or none
    /// [default: `[{rank}]<{stream}>:`]
    #[arg(long, value_parser = Prefix::parse, value_name = "TEMPLATE", help_heading = "Output")]
    pub(crate) prefix: Option<Prefix>,
    /// Begin each line with the time
    #[arg(long, conflicts_with = "prefix", aliases = ["prefix-timestamp", "prefix-output-with-timestamp"], help_heading = "Output")]
    pub(crate) timestamps: bool,
    /// Show only the output of these ranks: 0,4-7; files get all
    #[arg(long, value_parser = Ranks::parse, value_name = "RANKS", help_heading = "Output")]
    pub(crate) ranks: Option<Ranks>,
    /// Also write the output to files: DIR/JOB/rank-R.gen-G.stdout and .stderr
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(crate) output_dir: Option<PathBuf>,
    /// The same as horovodrun has the files: DIR/rank.R/stdout and stderr, over those of an earlier run
    #[arg(
        long,
        conflicts_with = "output_dir",
        value_name = "DIR",
        help_heading = "Output"
    )]
    pub(crate) output_filename: Option<PathBuf>,
    /// The same as torchrun has the files: DIR/JOB/attempt_N/RANK/stdout.log and stderr.log
    #[arg(long, conflicts_with_all = ["output_dir", "output_filename"], value_name = "DIR", help_heading = "Output")]
    pub(crate) log_dir: Option<PathBuf>,
    /// Give the workers no input: by default rank 0 has this command's
    #[arg(long, help_heading = "What workers find")]
    pub(crate) no_stdin: bool,
    /// From TERM to KILL when workers are ended [default: 5s]
    #[arg(long, value_parser = grace, value_name = "DURATION", help_heading = "Start and end")]
    pub(crate) grace: Option<Duration>,
    /// How long it may take until all workers run [default: 30s]
    #[arg(long, value_parser = time, value_name = "DURATION", help_heading = "Start and end")]
    pub(crate) start_timeout: Option<Duration>,
    /// End the job when it has run so long, and tell what each rank was at
    #[arg(long, value_parser = run_time, value_name = "DURATION", help_heading = "Start and end")]
    pub(crate) timeout: Option<Duration>,
    /// How long the job waits for room on a cluster that is busy [default: not at all]
    #[arg(long, value_parser = time, value_name = "DURATION", help_heading = "Start and end")]
    pub(crate) wait: Option<Duration>,
    /// Name of the job [default: that of the program]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Do not serve the HTTP rendezvous that Horovod's workers meet at
    #[arg(long, help_heading = "What workers find")]
    pub(crate) no_rendezvous: bool,
    /// Only these network interfaces, verified; HOST=NAME for one host alone
    #[arg(long, aliases = ["network-interfaces", "network-interface"], value_name = "NAME,...", value_delimiter = ',', help_heading = "Where")]
    pub(crate) interfaces: Vec<String>,
    /// Probe the network even if it is known which interfaces connect the hosts
    #[arg(long, alias = "disable-cache", help_heading = "Where")]
    pub(crate) no_cache: bool,
    /// TOML file with any of these options; what is on the command line counts more
    #[arg(long, value_name = "FILE")]
    pub(crate) config_file: Option<PathBuf>,
    /// Print what would run where, or what a run would refuse, and start no worker
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) elastic: ElasticArgs,
    #[command(flatten)]
    pub(crate) torch: TorchArgs,
    #[command(flatten)]
    pub(crate) ssh: super::super::host_args::SshArgs,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, value_name = "PROGRAM", value_hint = clap::ValueHint::CommandWithArguments)]
    pub(crate) program: Vec<std::ffi::OsString>,
}

/// The longest grace that a head takes.
const LONGEST_GRACE: Duration = Duration::from_secs(3600);

fn grace(text: &str) -> Result<Duration, String> {
    time_within(text, Duration::ZERO..=LONGEST_GRACE)
}
