//! Questions to the head that have no answer yet.

use std::collections::BTreeMap;

use kolo_core::head::messages::AskId;
use kolo_transport::wire::HeadReply;
use tokio::sync::oneshot;

/// As many questions may be open before those are looked for that nobody waits for.
const MANY: usize = 64;

/// The open questions. Of those that nobody waits for any more there are never more than of the others, and a few.
#[derive(Debug, Default)]
pub(super) struct Asks {
    open: BTreeMap<AskId, oneshot::Sender<HeadReply>>,
    /// So many were left when they were looked through last.
    left: usize,
}

impl Asks {
    /// One more. Those that nobody waits for any more, if it is time to look for them.
    pub(super) fn insert(&mut self, ask: AskId, answer: oneshot::Sender<HeadReply>) -> Vec<AskId> {
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

    pub(super) fn answer(&mut self, ask: AskId, reply: HeadReply) {
        if let Some(answer) = self.open.remove(&ask) {
            // Nobody may wait any more.
            answer.send(reply).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_that_nobody_waits_for_do_not_pile_up() {
        let mut asks = Asks::default();
        let (answer, waits) = oneshot::channel();
        assert!(asks.insert(AskId(0), answer).is_empty());
        let mut forgotten = Vec::new();
        for ask in 1..1000 {
            forgotten.extend(asks.insert(AskId(ask), oneshot::channel().0));
            assert!(asks.open.len() <= MANY);
        }
        assert!(forgotten.len() > 1000 - MANY && !forgotten.contains(&AskId(0)));
        asks.answer(AskId(0), HeadReply::Done);
        assert_eq!(waits.blocking_recv(), Ok(HeadReply::Done));
    }
}
