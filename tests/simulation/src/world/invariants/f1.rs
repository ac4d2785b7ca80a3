//! F-1: a lost member ends every wait on it.

use crate::world::World;

/// A worker was lost a moment ago, in a network without faults: nobody waits for it any more.
pub(crate) fn aftermath(world: &World, pid: u32) -> Result<(), String> {
    let Some(lost) = world.processes.get(&pid) else {
        return Ok(());
    };
    let job = lost.model.name.job;
    let Some((generation, _)) = lost.model.place() else {
        return Ok(());
    };
    let waits = world.processes.iter().find(|(_, process)| {
        let model = &process.model;
        // One that was told to end waits no more, whatever its loop does until then.
        process.alive
            && !process.is_ending
            && model.name.job == job
            && model.is_waiting()
            && model.place().is_some_and(|(other, _)| other == generation)
    });
    match waits {
        Some((other, _)) => Err(format!(
            "process {other} of {job} still waits in generation {generation} long after process {pid} has died"
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::node::messages::{Stay, WorkerId};
    use kolo_wire::ToWorker;
    use kolo_wire::ids::{Generation, Incarnation, JobId, Rank, Slot};

    use super::*;
    use crate::run::Options;
    use crate::worker::{Fate, Name, Saved, Worker};
    use crate::world::process::Process;

    /// Ranks 0 and 1 wait for each other, and rank 0 dies.
    fn after_a_loss() -> World {
        let mut world = World::new(0, Options::SMALL, false);
        for slot in 0..2 {
            let (job, incarnation) = (JobId(1), Incarnation::FIRST);
            let slot = Slot(slot);
            let name = Name {
                job,
                slot,
                incarnation,
            };
            let address = ([10, 1, 0, 1], 1).into();
            let mut model = Worker::new(name, address, None, false);
            model.start_as(Generation(1), (Rank(slot.0), 2), Fate::Works);
            model.begin(Saved::default());
            let stay = Stay { job, number: 1 };
            let worker = WorkerId {
                stay,
                slot,
                incarnation,
            };
            world
                .processes
                .insert(slot.0, Process::new(0, 0, worker, model));
        }
        world.processes.get_mut(&0).unwrap().alive = false;
        world
    }

    #[test]
    fn who_waits_for_the_dead_violates_f1_unless_it_was_told_to_end() {
        assert!(aftermath(&after_a_loss(), 0).is_err());
        let mut world = after_a_loss();
        world.process_hears(
            1,
            &ToWorker::Stop {
                reason: String::new(),
            },
        );
        assert_eq!(aftermath(&world, 0), Ok(()));
    }
}
