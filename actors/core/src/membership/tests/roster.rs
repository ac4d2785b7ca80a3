//! Facts, and those that come too late.

use super::*;

struct Seats {
    roster: Roster,
    now: Instant,
}

impl Seats {
    /// Two seats on node 1, one on node 2, booting.
    fn new() -> Self {
        Self {
            roster: seated(&[1, 1, 2]),
            now: Instant::now(),
        }
    }

    fn take(&mut self, fact: Fact) -> Result<Vec<Departure>, Stale> {
        self.now += ms(1);
        self.roster.take(self.now, &fact)
    }

    /// A fact that takes no process away.
    fn took(&mut self, fact: Fact) {
        assert_eq!(self.take(fact), Ok(vec![]));
    }

    fn ready(&mut self, process: Process) {
        self.took(ready(process));
    }

    /// What becomes of a process that ends.
    fn ends(&mut self, process: Process, exit: Exit, said: &str) -> Fate {
        let mut departures = self.take(exited(process, exit, said)).unwrap();
        assert_eq!(departures.len(), 1);
        departures.remove(0).fate
    }

    fn reserve(&mut self) -> Slot {
        self.roster.reserve(self.now, 1, 1, &BTreeSet::new())[0]
    }

    fn activate(&mut self) {
        let live: Vec<&Seat> = self.roster.live().collect();
        self.roster.activate(self.now, &first(&live));
    }

    fn states(&self) -> Vec<State> {
        let seats = self.roster.seats().iter();
        seats.map(|seat| seat.state).collect()
    }
}

#[test]
fn a_seat_goes_from_vacant_to_active() {
    use State::{Active, Booting, Ready, Reserving, Vacant};
    let mut seats = Seats::new();
    assert_eq!(seats.reserve(), Slot(3));
    assert_eq!(seats.states(), [Booting, Booting, Booting, Reserving]);
    seats.took(refused(Slot(3)));
    assert!(seats.roster.refused().is_some());
    seats.took(Fact::Offered);
    assert!(seats.roster.refused().is_none());
    seats.ready(process(1, 1));
    assert_eq!(seats.states(), [Booting, Ready, Booting, Vacant]);
    seats.activate();
    assert_eq!(seats.states(), [Booting, Active, Booting, Vacant]);
    // The state lists are in step, the longest-lived first.
    assert_eq!(seats.roster.count(Booting), 2);
    let booting = seats.roster.in_state(Booting).map(|seat| seat.slot.0);
    assert_eq!(booting.collect::<Vec<_>>(), [0, 2]);
}

#[test]
fn a_refusal_of_before_an_offer_does_not_count() {
    let mut seats = Seats::new();
    let slot = seats.reserve();
    seats.took(Fact::Offered);
    seats.took(refused(slot));
    assert_eq!(seats.roster.refused(), None);
    let slot = seats.reserve();
    seats.took(refused(slot));
    assert_eq!(seats.roster.refused(), Some(seats.now));
}

#[test]
fn how_a_process_ends_is_told_by_its_exit_and_its_state() {
    let code = Exit::Code;
    let mut seats = Seats::new();
    seats.ready(process(1, 1));
    let loss = Loss::Died("ended before it was ready, with exit code 0: bye".to_owned());
    let fate = seats.ends(process(0, 1), code(0), "bye");
    assert_eq!(fate, Fate::Lost(loss));
    // A spare that goes has left, one that fails has died.
    let fate = seats.ends(process(1, 1), code(0), "");
    assert_eq!(fate, Fate::Lost(Loss::Left("exit code 0".to_owned())));
    seats.ready(process(2, 1));
    seats.activate();
    let fate = seats.ends(process(2, 1), code(0), "");
    assert_eq!(fate, Fate::Returned(ids::Generation(1)));
    assert_eq!(seats.states(), [State::Lost, State::Lost, State::Returned]);
}

#[test]
fn who_leaves_has_left_whatever_its_exit() {
    for exit in [Exit::Code(0), Exit::Signal(15)] {
        let mut seats = Seats::new();
        seats.ready(process(2, 1));
        seats.activate();
        seats.took(drain(2));
        let seat = &seats.roster.seats()[2];
        assert_eq!(seats.roster.drain_reason(seat), "maintenance");
        let fate = seats.ends(process(2, 1), exit, "");
        assert!(matches!(fate, Fate::Lost(Loss::Left(_))), "{fate:?}");
    }
}

#[test]
fn a_drain_can_be_taken_back_and_holds_for_later_seats() {
    let mut seats = Seats::new();
    let leaving = |seats: &Seats| -> Vec<bool> {
        let seats = seats.roster.seats().iter();
        seats.map(|seat| seat.leaving).collect()
    };
    seats.took(drain(1));
    let slot = seats.reserve();
    seats.took(reserved(slot.0, 1));
    assert_eq!(leaving(&seats), [true, true, false, true]);
    seats.took(undrain(1));
    assert_eq!(leaving(&seats), [false; 4]);
}

#[test]
fn a_lost_node_loses_its_processes_and_its_seats() {
    let mut seats = Seats::new();
    seats.ready(process(0, 1));
    let fenced = seats.now + s(3);
    let fact = node_lost(1, fenced);
    let lost = seats.take(fact.clone()).unwrap();
    let lost = lost.into_iter().map(|lost| (lost.process, lost.host));
    let expected = [0, 1].map(|slot| (process(slot, 1), Some(host(1))));
    assert_eq!(lost.collect::<Vec<_>>(), expected);
    assert!(seats.roster.seats()[0].location.is_none());
    let unseen: Vec<_> = seats.roster.unseen(seats.now).collect();
    let expected = [0, 1].map(|slot| (process(slot, 1), Some(fenced)));
    assert_eq!(unseen, expected);
    assert_eq!(seats.roster.unseen(fenced).count(), 0);
    seats.took(fact);
}

#[test]
fn a_process_that_is_given_up_may_run_until_its_node_says_otherwise() {
    let mut seats = Seats::new();
    seats.ready(process(0, 1));
    let late = Loss::Late("late".to_owned());
    for is_there in [true, false] {
        let departure = seats.roster.give_up(seats.now, process(0, 1), late.clone());
        assert_eq!(departure.is_some(), is_there);
    }
    let unseen: Vec<_> = seats.roster.unseen(seats.now).collect();
    assert_eq!(unseen, [(process(0, 1), None)]);
    // The next process of the seat runs already.
    seats.roster.boot(seats.now, Slot(0));
    assert!(seats.take(failed(process(0, 1))).is_err());
    assert_eq!(seats.roster.unseen(seats.now).count(), 0);
}

#[test]
fn news_of_an_older_process_is_ignored_and_reported() {
    let mut seats = Seats::new();
    seats.ready(process(0, 1));
    assert_eq!(seats.take(failed(process(0, 1))).unwrap().len(), 1);
    // Twice is no news.
    seats.took(failed(process(0, 1)));
    let stale = |seats: &mut Seats, fact| seats.take(fact).unwrap_err().0;
    let why = "process 1 of slot 0 is ready, and was given up before";
    assert_eq!(stale(&mut seats, ready(process(0, 1))), why);
    seats.roster.boot(seats.now, Slot(0));
    let before = seats.roster.seats().to_vec();
    let old = "news of process 1 of slot 0, and process 2 of slot 0 is the last one";
    let no_seat = "process 1 of slot 9: there is no such seat";
    for (fact, why) in [
        (ready(process(0, 1)), old),
        (failed(process(0, 1)), old),
        (failed(process(9, 1)), no_seat),
        (reserved(0, 1), "slot 0 waits for no reservation"),
        (refused(Slot(9)), "slot 9 waits for no reservation"),
    ] {
        assert_eq!(stale(&mut seats, fact), why);
    }
    assert_eq!(seats.roster.seats(), before);
}
