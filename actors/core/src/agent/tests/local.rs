//! Agents that meet in one process.

use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Wake;

use super::*;

/// Counts how often it is woken.
#[derive(Debug, Default)]
struct Bell(AtomicU32);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

struct Guest {
    handler: LocalHandler,
    bell: Arc<Bell>,
    workers: u32,
}

impl Guest {
    fn of(place: &LocalRendezvous, workers: u32) -> Self {
        let (mut handler, bell) = (place.handler(), Arc::<Bell>::default());
        handler.wake_with(bell.clone().into());
        Self {
            handler,
            bell,
            workers,
        }
    }

    /// Asks for the next group: (round, group rank, group size, first rank, world size).
    fn meet(&mut self) -> Option<(u64, u32, u32, u32, u32)> {
        let Poll::Ready(group) = self.ask().map(Result::unwrap) else {
            return None;
        };
        let (ranks, size) = (group.workers[0], group.group_world_size);
        assert_eq!(group.workers.len(), self.workers as usize);
        let (first, world) = (ranks.global_rank, ranks.world_size);
        Some((group.round, group.group_rank, size, first, world))
    }

    fn refused(&mut self) -> RendezvousError {
        match self.ask() {
            Poll::Ready(Err(error)) => error,
            _ => panic!("the job is over"),
        }
    }

    fn ask(&mut self) -> Poll<Result<Rendezvous, RendezvousError>> {
        self.handler.next_rendezvous(&RoleInstance {
            role: "trainer".to_owned(),
            local_world_size: self.workers,
        })
    }

    fn was_woken(&self) -> bool {
        self.bell.0.swap(0, Ordering::SeqCst) > 0
    }
}

fn place(min: u32, max: u32) -> LocalRendezvous {
    LocalRendezvous::new(min..=max).unwrap()
}

/// Two guests that have met, with a worker each.
fn two(min: u32) -> [Guest; 2] {
    let place = place(min, 2);
    let [mut a, mut b] = [1; 2].map(|workers| Guest::of(&place, workers));
    a.meet();
    b.meet();
    a.meet();
    if min < 2 {
        b.meet();
    }
    [a, b]
}

#[test]
fn impossible_bounds_are_refused() {
    for (min, max) in [(0, 2), (3, 2)] {
        #[allow(clippy::reversed_empty_ranges)] // the case
        let refused = LocalRendezvous::new(min..=max).unwrap_err();
        assert_eq!(refused, SpecError::Nodes { min, max });
    }
}

#[test]
fn two_meet_and_a_third_is_spare_until_one_is_lost() {
    let place = place(2, 2);
    let [mut a, mut b, mut c] = [1, 2, 3].map(|workers| Guest::of(&place, workers));
    assert_eq!(a.meet(), None);
    assert_eq!(b.meet(), Some((1, 1, 2, 1, 3)));
    assert!(a.was_woken());
    assert_eq!(a.meet(), Some((1, 0, 2, 0, 3)));
    assert_eq!(c.meet(), None);
    assert_eq!(
        [&mut a, &mut b].map(|it| it.handler.num_nodes_waiting()),
        [0; 2]
    );
    b.was_woken();
    drop(a);
    assert!(b.was_woken(), "the loss of a member is told at once");
    assert_eq!(b.handler.num_nodes_waiting(), 1);
    assert_eq!(b.meet(), Some((2, 0, 2, 0, 5)));
    assert!(c.was_woken());
    assert_eq!(c.meet(), Some((2, 1, 2, 2, 5)));
    assert_eq!(c.handler.restarts(), 0, "losses use up no restart");
}

#[test]
fn who_comes_later_joins_until_members_have_done_their_work() {
    let place = place(1, 3);
    let [mut a, mut b, mut c] = [2; 3].map(|workers| Guest::of(&place, workers));
    assert_eq!(a.meet(), Some((1, 0, 1, 0, 2)));
    assert_eq!(b.meet(), None);
    assert!(a.was_woken());
    assert_eq!(a.handler.num_nodes_waiting(), 1);
    assert_eq!(a.meet(), Some((2, 0, 2, 0, 4)));
    assert_eq!(b.meet(), Some((2, 1, 2, 2, 4)));
    assert!(b.handler.exit_barrier().is_pending());
    assert_eq!(c.meet(), None);
    assert_eq!(a.handler.num_nodes_waiting(), 0, "nobody joins any more");
    assert_eq!(a.handler.exit_barrier(), Poll::Ready(Ok(Barrier::Done)));
    assert_eq!(b.handler.exit_barrier(), Poll::Ready(Ok(Barrier::Done)));
    assert!(c.was_woken());
    assert_eq!(c.refused(), RendezvousError::NotNeeded);
}

#[test]
fn failures_of_one_group_use_up_one_restart_of_the_job() {
    let [mut a, mut b] = two(2);
    assert!(a.handler.spend_restart(1));
    assert!(b.handler.spend_restart(1), "the same group");
    assert_eq!((a.handler.restarts(), b.handler.restarts()), (1, 1));
    assert_eq!(a.meet(), None);
    assert_eq!(b.meet(), Some((2, 1, 2, 1, 2)));
    assert_eq!(a.meet(), Some((2, 0, 2, 0, 2)));
    assert!(!b.handler.spend_restart(1), "the job has no other");
    let why = "boom".to_owned();
    b.handler.shutdown(Departure::Failed { why });
    assert_eq!(a.handler.num_nodes_waiting(), 1);
    assert_eq!(a.refused().to_string(), "the job is over: boom");
}

/// In torchelastic such an agent sits in its exit barrier and keeps the others from meeting.
#[test]
fn who_has_done_its_work_starts_anew_when_another_fails() {
    let [mut a, mut b] = two(2);
    assert!(a.handler.exit_barrier().is_pending());
    a.was_woken();
    assert!(b.handler.spend_restart(3));
    assert_eq!(b.meet(), None);
    assert!(a.was_woken());
    assert_eq!(a.handler.exit_barrier(), Poll::Ready(Ok(Barrier::Again)));
    assert_eq!(a.meet(), Some((2, 0, 2, 0, 2)));
    assert_eq!(b.meet(), Some((2, 1, 2, 1, 2)));
}

/// In torchelastic the rendezvous is closed for all when the first agent has waited long enough.
#[test]
fn who_leaves_after_success_disturbs_nobody() {
    let [mut a, mut b] = two(1);
    assert!(a.handler.exit_barrier().is_pending());
    a.handler.shutdown(Departure::Succeeded);
    assert_eq!(b.handler.num_nodes_waiting(), 0);
    assert_eq!(b.handler.exit_barrier(), Poll::Ready(Ok(Barrier::Done)));
}

#[test]
fn stores_are_of_one_group() {
    let place = place(1, 2);
    let mut a = Guest::of(&place, 1);
    let Poll::Ready(Ok(first)) = a.ask() else {
        panic!("one is enough");
    };
    a.was_woken();
    first.store.set("key", b"1".to_vec());
    assert!(a.was_woken());
    let Poll::Ready(Ok(second)) = a.ask() else {
        panic!("one is enough");
    };
    assert_eq!((first.round, second.round), (1, 2));
    assert_eq!(second.store.get("key"), None);
    assert_eq!(first.store.get("key"), Some(b"1".to_vec()));
}

/// The agent that was to say where rank 0 listens is lost: the others do not wait for that.
#[test]
fn a_group_without_its_first_agent_meets_again() {
    let place = place(1, 2);
    let mut lost = Guest::of(&place, 1);
    let spec = WorkerSpec::new("train", 1, place.handler());
    let mut core = AgentCore::new(Instant::now(), spec).unwrap();
    let now = Instant::now();
    lost.meet();
    let waits = |action| match action {
        Action::Wait { until } => until > now,
        action => panic!("{action:?}"),
    };
    waits(core.step(now, Event::Begin));
    lost.meet();
    assert!(waits(core.step(now, Event::Woken)));
    assert_eq!(core.group().group_rank, Some(1));
    drop(lost);
    assert!(!waits(core.step(now, Event::Woken)));
    let action = core.step(now, Event::Woken);
    assert!(matches!(action, Action::FindAddress), "{action:?}");
    let named = Event::Address(Ok(("here".to_owned(), 5)));
    assert!(matches!(core.step(now, named), Action::Start));
    assert_eq!(core.group().round, 3);
}

#[test]
fn too_few_are_waited_for_so_long() {
    let place = place(2, 2);
    let spec = WorkerSpec {
        rendezvous_timeout: Duration::from_secs(9),
        ..WorkerSpec::new("train", 1, place.handler())
    };
    let mut core = AgentCore::new(Instant::now(), spec).unwrap();
    let now = Instant::now();
    let by = now + Duration::from_secs(9);
    let action = core.step(now, Event::Begin);
    assert!(
        matches!(action, Action::Wait { until } if until == by),
        "{action:?}"
    );
    let Action::Finish(result) = core.step(by, Event::Woken) else {
        panic!("the time is over");
    };
    let why = "the group did not come together within 9s (rendezvous_timeout)";
    assert_eq!(result.unwrap_err().to_string(), why);
}
