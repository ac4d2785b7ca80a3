//! Operations that are told apart by name, and that each rank may start in another order.
//!
//! Every rank tells rank 0 what it has started, over links of their own. (Ranks are counted here in the order of their ranks
//! among all; in a group that has another order rank 0 is another one there.) What all ranks have started, rank 0 puts in one
//! order, which all follow: small operations that are alike become one. Nothing ticks: each message is the answer to
//! another one, and what gets ready while other operations run is what is fused. The operations themselves run in a group of
//! their own, beside those without names.
//!
//! | part | what |
//! |---|---|
//! | [`book`] | what rank 0 knows and decides: pure |
//! | [`wire`] | the messages: pure |
//! | [`hub`] | the links: [`line`], how they come: [`arriving`], what a lost rank means: [`loss`] |
//! | [`farewell`] | what is given up: the others hear of it first |
//! | [`joining`] | ranks without data |
//! | [`turn`] | running what was decided |
//! | [`member`] | what comes from outside: calls, losses, links |
//! | this one | starting, waiting and giving up |

mod arriving;
mod asking;
mod book;
mod farewell;
mod hub;
mod joining;
mod line;
mod loss;
mod member;
mod turn;
mod wire;

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kolo_transport::ids::{CallId, Rank};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::cause::Cause;
use crate::communicator::Communicator;
use crate::error::CollectiveError;
use crate::group::{Family, GroupId, Kind, Member as _};
use crate::inner::Inner;
use crate::lane::{Lane, LaneError};
use crate::operation::{Operation, Tag};
use crate::options::Options;
use crate::record::ShortName;
use crate::stall::{Missing, StallReport};
use book::{Key, Request};
use hub::SILENT;
use joining::Joining;
use loss::Loss;
use wire::Join;

/// Most bytes that are fused in one operation, if nothing else is set.
pub(crate) const THRESHOLD: u64 = 128 << 20;

/// Most characters of a name that ranks tell each other when they say what they do.
const SHOWN: usize = 100;

/// Named operations of one rank that wait. More are refused.
const MOST: usize = 1 << 16;

/// An operation that may be done together with others that are [alike](may_fuse).
pub(crate) trait Fusable: Any + Send {
    /// Does all of them as one operation.
    fn perform(self: Box<Self>, others: Vec<Box<dyn Fusable>>, comm: &Communicator);

    /// It can't be done.
    fn fail(self: Box<Self>, error: CollectiveError);
}

/// Whether an operation of so many ranks is one that is done together with others. Pure: all ranks say the same.
pub(crate) fn may_fuse(operation: &Operation, world: u32) -> bool {
    book::likeness(operation, world).is_some()
}

/// What is done when it is a name's turn.
pub(crate) enum Task {
    Fusable(Box<dyn Fusable>),
    /// Gets the communicator to do it on, or why it can't be done.
    Alone(Box<dyn FnOnce(Result<Communicator, CollectiveError>) + Send>),
}

impl Task {
    fn fail(self, error: CollectiveError) {
        match self {
            Self::Fusable(fusable) => fusable.fail(error),
            Self::Alone(run) => run(Err(error)),
        }
    }
}

/// What the hub is told.
enum Command {
    Ask {
        key: Key,
        request: Request,
    },
    Join(Join),
    Unjoin {
        serial: u64,
        all: bool,
    },
    Over {
        before: u64,
        cause: Cause,
    },
    /// A rank is gone.
    Lost(Loss),
    /// A rank of which nothing was heard was found to be gone.
    Gone(Loss),
    /// An operation whose turn it was has failed because of a rank that is lost. Who waits for it is told when the others can hear
    /// of it.
    LostInTurn {
        loss: Loss,
        told: Sender<()>,
    },
    /// A batch has ended here.
    Ended,
    /// A link is there, with what was read from it already, or will not be.
    Arrived {
        rank: u32,
        lane: Result<(Box<dyn Lane>, Vec<u8>), LaneError>,
    },
    /// Rank 0 asks for the link ...
    Requested,
    /// ... or has asked before, and it will come.
    Connecting,
    Settings {
        threshold: u64,
    },
}

/// The named operations of one rank in one group.
pub(crate) struct Names {
    pub(crate) id: GroupId,
    /// Among the members.
    me: u32,
    world: u32,
    /// In the order of their ranks among all, whatever that in the group is.
    members: Vec<u32>,
    family: Arc<Family>,
    /// Where they run.
    data: Arc<Inner>,
    commands: UnboundedSender<Command>,
    state: Mutex<State>,
}

/// An operation that waits for its turn.
struct Pending {
    name: ShortName,
    options: Options,
    operation: Operation,
    task: Task,
    /// Of what this rank has said to rank 0.
    serial: u64,
    started: Instant,
    /// When rank 0 must have said something about it, and the limit that it was given.
    until: Instant,
    limit: Duration,
}

impl Pending {
    /// It ends without having run. Without a turn it has the number of the first operation of its call.
    fn fail(self, data: &Inner, tag: Tag, error: CollectiveError) {
        let recorder = &data.family.recorder;
        recorder.refused((data.id, tag), self.operation, self.name, self.started);
        self.task.fail(error);
    }
}

#[derive(Default)]
struct State {
    pending: HashMap<Key, Pending>,
    call: u64,
    /// Nothing works any more, or not in this call.
    lost: Option<CollectiveError>,
    over: Option<(u64, CollectiveError)>,
    joining: Joining,
}

impl State {
    /// Why an operation of this name can't wait for its turn.
    fn why_not(&self, name: &str) -> Option<CollectiveError> {
        let over = self.over.as_ref().filter(|(call, _)| *call >= self.call);
        if let Some(error) = self.lost.as_ref().or(over.map(|(_, error)| error)) {
            return Some(error.clone());
        }
        let waiting = self.pending.len();
        let reason = if name.len() > wire::NAME {
            format!(
                "the name of an operation has {} bytes: it may have up to {}",
                name.len(),
                wire::NAME
            )
        } else if self.pending.contains_key(&(self.call, name.to_owned())) {
            format!(
                "an operation named `{name}` is under way on this rank already: wait for it, or give this one another name"
            )
        } else if waiting >= MOST {
            format!("{waiting} named operations are under way on this rank: wait for some")
        } else {
            return None;
        };
        Some(CollectiveError::Invalid { reason })
    }

    /// Takes what waits, if rank 0 had heard of it.
    fn take(&mut self, call: u64, name: &str, heard: u64) -> Option<Pending> {
        match self.pending.entry((call, name.to_owned())) {
            Entry::Occupied(pending) if pending.get().serial <= heard => Some(pending.remove()),
            _ => None,
        }
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Names")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that runs under the lock panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which group they are of this one.
    pub(crate) fn id_in(parent: &Inner) -> GroupId {
        parent.id.child(Kind::Names, 0, &parent.job_ranks())
    }

    /// For this rank of a group. `parent` is that group.
    pub(crate) fn start(parent: &Inner) -> Arc<Self> {
        let mut members = parent.job_ranks();
        let id = Self::id_in(parent);
        let data_id = parent.id.child(Kind::Negotiated, 0, &members);
        let data = parent.group(data_id, members.clone(), parent.me);
        let own = parent.job_rank(parent.me);
        // Links to lower ranks are this one's to make, and all have one to the first.
        members.sort_unstable();
        let me = members.partition_point(|member| *member < own) as u32;
        let (commands, todo) = unbounded_channel();
        let names = Arc::new(Self {
            id,
            me,
            world: parent.world,
            family: Arc::clone(&parent.family),
            data,
            members,
            commands,
            state: Mutex::new(State {
                call: parent.signals.lock().call,
                ..State::default()
            }),
        });
        names.data.runs_names(&names);
        names.family.join(id, &names);
        if let Some(loss) = names.first_lost() {
            names.tell(Command::Lost(loss));
        }
        let revoked = names.data.signals.lock().lost.revoked().map(str::to_owned);
        if let Some(reason) = revoked {
            Arc::clone(&names).revoke(&reason);
        }
        let hub = hub::Hub::new(&names, todo);
        parent.family.handle.spawn(hub.run());
        names
    }

    /// Where named operations run.
    pub(crate) fn data(&self) -> &Inner {
        &self.data
    }

    fn tell(&self, command: Command) {
        // The hub lives as long as this does.
        if self.commands.send(command).is_err() {
            tracing::debug!("named operations have ended");
        }
    }

    /// Starts an operation.
    pub(crate) fn submit(
        &self,
        name: &str,
        (options, operation): (Options, Operation),
        limit: Duration,
        task: Task,
    ) {
        let limit = limit.min(YEAR);
        let started = Instant::now();
        let mut pending = Pending {
            name: ShortName::new(name),
            options,
            operation,
            task,
            serial: 0,
            started,
            until: started + limit + SILENT,
            limit,
        };
        let mut state = self.lock();
        if let Some(error) = state.why_not(name) {
            let tag = Tag::new(state.call, 0);
            drop(state);
            return pending.fail(&self.data, tag, error);
        }
        let key = (state.call, name.to_owned());
        let serial = state.joining.number();
        pending.serial = serial;
        state.pending.insert(key.clone(), pending);
        let request = Request {
            operation,
            limit,
            serial,
            epoch: state.joining.epoch(key.0),
        };
        // Under the lock: rank 0 hears all in the order in which it happened.
        self.tell(Command::Ask { key, request });
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        self.data.signals.lock().timeout = timeout;
    }

    pub(crate) fn set_threshold(&self, threshold: u64) {
        self.tell(Command::Settings { threshold });
    }

    fn outward(&self, cause: Cause, call: u64, name: &str) -> CollectiveError {
        let error = cause.into_error(CallId(call), name);
        self.family
            .add_who_waits(error.with_ranks(|rank| self.job_rank(rank)))
    }

    /// A member by its rank among all.
    fn job_rank(&self, rank: Rank) -> Rank {
        Rank(self.members.get(rank.index()).copied().unwrap_or(rank.0))
    }

    /// The member that a rank of all is, if this rank has a link to it: rank 0 has one to each, the others to rank 0.
    fn linked(&self, job_rank: u32) -> Option<u32> {
        let position = self.position(job_rank)?;
        ((self.me == 0) != (position == 0)).then_some(position)
    }

    /// Rank 0 has given names up. If that is because a rank is gone, no name works any more.
    fn fail(&self, call: u64, names: &[String], heard: u64, cause: &Cause) {
        let taken = self.take(call, names, heard);
        self.fail_taken(call, taken, cause);
        if let Some(loss) = Loss::of(cause, self.world)
            && loss.for_good
        {
            self.give_up_for_good(&loss);
        }
    }

    /// These wait no more, but for those of which rank 0 had not heard yet.
    fn take(&self, call: u64, names: &[String], heard: u64) -> Vec<(String, Pending)> {
        let mut state = self.lock();
        let of_name = |name: &String| {
            let pending = state.take(call, name, heard)?;
            Some((name.clone(), pending))
        };
        names.iter().filter_map(of_name).collect()
    }

    /// Whether what was asked is still waited for.
    fn still_waits(&self, key: &Key, request: &Request) -> bool {
        let state = self.lock();
        let pending = state.pending.get(key);
        pending.is_some_and(|pending| pending.serial == request.serial)
    }

    fn fail_taken(&self, call: u64, taken: Vec<(String, Pending)>, cause: &Cause) {
        for (name, pending) in taken {
            let what = format!("{} named `{name}`", pending.operation);
            let error = self.outward(cause.clone(), call, &what);
            self.family.failed(call, &error);
            pending.fail(&self.data, Tag::new(call, 0), error);
        }
    }

    /// All that wait are given up on this rank.
    fn fail_all(&self, before: u64, error: &CollectiveError) {
        self.fail_waiting(self.take_waiting(before), error);
    }

    fn fail_waiting(&self, waiting: Vec<(Key, Pending)>, error: &CollectiveError) {
        for ((call, _), pending) in waiting {
            pending.fail(&self.data, Tag::new(call, 0), error.clone());
        }
    }

    /// What waits of calls before this one. It waits no more.
    fn take_waiting(&self, before: u64) -> Vec<(Key, Pending)> {
        let mut state = self.lock();
        let taken = state.pending.extract_if(|(call, _), _| *call < before);
        taken.collect()
    }

    /// Gives up what rank 0 has said nothing about for too long, if it has said nothing about any other for as long: what it has run
    /// may take its time, with the rest behind it. Returns when to look again.
    fn expire(&self, now: Instant, heard: Option<Instant>) -> Option<Instant> {
        let until = |pending: &Pending| {
            let since_heard = heard.map(|heard| heard + pending.limit + SILENT);
            since_heard.map_or(pending.until, |until| until.max(pending.until))
        };
        let (silent, next) = {
            let mut state = self.lock();
            let silent: Vec<(Key, Pending)> = state
                .pending
                .extract_if(|_, pending| now >= until(pending))
                .collect();
            (silent, state.pending.values().map(until).min())
        };
        for ((call, name), pending) in silent {
            let error = CollectiveError::Deadline {
                operation: format!("{} named `{name}`", pending.operation),
                waited: pending.limit,
                late: vec![Rank(self.members[0])],
                doing: self.family.who_waits(),
            };
            self.family.failed(call, &error);
            pending.fail(&self.data, Tag::new(call, 0), error);
        }
        next
    }

    /// Whether anything waits for rank 0.
    fn is_waiting(&self) -> bool {
        !self.lock().pending.is_empty()
    }

    /// The error of what waits when there is no link to rank 0.
    fn unlinked(&self, cause: Cause) -> CollectiveError {
        cause
            .into_own_error(Rank(self.me), CallId(self.lock().call), "names")
            .with_ranks(|rank| self.job_rank(rank))
    }

    /// The member that a rank of all is.
    fn position(&self, rank: u32) -> Option<u32> {
        let position = self.members.iter().position(|member| *member == rank)?;
        Some(position as u32)
    }

    /// Rank 0 says that these wait for long.
    fn stalled(
        &self,
        call: u64,
        names: Vec<String>,
        waited: Duration,
        missing: Vec<(u32, String)>,
    ) {
        let what: Vec<String> = {
            let state = self.lock();
            let started = |name: &String| {
                let pending = state.pending.get(&(call, name.clone()))?;
                Some(format!("{} named `{name}`", pending.operation))
            };
            names.iter().filter_map(started).collect()
        };
        if what.is_empty() {
            return;
        }
        let missing = missing
            .into_iter()
            .map(|(rank, doing)| Missing {
                rank: self.job_rank(Rank(rank)),
                doing,
            })
            .collect();
        let more = what.len().saturating_sub(6);
        let mut operation = what[..what.len().min(6)].join(", ");
        if more > 0 {
            operation = format!("{operation} and {more} more");
        }
        self.family.stalls.report(StallReport {
            operation,
            group: self.id,
            tag: Tag::new(call, 0),
            waited,
            missing,
        });
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        self.family.leave(self.id);
    }
}

/// A timer that never fires is a year long.
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

fn until(at: Option<Instant>, now: Instant) -> Instant {
    at.unwrap_or(now + YEAR)
}
