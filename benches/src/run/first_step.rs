//! From the start of the command to the end of the first step of real Horovod and torch, beside their own launchers.

use std::ffi::OsStr;
use std::path::Path;

use anyhow::Context as _;
use kolo_harness::Framework;

use crate::launchers::{Job, command, now, program, torchrun};
use crate::report::Figure;
use crate::stats::median;

const RANKS: usize = 4;

/// Milliseconds until rank 0 has made its step.
fn time<'a>(
    launcher: impl IntoIterator<Item = &'a OsStr>,
    options: &[&str],
    framework: Framework,
) -> anyhow::Result<f64> {
    let python = framework.python().map_err(anyhow::Error::msg)?;
    let python = python.to_str().context("the path of Python is no text")?;
    let steps = [python, "-c", program(framework), "0", "once"];
    let start = now();
    let mut command = command(launcher)?;
    command.args(options).args(steps);
    let mut job = Job::start(command)?;
    Ok(job.group(RANKS, start)?[0].stepped - start)
}

/// Medians of kolo and of the framework's own launcher, in turn.
fn medians(
    kolo: &Path,
    rounds: u32,
    framework: Framework,
    options: &[&str],
) -> anyhow::Result<(f64, f64)> {
    let launcher = framework.launcher().map_err(anyhow::Error::msg)?;
    let count = RANKS.to_string();
    let run = ["run", "--local", "-n", &count, "--"];
    let (mut own, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        own.push(time([kolo.as_os_str()], &run, framework)?);
        theirs.push(time(launcher, options, framework)?);
    }
    Ok((median(&own), median(&theirs)))
}

/// Measures both frameworks, `rounds` times. A peer that is missing, or does not work, is told.
pub(super) fn beside(kolo: &Path, rounds: u32) -> Vec<Figure> {
    let count = RANKS.to_string();
    let peers = [
        (Framework::Horovod, "horovodrun", vec!["-np", &count]),
        (Framework::Torch, "torchrun", torchrun(&count).to_vec()),
    ];
    let mut figures = Vec::new();
    for (framework, peer, options) in peers {
        match medians(kolo, rounds, framework, &options) {
            Ok((own, theirs)) => {
                let case = format!("first step of {framework:?}, {RANKS} workers");
                let figure = Figure::new("run", case, "p50", "ms", own);
                figures.push(figure.beside(peer, theirs));
            }
            Err(error) => eprintln!("{peer}: {error:#}"),
        }
    }
    figures
}
