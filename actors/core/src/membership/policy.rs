//! The policy: given what is true, what is to be done. A pure function, with its reason in plain words.

mod demand;
mod planned;
mod restart;

use std::time::Instant;

use kolo_wire::counted::Counted;
use kolo_wire::ids::Slot;
use kolo_wire::span::Span;

use super::budget::Budget;
use super::end::End;
use super::filter;
use super::generation::{Generation, Member};
use super::limits::Limits;
use super::order::{arrange, arrange_by_node};
use super::roster::Roster;
use super::seat::{Process, Seat, State};
use super::units::{self, Units};

/// How many late processes a reason lists.
const LISTED: usize = 8;

/// The use of seats that are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Members that the job has never had.
    Grow,
    /// Members for those that are lost or leave.
    Replace,
    /// Processes that are kept ready.
    Spare,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// Nothing.
    Keep,
    /// Start so many more processes.
    Ask {
        /// The use of them.
        purpose: Purpose,
        /// How many.
        count: usize,
    },
    /// End these processes, which nobody needs.
    Dismiss(Vec<Process>),
    /// Give back the room of these seats, in which there is no process.
    GiveBack(Vec<Slot>),
    /// A change is wanted. Ask the members to hold at their next commit, so that no work is lost.
    Hold,
    /// A group with new processes is wanted, see [`Limits::is_planned`]: start them for it. These are its seats, in rank order.
    Plan(Vec<Slot>),
    /// The group for which processes were started can't be formed any more: stop those that are new.
    Cancel,
    /// A change is wanted of a group that is started anew. Stop all its processes.
    Restart,
    /// Make a generation of these processes, in rank order.
    Form(Vec<Process>),
    /// Look again at that time, if nothing happens before.
    WaitUntil(Instant),
    /// The job ends.
    End(End),
}

/// A choice and the reason for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// What is to be done.
    pub choice: Choice,
    /// Why, in plain words. Of a generation it is the cause.
    pub reason: String,
}

fn decision(choice: Choice, reason: impl Into<String>) -> Decision {
    let reason = reason.into();
    Decision { choice, reason }
}

/// Decides on the membership of a job.
///
/// `previous` is the last generation that was active, or the first one that was given up. [`Budget::idle_since`] tells
/// whether it is still intact. `plan` is the generation for which processes were started. The caller asks again after each choice that it has carried out.
///
/// The rules:
/// - An intact group is only changed at a commit, where its members hold. A lost member is no reason to wait: the rest goes on
///   at once, with spares and whoever else is ready.
/// - A process that is ready waits for others on their way, for the join window at most.
/// - A member that leaves stays until there are enough without it, one of which has the state.
/// - The next generation has a member that has the state: one that has been in since before the last commit. Without any the
///   job ends, unless a commit outlives them. Before the first commit nothing is lost: the job begins anew, within its limits.
/// - While half of `previous` or more may run unseen, nothing is formed (G-3).
/// - Without a group the job waits for the start timeout at most.
#[must_use]
pub fn decide(
    now: Instant,
    roster: &Roster,
    limits: &Limits,
    budget: &Budget,
    previous: Option<&Generation>,
    plan: Option<&Generation>,
) -> Decision {
    let is_in_units = limits.per_host > 1 && !limits.holds_seats();
    let view = View {
        now,
        roster,
        limits,
        budget,
        previous,
        plan,
        units: is_in_units.then(|| Units::new(now, roster, limits, budget)),
    };
    if limits.starts_anew() {
        return view.anew();
    }
    if let Some(end) = view.end() {
        return end;
    }
    if let Some(ask) = view.ask() {
        return ask;
    }
    if limits.is_planned() {
        return view.planned();
    }
    if let Some(since) = budget.idle_since() {
        return view.form(since);
    }
    let rest = view.surplus().or_else(|| view.booked());
    rest.unwrap_or_else(|| view.change())
}

/// A group of the processes in these seats, in rank order.
fn form(seats: &[&Seat]) -> Choice {
    Choice::Form(seats.iter().map(|seat| seat.process()).collect())
}

struct View<'a> {
    now: Instant,
    roster: &'a Roster,
    limits: &'a Limits,
    budget: &'a Budget,
    previous: Option<&'a Generation>,
    /// For which processes were started.
    plan: Option<&'a Generation>,
    /// Of a job that takes room for several members at once, and whose processes go on.
    units: Option<Units>,
}

impl<'a> View<'a> {
    fn members(&self) -> &'a [Member] {
        self.previous.map_or(&[], Generation::members)
    }

    fn is_member(&self, seat: &Seat) -> bool {
        self.previous
            .is_some_and(|previous| previous.member(seat.process()).is_some())
    }

    /// The first member that is not there any more and has not returned, with the reason.
    fn first_lost(&self) -> Option<String> {
        self.members().iter().find_map(|member| {
            let seat = self.roster.seat(member.process.slot)?;
            let same = seat.process() == member.process;
            if same && (seat.state.is_live() || seat.state == State::Returned) {
                return None;
            }
            let why = seat.loss.as_ref().map(ToString::to_string);
            let Member {
                rank,
                process,
                location,
                ..
            } = member;
            let (host, why) = (&location.host, why.as_deref());
            let why = why.unwrap_or("no reason is known");
            Some(if self.limits.holds_seats() {
                format!("rank {rank} on {host} is lost: {why}")
            } else {
                format!("rank {rank} ({process} on {host}) is lost: {why}")
            })
        })
    }

    /// The process has the state for certain: it has been a member since before the last commit. Before the first commit
    /// there is nothing that one member has and another one lacks.
    fn has_state(&self, process: Process) -> bool {
        let committed = self.budget.committed_in();
        let member = self.previous.and_then(|previous| previous.member(process));
        member.is_some_and(|member| committed.0 == 0 || member.since <= committed)
    }

    /// Number of processes that are there and have the state.
    fn holders(&self) -> usize {
        let members = self.members().iter().map(|member| member.process);
        members
            .filter(|process| self.has_state(*process) && self.roster.is_live(*process))
            .count()
    }

    /// Programs may be done before they have ever met. Those that run may be, too, within the start timeout.
    fn returned_early(&self, returned: usize) -> Option<Decision> {
        let since = self.budget.idle_since()?;
        let is_first = self.limits.holds_seats() && !self.budget.has_formed();
        if returned == 0 || !is_first || self.budget.without_progress() > 0 {
            return None;
        }
        let running = self.roster.seats().iter();
        let running = running.filter(|seat| seat.state.is_there()).count();
        let deadline = since + self.limits.start_timeout;
        if running == 0 {
            let reason = format!("all workers have returned: {returned}");
            return Some(decision(Choice::End(End::Succeeded), reason));
        }
        let reason = format!("workers that have returned before the first group: {returned}");
        (self.now < deadline).then(|| decision(Choice::WaitUntil(deadline), reason))
    }

    /// Why the job ends now, if it does.
    fn end(&self) -> Option<Decision> {
        let end = |how, reason: String| Some(decision(Choice::End(how), reason));
        let is_idle = self.budget.idle_since().is_some();
        let returned = self.roster.count(State::Returned);
        if let Some(decision) = self.returned_early(returned) {
            return Some(decision);
        }
        if returned > 0 && is_idle {
            let lost = self.first_lost().map(|lost| lost + "; ");
            return end(
                End::Lost,
                format!(
                    "{}members that have returned already: {returned}, so that the rest can't go on",
                    lost.unwrap_or_default()
                ),
            );
        }
        if returned > 0 && self.roster.count(State::Active) == 0 {
            return end(
                End::Succeeded,
                format!("all members have returned: {returned}"),
            );
        }
        if let Some((how, reason)) = self.budget.exceeded(self.now, self.limits) {
            return end(how, reason);
        }
        if !is_idle {
            return None;
        }
        if !self.budget.has_formed() && self.budget.commit().is_none() {
            return None;
        }
        let lost = self.first_lost()?;
        if !self.budget.has_resets(self.limits) {
            let resets = self.budget.resets();
            return end(
                End::ResetLimit,
                format!(
                    "changes of the membership: {resets}, which is the limit (max_resets), and {lost}"
                ),
            );
        }
        let commit = self.budget.commit()?;
        if self.holders() == 0 && !self.budget.is_durable() {
            let number = self.previous.map_or(0, |previous| previous.number().0);
            return end(
                End::NoSurvivor,
                format!(
                    "no member of generation {number} that could hand on the state is left, so that nobody has the \
                     state of commit {commit}; commits on disk survive that; {lost}"
                ),
            );
        }
        None
    }

    fn survivors(&self) -> usize {
        let members = self.members().iter();
        members
            .filter(|member| self.roster.is_live(member.process))
            .count()
    }

    /// Whoever could be in a group that is formed now. A process that was started for another group is not.
    fn candidates(&self) -> impl Iterator<Item = &'a Seat> {
        let is_planned = self.limits.is_planned();
        let live = self.roster.live();
        live.filter(move |seat| !is_planned || self.is_member(seat))
    }

    /// The best group that could be formed now, in rank order. It may be too small.
    fn best(&self) -> Vec<&'a Seat> {
        let (staying, leaving): (Vec<&Seat>, Vec<&Seat>) =
            self.candidates().partition(|seat| !seat.leaving);
        let best = self.shaped(staying.iter().copied());
        if leaving.is_empty() || self.is_enough(&best) {
            return best;
        }
        // Those that leave are needed: as many as there is room for, if nobody else has the state; then they can hand it over.
        let has_state = staying.iter().any(|seat| self.has_state(seat.process()));
        let unit = self.limits.per_host;
        let room = self
            .limits
            .max
            .saturating_sub(staying.len() as u32)
            .max(unit);
        let limit = if has_state { u32::MAX } else { room };
        let mut leaving = arrange(self.previous, leaving);
        leaving.retain(|seat| self.is_member(seat));
        let leaving = units::whole(unit, limit, leaving);
        self.shaped(leaving.into_iter().chain(staying))
    }

    fn shaped(&self, seats: impl IntoIterator<Item = &'a Seat>) -> Vec<&'a Seat> {
        let mut seats = if self.limits.starts_anew() {
            arrange_by_node(self.previous, seats)
        } else {
            arrange(self.previous, seats)
        };
        loop {
            seats = units::whole(self.limits.per_host, self.limits.max, seats);
            let whole = seats.len();
            seats = filter::apply(&self.limits.filters, seats);
            if seats.len() == whole {
                return seats;
            }
        }
    }

    /// A group is large enough, and has the state if anybody has it.
    fn is_enough(&self, group: &[&Seat]) -> bool {
        group.len() >= self.limits.min as usize
            && (group.iter().any(|seat| self.has_state(seat.process())) || self.holders() == 0)
    }

    /// When a process that is ready since then has waited long enough for others on their way. Nothing if there are none to wait for,
    /// or no room for them in a group of this size.
    fn window(&self, first: Option<Instant>, size: usize) -> Option<Instant> {
        let coming = self.roster.count(State::Reserving) + self.roster.count(State::Booting);
        if coming == 0 || size >= self.limits.max as usize {
            return None;
        }
        let end = first? + self.limits.join_window;
        (end > self.now).then_some(end)
    }

    /// As [`View::window`], of a group that is to be formed until a deadline.
    fn gather(
        &self,
        first: Option<Instant>,
        size: usize,
        deadline: Instant,
        why: &str,
    ) -> Option<Decision> {
        let end = self.window(first, size).filter(|_| self.now < deadline)?;
        Some(decision(Choice::WaitUntil(end.min(deadline)), why))
    }

    /// No group is active: form one, wait, or give up.
    fn form(&self, since: Instant) -> Decision {
        let deadline = since + self.limits.start_timeout;
        let survivors = self.survivors();
        if let Some(wait) = self.wait_for_unseen(survivors, deadline) {
            return wait;
        }
        let ready = self.roster.count(State::Active) + self.roster.count(State::Ready);
        if ready < self.limits.min as usize {
            return self.too_few(ready, deadline);
        }
        // Survivors stand still, and go on at once. Looked at before the group: a start is a fact for each process.
        if survivors == 0 || !self.budget.has_formed() {
            let first = self.roster.in_state(State::Ready).next();
            let why = "enough processes are ready, others are on their way and may join";
            if let Some(wait) = self.gather(first.map(|seat| seat.since), ready, deadline, why) {
                return wait;
            }
        }
        let best = self.best();
        if !self.is_enough(&best) {
            return self.too_few(ready, deadline);
        }
        decision(form(&best), self.cause(&best))
    }

    /// Too few processes are ready, or they do not fit together: wait for more, or give up.
    fn too_few(&self, ready: usize, deadline: Instant) -> Decision {
        let min = self.limits.min as usize;
        let is_program = self.limits.holds_seats();
        let misfit = if ready < min {
            ""
        } else {
            ", of which too few fit together"
        };
        if self.now < deadline {
            // Without their number, which changes with each of them.
            let reason = if is_program {
                format!(
                    "waits for room for at least {}{misfit}",
                    Counted(min, "worker")
                )
            } else {
                format!("waits for at least {min} ready processes (min_workers){misfit}")
            };
            return decision(Choice::WaitUntil(deadline), reason);
        }
        let timeout = Span(self.limits.start_timeout);
        let mut reason = if is_program {
            format!(
                "there is room for {}{misfit}; needed are at least {min}, and no more came within {timeout}",
                Counted(ready, "worker")
            )
        } else {
            format!(
                "ready processes: {ready}{misfit}; needed are at least {min} (min_workers), and no more came within the start \
                 timeout of {timeout}"
            )
        };
        let late: Vec<String> = [State::Booting, State::Reserving]
            .into_iter()
            .flat_map(|state| self.roster.in_state(state))
            .take(LISTED)
            .map(|seat| match seat.host() {
                Some(host) if seat.state == State::Booting => {
                    format!("{} on {host}", seat.process())
                }
                _ => format!("a node for slot {}", seat.slot),
            })
            .collect();
        if !late.is_empty() && !is_program {
            reason = format!("{reason}; late: {}", late.join(", "));
        }
        for (host, _, why) in self.budget.left_out(self.now).take(LISTED) {
            reason = format!("{reason}; {host} is left out: {why}");
        }
        let lost = if is_program {
            Some(self.budget.idle_why().to_owned()).filter(|why| !why.is_empty())
        } else {
            self.first_lost()
        };
        if let Some(lost) = lost {
            reason = format!("{reason}; {lost}");
        }
        // Of several lines, the last of which says what to do.
        if let Some(refusal) = self.roster.refusal() {
            reason = format!("{reason}; no room: {refusal}");
        }
        decision(Choice::End(End::BelowMin), reason)
    }

    /// While half of the members or more may run unseen, they could be a group still. So could fewer, if no other member is
    /// there to leave it.
    fn wait_for_unseen(&self, survivors: usize, deadline: Instant) -> Option<Decision> {
        let previous = self.previous?;
        let unseen: Vec<Option<Instant>> = self
            .roster
            .unseen(self.now)
            .filter(|(process, _)| previous.member(*process).is_some())
            .map(|(_, until)| until)
            .collect();
        // A process without a known end was told to stop, and its node says when it has ended.
        let silent = unseen.iter().flatten().count();
        let is_split = silent > 0 && silent * 2 >= previous.members().len();
        let is_alone = survivors == 0 && !unseen.is_empty();
        if !is_split && !is_alone {
            return None;
        }
        let reason = format!(
            "{} of {} members may still run unseen, and no other group is formed before they have ended for certain",
            unseen.len(),
            previous.members().len()
        );
        let choice = match unseen.iter().flatten().max() {
            Some(end) => Choice::WaitUntil(*end),
            None if self.now < deadline => Choice::WaitUntil(deadline),
            None => Choice::End(End::BelowMin),
        };
        Some(decision(choice, reason))
    }

    /// A group is active: keep it, or ask it to hold for a change.
    fn change(&self) -> Decision {
        if let Some(keep) = self.settled("members", "max_resets") {
            return keep;
        }
        let members = self.members();
        let keep = |reason: String| decision(Choice::Keep, reason);
        let leaving = self.roster.leaving();
        let max = self.limits.max as usize;
        if leaving == 0 && (members.len() >= max || self.roster.count(State::Ready) == 0) {
            return keep(format!("members: {} of at most {max}", members.len()));
        }
        let best = self.best();
        let leaves = |member: &&Member| {
            let seat = self.roster.seat(member.process.slot);
            let stays = || best.iter().any(|seat| seat.process() == member.process);
            seat.is_some_and(|seat| seat.leaving) && !stays()
        };
        let gone = members.iter().filter(leaves).count();
        if !self.is_enough(&best) || (best.len() <= members.len() && gone == 0) {
            return keep(format!(
                "members: {}; nobody could replace or join them",
                members.len()
            ));
        }
        let new = best.iter().filter(|seat| !self.is_member(seat));
        let window = self.window(new.map(|seat| seat.since).min(), best.len());
        if let Some(end) = window.filter(|_| gone == 0) {
            return decision(
                Choice::WaitUntil(end),
                format!(
                    "members: {}, could be {}; others are on their way and may join, too",
                    members.len(),
                    best.len()
                ),
            );
        }
        decision(Choice::Hold, self.cause(&best))
    }

    /// Why the next generation is of these processes.
    fn cause(&self, group: &[&Seat]) -> String {
        let mut parts = Vec::new();
        // A held seat still has the name of the process before.
        let is_new = |seat: &&&Seat| !(seat.state.is_live() && self.is_member(seat));
        let new = group.iter().filter(is_new).count();
        let members = self.members();
        if members.is_empty() {
            return format!("the first {new} members");
        }
        parts.extend(self.first_lost());
        let lost = members.len() - self.survivors();
        if lost > 1 {
            parts.push(format!("{} more lost", lost - 1));
        }
        let left = self.survivors() + new - group.len();
        if left > 0 {
            parts.push(format!("{left} left"));
        }
        if new > 0 {
            parts.push(format!("{new} new"));
        }
        if parts.is_empty() {
            parts.push(match self.budget.broken() {
                Some(why) => format!("nobody is lost, but they could not go on: {why}"),
                None => "nothing has changed".to_owned(),
            });
        }
        let (before, after) = (members.len(), group.len());
        let what = if self.limits.holds_seats() {
            "workers"
        } else {
            "members"
        };
        format!("{before} -> {after} {what}: {}", parts.join("; "))
    }
}
