//! How often one address may try a secret: a token to join with, or a bearer secret. The core is pure: the clock is an argument.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kolo_transport::Flood;
use kolo_transport::places::network;

/// Attempts that an address has at first.
pub(crate) const BURST: u32 = 20;

/// An address gets another attempt after so long.
pub(crate) const REFILL: Duration = Duration::from_secs(1);

/// Addresses that are counted one by one. What comes on top shares one count.
const MAX_ADDRESSES: usize = 4096;

/// Lines about wrong secrets in ten seconds: more than one address can cause.
const LINES: u32 = 32;

/// The attempts of all addresses, at joining and at HTTPS together. A clone counts with it.
#[derive(Debug, Clone)]
pub struct Attempts {
    limiter: Arc<Mutex<Limiter>>,
    /// For lines about secrets that are wrong.
    pub(crate) wrong: Flood,
    too_many: Flood,
}

impl Default for Attempts {
    fn default() -> Self {
        Self {
            limiter: Arc::default(),
            wrong: Flood::new("wrong secrets were refused", LINES),
            too_many: Flood::new("attempts were refused unseen", 1),
        }
    }
}

impl Attempts {
    fn limiter(&self) -> MutexGuard<'_, Limiter> {
        self.limiter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an attempt.
    ///
    /// # Errors
    ///
    /// When there is an attempt again, if this one is to be refused unseen.
    pub(crate) fn attempt(&self, address: IpAddr) -> Result<(), Duration> {
        let verdict = self.limiter().attempt(Instant::now(), address);
        match verdict {
            Verdict::Admit => Ok(()),
            Verdict::Refuse { again_in } => {
                self.too_many.line(|| {
                    tracing::warn!(%address, "too many attempts with wrong secrets; refused unseen from now on");
                });
                Err(again_in)
            }
        }
    }

    /// The attempt was a good one and does not count.
    pub(crate) fn good(&self, address: IpAddr) {
        self.limiter().good(address);
    }
}

/// What to do with an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Look at it.
    Admit,
    /// Refuse it unseen.
    Refuse {
        /// When there is an attempt again.
        again_in: Duration,
    },
}

#[derive(Debug, Clone, Copy)]
struct Account {
    left: u32,
    /// Since when `left` is what is there.
    since: Instant,
}

impl Account {
    fn new(now: Instant) -> Self {
        Self {
            left: BURST,
            since: now,
        }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.since);
        let more = u32::try_from(passed.as_millis() / REFILL.as_millis()).unwrap_or(u32::MAX);
        if more > 0 {
            self.left = self.left.saturating_add(more).min(BURST);
            self.since += REFILL * more.min(BURST);
            if self.left == BURST {
                self.since = now;
            }
        }
    }

    fn take(&mut self, now: Instant) -> Verdict {
        self.refill(now);
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            return Verdict::Admit;
        }
        Verdict::Refuse {
            again_in: (self.since + REFILL).saturating_duration_since(now),
        }
    }
}

/// Counts attempts by address; of IPv6 by the /64, for that is what one host has.
#[derive(Debug, Default)]
pub(crate) struct Limiter {
    accounts: HashMap<IpAddr, Account>,
    /// Of all addresses that have no account.
    others: Option<Account>,
}

impl Limiter {
    /// An attempt from `address`.
    pub(crate) fn attempt(&mut self, now: Instant, address: IpAddr) -> Verdict {
        let key = network(address);
        if !self.accounts.contains_key(&key) && self.accounts.len() >= MAX_ADDRESSES {
            self.accounts.retain(|_, account| {
                account.refill(now);
                account.left < BURST
            });
        }
        if !self.accounts.contains_key(&key) && self.accounts.len() >= MAX_ADDRESSES {
            return self.others.get_or_insert(Account::new(now)).take(now);
        }
        self.accounts
            .entry(key)
            .or_insert_with(|| Account::new(now))
            .take(now)
    }

    /// The attempt was a good one and does not count: many nodes may come from one address.
    pub(crate) fn good(&mut self, address: IpAddr) {
        if let Some(account) = self.accounts.get_mut(&network(address)) {
            account.left = (account.left + 1).min(BURST);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn admitted(limiter: &mut Limiter, now: Instant, address: &str, attempts: u32) -> u32 {
        let mut count = 0;
        for _ in 0..attempts {
            count += u32::from(limiter.attempt(now, ip(address)) == Verdict::Admit);
        }
        count
    }

    #[test]
    fn an_address_has_a_burst_and_then_one_a_second_and_others_are_not_touched() {
        let start = Instant::now();
        let mut limiter = Limiter::default();
        assert_eq!(admitted(&mut limiter, start, "10.0.0.1", 1000), BURST);
        assert_eq!(admitted(&mut limiter, start, "::ffff:10.0.0.1", 5), 0);
        assert_eq!(admitted(&mut limiter, start, "10.0.0.2", 5), 5);
        let later = start + REFILL * 3 + REFILL / 2;
        assert_eq!(admitted(&mut limiter, later, "10.0.0.1", 1000), 3);
        assert_eq!(
            limiter.attempt(later, ip("10.0.0.1")),
            Verdict::Refuse {
                again_in: REFILL / 2
            }
        );
        let rested = start + Duration::from_secs(3600);
        assert_eq!(admitted(&mut limiter, rested, "10.0.0.1", 1000), BURST);
    }

    #[test]
    fn good_attempts_do_not_count() {
        let start = Instant::now();
        let mut limiter = Limiter::default();
        for _ in 0..10 * BURST {
            assert_eq!(limiter.attempt(start, ip("10.0.0.1")), Verdict::Admit);
            limiter.good(ip("10.0.0.1"));
        }
    }

    #[test]
    fn ipv6_hosts_are_counted_by_their_network_and_memory_is_bounded() {
        let start = Instant::now();
        let mut limiter = Limiter::default();
        let mut count = 0;
        for n in 0..1000_u32 {
            let address = ip(&format!("2001:db8:0:1::{n:x}"));
            count += u32::from(limiter.attempt(start, address) == Verdict::Admit);
        }
        assert_eq!(count, BURST);
        for n in 0..3 * MAX_ADDRESSES as u32 {
            limiter.attempt(start, Ipv6Addr::from(u128::from(n) << 64).into());
        }
        assert_eq!(limiter.accounts.len(), MAX_ADDRESSES);
        let mut count = 0;
        for n in 0..100 {
            let address = ip(&format!("2001:db9:{n:x}::1"));
            count += u32::from(limiter.attempt(start, address) == Verdict::Admit);
        }
        assert!(count < 100, "{count}");
        // Those that have rested make room.
        let later = start + REFILL * BURST * 2;
        assert_eq!(admitted(&mut limiter, later, "2001:dba::1", 1000), BURST);
        assert!(limiter.accounts.len() < MAX_ADDRESSES);
    }
}
