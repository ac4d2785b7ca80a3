//! The ways from the head to peers, drivers and those that ask.

use std::collections::BTreeMap;
use std::sync::Arc;

use kolo_core::head::messages::AskId;
use kolo_core::head::registry::Session;
use kolo_transport::ids::JobId;
use kolo_transport::wire::{HeadReply, JobEvent};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

use super::link::NodeLink;
use super::messages::Way;

/// As many questions may be open before those are looked for that nobody waits for.
const MANY: usize = 64;

/// All open ways.
#[derive(Default)]
pub(super) struct Ways {
    links: BTreeMap<Session, Arc<dyn NodeLink>>,
    drivers: BTreeMap<JobId, mpsc::Sender<JobEvent>>,
    asks: Asks,
}

impl Ways {
    /// One more. The questions that nobody waits for any more, if it is time to look for them.
    pub(super) fn open(&mut self, way: Way) -> Vec<AskId> {
        match way {
            Way::Link(session, link) => drop(self.links.insert(session, link)),
            Way::Driver(job, events) => drop(self.drivers.insert(job, events)),
            Way::Answer(ask, answer) => return self.asks.insert(ask, answer),
        }
        Vec::new()
    }

    pub(super) fn link(&self, session: Session) -> Option<&Arc<dyn NodeLink>> {
        self.links.get(&session)
    }

    pub(super) fn unlink(&mut self, session: Session) {
        self.links.remove(&session);
    }

    /// Tells the driver of a job. The end of the job is the end of this way, and so is a full queue: false then.
    pub(super) fn tell(&mut self, job: JobId, event: JobEvent) -> bool {
        let Some(driver) = self.drivers.get(&job) else {
            return true;
        };
        let is_last = matches!(event, JobEvent::Ended { .. });
        // A driver that is gone is known by the end of its stream.
        let is_full = matches!(driver.try_send(event), Err(TrySendError::Full(_)));
        if is_last || is_full {
            self.drivers.remove(&job);
        }
        !is_full
    }

    pub(super) fn answer(&mut self, ask: AskId, reply: HeadReply) {
        if let Some(answer) = self.asks.open.remove(&ask) {
            // Nobody may wait any more.
            answer.send(reply).ok();
        }
    }
}

/// The open questions. Of those that nobody waits for any more there are never more than of the others, and a few.
#[derive(Default)]
struct Asks {
    open: BTreeMap<AskId, oneshot::Sender<HeadReply>>,
    /// So many were left when they were looked through last.
    left: usize,
}

impl Asks {
    fn insert(&mut self, ask: AskId, answer: oneshot::Sender<HeadReply>) -> Vec<AskId> {
        let mut forgotten = Vec::new();
        if self.open.len() >= MANY.max(2 * self.left) {
            self.open.retain(|ask, answer| {
                if answer.is_closed() {
                    forgotten.push(*ask);
                }
                !answer.is_closed()
            });
            self.left = self.open.len();
        }
        self.open.insert(ask, answer);
        forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_that_nobody_waits_for_do_not_pile_up() {
        let mut ways = Ways::default();
        let mut open = |ask, answer| {
            let forgotten = ways.open(Way::Answer(AskId(ask), answer));
            assert!(ways.asks.open.len() <= MANY);
            forgotten
        };
        let (answer, waits) = oneshot::channel();
        assert!(open(0, answer).is_empty());
        let mut forgotten = Vec::new();
        for ask in 1..1000 {
            forgotten.extend(open(ask, oneshot::channel().0));
        }
        assert!(forgotten.len() > 1000 - MANY && !forgotten.contains(&AskId(0)));
        ways.answer(AskId(0), HeadReply::Done);
        assert_eq!(waits.blocking_recv(), Ok(HeadReply::Done));
    }
}
