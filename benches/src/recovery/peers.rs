//! The same losses under Horovod's elastic driver and under torchrun: a worker is killed, and the others go on without it (`shrink`), or
//! there are as many as before, with their state (`replace`; Horovod starts one process, torchrun all).

use super::Options;
use crate::launchers::Launcher;
use crate::losses::{Loss, Samples, Scale, Side, measure};
use crate::report::Figure;
use crate::stats::median;

/// Most losses of a kind: Horovod may wait for Gloo's time-out of 30 s at each.
const MOST: u32 = 5;

fn samples(loss: Loss, options: &Options) -> anyhow::Result<Samples> {
    let scale = Scale {
        ranks: options.workers as usize,
        n: options.n.min(MOST),
        bytes: if loss == Loss::Shrink {
            0
        } else {
            options.bytes
        },
    };
    let samples = measure(loss, Side::Peer, scale)?;
    let formed = samples.totals.len();
    eprintln!("{loss:?}: {formed} of {} groups have formed", scale.n);
    anyhow::ensure!(formed > 0, "no group has formed");
    Ok(samples)
}

/// Puts peers' rows behind kolo's own. A peer that is missing, or does not work, is told.
pub(super) fn beside(figures: &mut Vec<Figure>, options: &Options) {
    let mut add = |case: &str, loss, peer, less_python| match samples(loss, options) {
        Ok(samples) => {
            let own = |figure: &&Figure| figure.case.starts_with(case) && figure.metric == "p50";
            let Some(own) = figures.iter().find(own).cloned() else {
                return;
            };
            figures.push(own.beside(peer, median(&samples.totals)));
            if loss != Loss::Shrink {
                figures.push(own.beside(less_python, median(&samples.less_python)));
            }
        }
        Err(error) => eprintln!("{peer}: {error:#}"),
    };
    if options.peers.contains(&Launcher::Horovodrun) {
        let less_python = "horovodrun less Python";
        add("shrink", Loss::Shrink, "horovodrun", less_python);
        add("replace", Loss::Replace, "horovodrun", less_python);
    }
    if options.peers.contains(&Launcher::Torchrun) {
        let less_python = "torchrun less Python";
        add("replace", Loss::Restart, "torchrun", less_python);
    }
}
