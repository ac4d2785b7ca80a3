//! The stateful type that every worker holds: a replica of the network and the rank's share of the data.

use kolo::prelude::*;
use serde::{Deserialize, Serialize};

use crate::data::Digits;
use crate::mlp::{Mlp, PARAMETERS};
use crate::rng::Rng;

/// What the driver tells every worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Config {
    /// Decides the split of the data, the first weights and the order of the images.
    pub seed: u64,
    /// Images in a step, over all ranks.
    pub batch: usize,
    /// Step size of the descent.
    pub rate: f32,
    /// Share of the last step that is kept.
    pub momentum: f32,
}

/// How an epoch went.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Mean loss over the training images while learning.
    pub train_loss: f64,
    /// Mean loss over the held-out images.
    pub loss: f64,
    /// Share of the held-out images that are told right.
    pub accuracy: f64,
}

/// One replica.
pub struct Trainer {
    config: Config,
    model: Mlp,
    velocity: Vec<f32>,
    train: Digits,
    test: Digits,
}

#[kolo::executable]
impl Trainer {
    pub fn new(config: Config) -> anyhow::Result<Self> {
        let (train, test) = Digits::load()?.split(config.seed);
        let model = Mlp::new(config.seed);
        Ok(Self {
            config,
            model,
            velocity: vec![0.0; PARAMETERS],
            train,
            test,
        })
    }

    /// One pass over the training images, then a test. Every rank learns from its own part of each
    /// batch; the average of all gradients moves all replicas by the same step.
    pub fn train(&mut self, ctx: &Context, epoch: u32) -> anyhow::Result<Report> {
        let Config {
            seed,
            batch,
            rate,
            momentum,
        } = self.config;
        let steps = batches(
            self.train.len(),
            batch,
            epoch,
            seed,
            ctx.rank(),
            ctx.world_size(),
        );
        // The loss rides behind the gradient: one all-reduce a step.
        let mut gradient = vec![0.0; PARAMETERS + 1];
        let mut train_loss = 0.0;
        for images in &steps {
            gradient.fill(0.0);
            let scale = 1.0 / images.len() as f32;
            for &index in images {
                let (pixels, label) = self.train.get(index);
                let loss =
                    self.model
                        .add_gradient(pixels, label, scale, &mut gradient[..PARAMETERS]);
                gradient[PARAMETERS] += loss * scale;
            }
            ctx.comm().all_reduce(&mut gradient, ReduceOp::Average)?;
            for ((weight, velocity), slope) in self
                .model
                .parameters
                .iter_mut()
                .zip(&mut self.velocity)
                .zip(&gradient)
            {
                *velocity = momentum * *velocity - rate * slope;
                *weight += *velocity;
            }
            train_loss += f64::from(gradient[PARAMETERS]);
        }
        let (loss, accuracy) = self.test(ctx)?;
        Ok(Report {
            train_loss: train_loss / steps.len() as f64,
            loss,
            accuracy,
        })
    }

    /// A digest of the weights' bits, to show that all replicas are the same.
    pub fn digest(&self) -> u64 {
        // FNV-1a (Fowler, Noll and Vo).
        self.model
            .parameters
            .iter()
            .flat_map(|weight| weight.to_bits().to_le_bytes())
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            })
    }
}

impl Trainer {
    /// Loss and accuracy over the held-out images, of which every rank tests its share.
    fn test(&self, ctx: &Context) -> anyhow::Result<(f64, f64)> {
        let mut sums = [0.0_f64; 3];
        for index in (ctx.rank()..self.test.len()).step_by(ctx.world_size()) {
            let (pixels, label) = self.test.get(index);
            let (loss, hit) = self.model.test(pixels, label);
            sums[0] += f64::from(loss);
            sums[1] += f64::from(u8::from(hit));
            sums[2] += 1.0;
        }
        ctx.comm().all_reduce(&mut sums, ReduceOp::Sum)?;
        let [loss, hits, images] = sums;
        Ok((loss / images, hits / images))
    }
}

/// The batches of one epoch for one rank: `batch / world_size` images each, in an order that is
/// shuffled anew every epoch. All ranks get the same number of batches, and no image goes to two.
/// Images that do not fill a last batch are left out of this epoch.
fn batches(
    images: usize,
    batch: usize,
    epoch: u32,
    seed: u64,
    rank: usize,
    world_size: usize,
) -> Vec<Vec<usize>> {
    let share = (batch / world_size).max(1);
    let order = Rng::new(seed ^ (u64::from(epoch) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .permutation(images);
    order
        .chunks_exact(share * world_size)
        .map(|step| step[rank * share..][..share].to_vec())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_out_every_batch_without_overlap() {
        let mut seen = Vec::new();
        let steps = batches(1438, 64, 3, 7, 0, 4).len();
        for rank in 0..4 {
            let mine = batches(1438, 64, 3, 7, rank, 4);
            assert_eq!(mine.len(), steps);
            seen.extend(mine.into_iter().flatten());
        }
        assert_eq!(seen.len(), 1438 / 64 * 64);
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 1438 / 64 * 64);
    }
}
