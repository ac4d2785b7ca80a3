//! The socket beside a ring: it wakes, passes descriptors, and tells by its end that the peer is gone.

use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};

use kolo_transport::direct;

use super::passing::PassingSocket;

/// Bytes that are read at once: how often the peer rang does not matter.
const ROOM: usize = 64;

/// What waits for the peer: the reading or the writing of this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Read,
    Write,
}

impl Side {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Read => Self::Write,
            Self::Write => Self::Read,
        }
    }
}

/// Both sides of a lane wait for one thing, that bytes come on the socket, perhaps in two tasks.
#[derive(Debug, Default)]
struct Waiting(Mutex<[Option<Waker>; 2]>);

impl Waiting {
    fn set(&self, side: Side, waker: &Waker) {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut slots[side as usize] {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }

    fn wake_one(&self, side: Side) {
        let waker = self.0.lock().unwrap_or_else(PoisonError::into_inner)[side as usize].take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let [read, write] = {
            let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            [slots[0].take(), slots[1].take()]
        };
        if let (Some(read), Some(write)) = (&read, &write)
            && read.will_wake(write)
        {
            read.wake_by_ref();
            return;
        }
        for waker in [read, write].into_iter().flatten() {
            waker.wake();
        }
    }
}

#[derive(Debug)]
pub(super) struct Bell {
    waiting: Arc<Waiting>,
    /// Wakes all that wait.
    waker: Waker,
    is_gone: bool,
}

impl Bell {
    pub(super) fn new() -> Self {
        let waiting = Arc::new(Waiting::default());
        Self {
            waker: Waker::from(Arc::clone(&waiting)),
            waiting,
            is_gone: false,
        }
    }

    /// The peer is gone.
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone
    }

    /// Wakes the peer, which sleeps or is about to. If the socket is full, what the peer has not read of it does that.
    pub(super) fn ring(&mut self, socket: &PassingSocket) {
        if let Err(error) = socket.write_byte() {
            tracing::trace!(%error, "the peer of a ring can't be woken");
            self.is_gone = true;
        }
    }

    /// Ready when something came, or the peer is gone: what it gave before may be there. Then what waits on the other side has to
    /// be [woken](Bell::wake), if it was for that.
    pub(super) fn poll(
        &mut self,
        socket: &mut PassingSocket,
        side: Side,
        cx: &Context<'_>,
    ) -> Poll<()> {
        // A thread, too: what one side takes from the socket may be for the other one, which has looked before.
        self.waiting.set(side, cx.waker());
        let waker = if direct::is_direct(cx) {
            // The thread sleeps on the socket itself.
            cx.waker()
        } else {
            &self.waker
        };
        let mut cx = Context::from_waker(waker);
        let read = ready!(socket.poll_read(&mut cx, &mut [0; ROOM]));
        self.is_gone |= !matches!(read, Ok(1..));
        Poll::Ready(())
    }

    /// As [`Bell::poll`], of what is there now. Returns whether something is.
    pub(super) fn look(&mut self, socket: &mut PassingSocket) -> bool {
        match socket.read(&mut [0; ROOM]) {
            Ok(1..) => true,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                false
            }
            _ => {
                self.is_gone = true;
                true
            }
        }
    }

    /// Wakes what waits on this side.
    pub(super) fn wake(&self, side: Side) {
        self.waiting.wake_one(side);
    }
}
