//! `--nproc-per-node auto|cpu|gpu`: as many workers on each host as it has CPUs or GPUs.

use kolo_transport::wire::{Milli, NodeInfo, Resources};

use super::super::args::Connect;
use super::super::client::Client;
use super::super::error::CliError;
use super::args::Run;
use super::layout::nodes_called;
use super::target::{Surroundings, Target, target, usage};
use crate::NodeResources;

/// The options with a number in place of the word.
pub(super) async fn settle(
    mut options: Run,
    here: &Surroundings,
    connect: &Connect,
) -> Result<Run, CliError> {
    let word = options.nproc_per_node.clone().unwrap_or_default();
    if !matches!(word.as_str(), "auto" | "cpu" | "gpu") {
        return Ok(options);
    }
    let target = target(&options, here)?;
    let hosts = match &target {
        Target::Local => {
            let found = NodeResources::default().find();
            let found = found.map_err(|error| CliError::Usage(error.to_string()))?;
            vec![("this machine".to_owned(), found.resources)]
        }
        Target::Cluster | Target::Nodes(_) => nodes(&target, connect).await?,
        Target::Hosts(_) | Target::Discovered => {
            return usage(format!(
                "--nproc-per-node is `{word}`, and the hosts are given with their slots; leave --nproc-per-node out, or give a number"
            ));
        }
    };
    let (number, gpus) = number(&options, &word, hosts)?;
    options.nproc_per_node = Some(number.to_string());
    // On a cluster nobody sees a GPU that is not held.
    if gpus && target != Target::Local {
        options.gpus_per_worker.get_or_insert(1);
    }
    Ok(options)
}

/// The nodes that may be used, with all that they have.
async fn nodes(target: &Target, connect: &Connect) -> Result<Vec<(String, Resources)>, CliError> {
    let client = Client::connect(&connect.config()).await?;
    let nodes = client.cluster().await?.nodes;
    client.close().await;
    let meant = match target {
        Target::Nodes(hosts) => {
            let used = hosts.iter().filter(|host| host.slots > 0);
            let used = used.map(|host| (host.clone(), host.slots)).collect();
            Some(nodes_called(used, &nodes)?)
        }
        _ => None,
    };
    let is_meant = |node: &NodeInfo| match &meant {
        Some(meant) => meant.iter().any(|share| share.node == node.node),
        None => node.alive && !node.draining,
    };
    let there = nodes.into_iter().filter(is_meant);
    Ok(there.map(|node| (node.hostname, node.total)).collect())
}

/// How many workers each host gets, and whether GPUs were counted.
fn number(
    options: &Run,
    word: &str,
    hosts: Vec<(String, Resources)>,
) -> Result<(u32, bool), CliError> {
    let gpus_each = options.gpus_per_worker.unwrap_or(1).max(1);
    let cpus_each = options.cpus_per_worker.unwrap_or(Milli::units(1)).0.max(1);
    let has_gpus = hosts.iter().any(|(_, has)| has.gpus > 0);
    let by_gpu = word == "gpu" || (word == "auto" && has_gpus);
    let room = |has: &Resources| {
        if by_gpu {
            has.gpus / gpus_each
        } else {
            // Fewer than one is one: CPUs are shared.
            let most = has.cpus.0 / cpus_each;
            u32::try_from(most).unwrap_or(u32::MAX)
        }
    };
    let mut counts: Vec<(String, u32)> = hosts
        .into_iter()
        .map(|(name, has)| (name, room(&has)))
        .filter(|(_, room)| *room > 0)
        .collect();
    counts.sort();
    let Some((_, first)) = counts.first().cloned() else {
        let what = if by_gpu { "GPU" } else { "CPU" };
        return usage(format!(
            "--nproc-per-node is `{word}`, and no host has a {what} for a worker; give a number, or auto for CPUs where there are no GPUs"
        ));
    };
    if counts.iter().any(|(_, number)| *number != first) {
        let listed: Vec<String> = counts
            .iter()
            .map(|(name, number)| format!("{name}:{number}"))
            .collect();
        return usage(format!(
            "--nproc-per-node is `{word}`, which differs from host to host: {}; give a number, or the hosts with their slots by -H",
            listed.join(",")
        ));
    }
    Ok((first, by_gpu))
}

#[cfg(test)]
mod tests {
    use kolo_transport::wire::Milli;

    use super::super::plan::tests::options;
    use super::*;

    fn host(name: &str, cpus: u64, gpus: u32) -> (String, Resources) {
        let resources = Resources {
            cpus: Milli::units(cpus),
            gpus,
            ..Resources::default()
        };
        (name.to_owned(), resources)
    }

    fn ask(line: &str, hosts: &[(String, Resources)]) -> Result<(u32, bool), String> {
        let options = options(&format!("{line} x"));
        let word = options.nproc_per_node.clone().unwrap();
        number(&options, &word, hosts.to_vec()).map_err(|error| {
            assert_eq!(error.exit_code(), 2);
            error.to_string()
        })
    }

    /// `nproc_per_node` of torchrun's own tests: a number, auto, cpu, gpu.
    #[test]
    fn nproc_launch_auto_cpu_and_gpu() {
        let plain = [host("a", 8, 0)];
        let with = [host("a", 8, 2), host("b", 16, 2)];
        for (line, hosts, expected) in [
            ("--nproc-per-node cpu", &plain[..], (8, false)),
            ("--nproc-per-node auto", &plain, (8, false)),
            ("--nproc-per-node auto", &with, (2, true)),
            ("--nproc-per-node gpu", &with, (2, true)),
            ("--nproc-per-node gpu --gpus-per-worker 2", &with, (1, true)),
            (
                "--nproc-per-node cpu --cpus-per-worker 4",
                &plain,
                (2, false),
            ),
        ] {
            assert_eq!(ask(line, hosts).unwrap(), expected, "{line}");
        }
        // Hosts without any take no part.
        let some = [host("a", 8, 4), host("b", 8, 0)];
        assert_eq!(ask("--nproc-per-node gpu", &some).unwrap(), (4, true));
        for (line, hosts, message) in [
            ("--nproc-per-node gpu", &plain[..], "no host has a GPU"),
            ("--nproc-per-node auto", &[], "no host has a CPU"),
            ("--nproc-per-node cpu", &with, "a:8,b:16; give a number"),
        ] {
            let error = ask(line, hosts).unwrap_err();
            assert!(error.contains(message), "{line}: {error}");
        }
    }
}
