//! A place in the memory of this process where agents meet.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use super::rendezvous::{
    Barrier, Departure, MapStore, Rendezvous, RendezvousError, RendezvousHandler, Store,
};
use super::roles::{AssignedRanks, RoleInstance, assign_worker_ranks, fits};
use super::spec::SpecError;

/// A place where agents of one process meet, each with a handler of its own. For agents in threads, without daemons.
///
/// A group comes together as soon as the fewest agents are there and none of the last group runs on. Agents that come later join
/// while there are fewer than the most. Agents that stay keep their order.
///
/// ```
/// use std::task::{Poll, Waker};
///
/// use kolo_core::agent::{LocalRendezvous, RendezvousHandler, RoleInstance};
///
/// let place = LocalRendezvous::new(2..=2).expect("bounds in order");
/// let (mut first, mut second) = (place.handler(), place.handler());
/// let trainers = RoleInstance { role: "trainer".to_owned(), local_world_size: 3 };
/// assert!(first.next_rendezvous(&trainers).is_pending());
/// let Poll::Ready(Ok(group)) = second.next_rendezvous(&trainers) else {
///     panic!("two are enough");
/// };
/// assert_eq!((group.group_rank, group.workers[0].global_rank), (1, 3));
/// ```
#[derive(Debug, Clone)]
pub struct LocalRendezvous {
    hall: Arc<Mutex<Hall>>,
}

/// A [`LocalRendezvous`] in the hands of one agent. An agent that is dropped has left.
#[derive(Debug)]
pub struct LocalHandler {
    hall: Arc<Mutex<Hall>>,
    id: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Asks for nothing yet.
    Outside,
    /// Waits for the next group.
    Waiting,
    /// Has a place in the present group, and knows it or not.
    In { told: bool },
    /// In the present group, and its workers have succeeded.
    Finished,
}

#[derive(Debug)]
struct Visitor {
    instance: Option<RoleInstance>,
    waker: Waker,
    place: Place,
}

#[derive(Debug)]
struct Hall {
    min: usize,
    max: usize,
    count: u64,
    visitors: BTreeMap<u64, Visitor>,
    round: u64,
    /// The present group, by group rank.
    group: Vec<u64>,
    ranks: Vec<AssignedRanks>,
    /// Members of the present group that have left, their workers having succeeded.
    succeeded: Vec<u64>,
    store: Arc<MapStore>,
    restarts: u32,
    /// The last group whose failures have used up a restart.
    paid: u64,
    over: Option<RendezvousError>,
}

impl LocalRendezvous {
    /// A place for groups of so many agents.
    ///
    /// # Errors
    ///
    /// [`SpecError::Nodes`] if there can be no such group.
    pub fn new(nodes: RangeInclusive<u32>) -> Result<Self, SpecError> {
        let (min, max) = (*nodes.start(), *nodes.end());
        if min == 0 || max < min {
            return Err(SpecError::Nodes { min, max });
        }
        let hall = Hall {
            min: min as usize,
            max: max as usize,
            count: 0,
            visitors: BTreeMap::new(),
            round: 0,
            group: Vec::new(),
            ranks: Vec::new(),
            succeeded: Vec::new(),
            store: Arc::default(),
            restarts: 0,
            paid: 0,
            over: None,
        };
        let hall = Arc::new(Mutex::new(hall));
        Ok(Self { hall })
    }

    /// A handler for one more agent.
    #[must_use]
    pub fn handler(&self) -> LocalHandler {
        let hall = self.hall.clone();
        let mut open = lock(&hall);
        open.count += 1;
        let id = open.count;
        let visitor = Visitor {
            instance: None,
            waker: Waker::noop().clone(),
            place: Place::Outside,
        };
        open.visitors.insert(id, visitor);
        drop(open);
        LocalHandler { hall, id }
    }
}

fn lock(hall: &Mutex<Hall>) -> MutexGuard<'_, Hall> {
    // No code that holds the lock can leave the hall half changed.
    hall.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hall {
    fn wake_all(&self) {
        for visitor in self.visitors.values() {
            visitor.waker.wake_by_ref();
        }
    }

    fn place(&self, id: u64) -> Option<Place> {
        self.visitors.get(&id).map(|visitor| visitor.place)
    }

    fn waiting(&self) -> impl Iterator<Item = u64> {
        let waiting = self.visitors.iter();
        let waiting = waiting.filter(|(_, visitor)| visitor.place == Place::Waiting);
        waiting.map(|(id, _)| *id)
    }

    fn is_staying(&self, id: u64) -> bool {
        matches!(self.place(id), Some(Place::In { .. } | Place::Finished))
    }

    /// Members of the present group that are lost, or wait for the next one.
    fn broken(&self) -> usize {
        let members = self.group.iter();
        members
            .filter(|id| !self.is_staying(**id) && !self.succeeded.contains(id))
            .count()
    }

    /// Why this group is to end: members that are lost or failed, and agents that may join.
    fn changes(&self) -> usize {
        let broken = self.broken();
        let done = |id: &&u64| self.place(**id) == Some(Place::Finished);
        let has_done = !self.succeeded.is_empty() || self.group.iter().any(|id| done(&id));
        if broken > 0 || has_done {
            return broken;
        }
        let room = self.max.saturating_sub(self.group.len());
        self.waiting().count().min(room)
    }

    /// Makes the next group, if nobody of the last one runs on.
    fn gather(&mut self) {
        if self.over.is_some() || self.group.iter().any(|id| self.is_staying(*id)) {
            return;
        }
        let is_old = |id: &u64| self.group.contains(id);
        let mut next: Vec<u64> = self.group.clone();
        next.retain(|id| self.place(*id) == Some(Place::Waiting));
        next.extend(self.waiting().filter(|id| !is_old(id)));
        next.truncate(self.max);
        if next.len() < self.min {
            return;
        }
        let mut instances = Vec::with_capacity(next.len());
        let mut wakers = Vec::with_capacity(next.len());
        for id in &next {
            if let Some(visitor) = self.visitors.get_mut(id) {
                visitor.place = Place::In { told: false };
                instances.extend(visitor.instance.clone());
                wakers.push(visitor.waker.clone());
            }
        }
        if !fits(instances.iter()) {
            let why = "the agents bring more workers than a world may have; start fewer".to_owned();
            self.close(RendezvousError::Refused(why));
            return;
        }
        self.round += 1;
        self.ranks = assign_worker_ranks(&instances);
        self.store = Arc::new(MapStore::new(wakers));
        self.group = next;
        self.succeeded.clear();
        self.wake_all();
    }

    fn close(&mut self, why: RendezvousError) {
        self.over.get_or_insert(why);
        self.wake_all();
    }

    /// The present group, for a member that does not know of it.
    fn tell(&mut self, id: u64) -> Option<Rendezvous> {
        let visitor = self.visitors.get_mut(&id)?;
        if visitor.place != (Place::In { told: false }) {
            return None;
        }
        visitor.place = Place::In { told: true };
        let size = visitor.instance.as_ref()?.local_world_size;
        let group_rank = self.group.iter().position(|member| *member == id)?;
        let ranks = self.ranks.get(group_rank)?;
        let store: Arc<dyn Store> = self.store.clone();
        Some(Rendezvous {
            round: self.round,
            restarts: self.restarts,
            group_rank: group_rank as u32,
            group_world_size: self.group.len() as u32,
            workers: (0..size)
                .map(|local_rank| ranks.worker(local_rank))
                .collect(),
            store,
        })
    }

    fn leave(&mut self, id: u64, has_succeeded: bool) {
        if self.visitors.remove(&id).is_none() {
            return;
        }
        if has_succeeded {
            self.succeeded.push(id);
        }
        self.gather();
        self.wake_all();
    }
}

impl RendezvousHandler for LocalHandler {
    fn wake_with(&mut self, waker: Waker) {
        if let Some(visitor) = lock(&self.hall).visitors.get_mut(&self.id) {
            visitor.waker = waker;
        }
    }

    fn next_rendezvous(
        &mut self,
        instance: &RoleInstance,
    ) -> Poll<Result<Rendezvous, RendezvousError>> {
        let mut hall = lock(&self.hall);
        if let Some(over) = &hall.over {
            return Poll::Ready(Err(over.clone()));
        }
        if let Some(visitor) = hall.visitors.get_mut(&self.id)
            && !matches!(visitor.place, Place::Waiting | Place::In { told: false })
        {
            visitor.instance = Some(instance.clone());
            visitor.place = Place::Waiting;
            hall.wake_all();
        }
        hall.gather();
        if let Some(over) = &hall.over {
            return Poll::Ready(Err(over.clone()));
        }
        hall.tell(self.id)
            .map_or(Poll::Pending, |group| Poll::Ready(Ok(group)))
    }

    fn num_nodes_waiting(&mut self) -> u32 {
        lock(&self.hall).changes() as u32
    }

    fn restarts(&self) -> u32 {
        lock(&self.hall).restarts
    }

    fn spend_restart(&mut self, max_restarts: u32) -> bool {
        let mut hall = lock(&self.hall);
        if hall.paid == hall.round {
            return true;
        }
        if hall.restarts >= max_restarts {
            return false;
        }
        hall.restarts += 1;
        hall.paid = hall.round;
        true
    }

    fn exit_barrier(&mut self) -> Poll<Result<Barrier, RendezvousError>> {
        let mut hall = lock(&self.hall);
        if let Some(visitor) = hall.visitors.get_mut(&self.id)
            && visitor.place != Place::Finished
        {
            visitor.place = Place::Finished;
            hall.wake_all();
        }
        match &hall.over {
            None => {}
            Some(RendezvousError::NotNeeded) => return Poll::Ready(Ok(Barrier::Done)),
            Some(_) => return Poll::Ready(Ok(Barrier::Again)),
        }
        if hall.broken() > 0 {
            return Poll::Ready(Ok(Barrier::Again));
        }
        let is_done =
            |id: &u64| hall.succeeded.contains(id) || hall.place(*id) == Some(Place::Finished);
        if !hall.group.iter().all(is_done) {
            return Poll::Pending;
        }
        hall.close(RendezvousError::NotNeeded);
        Poll::Ready(Ok(Barrier::Done))
    }

    fn shutdown(&mut self, departure: Departure) {
        let mut hall = lock(&self.hall);
        let has_succeeded = departure == Departure::Succeeded;
        if let Departure::Failed { why } = departure {
            hall.close(RendezvousError::Closed { reason: why });
        }
        hall.leave(self.id, has_succeeded);
    }
}

impl Drop for LocalHandler {
    fn drop(&mut self) {
        lock(&self.hall).leave(self.id, false);
    }
}
