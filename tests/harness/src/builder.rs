//! What a cluster is to be like.

use std::net::IpAddr;
use std::time::Duration;

use crate::netns::Host;

/// Where daemons run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Each is a process of its own: it can be killed and stopped like a host.
    Processes,
    /// Threads of the test process: quicker to start, easier to debug. A node can be killed, not stopped.
    InProcess,
}

/// Describes a [`TestCluster`](crate::TestCluster).
#[derive(Debug, Clone)]
pub struct TestClusterBuilder {
    pub(crate) mode: Mode,
    pub(crate) nodes: usize,
    pub(crate) slots: u32,
    pub(crate) gpus: u32,
    pub(crate) custom: Vec<(String, f64)>,
    pub(crate) hostnames: Vec<String>,
    pub(crate) lease: Duration,
    pub(crate) certificate_life: Option<Duration>,
    pub(crate) orphan_timeout: Duration,
    pub(crate) lab: Option<OnLab>,
}

/// The hosts of a lab that the daemons run on.
#[derive(Debug, Clone)]
pub(crate) struct OnLab {
    pub(crate) head: Host,
    pub(crate) address: IpAddr,
    pub(crate) nodes: Vec<Host>,
}

impl TestClusterBuilder {
    /// Number of node daemons. Default: 1. They have the test's own program from the start; nodes that are added later are sent it.
    #[must_use]
    pub fn nodes(mut self, nodes: usize) -> Self {
        self.nodes = nodes;
        self
    }

    /// CPUs of each node, and so the number of default workers that fit there. Default: 1.
    #[must_use]
    pub fn slots(mut self, slots: u32) -> Self {
        self.slots = slots;
        self
    }

    /// GPUs that each node declares; they need not exist. Default: 0.
    #[must_use]
    pub fn gpus(mut self, gpus: u32) -> Self {
        self.gpus = gpus;
        self
    }

    /// A custom resource of each node. May be repeated.
    #[must_use]
    pub fn resource(mut self, name: impl Into<String>, amount: f64) -> Self {
        self.custom.push((name.into(), amount));
        self
    }

    /// Hostnames of the nodes, in order; the machine's own where there are fewer.
    #[must_use]
    pub fn hostnames<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.hostnames = names.into_iter().map(Into::into).collect();
        self
    }

    /// Runs the daemons on hosts of a [`Lab`](crate::netns::Lab): the head on `head`, where all reach it at `address`,
    /// and one node on each of `nodes`, called as the host is. All listen on all addresses. Who connects must be on a
    /// host as well, see [`Host::enter`].
    #[must_use]
    pub fn on_lab(mut self, head: &Host, address: IpAddr, nodes: &[Host]) -> Self {
        self.nodes = nodes.len();
        self.hostnames = nodes.iter().map(|host| host.name().to_owned()).collect();
        self.lab = Some(OnLab {
            head: head.clone(),
            address,
            nodes: nodes.to_vec(),
        });
        self
    }

    /// Where daemons run. Default: [`Mode::Processes`].
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// How long certificates are valid, those of workers included; they are renewed in time. Default: as a head has it.
    #[must_use]
    pub fn certificate_life(mut self, life: Duration) -> Self {
        self.certificate_life = Some(life);
        self
    }

    /// After how long without a heartbeat a node counts as lost. Default: 10 s, which a busy machine
    /// does not reach by accident; tests that wait for a loss want less.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How long a node waits for the driver and the head of a job to come back, when both are gone, before it ends the
    /// job's workers. Default: 60 s, as everywhere.
    #[must_use]
    pub fn orphan_timeout(mut self, timeout: Duration) -> Self {
        self.orphan_timeout = timeout;
        self
    }
}
