//! Drivers: each submits one job, brings its program, and ends the job in some way.

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::identity::Role;
use kolo_wire::ids::{DriverId, JobId, Rank};
use kolo_wire::{
    Cooldown, Elastic, GroupFilter, HeadRequest, HealthCheck, Installed, JobEvent, JobSpec,
    JobState, Milli, OnChange, Placement, Program, ProgramHash, Refusal, Resources, SubmitFrame,
};

use crate::knobs::{FAULTS, MS, SECOND, Time};
use crate::link::{Mail, Peer, Side};
use crate::queue::{Errand, Event};
use crate::world::World;

/// How a driver ends its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Not before the end of the run.
    Stay,
    Say(u8),
    Vanish,
    /// Its workers return.
    Wait,
}

/// What a driver knows of its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum View {
    Idle,
    Submitted,
    /// It was told of a group.
    Whole,
    Ended(JobState, Option<Refusal>),
    /// Its connection is lost, and with it the job.
    Cut,
}

/// A driver.
#[derive(Debug)]
pub(crate) struct Driver {
    id: DriverId,
    pub(crate) job: JobId,
    spec: JobSpec,
    pub(crate) plan: Plan,
    pub(crate) alive: bool,
    session: Option<u64>,
    pub(crate) view: View,
    /// When it began to wait for a group.
    pub(crate) since: Time,
    /// The last group that it was told of.
    pub(crate) table: Option<kolo_wire::GenerationTable>,
    pub(crate) lost: BTreeSet<Rank>,
    steps: Option<u64>,
    /// Its program fails again and again.
    pub(crate) is_bad: bool,
    /// When its program is on all nodes that it was told of.
    programs: Time,
}

impl Driver {
    pub(crate) fn is_elastic(&self) -> bool {
        self.spec.elastic.is_some()
    }

    /// Its program is installed on the hosts.
    fn is_installed(&self) -> bool {
        self.spec.installed.is_some()
    }

    /// Its job has workers on distinct nodes, the same number on each.
    pub(crate) fn takes_hosts(&self) -> bool {
        matches!(self.spec.placement, Placement::Spread { .. })
    }

    /// Its job takes room for so many workers at once.
    pub(crate) fn unit(&self) -> u32 {
        unit(self.spec.placement)
    }

    pub(crate) fn limits(&self) -> Option<&Elastic> {
        self.spec.elastic.as_deref()
    }

    /// Its job can't go on with fewer members: they hear of a loss by its revocation alone, as no generation follows at once.
    pub(crate) fn needs_all(&mut self) {
        if let Some(limits) = &mut self.spec.elastic {
            (limits.min, limits.spares) = (limits.max, 0);
            limits.filters.clear();
        }
    }

    /// Its job may not change as often as it likes.
    pub(crate) fn may_end_with_a_loss(&self) -> bool {
        self.limits().is_some_and(|it| it.max_resets.is_some())
    }

    /// It has or may have said that it has all that it wanted.
    pub(crate) fn is_done(&self) -> bool {
        matches!(self.plan, Plan::Say(0) | Plan::Stay)
    }

    /// Its job may run, and it waits for its end.
    pub(crate) fn is_there(&self) -> bool {
        self.alive && matches!(self.view, View::Submitted | View::Whole)
    }
}

/// Room for so many workers is taken at once.
fn unit(placement: Placement) -> u32 {
    match placement {
        Placement::Pack { .. } => 1,
        Placement::Spread { slots, .. } => slots,
    }
}

pub(crate) fn spec(job: JobId, placement: Placement) -> JobSpec {
    JobSpec {
        name: "job".to_owned(),
        program: Program {
            hash: ProgramHash([(job.0 % 251) as u8; 32]),
            size: 1,
            name: "program".to_owned(),
        },
        args: Vec::new(),
        placement,
        per_worker: Resources {
            cpus: Milli::units(1),
            ..Resources::default()
        },
        env: BTreeMap::new(),
        start_timeout_ms: 10_000,
        grace_ms: 1000,
        rendezvous: false,
        installed: None,
        layout: Vec::new(),
        interfaces: kolo_wire::InterfaceSelection::default(),
        no_cache: false,
        elastic: None,
    }
}

impl World {
    /// A new driver, which begins at a time.
    pub(crate) fn add_driver(&mut self, at: Time, elastic: bool, plan: Plan) -> usize {
        let job = JobId(self.random.number());
        let (placement, min) = if elastic {
            self.draw_bounds()
        } else {
            let room: u32 = self.knobs.slots.iter().sum();
            let workers = 1 + self.random.below(u64::from(room)) as u32;
            (Placement::Pack { workers }, workers)
        };
        let mut spec = spec(job, placement);
        spec.grace_ms = self.random.pick(&[0, 200, 1000]);
        spec.start_timeout_ms = self.random.between(5, 15) * 1000;
        let is_program = self.random.percent(30);
        spec.installed = is_program.then(Installed::default);
        if let Some(installed) = &mut spec.installed {
            "program".clone_into(&mut installed.program);
        }
        spec.rendezvous = (is_program || !elastic) && self.random.percent(20);
        let mut is_bad = false;
        if elastic {
            let limits = self.draw_limits(&spec, min);
            let has_end = limits.restarts_without_progress < 100;
            is_bad = is_program
                && has_end
                && plan == Plan::Stay
                && at < FAULTS
                && self.random.percent(30);
            spec.elastic = Some(Box::new(limits));
        }
        let steps = (plan == Plan::Wait).then(|| self.random.between(1, 15));
        self.drivers.push(Driver {
            id: DriverId(self.drivers.len() as u64 + 1),
            job,
            spec,
            plan,
            alive: true,
            session: None,
            view: View::Idle,
            since: at,
            table: None,
            lost: BTreeSet::new(),
            steps,
            is_bad,
            programs: 0,
        });
        let driver = self.drivers.len() - 1;
        self.queue.push(at, Event::Driver(driver, Errand::Begin));
        driver
    }

    /// Where the workers of an elastic job may be, at most, and how many of them are enough.
    fn draw_bounds(&mut self) -> (Placement, u32) {
        let slots = &self.knobs.slots;
        if self.random.percent(75) {
            let room: u32 = slots.iter().sum();
            let workers = 1 + self.random.below(u64::from(room)) as u32;
            let min = 1 + self.random.below(u64::from(workers)) as u32;
            return (Placement::Pack { workers }, min);
        }
        // Whole hosts: so many that have the slots.
        let some = self.random.below(slots.len() as u64) as usize;
        let slots = 1 + self.random.below(u64::from(slots[some])) as u32;
        let fit = self.knobs.slots.iter().filter(|it| **it >= slots).count();
        let hosts = 1 + self.random.below(fit as u64) as u32;
        let min = slots * (1 + self.random.below(u64::from(hosts)) as u32);
        (Placement::Spread { hosts, slots }, min)
    }

    fn draw_limits(&mut self, spec: &JobSpec, min: u32) -> Elastic {
        let is_program = spec.installed.is_some();
        let unit = unit(spec.placement);
        let most = self.random.pick(&[0, 1, 3, 1000, 1000, 1000]);
        let spares = self.random.pick(&[0, 0, 1, 2]);
        let is_checked = self.random.percent(20);
        let cools = self.random.percent(15);
        let max = spec.placement.workers().unwrap_or_default();
        // Installed programs have none: no command and no option gives them any.
        let filters = match self.random.below(10) {
            _ if is_program => Vec::new(),
            0 => vec![GroupFilter::Max(min)],
            1 if unit == 1 && (max > min || min.is_multiple_of(2)) => {
                vec![GroupFilter::DivisibleBy(2)]
            }
            _ => Vec::new(),
        };
        let is_limited = self.random.percent(10);
        Elastic {
            min,
            max,
            spares: if is_program { 0 } else { spares * unit },
            max_resets: is_limited.then(|| self.random.between(1, 4) as u32),
            restarts_within: None,
            restarts_without_progress: if is_program { most } else { 1000 },
            cooldown: cools.then_some(Cooldown {
                least_ms: 1000,
                most_ms: 5000,
            }),
            join_window_ms: self.random.below(2000),
            ack_timeout_ms: self.random.between(3000, 6000),
            filters,
            health_check: is_checked.then(|| HealthCheck {
                program: "check".to_owned(),
                args: Vec::new(),
                timeout_ms: spec.start_timeout_ms,
            }),
            hosts: None,
            on_change: if is_program {
                OnChange::Restart
            } else {
                OnChange::InPlace
            },
        }
    }

    pub(crate) fn driver_of(&self, job: JobId) -> Option<&Driver> {
        self.drivers.iter().find(|driver| driver.job == job)
    }

    pub(crate) fn steps_of(&self, job: JobId) -> Option<u64> {
        self.driver_of(job).and_then(|driver| driver.steps)
    }

    /// The driver of a job has a channel of calls to its nodes.
    pub(crate) fn has_driver(&self, job: JobId) -> bool {
        self.driver_of(job).is_some_and(Driver::is_there)
    }

    pub(crate) fn is_elastic(&self, job: JobId) -> bool {
        self.driver_of(job).is_some_and(Driver::is_elastic)
    }

    pub(crate) fn errand(&mut self, driver: usize, errand: Errand) {
        if !self.drivers[driver].alive {
            return;
        }
        match errand {
            Errand::Begin => self.driver_begins(driver),
            Errand::Ping => {
                if let Some(session) = self.drivers[driver].session {
                    self.send(session, Side::Head, Mail::Ping);
                    let next = Event::Driver(driver, Errand::Ping);
                    self.later(self.knobs.heartbeat, next);
                }
            }
            Errand::Programs(nodes) => {
                let hash = self.drivers[driver].spec.program.hash;
                for node in nodes {
                    let index = node.0 as usize - 1;
                    if self.nodes[index].daemon.is_some() {
                        self.nodes[index].programs.insert(hash);
                    }
                }
                self.driver_says(driver, SubmitFrame::ProgramReady);
            }
            Errand::Says(frame) => self.driver_says(driver, frame),
            Errand::Stopped => {
                let job = self.drivers[driver].job;
                self.administrator_asks(HeadRequest::Stop { job });
            }
            Errand::Vanish => {
                let Driver { id, job, .. } = self.drivers[driver];
                self.trace
                    .note(self.now, || format!("{id} of {job}: is gone"));
                self.drivers[driver].alive = false;
                if let Some(session) = self.drivers[driver].session.take()
                    && let Some(link) = self.links.get_mut(&session)
                {
                    link.is_open[Side::Peer as usize] = false;
                }
                self.nodes_look_for_orphans();
            }
            Errand::Leave => {
                if let Some(session) = self.drivers[driver].session {
                    self.close(session, Side::Peer, "the driver is done", true);
                }
            }
        }
    }

    fn nodes_look_for_orphans(&mut self) {
        for node in 0..self.nodes.len() {
            let life = self.nodes[node].life;
            self.later(0, Event::Orphans(node, life));
        }
    }

    fn driver_begins(&mut self, driver: usize) {
        let Driver { id, job, .. } = self.drivers[driver];
        let name = id.to_string();
        let Some(session) = self.connect(Peer::Driver(driver), (Role::Driver, name)) else {
            let again = Event::Driver(driver, Errand::Begin);
            return self.later(500 * MS, again);
        };
        let spec = self.drivers[driver].spec.clone();
        self.trace.note(self.now, || {
            format!(
                "{id}: submits {job}: {:?}, {:?}",
                spec.placement, spec.elastic
            )
        });
        self.drivers[driver].session = Some(session);
        self.drivers[driver].view = View::Submitted;
        self.drivers[driver].since = self.now;
        self.send(session, Side::Head, Mail::Submit(job, Box::new(spec)));
        self.later(0, Event::Driver(driver, Errand::Ping));
    }

    fn driver_says(&mut self, driver: usize, frame: SubmitFrame) {
        let Driver {
            id, job, session, ..
        } = self.drivers[driver];
        if let Some(session) = session {
            self.trace
                .note(self.now, || format!("{id}: says {frame:?}"));
            self.send(session, Side::Head, Mail::Frame(job, frame));
        }
    }

    pub(crate) fn driver_lost_head(&mut self, driver: usize, session: u64) {
        let entry = &mut self.drivers[driver];
        if entry.session != Some(session) {
            return;
        }
        entry.session = None;
        if matches!(entry.view, View::Submitted | View::Whole) {
            entry.view = View::Cut;
        }
        self.nodes_look_for_orphans();
    }

    pub(crate) fn driver_hears(&mut self, driver: usize, session: u64, mail: Mail) {
        if self.drivers[driver].session != Some(session) || !self.drivers[driver].alive {
            return;
        }
        match mail {
            Mail::News(event) => self.driver_told(driver, *event),
            Mail::Close(reason) => self.close(session, Side::Peer, &reason, false),
            _ => {}
        }
    }

    fn driver_told(&mut self, driver: usize, event: JobEvent) {
        let checked = self.drivers[driver].check_order(&event);
        self.hold("answers", checked);
        match event {
            JobEvent::Placed { .. } if self.drivers[driver].is_installed() => {}
            JobEvent::Placed { nodes, .. } => {
                let nodes = nodes.into_iter().map(|placed| placed.node).collect();
                // One that brings nothing sees its job fail.
                if !self.drivers[driver].is_elastic() && self.has_mishap() {
                    return;
                }
                let mut after = self.random.between(1, 50) * MS;
                if self.has_fault() {
                    after += self.random.below(4 * SECOND);
                }
                // Those that came first are answered first.
                let entry = &mut self.drivers[driver];
                entry.programs = entry.programs.max(self.now + after);
                let at = entry.programs;
                let bring = Event::Driver(driver, Errand::Programs(nodes));
                self.queue.push(at, bring);
            }
            JobEvent::Healthy { table, .. } | JobEvent::Generation { table, .. } => {
                let first = self.drivers[driver].view == View::Submitted;
                self.drivers[driver].view = View::Whole;
                self.drivers[driver].table = Some(table);
                if first {
                    self.plan_end(driver);
                }
            }
            JobEvent::Fell { .. } | JobEvent::Waits { .. } | JobEvent::Hold { .. } => {}
            JobEvent::RankLost { failure, .. } => {
                self.drivers[driver].lost.insert(failure.rank);
                if !self.drivers[driver].is_elastic() && self.random.percent(70) {
                    let after = self.random.below(500 * MS);
                    let stop = Errand::Says(SubmitFrame::Stop);
                    self.later(after, Event::Driver(driver, stop));
                }
            }
            JobEvent::Ended { state, refusal, .. } => {
                self.check_end(driver, state, refusal.as_ref());
                self.counts.ended(state);
                self.drivers[driver].view = View::Ended(state, refusal);
                self.later(5 * MS, Event::Driver(driver, Errand::Leave));
                self.nodes_look_for_orphans();
            }
        }
    }

    /// The end that a driver has in mind.
    fn plan_end(&mut self, driver: usize) {
        let after = self.random.below(15 * SECOND);
        let errand = match self.drivers[driver].plan {
            Plan::Stay | Plan::Wait => return,
            Plan::Vanish => Errand::Vanish,
            Plan::Say(0) => Errand::Says(SubmitFrame::Done),
            Plan::Say(1) => Errand::Says(SubmitFrame::Kill),
            Plan::Say(3) => Errand::Stopped,
            Plan::Say(_) => Errand::Says(SubmitFrame::Stop),
        };
        self.later(after, Event::Driver(driver, errand));
    }
}
