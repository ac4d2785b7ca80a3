//! What is known of a connection, and what is done to it, before HTTP begins.

use std::cell::Cell;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::TRANSFER_ENCODING;
use actix_web::middleware::Next;
use kolo_transport::identity::Identity;
use kolo_transport::ids::ClusterId;
use rustls::ServerConnection;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

/// How long a client may leave our answer unread.
const UNREAD: Duration = Duration::from_secs(10);

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
        match Identity::from_certificate(certificate) {
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

/// Has the kernel drop a connection whose peer neither reads nor acknowledges what was sent to it.
pub(super) fn limit_unread(stream: &TcpStream) {
    let millis = UNREAD.as_millis() as u32;
    if let Err(error) = rustix::net::sockopt::set_tcp_user_timeout(stream, millis) {
        tracing::debug!(%error, "a connection has no limit for unread answers");
    }
}

/// What the watchdog of a connection goes by.
#[derive(Debug)]
struct Activity {
    /// Requests that are being answered.
    in_flight: Cell<u32>,
    /// When to end the connection if there are none.
    end: Cell<Instant>,
    changed: Notify,
}

/// Ends a connection on which no request has become complete for a while.
///
/// The HTTP library limits the time for the head of a connection's first request, and the time until the first
/// byte of the next; but not the time for the rest of that, nor for the rest of a chunked body that was refused.
#[derive(Debug)]
pub(super) struct Watched {
    activity: Rc<Activity>,
    longest: Duration,
    watchdog: AbortHandle,
}

impl Watched {
    /// Watches a connection from now on, on the current thread's runtime.
    pub(super) fn new(stream: &TcpStream, longest: Duration) -> io::Result<Self> {
        let socket = stream.as_fd().try_clone_to_owned()?;
        let activity = Rc::new(Activity {
            in_flight: Cell::new(0),
            end: Cell::new(Instant::now() + longest),
            changed: Notify::new(),
        });
        let watched = Rc::clone(&activity);
        let watchdog = actix_web::rt::spawn(async move {
            loop {
                let end = watched.end.get();
                let changed = watched.changed.notified();
                if watched.in_flight.get() > 0 {
                    changed.await;
                } else if timeout_at(end, changed).await.is_err() {
                    break;
                }
            }
            let socket = std::net::TcpStream::from(socket);
            if let Err(error) = socket.shutdown(Shutdown::Both) {
                tracing::debug!(%error, "a connection that was to be closed was closed by its peer first");
            }
        })
        .abort_handle();
        Ok(Self {
            activity,
            longest,
            watchdog,
        })
    }

    /// Counts a request until the value is dropped. Then the connection may live on for as long as it has been told
    /// at first, if nothing happens on it.
    pub(super) fn request(&self) -> InFlight {
        let count = &self.activity.in_flight;
        count.set(count.get() + 1);
        self.activity.changed.notify_one();
        InFlight {
            activity: Rc::clone(&self.activity),
            rest: self.longest,
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.watchdog.abort();
    }
}

/// A request that is being answered.
#[derive(Debug)]
pub(super) struct InFlight {
    activity: Rc<Activity>,
    rest: Duration,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let activity = &self.activity;
        activity.in_flight.set(activity.in_flight.get() - 1);
        activity.end.set(Instant::now() + self.rest);
        activity.changed.notify_one();
    }
}

/// Tells the connection's watchdog that a request is being answered. For [`actix_web::middleware::from_fn`].
pub(super) async fn count(
    request: ServiceRequest,
    next: Next<impl MessageBody>,
) -> Result<ServiceResponse<impl MessageBody>, actix_web::Error> {
    let mut busy = request.conn_data::<Watched>().map(Watched::request);
    let chunked = request.headers().contains_key(TRANSFER_ENCODING);
    let response = next.call(request).await;
    let refused = match &response {
        Ok(response) => !response.status().is_success(),
        Err(_) => true,
    };
    // The library waits for the end of a chunked body that nobody reads, and may forget to look for it.
    if let Some(busy) = &mut busy
        && chunked
        && refused
    {
        busy.rest = busy.rest.min(UNWANTED);
    }
    response
}
