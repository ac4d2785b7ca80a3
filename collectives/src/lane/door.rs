//! Where links from other hosts come in: on the addresses that connect the hosts, and on no others.

use std::future::Future;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kolo_transport::endpoint::BindError;
use kolo_transport::ids::Rank;
use kolo_transport::wire::GenerationTable;
use kolo_transport::{
    CloseCode, Connection, Endpoint, EndpointConfig, Identity, LiveCredentials, TlsLink,
    TlsListener, TransportRuntime,
};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::{
    Lane, LaneChoice, LaneError, LinkHello, NetworkLanes, accept_quic, accept_tls, rank_of,
};
use crate::communicator::Acceptor;
use crate::group::GroupId;

/// Attempts to find a port that is free on all addresses.
const ATTEMPTS: usize = 64;

/// How many of the attempts also want TCP's port of the same number. After that there is no TLS on the address.
const TLS_ATTEMPTS: usize = 16;

/// Links of one kind that a door is accepting at once. More wait.
const MOST_ACCEPTING: usize = 64;

/// One address: a UDP socket for QUIC, and beside it a TCP socket with the same port for TLS. Clones share it.
#[derive(Debug, Clone)]
pub struct Door {
    lanes: Arc<NetworkLanes>,
    tls: Option<TlsListener>,
}

impl Door {
    /// Listens on an address for each of the settings, on all with one port: a peer needs to know no more than the address
    /// that it reaches. If the first has port 0, the system chooses one; the ports of the others don't count.
    ///
    /// A port that another process has on one of the addresses, or on TCP, is not taken: others are tried. If TCP
    /// is always taken, there is QUIC alone, which is logged as a warning.
    ///
    /// # Errors
    ///
    /// [`BindError`]; for a port that was given also [`BindError::Listen`], unless the choice is [`LaneChoice::Quic`].
    pub fn open_all(
        runtime: &TransportRuntime,
        credentials: impl Into<LiveCredentials>,
        settings: &[EndpointConfig],
        choice: LaneChoice,
    ) -> Result<Vec<Self>, BindError> {
        let credentials = credentials.into();
        let Some((first, others)) = settings.split_first() else {
            return Ok(Vec::new());
        };
        let is_given = first.listen.port() != 0;
        let mut attempt = 0;
        loop {
            attempt += 1;
            let first = Endpoint::bind(runtime, credentials.clone(), first.clone())?;
            let port = first.local_addr().port();
            let bind = |settings: &EndpointConfig| {
                let mut settings = settings.clone();
                settings.listen.set_port(port);
                Endpoint::bind(runtime, credentials.clone(), settings)
            };
            let others = match others.iter().map(bind).collect::<Result<Vec<_>, _>>() {
                Ok(others) => others,
                Err(BindError::Socket { error, .. })
                    if !is_given && error.kind() == ErrorKind::AddrInUse && attempt < ATTEMPTS =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            };
            let mut taken = None;
            let doors = std::iter::once(first)
                .chain(others)
                .map(|endpoint| Self {
                    tls: endpoint
                        .listen_tls()
                        .map_err(|error| taken = Some(error))
                        .ok(),
                    lanes: Arc::new(NetworkLanes::new(endpoint, choice)),
                })
                .collect();
            match taken {
                Some(error) if is_given && choice != LaneChoice::Quic => return Err(error),
                Some(_) if !is_given && attempt < TLS_ATTEMPTS => {}
                Some(error) => {
                    tracing::warn!(%error, "no links of TLS over TCP are taken here");
                    return Ok(doors);
                }
                None => return Ok(doors),
            }
        }
    }

    /// What makes links through it.
    pub fn lanes(&self) -> &NetworkLanes {
        &self.lanes
    }

    /// The UDP socket.
    pub fn endpoint(&self) -> &Endpoint {
        self.lanes.endpoint()
    }

    /// What takes links of TLS over TCP, if the port was free there.
    pub fn tls(&self) -> Option<&TlsListener> {
        self.tls.as_ref()
    }

    /// Where peers find it.
    pub fn address(&self) -> SocketAddr {
        self.endpoint().local_addr()
    }

    /// Takes links and hands them in, until the door is closed. `terms` says for each peer that has shown a certificate who takes its
    /// link, or refuses it; see [`Terms::of`]. A door may outlive a generation: then the terms change with it, and a
    /// link of another generation is refused (G-1). Every step of a link takes at most `limit`. What is not accepted is logged as
    /// a warning.
    ///
    /// Dropping the future ends it, and with it the links that are not accepted yet.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime that has I/O and time enabled.
    pub async fn serve<F, R>(&self, limit: Duration, terms: F)
    where
        F: Fn(Identity) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<Terms, LaneError>> + Send,
    {
        let reception = Reception { limit, terms };
        tokio::join!(self.serve_quic(&reception), self.serve_tls(&reception));
    }

    async fn serve_quic<F, R>(&self, reception: &Reception<F>)
    where
        F: Fn(Identity) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<Terms, LaneError>> + Send,
    {
        let mut links = Links::new();
        while let Some(connection) = self.endpoint().accept().await {
            let reception = reception.clone();
            let link = async move {
                if let Err(error) = reception.quic(&connection).await {
                    let peer = connection.peer().to_string();
                    log_refused(&peer, &error);
                    let code = match &error {
                        LaneError::StaleGeneration { .. } => CloseCode::StaleGeneration,
                        LaneError::Refused { .. } => CloseCode::Forbidden,
                        _ => CloseCode::Protocol,
                    };
                    connection.close(code, &error.to_string());
                }
            };
            links.begin(link).await;
        }
    }

    async fn serve_tls<F, R>(&self, reception: &Reception<F>)
    where
        F: Fn(Identity) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<Terms, LaneError>> + Send,
    {
        let Some(listener) = &self.tls else {
            return;
        };
        let mut links = Links::new();
        while let Some(link) = listener.accept().await {
            let reception = reception.clone();
            let link = async move {
                let peer = link.peer().to_string();
                if let Err(error) = reception.tls(link).await {
                    log_refused(&peer, &error);
                }
            };
            links.begin(link).await;
        }
    }

    /// Takes no more links, and ends those over QUIC, whose peers are told why. See [`Endpoint::drained`].
    pub fn close(&self, code: CloseCode, reason: &str) {
        if let Some(tls) = &self.tls {
            tls.close();
        }
        self.endpoint().close(code, reason);
    }
}

/// Who ends a link before it is one has found another one, or does not want it any more.
fn log_refused(peer: &str, error: &LaneError) {
    if matches!(error, LaneError::Ended { .. }) {
        tracing::debug!(peer, %error, "a link from another host was not made");
    } else {
        tracing::warn!(peer, %error, "a link from another host was not accepted");
    }
}

/// Who takes a link at a door, and from whom.
#[derive(Debug, Clone)]
pub struct Terms {
    /// The rank that takes the link, with its generation.
    pub own: LinkHello,
    /// Where the link is handed in.
    pub acceptor: Acceptor,
    /// The rank that the peer has in that generation, or why it has none. Then both sides say their generations, and the peer is
    /// refused: as one of another generation, if it is.
    pub peer: Result<Rank, LaneError>,
}

/// A link with its group, if the peer wants it.
type Taken = Option<(Box<dyn Lane>, GroupId)>;

/// What a door does with who comes.
#[derive(Clone)]
struct Reception<F> {
    limit: Duration,
    terms: F,
}

impl<F, R> Reception<F>
where
    F: Fn(Identity) -> R,
    R: Future<Output = Result<Terms, LaneError>>,
{
    async fn quic(&self, connection: &Connection) -> Result<(), LaneError> {
        let terms = (self.terms)(connection.peer().clone()).await?;
        let taken = accept_quic(connection, &terms.own, terms.expected(), self.limit).await;
        terms.hand_in(taken)
    }

    async fn tls(&self, link: TlsLink) -> Result<(), LaneError> {
        let terms = (self.terms)(link.peer().clone()).await?;
        let taken = accept_tls(link, &terms.own, terms.expected(), self.limit).await;
        terms.hand_in(taken)
    }
}

impl Terms {
    /// The terms for whoever has shown a certificate, by the members of the present generation.
    ///
    /// # Errors
    ///
    /// [`LaneError::Refused`] if it is no worker of the job: nothing is said to it.
    pub fn of(
        who: &Identity,
        table: &GenerationTable,
        (own, acceptor): (LinkHello, Acceptor),
    ) -> Result<Self, LaneError> {
        let peer = rank_of(who, table);
        if who.worker().is_none_or(|(job, _)| job != own.job) {
            peer.clone()?;
        }
        Ok(Self {
            own,
            acceptor,
            peer,
        })
    }

    /// The rank that the peer must say. No peer may say that of this side.
    fn expected(&self) -> Rank {
        *self.peer.as_ref().unwrap_or(&self.own.rank)
    }

    /// Nothing is taken if the peer keeps the other kind of link.
    fn hand_in(self, taken: Result<Taken, LaneError>) -> Result<(), LaneError> {
        match (taken, self.peer) {
            (Ok(_) | Err(LaneError::Refused { .. }), Err(why)) | (Err(why), _) => Err(why),
            (Ok(None), Ok(_)) => Ok(()),
            (Ok(Some((lane, group))), Ok(peer)) => self.acceptor.accept_group(group, peer, lane),
        }
    }
}

/// Links that are being accepted: so many, and no longer than whoever accepts them.
pub(crate) struct Links {
    tasks: JoinSet<()>,
    free: Arc<Semaphore>,
}

impl Links {
    pub(crate) fn new() -> Self {
        Self {
            tasks: JoinSet::new(),
            free: Arc::new(Semaphore::new(MOST_ACCEPTING)),
        }
    }

    /// Waits while there are too many.
    pub(crate) async fn begin(&mut self, link: impl Future<Output = ()> + Send + 'static) {
        while self.tasks.try_join_next().is_some() {}
        let permit = Arc::clone(&self.free).acquire_owned().await;
        self.tasks.spawn(async move {
            link.await;
            drop(permit);
        });
    }
}
