//! Options that say how much a group may change, and how often it is started anew.

use std::time::Duration;

use clap::{Args as ClapArgs, ValueEnum};

use super::super::super::args::{count, time, workers};
use crate::settings::values::{number, time_within};

/// The longest time that a host cools down, in seconds; as horovodrun.
const LONGEST_COOLDOWN: Duration = Duration::from_secs(3600);

/// The options.
#[derive(Debug, Clone, Default, ClapArgs)]
#[command(next_help_heading = "Elastic")]
pub(crate) struct ElasticArgs {
    /// Fewest workers: the job goes on with as many as there is room for
    #[arg(long, visible_alias = "min", alias = "min-num-proc", value_name = "N", value_parser = workers)]
    pub(crate) min_np: Option<u32>,
    /// Most workers [default: as many as -n says]
    #[arg(long, visible_alias = "max", alias = "max-num-proc", value_name = "N", value_parser = workers)]
    pub(crate) max_np: Option<u32>,
    /// How often the group is started anew after a worker has failed [default: 3 if its size may change, else 0]; hosts that are
    /// lost, leave or join cost nothing
    #[arg(long, value_name = "N", value_parser = number)]
    pub(crate) max_restarts: Option<u32>,
    /// How often a group all of whose workers ran is followed by another one, for any reason [default: no limit]
    #[arg(long, value_name = "N", value_parser = number)]
    pub(crate) reset_limit: Option<u32>,
    /// How long the job waits for its fewest workers [default: 10m]
    #[arg(long, value_parser = time, value_name = "DURATION")]
    pub(crate) elastic_timeout: Option<Duration>,
    /// Shortest and longest time that a host gets no worker after one has failed there; doubled at each failure
    #[arg(long, alias = "cooldown-range", num_args = 2, value_parser = cooldown_bound, value_names = ["LO", "HI"])]
    pub(crate) blacklist_cooldown_range: Option<Vec<Duration>>,
    /// Command that prints the hosts that the job may use, HOST or HOST:SLOTS on each line; run once a second. With a head they
    /// are nodes of the cluster, else nodes are started on them over ssh
    #[arg(long, conflicts_with_all = ["hosts", "hostfile", "local", "standalone"], value_name = "COMMAND")]
    pub(crate) host_discovery_script: Option<String>,
    /// Slots of hosts that are printed without
    #[arg(long, alias = "slots", requires = "host_discovery_script", value_name = "N", value_parser = count)]
    pub(crate) slots_per_host: Option<u32>,
    /// What happens at a change: restart stops all workers and starts others; in-place lets workers that are left go on, for scripts
    /// with @hvd.elastic.run [default: restart]
    #[arg(long, value_name = "restart|in-place", hide_possible_values = true)]
    pub(crate) on_change: Option<OnChangeArg>,
    /// The protocol of the workers, by its name: as --on-change in-place
    #[arg(long, value_name = "horovod", hide_possible_values = true)]
    pub(crate) elastic: Option<ElasticArg>,
}

/// The ways of `--on-change`: all workers are stopped and others started, or those that are left go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnChangeArg {
    Restart,
    InPlace,
}

/// The protocols of `--elastic`: that of `hvd.elastic`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ElasticArg {
    Horovod,
}

fn cooldown_bound(text: &str) -> Result<Duration, String> {
    time_within(text, Duration::from_secs(1)..=LONGEST_COOLDOWN)
}
