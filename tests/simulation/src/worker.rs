//! The model of a worker process: what `sdk/src/worker` says to its node, and an elastic loop as `sdk/src/elastic` runs it.
//!
//! Each step is an all-reduce over the samples of a batch, and then a commit. Time and messages are the world's.

use std::net::SocketAddr;

use kolo_wire::ids::{Generation, Incarnation, JobId, Rank, Slot};
use kolo_wire::worker::LOCAL_PROTOCOL;
use kolo_wire::{Exit, FailedOperation, FromWorker, GenerationTable, Kept, Member, ToWorker};

use crate::random::mix;

/// Samples of an epoch.
const SAMPLES: u64 = 100;
/// Samples of a step, over all ranks.
const BATCH: u64 = 16;

/// Names a process for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name {
    pub(crate) job: JobId,
    pub(crate) slot: Slot,
    pub(crate) incarnation: Incarnation,
}

/// The members of a generation, in rank order.
pub(crate) fn names(table: &GenerationTable) -> Vec<Name> {
    let members = table.members.iter();
    members.map(|member| Name::of(table.job, member)).collect()
}

impl Name {
    pub(crate) fn of(job: JobId, member: &Member) -> Self {
        Self {
            job,
            slot: member.slot,
            incarnation: member.incarnation,
        }
    }
}

/// How far the loop of a job has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Progress {
    pub(crate) steps: u64,
    pub(crate) epoch: u64,
    /// Samples of the epoch that are done.
    pub(crate) recorded: u64,
    /// The hashes of these samples, added up.
    pub(crate) sum: u64,
}

impl Progress {
    fn batch(self) -> u64 {
        BATCH.min(SAMPLES - self.recorded)
    }

    /// One rank's share of the next step.
    fn share(self, rank: Rank, size: u32) -> u64 {
        let (rank, size, batch) = (u64::from(rank.0), u64::from(size), self.batch());
        let begin = self.recorded + batch * rank / size;
        let end = self.recorded + batch * (rank + 1) / size;
        (begin..end).fold(0, |sum, place| sum.wrapping_add(sample(self.epoch, place)))
    }

    /// The next step is done. True if that ends the epoch.
    fn step(&mut self, sum: u64) -> bool {
        self.recorded += self.batch();
        self.sum = self.sum.wrapping_add(sum);
        self.steps += 1;
        self.recorded == SAMPLES
    }

    fn next_epoch(&mut self) {
        *self = Self {
            steps: self.steps,
            epoch: self.epoch + 1,
            ..Self::default()
        };
    }

    /// The sum of an epoch in which each sample came exactly once.
    pub(crate) fn exact_sum(epoch: u64) -> u64 {
        (0..SAMPLES).fold(0, |sum, place| sum.wrapping_add(sample(epoch, place)))
    }
}

fn sample(epoch: u64, place: u64) -> u64 {
    mix(epoch << 32 | place)
}

/// A commit. A later generation has later ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Saved {
    pub(crate) generation: u64,
    pub(crate) number: u64,
    pub(crate) progress: Progress,
}

/// A rank's part in an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Offer {
    /// All tell which commit they have.
    Meet {
        saved: Saved,
        live: Progress,
    },
    /// All take the state of one rank.
    Receive,
    Step {
        sum: u64,
    },
    Commit {
        number: u64,
        hold: bool,
    },
}

impl Offer {
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Meet { .. } => "meet",
            Self::Receive => "receive",
            Self::Step { .. } => "step",
            Self::Commit { .. } => "commit",
        }
    }
}

/// How an operation ends on a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The last commit of all, the state of the rank that gives it, and whether others lack it.
    Met {
        last: Saved,
        live: Progress,
        differ: bool,
    },
    Received,
    Stepped {
        sum: u64,
    },
    Committed {
        hold: bool,
    },
    Failed {
        culprit: Option<Rank>,
        reason: &'static str,
    },
}

/// Something that a worker does.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Act {
    Say(FromWorker),
    /// It is in this generation now.
    Enter(GenerationTable),
    /// It is in no generation up to this one any more.
    Leave(Generation),
    /// It comes to an operation.
    Join(Generation, u64, Offer),
    /// It works for a while.
    Work(Generation, u64),
    /// An operation has ended with an error.
    Fails(Generation),
    /// It waits for the generation after this one, for so many milliseconds.
    Wait(Generation, u64),
    /// A step was the last one of its epoch.
    Epoch(Progress),
    /// It has a commit in a generation.
    Has(Saved),
    Exit(Exit),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No loop runs.
    Idle,
    Meeting,
    Receiving(Saved),
    Working,
    Stepping,
    Committing,
    /// It waits for the next generation.
    Holding,
}

#[derive(Debug, Clone)]
struct Place {
    generation: Generation,
    rank: Rank,
    size: u32,
    /// The number of the next operation.
    operation: u64,
    /// No operation ends well any more.
    is_over: bool,
    /// A change waits.
    hold: bool,
}

/// A worker process.
#[derive(Debug, Clone)]
pub(crate) struct Worker {
    pub(crate) name: Name,
    address: SocketAddr,
    welcomed: bool,
    /// How long it waits for a next generation; `None` in a static job.
    next_within: Option<u64>,
    newest: Generation,
    place: Option<Place>,
    stage: Stage,
    live: Progress,
    saved: Saved,
    /// The last generation in which it has said that all have committed.
    said: Generation,
    /// It returns after so many steps.
    steps: Option<u64>,
    /// It takes tables of older generations, too: a bug put back.
    takes_stale: bool,
    /// It is an installed program, which says nothing to its node; and whether it fails at its first step.
    program: Option<Fate>,
}

/// How an installed program works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Works,
    Fails,
}

impl Worker {
    pub(crate) fn new(
        name: Name,
        address: SocketAddr,
        steps: Option<u64>,
        takes_stale: bool,
    ) -> Self {
        Self {
            name,
            address,
            welcomed: false,
            next_within: None,
            newest: Generation(0),
            place: None,
            stage: Stage::Idle,
            live: Progress::default(),
            saved: Saved::default(),
            said: Generation(0),
            steps,
            takes_stale,
            program: None,
        }
    }

    /// The process is an installed program, started as a rank of its only generation.
    pub(crate) fn start_as(
        &mut self,
        generation: Generation,
        (rank, size): (Rank, u32),
        fate: Fate,
    ) {
        self.program = Some(fate);
        self.newest = generation;
        self.place = Some(Place {
            generation,
            rank,
            size,
            operation: 0,
            is_over: false,
            hold: false,
        });
    }

    /// The program has started, and goes on from the last checkpoint.
    pub(crate) fn begin(&mut self, saved: Saved) -> Vec<Act> {
        let mut acts = Vec::new();
        let live = saved.progress;
        (self.saved, self.live, self.stage) = (saved, live, Stage::Meeting);
        self.join(Offer::Meet { saved, live }, &mut acts);
        acts
    }

    pub(crate) fn is_program(&self) -> bool {
        self.program.is_some()
    }

    /// It is a program that has done all its steps: it leaves its group in order, so that nobody misses it.
    pub(crate) fn is_through(&self) -> bool {
        self.is_program() && self.steps.is_some_and(|steps| self.live.steps >= steps)
    }

    /// It is about to end, and does nothing else any more.
    pub(crate) fn ends(&mut self) {
        self.stage = Stage::Idle;
    }

    /// The first thing that a process says.
    pub(crate) fn hello(pid: u32) -> FromWorker {
        FromWorker::Hello {
            protocol: LOCAL_PROTOCOL,
            pid,
            registry: 1,
        }
    }

    /// The generation that it is in, with its rank there.
    pub(crate) fn place(&self) -> Option<(Generation, Rank)> {
        let place = self.place.as_ref()?;
        Some((place.generation, place.rank))
    }

    /// The newest generation that it has heard of.
    pub(crate) fn newest(&self) -> Generation {
        self.newest
    }

    /// Its last commit.
    pub(crate) fn saved(&self) -> Saved {
        self.saved
    }

    /// It waits for other ranks.
    pub(crate) fn is_waiting(&self) -> bool {
        matches!(
            self.stage,
            Stage::Meeting | Stage::Receiving(_) | Stage::Stepping | Stage::Committing
        )
    }

    /// The node says something.
    pub(crate) fn hear(&mut self, message: &ToWorker) -> Vec<Act> {
        let mut acts = Vec::new();
        match message {
            ToWorker::Welcome {
                needs_data_plane,
                next_within_ms,
                ..
            } => {
                if self.welcomed {
                    return vec![Act::Exit(Exit::Code(1))];
                }
                self.welcomed = true;
                self.next_within = *next_within_ms;
                acts.push(Act::Say(if *needs_data_plane {
                    FromWorker::Sign { csr: vec![1] }
                } else {
                    FromWorker::Ready { address: None }
                }));
            }
            ToWorker::Certificate { .. } => acts.push(Act::Say(FromWorker::Ready {
                address: Some(self.address),
            })),
            ToWorker::Membership(table) => self.take(table, &mut acts),
            ToWorker::Revoke {
                generation, lost, ..
            } => {
                if self.is_in(*generation) {
                    self.fail(lost.first().copied(), "revoked", &mut acts);
                }
            }
            ToWorker::RankLost {
                generation,
                failure,
            } => {
                if self.is_in(*generation) {
                    self.fail(Some(failure.rank), "lost", &mut acts);
                }
            }
            ToWorker::Hold { generation, .. } => {
                if let Some(place) = &mut self.place
                    && place.generation == *generation
                {
                    place.hold = true;
                }
            }
            // The world knows when the process obeys.
            ToWorker::Stop { .. }
            | ToWorker::Peer { .. }
            | ToWorker::LinkRequested { .. }
            | ToWorker::Cancel { .. } => {}
        }
        acts
    }

    fn is_in(&self, generation: Generation) -> bool {
        (self.place.as_ref()).is_some_and(|place| place.generation == generation && !place.is_over)
    }

    fn take(&mut self, table: &GenerationTable, acts: &mut Vec<Act>) {
        let generation = table.generation;
        if table.job != self.name.job || (generation < self.newest && !self.takes_stale) {
            return;
        }
        if generation != self.newest || self.newest.0 == 0 {
            if let Some(place) = self.place.take() {
                acts.push(Act::Leave(place.generation));
                if self.saved.number > 0 {
                    self.live = self.saved.progress;
                }
            }
            self.newest = generation;
            self.stage = Stage::Idle;
            let mut members = table.members.iter();
            let me = members.find(|member| {
                member.slot == self.name.slot && member.incarnation == self.name.incarnation
            });
            if let Some(me) = me {
                self.place = Some(Place {
                    generation,
                    rank: me.rank,
                    size: table.world_size(),
                    operation: 0,
                    is_over: false,
                    hold: false,
                });
                acts.push(Act::Enter(table.clone()));
                self.stage = Stage::Meeting;
                let (saved, live) = (self.saved, self.live);
                self.join(Offer::Meet { saved, live }, acts);
            }
        }
        acts.push(Act::Say(FromWorker::Taken { generation }));
    }

    fn join(&mut self, offer: Offer, acts: &mut Vec<Act>) {
        if let Some(place) = &mut self.place {
            place.operation += 1;
            acts.push(Act::Join(place.generation, place.operation, offer));
        }
    }

    fn work(&mut self, acts: &mut Vec<Act>) {
        self.stage = Stage::Working;
        if let Some(place) = &self.place {
            acts.push(Act::Work(place.generation, place.operation));
        }
    }

    fn is_at(&self, generation: Generation, operation: u64) -> bool {
        let place = self.place.as_ref().filter(|place| !place.is_over);
        place.is_some_and(|place| place.generation == generation && place.operation == operation)
    }

    /// Its share of a step is done.
    pub(crate) fn worked(&mut self, generation: Generation, operation: u64) -> Vec<Act> {
        let mut acts = Vec::new();
        if self.stage == Stage::Working
            && self.is_at(generation, operation)
            && let Some(place) = &self.place
        {
            let sum = self.live.share(place.rank, place.size);
            self.stage = Stage::Stepping;
            self.join(Offer::Step { sum }, &mut acts);
        }
        acts
    }

    /// An operation has ended. Nothing happens if this is not the one that it waits in.
    pub(crate) fn ended(
        &mut self,
        generation: Generation,
        operation: u64,
        ending: &Ending,
    ) -> Vec<Act> {
        let mut acts = Vec::new();
        if !self.is_at(generation, operation) {
            return acts;
        }
        match (self.stage, ending) {
            (_, Ending::Failed { culprit, reason }) => self.fail(*culprit, reason, &mut acts),
            (Stage::Meeting, Ending::Met { last, live, differ }) => {
                if *differ {
                    let saved = Saved {
                        generation: generation.0,
                        number: last.number + 1,
                        progress: *live,
                    };
                    self.stage = Stage::Receiving(saved);
                    self.join(Offer::Receive, &mut acts);
                } else {
                    self.work(&mut acts);
                }
            }
            (Stage::Receiving(saved), Ending::Received) => {
                self.saved = saved;
                self.live = saved.progress;
                acts.push(Act::Has(saved));
                self.work(&mut acts);
            }
            (Stage::Stepping, Ending::Stepped { sum }) => {
                if self.live.step(*sum) {
                    acts.push(Act::Epoch(self.live));
                    self.live.next_epoch();
                }
                let hold = self.place.as_ref().is_some_and(|place| place.hold);
                let number = self.saved.number;
                self.stage = Stage::Committing;
                self.join(Offer::Commit { number, hold }, &mut acts);
            }
            (Stage::Committing, Ending::Committed { hold }) => {
                self.commit(generation, *hold, &mut acts);
            }
            _ => {}
        }
        acts
    }

    fn commit(&mut self, generation: Generation, hold: bool, acts: &mut Vec<Act>) {
        self.saved = Saved {
            generation: generation.0,
            number: self.saved.number + 1,
            progress: self.live,
        };
        acts.push(Act::Has(self.saved));
        let commit = self.saved.number;
        if self.next_within.is_some() && self.said < generation {
            self.said = generation;
            acts.push(Act::Say(FromWorker::Committed {
                generation,
                commit,
                kept: Kept::Made,
            }));
        }
        if self.steps.is_some_and(|steps| self.live.steps >= steps) {
            self.stage = Stage::Idle;
            acts.push(Act::Exit(Exit::Code(0)));
        } else if self.program == Some(Fate::Fails) {
            self.stage = Stage::Idle;
            acts.push(Act::Exit(Exit::Code(1)));
        } else if hold {
            self.wait(None, acts);
        } else {
            self.work(acts);
        }
    }

    /// Nothing ends well in this generation any more.
    fn fail(&mut self, culprit: Option<Rank>, reason: &str, acts: &mut Vec<Act>) {
        let Some(place) = &mut self.place else {
            return;
        };
        if place.is_over {
            return;
        }
        place.is_over = true;
        acts.push(Act::Fails(place.generation));
        if self.saved.number > 0 {
            self.live = self.saved.progress;
        }
        if self.stage == Stage::Idle {
            return;
        }
        if self.is_program() {
            self.stage = Stage::Idle;
            acts.push(Act::Exit(Exit::Code(1)));
            return;
        }
        // One that holds has said so.
        if self.stage != Stage::Holding {
            let reason = reason.to_owned();
            self.wait(Some(FailedOperation { culprit, reason }), acts);
        }
    }

    fn wait(&mut self, failed: Option<FailedOperation>, acts: &mut Vec<Act>) {
        let (Some(next_within), Some(place)) = (self.next_within, &self.place) else {
            self.stage = Stage::Idle;
            return;
        };
        self.stage = Stage::Holding;
        let generation = place.generation;
        acts.push(Act::Say(FromWorker::Holding {
            generation,
            commit: self.saved.number,
            failed,
        }));
        acts.push(Act::Wait(generation, next_within));
    }

    /// The next generation has not come within the time that the job allows: the loop ends with an error, and the program too.
    pub(crate) fn waited(&mut self, generation: Generation) -> Vec<Act> {
        if self.stage == Stage::Holding && self.newest == generation {
            self.stage = Stage::Idle;
            return vec![Act::Exit(Exit::Code(1))];
        }
        Vec::new()
    }
}
