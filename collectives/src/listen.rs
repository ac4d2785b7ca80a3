//! Answers for ranks that wait for this one while it does something else.
//!
//! Nobody reads the links between operations. So a rank that is in none for a second, or has not begun any, looks whether others
//! wait for it already, and tells them what it does instead. It looks when something comes, and not from time to time: a rank that
//! nobody waits for costs nothing.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kolo_transport::ids::Rank;

use crate::cause::{Cause, cut};
use crate::engine::Engine;
use crate::group::{Family, GroupId};
use crate::header::Header;
use crate::inner::Inner;
use crate::link::{Inbound, Link};
use crate::operation::Tag;
use crate::shm::setup::Sharing;

/// A rank that has ended an operation so long ago looks who waits for it.
const IDLE: Duration = Duration::from_secs(1);

/// While there are operations, it is looked so often in that time whether there was one.
const LOOKS: u32 = 4;

/// Most bytes of a link that are held, for who is in the group.
const AHEAD: usize = 64 * 1024;

#[derive(Debug, Default)]
pub(crate) struct Listener {
    /// Operations that had their turn.
    turns: AtomicU64,
    /// It waits for something to come.
    armed: AtomicBool,
    ended: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Listener {
    /// An operation has its turn.
    pub(crate) fn disturb(&self) {
        // Either the listener sees this turn, or this sees that it waits: both look after they have written.
        self.turns.fetch_add(1, Ordering::SeqCst);
        if self.armed.load(Ordering::SeqCst) && self.armed.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// The links are free again, of whoever was in no operation: the listener looks at them.
    pub(crate) fn freed(&self) {
        if self.armed.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// The communicator goes.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        let waker = self
            .waker
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// From now on somebody listens.
    pub(crate) fn start(self: &Arc<Self>, inner: &Arc<Inner>) {
        if inner.world == 1 {
            return;
        }
        let (listener, weak) = (Arc::clone(self), Arc::downgrade(inner));
        inner
            .family
            .handle
            .spawn(async move { listener.run(weak).await });
    }

    async fn run(self: Arc<Self>, inner: Weak<Inner>) {
        // Who has not begun anything listens at once: a group may have been made because somebody asks for it.
        let (mut turns, mut quiet) = (0, LOOKS);
        let mut told: Vec<Told> = Vec::new();
        while !self.ended.load(Ordering::Acquire) {
            let now = self.turns.load(Ordering::Relaxed);
            if now != turns {
                (turns, quiet) = (now, 0);
                told.clear();
            }
            if quiet < LOOKS {
                quiet += 1;
                let mut sleep = std::pin::pin!(tokio::time::sleep(IDLE / LOOKS));
                poll_fn(|cx| {
                    self.register(cx);
                    if self.ended.load(Ordering::Acquire) {
                        return Poll::Ready(());
                    }
                    sleep.as_mut().poll(cx)
                })
                .await;
                continue;
            }
            poll_fn(|cx| {
                self.register(cx);
                self.armed.store(true, Ordering::SeqCst);
                if self.turns.load(Ordering::SeqCst) != turns || self.ended.load(Ordering::Acquire)
                {
                    return Poll::Ready(());
                }
                // Neither the communicator nor the right to run operations is kept while this waits.
                let Some(inner) = inner.upgrade() else {
                    return Poll::Ready(());
                };
                let Ok(mut engine) = inner.engine.try_lock() else {
                    // An operation has been under way for so long. When it ends nobody says so.
                    quiet = 0;
                    return Poll::Ready(());
                };
                told.resize(engine.links.len(), Told::default());
                answer(&inner, &mut engine, &mut told, cx);
                drop(engine);
                if inner.signals.lock().needs_attendant() {
                    inner.attend();
                }
                Poll::Pending
            })
            .await;
            self.armed.store(false, Ordering::Release);
        }
    }

    fn register(&self, cx: &Context<'_>) {
        let mut waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
    }
}

/// What a peer was answered last: in which of its operations, and to how many questions that wait behind something else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Told {
    tag: Option<Tag>,
    waiting: usize,
}

/// Reads headers as far as they are there, and answers those who wait in operations that this rank has not begun.
fn answer(inner: &Arc<Inner>, engine: &mut Engine, told: &mut [Told], cx: &mut Context<'_>) {
    let next = take_links(inner, engine);
    let is_settled = matches!(engine.shm, Sharing::Active(_));
    let answers = Answers {
        family: &inner.family,
        group: inner.id,
        me: Rank(inner.me),
        next,
        is_settled,
        ahead: AHEAD,
        before: "",
    };
    for ((peer, link), told) in (0..).zip(&mut engine.links).zip(told) {
        answers.give(inner.job_rank(peer), link, told, cx);
    }
    // Of failed operations, too, the rest for peers that have not read before.
    if engine.poll_flush(cx).is_pending() {
        tracing::trace!("a peer does not read yet");
    }
}

/// For whom a rank answers.
pub(crate) struct Answers<'a> {
    pub(crate) family: &'a Family,
    pub(crate) group: GroupId,
    /// The rank in that group.
    pub(crate) me: Rank,
    /// Its next operation there.
    pub(crate) next: Tag,
    /// Whether it is known if memory is shared.
    pub(crate) is_settled: bool,
    /// Most bytes of a link that are held to look what a peer asks for.
    pub(crate) ahead: usize,
    /// What is said before what the rank does.
    pub(crate) before: &'static str,
}

impl Answers<'_> {
    /// Answers on one link, to this rank among all. What it says is still to be written.
    pub(crate) fn give(&self, rank: u32, link: &mut Link, told: &mut Told, cx: &mut Context<'_>) {
        // Asked last, and given up.
        let (mut asked, mut given_up) = (None, None);
        // What this rank does may be something else by the time it is asked again.
        let (mut again, mut waiting) = (false, 0);
        while let Some(held) = held(link, cx) {
            match held {
                // What was only asked is answered with what is said here. The rest is for the operation.
                Header::Ask(data) => (asked, again) = (Some(data), true),
                // It is of no use any more.
                Header::Share { .. } if self.is_settled => {}
                _ => break,
            }
            link.inbound = Some(Inbound::Header);
        }
        link.poll_frames(cx, self.ahead, |header, text| match header {
            Header::Data(data) | Header::Consent(data) => asked = Some(data),
            Header::Ask(data) => {
                asked = Some(data);
                waiting += 1;
            }
            Header::AbortOperation { tag, .. } => {
                let cause = text.and_then(Cause::parse);
                if cause.is_some_and(|cause| cause.ends_operation()) {
                    given_up = Some(tag);
                }
            }
            _ => {}
        });
        if let Some(data) = asked.filter(|data| data.tag >= self.next) {
            let place = (self.group, data.tag);
            self.family.hear(rank, place, &data.operation);
            let tell = Told {
                tag: Some(data.tag),
                waiting,
            };
            if again || *told != tell {
                *told = tell;
                let text = format!("{}{}", self.before, self.family.present());
                let text = cut(&text);
                let header = Header::Doing {
                    generation: self.family.generation,
                    tag: data.tag,
                    rank: self.me,
                    length: text.len() as u32,
                };
                let mut frame = header.encode().to_vec();
                frame.extend_from_slice(text.as_bytes());
                link.notify(&frame);
            }
        }
        if let Some(tag) = given_up {
            self.family.hear_no_more(rank, (self.group, tag));
        }
    }
}

/// Takes in the links that came since the last operation. Returns the number of the next one.
fn take_links(inner: &Inner, engine: &mut Engine) -> Tag {
    let (arrivals, notices, next) = {
        let mut state = inner.signals.lock();
        (state.take_links(), state.notices(), state.next_tag())
    };
    for arrival in arrivals {
        // One that this rank could not make is made again when it is needed.
        drop(engine.arrive(arrival, &notices));
    }
    next
}

/// The header of the frame that waits on a link, if there is one.
fn held(link: &mut Link, cx: &mut Context<'_>) -> Option<Header> {
    match link.inbound.take() {
        Some(Inbound::Header) => {
            // The next operation sees the end, too, and what is no header.
            link.inbound = Some(Inbound::Header);
            let Poll::Ready(Ok(header)) = link.poll_header(cx) else {
                return None;
            };
            link.inbound = Some(Inbound::Held(header));
            Some(header)
        }
        Some(Inbound::Held(header)) => {
            link.inbound = Some(Inbound::Held(header));
            Some(header)
        }
        other => {
            link.inbound = other;
            None
        }
    }
}
