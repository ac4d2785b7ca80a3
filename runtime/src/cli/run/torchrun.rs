//! Options that scripts for torchrun give, where they mean something here.

use super::super::error::CliError;
use super::args::Run;
use super::streams::Streams;
use super::target::{Surroundings, Target, usage};
use crate::hosts::Machine;

/// Signals at which torchrun's agent ends its workers, if nobody says.
const USUAL_SIGNALS: &str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";

/// Refuses a local rank that no worker has.
fn has_rank(option: &str, beyond: Option<u32>, local_size: u32) -> Result<(), CliError> {
    match beyond {
        None => Ok(()),
        Some(rank) => usage(format!(
            "{option} has local rank {rank}; the workers of a host have the local ranks 0 to {}",
            local_size.saturating_sub(1)
        )),
    }
}

/// Refuses what can't be as it is given. `local_size`: the most workers on one host.
pub(super) fn check(
    options: &Run,
    target: &Target,
    is_elastic: bool,
    local_size: u32,
    here: &Surroundings,
) -> Result<(), CliError> {
    let all = &options.torch;
    let given = &all.given;
    let has_files = options.output_dir.is_some()
        || options.output_filename.is_some()
        || options.log_dir.is_some();
    for (option, streams) in [("--redirects", &all.redirects), ("--tee", &all.tee)] {
        if streams.is_some() && !has_files {
            return usage(format!(
                "{option} is given without a folder for the files; give --log-dir DIR, too"
            ));
        }
        let highest = streams.as_ref().and_then(Streams::highest);
        has_rank(
            option,
            highest.filter(|rank| *rank >= local_size),
            local_size,
        )?;
    }
    let filter = all.local_ranks_filter.as_ref();
    let beyond = filter.and_then(|ranks| ranks.beyond(local_size));
    has_rank("--local-ranks-filter", beyond, local_size)?;
    if let Some("") = all.rdzv_id.as_deref() {
        return usage(
            "--rdzv-id is empty; give a text, or leave it out and the job's own id is taken",
        );
    }
    if let Some(port) = all.master_port.filter(|_| is_elastic) {
        return usage(format!(
            "--master-port is {port} in a job that may change, where each group needs a port that no group before had; \
             leave --master-port out, and kolo chooses the ports"
        ));
    }
    let is_here = |host: &str| Machine::new(host, &here.hostname) == Machine::Here;
    if let Some(address) = &given.master_addr
        && !(*target == Target::Local && is_here(address))
    {
        return usage(format!(
            "--master-addr is `{address}`; leave --master-addr out: kolo chooses the host of rank 0 and tells all workers"
        ));
    }
    if let Some(backend) = &given.rdzv_backend
        && !matches!(backend.as_str(), "c10d" | "static")
    {
        return usage(format!(
            "--rdzv-backend is `{backend}`; allowed are c10d and static, in place of which the head brings the workers together"
        ));
    }
    if let Some(endpoint) = &given.rdzv_endpoint {
        let host = endpoint
            .rsplit_once(':')
            .map_or(endpoint.as_str(), |(host, _)| host);
        if !(*target == Target::Local && is_here(host)) {
            return usage(format!(
                "--rdzv-endpoint is `{endpoint}`; write --head HOST:PORT before `run` in its place: a kolo-head brings hosts together"
            ));
        }
    }
    if let Some(rank) = given.node_rank.as_deref().filter(|rank| *rank != "0") {
        return usage(format!(
            "--node-rank is `{rank}`; `kolo run` is started once and not on each host: give the hosts by -H, or a cluster by --head"
        ));
    }
    if let Some(list) = &given.signals_to_handle {
        let is_usual = |name: &str| USUAL_SIGNALS.split(',').any(|usual| usual == name);
        if let Some(other) = list.split(',').find(|name| !is_usual(name.trim())) {
            return usage(format!(
                "--signals-to-handle has `{other}`; the workers are ended at {USUAL_SIGNALS}, and get SIGUSR1 and SIGUSR2 as they are"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::{on_cluster, planned, refused};

    #[test]
    fn a_line_for_torchrun_on_one_host_runs_as_it_is() {
        let plan = planned(
            "--standalone --nnodes 1 --nproc_per_node 2 --rdzv-backend c10d --rdzv_endpoint=localhost:0 --rdzv-id 7 --node-rank 0 \
             --master-addr 127.0.0.1 --master-port 29501 --monitor-interval 5 --start-method spawn --role trainer \
             --signals-to-handle SIGTERM,SIGINT x",
        );
        assert_eq!(plan.workers, 2);
        assert!(plan.notes.is_empty(), "{:?}", plan.notes);
        let env = plan.spec.env;
        assert_eq!(env["ROLE_NAME"], "trainer");
        assert_eq!(env["TORCHELASTIC_RUN_ID"], "7");
        assert_eq!(env["MASTER_PORT"], "29501");
        let plan = planned("--role a -e ROLE_NAME=b x");
        assert_eq!(plan.spec.env["ROLE_NAME"], "b");
        assert!(planned("x").spec.env.is_empty());
    }

    #[test]
    fn standalone_is_on_this_machine_whatever_head_there_is() {
        let target = |line: &str| on_cluster(line).unwrap().target;
        assert_eq!(target("--standalone x"), target("--local x"));
        assert_ne!(target("x"), target("--local x"));
    }

    #[test]
    fn what_means_nothing_here_is_refused_with_what_to_write() {
        for (line, message) in [
            ("--rdzv-backend etcd x", "allowed are c10d and static"),
            ("--rdzv-endpoint h:29400 x", "--head HOST:PORT"),
            ("--node-rank 1 x", "-H"),
            ("--master-addr other x", "leave --master-addr out"),
            (
                "-H localhost:2 --master-addr h x",
                "leave --master-addr out",
            ),
            (
                "-n 2 --max-restarts 1 --master-port 5 x",
                "leave --master-port out",
            ),
            ("--signals-to-handle SIGUSR1 x", "SIGUSR1"),
            ("-r 3 x", "--redirects is given without a folder"),
            ("--tee 3 x", "--log-dir DIR"),
        ] {
            let error = refused(line);
            assert!(error.contains(message), "{line}: {error}");
        }
    }
}
