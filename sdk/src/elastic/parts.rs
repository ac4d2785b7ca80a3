//! What a state consists of, and the passes over it.

use std::collections::BTreeSet;

use kolo_collectives::Element;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::StateError;
use super::snapshot::{ElementType, Kind, Part, Snapshot};
use crate::codec;

/// A type whose value, or a part of it, survives changes of the group: see [`State`](super::State).
///
/// One function names all parts. It is called for each commit, restore and sync, so that these can't disagree.
///
/// ```
/// use kolo::elastic::{Elastic, ElasticSampler, Parts};
///
/// struct Training {
///     sampler: ElasticSampler,
///     best: Option<f32>,
///     weights: Vec<f32>,
///     velocity: Vec<f32>,
///     /// The same on every rank, whatever happens: no part of the state.
///     images: Vec<[u8; 64]>,
/// }
///
/// impl Elastic for Training {
///     fn parts(&mut self, parts: &mut Parts<'_>) {
///         parts.value("sampler", &mut self.sampler);
///         parts.value("best", &mut self.best);
///         parts.buffer("weights", &mut self.weights);
///         parts.buffer("velocity", &mut self.velocity);
///     }
/// }
/// ```
///
/// A type that is one serde value as a whole needs no implementation: wrap the value in [`Value`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say what its state is",
    label = "not elastic",
    note = "implement `kolo::elastic::Elastic`, which names the parts of the state"
)]
pub trait Elastic {
    /// Names every part, always in the same order. A name is used once. The types of parts inside call their own `parts`.
    fn parts(&mut self, parts: &mut Parts<'_>);
}

impl<T: Elastic + ?Sized> Elastic for &mut T {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        (**self).parts(parts);
    }
}

/// A serde value as a state with one part, named `value`.
///
/// ```
/// use kolo::elastic::{State, Value};
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct Progress {
///     epoch: u32,
/// }
///
/// let mut state = State::new(Value(Progress { epoch: 0 }));
/// state.epoch += 1;
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Value<T>(pub T);

impl<T: Serialize + DeserializeOwned> Elastic for Value<T> {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        parts.value("value", &mut self.0);
    }
}

impl<T> std::ops::Deref for Value<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> std::ops::DerefMut for Value<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// Takes the parts of a state, by name: see [`Elastic`].
///
/// A part that can't be saved or restored ends the whole commit, restore or sync with an error that names the part.
#[derive(Debug)]
pub struct Parts<'a> {
    pass: Pass<'a>,
    /// How many parts, bytes of values and buffers came before.
    part: usize,
    byte: usize,
    buffer: usize,
    /// Other parts than the last time.
    changed: bool,
    error: Option<StateError>,
}

enum Pass<'a> {
    /// Copies the state.
    Save(&'a mut Snapshot),
    /// Looks whether the copy from some place fits the state. The buffers may come later.
    Match(&'a Snapshot, &'a str),
    /// Makes room for the buffers of a copy that fits.
    MakeRoom(&'a mut Snapshot),
    /// Makes the state that of the copy.
    Load(&'a Snapshot),
}

impl std::fmt::Debug for Pass<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Save(_) => "Save",
            Self::Match(..) => "Match",
            Self::MakeRoom(_) => "MakeRoom",
            Self::Load(_) => "Load",
        })
    }
}

/// Copies the state.
pub(super) fn save(state: &mut impl Elastic, to: &mut Snapshot) -> Result<(), StateError> {
    to.values.clear();
    let saved = run(state, Pass::Save(to));
    if saved.is_err() {
        // The names of the next copy are looked at again.
        to.parts.clear();
    }
    saved
}

/// Looks whether a copy fits the state. `place` is where the copy is from.
pub(super) fn check(
    state: &mut impl Elastic,
    copy: &Snapshot,
    place: &str,
) -> Result<(), StateError> {
    run(state, Pass::Match(copy, place))
}

/// Makes room for the buffers in a copy that [fits](check).
pub(super) fn make_room(state: &mut impl Elastic, copy: &mut Snapshot) -> Result<(), StateError> {
    run(state, Pass::MakeRoom(copy))
}

/// Makes the state that of a copy, which [fits](check).
pub(super) fn load(state: &mut impl Elastic, copy: &Snapshot) -> Result<(), StateError> {
    run(state, Pass::Load(copy))
}

fn run(state: &mut impl Elastic, pass: Pass<'_>) -> Result<(), StateError> {
    let mut parts = Parts {
        pass,
        part: 0,
        byte: 0,
        buffer: 0,
        changed: false,
        error: None,
    };
    state.parts(&mut parts);
    parts.finish()
}

impl Parts<'_> {
    /// A value of any serde type. It is encoded as MessagePack with the names of fields, as arguments of calls are.
    ///
    /// Long lists of numbers are faster as a [`buffer`](Self::buffer).
    pub fn value<V: Serialize + DeserializeOwned>(&mut self, name: &str, value: &mut V) {
        self.take(|parts| parts.take_value(name, value));
    }

    /// A buffer of numbers or bytes, whose length is the same on all ranks and never changes. It is copied as a whole, and sent
    /// over the data plane.
    pub fn buffer<T: Element>(&mut self, name: &str, values: &mut [T]) {
        let kind = Kind::Buffer(ElementType::of::<T>());
        self.take(|parts| {
            parts.take_elements(name, kind, values, |values, saved| {
                values.copy_from_slice(saved);
            })
        });
    }

    /// As [`buffer`](Self::buffer), but the length may change and differ from rank to rank: the list takes on the length that was
    /// committed or sent.
    pub fn list<T: Element>(&mut self, name: &str, values: &mut Vec<T>) {
        let kind = Kind::List(ElementType::of::<T>());
        self.take(|parts| {
            parts.take_elements(name, kind, values, |values, saved| {
                values.clear();
                values.extend_from_slice(saved);
            })
        });
    }

    /// After an error nothing is taken any more.
    fn take(&mut self, part: impl FnOnce(&mut Self) -> Result<(), StateError>) {
        if self.error.is_some() {
            return;
        }
        match part(self) {
            Ok(()) => self.part += 1,
            Err(error) => self.error = Some(error),
        }
    }

    fn take_value<V: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        value: &mut V,
    ) -> Result<(), StateError> {
        let (part, start) = (self.part, self.byte);
        let refused = |error: &dyn std::fmt::Display| {
            StateError::part(name, format_args!("is refused: {error}"))
        };
        match &mut self.pass {
            Pass::Save(to) => {
                codec::encode_behind(&mut to.values, value).map_err(|error| refused(&error))?;
                self.byte = to.values.len();
                let size = (self.byte - start) as u64;
                self.changed |= to.put(part, name, Kind::Value, size);
            }
            Pass::Match(copy, place) => {
                let size = copy.expect(part, name, (Kind::Value, 0), place)?;
                self.byte = start.saturating_add(size);
                let bytes = copy.value(start, self.byte, name)?;
                codec::decode::<V>(bytes).map_err(|error| refused(&error))?;
            }
            Pass::MakeRoom(_) => {}
            Pass::Load(copy) => {
                let size = copy.parts.get(part).map_or(0, |part| part.size as usize);
                self.byte = start.saturating_add(size);
                let bytes = copy.value(start, self.byte, name)?;
                *value = codec::decode(bytes).map_err(|error| refused(&error))?;
            }
        }
        Ok(())
    }

    fn take_elements<T: Element, B: AsRef<[T]> + ?Sized>(
        &mut self,
        name: &str,
        kind: Kind,
        values: &mut B,
        load: impl FnOnce(&mut B, &[T]),
    ) -> Result<(), StateError> {
        let (part, buffer, length) = (self.part, self.buffer, values.as_ref().len());
        match &mut self.pass {
            Pass::Save(to) => {
                let room = to.place::<T>(buffer);
                room.clear();
                room.extend_from_slice(values.as_ref());
                self.changed |= to.put(part, name, kind, length as u64);
            }
            Pass::Match(copy, place) => {
                copy.expect(part, name, (kind, length as u64), place)?;
            }
            Pass::MakeRoom(copy) => {
                let size = copy.parts.get(part).map_or(0, |part| part.size as usize);
                let room = copy.place::<T>(buffer);
                let more = size.saturating_sub(room.len());
                if room.try_reserve_exact(more).is_err() {
                    let reason = format_args!("needs memory for {size} elements");
                    return Err(StateError::part(name, reason));
                }
                room.resize(size, T::default());
            }
            Pass::Load(copy) => {
                let saved = copy.buffer::<T>(buffer);
                let saved =
                    saved.filter(|saved| matches!(kind, Kind::List(_)) || saved.len() == length);
                let Some(saved) = saved else {
                    return Err(StateError::part(name, "was another one a moment ago"));
                };
                load(values, saved);
            }
        }
        self.buffer += 1;
        Ok(())
    }

    fn finish(self) -> Result<(), StateError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        match self.pass {
            Pass::Save(to) => {
                to.parts.truncate(self.part);
                to.buffers.truncate(self.buffer);
                if self.changed {
                    let mut names = BTreeSet::new();
                    let twice = to.parts.iter().find(|part| !names.insert(&part.name));
                    if let Some(twice) = twice {
                        return Err(StateError::part(&twice.name, "is named twice"));
                    }
                }
                Ok(())
            }
            Pass::Match(copy, place) => match copy.parts.get(self.part) {
                Some(more) => {
                    let reason = format_args!("is missing, but {more} {place}");
                    Err(StateError::part(&more.name, reason))
                }
                None => Ok(()),
            },
            Pass::MakeRoom(copy) => {
                copy.buffers.truncate(self.buffer);
                Ok(())
            }
            Pass::Load(_) => Ok(()),
        }
    }
}

impl Snapshot {
    /// Makes a part that one. Says whether its name or kind was another.
    fn put(&mut self, index: usize, name: &str, kind: Kind, size: u64) -> bool {
        match self.parts.get_mut(index) {
            Some(part) if part.name == name && part.kind == kind => {
                part.size = size;
                false
            }
            _ => {
                self.parts.truncate(index);
                self.parts.push(Part {
                    name: name.to_owned(),
                    kind,
                    size,
                });
                true
            }
        }
    }

    /// The size of a part, if that is as the state has it.
    fn expect(
        &self,
        index: usize,
        name: &str,
        (kind, size): (Kind, u64),
        place: &str,
    ) -> Result<usize, StateError> {
        let reason = match self.parts.get(index) {
            Some(part) if part.name != name => format!("is where `{}` is {place}", part.name),
            Some(part) => {
                let own = Part {
                    name: String::new(),
                    kind,
                    size,
                };
                let same_size = part.size == size || !matches!(kind, Kind::Buffer(_));
                match usize::try_from(part.size) {
                    Ok(size) if part.kind == kind && same_size => return Ok(size),
                    _ => format!("is {own}, but {part} {place}"),
                }
            }
            None => format!("is missing {place}"),
        };
        Err(StateError::part(name, reason))
    }

    /// The encoded value between two places.
    fn value(&self, start: usize, end: usize, name: &str) -> Result<&[u8], StateError> {
        let bytes = self.values.get(start..end);
        bytes.ok_or_else(|| StateError::part(name, "has not all its bytes"))
    }
}
