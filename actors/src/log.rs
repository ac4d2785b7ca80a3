//! What head and nodes log as news.

use std::sync::atomic::{AtomicBool, Ordering};

static IS_GUEST: AtomicBool = AtomicBool::new(false);

/// Head and nodes are guests in this process, whose log is another program's: their news are for `debug` from now on.
pub fn be_guest() {
    IS_GUEST.store(true, Ordering::Relaxed);
}

/// Whether [`be_guest`] was called.
pub fn is_guest() -> bool {
    IS_GUEST.load(Ordering::Relaxed)
}

/// As `tracing::info!` in a daemon, and as `tracing::debug!` in a program that has head and nodes as guests.
#[macro_export]
macro_rules! news {
    ($($event:tt)*) => {
        if $crate::log::is_guest() {
            ::tracing::debug!($($event)*)
        } else {
            ::tracing::info!($($event)*)
        }
    };
}
