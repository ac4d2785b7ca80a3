//! Membership: which processes are the members of a job, with which ranks, from generation to generation.
//!
//! ```text
//!            facts                                      actions
//!   nodes, head, driver ──> Roster ──> Policy ──> Formation ──> nodes, driver
//!                        what is true   what to do   how it is carried out
//! ```
//!
//! - [`Roster`]: the seats of the job and what is true of each. It takes facts and has no opinion.
//! - [`decide`]: the policy, a pure function of roster, [`Limits`], [`Budget`] and the last generation.
//! - [`Formation`]: carries one [`Generation`] out. It is whole or it is given up, whichever message is lost.
//!
//! [`Membership`] ties them together. It has no clock, no randomness and no I/O: [`Membership::step`] takes the time and
//! [`Fact`]s, and gives the [`Action`]s to do.
//!
//! # The life of a change
//!
//! A member dies: [`Action::Revoke`] ends what the others wait for, and [`Action::Publish`] gives the survivors, spares and
//! whoever else is ready the next generation in the same step. They acknowledge, and it is [`Action::Active`].
//!
//! A node joins: [`Fact::Offered`] makes the job reserve seats and start processes. When they are ready, [`Action::Hold`]
//! asks the members to hold at their next commit. They say [`Fact::Holding`], and the next generation is published.
//!
//! # A group that is started anew
//!
//! In [`OnChange::Restart`](kolo_wire::OnChange::Restart) no process outlives its generation. A seat that a node holds is [`State::Held`] without a process;
//! [`Action::Publish`] starts one in the seat of each member, and a process is [`Fact::Ready`] when it runs. A loss, or room for more,
//! stops all processes at once ([`Action::Stop`]); when none is left the next generation is formed. Failures use up restarts,
//! and other changes none.
//!
//! # A group whose new processes are started with their ranks
//!
//! In [`OnChange::Horovod`](kolo_wire::OnChange::Horovod) survivors go on as in place, and a seat that a node holds is [`State::Held`]. [`Action::Plan`] names a generation
//! with new processes, which are started for it alone. When all of them are ready the members are asked to hold, and that generation is
//! published. A loss in between makes the plan void: its new processes are stopped, and others are planned for.
//!
//! # Invariants
//!
//! - G-2, G-3: a generation is active when all its members have taken it, and then no older one is whole any more.
//! - R-1: ranks are `0..n`. R-2: survivors keep their order, the longest-lived first.
//! - E-1: rank 0 has the last commit, as a member of all generations since then; or that commit outlives all members; or
//!   there is none yet.
//! - Numbers of generations, resets and incarnations only grow.
//! - A generation has at least [`Limits::min`] and at most [`Limits::max`] members.

mod action;
mod budget;
mod end;
mod fact;
mod filter;
mod formation;
mod generation;
mod limits;
mod machine;
mod order;
mod policy;
mod roster;
mod seat;
#[cfg(test)]
mod tests;
mod units;

pub use self::action::Action;
pub use self::budget::Budget;
pub use self::end::End;
pub use self::fact::Fact;
pub use self::formation::{Due, Formation, Outcome, REPEAT};
pub use self::generation::{Generation, Member};
pub use self::limits::{Limits, LimitsError, cooldown};
pub use self::machine::Membership;
pub use self::order::arrange;
pub use self::policy::{Choice, Decision, Purpose, decide};
pub use self::roster::{Departure, Fate, Roster, Stale};
pub use self::seat::{Addresses, Host, Incarnation, Location, Loss, Process, Seat, State};
