//! What is known of a connection, and what is done to it, before HTTP begins.

use std::cell::Cell;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix_web::body::MessageBody;
use actix_web::dev::{
    Server, ServerHandle, Service, ServiceFactory, ServiceRequest, ServiceResponse, fn_factory,
    fn_service,
};
use actix_web::http::StatusCode;
use actix_web::http::header::TRANSFER_ENCODING;
use actix_web::middleware::Next;
use kolo_transport::Flood;
use kolo_transport::descriptors;
use kolo_transport::identity::{Identity, identity_of};
use kolo_transport::ids::ClusterId;
use kolo_transport::places::{Kept, Places};
use rustls::ServerConnection;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

/// How long a client may leave our answer unread.
const UNREAD: Duration = Duration::from_secs(10);

/// How long a connection on which no request is being answered keeps its place when others want it.
const PATIENCE: Duration = Duration::from_secs(1);

/// The most connections, however many descriptors there are.
const MOST: usize = 4096;

/// How long an answer to who comes too often takes, and how long its peer has to read the last one before the connection ends.
const SLOW_ANSWER: Duration = Duration::from_millis(200);
const LAST_ANSWER: Duration = Duration::from_millis(300);

/// Lines of each kind about connections in ten seconds.
const LINES: u32 = 2;

/// How often a connection that is to be closed looks whether its requests are answered.
const SOON: Duration = Duration::from_millis(20);

/// How long a client may go on sending a chunked body that was refused.
const UNWANTED: Duration = Duration::from_secs(1);

/// Both addresses of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ends {
    pub(super) peer: SocketAddr,
    pub(super) local: SocketAddr,
}

impl Ends {
    pub(super) fn of(stream: &TcpStream) -> Option<Self> {
        Some(Self {
            peer: stream.peer_addr().ok()?,
            local: stream.local_addr().ok()?,
        })
    }
}

/// Who is at the other end of a TLS connection.
#[derive(Debug)]
pub(super) enum Peer {
    /// It has a certificate of the cluster.
    Member(Identity),
    /// It has one that the authority has signed but that names nobody here.
    Unusable(String),
    /// It has none.
    Unknown,
}

impl Peer {
    /// The handshake has verified that the certificate, if there is one, is good and that the peer has its key.
    pub(super) fn of(session: &ServerConnection, cluster: ClusterId) -> Self {
        let Some(certificate) = session.peer_certificates().and_then(|chain| chain.first()) else {
            return Self::Unknown;
        };
        match identity_of(certificate) {
            Ok(identity) if identity.cluster == cluster => Self::Member(identity),
            Ok(identity) => Self::Unusable(format!(
                "the certificate is for {}; this is {cluster}",
                identity.cluster
            )),
            Err(error) => Self::Unusable(error.to_string()),
        }
    }
}

/// A listener with a backlog of its own choice.
pub(super) fn listen(address: SocketAddr, backlog: u32) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    // A head that is started again finds its port although old connections linger.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(i32::try_from(backlog).unwrap_or(i32::MAX))?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// A server that runs. Dropping it closes its listener without waiting.
#[derive(Debug)]
pub(super) struct Running {
    /// For the log.
    name: &'static str,
    address: SocketAddr,
    handle: ServerHandle,
    /// True once connections are to end.
    close: watch::Sender<bool>,
    task: Option<JoinHandle<io::Result<()>>>,
}

impl Running {
    /// Has a server run that listens at this address, and whose connections end when `close` says so.
    pub(super) fn new(
        name: &'static str,
        address: SocketAddr,
        server: Server,
        close: watch::Sender<bool>,
    ) -> Self {
        Self {
            name,
            address,
            handle: server.handle(),
            close,
            task: Some(tokio::spawn(server)),
        }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes it: no connection is accepted any more, those that are open end with their requests, and are cut after a second.
    /// Cancel safe: it closes also if the future is dropped.
    pub(super) async fn stop(mut self) {
        self.close.send_replace(true);
        self.handle.stop(true).await;
        if let Some(task) = self.task.take() {
            let ended = task.await.map_err(io::Error::other).flatten();
            if let Err(error) = ended {
                tracing::warn!(server = self.name, %error, "a server did not end well");
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.task.is_some() {
            // The order to stop is given by the call; its future only waits for the end.
            drop(self.handle.stop(false));
        }
    }
}

/// Has the kernel drop a connection whose peer neither reads nor acknowledges what was sent to it.
fn limit_unread(stream: &TcpStream) {
    let millis = UNREAD.as_millis() as u32;
    if let Err(error) = rustix::net::sockopt::set_tcp_user_timeout(stream, millis) {
        tracing::debug!(%error, "a connection has no limit for unread answers");
    }
}

/// The connections of all HTTP listeners of a head. A clone counts with it.
#[derive(Debug, Clone)]
pub struct Connections {
    places: Arc<Places>,
    refused: Flood,
    /// For lines about addresses that have no business with a rendezvous.
    pub(super) foreign: Flood,
}

impl Connections {
    /// For a process that may have so many descriptors: a quarter of them for connections, half of these for one address. The
    /// others are for the head's own work.
    #[must_use]
    pub fn of_descriptors(descriptors: u64) -> Self {
        let most = descriptors::for_peers(descriptors, MOST);
        Self::new(most, most.div_ceil(2))
    }

    /// For the descriptors that this process may have now.
    #[must_use]
    pub fn of_this_process() -> Self {
        Self::of_descriptors(descriptors::limit())
    }

    /// At most so many, and so many of one address.
    #[must_use]
    pub fn new(most: usize, most_of_address: usize) -> Self {
        Self {
            places: Places::new(most, most_of_address, PATIENCE),
            refused: Flood::new("connections over HTTP were refused", LINES),
            foreign: Flood::new(
                "requests to rendezvous from foreign addresses were refused",
                LINES,
            ),
        }
    }

    /// Serves a connection, if there is a place for it, until it ends, its place goes to another, or `closing` is true and no
    /// request is being answered.
    async fn attend<F: Future>(
        &self,
        stream: TcpStream,
        longest: Duration,
        mut closing: watch::Receiver<bool>,
        serve: impl FnOnce(TcpStream) -> F,
    ) {
        // It has gone again.
        let Ok(peer) = stream.peer_addr() else { return };
        let place = match self.places.enter(peer.ip(), std::time::Instant::now()) {
            Ok(place) => place,
            Err(reason) => {
                self.refused
                    .line(|| tracing::warn!(%peer, reason, "refused a connection over HTTP"));
                return;
            }
        };
        limit_unread(&stream);
        let held = place.hold(|kept| async move {
            let activity = Rc::new(Activity {
                place: kept,
                in_flight: Cell::new(0),
                end: Cell::new(Instant::now() + longest),
                longest,
                is_over: Cell::new(false),
                changed: Notify::new(),
            });
            tokio::select! {
                _ = HERE.scope(Rc::clone(&activity), serve(stream)) => {}
                () = activity.idle_for_too_long() => {}
                () = async {
                    // An error is the end of the server, too.
                    closing.wait_for(|closing| *closing).await.ok();
                    activity.idle().await;
                } => {}
            }
            Ok(())
        });
        if let Err(reason) = held.await {
            tracing::debug!(%peer, reason, "a connection was closed");
        }
    }
}

/// A server's service for connections: `inner`, for those that have a place.
pub(super) fn guarded<S>(
    connections: Connections,
    longest: Duration,
    closing: watch::Receiver<bool>,
    inner: S,
) -> impl ServiceFactory<TcpStream, Config = (), Response = (), Error = (), InitError = S::InitError>
where
    S: ServiceFactory<TcpStream, Config = (), Response = ()>,
{
    fn_factory(move || {
        let (connections, closing) = (connections.clone(), closing.clone());
        let made = inner.new_service(());
        async move {
            let inner = Rc::new(made.await?);
            Ok(fn_service(move |stream: TcpStream| {
                let (connections, closing) = (connections.clone(), closing.clone());
                let inner = Rc::clone(&inner);
                async move {
                    // Whether it is ready is not asked: it would make connections wait when others stall in handshakes.
                    connections
                        .attend(stream, longest, closing, |stream| inner.call(stream))
                        .await;
                    Ok(())
                }
            }))
        }
    })
}

tokio::task_local! {
    /// The connection that the current task serves.
    static HERE: Rc<Activity>;
}

/// What happens on a connection.
///
/// The HTTP library limits the time for the head of a connection's first request, and the time until the first
/// byte of the next; but not the time for the rest of that, nor for the rest of a chunked body that was refused.
#[derive(Debug)]
pub(super) struct Activity {
    place: Kept,
    /// Requests that are being answered.
    in_flight: Cell<u32>,
    /// When to end the connection if there are none.
    end: Cell<Instant>,
    longest: Duration,
    /// Its peer is not to ask for more.
    is_over: Cell<bool>,
    changed: Notify,
}

impl Activity {
    /// That of the connection that is being served.
    pub(super) fn here() -> Option<Rc<Self>> {
        HERE.try_with(Rc::clone).ok()
    }

    async fn idle_for_too_long(&self) {
        loop {
            let end = self.end.get();
            let changed = self.changed.notified();
            if self.is_over.get() {
                return tokio::time::sleep(LAST_ANSWER).await;
            }
            if self.in_flight.get() > 0 {
                changed.await;
            } else if timeout_at(end, changed).await.is_err() {
                return;
            }
        }
    }

    async fn idle(&self) {
        while self.in_flight.get() > 0 {
            // Others wait for changes, too, and may take the notice.
            drop(tokio::time::timeout(SOON, self.changed.notified()).await);
        }
    }

    /// Counts a request until the value is dropped. Then the connection may live on for as long as it has been told
    /// at first, if nothing happens on it.
    fn request(self: &Rc<Self>) -> InFlight {
        let count = &self.in_flight;
        count.set(count.get() + 1);
        self.place.heard();
        self.changed.notify_waiters();
        InFlight {
            activity: Rc::clone(self),
            rest: self.longest,
        }
    }
}

/// A request that is being answered.
#[derive(Debug)]
struct InFlight {
    activity: Rc<Activity>,
    rest: Duration,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let activity = &self.activity;
        activity.in_flight.set(activity.in_flight.get() - 1);
        activity.end.set(Instant::now() + self.rest);
        if activity.in_flight.get() == 0 {
            activity.place.rest(std::time::Instant::now());
        }
        activity.changed.notify_waiters();
    }
}

/// Tells the connection's watchdog that a request is being answered. For [`actix_web::middleware::from_fn`].
pub(super) async fn count(
    request: ServiceRequest,
    next: Next<impl MessageBody>,
) -> Result<ServiceResponse<impl MessageBody>, actix_web::Error> {
    let mut busy = request.conn_data::<Rc<Activity>>().map(Activity::request);
    let chunked = request.headers().contains_key(TRANSFER_ENCODING);
    let response = next.call(request).await;
    let refused = match &response {
        Ok(response) => !response.status().is_success(),
        Err(_) => true,
    };
    // Who guesses secrets does that slowly, and needs a connection for each few.
    if let (Some(busy), Ok(answer)) = (&busy, &response)
        && answer.status() == StatusCode::TOO_MANY_REQUESTS
    {
        tokio::time::sleep(SLOW_ANSWER).await;
        busy.activity.is_over.set(true);
        busy.activity.changed.notify_waiters();
    }
    // The library waits for the end of a chunked body that nobody reads, and may forget to look for it.
    if let Some(busy) = &mut busy
        && chunked
        && refused
    {
        busy.rest = busy.rest.min(UNWANTED);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_descriptors_are_kept_for_the_heads_own_work() {
        for (descriptors, most) in [
            (0, 8),
            (64, 16),
            (1024, 256),
            (1 << 20, MOST),
            (u64::MAX, MOST),
        ] {
            let connections = Connections::of_descriptors(descriptors);
            let now = std::time::Instant::now();
            let enter = |ip: usize| {
                let ip = std::net::Ipv4Addr::from_bits(ip as u32);
                connections.places.enter(ip.into(), now)
            };
            let one: Vec<_> = (0..most).map_while(|_| enter(1).ok()).collect();
            assert_eq!(one.len(), most / 2, "{descriptors}");
            let others: Vec<_> = (2..2 + most).map_while(|ip| enter(ip).ok()).collect();
            assert_eq!(others.len(), most - most / 2, "{descriptors}");
        }
    }
}
