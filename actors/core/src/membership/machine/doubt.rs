//! A generation in which a member can't go on, and nothing that is known explains it.

use std::time::{Duration, Instant};

use kolo_wire::ids;

use super::super::seat::{Loss, Process};
use super::{Action, Membership};

/// How long the active generation is kept after a member could not go on in it. The loss that is behind it is known by then, if
/// there is one: what a process says may overtake the word of another one's end.
const DOUBT: Duration = Duration::from_secs(1);

/// A generation in which a member can't go on.
#[derive(Debug, Clone)]
pub(super) struct Doubt {
    pub(super) generation: ids::Generation,
    pub(super) until: Instant,
    culprit: Option<Process>,
    pub(super) why: String,
}

impl Membership {
    /// A member can't go on. Others that say so later add nothing.
    pub(super) fn doubt(
        &mut self,
        now: Instant,
        generation: ids::Generation,
        culprit: Option<ids::Rank>,
        why: &str,
    ) {
        let active = self.active().filter(|active| active.number() == generation);
        if let (None, Some(active)) = (&self.doubt, active) {
            let members = active.members();
            let culprit = culprit.and_then(|rank| members.get(rank.index()));
            self.doubt = Some(Doubt {
                generation,
                until: now + DOUBT,
                culprit: culprit.map(|member| member.process),
                why: why.to_owned(),
            });
        }
    }

    /// Gives up the generation in which a member can't go on, if nothing has explained that meanwhile. The next one has the same
    /// members: those that stand still do not take it, and are late. A process that is blamed twice in a row takes generations and
    /// does no work.
    pub(super) fn resolve_doubt(&mut self, now: Instant) {
        let is_active = |doubt: &Doubt| {
            let active = self.active();
            active.is_some_and(|active| active.number() == doubt.generation)
        };
        if !self.doubt.as_ref().is_some_and(is_active) {
            self.doubt = None;
        }
        let Some(doubt) = self.doubt.take_if(|doubt| now >= doubt.until) else {
            return;
        };
        let Doubt {
            generation,
            culprit,
            why,
            ..
        } = doubt;
        let blamed = std::mem::replace(&mut self.blamed, culprit);
        self.budget.idle(now, &why);
        self.budget.broke(&why);
        self.actions.push(Action::Tell(format!(
            "generation {generation} is given up: {why}"
        )));
        self.actions.push(Action::Revoke {
            generation,
            lost: Vec::new(),
            cause: why.clone(),
        });
        if let Some(process) = culprit.filter(|_| blamed == culprit) {
            self.give_up(now, process, Loss::Late(why));
        }
    }
}
