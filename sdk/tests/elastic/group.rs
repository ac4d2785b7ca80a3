//! A group of threads that lose, gain and part with members by a script.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kolo::collectives::local_group;
use kolo::elastic::{self, Cause, Elastic, Epoch, LastBatch, Membership, Parts, State};
use kolo::elastic::{ElasticSampler, StateError};
use kolo::{Context, Error, Rank, ReduceOp, Result};

/// The steps that are committed, and how far the next one is.
type Progress = (u64, When);

/// A thread, by its number. Numbers are not used again.
pub(crate) type Id = usize;

/// Nothing here takes nearly as long.
const LIMIT: Duration = Duration::from_secs(60);

/// Makes generations: the next one is there as soon as all members of the last one that are alive have asked for it.
pub(crate) struct Hub {
    state: Mutex<Members>,
    news: Condvar,
}

#[derive(Default)]
struct Members {
    generation: u64,
    present: Vec<Id>,
    joining: Vec<Id>,
    draining: BTreeSet<Id>,
    asking: BTreeSet<Id>,
    /// The members of the last generation, by rank.
    epochs: Vec<(Id, Option<Epoch>)>,
    /// Those that have not taken it yet.
    waiting: BTreeSet<Id>,
    /// How far each has come.
    progress: BTreeMap<Id, Progress>,
    /// Those that end as soon as they have their next generation.
    doomed: BTreeSet<Id>,
}

impl Hub {
    pub(crate) fn new(size: usize) -> Arc<Self> {
        let mut members = Members {
            joining: (0..size).collect(),
            ..Members::default()
        };
        members.form();
        Arc::new(Self {
            state: Mutex::new(members),
            news: Condvar::new(),
        })
    }

    fn change(&self, change: impl FnOnce(&mut Members)) {
        let mut members = self.state.lock().unwrap();
        change(&mut members);
        members.form_if_due();
        drop(members);
        self.news.notify_all();
    }

    /// Waits until all that are in the group have come as far, or have given up. If a thread was killed before, those that are not there
    /// yet would lose more.
    fn all_reach(&self, progress: Progress) {
        let members = self.state.lock().unwrap();
        let all = |members: &Members| {
            let reached = |id| members.progress.get(id).is_some_and(|own| *own >= progress);
            let there = |id| reached(id) || members.asking.contains(id);
            members.present.iter().all(there)
        };
        let waited = (self.news).wait_timeout_while(members, LIMIT, |members| !all(members));
        drop(waited.unwrap());
    }

    fn reach(&self, id: Id, progress: Progress) {
        self.change(|members| {
            members.progress.insert(id, progress);
        });
    }

    fn perform(&self, what: &What) {
        self.change(|members| match what {
            What::Join(id) => {
                members.joining.push(*id);
                let epochs = members.epochs.iter();
                epochs
                    .flat_map(|(_, epoch)| epoch)
                    .for_each(|epoch| epoch.interrupt().raise());
            }
            What::Drain(id) => {
                members.draining.insert(*id);
                // One rank hears first.
                let mut epochs = members.epochs.iter().flat_map(|(_, epoch)| epoch);
                epochs.next().unwrap().interrupt().raise();
            }
            What::Doom(id) => {
                members.doomed.insert(*id);
            }
            What::Kill | What::Fail | What::Disagree => {}
        });
    }

    /// The place of a thread, once it is in a generation. `None` if the group ends before.
    fn seat(self: &Arc<Self>, id: Id) -> Option<Seat> {
        let mut seat = Seat {
            hub: Arc::clone(self),
            id,
            epoch: None,
            asked: 0,
            killed: false,
        };
        seat.epoch = Some(self.wait(id)?);
        Some(seat)
    }

    fn wait(&self, id: Id) -> Option<Epoch> {
        let members = self.state.lock().unwrap();
        let (mut members, _) = (self.news)
            .wait_timeout_while(members, LIMIT, |members| {
                !members.waiting.contains(&id) && !members.present.is_empty()
            })
            .unwrap();
        members.waiting.remove(&id);
        let mut epochs = members.epochs.iter();
        let (_, epoch) = epochs.find(|(member, _)| *member == id)?;
        epoch.clone()
    }
}

impl Members {
    fn form_if_due(&mut self) {
        let due =
            !self.present.is_empty() && self.present.iter().all(|id| self.asking.contains(id));
        if due {
            self.form();
        }
    }

    fn form(&mut self) {
        self.present.retain(|id| !self.draining.contains(id));
        self.present.append(&mut self.joining);
        self.asking.clear();
        self.draining.clear();
        self.generation += 1;
        let Ok(group) = local_group(self.present.len() as u32) else {
            return;
        };
        let epochs = group
            .into_iter()
            .map(|comm| Some(Epoch::new(Context::for_tests(comm))));
        self.epochs = self.present.iter().copied().zip(epochs).collect();
        self.waiting = self.present.iter().copied().collect();
    }
}

pub(crate) struct Seat {
    hub: Arc<Hub>,
    id: Id,
    epoch: Option<Epoch>,
    asked: usize,
    killed: bool,
}

impl Membership for Seat {
    fn current(&self) -> Epoch {
        self.epoch.clone().unwrap()
    }

    fn next(&mut self, _: &Cause) -> Result<Epoch, Error> {
        self.asked += 1;
        let id = self.id;
        self.killed = self.hub.state.lock().unwrap().doomed.contains(&id);
        self.hub.change(|members| {
            members.asking.insert(id);
        });
        let epoch = self.hub.wait(id).filter(|_| !self.killed);
        self.epoch.clone_from(&epoch);
        epoch.ok_or_else(|| Error::msg(format!("thread {id} is not in the next generation")))
    }
}

/// A thread that is killed is lost to the others, and they are told.
impl Drop for Seat {
    fn drop(&mut self) {
        self.epoch = None;
        let (id, killed) = (self.id, self.killed);
        self.hub.change(|members| {
            members.present.retain(|present| *present != id);
            members.joining.retain(|joining| *joining != id);
            members.waiting.remove(&id);
            let rank = members.epochs.iter().position(|(member, _)| *member == id);
            let Some(rank) = rank else {
                return;
            };
            members.epochs[rank].1 = None;
            for epoch in members
                .epochs
                .iter()
                .flat_map(|(_, epoch)| epoch)
                .filter(|_| killed)
            {
                let comm = epoch.context().comm();
                comm.rank_lost(Rank(rank as u32), "its thread has ended");
            }
        });
    }
}

#[derive(Debug, PartialEq, thiserror::Error)]
#[error("killed")]
struct Killed;

/// A change, at a place in the work of one thread. It happens once.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    /// The number of steps that are committed by then.
    pub(crate) step: u64,
    pub(crate) by: Id,
    pub(crate) when: When,
    pub(crate) what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Eq, Ord)]
pub(crate) enum When {
    /// In a generation that is not the first, before its first operation.
    AfterChange,
    /// Before the step's all-reduce.
    BeforeStep,
    /// After the all-reduce, before the commit.
    BeforeCommit,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum What {
    /// The thread ends without a word.
    Kill,
    /// The thread has an error of its own.
    Fail,
    /// The thread asks for something else than the others.
    Disagree,
    Join(Id),
    Drain(Id),
    /// That thread ends at the beginning of its next generation, before or in the sync.
    Doom(Id),
}

/// The state of the test: which samples the group has seen how often, as the group would learn.
pub(crate) struct Work {
    pub(crate) sampler: ElasticSampler,
    pub(crate) steps: u64,
    /// Sums over all ranks.
    pub(crate) seen: Vec<u32>,
    /// Each commit, with the size of the group.
    pub(crate) sizes: Vec<u32>,
    /// What this thread did, committed or not: no part of the state, as what follows.
    pub(crate) done: u64,
    /// How often the callback was called.
    pub(crate) resets: u32,
}

impl Elastic for Work {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        parts.value("sampler", &mut self.sampler);
        parts.value("steps", &mut self.steps);
        parts.buffer("seen", &mut self.seen);
        parts.list("sizes", &mut self.sizes);
    }
}

/// How a thread ended.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) result: Result<(), String>,
    pub(crate) seen: Vec<u32>,
    pub(crate) sizes: Vec<u32>,
    pub(crate) resets: u32,
    pub(crate) done: u64,
    /// How often it asked for a next generation.
    pub(crate) asked: usize,
    /// The numbers of the commits that were interrupted.
    pub(crate) interrupted: Vec<u64>,
}

/// A run of some epochs over some samples.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) size: usize,
    /// All threads, those that join later included.
    pub(crate) threads: usize,
    pub(crate) samples: usize,
    pub(crate) epochs: u64,
    pub(crate) batch: usize,
    pub(crate) per_rank: bool,
    pub(crate) events: Vec<Event>,
}

impl Plan {
    /// Plays the plan. The ends are those of the threads which were in the group, by number.
    pub(crate) fn play(&self) -> BTreeMap<Id, End> {
        let hub = Hub::new(self.size);
        let happened = Mutex::new(BTreeSet::new());
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|id| {
                    let (hub, happened) = (&hub, &happened);
                    scope.spawn(move || Some((id, self.thread(hub, id, happened)?)))
                })
                .collect();
            let ends = threads
                .into_iter()
                .filter_map(|thread| thread.join().unwrap());
            ends.collect()
        })
    }

    fn thread(&self, hub: &Arc<Hub>, id: Id, happened: &Mutex<BTreeSet<usize>>) -> Option<End> {
        let mut seat = hub.seat(id)?;
        let happens = |step: u64, when: When| -> Option<What> {
            let mut happened = happened.lock().unwrap();
            let mut last = None;
            for (index, event) in self.events.iter().enumerate() {
                if (event.step, event.by, event.when) == (step, id, when) && happened.insert(index)
                {
                    hub.perform(&event.what);
                    last = Some(event.what.clone());
                }
            }
            drop(happened);
            if last == Some(What::Kill) {
                hub.all_reach((step, when));
            }
            last
        };
        let sampler = if self.per_rank {
            ElasticSampler::with_rank_batch(self.samples, self.batch)
        } else {
            ElasticSampler::with_global_batch(self.samples, self.batch)
        };
        let mut work = Work {
            sampler: sampler.seed(9).last_batch(LastBatch::Uneven),
            steps: 0,
            // Only rank 0 has the right first values.
            seen: vec![if id == 0 { 0 } else { 1_000 }; self.samples],
            sizes: vec![],
            done: 0,
            resets: 0,
        };
        let mut interrupted = vec![];
        let epochs = self.epochs;
        let result = {
            let mut state = State::new(&mut work).on_reset(|_, work| {
                work.resets += 1;
                Ok(())
            });
            elastic::run(&mut seat, &mut state, |ctx, state| -> Result<()> {
                hub.reach(id, (state.steps, When::BeforeStep));
                if state.resets > 0 && happens(state.steps, When::AfterChange) == Some(What::Kill) {
                    return Err(Killed.into());
                }
                while state.sampler.epoch() < epochs {
                    while let Some(batch) = state.sampler.next_batch(ctx.rank(), ctx.world_size()) {
                        let step = state.steps;
                        let mut seen = vec![0_u32; state.seen.len()];
                        batch.iter().for_each(|sample| seen[sample] += 1);
                        match happens(step, When::BeforeStep) {
                            Some(What::Kill) => return Err(Killed.into()),
                            Some(What::Fail) => return Err(Error::msg("no luck")),
                            Some(What::Disagree) => seen.truncate(1),
                            _ => {}
                        }
                        ctx.comm().all_reduce(&mut seen, ReduceOp::Sum)?;
                        let work = &mut ***state;
                        work.done += 1;
                        work.seen
                            .iter_mut()
                            .zip(&seen)
                            .for_each(|(all, new)| *all += new);
                        work.sampler.record(&batch)?;
                        work.steps += 1;
                        work.sizes.push(ctx.world_size() as u32);
                        hub.reach(id, (step, When::BeforeCommit));
                        if happens(step, When::BeforeCommit) == Some(What::Kill) {
                            return Err(Killed.into());
                        }
                        let committed = state.commit(ctx);
                        if committed == Err(StateError::Interrupted) {
                            interrupted.push(state.commits());
                        }
                        if matches!(committed, Ok(()) | Err(StateError::Interrupted)) {
                            hub.reach(id, (state.steps, When::BeforeStep));
                        }
                        committed?;
                    }
                    let next = state.sampler.epoch() + 1;
                    state.sampler.set_epoch(next);
                }
                Ok(())
            })
        };
        seat.killed |= result
            .as_ref()
            .is_err_and(|error| error.downcast_ref() == Some(&Killed));
        Some(End {
            result: result.map_err(|error| error.to_string()),
            seen: work.seen,
            sizes: work.sizes,
            resets: work.resets,
            done: work.done,
            asked: seat.asked,
            interrupted,
        })
    }
}
