//! Waiting for peers of the same host: spin, then give the processor away, then sleep on a futex.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::map::Map;
use super::rules;
use crate::blocking::processors;

/// How long to look before sleeping. A wake-up costs about 50 us where processors halt when idle, so that a wait that is
/// expected to be short is better not slept through. But who spins takes the processor from who is waited for, if there
/// are more ranks than processors, or the system has put two ranks on one.
#[derive(Debug)]
pub(crate) struct Patience {
    /// Looks without a pause between them, a few nanoseconds each: a pause takes as long as news from another processor.
    eager: AtomicU32,
    /// Looks with a pause between them.
    spins: AtomicU32,
    /// There may be a processor for each rank.
    may_spin: bool,
    /// Waits in which the processor is not given away, because somebody kept it for long ...
    wary: AtomicU32,
    /// ... and how many there were of them the last time.
    was_wary: AtomicU32,
}

const MOST_EAGER: u32 = 2000;
const MOST_SPINS: u32 = 4000;
const LEAST: u32 = 32;
/// Looks that give the processor away.
const YIELDS: u32 = 2000;
/// After so many of these looks a thread also looks for other news. At each of them that would cost short operations a fortieth of
/// their time.
const OTHER_NEWS: u32 = 16;
/// A thread that gets the processor back later than this looks for other news at once.
const LATE: Duration = Duration::from_micros(50);
/// Who comes as soon as it gets the processor was waiting for it.
const AT_ONCE: u32 = 4;
/// Who keeps a processor for so long that it was given is busy with something else, as a rule until its time slice is over. Who
/// sleeps gets the processor back as soon as it is woken.
const SLICE: Duration = Duration::from_millis(2);
/// So many waits after that are slept through, and twice as many when it is so again.
const WARY: u32 = 16;
const MOST_WARY: u32 = 1024;

impl Patience {
    /// For so many ranks on this host.
    pub(crate) fn of(ranks: usize) -> Self {
        let may_spin = ranks <= processors();
        let (eager, spins) = if may_spin {
            (MOST_EAGER, MOST_SPINS)
        } else {
            (0, 0)
        };
        Self {
            eager: AtomicU32::new(eager),
            spins: AtomicU32::new(spins),
            may_spin,
            wary: AtomicU32::new(0),
            was_wary: AtomicU32::new(0),
        }
    }

    /// Returns whether it came to be while this thread was looking. The looks end early if there is other news, for they may take
    /// milliseconds where ranks share a processor.
    #[inline]
    pub(crate) fn look(
        &self,
        is_there: impl FnMut() -> bool,
        is_other_news: impl FnMut() -> bool,
    ) -> bool {
        self.look_and(is_there, is_other_news, || {
            let given = Instant::now();
            std::thread::yield_now();
            given.elapsed()
        })
    }

    /// `give_away` gives the processor away, and returns for how long.
    #[inline]
    fn look_and(
        &self,
        mut is_there: impl FnMut() -> bool,
        is_other_news: impl FnMut() -> bool,
        give_away: impl FnMut() -> Duration,
    ) -> bool {
        for _ in 0..self.eager.load(Ordering::Relaxed) {
            if is_there() {
                return true;
            }
        }
        self.look_longer(is_there, is_other_news, give_away)
    }

    #[cold]
    fn look_longer(
        &self,
        mut is_there: impl FnMut() -> bool,
        mut is_other_news: impl FnMut() -> bool,
        mut give_away: impl FnMut() -> Duration,
    ) -> bool {
        let change = |word: &AtomicU32, to: u32, most: u32| {
            word.store(to.clamp(LEAST, most), Ordering::Relaxed);
        };
        let (eager, spins) = (
            self.eager.load(Ordering::Relaxed),
            self.spins.load(Ordering::Relaxed),
        );
        for _ in 0..spins {
            if is_there() {
                // It runs beside this thread: it is worth while.
                change(&self.eager, eager * 2, MOST_EAGER);
                change(&self.spins, spins * 2, MOST_SPINS);
                return true;
            }
            std::hint::spin_loop();
        }
        let wary = self.wary.load(Ordering::Relaxed);
        if wary > 0 {
            self.wary.store(wary - 1, Ordering::Relaxed);
            return is_there();
        }
        for yields in 0..YIELDS {
            if is_there() {
                if self.may_spin {
                    change(&self.spins, spins / 2, MOST_SPINS);
                    if yields <= AT_ONCE {
                        change(&self.eager, eager / 2, MOST_EAGER);
                    }
                }
                self.was_wary.store(0, Ordering::Relaxed);
                return true;
            }
            let given = give_away();
            if given > SLICE {
                let wary = self.was_wary.load(Ordering::Relaxed).saturating_mul(2);
                let wary = wary.clamp(WARY, MOST_WARY);
                self.was_wary.store(wary, Ordering::Relaxed);
                self.wary.store(wary, Ordering::Relaxed);
                break;
            }
            if (given > LATE || yields % OTHER_NEWS == OTHER_NEWS - 1) && is_other_news() {
                break;
            }
        }
        is_there()
    }
}

/// Tells ranks that sleep that there is something new.
pub(crate) fn ring(map: &Map, rank: usize) {
    let bell = map.bell(rank);
    rules::ring(map.sleeping(rank), bell, || wake(bell));
}

fn ring_anyway(bell: &AtomicU32) {
    rules::ring_anyway(bell, || wake(bell));
}

fn wake(bell: &AtomicU32) {
    // It can't fail on memory that is mapped.
    let woken = futex::wake(bell, futex::Flags::empty(), i32::MAX.cast_unsigned());
    debug_assert!(woken.is_ok(), "{woken:?}");
}

/// Whatever is lost (a faulty peer may write the bell), it is looked again after this time.
const LONGEST: Duration = Duration::from_secs(1);

/// Sleeps until the bell has another value than `seen`, or for so long.
fn sleep(bell: &AtomicU32, seen: u32, left: Duration) {
    let timeout = futex::Timespec {
        tv_sec: left.as_secs().cast_signed(),
        tv_nsec: left.subsec_nanos().into(),
    };
    match futex::wait(bell, futex::Flags::empty(), seen, Some(&timeout)) {
        Ok(()) => {}
        // Too late, interrupted, or another value: all the same to who looks again.
        Err(error) => tracing::trace!(%error, "a sleep on shared memory ended"),
    }
}

/// The bell of one rank, as something that wakes a thread that [sleeps](Waits::sleep), or a task that left its waker.
struct Bell {
    map: Arc<Map>,
    rank: usize,
    waiting: Mutex<Option<Waker>>,
    stop: AtomicBool,
}

impl std::fmt::Debug for Bell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bell")
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        ring_anyway(self.map.bell(self.rank));
    }
}

impl Bell {
    /// From here on, who has news rings. Returns what to wait on, after a look at what there is.
    fn listen(&self) -> u32 {
        rules::listen(self.map.sleeping(self.rank), self.map.bell(self.rank)) as u32
    }

    fn set_waiting(&self, waker: Option<&Waker>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        match (&mut *waiting, waker) {
            (Some(old), Some(new)) => old.clone_from(new),
            (waiting, new) => *waiting = new.cloned(),
        }
    }
}

/// Tasks look by themselves again at their deadlines, so that the thread that waits for them need not look often.
const IDLE: Duration = Duration::from_secs(60);

/// A thread that waits for the bell in the name of tasks, which can't.
#[derive(Debug)]
struct Porter {
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

impl Porter {
    /// Wakes this task when the bell rings. Call it before the last look at what there is.
    fn listen(&mut self, waker: &Waker) -> std::io::Result<()> {
        if self.thread.is_none() {
            let bell = Arc::clone(&self.bell);
            let thread = std::thread::Builder::new()
                .name("kolo-bell".to_owned())
                // It runs the executor's code that wakes tasks.
                .stack_size(256 << 10)
                .spawn(move || {
                    while !bell.stop.load(Ordering::SeqCst) {
                        let seen = bell.map.bell(bell.rank).load(Ordering::SeqCst);
                        let waker = bell
                            .waiting
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .take();
                        if let Some(waker) = waker {
                            waker.wake();
                        }
                        if !bell.stop.load(Ordering::SeqCst) {
                            sleep(bell.map.bell(bell.rank), seen, IDLE);
                        }
                    }
                })?;
            self.thread = Some(thread);
        }
        self.bell.set_waiting(Some(waker));
        self.bell.listen();
        Ok(())
    }
}

impl Drop for Porter {
    fn drop(&mut self) {
        self.bell.stop.store(true, Ordering::SeqCst);
        self.bell.set_waiting(None);
        if let Some(thread) = self.thread.take() {
            ring_anyway(self.bell.map.bell(self.bell.rank));
            // It ends by itself; if it is on its way to sleep, the bell has another value than it saw.
            drop(thread);
        }
    }
}

/// How a rank waits for others.
#[derive(Debug)]
pub(crate) struct Waits {
    pub(crate) patience: Patience,
    bell: Arc<Bell>,
    porter: Porter,
    heard: u32,
}

impl Waits {
    pub(crate) fn new(map: Arc<Map>, me: usize) -> Self {
        let patience = Patience::of(map.world());
        let bell = Arc::new(Bell {
            map,
            rank: me,
            waiting: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        Self {
            patience,
            porter: Porter {
                bell: Arc::clone(&bell),
                thread: None,
            },
            bell,
            heard: 0,
        }
    }

    /// What wakes a thread in [`Waits::sleep`].
    pub(crate) fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.bell))
    }

    /// From here on, who has news rings: for this thread, if it is `blocking` and [sleeps](Waits::sleep), or for the task. Look once more.
    pub(crate) fn listen(&mut self, blocking: bool, task: &Waker) {
        if blocking {
            self.heard = self.bell.listen();
        } else if let Err(error) = self.porter.listen(task) {
            // The task looks again now and then.
            tracing::warn!(%error, "no thread to wait for shared memory");
        }
    }

    /// Nobody need ring any more.
    pub(crate) fn ignore(&self) {
        rules::ignore(self.bell.map.sleeping(self.bell.rank));
    }

    /// Sleeps until it rings, until `at`, or a little less.
    pub(crate) fn sleep(&self, at: Instant) {
        let left = at.saturating_duration_since(Instant::now()).min(LONGEST);
        sleep(self.bell.map.bell(self.bell.rank), self.heard, left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks until it is there, at the look with this number.
    fn look(patience: &Patience, at: u32) -> [u32; 2] {
        let mut looks = 0;
        let is_there = || {
            looks += 1;
            looks >= at
        };
        let came = patience.look_and(is_there, || false, || Duration::ZERO);
        assert!(came && looks == at);
        [&patience.eager, &patience.spins].map(|word| word.load(Ordering::Relaxed))
    }

    #[test]
    fn who_gets_the_processor_back_late_sleeps_and_tries_again_rarely() {
        let patience = Patience::of(processors() + 1);
        let mut given = 0;
        // Somebody else computes; what is awaited never comes.
        for _ in 0..1000 {
            let busy = || {
                given += 1;
                SLICE * 4
            };
            assert!(!patience.look_longer(|| false, || false, busy));
        }
        assert_eq!(given, 6, "after 16, 32, 64, 128 and 256 more");
        // Then nobody does. A wait is looked through, and the next strangers are met as the first ones were.
        let looked = |patience: &Patience| {
            let mut looks = 0;
            let is_there = || {
                looks += 1;
                looks == 5
            };
            patience.look_longer(is_there, || false, || Duration::ZERO)
        };
        let slept = (0..2000).take_while(|_| !looked(&patience)).count();
        assert!(slept < 1024, "{slept}");
        assert!(looked(&patience));
        assert!(!patience.look_longer(|| false, || false, || SLICE * 4));
        assert_eq!(patience.wary.load(Ordering::Relaxed), WARY);
    }

    #[test]
    fn who_shares_a_processor_gives_it_away_at_once() {
        let patience = Patience::of(processors() + 1);
        assert_eq!(look(&patience, 1), [0, 0]);
        assert_eq!(look(&patience, 50), [0, 0]);
    }

    #[test]
    fn who_hears_other_news_looks_once_more() {
        for (given, expected) in [(Duration::ZERO, OTHER_NEWS + 1), (LATE * 2, 2)] {
            let patience = Patience::of(processors() + 1);
            let mut looks = 0;
            let never = || {
                looks += 1;
                false
            };
            assert!(!patience.look_and(never, || true, || given));
            assert_eq!(looks, expected);
        }
    }

    #[test]
    fn looks_last_as_long_as_they_are_worth_while() {
        let patience = Patience::of(1);
        for word in [&patience.eager, &patience.spins] {
            word.store(100, Ordering::Relaxed);
        }
        assert_eq!(look(&patience, 100), [100, 100]);
        // It came during the looks with pauses, ...
        assert_eq!(look(&patience, 150), [200, 200]);
        // ... as soon as the processor was given away, ...
        assert_eq!(look(&patience, 402), [100, 100]);
        // ... and a while after that.
        assert_eq!(look(&patience, 300), [100, 50]);
        for _ in 0..10 {
            look(&patience, 1000);
        }
        assert_eq!(look(&patience, 1000), [100, LEAST]);
    }
}
