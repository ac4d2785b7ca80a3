//! Every question has its answer: of peers to the head, of the head to nodes, of a node's core to its shell.

use crate::queue::{MS, SECOND};
use crate::world::World;

impl World {
    pub(crate) fn check_answers(&mut self) {
        // Heartbeats are under way at any time.
        if self.head.asks.len() > self.nodes.len() {
            let text = format!("the head owes {} answers", self.head.asks.len());
            return self.violation("answers", text);
        }
        let old = self.now - 40 * SECOND + MS;
        if let Some((id, since)) = self.head.requests.iter().find(|(_, since)| **since < old) {
            let text = format!(
                "request {} to the node of connection {} has no end after {} s",
                id.number,
                id.session.0,
                (self.now - since) / SECOND
            );
            return self.violation("answers", text);
        }
        for node in &self.nodes {
            let Some(daemon) = &node.daemon else {
                continue;
            };
            if !daemon.orders.is_empty() {
                let text = format!("{} owes {} answers", node.id, daemon.orders.len());
                return self.violation("answers", text);
            }
        }
    }
}
