//! The doors of processes: listeners that live as long as a process, each with a port of its own.
//!
//! | request | answer |
//! |---|---|
//! | the first one of a process | waits until the head lets the process in |
//! | `GET /rank_and_size/...` of a member | waits until the head lets the process into a later generation |
//! | `PUT /worker_addresses/...` | 200; the value is read as [`Ear::read`] says |
//! | all others | as of a job that never changes, in the store of the process's generation |
//!
//! All doors share one thread.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use actix_rt::ArbiterHandle;
use actix_service::{Service as _, ServiceFactory as _};
use actix_web::http::{Method, StatusCode};
use actix_web::web;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kolo_actors::head::TellNews;
use kolo_core::rendezvous::{
    Course, Door, DoorNews, DoorOpening, Ear, RANK_AND_SIZE, RendezvousPeers,
};
use kolo_transport::descriptors::make_room;
use kolo_transport::wire::GenerationTable;
use tokio::sync::watch;

use super::notice::{Notice, give};
use super::{Access, Connections, No, Place, RendezvousStartError, State, connection, service};

/// Longest value that says where a worker listens, in bytes.
pub(super) const EAR_BYTES: usize = 96 << 10;

/// Connections that the kernel keeps until they are accepted: those of one process.
const BACKLOG: u32 = 64;

/// The pause after a connection could not be accepted, as there are too few descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Where a request leads.
pub(super) enum Lead {
    /// To a store, under this scope.
    To(Place, String),
    /// To this answer.
    Answer(String),
    /// To the worker's ear, which its value tells of.
    Hear,
}

#[derive(Debug)]
struct Behind {
    door: Door,
    place: Option<Place>,
    ear: Option<(IpAddr, Ear)>,
    /// The number of the last request that has begun to wait. A process has one at a time: those before it have nobody who reads
    /// the answer.
    turn: u64,
    is_closed: bool,
}

/// A door that its listener and the head share.
pub(super) struct Shared {
    peers: RendezvousPeers,
    behind: Mutex<Behind>,
    changed: watch::Sender<()>,
    tell: TellNews,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Behind> {
        // Whatever panics, the state is whole.
        self.behind.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn admits(&self, peer: IpAddr, local: IpAddr) -> bool {
        self.peers.admits(peer, local)
    }

    /// Where a request leads, once the process is let in.
    pub(super) async fn lead(&self, method: &Method, scope: &str) -> Result<Lead, No> {
        if scope == RANK_AND_SIZE && method != Method::GET {
            let why = "a rank is asked for by GET";
            return Err(No::new(StatusCode::FORBIDDEN, why));
        }
        let mut changed = self.changed.subscribe();
        let mut turn = None;
        loop {
            changed.borrow_and_update();
            let (course, place) = {
                let mut behind = self.lock();
                if behind.is_closed {
                    let why = "this process is no member of its job any more";
                    return Err(No::new(StatusCode::GONE, why));
                }
                if turn.is_some_and(|turn| turn != behind.turn) {
                    let why = "a later request of this process waits";
                    return Err(No::new(StatusCode::SERVICE_UNAVAILABLE, why));
                }
                let course = behind.door.request(scope);
                if matches!(course, Course::Wait(_)) && turn.is_none() {
                    behind.turn += 1;
                    turn = Some(behind.turn);
                    self.changed.send_replace(());
                    changed.borrow_and_update();
                }
                (course, behind.place.clone())
            };
            match (course, place) {
                (Course::Store(scope), Some(place)) => return Ok(Lead::To(place, scope)),
                (Course::Ranks(ranks), _) => return Ok(Lead::Answer(ranks)),
                (Course::Hear, _) if method == Method::PUT => return Ok(Lead::Hear),
                (Course::Hear, _) => {
                    let why = "the addresses of workers are for the head";
                    return Err(No::new(StatusCode::FORBIDDEN, why));
                }
                (Course::Wait(news), _) => {
                    if let Some(news) = news {
                        (self.tell)(news).await;
                    }
                }
                (Course::Store(_), None) => {}
            }
            if changed.changed().await.is_err() {
                let why = "the head ends";
                return Err(No::new(StatusCode::SERVICE_UNAVAILABLE, why));
            }
        }
    }

    /// Takes a worker's word of where it listens: on the address that it comes from, wherever it says it does.
    pub(super) async fn hear(&self, peer: IpAddr, value: &[u8]) -> Result<(), No> {
        let pickle = BASE64_STANDARD.decode(value);
        let pickle = pickle.map_err(|error| No::new(StatusCode::BAD_REQUEST, error.to_string()))?;
        let ear = Ear::read(&pickle);
        let ear = ear.map_err(|error| No::new(StatusCode::BAD_REQUEST, error.to_string()))?;
        self.lock().ear = Some((peer, ear));
        (self.tell)(DoorNews::Hears).await;
        Ok(())
    }
}

/// The door of one process. Dropping it closes the listener, and ends what waits there.
pub struct DoorServer {
    shared: Arc<Shared>,
    thread: ArbiterHandle,
    close: watch::Sender<bool>,
}

impl fmt::Debug for DoorServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DoorServer").finish_non_exhaustive()
    }
}

impl DoorServer {
    /// Opens the door on a free port of `bind`, and has it served by `thread`.
    ///
    /// # Errors
    ///
    /// [`RendezvousStartError`].
    pub fn open(
        opening: DoorOpening,
        bind: IpAddr,
        connections: Connections,
        thread: ArbiterHandle,
        tell: TellNews,
    ) -> Result<(Self, SocketAddr), RendezvousStartError> {
        let refuse = |error| RendezvousStartError::Bind {
            address: bind,
            error,
        };
        make_room("the door of a process", 1)?;
        let listener = connection::listen(SocketAddr::new(bind, 0), BACKLOG).map_err(refuse)?;
        let address = listener.local_addr().map_err(refuse)?;
        let door = Door::new(opening.process, opening.node, opening.hostname);
        let shared = Arc::new(Shared {
            peers: RendezvousPeers::new(opening.peers),
            behind: Mutex::new(Behind {
                door,
                place: None,
                ear: None,
                turn: 0,
                is_closed: false,
            }),
            changed: watch::Sender::new(()),
            tell,
        });
        let state = State {
            access: Access::One(Arc::clone(&shared)),
            foreign: connections.foreign.clone(),
        };
        let (close, closing) = watch::channel(false);
        // A service stays on the thread that makes it.
        thread.spawn_fn(move || {
            actix_rt::spawn(async move {
                if let Err(error) = serve(listener, state, connections, closing).await {
                    tracing::warn!(%error, "the door of a process is not served");
                }
            });
        });
        let server = Self {
            shared,
            thread,
            close,
        };
        Ok((server, address))
    }

    /// Lets the process into a generation, if it is a member.
    pub fn admit(&self, table: &GenerationTable, place: &Place) {
        let mut behind = self.shared.lock();
        if behind.door.admit(table) {
            behind.place = Some(place.clone());
            drop(behind);
            self.shared.changed.send_replace(());
        }
    }

    /// Tells the process that hosts have changed, and the head whether it has heard.
    pub fn notice(&self, number: u64) {
        let ear = self.shared.lock().ear.clone();
        let tell = Arc::clone(&self.shared.tell);
        self.thread.spawn(async move {
            let taken = match ear {
                Some((ip, ear)) => give(Notice { ip, ear, number }).await,
                None => Err(io::Error::other("it has not said where it listens")),
            };
            let taken = taken.map_err(|error| error.to_string());
            tell(DoorNews::Noticed(number, taken)).await;
        });
    }
}

impl Drop for DoorServer {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.send_replace(());
        self.close.send_replace(true);
    }
}

/// Serves the connections of one door until it closes.
async fn serve(
    listener: TcpListener,
    state: State,
    connections: Connections,
    mut closing: watch::Receiver<bool>,
) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let service = service(web::Data::new(state), connections, closing.clone());
    let service = service.new_service(()).await;
    let service = service.map_err(|()| io::Error::other("the service can't be made"))?;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closing.wait_for(|closing| *closing) => return Ok(()),
        };
        match accepted {
            // It limits its connections itself.
            Ok((stream, _)) => drop(actix_rt::spawn(service.call(stream))),
            Err(error) => {
                tracing::debug!(%error, "a connection to a door could not be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests;
