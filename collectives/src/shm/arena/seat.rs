//! One rank's place among those that share the memory.

use std::sync::Arc;

use super::super::map::Map;
use super::super::wait::ring;

#[derive(Debug)]
pub(super) struct Seat {
    pub(super) map: Arc<Map>,
    pub(super) me: usize,
    pub(super) world: usize,
}

impl Seat {
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let me = self.me;
        (0..self.world).filter(move |rank| *rank != me)
    }

    /// Wakes the others that sleep.
    pub(super) fn ring_all(&self) {
        for rank in self.others() {
            ring(&self.map, rank);
        }
    }

    /// The part of a reduction that a rank combines, in bytes.
    #[inline]
    pub(super) fn slice(&self, rank: usize, length: usize) -> std::ops::Range<usize> {
        let each = length.div_ceil(self.world).next_multiple_of(64);
        (rank * each).min(length)..((rank + 1) * each).min(length)
    }
}
