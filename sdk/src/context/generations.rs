//! Where the elastic loops of user code get their generations from.

use std::sync::Arc;

use super::Context;
use super::session::Session;
use crate::elastic::{Cause, Epoch, Membership, NoGeneration};
use crate::error::Error;

/// The generations of a worker's job, from the one that a loop begins in.
#[derive(Debug)]
pub(crate) struct Generations {
    /// None in tests, and when the worker ends.
    session: Option<Arc<Session>>,
    context: Context,
}

impl Generations {
    pub(crate) fn new(session: Option<Arc<Session>>, context: &Context) -> Self {
        let context = match &session {
            Some(session) => session.latest(context),
            None => context.clone(),
        };
        Self { session, context }
    }
}

impl Membership for Generations {
    fn current(&self) -> Epoch {
        Epoch::new(self.context.clone())
    }

    fn next(&mut self, cause: &Cause) -> Result<Epoch, Error> {
        let session = (self.session.as_ref()).ok_or_else(|| NoGeneration::Static {
            generation: self.context.generation(),
        })?;
        self.context = session.next(&self.context, cause)?;
        Ok(self.current())
    }

    fn is_static(&self) -> bool {
        (self.session.as_ref()).is_none_or(|session| session.is_static())
    }
}
