//! A cluster's authority and its members' endpoints on the loopback.
#![allow(dead_code, unreachable_pub)] // each test binary uses a part

pub mod lent;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kolo_transport::identity::HEAD_NAME;
use kolo_transport::ids::{ClusterId, DriverId, NodeId};
use kolo_transport::wire::{JoinReply, JoinRequest, Refusal, RefusalKind};
use kolo_transport::{
    Authority, CloseCode, Connection, Credentials, Endpoint, EndpointConfig, Expect, JoinHandler,
    JoinToken, RandomId as _, Role, TokenBook, TransportRuntime, token,
};

/// A wait that is longer than this has failed.
const PATIENCE: Duration = Duration::from_secs(30);

pub struct Cluster {
    pub runtime: TransportRuntime,
    pub authority: Arc<Authority>,
}

impl Cluster {
    pub fn new() -> Self {
        Self {
            runtime: TransportRuntime::new(2).unwrap(),
            authority: Arc::new(Authority::create(ClusterId::random()).unwrap()),
        }
    }

    pub fn head(&self) -> Credentials {
        self.authority.issue(Role::Head, HEAD_NAME).unwrap()
    }

    pub fn node(&self, id: u64) -> Credentials {
        let name = NodeId(id).to_string();
        self.authority.issue(Role::Node, &name).unwrap()
    }

    pub fn driver(&self, id: u64) -> Credentials {
        let name = DriverId(id).to_string();
        self.authority.issue(Role::Driver, &name).unwrap()
    }

    pub fn bind(&self, credentials: Credentials) -> Endpoint {
        self.bind_with(credentials, |_| ())
    }

    pub fn bind_with(
        &self,
        credentials: Credentials,
        change: impl FnOnce(&mut EndpointConfig),
    ) -> Endpoint {
        let mut config = EndpointConfig::default();
        change(&mut config);
        Endpoint::bind(&self.runtime, credentials, config).unwrap()
    }

    /// A head's and a driver's end of one connection, with the endpoints.
    pub async fn pair(&self) -> Pair {
        let head = self.bind(self.head());
        let driver = self.bind(self.driver(1));
        let (accepted, connected) = within(async {
            tokio::join!(
                head.accept(),
                driver.connect(head.local_addr(), Expect::head())
            )
        })
        .await;
        Pair {
            server: accepted.unwrap(),
            client: connected.unwrap(),
            head,
            driver,
        }
    }
}

pub struct Pair {
    pub server: Connection,
    pub client: Connection,
    pub head: Endpoint,
    pub driver: Endpoint,
}

/// What the head does with joiners: a book of tokens and the authority.
pub struct Joins {
    pub authority: Arc<Authority>,
    pub book: Mutex<TokenBook>,
}

impl Joins {
    pub fn new(cluster: &Cluster) -> Arc<Self> {
        Arc::new(Self {
            authority: Arc::clone(&cluster.authority),
            book: Mutex::default(),
        })
    }

    pub fn token(&self, role: Role, ttl: Duration, uses: Option<u32>) -> JoinToken {
        self.book.lock().unwrap().create(
            role,
            ttl,
            uses,
            self.authority.fingerprint(),
            now(),
            token::random_secret(),
        )
    }
}

impl JoinHandler for Joins {
    fn join(&self, request: JoinRequest, _peer: SocketAddr) -> JoinReply {
        let redeemed = self
            .book
            .lock()
            .unwrap()
            .redeem(request.role, &request.secret, now());
        if let Err(error) = redeemed {
            return JoinReply::Refused(Refusal::new(RefusalKind::Token, error.to_string()));
        }
        let name = match request.role {
            Role::Node => NodeId::random().to_string(),
            _ => DriverId::random().to_string(),
        };
        let day = Duration::from_secs(24 * 3600);
        match self.authority.sign(&request.csr, request.role, &name, day) {
            Ok(certificate) => JoinReply::Joined {
                cluster: self.authority.cluster(),
                name,
                certificate: certificate.to_vec(),
            },
            Err(error) => JoinReply::Refused(Refusal::new(RefusalKind::Invalid, error.to_string())),
        }
    }
}

pub fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs()
}

/// Waits for what must happen.
pub async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future)
        .await
        .expect("it did not happen in 30 s")
}

/// A bare QUIC client, which can do what an `Endpoint` does not.
pub async fn raw_connect(
    config: rustls::ClientConfig,
    address: SocketAddr,
) -> Result<quinn::Connection, quinn::ConnectionError> {
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(config).unwrap();
    let endpoint = quinn::Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
    endpoint
        .connect_with(quinn::ClientConfig::new(Arc::new(crypto)), address, "kolo")
        .unwrap()
        .await
}

/// How the server ends a connection.
pub async fn end_of(connection: &quinn::Connection) -> (CloseCode, String) {
    match within(connection.closed()).await {
        quinn::ConnectionError::ApplicationClosed(close) => (
            CloseCode::from_number(close.error_code.into_inner()),
            String::from_utf8_lossy(&close.reason).into_owned(),
        ),
        other => panic!("{other}"),
    }
}

/// TLS of a client that trusts `authority` and has no certificate.
pub fn anonymous(authority: &Authority, alpn: &[u8]) -> rustls::ClientConfig {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority.certificate()).unwrap();
    let mut config = rustls::ClientConfig::builder_with_provider(kolo_transport::tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.to_vec()];
    config
}
