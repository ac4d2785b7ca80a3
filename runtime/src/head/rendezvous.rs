//! The plain HTTP rendezvous of the jobs that ask for one.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use actix::{Arbiter, ArbiterHandle};

use kolo_actors::budget::Budget;
use kolo_actors::head::{LocalFuture, RendezvousHost, TellNews};
use kolo_core::env::horovod_hostnames;
use kolo_core::head::messages::Opening;
use kolo_core::membership::Process;
use kolo_core::rendezvous::{DoorNews, DoorOpening};
use kolo_transport::ids::JobId;
use kolo_transport::wire::{GenerationTable, Member};

use crate::http::{Connections, DoorServer, Place, RendezvousPlan, RendezvousServer};

type Open = Arc<Mutex<HashMap<JobId, RendezvousServer>>>;

/// Opens and closes them.
pub(super) struct Servers {
    /// The address on which the head itself listens.
    listen: IpAddr,
    open: Open,
    connections: Connections,
    /// The doors of processes, by job.
    doors: Mutex<HashMap<JobId, HashMap<Process, DoorServer>>>,
    /// The thread that serves all doors.
    thread: OnceLock<ArbiterHandle>,
    /// What the values of all jobs' rendezvous may take together.
    memory: Arc<Budget>,
}

impl Servers {
    pub(super) fn new(listen: IpAddr, connections: Connections, memory: usize) -> Self {
        Self {
            listen,
            open: Open::default(),
            doors: Mutex::default(),
            thread: OnceLock::new(),
            connections,
            memory: Budget::new(memory),
        }
    }

    /// The address to listen on for nodes that reach the head by `local`.
    fn bind(&self, local: Option<IpAddr>) -> Result<IpAddr, String> {
        // A head on all interfaces opens it only where the nodes of this job come in.
        let bind = if self.listen.is_unspecified() {
            local.unwrap_or(self.listen)
        } else {
            self.listen
        };
        if bind.is_unspecified() {
            return Err(format!(
                "the head listens on {bind} and does not know by which address nodes reach it; \
                 start it with --listen and that address"
            ));
        }
        Ok(bind)
    }

    fn doors(&self) -> MutexGuard<'_, HashMap<JobId, HashMap<Process, DoorServer>>> {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_open_door(&self, opening: DoorOpening, tell: TellNews) -> Result<SocketAddr, String> {
        let bind = self.bind(opening.local)?;
        let thread = self.thread.get_or_init(|| Arbiter::new().handle()).clone();
        let (job, process) = (opening.job, opening.process);
        let opened = DoorServer::open(opening, bind, self.connections.clone(), thread, tell);
        let (door, address) = opened.map_err(|error| error.to_string())?;
        self.doors().entry(job).or_default().insert(process, door);
        Ok(address)
    }
}

impl RendezvousHost for Servers {
    fn open(&self, opening: Opening) -> LocalFuture<Result<SocketAddr, String>> {
        let bind = self.bind(opening.local);
        let open = Arc::clone(&self.open);
        let connections = self.connections.clone();
        let memory = Arc::clone(&self.memory);
        Box::pin(async move {
            let bind = bind?;
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
        self.doors().remove(&job);
        Box::pin(async move {
            if let Some(server) = server {
                server.stop().await;
            }
        })
    }
    fn open_door(&self, opening: DoorOpening, tell: TellNews) {
        let opened = self.try_open_door(opening, Arc::clone(&tell));
        actix::spawn(async move { tell(DoorNews::Opened(opened)).await });
    }

    fn admit(&self, table: Arc<GenerationTable>) {
        let nodes = |member: &Member| member.node.to_string();
        let plan = RendezvousPlan::from_members(&table.members, nodes, []);
        let place = Place::new(plan, &self.memory);
        let doors = self.doors();
        let doors = doors.get(&table.job).into_iter().flatten();
        for (_, door) in doors {
            door.admit(&table, &place);
        }
    }

    fn notice(&self, job: JobId, process: Process, number: u64) {
        let doors = self.doors();
        if let Some(door) = doors.get(&job).and_then(|doors| doors.get(&process)) {
            door.notice(number);
        }
    }

    fn close_door(&self, job: JobId, process: Process) {
        if let Some(doors) = self.doors().get_mut(&job) {
            doors.remove(&process);
        }
    }
}
