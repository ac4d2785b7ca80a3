//! A generation in which a member can't go on, and nothing that is known explains it.

use std::time::{Duration, Instant};

use kolo_wire::ids;

use super::super::generation::Generation;
use super::super::seat::Process;

/// How long the active generation is kept after a member could not go on in it. The loss that is behind it is known by then, if
/// there is one: what a process says may overtake the word of another one's end.
const DOUBT: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
struct Doubt {
    generation: ids::Generation,
    until: Instant,
    culprit: Option<Process>,
    why: String,
}

/// What members say that can't go on.
#[derive(Debug, Clone, Default)]
pub(super) struct Doubts {
    open: Option<Doubt>,
    /// Blamed when the generation before was given up in doubt, and nothing was committed since.
    blamed: Option<Process>,
}

impl Doubts {
    /// A member of the active generation can't go on. Others that say so later add nothing.
    pub(super) fn add(
        &mut self,
        now: Instant,
        active: &Generation,
        culprit: Option<ids::Rank>,
        why: &str,
    ) {
        self.open.get_or_insert_with(|| {
            let culprit = culprit.and_then(|rank| active.members().get(rank.index()));
            Doubt {
                generation: active.number(),
                until: now + DOUBT,
                culprit: culprit.map(|member| member.process),
                why: why.to_owned(),
            }
        });
    }

    /// When the generation is given up.
    pub(super) fn until(&self) -> Option<Instant> {
        self.open.as_ref().map(|doubt| doubt.until)
    }

    /// All members hold in a generation. Why, if none of them could go on there.
    pub(super) fn hold(&mut self, generation: ids::Generation) -> Option<String> {
        let doubt = self.open.take()?;
        (doubt.generation == generation).then_some(doubt.why)
    }

    /// Something was committed.
    pub(super) fn forgive(&mut self) {
        self.blamed = None;
    }

    /// Why the active generation is given up now, if nothing has explained the doubt meanwhile. The next one has the same members:
    /// those that stand still do not take it, and are late. A process that is blamed twice in a row takes generations and does no
    /// work: that is given up.
    pub(super) fn due(
        &mut self,
        now: Instant,
        active: Option<&Generation>,
    ) -> Option<(String, Option<Process>)> {
        let active = active.map(Generation::number);
        self.open.take_if(|doubt| active != Some(doubt.generation));
        let Doubt { culprit, why, .. } = self.open.take_if(|doubt| now >= doubt.until)?;
        let blamed = std::mem::replace(&mut self.blamed, culprit);
        Some((why, culprit.filter(|_| blamed == culprit)))
    }
}
