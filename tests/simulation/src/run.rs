//! Runs: their options, and what comes of them.

use std::fmt;
use std::ops::AddAssign;

use kolo_wire::JobState;

use crate::mutation::Mutation;

/// What holds for all seeds.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The most nodes of a cluster.
    pub nodes: u32,
    /// The most slots of a node.
    pub slots: u32,
    /// A bug to put in.
    pub mutation: Option<Mutation>,
}

impl Options {
    /// Small clusters without a bug: these find as much as large ones, and sooner.
    pub const SMALL: Self = Self {
        nodes: 6,
        slots: 2,
        mutation: None,
    };
}

/// What has happened in runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Generations that drivers were told of.
    pub generations: u64,
    /// Nodes that the head has lost.
    pub losses: u64,
    /// Registrations of nodes.
    pub joins: u64,
    /// Commits that all members of a generation have.
    pub commits: u64,
    /// Jobs that have succeeded, failed, and were stopped, as drivers were told.
    pub ends: [u64; 3],
    /// Events of the virtual clock.
    pub events: u64,
}

impl Counts {
    pub(crate) fn ended(&mut self, state: JobState) {
        let place = match state {
            JobState::Succeeded => 0,
            JobState::Failed => 1,
            _ => 2,
        };
        self.ends[place] += 1;
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.generations += other.generations;
        self.losses += other.losses;
        self.joins += other.joins;
        self.commits += other.commits;
        for (end, more) in self.ends.iter_mut().zip(other.ends) {
            *end += more;
        }
        self.events += other.events;
    }
}

/// An invariant that does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Its id.
    pub invariant: &'static str,
    /// What has happened.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} does not hold: {}", self.invariant, self.text)
    }
}

/// What came of one run.
#[derive(Debug)]
pub struct Outcome {
    /// What has happened.
    pub counts: Counts,
    /// The first invariant that did not hold.
    pub violation: Option<Violation>,
    /// The same for the same seed and options. Without a trace it covers the times alone.
    pub hash: u64,
    /// The trace, if one was asked for.
    pub lines: Vec<String>,
}
