//! One process for each slot and incarnation, for ever.

use std::collections::BTreeMap;

use crate::worker::Name;

/// The processes that were started.
#[derive(Debug, Default)]
pub(crate) struct Seats(BTreeMap<Name, u32>);

impl Seats {
    pub(crate) fn started(&mut self, name: Name, pid: u32) -> Result<(), String> {
        let before = self.0.insert(name, pid);
        match before {
            Some(before) => Err(format!(
                "processes {before} and {pid} are both incarnation {} of slot {} of {}",
                name.incarnation, name.slot, name.job
            )),
            None => Ok(()),
        }
    }
}
