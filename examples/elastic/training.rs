//! The work of a rank: a replica of the network, and a loop that goes on when the group has changed.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use kolo::elastic::Checkpoints;
use kolo::prelude::*;
use serde::{Deserialize, Serialize};

use crate::data::Digits;
use crate::mlp::{Mlp, PARAMETERS};
use crate::report::{Entry, News, now};

const RATE: f32 = 0.08;
const MOMENTUM: f32 = 0.9;
/// From one checkpoint to the next, at least.
const INTERVAL: Duration = Duration::from_millis(100);

/// What the driver tells every worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Config {
    /// Decides the split of the data, the first weights and the order of the images.
    pub seed: u64,
    /// Images in a step, over all ranks.
    pub batch: usize,
    /// The fewest passes over the training images.
    pub epochs: u64,
    /// The group goes on until this file is there.
    pub end: PathBuf,
    /// After so many passes the group gives up.
    pub most_epochs: u64,
    /// Where checkpoints are kept, if at all.
    pub checkpoints: Option<PathBuf>,
    /// The group begins with the newest checkpoint.
    pub resume: bool,
}

/// What every rank knows at the end.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Share of the held-out images that are told right.
    pub accuracy: f64,
    /// Passes in which some image was not used exactly once.
    pub uneven_epochs: u64,
    /// A digest of the weights' bits: the same on all ranks.
    pub digest: u64,
}

/// The state of the group: everything that must outlive a rank.
struct Training {
    progress: Progress,
    model: Mlp,
    velocity: Vec<f32>,
    /// How often each training image was used in this epoch.
    used: Vec<u32>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Progress {
    sampler: ElasticSampler,
    steps: u64,
    uneven_epochs: u64,
}

impl Elastic for Training {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        parts.value("progress", &mut self.progress);
        parts.buffer("weights", &mut self.model.parameters);
        parts.buffer("velocity", &mut self.velocity);
        parts.buffer("used", &mut self.used);
    }
}

/// Trains until the group has seen all changes that the driver makes. Rank 0 tells how each generation came about.
#[kolo::function]
pub fn train(ctx: &Context, config: Config) -> anyhow::Result<Summary> {
    let (images, held_out) = Digits::load()?.split(config.seed);
    let sampler = ElasticSampler::with_global_batch(images.len(), config.batch).seed(config.seed);
    let mut state = State::new(Training {
        progress: Progress {
            sampler,
            steps: 0,
            uneven_epochs: 0,
        },
        model: Mlp::new(config.seed),
        velocity: vec![0.0; PARAMETERS],
        used: vec![0; images.len()],
    });
    if let Some(directory) = &config.checkpoints {
        let checkpoints = Checkpoints::in_directory(directory)
            .not_more_often_than(INTERVAL)
            .resume(config.resume);
        state = state.checkpoints(checkpoints);
    }
    let mut here = Here::default();
    ctx.elastic(&mut state, |ctx, state| {
        let begun = begin(ctx, state, &mut here);
        let done = begun.and_then(|()| learn(ctx, state, &images, &config, &mut here));
        here.stopped = Some(now());
        done?;
        Ok(Summary {
            accuracy: accuracy(ctx, &state.model, &held_out)?,
            uneven_epochs: state.progress.uneven_epochs,
            digest: digest(&state.model.parameters),
        })
    })
}

/// What this process alone has seen.
#[derive(Debug, Default)]
struct Here {
    /// Steps that were begun, committed or not.
    begun: u64,
    /// When the loop could not go on in the generation before.
    stopped: Option<u64>,
    /// What is to be told of this generation, when its first step is made.
    entry: Option<Entry>,
}

/// Counts the step that some rank had begun and none has committed, and hears when the ranks had stopped.
fn begin(ctx: &Context, state: &State<Training>, here: &mut Here) -> anyhow::Result<()> {
    let entered = now();
    let formed = entered - ctx.formed_at().elapsed().as_micros() as u64;
    // The members have heard of each other, and the links are made, when their first operation is done.
    let records = ctx.comm().records();
    let met = records
        .first()
        .map(|record| record.ended.saturating_sub(record.asked));
    let steps = state.progress.steps;
    // The last and the first time of those that stay.
    let stopped = here.stopped.map_or([0; 2], |at| [at, !at]);
    let mut all = [here.begun.max(steps), stopped[0], stopped[1]];
    ctx.comm().all_reduce(&mut all, ReduceOp::Max)?;
    let [begun, last, first] = all;
    here.begun = steps;
    here.entry = Some(Entry {
        generation: ctx.generation().0,
        cause: ctx.cause().to_owned(),
        stopped: (last > 0).then_some([!first, last]),
        formed,
        connect: met.unwrap_or_default().as_micros() as u64,
        entered,
        stepped: 0,
        steps,
        redone: begun - steps,
    });
    Ok(())
}

/// Passes over the training images, until the group has seen all changes.
fn learn(
    ctx: &Context,
    state: &mut State<Training>,
    images: &Digits,
    config: &Config,
    here: &mut Here,
) -> anyhow::Result<()> {
    let mut gradient = vec![0.0; PARAMETERS];
    loop {
        while let Some(batch) = (state.progress.sampler).next_batch(ctx.rank(), ctx.world_size()) {
            here.begun = state.progress.steps + 1;
            // The first step of a generation is told when that is made.
            if ctx.rank() == 0 && config.checkpoints.is_some() && here.entry.is_none() {
                let (number, durable) = (here.begun, state.durable());
                News::Step { number, durable }.tell()?;
            }
            gradient.fill(0.0);
            for image in &batch {
                let (pixels, label) = images.get(image);
                state.model.add_gradient(pixels, label, 1.0, &mut gradient);
            }
            ctx.comm().all_reduce(&mut gradient, ReduceOp::Sum)?;
            state.step(&gradient, 1.0 / batch.global_len() as f32);
            state.use_images(ctx.world_size());
            state.progress.sampler.record(&batch)?;
            if let Some(mut entry) = here.entry.take()
                && ctx.rank() == 0
            {
                entry.stepped = now();
                News::Entered(entry).tell()?;
            }
            state.commit(ctx)?;
        }
        let epoch = state.progress.sampler.epoch() + 1;
        state.end_epoch(epoch);
        // What rank 0 sees counts.
        let mut may_end = [config.end.exists()];
        ctx.comm().broadcast(&mut may_end, Rank(0))?;
        if epoch >= config.epochs && may_end[0] {
            return Ok(());
        }
        ensure!(
            epoch < config.most_epochs,
            "after {epoch} epochs the driver has not said that the group may end"
        );
        state.commit(ctx)?;
    }
}

impl Training {
    /// One step of the descent, the same on all ranks.
    fn step(&mut self, gradient: &[f32], scale: f32) {
        let weights = self.model.parameters.iter_mut();
        for ((weight, velocity), slope) in weights.zip(&mut self.velocity).zip(gradient) {
            *velocity = MOMENTUM * *velocity - RATE * scale * slope;
            *weight += *velocity;
        }
        self.progress.steps += 1;
    }

    /// Counts the images of the next batch on all ranks, so that a rank which is lost takes no count with it.
    fn use_images(&mut self, world_size: usize) {
        for rank in 0..world_size {
            for image in (self.progress.sampler.next_batch(rank, world_size))
                .iter()
                .flatten()
            {
                self.used[image] += 1;
            }
        }
    }

    fn end_epoch(&mut self, next: u64) {
        let is_even = self.used.iter().all(|times| *times == 1);
        self.progress.uneven_epochs += u64::from(!is_even);
        self.progress.sampler.set_epoch(next);
        self.used.fill(0);
    }
}

/// The share of the held-out images that are told right; each rank tests its part of them.
fn accuracy(ctx: &Context, model: &Mlp, held_out: &Digits) -> anyhow::Result<f64> {
    let mut hits = [0_u64];
    for image in (ctx.rank()..held_out.len()).step_by(ctx.world_size()) {
        let (pixels, label) = held_out.get(image);
        hits[0] += u64::from(model.test(pixels, label).1);
    }
    ctx.comm().all_reduce(&mut hits, ReduceOp::Sum)?;
    Ok(hits[0] as f64 / held_out.len() as f64)
}

/// FNV-1a (Fowler, Noll and Vo) of the bits.
fn digest(weights: &[f32]) -> u64 {
    let bytes = weights
        .iter()
        .flat_map(|weight| weight.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
