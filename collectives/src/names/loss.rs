//! What a lost rank means for named operations.
//!
//! Who hears of a loss may end at once, and then its own link ends, too. So it says first why, and who finds that a link has
//! ended names the rank with which it began. A link alone, or a loss of which the sender knows no more than that, is believed for what
//! waits at that moment. That a rank is lost for good follows from the end of its own link, from a question, or from the word
//! of another rank that has found it out so.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use super::farewell::Then;
use super::hub::Hub;
use super::wire::{Down, Up};
use super::{Command, Names};
use crate::cause::Cause;
use crate::error::CollectiveError;
use crate::group::Saying;

/// Longest that an operation waits until it is said why it failed: as long as a busy host may need for it.
const TOLD: Duration = Duration::from_millis(500);

/// Links that end so shortly one after the other do so for one reason.
const SHORTLY: Duration = Duration::from_secs(1);

/// The ends of one rank's links are seen at different times. In this one all are, as a rule.
const ALL_ENDS: Duration = Duration::from_millis(200);

/// Who says that it has lost a rank ends because of that in this time, if it does: so long it may take to find out over QUIC.
const BECAUSE: Duration = Duration::from_secs(5);

/// A rank that is lost, by its number among the members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Loss {
    pub(super) rank: u32,
    pub(super) reason: String,
    /// It is gone, and not only a link to it.
    pub(super) for_good: bool,
}

impl Loss {
    pub(super) fn cause(&self) -> Cause {
        Cause::Lost {
            rank: Rank(self.rank),
            reason: self.reason.clone(),
            for_good: self.for_good,
        }
    }

    /// A rank is gone, and with it all that works here, because another one is lost.
    fn because_of(self, first: Option<Self>) -> Self {
        match first {
            Some(first) => Self {
                for_good: true,
                ..first
            },
            None => self,
        }
    }

    /// What a peer says of a loss in a group of so many.
    pub(super) fn of(cause: &Cause, world: u32) -> Option<Self> {
        match cause {
            Cause::Lost {
                rank,
                reason,
                for_good,
            } if rank.0 < world => Some(Self {
                rank: rank.0,
                reason: reason.clone(),
                for_good: *for_good,
            }),
            _ => None,
        }
    }
}

/// A loss because of which somebody may end, and since when.
#[derive(Debug, Clone)]
pub(super) struct Words(Loss, Instant);

impl Words {
    pub(super) fn now(loss: Loss) -> Self {
        Self(loss, Instant::now())
    }

    pub(super) fn is_of(&self, rank: u32) -> bool {
        self.0.rank == rank
    }

    /// The loss, if it is not older than that.
    fn within(&self, age: Duration) -> Option<&Loss> {
        (self.1.elapsed() < age).then_some(&self.0)
    }
}

impl Names {
    /// Gives up all that wait, and all to come. What was heard first stays.
    pub(super) fn give_up_for_good(&self, loss: &Loss) {
        let (error, is_news) = {
            let mut state = self.lock();
            let is_news = state.lost.is_none();
            let error = state.lost.get_or_insert_with(|| self.error_of(loss));
            (error.clone(), is_news)
        };
        self.fail_all(u64::MAX, &error);
        if is_news && loss.rank != self.me {
            self.leave_data(self.members[loss.rank as usize], loss.reason.clone());
        }
    }

    /// The other groups hear of a rank that is lost, for now or for good.
    pub(super) fn tell_elsewhere(&self, loss: &Loss) -> Vec<Saying> {
        if loss.rank == self.me {
            return Vec::new();
        }
        let rank = self.members[loss.rank as usize];
        self.family.lost_in(&[self.id], rank, &loss.reason)
    }

    fn error_of(&self, loss: &Loss) -> CollectiveError {
        CollectiveError::PeerLost {
            rank: self.job_rank(Rank(loss.rank)),
            reason: loss.reason.clone(),
        }
    }

    /// An operation whose turn it was has failed because a rank (one of all) is lost. Waits for a moment until the others can
    /// hear of it on the links for names: if this rank ends because of that, they know why.
    pub(crate) fn lost_in_turn(&self, rank: u32, reason: &str, for_good: bool) {
        let Some(position) = self.position(rank) else {
            return;
        };
        let (told, is_told) = channel();
        let loss = Loss {
            rank: position,
            reason: reason.to_owned(),
            for_good,
        };
        self.tell(Command::LostInTurn { loss, told });
        // If it can't be said by then it is lost.
        is_told.recv_timeout(TOLD).unwrap_or_default();
    }

    /// The member of which it was heard first that it is gone, if any is.
    pub(super) fn first_lost(&self) -> Option<Loss> {
        let state = self.data.signals.lock();
        let (rank, reason) = state.lost.first()?;
        Some(Loss {
            rank: self.position(self.data.job_rank(rank))?,
            reason: reason.to_owned(),
            for_good: true,
        })
    }
}

/// A link that has ended, while it is not clear whether because of another rank.
pub(super) struct Postponed {
    ended: Loss,
    words: Option<Words>,
    until: Instant,
}

impl Hub {
    /// A link has ended. Why is judged when all links were read.
    pub(super) fn postpone(&mut self, ended: Loss, words: Option<Words>) {
        self.postponed.push(Postponed {
            ended,
            words,
            until: Instant::now() + ALL_ENDS,
        });
    }

    /// What it means that links have ended. Returns when to look again.
    pub(super) fn judge_postponed(&mut self, names: &Arc<Names>) -> Option<Instant> {
        let now = Instant::now();
        let is_due = |hub: &Self, one: &Postponed| {
            let first = hub.who_began(one);
            let is_there = first.is_some_and(|first| !first.for_good && hub.is_there(first.rank));
            !is_there || now >= one.until
        };
        while let Some(due) = self.postponed.iter().position(|one| is_due(self, one)) {
            self.judge(names, due);
        }
        self.postponed.iter().map(|one| one.until).min()
    }

    /// What it means that the link of a rank had ended that has another one now.
    pub(super) fn judge_before_it_is_back(&mut self, names: &Arc<Names>, rank: u32) {
        while let Some(old) = (self.postponed.iter()).position(|one| one.ended.rank == rank) {
            self.judge(names, old);
        }
    }

    fn judge(&mut self, names: &Arc<Names>, index: usize) {
        let first = self.who_began(&self.postponed[index]);
        // One that is there is not the one with which it began.
        let first = first.filter(|first| first.for_good || !self.is_there(first.rank));
        let words = first.map(Words::now);
        let one = self.postponed.remove(index);
        let line = if self.me == 0 { one.ended.rank } else { 0 } as usize;
        // If it can't be linked again, or others have left because of it, that is why.
        if self.lines[line].lane.is_none() {
            self.lines[line].last_words.clone_from(&words);
        }
        self.line_ended(names, one.ended, words.as_ref());
    }

    /// The rank because of which one has left whose link has ended, which may have left because of a third one, and so on.
    fn who_began(&self, one: &Postponed) -> Option<Loss> {
        let mut first = self.said_before(&one.ended, one.words.as_ref())?;
        // They may have lost each other.
        for _ in 0..self.lines.len() {
            let next = self.said_before(&first, self.words_of(first.rank));
            match next.filter(|next| next.rank != one.ended.rank) {
                Some(next) => first = next,
                None => break,
            }
        }
        Some(first)
    }

    /// What a rank said last whose link has ended.
    fn words_of(&self, rank: u32) -> Option<&Words> {
        let ended = self.postponed.iter().find(|one| one.ended.rank == rank);
        if let Some(ended) = ended {
            return ended.words.as_ref();
        }
        // On others there is one line, to rank 0.
        let line = self.lines.get(rank as usize)?;
        let is_kept = line.lane.is_none() && (self.me == 0 || rank == 0);
        line.last_words.as_ref().filter(|_| is_kept)
    }

    /// Whether a rank has a link that would have ended with it.
    fn is_there(&self, rank: u32) -> bool {
        let line = self
            .book
            .as_ref()
            .and_then(|_| self.lines.get(rank as usize));
        line.is_some_and(|line| line.lane.is_some())
    }

    /// A link has ended, maybe because of another rank.
    fn line_ended(&mut self, names: &Arc<Names>, ended: Loss, words: Option<&Words>) {
        match self.first_before(names, &ended, words) {
            Some(first) if first.for_good => return self.declare_lost(names, first),
            Some(first) => {
                self.fail_what_waits(names, &first);
                self.ended_last = Some(Words::now(first));
            }
            None => {
                self.ended_last = Some(Words::now(ended.clone()));
                if !ended.for_good {
                    self.fail_what_waits(names, &ended);
                }
            }
        }
        if ended.for_good {
            let why = self.said_before(&ended, words);
            self.declare_lost(names, ended.because_of(why));
        }
    }

    /// A rank of which nothing was heard is gone. It is lost in all groups, and this hears of that from there.
    pub(super) fn found_gone(&mut self, names: &Arc<Names>, gone: &Loss) {
        let line = if self.me == 0 { gone.rank } else { 0 };
        let words = self.lines[line as usize].last_words.take();
        let words = words.filter(|words| words.0.for_good || !self.is_there(words.0.rank));
        if let Some(first) = self.first_before(names, gone, words.as_ref()) {
            self.fail_what_waits(names, &first);
        }
        if let Some(first) = self.said_before(gone, words.as_ref()) {
            self.declare_lost(names, gone.clone().because_of(Some(first)));
        }
        (names.family).rank_lost(names.members[gone.rank as usize], &gone.reason);
    }

    /// The rank because of which another one is lost, if there is one.
    pub(super) fn first_before(
        &self,
        names: &Names,
        lost: &Loss,
        words: Option<&Words>,
    ) -> Option<Loss> {
        let just_ended = || self.ended_last.as_ref()?.within(SHORTLY).cloned();
        self.said_before(lost, words)
            .or_else(|| names.first_lost())
            .or_else(just_ended)
            .filter(|loss| self.is_other(loss, lost))
    }

    /// The rank because of which another one has left, as that one said.
    fn said_before(&self, lost: &Loss, words: Option<&Words>) -> Option<Loss> {
        let said = words.and_then(|words| words.within(BECAUSE));
        said.filter(|loss| self.is_other(loss, lost)).cloned()
    }

    /// That the other one has lost this rank says nothing of who was lost first.
    fn is_other(&self, loss: &Loss, lost: &Loss) -> bool {
        loss.rank != self.me && loss.rank != lost.rank
    }

    /// Only what waits now fails because of it.
    pub(super) fn fail_what_waits(&mut self, names: &Arc<Names>, loss: &Loss) {
        self.farewell.say_elsewhere(names.tell_elsewhere(loss));
        if let Some(book) = &mut self.book {
            book.lost(loss.cause(), false);
            self.say_why(names, loss);
        } else {
            self.fail_waiting(names, names.error_of(loss));
        }
    }

    /// All that wait on this rank fail, when the other groups can hear why.
    pub(super) fn fail_waiting(&mut self, names: &Names, error: CollectiveError) {
        let then = Then::FailWaiting(names.take_waiting(u64::MAX), error);
        self.farewell.add(then);
    }

    /// A rank is gone: nothing with a name works any more. All are told, those that have nothing under way as well: when this
    /// rank leaves because of it, they know why.
    pub(super) fn declare_lost(&mut self, names: &Arc<Names>, loss: Loss) {
        // With the first one it began.
        let loss = self.declared.get_or_insert(loss).clone();
        if let Some(book) = &mut self.book {
            book.lost(loss.cause(), true);
        }
        self.farewell.say_elsewhere(names.tell_elsewhere(&loss));
        self.farewell.add(Then::GiveUp(loss.clone()));
        self.say_why(names, &loss);
    }

    /// Says why this rank may end now.
    pub(super) fn say_why(&mut self, names: &Arc<Names>, loss: &Loss) {
        let cause = loss.cause().encode();
        if self.book.is_some() {
            self.say_all(&Down::Fail {
                call: 0,
                heard: 0,
                names: Vec::new(),
                cause,
            });
        } else if self.lines[0].lane.is_some() || self.lines[0].connecting {
            self.say(names, &Up::Over { before: 0, cause });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::sync::Mutex;
    use std::task::{Context, Poll, Waker};

    use kolo_transport::ids::{Generation, JobId};

    use super::*;
    use crate::communicator::Communicator;
    use crate::group::GroupId;
    use crate::lane::{Connecting, Connector, Lane, LaneError, MemoryLane};
    use crate::names::wire;
    use crate::operation::ReduceOp;

    /// Its end says nothing of the peer, as that of a link through a network.
    #[derive(Debug)]
    struct Breakable(MemoryLane);

    impl Lane for Breakable {
        fn poll_write(
            &mut self,
            cx: &mut Context<'_>,
            parts: &[IoSlice<'_>],
        ) -> Poll<Result<usize, LaneError>> {
            self.0.poll_write(cx, parts)
        }

        fn poll_read(
            &mut self,
            cx: &mut Context<'_>,
            into: &mut [u8],
        ) -> Poll<Result<usize, LaneError>> {
            self.0.poll_read(cx, into)
        }

        fn kind(&self) -> &'static str {
            "memory"
        }
    }

    #[derive(Debug)]
    struct MadeOnce(Mutex<Option<Breakable>>);

    impl Connector for MadeOnce {
        fn connect(&self, peer: Rank) -> Connecting {
            let lane = self.0.lock().unwrap().take();
            Box::pin(async move {
                let lane = lane.ok_or_else(|| LaneError::Unreachable {
                    reason: format!("nothing listens where rank {peer} was"),
                })?;
                Ok(Box::new(lane) as Box<dyn Lane>)
            })
        }

        fn connect_group(&self, peer: Rank, _group: GroupId) -> Connecting {
            self.connect(peer)
        }
    }

    #[test]
    fn who_said_why_it_goes_and_can_not_be_reached_is_not_named() {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
        let (mine, mut theirs) = MemoryLane::pair(1 << 16);
        let connector = Arc::new(MadeOnce(Mutex::new(Some(Breakable(mine)))));
        let (generation, job) = (Generation(1), JobId(1));
        let handle = runtime.handle().clone();
        let comm = Communicator::new(Rank(2), 3, generation, job, connector, handle).unwrap();
        let cause = Cause::Lost {
            rank: Rank(1),
            reason: "killed".to_owned(),
            for_good: false,
        };
        let mut words = Vec::new();
        let fail = Down::Fail {
            call: 0,
            heard: 0,
            names: Vec::new(),
            cause: cause.encode(),
        };
        wire::put(&mut words, &fail);
        let mut cx = Context::from_waker(Waker::noop());
        let sent = theirs.poll_write(&mut cx, &[IoSlice::new(&words)]);
        assert!(matches!(sent, Poll::Ready(Ok(count)) if count == words.len()));
        drop(theirs);
        let sum = || {
            let sum = comm.named("sum").all_reduce(vec![1.0_f32], ReduceOp::Sum);
            sum.wait().unwrap_err()
        };
        // The link to rank 0 ends, and then there is none to be had.
        for _ in 0..2 {
            let error = sum();
            assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
        }
    }

    #[test]
    fn a_loss_is_said_and_understood() {
        let loss = Loss {
            rank: 3,
            reason: "killed".to_owned(),
            for_good: false,
        };
        assert_eq!(Loss::of(&loss.cause(), 4), Some(loss.clone()));
        // It is none of the group's.
        assert_eq!(Loss::of(&loss.cause(), 3), None);
        let left = Cause::Left {
            rank: Rank(1),
            reason: String::new(),
        };
        assert_eq!(Loss::of(&left, 4), None);
        let words = Words::now(loss.clone());
        assert_eq!(words.within(Duration::MAX), Some(&loss));
        assert_eq!(words.within(Duration::ZERO), None);
    }
}
