//! A client that sends exactly the bytes that it is told to.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kolo_transport::Authority;
use kolo_transport::credentials::Credentials;
use kolo_transport::identity::Role;
use kolo_transport::tls;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::fake::{CLUSTER, FakeHead};
use crate::http::{BearerSecret, Connections, HttpConfig, HttpHandle, HttpLimits, serve_with};
use crate::limiter::Attempts;

pub(super) const SECRET: &str = "a-secret-of-the-operator";

/// Longer than any limit of the server, so that a test that fails ends.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// A head's API, and the authority of its cluster.
pub(super) struct Site {
    pub(super) head: Arc<FakeHead>,
    pub(super) authority: Authority,
    pub(super) http: HttpHandle,
}

impl Site {
    pub(super) fn new() -> Self {
        Self::with(HttpLimits::default())
    }

    pub(super) fn with(limits: HttpLimits) -> Self {
        Self::with_connections(limits, Connections::new(1000, 1000))
    }

    pub(super) fn with_connections(limits: HttpLimits, connections: Connections) -> Self {
        let authority = Authority::create(CLUSTER).unwrap();
        let head = FakeHead::new();
        let config = HttpConfig {
            listen: ([127, 0, 0, 1], 0).into(),
            credentials: authority.issue(Role::Head, "head").unwrap().into(),
            bearer: Some(BearerSecret::new(SECRET).unwrap()),
            attempts: Attempts::default(),
            connections,
        };
        let http = serve_with(head.clone(), config, limits).unwrap();
        Self {
            head,
            authority,
            http,
        }
    }

    /// A client that has a certificate of the cluster.
    pub(super) fn member(&self, role: Role, name: &str) -> Client {
        self.presenting(&self.authority.issue(role, name).unwrap())
    }

    /// A client with these credentials, which trusts this cluster's head all the same.
    pub(super) fn presenting(&self, credentials: &Credentials) -> Client {
        let config = self
            .config()
            .with_client_auth_cert(credentials.chain(), credentials.private_key())
            .unwrap();
        self.client(config, None)
    }

    /// A client without a certificate.
    pub(super) fn stranger(&self) -> Client {
        self.client(self.config().with_no_client_auth(), None)
    }

    /// A client with the bearer secret.
    pub(super) fn bearer(&self) -> Client {
        self.claiming(&format!("Bearer {SECRET}"))
    }

    /// A client with this `Authorization` header.
    pub(super) fn claiming(&self, authorization: &str) -> Client {
        self.client(
            self.config().with_no_client_auth(),
            Some(authorization.to_owned()),
        )
    }

    fn config(&self) -> rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert> {
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.certificate()).unwrap();
        ClientConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
    }

    fn client(&self, config: ClientConfig, authorization: Option<String>) -> Client {
        Client {
            address: self.http.address(),
            connector: TlsConnector::from(Arc::new(config)),
            authorization,
        }
    }
}

#[derive(Clone)]
pub(super) struct Client {
    address: SocketAddr,
    connector: TlsConnector,
    authorization: Option<String>,
}

/// An answer, in parts.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) head: String,
    pub(super) body: Vec<u8>,
}

impl Answer {
    pub(super) fn parse(bytes: &[u8]) -> Self {
        let end = bytes
            .windows(4)
            .position(|window| window == b"\r\n\r\n")
            .unwrap_or_else(|| panic!("no answer: {:?}", String::from_utf8_lossy(bytes)));
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        Self {
            status: head[9..12].parse().unwrap(),
            head,
            body: bytes[end + 4..].to_vec(),
        }
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(": ")?;
            found.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    /// The kind of the error in the body.
    pub(super) fn error_kind(&self) -> String {
        let json = self.json();
        assert!(
            json["error"]["message"]
                .as_str()
                .is_some_and(|text| !text.is_empty())
        );
        json["error"]["kind"].as_str().unwrap().to_owned()
    }
}

impl Client {
    pub(super) async fn connect(&self) -> std::io::Result<TlsStream<TcpStream>> {
        self.connect_over(TcpStream::connect(self.address).await?)
            .await
    }

    async fn connect_over(&self, stream: TcpStream) -> std::io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(tls::SERVER_NAME).unwrap();
        self.connector.connect(name, stream).await
    }

    pub(super) fn bytes(&self, method: &str, path: &str, body: &[u8]) -> Vec<u8> {
        let authorization = self
            .authorization
            .as_ref()
            .map_or(String::new(), |value| format!("Authorization: {value}\r\n"));
        let length = body.len();
        let mut bytes = format!(
            "{method} {path} HTTP/1.1\r\nHost: kolo\r\nConnection: close\r\n{authorization}Content-Length: {length}\r\n\r\n"
        )
        .into_bytes();
        bytes.extend_from_slice(body);
        bytes
    }

    /// Sends bytes and reads until the server closes.
    pub(super) async fn exchange(&self, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
        self.exchange_over(TcpStream::connect(self.address).await?, bytes)
            .await
    }

    /// As [`Client::exchange`], over a connection that is there.
    pub(super) async fn exchange_over(
        &self,
        stream: TcpStream,
        bytes: &[u8],
    ) -> std::io::Result<Vec<u8>> {
        let talk = async {
            let (mut reading, mut writing) = tokio::io::split(self.connect_over(stream).await?);
            let mut answer = Vec::new();
            // The server may answer and close before it has read all.
            let (_sent, read) = tokio::join!(
                async {
                    writing.write_all(bytes).await?;
                    writing.flush().await
                },
                reading.read_to_end(&mut answer)
            );
            match read {
                // Closed without the goodbye of TLS: what came before counts.
                Err(error) if answer.is_empty() => Err(error),
                _ => Ok(answer),
            }
        };
        tokio::time::timeout(PATIENCE, talk)
            .await
            .expect("the server answers in time")
    }

    pub(super) async fn send(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        let bytes = self.bytes(method, path, body);
        Answer::parse(&self.exchange(&bytes).await.unwrap())
    }

    pub(super) async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, b"").await
    }
}
