//! The HTTPS listener of the head.

use std::any::Any;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actix_http::{HttpService, TlsAcceptorConfig};
use actix_service::{IntoServiceFactory as _, ServiceFactoryExt as _, map_config};
use actix_tls::accept::rustls_0_23::TlsStream;
use actix_web::dev::{AppConfig, Extensions, Server};
use actix_web::middleware::from_fn;
use actix_web::rt::net::TcpStream;
use actix_web::{App, Resource, Route, web};
use kolo_transport::LiveCredentials;
use kolo_transport::descriptors::{TooFewDescriptors, make_room};
use kolo_transport::ids::ClusterId;
use kolo_transport::tls::{self, ClientAuth, TlsError};
use tokio::sync::watch;

use super::api::HeadApi;
use super::auth::BearerSecret;
use super::connection::{self, Activity, Connections, Peer, Running};
use super::error::ApiError;
use super::state::Api;
use super::{metrics, openapi, routes};
use crate::limiter::Attempts;

/// Where the API listens and who may use it.
#[derive(Debug, Clone)]
pub struct HttpConfig {
    /// Where to listen. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// The head's own certificate and key. Clients check it against the cluster's authority, for the name `kolo`.
    pub credentials: LiveCredentials,
    /// A secret that gives the rights of a driver to who has no certificate. `None`: certificates only.
    pub bearer: Option<BearerSecret>,
    /// The attempts with wrong secrets, here and at joining.
    pub attempts: Attempts,
    /// The connections, of this and of the plain rendezvous.
    pub connections: Connections,
}

/// How long clients may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HttpLimits {
    /// For the TLS handshake. Default 5 seconds.
    pub handshake: Duration,
    /// For the head of a request. Default 5 seconds.
    pub head: Duration,
    /// Until the next request on a connection. Default 30 seconds.
    pub idle: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            head: Duration::from_secs(5),
            idle: Duration::from_secs(30),
        }
    }
}

/// Why the API could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpStartError {
    /// There are too few descriptors. Raise the limit of open files.
    #[error(transparent)]
    Descriptors(#[from] TooFewDescriptors),
    /// The address can't be listened on: it is in use, or not one of this machine.
    #[error(
        "the HTTP API can't listen on {address}: {error}; give a free address of this machine, or port 0"
    )]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the operating system said.
        error: io::Error,
    },
    /// The credentials can't be used for TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// The running API. Dropping it closes the listener without waiting.
#[derive(Debug)]
pub struct HttpHandle(Running);

impl HttpHandle {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.0.address()
    }

    /// Closes it: no connection is accepted any more, those that are open end with their requests, and are cut after a second.
    ///
    /// Cancel safe: it closes also if the future is dropped.
    pub async fn stop(self) {
        self.0.stop().await;
    }
}

/// Opens the API over HTTPS. It accepts connections when this returns.
///
/// # Errors
///
/// [`HttpStartError`].
///
/// # Panics
///
/// Outside a tokio or actix runtime.
pub fn serve(api: Arc<dyn HeadApi>, config: HttpConfig) -> Result<HttpHandle, HttpStartError> {
    serve_with(api, config, HttpLimits::default())
}

/// As [`serve`], with other limits.
///
/// # Errors
///
/// [`HttpStartError`].
///
/// # Panics
///
/// Outside a tokio or actix runtime.
pub fn serve_with(
    api: Arc<dyn HeadApi>,
    config: HttpConfig,
    limits: HttpLimits,
) -> Result<HttpHandle, HttpStartError> {
    let refuse = |error| HttpStartError::Bind {
        address: config.listen,
        error,
    };
    // The server's threads panic without.
    make_room("the HTTP API", super::DESCRIPTORS)?;
    let tls = tls::server_config(&config.credentials, ClientAuth::Optional, &[])?;
    let cluster = config.credentials.identity().cluster;
    let listener: TcpListener = connection::listen(config.listen, 1024).map_err(refuse)?;
    let address = listener.local_addr().map_err(refuse)?;
    let api = web::Data::new(Api {
        head: api,
        bearer: config.bearer,
        attempts: config.attempts,
    });
    let connections = config.connections;
    let (close, closing) = watch::channel(false);
    let server = Server::build()
        .workers(2)
        .disable_signals()
        .shutdown_timeout(1)
        .listen("api", listener, move || {
            let api = api.clone();
            let app = App::new()
                .app_data(api)
                .wrap(from_fn(connection::count))
                .configure(configure)
                .default_service(web::to(no_path))
                .into_factory()
                .map_err(|error: actix_web::Error| error.error_response());
            let service = HttpService::build()
                .keep_alive(limits.idle)
                .client_request_timeout(limits.head)
                .client_disconnect_timeout(Duration::from_secs(1))
                .on_connect_ext(move |stream: &_, data: &mut Extensions| {
                    remember_peer(stream, data, cluster);
                })
                .finish(map_config(app, |()| AppConfig::default()))
                .rustls_0_23_with_config(
                    tls.clone(),
                    TlsAcceptorConfig::default().handshake_timeout(limits.handshake),
                );
            let longest = limits.idle + limits.head;
            connection::guarded(connections.clone(), longest, closing.clone(), service)
        })
        .map_err(refuse)?
        .run();
    tracing::info!(%address, "the HTTP API listens");
    Ok(HttpHandle(Running::new("api", address, server, close)))
}

fn remember_peer(stream: &dyn Any, data: &mut Extensions, cluster: ClusterId) {
    if let Some(stream) = stream.downcast_ref::<TlsStream<TcpStream>>() {
        data.insert(Peer::of(stream.get_ref().1, cluster));
    }
    if let Some(activity) = Activity::here() {
        data.insert(activity);
    }
}

/// A path and its methods; any other method is answered with 405.
fn resource(path: &str, allow: &'static str, routes: impl IntoIterator<Item = Route>) -> Resource {
    routes
        .into_iter()
        .fold(web::resource(path), Resource::route)
        .default_service(web::to(move || async move {
            Err::<&'static str, _>(ApiError::method(allow))
        }))
}

fn configure(config: &mut web::ServiceConfig) {
    for resource in [
        resource(
            "/healthz",
            "GET, HEAD",
            [
                web::get().to(routes::healthz),
                web::head().to(routes::healthz),
            ],
        ),
        resource(
            "/readyz",
            "GET, HEAD",
            [
                web::get().to(routes::readyz),
                web::head().to(routes::readyz),
            ],
        ),
        resource(
            "/api/v1/openapi.json",
            "GET",
            [web::get().to(openapi::serve)],
        ),
        resource("/metrics", "GET", [web::get().to(metrics::metrics)]),
        resource("/api/v1/cluster", "GET", [web::get().to(routes::cluster)]),
        resource("/api/v1/nodes", "GET", [web::get().to(routes::nodes)]),
        resource(
            "/api/v1/nodes/{node}/drain",
            "PUT, DELETE",
            [
                web::put().to(routes::drain),
                web::delete().to(routes::undrain),
            ],
        ),
        resource("/api/v1/jobs", "GET", [web::get().to(routes::jobs)]),
        resource(
            "/api/v1/jobs/{job}",
            "GET, DELETE",
            [web::get().to(routes::job), web::delete().to(routes::stop)],
        ),
        resource(
            "/api/v1/jobs/{job}/workers",
            "GET",
            [web::get().to(routes::workers)],
        ),
    ] {
        config.service(resource);
    }
}

async fn no_path() -> Result<&'static str, ApiError> {
    Err(ApiError::not_found(
        "there is nothing at this path; see /api/v1/openapi.json",
    ))
}
