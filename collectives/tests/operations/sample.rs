//! One case: an operation, and whether it is right.

use std::collections::BTreeSet;

use super::*;

/// Numbers of the reference repeat after so many.
const PERIOD: usize = 11;

/// Lengths that are tried whatever changes where.
const LENGTHS: [usize; 7] = [0, 1, 2, 3, 61, 1021, 4099];

macro_rules! operations {
    ($($what:ident: $kind:ident,)*) => {
        /// Operations, and the forms that have ways of their own.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum What {
            $($what),*
        }

        impl What {
            pub(crate) const ALL: [Self; 19] = [$(Self::$what),*];

            pub(crate) fn kind(self) -> OperationKind {
                match self {
                    $(Self::$what => OperationKind::$kind),*
                }
            }
        }
    };
}

operations! {
    AllReduce: AllReduce,
    AllReduceInto: AllReduce,
    AllReduceBuffer: AllReduce,
    AllReduceGrouped: AllReduce,
    NamedAllReduce: AllReduce,
    Reduce: Reduce,
    ReduceScatter: ReduceScatter,
    ReduceScatterGrouped: ReduceScatter,
    Broadcast: Broadcast,
    AllGather: AllGather,
    AllGatherVarcount: AllGatherVarcount,
    AllGatherGrouped: AllGatherVarcount,
    Gather: Gather,
    GatherVarcount: GatherVarcount,
    Scatter: Scatter,
    ScatterVarcount: ScatterVarcount,
    AllToAll: AllToAll,
    AllToAllVarcount: AllToAllVarcount,
    SendReceive: SendReceive,
}

impl What {
    fn has_operator(self) -> bool {
        matches!(
            self.kind(),
            OperationKind::AllReduce | OperationKind::Reduce | OperationKind::ReduceScatter
        )
    }

    fn has_root(self) -> bool {
        matches!(
            self.kind(),
            OperationKind::Reduce
                | OperationKind::Broadcast
                | OperationKind::Gather
                | OperationKind::GatherVarcount
                | OperationKind::Scatter
                | OperationKind::ScatterVarcount
        )
    }
}

/// Those that a type has, but for Adasum, which has tests of its own.
fn operators(dtype: DType) -> Vec<ReduceOp> {
    (ReduceOp::ALL.into_iter())
        .filter(|op| *op != ReduceOp::Adasum && op.allows(dtype))
        .collect()
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) kind: Kind,
    pub(crate) world: u32,
    pub(crate) what: What,
    pub(crate) dtype: DType,
    pub(crate) op: Option<ReduceOp>,
    pub(crate) root: Option<Rank>,
    /// So many times slower links: algorithms change at shorter lengths.
    pub(crate) slowed: u32,
    /// The algorithm that is set; what is pipelined then has short segments.
    pub(crate) force: Option<Algorithm>,
    /// How values travel.
    pub(crate) short: Compression,
    /// The switch that the length is near to.
    pub(crate) switch: Option<usize>,
    /// Of a rank, or of its part where data have parts.
    pub(crate) length: usize,
}

impl Sample {
    pub(crate) fn draw(seed: u64) -> Self {
        let mut state = seed;
        // SplitMix64: neighbours among seeds have nothing in common.
        let mut below = |limit: usize| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((mixed ^ (mixed >> 31)) % limit as u64) as usize
        };
        let world = WORLDS[below(7)];
        let (what, dtype) = (What::ALL[below(19)], DType::ALL[below(13)]);
        let ops = operators(dtype);
        let op = ops[below(ops.len())];
        let root = Rank(below(world as usize) as u32);
        let mut sample = Self {
            kind: [Kind::Shared, Kind::Unix, Kind::Memory][below(3)],
            world,
            what,
            dtype,
            op: what.has_operator().then_some(op),
            root: what.has_root().then_some(root),
            slowed: [1, 40, 400][below(3)],
            force: None,
            short: Compression::None,
            switch: None,
            length: LENGTHS[below(7)],
        };
        let switches = sample.switches();
        if !switches.is_empty() && below(4) > 0 {
            let switch = switches[below(switches.len())];
            sample.switch = Some(switch);
            sample.length = (switch + below(4)).saturating_sub(2);
        }
        sample
    }

    /// One of each operation, type and operator, on ranks with such links, of no elements.
    pub(crate) fn each(kind: Kind, world: u32, dtypes: &[DType]) -> Vec<Self> {
        let mut samples = Vec::new();
        for (what, dtype) in
            (What::ALL.into_iter()).flat_map(|what| dtypes.iter().map(move |dtype| (what, *dtype)))
        {
            let ops = if what.has_operator() {
                operators(dtype).into_iter().map(Some).collect()
            } else {
                vec![None]
            };
            samples.extend(ops.into_iter().map(|op| Self {
                kind,
                world,
                what,
                dtype,
                op,
                root: what.has_root().then_some(Rank(world / 2)),
                slowed: 400,
                force: None,
                short: Compression::None,
                switch: None,
                length: 0,
            }));
        }
        samples
    }

    /// The same of these lengths.
    pub(crate) fn of_lengths(self, lengths: &[usize]) -> impl Iterator<Item = Self> {
        (lengths.iter()).map(move |length| Self {
            length: *length,
            ..self
        })
    }

    /// The same of other lengths: short ones, and those around every change.
    pub(crate) fn around_switches(self) -> impl Iterator<Item = Self> {
        let near = (self.switches().into_iter())
            .flat_map(|switch| (-1..=1).filter_map(move |more| switch.checked_add_signed(more)));
        let lengths: BTreeSet<usize> = near.chain(LENGTHS).collect();
        (lengths.into_iter()).map(move |length| Self { length, ..self })
    }

    pub(crate) fn tuning(&self) -> Tuning {
        Tuning {
            model: Model::default().slowed(f64::from(self.slowed)),
            force: self.force,
            segment: self.force.map(|_| 5),
        }
    }

    /// What a rank gives: its numbers, and if they travel as half types, so little more that they are what arrives.
    fn given<T: Value>(&self, rank: u32, length: usize) -> Vec<T> {
        let mut values = of_rank::<T>(rank, length);
        if self.short != Compression::None {
            for value in &mut values {
                let any: &mut dyn std::any::Any = value;
                if let Some(value) = any.downcast_mut::<f32>() {
                    *value *= 1.00001;
                } else if let Some(value) = any.downcast_mut::<f64>() {
                    *value *= 1.00001;
                }
            }
        }
        values
    }

    /// How many elements a rank has where they have different ones: as many in all as if not.
    fn share(&self, rank: u32) -> usize {
        let more = self.length.min(3 + rank as usize / 2);
        match rank % 2 {
            0 if rank + 1 < self.world => self.length + more,
            0 => self.length,
            _ => self.length - more,
        }
    }
}

/// A rank's numbers.
fn of_rank<T: Value>(rank: u32, length: usize) -> Vec<T> {
    repeated(&input::<T>(rank, PERIOD), length)
}

fn repeated<T: Element>(period: &[T], length: usize) -> Vec<T> {
    let mut values = period.repeat(length.div_ceil(PERIOD));
    values.truncate(length);
    values
}

/// Says which case it was.
struct Case<'a>(&'a Sample);

impl Drop for Case<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{:?}", self.0);
        }
    }
}

/// All cases, one after the other, on ranks that are there.
pub(crate) fn run(group: &Group, samples: &[Sample]) {
    group.run(|comm| run_on(comm, samples));
}

/// The part of one rank.
pub(crate) fn run_on(comm: &Communicator, samples: &[Sample]) {
    for sample in samples {
        let _case = Case(sample);
        if comm.tuning() != sample.tuning() {
            comm.set_tuning(sample.tuning());
        }
        let of_type = for_each_type!(dtype_of).map(|dtype_of| dtype_of() == sample.dtype);
        let index = of_type.iter().position(|is_it| *is_it);
        let options = Options::new().compression(sample.short);
        let once = for_each_type!(once)[index.expect("a type that has a reference")];
        once(&comm.with(options), sample);
    }
}

fn dtype_of<T: Value>() -> DType {
    T::DTYPE
}

fn once<T: Value>(comm: &Communicator, sample: &Sample) {
    match sample.op {
        Some(op) => reduces::<T>(comm, sample, op),
        None => moves::<T>(comm, sample),
    }
}

fn reduces<T: Value>(comm: &Communicator, sample: &Sample, op: ReduceOp) {
    let (me, world, length) = (comm.rank(), sample.world, sample.length);
    let before = sample.given::<T>(me.0, length);
    let expected = repeated(&combined::<T>(op, 0..world, PERIOD), length);
    let mut data = before.clone();
    match sample.what {
        What::AllReduce => {
            comm.all_reduce(&mut data, op).unwrap();
            assert!(data == expected);
        }
        What::AllReduceInto => {
            let mut into = vec![T::default(); length];
            comm.all_reduce_into(&data, &mut into, op).unwrap();
            assert!(into == expected && data == before);
        }
        What::AllReduceBuffer => {
            let mut buffer = comm.buffer::<T>(length).unwrap();
            buffer.copy_from_slice(&data);
            comm.all_reduce_buffer(&mut buffer, op).unwrap();
            assert!(*buffer == *expected);
        }
        What::AllReduceGrouped => {
            let mut other = sample.given::<T>(me.0, 3);
            comm.all_reduce_grouped(&mut [&mut data, &mut [], &mut other], op)
                .unwrap();
            assert!(data == expected && other == combined::<T>(op, 0..world, 3));
        }
        What::NamedAllReduce => {
            // Two that may be fused.
            let named = ["one", "two"].map(|name| comm.named(name).all_reduce(before.clone(), op));
            assert!(named.map(|named| named.wait().unwrap()) == [expected.clone(), expected]);
        }
        What::Reduce => {
            let root = sample.root.unwrap();
            comm.reduce(&mut data, op, root).unwrap();
            assert!(data == if me == root { expected } else { before });
        }
        What::ReduceScatter => {
            // A row for each element, all in one, rows of two.
            for (rows, width) in [(length, 1), (1, length), (length / 2, 2)] {
                if rows * width == length {
                    let part = comm.reduce_scatter(&data, rows, op).unwrap();
                    let mine = comm.rows_of(rows, me);
                    assert!(part == expected[mine.start * width..mine.end * width]);
                }
            }
            assert!(data == before);
        }
        What::ReduceScatterGrouped => {
            let other = sample.given::<T>(me.0, 6);
            let given: [(&[T], usize); 3] = [(&data, length), (&[], 0), (&other, 3)];
            let parts = comm.reduce_scatter_grouped(&given, op).unwrap();
            let rows = comm.rows_of(3, me);
            let others = combined::<T>(op, 0..world, 6)[2 * rows.start..2 * rows.end].to_vec();
            let mine = expected[comm.rows_of(length, me)].to_vec();
            assert!(parts == [mine, vec![], others]);
        }
        other => panic!("{other:?} reduces nothing"),
    }
}

fn moves<T: Value>(comm: &Communicator, sample: &Sample) {
    let (me, world, length) = (comm.rank().0, sample.world, sample.length);
    let is_root = sample.root == Some(comm.rank());
    let root = sample.root.unwrap_or_default();
    let mut data = sample.given::<T>(me, length);
    let of_all = || -> Vec<T> { (0..world).flat_map(|rank| of_rank(rank, length)).collect() };
    let counts: Vec<usize> = (0..world).map(|rank| sample.share(rank)).collect();
    let varied = || Gathered {
        values: (0..world)
            .flat_map(|rank| of_rank::<T>(rank, sample.share(rank)))
            .collect(),
        counts: counts.clone(),
    };
    match sample.what {
        What::Broadcast => {
            comm.broadcast(&mut data, root).unwrap();
            assert!(data == of_rank(root.0, length));
        }
        What::AllGather => assert!(comm.all_gather(&data).unwrap() == of_all()),
        What::Gather => {
            assert!(comm.gather(&data, root).unwrap() == is_root.then(of_all));
        }
        What::AllGatherVarcount => {
            let mine = sample.given::<T>(me, sample.share(me));
            assert!(comm.all_gather_varcount(&mine).unwrap() == varied());
        }
        What::GatherVarcount => {
            let mine = sample.given::<T>(me, sample.share(me));
            assert!(comm.gather_varcount(&mine, root).unwrap() == is_root.then(varied));
        }
        What::Scatter => {
            let mut all: Vec<T> = Vec::new();
            if is_root {
                all.extend((0..world).flat_map(|rank| sample.given::<T>(rank, length)));
            }
            let part = comm.scatter(&all, length, root).unwrap();
            assert!(part == of_rank::<T>(me, length));
        }
        What::ScatterVarcount => {
            let mut all: Vec<T> = Vec::new();
            if is_root {
                let given = |rank| sample.given::<T>(rank, sample.share(rank));
                all.extend((0..world).flat_map(given));
            }
            let counts = if is_root { &counts[..] } else { &[] };
            let part = comm.scatter_varcount(&all, counts, root).unwrap();
            assert!(part == of_rank::<T>(me, sample.share(me)));
        }
        What::AllToAll => {
            // Other numbers for each two ranks.
            let part = |from: u32, to: u32| of_rank::<T>(from + world * to, length);
            let given = |to| sample.given::<T>(me + world * to, length);
            let all: Vec<T> = (0..world).flat_map(given).collect();
            let expected: Vec<T> = (0..world).flat_map(|from| part(from, me)).collect();
            assert!(comm.all_to_all(&all).unwrap() == expected);
        }
        What::AllToAllVarcount => {
            let part = |from: u32, to: u32| {
                let length = sample.share((from + to) % world);
                of_rank::<T>(from + world * to, length)
            };
            let splits: Vec<usize> = (0..world).map(|to| part(me, to).len()).collect();
            let given = |to| sample.given::<T>(me + world * to, sample.share((me + to) % world));
            let mut all: Vec<T> = (0..world).flat_map(given).collect();
            // What the splits leave over stays.
            all.push(T::default());
            let parts: Vec<Vec<T>> = (0..world).map(|from| part(from, me)).collect();
            let expected = Gathered {
                counts: parts.iter().map(Vec::len).collect(),
                values: parts.concat(),
            };
            assert!(comm.all_to_all_varcount(&all, &splits).unwrap() == expected);
        }
        What::AllGatherGrouped => {
            let mine = sample.given::<T>(me, sample.share(me));
            let all = comm.all_gather_grouped(&[&mine, &[], &data]).unwrap();
            let equal = Gathered {
                values: of_all(),
                counts: vec![length; world as usize],
            };
            let none = Gathered {
                counts: vec![0; world as usize],
                ..Gathered::default()
            };
            assert!(all == [varied(), none, equal]);
        }
        // Around the circle, one way and the other.
        What::SendReceive if world > 1 => {
            let (next, before) = ((me + 1) % world, (me + world - 1) % world);
            let sent = comm.start().send(data.clone(), Rank(next));
            let received = comm.receive::<T>(Rank(before)).unwrap();
            assert!(received == of_rank::<T>(before, length));
            assert!(sent.wait().unwrap() == data);
            let sent = comm.start().send(data, Rank(before));
            let mut into = vec![T::default(); length];
            comm.receive_into(&mut into, Rank(next)).unwrap();
            assert!(into == of_rank::<T>(next, length));
            sent.wait().unwrap();
        }
        What::SendReceive => {}
        other => panic!("{other:?} moves nothing"),
    }
}
