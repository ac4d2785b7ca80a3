//! The cluster and its nodes, as people and programs see them.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{Resources, RevokedMember};
use crate::ids::{ClusterId, JobId, NodeId};

/// A node, as the API and `kolo` show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Its id.
    pub node: NodeId,
    /// Its hostname.
    pub hostname: String,
    /// Where its daemon listens.
    pub address: SocketAddr,
    /// Whether its lease is valid.
    pub alive: bool,
    /// What it has.
    pub total: Resources,
    /// What is free.
    pub available: Resources,
    /// Milliseconds since it was last heard.
    pub last_seen_ms: u64,
    /// The jobs that hold resources on it.
    pub jobs: Vec<JobId>,
    /// Whether it takes no more jobs, since it is drained or being stopped. Of a node that is gone: whether it was stopped.
    #[serde(default)]
    pub draining: bool,
}

/// The cluster, as the API and `kolo status` show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterInfo {
    /// Its id.
    pub cluster: ClusterId,
    /// Version of the head.
    pub version: String,
    /// Milliseconds since the head started.
    pub uptime_ms: u64,
    /// Its nodes, in order of registration.
    pub nodes: Vec<NodeInfo>,
    /// Jobs that have not ended.
    pub running_jobs: u32,
    /// Nodes and drivers that were put out.
    #[serde(default)]
    pub revoked: Vec<RevokedMember>,
    /// The head's wall clock, in milliseconds since 1970; 0 if it does not say.
    #[serde(default)]
    pub time_ms: u64,
}
