//! The links of one worker to other hosts: which kind is made, and how the other side takes it.
//!
//! There are two kinds: [`QuicLane`] and [`TlsLane`]. Which one is better for a pair of hosts depends on the path, the kernel
//! and the processors. So who makes a link makes one of each at first, measures both in turn with a few small messages and a few
//! large ones, keeps the better one and ends the other. What was found holds for all further links to that host.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::future::poll_fn;
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kolo_transport::ids::{Rank, Slot};
use kolo_transport::{ConnectError, Connection, Endpoint, Expect, TlsLink};

use super::{Lane, LaneError, LinkHello, QuicLane, TlsLane};
use crate::group::GroupId;

/// Round trips of each length that are measured on each lane in one pass.
const SMALL: (usize, u32) = (64, 8);
const LARGE: (usize, u32) = (512 << 10, 2);

/// Sent and echoed before that: one packet where packets have 9000 bytes. A network whose interfaces have those and whose switches
/// drop them lets short messages pass, and perhaps long ones, which leave in other packets.
const WHOLE: usize = 8000;

/// The TLS lane counts as broken if one pass takes so many times as long as the one of QUIC, and this.
const MUCH_SLOWER: u32 = 10;
const SLOW: Duration = Duration::from_secs(1);

/// Passes, in turn: what disturbs one lane for some milliseconds is not to decide. Where one pass of both takes longer than this,
/// such things count for less, and there are only two.
const PASSES: u32 = 4;
const LONG_PASS: Duration = Duration::from_millis(20);

/// Most bytes of one message, and of all, that a peer has echoed.
const MOST_ECHO: usize = 1 << 20;
const MOST_ECHOES: usize = 64 << 20;

/// QUIC has to be so many times better. The TLS lane takes less processor time, and is better in use than when it is measured: then
/// a task of the runtime waits for it, in use the thread that runs the operation, which looks for what comes.
const BETTER: f64 = 2.0;

/// After an attempt to make a link that failed for a reason that may pass the next one is made so much later, and then after
/// twice as long.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Who has not answered for so long may be gone.
const SILENCE: Duration = Duration::from_millis(200);

/// Commands of the side that makes a link, each with a length.
const COMMAND: usize = 5;
const ECHO: u8 = 1;
const KEEP: u8 = 2;

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

/// What was measured of a lane: times of all round trips.
#[derive(Debug, Clone, Default, PartialEq)]
struct Measured {
    small: Vec<Duration>,
    large: Vec<Duration>,
}

impl Measured {
    /// Those in the middle. The shortest may be of a moment in which both ends had the same processor.
    fn medians(&self) -> [Duration; 2] {
        [&self.small, &self.large].map(|times| {
            let mut times = times.clone();
            times.sort_unstable();
            times.get(times.len() / 2).copied().unwrap_or(Duration::MAX)
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
        let known = match self.choice {
            LaneChoice::Auto => self.found().get(&address.ip()).copied(),
            forced => Some(forced),
        };
        let (quic, tls) = (
            self.quic(own, peer, expect.clone(), address, limit),
            self.tls(own, peer, expect.clone(), address, limit),
        );
        let mut lane = match known {
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
        timed(limit, command(lane.as_mut(), KEEP, 0)).await?;
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

fn only(peer: Rank, address: SocketAddr, lane: Box<dyn Lane>, error: &LaneError) -> Box<dyn Lane> {
    let kind = lane.kind();
    tracing::info!(%peer, %address, lane = kind, %error, "only one kind of link can be made to this rank");
    lane
}

/// The lane whose times are shorter, small messages and large ones weighing the same. Pure.
fn choose(quic: &Measured, tls: &Measured) -> LaneChoice {
    let product = |lane: &Measured| {
        let times = lane.medians().map(|time| time.as_secs_f64());
        times.iter().product::<f64>()
    };
    if product(tls) <= product(quic) * BETTER {
        LaneChoice::Tls
    } else {
        LaneChoice::Quic
    }
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

/// Echoes what is measured, until the peer keeps the lane or ends it.
async fn kept(
    mut lane: Box<dyn Lane>,
    group: GroupId,
    limit: Duration,
) -> Result<Option<(Box<dyn Lane>, GroupId)>, LaneError> {
    let keeps = timed(limit, async {
        let mut echoed = 0;
        let mut bytes = Vec::new();
        loop {
            let mut head = [0; COMMAND];
            if !read(lane.as_mut(), &mut head).await? {
                return Ok(false);
            }
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            match head[0] {
                KEEP if length == 0 => return Ok(true),
                ECHO if length <= MOST_ECHO && echoed + length <= MOST_ECHOES => {
                    echoed += length;
                    bytes.resize(length, 0);
                    if !read(lane.as_mut(), &mut bytes).await? {
                        return Ok(false);
                    }
                    write(lane.as_mut(), &[IoSlice::new(&bytes)]).await?;
                }
                other => {
                    return Err(LaneError::Protocol {
                        reason: format!("a new link has command {other} with length {length}"),
                    });
                }
            }
        }
    })
    .await?;
    Ok(keeps.then_some((lane, group)))
}

/// What is found of two lanes, in turn. The other end waits for as long as `limit` for all of it.
async fn measure_both<'a>(
    quic: &'a mut dyn Lane,
    tls: &'a mut dyn Lane,
    limit: Duration,
) -> (Result<Measured, LaneError>, Result<Measured, LaneError>) {
    let (mut of_quic, mut of_tls) = (Ok(Measured::default()), Ok(Measured::default()));
    let begun = Instant::now();
    for pass in 1..=PASSES {
        // Time must be left to use the other one if this one hangs.
        let mut patience = limit / 4;
        let lanes: [(&mut dyn Lane, _); 2] = [(quic, &mut of_quic), (tls, &mut of_tls)];
        for (lane, found) in lanes {
            let Ok(before) = found else {
                patience = limit;
                continue;
            };
            let pass = Instant::now();
            let left = limit.saturating_sub(begun.elapsed()) / 2;
            let measuring = measure(lane, std::mem::take(before));
            *found = timed(patience.min(left), measuring).await;
            patience = match found {
                Ok(_) => (MUCH_SLOWER * pass.elapsed()).max(SLOW),
                Err(_) => limit,
            };
        }
        let is_long = pass >= 2 && begun.elapsed() > pass * LONG_PASS;
        if is_long || of_tls.is_err() || of_quic.is_err() {
            break;
        }
    }
    (of_quic, of_tls)
}

/// One pass more.
async fn measure(lane: &mut dyn Lane, mut found: Measured) -> Result<Measured, LaneError> {
    let mut bytes = vec![0; LARGE.0];
    let mut probes = Vec::new();
    for (found, (length, times)) in [
        (&mut probes, (WHOLE, 1)),
        (&mut found.small, SMALL),
        (&mut found.large, LARGE),
    ] {
        for _ in 0..times {
            let begun = Instant::now();
            let mut head = [ECHO; COMMAND];
            head[1..].copy_from_slice(&(length as u32).to_be_bytes());
            write(lane, &[IoSlice::new(&head), IoSlice::new(&bytes[..length])]).await?;
            if !read(lane, &mut bytes[..length]).await? {
                return Err(LaneError::Ended {
                    reason: "the peer closed it while it was measured".to_owned(),
                });
            }
            found.push(begun.elapsed());
        }
    }
    Ok(found)
}

async fn command(lane: &mut dyn Lane, command: u8, length: u32) -> Result<(), LaneError> {
    let mut head = [command; COMMAND];
    head[1..].copy_from_slice(&length.to_be_bytes());
    write(lane, &[IoSlice::new(&head)]).await
}

async fn write(lane: &mut dyn Lane, parts: &[IoSlice<'_>]) -> Result<(), LaneError> {
    for part in parts {
        let mut rest: &[u8] = part;
        while !rest.is_empty() {
            let count = poll_fn(|cx| lane.poll_write(cx, &[IoSlice::new(rest)])).await?;
            rest = &rest[count..];
        }
    }
    poll_fn(|cx| lane.poll_flush(cx)).await
}

/// Fills `into`; false if the peer has ended the lane instead.
async fn read(lane: &mut dyn Lane, into: &mut [u8]) -> Result<bool, LaneError> {
    let mut got = 0;
    while got < into.len() {
        match poll_fn(|cx| lane.poll_read(cx, &mut into[got..])).await? {
            0 => return Ok(false),
            count => got += count,
        }
    }
    Ok(true)
}

async fn timed<T>(
    limit: Duration,
    future: impl Future<Output = Result<T, LaneError>>,
) -> Result<T, LaneError> {
    tokio::time::timeout(limit, future)
        .await
        .unwrap_or_else(|_| {
            Err(LaneError::Timeout {
                reason: format!("a new link was not used within {} s", limit.as_secs_f64()),
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::MemoryLane;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn choices_have_names() {
        for choice in [LaneChoice::Auto, LaneChoice::Quic, LaneChoice::Tls] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        let error = "rdma".parse::<LaneChoice>().unwrap_err().to_string();
        assert!(error.contains("rdma") && error.contains("tls"), "{error}");
    }

    #[test]
    fn the_faster_lane_is_chosen_and_tls_if_they_are_alike() {
        // Single ones that are nothing like the others do not count.
        let lane = |small, large| Measured {
            small: [1, small, 10_000, small, small]
                .map(Duration::from_micros)
                .to_vec(),
            large: [large, 1, large].map(Duration::from_micros).to_vec(),
        };
        assert_eq!(choose(&lane(60, 900), &lane(30, 500)), LaneChoice::Tls);
        assert_eq!(choose(&lane(60, 500), &lane(60, 950)), LaneChoice::Tls);
        assert_eq!(choose(&lane(30, 500), &lane(61, 500)), LaneChoice::Quic);
        assert_eq!(choose(&lane(60, 500), &lane(30, 5000)), LaneChoice::Quic);
    }

    #[tokio::test]
    async fn a_lane_is_measured_and_then_kept_with_nothing_left_on_it() {
        let (mut mine, theirs) = MemoryLane::pair(1000);
        let (measured, kept) = tokio::join!(
            async {
                let measured = measure(&mut mine, Measured::default()).await.unwrap();
                command(&mut mine, KEEP, 0).await.unwrap();
                measured
            },
            kept(Box::new(theirs), GroupId(5), LIMIT)
        );
        assert_eq!((measured.small.len(), measured.large.len()), (8, 2));
        let (mut theirs, group) = kept.unwrap().unwrap();
        assert_eq!(group, GroupId(5));
        write(&mut mine, &[IoSlice::new(b"after")]).await.unwrap();
        let mut bytes = [0; 5];
        assert!(read(theirs.as_mut(), &mut bytes).await.unwrap());
        assert_eq!(&bytes, b"after");
    }

    /// Echoes, and gives up after so many bytes without saying so.
    async fn echo(mut lane: MemoryLane, most: usize) {
        let mut bytes = vec![0; LARGE.0];
        let mut echoed = 0;
        loop {
            let mut head = [0; COMMAND];
            if !read(&mut lane, &mut head).await.unwrap() {
                return;
            }
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            echoed += length;
            if echoed > most {
                std::future::pending::<()>().await;
            }
            assert!(read(&mut lane, &mut bytes[..length]).await.unwrap());
            write(&mut lane, &[IoSlice::new(&bytes[..length])])
                .await
                .unwrap();
        }
    }

    /// Neither of them eats up the time that the other end waits for all.
    #[tokio::test]
    async fn a_lane_that_hangs_is_given_up_soon_and_the_other_one_is_measured() {
        let (all, some) = (usize::MAX, WHOLE - 1);
        for (quic, tls, limit) in [(all, some, LIMIT), (some, all, 4 * SLOW), (all, all, LIMIT)] {
            let lanes = [quic, tls].map(|most| (most, MemoryLane::pair(LARGE.0)));
            let [
                (quic, (mut to_quic, quic_end)),
                (tls, (mut to_tls, tls_end)),
            ] = lanes;
            let begun = Instant::now();
            let found = tokio::select! {
                found = measure_both(&mut to_quic, &mut to_tls, limit) => found,
                _ = async { tokio::join!(echo(quic_end, quic), echo(tls_end, tls)) } => unreachable!("they end last"),
            };
            assert!(begun.elapsed() < LIMIT / 2);
            for (found, most) in [(found.0, quic), (found.1, tls)] {
                match found {
                    Ok(found) => assert!(most == all && found.large.len() >= 2),
                    Err(LaneError::Timeout { .. }) => assert_eq!(most, some),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    #[tokio::test]
    async fn a_lane_that_is_not_kept_is_no_error_and_one_that_breaks_the_rules_is() {
        let (mine, theirs) = MemoryLane::pair(1000);
        drop(mine);
        assert!(
            kept(Box::new(theirs), GroupId::WORLD, LIMIT)
                .await
                .unwrap()
                .is_none()
        );

        for bytes in [[9, 0, 0, 0, 0], [ECHO, 0xff, 0, 0, 0], [KEEP, 0, 0, 0, 1]] {
            let (mut mine, theirs) = MemoryLane::pair(1000);
            write(&mut mine, &[IoSlice::new(&bytes)]).await.unwrap();
            let error = kept(Box::new(theirs), GroupId::WORLD, LIMIT)
                .await
                .unwrap_err();
            assert!(matches!(error, LaneError::Protocol { .. }), "{error}");
        }

        let (_mine, theirs) = MemoryLane::pair(1000);
        let error = kept(Box::new(theirs), GroupId::WORLD, Duration::from_millis(20)).await;
        assert!(matches!(error, Err(LaneError::Timeout { .. })));
    }
}
