//! What a communicator keeps from one operation to the next: links, buffers, the last schedule.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use kolo_transport::ids::{Generation, JobId, Rank};

use crate::cause::Cause;
use crate::element::{self, Element};
use crate::error::CollectiveError;
use crate::header::{Header, Share};
use crate::lane::LaneError;
use crate::link::Link;
use crate::operation::{Operation, OperationKind, ReduceOp, Tag};
use crate::reduce::{self, Finish};
use crate::schedule::{Action, Algorithm, Choices, Equal, Group, Layout, Offsets, Rows, Schedule, Tuning};
use crate::scratch::Scratch;
use crate::shm::map::Owner;
use crate::shm::setup::Sharing;
use crate::signals::Arrival;

/// How far an action of the present step is.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Progress {
    /// Bytes that are through.
    pub(crate) bytes: usize,
    pub(crate) done: bool,
}

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
        }
    }

    /// Whether it is this rank that makes the link to a peer: the one that is higher among all ranks makes it.
    pub(crate) fn dials(&self, peer: u32) -> bool {
        match &self.members {
            Some(members) => members[self.me as usize] > members[peer as usize],
            None => self.me > peer,
        }
    }

    /// Sets how many elements each rank has, for an operation on different lengths. Returns their sum, if it is a number.
    pub(crate) fn set_offsets(&mut self, counts: impl IntoIterator<Item = usize>) -> Option<usize> {
        fill_offsets(&mut self.offsets, counts)
    }

    /// The same for what an all-to-all sends.
    pub(crate) fn set_sent_offsets(
        &mut self,
        counts: impl IntoIterator<Item = usize>,
    ) -> Option<usize> {
        fill_offsets(&mut self.sent_offsets, counts)
    }

    /// Whether the lengths that are known have this sum, and this rank has none of it.
    pub(crate) fn is_share_empty(&self, total: u64) -> bool {
        let me = self.me as usize;
        self.offsets.len() == self.world as usize + 1
            && self.offsets[me] == self.offsets[me + 1]
            && self.offsets.last().is_some_and(|last| *last as u64 == total)
    }

    /// Takes new settings, if their version is another one.
    pub(crate) fn settle(&mut self, version: u64, tuning: Tuning, layout: &Arc<Layout>) {
        if self.settings != version {
            self.settings = version;
            self.choices = Choices::new(tuning, layout.shape());
            self.layout = Arc::clone(layout);
            self.made_for = None;
        }
    }

    /// Sets how an operation is done.
    pub(crate) fn choose(&mut self, operation: &mut Operation) {
        let size = element_size(operation) as u64;
        let shares = match operation.kind {
            OperationKind::AllGather
            | OperationKind::AllGatherCounts
            | OperationKind::Gather
            | OperationKind::Scatter
            | OperationKind::AllToAll => u64::from(self.world),
            _ => 1,
        };
        let bytes = operation.count.saturating_mul(size).saturating_mul(shares);
        if operation.is_join() && self.world > 1 {
            // Every rank sends something at once, to one that may have data still and says so.
            operation.algorithm = Algorithm::Bruck;
            return;
        }
        operation.algorithm = self.choices.choose(operation.kind, operation.reduce, bytes);
        operation.segment = self.choices.segment(operation.algorithm, bytes);
    }

    /// Makes the schedule of an operation, unless it is the last one's, and the room that it needs.
    ///
    /// Fails if there is not so much memory.
    pub(crate) fn plan(&mut self, operation: &Operation) -> Result<(), CollectiveError> {
        let varcount = matches!(
            operation.kind,
            OperationKind::AllGatherVarcount
                | OperationKind::GatherVarcount
                | OperationKind::ScatterVarcount
                | OperationKind::AllToAllVarcount
        );
        if varcount || self.made_for != Some(*operation) {
            self.make_schedule(operation);
            // One of different lengths is made anew each time: the lengths are not in the operation.
            self.made_for = (!varcount).then_some(*operation);
        }
        let bytes = self.schedule.buffer.checked_mul(element_size(operation));
        if bytes.is_some_and(|bytes| self.work.try_reserve(bytes)) {
            return Ok(());
        }
        Err(CollectiveError::Invalid {
            reason: format!(
                "{operation} by the {} algorithm takes {} elements of {} bytes to work with, more than this \
                 process can get: give less at a time, or the process more memory",
                operation.algorithm,
                self.schedule.buffer,
                element_size(operation)
            ),
        })
    }

    fn make_schedule(&mut self, operation: &Operation) {
        let Self {
            schedule, layout, ..
        } = self;
        let group = Group::on(self.me, layout);
        let count = operation.count as usize;
        let algorithm = operation.algorithm;
        let root = operation.root.unwrap_or(0);
        let finish = finish_of(operation, self.world).is_some_and(|finish| !finish.is_nothing());
        let size = element_size(operation);
        let segment = (1_usize << operation.segment) / size;
        match operation.kind {
            OperationKind::AllReduce if operation.reduce == Some(ReduceOp::Adasum) => {
                schedule.adasum(group, algorithm, count, size, finish);
            }
            OperationKind::AllReduce => schedule.all_reduce(group, algorithm, count, finish),
            OperationKind::Reduce => {
                schedule.reduce(group, algorithm, root, count, segment, finish);
            }
            OperationKind::ReduceScatter => {
                let rows = operation.rows.max(1) as usize;
                let split = Rows {
                    rows,
                    width: count / rows,
                    world: self.world,
                };
                schedule.reduce_scatter(group, algorithm, split, finish);
            }
            OperationKind::Broadcast => {
                schedule.broadcast(group, algorithm, root, count, segment);
            }
            OperationKind::AllGather | OperationKind::AllGatherCounts => {
                schedule.all_gather(group, algorithm, Equal(count));
            }
            OperationKind::AllGatherVarcount => {
                schedule.all_gather(group, algorithm, Offsets(&self.offsets));
            }
            OperationKind::Gather => schedule.gather(group, algorithm, root, Equal(count)),
            OperationKind::GatherVarcount => {
                schedule.gather(group, algorithm, root, Offsets(&self.offsets));
            }
            OperationKind::Scatter => schedule.scatter(group, algorithm, root, Equal(count)),
            OperationKind::ScatterVarcount => {
                schedule.scatter(group, algorithm, root, Offsets(&self.offsets));
            }
            OperationKind::AllToAll => {
                schedule.all_to_all(group, algorithm, Equal(count), Equal(count));
            }
            OperationKind::AllToAllVarcount => {
                let (send, receive) = (Offsets(&self.sent_offsets), Offsets(&self.offsets));
                schedule.all_to_all(group, algorithm, send, receive);
            }
            OperationKind::Barrier => schedule.barrier(group),
            OperationKind::SendReceive if root == self.me => {
                schedule.send(operation.rows as u32, count);
            }
            OperationKind::SendReceive => schedule.receive(root, count),
        }
    }

    /// Copies this rank's input to its place, as it travels.
    pub(crate) fn load(&mut self, operation: &Operation, input: &[u8]) {
        let Some(span) = self.schedule.input else {
            return;
        };
        let size = element_size(operation);
        let place = &mut self.work.bytes_mut()[span.start * size..span.end() * size];
        convert_in(operation, place, input);
        if let (Some(dtype), true) = (operation.wire_type(), operation.reduce.is_some()) {
            reduce::scale(dtype, place, operation.prescale);
        }
    }

    /// As [`Engine::load`], of inputs that follow each other.
    pub(crate) fn load_parts<'a>(
        &mut self,
        operation: &Operation,
        parts: impl Iterator<Item = &'a [u8]>,
    ) {
        let Some(span) = self.schedule.input else {
            return;
        };
        let size = element_size(operation);
        let given = operation.dtype.map_or(1, crate::DType::size);
        let place = &mut self.work.bytes_mut()[span.start * size..span.end() * size];
        let mut at = 0;
        for part in parts {
            let end = at + part.len() / given * size;
            convert_in(operation, &mut place[at..end], part);
            at = end;
        }
        if let (Some(dtype), true) = (operation.wire_type(), operation.reduce.is_some()) {
            reduce::scale(dtype, place, operation.prescale);
        }
    }

    /// The input of a rank that has no data: what changes nothing.
    pub(crate) fn load_neutral(&mut self, operation: &Operation) {
        let Some(span) = self.schedule.input else {
            return;
        };
        let size = element_size(operation);
        let place = &mut self.work.bytes_mut()[span.start * size..span.end() * size];
        match (operation.wire_type(), operation.reduce) {
            (Some(dtype), Some(op)) => reduce::fill_neutral(dtype, op, place),
            _ => place.fill(0),
        }
    }

    /// A stretch of the result, from one element to before another one, as it travelled. It lies in one piece, as the
    /// results of all reductions on all elements do.
    pub(crate) fn result(&self, operation: &Operation, from: usize, to: usize) -> &[u8] {
        let size = element_size(operation);
        let start = self.schedule.outputs.first().map_or(0, |output| output.from.start);
        &self.work.bytes()[(start + from) * size..(start + to) * size]
    }

    /// Copies the result to the caller. `T` is the type of the operation that was planned last.
    pub(crate) fn store<T: Element>(&self, operation: &Operation, result: &mut [T]) {
        let size = element_size(operation);
        for output in &self.schedule.outputs {
            let from = &self.work.bytes()[output.from.start * size..output.from.end() * size];
            let into = &mut result[output.to..output.to + output.from.len];
            element::store(into, operation.wire, from);
        }
    }

    /// Takes a lane that has come, or the news that none comes, which it returns. A new peer is told `notices`.
    pub(crate) fn arrive(&mut self, arrival: Arrival, notices: &[u8]) -> Result<(), LaneError> {
        let link = &mut self.links[arrival.rank as usize];
        match arrival.lane {
            Ok(lane) => {
                tracing::debug!(peer = arrival.rank, lane = lane.kind(), "a link is up");
                link.install(lane);
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
                let link = &self.links[peer as usize];
                let gone = link.ended.as_ref().is_some_and(|ended| ended.is_final);
                let idle = !link.is_up() && !link.connecting && !gone;
                if peer != self.me && idle && self.dials(peer) {
                    self.links[peer as usize].connecting = true;
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
        let mut found = Vec::new();
        for peer in (0..self.world).filter(|peer| *peer != self.me) {
            let link = &self.links[peer as usize];
            let broken = link.ended.as_ref().is_some_and(|ended| !ended.is_final);
            if broken && !link.is_up() && !link.connecting && self.dials(peer) {
                self.links[peer as usize].connecting = true;
                found.push(peer);
            }
        }
        found
    }

    /// Begins to make or await shared memory.
    pub(crate) fn form(&mut self, job: JobId) {
        let owner = Owner {
            job,
            generation: self.generation,
            world: self.world,
        };
        self.shm.form(self.me, owner);
    }

    /// Says something about shared memory to one rank or to all that are linked. Returns the frame.
    pub(crate) fn say(&mut self, share: Share, peer: Option<u32>) -> Vec<u8> {
        let generation = self.generation;
        let frame = Header::Share { generation, share }.encode();
        match peer {
            Some(peer) => self.links[peer as usize].notify(&frame),
            None => {
                for link in &mut self.links {
                    link.notify(&frame);
                }
            }
        }
        frame.to_vec()
    }

    /// Forgets the schedule.
    pub(crate) fn unplan(&mut self) {
        self.schedule.clear();
        self.made_for = None;
    }

    /// Whether a certain algorithm is asked for.
    pub(crate) fn is_forced(&self) -> bool {
        self.choices.tuning().force.is_some()
    }

    /// The version of the settings that are in use.
    pub(crate) fn settings(&self) -> u64 {
        self.settings
    }

    /// What wakes a thread in [`Engine::sleep_shared`].
    pub(crate) fn shared_waker(&self) -> Waker {
        match &self.shm {
            Sharing::Active(arena) => arena.waker.clone(),
            _ => Waker::noop().clone(),
        }
    }

    /// Looks for what is awaited in shared memory for a while, and sleeps until it may be there.
    pub(crate) fn sleep_shared(&mut self, until: Instant) {
        if let Some(arena) = self.shm.active()
            && !arena.linger()
        {
            arena.sleep(until);
        }
    }

    /// Whether an operation is under way in shared memory.
    pub(crate) fn is_in_shared(&self) -> bool {
        matches!(&self.shm, Sharing::Active(arena) if arena.is_open())
    }

    /// Whether an operation only begins in shared memory. Then its algorithm counts.
    pub(crate) fn goes_over_links(&self, operation: &Operation, forced: bool) -> bool {
        matches!(&self.shm, Sharing::Active(arena) if arena.only_agrees(operation, forced, &self.offsets))
    }

    /// Whether nobody wakes this rank when it can go on in shared memory.
    pub(crate) fn must_poll(&self) -> bool {
        matches!(&self.shm, Sharing::Active(arena) if arena.must_poll())
    }

    /// Whether the operation in shared memory can't end without a rank.
    pub(crate) fn lacks(&self, rank: u32) -> bool {
        matches!(&self.shm, Sharing::Active(arena) if arena.lacks(rank))
    }

    /// The ranks that are waited for in shared memory.
    pub(crate) fn late_in_shared(&self) -> Vec<Rank> {
        match &self.shm {
            Sharing::Active(arena) => arena.late(),
            _ => Vec::new(),
        }
    }

    /// Gives the operation in shared memory up.
    pub(crate) fn leave_shared(&mut self) {
        if let Some(arena) = self.shm.active() {
            arena.ignore();
            arena.give_up();
        }
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
            .poll_flush(&mut Context::from_waker(Waker::noop()))
            .is_pending()
        {
            tracing::trace!("a peer does not read yet");
        }
    }

    /// Ends the links whose peers have not read for too long.
    pub(crate) fn end_slow_links(&mut self) {
        for link in &mut self.links {
            if link.has_backlog() {
                link.end("the peer does not read what it is sent".to_owned());
            }
        }
    }

    /// Tells every linked peer something about an operation. Returns the frame, for peers to come.
    pub(crate) fn tell(&mut self, tag: Tag, cause: &Cause) -> Vec<u8> {
        let text = cause.encode();
        let header = Header::AbortOperation {
            generation: self.generation,
            tag,
            length: text.len() as u32,
        };
        let frame = frame(&header, &text);
        self.notify_all(&frame);
        frame
    }

    pub(crate) fn has_backlog(&self) -> bool {
        self.links.iter().any(Link::has_backlog)
    }

    /// Gives the memory of buffers back.
    pub(crate) fn release(&mut self) {
        self.work.release();
        if let Some(arena) = self.shm.active() {
            arena.release();
        }
        for link in &mut self.links {
            link.stage.release();
        }
    }
}

fn fill_offsets(
    offsets: &mut Vec<usize>,
    counts: impl IntoIterator<Item = usize>,
) -> Option<usize> {
    offsets.clear();
    offsets.push(0);
    let mut total = 0_usize;
    for count in counts {
        total = total.checked_add(count)?;
        offsets.push(total);
    }
    Some(total)
}

/// Copies elements to the working buffer, as they travel.
fn convert_in(operation: &Operation, place: &mut [u8], input: &[u8]) {
    match (operation.dtype, operation.wire) {
        (Some(dtype), Some(wire)) => reduce::convert(wire, place, dtype, input),
        _ => place.copy_from_slice(input),
    }
}

/// Bytes of an element; a barrier has none to speak of.
pub(crate) fn element_size(operation: &Operation) -> usize {
    match operation.kind {
        // The type is the caller's, so that a mismatch is seen here; the lengths themselves are `u64`.
        OperationKind::AllGatherCounts => size_of::<u64>(),
        _ => operation.wire_type().map_or(1, crate::DType::size),
    }
}

/// What is done to combined values.
pub(crate) fn finish_of(operation: &Operation, world: u32) -> Option<Finish> {
    let op = operation.reduce?;
    Some(Finish::of(op, world, operation.postscale))
}

/// The frame that says that a rank takes part in no more operations of a call.
pub(crate) fn call_notice(generation: Generation, call: u64, cause: &Cause) -> Vec<u8> {
    let text = cause.encode();
    let header = Header::AbortCall {
        generation,
        call,
        length: text.len() as u32,
    };
    frame(&header, &text)
}

/// A frame of a header and its payload.
fn frame(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut frame = header.encode().to_vec();
    frame.extend_from_slice(payload);
    frame
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
