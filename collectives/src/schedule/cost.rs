//! What an operation costs: a message of S bytes takes `alpha + S beta`, combining S bytes takes `S gamma`.
//!
//! The model is Hockney's with the part of the latency that a processor spends on each message set apart, as in LogGP
//! (Alexandrov et al. 1995), and with two classes of links (inside a host, across hosts). The ranks of a host share its
//! link to the others. It is used twice: [`time`] runs it over the schedules of all ranks, [`predict`] over a formula,
//! which works for any number of ranks at once. A test holds one against the other.

use std::collections::BTreeMap;

use super::{Action, Algorithm, Layout, Schedule, Shape};
use crate::operation::OperationKind;

/// One class of links.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Class {
    /// Seconds until the first byte of a message is there, whatever else is under way.
    pub alpha: f64,
    /// Seconds that a rank is busy with each message.
    pub overhead: f64,
    /// Seconds for each byte. Across hosts that of a host's link, which its ranks share.
    pub beta: f64,
}

impl Class {
    fn message(&self, bytes: f64) -> f64 {
        self.overhead + bytes * self.beta
    }
}

/// What links and processors take. [Measured](crate::Communicator::calibrate) values are better than the default, which fits Unix
/// sockets inside a host and a network of 10 Gbit/s.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Model {
    /// Links inside a host.
    pub inside: Class,
    /// Links across hosts.
    pub across: Class,
    /// Seconds to combine a byte.
    pub gamma: f64,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            inside: Class {
                alpha: 8e-6,
                overhead: 2e-6,
                beta: 4e-10,
            },
            across: Class {
                alpha: 30e-6,
                overhead: 5e-6,
                beta: 8e-10,
            },
            gamma: 1e-10,
        }
    }
}

impl Model {
    /// The same machine when every byte is `factor` times as long on its way and combined as much slower: algorithms
    /// change at sizes that are smaller by it. For tests.
    #[must_use]
    pub fn slowed(mut self, factor: f64) -> Self {
        self.inside.beta *= factor;
        self.across.beta *= factor;
        self.gamma *= factor;
        self
    }
}

/// What an operation is expected to take.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Prediction {
    /// Until the last rank has its result.
    pub seconds: f64,
    /// Steps of the rank that has the most.
    pub steps: f64,
    /// Bytes that the busiest rank sends inside its host.
    pub inside: f64,
    /// Bytes that the busiest host sends to others.
    pub across: f64,
}

/// Concurrent flows to one place hinder each other: what they lose against one after the other.
const CONGESTION: f64 = 1.25;

/// How far the partners of a step are apart.
#[derive(Debug, Clone, Copy)]
enum Reach {
    /// Around the circle of ranks.
    Circle(u32),
    /// In blocks of twice the distance.
    Pairs(u32),
    /// As pairs, of which most do nothing: a tree.
    Tree(u32),
    /// In a host.
    Inside,
    /// In another host; so many ranks of a host at once.
    Across(u32),
}

struct Tally<'a> {
    model: &'a Model,
    shape: Shape,
    sum: Prediction,
}

impl Tally<'_> {
    /// So many messages are inside a host, and so many ranks of a host have one to another.
    fn ways(&self, reach: Reach) -> (bool, u32) {
        let most = self.shape.most;
        if self.shape.hosts == 1 {
            return (true, 0);
        }
        let aligned = |distance: u32| most.is_multiple_of(distance.saturating_mul(2));
        match reach {
            Reach::Circle(distance) => {
                let distance = distance.min(self.shape.world - distance);
                (distance < most, distance.min(most))
            }
            Reach::Pairs(distance) if aligned(distance) => (true, 0),
            Reach::Pairs(distance) => (distance < most, distance.min(most)),
            Reach::Tree(distance) if aligned(distance) => (true, 0),
            Reach::Tree(distance) => (distance < most, 1),
            Reach::Inside => (true, 0),
            Reach::Across(sharing) => (false, sharing),
        }
    }

    /// So many steps, in each of which a rank sends and receives a message of so many bytes, and combines as many or
    /// none.
    fn steps(&mut self, times: f64, reach: Reach, bytes: f64, reduces: bool) {
        let (inside, sharing) = self.ways(reach);
        let mut longest: f64 = 0.0;
        if inside {
            let class = self.model.inside;
            longest = class.alpha + class.message(bytes);
            self.sum.inside += times * bytes;
        }
        if sharing > 0 {
            let class = self.model.across;
            let shared = bytes * f64::from(sharing);
            longest = longest.max(class.alpha + class.message(shared));
            self.sum.across += times * shared;
        }
        if reduces {
            longest += bytes * self.model.gamma;
        }
        self.sum.seconds += times * longest;
        self.sum.steps += times;
    }

    fn step(&mut self, reach: Reach, bytes: f64, reduces: bool) {
        self.steps(1.0, reach, bytes, reduces);
    }

    /// One step in which a rank sends so many messages inside its host, and combines so many bytes.
    fn inside(&mut self, messages: f64, bytes: f64, reduced: f64) {
        let class = self.model.inside;
        if messages > 0.0 {
            self.sum.seconds += class.alpha + messages * class.message(bytes);
            self.sum.inside += messages * bytes;
            self.sum.steps += 1.0;
        }
        self.combine(reduced);
    }

    fn combine(&mut self, bytes: f64) {
        self.sum.seconds += bytes * self.model.gamma;
    }

    /// The powers of two below `size`.
    fn distances(size: u32) -> impl DoubleEndedIterator<Item = u32> {
        (0..ceil_log2(size)).map(|bit| 1 << bit)
    }

    fn tree(&mut self, size: u32, reduces: bool, bytes: impl Fn(f64) -> f64) {
        for distance in Self::distances(size) {
            self.step(Reach::Tree(distance), bytes(f64::from(distance)), reduces);
        }
    }

    /// The extra steps of a world that is no power of two: before and after.
    fn fold(&mut self, size: u32, reach: Reach, before: f64, after: f64) {
        if !size.is_power_of_two() {
            self.step(reach, before, true);
            self.step(reach, after, false);
        }
    }

    fn ring(&mut self, size: u32, reach: Reach, bytes: f64, both: bool) {
        let (steps, piece) = (f64::from(size - 1), bytes / f64::from(size));
        self.steps(steps, reach, piece, true);
        if both {
            self.steps(steps, reach, piece, false);
        }
    }

    fn halving(&mut self, size: u32, reach: impl Fn(u32) -> Reach, bytes: f64, both: bool) {
        let power = 1_u32 << size.ilog2();
        let after = if both { bytes } else { bytes / f64::from(size) };
        self.fold(size, reach(1), bytes, after);
        for width in Self::distances(power) {
            let part = bytes * f64::from(width) / f64::from(power);
            self.step(reach(width), part, true);
            if both {
                self.step(reach(width), part, false);
            }
        }
    }

    fn doubling(&mut self, size: u32, reach: impl Fn(u32) -> Reach, bytes: f64) {
        let power = 1_u32 << size.ilog2();
        self.fold(size, reach(1), bytes, bytes);
        for distance in Self::distances(power) {
            self.step(reach(distance), bytes, true);
        }
    }

    fn bruck(&mut self, share: f64) {
        let world = self.shape.world;
        for distance in Self::distances(world) {
            let more = distance.min(world - distance);
            self.step(Reach::Circle(distance), f64::from(more) * share, false);
        }
    }

    /// The first segment goes all the way, the others follow as fast as the slowest link lets them.
    fn chain(&mut self, bytes: f64, segment: f64, reduces: bool) {
        let Shape { world, hosts, .. } = self.shape;
        let segments = (bytes / segment.max(1.0)).ceil().max(1.0);
        let each = bytes / segments;
        self.steps(f64::from(world - hosts), Reach::Inside, each, reduces);
        self.steps(f64::from(hosts - 1), Reach::Across(1), each, reduces);
        self.steps(segments - 1.0, Reach::Circle(1), each, reduces);
        (self.sum.inside, self.sum.across) = (bytes, if hosts > 1 { bytes } else { 0.0 });
    }

    fn all_reduce(&mut self, algorithm: Algorithm, bytes: f64) {
        let Shape {
            world,
            hosts,
            least,
            most,
        } = self.shape;
        match algorithm {
            Algorithm::Flat => {
                self.bruck(bytes);
                self.combine(bytes * f64::from(world - 1));
            }
            Algorithm::Binomial => {
                self.tree(world, true, |_| bytes);
                self.tree(world, false, |_| bytes);
            }
            Algorithm::Doubling => self.doubling(world, Reach::Pairs, bytes),
            Algorithm::Halving => self.halving(world, Reach::Pairs, bytes, true),
            Algorithm::TwoLevelRing | Algorithm::TwoLevelHalving | Algorithm::TwoLevelDoubling => {
                let piece = bytes / f64::from(least);
                let mates = f64::from(most - 1);
                self.inside(mates, piece, mates * piece);
                if hosts > 1 {
                    let reach = |_| Reach::Across(least);
                    match algorithm {
                        Algorithm::TwoLevelRing => self.ring(hosts, reach(1), piece, true),
                        Algorithm::TwoLevelHalving => self.halving(hosts, reach, piece, true),
                        _ => self.doubling(hosts, reach, piece),
                    }
                }
                self.inside(mates, piece, 0.0);
            }
            _ => self.ring(world, Reach::Circle(1), bytes, true),
        }
    }

    fn all_gather(&mut self, algorithm: Algorithm, total: f64) {
        let Shape {
            world,
            hosts,
            least,
            most,
        } = self.shape;
        let share = total / f64::from(world);
        match algorithm {
            Algorithm::Bruck => self.bruck(share),
            Algorithm::TwoLevelRing => {
                let mates = f64::from(most - 1);
                let foreign = f64::from(hosts - 1);
                let part = f64::from(most) * share / f64::from(least);
                self.inside(mates, share, 0.0);
                self.steps(foreign, Reach::Across(least), part, false);
                self.inside(mates * foreign, part, 0.0);
            }
            _ => self.steps(f64::from(world - 1), Reach::Circle(1), share, false),
        }
    }

    fn broadcast(&mut self, algorithm: Algorithm, bytes: f64, segment: f64) {
        let Shape {
            world, hosts, most, ..
        } = self.shape;
        let piece = bytes / f64::from(world);
        match algorithm {
            Algorithm::ScatterGather => {
                self.tree(world, false, |distance| piece * distance);
                self.steps(f64::from(world - 1), Reach::Circle(1), piece, false);
            }
            Algorithm::Chain => self.chain(bytes, segment, false),
            Algorithm::TwoLevelTree => {
                self.steps(ceil_log2(hosts).into(), Reach::Across(1), bytes, false);
                self.steps(ceil_log2(most).into(), Reach::Inside, bytes, false);
            }
            _ => self.tree(world, false, |_| bytes),
        }
    }

    /// All messages of a step at once, to or from every other rank.
    fn linear(&mut self, bytes: f64, sharing: u32) {
        let Shape { world, most, .. } = self.shape;
        let (near, far) = (f64::from(most - 1), f64::from(world - most));
        let Model { inside, across, .. } = self.model;
        let mut seconds: f64 = inside.alpha + near * inside.message(bytes);
        if far > 0.0 {
            let shared = bytes * f64::from(sharing);
            seconds = seconds.max(across.alpha + far * across.message(shared));
            self.sum.across += far * shared;
        }
        let flows = if world > 2 { CONGESTION } else { 1.0 };
        self.sum.seconds += seconds * flows;
        self.sum.inside += near * bytes;
        self.sum.steps += 1.0;
    }

    fn all_to_all(&mut self, algorithm: Algorithm, block: f64) {
        let Shape { world, most, .. } = self.shape;
        match algorithm {
            Algorithm::Linear => self.linear(block, most),
            Algorithm::Bruck => {
                for bit in Self::distances(world) {
                    // The distances that have the bit.
                    let blocks = world / (2 * bit) * bit + (world % (2 * bit)).saturating_sub(bit);
                    let bytes = f64::from(blocks) * block;
                    self.step(Reach::Circle(bit), bytes, false);
                    self.combine(2.0 * bytes);
                }
            }
            _ => {
                // The distances near 0 and near the world size one by one, those between at once: they are alike.
                let near = most.min(world.div_ceil(2));
                for distance in 1..near {
                    self.steps(2.0, Reach::Circle(distance), block, false);
                }
                let between = f64::from(world - 1) - 2.0 * f64::from(near.saturating_sub(1));
                self.steps(between, Reach::Circle(world / 2), block, false);
            }
        }
    }
}

fn ceil_log2(number: u32) -> u32 {
    u32::BITS - number.saturating_sub(1).leading_zeros()
}

/// What an operation is expected to take, by a formula: at once for any number of ranks.
///
/// `bytes` are those of the buffer of one rank; of gathers, scatters and all-to-all those of all shares. A chain is cut
/// into segments of `segment` bytes.
#[must_use]
pub fn predict(
    model: &Model,
    shape: Shape,
    kind: OperationKind,
    algorithm: Algorithm,
    bytes: f64,
    segment: f64,
) -> Prediction {
    use OperationKind as Kind;
    let mut tally = Tally {
        model,
        shape,
        sum: Prediction::default(),
    };
    let world = shape.world;
    if world <= 1 {
        return tally.sum;
    }
    let share = bytes / f64::from(world);
    match kind {
        Kind::AllReduce => tally.all_reduce(algorithm, bytes),
        Kind::Reduce => match algorithm {
            Algorithm::Chain => tally.chain(bytes, segment, true),
            Algorithm::Ring => {
                tally.ring(world, Reach::Circle(1), bytes, false);
                tally.tree(world, false, |distance| share * distance);
            }
            _ => tally.tree(world, true, |_| bytes),
        },
        Kind::ReduceScatter => match algorithm {
            Algorithm::Halving => tally.halving(world, Reach::Pairs, bytes, false),
            _ => tally.ring(world, Reach::Circle(1), bytes, false),
        },
        Kind::AllGather | Kind::AllGatherCounts | Kind::AllGatherVarcount => {
            tally.all_gather(algorithm, bytes);
        }
        Kind::Gather | Kind::GatherVarcount | Kind::Scatter | Kind::ScatterVarcount => {
            match algorithm {
                Algorithm::Binomial => tally.tree(world, false, |distance| share * distance),
                _ => tally.linear(share, 1),
            }
        }
        Kind::Broadcast => tally.broadcast(algorithm, bytes, segment),
        Kind::AllToAll | Kind::AllToAllVarcount => tally.all_to_all(algorithm, share),
        Kind::Barrier => {
            for distance in Tally::distances(world) {
                tally.step(Reach::Circle(distance), 0.0, false);
            }
        }
        Kind::SendReceive => tally.step(Reach::Circle(world / 2), bytes, false),
    }
    tally.sum
}

/// What the schedules of all ranks, in rank order, are expected to take, with elements of `size` bytes. Every rank begins
/// at once; a message moves when both sides have come to its step.
///
/// # Panics
///
/// If the schedules do not belong together, or not to this layout.
#[must_use]
pub fn time(model: &Model, layout: &Layout, schedules: &[Schedule], size: usize) -> Prediction {
    let world = schedules.len();
    assert_eq!(world, layout.world() as usize, "one schedule for each rank");
    let crosses = |a: usize, b: u32| layout.host_of(a as u32) != layout.host_of(b);
    let longest = schedules.iter().map(Schedule::len).max().unwrap_or(0);
    // How many messages enter and leave a host in the steps of one number.
    let mut crossing = vec![vec![[0_u32; 2]; longest]; layout.hosts() as usize];
    let mut sum = Prediction {
        steps: longest as f64,
        ..Prediction::default()
    };
    let mut across = vec![0.0; layout.hosts() as usize];
    for (rank, schedule) in schedules.iter().enumerate() {
        let host = layout.host_of(rank as u32) as usize;
        let mut inside = 0.0;
        for (index, step) in schedule.steps().enumerate() {
            for action in step {
                let Some((peer, span)) = action.transfer() else {
                    continue;
                };
                let sends = matches!(action, Action::Send { .. });
                let bytes = if sends { (span.len * size) as f64 } else { 0.0 };
                if crosses(rank, peer) {
                    crossing[host][index][usize::from(sends)] += 1;
                    across[host] += bytes;
                } else {
                    inside += bytes;
                }
            }
        }
        sum.inside = sum.inside.max(inside);
    }
    sum.across = across.iter().copied().fold(0.0, f64::max);
    let partners = partners(schedules);
    // When each rank came to each of its steps.
    let mut came: Vec<Vec<f64>> = vec![vec![0.0]; world];
    loop {
        let mut moved = false;
        for rank in 0..world {
            while came[rank].len() <= schedules[rank].len() {
                let Some(done) = step_ends(
                    model, layout, schedules, size, &came, &crossing, &partners, rank,
                ) else {
                    break;
                };
                came[rank].push(done);
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    for (rank, schedule) in schedules.iter().enumerate() {
        assert_eq!(
            came[rank].len(),
            schedule.len() + 1,
            "schedules that belong together"
        );
        sum.seconds = sum.seconds.max(came[rank][schedule.len()]);
    }
    sum
}

#[allow(clippy::too_many_arguments)] // one loop of `time`
/// When the present step of a rank ends, if its peers have come to their side of it.
fn step_ends(
    model: &Model,
    layout: &Layout,
    schedules: &[Schedule],
    size: usize,
    came: &[Vec<f64>],
    crossing: &[Vec<[u32; 2]>],
    partners: &[Vec<Vec<usize>>],
    rank: usize,
) -> Option<f64> {
    let index = came[rank].len() - 1;
    let host = layout.host_of(rank as u32);
    let step = schedules[rank].step(index);
    let mut begin = came[rank][index];
    let mut latency: f64 = 0.0;
    // What a rank sends and what it receives are on their way at the same time; the classes too.
    let (mut near, mut far, mut messages) = ([0.0_f64; 2], [0.0_f64; 2], [0_u32; 2]);
    let mut moved = 0_usize;
    for (place, action) in step.iter().enumerate() {
        let Some((peer, span)) = action.transfer() else {
            if let Action::Combine { into, .. } | Action::Copy { into, .. } = action {
                moved += into.len;
            }
            continue;
        };
        let sends = matches!(action, Action::Send { .. });
        if matches!(action, Action::ReceiveReduce { .. }) {
            moved += span.len;
        }
        let other = partners[rank][index][place];
        begin = begin.max(*came[peer as usize].get(other)?);
        let (way, bytes) = (usize::from(sends), (span.len * size) as f64);
        if layout.host_of(peer) == host {
            latency = latency.max(model.inside.alpha);
            near[way] += model.inside.message(bytes);
        } else {
            latency = latency.max(model.across.alpha);
            far[way] += bytes * model.across.beta;
            messages[way] += 1;
        }
    }
    let mut busiest = near[0].max(near[1]);
    for way in 0..2 {
        if messages[way] > 0 {
            // The host's link is shared with what its other ranks have on it in this step.
            let own = f64::from(messages[way]);
            let sharing = f64::from(crossing[host as usize][index][way]) / own;
            busiest = busiest.max(own * model.across.overhead + far[way] * sharing);
        }
    }
    Some(begin + latency + busiest + (moved * size) as f64 * model.gamma)
}

/// For each rank, step and action: the step in which the peer does its side of it; 0 for local actions.
fn partners(schedules: &[Schedule]) -> Vec<Vec<Vec<usize>>> {
    // For each pair of ranks the steps in which the one sends, and those in which the other receives.
    let mut sends: BTreeMap<(u32, u32), Vec<usize>> = BTreeMap::new();
    let mut receives = sends.clone();
    let mut numbers: Vec<Vec<Vec<usize>>> = Vec::new();
    for (rank, schedule) in (0..).zip(schedules) {
        let mut steps = Vec::new();
        for (index, step) in schedule.steps().enumerate() {
            let number = |action: &Action| {
                let Some((peer, _)) = action.transfer() else {
                    return 0;
                };
                let list = if matches!(action, Action::Send { .. }) {
                    sends.entry((rank, peer)).or_default()
                } else {
                    receives.entry((peer, rank)).or_default()
                };
                list.push(index);
                list.len() - 1
            };
            steps.push(step.iter().map(number).collect());
        }
        numbers.push(steps);
    }
    for (rank, schedule) in (0..).zip(schedules) {
        for (index, step) in schedule.steps().enumerate() {
            for (place, action) in step.iter().enumerate() {
                let Some((peer, _)) = action.transfer() else {
                    continue;
                };
                let number = &mut numbers[rank as usize][index][place];
                let other = if matches!(action, Action::Send { .. }) {
                    receives.get(&(rank, peer))
                } else {
                    sends.get(&(peer, rank))
                };
                *number = *other
                    .and_then(|steps| steps.get(*number))
                    .expect("schedules that belong together: every transfer has two sides");
            }
        }
    }
    numbers
}
