//! What a daemon tells the service manager: `sd_notify` of systemd, which is datagrams to a Unix socket.
//!
//! Without `NOTIFY_SOCKET` in the environment all of it does nothing. Workers don't get these variables.

use std::ffi::{OsStr, OsString};
use std::future::Future;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// How long a message that matters waits for a service manager that does not read.
const PATIENCE: Duration = Duration::from_secs(1);

/// The way to the service manager.
#[derive(Debug, Default)]
pub struct Notifier {
    socket: Option<Socket>,
    watchdog: Option<Duration>,
}

/// One for each kind of message.
#[derive(Debug)]
struct Socket {
    address: SocketAddr,
    /// Waits a moment if the service manager has too much to read.
    states: UnixDatagram,
    /// Never waits.
    pings: UnixDatagram,
}

impl Notifier {
    /// As the environment says: `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`.
    ///
    /// What can't be used is logged, and the daemon runs without.
    pub fn from_env() -> Self {
        Self::from_vars(|name| std::env::var_os(name))
    }

    fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Self {
        let Some(name) = var("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Self::default();
        };
        let socket = match open(&name) {
            Ok(socket) => Some(socket),
            Err(error) => {
                tracing::warn!(socket = %name.display(), %error, "the service manager can't be told");
                None
            }
        };
        let number = |name| var(name)?.to_str()?.parse::<u64>().ok();
        // The variables may be meant for another process that has passed them on.
        let is_mine = var("WATCHDOG_PID")
            .is_none_or(|_| number("WATCHDOG_PID") == Some(u64::from(std::process::id())));
        let watchdog = number("WATCHDOG_USEC")
            .filter(|usec| is_mine && *usec > 0)
            .map(Duration::from_micros);
        Self { socket, watchdog }
    }

    /// The daemon serves; `status` is a line for people.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={}", line(status)));
    }

    /// The daemon reads its settings again; [`Notifier::ready`] ends that.
    pub fn reloading(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let usec = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={usec}"));
    }

    /// The daemon leaves.
    pub fn stopping(&self, status: &str) {
        self.send(&format!("STOPPING=1\nSTATUS={}", line(status)));
    }

    /// Tells the watchdog that all is well, for as long as `is_good` says so within the time that it is given; else
    /// it tells nothing, and the service manager ends the daemon in the end. Returns at once if nobody asks for it.
    pub async fn watchdog<F: Future<Output = bool>>(&self, is_good: impl Fn(Duration) -> F) {
        let Some(interval) = self.watchdog.filter(|_| self.socket.is_some()) else {
            return;
        };
        // A third each for the pause, for the answer, and to be late.
        let share = interval / 3;
        let mut was_good = true;
        loop {
            let good = is_good(share).await;
            if good {
                self.ping();
            } else if was_good {
                tracing::error!(
                    ?interval,
                    "the daemon does not do its work; the watchdog is not told any more"
                );
            }
            was_good = good;
            tokio::time::sleep(share).await;
        }
    }

    fn send(&self, message: &str) {
        let Some(socket) = &self.socket else { return };
        if let Err(error) = socket
            .states
            .send_to_addr(message.as_bytes(), &socket.address)
        {
            tracing::warn!(%error, "the service manager was not told");
        }
    }

    fn ping(&self) {
        let Some(socket) = &self.socket else { return };
        match socket.pings.send_to_addr(b"WATCHDOG=1", &socket.address) {
            Ok(_) => {}
            // It has pings to read.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => tracing::warn!(%error, "the service manager was not told"),
        }
    }
}

/// A status is one line.
fn line(status: &str) -> String {
    status.replace(['\n', '\r'], " ")
}

/// `/path` or, in the abstract namespace, `@name`.
fn open(name: &OsStr) -> io::Result<Socket> {
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        [b'/', ..] => SocketAddr::from_pathname(name)?,
        _ => {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "it is neither an absolute path nor an abstract name that begins with `@`",
            ));
        }
    };
    let (states, pings) = (UnixDatagram::unbound()?, UnixDatagram::unbound()?);
    states.set_write_timeout(Some(PATIENCE))?;
    pings.set_nonblocking(true)?;
    Ok(Socket {
        address,
        states,
        pings,
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::sync::Notify;

    use super::*;

    fn notifier(socket: &str, usec: Option<&str>, pid: Option<&str>) -> Notifier {
        Notifier::from_vars(|name| {
            match name {
                "NOTIFY_SOCKET" => Some(socket),
                "WATCHDOG_USEC" => usec,
                "WATCHDOG_PID" => pid,
                _ => None,
            }
            .map(OsString::from)
        })
    }

    #[test]
    fn what_is_not_there_or_not_meant_for_it_is_left_alone() {
        for name in ["", "relative", "vsock:2:1", "@", "/no/such/socket"] {
            notifier(name, Some("1000"), None).ready("");
        }
        let own = std::process::id().to_string();
        for (usec, pid, expected) in [
            (None, None, None),
            (Some("3000000"), None, Some(Duration::from_secs(3))),
            (Some("3000000"), Some(&*own), Some(Duration::from_secs(3))),
            (Some("3000000"), Some("1"), None),
            (Some("3000000"), Some("x"), None),
            (Some("0"), None, None),
            (Some("x"), None, None),
        ] {
            let notifier = notifier("/no/such/socket", usec, pid);
            assert_eq!(notifier.watchdog, expected, "{usec:?} {pid:?}");
        }
    }

    #[tokio::test]
    async fn the_watchdog_hears_nothing_of_a_daemon_that_does_not_work() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_nonblocking(true).unwrap();
        let notifier = notifier(path.to_str().unwrap(), Some("30000"), None);
        for (good, expected) in [(true, 5), (false, 0)] {
            let asked = Cell::new(0);
            let enough = Notify::new();
            let watch = notifier.watchdog(|limit| {
                assert_eq!(limit, Duration::from_millis(10));
                asked.set(asked.get() + 1);
                if asked.get() > 5 {
                    enough.notify_one();
                }
                async move { good }
            });
            tokio::select! {
                biased;
                () = enough.notified() => {}
                () = watch => panic!("it ended"),
            }
            let mut buffer = [0; 64];
            let mut pings = 0;
            while let Ok(length) = socket.recv(&mut buffer) {
                assert_eq!(&buffer[..length], b"WATCHDOG=1");
                pings += 1;
            }
            // The last one may be on its way already.
            assert!(
                (expected..=expected + u32::from(good)).contains(&pings),
                "{pings}"
            );
        }
    }

    #[tokio::test]
    async fn without_a_watchdog_there_is_nothing_to_do() {
        Notifier::default()
            .watchdog(|_| async { panic!("nobody asks") })
            .await;
    }
}
