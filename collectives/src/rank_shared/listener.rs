//! Answers for ranks that wait for this one while it does something else.
//!
//! Nobody reads the links between operations. So a rank that is in none for a second, or has not begun any, looks whether others
//! wait for it already, and tells them what it does instead. It looks when something comes, and not from time to time: a rank that
//! nobody waits for costs nothing.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use kolo_transport::ids::Rank;
use tokio::runtime::Handle;

use super::{GroupId, RankShared};
use crate::cause::Cause;
use crate::header::Header;
use crate::link::{Inbound, Link};
use crate::operation::Tag;
use crate::times::IDLE;

/// While there are operations, it is looked so often in that time whether there was one.
const LOOKS: u32 = 4;

/// Questions of a peer that are taken in one turn.
const MOST_ASKS: u32 = 64;

/// A group that answers while it is in no operation.
pub(crate) trait Idle: Send + Sync + 'static {
    /// Answers on all links, as far as they can be read. Returns `false` if an operation is under way.
    fn answer(self: Arc<Self>, told: &mut Vec<Told>, cx: &mut Context<'_>) -> bool;
}

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

    /// From now on somebody listens for this group.
    pub(crate) fn start<G: Idle>(self: &Arc<Self>, group: &Arc<G>, handle: &Handle) {
        let (listener, weak) = (Arc::clone(self), Arc::downgrade(group));
        handle.spawn(async move { listener.run(weak).await });
    }

    async fn run<G: Idle>(self: Arc<Self>, group: Weak<G>) {
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
                // Neither the group nor the right to run operations is kept while this waits.
                let Some(group) = group.upgrade() else {
                    return Poll::Ready(());
                };
                if !group.answer(&mut told, cx) {
                    // An operation has been under way for so long. When it ends nobody says so.
                    quiet = 0;
                    return Poll::Ready(());
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

/// What is known of a peer since this rank listens.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Told {
    /// All that waits on its link is looked at from the first frame on.
    has_begun: bool,
    /// The operation in which it was answered last.
    tag: Option<Tag>,
}

/// For whom a rank answers.
pub(crate) struct Answers<'a> {
    pub(crate) rank_shared: &'a RankShared,
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
        if !std::mem::replace(&mut told.has_begun, true) {
            link.look_again();
        }
        // What it asked for last, whether it was a question, and what it gave up.
        let (mut asked, mut is_question, mut given_up) = (None, false, None);
        for taken in 0.. {
            if taken == MOST_ASKS {
                cx.waker().wake_by_ref();
                break;
            }
            let Some(held) = link.poll_held(cx) else {
                break;
            };
            match held {
                // What was only asked is answered with what is said here. The rest is for the operation.
                Header::Ask(data) => (asked, is_question) = (Some(data), true),
                // It is of no use any more.
                Header::Share { .. } if self.is_settled => {}
                _ => break,
            }
            link.inbound = Some(Inbound::Header);
        }
        while let Some((header, text)) = link.poll_ahead(cx, self.ahead) {
            match header {
                Header::Data(data) | Header::Consent(data) => asked = Some(data),
                Header::Ask(data) => (asked, is_question) = (Some(data), true),
                Header::AbortOperation { tag, .. } => {
                    let cause = text.and_then(|text| Cause::parse(&text));
                    if cause.is_some_and(|cause| cause.ends_operation()) {
                        given_up = Some(tag);
                    }
                }
                _ => {}
            }
        }
        if let Some(data) = asked.filter(|data| data.tag >= self.next) {
            let place = (self.group, data.tag);
            self.rank_shared.hear(rank, place, &data.operation);
            // What this rank does may be something else by the time it is asked again.
            if told.tag.replace(data.tag) != Some(data.tag) || is_question {
                let text = format!("{}{}", self.before, self.rank_shared.present());
                let generation = self.rank_shared.generation;
                link.notify(&Header::doing(generation, data.tag, self.me, &text));
            }
        }
        if let Some(tag) = given_up {
            self.rank_shared.hear_no_more(rank, (self.group, tag));
        }
    }
}
