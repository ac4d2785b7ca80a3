//! The interfaces that connect a job's nodes, and what workers are told of them.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use kolo_wire::network::is_link_local;
use kolo_wire::{
    GenerationTable, JobState, Member, NetworkChoice, NetworkReport, Refusal, RefusalKind,
};

use super::messages::Action;
use super::{Base, Phase};
use crate::env::{self, Env, JobEnv};
use crate::interfaces::{self, Discovery, Network, Plan};

/// What is known of the network.
#[derive(Debug)]
pub(super) enum Net {
    /// The nodes are reached where they registered.
    Registered,
    /// To be found out when the nodes are reserved.
    Wanted(Box<Discovery>),
    /// Being found out.
    Asked,
    /// Found.
    Known(Arc<Network>),
    /// Nothing connects them.
    Apart(NetworkReport),
}

impl Net {
    /// Whether it is still to be found out.
    pub(super) fn is_open(&self) -> bool {
        matches!(self, Self::Wanted(_) | Self::Asked)
    }

    /// Whether nothing but the addresses at which the nodes registered is known.
    pub(super) fn is_unknown(&self) -> bool {
        self.known()
            .is_none_or(|network| *network.choice() == NetworkChoice::Registered)
    }

    /// Whether nobody has asked for it yet.
    pub(super) fn is_wanted(&self) -> bool {
        matches!(self, Self::Wanted(_))
    }

    pub(super) fn known(&self) -> Option<&Network> {
        match self {
            Self::Known(network) => Some(network),
            _ => None,
        }
    }

    pub(super) fn report(&self) -> Option<&NetworkReport> {
        match self {
            Self::Known(network) => Some(&network.report),
            Self::Apart(report) => Some(report),
            _ => None,
        }
    }
}

impl Base {
    /// What connects the nodes, or how to find out.
    pub(super) fn connect_by(&mut self, plan: Plan) {
        if let Net::Known(network) = &self.net {
            self.before = Some(Arc::clone(network));
        }
        self.net = match plan {
            Plan::Known(network) => Net::Known(network),
            Plan::Probe(discovery) => Net::Wanted(discovery),
        };
        self.parts.pend_all();
    }

    /// The nodes are reserved: now they can be asked.
    pub(super) fn discover(&mut self) {
        match std::mem::replace(&mut self.net, Net::Registered) {
            Net::Wanted(discovery) => {
                self.net = Net::Asked;
                self.state = JobState::Probing;
                self.actions.push(Action::Discover(discovery));
            }
            Net::Known(network) => self.take(network),
            other => self.net = other,
        }
    }

    pub(super) fn discovered(&mut self, found: Result<Arc<Network>, NetworkReport>) {
        if !matches!(self.net, Net::Asked) {
            return self.note("a network was found that nobody asked for".to_owned());
        }
        match found {
            Ok(network) => self.take(network),
            Err(report) => {
                let refusal = interfaces::refusal(&report);
                self.net = Net::Apart(report);
                if self.phase == Phase::Prepare && self.ending.is_none() {
                    let (kind, message) = refusal.map_or_else(
                        || (RefusalKind::Internal, "the probe gave no result".to_owned()),
                        |refusal| (refusal.kind, refusal.message),
                    );
                    self.fail(kind, message);
                }
            }
        }
    }

    fn take(&mut self, network: Arc<Network>) {
        self.net = Net::Known(network);
        if let Err(refusal) = self.check_network()
            && self.ending.is_none()
        {
            self.fail(refusal.kind, refusal.message);
        }
    }

    /// Whether the network is of use to the job: Horovod's workers reach each other over one interface of each node.
    pub(super) fn check_network(&self) -> Result<(), Refusal> {
        match self.net.known() {
            Some(network) if self.spec.rendezvous => network.check_one_interface(),
            _ => Ok(()),
        }
    }

    /// The address that all ranks reach a node at, if rank 0 is there.
    pub(super) fn ip_of(&self, part: usize) -> IpAddr {
        let site = &self.parts[part].site;
        let chosen = self
            .net
            .known()
            .filter(|network| *network.choice() != NetworkChoice::Local)
            .and_then(|network| network.listen(site.node).first())
            // Programs have no way to say over which interface that is.
            .filter(|listen| !is_link_local(listen.ip));
        chosen.map_or(site.address.ip(), |listen| listen.ip)
    }

    /// The variables of one worker. Its node has this number among the nodes.
    pub(super) fn slot_env(&self, common: &JobEnv, member: &Member, number: u32) -> Env {
        let mut all = env::member(common, member, number);
        if let Some(network) = self.net.known().or(self.before.as_deref()) {
            all.extend(env::network(network, member.node));
        }
        all
    }

    /// The members with the addresses at which the workers of one node reach them.
    pub(super) fn table_for(&self, part: usize) -> Option<Arc<GenerationTable>> {
        let mut table = Arc::clone(self.published.as_ref()?);
        // While new nodes are probed, the members reach each other as before.
        let network = self.net.known().or(self.before.as_deref());
        // Processes may have started in another network, and tell of another of their addresses.
        let has_own = |network: &&Network| *network.choice() != NetworkChoice::Registered;
        let Some(network) = network.filter(has_own) else {
            return Some(table);
        };
        let by = self.parts[part].site.node;
        for member in &mut Arc::make_mut(&mut table).members {
            if member.node != by
                && let Some(address) = member.address
                && let Some(ip) = network.address(member.node, by)
            {
                // Workers use one port on all their addresses.
                member.address = Some(SocketAddr::new(ip, address.port()));
            }
        }
        Some(table)
    }
}
