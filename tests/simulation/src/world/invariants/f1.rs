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
