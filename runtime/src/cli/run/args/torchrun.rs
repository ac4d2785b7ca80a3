//! Options that scripts for torchrun give.

use clap::Args as ClapArgs;

use super::super::ranks::Ranks;
use super::super::streams::{Shown, Streams};
use crate::settings::values::port;

/// The options.
#[derive(Debug, Clone, Default, ClapArgs)]
#[command(next_help_heading = "As torchrun has them")]
pub(crate) struct TorchArgs {
    /// The same as --local
    #[arg(long, conflicts_with_all = ["hosts", "hostfile"])]
    pub(crate) standalone: bool,
    /// ROLE_NAME of all workers [default: default]
    #[arg(long, value_name = "NAME")]
    pub(crate) role: Option<String>,
    /// Port of rank 0 that workers meet at, in a job that never changes [default: a free one]
    #[arg(long, value_name = "PORT", value_parser = port)]
    pub(crate) master_port: Option<u16>,
    /// TORCHELASTIC_RUN_ID of all workers [default: the id of the job]
    #[arg(long, value_name = "ID")]
    pub(crate) rdzv_id: Option<String>,
    /// Write to files and do not show: 1 standard output, 2 standard error, 3 both; 0:1,1:3 by local rank
    #[arg(short = 'r', long, value_parser = Streams::parse, value_name = "STREAMS")]
    pub(crate) redirects: Option<Streams>,
    /// Write to files and show, over --redirects
    #[arg(short = 't', long, value_parser = Streams::parse, value_name = "STREAMS")]
    pub(crate) tee: Option<Streams>,
    /// Show only the output of these local ranks
    #[arg(long, value_parser = Ranks::parse, value_name = "RANKS")]
    pub(crate) local_ranks_filter: Option<Ranks>,
    #[command(flatten)]
    pub(crate) given: TakenAsGiven,
}

/// Options that say what is so anyway, or else are refused.
#[derive(Debug, Clone, Default, ClapArgs)]
pub(crate) struct TakenAsGiven {
    #[arg(long, hide = true)]
    pub(crate) rdzv_backend: Option<String>,
    #[arg(long, hide = true)]
    pub(crate) rdzv_endpoint: Option<String>,
    #[arg(long, hide = true)]
    pub(crate) node_rank: Option<String>,
    #[arg(long, hide = true)]
    pub(crate) master_addr: Option<String>,
    #[arg(long, hide = true, value_parser = super::super::super::args::time)]
    pub(crate) monitor_interval: Option<std::time::Duration>,
    #[arg(long, hide = true, value_parser = ["spawn", "fork", "forkserver"])]
    pub(crate) start_method: Option<String>,
    #[arg(long, hide = true)]
    pub(crate) signals_to_handle: Option<String>,
}

impl TorchArgs {
    /// What is shown of the output.
    pub(crate) fn shown(&self) -> Shown {
        Shown {
            redirects: self.redirects.clone(),
            tee: self.tee.clone(),
            local_ranks: self.local_ranks_filter.clone().unwrap_or_default(),
        }
    }

    /// Variables that the workers have, unless `--env` gives them.
    pub(crate) fn variables(&self) -> impl Iterator<Item = (&'static str, String)> {
        let port = self.master_port.map(|port| port.to_string());
        let all = [
            ("ROLE_NAME", self.role.clone()),
            ("TORCHELASTIC_RUN_ID", self.rdzv_id.clone()),
            ("MASTER_PORT", port),
        ];
        all.into_iter()
            .filter_map(|(name, value)| Some((name, value?)))
    }
}
