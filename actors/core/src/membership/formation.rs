//! A formation: one generation on its way to its members, all or nothing.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::{self, Rank};

use super::generation::Generation;
use super::roster::Fate;
use super::seat::Process;

/// The time after which a message that had no effect yet is sent again.
pub const REPEAT: Duration = Duration::from_secs(1);

/// How far a formation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Members have not answered yet.
    Waiting,
    /// All members have taken the generation, and the one before is over.
    Whole,
    /// A member is lost: the generation is given up.
    Broken,
}

/// What is to be done for a formation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Due {
    /// Nothing before that time.
    Nothing(Instant),
    /// Send the generation to these processes.
    Publish(Vec<Process>),
    /// The time is over for these processes: they are late.
    Late(Vec<Process>),
}

/// Carries one generation out. Messages may be lost, repeated and reordered: what counts is who has answered for this
/// number.
///
/// The generation is whole when all its members have taken it, and when the one before is over for certain (G-3): more of
/// its members have taken the new one than are there and have not.
#[derive(Debug, Clone)]
pub struct Formation {
    generation: Arc<Generation>,
    /// Members that have not taken it.
    missing: BTreeSet<Process>,
    /// Processes of the generation before that have not taken it and are there.
    old: BTreeSet<Process>,
    /// Processes of the generation before that have taken it.
    old_taken: usize,
    /// Members that are lost, and the reason for the first one.
    lost: Vec<Rank>,
    cause: Option<String>,
    repeat_at: Instant,
    deadline: Instant,
}

impl Formation {
    /// A formation that has sent nothing yet. `old` are the live members of the generation before.
    #[must_use]
    pub fn new(
        now: Instant,
        generation: Arc<Generation>,
        old: impl IntoIterator<Item = Process>,
        timeout: Duration,
    ) -> Self {
        let members = generation.members().iter();
        Self {
            missing: members.map(|member| member.process).collect(),
            old: old.into_iter().collect(),
            old_taken: 0,
            lost: Vec::new(),
            cause: None,
            repeat_at: now,
            deadline: now + timeout,
            generation,
        }
    }

    /// The generation.
    #[must_use]
    pub fn generation(&self) -> &Arc<Generation> {
        &self.generation
    }

    /// A process has taken a generation. Ignored if that is another one.
    pub fn taken(&mut self, generation: ids::Generation, process: Process) {
        if generation == self.generation.number() {
            self.missing.remove(&process);
            if self.old.remove(&process) {
                self.old_taken += 1;
            }
        }
    }

    /// All members have committed in a generation, so all of them have taken it. Ignored if that is another one.
    pub fn committed(&mut self, generation: ids::Generation) {
        for process in self.missing.clone() {
            self.taken(generation, process);
        }
    }

    /// A process is not there any more. A member that has returned from this generation had taken it.
    pub fn gone(&mut self, process: Process, fate: &Fate) {
        let why = match fate {
            Fate::Returned(generation) if *generation == self.generation.number() => {
                return self.taken(*generation, process);
            }
            Fate::Returned(generation) => format!("it has returned from generation {generation}"),
            Fate::Lost(loss) => loss.to_string(),
        };
        self.old.remove(&process);
        if let Some(member) = self.generation.member(process) {
            self.lost.push(member.rank);
            let rank = member.rank;
            self.cause
                .get_or_insert_with(|| format!("rank {rank} is lost: {why}"));
        }
    }

    /// How far the formation is.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        if !self.lost.is_empty() {
            Outcome::Broken
        } else if self.missing.is_empty()
            && (self.old.is_empty() || self.old_taken > self.old.len())
        {
            Outcome::Whole
        } else {
            Outcome::Waiting
        }
    }

    /// The ranks that are lost, and why the first one is.
    #[must_use]
    pub fn lost(&self) -> (&[Rank], &str) {
        (&self.lost, self.cause.as_deref().unwrap_or_default())
    }

    /// What is to be done now. Ask again after each answer that is not [`Due::Nothing`].
    pub fn due(&mut self, now: Instant) -> Due {
        if now >= self.deadline {
            let late = if self.missing.is_empty() {
                &self.old
            } else {
                &self.missing
            };
            let late = late.iter().copied().collect();
            self.deadline = now + REPEAT;
            return Due::Late(late);
        }
        if now >= self.repeat_at {
            self.repeat_at = now + REPEAT;
            return Due::Publish(self.missing.union(&self.old).copied().collect());
        }
        Due::Nothing(self.repeat_at.min(self.deadline))
    }
}
