//! The head that nodes are to join.

use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use kolo_transport::JoinToken;
use kolo_transport::identity::Role;
use kolo_transport::ids::{ClusterId, NodeId};

use super::reach::{self, Addresses};
use crate::Head;

/// How long a token is valid: a node uses it as soon as it has it.
const TOKEN_TTL: Duration = Duration::from_secs(600);

/// Who makes the nodes' tokens, and knows the nodes that are there.
#[allow(async_fn_in_trait)] // it is awaited where it is called
pub trait NodeAuthority {
    /// A join token for one node.
    ///
    /// # Errors
    ///
    /// Why there is none, in words.
    async fn node_token(&self) -> Result<JoinToken, String>;

    /// The nodes that are alive, by hostname.
    ///
    /// # Errors
    ///
    /// Why they can't be told, in words.
    async fn alive(&self) -> Result<Vec<(String, NodeId, SocketAddr)>, String>;
}

/// A head in this process: it has no nodes but those that are brought up.
impl NodeAuthority for &Head {
    async fn node_token(&self) -> Result<JoinToken, String> {
        self.store_token(Role::Node, TOKEN_TTL, Some(1))
            .map_err(|error| error.to_string())
    }

    async fn alive(&self) -> Result<Vec<(String, NodeId, SocketAddr)>, String> {
        Ok(Vec::new())
    }
}

/// The head that nodes are to join: how it is reached, and who makes their tokens.
#[derive(Debug)]
pub struct HeadAccess<A> {
    pub(super) cluster: ClusterId,
    pub(super) addresses: Addresses,
    pub(super) authority: A,
}

impl<'a> HeadAccess<&'a Head> {
    /// A head that runs in this process. For hosts to reach it, it must listen on an address that is not the loopback's:
    /// [`wildcard`](kolo_transport::interfaces::wildcard).
    pub fn to(head: &'a Head) -> Self {
        Self {
            cluster: head.cluster(),
            addresses: Addresses {
                given: None,
                here: Some(head.address()),
                elsewhere: Vec::new(),
                own: reach::own_addresses(),
            },
            authority: head,
        }
    }
}

impl<A: NodeAuthority> HeadAccess<A> {
    /// A head that runs already, elsewhere or here, as it was named (`HOST:PORT`) and at the address where it answered.
    pub fn running(cluster: ClusterId, named: &str, address: SocketAddr, authority: A) -> Self {
        let ip = address.ip().to_canonical();
        // The loopback is another machine for each host: then what this machine is called is tried.
        // By which family it listens elsewhere is not known.
        let here = ip
            .is_loopback()
            .then(|| SocketAddr::from((Ipv6Addr::UNSPECIFIED, address.port())));
        let elsewhere = if here.is_some() {
            Vec::new()
        } else {
            vec![
                named.to_owned(),
                SocketAddr::new(ip, address.port()).to_string(),
            ]
        };
        Self {
            cluster,
            addresses: Addresses {
                given: None,
                here,
                elsewhere,
                own: reach::own_addresses(),
            },
            authority,
        }
    }

    /// Says where the head listens, if it runs on this machine: hosts then look for it at this machine's addresses.
    pub(crate) fn listens_here(&mut self, listen: SocketAddr) {
        self.addresses.here = Some(listen);
        self.addresses.elsewhere.clear();
    }

    /// Lets all nodes use this `HOST:PORT` and no other.
    #[must_use]
    pub fn by_address(mut self, address: Option<String>) -> Self {
        if address.is_some() {
            self.addresses.given = address;
        }
        self
    }
}
