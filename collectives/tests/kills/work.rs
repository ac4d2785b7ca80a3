//! What a rank does until another one is lost: operations at random, the same on all ranks.

use super::*;

type Result<T = ()> = std::result::Result<T, CollectiveError>;

/// Shared memory has a way of its own for all-reduces and reduces from here on, if ranks have a processor each: it writes over the
/// caller's data while the operation can still fail.
const LONG_BYTES: usize = 12 << 20;

/// Elements of a buffer in shared memory.
const OF_BUFFER: usize = 60_000;

/// What all ranks of a group do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    /// Everybody sends to this rank and gets something back. Two others that send to each other would hear of its loss only by the
    /// deadline: it is none of theirs.
    pub(crate) victim: u32,
    /// What needs no more links than those of all ranks.
    pub(crate) simple: bool,
    /// Long data alone.
    pub(crate) long: bool,
}

/// Works until a rank is lost. Returns the error and how many operations went well before. Once there are some, it has all the
/// links that it needs.
pub(crate) fn work(
    comm: &Communicator,
    plan: Plan,
    ready: impl FnOnce(),
) -> (CollectiveError, u32) {
    let mut work = Work {
        comm,
        plan,
        number: 0,
        random: plan.seed,
        more: None,
        long: None,
    };
    if let Err(error) = work.prepare() {
        return (error, 0);
    }
    ready();
    loop {
        work.number += 1;
        if let Err(error) = work.step() {
            return (error, work.number);
        }
    }
}

struct Work<'a> {
    comm: &'a Communicator,
    plan: Plan,
    /// Of the operation; data differ by it.
    number: u32,
    random: u64,
    more: Option<More>,
    long: Option<Long>,
}

/// What operations that are not simple need. A rank that gives up drops it: members of the group who don't know yet why it is
/// gone see that it is.
struct More {
    buffer: SharedBuffer<f32>,
    part: Option<Communicator>,
}

/// Made once: most of the time is to pass in operations.
struct Long {
    before: Vec<f32>,
    sum: Vec<f32>,
    data: Vec<f32>,
}

/// Bit by bit, and fast without optimisation, too.
fn is_same(got: &[f32], expected: &[f32]) -> bool {
    bytemuck::cast_slice::<f32, u8>(got) == bytemuck::cast_slice::<f32, u8>(expected)
}

/// The data of an operation that may have failed are the result, or as they were (F-2).
fn check(result: Result, data: &[f32], expected: &[f32], before: &[f32]) -> Result {
    let right = if result.is_ok() { expected } else { before };
    assert!(is_same(data, right), "{result:?}");
    result
}

impl Work<'_> {
    /// Whole numbers, so that sums are exact: that of rank 0 so many times.
    fn values(&self, times: u32, length: usize) -> Vec<f32> {
        vec![((1 + self.number % 5) * times) as f32; length]
    }

    fn of_rank(&self, rank: Rank, length: usize) -> Vec<f32> {
        self.values(rank.0 + 1, length)
    }

    fn mine(&self, length: usize) -> Vec<f32> {
        self.of_rank(self.comm.rank(), length)
    }

    /// Of what these ranks have.
    fn sum(&self, ranks: impl IntoIterator<Item = Rank>, length: usize) -> Vec<f32> {
        let times = ranks.into_iter().map(|rank| rank.0 + 1).sum();
        self.values(times, length)
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.comm.world_size()).map(Rank)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 33) % limit
    }

    /// Makes all links.
    fn prepare(&mut self) -> Result {
        let comm = self.comm;
        // Every rank sends to every other one.
        let world = comm.world_size() as usize;
        comm.all_to_all_varcount(&vec![1_u8; world], &vec![1; world])?;
        if self.plan.long {
            const LENGTH: usize = LONG_BYTES / 4 + 70_001;
            let before = self.mine(LENGTH);
            self.long = Some(Long {
                data: before.clone(),
                before,
                sum: self.sum(self.ranks(), LENGTH),
            });
            return comm.barrier();
        }
        if self.plan.simple {
            return Ok(());
        }
        let buffer = comm.buffer(OF_BUFFER)?;
        // All, or all but one, in another order.
        let left_out = match self.below(world as u64 + 1) as u32 {
            rank if world > 2 => Some(Rank(rank)),
            _ => None,
        };
        let mut members: Vec<Rank> = self
            .ranks()
            .filter(|rank| Some(*rank) != left_out)
            .collect();
        members.reverse();
        let part = comm.group(&members)?;
        if let Some(part) = &part {
            let world = members.len();
            part.all_to_all_varcount(&vec![1_u8; world], &vec![1; world])?;
        }
        self.more = Some(More { buffer, part });
        self.exchange(1);
        self.by_name(1)
    }

    fn step(&mut self) -> Result {
        if self.long.is_some() {
            return self.long();
        }
        let length = [1, 40, 3000, 60_000, 400_000][self.below(5) as usize];
        match self.below(if self.more.is_some() { 8 } else { 4 }) {
            0 => self.comm.barrier(),
            1 => self.broadcast(length),
            2 => self.all_gather(length),
            3 => self.all_reduce(length),
            4 => {
                self.exchange(length);
                Ok(())
            }
            5 => self.by_name(length),
            6 => self.of_buffers(),
            _ => self.in_part(length),
        }
    }

    fn long(&mut self) -> Result {
        let (comm, root) = (self.comm, self.root());
        let has_root = self.below(4) == 0;
        let Long { before, sum, data } = self.long.as_mut().unwrap();
        data.copy_from_slice(before);
        if !has_root {
            return check(comm.all_reduce(data, ReduceOp::Sum), data, sum, before);
        }
        let result = comm.reduce(data, ReduceOp::Sum, root);
        let expected = if comm.rank() == root { &*sum } else { &*before };
        check(result, data, expected, before)
    }

    fn root(&self) -> Rank {
        Rank(self.number % self.comm.world_size())
    }

    fn all_reduce(&self, length: usize) -> Result {
        let before = self.mine(length);
        let mut data = before.clone();
        let result = self.comm.all_reduce(&mut data, ReduceOp::Sum);
        check(result, &data, &self.sum(self.ranks(), length), &before)
    }

    fn ended(
        &self,
        handle: Handle<Vec<f32>>,
        ranks: impl IntoIterator<Item = Rank>,
        length: usize,
    ) -> Result {
        let (result, data) = match handle.wait_or_reclaim() {
            Ok(data) => (Ok(()), data),
            Err(failure) => (Err(failure.error), failure.input.unwrap()),
        };
        let (expected, before) = (self.sum(ranks, length), self.mine(length));
        check(result, &data, &expected, &before)
    }

    fn broadcast(&self, length: usize) -> Result {
        let (root, before) = (self.root(), self.mine(length));
        let mut data = before.clone();
        let result = self.comm.broadcast(&mut data, root);
        if result.is_err() && self.comm.rank() != root {
            // It is no input, and may hold anything.
            return result;
        }
        check(result, &data, &self.of_rank(root, length), &before)
    }

    fn all_gather(&self, length: usize) -> Result {
        let share = |rank: Rank| length / 4 + 1 - rank.index() % 2;
        let mine = self.mine(share(self.comm.rank()));
        let gathered = self.comm.all_gather_varcount(&mine)?;
        let of_all = self
            .ranks()
            .flat_map(|rank| self.of_rank(rank, share(rank)));
        assert!(is_same(&gathered.values, &of_all.collect::<Vec<_>>()));
        Ok(())
    }

    /// Of a loss, a message tells its two ranks alone. So a rank goes on after a failure: the next operation of all fails on all of them.
    fn exchange(&self, length: usize) {
        if let Err(error) = self.messages(length) {
            let lost = error.culprit_rank();
            assert_eq!(lost, Some(Rank(self.plan.victim)), "{error}");
        }
    }

    fn messages(&self, length: usize) -> Result {
        let (comm, data) = (self.comm, self.mine(length));
        let center = Rank(self.plan.victim);
        let receive = |from| {
            let got = comm.receive::<f32>(from)?;
            assert!(is_same(&got, &self.of_rank(from, length)));
            Ok(())
        };
        if comm.rank() != center {
            let sent = comm.send(&data, center);
            assert!(is_same(&data, &self.mine(length)));
            sent?;
            return receive(center);
        }
        for rank in self.ranks().filter(|rank| *rank != center) {
            receive(rank)?;
            comm.send(&data, rank)?;
        }
        Ok(())
    }

    /// Two operations that may be fused, in another order on each rank.
    fn by_name(&self, length: usize) -> Result {
        let comm = self.comm;
        let start = |name| {
            let named = comm.named(format!("{name} {}", self.number));
            (name, named.all_reduce(self.mine(length), ReduceOp::Sum))
        };
        let mut handles = if comm.rank().0.is_multiple_of(2) {
            [start("one"), start("two")]
        } else {
            [start("two"), start("one")]
        };
        handles.sort_by_key(|(name, _)| *name);
        let [one, two] = handles.map(|(_, handle)| self.ended(handle, self.ranks(), length));
        if let (Err(one), Err(two)) = (&one, &two) {
            assert_eq!(one.culprit_rank(), two.culprit_rank(), "{one} / {two}");
        }
        one.and(two)
    }

    fn of_buffers(&mut self) -> Result {
        let before = self.mine(OF_BUFFER);
        let expected = self.sum(self.ranks(), OF_BUFFER);
        let more = self.more.as_mut().unwrap();
        more.buffer.copy_from_slice(&before);
        let result = self.comm.all_reduce_buffer(&mut more.buffer, ReduceOp::Sum);
        check(result, &more.buffer, &expected, &before)
    }

    /// In a group, while all ranks do something, too.
    fn in_part(&self, length: usize) -> Result {
        let Some(part) = &self.more.as_ref().unwrap().part else {
            self.all_reduce(length)?;
            return self.comm.barrier();
        };
        let handle = part.start().all_reduce(self.mine(length), ReduceOp::Sum);
        let result = self.all_reduce(length);
        let ended = self.ended(handle, part.members(), length);
        result?;
        self.together(ended, |lost| part.rank_of(lost).is_some())
    }

    /// After an operation of some of the ranks, of which the others know nothing. Who is missed there may have left because of one
    /// that is no member, and who ends its process now would be missed by others in its turn. All together know whom they have lost.
    fn together(&self, in_part: Result, is_member: impl Fn(Rank) -> bool) -> Result {
        let of_all = self.comm.barrier();
        if let Err(error) = in_part {
            let of_all = of_all.as_ref().unwrap_err();
            let lost = of_all.culprit_rank().unwrap();
            assert!(
                !is_member(lost) || error.culprit_rank() == Some(lost),
                "{error} / {of_all}"
            );
        }
        of_all
    }
}
