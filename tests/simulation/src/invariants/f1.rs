//! F-1: a lost member ends every wait on it.

use kolo_wire::ids::Generation;

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
        let is_in = |other: Generation| other == generation;
        let waits = self.processes.iter().find(|(_, process)| {
            let model = &process.model;
            process.alive
                && model.name.job == job
                && model.is_waiting()
                && model.place().is_some_and(|(other, _)| is_in(other))
        });
        if let Some((other, _)) = waits {
            let text = format!(
                "process {other} of {job} still waits in generation {generation} long after process {pid} has died"
            );
            self.violation("F-1", text);
        }
    }
}
