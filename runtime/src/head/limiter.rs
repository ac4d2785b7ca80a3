//! How often one address may try to join. Pure: the clock is an argument.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Attempts that an address has at first.
pub(super) const BURST: u32 = 20;

/// An address gets another attempt after so long.
pub(super) const REFILL: Duration = Duration::from_secs(1);

/// Addresses that are counted one by one. What comes on top shares one count.
const MAX_ADDRESSES: usize = 4096;

/// Of an address that has no attempt left: one line in the log in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// What to do with an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Look at it.
    Admit,
    /// Refuse it unseen.
    Refuse {
        /// When there is an attempt again.
        again_in: Duration,
        /// Whether to write a line to the log, and how many refusals had none before it.
        log: Option<u64>,
    },
}

#[derive(Debug, Clone, Copy)]
struct Account {
    left: u32,
    /// Since when `left` is what is there.
    since: Instant,
    logged: Option<Instant>,
    not_logged: u64,
}

impl Account {
    fn new(now: Instant) -> Self {
        Self {
            left: BURST,
            since: now,
            logged: None,
            not_logged: 0,
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
        let log = self
            .logged
            .is_none_or(|logged| now.saturating_duration_since(logged) >= LOG_INTERVAL);
        let log = if log {
            self.logged = Some(now);
            Some(std::mem::take(&mut self.not_logged))
        } else {
            self.not_logged += 1;
            None
        };
        Verdict::Refuse {
            again_in: (self.since + REFILL).saturating_duration_since(now),
            log,
        }
    }
}

/// Counts attempts by address; of IPv6 by the /64, for that is what one host has.
#[derive(Debug, Default)]
pub(super) struct Limiter {
    accounts: HashMap<IpAddr, Account>,
    /// Of all addresses that have no account.
    others: Option<Account>,
}

impl Limiter {
    /// An attempt from `address`.
    pub(super) fn attempt(&mut self, now: Instant, address: IpAddr) -> Verdict {
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
    pub(super) fn good(&mut self, address: IpAddr) {
        if let Some(account) = self.accounts.get_mut(&network(address)) {
            account.left = (account.left + 1).min(BURST);
        }
    }
}

fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => {
            let network = u128::from(address) >> 64 << 64;
            Ipv6Addr::from(network).into()
        }
    }
}

#[cfg(test)]
mod tests {
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
                again_in: REFILL / 2,
                log: None
            }
        );
        let rested = start + Duration::from_secs(3600);
        assert_eq!(admitted(&mut limiter, rested, "10.0.0.1", 1000), BURST);
    }

    #[test]
    fn refusals_are_one_line_a_minute_with_their_number() {
        let start = Instant::now();
        let mut limiter = Limiter::default();
        let mut lines = Vec::new();
        for attempt in 0..1000 + BURST {
            if let Verdict::Refuse {
                log: Some(before), ..
            } = limiter.attempt(start, ip("10.0.0.1"))
            {
                lines.push((attempt, before));
            }
        }
        assert_eq!(lines, [(BURST, 0)]);
        // Nothing is left of the minute's attempts when it tries all the time.
        let later = start + LOG_INTERVAL;
        admitted(&mut limiter, later, "10.0.0.1", BURST);
        assert!(matches!(
            limiter.attempt(later, ip("10.0.0.1")),
            Verdict::Refuse { log: Some(999), .. }
        ));
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
