//! The plain HTTP rendezvous of one job, for workers of other systems.
//!
//! Horovod's workers find each other by it and can neither encrypt nor authenticate. So it is a listener of its
//! own on a port of its own, it lives as long as the job, it knows the job's scopes only, and it answers only the
//! addresses of the job's nodes. What those may do with it is limited in size and time.
//!
//! | request | answer |
//! |---|---|
//! | `GET /scope/key` | 200 with the value, or 404 at once |
//! | `PUT /scope/key` with `Content-Length` | 200 |
//! | `DELETE /scope/key` | 200; finalises a scope (see [`kolo_core::rendezvous`]) |
//! | from another address, or of a scope of no member | 403 |
//! | a path that is not exactly `/scope/key` | 400 |
//! | PUT without a length, with too long a body, one that does not come in time, a full store | 411, 413, 408, 507 |
//! | any other method, HEAD included | 501 |
//!
//! The path is taken as it stands: nothing in it is decoded, and a `?` is a part of the key. Horovod's client
//! reads header names with regard to case, so they are written as `Content-Length`. A connection is closed after
//! its answer: that client makes a new one for each request.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use actix_http::HttpService;
use actix_service::{IntoServiceFactory as _, ServiceFactory, ServiceFactoryExt as _, map_config};
use actix_web::dev::{AppConfig, Extensions, Server};
use actix_web::http::{KeepAlive, Method, StatusCode};
use actix_web::middleware::from_fn;
use actix_web::rt::net::TcpStream;
use actix_web::{App, HttpRequest, HttpResponse, web};
use bytes::Bytes;
use kolo_actors::budget::Budget;
use kolo_core::rendezvous::{RendezvousError, RendezvousPlan, RendezvousUsage};
use kolo_transport::Flood;
use kolo_transport::descriptors::{TooFewDescriptors, make_room};
use tokio::sync::watch;

use super::body::{self, BodyError};
use super::connection::{self, Activity, Connections, Ends, Running};
use super::store::SharedStore;
use door::{EAR_BYTES, Lead, Shared};

mod door;
mod notice;

pub use door::DoorServer;

/// A head must be here this long after the connection is made; a body takes longer by its size.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a connection lives before and after its request, all in all.
const UNFINISHED: Duration = Duration::from_secs(10);

/// Connections that the kernel keeps until they are accepted: all ranks of a large job come at once.
const BACKLOG: u32 = 4096;

/// Why a job's rendezvous could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousStartError {
    /// There are too few descriptors. Raise the limit of open files.
    #[error(transparent)]
    Descriptors(#[from] TooFewDescriptors),
    /// The address can't be listened on. It must be one of this machine.
    #[error("the rendezvous can't listen on {address}: {error}; give an address of this machine")]
    Bind {
        /// The address.
        address: IpAddr,
        /// What the operating system said.
        error: io::Error,
    },
}

/// The store of a group and its scopes. A clone is the same store.
#[derive(Debug, Clone)]
pub struct Place {
    plan: Arc<RendezvousPlan>,
    store: SharedStore,
}

impl Place {
    /// An empty store for the members of a plan.
    #[must_use]
    pub fn new(plan: RendezvousPlan, memory: &Arc<Budget>) -> Self {
        let store = SharedStore::new(plan.limits(), plan.scopes().clone(), memory);
        let plan = Arc::new(plan);
        Self { plan, store }
    }
}

/// Behind a listener: one store for all who come, or what the door of one process leads to.
enum Access {
    All(Place),
    One(Arc<Shared>),
}

impl Access {
    fn admits(&self, peer: IpAddr, local: IpAddr) -> bool {
        match self {
            Self::All(place) => place.plan.peers().admits(peer, local),
            Self::One(shared) => shared.admits(peer, local),
        }
    }
}

struct State {
    access: Access,
    foreign: Flood,
}

/// The rendezvous of one job. Dropping it closes the listener without waiting.
#[derive(Debug)]
pub struct RendezvousServer {
    running: Option<Running>,
    address: SocketAddr,
    store: SharedStore,
}

impl RendezvousServer {
    /// Opens the rendezvous of `plan` on a free port of `bind`. It accepts connections when this returns. `connections` and `memory`
    /// are those of all listeners of the head.
    ///
    /// # Errors
    ///
    /// [`RendezvousStartError`].
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    #[allow(clippy::unused_async)] // callers must not depend on that nothing is waited for
    pub async fn start(
        plan: RendezvousPlan,
        bind: IpAddr,
        connections: Connections,
        memory: &Arc<Budget>,
    ) -> Result<Self, RendezvousStartError> {
        let refuse = |error| RendezvousStartError::Bind {
            address: bind,
            error,
        };
        // The server's threads panic without.
        make_room("the rendezvous", super::DESCRIPTORS)?;
        let listener = connection::listen(SocketAddr::new(bind, 0), BACKLOG).map_err(refuse)?;
        let address = listener.local_addr().map_err(refuse)?;
        let place = Place::new(plan, memory);
        let store = place.store.clone();
        let state = web::Data::new(State {
            access: Access::All(place),
            foreign: connections.foreign.clone(),
        });
        let (close, closing) = watch::channel(false);
        let server = Server::build()
            .workers(1)
            .disable_signals()
            .shutdown_timeout(1)
            .listen("rendezvous", listener, move || {
                service(state.clone(), connections.clone(), closing.clone())
            })
            .map_err(refuse)?
            .run();
        Ok(Self {
            running: Some(Running::new("rendezvous", address, server, close)),
            address,
            store,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How full it is.
    pub fn usage(&self) -> RendezvousUsage {
        self.store.usage()
    }

    /// Closes it: no connection is accepted any more, those that are open end with their requests, and are cut after a second. Its
    /// values are dropped.
    ///
    /// Cancel safe: it closes also if the future is dropped.
    pub async fn stop(mut self) {
        self.store.retire();
        if let Some(running) = self.running.take() {
            running.stop().await;
        }
    }
}

impl Drop for RendezvousServer {
    fn drop(&mut self) {
        self.store.retire();
    }
}

/// Serves connections.
fn service(
    state: web::Data<State>,
    connections: Connections,
    closing: watch::Receiver<bool>,
) -> impl ServiceFactory<TcpStream, Config = (), Response = (), Error = (), InitError = ()> {
    let app = App::new()
        .app_data(state)
        .wrap(from_fn(connection::count))
        .default_service(web::to(answer))
        .into_factory()
        .map_err(|error: actix_web::Error| error.error_response());
    let service = HttpService::build()
        .keep_alive(KeepAlive::Disabled)
        .client_request_timeout(REQUEST_TIMEOUT)
        .client_disconnect_timeout(Duration::from_secs(1))
        .on_connect_ext(|stream: &TcpStream, data: &mut Extensions| {
            remember_ends(stream, data);
        })
        .finish(map_config(app, |()| AppConfig::default()))
        .tcp();
    connection::guarded(connections, UNFINISHED, closing, service)
}

fn remember_ends(stream: &TcpStream, data: &mut Extensions) {
    if let Some(ends) = Ends::of(stream) {
        data.insert(ends);
    }
    if let Some(activity) = Activity::here() {
        data.insert(activity);
    }
}

async fn answer(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> HttpResponse {
    let mut response = match decide(&request, payload, &state).await {
        Ok(response) => response,
        Err(no) => {
            tracing::debug!(
                status = no.status.as_u16(),
                method = %request.method(),
                path = %request.uri(),
                peer = ?request.peer_addr(),
                "the rendezvous refuses a request: {}",
                no.reason
            );
            HttpResponse::build(no.status)
                .content_type("text/plain; charset=utf-8")
                .body(format!("{}\n", no.reason))
        }
    };
    response.head_mut().set_camel_case_headers(true);
    response
}

struct No {
    status: StatusCode,
    reason: String,
}

impl No {
    fn new(status: StatusCode, reason: impl Into<String>) -> Self {
        Self {
            status,
            reason: reason.into(),
        }
    }
}

async fn decide(
    request: &HttpRequest,
    payload: web::Payload,
    state: &State,
) -> Result<HttpResponse, No> {
    // First of all, who asks: nothing else of the request is looked at before.
    let admitted = request
        .conn_data::<Ends>()
        .filter(|ends| state.access.admits(ends.peer.ip(), ends.local.ip()));
    let Some(ends) = admitted else {
        let peer = request
            .peer_addr()
            .map_or_else(|| "this address".to_owned(), |peer| peer.ip().to_string());
        state.foreign.line(|| {
            tracing::warn!(%peer, "the rendezvous refuses an address that is no node of its job");
        });
        return Err(No::new(
            StatusCode::FORBIDDEN,
            format!("{peer} is not the address of a node of this job"),
        ));
    };
    let method = request.method();
    if ![Method::GET, Method::PUT, Method::DELETE].contains(method) {
        return Err(No::new(
            StatusCode::NOT_IMPLEMENTED,
            "only GET, PUT and DELETE are known here",
        ));
    }
    let path = request
        .uri()
        .path_and_query()
        .map_or("", |path| path.as_str());
    let (scope, key) = split(path).ok_or_else(|| {
        No::new(
            StatusCode::BAD_REQUEST,
            "the path must be exactly /SCOPE/KEY",
        )
    })?;
    let (Place { plan, store }, scope) = match &state.access {
        Access::All(place) => (place.clone(), scope.to_owned()),
        Access::One(shared) => match shared.lead(method, scope).await? {
            Lead::To(place, scope) => (place, scope),
            Lead::Answer(ranks) => return Ok(found(ranks.into())),
            Lead::Hear => {
                let value = read_value(request, payload, EAR_BYTES).await?;
                shared.hear(ends.peer.ip(), &value).await?;
                return Ok(HttpResponse::Ok().finish());
            }
        },
    };
    let scope = scope.as_str();
    if !plan.allows(scope, key) {
        return Err(No::new(
            StatusCode::FORBIDDEN,
            "this is not a scope of this job, or not the key of a member",
        ));
    }
    if method == Method::GET {
        return Ok(match store.get(scope, key) {
            Some(value) => found(value),
            None => HttpResponse::NotFound().finish(),
        });
    }
    if method == Method::DELETE {
        let outcome = store.delete(scope, key);
        tracing::debug!(scope, key, ?outcome, "rendezvous: delete");
        return Ok(HttpResponse::Ok().finish());
    }
    let value = read_value(request, payload, store.limits().value_bytes).await?;
    store
        .put(scope, key, value)
        .map_err(|error| No::new(status_of(&error), error.to_string()))?;
    Ok(HttpResponse::Ok().finish())
}

fn found(value: Bytes) -> HttpResponse {
    HttpResponse::Ok()
        .content_type("application/octet-stream")
        .body(value)
}

async fn read_value(
    request: &HttpRequest,
    payload: web::Payload,
    limit: usize,
) -> Result<Bytes, No> {
    let length = body::declared_length(request).ok_or_else(|| {
        No::new(
            StatusCode::LENGTH_REQUIRED,
            "a PUT must have a Content-Length",
        )
    })?;
    body::read(payload, Some(length), limit, REQUEST_TIMEOUT)
        .await
        .map_err(|error| {
            let status = match error {
                BodyError::TooLong { .. } => StatusCode::PAYLOAD_TOO_LARGE,
                BodyError::Late { .. } => StatusCode::REQUEST_TIMEOUT,
                BodyError::Broken(_) => StatusCode::BAD_REQUEST,
            };
            No::new(status, error.to_string())
        })
}

/// `/scope/key`, both of them not empty and without a further slash.
fn split(path: &str) -> Option<(&str, &str)> {
    let (scope, key) = path.strip_prefix('/')?.split_once('/')?;
    (!scope.is_empty() && !key.is_empty() && !key.contains('/')).then_some((scope, key))
}

fn status_of(error: &RendezvousError) -> StatusCode {
    match error {
        RendezvousError::Value { .. } => StatusCode::PAYLOAD_TOO_LARGE,
        RendezvousError::Full { .. } | RendezvousError::Shared { .. } => {
            StatusCode::INSUFFICIENT_STORAGE
        }
        RendezvousError::Over => StatusCode::CONFLICT,
        _ => StatusCode::BAD_REQUEST,
    }
}

#[cfg(test)]
mod tests;
