//! What a rank gives up: the others hear of it first, because a program may end as soon as it does.

use std::sync::mpsc::Sender;
use std::task::Context;
use std::time::{Duration, Instant};

use super::book::Key;
use super::line::Line;
use super::loss::Loss;
use super::{Names, Pending};
use crate::cause::Cause;
use crate::engine::DEPARTURE;
use crate::error::CollectiveError;
use crate::group::{ELSEWHERE, Saying};

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
    /// These are given up here. They wait no more.
    FailWaiting(Vec<(Key, Pending)>, CollectiveError),
    /// Nothing works any more because of this rank: all that wait fail, and all to come.
    GiveUp(Loss),
    /// Who waits for it hears so.
    Tell(Sender<()>),
}

/// Something that the others are being told.
struct Leaving {
    then: Then,
    since: Instant,
}

#[derive(Default)]
pub(super) struct Farewell {
    leaving: Vec<Leaving>,
    /// What is being said in other groups, and until when that is waited for.
    elsewhere: Vec<(Saying, Instant)>,
}

impl Farewell {
    /// Does something when what is put on the lines after this has left this process.
    pub(super) fn add(&mut self, then: Then) {
        self.leaving.push(Leaving {
            then,
            since: Instant::now(),
        });
    }

    /// Nothing is given up before this has left, too, or can't.
    pub(super) fn say_elsewhere(&mut self, saying: Vec<Saying>) {
        let until = Instant::now() + ELSEWHERE;
        (self.elsewhere).extend(saying.into_iter().map(|saying| (saying, until)));
    }

    /// Writes, and does what is to be done. Returns when to look again.
    pub(super) fn see_off(
        &mut self,
        names: &Names,
        lines: &mut [Line],
        cx: &mut Context<'_>,
    ) -> Option<Instant> {
        if self.leaving.is_empty() && self.elsewhere.is_empty() {
            return None;
        }
        for line in lines.iter_mut() {
            // An end is found when the line is read.
            line.write(cx).ok();
        }
        let now = Instant::now();
        (self.elsewhere).retain_mut(|(has_left, until)| now < *until && !has_left());
        let is_said = self.elsewhere.is_empty();
        let have_left = (lines.iter()).all(|line| !line.is_unsaid() && !line.is_leaving());
        let has_left = |leaving: &mut Leaving| {
            // Other groups do not wait for each other.
            let waits = !is_said && !matches!(leaving.then, Then::Tell(_));
            if waits && now < leaving.since + ELSEWHERE {
                return false;
            }
            have_left || now >= leaving.since + DEPARTURE
        };
        let over: Vec<Leaving> = self.leaving.extract_if(.., has_left).collect();
        for leaving in over {
            match leaving.then {
                Then::Fail {
                    call,
                    names: which,
                    cause,
                } => names.fail_taken(call, which, &cause),
                Then::FailWaiting(waiting, error) => names.fail_waiting(waiting, &error),
                Then::GiveUp(loss) => names.give_up_for_good(&loss),
                // Who waited may have gone.
                Then::Tell(sender) => sender.send(()).unwrap_or_default(),
            }
        }
        let is_over = self.leaving.is_empty() && self.elsewhere.is_empty();
        (!is_over).then(|| now + TICK)
    }
}
