//! The way to a cluster.

use std::time::Duration;

use kolo_transport::session::Connection;
use kolo_transport::wire::PlacedNode;
use kolo_transport::{Credentials, Endpoint, EndpointConfig, Expect, TransportRuntime};

/// A connection to its head, and what others are made with.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) runtime: TransportRuntime,
    pub(crate) credentials: Credentials,
    /// The endpoint that the head was reached from.
    pub(crate) endpoint: Endpoint,
    pub(crate) head: Connection,
    pub(crate) connect_timeout: Duration,
}

impl Link {
    /// Connects to a node. The endpoint must live as long as the connection.
    pub(crate) async fn node(&self, node: &PlacedNode) -> Result<(Endpoint, Connection), String> {
        let own = self.endpoint.local_addr();
        let fits = own.is_ipv4() == node.address.is_ipv4()
            && (own.ip().is_unspecified()
                || own.ip().is_loopback() == node.address.ip().is_loopback());
        let endpoint = if fits {
            self.endpoint.clone()
        } else {
            let mut config = EndpointConfig::towards(node.address);
            config.handshake_timeout = self.connect_timeout;
            config.idle_timeout = config.idle_timeout.max(self.connect_timeout);
            Endpoint::bind(&self.runtime, self.credentials.clone(), config)
                .map_err(|error| error.to_string())?
        };
        let connection = endpoint
            .connect(node.address, Expect::node(node.node))
            .await
            .map_err(|error| error.to_string())?;
        Ok((endpoint, connection))
    }
}
