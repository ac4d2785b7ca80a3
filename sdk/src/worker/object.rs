//! A value of an executable in its worker, with the last commit of its state.

use std::any::Any;
use std::fmt;

use crate::context::Context;
use crate::elastic::{Elastic, Parts, State, StateError};
use crate::registry::ClassEntry;

/// A value as its class knows it. What the class says of its state goes together with the number of the last commit.
struct Live {
    class: &'static ClassEntry,
    value: Box<dyn Any>,
    /// How many commits its driver has made. Syncs do not count.
    driven: u64,
}

impl Elastic for Live {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        parts.value("kolo::commits", &mut self.driven);
        if let Some(of_class) = self.class.parts {
            of_class(&mut *self.value, parts);
        }
    }
}

/// See the [module](self).
pub(super) struct Object {
    state: State<Live>,
    /// Counts up, to drop in this order.
    pub(super) created: u64,
    /// What left it in an unknown state.
    pub(super) poison: Option<String>,
}

impl Object {
    pub(super) fn new(class: &'static ClassEntry, value: Box<dyn Any>, created: u64) -> Self {
        let live = Live {
            class,
            value,
            driven: 0,
        };
        Self {
            state: State::new(live),
            created,
            poison: None,
        }
    }

    pub(super) fn class(&self) -> &'static ClassEntry {
        self.state.class
    }

    pub(super) fn value(&mut self) -> &mut dyn Any {
        &mut *self.state.value
    }

    /// Another value takes the place of one that is in an unknown state. The last commit stays.
    pub(super) fn replace(&mut self, value: Box<dyn Any>) {
        self.state.value = value;
        self.poison = None;
    }

    /// Goes back to the last commit of all ranks, which call this at once. Gives the number of commits that the driver has made.
    pub(super) fn recover(&mut self, context: &Context) -> Result<u64, StateError> {
        if self.state.is_committed() {
            self.state.restore()?;
        }
        self.state.begin(context, false)?;
        Ok(self.state.driven)
    }

    /// Commits on all ranks, which call this at once. Gives the number of commits that the driver has made.
    pub(super) fn commit(&mut self, context: &Context) -> Result<u64, StateError> {
        self.state.driven += 1;
        if let Err(error) = self.state.commit(context) {
            self.state.driven -= 1;
            return Err(error);
        }
        Ok(self.state.driven)
    }
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Object")
            .field("class", &self.class().name)
            .field("created", &self.created)
            .field("poison", &self.poison)
            .finish_non_exhaustive()
    }
}
