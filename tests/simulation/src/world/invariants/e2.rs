//! E-2: each sample of an epoch is processed exactly once, across any changes.

use crate::worker::Progress;

/// An epoch is over.
pub(crate) fn epoch(progress: Progress) -> Result<(), String> {
    if progress.sum == Progress::exact_sum(progress.epoch) {
        return Ok(());
    }
    Err(format!(
        "samples of epoch {} were missed or came twice by step {}",
        progress.epoch, progress.steps
    ))
}
