//! How many handshakes go on at once, in all and with the peers of one address, and who of them makes room for others.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::EndpointConfig;
use crate::awake::AwakeClock;

/// The places for handshakes of one listener.
#[derive(Debug)]
pub(crate) struct Places {
    most: usize,
    most_of_address: usize,
    patience: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// By number, which is the order in which they came.
    taken: BTreeMap<u64, Taken>,
    by_source: HashMap<IpAddr, usize>,
}

#[derive(Debug)]
struct Taken {
    source: IpAddr,
    since: Instant,
    /// The peer has said nothing so far.
    is_silent: bool,
    /// Dropped when the place goes to another.
    _is_kept: oneshot::Sender<()>,
}

impl Places {
    pub(crate) fn new(config: &EndpointConfig) -> Arc<Self> {
        Arc::new(Self {
            most: config.max_handshakes,
            most_of_address: config.max_handshakes_per_address,
            patience: config.handshake_patience,
            state: Mutex::default(),
        })
    }

    /// Whether half the places are taken, in all or of those for the address of `peer`.
    pub(crate) fn is_crowded(&self, peer: IpAddr) -> bool {
        let state = self.state();
        state.taken.len() > self.most / 2
            || state.of(source(peer)) >= self.most_of_address.div_ceil(2)
    }

    /// Takes a place for one more handshake, which begins `now`. If there is none, the one whose peer has [said nothing](Place::heard)
    /// for longest (of the peer's address, if that has too many) loses its place to it, but not before
    /// [`EndpointConfig::handshake_patience`] is over. All others end: if many members come at once, some get through.
    ///
    /// # Errors
    ///
    /// Why there is no place.
    pub(crate) fn enter(
        self: &Arc<Self>,
        peer: IpAddr,
        now: Instant,
    ) -> Result<Place, &'static str> {
        let source = source(peer);
        let mut state = self.state();
        let mut silent = state.taken.iter().filter(|(_, taken)| taken.is_silent);
        let full = if state.of(source) >= self.most_of_address {
            let oldest = silent.find(|(_, taken)| taken.source == source);
            Some(("too many handshakes at once with its address", oldest))
        } else if state.taken.len() >= self.most {
            Some(("too many handshakes at once", silent.next()))
        } else {
            None
        };
        if let Some((reason, oldest)) = full {
            let oldest = oldest
                .filter(|(_, taken)| now.saturating_duration_since(taken.since) >= self.patience)
                .map(|(number, _)| *number);
            state.leave(oldest.ok_or(reason)?);
        }
        let number = state.next;
        state.next += 1;
        let (is_kept, lost) = oneshot::channel();
        state.taken.insert(
            number,
            Taken {
                source,
                since: now,
                is_silent: true,
                _is_kept: is_kept,
            },
        );
        *state.by_source.entry(source).or_default() += 1;
        Ok(Place {
            kept: Kept {
                number,
                all: Arc::clone(self),
            },
            lost,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn of(&self, source: IpAddr) -> usize {
        self.by_source.get(&source).copied().unwrap_or(0)
    }

    fn leave(&mut self, number: u64) {
        // A place that went to another is left a second time by who had it.
        let Some(taken) = self.taken.remove(&number) else {
            return;
        };
        if let Some(count) = self.by_source.get_mut(&taken.source) {
            *count -= 1;
            if *count == 0 {
                self.by_source.remove(&taken.source);
            }
        }
    }
}

/// The place of one handshake, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    kept: Kept,
    lost: oneshot::Receiver<()>,
}

/// As long as a handshake has its place.
#[derive(Debug)]
pub(crate) struct Kept {
    number: u64,
    all: Arc<Places>,
}

impl Kept {
    /// The peer has said something: the place is its own from here on.
    pub(crate) fn heard(&self) {
        if let Some(taken) = self.all.state().taken.get_mut(&self.number) {
            taken.is_silent = false;
        }
    }
}

impl Place {
    /// The peer has said something: the place is its own from here on.
    pub(crate) fn heard(&self) {
        self.kept.heard();
    }

    /// Runs a handshake, for `limit` at most by this clock and only while it has its place.
    ///
    /// # Errors
    ///
    /// The handshake's, or why it was not let go on.
    pub(crate) async fn hold<F>(
        self,
        clock: &AwakeClock,
        limit: Duration,
        handshake: impl FnOnce(Kept) -> F,
    ) -> Result<(), String>
    where
        F: Future<Output = Result<(), String>>,
    {
        let Self { kept, mut lost } = self;
        tokio::select! {
            biased;
            ended = clock.timeout(limit, handshake(kept)) => {
                ended.unwrap_or_else(|| Err("the handshake did not end in time".to_owned()))
            }
            // The sender never sends.
            _ = &mut lost => Err("the peer said nothing, and made room for another".to_owned()),
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.all.state().leave(self.number);
    }
}

/// What counts as one address: a host has all of an IPv6 network to choose from.
fn source(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
        ip @ IpAddr::V4(_) => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);

    fn places(most: usize, most_of_address: usize) -> Arc<Places> {
        Places::new(&EndpointConfig {
            max_handshakes: most,
            handshake_patience: PATIENCE,
            max_handshakes_per_address: most_of_address,
            ..EndpointConfig::default()
        })
    }

    fn ip(ip: &str) -> IpAddr {
        ip.parse().unwrap()
    }

    fn is_lost(place: &mut Place) -> bool {
        place.lost.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn places_are_counted_by_address_as_long_as_they_are_held() {
        let all = places(100, 2);
        let now = Instant::now();
        let enter = |peer| all.enter(ip(peer), now);
        let taken = ["10.0.0.1", "::ffff:10.0.0.1"].map(|peer| enter(peer).unwrap());
        assert!(enter("10.0.0.1").unwrap_err().contains("address"));
        enter("10.0.0.2").unwrap();
        let network = ["2001:db8::1", "2001:db8::ffff:0:0:1"].map(|peer| enter(peer).unwrap());
        enter("2001:db8::2").unwrap_err();
        enter("2001:db8:0:1::1").unwrap();
        drop(taken);
        enter("10.0.0.1").unwrap();
        drop(network);
        assert!(all.state().taken.is_empty());
        assert!(all.state().by_source.is_empty());
    }

    #[test]
    fn half_the_places_are_a_crowd() {
        let all = places(4, 2);
        let now = Instant::now();
        assert!(!all.is_crowded(ip("10.0.0.1")));
        let mut taken = vec![all.enter(ip("10.0.0.1"), now).unwrap()];
        assert!(all.is_crowded(ip("10.0.0.1")));
        assert!(!all.is_crowded(ip("10.0.0.2")));
        taken.push(all.enter(ip("10.0.0.2"), now).unwrap());
        assert!(!all.is_crowded(ip("10.0.0.3")));
        taken.push(all.enter(ip("10.0.0.3"), now).unwrap());
        assert!(all.is_crowded(ip("10.0.0.4")));
    }

    #[test]
    fn who_says_nothing_makes_room_for_others_and_nobody_else_does() {
        let all = places(3, 2);
        let begin = Instant::now();
        let enter = |peer, after| all.enter(ip(peer), begin + after);
        let mut slow = enter("10.0.0.1", Duration::ZERO).unwrap();
        let mut later = enter("10.0.0.2", PATIENCE / 2).unwrap();
        let mut last = enter("10.0.0.2", PATIENCE).unwrap();
        // The peer's address is full: its own make room, although another is older.
        enter("10.0.0.2", PATIENCE).unwrap_err();
        let mut newcomer = enter("10.0.0.2", PATIENCE * 3 / 2).unwrap();
        assert!(is_lost(&mut later) && !is_lost(&mut slow) && !is_lost(&mut last));
        // All are taken: the oldest one makes room.
        let reason = all.enter(ip("10.0.0.3"), begin).unwrap_err();
        assert!(!reason.contains("address"), "{reason}");
        let mut other = enter("10.0.0.3", PATIENCE * 3 / 2).unwrap();
        assert!(is_lost(&mut slow) && !is_lost(&mut last) && !is_lost(&mut newcomer));
        // Who lost a place gives back no other's.
        drop((slow, later));
        assert_eq!(all.state().taken.len(), 3);
        enter("10.0.0.4", PATIENCE * 3 / 2).unwrap_err();
        // Who has said something keeps it as long as it takes.
        last.heard();
        newcomer.heard();
        let _next = enter("10.0.0.4", PATIENCE * 10).unwrap();
        assert!(is_lost(&mut other) && !is_lost(&mut last) && !is_lost(&mut newcomer));
        enter("10.0.0.2", PATIENCE * 100).unwrap_err();
    }
}
