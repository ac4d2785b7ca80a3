//! Waiting for datagrams.

use std::io;
use std::net::UdpSocket;
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::super::socket::{Socket, watch};
use super::{LOOK, Pump, lock};

/// Sockets that are watched by the runtime of the task that has this.
#[derive(Default)]
pub(super) struct Watch {
    sockets: Vec<Watched>,
    /// Of the pump's sockets, when all of them were here.
    version: u64,
    /// Some are not, and that was said.
    failing: bool,
}

struct Watched {
    socket: Weak<Socket>,
    io: Io,
}

/// A descriptor of a socket. It is kept while it is not watched: when it is needed, the process may have no more.
enum Io {
    Kept(UdpSocket),
    Watched(AsyncFd<UdpSocket>),
    /// It could not be had.
    Missing,
}

impl Watch {
    pub(super) fn stop(&mut self) {
        // A descriptor that is kept keeps the port.
        self.sockets.retain(|own| own.socket.strong_count() > 0);
        for Watched { io, .. } in &mut self.sockets {
            *io = match std::mem::replace(io, Io::Missing) {
                Io::Watched(watch) => Io::Kept(watch.into_inner()),
                io => io,
            };
        }
    }

    /// Watches all sockets of the pump, and tells those that may be readable. Whether it could watch all.
    pub(super) fn poll(&mut self, pump: &Pump, cx: &mut Context<'_>) -> bool {
        if self.version != pump.version.load(Ordering::SeqCst) {
            let sockets = lock(&pump.sockets);
            self.version = pump.version.load(Ordering::SeqCst);
            self.sockets.retain(|own| own.socket.strong_count() > 0);
            for socket in &*sockets {
                if !self.sockets.iter().any(|own| own.socket.ptr_eq(socket)) {
                    self.sockets.push(Watched {
                        socket: Weak::clone(socket),
                        io: Io::Missing,
                    });
                }
            }
        }
        let mut error = None;
        for own in &mut self.sockets {
            let Some(socket) = own.socket.upgrade() else {
                own.io = Io::Missing;
                continue;
            };
            match own.poll(&socket, cx) {
                Ok(()) => {}
                Err(failed) => error = Some(failed),
            }
        }
        if let Some(error) = &error
            && !self.failing
        {
            tracing::error!(%error, "a socket can't be watched; it is looked at every {LOOK:?} until it can");
        }
        self.failing = error.is_some();
        !self.failing
    }
}

impl Watched {
    fn poll(&mut self, socket: &Socket, cx: &mut Context<'_>) -> io::Result<()> {
        if !matches!(self.io, Io::Watched(_)) {
            let io = match std::mem::replace(&mut self.io, Io::Missing) {
                Io::Kept(io) => io,
                _ => socket.descriptor()?,
            };
            self.io = match watch(io, Interest::READABLE) {
                Ok(watched) => Io::Watched(watched),
                Err((io, error)) => {
                    self.io = Io::Kept(io);
                    return Err(error);
                }
            };
        }
        if let Io::Watched(watched) = &self.io {
            while let Poll::Ready(ready) = watched.poll_read_ready(cx) {
                let Ok(mut ready) = ready else { break };
                // Before the socket is read: what comes then is told again.
                ready.clear_ready();
                socket.readable();
            }
        }
        Ok(())
    }
}
