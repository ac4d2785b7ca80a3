//! Joining a cluster with a token.
//!
//! The joiner makes a key, connects to the head without a certificate, checks that the head's authority is the
//! one that the token names, and only then sends the token's secret and a certificate signing request. It
//! gets back a certificate for its key. The key never leaves it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::QuicClientConfig;

use crate::credentials::{CertificateRequest, Credentials};
use crate::end::{CloseCode, ConnectionLost, with_reason};
use crate::endpoint::{
    ALPN_JOIN, BindError, ConnectError, EndpointConfig, STREAM_RECEIVE_WINDOW, bind_socket,
    presented_identity, quinn_endpoint,
};
use crate::frame::{FrameError, FrameReader, FrameWriter, Limits};
use crate::identity::{Identity, IdentityError, Role};
use crate::runtime::TransportRuntime;
use crate::tls::{self, PinnedAuthority, TlsError};
use crate::token::JoinToken;
use crate::wire::{JoinReply, JoinRequest, Refusal};

/// How long [`join`] takes at most.
pub const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a cluster could not be joined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// There is no connection to the head.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The process at the address belongs to another cluster than the token. Check both; the address may also be someone
    /// who pretends to be the head. The secret was not sent.
    #[error(
        "{address} does not belong to the cluster of the token: its authority has another fingerprint"
    )]
    Fingerprint {
        /// The address.
        address: SocketAddr,
    },
    /// The process at the address is of the token's cluster, but is not its head. The secret was not sent.
    #[error("{address} is {found}, not the head of the cluster")]
    NotHead {
        /// The address.
        address: SocketAddr,
        /// Who it is.
        found: Box<Identity>,
    },
    /// The head said no: the token is unknown, expired, used up or for another role. Its message says what to do.
    #[error("the head refused: {0}")]
    Refused(Refusal),
    /// The head did not answer in time, or ended the connection.
    #[error("the head gave no answer: {reason}")]
    Unanswered {
        /// What happened.
        reason: String,
    },
    /// The head's answer is not usable: it is of another version, or faulty.
    #[error("the head's answer is not usable: {0}")]
    Answer(IdentityError),
    /// A key or a socket could not be made here.
    #[error("joining could not be started: {reason}")]
    Local {
        /// What failed.
        reason: String,
    },
}

impl From<Refusal> for JoinError {
    fn from(error: Refusal) -> Self {
        Self::Refused(error)
    }
}

impl JoinError {
    /// Whether another attempt may work without any change on this side.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connect(error) => error.is_retryable(),
            Self::Refused(refusal) => refusal.is_retryable(),
            Self::Unanswered { .. } => true,
            _ => false,
        }
    }
}

impl From<BindError> for JoinError {
    fn from(error: BindError) -> Self {
        Self::Local {
            reason: error.to_string(),
        }
    }
}

impl From<TlsError> for JoinError {
    fn from(error: TlsError) -> Self {
        Self::Local {
            reason: error.to_string(),
        }
    }
}

/// Joins the cluster whose head listens at `address`, within [`JOIN_TIMEOUT`]. May be awaited on any executor.
///
/// When the future is dropped or fails after the request was sent, the head may have counted the token as used.
///
/// # Errors
///
/// [`JoinError`].
pub async fn join(
    runtime: &TransportRuntime,
    address: SocketAddr,
    token: &JoinToken,
) -> Result<Credentials, JoinError> {
    let joined = join_any(runtime, &[address], token, Duration::ZERO).await?;
    Ok(joined.1)
}

/// As [`join`], where it is not known by which of several addresses the head can be reached. Gives the one that led to it.
///
/// The addresses are tried in order, each `head_start` after the one before or as soon as that has failed, without
/// giving any of them up. Only the head that is the first to prove who it is gets the token's secret, so a token for one
/// use is used once. Takes as long as [`JOIN_TIMEOUT`] at most.
///
/// # Errors
///
/// [`JoinError`]: the one of the first address that is no mere failure to connect, or else that of the first address.
///
/// # Panics
///
/// If there are no addresses.
pub async fn join_any(
    runtime: &TransportRuntime,
    addresses: &[SocketAddr],
    token: &JoinToken,
    head_start: Duration,
) -> Result<(SocketAddr, Credentials), JoinError> {
    assert!(!addresses.is_empty(), "there must be an address to try");
    let (addresses, token, own) = (addresses.to_vec(), token.clone(), runtime.clone());
    let mut race = tokio::task::JoinSet::new();
    race.spawn_on(
        async move { race_for_head(&own, addresses, token, head_start).await },
        runtime.handle(),
    );
    // It ends with this future, since the set ends its tasks.
    match runtime.timeout(JOIN_TIMEOUT, race.join_next()).await {
        Some(Some(Ok(joined))) => joined,
        Some(Some(Err(error))) => Err(JoinError::Local {
            reason: error.to_string(),
        }),
        Some(None) | None => Err(JoinError::Unanswered {
            reason: format!("it took longer than {JOIN_TIMEOUT:?}"),
        }),
    }
}

async fn race_for_head(
    runtime: &TransportRuntime,
    addresses: Vec<SocketAddr>,
    token: JoinToken,
    head_start: Duration,
) -> Result<(SocketAddr, Credentials), JoinError> {
    let mut attempts = tokio::task::JoinSet::new();
    let mut failures: Vec<(usize, JoinError)> = Vec::new();
    let mut next = addresses.iter().copied().enumerate();
    let mut waiting = true;
    while waiting || !attempts.is_empty() {
        if waiting {
            match next.next() {
                Some((index, address)) => {
                    let (runtime, token) = (runtime.clone(), token.clone());
                    attempts.spawn(async move {
                        let attempt = greet_alone(&runtime, address, &token).await;
                        (index, address, attempt)
                    });
                }
                None => waiting = false,
            }
        }
        let finished = if waiting {
            match tokio::time::timeout(head_start, attempts.join_next()).await {
                Ok(finished) => finished,
                Err(_) => continue,
            }
        } else {
            attempts.join_next().await
        };
        match finished {
            Some(Ok((_, address, Ok((endpoint, greeting))))) => {
                let joined = enter(greeting, &token).await;
                endpoint.close(CloseCode::Done.varint(), b"");
                return joined.map(|credentials| (address, credentials));
            }
            Some(Ok((index, _, Err(error)))) => failures.push((index, error)),
            Some(Err(error)) => {
                return Err(JoinError::Local {
                    reason: error.to_string(),
                });
            }
            None => {}
        }
    }
    failures.sort_by_key(|(index, error)| (matches!(error, JoinError::Connect(_)), *index));
    Err(failures.into_iter().next().map_or_else(
        || unreachable!("every address has failed"),
        |(_, error)| error,
    ))
}

async fn greet_alone(
    runtime: &TransportRuntime,
    address: SocketAddr,
    token: &JoinToken,
) -> Result<(quinn::Endpoint, Greeting), JoinError> {
    let config = EndpointConfig::towards(address);
    let socket = bind_socket(config.listen)?;
    let endpoint =
        quinn_endpoint(runtime, &config, None, socket).map_err(|error| JoinError::Local {
            reason: error.to_string(),
        })?;
    let greeting = greet(&endpoint, &config, address, token).await?;
    Ok((endpoint, greeting))
}

/// A head that has shown that it is the one of the token, and was told nothing yet.
struct Greeting {
    connection: quinn::Connection,
    head: Identity,
    authority: rustls_pki_types::CertificateDer<'static>,
}

async fn greet(
    endpoint: &quinn::Endpoint,
    config: &EndpointConfig,
    address: SocketAddr,
    token: &JoinToken,
) -> Result<Greeting, JoinError> {
    let pin = Arc::new(PinnedAuthority::new(token.fingerprint()));
    let tls = tls::joining_config(Arc::clone(&pin), &[ALPN_JOIN])?;
    let tls = QuicClientConfig::try_from(tls).map_err(TlsError::new)?;
    let mut client = quinn::ClientConfig::new(Arc::new(tls));
    client.transport_config(Arc::new(config.transport(0, STREAM_RECEIVE_WINDOW)));
    let connection = endpoint
        .connect_with(client, address, tls::SERVER_NAME)
        .map_err(|error| ConnectError::start(address, &error))?
        .await
        .map_err(|error| {
            if pin.saw_another() {
                JoinError::Fingerprint { address }
            } else {
                ConnectError::before_proof(address, error).into()
            }
        })?;
    let head = presented_identity(&connection)
        .map_err(|reason| ConnectError::Certificate { address, reason })?;
    if head.role != Role::Head {
        return Err(JoinError::NotHead {
            address,
            found: Box::new(head),
        });
    }
    // The verifier has let nobody through without it.
    let authority = pin.authority().ok_or(JoinError::Fingerprint { address })?;
    Ok(Greeting {
        connection,
        head,
        authority,
    })
}

async fn enter(greeting: Greeting, token: &JoinToken) -> Result<Credentials, JoinError> {
    let Greeting {
        connection,
        head,
        authority,
    } = greeting;
    let request = CertificateRequest::generate().map_err(|error| JoinError::Local {
        reason: error.to_string(),
    })?;
    let reply = ask(&connection, token, &request)
        .await
        .map_err(|error| unanswered(&connection, &error))?;
    match reply {
        JoinReply::Refused(refusal) => Err(refusal.into()),
        JoinReply::Joined {
            cluster,
            name,
            certificate,
        } => {
            let credentials = request
                .finish(&certificate, &authority)
                .map_err(JoinError::Answer)?;
            let got = credentials.identity();
            if (got.cluster, got.role, &got.name) == (head.cluster, token.role(), &name)
                && cluster == head.cluster
            {
                Ok(credentials)
            } else {
                Err(JoinError::Answer(IdentityError::Certificate {
                    reason: format!(
                        "it is for {got}, not for {} {name} of {cluster}",
                        token.role()
                    ),
                }))
            }
        }
    }
}

async fn ask(
    connection: &quinn::Connection,
    token: &JoinToken,
    request: &CertificateRequest,
) -> Result<JoinReply, FrameError> {
    let (send, recv) = connection.open_bi().await.map_err(ConnectionLost::from)?;
    let mut writer = FrameWriter::new(send);
    let request = JoinRequest {
        role: token.role(),
        secret: token.secret().to_vec(),
        csr: request.der().to_vec(),
    };
    writer.send(&request, &[]).await?;
    // An error only says that the head has stopped the stream, and then there may be a reply.
    drop(writer.stream_mut().finish());
    let reply = FrameReader::new(recv, Limits::JOIN).expect().await?;
    Ok(reply.head)
}

fn unanswered(connection: &quinn::Connection, error: &FrameError) -> JoinError {
    let reason = match connection.close_reason().map(ConnectionLost::from) {
        Some(ConnectionLost::Closed { code, reason }) => {
            format!("{code}{}", with_reason(&reason))
        }
        Some(lost) => lost.to_string(),
        None => error.to_string(),
    };
    JoinError::Unanswered { reason }
}
