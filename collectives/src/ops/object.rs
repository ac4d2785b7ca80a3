//! Values of any serialisable type.

use kolo_transport::ids::Rank;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{fits, make_room, too_many};
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
    /// # use kolo_collectives::local_group;
    /// # use kolo_collectives::Rank;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let mine = (comm.rank() == Rank(0)).then(|| ("epoch".to_owned(), 3));
    ///             let all: (String, u32) = comm.broadcast_object(mine, Rank(0)).unwrap();
    ///             assert_eq!(all, ("epoch".to_owned(), 3));
    ///         });
    ///     }
    /// });
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
        Self::blocking(async |alarm, started| {
            let kind = OperationKind::Broadcast;
            let (mut turn, tag) = self.turn(alarm, started, kind).await?;
            let root = match self.check_root(kind, root) {
                Ok(root) => root,
                Err(error) => return Err(turn.refuse(tag, error)),
            };
            let is_root = root == self.inner.me;
            let encoded = match &value {
                _ if !is_root => Ok(Vec::new()),
                Some(value) => encode(value),
                None => Err(CollectiveError::Invalid {
                    reason: format!("broadcast_object: rank {root} is the root and gave no value"),
                }),
            };
            let encoded = match encoded {
                Ok(encoded) => encoded,
                Err(error) => return Err(turn.refuse(tag, error)),
            };
            let request = |dtype, count| Operation {
                root: Some(root),
                shape: Mark::Object.encode(),
                ..Operation::new(kind, Some(dtype), count)
            };
            let mut length = [encoded.len() as u64];
            let input = length;
            turn.run(
                alarm,
                tag,
                request(DType::U64, 1),
                bytemuck::cast_slice(&input),
            )
            .await?;
            turn.store(&mut length);
            if !fits::<u8>(length[0] as usize) {
                return Err(turn.refuse(tag.next_part(), too_many::<u8>(&length)));
            }
            turn.run(
                alarm,
                tag.next_part(),
                request(DType::U8, length[0]),
                &encoded,
            )
            .await?;
            match value {
                Some(value) if is_root => Ok(value),
                _ => {
                    let mut bytes = Vec::new();
                    make_room::<u8>(&mut bytes, length[0] as usize)?;
                    turn.store(&mut bytes);
                    decode(&bytes, root)
                }
            }
        })
    }

    /// Gives all ranks' values to every rank, in rank order.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let names = comm.all_gather_object(&format!("rank {}", comm.rank())).unwrap();
    ///             assert_eq!(names, ["rank 0", "rank 1"]);
    ///         });
    ///     }
    /// });
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
        let encoded = match encode(value) {
            Ok(encoded) => encoded,
            Err(error) => {
                return Self::blocking(async |alarm, started| {
                    let kind = OperationKind::AllGatherVarcount;
                    let (mut turn, tag) = self.turn(alarm, started, kind).await?;
                    Err(turn.refuse(tag, error))
                });
            }
        };
        let options = crate::Options::new().called(self.options.name, self.options.asked);
        let objects = self.with(options.marked(Mark::Object));
        let all = objects.all_gather_varcount(&encoded)?;
        (0..self.inner.world)
            .map(|rank| decode(all.of(Rank(rank)), rank))
            .collect()
    }
}

fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CollectiveError> {
    rmp_serde::to_vec_named(value).map_err(|error| CollectiveError::Invalid {
        reason: format!(
            "a value of type {} can't be serialised: {error}",
            std::any::type_name::<T>()
        ),
    })
}

fn decode<T: DeserializeOwned>(bytes: &[u8], rank: u32) -> Result<T, CollectiveError> {
    if bytes.is_empty() {
        // Whatever is serialised has a byte at least.
        let reason = format!("rank {rank} has joined: it has no value to give");
        return Err(CollectiveError::Invalid { reason });
    }
    rmp_serde::from_slice(bytes).map_err(|error| CollectiveError::Invalid {
        reason: format!(
            "what rank {rank} gave is no {}: {error}",
            std::any::type_name::<T>()
        ),
    })
}
