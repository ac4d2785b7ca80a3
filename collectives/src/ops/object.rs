//! Values of any serialisable type.

use kolo_transport::ids::Rank;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::forms::{or_refuse, started};
use super::{fits, invalid, make_room, too_many};
use crate::DType;
use crate::communicator::Communicator;
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind};
use crate::shape::Mark;

impl Communicator {
    /// Gives the root's value to every rank. The root gives `Some`; what the others give is not looked at. It travels as
    /// MessagePack, with the names of fields.
    ///
    /// It has two parts: one for the length, one for the value.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// # use kolo_collectives::Rank;
    /// run_local(2, |comm| {
    ///     let mine = (comm.rank() == Rank(0)).then(|| ("epoch".to_owned(), 3));
    ///     let all: (String, u32) = comm.broadcast_object(mine, Rank(0)).unwrap();
    ///     assert_eq!(all, ("epoch".to_owned(), 3));
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] if the root gives `None` or its value can't be
    /// serialised (the others fail, too), or if what came is no `T`.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        value: Option<T>,
        root: Rank,
    ) -> Result<T, CollectiveError> {
        let kind = OperationKind::Broadcast;
        self.in_turn(kind, async |alarm, turn, tag| {
            let is_root = root == self.rank();
            let encoded = self.check_root(kind, root).and_then(|()| match &value {
                _ if !is_root => Ok(Vec::new()),
                Some(value) => encode(value),
                None => Err(invalid(format!(
                    "broadcast_object: rank {root} is the root and gave no value"
                ))),
            });
            let encoded = or_refuse(turn, tag, encoded)?;
            let request = |dtype, count| Operation {
                root: Some(root.0),
                shape: Mark::Object.encode(),
                ..Operation::new(kind, Some(dtype), count)
            };
            let mut length = [encoded.len() as u64];
            let input = length;
            let input = bytemuck::cast_slice(&input);
            turn.run(alarm, tag, request(DType::U64, 1), input).await?;
            turn.store(&mut length);
            let [count] = length;
            let fits = fits::<u8>(count as usize).then_some(());
            let fits = fits.ok_or_else(|| too_many::<u8>(&length));
            or_refuse(turn, tag.next_part(), fits)?;
            let values = request(DType::U8, count);
            turn.run(alarm, tag.next_part(), values, &encoded).await?;
            match value {
                Some(value) if is_root => Ok(value),
                _ => {
                    let mut bytes = Vec::new();
                    make_room::<u8>(&mut bytes, count as usize)?;
                    turn.store(&mut bytes);
                    decode(&bytes, root.0)
                }
            }
        })
    }

    /// Gives all ranks' values to every rank, in rank order.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// run_local(2, |comm| {
    ///     let names = comm.all_gather_object(&format!("rank {}", comm.rank())).unwrap();
    ///     assert_eq!(names, ["rank 0", "rank 1"]);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] if a rank's value can't be serialised (all fail), or if
    /// what came is no `T`.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
    ) -> Result<Vec<T>, CollectiveError> {
        let encoded = self.needed(OperationKind::AllGatherVarcount, encode(value))?;
        let options = crate::Options::new().called(self.options.name, self.options.asked);
        let objects = self.with(options.marked(Mark::Object));
        let all = objects.all_gather_varcount(&encoded)?;
        (0..self.inner.world)
            .map(|rank| decode(all.of(Rank(rank)), rank))
            .collect()
    }
}

started! {
    broadcast_object[T: Serialize + DeserializeOwned + Send + 'static](value: Option<T>, root: Rank) -> T,
    |_of| Operation {
        root: Some(root.0),
        shape: Mark::Object.encode(),
        ..Operation::new(OperationKind::Broadcast, Some(DType::U8), 0)
    },
    |comm| comm.broadcast_object(value, root)
}

started! {
    all_gather_object[T: Serialize + DeserializeOwned + Send + 'static](value: T) -> Vec<T>,
    |_of| Operation {
        shape: Mark::Object.encode(),
        ..Operation::new(OperationKind::AllGatherVarcount, Some(DType::U8), 0)
    },
    |comm| comm.all_gather_object(&value)
}

fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CollectiveError> {
    rmp_serde::to_vec_named(value).map_err(|error| {
        let name = std::any::type_name::<T>();
        invalid(format!(
            "a value of type {name} can't be serialised: {error}"
        ))
    })
}

fn decode<T: DeserializeOwned>(bytes: &[u8], rank: u32) -> Result<T, CollectiveError> {
    if bytes.is_empty() {
        // Whatever is serialised has a byte at least.
        let reason = format!("rank {rank} has joined: it has no value to give");
        return Err(invalid(reason));
    }
    rmp_serde::from_slice(bytes).map_err(|error| {
        let name = std::any::type_name::<T>();
        invalid(format!("what rank {rank} gave is no {name}: {error}"))
    })
}
