//! The right to run operations, and running them.

use std::borrow::BorrowMut;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;
use tokio::sync::MutexGuard;

use super::GroupCore;
use super::shared_memory::{Given, Shared};
use crate::blocking::Alarm;
use crate::cause::Cause;
use crate::copy;
use crate::driver::engine::Engine;
use crate::driver::{Driver, InPlace, TimeLimit};
use crate::element::{self, DType, Element};
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind, Tag};
use crate::record::{Begun, Moved, ShortName};
use crate::shm::arena::Own;

/// The right to run operations, until it is dropped.
#[derive(Debug)]
pub(crate) struct OpGuard<'a> {
    pub(super) inner: &'a Arc<GroupCore>,
    pub(super) engine: MutexGuard<'a, Engine>,
    /// What ran last, or is to run.
    pub(crate) operation: Operation,
    /// Its name, if it has one.
    pub(crate) name: ShortName,
    /// When it was asked for.
    pub(crate) asked: Instant,
    /// The operation that has begun and goes on, in the flight recorder.
    pub(super) recorded: Option<Begun>,
    pub(super) limit: TimeLimit,
    pub(super) timeout: Duration,
    /// The result is in [`Engine::packed`].
    pub(super) in_packed: bool,
    /// Nothing went wrong, and nothing is left to be done.
    pub(super) quick: bool,
}

/// Where an operation over links works, and when it is done.
enum Way<'a> {
    /// In the engine's buffer.
    Buffered,
    InPlace(InPlace<'a>),
    /// In the engine's buffer, until the receiver has taken what is sent.
    UntilTaken,
}

impl OpGuard<'_> {
    /// Runs one operation, whose algorithm is not chosen yet.
    pub(crate) async fn run<A: Alarm>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        operation: Operation,
        input: &[u8],
    ) -> Result<(), CollectiveError> {
        if self
            .share(alarm, tag, operation, Given::Input(input))
            .await?
            == Shared::Done
        {
            return Ok(());
        }
        let load = |engine: &mut Engine, operation: &Operation| engine.load(operation, input);
        self.run_over_links(alarm, tag, operation, load)
            .await
            .map(drop)
    }

    /// As [`OpGuard::run`], from the first of two ranks to the second. It is done when that one has [said](OpGuard::give_word) that it
    /// takes what came.
    pub(crate) async fn run_until_taken<A: Alarm>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        operation: Operation,
        input: &[u8],
    ) -> Result<(), CollectiveError> {
        let load = |engine: &mut Engine, operation: &Operation| engine.load(operation, input);
        self.run_loaded(alarm, tag, operation, Way::UntilTaken, load)
            .await
            .map(drop)
    }

    /// Says that this rank takes what came in the operation that ran last.
    pub(crate) fn give_word(&mut self, tag: Tag) {
        let operation = self.operation;
        self.engine.give_word(tag, operation);
    }

    /// As [`OpGuard::run`], of a buffer that is to hold the result (of a reduce, on the root). Without `stores` it stays as it is. If a broadcast fails, it may
    /// hold a part of the result on ranks that are not the root.
    pub(crate) async fn run_in_place<A: Alarm, T: Element>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        operation: Operation,
        data: &mut [T],
        stores: bool,
    ) -> Result<(), CollectiveError> {
        let is_root = operation.root == Some(self.inner.me);
        let given = match operation.kind {
            OperationKind::Broadcast if !is_root => match element::bytes_of_mut(data) {
                Some(data) => Given::Both(&[], data),
                None => Given::Input(&[]),
            },
            OperationKind::AllReduce | OperationKind::Reduce => match element::bytes_of_mut(data) {
                Some(data) => Given::InPlace(data),
                None => Given::Input(element::bytes_of(data)),
            },
            _ => Given::Input(element::bytes_of(data)),
        };
        if self.is_result(&operation) {
            return self.run_alone(alarm, tag, operation).await;
        }
        if self.share(alarm, tag, operation, given).await? == Shared::Not {
            let done = self
                .run_over_links_in_place(alarm, tag, operation, data)
                .await?;
            if done {
                return Ok(());
            }
        }
        if stores {
            self.store_over(data);
        }
        Ok(())
    }

    /// As [`OpGuard::run`], with a buffer for the result alone. If it fails, that may hold anything.
    pub(crate) async fn run_into<A: Alarm, T: Element>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        mut operation: Operation,
        data: &[T],
        result: &mut [T],
    ) -> Result<(), CollectiveError> {
        if self.is_result(&operation) && data.len() == result.len() {
            self.run_alone(alarm, tag, operation).await?;
            result.copy_from_slice(data);
            return Ok(());
        }
        let input = element::bytes_of(data);
        let given = match element::bytes_of_mut(result) {
            Some(result) => Given::Both(input, result),
            None => Given::Input(input),
        };
        if self.share(alarm, tag, operation, given).await? == Shared::Done {
            self.store_with(input, result);
            return Ok(());
        }
        self.plan(tag, &mut operation)?;
        let schedule = &self.engine.schedule;
        let as_it_is = self.travels_as_given(&operation) && operation.prescale.is_one();
        let size = size_of::<T>();
        if as_it_is
            && schedule.is_into(result.len())
            && let Some(result) = element::bytes_of_mut(result)
        {
            if let Some(own) = schedule.input {
                copy::slice(input, &mut result[own.start * size..own.end() * size]);
            }
            let place = Way::InPlace(InPlace::into_result(result));
            self.run_planned(alarm, tag, operation, place).await?;
        } else if as_it_is
            && let Some(written) = schedule.is_apart(data.len(), result.len())
            && let Some(result) = element::bytes_of_mut(result)
        {
            // What comes is added to that, or it is all that comes of the input.
            for output in &schedule.outputs {
                let from = output.from.start * size..output.from.end() * size;
                if from.end <= input.len() {
                    let to = output.to * size;
                    copy::slice(&input[from.clone()], &mut result[to..to + from.len()]);
                }
            }
            let place = InPlace::apart(input, result, written.start * size);
            self.run_planned(alarm, tag, operation, Way::InPlace(place))
                .await?;
        } else {
            self.make_room(tag, &operation)?;
            self.engine.load(&operation, input);
            self.run_planned(alarm, tag, operation, Way::Buffered)
                .await?;
            self.store(result);
        }
        Ok(())
    }

    /// Whether what is given is the result: in a world of one, of values that stay as they are.
    fn is_result(&self, operation: &Operation) -> bool {
        self.inner.world == 1
            && operation.wire.is_none()
            && operation.prescale.is_one()
            && operation.postscale.is_one()
    }

    /// As [`OpGuard::run`], of an operation for which there is [nothing to do](OpGuard::is_result).
    async fn run_alone<A: Alarm>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        operation: Operation,
    ) -> Result<(), CollectiveError> {
        self.run_over_links(alarm, tag, operation, |_, _| ())
            .await
            .map(drop)
    }

    /// Whether other ranks see the bytes that the caller gave, and whose are any bytes.
    fn travels_as_given(&self, operation: &Operation) -> bool {
        self.inner.world > 1
            && operation.wire.is_none()
            && operation.dtype.is_some_and(|dtype| dtype != DType::Bool)
    }

    /// As [`OpGuard::run`], of an input in several parts. Returns whether there is a result, or the parts are that already.
    pub(crate) async fn run_parts<'a, A: Alarm, I: Iterator<Item = &'a [u8]>>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        operation: Operation,
        parts: impl Fn() -> I,
    ) -> Result<bool, CollectiveError> {
        if self.is_result(&operation) {
            self.run_alone(alarm, tag, operation).await?;
            return Ok(false);
        }
        if self.inner.world > 1 && self.engine.may_share() {
            // In one piece, which the result becomes.
            let mut packed = std::mem::take(&mut self.engine.packed);
            let bytes = parts().map(<[u8]>::len).sum();
            if !packed.try_reserve(bytes) {
                self.operation = operation;
                let reason = format!("{operation}: {bytes} bytes to pack it in do not fit memory");
                return Err(self.refuse(tag, CollectiveError::Invalid { reason }));
            }
            let mut end = 0;
            for part in parts() {
                copy::slice(part, &mut packed.bytes_mut()[end..end + part.len()]);
                end += part.len();
            }
            let given = Given::Scratch(&mut packed.bytes_mut()[..end]);
            let shared = self.share(alarm, tag, operation, given).await;
            if let (Ok(Shared::Done), Some(arena)) = (&shared, self.engine.shm.active()) {
                let length = operation.count as usize * operation.element_size();
                arena.store_packed(&mut packed.bytes_mut()[..length]);
            }
            self.engine.packed = packed;
            self.in_packed = shared? == Shared::Done;
            if self.in_packed {
                return Ok(true);
            }
        }
        let load = |engine: &mut Engine, operation: &Operation| {
            engine.load_parts(operation, parts());
        };
        self.run_over_links(alarm, tag, operation, load)
            .await
            .map(|_| true)
    }

    /// As [`OpGuard::run`]; `load` puts the input in its place. Returns what the others ask for, if this is a
    /// [join](Operation::JOIN) and some have data still: then nothing was done.
    pub(crate) async fn run_with<A: Alarm>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        operation: Operation,
        load: impl FnOnce(&mut Engine, &Operation),
    ) -> Result<Option<Operation>, CollectiveError> {
        self.share(alarm, tag, operation, Given::Nothing).await?;
        self.run_over_links(alarm, tag, operation, load).await
    }

    /// As [`OpGuard::run_with`], whether memory is shared or not.
    pub(crate) async fn run_over_links<A: Alarm>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        operation: Operation,
        load: impl FnOnce(&mut Engine, &Operation),
    ) -> Result<Option<Operation>, CollectiveError> {
        self.run_loaded(alarm, tag, operation, Way::Buffered, load)
            .await
    }

    async fn run_loaded<A: Alarm>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        mut operation: Operation,
        way: Way<'_>,
        load: impl FnOnce(&mut Engine, &Operation),
    ) -> Result<Option<Operation>, CollectiveError> {
        self.plan(tag, &mut operation)?;
        self.make_room(tag, &operation)?;
        load(&mut self.engine, &operation);
        self.run_planned(alarm, tag, operation, way).await
    }

    /// Returns whether `data` holds the result; if not, it has to be [stored](OpGuard::store).
    async fn run_over_links_in_place<A: Alarm, T: Element>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        mut operation: Operation,
        data: &mut [T],
    ) -> Result<bool, CollectiveError> {
        self.plan(tag, &mut operation)?;
        let schedule = &self.engine.schedule;
        let suits = self.travels_as_given(&operation) && schedule.is_in_place(data.len());
        let is_input =
            operation.kind != OperationKind::Broadcast || operation.root == Some(self.inner.me);
        let keeps = is_input && schedule.is_writing();
        if keeps || !suits {
            self.make_room(tag, &operation)?;
        }
        if suits && let Some(data) = element::bytes_of_mut(data) {
            let place = Way::InPlace(InPlace::over(data, keeps));
            self.run_planned(alarm, tag, operation, place).await?;
            return Ok(true);
        }
        self.engine.load(&operation, element::bytes_of(data));
        self.run_planned(alarm, tag, operation, Way::Buffered)
            .await?;
        Ok(false)
    }

    /// Chooses how to do an operation, and gets ready for it.
    fn plan(&mut self, tag: Tag, operation: &mut Operation) -> Result<(), CollectiveError> {
        self.operation = *operation;
        if let Err(error) = operation.check(self.inner.world) {
            let reason = format!("{operation}: {error}");
            return Err(self.refuse(tag, CollectiveError::Invalid { reason }));
        }
        {
            let state = self.inner.signals.lock();
            self.engine.settle(&state.choice);
        }
        self.engine.choose(operation);
        self.operation = *operation;
        self.engine
            .plan(operation)
            .map_err(|error| self.refuse(tag, error))
    }

    /// Gets memory for an operation that does not work in the caller's buffers alone.
    fn make_room(&mut self, tag: Tag, operation: &Operation) -> Result<(), CollectiveError> {
        self.engine
            .make_room(operation)
            .map_err(|error| self.refuse(tag, error))
    }

    async fn run_planned<A: Alarm>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        operation: Operation,
        way: Way<'_>,
    ) -> Result<Option<Operation>, CollectiveError> {
        let inner = self.inner;
        let recording = self.recording(tag, operation);
        let eager = self.engine.has_processors();
        let connect = |peer| inner.connect(peer);
        let mut run = Driver::new(
            &mut self.engine,
            inner.place(&connect),
            operation,
            tag,
            &mut self.limit,
        );
        match way {
            Way::Buffered => {}
            Way::InPlace(place) => run = run.in_place(place),
            Way::UntilTaken => run = run.until_taken(),
        }
        alarm.be_eager(eager);
        let result = drive(&mut run, alarm).await;
        alarm.be_eager(false);
        drop(run);
        recording.end(&mut self.engine, result.is_ok());
        result.map_err(|error| self.failed(tag, error))
    }

    /// The error for the caller. Whoever asks the communicator of all ranks for the last failure hears of it, too.
    pub(super) fn failed(&self, tag: Tag, error: CollectiveError) -> CollectiveError {
        self.inner.tell_named(&error);
        let error = self.inner.outward(error);
        self.inner.rank_shared.failed(tag.call, &error);
        error
    }

    /// The time limit begins anew.
    pub(crate) fn renew(&mut self) {
        let now = Instant::now();
        self.limit = TimeLimit::new(now, now + self.timeout);
    }

    /// Takes the number of one more operation.
    pub(crate) fn next_number(&mut self) -> Tag {
        self.inner.signals.lock().take_number()
    }

    /// Whether operations of this call still have a sense.
    pub(crate) fn call_goes_on(&self, call: u64) -> bool {
        let state = self.inner.signals.lock();
        state.call == call && state.call_failed.is_none() && state.lost.is_empty()
    }

    /// A stretch of the result of the operation that ran last.
    pub(crate) fn result(&self, from: usize, to: usize) -> &[u8] {
        if self.in_packed {
            let size = self.operation.element_size();
            return &self.engine.packed.bytes()[from * size..to * size];
        }
        self.engine.result(&self.operation, from, to)
    }

    /// Where the shares begin of the operation that ran last, or of the next one.
    pub(crate) fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Copies the result of the operation that ran last.
    pub(crate) fn store<T: Element>(&mut self, into: &mut [T]) {
        self.store_own(Own::Given, into);
    }

    /// As [`OpGuard::store`], of an operation that began with this input: so it need not be where it was given.
    pub(crate) fn store_with<T: Element>(&mut self, input: &[u8], into: &mut [T]) {
        self.store_own(Own::At(input), into);
    }

    /// As [`OpGuard::store`], over the input if it is a reduction.
    pub(crate) fn store_over<T: Element>(&mut self, data: &mut [T]) {
        self.store_own(Own::InResult, data);
    }

    fn store_own<T: Element>(&mut self, own: Own<'_>, into: &mut [T]) {
        let Engine { shm, offsets, .. } = &mut *self.engine;
        match shm.active().filter(|arena| arena.is_open()) {
            Some(arena) => arena.store(offsets, own, into),
            None => self.engine.store(&self.operation, into),
        }
    }

    /// Does not run an operation because the one before it failed, and tells the peers so.
    pub(crate) fn skip(&mut self, tag: Tag) {
        let failure = self.inner.signals.lock().last_failure.clone();
        if let Some(error) = failure {
            self.tell(tag, &error);
        }
    }

    /// Does not run an operation, and tells the peers why.
    pub(crate) fn refuse(&mut self, tag: Tag, error: CollectiveError) -> CollectiveError {
        drop(self.recording(tag, self.operation));
        self.tell_refused(tag, error)
    }

    /// As [`OpGuard::refuse`], of an operation that this rank has not: it is in no record.
    pub(crate) fn tell_refused(&mut self, tag: Tag, error: CollectiveError) -> CollectiveError {
        self.tell(tag, &error);
        self.failed(tag, error)
    }

    fn tell(&mut self, tag: Tag, error: &CollectiveError) {
        let cause = Cause::of(error, Rank(self.inner.me));
        let notice = self.engine.tell(tag, &cause);
        self.engine.flush_notices();
        self.inner.signals.failed(tag, error, notice);
    }
}

impl<'a> OpGuard<'a> {
    /// The record of an operation, which it may have already.
    pub(super) fn recording(&mut self, tag: Tag, operation: Operation) -> Recording<'a> {
        let inner = self.inner;
        let recorder = &inner.rank_shared.recorder;
        let begun = if let Some(begun) = self.recorded.take() {
            recorder.goes_on(begun, operation)
        } else {
            let times = (self.asked, Instant::now());
            recorder.begin((inner.id, tag), operation, self.name, times)
        };
        Recording { inner, begun }
    }
}

/// Polls a run to its end.
pub(super) async fn drive<'a, A: Alarm>(
    mut run: impl BorrowMut<Driver<'a>>,
    alarm: &mut A,
) -> Result<Option<Operation>, CollectiveError> {
    let run = run.borrow_mut();
    let mut fired = false;
    poll_fn(|cx| {
        loop {
            if let Poll::Ready(result) = run.poll(cx, fired) {
                return Poll::Ready(result);
            }
            fired = alarm.poll_at(run.wake_at(), cx).is_ready();
            if !fired {
                return Poll::Pending;
            }
        }
    })
    .await
}

/// An operation in the flight recorder. One that is dropped has failed.
pub(super) struct Recording<'a> {
    pub(super) inner: &'a Arc<GroupCore>,
    pub(super) begun: Begun,
}

impl Recording<'_> {
    /// It goes on, and [is taken up](OpGuard::recording) there.
    pub(super) fn pass_on(self) -> Begun {
        let begun = self.begun;
        std::mem::forget(self);
        begun
    }

    pub(super) fn end(self, engine: &mut Engine, well: bool) {
        self.end_with(engine, well, None);
    }

    /// It has ended in shared memory. What was said on the links meanwhile counts, too.
    pub(super) fn end_shared(self, engine: &mut Engine, well: bool) {
        let own = self.inner.job_rank(self.inner.me);
        self.end_with(engine, well, Some(("shm", own, Moved::default())));
    }

    fn end_with(self, engine: &mut Engine, well: bool, more: Option<(&'static str, u32, Moved)>) {
        let inner = self.inner;
        let moved = (0..).zip(&mut engine.links).filter_map(|(peer, link)| {
            let (kind, moved) = link.take_moved()?;
            Some((kind, inner.job_rank(peer), moved))
        });
        let recorder = &inner.rank_shared.recorder;
        recorder.end(self.begun, well, moved.chain(more));
        std::mem::forget(self);
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        let recorder = &self.inner.rank_shared.recorder;
        recorder.end(self.begun, false, std::iter::empty());
    }
}

impl Drop for OpGuard<'_> {
    fn drop(&mut self) {
        // Of an operation that has no result here.
        if let Some(arena) = self.engine.shm.active() {
            arena.leave();
        }
        if self.quick {
            return;
        }
        if let Some(begun) = self.recorded {
            // Nobody went on with it.
            let recorder = &self.inner.rank_shared.recorder;
            recorder.end(begun, false, std::iter::empty());
        }
        let pending = self.inner.signals.lock().needs_attendant();
        if pending || self.engine.has_backlog() {
            self.inner.attend();
        }
    }
}
