//! Sizes and times of a run: the seed gives them.

use crate::random::Random;

/// Microseconds since the beginning of a run.
pub(crate) type Time = u64;

pub(crate) const MS: Time = 1000;
pub(crate) const SECOND: Time = 1000 * MS;

/// Faults happen before.
pub(crate) const FAULTS: Time = 20 * SECOND;
/// By then all jobs that can must be whole, and work.
pub(crate) const SERVE: Time = 110 * SECOND;
/// By then each job must be whole again after the loss of one worker, in a network without faults.
pub(crate) const AGAIN: Time = 130 * SECOND;
/// By then nothing is left of any job.
pub(crate) const QUIET: Time = 190 * SECOND;

/// What does not change in a run.
#[derive(Debug, Clone)]
pub(crate) struct Knobs {
    /// How often, in percent, something goes wrong: with hosts, and with messages.
    pub(crate) fault: u64,
    /// How often, in percent, something goes wrong with a process.
    pub(crate) mishap: u64,
    /// The nodes of the beginning, and those that may come.
    pub(crate) nodes: usize,
    /// Slots of each node.
    pub(crate) slots: Vec<u32>,
    pub(crate) lease: Time,
    pub(crate) heartbeat: Time,
    /// How long the head waits for an answer of a node.
    pub(crate) request: Time,
    /// How long a job may go on without driver and head.
    pub(crate) orphan: Time,
    /// The time that a worker takes for a step.
    pub(crate) step: Time,
    /// How long a rank waits in an operation.
    pub(crate) patience: Time,
}

impl Knobs {
    pub(crate) fn draw(random: &mut Random, nodes: u32, slots: u32) -> Self {
        let least = u64::from(nodes.min(2));
        let nodes = random.between(least, u64::from(nodes)) as usize;
        let lease = random.between(10, 30) * 100 * MS;
        Self {
            fault: random.pick(&[0, 2, 5, 15, 15]),
            mishap: random.pick(&[0, 0, 1, 5]),
            nodes,
            slots: (0..nodes)
                .map(|_| random.between(1, u64::from(slots)) as u32)
                .collect(),
            lease,
            heartbeat: lease / 4,
            request: random.between(2, 6) * SECOND,
            orphan: random.between(5, 40) * SECOND,
            step: random.between(2, 15) * 100 * MS,
            patience: random.between(8, 15) * SECOND,
        }
    }
}
