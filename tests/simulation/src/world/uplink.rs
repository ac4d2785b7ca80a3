//! The way of a node to the head: connections, registrations, heartbeats, and questions with their answers, as
//! `runtime/src/node/uplink.rs` has them.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use std::time::Duration;

use kolo_core::fence;
use kolo_core::node::messages::{AskId, Delivery, Input, WorkerId};
use kolo_core::node::orphans::{Cause, Head, Present};
use kolo_wire::identity::Role;
use kolo_wire::ids::{JobId, NodeId};
use kolo_wire::{HeadReply, HeadRequest, NodeRegistration, NodeRequest, Refusal, RefusalKind};

use crate::knobs::{MS, SECOND, Time};
use crate::link::{Mail, Peer, Side, Tag};
use crate::mutation::Mutation;
use crate::queue::Event;
use crate::world::World;
use crate::world::invariants::partition;
use crate::world::node::PAUSES;

/// How long a node waits for the answers of the head, as the daemon does.
const REQUEST: Time = 10 * SECOND;
const SIGN: Time = 15 * SECOND;

impl World {
    pub(crate) fn node_connects(&mut self, node: usize, life: u64) {
        if self.daemon(node).is_some_and(|it| it.session.is_some()) {
            return;
        }
        let name = self.nodes[node].id.to_string();
        let Some(session) = self.connect(Peer::Node(node, life), (Role::Node, name)) else {
            self.hold("partition", partition::alone(self, node));
            return self.connect_again(node);
        };
        let [.., high, low] = (node as u32 + 1).to_be_bytes();
        let entry = &mut self.nodes[node];
        let Some(daemon) = entry.daemon.as_mut() else {
            return;
        };
        daemon.session = Some(session);
        let registration = NodeRegistration {
            node: entry.id,
            hostname: format!("host-{}", entry.id.0),
            address: SocketAddr::from(([10, 2, high, low], 7700)),
            resources: daemon.core.total().clone(),
            version: "1".to_owned(),
            jobs: daemon.core.jobs().collect(),
            network: None,
            instance: daemon.instance,
            seal: None,
            draining: daemon.core.is_leaving(),
        };
        let registration = self.mutated_registration(registration);
        self.node_asks(node, Tag::Register, HeadRequest::Register(registration));
    }

    fn connect_again(&mut self, node: usize) {
        let life = self.nodes[node].life;
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        let pause = daemon.pause;
        daemon.pause = (pause * 2).min(PAUSES.1);
        self.later(pause, Event::Connect(node, life));
    }

    pub(crate) fn node_asks(&mut self, node: usize, tag: Tag, request: HeadRequest) {
        let life = self.nodes[node].life;
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        let Some(session) = daemon.session else {
            return;
        };
        let number = daemon.question(tag);
        let limit = match tag {
            Tag::Beat => None,
            Tag::Sign(_) => Some(SIGN),
            Tag::Drain => Some(self.knobs.request * 2),
            Tag::Register | Tag::Events(_) => Some(REQUEST),
        };
        if let Some(limit) = limit {
            self.later(limit, Event::Unanswered(node, life, tag, number));
        }
        let mail = Mail::Ask(tag, number, Box::new(request));
        self.send(session, Side::Head, mail);
    }

    /// A question to the head has no answer in time.
    pub(crate) fn unanswered(&mut self, node: usize, tag: Tag, number: u64) {
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        if daemon.questions.remove(&number).is_none() {
            return;
        }
        match tag {
            Tag::Register => self.leave_head(node, "the head does not answer"),
            Tag::Events(session) => {
                let delivery = Delivery::Late;
                self.node_step(node, Input::Delivered { session, delivery });
            }
            Tag::Sign(worker) => self.not_signed(node, worker),
            Tag::Drain => self.stop_jobs(node),
            Tag::Beat => {}
        }
    }

    fn not_signed(&mut self, node: usize, worker: WorkerId) {
        let signed = Err(Refusal::new(RefusalKind::Timeout, "the head did not sign"));
        self.node_step(node, Input::Signed { worker, signed });
    }

    pub(crate) fn leave_head(&mut self, node: usize, why: &str) {
        let session = self.daemon(node).and_then(|daemon| daemon.session);
        if let Some(session) = session {
            self.close(session, Side::Peer, why, true);
        }
    }

    /// The connection of a node has ended on its side.
    pub(crate) fn node_lost_head(&mut self, node: usize, life: u64, session: u64) {
        if !self.is_alive(node, life) {
            return;
        }
        let now = self.now;
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        if daemon.session != Some(session) {
            return;
        }
        daemon.session = None;
        daemon.asked = None;
        let was_registered = std::mem::replace(&mut daemon.registered, false);
        // Certificates are asked for again over the next connection.
        let is_sign = |tag: &Tag| matches!(tag, Tag::Sign(_));
        let (signs, questions): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut daemon.questions)
                .into_iter()
                .partition(|(_, tag)| is_sign(tag));
        daemon.questions = signs;
        self.nodes[node].alone_since.get_or_insert(now);
        for tag in questions.into_values() {
            match tag {
                Tag::Events(session) => {
                    let delivery = Delivery::Failed("the connection has ended".to_owned());
                    self.node_step(node, Input::Delivered { session, delivery });
                }
                Tag::Drain => self.stop_jobs(node),
                Tag::Register | Tag::Beat | Tag::Sign(_) => {}
            }
        }
        if was_registered {
            self.node_step(node, Input::Head { registered: false });
            if self.mutates(Mutation::EndWorkersEarly) {
                self.end_all_jobs(node);
            }
        }
        self.look_for_orphans(node);
        self.connect_again(node);
    }

    fn end_all_jobs(&mut self, node: usize) {
        let jobs: Vec<JobId> = match &self.nodes[node].daemon {
            Some(daemon) => daemon.core.jobs().collect(),
            None => return,
        };
        for job in jobs {
            self.end_job(node, job, "the head is away");
        }
    }

    /// The node is to end a job by itself. The question to its core, which is answered when nothing is left.
    fn end_job(&mut self, node: usize, job: JobId, reason: &str) -> Option<AskId> {
        let ask = self.daemon(node)?.ask(None);
        let request = Box::new(NodeRequest::Stop {
            job,
            reason: reason.to_owned(),
            interrupt: false,
        });
        self.node_step(node, Input::Order { ask, request });
        Some(ask)
    }

    /// The time of a notice is over: what is left is killed.
    pub(crate) fn kill_job(&mut self, node: usize, job: JobId, ask: AskId) {
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        if daemon.orders.contains_key(&ask) {
            let ask = daemon.ask(None);
            let request = Box::new(NodeRequest::Kill { job });
            self.node_step(node, Input::Order { ask, request });
        }
    }

    /// Ends jobs whose driver and head have both been gone for too long.
    pub(crate) fn look_for_orphans(&mut self, node: usize) {
        let now = self.instant(self.now.saturating_sub(self.nodes[node].frozen));
        if self.mutates_fence(node) {
            return;
        }
        let jobs: Vec<Present> = match &self.nodes[node].daemon {
            Some(daemon) => (daemon.starts.keys())
                .map(|stay| Present {
                    job: stay.job,
                    driver: self.has_driver(stay.job),
                    elastic: self.is_elastic(stay.job),
                })
                .collect(),
            None => return,
        };
        let (life, frozen) = (self.nodes[node].life, self.nodes[node].frozen);
        let lease = Duration::from_micros(self.knobs.lease);
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        let head = Head {
            is_there: daemon.registered,
            lease,
        };
        let over = daemon.orphans.step(now, head, jobs);
        let next = daemon.orphans.next_deadline();
        for (job, cause) in over {
            let reason = format!("the head is away: {cause:?}");
            let ask = self.end_job(node, job, &reason);
            if let (Some(ask), Cause::CutOff(_)) = (ask, cause) {
                let notice = fence::NOTICE.as_micros() as Time;
                self.later(notice, Event::Kill(node, life, job, ask));
            }
        }
        if let Some(at) = next {
            let at = (self.time(at) + frozen).max(self.now + MS);
            self.queue.push(at, Event::Orphans(node, life));
        }
    }

    pub(crate) fn beat(&mut self, node: usize, session: u64) {
        let (now, lease) = (
            self.now.saturating_sub(self.nodes[node].frozen),
            self.knobs.lease,
        );
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        if daemon.session != Some(session) {
            return;
        }
        if daemon.asked.is_some_and(|asked| now >= asked + lease) {
            return self.leave_head(node, "no answer to heartbeats");
        }
        daemon.asked.get_or_insert(now);
        self.node_asks(node, Tag::Beat, HeadRequest::Heartbeats);
        self.later(self.knobs.heartbeat, Event::Beat(node, session));
    }

    /// A message of the head comes to a node.
    pub(crate) fn node_hears(&mut self, node: usize, session: u64, mail: Mail) {
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        if daemon.session != Some(session) {
            return;
        }
        match mail {
            Mail::Answer(tag, number, reply) => {
                // A heartbeat is no question of its own.
                let known = daemon.questions.remove(&number);
                if known.is_some() {
                    self.answered(node, session, tag, *reply);
                }
            }
            // The daemon serves a connection once it knows that it is registered.
            order @ Mail::Order(..) if !daemon.registered => {
                self.later(MS, Event::Arrive(session, Side::Peer, order));
            }
            Mail::Order(id, request) => {
                if self.mutated_order(session, id, &request) {
                    return;
                }
                let Some(daemon) = self.daemon(node) else {
                    return;
                };
                let ask = daemon.ask(Some((session, id)));
                let text = || format!("{}: is asked {request:?}", NodeId(node as u64 + 1));
                self.trace.note(self.now, text);
                let request = self.mutated_request(*request);
                self.node_step(
                    node,
                    Input::Order {
                        ask,
                        request: Box::new(request),
                    },
                );
            }
            Mail::Close(reason) => {
                self.close(session, Side::Peer, &reason, false);
            }
            _ => {}
        }
    }

    fn answered(&mut self, node: usize, session: u64, tag: Tag, reply: HeadReply) {
        match tag {
            Tag::Register if Self::is_registered(&reply) => {
                self.nodes[node].alone_since = None;
                let Some(daemon) = self.daemon(node) else {
                    return;
                };
                daemon.registered = true;
                daemon.pause = PAUSES.0;
                self.counts.joins += 1;
                self.node_step(node, Input::Head { registered: true });
                self.later(0, Event::Beat(node, session));
                self.sign_again(node);
                self.look_for_orphans(node);
            }
            Tag::Register => self.leave_head(node, "the head refuses it"),
            Tag::Beat => {
                if reply != HeadReply::Done {
                    self.leave_head(node, "the head counts it as lost");
                } else if let Some(daemon) = self.daemon(node) {
                    daemon.asked = None;
                }
            }
            Tag::Events(session) => {
                let delivery = match reply {
                    HeadReply::Done => Delivery::Taken,
                    HeadReply::Refused(refusal) if refusal.kind == RefusalKind::Forbidden => {
                        Delivery::Failed(refusal.message)
                    }
                    other => Delivery::Unwanted(format!("{other:?}")),
                };
                self.node_step(node, Input::Delivered { session, delivery });
            }
            Tag::Sign(worker) => {
                let signed = match reply {
                    HeadReply::Signed { .. } => Ok(vec![1]),
                    HeadReply::Refused(refusal) => Err(refusal),
                    other => Err(Refusal::new(RefusalKind::Internal, format!("{other:?}"))),
                };
                self.node_step(node, Input::Signed { worker, signed });
            }
            Tag::Drain => self.stop_jobs(node),
        }
    }

    /// Signing requests that have waited for a connection.
    fn sign_again(&mut self, node: usize) {
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        let mut waiting = Vec::new();
        daemon.questions.retain(|_, tag| match tag {
            Tag::Sign(worker) => {
                waiting.push(*worker);
                false
            }
            _ => true,
        });
        for worker in waiting {
            self.sign(node, worker);
        }
    }

    pub(crate) fn sign(&mut self, node: usize, worker: WorkerId) {
        let Some(daemon) = self.daemon(node) else {
            return;
        };
        if daemon.registered {
            let (job, slot) = (worker.stay.job, worker.slot);
            let csr = Vec::new();
            self.node_asks(
                node,
                Tag::Sign(worker),
                HeadRequest::SignWorker { job, slot, csr },
            );
        } else {
            let number = daemon.question(Tag::Sign(worker));
            let life = self.nodes[node].life;
            // It is asked for once the head is there, and not longer than this.
            let late = Event::Unanswered(node, life, Tag::Sign(worker), number);
            self.later(SIGN, late);
        }
    }
}
