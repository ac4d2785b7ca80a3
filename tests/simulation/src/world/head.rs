//! The shell of a head: [`HeadCore`] on the virtual clock.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use kolo_core::fence::{self, Fence};
use kolo_core::head::HeadCore;
use kolo_core::head::job::JobConfig;
use kolo_core::head::messages::{
    AskId, Caller, Input, LinkEnd, Now, Output, Question, RequestId, Settings,
};
use kolo_core::head::registry::Session;
use kolo_wire::identity::{Identity, Role};
use kolo_wire::ids::JobId;
use kolo_wire::{HeadReply, HeadRequest, JobEvent, NodeRequest};

use crate::knobs::{MS, Time};
use crate::link::{Link, Mail, Peer, Side, Tag};
use crate::mutation::Mutation;
use crate::queue::Event;
use crate::world::invariants::{Oracle, e1, g2};
use crate::world::{CLUSTER, World};

/// One life of the head, or none.
#[derive(Debug, Default)]
pub(crate) struct Head {
    pub(crate) core: Option<HeadCore>,
    pub(crate) life: u64,
    /// It stands still until then.
    pub(crate) paused: Time,
    /// How long it has stood still.
    pub(crate) frozen: Time,
    tick: Option<Time>,
    /// Questions that have no answer yet.
    pub(crate) asks: BTreeMap<AskId, (u64, Tag, u64)>,
    next_ask: u64,
    /// Requests to nodes whose end is not known, since when, and the job that the node is to end.
    pub(crate) requests: BTreeMap<RequestId, (Time, Option<JobId>)>,
    /// The node of each connection, also of those that have ended.
    nodes: BTreeMap<u64, usize>,
    /// The connection of each job's driver.
    pub(crate) drivers: BTreeMap<JobId, u64>,
    pub(crate) rendezvous: BTreeMap<JobId, u32>,
}

impl World {
    fn head_now(&self) -> Now {
        Now {
            awake: self.instant(self.now.saturating_sub(self.head.frozen)),
            real: self.instant(self.now),
        }
    }

    pub(crate) fn head_starts(&mut self) {
        let us = Duration::from_micros;
        let settings = Settings {
            cluster: CLUSTER,
            lease: us(self.knobs.lease),
            heartbeat: us(self.knobs.heartbeat),
            job: JobConfig {
                request_timeout: us(self.knobs.request),
                fence: fence::of_head(us(self.knobs.lease), us(self.knobs.heartbeat)),
                ..JobConfig::default()
            },
        };
        let now = self.head_now();
        self.head.life += 1;
        self.head.core = Some(HeadCore::new(now, settings));
        self.trace.note(self.now, || "head: starts".to_owned());
    }

    /// The head is killed. What it knew of jobs is gone.
    pub(crate) fn head_dies(&mut self) {
        if self.head.core.take().is_none() {
            return;
        }
        self.trace.note(self.now, || "head: is killed".to_owned());
        self.head.asks.clear();
        self.head.requests.clear();
        self.head.drivers.clear();
        self.head.rendezvous.clear();
        self.head.tick = None;
        for link in self.links.values_mut() {
            link.is_open[Side::Head as usize] = false;
        }
        self.oracle.told.head_died();
    }

    /// Another process connects to the head. The number of the connection, if the head is there.
    pub(crate) fn connect(&mut self, peer: Peer, identity: (Role, String)) -> Option<u64> {
        let is_there = self.head.core.is_some()
            && self.head.paused <= self.now
            && !self.is_cut(peer, Side::Head)
            && !self.is_cut(peer, Side::Peer);
        if !is_there {
            return None;
        }
        self.sessions += 1;
        let session = self.sessions;
        self.links.insert(session, Link::new(peer, self.now));
        if let Peer::Node(node, _) = peer {
            self.head.nodes.insert(session, node);
        }
        let (role, name) = identity;
        let peer = Identity {
            cluster: CLUSTER,
            role,
            name,
        };
        self.head_step(Input::Connected {
            session: Session(session),
            peer,
            remote: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
            local: None,
        });
        for side in [Side::Head, Side::Peer] {
            self.later(self.knobs.lease, Event::Idle(session, side));
        }
        Some(session)
    }

    pub(crate) fn head_step(&mut self, input: Input) {
        let now = self.head_now();
        let Some(core) = &mut self.head.core else {
            return;
        };
        for output in core.step(now, input) {
            self.head_does(output);
        }
        self.head_wakes();
    }

    /// Sees to it that the head has its next tick in time.
    pub(crate) fn head_wakes(&mut self) {
        let deadline = self.head.core.as_ref().and_then(HeadCore::deadline);
        let at = deadline.map(|at| self.time(at) + self.head.frozen);
        if let Some(at) = at
            && self
                .head
                .tick
                .is_none_or(|tick| at < tick || tick < self.now)
        {
            let at = at.max(self.now);
            self.head.tick = Some(at);
            self.queue.push(at, Event::HeadTick(self.head.life));
        }
    }

    pub(crate) fn head_ticks(&mut self) {
        if self.head.tick.is_some_and(|tick| tick <= self.now) {
            self.head.tick = None;
        }
        let now = self.head_now();
        let deadline = self.head.core.as_ref().and_then(HeadCore::deadline);
        if deadline.is_some_and(|at| at <= now.awake) {
            self.head_step(Input::Tick);
        } else {
            self.head_wakes();
        }
    }

    fn head_does(&mut self, output: Output) {
        match output {
            Output::Send(id, request, _) => {
                let mut ends = None;
                match request.as_ref() {
                    NodeRequest::Stop { job, .. } | NodeRequest::Kill { job } => ends = Some(*job),
                    NodeRequest::Membership(table) => self.oracle.order.published(table),
                    NodeRequest::Start(start) => {
                        self.oracle.commits.ordered(start);
                        self.oracle.restarts.ordered(start.job, start.generation);
                    }
                    _ => {}
                }
                self.head.requests.insert(id, (self.now, ends));
                let mail = Mail::Order(id, request);
                self.send(id.session.0, Side::Peer, mail);
            }
            Output::Cancel(id) => {
                self.head.requests.remove(&id);
            }
            Output::CloseLink(session, end, reason) => {
                self.trace.note(self.now, || {
                    format!("head: ends connection {}: {reason}", session.0)
                });
                self.counts.losses += u64::from(end == LinkEnd::Lost);
                // One that has registered again has been lost, too.
                if let Some(node) = self.head.nodes.get(&session.0).copied() {
                    self.oracle
                        .commits
                        .give_up(self.processes.values(), node, None);
                }
                self.close(session.0, Side::Head, &reason, true);
            }
            Output::Tell(job, event) => {
                self.trace
                    .note(self.now, || format!("head: tells {job}: {event:?}"));
                self.check_told(&event);
                if let Some(session) = self.head.drivers.get(&job).copied() {
                    self.send(session, Side::Peer, Mail::News(event));
                }
            }
            Output::Answer(ask, reply) => match self.head.asks.remove(&ask) {
                Some((session, tag, number)) => {
                    self.send(session, Side::Peer, Mail::Answer(tag, number, reply));
                }
                None => self.violation("answers", format!("the head answers {ask:?} twice")),
            },
            Output::OpenRendezvous(opening) => {
                *self.head.rendezvous.entry(opening.job).or_default() += 1;
                let opened = if self.has_mishap() {
                    self.oracle.restarts.unopened(opening.job);
                    Err("no more ports".to_owned())
                } else {
                    Ok(SocketAddr::from(([10, 0, 0, 1], 80)))
                };
                let opened = Input::RendezvousOpened(opening.job, opened);
                let life = self.head.life;
                self.later(MS, Event::HeadHears(life, Box::new(opened)));
            }
            Output::CloseRendezvous(job) => {
                self.head.rendezvous.remove(&job);
            }
            Output::Log(line) => self.trace.note(self.now, || {
                let about = (line.job.map(|job| format!(" {job}"))).unwrap_or_default();
                let node = (line.node.map(|node| format!(" {node}"))).unwrap_or_default();
                format!("head:{about}{node} {}", line.text)
            }),
            Output::Alive(_) => {}
            // Doors of Horovod's jobs are not here.
            other => self.trace.note(self.now, || format!("head: {other:?}")),
        }
    }

    /// The head tells a driver something.
    fn check_told(&mut self, event: &JobEvent) {
        let (JobEvent::Healthy { table, .. } | JobEvent::Generation { table, .. }) = event else {
            return;
        };
        let job = table.job;
        self.check_ranks(table);
        let ordered = self.oracle.order.active(table);
        self.hold("R-2", ordered);
        self.hold("G-2", g2::whole(self, table));
        if matches!(event, JobEvent::Generation { .. }) {
            self.oracle.restarts.active(job, table.generation);
            self.hold("E-1", e1::state(self, table));
            let checked = self.driver_of(job).map(|it| it.check_size(table));
            self.hold("liveness", checked.unwrap_or(Ok(())));
        }
        self.counts.generations += 1;
        let active = self.oracle.generations.active(table);
        self.hold("G-3", active);
    }

    /// Somebody asks the head for something over HTTP.
    pub(crate) fn administrator_asks(&mut self, request: HeadRequest) {
        self.administrators += 1;
        let ask = AskId(u64::MAX / 2 + self.administrators);
        self.head.asks.insert(ask, (0, Tag::Drain, 0));
        let question = Question::Request(Caller::Http, Box::new(request));
        self.head_step(Input::Asked { ask, question });
    }

    /// A message comes to the head.
    pub(crate) fn head_hears(&mut self, session: u64, mail: Mail) {
        match mail {
            Mail::Ask(tag, number, request) => {
                self.head.next_ask += 1;
                let ask = AskId(self.head.next_ask);
                self.head.asks.insert(ask, (session, tag, number));
                self.oracle.told.reported(&request);
                let request = self.mutated_report(request);
                let Oracle {
                    commits,
                    generations,
                    ..
                } = &mut self.oracle;
                commits.reported(&request, generations, &self.groups);
                let question = Question::Request(Caller::Peer(Session(session)), request);
                self.head_step(Input::Asked { ask, question });
            }
            Mail::Reply(id, reply) => {
                if let Some((_, ends)) = self.head.requests.remove(&id) {
                    // What the node has said before, and what comes later, is of no use any more.
                    if let Some(node) = self
                        .head
                        .nodes
                        .get(&session)
                        .copied()
                        .filter(|_| ends.is_some())
                    {
                        self.oracle
                            .commits
                            .give_up(self.processes.values(), node, ends);
                    }
                    self.head_step(Input::Replied(id, *reply));
                }
            }
            Mail::Submit(job, spec) => {
                self.head.drivers.insert(job, session);
                let session = Session(session);
                self.head_step(Input::Submit {
                    session,
                    job,
                    spec,
                    dry_run: false,
                });
            }
            Mail::Frame(job, frame) => self.head_step(Input::Frame(job, frame)),
            Mail::Ping => self.send(session, Side::Peer, Mail::Ping),
            Mail::Close(reason) => self.close(session, Side::Head, &reason, false),
            Mail::Answer(..) | Mail::Order(..) | Mail::News(_) => {}
        }
    }

    /// A connection has ended for the head.
    pub(crate) fn head_lost(&mut self, session: u64, reason: String) {
        let gone: Vec<JobId> = (self.head.drivers.iter())
            .filter(|(_, other)| **other == session)
            .map(|(job, _)| *job)
            .collect();
        for job in gone {
            self.head.drivers.remove(&job);
            if !self.mutates(Mutation::ForgetDriver) {
                self.head_step(Input::DriverGone(job));
            }
        }
        // Nobody waits for these answers any more.
        let asks: Vec<AskId> = (self.head.asks.iter())
            .filter(|(_, (other, ..))| *other == session)
            .map(|(ask, _)| *ask)
            .collect();
        for ask in asks {
            self.head.asks.remove(&ask);
            self.head_step(Input::Forget(ask));
        }
        self.head
            .requests
            .retain(|request, _| request.session.0 != session);
        let session = Session(session);
        self.head_step(Input::Disconnected {
            session,
            reason,
            fence: Fence::Lease,
        });
    }

    pub(crate) fn is_registered(reply: &HeadReply) -> bool {
        matches!(reply, HeadReply::Registered { .. })
    }
}
