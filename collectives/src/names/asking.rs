//! Asking whether those are gone that named operations wait for, where no link would tell.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

use super::loss::Loss;
use super::{Command, Names};
use crate::group::until_gone;
use crate::inner::OF_WAITED;

/// When nothing has come for so long it is asked.
const ASK: Duration = Duration::from_millis(100);

/// What is being asked, and when the next questions are due.
#[derive(Debug, Default)]
pub(super) struct Asking {
    at: Option<Instant>,
    tasks: Vec<AbortHandle>,
}

impl Asking {
    /// Something has come, or was started.
    pub(super) fn stir(&mut self, now: Instant) {
        self.end();
        self.at = Some(now + ASK);
    }

    /// When to look next.
    pub(super) fn at(&self) -> Option<Instant> {
        self.at
    }

    /// Whether questions are due now. They are due once.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        self.at.take_if(|at| now >= *at).is_some()
    }

    /// Asks about members until they are gone or something comes. One that is gone is lost, in all groups.
    pub(super) fn ask(&mut self, names: &Arc<Names>, members: impl IntoIterator<Item = u32>) {
        for member in members {
            let rank = names.members[member as usize];
            let Some(first) = names.family.is_gone(rank) else {
                continue;
            };
            let family = Arc::downgrade(&names.family);
            let names_of = Arc::downgrade(names);
            let asking = async move {
                let gone = until_gone(family, rank, first, OF_WAITED).await;
                if let (Some(reason), Some(names)) = (gone, names_of.upgrade()) {
                    names.tell(Command::Gone(Loss {
                        rank: member,
                        reason,
                        for_good: true,
                    }));
                }
            };
            let task = names.family.handle.spawn(asking);
            self.tasks.push(task.abort_handle());
        }
    }

    fn end(&mut self) {
        self.tasks.drain(..).for_each(|task| task.abort());
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.end();
    }
}
