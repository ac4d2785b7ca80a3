//! Signals that end the job.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT, SIGTERM and SIGHUP, from now on.
#[derive(Debug)]
pub(crate) struct Signals {
    all: Vec<(i32, Signal)>,
}

impl Signals {
    /// Takes them. SIGHUP and SIGINT stay ignored if they are, as under `nohup` and in scripts' background.
    pub(crate) fn take() -> io::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mut all = Vec::new();
        for kind in [
            SignalKind::interrupt(),
            SignalKind::terminate(),
            SignalKind::hangup(),
        ] {
            let number = kind.as_raw_value();
            if !is_ignored(&status, number) {
                all.push((number, signal(kind)?));
            }
        }
        Ok(Self { all })
    }

    /// The next one. Cancel safe.
    pub(crate) async fn next(&mut self) -> i32 {
        let waits = self.all.iter_mut().map(|(number, signal)| {
            Box::pin(async move {
                if signal.recv().await.is_none() {
                    std::future::pending::<()>().await;
                }
                *number
            })
        });
        let waits: Vec<_> = waits.collect();
        if waits.is_empty() {
            return std::future::pending().await;
        }
        futures_util::future::select_all(waits).await.0
    }
}

/// The name of one of them.
pub(crate) fn name(number: i32) -> &'static str {
    match number {
        1 => "SIGHUP",
        2 => "SIGINT",
        _ => "SIGTERM",
    }
}

fn is_ignored(status: &str, number: i32) -> bool {
    status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << (number - 1)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ignored_is_read_from_the_status() {
        let status = "Name:\tkolo\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n";
        assert!(is_ignored(status, 1) && is_ignored(status, 13));
        assert!(!is_ignored(status, 2) && !is_ignored(status, 15));
        assert!(!is_ignored("", 1));
    }
}
