//! The roster: the seats of a job and what is true of each. It takes facts and has no opinion.

mod nodes;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use kolo_wire::OnChange;
use kolo_wire::ids::{self, NodeId, Slot};

use super::fact::Fact;
use super::generation::Generation;
use super::seat::{Host, Incarnation, Location, Loss, Process, Seat, State};

/// A process that is not there any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Departure {
    /// The process.
    pub process: Process,
    /// The failure domain that it was in.
    pub host: Option<Host>,
    /// Since when its seat was as far as it was.
    pub since: Instant,
    /// What became of it.
    pub fate: Fate,
}

/// What became of a process that is not there any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// It has ended with success, as a member of this generation.
    Returned(ids::Generation),
    /// It is lost.
    Lost(Loss),
}

/// A fact that changes nothing, because it is about something that is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stale(pub String);

/// The seats of a job.
#[derive(Debug, Clone, Default)]
pub struct Roster {
    /// What becomes of processes at a change. In place by default.
    on_change: OnChange,
    /// Seat `n` has slot `n`.
    seats: Vec<Seat>,
    /// The seats in each state, those that have been there longest first.
    by_state: BTreeMap<State, BTreeSet<(Instant, Slot)>>,
    /// Nodes that are to be left, and why.
    draining: BTreeMap<NodeId, String>,
    /// When all processes were told last to prepare for their end, and until when they may leave.
    noticed: Option<(Instant, Instant)>,
    /// When the last reservation was refused, unless room was offered since.
    refused: Option<Instant>,
    /// Why the last one was refused.
    refusal: Option<String>,
    /// Other jobs wait for room, and there is too little for this one. Until room is offered.
    contended: bool,
    /// Seats for which a node was looked for already when room was offered: their refusal is of the time before.
    older: BTreeSet<Slot>,
    /// Processes that are lost and may still run. Nobody has seen their end.
    unseen: BTreeMap<Process, Unseen>,
}

/// A process that is lost and may still run.
#[derive(Debug, Clone, Copy)]
struct Unseen {
    node: Option<NodeId>,
    /// When it has ended for certain, if that is known.
    until: Option<Instant>,
}

impl Roster {
    /// No seats yet.
    #[must_use]
    pub fn new(on_change: OnChange) -> Self {
        Self {
            on_change,
            ..Self::default()
        }
    }

    /// A seat that a node holds waits without a process.
    fn holds_seats(&self) -> bool {
        self.on_change != OnChange::InPlace
    }

    /// All seats, by slot.
    #[must_use]
    pub fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// The seat of a slot.
    #[must_use]
    pub fn seat(&self, slot: Slot) -> Option<&Seat> {
        self.seats.get(slot.0 as usize)
    }

    /// Number of seats in a state.
    #[must_use]
    pub fn count(&self, state: State) -> usize {
        self.by_state.get(&state).map_or(0, BTreeSet::len)
    }

    /// The seats in a state, those that have been there longest first.
    pub fn in_state(&self, state: State) -> impl Iterator<Item = &Seat> {
        let seats = self.by_state.get(&state).into_iter().flatten();
        seats.filter_map(|(_, slot)| self.seat(*slot))
    }

    /// The seats whose process can take part in a generation.
    pub fn live(&self) -> impl Iterator<Item = &Seat> {
        let active = self.in_state(State::Active);
        active.chain(self.in_state(State::Ready))
    }

    /// The process is there and can take part in a generation.
    #[must_use]
    pub fn is_live(&self, process: Process) -> bool {
        let seat = self.seat(process.slot);
        seat.is_some_and(|seat| seat.process() == process && seat.state.is_live())
    }

    /// The end of the process is no failure, whatever its exit: its node is to be left, or the process was told to prepare for
    /// its end.
    #[must_use]
    pub fn may_leave(&self, now: Instant, process: Process) -> bool {
        let seat = self.seat(process.slot);
        let seat = seat.filter(|seat| seat.process() == process);
        let is_noticed = |seat: &Seat| {
            let noticed = self.noticed.as_ref();
            noticed.is_some_and(|(at, until)| seat.since <= *at && now <= *until)
        };
        seat.is_some_and(|seat| seat.leaving || is_noticed(seat))
    }

    /// Some nodes are to be left.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        !self.draining.is_empty()
    }

    /// Number of processes that are there or on their way, and are to leave, and of held seats.
    #[must_use]
    pub fn leaving(&self) -> usize {
        if !self.is_draining() {
            return 0;
        }
        let states = [
            State::Held,
            State::Booting,
            State::Ready,
            State::Active,
            State::Stopping,
        ];
        let seats = states.into_iter().flat_map(|state| self.in_state(state));
        seats.filter(|seat| seat.leaving).count()
    }

    /// Number of processes that stay, and of those that are on their way.
    #[must_use]
    pub fn staying(&self) -> usize {
        let coming = self.count(State::Reserving) + self.count(State::Booting);
        let live = self.count(State::Active) + self.count(State::Ready);
        coming + live - self.leaving()
    }

    /// Why the node of a seat is to be left. Empty if it is not.
    #[must_use]
    pub fn drain_reason(&self, seat: &Seat) -> &str {
        let location = seat.location.as_ref();
        let why = location.and_then(|location| self.draining.get(&location.node));
        why.map_or("", |why| why)
    }

    /// When the last reservation was refused, unless room was offered since.
    #[must_use]
    pub fn refused(&self) -> Option<Instant> {
        self.refused
    }

    /// Why the last reservation that was refused was refused, whatever was offered since.
    #[must_use]
    pub fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    /// Other jobs wait for room, and there is too little for this one.
    #[must_use]
    pub fn is_contended(&self) -> bool {
        self.contended
    }

    /// Processes that are lost and may still run at `now`, and when each has ended for certain, if that is known. Not
    /// those of generations before the last one that was active.
    pub fn unseen(&self, now: Instant) -> impl Iterator<Item = (Process, Option<Instant>)> {
        let unseen = self
            .unseen
            .iter()
            .map(|(process, unseen)| (*process, unseen.until));
        unseen.filter(move |(_, until)| until.is_none_or(|until| until > now))
    }

    /// The process is lost, and nobody has seen its end yet.
    #[must_use]
    pub fn is_unseen(&self, process: Process) -> bool {
        self.unseen.contains_key(&process)
    }

    /// Takes a fact in. The result lists the processes that are not there any more because of it.
    ///
    /// # Errors
    ///
    /// [`Stale`] if the fact is about an older process or an answer that nobody waits for, as one that comes twice. Nothing has
    /// changed then. Any other fact that comes twice changes nothing either, and is no error.
    pub fn take(&mut self, now: Instant, fact: &Fact) -> Result<Vec<Departure>, Stale> {
        match fact {
            Fact::Reserved { slot, location } => self.reserved(now, *slot, location)?,
            Fact::Refused { slot, why } => {
                self.waiting(*slot)?;
                self.refusal = Some(why.clone());
                if !self.older.remove(slot) {
                    self.refused = Some(now);
                }
                if self.holds_seats() {
                    // What a node holds it still holds.
                    self.empty(now, *slot);
                    return Ok(Vec::new());
                }
                let had = self.seat(*slot).is_some_and(|seat| seat.loss.is_some());
                let state = if had { State::Lost } else { State::Vacant };
                self.set(now, *slot, state);
            }
            Fact::Contended => {
                self.contended = true;
                self.refused.get_or_insert(now);
            }
            Fact::Offered => {
                self.refused = None;
                self.contended = false;
                let waiting = self.in_state(State::Reserving).map(|seat| seat.slot);
                self.older = waiting.collect();
            }
            Fact::Ready { process, addresses } => {
                let seat = self.current(*process)?;
                match seat.state {
                    State::Booting => {
                        seat.addresses.clone_from(addresses);
                        self.set(now, process.slot, State::Ready);
                    }
                    State::Ready | State::Active => {}
                    State::Vacant
                    | State::Reserving
                    | State::Held
                    | State::Stopping
                    | State::Returned
                    | State::Lost => {
                        return Err(Stale(format!(
                            "{process} is ready, and was given up before"
                        )));
                    }
                }
            }
            Fact::Exited {
                process,
                exit,
                generation,
                said,
            } => {
                let returned = exit.is_success().then_some(*generation);
                let why = if said.is_empty() {
                    exit.to_string()
                } else {
                    format!("{exit}: {said}")
                };
                return self.exited(now, *process, returned, why);
            }
            Fact::Unseen { process, why } => {
                let loss = match self.current(*process)?.state {
                    State::Stopping => Loss::Left(why.clone()),
                    _ => Loss::Late(why.clone()),
                };
                return Ok(self.give_up(now, *process, loss).into_iter().collect());
            }
            Fact::NodeLost { node, why, fenced } => {
                return Ok(self.node_lost(now, *node, why, *fenced));
            }
            Fact::Drain { node, why } => {
                self.draining.insert(*node, why.clone());
                self.mark(*node, true);
            }
            Fact::Undrain { node } => {
                self.draining.remove(node);
                self.mark(*node, false);
            }
            Fact::Noticed { until } => self.noticed = Some((now, *until)),
            Fact::Unhealthy { .. }
            | Fact::Explained { .. }
            | Fact::Acknowledged { .. }
            | Fact::Committed { .. }
            | Fact::Broken { .. }
            | Fact::Holding { .. } => {}
        }
        Ok(Vec::new())
    }

    /// Takes `count` seats without a process in units of `unit` seats, new ones if need be, and marks that nodes are looked for. Held
    /// seats on hosts that cool down are among them.
    pub fn reserve(
        &mut self,
        now: Instant,
        count: usize,
        unit: u32,
        cooling: &BTreeSet<Host>,
    ) -> Vec<Slot> {
        let is_cool = |seat: &Seat| seat.host().is_some_and(|host| cooling.contains(host));
        let is_free = |seat: &Seat| match seat.state {
            State::Vacant | State::Lost => true,
            State::Held => is_cool(seat),
            _ => false,
        };
        let units = self.seats.chunks(unit as usize);
        let free = units.filter(|unit| unit.iter().all(is_free));
        let free = free.flatten().map(|seat| seat.slot);
        let new = (self.seats.len() as u32..).map(Slot);
        let slots: Vec<Slot> = free.chain(new).take(count).collect();
        for slot in &slots {
            if slot.0 as usize == self.seats.len() {
                self.seats.push(Seat {
                    slot: *slot,
                    incarnation: Incarnation::default(),
                    state: State::Vacant,
                    since: now,
                    location: None,
                    leaving: false,
                    addresses: [].into(),
                    loss: None,
                });
            }
            self.set(now, *slot, State::Reserving);
        }
        slots
    }

    /// The next process of a seat is being started, on the node that holds the seat.
    pub fn boot(&mut self, now: Instant, slot: Slot) {
        if let Some(seat) = self.seats.get_mut(slot.0 as usize) {
            seat.incarnation.0 += 1;
            seat.addresses = [].into();
            self.set(now, slot, State::Booting);
        }
    }

    /// A generation is active: its members are, and nobody else.
    pub fn activate(&mut self, now: Instant, generation: &Generation) {
        let live: Vec<Process> = self.live().map(Seat::process).collect();
        for process in live {
            if generation.member(process).is_some() {
                self.set(now, process.slot, State::Active);
            } else if self.seats[process.slot.0 as usize].state == State::Active {
                self.set(now, process.slot, State::Ready);
            }
        }
        self.unseen.clear();
    }

    /// A process that is still there is given up. Nothing if it is not there.
    pub fn give_up(&mut self, now: Instant, process: Process, loss: Loss) -> Option<Departure> {
        let seat = self.current(process).ok()?;
        if !seat.state.is_there() {
            return None;
        }
        let node = seat.location.as_ref().map(|location| location.node);
        self.unseen.insert(process, Unseen { node, until: None });
        Some(self.lose(now, process.slot, loss))
    }

    /// A process that is not wanted is told to end, so that its seat can be used anew. False if it is not there.
    pub fn stop(&mut self, now: Instant, process: Process) -> bool {
        let is_there = self
            .current(process)
            .is_ok_and(|seat| seat.state.is_there());
        if is_there {
            self.set(now, process.slot, State::Stopping);
        }
        is_there
    }

    /// All processes that are there are told to end, so that all seats that nodes hold can be used anew: also those of processes
    /// that have returned.
    pub fn stop_all(&mut self, now: Instant) -> Vec<Process> {
        let mut stopped = Vec::new();
        for slot in (0..self.seats.len() as u32).map(Slot) {
            let seat = &self.seats[slot.0 as usize];
            match seat.state {
                State::Booting | State::Ready | State::Active => {
                    stopped.push(seat.process());
                    self.set(now, slot, State::Stopping);
                }
                State::Returned => self.empty(now, slot),
                State::Vacant | State::Reserving | State::Held | State::Stopping | State::Lost => {}
            }
        }
        stopped
    }

    /// The process of a seat has ended for certain, and another one may start there.
    fn empty(&mut self, now: Instant, slot: Slot) {
        let seat = &self.seats[slot.0 as usize];
        let state = match &seat.location {
            Some(_) if seat.leaving => State::Lost,
            Some(_) => State::Held,
            None => State::Vacant,
        };
        if state == State::Lost {
            let why = self.drain_reason(seat).to_owned();
            self.seats[slot.0 as usize].loss = Some(Loss::Left(why));
        }
        self.set(now, slot, state);
    }

    /// The seat with this slot, if an answer to its reservation is waited for.
    fn waiting(&mut self, slot: Slot) -> Result<&mut Seat, Stale> {
        let seat = self.seats.get_mut(slot.0 as usize);
        seat.filter(|seat| seat.state == State::Reserving)
            .ok_or_else(|| Stale(format!("slot {slot} waits for no reservation")))
    }

    /// The seat of a process, if no newer process has taken it.
    fn current(&mut self, process: Process) -> Result<&mut Seat, Stale> {
        let Some(seat) = self.seats.get_mut(process.slot.0 as usize) else {
            return Err(Stale(format!("{process}: there is no such seat")));
        };
        if seat.process() == process {
            return Ok(seat);
        }
        let last = seat.process();
        Err(Stale(format!(
            "news of {process}, and {last} is the last one"
        )))
    }

    fn reserved(&mut self, now: Instant, slot: Slot, location: &Location) -> Result<(), Stale> {
        let leaving = self.draining.contains_key(&location.node);
        self.older.remove(&slot);
        let seat = self.waiting(slot)?;
        seat.location = Some(location.clone());
        seat.leaving = leaving;
        if self.holds_seats() {
            self.empty(now, slot);
        } else {
            self.boot(now, slot);
        }
        Ok(())
    }

    fn exited(
        &mut self,
        now: Instant,
        process: Process,
        returned: Option<ids::Generation>,
        why: String,
    ) -> Result<Vec<Departure>, Stale> {
        self.unseen.remove(&process);
        let starts_anew = self.on_change == OnChange::Restart;
        let (holds_seats, may_leave) = (self.holds_seats(), self.may_leave(now, process));
        let seat = self.current(process)?;
        // A group that is started anew has no other use for a node that leaves: the work is done.
        let returned = returned.filter(|_| starts_anew || !seat.leaving);
        let loss = match (seat.state, returned) {
            // It was told to, however it has ended.
            (State::Stopping | State::Lost, _) if holds_seats => {
                self.empty(now, process.slot);
                return Ok(Vec::new());
            }
            (
                State::Vacant
                | State::Reserving
                | State::Held
                | State::Stopping
                | State::Returned
                | State::Lost,
                _,
            ) => {
                return Ok(Vec::new());
            }
            // One that is started with its rank may be done before all others are there.
            (state, Some(generation))
                if state == State::Active
                    || starts_anew
                    || holds_seats && state == State::Booting =>
            {
                let departure = Departure {
                    process,
                    host: seat.host().cloned(),
                    since: seat.since,
                    fate: Fate::Returned(generation),
                };
                self.set(now, process.slot, State::Returned);
                return Ok(vec![departure]);
            }
            (State::Ready, Some(_)) => Loss::Left(why),
            (State::Booting | State::Ready | State::Active, _) if may_leave => Loss::Left(why),
            (State::Booting, _) if !starts_anew => {
                Loss::Died(format!("ended before it was ready, with {why}"))
            }
            (State::Booting | State::Ready | State::Active, _) => Loss::Died(why),
        };
        let departure = self.lose(now, process.slot, loss);
        if holds_seats {
            self.empty(now, process.slot);
        }
        Ok(vec![departure])
    }

    fn lose(&mut self, now: Instant, slot: Slot, loss: Loss) -> Departure {
        let seat = &mut self.seats[slot.0 as usize];
        let departure = Departure {
            process: seat.process(),
            host: seat.host().cloned(),
            since: seat.since,
            fate: Fate::Lost(loss.clone()),
        };
        seat.loss = Some(loss);
        self.set(now, slot, State::Lost);
        departure
    }

    /// The only place that changes a state.
    fn set(&mut self, now: Instant, slot: Slot, state: State) {
        let seat = &mut self.seats[slot.0 as usize];
        if let Some(seats) = self.by_state.get_mut(&seat.state) {
            seats.remove(&(seat.since, slot));
        }
        seat.state = state;
        seat.since = now;
        self.by_state.entry(state).or_default().insert((now, slot));
    }
}
