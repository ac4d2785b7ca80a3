//! From a loss of a rank to the next step of real Horovod and torch: the same scripts under `kolo run` and under their own launchers, in turn.

use crate::launchers::{Launcher, kolo};
use crate::losses::{Loss, Samples, Scale, Side, measure};
use crate::report::{Figure, Format};
use crate::stats::median;

/// Losses of one side before it is the other's turn.
const TURN: u32 = 5;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Whose scripts, with commas between: Horovod's elastic ones, which go on in place, and torch's, which are started anew.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "horovodrun,torchrun"
    )]
    peer: Vec<Launcher>,
    /// Ranks. With three or more Horovod 0.28.1 notices some losses under its own launcher only when `HOROVOD_GLOO_TIMEOUT_SECONDS` is over.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=64))]
    workers: u32,
    /// How often each.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    n: u32,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub(crate) format: Format,
}

/// Of kolo, and of the peer.
#[derive(Debug, Default)]
struct Both([Samples; 2]);

impl Both {
    /// Measures in turn. A side that does not work is told, and has no samples.
    fn measure(loss: Loss, peer: &str, options: &Options) -> anyhow::Result<Self> {
        let kolo = kolo()?;
        let sides = [(Side::Kolo(&kolo), "kolo run"), (Side::Peer, peer)];
        let mut both = Self::default();
        let mut works = [true; 2];
        let mut done = 0;
        while done < options.n {
            let scale = Scale {
                ranks: options.workers as usize,
                n: TURN.min(options.n - done),
            };
            done += scale.n;
            for ((samples, works), (side, name)) in both.0.iter_mut().zip(&mut works).zip(sides) {
                if !*works {
                    continue;
                }
                eprintln!("{name}:");
                match measure(loss, side, scale) {
                    Ok(more) => samples.extend(more),
                    Err(error) => {
                        eprintln!("{name}: {error:#}");
                        *works = false;
                    }
                }
            }
        }
        Ok(both)
    }

    /// The medians of one time beside each other, if kolo has one.
    fn figure(
        &self,
        (case, metric): (&str, &'static str),
        peer: &'static str,
        pick: fn(&Samples) -> &[f64],
    ) -> Option<Figure> {
        let [own, theirs] = self.0.each_ref().map(pick);
        if own.is_empty() {
            return None;
        }
        let figure = Figure::new("elastic", case, metric, "ms", median(own));
        Some(if theirs.is_empty() {
            figure
        } else {
            figure.beside(peer, median(theirs))
        })
    }

    /// How many groups have not formed.
    fn hung(&self, case: &str, peer: &'static str) -> Figure {
        let [own, theirs] = self.0.each_ref().map(|samples| f64::from(samples.hung));
        Figure {
            peer: Some(peer),
            peer_value: Some(theirs),
            ..Figure::new("elastic", case, "hung", "groups", own)
        }
    }
}

/// Measures the scripts of all peers, one after the other.
pub(crate) fn run(options: &Options) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    if options.peer.contains(&Launcher::Horovodrun) {
        let peer = "horovodrun";
        let both = Both::measure(Loss::Shrink, peer, options)?;
        let shrink = both.figure(("horovod-shrink", "p50"), peer, |it| &it.totals);
        let grow = both.figure(("horovod-grow", "p50"), peer, |it| &it.grown);
        let hung = both.hung("horovod-shrink", peer);
        figures.extend(shrink.into_iter().chain(grow).chain([hung]));
    }
    if options.peer.contains(&Launcher::Torchrun) {
        let (case, peer) = ("torch-restart", "torchrun");
        let both = Both::measure(Loss::Restart, peer, options)?;
        let all = both.figure((case, "p50"), peer, |it| &it.totals);
        let rest = both.figure((case, "less_python"), peer, |it| &it.less_python);
        figures.extend(all.into_iter().chain(rest).chain([both.hung(case, peer)]));
    }
    Ok(figures)
}
