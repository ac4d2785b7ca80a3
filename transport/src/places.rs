//! Who comes in: how many peers have a place at once, in all and of one address, and who of them makes room for others.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// The places of one listener, for handshakes or connections.
#[derive(Debug)]
pub struct Places {
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
    /// Since when it is idle.
    since: Instant,
    /// The peer has not said what gives it a right to its place.
    is_idle: bool,
    /// Dropped when the place goes to another.
    _is_kept: oneshot::Sender<()>,
}

impl Places {
    /// So many places, so many of them for the peers of one address (for IPv6 of one /64 network). An idle peer keeps its place for
    /// `patience` at least.
    #[must_use]
    pub fn new(most: usize, most_of_address: usize, patience: Duration) -> Arc<Self> {
        Arc::new(Self {
            most,
            most_of_address,
            patience,
            state: Mutex::default(),
        })
    }

    /// Whether half the places are taken, in all or of those for the address of `peer`.
    pub fn is_crowded(&self, peer: IpAddr) -> bool {
        let state = self.state();
        state.taken.len() > self.most / 2
            || state.of(network(peer)) >= self.most_of_address.div_ceil(2)
    }

    /// Takes a place for one more peer, which is idle from `now` on. If there is none, the one that is [idle](Kept::rest)
    /// for longest (of the peer's address, if that has too many) loses its place to it, but not before the patience is over. All
    /// others stay: if many members come at once, some get through.
    ///
    /// # Errors
    ///
    /// Why there is no place.
    pub fn enter(self: &Arc<Self>, peer: IpAddr, now: Instant) -> Result<Place, &'static str> {
        let source = network(peer);
        let mut state = self.state();
        let longest_idle = |of_source: bool| {
            state
                .taken
                .iter()
                .filter(|(_, taken)| taken.is_idle && (!of_source || taken.source == source))
                .min_by_key(|(number, taken)| (taken.since, **number))
        };
        let full = if state.of(source) >= self.most_of_address {
            Some(("too many at once of its address", longest_idle(true)))
        } else if state.taken.len() >= self.most {
            Some(("too many at once", longest_idle(false)))
        } else {
            None
        };
        if let Some((reason, idle)) = full {
            let idle = idle
                .filter(|(_, taken)| now.saturating_duration_since(taken.since) >= self.patience)
                .map(|(number, _)| *number);
            state.leave(idle.ok_or(reason)?);
        }
        let number = state.next;
        state.next += 1;
        let (is_kept, lost) = oneshot::channel();
        state.taken.insert(
            number,
            Taken {
                source,
                since: now,
                is_idle: true,
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

/// The place of one peer, until it is dropped.
#[derive(Debug)]
pub struct Place {
    kept: Kept,
    lost: oneshot::Receiver<()>,
}

/// As long as a peer has its place.
#[derive(Debug)]
pub struct Kept {
    number: u64,
    all: Arc<Places>,
}

impl Kept {
    /// The peer has said what gives it a right to its place: it keeps it from here on.
    pub fn heard(&self) {
        if let Some(taken) = self.all.state().taken.get_mut(&self.number) {
            taken.is_idle = false;
        }
    }

    /// The peer is idle from `now` on: it makes room for others when its turn comes.
    pub fn rest(&self, now: Instant) {
        if let Some(taken) = self.all.state().taken.get_mut(&self.number) {
            taken.is_idle = true;
            taken.since = now;
        }
    }
}

impl Place {
    /// Runs a handshake or a connection while it has its place.
    ///
    /// # Errors
    ///
    /// Its own, or why it was not let go on.
    pub async fn hold<F>(self, work: impl FnOnce(Kept) -> F) -> Result<(), String>
    where
        F: Future<Output = Result<(), String>>,
    {
        let Self { kept, mut lost } = self;
        tokio::select! {
            biased;
            ended = work(kept) => ended,
            // The sender never sends.
            _ = &mut lost => Err("the peer was idle, and made room for another".to_owned()),
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.all.state().leave(self.number);
    }
}

/// What counts as one address: a host has all of an IPv6 /64 network to choose from.
#[must_use]
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
        ip @ IpAddr::V4(_) => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);

    fn places(most: usize, most_of_address: usize) -> Arc<Places> {
        Places::new(most, most_of_address, PATIENCE)
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
        last.kept.heard();
        newcomer.kept.heard();
        let _next = enter("10.0.0.4", PATIENCE * 10).unwrap();
        assert!(is_lost(&mut other) && !is_lost(&mut last) && !is_lost(&mut newcomer));
        enter("10.0.0.2", PATIENCE * 100).unwrap_err();
        // Until it rests again.
        newcomer.kept.rest(begin + PATIENCE * 100);
        enter("10.0.0.2", PATIENCE * 100 + PATIENCE / 2).unwrap_err();
        let _last = enter("10.0.0.2", PATIENCE * 101).unwrap();
        assert!(is_lost(&mut newcomer) && !is_lost(&mut last));
    }

    #[test]
    fn who_rests_for_longest_makes_room_first_and_not_who_came_first() {
        let all = places(10, 2);
        let begin = Instant::now();
        let enter = |after| all.enter(ip("10.0.0.1"), begin + after);
        let (mut first, mut second) = (enter(PATIENCE).unwrap(), enter(PATIENCE).unwrap());
        first.kept.heard();
        first.kept.rest(begin + PATIENCE * 3);
        let _third = enter(PATIENCE * 4).unwrap();
        assert!(is_lost(&mut second) && !is_lost(&mut first));
    }
}
