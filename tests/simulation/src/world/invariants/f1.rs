//! F-1: a lost member ends every wait on it.

use crate::world::World;

impl World {
    /// A worker was lost a moment ago, in a network without faults: nobody waits for it any more.
    pub(crate) fn check_aftermath(&mut self, pid: u32) {
        let Some(lost) = self.processes.get(&pid) else {
            return;
        };
        let job = lost.model.name.job;
        let Some((generation, _)) = lost.model.place() else {
            return;
        };
        let waits = self.processes.iter().find(|(_, process)| {
            let model = &process.model;
            // One that was told to end waits no more, whatever its loop does until then.
            process.alive
                && !process.is_ending
                && model.name.job == job
                && model.is_waiting()
                && model.place().is_some_and(|(other, _)| other == generation)
        });
        if let Some((other, _)) = waits {
            let text = format!(
                "process {other} of {job} still waits in generation {generation} long after process {pid} has died"
            );
            self.violation("F-1", text);
        }
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::node::messages::{Stay, WorkerId};
    use kolo_wire::ToWorker;
    use kolo_wire::ids::{Generation, Incarnation, JobId, Rank, Slot};

    use crate::run::Options;
    use crate::worker::{Fate, Name, Saved, Worker};
    use crate::world::World;
    use crate::world::process::Process;

    /// Ranks 0 and 1 wait for each other, and rank 0 dies.
    fn after_a_loss() -> World {
        let mut world = World::new(0, Options::default(), false);
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
        let mut world = after_a_loss();
        world.check_aftermath(0);
        assert_eq!(world.violation.unwrap().invariant, "F-1");
        let mut world = after_a_loss();
        world.process_hears(
            1,
            &ToWorker::Stop {
                reason: String::new(),
            },
        );
        world.check_aftermath(0);
        assert_eq!(world.violation, None);
    }
}
