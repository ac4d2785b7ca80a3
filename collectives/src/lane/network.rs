//! The links of one worker to other hosts: which kind is made, and how the other side takes it.
//!
//! There are two kinds: [`QuicLane`] and [`TlsLane`]. Which one is better for a pair of hosts depends on the path, the kernel
//! and the processors. So who makes a link makes one of each at first, measures both in turn with a few small messages and a few
//! large ones, keeps the better one and ends the other. What was found holds for all further links to that host.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kolo_transport::ids::{Rank, Slot};
use kolo_transport::{ConnectError, Connection, Endpoint, Expect, TlsLink};

use super::measure::{choose, keep, kept, measure_both};
use super::{Lane, LaneError, LinkHello, QuicLane, TlsLane};
use crate::group::GroupId;

/// After an attempt to make a link that failed for a reason that may pass the next one is made so much later, and then after
/// twice as long.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Who has not answered for so long may be gone.
const SILENCE: Duration = Duration::from_millis(200);

/// Which kind of links are made to other hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LaneChoice {
    /// The one that is found to be better for the pair of hosts.
    #[default]
    Auto,
    /// QUIC.
    Quic,
    /// TLS 1.3 over TCP.
    Tls,
}

/// A text that is no [`LaneChoice`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no kind of lane; there are `auto`, `quic` and `tls`")]
pub struct ParseLaneChoiceError(String);

impl FromStr for LaneChoice {
    type Err = ParseLaneChoiceError;

    fn from_str(text: &str) -> Result<Self, ParseLaneChoiceError> {
        match text {
            "auto" => Ok(Self::Auto),
            "quic" => Ok(Self::Quic),
            "tls" => Ok(Self::Tls),
            other => Err(ParseLaneChoiceError(other.to_owned())),
        }
    }
}

impl fmt::Display for LaneChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Quic => "quic",
            Self::Tls => "tls",
        })
    }
}

/// Why an attempt to make a link came to nothing.
#[derive(Debug)]
struct Failed {
    error: LaneError,
    /// Another attempt may work.
    may_pass: bool,
}

impl From<LaneError> for Failed {
    fn from(error: LaneError) -> Self {
        Self {
            error,
            may_pass: false,
        }
    }
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

/// Makes links to other hosts, over an endpoint that [accepts](accept_quic) them and whose peers do. Needs a tokio runtime that
/// has time enabled.
#[derive(Debug)]
pub struct NetworkLanes {
    endpoint: Endpoint,
    choice: LaneChoice,
    /// What is better, by host.
    found: Mutex<HashMap<IpAddr, LaneChoice>>,
    /// Where somebody took a connection of this side once: no firewall speaks for it.
    reached: Mutex<HashSet<SocketAddr>>,
}

impl NetworkLanes {
    /// Links over this endpoint.
    #[must_use]
    pub fn new(endpoint: Endpoint, choice: LaneChoice) -> Self {
        Self {
            endpoint,
            choice,
            found: Mutex::default(),
            reached: Mutex::default(),
        }
    }

    /// The endpoint.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    fn found(&self) -> std::sync::MutexGuard<'_, HashMap<IpAddr, LaneChoice>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reached(&self) -> std::sync::MutexGuard<'_, HashSet<SocketAddr>> {
        self.reached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a link to the worker in `slot`, which is `peer`, at `address`. Every step takes at most `limit`.
    ///
    /// What may be better in a moment (no route to the host, nobody who answers in time, a peer that is busy) is tried again until
    /// `limit` has passed. A peer that is [gone](NetworkLanes::is_gone), or not there yet, is not waited for.
    ///
    /// If the choice is left to it and only one kind can be made, for instance because a firewall lets only UDP or only TCP pass,
    /// it is that one.
    ///
    /// # Errors
    ///
    /// [`LaneError`].
    pub async fn connect(
        &self,
        own: &LinkHello,
        (peer, slot, address): (Rank, Slot, SocketAddr),
        limit: Duration,
    ) -> Result<Box<dyn Lane>, LaneError> {
        let trying = Box::pin(async {
            let begun = Instant::now();
            let mut pause = PAUSE;
            loop {
                match self.attempt(own, (peer, slot, address), limit).await {
                    Ok(lane) => return Ok(lane),
                    Err(failed) if failed.may_pass && begun.elapsed() < limit => {
                        tracing::debug!(%peer, %address, error = %failed.error, "a link is tried again");
                    }
                    Err(failed) => return Err(failed.error),
                }
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
        });
        tokio::select! {
            biased;
            made = trying => made,
            reason = self.until_gone(address) => Err(LaneError::Unreachable { reason }),
        }
    }

    /// Asks the worker in `slot`, which is `peer`, at `address`, for its link to this one in the group that `own` names: see
    /// [`Connector::request`](crate::Connector::request). It is a link that is ended at once, of the kind that is in use to that
    /// host, or of the one that is there first. Every step takes at most `limit`.
    ///
    /// # Errors
    ///
    /// [`LaneError`].
    pub async fn request(
        &self,
        own: &LinkHello,
        (peer, slot, address): (Rank, Slot, SocketAddr),
        limit: Duration,
    ) -> Result<(), LaneError> {
        // A handshake with nobody would go on until it meets a peer that comes meanwhile, and has no use for it any more.
        let is_there = self.endpoint.is_reachable(address).await;
        if !is_there && self.endpoint.is_refused(address).await {
            return Err(LaneError::Unreachable {
                reason: format!("nothing listens at {address}"),
            });
        }
        let expect = Expect::worker(own.job, slot);
        let quic = Box::pin(self.quic(own, peer, expect.clone(), address, limit));
        let tls = Box::pin(self.tls(own, peer, expect, address, limit));
        let made = match self.known(address) {
            Some(LaneChoice::Tls) => tls.await,
            Some(LaneChoice::Quic) => quic.await,
            _ => first(quic, tls).await,
        };
        let mut lane = made.map_err(|failed| failed.error)?;
        keep(lane.as_mut(), limit).await?;
        self.reached().insert(address);
        Ok(())
    }

    /// The kind of links to a host, if there is no choice any more.
    fn known(&self, address: SocketAddr) -> Option<LaneChoice> {
        match self.choice {
            LaneChoice::Auto => self.found().get(&address.ip()).copied(),
            forced => Some(forced),
        }
    }

    async fn until_gone(&self, address: SocketAddr) -> String {
        loop {
            tokio::time::sleep(SILENCE).await;
            if let Some(reason) = self.is_gone(address).await {
                return reason;
            }
        }
    }

    async fn attempt(
        &self,
        own: &LinkHello,
        (peer, slot, address): (Rank, Slot, SocketAddr),
        limit: Duration,
    ) -> Result<Box<dyn Lane>, Failed> {
        let expect = Expect::worker(own.job, slot);
        let (quic, tls) = (
            self.quic(own, peer, expect.clone(), address, limit),
            self.tls(own, peer, expect.clone(), address, limit),
        );
        let mut lane = match self.known(address) {
            Some(LaneChoice::Quic) => quic.await?,
            Some(LaneChoice::Tls) => tls.await?,
            _ => match tokio::join!(quic, tls) {
                (Ok(quic), Ok(tls)) => self.better(address, quic, tls, limit).await?,
                // It did not answer in time: TCP does not get through.
                (Ok(quic), Err(failed)) if failed.may_pass => {
                    only(peer, address, quic, &failed.error)
                }
                (Ok(quic), Err(_)) => {
                    // The peer may only have begun to listen after TCP was tried.
                    match self.tls(own, peer, expect, address, limit).await {
                        Ok(tls) => self.better(address, quic, tls, limit).await?,
                        Err(failed) => only(peer, address, quic, &failed.error),
                    }
                }
                (Err(failed), Ok(tls)) => only(peer, address, tls, &failed.error),
                (Err(quic), Err(tls)) => {
                    let may_pass = quic.may_pass || tls.may_pass;
                    let error = match tls.error {
                        refused @ LaneError::Refused { .. } => refused,
                        _ => quic.error,
                    };
                    return Err(Failed { error, may_pass });
                }
            },
        };
        keep(lane.as_mut(), limit).await?;
        self.reached().insert(address);
        Ok(lane)
    }

    /// Why the worker at `address` is gone for good, if that is certain: its host says that nothing listens there, neither for
    /// QUIC nor for TLS ([`Endpoint::is_refused`]). For [`Connector::is_gone`](crate::Connector::is_gone) where a worker
    /// listens before the others hear of its address.
    ///
    /// `None` if the worker is there, and if nobody says anything, because the network is down, say. A firewall may refuse for a
    /// worker that is there. So nobody counts as gone before he was found there once, by a link that was made to him or
    /// by this question.
    pub async fn is_gone(&self, address: SocketAddr) -> Option<String> {
        if !self.reached().contains(&address) {
            if self.endpoint.is_reachable(address).await {
                self.reached().insert(address);
            }
            return None;
        }
        let gone = self.endpoint.is_refused(address).await;
        gone.then(|| format!("nothing listens at {address} any more: its process is gone"))
    }

    async fn quic(
        &self,
        own: &LinkHello,
        peer: Rank,
        expect: Expect,
        address: SocketAddr,
        limit: Duration,
    ) -> Result<Box<dyn Lane>, Failed> {
        let connection = self.endpoint.connect(address, expect).await?;
        Ok(Box::new(
            QuicLane::connect(&connection, own, peer, limit).await?,
        ))
    }

    async fn tls(
        &self,
        own: &LinkHello,
        peer: Rank,
        expect: Expect,
        address: SocketAddr,
        limit: Duration,
    ) -> Result<Box<dyn Lane>, Failed> {
        let link = self.endpoint.connect_tls(address, expect).await?;
        Ok(Box::new(TlsLane::open(link, own, peer, limit).await?))
    }

    /// Measures both, in turn.
    async fn better(
        &self,
        address: SocketAddr,
        mut quic: Box<dyn Lane>,
        mut tls: Box<dyn Lane>,
        limit: Duration,
    ) -> Result<Box<dyn Lane>, LaneError> {
        let (of_quic, of_tls) = measure_both(quic.as_mut(), tls.as_mut(), limit).await;
        let better = match (&of_quic, &of_tls) {
            (Ok(of_quic), Ok(of_tls)) => {
                let better = choose(of_quic, of_tls);
                let (of_quic, of_tls) = (of_quic.medians(), of_tls.medians());
                tracing::debug!(%address, ?of_quic, ?of_tls, %better, "measured the ways to a host");
                self.found().insert(address.ip(), better);
                better
            }
            (Ok(_), Err(error @ LaneError::Timeout { .. })) => {
                tracing::warn!(%address, %error, "TLS over TCP is much slower on the way to a host, or does not pass; links go over QUIC");
                self.found().insert(address.ip(), LaneChoice::Quic);
                LaneChoice::Quic
            }
            (Err(_), _) => LaneChoice::Tls,
            (_, Err(_)) => LaneChoice::Quic,
        };
        match better {
            LaneChoice::Quic => of_quic.map(|_| quic),
            _ => of_tls.map(|_| tls),
        }
    }
}

/// What succeeds first; the last failure, if neither does.
async fn first<T, E>(
    one: impl Future<Output = Result<T, E>>,
    other: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let (mut one, mut other) = (pin!(one), pin!(other));
    tokio::select! {
        made = &mut one => match made {
            Ok(made) => Ok(made),
            Err(_) => other.await,
        },
        made = &mut other => match made {
            Ok(made) => Ok(made),
            Err(_) => one.await,
        },
    }
}

fn only(peer: Rank, address: SocketAddr, lane: Box<dyn Lane>, error: &LaneError) -> Box<dyn Lane> {
    let kind = lane.kind();
    tracing::info!(%peer, %address, lane = kind, %error, "only one kind of link can be made to this rank");
    lane
}

/// Takes a link that [`NetworkLanes::connect`] makes on a QUIC connection that was accepted; `peer` comes from its certificate, see
/// [`rank_of`](super::rank_of). Returns for which group it is. `None` if the peer has kept another one.
///
/// # Errors
///
/// [`LaneError`].
///
/// # Panics
///
/// Outside a tokio runtime that has time enabled.
pub async fn accept_quic(
    connection: &Connection,
    own: &LinkHello,
    peer: Rank,
    limit: Duration,
) -> Result<Option<(Box<dyn Lane>, GroupId)>, LaneError> {
    let lane = QuicLane::accept(connection, own, peer, limit).await?;
    let group = lane.group();
    kept(Box::new(lane), group, limit).await
}

/// As [`accept_quic`], on a connection of TLS over TCP.
///
/// # Errors
///
/// [`LaneError`].
///
/// # Panics
///
/// Outside a tokio runtime that has time enabled.
pub async fn accept_tls(
    link: TlsLink,
    own: &LinkHello,
    peer: Rank,
    limit: Duration,
) -> Result<Option<(Box<dyn Lane>, GroupId)>, LaneError> {
    let lane = TlsLane::open(link, own, peer, limit).await?;
    let group = lane.group();
    kept(Box::new(lane), group, limit).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_have_names() {
        for choice in [LaneChoice::Auto, LaneChoice::Quic, LaneChoice::Tls] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        let error = "rdma".parse::<LaneChoice>().unwrap_err().to_string();
        assert!(error.contains("rdma") && error.contains("tls"), "{error}");
    }
}
