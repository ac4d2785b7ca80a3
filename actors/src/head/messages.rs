//! The message of the head's actor: an input of its core, with the way back.

use std::fmt;
use std::sync::Arc;

use actix::Message;
use kolo_core::head::messages::{AskId, Input};
use kolo_core::head::registry::Session;
use kolo_transport::ids::JobId;
use kolo_transport::wire::{HeadReply, JobEvent, Refusal, RefusalKind};
use tokio::sync::{mpsc, oneshot};

use super::link::NodeLink;

/// Something has happened.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Happened {
    /// The input of the core.
    pub input: Input,
    /// The way for what follows.
    pub way: Option<Way>,
}

impl From<Input> for Happened {
    fn from(input: Input) -> Self {
        Self { input, way: None }
    }
}

/// A way from the head to somebody.
pub enum Way {
    /// To a peer, with [`Input::Connected`].
    Link(Session, Arc<dyn NodeLink>),
    /// To a driver, with [`Input::Submit`]. A driver whose queue is full counts as gone; the queue is closed then, without
    /// [`JobEvent::Ended`].
    Driver(JobId, mpsc::Sender<JobEvent>),
    /// To whoever asks, with [`Input::Asked`].
    Answer(AskId, oneshot::Sender<HeadReply>),
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link(session, _) => f.debug_tuple("Link").field(session).finish(),
            Self::Driver(job, _) => f.debug_tuple("Driver").field(job).finish(),
            Self::Answer(ask, _) => f.debug_tuple("Answer").field(ask).finish(),
        }
    }
}

/// The actor is gone, which it is only when the head stops.
#[must_use]
pub fn stopping() -> Refusal {
    Refusal::new(RefusalKind::Stopped, "the head is stopping")
}
