//! Hosts that are given up: their nodes are put out of the cluster.

use std::time::Duration;

use kolo_transport::identity::Role;
use kolo_transport::ids::NodeId;
use kolo_transport::wire::{HeadReply, HeadRequest};

use super::args::Connect;
use super::client::{Client, ClientConfig};
use crate::hosts::HostSlots;
use crate::private_file::is_locked;
use crate::ssh::state::Launch;

/// How long the head may take: it tells the nodes before it answers.
const ANSWER: Duration = Duration::from_secs(15);

/// Why the node is out, for who looks at `kolo status` later.
const REASON: &str = "its host was given up by kolo down";

/// Puts nodes out. It connects to the head when it is first needed.
pub(super) struct Exclusion<'a> {
    launch: Option<&'a Launch>,
    config: ClientConfig,
    client: Option<Client>,
}

impl<'a> Exclusion<'a> {
    pub(super) fn new(launch: Option<&'a Launch>, connect: &Connect) -> Self {
        let mut config = connect.config();
        if let Some(launch) = launch {
            config.head = Some(launch.head.clone());
            config.credentials = Some(launch.credentials.clone());
        }
        Self {
            launch,
            config,
            client: None,
        }
    }

    /// Revokes the nodes of a host, and tells what may be left there.
    pub(super) async fn put_out(&mut self, host: &HostSlots) -> Result<String, String> {
        let known = self.launch.and_then(|launch| {
            let of_host = launch.nodes.iter().find(|node| node.is_of(host));
            of_host.cloned()
        });
        let revoked = if self.head_is_gone() {
            None
        } else {
            let recorded = known.as_ref().map(|node| node.node);
            Some(self.revoke(host, recorded).await?)
        };
        let node = match revoked.as_deref() {
            None => "its head has ended".to_owned(),
            Some([]) => "the head knows no node of it".to_owned(),
            Some(nodes) => {
                let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
                format!("{} is revoked", names.join(", "))
            }
        };
        let (process, folder) = match known {
            None => ("a process kolo-node".to_owned(), String::new()),
            Some(node) => (
                format!("process {} (kolo-node)", node.pid),
                format!(", in {}", node.state),
            ),
        };
        let end = match self.launch.and_then(|launch| launch.head_pid) {
            Some(_) => "end it by hand",
            None => "it ends when it reaches the head again, or by hand",
        };
        Ok(format!(
            "{node}; {process} and what it runs may be left there{folder}: {end}"
        ))
    }

    /// Whether the launch had a head of its own that does not run any more: no node can come back to it.
    fn head_is_gone(&self) -> bool {
        let state = self.launch.and_then(|launch| launch.head_state.as_ref());
        state.is_some_and(|state| !is_locked(&state.join("lock")))
    }

    async fn revoke(
        &mut self,
        host: &HostSlots,
        recorded: Option<NodeId>,
    ) -> Result<Vec<NodeId>, String> {
        let client = match &mut self.client {
            Some(client) => client,
            none => {
                let client = Client::connect(&self.config).await;
                none.insert(client.map_err(|error| error.to_string())?)
            }
        };
        let nodes: Vec<NodeId> = if let Some(node) = recorded {
            vec![node]
        } else {
            // The launch was killed before it knew: its nodes are called as the host is.
            let cluster = client.cluster().await.map_err(|error| error.to_string())?;
            let of_host = cluster
                .nodes
                .into_iter()
                .filter(|node| host.is_called(&node.hostname));
            of_host.map(|node| node.node).collect()
        };
        for node in &nodes {
            let request = HeadRequest::Revoke {
                role: Role::Node,
                name: node.to_string(),
                reason: REASON.to_owned(),
            };
            match client.request(&request, ANSWER).await {
                Ok(HeadReply::Revoked { .. }) => {}
                Ok(_) => return Err("the head gave an answer to another question".to_owned()),
                Err(error) => return Err(format!("{node} can't be revoked: {error}")),
            }
        }
        Ok(nodes)
    }

    pub(super) async fn end(self) {
        if let Some(client) = self.client {
            client.close().await;
        }
    }
}
