//! From measured links to the numbers of the model: who measures with whom, and what follows from what was found. No I/O.

use std::fmt;

use super::Layout;
use super::cost::{Class, Model};

/// Bytes of a short message and of a long one.
pub(crate) const SHORT: usize = 64;
pub(crate) const LONG: usize = 512 << 10;

/// What links and processors were found to take: the same on all ranks, to the last bit. See
/// [`Communicator::calibrate`](crate::Communicator::calibrate).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Calibration {
    /// What algorithms are chosen by from now on. Times are in seconds, those of bytes in seconds for one byte. What could not be
    /// measured is as it was.
    pub model: Model,
    /// So many pairs of ranks of one host were measured. 0 if no host has two.
    pub pairs_inside: u32,
    /// So many pairs of ranks on two hosts were measured. 0 if there is one host.
    pub pairs_across: u32,
}

/// For people: `inside hosts 9.1 us and 2.41 GB/s (1 pair), across hosts not measured, combining 11.20 GB/s`.
impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Model {
            inside,
            across,
            gamma,
        } = self.model;
        let classes = [
            ("inside", inside, self.pairs_inside),
            ("across", across, self.pairs_across),
        ];
        for (name, class, pairs) in classes {
            write!(f, "{name} hosts ")?;
            match pairs {
                0 => f.write_str("not measured, ")?,
                pairs => {
                    let (micros, speed) = (1e6 * (class.alpha + class.overhead), 1e-9 / class.beta);
                    let s = if pairs == 1 { "" } else { "s" };
                    write!(f, "{micros:.1} us and {speed:.2} GB/s ({pairs} pair{s}), ")?;
                }
            }
        }
        write!(f, "combining {:.2} GB/s", 1e-9 / gamma)
    }
}

/// A turn of measurements, in which no rank has two partners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Round {
    /// The first two ranks of each host.
    Inside,
    /// The first ranks of hosts 0 and 1, 2 and 3, ...
    Across,
    /// Of an odd number of hosts the last, with host 0.
    Last,
}

impl Round {
    pub(crate) const ALL: [Self; 3] = [Self::Inside, Self::Across, Self::Last];

    /// The two ranks of which this is one, the lower first.
    pub(crate) fn pair(self, layout: &Layout, rank: u32) -> Option<(u32, u32)> {
        let (host, hosts) = (layout.host_of(rank), layout.hosts());
        let first = |host: u32| layout.ranks_on(host)[0];
        let (one, other) = match self {
            Self::Inside => match *layout.ranks_on(host) {
                [one, other, ..] => (one, other),
                _ => return None,
            },
            // The host with the other last bit.
            Self::Across if host ^ 1 < hosts => (first(host), first(host ^ 1)),
            Self::Last if hosts % 2 == 1 && hosts > 1 && (host == 0 || host == hosts - 1) => {
                (first(0), first(hosts - 1))
            }
            Self::Across | Self::Last => return None,
        };
        (rank == one || rank == other).then_some((one.min(other), one.max(other)))
    }
}

/// What two ranks found, in seconds: the time on the way of a short message and of a long one, and how long a rank is busy with one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sample {
    pub(crate) short: f64,
    pub(crate) busy: f64,
    pub(crate) long: f64,
}

/// What a rank has to say: what it found as the lower one of a pair, in each round, and the time to combine a byte.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Report {
    pub(crate) samples: [Option<Sample>; Round::ALL.len()],
    pub(crate) gamma: f64,
}

impl Report {
    pub(crate) const NUMBERS: usize = 3 * Round::ALL.len() + 1;

    /// As it travels; what was not measured is NaN.
    pub(crate) fn encode(&self) -> [f64; Self::NUMBERS] {
        let mut numbers = [f64::NAN; Self::NUMBERS];
        for (place, sample) in numbers.chunks_exact_mut(3).zip(self.samples) {
            if let Some(Sample { short, busy, long }) = sample {
                place.copy_from_slice(&[short, busy, long]);
            }
        }
        numbers[Self::NUMBERS - 1] = self.gamma;
        numbers
    }

    /// From what came. Numbers that no clock gives count as not measured.
    pub(crate) fn decode(numbers: &[f64]) -> Self {
        let sane = |seconds: f64| seconds > 0.0 && seconds < 1e6;
        let mut report = Self::default();
        for (sample, place) in report.samples.iter_mut().zip(numbers.chunks_exact(3)) {
            *sample = place.iter().all(|time| sane(*time)).then(|| Sample {
                short: place[0],
                busy: place[1],
                long: place[2],
            });
        }
        let gamma = numbers.last().copied().unwrap_or(0.0);
        report.gamma = if sane(gamma) { gamma } else { 0.0 };
        report
    }
}

/// No link is faster, and no formula divides by zero.
const LEAST_LATENCY: f64 = 1e-8;
const LEAST_PER_BYTE: f64 = 1e-13;

impl Calibration {
    pub(crate) const NUMBERS: usize = 9;

    /// From what all ranks found. What nobody measured is as in `old`.
    pub(crate) fn of(reports: &[Report], old: &Model) -> Self {
        let found = |rounds: &[Round]| -> Vec<Sample> {
            let of = |report: &Report| {
                let samples = Round::ALL.iter().zip(report.samples);
                let wanted = samples.filter(|(round, _)| rounds.contains(round));
                wanted.filter_map(|(_, sample)| sample).collect::<Vec<_>>()
            };
            reports.iter().flat_map(of).collect()
        };
        let inside = found(&[Round::Inside]);
        let across = found(&[Round::Across, Round::Last]);
        let gammas = reports.iter().map(|report| report.gamma);
        let gamma = median(gammas.filter(|gamma| *gamma > 0.0));
        Self {
            model: Model {
                inside: class(&inside).unwrap_or(old.inside),
                across: class(&across).unwrap_or(old.across),
                gamma: gamma.map_or(old.gamma, |gamma| gamma.max(LEAST_PER_BYTE)),
            },
            pairs_inside: inside.len() as u32,
            pairs_across: across.len() as u32,
        }
    }

    /// As it travels.
    pub(crate) fn encode(&self) -> [f64; Self::NUMBERS] {
        let Model {
            inside,
            across,
            gamma,
        } = self.model;
        [
            inside.alpha,
            inside.overhead,
            inside.beta,
            across.alpha,
            across.overhead,
            across.beta,
            gamma,
            f64::from(self.pairs_inside),
            f64::from(self.pairs_across),
        ]
    }

    pub(crate) fn decode(numbers: [f64; Self::NUMBERS]) -> Self {
        let class = |from: usize| Class {
            alpha: numbers[from],
            overhead: numbers[from + 1],
            beta: numbers[from + 2],
        };
        #[allow(clippy::cast_sign_loss)] // they were counted
        let count = |number: f64| number as u32;
        Self {
            model: Model {
                inside: class(0),
                across: class(3),
                gamma: numbers[6],
            },
            pairs_inside: count(numbers[7]),
            pairs_across: count(numbers[8]),
        }
    }
}

/// Each number is the median of the pairs: one that was disturbed does not count.
fn class(samples: &[Sample]) -> Option<Class> {
    let short = median(samples.iter().map(|sample| sample.short))?;
    let busy = median(samples.iter().map(|sample| sample.busy))?;
    let bytes = (LONG - SHORT) as f64;
    let per_byte = |sample: &Sample| (sample.long - sample.short) / bytes;
    let beta = median(samples.iter().map(per_byte))?;
    // Some of the way is the processor's, and some is not.
    let overhead = busy.clamp(0.05 * short, 0.9 * short);
    Some(Class {
        alpha: (short - overhead).max(LEAST_LATENCY),
        overhead: overhead.max(LEAST_LATENCY),
        beta: beta.max(LEAST_PER_BYTE),
    })
}

/// The middle one; of two the greater.
pub(crate) fn median(times: impl Iterator<Item = f64>) -> Option<f64> {
    let mut times: Vec<f64> = times.collect();
    times.sort_unstable_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::{OperationKind, ReduceOp};
    use crate::schedule::{Algorithm, Choices, Shape, Tuning};

    fn pairs(round: Round, layout: &Layout) -> Vec<(u32, u32)> {
        let mut pairs: Vec<_> = (0..layout.world())
            .filter_map(|rank| round.pair(layout, rank))
            .collect();
        pairs.sort_unstable();
        pairs
    }

    #[test]
    fn both_ranks_of_a_pair_know_it_and_nobody_has_two_partners() {
        for slots in [
            &[1][..],
            &[5],
            &[1, 1],
            &[2, 3],
            &[1, 1, 1],
            &[4, 1, 2, 2, 3],
            &[2; 8],
        ] {
            let layout = Layout::of_slots(slots);
            for round in Round::ALL {
                let pairs = pairs(round, &layout);
                let mut ranks: Vec<u32> =
                    pairs.iter().step_by(2).flat_map(|p| [p.0, p.1]).collect();
                assert!(pairs.chunks(2).all(|two| two[0] == two[1]), "{pairs:?}");
                ranks.sort_unstable();
                assert!(ranks.windows(2).all(|two| two[0] < two[1]), "{pairs:?}");
                let inside = round == Round::Inside;
                let same = |pair: &(u32, u32)| layout.host_of(pair.0) == layout.host_of(pair.1);
                assert!(pairs.iter().all(|pair| same(pair) == inside));
            }
            // Every host is measured, if there is another one.
            let across = [Round::Across, Round::Last].map(|round| pairs(round, &layout));
            let hosts: std::collections::BTreeSet<u32> = across
                .iter()
                .flatten()
                .flat_map(|pair| [layout.host_of(pair.0), layout.host_of(pair.1)])
                .collect();
            let all = if slots.len() > 1 { slots.len() } else { 0 };
            assert_eq!(hosts.len(), all, "{slots:?}");
        }
        let layout = Layout::of_hosts(&["a", "b", "a", "c", "b"]);
        assert_eq!(Round::Inside.pair(&layout, 2), Some((0, 2)));
        assert_eq!(Round::Across.pair(&layout, 1), Some((0, 1)));
        assert_eq!(Round::Last.pair(&layout, 3), Some((0, 3)));
        assert_eq!(Round::Across.pair(&layout, 3), None);
    }

    /// Links that take so much for a message and for each byte.
    fn sample(latency: f64, busy: f64, per_byte: f64) -> Sample {
        Sample {
            short: latency,
            busy,
            long: latency + (LONG - SHORT) as f64 * per_byte,
        }
    }

    fn near(one: f64, other: f64) -> bool {
        (one / other - 1.0).abs() < 1e-9
    }

    #[test]
    fn numbers_are_those_of_the_middle_pair() {
        let report = |samples| Report {
            samples,
            gamma: 2e-10,
        };
        let (fast, slow) = (sample(10e-6, 2e-6, 1e-10), sample(50e-6, 9e-6, 1e-9));
        let disturbed = sample(3.0, 2.0, 1e-3);
        let reports = [
            report([Some(fast), Some(slow), None]),
            report([Some(disturbed), Some(slow), None]),
            report([Some(fast), None, Some(disturbed)]),
            Report::default(),
        ];
        let found = Calibration::of(&reports, &Model::default());
        let Model { inside, across, .. } = found.model;
        assert!(
            near(inside.alpha, 8e-6) && near(inside.overhead, 2e-6),
            "{found:?}"
        );
        assert!(
            near(inside.beta, 1e-10) && near(across.beta, 1e-9),
            "{found:?}"
        );
        assert!(
            near(across.alpha, 41e-6) && near(across.overhead, 9e-6),
            "{found:?}"
        );
        assert!(near(found.model.gamma, 2e-10));
        assert_eq!((found.pairs_inside, found.pairs_across), (3, 3));
        assert_eq!(Calibration::decode(found.encode()), found);
        let text = found.to_string();
        assert!(
            text.contains("inside hosts 10.0 us and 10.00 GB/s (3 pairs)"),
            "{text}"
        );
    }

    #[test]
    fn what_is_not_measured_or_makes_no_sense_is_as_it_was() {
        let old = Model::default().slowed(3.0);
        assert_eq!(Calibration::of(&[Report::default(); 3], &old).model, old);
        let mut report = Report::default();
        report.samples[0] = Some(sample(1e-6, 1e-7, 1e-10));
        let numbers = report.encode();
        assert_eq!(Report::decode(&numbers), report);
        for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            let mut numbers = numbers;
            numbers[1] = bad;
            assert_eq!(Report::decode(&numbers), Report::default(), "{bad}");
        }
        // A long message that was faster than a short one, and a processor that was busy for longer.
        report.samples[0] = Some(Sample {
            short: 1e-5,
            busy: 1.0,
            long: 1e-6,
        });
        let found = Calibration::of(&[report], &old).model;
        assert!(found.inside.alpha > 0.0 && found.inside.beta > 0.0);
        assert!(found.inside.overhead < 1e-5);
        let text = Calibration::of(&[report], &old).to_string();
        assert!(text.contains("across hosts not measured"), "{text}");
    }

    #[test]
    fn the_choice_follows_what_was_measured() {
        let chosen = |latency, per_byte| {
            let mut report = Report {
                gamma: 1e-10,
                ..Report::default()
            };
            report.samples[1] = Some(sample(latency, latency / 10.0, per_byte));
            let model = Calibration::of(&[report], &Model::default()).model;
            let tuning = Tuning {
                model,
                ..Tuning::default()
            };
            let mut choices = Choices::new(tuning, Shape::even(8, 8));
            choices.choose(OperationKind::AllReduce, Some(ReduceOp::Sum), 1 << 20)
        };
        // Messages are dear and bytes cheap, and the other way round.
        let (dear, cheap) = (chosen(50e-3, 1e-11), chosen(1e-7, 1e-8));
        assert!(
            [Algorithm::Flat, Algorithm::Doubling].contains(&dear),
            "{dear}"
        );
        assert!(
            cheap == Algorithm::Ring
                || cheap == Algorithm::Halving
                || cheap == Algorithm::TwoLevelRing
                || cheap == Algorithm::TwoLevelHalving,
            "{cheap}"
        );
        assert_ne!(dear, cheap);
    }
}
