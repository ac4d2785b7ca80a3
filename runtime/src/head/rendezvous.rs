//! The plain HTTP rendezvous of the jobs that ask for one.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use kolo_actors::head::{LocalFuture, RendezvousHost};
use kolo_core::env::horovod_hostnames;
use kolo_core::head::messages::Opening;
use kolo_transport::ids::JobId;

use crate::http::{Connections, JobStores, RendezvousPlan, RendezvousServer};

type Open = Arc<Mutex<HashMap<JobId, RendezvousServer>>>;

/// Opens and closes them.
pub(super) struct Servers {
    /// The address on which the head itself listens.
    listen: IpAddr,
    open: Open,
    connections: Connections,
    /// The rendezvous over HTTPS, which end with their jobs, too.
    stores: Arc<JobStores>,
}

impl Servers {
    pub(super) fn new(listen: IpAddr, connections: Connections, stores: Arc<JobStores>) -> Self {
        Self {
            listen,
            open: Open::default(),
            connections,
            stores,
        }
    }
}

impl RendezvousHost for Servers {
    fn open(&self, opening: Opening) -> LocalFuture<Result<SocketAddr, String>> {
        // A head on all interfaces opens it only where the nodes of this job come in.
        let bind = if self.listen.is_unspecified() {
            opening.local.unwrap_or(self.listen)
        } else {
            self.listen
        };
        let open = Arc::clone(&self.open);
        let connections = self.connections.clone();
        let memory = Arc::clone(self.stores.memory());
        Box::pin(async move {
            if bind.is_unspecified() {
                return Err(format!(
                    "the head listens on {bind} and does not know by which address nodes reach it; \
                     start it with --listen and that address"
                ));
            }
            let names = horovod_hostnames(&opening.members);
            let plan = RendezvousPlan::from_members(
                &opening.members,
                |member| names.get(&member.node).unwrap_or(&member.hostname).clone(),
                opening.peers,
            );
            let server = RendezvousServer::start(plan, bind, connections, &memory)
                .await
                .map_err(|error| error.to_string())?;
            let address = server.address();
            let before = open
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(opening.job, server);
            if let Some(before) = before {
                tokio::task::spawn_local(before.stop());
            }
            Ok(address)
        })
    }

    fn close(&self, job: JobId) -> LocalFuture<()> {
        let server = self
            .open
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&job);
        self.stores.end(job);
        Box::pin(async move {
            if let Some(server) = server {
                server.stop().await;
            }
        })
    }
}
