//! The generations of an elastic group, and the calls that span them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use bytes::Bytes;
use kolo_transport::ids::{CallId, Generation, ObjectId, Rank};
use kolo_transport::wire::{CallOp, GenerationTable, Outcome, RankFailure};
use tokio::sync::{Notify, broadcast, oneshot, watch};

use super::failure::CallError;
use super::group::{CHANGES, Group, Listener, Waiter};
use super::outbox::Permit;
use super::request::{Bodies, Request};
use super::spanning::{Process, SpanEffects, SpanTable};
use super::table::End;
use super::values::{Progress, Recovery, Value};

/// Generations that wait for a slow reader, at most.
const NEWS: usize = 64;

/// A change of the members of an elastic group, or the first members that its reader has heard of.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GenerationChange {
    /// The members from now on. The table has the generation's number and its cause in words.
    pub table: Arc<GenerationTable>,
    /// The number of ranks in the generation that was read before; 0 if this is the first that is read.
    pub before: usize,
    /// Ranks of the generation that was read before whose processes are not in this one.
    pub left: Vec<Rank>,
    /// Ranks of this generation whose processes were not in the one that was read before.
    pub joined: Vec<Rank>,
}

impl GenerationChange {
    pub(crate) fn new(before: Option<&GenerationTable>, table: Arc<GenerationTable>) -> Self {
        let missing_in = |of: &GenerationTable, there: Option<&GenerationTable>| {
            let there = there.map_or(&[][..], |table| &table.members);
            let is_new = |process| !there.iter().any(|other| Process::of(other) == process);
            let members = of.members.iter();
            let members = members.filter(|member| is_new(Process::of(member)));
            members.map(|member| member.rank).collect()
        };
        Self {
            before: before.map_or(0, |before| before.members.len()),
            left: before.map_or(Vec::new(), |before| missing_in(before, Some(&table))),
            joined: missing_in(&table, before),
            table,
        }
    }
}

/// The newest generation, and whether calls can be made there.
#[derive(Clone)]
pub(crate) struct Present {
    pub(crate) group: Arc<Group>,
    /// It takes no calls any more, and the next one has not come yet.
    pub(crate) is_over: bool,
    /// Why there are no more generations.
    pub(crate) ended: Option<End>,
}

struct State {
    spans: SpanTable<Waiter>,
    /// Generations that still have calls, and the present one.
    groups: BTreeMap<Generation, Arc<Group>>,
    /// Values of executables that have handles.
    values: BTreeMap<ObjectId, Arc<Value>>,
    /// Values that are being made. The present generation does not end between two calls before they have handles.
    making: BTreeMap<ObjectId, Generation>,
    /// Workers may have values.
    has_made: bool,
    /// Hears of each generation that takes calls. None at the end.
    news: Option<broadcast::Sender<Arc<GenerationTable>>>,
    /// A generation that is to end where that loses no work.
    offer: Option<Offer>,
    /// A generation that has ended so, until the head is told.
    holding: Option<Generation>,
    /// A generation with a node that is not reached, and why. The last one.
    unreachable: Option<(Generation, String)>,
}

/// A change that waits.
#[derive(Debug, Clone, Copy)]
struct Offer {
    /// The generation that ends then.
    generation: Generation,
    /// A value has committed since: what others have not is no reason to wait.
    at_commit: bool,
}

/// See the [module](self). Shared by the executor, its calls and the task of its job.
pub(crate) struct Generations {
    /// Calls that are made between two generations wait for the next.
    pub(crate) waits: bool,
    state: Mutex<State>,
    present: watch::Sender<Present>,
    /// Wakes the timer when there may be something earlier to wait for.
    timer: Notify,
    /// A generation may have no calls any more.
    idle: Notify,
    /// A generation has ended between two calls.
    held: Notify,
    /// A node is not reached.
    cut_off: Notify,
}

impl Generations {
    /// The first generation is made by `first`, which is given the place to refer back to.
    pub(crate) fn new(waits: bool, first: impl FnOnce(&Weak<Self>) -> Group) -> Arc<Self> {
        Arc::new_cyclic(|this| {
            let group = Arc::new(first(this));
            let table = Arc::clone(group.members());
            Self {
                waits,
                state: Mutex::new(State {
                    groups: BTreeMap::from([(table.generation, Arc::clone(&group))]),
                    spans: SpanTable::new(table),
                    values: BTreeMap::new(),
                    making: BTreeMap::new(),
                    has_made: false,
                    news: Some(broadcast::Sender::new(NEWS)),
                    offer: None,
                    holding: None,
                    unreachable: None,
                }),
                present: watch::Sender::new(Present {
                    group,
                    is_over: false,
                    ended: None,
                }),
                timer: Notify::new(),
                idle: Notify::new(),
                held: Notify::new(),
                cut_off: Notify::new(),
            }
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here leaves the state half changed by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest generation that takes calls, or has taken some.
    pub(crate) fn now(&self) -> Arc<Group> {
        Arc::clone(&self.present.borrow().group)
    }

    /// The last generation that has begun. Calls that span generations are given to its members; others are taken there once it is the
    /// present one.
    fn newest(&self, state: &State) -> Arc<Group> {
        let newest = state.groups.values().next_back();
        newest.cloned().unwrap_or_else(|| self.now())
    }

    pub(crate) fn present(&self) -> watch::Receiver<Present> {
        self.present.subscribe()
    }

    /// The present generation, and those that follow.
    pub(crate) fn changes(
        &self,
    ) -> (
        Arc<GenerationTable>,
        broadcast::Receiver<Arc<GenerationTable>>,
    ) {
        let state = self.lock();
        let later = match &state.news {
            Some(news) => news.subscribe(),
            None => broadcast::Sender::new(1).subscribe(),
        };
        (Arc::clone(self.now().members()), later)
    }

    /// Does what follows from an event.
    fn apply(&self, event: impl FnOnce(&mut SpanTable<Waiter>) -> SpanEffects<Waiter>) {
        let mut state = self.lock();
        let effects = event(&mut state.spans);
        self.carry_out(state, effects);
    }

    fn carry_out(&self, state: MutexGuard<'_, State>, effects: SpanEffects<Waiter>) {
        let newest = self.newest(&state);
        for (call, ranks) in effects.gives {
            if let Some((request, deadline, waiter)) = state.spans.request(call) {
                let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                newest.give(call, &ranks, request, left, waiter.permit());
            }
        }
        for (generation, call, rank) in effects.cancels {
            if let Some(group) = state.groups.get(&generation) {
                group.withdraw(call, vec![rank]);
            }
        }
        let is_busy = state.groups.len() > 1;
        drop(state);
        for completion in &effects.completions {
            if let Err(CallError::GenerationOver {
                generation, cause, ..
            }) = &completion.result
                && *generation == newest.generation()
            {
                newest.supersede(cause);
                self.is_over(*generation, false);
            }
        }
        if !effects.completions.is_empty() {
            self.between_calls();
        }
        Group::complete(effects.completions);
        if is_busy {
            self.idle.notify_one();
        }
        self.timer.notify_one();
    }

    /// Sends a call to all ranks, of this generation and those to come.
    pub(crate) fn span(
        &self,
        request: Request,
        permit: Permit,
    ) -> Result<(CallId, oneshot::Receiver<Bodies>), CallError> {
        request.check()?;
        let (sender, answer) = oneshot::channel();
        let waiter = Waiter::new(sender, permit);
        let mut state = self.lock();
        let newest = self.newest(&state);
        let call = newest.next_id();
        let effects = (state.spans).begin(Instant::now(), call, request, waiter)?;
        self.carry_out(state, effects);
        Ok((call, answer))
    }

    /// The head says that a rank of a generation is lost.
    pub(crate) fn reported_lost(&self, generation: Generation, failure: RankFailure) {
        let mut state = self.lock();
        let Some(group) = state.groups.get(&generation).cloned() else {
            return;
        };
        if let Some(process) = group.process(failure.rank) {
            state.spans.reported_lost(process, &failure);
        }
        drop(state);
        group.reported_lost(failure);
    }

    /// The head asks to end a generation where that loses no work: between two calls, when each value is at its last commit.
    pub(crate) fn hold(&self, generation: Generation) {
        self.lock().offer = Some(Offer {
            generation,
            at_commit: false,
        });
        self.between_calls();
    }

    /// A value is at a commit. If a change waits the generation takes no more calls, also if another value has none.
    pub(super) fn has_committed(&self) {
        let mut state = self.lock();
        let Some(group) = self.offered(&state) else {
            return;
        };
        if let Some(offer) = &mut state.offer {
            offer.at_commit = true;
            // Else calls that span generations, and follow each other closely, would never let it end.
            state.spans.hold();
            drop(state);
            self.ends(&group, |group| {
                group.supersede(CHANGES);
                true
            });
            self.between_calls();
        }
    }

    /// The generation that is to end, if it is the present one and no next one has begun.
    fn offered(&self, state: &State) -> Option<Arc<Group>> {
        let (group, offer) = (self.now(), state.offer?);
        let generation = group.generation();
        (offer.generation == generation && self.newest(state).generation() == generation)
            .then_some(group)
    }

    /// The head is gone: no other generation comes.
    pub(super) fn without_head(&self) {
        self.lock().offer = None;
        self.now().without_head();
    }

    /// The present generation takes no more calls, if `ends` says so. No call sees one without the other.
    fn ends(&self, group: &Arc<Group>, ends: impl FnOnce(&Group) -> bool) -> bool {
        let mut is_over = false;
        self.present.send_if_modified(|present| {
            is_over = ends(group);
            let is_news = is_over && !present.is_over && Arc::ptr_eq(&present.group, group);
            present.is_over |= is_news;
            is_news
        });
        is_over
    }

    /// Waits for a generation that takes calls.
    pub(crate) async fn recovered(&self) -> Result<Arc<Group>, End> {
        let mut present = self.present();
        let decided = present.wait_for(|now| !now.is_over || now.ended.is_some());
        let present = match decided.await {
            Ok(present) => present.clone(),
            // The sender is here.
            Err(_) => self.present.borrow().clone(),
        };
        present.ended.map_or(Ok(present.group), Err)
    }

    /// Workers may have a value from now on.
    pub(super) fn begin_to_make(&self, object: ObjectId) {
        let mut state = self.lock();
        state.has_made = true;
        let generation = self.newest(&state).generation();
        state.making.insert(object, generation);
    }

    /// The call that was to make a value was not sent.
    pub(super) fn stop_to_make(&self, object: ObjectId) {
        self.lock().making.remove(&object);
        self.between_calls();
    }

    /// A value was made in a generation. It lives on in the next ones, if that one is still the newest: else some members lack the
    /// value.
    pub(super) fn adopt(&self, value: &Arc<Value>, made_in: Generation) -> Result<(), CallError> {
        let mut state = self.lock();
        if self.newest(&state).generation() != made_in {
            return Err(CallError::GenerationOver {
                call: value.class.to_owned(),
                generation: made_in,
                lost: Vec::new(),
                cause: "the next generation had begun before all ranks had made the value"
                    .to_owned(),
            });
        }
        *value.progress() = Progress::new(made_in);
        (state.values).insert(value.object, Arc::clone(value));
        state.making.remove(&value.object);
        drop(state);
        self.between_calls();
        Ok(())
    }

    /// A value has no handle any more. Gives the group that is to drop it.
    pub(super) fn forget(&self, object: ObjectId) -> Arc<Group> {
        let mut state = self.lock();
        state.values.remove(&object);
        state.making.remove(&object);
        let newest = self.newest(&state);
        drop(state);
        self.between_calls();
        newest
    }

    /// The next generation has begun. Calls that span generations go there from now on; values of executables are to follow.
    pub(crate) fn install(&self, group: Group) -> Recovery {
        let group = Arc::new(group);
        let table = Arc::clone(group.members());
        let cause = &table.cause;
        let begun = format!("generation {} has begun: {cause}", table.generation);
        self.ends(&self.now(), |group| {
            group.supersede(&begun);
            true
        });
        let mut state = self.lock();
        if let Some(end) = state.spans.end() {
            group.close(&end.reason);
        }
        (state.groups).insert(table.generation, Arc::clone(&group));
        let values: Vec<_> = state.values.values().cloned().collect();
        let has_made = state.has_made;
        let effects = state.spans.generation(table);
        self.carry_out(state, effects);
        self.idle.notify_one();
        if !has_made {
            return Recovery::nothing(group);
        }
        // What new members get has the same order everywhere: calls that span generations, then values.
        let recovery = Recovery::begin(Arc::clone(&group), values);
        // A handle that has gone meanwhile may have said so before its value was asked for.
        let state = self.lock();
        let objects = recovery.objects();
        let gone: Vec<_> = (objects.into_iter())
            .filter(|object| !state.values.contains_key(object))
            .collect();
        drop(state);
        for object in gone {
            group.tell(CallOp::Drop { object }, &Bytes::new());
        }
        recovery
    }

    /// The newest generation takes calls.
    pub(crate) fn publish(&self, group: &Arc<Group>) {
        let state = self.lock();
        // Nobody may listen.
        (state.news.as_ref()).map(|news| news.send(Arc::clone(group.members())).ok());
        self.present.send_modify(|present| {
            present.group = Arc::clone(group);
            // It may have lost a rank meanwhile.
            present.is_over = group.is_over();
        });
        drop(state);
        self.idle.notify_one();
        self.between_calls();
    }

    /// No more calls are taken; those that are in flight go on.
    pub(crate) fn close(&self, reason: &str) {
        let mut state = self.lock();
        state.spans.close(reason);
        let newest = self.newest(&state);
        drop(state);
        self.now().close(reason);
        newest.close(reason);
    }

    /// The group has ended: so has every call.
    pub(crate) fn finish(&self, end: &End) {
        let mut state = self.lock();
        state.news = None;
        let groups: Vec<Arc<Group>> = state.groups.values().cloned().collect();
        let effects = state.spans.finish(end.clone());
        self.carry_out(state, effects);
        for group in groups {
            group.finish(&end.reason, end.failure.clone());
        }
        // The last, so that a call that has waited for a generation finds the end.
        self.present.send_modify(|present| {
            present.is_over = true;
            present.ended = Some(end.clone());
        });
    }

    /// Waits until a node with members of a generation is not reached: which generation, and why. Cancel safe.
    pub(crate) async fn unreachable(&self) -> (Generation, String) {
        loop {
            if let Some(cut_off) = self.lock().unreachable.take() {
                return cut_off;
            }
            self.cut_off.notified().await;
        }
    }

    /// Waits until a generation has ended between two calls. Cancel safe.
    pub(crate) async fn holding(&self) -> Generation {
        loop {
            if let Some(generation) = self.lock().holding.take() {
                return generation;
            }
            self.held.notified().await;
        }
    }

    /// Waits until some generations before the present one have no calls any more, and forgets these.
    pub(crate) async fn retired(&self) -> Vec<Generation> {
        loop {
            let retired = self.retire();
            if !retired.is_empty() {
                return retired;
            }
            self.idle.notified().await;
        }
    }

    fn retire(&self) -> Vec<Generation> {
        let present = self.now().generation();
        let mut state = self.lock();
        let newest = self.newest(&state).generation();
        let State { spans, groups, .. } = &mut *state;
        let mut retired = Vec::new();
        groups.retain(|generation, group| {
            let is_needed = [present, newest].contains(generation);
            let is_idle = !is_needed && group.is_idle() && !spans.uses(*generation);
            if is_idle {
                group.hang_up();
                retired.push(*generation);
            }
            !is_idle
        });
        retired
    }

    /// Ends calls whose deadlines pass. Never ends by itself.
    pub(crate) async fn keep_time(self: Arc<Self>) {
        loop {
            let next = self.lock().spans.next_wake();
            let sleep = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = sleep => self.apply(|spans| spans.tick(Instant::now())),
                () = self.timer.notified() => {}
            }
        }
    }
}

impl Listener for Generations {
    fn is_over(&self, generation: Generation, idle: bool) {
        self.present.send_if_modified(|present| {
            let is_news = present.group.generation() == generation && !present.is_over;
            present.is_over |= is_news;
            is_news
        });
        if idle {
            self.idle.notify_one();
        }
    }

    fn between_calls(&self) {
        let mut state = self.lock();
        let (Some(group), Some(offer)) = (self.offered(&state), state.offer) else {
            return;
        };
        let is_committed = |value: &Arc<Value>| value.progress().is_committed();
        // One of an earlier generation has failed, though its future may not know yet.
        let mut making = state.making.values();
        let is_making = making.any(|made_in| *made_in == group.generation());
        let is_kept = !is_making && (offer.at_commit || state.values.values().all(is_committed));
        if is_kept && !state.spans.is_given() && self.ends(&group, Group::rest) {
            state.spans.hold();
            state.offer = None;
            state.holding = Some(offer.generation);
            self.held.notify_one();
            self.idle.notify_one();
        }
    }

    fn result(
        &self,
        now: Instant,
        call: (CallId, Process),
        generation: Generation,
        outcome: Outcome,
        body: Bytes,
    ) {
        self.apply(|spans| spans.result(now, call, generation, outcome, body));
    }

    fn lost(&self, process: Process, failure: &RankFailure, by: Option<Generation>) {
        self.apply(|spans| spans.lost(process, failure, by));
    }

    fn note_unreachable(&self, generation: Generation, why: String) {
        self.lock().unreachable = Some((generation, why));
        self.cut_off.notify_one();
    }

    fn cancel(&self, call: CallId) {
        self.apply(|spans| spans.cancel(call));
    }
}
