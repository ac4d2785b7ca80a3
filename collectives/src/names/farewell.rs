//! What a rank gives up: the others hear of it first, because a program may end as soon as it does.

use std::sync::mpsc::Sender;
use std::task::Context;
use std::time::{Duration, Instant};

use super::line::Line;
use super::loss::Loss;
use super::{Names, Pending};
use crate::cause::Cause;
use crate::lane::{DEPARTURE, Departure};

/// So often it is looked whether the others can hear of it.
const TICK: Duration = Duration::from_millis(1);

/// What is done when the others can hear of it.
pub(super) enum Then {
    /// These are given up here, too. They wait no more: one that is started meanwhile is another one.
    Fail {
        call: u64,
        names: Vec<(String, Pending)>,
        cause: Cause,
    },
    /// Nothing works any more because of this rank: all that wait fail, and all to come.
    GiveUp(Loss),
    /// Who waits for it hears so.
    Tell(Sender<()>),
}

/// Something that the others are being told.
struct Leaving {
    then: Then,
    since: Instant,
    /// By line.
    departures: Vec<Departure>,
}

#[derive(Default)]
pub(super) struct Farewell(Vec<Leaving>);

impl Farewell {
    /// Does something when what is put on the lines after this has left this process.
    pub(super) fn add(&mut self, lines: &[Line], then: Then) {
        let departures = lines.iter().map(|line| Departure::new(line.departures()));
        self.0.push(Leaving {
            then,
            since: Instant::now(),
            departures: departures.collect(),
        });
    }

    /// Writes, and does what is to be done. Returns when to look again.
    pub(super) fn see_off(
        &mut self,
        names: &Names,
        lines: &mut [Line],
        cx: &mut Context<'_>,
    ) -> Option<Instant> {
        if self.0.is_empty() {
            return None;
        }
        for line in lines.iter_mut() {
            // An end is found when the line is read.
            line.write(cx).ok();
        }
        let now = Instant::now();
        let has_left = |leaving: &mut Leaving| {
            let mut all = true;
            for (line, departure) in lines.iter().zip(&mut leaving.departures) {
                all &= departure.is_over(line.departures()) && !line.is_unsaid();
            }
            all || now >= leaving.since + DEPARTURE
        };
        let over: Vec<Leaving> = self.0.extract_if(.., has_left).collect();
        for leaving in over {
            match leaving.then {
                Then::Fail {
                    call,
                    names: which,
                    cause,
                } => names.fail_taken(call, which, &cause),
                Then::GiveUp(loss) => names.give_up_for_good(&loss),
                // Who waited may have gone.
                Then::Tell(sender) => sender.send(()).unwrap_or_default(),
            }
        }
        (!self.0.is_empty()).then(|| now + TICK)
    }
}
