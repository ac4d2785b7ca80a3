//! How long things take or may take that are not between two machines' wires: one table, with the reasons.

use std::time::Duration;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

// Limits.

/// How long an operation may take, if nothing else is set: longer than a rank loads data or saves a state.
pub(crate) const TIMEOUT: Duration = ms(60_000);
/// Longer timeouts count as this one: clocks end somewhere.
pub(crate) const FOREVER: Duration = ms(10 * 365 * 24 * 3_600_000);
/// A wait is reported after this time, if nothing else is set.
pub(crate) const STALL: Duration = ms(60_000);

// While a rank waits in an operation, or for others to start a name.

/// A rank that hears nothing for so long says what it asks for. Nearly all operations are over by then.
pub(crate) const ASK: Duration = ms(100);
/// After so long it asks again, and after twice as long once more: what the others do may be something else by
/// then. (Not just before the deadline, which may be that of the others, too: then they do nothing any more.)
pub(crate) const REPEAT: Duration = ms(1_000);
/// Before a report, others have so long to say what they know of the ranks that did not come.
pub(crate) const COLLECT: Duration = ms(300);
/// A rank that waits has a turn so often at least ...
pub(crate) const TURN: Duration = ms(1_000);
/// ... and of the time between two of them so much counts: a rank that was stopped, maybe with all others, comes back to ranks
/// that are not late because of that.
pub(crate) const MOST_OF_TURN: Duration = ms(2_000);
/// Where nobody wakes a rank that waits in shared memory it looks so often.
pub(crate) const LOOK: Duration = ms(1);

// At the deadline.

/// Ranks that say nothing for so long after the question are late ...
pub(crate) const ANSWER: Duration = ms(400);
/// ... or for so long, if the deadline was far away: a loaded host is not taken for a late rank.
pub(crate) const LONGEST_ANSWER: Duration = ms(2_000);

// When a rank leaves, or its link ends.

/// Who leaves an operation in shared memory says why on its link, which is slower than flags.
pub(crate) const WORD: Duration = ms(200);
/// The word on a lost rank is awaited for so long at most, whatever the connector says.
pub(crate) const LONGEST_WORD: Duration = ms(3_600_000);
/// The end of a link for names is a suspicion for so long, whether somebody watches the ranks or not: a member that is done may go.
pub(crate) const PATIENCE: Duration = ms(1_000);
/// A link for names is not asked for again before the one that broke was so old: a network that cuts every link gets one in this
/// time.
pub(crate) const LIVED: Duration = ms(1_000);

// Between operations.

/// A rank that has ended an operation so long ago looks who waits for it.
pub(crate) const IDLE: Duration = ms(1_000);
/// What a failed operation leaves to be said waits for peers that do not read for so long at least, until the listener sees to it.
pub(crate) const ATTENDED: Duration = ms(2_000);
/// A request for a link that was made before the link was there comes in this time.
pub(crate) const NEW_LINK: Duration = ms(1_000);

// Names.

/// Ranks wait for so long after an operation's deadline for the coordinator's word on it.
pub(crate) const SILENT: Duration = ms(2_000);
/// A failed operation ends on this rank when the others have been told, or after so long: the program may end then.
pub(crate) const TOLD: Duration = ms(100);
/// What was decided last is said for so long when the communicator is gone.
pub(crate) const REST: Duration = ms(1_000);
/// The coordinator looks at all entries to ask for those that are late, of which there may be thousands: at most once in this time.
pub(crate) const PAUSE: Duration = ms(50);
