//! Which samples a rank works on in each step.

use std::num::NonZeroU64;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::order::Order;

/// Deals the samples of a data set out to the ranks, each of them exactly once in every epoch, whatever becomes of the group
/// meanwhile (invariant E-2).
///
/// A sampler is a small value: the seed, the epoch, and how many samples of the epoch are recorded. The value is the same on every
/// rank. Keep the sampler in the [`State`](super::State) of the group: then recorded samples are committed, restored and synced
/// with the model that has learnt from them. Samples of a step that was lost come again, to the ranks that are there by then.
///
/// A sampler knows neither rank nor size of a group. [`next_batch`](Self::next_batch) takes both, so that a share can't be that
/// of an earlier generation.
///
/// ```
/// use kolo::elastic::ElasticSampler;
///
/// // The loop of one rank. Here it is the only one.
/// let (rank, world_size) = (0, 1);
/// let mut sampler = ElasticSampler::with_global_batch(1_000, 64).seed(7);
/// let mut seen = vec![0; 1_000];
/// for epoch in 0..2 {
///     sampler.set_epoch(epoch);
///     while let Some(batch) = sampler.next_batch(rank, world_size) {
///         for sample in &batch {
///             seen[sample] += 1;
///         }
///         // ... an all-reduce, a step of the model, and then:
///         sampler.record(&batch)?;
///     }
/// }
/// assert!(seen.iter().all(|times| *times == 2));
/// # Ok::<(), kolo::elastic::StaleBatch>(())
/// ```
///
/// # Steps
///
/// Batches are made for the whole group and then cut into slices, one for each rank. So every rank makes the same number of
/// steps, and operations of all ranks pair up. Slices of a batch differ by one sample at most; the lower ranks have the longer
/// ones.
///
/// The last batch of an epoch may be short. [`LastBatch`] says what becomes of the batch. By default every rank still makes
/// the step, with a shorter slice or an empty one. A mean over ranks would then weigh samples differently. Sum up over
/// samples and ranks instead, and divide by [`Batch::global_len`]; or see [`Batch::share`].
///
/// # Order
///
/// Seed and epoch decide the order, on every platform: a generalised Feistel network with cycle walking (Black and Rogaway, 2002) of
/// 24 rounds over SplitMix64. The order is computed for one sample at a time, in about 0.2 us, and takes no memory for each
/// sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ElasticSampler {
    samples: u64,
    batch: NonZeroU64,
    per_rank: bool,
    last: LastBatch,
    /// `None` for the order of the data set itself.
    seed: Option<u64>,
    epoch: u64,
    recorded: u64,
}

/// What becomes of the last batch of an epoch, if too few samples are left to fill the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LastBatch {
    /// The last batch is short. Its slices are shorter too, and some may be empty. Each sample comes exactly once.
    #[default]
    Uneven,
    /// The last batch is left out. All batches have the same length; each sample comes at most once in an epoch.
    Drop,
    /// The last batch is filled up with the first samples of the order. All batches have the same length; each sample comes
    /// at least once in an epoch. Horovod does this always.
    Pad,
}

/// A batch was recorded that is not the next one of the sampler: the batch was recorded already, or the state has been restored or synced
/// since the batch was made. Ask [`ElasticSampler::next_batch`] for another one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a batch from sample {start} of epoch {epoch} was recorded, but the sampler is at sample {at} of epoch {at_epoch}; \
     record each batch once, before the next one is made"
)]
pub struct StaleBatch {
    epoch: u64,
    start: u64,
    at_epoch: u64,
    at: u64,
}

impl ElasticSampler {
    /// A sampler for the samples `0..samples`, whose batches have `batch` samples over all ranks. A group that shrinks makes as
    /// many steps as before, with longer slices. The order is shuffled with seed 0.
    ///
    /// # Panics
    ///
    /// If `batch` is 0.
    #[must_use]
    pub fn with_global_batch(samples: usize, batch: usize) -> Self {
        let batch = NonZeroU64::new(batch as u64);
        Self {
            samples: samples as u64,
            batch: batch.expect("a batch has at least one sample"),
            per_rank: false,
            last: LastBatch::default(),
            seed: Some(0),
            epoch: 0,
            recorded: 0,
        }
    }

    /// As [`Self::with_global_batch`], but with `batch` samples for each rank. A group that shrinks makes more steps, with slices
    /// as long as before.
    ///
    /// # Panics
    ///
    /// If `batch` is 0.
    #[must_use]
    pub fn with_rank_batch(samples: usize, batch: usize) -> Self {
        Self {
            per_rank: true,
            ..Self::with_global_batch(samples, batch)
        }
    }

    /// Shuffles with this seed in place of 0.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self {
            seed: Some(seed),
            ..self
        }
    }

    /// Deals out the samples in their own order: `0..samples` in every epoch.
    #[must_use]
    pub fn sequential(self) -> Self {
        Self { seed: None, ..self }
    }

    /// Says what becomes of a short last batch.
    #[must_use]
    pub fn last_batch(self, last: LastBatch) -> Self {
        Self { last, ..self }
    }

    /// The epoch of the next batch. The first one is 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Begins another epoch, in which no sample is recorded yet. Does nothing if this is the present epoch: a loop
    /// may set its epoch when it comes back to the middle of one.
    pub fn set_epoch(&mut self, epoch: u64) {
        if epoch != self.epoch {
            self.epoch = epoch;
            self.recorded = 0;
        }
    }

    /// The number of samples of this epoch that are recorded.
    pub fn recorded(&self) -> usize {
        self.recorded as usize
    }

    /// The number of batches that are left of this epoch, for a group of this size.
    pub fn steps_left(&self, world_size: usize) -> usize {
        let (left, batch) = (self.left(), self.batch_of(world_size));
        let steps = match self.last {
            LastBatch::Drop => left / batch,
            LastBatch::Uneven | LastBatch::Pad => left.div_ceil(batch),
        };
        steps as usize
    }

    /// The slice that this rank has of the next batch; `None` at the end of the epoch, which all ranks see at the same step.
    ///
    /// The next batch is the same until [`Self::record`] says that its samples are done.
    ///
    /// # Panics
    ///
    /// If the rank is not below the size.
    pub fn next_batch(&self, rank: usize, world_size: usize) -> Option<Batch> {
        assert!(
            rank < world_size,
            "rank {rank} is not in a group of {world_size}"
        );
        let batch = self.batch_of(world_size);
        let left = self.left();
        let global = match self.last {
            _ if left >= batch => batch,
            LastBatch::Drop => return None,
            _ if left == 0 => return None,
            LastBatch::Uneven => left,
            LastBatch::Pad => batch,
        };
        let (rank, world_size) = (rank as u64, world_size as u64);
        let (even, longer) = (global / world_size, global % world_size);
        Some(Batch {
            epoch: self.epoch,
            start: self.recorded,
            end: self.recorded + global.min(left),
            global,
            first: self.recorded + rank * even + rank.min(longer),
            length: even + u64::from(rank < longer),
            samples: self.samples,
            order: match self.seed {
                Some(seed) => Order::shuffled(self.samples, seed, self.epoch),
                None => Order::sequential(self.samples),
            },
        })
    }

    /// Says that all ranks are done with the batch that [`Self::next_batch`] made. Every rank records its own slice of the batch,
    /// which counts for all slices.
    ///
    /// # Errors
    ///
    /// [`StaleBatch`] if the batch is not the next one. The sampler is as before then.
    pub fn record(&mut self, batch: &Batch) -> Result<(), StaleBatch> {
        if (batch.epoch, batch.start) != (self.epoch, self.recorded) {
            return Err(StaleBatch {
                epoch: batch.epoch,
                start: batch.start,
                at_epoch: self.epoch,
                at: self.recorded,
            });
        }
        self.recorded = batch.end;
        Ok(())
    }

    fn left(&self) -> u64 {
        self.samples.saturating_sub(self.recorded)
    }

    /// Samples of a full batch.
    fn batch_of(&self, world_size: usize) -> u64 {
        let ranks = if self.per_rank { world_size as u64 } else { 1 };
        // A group of no ranks has no steps; its batch is not 0 either.
        self.batch.get().saturating_mul(ranks.max(1))
    }
}

/// The slice of a batch that one rank works on. Iterate over it for the numbers of the samples.
#[derive(Debug, Clone)]
pub struct Batch {
    epoch: u64,
    /// The batch of all ranks: positions in the order.
    start: u64,
    end: u64,
    /// Its number of samples, with those that fill the batch up.
    global: u64,
    /// The slice.
    first: u64,
    length: u64,
    samples: u64,
    order: Order,
}

impl Batch {
    /// The samples, each a number below that of all samples.
    pub fn iter(&self) -> Samples<'_> {
        Samples {
            batch: self,
            left: 0..self.len(),
        }
    }

    /// The number of samples of this rank. The number may be 0 in a short last batch, or in a group with more ranks than a batch has samples.
    pub fn len(&self) -> usize {
        self.length as usize
    }

    /// Whether this rank has no samples. The rank still takes part in the operations of the step.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The number of samples of all ranks.
    pub fn global_len(&self) -> usize {
        self.global as usize
    }

    /// The part of the whole batch that this rank has, from 0 to 1. The mean over the whole batch is the sum, over all ranks, of
    /// each rank's mean times its share.
    pub fn share(&self) -> f64 {
        self.length as f64 / self.global as f64
    }
}

impl<'a> IntoIterator for &'a Batch {
    type Item = usize;
    type IntoIter = Samples<'a>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// The samples of one rank in a [`Batch`].
#[derive(Debug, Clone)]
pub struct Samples<'a> {
    batch: &'a Batch,
    left: Range<usize>,
}

impl Iterator for Samples<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let batch = self.batch;
        // Only a batch that is filled up goes beyond the last sample.
        let position = (batch.first + self.left.next()? as u64) % batch.samples;
        Some(batch.order.at(position) as usize)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.left.size_hint()
    }
}

impl ExactSizeIterator for Samples<'_> {}
