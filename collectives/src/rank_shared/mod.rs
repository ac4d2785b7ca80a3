//! Groups of ranks, and what all groups of one rank share: the way to the peers, the flight recorder, links that came
//! before the group that they are for.

mod early_links;
mod heard;
pub(crate) mod listener;
pub(crate) mod signals;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use kolo_transport::ids::{CallId, Generation, JobId, Rank};
use tokio::runtime::Handle;

use crate::error::CollectiveError;
pub(crate) use crate::group_id::GroupId;
pub(crate) use crate::group_id::Kind;
use crate::lane::{Connecting, Connector, Lane, LaneError, OneHost};
use crate::link::Link;
use crate::operation::Tag;
use crate::record::Recorder;
use crate::stall::Stalls;
use crate::times::LONGEST_WORD;
use early_links::EarlyLinks;
use heard::Heard;

/// Groups that are known to have been here. Of those before nobody makes a link any more.
const MAX_GONE: usize = 1 << 16;

/// Something that has links of its own.
pub(crate) trait Member: Send + Sync {
    /// A link is there, or will not be; the rank is one of all ranks. `theirs` says that it is the peer that has tried.
    fn lane(
        self: Arc<Self>,
        rank: u32,
        lane: Result<Box<Link>, LaneError>,
        theirs: bool,
    ) -> Result<(), LaneError>;
    /// A link to a rank (one of all) was begun before this was made, and will come.
    fn connecting(&self, rank: u32);
    /// A user call begins.
    fn begin_call(self: Arc<Self>, call: CallId);
    /// This rank failed in a call.
    fn abort_call(self: Arc<Self>, call: u64, reason: &str);
    /// A rank (one of all) is lost.
    fn rank_lost(self: Arc<Self>, rank: u32, reason: &str);
    /// Nothing is to work any more.
    fn revoke(self: Arc<Self>, reason: &str);
    /// A higher rank (one of all) could not be asked for its link: nobody is there. Of a rank that had a link, that says that the rank is
    /// gone.
    fn not_asked(self: Arc<Self>, rank: u32, error: LaneError);
    /// A lower rank (one of all) asks for its link.
    fn requested(self: Arc<Self>, rank: u32);
    /// Whether this rank has not begun this operation.
    fn has_yet_to_begin(&self, tag: Tag) -> bool;
    /// Makes what is made out of this one when a rank (one of all) needs it, if that has this id: the group for what is sent between
    /// it and this rank, or what runs named operations.
    fn make_child(self: Arc<Self>, group: GroupId, rank: u32);
    /// Since when and for what this rank waits that is no operation yet.
    fn waits(&self) -> Option<(Instant, String)>;
}

/// What the groups of one rank share.
pub(crate) struct RankShared {
    /// Among all ranks.
    pub(crate) me: u32,
    pub(crate) world: u32,
    pub(crate) generation: Generation,
    pub(crate) job: JobId,
    connector: Arc<dyn Connector>,
    pub(crate) handle: Handle,
    pub(crate) recorder: Recorder,
    pub(crate) stalls: Stalls,
    /// Held while a group is made of another one, and while something is told to all groups: a new group is told, or takes over
    /// what the other one was told. Lock order: this before all others.
    telling: Mutex<()>,
    /// Links for groups that are not made yet. Lock order: this before the state.
    early_links: Mutex<EarlyLinks>,
    state: Mutex<State>,
}

/// A peer is being asked for its link to a group.
struct Requested(Weak<RankShared>, (GroupId, u32));

impl Drop for Requested {
    fn drop(&mut self) {
        if let Some(rank_shared) = self.0.upgrade() {
            rank_shared.lock().requesting.remove(&self.1);
        }
    }
}

#[derive(Default)]
struct State {
    members: HashMap<GroupId, Weak<dyn Member>>,
    /// Those that are being made to lower ranks, which have asked for them.
    begun: HashSet<(GroupId, u32)>,
    /// Groups that were here and are gone, and in which order they went.
    gone: HashSet<GroupId>,
    went: VecDeque<GroupId>,
    /// The ranks that are being asked for their links, one request at a time for each group.
    requesting: HashSet<(GroupId, u32)>,
    /// What ranks ask for in groups in which this one has not come so far, by rank.
    heard: HashMap<u32, Heard>,
    /// Groups of one rank that sends and one that receives.
    pairs: HashMap<GroupId, (u32, u32)>,
    /// The last operation that failed, and in which call.
    failure: Option<(u64, CollectiveError)>,
}

fn is_gone(group: GroupId) -> LaneError {
    LaneError::Unreachable {
        reason: format!("this rank has no communicator for {group}"),
    }
}

impl fmt::Debug for RankShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankShared")
            .field("me", &self.me)
            .finish_non_exhaustive()
    }
}

impl RankShared {
    pub(crate) fn new(
        (me, world): (u32, u32),
        generation: Generation,
        job: JobId,
        connector: Arc<dyn Connector>,
        handle: Handle,
    ) -> Self {
        Self {
            me,
            world,
            generation,
            job,
            connector,
            handle,
            recorder: Recorder::new(world),
            stalls: Stalls::default(),
            telling: Mutex::default(),
            early_links: Mutex::default(),
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that runs under the lock panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn early_links(&self) -> MutexGuard<'_, EarlyLinks> {
        let links = self.early_links.lock();
        links.unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks whether these ranks of the job are on this host.
    pub(crate) fn is_one_host(&self, ranks: &[Rank]) -> Option<OneHost> {
        self.connector.is_one_host(ranks)
    }

    /// Starts making a link.
    pub(crate) fn connect(&self, group: GroupId, peer: u32) -> Connecting {
        if group == GroupId::WORLD {
            self.connector.connect(Rank(peer))
        } else {
            self.connector.connect_group(Rank(peer), group)
        }
    }

    /// Asks a higher rank for the link that is its to make, if there is a way.
    pub(crate) fn request(self: &Arc<Self>, group: GroupId, peer: u32) {
        if !self.lock().requesting.insert((group, peer)) {
            return;
        }
        let requesting = self.connector.request(Rank(peer), group);
        let requested = Requested(Arc::downgrade(self), (group, peer));
        if let Some(requesting) = requesting {
            self.handle.spawn(async move {
                let asked = requesting.await;
                let rank_shared = requested.0.clone();
                drop(requested);
                if let (Err(error), Some(rank_shared)) = (asked, rank_shared.upgrade()) {
                    tracing::debug!(peer, %error, "a rank can't be asked for a link");
                    let member = rank_shared
                        .lock()
                        .members
                        .get(&group)
                        .and_then(Weak::upgrade);
                    // A rank that is only slow is late.
                    if let Some(member) = member.filter(|_| error.says_nobody_is_there()) {
                        member.not_asked(peer, error);
                    }
                }
            });
        }
    }

    /// How long after the end of a link the word of the authority may take to come.
    pub(crate) fn patience(&self) -> Duration {
        self.connector.word_within().min(LONGEST_WORD)
    }

    /// A group is here. It gets the links that came before it.
    pub(crate) fn join(&self, id: GroupId, member: &Arc<impl Member + 'static>) {
        let weak = Arc::downgrade(member);
        let early = {
            let mut early_links = self.early_links();
            let mut state = self.lock();
            state.members.insert(id, weak);
            let begun = state.begun.iter().filter(|(group, _)| *group == id);
            for (_, rank) in begun {
                member.connecting(*rank);
            }
            early_links.take(id)
        };
        for (rank, lane) in early {
            if let Err(error) = Arc::clone(member).lane(rank, lane, true) {
                tracing::debug!(rank, %error, "a link that came early is of no use");
            }
        }
    }

    /// Makes what is made out of a new group when a rank needs it, if one does already.
    pub(crate) fn offer(&self, member: &Arc<impl Member + 'static>) {
        let wanted = self.early_links().wanted();
        for (group, rank) in wanted {
            Arc::clone(member).make_child(group, rank);
        }
    }

    /// A group goes.
    pub(crate) fn leave(&self, id: GroupId) {
        let mut state = self.lock();
        state.members.remove(&id);
        state.pairs.remove(&id);
        if state.gone.insert(id) {
            state.went.push_back(id);
        }
        if state.went.len() > MAX_GONE
            && let Some(oldest) = state.went.pop_front()
        {
            state.gone.remove(&oldest);
        }
    }

    /// A peer has made a lane.
    pub(crate) fn accept(
        self: &Arc<Self>,
        group: GroupId,
        rank: Rank,
        lane: Box<dyn Lane>,
    ) -> Result<(), LaneError> {
        self.check(rank)?;
        if rank.0 < self.me {
            // Links to lower ranks are this one's to make. One that could not ask for its own, or too early, tries again.
            if let Err(error) = self.requested(group, rank) {
                tracing::debug!(%rank, %error, "a link that is asked for is not made");
            }
            return Ok(());
        }
        self.make_if_child(group, rank);
        self.take_in(group, rank.0, Ok(Box::new(Link::over(lane))), true)
    }

    /// A link is there for a group, or will not be. It waits if the group is not made yet.
    fn take_in(
        self: &Arc<Self>,
        group: GroupId,
        rank: u32,
        link: Result<Box<Link>, LaneError>,
        theirs: bool,
    ) -> Result<(), LaneError> {
        let member = {
            let mut early_links = self.early_links();
            let mut state = self.lock();
            if !theirs {
                state.begun.remove(&(group, rank));
            }
            match state.members.get(&group) {
                Some(member) => member.upgrade().ok_or_else(|| is_gone(group))?,
                None if state.gone.contains(&group) => return Err(is_gone(group)),
                // What this rank could not make now it may make when it needs it.
                None if !theirs && link.is_err() => return Ok(()),
                None => {
                    let attend = |serial| {
                        let attending = early_links::attend(Arc::downgrade(self), serial);
                        Some(self.handle.spawn(attending).abort_handle())
                    };
                    return early_links.put((self.me, self.world), (group, rank), link, attend);
                }
            }
        };
        member.lane(rank, link, theirs)
    }

    /// A lower peer asks for its link.
    pub(crate) fn requested(self: &Arc<Self>, group: GroupId, rank: Rank) -> Result<(), LaneError> {
        self.check(rank)?;
        if rank.0 > self.me {
            return Err(LaneError::Refused {
                reason: format!(
                    "rank {rank} asks rank {} for a link, which the higher rank makes",
                    self.me
                ),
            });
        }
        self.make_if_child(group, rank);
        let member = {
            let mut early_links = self.early_links();
            let mut state = self.lock();
            match state.members.get(&group) {
                Some(member) => member.upgrade().ok_or_else(|| is_gone(group))?,
                None if state.gone.contains(&group) => return Err(is_gone(group)),
                // It is to hear what this rank does instead.
                None => return self.begin((&mut early_links, &mut state), group, rank.0),
            }
        };
        member.requested(rank.0);
        Ok(())
    }

    /// Starts making a link to a lower rank for a group that this one has not made.
    fn begin(
        self: &Arc<Self>,
        (early_links, state): (&mut EarlyLinks, &mut State),
        group: GroupId,
        rank: u32,
    ) -> Result<(), LaneError> {
        // A peer that asks again long after it got its link has lost it.
        if early_links.has_new_link(group, rank) || state.begun.contains(&(group, rank)) {
            return Ok(());
        }
        let coming = state
            .begun
            .iter()
            .filter(|(_, other)| *other == rank)
            .count();
        early_links.check((self.me, self.world), rank, coming)?;
        state.begun.insert((group, rank));
        let (connecting, rank_shared) = (self.connect(group, rank), Arc::downgrade(self));
        self.handle.spawn(async move {
            let lane = connecting.await;
            let Some(rank_shared) = rank_shared.upgrade() else {
                return;
            };
            let link = lane.map(Link::over).map(Box::new);
            if let Err(error) = rank_shared.take_in(group, rank, link, false) {
                tracing::debug!(rank, %error, "a link that was asked for is of no use any more");
            }
        });
        Ok(())
    }

    /// Whether it is another rank.
    fn check(&self, rank: Rank) -> Result<(), LaneError> {
        if rank.0 < self.world && rank.0 != self.me {
            return Ok(());
        }
        Err(LaneError::Refused {
            reason: format!(
                "rank {} of a world of {} can't have a link to rank {rank}",
                self.me, self.world
            ),
        })
    }

    /// Makes what is made when a rank needs it, if it is that and was never here: whoever waits in it is to hear what this rank
    /// does in the meantime.
    fn make_if_child(&self, group: GroupId, rank: Rank) {
        let is_new = {
            let state = self.lock();
            !state.members.contains_key(&group) && !state.gone.contains(&group)
        };
        if is_new {
            for member in self.members() {
                member.make_child(group, rank.0);
            }
        }
    }

    /// A group is for what one rank sends to another.
    pub(crate) fn name_pair(&self, group: GroupId, from: u32, to: u32) {
        self.lock().pairs.insert(group, (from, to));
    }

    pub(crate) fn is_pair(&self, group: GroupId) -> bool {
        self.lock().pairs.contains_key(&group)
    }

    fn members(&self) -> Vec<Arc<dyn Member>> {
        self.lock()
            .members
            .values()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// While it is held nothing is told to all groups.
    pub(crate) fn still(&self) -> MutexGuard<'_, ()> {
        self.telling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn begin_call(&self, call: CallId) {
        let _still = self.still();
        for member in self.members() {
            member.begin_call(call);
        }
    }

    pub(crate) fn abort_call(&self, call: u64, reason: &str) {
        let _still = self.still();
        for member in self.members() {
            member.abort_call(call, reason);
        }
    }

    pub(crate) fn rank_lost(&self, rank: u32, reason: &str) {
        let _still = self.still();
        for member in self.members() {
            member.rank_lost(rank, reason);
        }
    }

    pub(crate) fn revoke(&self, reason: &str) {
        let _still = self.still();
        for member in self.members() {
            member.revoke(reason);
        }
    }

    /// An operation of some group failed. Ranks are those among all.
    pub(crate) fn failed(&self, call: u64, error: &CollectiveError) {
        self.lock().failure = Some((call, error.clone()));
    }

    /// The last failure, if it was in this call.
    pub(crate) fn last_failure(&self, call: u64) -> Option<CollectiveError> {
        let state = self.lock();
        let (of, error) = state.failure.as_ref()?;
        (*of == call).then(|| error.clone())
    }
}
