//! Links to other hosts: how they are made, and where they come in.

use std::fmt;
use std::future::Future;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_transport::endpoint::BindError;
use kolo_transport::ids::{Rank, Slot};
use kolo_transport::wire::GenerationTable;
use kolo_transport::{
    CloseCode, ConnectError, Connection, Endpoint, EndpointConfig, Expect, Identity,
    LiveCredentials, TlsLink, TlsListener, TransportRuntime,
};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::{Lane, LaneError, LinkHello, quic, tls};
use crate::group_id::GroupId;

/// Attempts to find a port that is free on all addresses.
const ATTEMPTS: usize = 64;

/// Links that a door is accepting at once. More wait.
const MOST_ACCEPTING: usize = 64;

/// The pause after the first attempt to make a link that failed for a reason that may pass. Each pause is twice as long as the one
/// before.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause if the peer is a generation behind, of which the peer hears in a moment.
const LONGEST_PAUSE_BEHIND: Duration = Duration::from_millis(20);

/// Which kind of links connects ranks of different hosts. The ranks of a job use the same kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LaneChoice {
    /// TLS 1.3 over TCP.
    #[default]
    Tls,
    /// QUIC, for networks that pass only UDP.
    Quic,
}

/// A text that is no [`LaneChoice`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no kind of lane; there are `tls` and `quic`")]
pub struct ParseLaneChoiceError(String);

impl FromStr for LaneChoice {
    type Err = ParseLaneChoiceError;

    fn from_str(text: &str) -> Result<Self, ParseLaneChoiceError> {
        match text {
            "tls" => Ok(Self::Tls),
            "quic" => Ok(Self::Quic),
            other => Err(ParseLaneChoiceError(other.to_owned())),
        }
    }
}

impl fmt::Display for LaneChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tls => "tls",
            Self::Quic => "quic",
        })
    }
}

/// One address of a rank: links to other hosts are made from there and come in there. Clones share it.
///
/// TLS uses the TCP port with the number of the endpoint's UDP port.
#[derive(Debug, Clone)]
pub struct Door {
    endpoint: Endpoint,
    /// `None` if links go over QUIC.
    listener: Option<TlsListener>,
}

impl Door {
    /// Listens on an address for each of the settings, on all with one port: a peer needs to know no more than the address
    /// that it reaches. If the first has port 0, the system chooses one; the ports of the others don't count.
    ///
    /// If the system chose a port that another process has on one of the addresses, other ports are tried.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn open_all(
        runtime: &TransportRuntime,
        credentials: impl Into<LiveCredentials>,
        settings: &[EndpointConfig],
        choice: LaneChoice,
    ) -> Result<Vec<Self>, BindError> {
        let credentials = credentials.into();
        let is_given = settings.first().is_some_and(|it| it.listen.port() != 0);
        let mut attempts = if is_given { 1 } else { ATTEMPTS };
        loop {
            attempts -= 1;
            match Self::open_on_one_port(runtime, &credentials, settings, choice) {
                Err(BindError::Socket { error, .. } | BindError::Listen { error, .. })
                    if error.kind() == ErrorKind::AddrInUse && attempts > 0 => {}
                done => return done,
            }
        }
    }

    fn open_on_one_port(
        runtime: &TransportRuntime,
        credentials: &LiveCredentials,
        settings: &[EndpointConfig],
        choice: LaneChoice,
    ) -> Result<Vec<Self>, BindError> {
        let mut doors: Vec<Self> = Vec::new();
        for settings in settings {
            let mut settings = settings.clone();
            if let Some(first) = doors.first() {
                settings.listen.set_port(first.address().port());
            }
            let endpoint = Endpoint::bind(runtime, credentials.clone(), settings)?;
            let listener = match choice {
                LaneChoice::Tls => Some(endpoint.listen_tls()?),
                LaneChoice::Quic => None,
            };
            doors.push(Self { endpoint, listener });
        }
        Ok(doors)
    }

    /// The UDP socket.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The address at which peers find this door.
    pub fn address(&self) -> SocketAddr {
        self.endpoint.local_addr()
    }

    /// Makes a link to the worker in `slot`, which is `peer`, at `address`. Every step takes at most `limit`.
    ///
    /// A failure that may pass (no route to the host, no answer in time, a peer that is busy, or a generation behind) is
    /// tried again until `limit` has passed. A peer whose host says that nothing listens there is not waited for.
    ///
    /// # Errors
    ///
    /// [`LaneError`].
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime that has time enabled.
    pub async fn connect(
        &self,
        own: &LinkHello,
        (peer, slot, address): (Rank, Slot, SocketAddr),
        limit: Duration,
    ) -> Result<Box<dyn Lane>, LaneError> {
        let begun = Instant::now();
        let mut pause = PAUSE;
        loop {
            let failed = match self.attempt(own, (peer, slot, address), limit).await {
                Ok(lane) => return Ok(lane),
                Err(failed) => failed,
            };
            if !failed.may_pass || begun.elapsed() >= limit {
                return Err(failed.error);
            }
            tracing::debug!(%peer, %address, error = %failed.error, "a link is tried again");
            let longest = match failed.error {
                LaneError::StaleGeneration { .. } => LONGEST_PAUSE_BEHIND,
                _ => LONGEST_PAUSE,
            };
            pause = pause.min(longest);
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// Asks the worker in `slot`, which is `peer`, at `address`, for its link to this one in the group that `own` names: see
    /// [`Connector::request`](super::Connector::request). It is a link that is ended at once. What may pass is tried again, as in
    /// [`Door::connect`].
    ///
    /// # Errors
    ///
    /// [`LaneError`].
    ///
    /// # Panics
    ///
    /// As [`Door::connect`].
    pub async fn request(
        &self,
        own: &LinkHello,
        peer: (Rank, Slot, SocketAddr),
        limit: Duration,
    ) -> Result<(), LaneError> {
        self.connect(own, peer, limit).await.map(drop)
    }

    async fn attempt(
        &self,
        own: &LinkHello,
        (peer, slot, address): (Rank, Slot, SocketAddr),
        limit: Duration,
    ) -> Result<Box<dyn Lane>, Failed> {
        let expect = Expect::worker(own.job, slot);
        let opened = if self.listener.is_some() {
            let link = self.endpoint.connect_tls(address, expect).await?;
            tls::open(link, own, peer, limit).await
        } else {
            let connection = self.endpoint.connect(address, expect).await?;
            quic::dial(&connection, own, peer, limit).await
        };
        let (lane, _) = opened.map_err(|error| Failed {
            may_pass: error.is_behind(own),
            error,
        })?;
        Ok(lane)
    }

    /// The next connection that a peer makes. `None` when the door is closed. Cancel safe.
    pub async fn accept(&self) -> Option<Incoming> {
        match &self.listener {
            Some(listener) => listener.accept().await.map(Box::new).map(Incoming::Tls),
            None => self.endpoint.accept().await.map(Incoming::Quic),
        }
    }

    /// Takes links and hands them in, until the door is closed. `terms` says for each peer that has shown a certificate what takes
    /// its link, or refuses the peer; see [`Terms::of`]. A door may outlive a generation: then the terms change with it, and a
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
        let mut tasks = JoinSet::new();
        let free = Arc::new(Semaphore::new(MOST_ACCEPTING));
        while let Some(incoming) = self.accept().await {
            while tasks.try_join_next().is_some() {}
            let permit = Arc::clone(&free).acquire_owned().await;
            let terms = terms.clone();
            tasks.spawn(async move {
                let connection = incoming.connection();
                let peer = incoming.peer().clone();
                let taken = match terms(peer.clone()).await {
                    Ok(terms) => terms.take(incoming, limit).await,
                    Err(error) => Err(error),
                };
                if let Err(error) = taken {
                    log_refused(&peer, &error);
                    if let Some(connection) = connection {
                        connection.close(quic::code_of(&error), &error.to_string());
                    }
                }
                drop(permit);
            });
        }
    }

    /// Takes no more links, and ends those over QUIC, whose peers are told why. See [`Endpoint::drained`].
    pub fn close(&self, code: CloseCode, reason: &str) {
        if let Some(listener) = &self.listener {
            listener.close();
        }
        self.endpoint.close(code, reason);
    }
}

/// A peer that ends its link before it is made does not want the link any more.
fn log_refused(peer: &Identity, error: &LaneError) {
    if matches!(error, LaneError::Ended { .. }) {
        tracing::debug!(%peer, %error, "a link from another host was not made");
    } else {
        tracing::warn!(%peer, %error, "a link from another host was not accepted");
    }
}

/// Why an attempt to make a link came to nothing.
#[derive(Debug)]
struct Failed {
    error: LaneError,
    /// Another attempt may work.
    may_pass: bool,
}

impl From<ConnectError> for Failed {
    fn from(error: ConnectError) -> Self {
        let reason = error.to_string();
        Self {
            may_pass: error.is_retryable(),
            error: match error {
                // Somebody is there, and it is not the peer or does not want this side.
                ConnectError::Certificate { .. }
                | ConnectError::WrongPeer { .. }
                | ConnectError::Rejected { .. }
                | ConnectError::Date { .. }
                | ConnectError::Version { .. } => LaneError::Refused { reason },
                _ => LaneError::Unreachable { reason },
            },
        }
    }
}

/// A connection that a peer has made to a [`Door`]: the peer has shown a certificate, and has not said hello yet.
#[derive(Debug)]
pub enum Incoming {
    /// TLS over TCP.
    Tls(Box<TlsLink>),
    /// QUIC.
    Quic(Connection),
}

impl Incoming {
    /// The peer, by its certificate.
    pub fn peer(&self) -> &Identity {
        match self {
            Self::Tls(link) => link.peer(),
            Self::Quic(connection) => connection.peer(),
        }
    }

    /// Makes the connection a link to `peer`, after both sides have said [hello](super::greet), for which the peer has at most
    /// `limit`. Also returns the group for which the peer wants it. The rank of a peer comes from its certificate: see [`rank_of`].
    ///
    /// # Errors
    ///
    /// [`LaneError`].
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime that has time enabled.
    pub async fn open(
        self,
        own: &LinkHello,
        peer: Rank,
        limit: Duration,
    ) -> Result<(Box<dyn Lane>, GroupId), LaneError> {
        match self {
            Self::Tls(link) => tls::open(*link, own, peer, limit).await,
            Self::Quic(connection) => quic::take(&connection, own, peer, limit).await,
        }
    }

    /// A connection that is closed with a reason.
    fn connection(&self) -> Option<Connection> {
        match self {
            Self::Tls(_) => None,
            Self::Quic(connection) => Some(connection.clone()),
        }
    }
}

/// Takes a link from a peer, for a group.
pub type Take = Box<dyn FnOnce(GroupId, Rank, Box<dyn Lane>) -> Result<(), LaneError> + Send>;

/// The terms on which a [`Door`] takes the link of a peer.
pub struct Terms {
    own: LinkHello,
    /// The rank of the peer in the generation of `own`, or why it has none. Then both sides say their generations, and the peer is
    /// refused: as one of another generation, if it is.
    peer: Result<Rank, LaneError>,
    take: Take,
}

impl Terms {
    /// The terms for a peer that has shown this certificate, by the members of the present generation: `own` is said to the peer,
    /// and `take` gets the link.
    ///
    /// # Errors
    ///
    /// [`LaneError::Refused`] if the peer is no worker of the job: nothing is said to it.
    pub fn of(
        who: &Identity,
        table: &GenerationTable,
        own: LinkHello,
        take: impl FnOnce(GroupId, Rank, Box<dyn Lane>) -> Result<(), LaneError> + Send + 'static,
    ) -> Result<Self, LaneError> {
        let peer = rank_of(who, table);
        if who.worker().is_none_or(|(job, _)| job != own.job) {
            peer.clone()?;
        }
        Ok(Self {
            own,
            peer,
            take: Box::new(take),
        })
    }

    async fn take(self, incoming: Incoming, limit: Duration) -> Result<(), LaneError> {
        // No peer may say the rank of this side.
        let expected = *self.peer.as_ref().unwrap_or(&self.own.rank);
        let opened = incoming.open(&self.own, expected, limit).await;
        match (opened, self.peer) {
            (Ok(_) | Err(LaneError::Refused { .. }), Err(why)) | (Err(why), _) => Err(why),
            (Ok((lane, group)), Ok(peer)) => (self.take)(group, peer, lane),
        }
    }
}

impl fmt::Debug for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Terms")
            .field("own", &self.own)
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

/// The rank of an authenticated worker, by the slot in its certificate.
///
/// # Errors
///
/// [`LaneError::Refused`] if it is no worker of this table's job, or in none of its slots.
pub fn rank_of(peer: &Identity, table: &GenerationTable) -> Result<Rank, LaneError> {
    let refused = |reason: String| LaneError::Refused { reason };
    let (job, slot) = peer
        .worker()
        .ok_or_else(|| refused(format!("{peer} is no worker")))?;
    if job != table.job {
        return Err(refused(format!("{peer} is not of {}", table.job)));
    }
    table
        .members
        .iter()
        .find(|member| member.slot == slot)
        .map(|member| member.rank)
        .ok_or_else(|| refused(format!("{peer} is not in generation {}", table.generation)))
}

#[cfg(test)]
mod tests {
    use kolo_transport::Role;
    use kolo_transport::ids::{
        ClusterId, CrossRank, Generation, Incarnation, JobId, LocalRank, NodeId,
    };
    use kolo_transport::wire::{Handover, Member};

    use super::*;

    #[test]
    fn choices_have_names() {
        assert_eq!(LaneChoice::default(), LaneChoice::Tls);
        for choice in [LaneChoice::Quic, LaneChoice::Tls] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        for strange in ["rdma", "auto"] {
            let error = strange.parse::<LaneChoice>().unwrap_err().to_string();
            assert!(error.contains(strange) && error.contains("tls"), "{error}");
        }
    }

    #[test]
    fn the_rank_of_a_peer_comes_from_its_certificate() {
        let member = |rank| Member {
            rank: Rank(rank),
            local_rank: LocalRank(0),
            local_size: 1,
            cross_rank: CrossRank(rank),
            cross_size: 3,
            slot: Slot(2 - rank),
            node: NodeId(u64::from(rank)),
            hostname: String::new(),
            address: None,
            incarnation: Incarnation::FIRST,
        };
        let table = GenerationTable {
            job: JobId(7),
            generation: Generation(3),
            members: (0..3).map(member).collect(),
            cause: String::new(),
            handover: Handover::None,
        };
        let peer = |role, name: String| Identity::new(ClusterId(1), role, name).unwrap();
        let worker = |job, slot| peer(Role::Worker, Identity::worker_name(JobId(job), Slot(slot)));
        assert_eq!(rank_of(&worker(7, 0), &table), Ok(Rank(2)));
        assert_eq!(rank_of(&worker(7, 2), &table), Ok(Rank(0)));
        for stranger in [
            worker(7, 3),
            worker(99, 0),
            peer(Role::Node, NodeId(1).to_string()),
        ] {
            let error = rank_of(&stranger, &table).unwrap_err();
            assert!(matches!(error, LaneError::Refused { .. }), "{error}");
        }
    }
}
