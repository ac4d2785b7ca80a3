//! The rules of the words that ranks share: who may write what, when. Pure: over any kind of atomic words, so that they can
//! be explored (`tests/shared_rules.rs`).
//!
//! Each rank has, for operations of even and odd number, a *flag* and a word *done*; it alone writes them. The flag holds the
//! [ticket](super::ticket) of the operation whose data the rank has given, with [`GONE`] if it gave the operation up. `done` is
//! the ticket of the last operation of that parity that the rank gave data for and in which it touches others' data no more.
//!
//! A rank reads others' data of an operation only after it has set its own flag and seen theirs, all with the same
//! ticket. So before it writes its own data again, the owner makes sure that it finds no rank that [holds](holds) the
//! operation for which it gave them last. If that operation failed here, the owner first marks it as gone.
//!
//! Why this is enough. Flags are written and read in one total order (`SeqCst`). Say that A gave data in an operation and
//! now wants to write them again, and that B reads them: B saw A's flag with the ticket, after it had set its own.
//!
//! * If the operation went well at A, then A saw B's flag with the ticket. So A's look for holders comes after B's flag was
//!   set, and finds it, until B is done or in a later operation.
//! * If A gave up, its mark precedes its look. B saw the flag without the mark, so B's look precedes the mark; B's own
//!   flag precedes that; so A's look finds it.
//!
//! A rank that gives an operation up before it has given anything leaves flag and `done` as they are: they still say
//! that it is done with the one before. Two ranks that only waited for a third would hold each other otherwise, for good.
//!
//! A rank that dies in the middle is a holder for ever. Then the owner's operation ends by the news of the death, and no
//! later one begins.
//!
//! Sleeping and coming to share memory have the same form: who waits says so and looks then, who has news gives
//! them and looks for waiters then. In one total order one of the two sees the other.

use std::sync::atomic::Ordering;

/// Set in a flag when its rank has given the operation up.
pub(crate) const GONE: u64 = 1;

/// A word that several ranks see.
pub(crate) trait Word {
    fn get(&self) -> u64;
    /// Also orders what was written before, for who reads the value.
    fn set(&self, value: u64);
    /// As [`Word::set`], but not in the total order: what is read after may be read before.
    fn put(&self, value: u64);
    /// Another value than any that was seen, in the total order.
    fn advance(&self);
}

impl Word for std::sync::atomic::AtomicU64 {
    fn get(&self) -> u64 {
        self.load(Ordering::SeqCst)
    }

    fn set(&self, value: u64) {
        // A store would do; on x86-64 it is the same instruction.
        self.swap(value, Ordering::SeqCst);
    }

    fn put(&self, value: u64) {
        self.store(value, Ordering::Release);
    }

    fn advance(&self) {
        self.fetch_add(1, Ordering::SeqCst);
    }
}

/// For what a rank sleeps on: the system waits for words of 32 bits.
impl Word for std::sync::atomic::AtomicU32 {
    fn get(&self) -> u64 {
        self.load(Ordering::SeqCst).into()
    }

    fn set(&self, value: u64) {
        self.swap(value as u32, Ordering::SeqCst);
    }

    fn put(&self, value: u64) {
        self.store(value as u32, Ordering::Release);
    }

    fn advance(&self) {
        self.fetch_add(1, Ordering::SeqCst);
    }
}

/// Whether a rank with this flag and this `done` may still read others' data of the operation with this ticket.
pub(crate) fn holds<W: Word>(flag: &W, done: &W, ticket: u64) -> bool {
    flag.get() == ticket && done.get() != ticket
}

/// Gives the data of an operation, which are in their place.
pub(crate) fn give<W: Word>(flag: &W, ticket: u64) {
    flag.set(ticket);
}

/// Gives an operation up. Others that come later find no data.
pub(crate) fn give_up<W: Word>(flag: &W, ticket: u64) {
    flag.set(ticket | GONE);
}

/// Whether a rank has given the operation up.
pub(crate) fn is_gone<W: Word>(flag: &W, ticket: u64) -> bool {
    flag.get() == ticket | GONE
}

/// Whether a rank has given its data for the operation.
pub(crate) fn has_given<W: Word>(flag: &W, ticket: u64) -> bool {
    flag.get() == ticket
}

/// Says that this rank has combined its slice and touches others' data no more (but to copy slices).
pub(crate) fn slice<W: Word>(second: &W, ticket: u64) {
    second.set(ticket);
}

/// Takes that back, for the rank gives the operation up. From here on its data may change that others read where they are.
pub(crate) fn take_back<W: Word>(second: &W, ticket: u64) {
    second.set(ticket | GONE);
}

/// Whether all ranks have combined their slices, of data that were right.
///
/// Looked at twice. When the first look has seen all, nobody reads data any more; what the second one sees shows that nobody had
/// taken its word back before that, so that nobody's data had changed. With one look alone, a rank that is seen first may
/// take it back and change its data while one that is seen later still reads them.
pub(crate) fn all_have_sliced<'a, W: Word + 'a>(
    seconds: impl Iterator<Item = &'a W> + Clone,
    ticket: u64,
) -> bool {
    let all = || seconds.clone().all(|second| second.get() == ticket);
    all() && all()
}

/// Says that this rank, which gave data for the operation, touches others' no more.
pub(crate) fn leave<W: Word>(done: &W, ticket: u64) {
    done.put(ticket);
}

/// From here on, who has news [rings](ring). Returns the bell's value, which to sleep on after one more look.
pub(crate) fn listen<W: Word>(sleeping: &W, bell: &W) -> u64 {
    sleeping.set(1);
    bell.get()
}

/// Nobody need ring any more.
pub(crate) fn ignore<W: Word>(sleeping: &W) {
    sleeping.put(0);
}

/// Wakes a rank that sleeps, or is about to, after news were given to it.
pub(crate) fn ring<W: Word>(sleeping: &W, bell: &W, wake: impl FnOnce()) {
    if sleeping.get() != 0 {
        ring_anyway(bell, wake);
    }
}

pub(crate) fn ring_anyway<W: Word>(bell: &W, wake: impl FnOnce()) {
    bell.advance();
    wake();
}

/// Whether so many pieces can be given and the next one has a place, for this reader, which has `taken` some.
pub(crate) fn may_give<W: Word>(taken: &W, given: usize, places: usize) -> bool {
    (given as u64) < taken.get().saturating_add(places as u64)
}

/// Whether a rank that has `given` some pieces has given the one after so many.
pub(crate) fn may_take<W: Word>(given: &W, taken: usize) -> bool {
    given.get() > taken as u64
}

/// Whether a rank that has `ended` so many rounds lets others begin this one: it has ended all before.
pub(crate) fn may_begin<W: Word>(ended: &W, round: usize) -> bool {
    ended.get() >= round as u64
}

const ATTACHED: u64 = 1;

/// This rank has the memory. Returns whether all have it now: whoever of them is last finds that.
pub(crate) fn attach<'a, W: Word + 'a>(own: &W, all: impl IntoIterator<Item = &'a W>) -> bool {
    own.set(ATTACHED);
    all.into_iter().all(is_attached)
}

pub(crate) fn is_attached<W: Word>(word: &W) -> bool {
    word.get() == ATTACHED
}
