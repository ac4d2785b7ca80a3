//! The other sides of connections, and the right of each to ask (S-2).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};

use kolo_wire::identity::Identity;
use kolo_wire::ids::{DriverId, NodeId};
use kolo_wire::{NodeRegistration, Refusal, RefusalKind};

use crate::head::messages::Caller;
use crate::head::registry::{NodeRegistry, Session};

/// The other side of a connection.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) identity: Identity,
    pub(super) remote: IpAddr,
    pub(super) local: Option<IpAddr>,
    /// It is a node that has registered over this connection.
    pub(super) registered: bool,
}

/// All peers.
#[derive(Debug, Default)]
pub(super) struct Peers(BTreeMap<Session, Peer>);

impl Deref for Peers {
    type Target = BTreeMap<Session, Peer>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Peers {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Peers {
    fn peer(&self, session: Session) -> Result<&Peer, Refusal> {
        self.0.get(&session).ok_or_else(disconnected)
    }

    /// The driver that asks; `None` for the HTTP API.
    pub(super) fn driver(&self, caller: Caller) -> Result<Option<DriverId>, Refusal> {
        match caller {
            Caller::Http => Ok(None),
            Caller::Peer(session) => self.driver_of(session).map(Some),
        }
    }

    pub(super) fn driver_of(&self, session: Session) -> Result<DriverId, Refusal> {
        let peer = self.peer(session)?;
        let driver = peer.identity.driver();
        driver.ok_or_else(|| forbidden(peer, "driver"))
    }

    /// The node that introduces itself, if it may.
    pub(super) fn introduced(
        &self,
        session: Session,
        registration: &NodeRegistration,
    ) -> Result<NodeId, Refusal> {
        let peer = self.peer(session)?;
        let node = peer.identity.node();
        let node = node.ok_or_else(|| forbidden(peer, "node"))?;
        if registration.node != node {
            return Err(Refusal::new(
                RefusalKind::Forbidden,
                format!(
                    "a certificate for {node} can't register {}",
                    registration.node
                ),
            ));
        }
        if peer.registered {
            return Err(Refusal::new(
                RefusalKind::Invalid,
                format!("{node} is registered over this connection already"),
            ));
        }
        Ok(node)
    }

    /// The node that asks, and its stay, which lasts.
    pub(super) fn node(
        &self,
        caller: Caller,
        registry: &NodeRegistry,
    ) -> Result<(NodeId, Session), Refusal> {
        let session = session(caller)?;
        let peer = self.peer(session)?;
        let node = peer.identity.node();
        let node = node.ok_or_else(|| forbidden(peer, "node"))?;
        let problem = if !peer.registered {
            "must register over this connection first"
        } else if !registry.is_current(node, session) {
            "is not registered, or counts as lost; register again"
        } else {
            return Ok((node, session));
        };
        Err(Refusal::new(
            RefusalKind::Forbidden,
            format!("{node} {problem}"),
        ))
    }
}

pub(super) fn session(caller: Caller) -> Result<Session, Refusal> {
    match caller {
        Caller::Peer(session) => Ok(session),
        Caller::Http => Err(Refusal::new(
            RefusalKind::Forbidden,
            "only a node may ask for this",
        )),
    }
}

fn forbidden(peer: &Peer, needed: &str) -> Refusal {
    Refusal::new(
        RefusalKind::Forbidden,
        format!(
            "only a {needed} may ask for this, and {} is none",
            peer.identity
        ),
    )
}

pub(super) fn disconnected() -> Refusal {
    Refusal::new(RefusalKind::Forbidden, "the connection has ended")
}
