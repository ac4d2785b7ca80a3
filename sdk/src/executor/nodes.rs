//! The driver's way to the nodes of a job: the program goes there, and calls.

use std::sync::{Arc, Weak};

use futures_util::future::try_join_all;
use kolo_transport::ConnectionLost;
use kolo_transport::frame::{FrameError, Limits};
use kolo_transport::ids::{NodeId, Rank};
use kolo_transport::runtime::TransportRuntime;
use kolo_transport::session::{Connection, FrameReceiver, FrameSender, Stream};
use kolo_transport::wire::{
    GenerationTable, NodeReply, NodeRequest, PlacedNode, Program, RefusalKind,
};
use tokio::task::JoinSet;

use super::upload::{self, Progress};
use crate::call::{Group, GroupNode, InFlight, Listener};
use crate::cluster::{Cluster, NodeConnectError};
use crate::error::StartError;

/// The nodes of a cluster, and the program for them.
#[derive(Clone)]
pub(super) struct Nodes {
    pub(super) cluster: Cluster,
    pub(super) program: Program,
    pub(super) progress: Arc<Progress>,
}

/// Open channels for calls to all nodes of a generation.
pub(super) struct Channels {
    pub(super) table: GenerationTable,
    pub(super) nodes: Vec<GroupNode>,
    connections: Vec<(NodeId, Connection)>,
    sinks: Vec<FrameSender>,
    replies: Vec<FrameReceiver>,
}

impl Channels {
    /// The connection to a node of the generation.
    pub(super) fn connection(&self, node: NodeId) -> Option<&Connection> {
        let mut connections = self.connections.iter();
        connections.find_map(|(of, connection)| (*of == node).then_some(connection))
    }

    /// The group, and where it reads what the nodes send.
    pub(super) fn into_group(
        self,
        in_flight: InFlight,
        elastic: Option<Weak<dyn Listener>>,
    ) -> (Group, Vec<FrameReceiver>) {
        let group = Group::new(self.table, self.nodes, self.sinks, in_flight, elastic);
        (group, self.replies)
    }
}

/// The tasks of a group's channels, which tell the user by `say` of calls that wait for others. They end when this is dropped.
pub(super) fn serve(
    runtime: &TransportRuntime,
    group: &Arc<Group>,
    replies: Vec<FrameReceiver>,
    say: impl Fn(String) + Send + 'static,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for (index, replies) in replies.into_iter().enumerate() {
        tasks.spawn(runtime.drive(Arc::clone(group).read(index, replies)));
        tasks.spawn(Arc::clone(group).flush(index));
    }
    tasks.spawn(Arc::clone(group).keep_time(say));
    tasks
}

impl Nodes {
    /// Connects to a node and gives it the program if it lacks that.
    pub(super) async fn prepare(&self, node: &PlacedNode) -> Result<Connection, StartError> {
        let connection = self.connect(node).await?;
        if !node.has_program {
            upload::upload(&connection, node, &self.program, &self.progress).await?;
        }
        Ok(connection)
    }

    async fn connect(&self, node: &PlacedNode) -> Result<Connection, StartError> {
        match self.cluster.node_connection(node.node, node.address).await {
            Ok(connection) => Ok(connection),
            Err(NodeConnectError::Endpoint(error)) => Err(error.into()),
            Err(NodeConnectError::Node(error)) => Err(StartError::unreachable(node, &error)),
        }
    }

    /// Opens channels for calls to all nodes with members of a generation.
    pub(super) async fn attach_all(
        &self,
        table: GenerationTable,
        nodes: &[PlacedNode],
    ) -> Result<Channels, StartError> {
        let has_members = |node: &&PlacedNode| table.members.iter().any(|m| m.node == node.node);
        let attach = (nodes.iter().filter(has_members)).map(|node| self.attach(node, &table));
        let mut channels = Channels {
            nodes: Vec::new(),
            connections: Vec::new(),
            sinks: Vec::new(),
            replies: Vec::new(),
            table: table.clone(),
        };
        for (node, connection, stream) in try_join_all(attach).await? {
            channels.connections.push((node.node, connection));
            channels.nodes.push(node);
            channels.sinks.push(stream.send);
            channels.replies.push(stream.recv);
        }
        Ok(channels)
    }

    /// Opens the channel for calls to a node.
    async fn attach(
        &self,
        node: &PlacedNode,
        table: &GenerationTable,
    ) -> Result<(GroupNode, Connection, Stream), StartError> {
        let connection = self.connect(node).await?;
        let lost = |error: FrameError| StartError::unreachable(node, &error);
        let mut stream = connection
            .open(Limits::CALLS)
            .await
            .map_err(|error: ConnectionLost| lost(error.into()))?;
        let request = NodeRequest::Attach {
            job: table.job,
            generation: table.generation,
        };
        stream.send.send(&request, &[]).await.map_err(lost)?;
        let expected: Vec<Rank> = table
            .members
            .iter()
            .filter(|member| member.node == node.node)
            .map(|member| member.rank)
            .collect();
        match stream.recv.expect::<NodeReply>().await.map_err(lost)?.head {
            NodeReply::Attached { mut ranks } => {
                ranks.sort_unstable();
                if ranks != expected {
                    let reply = format!("attached to ranks {ranks:?} in place of {expected:?}");
                    return Err(StartError::Unexpected {
                        from: node.hostname.clone(),
                        reply,
                    });
                }
                let node = GroupNode {
                    node: node.node,
                    hostname: node.hostname.clone(),
                    ranks,
                };
                Ok((node, connection, stream))
            }
            other => Err(StartError::unfit(node, "calls", other)),
        }
    }
}

/// A node is in another generation already.
pub(super) fn is_stale(error: &StartError) -> bool {
    matches!(error, StartError::NodeRefused { refusal, .. } if refusal.kind == RefusalKind::Stale)
}
