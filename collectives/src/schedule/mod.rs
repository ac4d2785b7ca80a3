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
//! Both are checked for every algorithm and every world size up to 64, and every layout up to 8 hosts of 8, without a
//! socket.
//!
//! Results have the same bits on every rank, because every element of a result is either computed by one
//! rank and copied, or computed by every rank from the same inputs in the same order.
//!
//! | algorithm | for | steps | bytes that a rank sends |
//! |---|---|---|---|
//! | [`Flat`](Algorithm::Flat) | all-reduce | log n | (n-1) S |
//! | [`Doubling`](Algorithm::Doubling) | all-reduce, Adasum | log n, +2 if n is no power of two | S log p, + S |
//! | [`Binomial`](Algorithm::Binomial) | broadcast, scatter | log n | what is for the ranks below |
//! | | reduce, gather | log n | S; what is of the ranks below |
//! | [`Halving`](Algorithm::Halving) | all-reduce | 2 log n, +2 | 2 S (p-1)/p, + S |
//! | | reduce-scatter | log n, +2 | S (p-1)/p, + S |
//! | | Adasum | log n (log n + 5)/2 | 2 S (n-1)/n |
//! | [`Ring`](Algorithm::Ring) | all-reduce | (segments + 1) (n-1) | 2 S (n-1)/n |
//! | | reduce-scatter, all-gather | n-1 | S (n-1)/n |
//! | | reduce | n-1 + log n | up to S (n-1)/n + S/2 |
//! | [`Bruck`](Algorithm::Bruck) | all-gather | log n | (n-1) shares |
//! | [`ScatterGather`](Algorithm::ScatterGather) | broadcast | log n + n-1 | S (n-1)/n, the root twice |
//! | [`Pairwise`](Algorithm::Pairwise) | all-to-all | n-1 | S (n-1)/n |
//! | [`Linear`](Algorithm::Linear) | all-to-all, gather, scatter, send | 1 | S (n-1)/n; a share |
//! | [`TwoLevelRing`](Algorithm::TwoLevelRing) | all-reduce | 2 (h-1) + 2 | across hosts: 2 S/m (h-1)/h for m ranks of a host |
//! | | all-gather | h-1 + 2 | across hosts: a host's shares / m, h-1 times |
//! | [`TwoLevelHalving`](Algorithm::TwoLevelHalving) | all-reduce | 2 log h + 2, +2 | as `Halving` of S/m |
//! | [`TwoLevelDoubling`](Algorithm::TwoLevelDoubling) | all-reduce | log h + 2, +2 | as `Doubling` of S/m |
//! | [`TwoLevelTree`](Algorithm::TwoLevelTree) | broadcast | log h + log k | S for each child |
//! | [`Dissemination`](Algorithm::Dissemination) | barrier | log n | 0 |
//!
//! n: ranks; p: the power of two up to n; S: bytes of the whole; h: hosts; k: ranks of a host; m: ranks of the host with
//! the fewest; log: to base 2, rounded up. Sources are in `docs/collectives.md`.

mod action;
mod adasum;
mod bruck;
mod choose;
mod cost;
mod counts;
mod direct;
mod doubling;
mod halving;
mod layout;
mod levels;
mod places;
mod ring;
mod tree;

#[cfg(test)]
#[allow(clippy::cast_possible_wrap)] // small numbers
mod bed;
#[cfg(test)]
mod simulate;
#[cfg(test)]
mod tests;

pub use crate::operation::{Algorithm, UnknownAlgorithm};
pub use action::{Action, Span};
pub use choose::{Choices, Tuning};
pub use cost::{Class, Model, Prediction, predict};
pub use counts::{Counts, Equal, Offsets, Rows};
pub use layout::{Layout, Shape};

use counts::start;

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
pub struct Group<'a> {
    /// The rank whose schedule it is.
    pub rank: u32,
    /// The number of ranks, at least 1.
    pub world: u32,
    /// Where the ranks are: for algorithms of two levels, which count as others without it.
    pub layout: Option<&'a Layout>,
}

impl<'a> Group<'a> {
    /// A rank of a world whose layout does not matter.
    #[must_use]
    pub const fn new(rank: u32, world: u32) -> Self {
        Self {
            rank,
            world,
            layout: None,
        }
    }

    /// A rank of a world with this layout.
    #[must_use]
    pub fn on(rank: u32, layout: &'a Layout) -> Self {
        Self {
            rank,
            world: layout.world(),
            layout: Some(layout),
        }
    }

    fn team(self) -> Team {
        Team {
            me: self.rank,
            size: self.world,
        }
    }
}

/// Ranks that do something together, by their places among themselves.
#[derive(Debug, Clone, Copy)]
struct Team {
    me: u32,
    size: u32,
}

impl Team {
    /// The rank that comes `distance` after this one, around the circle.
    fn after(self, distance: u32) -> u32 {
        self.member(self.me, distance)
    }

    /// The rank that comes `distance` (at most the size) before this one, around the circle.
    fn before(self, distance: u32) -> u32 {
        self.after(self.size - distance)
    }

    /// The place of this rank, counted from the root.
    fn place(self, root: u32) -> u32 {
        self.before(root)
    }

    /// The same ranks, named by their places.
    fn places(self, root: u32) -> Self {
        let me = self.place(root);
        Self { me, ..self }
    }

    /// The rank at a place, counted from the root.
    fn member(self, root: u32, place: u32) -> u32 {
        ((u64::from(root) + u64::from(place)) % u64::from(self.size)) as u32
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
        &self.actions[self.start_of(index)..end]
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
        self.actions[self.start_of(step.min(self.len()))..]
            .iter()
            .filter_map(|action| action.transfer().map(|(peer, _)| peer))
    }

    /// Empties it, and keeps its memory.
    pub(crate) fn clear(&mut self) {
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

    fn send_to(&mut self, peer: u32, span: Span) {
        self.act(Action::Send { peer, span });
    }

    fn receive_from(&mut self, peer: u32, span: Span) {
        self.act(Action::Receive { peer, span });
    }

    fn reduce_from(&mut self, peer: u32, span: Span) {
        self.act(Action::ReceiveReduce { peer, span });
    }

    fn combine(&mut self, from: Span, into: Span) {
        self.act(Action::Combine { from, into });
    }

    /// Where the actions of a step begin.
    fn start_of(&self, step: usize) -> usize {
        let before = step.checked_sub(1).and_then(|before| self.ends.get(before));
        before.copied().unwrap_or(0)
    }

    /// Adds the transfers of the steps from `first` on, the last step first and each transfer the other way: what went to a rank to
    /// be combined there is handed out by that rank.
    fn and_back(&mut self, first: usize) {
        for step in (first..self.ends.len()).rev() {
            for at in self.start_of(step)..self.ends[step] {
                if let Some(back) = self.actions[at].back() {
                    self.act(back);
                }
            }
            self.end_step();
        }
    }

    /// As [`Schedule::and_back`], in place of the steps from `first` on.
    fn only_back(&mut self, first: usize) {
        let (steps, begin, end) = (self.ends.len(), self.start_of(first), self.actions.len());
        self.and_back(first);
        self.actions.drain(begin..end);
        self.ends.drain(first..steps);
        for later in &mut self.ends[first..] {
            *later -= end - begin;
        }
    }

    /// A gather becomes the scatter of the same shares: what is put together is cut up.
    fn turn(&mut self) {
        let whole = self.outputs.pop();
        if let Some(share) = self.input.take() {
            self.outputs.push(Output { from: share, to: 0 });
        }
        self.input = whole.map(|output| output.from);
        self.only_back(0);
    }

    /// Adds a local action to the last step, or makes the first step of it.
    fn local(&mut self, action: Action) {
        debug_assert_eq!(self.actions.len(), self.ends.last().copied().unwrap_or(0));
        self.ends.pop();
        self.act(action);
        self.end_step();
    }

    /// Finishes combined values after the last step, if there is something to do to them.
    fn finish(&mut self, finish: bool, span: Span) {
        if finish {
            self.local(Action::Finish { span });
        }
    }

    /// Gives the peers of the actions from `first` on other names.
    fn rename(&mut self, first: usize, name: impl Fn(u32) -> u32) {
        for peer in self.actions[first..]
            .iter_mut()
            .filter_map(Action::peer_mut)
        {
            *peer = name(*peer);
        }
    }

    /// Makes it the schedule of an all-reduce of `count` elements. `finish` says that there is something to do to
    /// combined values ([`Action::Finish`]). A ring of more than `segment` elements is pipelined.
    ///
    /// An algorithm that is not [able](Algorithm::able) to counts as [`Algorithm::Ring`], here and below; one of two levels
    /// without a layout as what it does across hosts.
    pub fn all_reduce(
        &mut self,
        group: Group<'_>,
        algorithm: Algorithm,
        count: usize,
        segment: usize,
        finish: bool,
    ) {
        self.clear();
        let team = group.team();
        if group.world == 1 {
            self.whole(count);
            return self.finish(finish, Span::between(0, count));
        }
        if let (true, Some(layout)) = (algorithm.is_two_level(), group.layout) {
            return levels::all_reduce(self, group.rank, layout, algorithm, count, finish);
        }
        match algorithm {
            Algorithm::Flat => bruck::all_reduce(self, team, count, finish),
            Algorithm::Halving | Algorithm::TwoLevelHalving => {
                self.whole(count);
                halving::all_reduce(self, team, 0, count, finish);
            }
            Algorithm::Doubling | Algorithm::TwoLevelDoubling => {
                self.buffer = 2 * count;
                self.input = Some(Span::between(0, count));
                let from = doubling::all_reduce(self, team, 0, count, count, finish);
                self.outputs.push(Output { from, to: 0 });
            }
            _ => {
                self.whole(count);
                ring::all_reduce(self, team, 0, count, segment, finish);
            }
        }
    }

    /// Makes it the schedule of an all-reduce by Adasum, of `count` elements of `size` bytes, in a world of a power of
    /// two of ranks. An algorithm that is not one of [`Algorithm::ADASUM`] counts as [`Algorithm::Halving`].
    ///
    /// # Panics
    ///
    /// If the world is no power of two, or `size` is not 2, 4 or 8.
    pub fn adasum(
        &mut self,
        group: Group<'_>,
        algorithm: Algorithm,
        count: usize,
        size: usize,
        finish: bool,
    ) {
        assert!(
            group.world.is_power_of_two() && matches!(size, 2 | 4 | 8),
            "adasum of floats in a power of two of ranks: ReduceOp::check says so"
        );
        self.clear();
        match algorithm {
            Algorithm::Doubling => adasum::doubling(self, group.team(), count, size, finish),
            _ => adasum::halving(self, group.team(), count, size, finish),
        }
    }

    /// Makes it the schedule of a reduction of `count` elements to `root`; the others have no output.
    pub fn reduce(
        &mut self,
        group: Group<'_>,
        algorithm: Algorithm,
        root: u32,
        count: usize,
        finish: bool,
    ) {
        self.clear();
        let team = group.team();
        let span = Span::between(0, count);
        self.whole(count);
        if group.rank != root {
            self.outputs.clear();
        }
        if algorithm == Algorithm::Ring && group.world > 1 {
            // Piece k belongs to place k, counted from the root.
            let place = team.places(root);
            let bounds = |index: u32| start(count, team.size, index);
            ring::reduce_scatter(self, place, bounds);
            self.rename(0, |place| team.member(root, place));
            let own = Span::between(bounds(place.me), bounds(place.me + 1));
            self.finish(finish, own);
            return tree::gather_pieces(self, team, root, count);
        }
        tree::reduce(self, team, root, span);
        self.finish(finish && group.rank == root, span);
    }

    /// Makes it the schedule of a reduce-scatter: rank i gets the i-th part, which has `counts.of(i)` elements. See
    /// [`Rows`] for how Horovod splits a first dimension.
    pub fn reduce_scatter(
        &mut self,
        group: Group<'_>,
        algorithm: Algorithm,
        counts: impl Counts,
        finish: bool,
    ) {
        self.clear();
        let team = group.team();
        let total = counts.before(group.world);
        self.buffer = total;
        self.input = Some(Span::between(0, total));
        let from = counts.span(group.rank);
        self.outputs.push(Output { from, to: 0 });
        match algorithm {
            Algorithm::Halving if group.world > 1 => {
                halving::reduce_scatter(self, team, counts, finish);
            }
            _ => {
                let bounds = |index: u32| counts.before(index);
                ring::reduce_scatter(self, team, bounds);
                self.finish(finish, from);
            }
        }
    }

    /// Makes it the schedule of an all-gather: rank i has `counts.of(i)` elements, and the result has all in
    /// rank order.
    pub fn all_gather(&mut self, group: Group<'_>, algorithm: Algorithm, counts: impl Counts) {
        self.clear();
        let team = group.team();
        match (algorithm, group.layout) {
            _ if group.world == 1 => self.whole(counts.of(0)),
            (Algorithm::TwoLevelRing, Some(layout)) => {
                levels::all_gather(self, group.rank, layout, counts);
            }
            (Algorithm::Bruck, _) => bruck::all_gather(self, team, counts),
            _ => {
                let all = Span::between(0, counts.before(group.world));
                self.buffer = all.len;
                self.input = Some(counts.span(group.rank));
                self.outputs.push(Output { from: all, to: 0 });
                ring::all_gather(self, team, |index| counts.before(index));
            }
        }
    }

    /// Makes it the schedule of a gather: `root` gets what [`Schedule::all_gather`] gives everybody.
    pub fn gather(
        &mut self,
        group: Group<'_>,
        algorithm: Algorithm,
        root: u32,
        counts: impl Counts,
    ) {
        self.clear();
        match algorithm {
            Algorithm::Binomial => tree::gather(self, group.team(), root, counts),
            _ => direct::gather(self, group.team(), root, counts),
        }
    }

    /// Makes it the schedule of a scatter: the root has all shares in rank order, rank i gets the i-th.
    pub fn scatter(
        &mut self,
        group: Group<'_>,
        algorithm: Algorithm,
        root: u32,
        counts: impl Counts,
    ) {
        self.gather(group, algorithm, root, counts);
        self.turn();
    }

    /// Makes it the schedule of a broadcast of `count` elements from `root`.
    pub fn broadcast(&mut self, group: Group<'_>, algorithm: Algorithm, root: u32, count: usize) {
        self.clear();
        let team = group.team();
        let span = Span::between(0, count);
        self.whole(count);
        if group.rank != root {
            self.input = None;
        }
        match (algorithm, group.layout) {
            (Algorithm::TwoLevelTree, Some(layout)) => {
                levels::broadcast(self, group.rank, layout, root, span);
            }
            (Algorithm::ScatterGather, _) => {
                tree::gather_pieces(self, team, root, count);
                self.only_back(0);
                let first = self.actions.len();
                let bounds = |index| start(count, team.size, index);
                ring::all_gather(self, team.places(root), bounds);
                self.rename(first, |place| team.member(root, place));
            }
            _ => tree::broadcast(self, team, root, span),
        }
    }

    /// Makes it the schedule of an all-to-all: this rank has `send.of(i)` elements for rank i and gets `receive.of(i)`
    /// from it, both in rank order. `receive` of one rank is `send` of the other.
    pub fn all_to_all(
        &mut self,
        group: Group<'_>,
        algorithm: Algorithm,
        send: impl Counts,
        receive: impl Counts,
    ) {
        self.clear();
        let at_once = algorithm == Algorithm::Linear;
        direct::all_to_all(self, group.team(), send, receive, at_once);
    }

    /// Makes it the schedule of a barrier.
    pub fn barrier(&mut self, group: Group<'_>) {
        self.clear();
        tree::barrier(self, group.team());
    }

    /// Makes it the schedule of a rank that sends to one other.
    pub fn send(&mut self, peer: u32, count: usize) {
        self.clear();
        let span = Span::between(0, count);
        self.buffer = count;
        self.input = Some(span);
        self.send_to(peer, span);
        self.end_step();
    }

    /// Makes it the schedule of a rank that receives from one other.
    pub fn receive(&mut self, peer: u32, count: usize) {
        self.clear();
        let span = Span::between(0, count);
        self.buffer = count;
        self.outputs.push(Output { from: span, to: 0 });
        self.receive_from(peer, span);
        self.end_step();
    }

    /// Input and output are the same stretch.
    fn whole(&mut self, count: usize) {
        let all = Span::between(0, count);
        self.buffer = count;
        self.input = Some(all);
        self.outputs.push(Output { from: all, to: 0 });
    }
}
