//! Events that the head has not acknowledged.

use std::collections::VecDeque;

use kolo_wire::NodeEvent;

use super::messages::{Delivery, Output};

/// Most events in one message to the head.
const MAX_EVENTS: usize = 256;

/// About how many bytes of events go into one message; an event has at most a few tens of KiB.
const MAX_EVENT_BYTES: usize = 1 << 20;

/// Sends events in order, all that are there, each time when those before are acknowledged. A job gives a few per worker,
/// and jobs are started by a head that is there. Workers of elastic jobs tell of each commit too, and end when the head has
/// been away for the fence. So the number of events is bounded by what runs here.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    events: VecDeque<NodeEvent>,
    /// Events that have gone, ever.
    settled: u64,
    /// Counts the registrations.
    session: u64,
    registered: bool,
    /// How many of the first events are on their way.
    sent: usize,
}

impl Outbox {
    pub(super) fn push(&mut self, event: NodeEvent) {
        self.events.push_back(event);
    }

    /// How many events there have been. They are delivered when [`Outbox::settled`] is as many.
    pub(super) fn mark(&self) -> u64 {
        self.settled + self.events.len() as u64
    }

    pub(super) fn settled(&self) -> u64 {
        self.settled
    }

    /// There is a connection to the head.
    pub(super) fn is_registered(&self) -> bool {
        self.registered
    }

    /// A new connection, or the end of one. What was on its way is sent again with the next one.
    pub(super) fn set_registered(&mut self, registered: bool) {
        self.session += u64::from(registered);
        self.registered = registered;
        self.sent = 0;
    }

    /// What is to be sent now.
    pub(super) fn send(&mut self) -> Option<Output> {
        if !self.registered || self.sent > 0 || self.events.is_empty() {
            return None;
        }
        let events = self.batch();
        self.sent = events.len();
        Some(Output::Send {
            session: self.session,
            events,
        })
    }

    /// The fate of what was sent.
    pub(super) fn delivered(&mut self, session: u64, delivery: Delivery) -> Option<Output> {
        if session != self.session || !self.registered {
            return None;
        }
        let count = std::mem::take(&mut self.sent);
        match delivery {
            Delivery::Taken => {
                self.settle(count);
                None
            }
            // Saying them again would change nothing.
            Delivery::Unwanted(reason) => {
                self.settle(count);
                Some(Output::Warn(format!(
                    "the head did not want {count} events: {reason}"
                )))
            }
            Delivery::Late => None,
            Delivery::Failed(reason) => {
                self.registered = false;
                Some(Output::Leave { reason })
            }
        }
    }

    fn settle(&mut self, count: usize) {
        self.events.drain(..count);
        self.settled += count as u64;
    }

    /// The events that go out together.
    fn batch(&self) -> Vec<NodeEvent> {
        let mut bytes = 0;
        self.events
            .iter()
            .take(MAX_EVENTS)
            .take_while(|event| {
                let first = bytes == 0;
                bytes += weight(event);
                first || bytes <= MAX_EVENT_BYTES
            })
            .cloned()
            .collect()
    }
}

/// About how long an event is in a message.
fn weight(event: &NodeEvent) -> usize {
    const PLAIN: usize = 512;
    match event {
        NodeEvent::WorkerExited { failure, .. } => {
            let lines = |lines: &[String]| lines.iter().map(|line| line.len() + 8).sum::<usize>();
            let error = failure.error();
            let error = error.map_or(0, |error| error.message.len() + lines(&error.callstack));
            let reason = failure.reason.as_ref().map_or(0, String::len);
            PLAIN + lines(&failure.stderr_tail) + error + reason
        }
        NodeEvent::WorkerReady { .. }
        | NodeEvent::WorkerUnseen { .. }
        | NodeEvent::Taken { .. }
        | NodeEvent::Committed { .. }
        | NodeEvent::Holding { .. }
        | NodeEvent::JobGone { .. }
        | NodeEvent::JobLeft { .. } => PLAIN,
    }
}

#[cfg(test)]
mod tests {
    use kolo_wire::ids::{Generation, Incarnation, JobId, NodeId, Rank, Slot};
    use kolo_wire::{Exit, RankFailure};

    use super::*;

    fn gone(job: u64) -> NodeEvent {
        NodeEvent::JobGone { job: JobId(job) }
    }

    fn exited(tail: usize) -> NodeEvent {
        NodeEvent::WorkerExited {
            incarnation: Incarnation::FIRST,
            generation: Generation(0),
            job: JobId(1),
            slot: Slot(0),
            failure: RankFailure {
                rank: Rank(0),
                node: NodeId(1),
                hostname: "host".to_owned(),
                pid: 1,
                exit: Exit::Code(1),
                reason: None,
                stderr_tail: vec!["x".repeat(tail)],
                account: None,
            },
            expected: false,
        }
    }

    /// A registered node with these events.
    fn outbox(events: impl IntoIterator<Item = NodeEvent>) -> Outbox {
        let mut outbox = Outbox::default();
        events.into_iter().for_each(|event| outbox.push(event));
        assert_eq!(outbox.send(), None, "there is no head yet");
        outbox.set_registered(true);
        outbox
    }

    /// What goes out now, and in which session.
    fn sent(outbox: &mut Outbox) -> (u64, Vec<NodeEvent>) {
        match outbox.send() {
            Some(Output::Send { session, events }) => (session, events),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn events_go_out_together_in_order_within_a_bound() {
        let first: Vec<_> = (0..MAX_EVENTS as u64).map(gone).collect();
        assert_eq!(sent(&mut outbox((0..1000).map(gone))), (1, first));
        assert_eq!(outbox([]).send(), None);
        // Three of 400 KiB are too long together.
        let long = (0..3).map(|_| exited(400 << 10));
        assert_eq!(sent(&mut outbox(long)).1.len(), 2);
        // One that is too long by itself goes alone.
        let longest = [exited(3 << 20), gone(1)];
        assert_eq!(sent(&mut outbox(longest)).1.len(), 1);
    }

    #[test]
    fn the_next_events_wait_for_those_before() {
        let mut outbox = outbox([gone(1)]);
        let mark = outbox.mark();
        assert_eq!(sent(&mut outbox), (1, vec![gone(1)]));
        outbox.push(gone(2));
        assert_eq!(outbox.send(), None);
        assert!(outbox.settled() < mark);
        assert_eq!(outbox.delivered(1, Delivery::Taken), None);
        assert!(outbox.settled() >= mark);
        // No answer in time: once more.
        for _ in 0..2 {
            assert_eq!(sent(&mut outbox), (1, vec![gone(2)]));
            assert_eq!(outbox.delivered(1, Delivery::Late), None);
        }
        sent(&mut outbox);
        let unwanted = outbox.delivered(1, Delivery::Unwanted("a riddle".to_owned()));
        assert!(matches!(unwanted, Some(Output::Warn(text)) if text.contains("a riddle")));
        assert_eq!(outbox.settled(), outbox.mark());
    }

    #[test]
    fn what_was_not_acknowledged_goes_out_again_in_the_next_session() {
        let mut outbox = outbox([gone(1)]);
        sent(&mut outbox);
        let failed = || Delivery::Failed("register first".to_owned());
        let leave = Output::Leave {
            reason: "register first".to_owned(),
        };
        assert_eq!(outbox.delivered(1, failed()), Some(leave));
        assert_eq!(outbox.send(), None);
        outbox.set_registered(true);
        assert_eq!(sent(&mut outbox), (2, vec![gone(1)]));
        // The connection ends before the answer is missed, which says nothing of the next one.
        outbox.set_registered(false);
        assert_eq!(outbox.send(), None);
        assert_eq!(outbox.delivered(2, failed()), None);
        outbox.set_registered(true);
        assert_eq!(sent(&mut outbox), (3, vec![gone(1)]));
        assert_eq!(outbox.delivered(2, Delivery::Taken), None);
        assert!(outbox.settled() < outbox.mark());
    }
}
