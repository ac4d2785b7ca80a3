//! What a simulated node does when it is told to.

use super::*;

impl Cluster {
    pub(super) fn order(
        &mut self,
        node: NodeId,
        request: NodeRequest,
    ) -> Result<NodeReply, Refusal> {
        let refuses = self.has_fault();
        let full = || Refusal::new(RefusalKind::Unplaceable, "full");
        match request {
            NodeRequest::Reserve { .. } => {
                if refuses {
                    return Err(full());
                }
                self.machines.get_mut(&node).unwrap().is_reserved = true;
                return Ok(NodeReply::Reserved {
                    has_program: self.random.percent(50),
                    free_port: 1,
                    problem: None,
                });
            }
            NodeRequest::Start(start) => {
                if refuses {
                    return Err(full());
                }
                let machine = self.machines.get_mut(&node).unwrap();
                machine.is_reserved = false;
                for slot in start.slots {
                    self.boot(node, (slot.member.slot, slot.member.incarnation));
                }
                return Ok(NodeReply::Started { pids: Vec::new() });
            }
            NodeRequest::Membership(table) => self.membership(node, &table),
            NodeRequest::Hold { generation, .. } => {
                let commit = self.commits + 1;
                for (slot, incarnation) in self.members_on(node, generation.0) {
                    let job = JOB;
                    self.say(
                        node,
                        NodeEvent::Holding {
                            job,
                            slot,
                            incarnation,
                            generation,
                            // The same on all ranks.
                            commit: commit.max(generation.0 * 1_000_000),
                            failed: None,
                        },
                    );
                }
            }
            NodeRequest::StopWorker {
                slot, incarnation, ..
            } => self.exit(node, (slot, incarnation), Exit::Signal(15), true),
            NodeRequest::Release { .. } | NodeRequest::Stop { .. } => {
                let machine = self.machines.get_mut(&node).unwrap();
                machine.is_reserved = false;
                for name in machine.workers.keys().copied().collect::<Vec<_>>() {
                    self.exit(node, name, Exit::Signal(15), true);
                }
                self.say(node, NodeEvent::JobGone { job: JOB });
            }
            NodeRequest::Revoke { .. } => {}
            other => panic!("{other:?}"),
        }
        Ok(NodeReply::Done)
    }

    pub(super) fn boot(&mut self, node: NodeId, name: Name) {
        let seed = self.seed;
        let machine = self.machines.get_mut(&node).unwrap();
        let older = machine.workers.keys().copied();
        let older: Vec<Name> = older.filter(|older| older.0 == name.0).collect();
        for older in older {
            assert!(older.1 < name.1, "seed {seed}: {name:?} is started again");
            self.exit(node, older, Exit::Signal(9), true);
        }
        let machine = self.machines.get_mut(&node).unwrap();
        machine.workers.insert(name, 0);
        let delay = self.delay();
        if self.has_fault() {
            return self.later(delay, What::Exit(node, name, Exit::Code(1)));
        }
        self.later(delay, What::Ready(node, name));
        if self.has_fault() {
            let at = self.random.below(HEAL);
            self.later(at, What::Exit(node, name, Exit::Signal(9)));
        }
    }

    pub(super) fn exit(&mut self, node: NodeId, name: Name, exit: Exit, expected: bool) {
        let machine = self.machines.get_mut(&node).unwrap();
        let Some(generation) = machine.workers.remove(&name) else {
            return;
        };
        let (slot, incarnation) = name;
        let event = NodeEvent::WorkerExited {
            job: JOB,
            slot,
            incarnation,
            generation: Generation(generation),
            failure: failure(exit),
            expected,
        };
        self.say(node, event);
    }

    pub(super) fn membership(&mut self, node: NodeId, table: &GenerationTable) {
        let number = table.generation.0;
        let machine = self.machines.get_mut(&node).unwrap();
        let mut taking = Vec::new();
        for (name, taken) in &mut machine.workers {
            if *taken <= number {
                *taken = number;
                taking.push(*name);
            }
        }
        for (slot, incarnation) in taking {
            self.taken.insert((slot, incarnation), number);
            let event = NodeEvent::Taken {
                job: JOB,
                slot,
                incarnation,
                generation: table.generation,
            };
            self.say(node, event);
        }
    }
}
