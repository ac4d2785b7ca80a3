//! Which rank sends what to whom, step by step. No I/O, no clock.
//!
//! A [`Schedule`] is what one rank does in one operation, on a working buffer of its own:
//!
//! 1. its input is copied to [`Schedule::input`];
//! 2. for every [step](Schedule::steps): all sends and receives are posted together; when all are done, the
//!    local actions run in order;
//! 3. the result is copied from [`Schedule::outputs`].
//!
//! For each pair of ranks, the n-th send of one is received by the n-th receive of the other. No step needs
//! a link to hold data that nobody has asked for yet, so schedules can't deadlock whatever the lanes hold.
//! Both are checked for every algorithm and every world size up to 64 without a socket.
//!
//! Results have the same bits on every rank, because every element of a result is either computed by one
//! rank and copied, or computed by every rank from the same inputs in the same order.
//!
//! | algorithm | for | steps | bytes that a rank sends | source |
//! |---|---|---|---|---|
//! | [`Gather`](Algorithm::Gather) | short all-reduce | log2 n | (n-1) S | all-gather by Bruck et al. 1997, then a local reduction in rank order |
//! | [`Halving`](Algorithm::Halving) | middle all-reduce | 2 log2 n, +2 if n is no power of two | 2 S (p-1)/p, + S | Rabenseifner 2004 |
//! | [`Ring`](Algorithm::Ring) | long all-reduce and all-gather | 2 (n-1); n-1 | 2 S (n-1)/n; total less the next rank's share | Patarasuk and Yuan 2009 |
//! | [`Bruck`](Algorithm::Bruck) | short all-gather | log2 n | (n-1) shares | Bruck et al. 1997 |
//! | [`Binomial`](Algorithm::Binomial) | broadcast | log2 n | S for each child | |
//! | [`Dissemination`](Algorithm::Dissemination) | barrier | log2 n | 0 | Hensgen, Finkel and Manber 1988 |

mod bruck;
mod choose;
mod halving;
mod ring;
mod tree;

#[cfg(test)]
mod simulate;
#[cfg(test)]
mod tests;

use std::fmt;

pub use choose::Tuning;
pub(crate) use choose::choose;

/// A stretch of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Span {
    /// First element.
    pub start: usize,
    /// Number of elements; may be 0.
    pub len: usize,
}

impl Span {
    /// The elements from `start` to before `end`.
    #[must_use]
    pub fn between(start: usize, end: usize) -> Self {
        Self {
            start,
            len: end - start,
        }
    }

    /// The first element after it.
    #[must_use]
    pub fn end(self) -> usize {
        self.start + self.len
    }
}

/// One thing to do. Spans are in the rank's own working buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send these elements. A transfer of no elements is still sent: it says that the rank is there.
    Send {
        /// To whom.
        peer: u32,
        /// What.
        span: Span,
    },
    /// Receive elements into their place.
    Receive {
        /// From whom.
        peer: u32,
        /// Where to.
        span: Span,
    },
    /// Receive elements and combine them: `own = own op received`.
    ReceiveReduce {
        /// From whom.
        peer: u32,
        /// With which.
        span: Span,
    },
    /// Local: `into = into op from`. The spans have one length and do not overlap.
    Combine {
        /// The right operands.
        from: Span,
        /// The left operands and the results.
        into: Span,
    },
    /// Local: divide by the world size.
    Divide {
        /// What.
        span: Span,
    },
}

/// How an operation is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// A world of one rank: nothing to exchange.
    Local,
    /// All-reduce: gather all, then every rank reduces all in rank order.
    Gather,
    /// All-reduce: reduce-scatter by recursive halving, all-gather by doubling.
    Halving,
    /// All-reduce or all-gather along a ring.
    Ring,
    /// All-gather by doubling distances.
    Bruck,
    /// Broadcast along a binomial tree.
    Binomial,
    /// Barrier by doubling distances.
    Dissemination,
}

impl Algorithm {
    pub(crate) const ALL: [Self; 7] = [
        Self::Local,
        Self::Gather,
        Self::Halving,
        Self::Ring,
        Self::Bruck,
        Self::Binomial,
        Self::Dissemination,
    ];

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Local => 0,
            Self::Gather => 1,
            Self::Halving => 2,
            Self::Ring => 3,
            Self::Bruck => 4,
            Self::Binomial => 5,
            Self::Dissemination => 6,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|algorithm| algorithm.code() == code)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Local => "local",
            Self::Gather => "gather",
            Self::Halving => "halving",
            Self::Ring => "ring",
            Self::Bruck => "bruck",
            Self::Binomial => "binomial",
            Self::Dissemination => "dissemination",
        })
    }
}

/// Where a stretch of the result goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Output {
    /// Its place in the working buffer.
    pub from: Span,
    /// Its first element's place in the result.
    pub to: usize,
}

/// What one rank does in one operation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Schedule {
    /// Elements of the working buffer.
    pub buffer: usize,
    /// Where this rank's input goes; `None` if it has none (a rank of a broadcast that is not the root).
    pub input: Option<Span>,
    /// Where the result is.
    pub outputs: Vec<Output>,
    actions: Vec<Action>,
    // Where each step ends in `actions`.
    ends: Vec<usize>,
}

/// What a schedule is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The rank whose schedule it is.
    pub rank: u32,
    /// The number of ranks, at least 1.
    pub world: u32,
}

impl Group {
    /// The rank that comes `distance` after this one, around the circle.
    fn after(self, distance: u32) -> u32 {
        ((u64::from(self.rank) + u64::from(distance)) % u64::from(self.world)) as u32
    }

    /// The rank that comes `distance` (at most the world size) before this one, around the circle.
    fn before(self, distance: u32) -> u32 {
        self.after(self.world - distance)
    }
}

impl Schedule {
    /// The steps, each with its actions. Sends and receives come before local actions.
    pub fn steps(&self) -> impl ExactSizeIterator<Item = &[Action]> {
        (0..self.ends.len()).map(|index| self.step(index))
    }

    /// The actions of one step; none if there is no such step.
    #[must_use]
    pub fn step(&self, index: usize) -> &[Action] {
        let Some(&end) = self.ends.get(index) else {
            return &[];
        };
        let start = index
            .checked_sub(1)
            .map_or(0, |previous| self.ends[previous]);
        &self.actions[start..end]
    }

    /// Number of steps.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is nothing to do: a world of one rank.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The peers of the steps from `step` on; a peer comes once for every transfer.
    pub fn peers_from(&self, step: usize) -> impl Iterator<Item = u32> + '_ {
        let start = step.checked_sub(1).map_or(0, |previous| {
            self.ends
                .get(previous)
                .copied()
                .unwrap_or(self.actions.len())
        });
        self.actions[start..]
            .iter()
            .filter_map(|action| match action {
                Action::Send { peer, .. }
                | Action::Receive { peer, .. }
                | Action::ReceiveReduce { peer, .. } => Some(*peer),
                Action::Combine { .. } | Action::Divide { .. } => None,
            })
    }

    /// Empties it, and keeps its memory.
    fn clear(&mut self) {
        self.buffer = 0;
        self.input = None;
        self.outputs.clear();
        self.actions.clear();
        self.ends.clear();
    }

    fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    fn end_step(&mut self) {
        if self.actions.len() > self.ends.last().copied().unwrap_or(0) {
            self.ends.push(self.actions.len());
        }
    }

    /// Makes it the schedule of an all-reduce of `count` elements. `divide` is for the average.
    ///
    /// An algorithm that is not one for all-reduce counts as [`Algorithm::Ring`].
    pub fn all_reduce(&mut self, group: Group, algorithm: Algorithm, count: usize, divide: bool) {
        self.clear();
        match algorithm {
            _ if group.world == 1 => self.whole(count),
            Algorithm::Gather => bruck::all_reduce(self, group, count, divide),
            Algorithm::Halving => halving::all_reduce(self, group, count, divide),
            _ => ring::all_reduce(self, group, count, divide),
        }
    }

    /// Makes it the schedule of an all-gather: rank i has `counts[i]` elements, and the result has all in
    /// rank order. Panics if there is not one count for every rank.
    ///
    /// An algorithm that is not one for all-gather counts as [`Algorithm::Ring`].
    pub fn all_gather(&mut self, group: Group, algorithm: Algorithm, counts: impl Counts) {
        self.clear();
        match algorithm {
            _ if group.world == 1 => self.whole(counts.of(0)),
            Algorithm::Bruck => bruck::all_gather(self, group, counts),
            _ => ring::all_gather(self, group, counts),
        }
    }

    /// Makes it the schedule of a broadcast of `count` elements from `root`.
    pub fn broadcast(&mut self, group: Group, root: u32, count: usize) {
        self.clear();
        tree::broadcast(self, group, root, count);
    }

    /// Makes it the schedule of a barrier.
    pub fn barrier(&mut self, group: Group) {
        self.clear();
        tree::barrier(self, group);
    }

    /// Input and output are the same stretch.
    fn whole(&mut self, count: usize) {
        let all = Span::between(0, count);
        self.buffer = count;
        self.input = Some(all);
        self.outputs.push(Output { from: all, to: 0 });
    }
}

/// How many elements each rank has, in a gather.
pub trait Counts: Copy {
    /// Elements of this rank.
    fn of(self, rank: u32) -> usize;

    /// Elements of the ranks before this one.
    fn before(self, rank: u32) -> usize;
}

/// The same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Equal(pub usize);

impl Counts for Equal {
    fn of(self, _rank: u32) -> usize {
        self.0
    }

    fn before(self, rank: u32) -> usize {
        self.0 * rank as usize
    }
}

/// Different: `offsets[i]` elements come before rank i's; one more entry than ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offsets<'a>(pub &'a [usize]);

impl Counts for Offsets<'_> {
    fn of(self, rank: u32) -> usize {
        self.0[rank as usize + 1] - self.0[rank as usize]
    }

    fn before(self, rank: u32) -> usize {
        self.0[rank as usize]
    }
}

/// Piece `index` of `count` elements cut into `pieces` as evenly as can be.
fn piece(count: usize, pieces: u32, index: u32) -> Span {
    // The first `count % pieces` pieces have one element more.
    let (pieces, index) = (pieces as usize, index as usize);
    let (least, longer) = (count / pieces, count % pieces);
    let start = |index: usize| index * least + index.min(longer);
    Span::between(start(index), start(index + 1))
}
