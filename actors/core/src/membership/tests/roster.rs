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

    fn ready(&mut self, process: Process) -> Result<Vec<Departure>, Stale> {
        let addresses = [].into();
        self.take(Fact::Ready { process, addresses })
    }

    fn activate(&mut self) {
        let generation = Generation::new(
            ids::Generation(1),
            String::new(),
            self.roster.live(),
            None,
            ids::Generation(0),
        );
        self.roster.activate(self.now, &generation);
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
    assert_eq!(
        seats.roster.reserve(seats.now, 1, 1, &BTreeSet::new()),
        [Slot(3)]
    );
    assert_eq!(seats.states(), [Booting, Booting, Booting, Reserving]);
    seats
        .take(Fact::Refused {
            slot: Slot(3),
            why: "full".to_owned(),
        })
        .unwrap();
    assert!(seats.roster.refused().is_some());
    seats.take(Fact::Offered).unwrap();
    assert!(seats.roster.refused().is_none());
    seats.ready(process(1, 1)).unwrap();
    assert_eq!(seats.states(), [Booting, Ready, Booting, Vacant]);
    seats.activate();
    assert_eq!(seats.states(), [Booting, Active, Booting, Vacant]);
    // The state lists are in step, the longest-lived first.
    assert_eq!(seats.roster.count(Booting), 2);
    let booting: Vec<_> = seats
        .roster
        .in_state(Booting)
        .map(|seat| seat.slot.0)
        .collect();
    assert_eq!(booting, [0, 2]);
}

#[test]
fn a_refusal_of_before_an_offer_does_not_count() {
    let mut seats = Seats::new();
    for slot in seats.roster.reserve(seats.now, 1, 1, &BTreeSet::new()) {
        seats.take(Fact::Offered).unwrap();
        seats
            .take(Fact::Refused {
                slot,
                why: "full".to_owned(),
            })
            .unwrap();
    }
    assert_eq!(seats.roster.refused(), None);
    for slot in seats.roster.reserve(seats.now, 1, 1, &BTreeSet::new()) {
        seats
            .take(Fact::Refused {
                slot,
                why: "full".to_owned(),
            })
            .unwrap();
    }
    assert_eq!(seats.roster.refused(), Some(seats.now));
}

#[test]
fn how_a_process_ends_is_told_by_its_exit_and_its_state() {
    let code = Exit::Code;
    let mut seats = Seats::new();
    seats.ready(process(1, 1)).unwrap();
    let departures = seats.take(exited(process(0, 1), code(0), "bye")).unwrap();
    let loss = Loss::Died("ended before it was ready, with exit code 0: bye".to_owned());
    assert_eq!(departures[0].fate, Fate::Lost(loss));
    assert_eq!(departures[0].host, Some(host(1)));
    // A spare that goes has left, one that fails has died.
    let departures = seats.take(exited(process(1, 1), code(0), "")).unwrap();
    assert_eq!(
        departures[0].fate,
        Fate::Lost(Loss::Left("exit code 0".to_owned()))
    );
    seats.ready(process(2, 1)).unwrap();
    seats.activate();
    let departures = seats.take(exited(process(2, 1), code(0), "")).unwrap();
    assert_eq!(departures[0].fate, Fate::Returned(ids::Generation(1)));
    assert_eq!(seats.states(), [State::Lost, State::Lost, State::Returned]);
}

#[test]
fn who_leaves_has_left_whatever_its_exit() {
    for exit in [Exit::Code(0), Exit::Signal(15)] {
        let mut seats = Seats::new();
        seats.ready(process(2, 1)).unwrap();
        seats.activate();
        seats.take(drain(2)).unwrap();
        assert_eq!(
            seats.roster.drain_reason(&seats.roster.seats()[2]),
            "maintenance"
        );
        let departures = seats.take(exited(process(2, 1), exit, "")).unwrap();
        assert!(
            matches!(departures[0].fate, Fate::Lost(Loss::Left(_))),
            "{departures:?}"
        );
    }
}

#[test]
fn a_drain_can_be_taken_back_and_holds_for_later_seats() {
    let mut seats = Seats::new();
    let leaving = |seats: &Seats| -> Vec<bool> {
        seats
            .roster
            .seats()
            .iter()
            .map(|seat| seat.leaving)
            .collect()
    };
    seats.take(drain(1)).unwrap();
    let slot = seats.roster.reserve(seats.now, 1, 1, &BTreeSet::new())[0];
    let fact = Fact::Reserved {
        slot,
        location: location(1),
    };
    seats.take(fact).unwrap();
    assert_eq!(leaving(&seats), [true, true, false, true]);
    seats.take(undrain(1)).unwrap();
    assert_eq!(leaving(&seats), [false; 4]);
}

#[test]
fn a_lost_node_loses_its_processes_and_its_seats() {
    let mut seats = Seats::new();
    seats.ready(process(0, 1)).unwrap();
    let fenced = seats.now + s(3);
    let fact = node_lost(1, fenced);
    let lost: Vec<_> = seats
        .take(fact.clone())
        .unwrap()
        .iter()
        .map(|lost| lost.process)
        .collect();
    assert_eq!(lost, [process(0, 1), process(1, 1)]);
    assert!(seats.roster.seats()[0].location.is_none());
    let unseen: Vec<_> = seats.roster.unseen(seats.now).collect();
    assert_eq!(
        unseen,
        [(process(0, 1), Some(fenced)), (process(1, 1), Some(fenced))]
    );
    assert_eq!(seats.roster.unseen(fenced).count(), 0);
    assert_eq!(seats.take(fact), Ok(vec![]));
}

#[test]
fn a_process_that_is_given_up_may_run_until_its_node_says_otherwise() {
    let mut seats = Seats::new();
    seats.ready(process(0, 1)).unwrap();
    let late = Loss::Late("late".to_owned());
    assert!(
        seats
            .roster
            .give_up(seats.now, process(0, 1), late.clone())
            .is_some()
    );
    assert!(
        seats
            .roster
            .give_up(seats.now, process(0, 1), late)
            .is_none()
    );
    assert_eq!(
        seats.roster.unseen(seats.now).collect::<Vec<_>>(),
        [(process(0, 1), None)]
    );
    // The next process of the seat runs already.
    seats.roster.boot(seats.now, Slot(0));
    assert!(seats.take(failed(process(0, 1))).is_err());
    assert_eq!(seats.roster.unseen(seats.now).count(), 0);
}

#[test]
fn news_of_an_older_process_is_ignored_and_reported() {
    let mut seats = Seats::new();
    seats.ready(process(0, 1)).unwrap();
    assert_eq!(seats.take(failed(process(0, 1))).unwrap().len(), 1);
    // Twice is no news.
    assert_eq!(seats.take(failed(process(0, 1))), Ok(vec![]));
    let why = seats.ready(process(0, 1)).unwrap_err().0;
    assert_eq!(why, "process 1 of slot 0 is ready, and was given up before");
    seats.roster.boot(seats.now, Slot(0));
    let before = seats.roster.seats().to_vec();
    let old = "news of process 1 of slot 0, and process 2 of slot 0 is the last one";
    assert_eq!(seats.ready(process(0, 1)).unwrap_err().0, old);
    assert_eq!(seats.take(failed(process(0, 1))).unwrap_err().0, old);
    assert!(seats.take(failed(process(9, 1))).is_err());
    let fact = Fact::Reserved {
        slot: Slot(0),
        location: location(1),
    };
    assert_eq!(
        seats.take(fact).unwrap_err().0,
        "slot 0 waits for no reservation"
    );
    assert!(
        seats
            .take(Fact::Refused {
                slot: Slot(9),
                why: "full".to_owned()
            })
            .is_err()
    );
    assert_eq!(seats.roster.seats(), before);
}
