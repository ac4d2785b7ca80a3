//! Operations that are told apart by name, and that each rank may start in another order.
//!
//! Every rank tells the coordinator what it has started. The coordinator is the member with the lowest rank in the job: members
//! are counted here in that order, so it is member 0. When all ranks have asked for a name, the coordinator gives the operation a
//! number, which all ranks follow; small operations that are alike become one. Nothing ticks: what gets ready while other
//! operations run is what is fused. The messages go over links of a reserved group, and the operations run in a second one.
//!
//! | part | content |
//! |---|---|
//! | [`book`] | what the coordinator knows and decides: events in, decisions out, no I/O |
//! | [`messages`] | what is said on the links, no I/O |
//! | [`shell`] | the task that moves messages between the links ([`line`]), the book and this rank |
//! | [`ending`] | operations that fail: what they wait for before they end |
//! | [`joining`] | ranks without data |
//! | [`turn`] | running what was decided |
//! | [`member`] | what comes from outside: calls, losses, links |
//! | this module | the operations of this rank that wait for their turn |

mod book;
mod ending;
mod joining;
mod line;
mod member;
mod messages;
mod shell;
mod turn;

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kolo_transport::ids::{CallId, Rank};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::communicator::Communicator;
use crate::error::CollectiveError;
use crate::group_core::{GroupCore, Named};
use crate::lane::{Lane, LaneError};
use crate::operation::{Operation, Tag};
use crate::options::Options;
use crate::rank_shared::{GroupId, Kind, RankShared};
use crate::record::ShortName;
use crate::stall::{Missing, StallReport};
use crate::times::{FOREVER, SILENT};
use joining::Joining;
use messages::{Key, Request, Up};

/// Most bytes that are fused in one operation, if nothing else is set.
const THRESHOLD: u64 = 128 << 20;

/// Most characters of a name that ranks tell each other when they say what they do.
const SHOWN: usize = 100;

/// Most names in a text for people.
const LISTED: usize = 6;

/// Most named operations of one rank that wait at once. Further ones are refused.
const MOST: usize = 1 << 16;

/// An operation that may be done together with others that are [alike](may_fuse).
pub(crate) trait Fusable: Any + Send {
    /// Does this operation and the others as one.
    fn perform(self: Box<Self>, others: Vec<Box<dyn Fusable>>, comm: &Communicator);

    /// Ends the operation, which can't be done.
    fn fail(self: Box<Self>, error: CollectiveError);
}

/// Whether an operation of so many ranks may be fused with others. Pure: all ranks say the same.
pub(crate) fn may_fuse(operation: &Operation, world: u32) -> bool {
    book::likeness(operation, world).is_some()
}

/// What is done when it is a name's turn.
pub(crate) enum Task {
    Fusable(Box<dyn Fusable>),
    /// The closure gets the communicator for the operation, or the reason why there is no turn.
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

/// What the shell is told.
enum Command {
    /// This rank says something to the coordinator, which it may be itself.
    Say(Up),
    /// Calls before this one are over on this rank. What of them waits here ends with this error.
    Over {
        before: u64,
        cause: CollectiveError,
        error: CollectiveError,
    },
    /// A member is lost: nothing with a name works any more.
    Lost(CollectiveError),
    /// The group is revoked: what waits for a word on a lost rank ends as well.
    Revoked(CollectiveError),
    /// An operation that was decided has ended on this rank.
    Ended,
    /// A link of a member has come, with what was read from it already, or it will not come.
    Arrived {
        member: u32,
        lane: Result<(Box<dyn Lane>, Vec<u8>), LaneError>,
    },
    /// Nobody is there who could be asked for the link of a member.
    NotAsked {
        member: u32,
        error: LaneError,
    },
    /// The coordinator asks for this rank's link.
    Requested,
    /// This rank's link to the coordinator is being made already.
    Connecting,
    SetThreshold(u64),
}

/// The named operations of one rank in one group.
pub(crate) struct Negotiation {
    id: GroupId,
    /// The number of this rank among the members.
    me: u32,
    world: u32,
    /// The members' ranks in the job, in ascending order, whatever their order in the group is.
    members: Vec<u32>,
    rank_shared: Arc<RankShared>,
    /// The group in which the operations run.
    data: Arc<GroupCore>,
    commands: UnboundedSender<Command>,
    state: Mutex<State>,
}

/// An operation that waits for its turn.
struct Pending {
    name: ShortName,
    options: Options,
    operation: Operation,
    task: Task,
    /// The number of this rank's word to the coordinator about it.
    serial: u64,
    started: Instant,
    limit: Duration,
}

impl Pending {
    /// Ends the operation without a turn. The record has the number of the first operation of its call.
    fn fail(self, data: &GroupCore, tag: Tag, error: CollectiveError) {
        let recorder = &data.rank_shared.recorder;
        recorder.refused((data.id, tag), self.operation, self.name, self.started);
        self.task.fail(error);
    }
}

/// Operations that wait no more, and have not ended yet.
type Taken = Vec<(Key, Pending)>;

#[derive(Default)]
struct State {
    pending: HashMap<Key, Pending>,
    call: u64,
    /// Why nothing with a name works any more.
    lost: Option<CollectiveError>,
    /// The call that has failed on this rank, and why.
    failed_call: Option<(u64, CollectiveError)>,
    joining: Joining,
}

impl State {
    /// Why an operation of this name can't wait for its turn.
    fn why_not(&self, name: &str) -> Option<CollectiveError> {
        let failed = self.failed_call.as_ref();
        let failed = failed.filter(|(call, _)| *call >= self.call);
        if let Some(error) = self.lost.as_ref().or(failed.map(|(_, error)| error)) {
            return Some(error.clone());
        }
        let (length, most, waiting) = (name.len(), messages::NAME, self.pending.len());
        let reason = if length > most {
            format!("the name of an operation has {length} bytes: it may have up to {most}")
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

    /// Takes an operation that waits, if the coordinator had heard of it.
    fn take(&mut self, key: Key, heard: u64) -> Option<(Key, Pending)> {
        match self.pending.entry(key) {
            Entry::Occupied(entry) if entry.get().serial <= heard => Some(entry.remove_entry()),
            _ => None,
        }
    }
}

impl fmt::Debug for Negotiation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Negotiation")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl Negotiation {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that runs under the lock panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The named operations of this rank in the group `parent`, begun at first use.
    pub(crate) fn of(parent: &GroupCore) -> Arc<Self> {
        let named: Arc<dyn Any + Send + Sync> = Arc::clone(parent.named()) as _;
        (named.downcast()).expect("all groups start named operations by `Negotiation::start`")
    }

    /// Begins the named operations of this rank in the group `parent`.
    pub(crate) fn start(parent: &GroupCore) -> Arc<dyn Named> {
        let mut members = parent.job_ranks();
        let id = parent.named_id();
        let data_id = parent.id.child(Kind::Negotiated, 0, &members);
        let data = parent.group(data_id, members.clone(), parent.me);
        let own = parent.job_rank(parent.me);
        // Links to lower ranks are this rank's to make, and all members have a link to the first.
        members.sort_unstable();
        let me = members.partition_point(|member| *member < own) as u32;
        let (commands, todo) = unbounded_channel();
        let this = Arc::new(Self {
            id,
            me,
            world: parent.world,
            rank_shared: Arc::clone(&parent.rank_shared),
            data,
            members,
            commands,
            state: Mutex::new(State {
                call: parent.signals.lock().call,
                ..State::default()
            }),
        });
        this.rank_shared.join(id, &this);
        // A loss that came before the group was there.
        let lost = this.data.signals.lock().lost.error();
        match lost.map(|error| this.data.outward(error)) {
            Some(CollectiveError::PeerLost { rank, reason }) => this.lose(rank.0, &reason),
            Some(error) => this.give_up(&error),
            None => {}
        }
        let shell = shell::Shell::new(&this, todo);
        parent.rank_shared.handle.spawn(shell.run());
        this
    }

    fn tell(&self, command: Command) {
        // The shell lives as long as this does.
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
        let limit = limit.min(FOREVER);
        let mut pending = Pending {
            name: ShortName::new(name),
            options,
            operation,
            task,
            serial: 0,
            started: Instant::now(),
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
        // Under the lock: the coordinator hears all in the order in which it happened.
        self.tell(Command::Say(Up::Ask { key, request }));
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        self.data.signals.lock().timeout = timeout;
    }

    pub(crate) fn set_threshold(&self, threshold: u64) {
        self.tell(Command::SetThreshold(threshold));
    }

    /// The rank of a member in the job.
    fn job_rank(&self, member: u32) -> u32 {
        (self.members.get(member as usize).copied()).unwrap_or(member)
    }

    /// The member with this rank in the job.
    fn position(&self, rank: u32) -> Option<u32> {
        let position = self.members.binary_search(&rank).ok()?;
        Some(position as u32)
    }

    /// The member with this rank in the job, if this rank has a link to it: member 0 has one to each, the others to member 0.
    fn linked(&self, rank: u32) -> Option<u32> {
        let position = self.position(rank)?;
        ((self.me == 0) != (position == 0)).then_some(position)
    }

    /// Takes these operations from those that wait, but for those of which the coordinator had not heard.
    fn take(&self, call: u64, names: &[String], heard: u64) -> Taken {
        let mut state = self.lock();
        let of_name = |name: &String| state.take((call, name.clone()), heard);
        names.iter().filter_map(of_name).collect()
    }

    /// Takes all operations that wait and are of calls before this one.
    fn take_before(&self, call: u64) -> Taken {
        let mut state = self.lock();
        let taken = state.pending.extract_if(|key, _| key.0 < call);
        taken.collect()
    }

    /// Ends operations with a cause that names members.
    fn fail(&self, taken: Taken, cause: &CollectiveError) {
        for ((call, name), pending) in taken {
            let what = format!("{} named `{name}`", pending.operation);
            let error = cause.clone();
            let error = match error.heard_in(CallId(call), &what) {
                // Nobody else has failed.
                CollectiveError::PeerFailed { rank, reason, .. } if rank == Rank(self.me) => {
                    CollectiveError::Aborted { reason }
                }
                error => error,
            };
            let error = error.with_ranks(|rank| Rank(self.job_rank(rank.0)));
            let error = self.rank_shared.add_who_waits(error);
            self.rank_shared.failed(call, &error);
            pending.fail(&self.data, Tag::new(call, 0), error);
        }
    }

    fn fail_with(&self, taken: Taken, error: &CollectiveError) {
        for ((call, _), pending) in taken {
            pending.fail(&self.data, Tag::new(call, 0), error.clone());
        }
    }

    /// Ends all that waits and all to come. The first reason stays.
    fn give_up(&self, error: &CollectiveError) {
        let first = self.lock().lost.get_or_insert(error.clone()).clone();
        self.fail_with(self.take_before(u64::MAX), &first);
    }

    /// Gives up operations on which the coordinator has said nothing for too long, and nothing on any other for as long: an
    /// operation that it has decided may take its time, with the rest behind it. Returns when to look again.
    fn expire(&self, now: Instant, decided: Option<Instant>) -> Option<Instant> {
        let until = |pending: &Pending| {
            let since = decided.map_or(pending.started, |at| at.max(pending.started));
            since + pending.limit + SILENT
        };
        let (silent, next) = {
            let mut state = self.lock();
            let silent: Taken = (state.pending)
                .extract_if(|_, pending| now >= until(pending))
                .collect();
            (silent, state.pending.values().map(until).min())
        };
        for ((call, name), pending) in silent {
            let error = CollectiveError::Deadline {
                operation: format!("{} named `{name}`", pending.operation),
                waited: pending.limit,
                late: vec![Rank(self.members[0])],
                doing: self.rank_shared.who_waits(),
            };
            self.rank_shared.failed(call, &error);
            pending.fail(&self.data, Tag::new(call, 0), error);
        }
        next
    }

    /// Reports those of these names that wait here. They have waited for so long for these members.
    fn report_stall(
        &self,
        call: u64,
        names: Vec<String>,
        waited: Duration,
        missing: Vec<(u32, String)>,
    ) {
        let waiting: Vec<String> = {
            let state = self.lock();
            let described = names.into_iter().filter_map(|name| {
                let key = (call, name);
                let operation = state.pending.get(&key)?.operation;
                Some(format!("{operation} named `{}`", key.1))
            });
            described.collect()
        };
        if waiting.is_empty() {
            return;
        }
        let missing = missing.into_iter().map(|(member, doing)| Missing {
            rank: Rank(self.job_rank(member)),
            doing,
        });
        self.rank_shared.stalls.report(StallReport {
            operation: listed(&waiting),
            group: self.id,
            tag: Tag::new(call, 0),
            waited,
            missing: missing.collect(),
        });
    }
}

impl Named for Negotiation {
    fn data(&self) -> &GroupCore {
        &self.data
    }

    fn lost(&self, rank: u32, reason: &str) {
        // Each operation that fails after a loss says so again.
        if self.lock().lost.is_none() {
            self.lose(rank, reason);
        }
    }
}

impl Drop for Negotiation {
    fn drop(&mut self) {
        self.rank_shared.leave(self.id);
    }
}

/// The first texts, and how many more there are.
fn listed(texts: &[String]) -> String {
    let first = texts[..texts.len().min(LISTED)].join(", ");
    match texts.len().saturating_sub(LISTED) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}
