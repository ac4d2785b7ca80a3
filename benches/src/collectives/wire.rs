//! What the bench and the ranks say to each other: lines, and stamps of time behind the answer.
//!
//! `benches/peers/rank.h` speaks the same, for the peers.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{BufRead, Write};
use std::str::FromStr;

use anyhow::Context as _;
use kolo::collectives::Algorithm;
use kolo::collectives::lane::LaneChoice;
use serde::{Deserialize, Serialize};

/// Bytes of one value.
const VALUE: u64 = 4;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Operation {
    AllReduce,
    AllGather,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    ReduceScatter,
    AllToAll,
    /// Ranks in pairs, there and back.
    SendReceive,
    Barrier,
}

impl Operation {
    /// As on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllToAll => "all-to-all",
            Self::SendReceive => "send-receive",
            Self::Barrier => "barrier",
        }
    }

    /// Whether sizes are those of all ranks' shares.
    fn is_shared_out(self) -> bool {
        matches!(
            self,
            Self::AllGather | Self::Gather | Self::Scatter | Self::ReduceScatter | Self::AllToAll
        )
    }

    /// Values of one rank's share, or of the whole buffer: at least one.
    pub(crate) fn share(self, bytes: u64, ranks: u32) -> u64 {
        match self {
            Self::Barrier => 0,
            _ if self.is_shared_out() => (bytes / VALUE / u64::from(ranks)).max(1),
            _ => (bytes / VALUE).max(1),
        }
    }

    /// The bytes that are really used for a size.
    pub(crate) fn bytes(self, bytes: u64, ranks: u32) -> u64 {
        let parts = if self.is_shared_out() { ranks } else { 1 };
        self.share(bytes, ranks) * VALUE * u64::from(parts)
    }

    /// Whether a rank could run ahead of the others without one.
    pub(crate) fn wants_barrier(self) -> bool {
        matches!(
            self,
            Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter
        )
    }
}

/// How kolo's bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum Lane {
    /// As kolo chooses: shared memory inside a host, and TLS over TCP between hosts.
    Auto,
    /// QUIC, inside a host too.
    Quic,
    /// TLS over TCP, inside a host too.
    Tls,
}

impl Lane {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Quic => "quic",
            Self::Tls => "tls",
        }
    }

    /// What links over the network are.
    pub(crate) fn choice(self) -> LaneChoice {
        match self {
            Self::Quic => LaneChoice::Quic,
            Self::Auto | Self::Tls => LaneChoice::Tls,
        }
    }
}

/// A series of operations that all ranks of a group do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Values: see [`Operation::share`].
    pub(crate) share: u64,
    /// Operations that are checked but not timed, first.
    pub(crate) warm: u32,
    /// Operations that are timed and checked.
    pub(crate) timed: u32,
    /// Which way of the contestant's.
    pub(crate) variant: u32,
    /// The values of the first operation; those of later ones follow from it.
    pub(crate) seed: u32,
    /// Whether a barrier that is not timed comes before each operation.
    pub(crate) barrier: bool,
}

impl Run {
    pub(crate) fn send(&self, to: &mut impl Write) -> anyhow::Result<()> {
        let line = format!(
            "run {} {} {} {} {} {}\n",
            self.share,
            self.warm,
            self.timed,
            self.variant,
            self.seed,
            u8::from(self.barrier)
        );
        to.write_all(line.as_bytes())?;
        Ok(())
    }
}

impl FromStr for Run {
    type Err = anyhow::Error;

    fn from_str(line: &str) -> anyhow::Result<Self> {
        let mut words = line.split_whitespace();
        anyhow::ensure!(words.next() == Some("run"), "`{line}` is no run");
        let mut number = || -> anyhow::Result<u64> {
            let word = words.next().with_context(|| format!("`{line}` is cut"))?;
            word.parse().with_context(|| format!("`{word}` in a run"))
        };
        Ok(Self {
            share: number()?,
            warm: number()?.try_into()?,
            timed: number()?.try_into()?,
            variant: number()?.try_into()?,
            seed: number()?.try_into()?,
            barrier: number()? != 0,
        })
    }
}

/// What one rank answers to a [`Run`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// When each timed operation began and ended, in nanoseconds of the monotonic clock.
    pub(crate) stamps: Vec<(i64, i64)>,
    /// Values that were not as they must be.
    pub(crate) wrong: u64,
    /// How it was done, from kolo's ranks.
    pub(crate) how: Option<How>,
}

/// How kolo did an operation. Neither has spaces.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct How {
    /// Kinds of lanes, with commas between.
    pub(crate) lanes: String,
    /// The algorithm; `local` where there is none, as in shared memory.
    pub(crate) algorithm: String,
}

impl How {
    /// What ranks did together: all that any of them used.
    pub(crate) fn of_all<'a>(ranks: impl Iterator<Item = &'a Self>) -> Option<Self> {
        let (mut lanes, mut algorithms) = (BTreeSet::new(), BTreeSet::new());
        for how in ranks {
            lanes.extend(how.lanes.split(','));
            algorithms.insert(&how.algorithm[..]);
        }
        let join = |names: BTreeSet<&str>| names.into_iter().collect::<Vec<_>>().join(",");
        (!lanes.is_empty()).then(|| Self {
            lanes: join(lanes),
            algorithm: join(algorithms),
        })
    }
}

/// For people: `two-level-ring over shm-ring,tls`.
impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.algorithm != Algorithm::Local.name() {
            write!(f, "{} ", self.algorithm)?;
        }
        write!(f, "over {}", self.lanes)
    }
}

impl Answer {
    pub(crate) fn send(&self, to: &mut impl Write) -> anyhow::Result<()> {
        let mut out = Vec::new();
        write!(out, "done {} {}", self.stamps.len(), self.wrong)?;
        if let Some(How { lanes, algorithm }) = &self.how {
            write!(out, " {lanes} {algorithm}")?;
        }
        out.push(b'\n');
        for (begun, ended) in &self.stamps {
            out.extend_from_slice(&begun.to_le_bytes());
            out.extend_from_slice(&ended.to_le_bytes());
        }
        to.write_all(&out)?;
        Ok(())
    }

    pub(crate) fn receive(from: &mut impl BufRead) -> anyhow::Result<Self> {
        let mut line = String::new();
        anyhow::ensure!(from.read_line(&mut line)? > 0, "a rank ended");
        if let Some(reason) = line.strip_prefix("error ") {
            anyhow::bail!("{}", reason.trim_end());
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let (count, wrong, how) = match words[..] {
            ["done", count, wrong] => (count, wrong, None),
            ["done", count, wrong, lanes, algorithm] => {
                let how = How {
                    lanes: lanes.to_owned(),
                    algorithm: algorithm.to_owned(),
                };
                (count, wrong, Some(how))
            }
            _ => anyhow::bail!("a rank answered `{}`", line.trim_end()),
        };
        let count: usize = count.parse().context("the number of operations")?;
        let mut stamps = Vec::new();
        let mut bytes = [0; 16];
        for _ in 0..count {
            from.read_exact(&mut bytes).context("a rank ended")?;
            let stamp =
                |at: usize| i64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
            stamps.push((stamp(0), stamp(8)));
        }
        Ok(Self {
            stamps,
            wrong: wrong.parse().context("the number of wrong values")?,
            how,
        })
    }
}

/// The first line of a rank: `ready RANK VARIANTS`.
pub(crate) fn parse_ready(line: &str) -> anyhow::Result<(usize, u32)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["ready", rank, variants] = words[..] else {
        anyhow::bail!("a rank began with `{}`", line.trim_end());
    };
    Ok((rank.parse()?, variants.parse()?))
}
