//! What an operation costs: a message of S bytes takes `alpha + S beta`, combining S bytes takes `S gamma`.
//!
//! The model is Hockney's with the part of the latency that a processor spends on each message set apart, as in LogGP
//! (Alexandrov et al. 1995), and with two classes of links (inside a host, across hosts). The ranks of a host share its
//! link to the others. A test holds the steps and bytes of the formula against those of the schedules.

use super::{Algorithm, Shape};
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

/// What links and processors take. The default fits Unix sockets inside a host and a network of 10 Gbit/s.
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

    fn broadcast(&mut self, algorithm: Algorithm, bytes: f64) {
        let Shape {
            world, hosts, most, ..
        } = self.shape;
        let piece = bytes / f64::from(world);
        match algorithm {
            Algorithm::ScatterGather => {
                self.tree(world, false, |distance| piece * distance);
                self.steps(f64::from(world - 1), Reach::Circle(1), piece, false);
            }
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
        if algorithm == Algorithm::Linear {
            return self.linear(block, most);
        }
        // The distances near 0 and near the world size one by one, those between at once: they are alike.
        let near = most.min(world.div_ceil(2));
        for distance in 1..near {
            self.steps(2.0, Reach::Circle(distance), block, false);
        }
        let between = f64::from(world - 1) - 2.0 * f64::from(near.saturating_sub(1));
        self.steps(between, Reach::Circle(world / 2), block, false);
    }
}

fn ceil_log2(number: u32) -> u32 {
    u32::BITS - number.saturating_sub(1).leading_zeros()
}

/// What an operation is expected to take, by a formula: at once for any number of ranks.
///
/// `bytes` are those of the buffer of one rank; of gathers, scatters and all-to-all those of all shares.
#[must_use]
pub fn predict(
    model: &Model,
    shape: Shape,
    kind: OperationKind,
    algorithm: Algorithm,
    bytes: f64,
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
        Kind::Broadcast => tally.broadcast(algorithm, bytes),
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
