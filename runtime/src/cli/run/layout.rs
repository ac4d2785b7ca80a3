//! How many workers, and how many of them on each host.

use std::collections::HashSet;

use kolo_core::placement::MAX_PER_NODE;
use kolo_core::ranks::MAX_WORLD_SIZE;
use kolo_transport::wire::counted::Counted;
use kolo_transport::wire::{JobSpec, Milli, NodeInfo, NodeShare, Placement};

use super::super::args::workers;
use super::super::error::CliError;
use super::super::ids::{Called, listed};
use super::args::Run;
use super::target::{Target, usage};
use crate::hosts::HostSlots;

pub(super) fn count(option: &str, given: &str) -> Result<u32, CliError> {
    let or = match option {
        "nproc-per-node" => "; or auto, cpu or gpu",
        _ => "; or the fewest and the most as 1:4",
    };
    workers(given).or_else(|allowed| {
        usage(format!(
            "invalid value '{given}' for '--{option}': {allowed}{or}"
        ))
    })
}

/// `N`, or `N:N` as torchrun writes it.
fn nodes(given: &str) -> Result<u32, CliError> {
    match given.split_once(':') {
        Some((least, most)) if least == most => count("nnodes", least),
        _ => count("nnodes", given),
    }
}

/// The hosts that have slots, with their places in the list.
fn used(hosts: &[HostSlots]) -> impl Iterator<Item = (usize, &HostSlots)> {
    hosts.iter().enumerate().filter(|(_, host)| host.slots > 0)
}

/// How many workers there are, and how a cluster places them.
pub(super) fn placement(options: &Run, target: &Target) -> Result<(Placement, u32), CliError> {
    let per_node = options
        .nproc_per_node
        .as_deref()
        .map(|given| count("nproc-per-node", given))
        .transpose()?;
    let hosts = options.nnodes.as_deref().map(nodes).transpose()?;
    let slots: Option<u64> = match target {
        Target::Hosts(hosts) | Target::Nodes(hosts) => {
            Some(hosts.iter().map(|host| u64::from(host.slots)).sum())
        }
        Target::Local | Target::Cluster | Target::Discovered => None,
    };
    let product = match (hosts, per_node) {
        (Some(hosts), Some(per_node)) => Some(u64::from(hosts) * u64::from(per_node)),
        (None, Some(per_node)) => match target {
            Target::Hosts(hosts) | Target::Nodes(hosts) => {
                Some(used(hosts).count() as u64 * u64::from(per_node))
            }
            Target::Local => Some(u64::from(per_node)),
            Target::Cluster | Target::Discovered => match options.num_proc {
                Some(all) if all % per_node == 0 => Some(u64::from(all)),
                Some(all) => {
                    return usage(format!(
                        "{} can't be {per_node} on each host; give a multiple of {per_node}",
                        Counted(all, "worker")
                    ));
                }
                // One host, as torchrun has it.
                None => Some(u64::from(per_node)),
            },
        },
        (Some(hosts), None) => match options.num_proc {
            Some(all) if all % hosts == 0 => Some(u64::from(all)),
            Some(all) => {
                return usage(format!(
                    "{} can't be spread evenly over {hosts} hosts; give a multiple of {hosts}",
                    Counted(all, "worker")
                ));
            }
            None => Some(u64::from(hosts)),
        },
        (None, None) => None,
    };
    let workers = match (product, options.num_proc) {
        (Some(product), Some(all)) if product != u64::from(all) => {
            return usage(format!(
                "--num-proc is {all}, and the other options make {}; give one of them, or what agrees",
                Counted(product, "worker")
            ));
        }
        (Some(product), _) => product,
        (None, Some(all)) => u64::from(all),
        (None, None) => slots.unwrap_or(1),
    };
    let workers = match u32::try_from(workers) {
        Ok(workers) if (1..=MAX_WORLD_SIZE).contains(&workers) => workers,
        _ => {
            return usage(format!(
                "requested {workers} workers; allowed are 1 to {MAX_WORLD_SIZE}"
            ));
        }
    };
    match target {
        Target::Local if hosts.is_some_and(|hosts| hosts > 1) => {
            return usage(
                "--nnodes is more than 1, and this machine is one host; give --hosts or --hostfile, or a cluster by KOLO_HEAD",
            );
        }
        Target::Local if workers > MAX_PER_NODE => {
            return usage(format!(
                "requested {workers} workers; one host takes at most {MAX_PER_NODE}"
            ));
        }
        Target::Hosts(list) | Target::Nodes(list) => {
            if let Some(hosts) = hosts
                && hosts as usize > used(list).count()
            {
                return usage(format!(
                    "--nnodes is {hosts}, and the hosts with slots are only {}; give more hosts, or a smaller --nnodes",
                    used(list).count()
                ));
            }
            let all = slots.unwrap_or_default();
            if u64::from(workers) > all {
                return usage(format!(
                    "requested {}, and the hosts have {}; give more slots, or ask for less",
                    Counted(workers, "worker"),
                    Counted(all, "slot")
                ));
            }
        }
        Target::Local | Target::Cluster | Target::Discovered => {}
    }
    let spread = match (target, hosts, per_node) {
        (Target::Cluster | Target::Discovered, Some(hosts), _) => Some((hosts, workers / hosts)),
        (Target::Cluster | Target::Discovered, None, Some(per_node)) => {
            Some((workers / per_node, per_node))
        }
        _ => None,
    };
    let placement = match spread {
        Some((hosts, slots)) => Placement::Spread { hosts, slots },
        None => Placement::Pack { workers },
    };
    Ok((placement, workers))
}

/// How many workers each host gets: filled in order, or evenly if that is asked for. Hosts without any are left out.
pub(super) fn shares(
    options: &Run,
    hosts: &[HostSlots],
    workers: u32,
) -> Result<Vec<(usize, u32)>, CliError> {
    let per_node = match (&options.nproc_per_node, &options.nnodes) {
        (Some(given), _) => Some(count("nproc-per-node", given)?),
        (None, Some(given)) => Some(workers / nodes(given)?),
        (None, None) => None,
    };
    let mut left = workers;
    let mut shares = Vec::new();
    for (index, host) in used(hosts) {
        let share = per_node.unwrap_or(host.slots).min(left);
        if share > host.slots {
            return usage(format!(
                "requested {} on {}, which has {}; give it more slots, or ask for less",
                Counted(share, "worker"),
                host.destination(),
                Counted(host.slots, "slot")
            ));
        }
        if share > MAX_PER_NODE {
            return usage(format!(
                "{} would get {share} workers; one host takes at most {MAX_PER_NODE}",
                host.destination()
            ));
        }
        if share > 0 {
            shares.push((index, share));
            left -= share;
        }
    }
    if left > 0 {
        return usage(format!("the hosts have no slots for {left} of the workers"));
    }
    Ok(shares)
}

/// The most workers that one host may get.
pub(super) fn local_size(target: &Target, placement: Placement) -> u32 {
    match (target, placement) {
        (_, Placement::Spread { slots, .. }) => slots,
        (Target::Hosts(hosts) | Target::Nodes(hosts), Placement::Pack { workers }) => {
            let slots = hosts.iter().map(|host| host.slots).max();
            slots.unwrap_or_default().min(workers)
        }
        (_, Placement::Pack { workers }) => workers.min(MAX_PER_NODE),
    }
}

/// Lays the job over nodes that were started for it.
pub(crate) fn lay_out(spec: &mut JobSpec, layout: Vec<NodeShare>) {
    // An elastic job takes the hosts that there are.
    if spec.elastic.is_none() {
        spec.layout = layout;
    }
    // Each host declares a CPU for each slot.
    spec.per_worker.cpus = Milli::units(1);
}

/// Which nodes of a cluster are meant by their hostnames or ids.
pub(super) fn nodes_called(
    shares: Vec<(HostSlots, u32)>,
    nodes: &[NodeInfo],
) -> Result<Vec<NodeShare>, CliError> {
    let alive = || nodes.iter().filter(|node| node.alive);
    let called = Called::of(alive());
    let (mut layout, mut given) = (Vec::new(), HashSet::new());
    for (host, workers) in shares {
        let name = host.destination();
        let Some(node) = called.find(&host.host)? else {
            if Called::of(nodes).find(&host.host)?.is_some() {
                return usage(format!(
                    "{name} is not there any more, as `kolo status` shows; leave {name} out, or start kolo-node there again"
                ));
            }
            let mut names: Vec<String> = alive().map(|node| node.hostname.clone()).collect();
            names.sort_unstable();
            return usage(format!(
                "no node of the cluster is called `{name}`; there are {} (hosts are reached over ssh where no head is given: \
                 without KOLO_HEAD and --head)",
                listed(&names)
            ));
        };
        if node.draining {
            return usage(format!(
                "{name} takes no new work, since it is drained or is being stopped; `kolo node undrain {name}` ends a drain"
            ));
        }
        let (node, hostname) = (node.node, &node.hostname);
        if !given.insert(node) {
            return usage(format!(
                "{name} is {hostname} ({node}), which is given already; give each node once, with all its slots"
            ));
        }
        layout.push(NodeShare { node, workers });
    }
    Ok(layout)
}

#[cfg(test)]
mod tests {
    use kolo_transport::ids::NodeId;
    use kolo_transport::wire::Resources;

    use super::*;

    fn node(id: u64, hostname: &str) -> NodeInfo {
        NodeInfo {
            node: NodeId(id),
            hostname: hostname.to_owned(),
            address: ([127, 0, 0, 1], 1).into(),
            alive: true,
            total: Resources::default(),
            available: Resources::default(),
            last_seen_ms: 0,
            jobs: Vec::new(),
            draining: false,
        }
    }

    #[test]
    fn nodes_are_called_by_hostname_or_id_in_the_order_given() {
        let mut nodes = vec![
            node(1, "b"),
            node(2, "a.example"),
            node(3, "two"),
            node(4, "two"),
            node(5, "node-0000000000000005"),
            node(6, "gone"),
            node(7, "fd00::2"),
            node(0x4a << 56, "four"),
        ];
        nodes[5].alive = false;
        let ask = |hosts: &[&str]| {
            let hosts = hosts.iter().map(|host| HostSlots::new(*host, 9));
            let shares = (1..).zip(hosts).map(|(workers, host)| (host, workers));
            let layout = nodes_called(shares.collect(), &nodes)?;
            let pairs = layout.iter().map(|share| (share.node.0, share.workers));
            Ok::<Vec<_>, CliError>(pairs.collect())
        };
        assert_eq!(
            ask(&[
                "A.Example.",
                "node-0000000000000003",
                "b",
                "FD00:0::2",
                "node-4a00"
            ])
            .unwrap(),
            [(2, 1), (3, 2), (1, 3), (7, 4), (0x4a << 56, 5)]
        );
        assert_eq!(ask(&["node-0000000000000005"]).unwrap(), [(5, 1)]);
        for (hosts, message) in [
            (&["gone"][..], "gone is not there any more"),
            (
                &["b", "nowhere"],
                "no node of the cluster is called `nowhere`; there are a.example, b, fd00::2, four, node-0000000000000005, two, two",
            ),
            (
                &["two"],
                "2 nodes of the cluster are called `two`: give the id in place of the name, which is one of \
                 node-0000000000000003, node-0000000000000004",
            ),
            (&["b", "node-0000000000000001"], "which is given already"),
            (&["node-0000"], "`node-0000` is the start of 6 nodes"),
            (&["node-4"], "no node of the cluster is called `node-4`"),
        ] {
            let error = ask(hosts).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(message), "{error}");
        }
        assert_eq!(listed(&[]), "none");
        let ten = ["x"; 10].map(str::to_owned);
        assert_eq!(listed(&ten), "x, x, x, x, x, x, x, x and 2 more");
    }
}
