//! A node that is drained has no worker of an elastic job after the deadline.

use kolo_core::head::messages::{AskId, Caller, Input, Question};
use kolo_wire::HeadRequest;

use crate::knobs::{MS, Time};
use crate::link::Tag;
use crate::world::World;

/// Members that are still there are ended after it.
pub(crate) const DEADLINE: Time = 3000 * MS;

impl World {
    /// An administrator drains a node, or lets it work again.
    pub(crate) fn drain(&mut self, node: usize, drained: bool) {
        let name = self.nodes[node].id.to_string();
        let request = if drained {
            HeadRequest::DrainNode {
                node: name,
                deadline_ms: DEADLINE / MS,
            }
        } else {
            HeadRequest::UndrainNode { node: name }
        };
        self.nodes[node].drained = drained;
        self.administrator_asks(request);
    }

    /// Somebody asks the head for something over HTTP.
    pub(crate) fn administrator_asks(&mut self, request: HeadRequest) {
        self.administrators += 1;
        let ask = AskId(u64::MAX / 2 + self.administrators);
        self.head.asks.insert(ask, (0, Tag::Drain, 0));
        let question = Question::Request(Caller::Http, Box::new(request));
        self.head_step(Input::Asked { ask, question });
    }

    pub(crate) fn check_drained(&mut self) {
        let left = self.processes.iter().find(|(_, process)| {
            process.alive
                && self.nodes[process.node].drained
                && self.is_elastic(process.model.name.job)
        });
        if let Some((pid, process)) = left {
            let text = format!(
                "process {pid} of {} is on host-{}, which was drained long ago",
                process.model.name.job,
                process.node + 1
            );
            self.violation("drain", text);
        }
    }
}
