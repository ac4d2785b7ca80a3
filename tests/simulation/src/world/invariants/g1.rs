//! G-1: no process goes back to a generation, and no message of an old one has an effect.

use std::collections::BTreeMap;

use kolo_wire::ids::Generation;

use crate::worker::Name;

/// The last generation of each process.
#[derive(Debug, Default)]
pub(crate) struct Fences(BTreeMap<Name, Generation>);

impl Fences {
    /// A process is in a generation from now on.
    pub(crate) fn entered(&mut self, name: Name, generation: Generation) -> Result<(), String> {
        match self.0.insert(name, generation) {
            Some(before) if before >= generation => Err(format!(
                "slot {} of {} is in generation {generation}, and was in {before} before",
                name.slot, name.job
            )),
            _ => Ok(()),
        }
    }
}
