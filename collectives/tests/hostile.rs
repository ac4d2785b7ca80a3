//! A peer that does not keep to the protocol.

#![allow(clippy::unwrap_used)]

mod common;

use std::future::poll_fn;
use std::io::IoSlice;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use common::{GENERATION, JOB, LONG};
use kolo_collectives::cause::Cause;
use kolo_collectives::header::{Data, HEADER, Header, SEGMENT};
use kolo_collectives::lane::{Connecting, MemoryLane};
use kolo_collectives::operation::{Factor, Operation, OperationKind, Tag};
use kolo_collectives::schedule::Algorithm;
use kolo_collectives::{
    Acceptor, CollectiveError, Communicator, Connector, DType, GroupId, Lane, LaneError, ReduceOp,
};
use kolo_transport::ids::{Generation, JobId, Rank};
use proptest::prelude::*;
use tokio::runtime::Runtime;

/// Rank 0 waits for links and makes none.
#[derive(Debug)]
struct NoConnector;

impl Connector for NoConnector {
    fn connect(&self, peer: Rank) -> Connecting {
        Box::pin(async move {
            Err(LaneError::Unreachable {
                reason: format!("there is no way to rank {peer}"),
            })
        })
    }
}

/// Rank 0 of two, and the other end of its link.
fn victim(runtime: &Runtime, rank: u32) -> (Communicator, MemoryLane) {
    let comm = Communicator::new(
        Rank(rank),
        2,
        GENERATION,
        JOB,
        Arc::new(NoConnector),
        runtime.handle().clone(),
    )
    .unwrap()
    .with_timeout(LONG);
    let (mine, theirs) = MemoryLane::pair(4 << 20);
    comm.acceptor()
        .accept(Rank(1 - rank), Box::new(mine))
        .unwrap();
    (comm, theirs)
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

fn write(runtime: &Runtime, lane: &mut MemoryLane, mut bytes: &[u8]) {
    runtime.block_on(async {
        while !bytes.is_empty() {
            let count = poll_fn(|cx| lane.poll_write(cx, &[IoSlice::new(bytes)])).await;
            bytes = &bytes[count.unwrap()..];
        }
    });
}

/// What rank 0 says before it gives up, read to the end.
fn read_all(runtime: &Runtime, lane: &mut MemoryLane) -> Vec<u8> {
    let mut all = Vec::new();
    runtime.block_on(async {
        let mut piece = [0; 4096];
        loop {
            match poll_fn(|cx| lane.poll_read(cx, &mut piece)).await {
                Ok(0) | Err(_) => return,
                Ok(count) => all.extend_from_slice(&piece[..count]),
            }
        }
    });
    all
}

const COUNT: u64 = 100;

/// The right header of the first frame for rank 0's all-reduce of 100 `i32`.
fn right() -> Data {
    Data {
        generation: GENERATION,
        tag: Tag::default(),
        operation: Operation {
            reduce: Some(ReduceOp::Sum),
            algorithm: Algorithm::Flat,
            ..Operation::new(OperationKind::AllReduce, Some(DType::I32), COUNT)
        },
        step: 0,
        offset: 0,
        length: 4 * COUNT as u32,
    }
}

/// Rank 0's error when rank 1 sends this, and closes the link or not.
fn error_after(bytes: &[u8], closes: bool) -> CollectiveError {
    let runtime = runtime();
    let (comm, mut lane) = victim(&runtime, 0);
    write(&runtime, &mut lane, bytes);
    let _open = (!closes).then_some(lane);
    let mut data = [7_i32; COUNT as usize];
    let error = comm.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
    assert_eq!(data, [7; COUNT as usize]);
    error
}

fn frame(header: Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = header.encode().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

fn protocol_error(bytes: &[u8], contains: &str) {
    let error = error_after(bytes, false);
    let text = error.to_string();
    assert!(matches!(error, CollectiveError::Protocol { .. }), "{text}");
    assert_eq!(error.culprit_rank(), Some(Rank(1)));
    assert!(text.contains(contains), "{text}");
}

#[test]
fn frames_that_break_the_protocol_are_refused_with_the_senders_name() {
    protocol_error(&[b'H'; HEADER], "instead of `kolo`");
    let mut old = Header::Data(right()).encode();
    old[4] = 0;
    protocol_error(&old, "protocol version 0, this side has 2");
    let mut long = right();
    long.length = SEGMENT as u32 + 1;
    protocol_error(&Header::Data(long).encode(), "over the limit of 262144");
    let hello = Header::Hello {
        job: JobId(1),
        generation: GENERATION,
        rank: Rank(1),
        group: 0,
    };
    protocol_error(&hello.encode(), "a hello in the middle");
    let mut stale = right();
    stale.generation = Generation(GENERATION.0 - 1);
    protocol_error(
        &Header::Data(stale).encode(),
        "a frame of generation 2 on a link of generation 3",
    );
    let mut short = right();
    short.length = 8;
    protocol_error(
        &Header::Data(short).encode(),
        "8 bytes at 0 of its step 0 came where 400",
    );
    let mut shifted = right();
    shifted.offset = 4;
    protocol_error(&Header::Data(shifted).encode(), "400 bytes at 4");
    let notice = Header::AbortOperation {
        generation: GENERATION,
        tag: Tag::default(),
        length: 3,
    };
    protocol_error(&frame(notice, b"???"), "a notice that is none");
    let text = Cause::Lost {
        rank: Rank(2),
        reason: "who?".to_owned(),
        for_good: false,
    }
    .encode();
    let stranger = Header::AbortOperation {
        generation: GENERATION,
        tag: Tag::default(),
        length: text.len() as u32,
    };
    protocol_error(
        &frame(stranger, &text),
        "a notice about rank 2 of a world of 2",
    );
}

/// A lane whose owner lies: where it sends the length [`Liar::SAID`], alone or among others, it says another one.
#[derive(Debug)]
struct Liar {
    inner: MemoryLane,
    says: u64,
}

impl Liar {
    const SAID: usize = 777;
}

impl Lane for Liar {
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>> {
        let [header, payload] = parts else {
            return self.inner.poll_write(cx, parts);
        };
        let mut words = payload.to_vec();
        if payload.len() <= 64 && payload.len().is_multiple_of(8) {
            for word in words.chunks_exact_mut(8) {
                if *word == (Self::SAID as u64).to_le_bytes() {
                    word.copy_from_slice(&self.says.to_le_bytes());
                }
            }
        }
        self.inner
            .poll_write(cx, &[IoSlice::new(header), IoSlice::new(&words)])
    }

    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        self.inner.poll_read(cx, into)
    }

    fn kind(&self) -> &'static str {
        "liar"
    }
}

/// Links for every group that are made when rank 1 wants them; it lies on all of them.
#[derive(Debug)]
struct LiarsConnector {
    acceptor: Acceptor,
    says: u64,
}

impl Connector for LiarsConnector {
    fn connect(&self, peer: Rank) -> Connecting {
        self.connect_group(peer, GroupId::WORLD)
    }

    fn connect_group(&self, _peer: Rank, group: GroupId) -> Connecting {
        let (acceptor, says) = (self.acceptor.clone(), self.says);
        Box::pin(async move {
            let (inner, theirs) = MemoryLane::pair(4 << 20);
            acceptor.accept_group(group, Rank(1), Box::new(theirs))?;
            Ok(Box::new(Liar { inner, says }) as Box<dyn Lane>)
        })
    }
}

/// A peer that says that it has more elements than there is memory for makes an error, and does not end the process: in
/// every operation that begins with lengths.
#[test]
fn lengths_that_no_memory_holds_are_refused() {
    type Body = fn(&Communicator) -> Result<(), CollectiveError>;
    const SAID: usize = Liar::SAID;
    let bodies: [(&str, Body); 8] = [
        ("all_gather_varcount", |comm| {
            let mine = vec![1_i32; SAID * comm.rank().index()];
            comm.all_gather_varcount(&mine).map(drop)
        }),
        ("gather_varcount", |comm| {
            comm.gather_varcount(&[1_u8; SAID], Rank(0)).map(drop)
        }),
        ("scatter_varcount", |comm| {
            let data = [0_u64; SAID + 1];
            comm.scatter_varcount(&data, &[SAID, 1], Rank(1)).map(drop)
        }),
        ("all_to_all_varcount", |comm| {
            comm.all_to_all_varcount(&[1_u8; SAID + 1], &[SAID, 1])
                .map(drop)
        }),
        ("broadcast_object", |comm| {
            // Three bytes say what and how long it is.
            let value = "x".repeat(SAID - 3);
            comm.broadcast_object(Some(value), Rank(1)).map(drop)
        }),
        ("all_gather_object", |comm| {
            let length = if comm.rank() == Rank(0) { 5 } else { SAID - 3 };
            comm.all_gather_object(&"x".repeat(length)).map(drop)
        }),
        ("receive", |comm| match comm.rank() {
            Rank(0) => comm.receive::<u16>(Rank(1)).map(drop),
            _ => comm.send(&[1_u16; SAID], Rank(0)),
        }),
        ("receive_into", |comm| match comm.rank() {
            Rank(0) => comm.receive_into(&mut [0_i8; SAID], Rank(1)),
            _ => comm.send(&[1_i8; SAID], Rank(0)),
        }),
    ];
    let runtime = runtime();
    for (name, body) in bodies {
        for says in [
            SAID as u64,
            1 << 50,
            1 << 58,
            u64::MAX >> 3,
            u64::MAX - 8,
            u64::MAX,
        ] {
            let make = |rank, connector| {
                let handle = runtime.handle().clone();
                Communicator::new(Rank(rank), 2, GENERATION, JOB, connector, handle).unwrap()
            };
            let victim = make(0, Arc::new(NoConnector));
            victim.set_timeout(LONG);
            let acceptor = victim.acceptor();
            let liar = make(1, Arc::new(LiarsConnector { acceptor, says }));
            // It believes itself, and may wait.
            liar.set_timeout(Duration::from_millis(300));
            let result = std::thread::scope(|scope| {
                scope.spawn(|| drop(body(&liar)));
                body(&victim)
            });
            if says == SAID as u64 {
                assert_eq!(result, Ok(()), "{name}: who does not lie is believed");
                continue;
            }
            let error = result.unwrap_err();
            assert!(
                matches!(error, CollectiveError::Invalid { .. }),
                "{name}, {says}: {error}"
            );
        }
    }
}

#[test]
fn a_link_that_ends_anywhere_in_a_frame_is_a_lost_peer() {
    let whole = frame(Header::Data(right()), &[1; 4 * COUNT as usize]);
    for cut in [0, 1, HEADER - 1, HEADER, HEADER + 1, whole.len() - 1] {
        let error = error_after(&whole[..cut], true);
        assert!(
            matches!(error, CollectiveError::PeerLost { .. }),
            "{cut}: {error}"
        );
        assert_eq!(error.culprit_rank(), Some(Rank(1)));
    }
}

/// The rest of a notice that comes when its operation has ended well is nobody's business.
#[test]
fn a_notice_that_is_cut_by_the_end_of_its_operation_does_not_hurt_the_next() {
    let runtime = runtime();
    let (comm, mut lane) = victim(&runtime, 0);
    let cause = Cause::Failed {
        rank: Rank(1),
        reason: "too late".to_owned(),
    };
    let text = cause.encode();
    let notice = Header::AbortOperation {
        generation: GENERATION,
        tag: Tag::default(),
        length: text.len() as u32,
    };
    let values = [1_u8; 4 * COUNT as usize];
    let mut bytes = frame(Header::Data(right()), &values);
    bytes.extend_from_slice(&notice.encode());
    bytes.extend_from_slice(&text[..5]);
    write(&runtime, &mut lane, &bytes);
    comm.all_reduce(&mut [0_i32; COUNT as usize], ReduceOp::Sum)
        .unwrap();

    let mut next = right();
    next.tag = next.tag.after();
    let mut bytes = text[5..].to_vec();
    bytes.extend_from_slice(&frame(Header::Data(next), &values));
    write(&runtime, &mut lane, &bytes);
    let mut data = [1_i32; COUNT as usize];
    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, [0x0101_0102; COUNT as usize]);
}

#[test]
fn a_peer_hears_why_this_rank_gave_up() {
    let runtime = runtime();
    let (comm, mut lane) = victim(&runtime, 0);
    let mut other = right();
    other.operation.count = 101;
    write(&runtime, &mut lane, &Header::Data(other).encode());
    let error = comm
        .all_reduce(&mut [7_i32; COUNT as usize], ReduceOp::Sum)
        .unwrap_err();
    assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
    drop(comm);
    let said = read_all(&runtime, &mut lane);
    let mut header = [0; HEADER];
    header.copy_from_slice(&said[said.len() - HEADER - text_length(&said)..][..HEADER]);
    let header = Header::parse(&header).unwrap();
    assert!(
        matches!(header, Header::AbortOperation { .. }),
        "{header:?}"
    );
    let cause = Cause::parse(&said[said.len() - header.length()..]).unwrap();
    let Cause::Mismatch {
        asked, other_asked, ..
    } = cause
    else {
        panic!("{cause:?}");
    };
    assert_eq!(asked, "all_reduce(sum) of 100 i32");
    assert_eq!(other_asked, "all_reduce(sum) of 101 i32");
}

/// The length of the last payload: what follows the last header.
fn text_length(said: &[u8]) -> usize {
    let last = said
        .windows(5)
        .rposition(|window| window == [b'k', b'o', b'l', b'o', 2])
        .unwrap();
    said.len() - last - HEADER
}

#[test]
fn a_rank_that_can_make_no_link_says_so() {
    let runtime = runtime();
    let comm = Communicator::new(
        Rank(1),
        2,
        GENERATION,
        JOB,
        Arc::new(NoConnector),
        runtime.handle().clone(),
    )
    .unwrap();
    let error = comm.barrier().unwrap_err();
    assert_eq!(
        error.to_string(),
        "can't connect to rank 0: there is no way to rank 0"
    );
    assert_eq!(error.culprit_rank(), Some(Rank(0)));
    assert!(error.is_retryable());
}

/// An operation that a peer may claim to do; most of them make no sense.
fn any_operation() -> impl Strategy<Value = Operation> {
    let types = || prop::option::of(prop::sample::select(DType::ALL.to_vec()));
    let number = || {
        prop_oneof![
            0_u64..6,
            Just(1 << 20),
            Just(1 << 40),
            Just(1 << 62),
            any::<u64>()
        ]
    };
    let marks = [
        0,
        // Lengths of several kinds of operations, an object, a join, and what is none of them.
        7 << 61 | 1 << 16 | 5 << 8 | 7,
        7 << 61 | 1 << 16 | 10 << 8 | 7,
        7 << 61 | 1 << 16 | 14 << 8 | 7,
        7 << 61 | 2 << 16,
        7 << 61 | 3 << 16,
        7 << 61 | 9 << 16,
        1 << 61 | 5,
    ];
    (
        prop::sample::select(OperationKind::ALL.to_vec()),
        types(),
        prop::option::of(prop::sample::select(ReduceOp::ALL.to_vec())),
        prop::option::of(0..3_u32),
        prop::sample::select(Algorithm::ALL.to_vec()),
        types(),
        (any::<u8>(), prop::sample::select(marks.to_vec())),
        (number(), number(), any::<f64>()),
    )
        .prop_map(
            |(
                kind,
                dtype,
                reduce,
                root,
                algorithm,
                wire,
                (segment, shape),
                (count, rows, scale),
            )| {
                Operation {
                    kind,
                    dtype,
                    reduce,
                    root,
                    count,
                    rows,
                    shape,
                    prescale: Factor::new(scale),
                    postscale: Factor::ONE,
                    wire,
                    algorithm,
                    segment,
                }
            },
        )
}

/// What a victim does while its peer misbehaves.
type Doing = fn(&Communicator) -> Result<(), CollectiveError>;

const DOING: [Doing; 9] = [
    |comm| comm.all_reduce(&mut [1_i32; COUNT as usize], ReduceOp::Sum),
    |comm| comm.broadcast(&mut [1_u8; 9], Rank(1)),
    |comm| comm.all_gather_varcount(&[1_f32; 3]).map(drop),
    |comm| comm.gather_varcount(&[1_f64; 3], Rank(0)).map(drop),
    |comm| comm.scatter_varcount(&[0_u8], &[0, 1], Rank(1)).map(drop),
    |comm| comm.all_to_all_varcount(&[1_u8; 4], &[1, 3]).map(drop),
    |comm| comm.broadcast_object(Some(5_u8), Rank(1)).map(drop),
    |comm| comm.join().map(drop),
    |comm| comm.trace().map(drop),
];

proptest! {
    #![proptest_config(ProptestConfig::default())]

    /// A rank without data takes part in what its peers say that they do. It looks at what they say first.
    #[test]
    fn a_rank_that_joined_follows_nobody_into_nonsense(
        operation in any_operation(),
        ask in any::<bool>(),
        noise in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let runtime = runtime();
        let (comm, mut lane) = victim(&runtime, 0);
        let data = Data { operation, length: 0, ..right() };
        let header = if ask { Header::Ask(data) } else { Header::Data(data) };
        write(&runtime, &mut lane, &frame(header, &noise));
        drop(lane);
        let error = comm.join().unwrap_err();
        prop_assert!(!matches!(error, CollectiveError::Deadline { .. }), "{}", error);
    }

    /// Frames of all kinds about all operations, whatever the rank does itself.
    #[test]
    fn frames_in_any_order_end_the_operation_and_nothing_else(
        doing in prop::sample::select(DOING.to_vec()),
        frames in prop::collection::vec(
            (any_operation(), 4_u8..11, 0..3_u64, 0_u8..20, any::<bool>()),
            1..6,
        ),
        noise in prop::collection::vec(any::<u8>(), 0..3 * HEADER),
    ) {
        let runtime = runtime();
        let (comm, mut lane) = victim(&runtime, 0);
        let mut bytes = Vec::new();
        for (operation, kind, number, length, right_one) in frames {
            let tag = Tag { call: 0, operation: number };
            let operation = if right_one { right().operation } else { operation };
            let mut header = Header::Data(Data { operation, tag, ..right() }).encode();
            header[5] = kind;
            let length = if matches!(kind, 7 | 8 | 10) { 0 } else { length };
            header[52..56].copy_from_slice(&u32::from(length).to_le_bytes());
            if kind == 10 {
                header[6] = 1 + length % 5;
            }
            bytes.extend_from_slice(&header);
            bytes.extend(std::iter::repeat_n(length, usize::from(length)));
        }
        bytes.extend_from_slice(&noise);
        write(&runtime, &mut lane, &bytes);
        drop(lane);
        let error = doing(&comm).unwrap_err();
        prop_assert!(!matches!(error, CollectiveError::Deadline { .. }), "{}", error);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Whatever a peer sends, the operation ends with an error and the input as it was.
    #[test]
    fn random_bytes_end_the_operation_and_nothing_else(
        kinds in prop::collection::vec(0_u8..8, 0..4),
        noise in prop::collection::vec(any::<u8>(), 0..3 * HEADER),
    ) {
        let mut bytes = Vec::new();
        for kind in kinds {
            let mut header = Header::Data(right()).encode();
            header[5] = kind;
            header[55] = 0;
            bytes.extend_from_slice(&header);
        }
        bytes.extend_from_slice(&noise);
        let error = error_after(&bytes, true);
        prop_assert!(!matches!(error, CollectiveError::Deadline { .. }), "{}", error);
    }
}

/// Rank 1 wants a link for some group, gets none, and its connector knows which it was.
#[derive(Debug, Default)]
struct Curious(Mutex<Option<GroupId>>);

impl Connector for Curious {
    fn connect(&self, peer: Rank) -> Connecting {
        self.connect_group(peer, GroupId::WORLD)
    }

    fn connect_group(&self, _peer: Rank, group: GroupId) -> Connecting {
        *self.0.lock().unwrap() = Some(group);
        Box::pin(async {
            Err(LaneError::Unreachable {
                reason: "it only wanted to know".to_owned(),
            })
        })
    }
}

/// The group over whose links named operations are negotiated.
fn group_of_names(runtime: &Runtime) -> GroupId {
    let connector = Arc::new(Curious::default());
    let handle = runtime.handle().clone();
    let as_connector = Arc::clone(&connector) as Arc<dyn Connector>;
    let comm = Communicator::new(Rank(1), 2, GENERATION, JOB, as_connector, handle).unwrap();
    comm.named("a").barrier().wait().unwrap_err();
    connector.0.lock().unwrap().unwrap()
}

/// A rank that never stops asking for new names is left, and what the others wait for ends.
#[test]
fn names_without_end_are_refused() {
    let runtime = runtime();
    let group = group_of_names(&runtime);
    let (comm, _lane) = victim(&runtime, 0);
    let waiting = comm.named("w").barrier();
    let (mine, mut theirs) = MemoryLane::pair(1 << 20);
    comm.acceptor()
        .accept_group(group, Rank(1), Box::new(mine))
        .unwrap();
    let operation = Header::Ask(Data {
        length: 0,
        ..right()
    })
    .encode();
    let mut sent = 0_u32;
    runtime.block_on(async {
        loop {
            // MessagePack: {"Ask": {call, name, operation, limit_ms}} as arrays and maps of serde's making.
            let name = format!("{sent:08}");
            let mut message = vec![0x81, 0xa3];
            message.extend_from_slice(b"Ask");
            message.extend_from_slice(&[0x94, 0, 0xa8]);
            message.extend_from_slice(name.as_bytes());
            message.extend_from_slice(&[0xdc, 0, HEADER as u8]);
            for byte in operation {
                if byte > 0x7f {
                    message.push(0xcc);
                }
                message.push(byte);
            }
            message.extend_from_slice(&[0xce, 0x7f, 0xff, 0xff, 0xff]);
            let mut bytes = (message.len() as u32).to_le_bytes().to_vec();
            bytes.extend_from_slice(&message);
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                match poll_fn(|cx| theirs.poll_write(cx, &[IoSlice::new(rest)])).await {
                    Ok(count) => rest = &rest[count..],
                    Err(_) => return,
                }
            }
            sent += 1;
            assert!(sent < 1 << 20, "it is listened to for ever");
        }
    });
    assert!(
        sent > 100_000,
        "{sent}: names that could be under way are taken"
    );
    let error = waiting.wait().unwrap_err();
    assert!(
        error.to_string().contains("more than can be under way"),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Whatever comes on a link for names, who waits gets an error.
    #[test]
    fn noise_on_a_link_for_names_ends_what_waits(
        messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..4),
        noise in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let runtime = runtime();
        let group = group_of_names(&runtime);
        let (comm, _lane) = victim(&runtime, 0);
        let waiting = comm.named("w").barrier();
        let (mine, mut theirs) = MemoryLane::pair(1 << 20);
        comm.acceptor().accept_group(group, Rank(1), Box::new(mine)).unwrap();
        let mut bytes = Vec::new();
        for message in messages {
            bytes.extend_from_slice(&(message.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&message);
        }
        bytes.extend_from_slice(&noise);
        write(&runtime, &mut theirs, &bytes);
        drop(theirs);
        prop_assert!(waiting.wait().is_err());
    }
}
