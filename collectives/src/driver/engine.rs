//! What a communicator keeps from one operation to the next: links, buffers, the last schedule.

use std::sync::Arc;
use std::task::{Context, Poll};

use kolo_transport::direct::looker;
use kolo_transport::ids::Generation;

use crate::blocking::processors;
use crate::cause::Cause;
use crate::header::{Data, Header, SEGMENT};
use crate::lane::LaneError;
use crate::link::Link;
use crate::operation::{Operation, Tag};
use crate::rank_shared::signals::{Arrival, Choice};
use crate::schedule::{Action, Choices, Layout, Schedule, Span, Tuning};
use crate::scratch::Scratch;
use crate::shm::setup::Sharing;

mod data;
mod shared;

/// How far an action of the present step is.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Progress {
    /// Bytes that are through.
    pub(crate) bytes: usize,
    pub(crate) done: bool,
}

impl Progress {
    /// The bytes of a transfer that go in its next frame, in the working buffer of elements of this size.
    pub(super) fn segment(self, action: Action, size: usize) -> Span {
        let span = span_of(action);
        let start = span.start * size + self.bytes;
        let left = span.len * size - self.bytes;
        Span::between(start, start + left.min(SEGMENT))
    }

    /// After so many more bytes.
    pub(super) fn after(self, action: Action, size: usize, bytes: usize) -> Self {
        let bytes = self.bytes + bytes;
        Self {
            bytes,
            done: bytes == span_of(action).len * size,
        }
    }
}

/// Of a transfer.
fn span_of(action: Action) -> Span {
    action.transfer().map_or(Span::default(), |(_, span)| span)
}

/// What outlives an operation; the fields are many because that is much: the links, the schedule, and the buffers of all kinds of
/// operations, which are kept so that nothing is allocated twice.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) me: u32,
    pub(crate) world: u32,
    pub(crate) generation: Generation,
    /// Of a group, its members by their ranks among all.
    members: Option<Arc<[u32]>>,
    /// By rank; the own one is never used.
    pub(crate) links: Vec<Link>,
    pub(crate) work: Scratch,
    /// Several buffers in one piece, for operations in shared memory.
    pub(crate) packed: Scratch,
    pub(crate) schedule: Schedule,
    made_for: Option<Operation>,
    /// Which algorithm is used when, and for which version of settings that is.
    choices: Choices,
    layout: Arc<Layout>,
    settings: u64,
    /// Of the actions of the present step.
    pub(crate) progress: Vec<Progress>,
    /// The last operation, if it succeeded here.
    pub(crate) previous: Option<(Tag, Operation)>,
    /// Where the shares begin, of an operation on different lengths; for an all-to-all of what comes.
    pub(crate) offsets: Vec<usize>,
    /// For an all-to-all of different lengths, where that begins which goes to each rank.
    pub(crate) sent_offsets: Vec<usize>,
    /// Lengths while they are exchanged.
    pub(crate) lengths: Vec<u64>,
    pub(crate) shm: Sharing,
    /// The last operation in shared memory was one in which some rank had no data: the next one, which is likely to be the
    /// same, is not to be expected to end by itself.
    pub(crate) is_hasty: bool,
}

impl Engine {
    pub(crate) fn new(
        me: u32,
        world: u32,
        generation: Generation,
        members: Option<Arc<[u32]>>,
    ) -> Self {
        Self {
            me,
            world,
            generation,
            members,
            links: (0..world).map(|_| Link::default()).collect(),
            work: Scratch::default(),
            packed: Scratch::default(),
            schedule: Schedule::default(),
            made_for: None,
            choices: Choices::new(Tuning::default(), Layout::single(world).shape()),
            layout: Arc::new(Layout::single(world)),
            settings: 0,
            progress: Vec::new(),
            previous: None,
            offsets: Vec::new(),
            sent_offsets: Vec::new(),
            lengths: Vec::new(),
            shm: Sharing::Unknown,
            is_hasty: false,
        }
    }

    /// Whether it is this rank that makes the link to a peer: the one that is higher among all ranks makes it.
    pub(crate) fn dials(&self, peer: u32) -> bool {
        match &self.members {
            Some(members) => members[self.me as usize] > members[peer as usize],
            None => self.me > peer,
        }
    }

    /// Takes new settings, if their version is another one.
    pub(crate) fn settle(&mut self, choice: &Choice) {
        if self.settings != choice.version {
            self.settings = choice.version;
            self.choices = Choices::new(choice.tuning, choice.layout.shape());
            self.layout = Arc::clone(&choice.layout);
            self.made_for = None;
        }
    }

    /// Whether there may be a processor for each rank of this host.
    pub(crate) fn has_processors(&self) -> bool {
        let host = self.layout.host_of(self.me);
        self.layout.ranks_on(host).len() <= processors()
    }

    /// Takes a lane that has come, or the news that none comes, which it returns. A new peer is told `notices`.
    pub(crate) fn arrive(&mut self, arrival: Arrival, notices: &[u8]) -> Result<(), LaneError> {
        let link = &mut self.links[arrival.rank as usize];
        match arrival.lane {
            Ok(new) => {
                tracing::debug!(peer = arrival.rank, lane = new.kind(), "a link is up");
                link.install(*new);
                link.notify(notices);
                Ok(())
            }
            Err(error) => {
                tracing::debug!(peer = arrival.rank, %error, "no link could be made");
                link.connecting = false;
                Err(error)
            }
        }
    }

    /// Whether a link to a peer is this rank's to make and nobody does so yet. From here on it counts as being made.
    pub(crate) fn may_begin_link(&mut self, peer: u32) -> bool {
        let dials = self.dials(peer);
        let link = &mut self.links[peer as usize];
        let may = dials && !link.is_up() && !link.connecting && !link.is_over();
        link.connecting |= may;
        may
    }

    /// A peer asks for its link. Returns whether this rank begins to make the link now. One that is there has ended for the peer, and is
    /// made again when the end is [seen](Engine::renews).
    pub(crate) fn is_asked_by(&mut self, peer: u32) -> bool {
        let link = &mut self.links[peer as usize];
        link.requested = link.is_up();
        self.may_begin_link(peer)
    }

    /// Whether a link has ended for which the peer had asked before the end was seen here. From here on it counts as being made.
    pub(crate) fn renews(&mut self, peer: u32) -> bool {
        let link = &mut self.links[peer as usize];
        !link.is_up() && std::mem::take(&mut link.requested) && self.may_begin_link(peer)
    }

    /// The links that [are made again](Engine::renews), found between operations.
    pub(crate) fn poll_renewals(&mut self, cx: &mut Context<'_>) -> Vec<u32> {
        let mut found = Vec::new();
        for peer in 0..self.world {
            let link = &mut self.links[peer as usize];
            if link.requested {
                link.poll_end(cx);
                found.extend(self.renews(peer).then_some(peer));
            }
        }
        found
    }

    /// Some of the ranks that may wait for this one to make a link, and have none: the lower ones at distances
    /// 1, 2, 4, ..., which most schedules use. They count as being linked from here on.
    pub(crate) fn unlinked_neighbours(&mut self) -> Vec<u32> {
        let mut found = Vec::new();
        let mut distance = 1;
        while distance < self.world {
            for peer in [
                (self.me + distance) % self.world,
                (self.me + self.world - distance) % self.world,
            ] {
                if self.may_begin_link(peer) {
                    found.push(peer);
                }
            }
            distance *= 2;
        }
        found
    }

    /// The lower ranks to which the network broke the link, and which wait for a new one. They count as being
    /// linked from here on.
    pub(crate) fn broken_links(&mut self) -> Vec<u32> {
        (0..self.world)
            .filter(|peer| self.links[*peer as usize].ended.is_some() && self.may_begin_link(*peer))
            .collect()
    }

    /// An operation has ended well here.
    pub(crate) fn passes(&mut self, tag: Tag, operation: Operation) {
        self.previous = Some((tag, operation));
    }

    /// Whether a certain algorithm is asked for.
    pub(crate) fn is_forced(&self) -> bool {
        self.choices.tuning().force.is_some()
    }

    /// The version of the settings that are in use.
    pub(crate) fn settings(&self) -> u64 {
        self.settings
    }

    /// Puts a notice on every link.
    pub(crate) fn notify_all(&mut self, frame: &[u8]) {
        for link in &mut self.links {
            link.notify(frame);
        }
        if let Some(arena) = self.shm.active() {
            arena.tell();
        }
    }

    /// Leaves an operation: what is half done on the links is finished later.
    pub(crate) fn abandon(&mut self) {
        for link in &mut self.links {
            link.abandon(self.work.bytes());
        }
    }

    /// As [`Engine::abandon`], one that works in the caller's buffer.
    pub(crate) fn abandon_with(&mut self, work: &[u8]) {
        for link in &mut self.links {
            link.abandon(work);
        }
    }

    /// Writes what waits on the links.
    pub(crate) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut done = Poll::Ready(());
        for link in &mut self.links {
            if !link.has_backlog() {
                continue;
            }
            match link.poll_backlog(cx) {
                Poll::Ready(Ok(())) => {}
                // What the peer said before is read by the next operation, which also finds the end.
                Poll::Ready(Err(error)) => link.write_error = Some(error.to_string()),
                Poll::Pending => done = Poll::Pending,
            }
        }
        done
    }

    /// As [`Engine::poll_flush`], as far as it goes without waiting.
    pub(crate) fn flush_now(&mut self) {
        // Whoever waits next asks again.
        if self
            .poll_flush(&mut Context::from_waker(looker()))
            .is_pending()
        {
            tracing::trace!("a peer does not read yet");
        }
    }

    /// As [`Engine::flush_now`], of [notices](Engine::notify_all): peers that read their links before these were there read again.
    pub(crate) fn flush_notices(&mut self) {
        self.flush_now();
        if let Some(arena) = self.shm.active() {
            arena.tell();
        }
    }

    /// Tells every linked peer something about an operation. Returns the frame, for peers to come.
    pub(crate) fn tell(&mut self, tag: Tag, cause: &Cause) -> Vec<u8> {
        let frame = self.notice(tag, cause);
        self.notify_all(&frame);
        frame
    }

    /// The frame that says something about an operation.
    pub(crate) fn notice(&self, tag: Tag, cause: &Cause) -> Vec<u8> {
        cause.notice(self.generation, tag)
    }

    /// Says that this rank takes what came in an operation that [waits](crate::driver::Driver::until_taken) for that.
    pub(crate) fn give_word(&mut self, tag: Tag, operation: Operation) {
        let word = Header::Consent(Data {
            generation: self.generation,
            tag,
            operation,
            step: 0,
            offset: 0,
            length: 0,
        });
        self.notify_all(&word.encode());
        self.flush_now();
    }

    pub(crate) fn has_backlog(&self) -> bool {
        self.links.iter().any(Link::has_backlog)
    }

    /// Gives the memory of buffers back.
    pub(crate) fn release(&mut self) {
        self.work.release();
        self.packed.release();
        if let Some(arena) = self.shm.active() {
            arena.release();
        }
        for link in &mut self.links {
            link.stage.release();
        }
    }
}

/// The first transfer with this peer that is not done, in one direction.
pub(crate) fn next_transfer(
    step: &[Action],
    progress: &[Progress],
    peer: u32,
    sends: bool,
) -> Option<usize> {
    step.iter().zip(progress).position(|(action, progress)| {
        !progress.done
            && action.transfer().is_some_and(|(other, _)| other == peer)
            && matches!(action, Action::Send { .. }) == sends
    })
}
