//! survivors keep their order, and come before those that are new.

use kolo_wire::GenerationTable;
use kolo_wire::ids::{Incarnation, Slot};

use crate::world::World;

fn check(before: &GenerationTable, after: &GenerationTable) -> Result<(), String> {
    let names = |table: &GenerationTable| -> Vec<(Slot, Incarnation)> {
        let members = table.members.iter();
        members
            .map(|member| (member.slot, member.incarnation))
            .collect()
    };
    let (old, new) = (names(before), names(after));
    let stay: Vec<_> = old.into_iter().filter(|name| new.contains(name)).collect();
    if new.starts_with(&stay) {
        Ok(())
    } else {
        Err(format!(
            "generation {} of {} has {new:?}, and of the one before stay {stay:?}",
            after.generation, after.job
        ))
    }
}

impl World {
    pub(crate) fn check_order(&mut self, table: &GenerationTable) {
        let before = self.oracle.generations.last(table.job);
        let checked = before.map_or(Ok(()), |before| check(before, table));
        self.hold("R-2", checked);
    }
}
