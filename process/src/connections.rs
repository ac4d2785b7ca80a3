//! Connections of other processes, as far as the system lets this one reach them.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, Shutdown, SocketType};
use rustix::process::{PidfdFlags, PidfdGetfdFlags};

use crate::procfs::{self, Process};

/// Ends TCP connections of the processes in sessions, for both sides: those whose limit for reads and for writes is the number of seconds
/// that the environment variable `limit` of the process has, and which besides have what Gloo sets: no delay, and addresses used again.
/// Gives their number. Ends none any more once `is_late` is true.
///
/// # Errors
///
/// The first of the system's, when all is tried: `PermissionDenied` if it guards a process against its own supervisor, for instance in some
/// containers. A process that ends meanwhile is no error.
pub fn end_connections(sessions: &[u32], limit: &str, is_late: &Mutex<bool>) -> io::Result<usize> {
    let all = procfs::all().into_iter();
    let processes = all.filter(|process| sessions.contains(&process.session) && !process.dead);
    let (mut ended, mut failure) = (0, None);
    for process in processes {
        let Some(seconds) = process.seconds(limit) else {
            continue;
        };
        match end(&process, seconds, is_late) {
            Ok(count) => ended += count,
            Err(_) if !process.is_there() => {}
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    failure.map_or(Ok(ended), Err)
}

impl Process {
    /// Whether it is the same process still, and runs.
    fn is_there(&self) -> bool {
        Self::read(self.pid).is_some_and(|now| now.start == self.start && !now.dead)
    }

    /// The seconds in a variable of its environment; `None` if there are none.
    fn seconds(&self, name: &str) -> Option<Duration> {
        let mut seconds = None;
        self.has_variable(name, |value| {
            let value = std::str::from_utf8(value).ok();
            seconds = value.and_then(|value| value.parse().ok());
            true
        });
        seconds.map(Duration::from_secs)
    }
}

/// Ends the connections of one process that have this limit.
fn end(process: &Process, limit: Duration, is_late: &Mutex<bool>) -> io::Result<usize> {
    let pid = procfs::raw(process.pid).ok_or(rustix::io::Errno::SRCH)?;
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    if !process.is_there() {
        return Err(rustix::io::Errno::SRCH.into());
    }
    let folder = format!("/proc/{}/fd", process.pid);
    let (mut ended, mut failure) = (0, None);
    for entry in fs::read_dir(folder)? {
        let Ok(entry) = entry else {
            continue;
        };
        let is_socket = fs::read_link(entry.path())
            .is_ok_and(|target| target.to_string_lossy().starts_with("socket:"));
        let number = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let Some(number) = number.filter(|_| is_socket) else {
            continue;
        };
        let number: RawFd = number;
        let socket = rustix::process::pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty());
        let socket = match socket {
            Ok(socket) => socket,
            // It was closed meanwhile.
            Err(rustix::io::Errno::BADF) => continue,
            Err(error) => {
                failure = failure.or(Some(error));
                continue;
            }
        };
        if !is_of_gloo(socket.as_fd(), limit).unwrap_or(false) {
            continue;
        }
        let is_late = is_late.lock().unwrap_or_else(PoisonError::into_inner);
        // One that is connected no more needs no end.
        if !*is_late && rustix::net::shutdown(&socket, Shutdown::Both).is_ok() {
            ended += 1;
        }
    }
    failure.map_or(Ok(ended), |error| Err(error.into()))
}

fn is_of_gloo(socket: BorrowedFd<'_>, limit: Duration) -> rustix::io::Result<bool> {
    let domain = sockopt::socket_domain(socket)?;
    Ok(matches!(domain, AddressFamily::INET | AddressFamily::INET6)
        && sockopt::socket_type(socket)? == SocketType::STREAM
        && sockopt::socket_timeout(socket, Timeout::Recv)? == Some(limit)
        && sockopt::socket_timeout(socket, Timeout::Send)? == Some(limit)
        && sockopt::socket_reuseaddr(socket)?
        && sockopt::tcp_nodelay(socket)?)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Both ends of a connection; the first is as Gloo makes them, but for what `change` changes.
    fn connection(change: fn(&TcpStream)) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        one.set_nodelay(true).unwrap();
        sockopt::set_socket_reuseaddr(&one, true).unwrap();
        one.set_read_timeout(Some(LIMIT)).unwrap();
        one.set_write_timeout(Some(LIMIT)).unwrap();
        change(&one);
        (one, listener.accept().unwrap().0)
    }

    const LIMIT: Duration = Duration::from_secs(4321);

    #[test]
    fn connections_of_gloo_end_on_both_sides_and_others_stay() {
        let (mut of_gloo, mut peer) = connection(|_| ());
        let others = [
            (|one| one.set_nodelay(false).unwrap()) as fn(&TcpStream),
            |one| sockopt::set_socket_reuseaddr(one, false).unwrap(),
            |one| one.set_read_timeout(None).unwrap(),
            |one| one.set_write_timeout(Some(Duration::from_secs(1))).unwrap(),
        ]
        .map(connection);
        let own = Process::read(std::process::id()).unwrap();
        let (late, in_time) = (Mutex::new(true), Mutex::new(false));
        let without = end_connections(&[own.session], "KOLO_NO_SUCH_VARIABLE", &in_time);
        assert_eq!(without.unwrap(), 0, "no process has the variable");
        assert_eq!(end(&own, LIMIT, &late).unwrap(), 0);
        assert_eq!(end(&own, LIMIT, &in_time).unwrap(), 1);
        let mut rest = Vec::new();
        assert_eq!(peer.read_to_end(&mut rest).unwrap(), 0);
        assert_eq!(of_gloo.read_to_end(&mut rest).unwrap(), 0);
        for (mut one, mut other) in others {
            one.write_all(b"x").unwrap();
            other.read_exact(&mut [0]).unwrap();
        }
    }
}
