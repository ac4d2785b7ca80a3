//! Operations of ranks that share memory: how they begin, and the short way of those that end at once.

use std::sync::Arc;
use std::time::Instant;

use kolo_transport::ids::Rank;

use super::{GroupCore, OpGuard, drive};
use crate::blocking::Alarm;
use crate::driver::engine::Engine;
use crate::driver::{Driver, TimeLimit};
use crate::element::{self, Element};
use crate::error::CollectiveError;
use crate::handle::Progress;
use crate::operation::{Operation, OperationKind, Tag};
use crate::options::Options;
use crate::shm::arena::{Arena, Outcome};
use crate::shm::buffer::{Buffers, SharedBuffer};
use crate::shm::map::MOST_RANKS;
use crate::shm::setup::Sharing;
use crate::times::FOREVER;

/// What an operation is given.
#[derive(Debug)]
pub(super) enum Given<'a> {
    Input(&'a [u8]),
    /// Also where the result goes, for operations that are done [piece by piece](Arena::streams).
    Both(&'a [u8], &'a mut [u8]),
    /// Input and result, which is to be as it was if the operation fails.
    InPlace(&'a mut [u8]),
    /// As [`Given::InPlace`], but it may be anything if the operation fails.
    Scratch(&'a mut [u8]),
    /// Halves of a buffer in shared memory, and what is in the one that the caller has.
    Buffers(Buffers, &'a [u8]),
    /// It goes over the links.
    Nothing,
}

impl Given<'_> {
    /// What is read alone, and what is written while the operation is under way, or both read and written.
    fn parts(&mut self, streams: bool) -> (&[u8], &mut [u8]) {
        match self {
            Self::Input(input) | Self::Buffers(_, input) => (input, &mut []),
            Self::Both(input, result) => (input, result),
            Self::InPlace(data) | Self::Scratch(data) => {
                if streams {
                    (&[], data)
                } else {
                    (data, &mut [])
                }
            }
            Self::Nothing => (&[], &mut []),
        }
    }
}

/// Whether an operation was done in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shared {
    Done,
    /// It is to be done over the links.
    Not,
}

/// How far the short way led.
#[derive(Debug)]
pub(crate) enum Quick<'a> {
    /// To the end: the result can be stored.
    Done(OpGuard<'a>),
    /// It has begun: [`OpGuard::resume`].
    Begun(OpGuard<'a>, Tag),
    /// It can't be done here, and the others know.
    Failed(CollectiveError),
    /// Nowhere: nothing was done.
    No,
}

impl GroupCore {
    /// Begins an operation in shared memory, and waits a little for its end, if nothing at all stands in the way: no
    /// other operation, no news, no failure. Allocates nothing.
    #[inline]
    pub(crate) fn quick<'a>(
        self: &'a Arc<Self>,
        operation: &Operation,
        options: &Options,
        input: &[u8],
    ) -> Quick<'a> {
        let plan = |arena: &Arena, offsets: &[usize]| arena.plan_short(operation, offsets);
        self.quick_with(operation, options, input, plan, |arena, tag, plan| {
            arena.begin_planned(tag, operation, plan, input, &mut [])
        })
    }

    /// As [`GroupCore::quick`], of buffers in the memory.
    pub(crate) fn quick_buffers<'a, T: Element>(
        self: &'a Arc<Self>,
        operation: &Operation,
        options: &Options,
        buffer: &SharedBuffer<T>,
    ) -> Quick<'a> {
        let halves = |arena: &Arena, _: &[usize]| buffer.halves(arena.map());
        let input = element::bytes_of(buffer);
        self.quick_with(operation, options, input, halves, |arena, tag, halves| {
            arena.begin_buffers(tag, operation, halves, input)
        })
    }

    /// `plan` says how it is done, if it suits.
    #[inline]
    fn quick_with<'a, P>(
        self: &'a Arc<Self>,
        operation: &Operation,
        options: &Options,
        input: &[u8],
        plan: impl FnOnce(&Arena, &[usize]) -> Option<P>,
        begin: impl FnOnce(&mut Arena, Tag, P) -> Result<Outcome, CollectiveError>,
    ) -> Quick<'a> {
        if self.progress.get().and_then(Progress::ahead).is_some() {
            return Quick::No;
        }
        let Ok(mut engine) = self.engine.try_lock() else {
            return Quick::No;
        };
        let (settings, forced, hasty) = (engine.settings(), engine.is_forced(), engine.is_hasty);
        let Engine { shm, offsets, .. } = &mut *engine;
        let Some(arena) = shm.active() else {
            return Quick::No;
        };
        let is_valid = operation.check(self.world).is_ok()
            && operation.root.is_none_or(|root| root < self.world);
        if forced || !is_valid || hasty || arena.is_told() {
            return Quick::No;
        }
        let Some(plan) = plan(arena, offsets) else {
            return Quick::No;
        };
        let started = Instant::now();
        let asked = options.asked.unwrap_or(started);
        let (tag, timeout) = {
            let mut state = self.signals.lock();
            if !state.is_calm(settings) {
                return Quick::No;
            }
            (state.take_number(), state.timeout)
        };
        let begun = begin(arena, tag, plan);
        // What the others give is on its way: what else there is to do costs no time now.
        self.listener.disturb();
        let mut turn = OpGuard {
            inner: self,
            engine,
            operation: *operation,
            name: options.name,
            asked,
            recorded: None,
            limit: TimeLimit::new(started, started),
            timeout: timeout.min(FOREVER),
            in_packed: false,
            quick: true,
        };
        if let Err(error) = begun {
            turn.quick = false;
            return Quick::Failed(turn.refuse(tag, error));
        }
        let recorder = &self.rank_shared.recorder;
        let (place, times) = ((self.id, tag), (asked, started));
        let arena = turn.engine.shm.active();
        let looked = arena.map(|arena| arena.look(input, &mut []));
        if matches!(looked, Some(Ok(Outcome::Ready))) {
            turn.engine.passes(tag, *operation);
            recorder.done(place, *operation, options.name, times);
            return Quick::Done(turn);
        }
        turn.recorded = Some(recorder.begin(place, *operation, options.name, times));
        turn.quick = false;
        turn.renew();
        Quick::Begun(turn, tag)
    }
}

impl OpGuard<'_> {
    /// Waits for the end of an operation that [has begun](Quick::Begun). Returns where it was done.
    pub(crate) async fn resume<A: Alarm>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        input: &[u8],
    ) -> Result<Shared, CollectiveError> {
        let operation = self.operation;
        let shared = self
            .wait_shared(alarm, tag, operation, (input, &mut []))
            .await?;
        if shared == Shared::Not {
            let load = |engine: &mut Engine, operation: &Operation| engine.load(operation, input);
            self.run_over_links(alarm, tag, operation, load).await?;
        }
        Ok(shared)
    }

    /// As [`OpGuard::run`], of buffers in shared memory. Returns where it was done; `None` if the buffer is not in this memory: then
    /// nothing was done.
    pub(crate) async fn run_buffers<A: Alarm, T: Element>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        operation: Operation,
        buffer: &SharedBuffer<T>,
    ) -> Result<Option<Shared>, CollectiveError> {
        if self.engine.shm.is_unsettled() {
            self.form(alarm, tag, operation).await?;
        }
        let forced = self.engine.is_forced();
        let halves = match self.engine.shm.active().filter(|_| !forced) {
            Some(arena) => buffer.halves(arena.map()),
            None => None,
        };
        let Some(halves) = halves else {
            return Ok(None);
        };
        let given = Given::Buffers(halves, element::bytes_of(buffer));
        let shared = self.share(alarm, tag, operation, given).await?;
        if shared == Shared::Not {
            let load = |engine: &mut Engine, operation: &Operation| {
                engine.load(operation, element::bytes_of(buffer));
            };
            self.run_over_links(alarm, tag, operation, load).await?;
        }
        Ok(Some(shared))
    }

    /// Leaves the operation in shared memory that ran last, whose result needs no copy.
    pub(crate) fn leave(&mut self) {
        if let Some(arena) = self.engine.shm.active() {
            arena.leave();
        }
    }

    /// A buffer in shared memory, after an operation of all ranks.
    pub(crate) fn buffer<T: Element>(
        &mut self,
        len: usize,
    ) -> Result<SharedBuffer<T>, CollectiveError> {
        match self.engine.shm.active() {
            Some(arena) if SharedBuffer::<T>::can_be_shared() => arena.buffer(len),
            _ => SharedBuffer::private(len),
        }
    }

    /// Whether all ranks share memory; it is settled by the first operation that asks.
    async fn form<A: Alarm>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        operation: Operation,
    ) -> Result<(), CollectiveError> {
        let inner = self.inner;
        if matches!(self.engine.shm, Sharing::Unknown) {
            let ranks: Vec<Rank> = (0..inner.world)
                .map(|rank| Rank(inner.job_rank(rank)))
                .collect();
            let few = (2..=MOST_RANKS).contains(&inner.world);
            let Some(one_host) = few.then(|| inner.rank_shared.is_one_host(&ranks)).flatten()
            else {
                self.engine.shm = Sharing::Off;
                return Ok(());
            };
            self.engine.shm = Sharing::Asked;
            let weak = Arc::downgrade(inner);
            inner.rank_shared.handle.spawn(async move {
                let answer = one_host.await;
                if let Some(inner) = weak.upgrade() {
                    inner.signals.change(|state| state.one_host = Some(answer));
                }
            });
        }
        self.engine.unplan();
        let connect = |peer| inner.connect(peer);
        let place = inner.place(&connect);
        // Whoever asks what this rank does is told of the operation that it waits to begin.
        let recording = self.recording(tag, operation);
        let limit = &mut self.limit;
        let run = Driver::new(&mut self.engine, place, operation, tag, limit).forming();
        let result = drive(run, alarm).await;
        match result {
            Ok(_) => {
                self.recorded = Some(recording.pass_on());
                if let Some(arena) = self.engine.shm.active() {
                    let (members, me) = (inner.job_ranks(), inner.job_rank(inner.me));
                    inner
                        .rank_shared
                        .recorder
                        .shares(arena.map().moved(), members, me);
                }
                Ok(())
            }
            Err(error) => {
                recording.end(&mut self.engine, false);
                Err(self.failed(tag, error))
            }
        }
    }

    /// Does an operation in shared memory, if there is some and it can be done there.
    pub(super) async fn share<A: Alarm>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        mut operation: Operation,
        mut given: Given<'_>,
    ) -> Result<Shared, CollectiveError> {
        let none = operation.kind == OperationKind::SendReceive || self.inner.world == 1;
        if none || matches!(self.engine.shm, Sharing::Off) {
            return Ok(Shared::Not);
        }
        self.operation = operation;
        if let Err(error) = operation.check(self.inner.world) {
            let reason = format!("{operation}: {error}");
            return Err(self.refuse(tag, CollectiveError::Invalid { reason }));
        }
        if self.engine.shm.is_unsettled() {
            self.form(alarm, tag, operation).await?;
        }
        if self.engine.shm.active().is_none() {
            return Ok(Shared::Not);
        }
        let obstacle = {
            let state = self.inner.signals.lock();
            self.engine.settle(&state.choice);
            state.obstacle(tag)
        };
        if let Some(error) = obstacle {
            // What is given here could be all that the others wait for: the operation would end well after an abort.
            return Err(self.refuse(tag, error));
        }
        let forced = self.engine.is_forced() || matches!(given, Given::Nothing);
        let buffers = match given {
            Given::Buffers(buffers, _) => Some(buffers),
            _ => None,
        };
        if self.engine.goes_over_links(&operation, forced) {
            self.engine.choose(&mut operation);
        }
        let Engine { shm, offsets, .. } = &mut *self.engine;
        let Some(arena) = shm.active() else {
            return Ok(Shared::Not);
        };
        let streams = arena.streams(&operation);
        let keeps = matches!(given, Given::InPlace(_));
        let in_place = keeps || matches!(given, Given::Scratch(_));
        let (input, result) = given.parts(streams);
        let begun = match buffers {
            Some(buffers) if !forced => arena.begin_buffers(tag, &operation, buffers, input),
            _ if in_place && streams => {
                arena.begin_in_place(tag, &operation, forced, result, keeps)
            }
            _ => arena.begin(tag, &operation, forced, offsets, input, result),
        };
        match begun {
            Err(error) => Err(self.refuse(tag, error)),
            Ok(_) => {
                self.wait_shared(alarm, tag, operation, (input, result))
                    .await
            }
        }
    }

    /// Waits for the end of an operation that has begun in shared memory.
    async fn wait_shared<A: Alarm>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        operation: Operation,
        (input, result): (&[u8], &mut [u8]),
    ) -> Result<Shared, CollectiveError> {
        let inner = self.inner;
        self.operation = operation;
        let recording = self.recording(tag, operation);
        let waits = alarm.may_sleep() && !self.engine.is_hasty;
        let looked = match self.engine.shm.active() {
            Some(arena) if waits => arena.look(input, result),
            _ => Ok(Outcome::Pending),
        };
        let result = if matches!(looked, Ok(Outcome::Ready | Outcome::Elsewhere)) {
            self.engine.passes(tag, operation);
            Ok(())
        } else {
            self.engine.unplan();
            let connect = |peer| inner.connect(peer);
            let place = inner.place(&connect);
            let limit = &mut self.limit;
            let blocking = alarm.may_sleep();
            let run = Driver::new(&mut self.engine, place, operation, tag, limit)
                .shared_memory(blocking, input, result);
            if blocking {
                run.wait().map(drop)
            } else {
                drive(run, alarm).await.map(drop)
            }
        };
        let elsewhere = result.is_ok() && !self.engine.is_in_shared();
        if elsewhere {
            self.recorded = Some(recording.pass_on());
            return Ok(Shared::Not);
        }
        recording.end_shared(&mut self.engine, result.is_ok());
        match result {
            Ok(()) => Ok(Shared::Done),
            Err(error) => Err(self.failed(tag, error)),
        }
    }
}
