//! A copy of a state, kept in the memory of one rank.

use std::any::Any;
use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;

use kolo_collectives::{CollectiveError, Communicator, DType, Element, Rank};
use serde::{Deserialize, Serialize};

use super::StateError;
use crate::codec;

/// Names a commit. A later generation has later commits, whatever the numbers. Number 0 is that of a state which was neither
/// committed nor synced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CommitId {
    pub(super) generation: u64,
    pub(super) number: u64,
}

/// A copy of all parts of a state. Its memory is used again for the next copy.
#[derive(Default)]
pub(super) struct Snapshot {
    pub(super) parts: Vec<Part>,
    /// The encoded values, one after the other.
    pub(super) values: Vec<u8>,
    /// The buffers, in the order of their parts.
    pub(super) buffers: Vec<Box<dyn Stored>>,
}

/// A part of a state, as told to other ranks.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// Bytes of a value, elements of a buffer.
    pub(super) size: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Kind {
    Value,
    /// Elements, whose number is the same on all ranks.
    Buffer(ElementType),
    /// Elements, whose number is that of the rank which sends them.
    List(ElementType),
}

/// A [`DType`], by its place in the list of all types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ElementType(u8);

impl ElementType {
    pub(super) fn of<T: Element>() -> Self {
        let place = DType::ALL.iter().position(|dtype| *dtype == T::DTYPE);
        // A type that is not in the list is of no use to a peer either: no place, no name.
        Self(place.map_or(u8::MAX, |place| place as u8))
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match DType::ALL.get(usize::from(self.0)) {
            Some(dtype) => dtype.fmt(f),
            None => f.write_str("an unknown type"),
        }
    }
}

impl Part {
    /// How many bytes the part takes; `None` if that is no number, or the type is not known.
    pub(super) fn bytes(&self) -> Option<u64> {
        match self.kind {
            Kind::Value => Some(self.size),
            Kind::Buffer(element) | Kind::List(element) => {
                let dtype = DType::ALL.get(usize::from(element.0))?;
                self.size.checked_mul(dtype.size() as u64)
            }
        }
    }
}

/// Says what a part is: "a buffer of 5 f32".
impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.size;
        match self.kind {
            Kind::Value => f.write_str("a value"),
            Kind::Buffer(element) => write!(f, "a buffer of {size} {element}"),
            Kind::List(element) => write!(f, "a list of {size} {element}"),
        }
    }
}

/// The copy of a buffer: a `Vec` of some element type.
pub(super) trait Stored: Any + Send + Sync {
    /// Takes the root's elements for its own.
    fn broadcast(&mut self, comm: &Communicator, root: Rank) -> Result<(), CollectiveError>;

    /// The elements as bytes.
    fn bytes(&self) -> &[u8];

    /// Takes all elements from bytes.
    fn read(&mut self, from: &mut dyn Read) -> io::Result<()>;
}

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

impl<T: Element> Stored for Vec<T> {
    fn broadcast(&mut self, comm: &Communicator, root: Rank) -> Result<(), CollectiveError> {
        comm.broadcast(self, root)
    }

    fn bytes(&self) -> &[u8] {
        T::as_bytes(self)
    }

    fn read(&mut self, from: &mut dyn Read) -> io::Result<()> {
        let size = T::DTYPE.size();
        let mut piece = vec![0; PIECE.min(self.len() * size)];
        for elements in self.chunks_mut(PIECE / size) {
            let bytes = &mut piece[..elements.len() * size];
            from.read_exact(bytes)?;
            T::take_bytes(elements, bytes);
        }
        Ok(())
    }
}

/// The last commit of a state, and memory for the next. The last commit may be read by others meanwhile: by the thread that writes
/// checkpoints, which reads that one and at most one before.
#[derive(Default)]
pub(super) struct Copies {
    committed: Arc<Snapshot>,
    spare: Arc<Snapshot>,
    third: Arc<Snapshot>,
}

impl Copies {
    pub(super) fn committed(&self) -> &Arc<Snapshot> {
        &self.committed
    }

    /// Where the next copy goes, so that a failure half-way leaves the last one whole.
    pub(super) fn spare(&mut self) -> &mut Snapshot {
        if Arc::get_mut(&mut self.spare).is_none() {
            std::mem::swap(&mut self.spare, &mut self.third);
        }
        if Arc::get_mut(&mut self.spare).is_none() {
            self.spare = Arc::default();
        }
        Arc::get_mut(&mut self.spare).expect("nobody else has this copy, as was just seen")
    }

    /// Takes the copy in `spare` for the last commit.
    pub(super) fn keep(&mut self) {
        std::mem::swap(&mut self.committed, &mut self.spare);
    }
}

impl Snapshot {
    /// The copy of buffer `index`, if that is one of this type.
    pub(super) fn buffer<T: Element>(&self, index: usize) -> Option<&Vec<T>> {
        let stored: &dyn Any = self.buffers.get(index)?.as_ref();
        stored.downcast_ref()
    }

    /// The place for a copy of buffer `index`, which may have anything in it. Those before it have their places.
    pub(super) fn place<T: Element>(&mut self, index: usize) -> &mut Vec<T> {
        if self.buffer::<T>(index).is_none() {
            self.buffers.truncate(index);
            self.buffers.push(Box::new(Vec::<T>::new()));
        }
        let stored: &mut dyn Any = self.buffers[index].as_mut();
        stored
            .downcast_mut()
            .expect("a buffer of this type is there now")
    }

    /// The list of parts as a message of its own, which is sent before the values.
    pub(super) fn manifest(&self) -> Result<Vec<u8>, CollectiveError> {
        codec::encode(&self.parts).map_err(|error| CollectiveError::Invalid {
            reason: format!("the list of a state's parts: {error}"),
        })
    }

    /// Takes what another rank has sent. The buffers come later.
    pub(super) fn take_message(
        &mut self,
        manifest: &[u8],
        values: &[u8],
        rank: Rank,
    ) -> Result<(), CollectiveError> {
        self.parts = codec::decode(manifest).map_err(|error| CollectiveError::Protocol {
            rank,
            reason: format!("the list of a state's parts: {error}"),
        })?;
        self.values.clear();
        self.values.extend_from_slice(values);
        Ok(())
    }
}

impl StateError {
    /// A part that is not as needed.
    pub(super) fn part(name: &str, reason: impl fmt::Display) -> Self {
        Self::Part {
            name: name.to_owned(),
            reason: reason.to_string(),
        }
    }
}
