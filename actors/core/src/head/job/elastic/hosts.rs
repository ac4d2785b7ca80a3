//! The hosts that a job may use, where its driver names them.

use kolo_wire::JobHost;
use kolo_wire::ids::NodeId;

use super::super::{Job, Part};
use super::Fact;
use crate::head::validate;
use crate::placement::MAX_PER_NODE;

/// Whether a node is called so: by its hostname, whose case and last dot do not count, or by its id.
fn is_called(name: &str, node: NodeId, hostname: &str) -> bool {
    let plain = |name: &'_ str| name.trim_end_matches('.').to_ascii_lowercase();
    plain(name) == plain(hostname) || name == node.to_string()
}

/// How many workers of a job that names these hosts a node takes at most.
pub(in crate::head) fn most_on(hosts: Option<&[JobHost]>, node: NodeId, hostname: &str) -> u32 {
    let Some(hosts) = hosts else {
        return MAX_PER_NODE;
    };
    let mut known = hosts.iter();
    let host = known.find(|host| is_called(&host.name, node, hostname));
    host.map_or(0, |host| host.slots)
}

impl Job {
    /// The hosts that the job may use; `None` are all.
    #[must_use]
    pub fn hosts(&self) -> Option<&[JobHost]> {
        self.spec.elastic.as_ref()?.hosts.as_deref()
    }

    /// The driver names the hosts that the job may use from now on.
    pub(in crate::head::job) fn use_hosts(&mut self, hosts: Vec<JobHost>) {
        if let Err(refusal) = validate::hosts(&hosts) {
            return self.note(format!("ignored: a list of hosts: {}", refusal.message));
        }
        let Some(spec) = &mut self.spec.elastic else {
            return self.note("ignored: a list of hosts for a job that never changes".to_owned());
        };
        spec.hosts = Some(hosts);
        let there = self.parts.iter().filter(|part| !part.hold.is_over());
        let nodes: Vec<NodeId> = there.map(|part| part.site.node).collect();
        for node in nodes {
            self.check_host(node);
        }
        self.fact(Fact::Offered);
    }

    /// Leaves a node that the list of hosts does not allow as it is used, or stays if it does again.
    pub(super) fn check_host(&mut self, node: NodeId) {
        let Some(part) = self.part(node).map(|part| &self.parts[part]) else {
            return;
        };
        let Part { site, .. } = part;
        let most = most_on(self.hosts(), node, &site.hostname);
        let (is_too_much, hostname) = (most < site.workers, site.hostname.clone());
        let Some(elastic) = &mut self.elastic else {
            return;
        };
        if elastic.drained.contains(&node) {
            // It is left anyway.
        } else if !is_too_much {
            if elastic.unlisted.remove(&node) {
                self.fact(Fact::Undrain { node });
            }
        } else if elastic.unlisted.insert(node) {
            let why = match most {
                0 => format!("{hostname} is not on the list of hosts any more"),
                most => format!("{hostname} has fewer slots on the list of hosts: {most}"),
            };
            self.touch(node);
            self.fact(Fact::Drain { node, why });
        }
    }
}
