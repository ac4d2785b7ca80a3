//! All-to-all, and one rank to one other.

use kolo_transport::ids::Rank;

use super::forms::{Ends, or_refuse, started};
use super::{check_buffer, fits, invalid, make_room, set_offsets, too_many, zeros};
use crate::communicator::Communicator;
use crate::element::{self, Element};
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind};
use crate::ops::Gathered;

/// Values of so few bytes are sent along with their number: one operation in place of two.
const ALONG: usize = 1024;

/// Words of a send's first part: the number of values, whether they are here, and room for them.
const WORDS: usize = HEAD + ALONG / size_of::<u64>();
const HEAD: usize = 2;

impl Communicator {
    /// Every rank sends part i of its values to rank i, and gets one part from each, in rank order. All parts have the
    /// same length: that of `data` divided by the world size.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// run_local(2, |comm| {
    ///     let me = comm.rank().0;
    ///     let mine = comm.all_to_all(&[10 * me, 10 * me + 1]).unwrap();
    ///     assert_eq!(mine, [me, 10 + me]);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] if the length is no multiple of the world size.
    pub fn all_to_all<T: Element>(&self, data: &[T]) -> Result<Vec<T>, CollectiveError> {
        let mut received = self.needed(OperationKind::AllToAll, zeros(data.len()))?;
        self.all_to_all_into(data, &mut received)?;
        Ok(received)
    }

    /// As [`Communicator::all_to_all`], into a buffer of the same length as `data`.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_to_all`], and [`CollectiveError::Invalid`] for a buffer of another length. After a failure it
    /// may hold anything.
    pub fn all_to_all_into<T: Element>(
        &self,
        data: &[T],
        received: &mut [T],
    ) -> Result<(), CollectiveError> {
        let (kind, world) = (OperationKind::AllToAll, self.world());
        let request = self.request::<T>(kind, data.len() / world);
        let (length, given) = (data.len(), received.len());
        self.once(&request, Ends::Into(data, received), || {
            if !length.is_multiple_of(world) {
                return Err(invalid(format!(
                    "{kind} of {length} elements: they are not a whole number for each of {world} ranks; give splits to \
                     all_to_all_varcount"
                )));
            }
            check_buffer(format_args!("{kind} of {length} elements"), given, length)
        })
    }

    /// As [`Communicator::all_to_all`], with parts of different lengths: `splits` says how many elements of `data` go to
    /// each rank, in rank order. What their sum leaves over stays here. Returns what came, and how many elements came
    /// from each rank.
    ///
    /// It has two parts: one for the lengths, one for the values.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// run_local(2, |comm| {
    ///     // One element to rank 0, two to rank 1.
    ///     let got = comm.all_to_all_varcount(&['a' as u8, 98, 99], &[1, 2]).unwrap();
    ///     assert_eq!(got.counts, [1 + comm.rank().index(); 2]);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] if there is not one split for each rank, or they are
    /// more than `data` in all.
    pub fn all_to_all_varcount<T: Element>(
        &self,
        data: &[T],
        splits: &[usize],
    ) -> Result<Gathered<T>, CollectiveError> {
        let mut received = Gathered::default();
        self.all_to_all_varcount_into(data, splits, &mut received)?;
        Ok(received)
    }

    /// As [`Communicator::all_to_all_varcount`], into what an earlier one returned: memory is used again.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_to_all_varcount`]; `received` is as it was.
    pub fn all_to_all_varcount_into<T: Element>(
        &self,
        data: &[T],
        splits: &[usize],
        received: &mut Gathered<T>,
    ) -> Result<(), CollectiveError> {
        let (kind, world) = (OperationKind::AllToAllVarcount, self.world());
        self.in_turn(kind, async |alarm, turn, tag| {
            let what = format_args!("the splits of {kind} on {world} ranks");
            or_refuse(turn, tag, check_buffer(what, splits.len(), world))?;
            let sent = turn.engine().set_sent_offsets(splits.iter().copied());
            let sent = sent.filter(|sent| *sent <= data.len()).ok_or_else(|| {
                invalid(format!(
                    "{kind} with splits {splits:?} of {} elements: they are more than there are",
                    data.len()
                ))
            });
            let sent = or_refuse(turn, tag, sent)?;
            let request = Operation::lengths(OperationKind::AllToAll, kind, T::DTYPE, 1);
            let mut lengths = std::mem::take(&mut turn.engine().lengths);
            lengths.clear();
            lengths.extend(splits.iter().map(|split| *split as u64));
            turn.run(alarm, tag, request, bytemuck::cast_slice(&lengths))
                .await?;
            turn.store(&mut lengths);
            let total = set_offsets::<T>(turn, tag.next_part(), &lengths)?;
            let values = self.request::<T>(kind, 0);
            let input = element::bytes_of(&data[..sent]);
            turn.run(alarm, tag.next_part(), values, input).await?;
            // Not before: memory is touched here that peers say they fill.
            received.prepare(&lengths, total)?;
            turn.store(&mut received.values);
            turn.engine().lengths = lengths;
            Ok(())
        })
    }

    /// Sends values to one other rank, which [receives](Communicator::receive) them. The other ranks take no part.
    ///
    /// It returns when the other rank has called `receive`, has said that it asks for the same and has room for it, and all
    /// values are on their way. So ranks that both send first wait for each other until the deadline, however little they
    /// send: [start](crate::Start::send) the sends, as the second example does. What one rank sends to another comes in
    /// order.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// # use kolo_collectives::Rank;
    /// let group = local_group(3)?;
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| group[0].send(&[1.5_f64, 2.5], Rank(2)).unwrap());
    ///     scope.spawn(|| assert_eq!(group[2].receive::<f64>(Rank(0)).unwrap(), [1.5, 2.5]));
    /// });
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// Every rank passes a value on to the next one:
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// # use kolo_collectives::Rank;
    /// run_local(3, |comm| {
    ///     let me = comm.rank().0;
    ///     let sent = comm.start().send(vec![me], Rank((me + 1) % 3));
    ///     assert_eq!(comm.receive::<u32>(Rank((me + 2) % 3)).unwrap(), [(me + 2) % 3]);
    ///     sent.wait().unwrap();
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] if `to` is this rank or none of the group, and
    /// [`CollectiveError::Mismatch`] on both ranks if they disagree on type, shape or compression. What the receiver refuses
    /// (a buffer of another length, more than its memory holds) is [`CollectiveError::PeerFailed`] here. After an error the
    /// receiver may have the values all the same, if it took them just before the link ended or this rank's deadline passed.
    pub fn send<T: Element>(&self, data: &[T], to: Rank) -> Result<(), CollectiveError> {
        let pair = self.pair(self.rank(), to)?;
        let kind = OperationKind::SendReceive;
        pair.in_turn(kind, async |alarm, turn, tag| {
            let values = pair.directed(pair.request::<T>(kind, data.len()), true);
            let bytes = element::bytes_of(data);
            let along = bytes.len() <= ALONG && values.is_plain();
            let mut first = [0_u64; WORDS];
            (first[0], first[1]) = (data.len() as u64, u64::from(along));
            if along {
                bytemuck::cast_slice_mut(&mut first[HEAD..])[..bytes.len()].copy_from_slice(bytes);
            }
            let request = pair.directed(first_part::<T>(), true);
            let first = bytemuck::cast_slice(&first);
            if along {
                return turn.run_until_taken(alarm, tag, request, first).await;
            }
            turn.run(alarm, tag, request, first).await?;
            turn.run_into(alarm, tag.next_part(), values, data, &mut [])
                .await
        })
    }

    /// Receives what one other rank [sends](Communicator::send).
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] if `from` is this rank or none of the group.
    pub fn receive<T: Element>(&self, from: Rank) -> Result<Vec<T>, CollectiveError> {
        let mut data = Vec::new();
        self.receive_from(from, |wanted| {
            // The other rank says how many: this one's memory may not hold them.
            make_room(&mut data, wanted)?;
            Ok(&mut data[..])
        })?;
        Ok(data)
    }

    /// As [`Communicator::receive`], into a buffer of as many elements as the other rank sends.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// # use kolo_collectives::Rank;
    /// run_local(2, |comm| {
    ///     if comm.rank() == Rank(0) {
    ///         comm.send(&[1_u8, 2, 3], Rank(1)).unwrap();
    ///     } else {
    ///         let mut data = [0_u8; 3];
    ///         comm.receive_into(&mut data, Rank(0)).unwrap();
    ///         assert_eq!(data, [1, 2, 3]);
    ///     }
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Communicator::receive`], and [`CollectiveError::Invalid`] if it sends another number: then it fails, too. If it
    /// fails later, the buffer may hold a part of what was sent.
    pub fn receive_into<T: Element>(
        &self,
        data: &mut [T],
        from: Rank,
    ) -> Result<(), CollectiveError> {
        self.receive_from(from, |wanted| {
            let what = format_args!("rank {from} sends {wanted} {}, to be received", T::DTYPE);
            check_buffer(what, data.len(), wanted).map(|()| data)
        })
    }

    fn receive_from<'a, T: Element>(
        &self,
        from: Rank,
        room: impl FnOnce(usize) -> Result<&'a mut [T], CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let pair = self.pair(from, self.rank())?;
        let kind = OperationKind::SendReceive;
        pair.in_turn(kind, async |alarm, turn, tag| {
            let request = pair.directed(first_part::<T>(), false);
            if let Err(error) = turn.run(alarm, tag, request, &[]).await {
                // The sender may be past it already.
                turn.skip(tag.next_part());
                return Err(error);
            }
            let mut first = [0_u64; WORDS];
            turn.store(&mut first);
            let (wanted, is_along) = (first[0] as usize, first[1] != 0);
            // Where the sender waits for this rank's word.
            let tag = if is_along { tag } else { tag.next_part() };
            let room = if fits::<T>(wanted) {
                room(wanted)
            } else {
                Err(too_many::<T>(&first[..1]))
            };
            let room = or_refuse(turn, tag, room)?;
            let values = pair.directed(pair.request::<T>(kind, room.len()), false);
            if is_along {
                let bytes: &[u8] = bytemuck::cast_slice(&first[HEAD..]);
                let bytes = along(bytes.get(..size_of_val(room)), &values);
                let bytes = or_refuse(turn, tag, bytes)?;
                T::take_bytes(room, bytes);
                turn.give_word(tag);
                return Ok(());
            }
            turn.run_into(alarm, tag, values, &[], room).await
        })
    }

    /// The two ranks as a group of their own, for this direction.
    pub(super) fn pair(&self, from: Rank, to: Rank) -> Result<Self, CollectiveError> {
        let (inner, world) = (&self.inner, self.inner.world);
        if from == to || from.0 >= world || to.0 >= world {
            return Err(invalid(format!(
                "rank {from} can't send to rank {to}: one rank sends to another one, of ranks 0 to {}",
                world - 1
            )));
        }
        let pair = inner.pair(from.0, to.0);
        let (timeout, table) = {
            let state = inner.signals.lock();
            (state.timeout, state.table.clone())
        };
        {
            let mut state = pair.signals.lock();
            state.timeout = timeout;
            // It may have been made before there was one.
            if state.table.is_none() {
                state.table = table;
            }
        }
        Ok(Self {
            inner: pair,
            options: self.options,
        })
    }

    /// From the first member of a pair to the second; this rank is one of them.
    fn directed(&self, operation: Operation, sends: bool) -> Operation {
        debug_assert_eq!(sends, self.inner.me == 0);
        Operation {
            root: Some(0),
            rows: 1,
            ..operation
        }
    }
}

started! {
    all_to_all[T: Element](data: Vec<T>) -> Vec<T>,
    |of| of.request::<T>(OperationKind::AllToAll, data.len()),
    |comm| comm.all_to_all(&data)
}

started! {
    all_to_all_varcount[T: Element](data: Vec<T>, splits: Vec<usize>) -> Gathered<T>,
    |of| of.request::<T>(OperationKind::AllToAllVarcount, 0),
    |comm| comm.all_to_all_varcount(&data, &splits)
}

/// The values that came along, if this rank asks for the same as the sender did.
fn along<'a>(bytes: Option<&'a [u8]>, asked: &Operation) -> Result<&'a [u8], CollectiveError> {
    let sender = Rank(0);
    if !asked.is_plain() {
        return Err(CollectiveError::Mismatch {
            rank: Rank(1),
            asked: asked.to_string(),
            other: sender,
            other_asked: asked.as_plain().to_string(),
        });
    }
    bytes.ok_or_else(|| CollectiveError::Protocol {
        rank: sender,
        reason: format!("it says that more than {ALONG} bytes came along with their number"),
    })
}

/// What a send begins with, when the receiver does not know yet how much comes.
fn first_part<T: Element>() -> Operation {
    let kind = OperationKind::SendReceive;
    Operation::lengths(kind, kind, T::DTYPE, WORDS as u64)
}
