//! E-2: each sample of an epoch is processed exactly once, across any changes.

use crate::worker::Progress;
use crate::world::World;

impl World {
    /// An epoch is over.
    pub(crate) fn check_epoch(&mut self, progress: Progress) {
        if progress.sum != Progress::exact_sum(progress.epoch) {
            let text = format!(
                "samples of epoch {} were missed or came twice by step {}",
                progress.epoch, progress.steps
            );
            self.violation("E-2", text);
        }
    }
}
