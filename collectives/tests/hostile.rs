//! A peer that does not keep to the protocol.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::victim::{
    COUNT, NoConnector, frame, notice, read_notice, right, runtime, victim, write,
};
use common::{GENERATION, JOB};
use kolo_collectives::cause::Cause;
use kolo_collectives::header::{Data, HEADER, Header, SEGMENT};
use kolo_collectives::operation::{Factor, Operation, OperationKind, Tag};
use kolo_collectives::schedule::Algorithm;
use kolo_collectives::{CollectiveError, Communicator, DType, ReduceOp};
use kolo_transport::ids::{CallId, Generation, JobId, Rank};
use proptest::prelude::*;

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

#[test]
fn frames_that_break_the_protocol_are_refused_with_the_senders_name() {
    let changed = |change: fn(&mut Data)| {
        let mut data = right();
        change(&mut data);
        Header::Data(data).encode().to_vec()
    };
    let mut old = changed(|_| ());
    old[4] = 0;
    let hello = Header::Hello {
        job: JobId(1),
        generation: GENERATION,
        rank: Rank(1),
        group: 0,
        world: 2,
    };
    let unknown = Header::AbortOperation {
        generation: GENERATION,
        tag: Tag::default(),
        length: 3,
    };
    let stranger = Cause::Failure(CollectiveError::PeerLost {
        rank: Rank(2),
        reason: "who?".to_owned(),
    });
    let of_the_rank_alone = Cause::Failure(CollectiveError::Revoked {
        reason: "you are".to_owned(),
    });
    for (bytes, contains) in [
        (vec![b'H'; HEADER], "instead of `kolo`"),
        (old, "protocol version 0, this side has 7"),
        (
            changed(|data| data.length = SEGMENT as u32 + 1),
            "over the limit of 262144",
        ),
        (hello.encode().to_vec(), "a hello in the middle"),
        (
            changed(|data| data.generation = Generation(GENERATION.0 - 1)),
            "a frame of generation 2 on a link of generation 3",
        ),
        (
            changed(|data| data.length = 8),
            "8 bytes at 0 of its step 0 came where 400",
        ),
        (changed(|data| data.offset = 4), "400 bytes at 4"),
        (frame(unknown, b"???"), "a notice that is none"),
        (
            notice(Tag::default(), &of_the_rank_alone),
            "a notice that is none",
        ),
        (
            notice(Tag::default(), &stranger),
            "a notice about rank 2 of a world of 2",
        ),
    ] {
        let error = error_after(&bytes, false);
        let text = error.to_string();
        assert!(matches!(error, CollectiveError::Protocol { .. }), "{text}");
        assert_eq!(error.culprit_rank(), Some(Rank(1)));
        assert!(text.contains(contains), "{text}");
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
    let cause = Cause::Failure(CollectiveError::PeerFailed {
        rank: Rank(1),
        call: CallId(0),
        reason: "too late".to_owned(),
    });
    let values = [1_u8; 4 * COUNT as usize];
    let mut bytes = frame(Header::Data(right()), &values);
    let notice = notice(Tag::default(), &cause);
    let (begin, rest) = notice.split_at(notice.len() - 10);
    bytes.extend_from_slice(begin);
    write(&runtime, &mut lane, &bytes);
    comm.all_reduce(&mut [0_i32; COUNT as usize], ReduceOp::Sum)
        .unwrap();

    let mut next = right();
    next.tag.operation += 1;
    let mut bytes = rest.to_vec();
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
    // Behind its own data.
    let cause = std::iter::from_fn(|| Some(read_notice(&runtime, &mut lane)))
        .flatten()
        .next();
    let Some((
        _,
        Cause::Failure(CollectiveError::Mismatch {
            asked, other_asked, ..
        }),
    )) = cause
    else {
        panic!("{cause:?}");
    };
    assert_eq!(asked, "all_reduce(sum) of 100 i32");
    assert_eq!(other_asked, "all_reduce(sum) of 101 i32");
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
        "can't connect to rank 0: there is no way to rank 0 (rank 1 has tried)"
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
            let tag = Tag::new(0, number);
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
