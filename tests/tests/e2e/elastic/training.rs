//! The work of an elastic group: a loop that counts what the group loses.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kolo::elastic::StateError;
use kolo::prelude::*;
use serde::{Deserialize, Serialize};

const SAMPLES: usize = 24;
const BATCH: usize = 6;

/// So that groups of many tests at once leave processors to each other.
const PACE: Duration = Duration::from_millis(1);

/// The arguments of [`train`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Task {
    /// Holds what the workers tell the test, and the test the workers.
    pub folder: PathBuf,
    /// Length of the large buffer of the state.
    pub numbers: usize,
    /// How long an operation of the group waits for a rank.
    pub patience: Duration,
}

impl Task {
    /// The group ends at the end of the epoch when this file is there.
    pub fn stop(&self) -> PathBuf {
        self.folder.join("stop")
    }

    /// Committed steps, as rank 0 writes it.
    pub fn steps(&self) -> PathBuf {
        self.folder.join("steps")
    }
}

/// What every rank knows at the end, the same on all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    pub epochs: u64,
    /// Epochs in which some sample did not come exactly once.
    pub uneven_epochs: u64,
    pub steps: u64,
    pub steps_redone: u64,
    /// Generations that the group has worked in.
    pub generations: u64,
    /// Changes at which the ranks that stayed had all stopped at a commit.
    pub interrupts: u64,
    /// Those at which the ranks had stopped at different commits.
    pub torn_interrupts: u64,
    /// A digest of the whole state.
    pub digest: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Progress {
    sampler: ElasticSampler,
    is_stopping: bool,
    uneven_epochs: u64,
    steps: u64,
    steps_redone: u64,
    generations: u64,
    interrupts: u64,
    torn_interrupts: u64,
}

struct Training {
    progress: Progress,
    used: Vec<u32>,
    weights: Vec<f32>,
}

impl Elastic for Training {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        parts.value("progress", &mut self.progress);
        parts.buffer("used", &mut self.used);
        parts.buffer("weights", &mut self.weights);
    }
}

/// What this process alone has seen.
#[derive(Debug, Default)]
struct Here {
    /// Steps that were begun, committed or not.
    begun: u64,
    /// The step at whose commit this rank was interrupted.
    interrupted_at: Option<u64>,
}

/// Works until the test asks for the end. The rank, and what it knows.
#[kolo::function]
pub fn train(ctx: &Context, task: Task) -> anyhow::Result<(usize, Outcome)> {
    let mut state = State::new(Training {
        progress: Progress {
            sampler: ElasticSampler::with_global_batch(SAMPLES, BATCH).seed(7),
            is_stopping: false,
            uneven_epochs: 0,
            steps: 0,
            steps_redone: 0,
            generations: 0,
            interrupts: 0,
            torn_interrupts: 0,
        },
        used: vec![0; SAMPLES],
        // Each process begins with others.
        weights: vec![std::process::id() as f32; task.numbers],
    });
    let mut here = Here::default();
    ctx.elastic(&mut state, |ctx, state| {
        ctx.comm().set_timeout(task.patience);
        begin(ctx, state, &mut here)?;
        learn(ctx, state, &task, &mut here)?;
        Ok((ctx.rank(), outcome(state)))
    })
}

/// Counts the generation, and the steps that some rank had begun and none has committed.
fn begin(ctx: &Context, state: &mut State<Training>, here: &mut Here) -> anyhow::Result<()> {
    let steps = state.progress.steps;
    let stopped = here.interrupted_at;
    let mut most = [here.begun.max(steps), stopped.unwrap_or(0)];
    let mut least = [stopped.unwrap_or(u64::MAX)];
    ctx.comm().all_reduce(&mut most, ReduceOp::Max)?;
    ctx.comm().all_reduce(&mut least, ReduceOp::Min)?;
    let progress = &mut state.progress;
    progress.generations += 1;
    progress.steps_redone += most[0] - steps;
    progress.interrupts += u64::from(most[1] > 0);
    progress.torn_interrupts += u64::from(most[1] > 0 && most[1] != least[0]);
    *here = Here {
        begun: steps,
        interrupted_at: None,
    };
    Ok(())
}

fn learn(
    ctx: &Context,
    state: &mut State<Training>,
    task: &Task,
    here: &mut Here,
) -> anyhow::Result<()> {
    let size = ctx.world_size();
    loop {
        while let Some(batch) = state.progress.sampler.next_batch(ctx.rank(), size) {
            std::thread::sleep(PACE);
            here.begun = state.progress.steps + 1;
            let asked = f64::from(u8::from(task.stop().exists()));
            let mut sums = [batch.iter().sum::<usize>() as f64, asked];
            ctx.comm().all_reduce(&mut sums, ReduceOp::Sum)?;
            state.step(&batch, sums, size)?;
            commit(ctx, state, here)?;
            if ctx.rank() == 0 {
                tell(&task.steps(), state.progress.steps)?;
            }
        }
        state.end_epoch();
        if state.progress.is_stopping {
            return Ok(());
        }
    }
}

fn commit(ctx: &Context, state: &mut State<Training>, here: &mut Here) -> Result<(), StateError> {
    let committed = state.commit(ctx);
    if committed == Err(StateError::Interrupted) {
        here.interrupted_at = Some(state.progress.steps);
    }
    committed
}

impl Training {
    fn step(
        &mut self,
        batch: &kolo::elastic::Batch,
        sums: [f64; 2],
        size: usize,
    ) -> anyhow::Result<()> {
        // All ranks count the samples of all, so that a rank which is lost takes no count with it.
        for rank in 0..size {
            let slice = self.progress.sampler.next_batch(rank, size);
            slice
                .iter()
                .flatten()
                .for_each(|sample| self.used[sample] += 1);
        }
        let at = self.progress.steps as usize % self.weights.len();
        self.weights[at] += sums[0] as f32;
        self.progress.steps += 1;
        self.progress.is_stopping |= sums[1] > 0.0;
        Ok(self.progress.sampler.record(batch)?)
    }

    fn end_epoch(&mut self) {
        let is_even = self.used.iter().all(|times| *times == 1);
        self.progress.uneven_epochs += u64::from(!is_even);
        let next = self.progress.sampler.epoch() + 1;
        self.progress.sampler.set_epoch(next);
        self.used.fill(0);
    }
}

fn outcome(state: &Training) -> Outcome {
    let Progress {
        sampler,
        uneven_epochs,
        steps,
        steps_redone,
        generations,
        interrupts,
        torn_interrupts,
        ..
    } = &state.progress;
    let weights = state.weights.iter().fold(0_u64, |hash, weight| {
        hash.wrapping_mul(31)
            .wrapping_add(u64::from(weight.to_bits()))
    });
    Outcome {
        epochs: sampler.epoch(),
        uneven_epochs: *uneven_epochs,
        steps: *steps,
        steps_redone: *steps_redone,
        generations: *generations,
        interrupts: *interrupts,
        torn_interrupts: *torn_interrupts,
        digest: weights,
    }
}

/// Whoever reads the file sees one whole number.
fn tell(path: &Path, number: u64) -> std::io::Result<()> {
    let draft = path.with_extension(format!("{}", std::process::id()));
    std::fs::write(&draft, number.to_string())?;
    std::fs::rename(draft, path)
}
