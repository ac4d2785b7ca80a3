//! What people see of a job.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use kolo_wire::ids::Generation;
use kolo_wire::{JobInfo, LeftOut, MembershipInfo, RefusalKind, WorkerInfo, WorkerState};

use super::{Hold, Job, Phase, Rendezvous, Seat};

/// How many culprits a message lists.
const LISTED: usize = 16;

impl Job {
    /// The job, as the API and `kolo` show it, at this age.
    #[must_use]
    pub fn info(&self, age: Duration) -> JobInfo {
        let elastic = self.elastic.as_deref();
        JobInfo {
            workers: self.in_rank_order().into_iter().map(worker_info).collect(),
            nodes: self.placed_nodes(),
            network: self.net.report().cloned(),
            membership: elastic.map(|elastic| {
                Box::new(MembershipInfo {
                    cause: elastic.active().map(|table| table.cause.clone()),
                    decision: elastic.decision().to_owned(),
                    left_out: Vec::new(),
                })
            }),
            ..self.outline(age)
        }
    }

    /// As [`Job::info`], without all that grows with the number of workers and nodes.
    pub(in crate::head) fn outline(&self, age: Duration) -> JobInfo {
        JobInfo {
            state: self.state,
            generation: if self.phase == Phase::Up {
                self.generation
            } else {
                Generation(0)
            },
            age_ms: age.as_millis() as u64,
            reason: self.ending.as_ref().map(|ending| ending.reason.clone()),
            rendezvous: match self.rendezvous {
                Rendezvous::Open(address) if !self.finished => Some(address),
                _ => None,
            },
            ..JobInfo::new(self.id, self.spec.name.clone(), self.owner)
        }
    }

    /// How many workers and nodes [`Job::info`] lists.
    pub(in crate::head) fn size(&self) -> usize {
        self.seats.len() + self.parts.len()
    }

    /// The hosts that get no new worker of an elastic job at this time.
    #[must_use]
    pub fn left_out(&self, now: Instant) -> Vec<LeftOut> {
        let elastic = self.elastic.as_deref().filter(|_| self.ending.is_none());
        elastic.map_or_else(Vec::new, |elastic| elastic.left_out(now))
    }

    /// The members, and then all other seats.
    fn in_rank_order(&self) -> Vec<&Seat> {
        let mut seats: Vec<&Seat> = self.seats.values().collect();
        if let Some(elastic) = self.elastic.as_deref() {
            seats.sort_by_key(|seat| {
                let is_member = elastic.is_member(seat.process());
                (!is_member, seat.member.rank, seat.member.slot)
            });
        }
        seats
    }

    /// Fails the job because of its start timeout, naming those who did not come.
    pub(super) fn start_timed_out(&mut self) {
        let seconds = self.spec.start_timeout_ms as f64 / 1000.0;
        let mut message =
            format!("the group was not ready within its start timeout of {seconds} s: ");
        match self.phase {
            Phase::Reserve => {
                let missing = self.parts_that(|hold| hold == Hold::Reserving);
                let _ = write!(message, "no answer to the reservation from {missing}");
            }
            Phase::Prepare if !self.program_ready => {
                message.push_str("its driver did not bring the program to all nodes");
            }
            Phase::Prepare if self.net.is_open() => message.push_str(
                "its nodes were not done with the probe of their network interfaces; give it more time, or name \
                 interfaces that are probed alone (--interfaces)",
            ),
            Phase::Prepare => message.push_str("the rendezvous did not open"),
            Phase::Boot => message.push_str(&self.ranks_that_did_not_come()),
            Phase::Publish | Phase::Up => {
                let names: Vec<_> = (0..self.parts.len())
                    .filter(|part| !self.parts[*part].has_membership)
                    .map(|part| self.place_name(part))
                    .collect();
                let _ = write!(
                    message,
                    "the membership was not taken by {}",
                    listed(&names)
                );
            }
        }
        self.fail(RefusalKind::Timeout, message);
    }

    fn parts_that(&self, is: impl Fn(Hold) -> bool) -> String {
        let names: Vec<_> = (0..self.parts.len())
            .filter(|part| is(self.parts[*part].hold))
            .map(|part| self.place_name(part))
            .collect();
        listed(&names)
    }

    fn ranks_that_did_not_come(&self) -> String {
        let late: Vec<_> = self
            .seats
            .values()
            .filter(|seat| seat.state != WorkerState::Ready)
            .map(|seat| {
                let process = match seat.pid {
                    0 => "no process yet".to_owned(),
                    pid => format!("pid {pid} said no hello"),
                };
                format!(
                    "rank {} on {} ({}; {process})",
                    seat.member.rank, seat.member.hostname, seat.member.node
                )
            })
            .collect();
        if late.is_empty() {
            let missing = self.parts_that(|hold| hold == Hold::Starting);
            return format!("no answer to the start from {missing}");
        }
        format!(
            "{} of {} workers did not come: {}",
            late.len(),
            self.seats.len(),
            listed(&late)
        )
    }
}

fn worker_info(seat: &Seat) -> WorkerInfo {
    WorkerInfo {
        member: seat.member.clone(),
        state: seat.state,
        pid: seat.pid,
        exit: seat.exit,
    }
}

pub(super) fn listed(names: &[String]) -> String {
    let mut text = names[..names.len().min(LISTED)].join(", ");
    if names.len() > LISTED {
        let _ = write!(text, " and {} more", names.len() - LISTED);
    }
    text
}
