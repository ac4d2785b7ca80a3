//! Peers that keep to the form of the protocol and lie: about lengths, and about named operations.

#![allow(clippy::unwrap_used)]

mod common;

use std::future::poll_fn;
use std::io::IoSlice;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use common::victim::{NoConnector, right, runtime, victim, write};
use common::{GENERATION, JOB, LONG};
use kolo_collectives::header::{Data, HEADER, Header};
use kolo_collectives::lane::{Connecting, MemoryLane};
use kolo_collectives::{
    Acceptor, CollectiveError, Communicator, Connector, GroupId, Lane, LaneError,
};
use kolo_transport::ids::Rank;
use proptest::prelude::*;
use tokio::runtime::Runtime;

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
        // Lengths are few, and first.
        if payload.len().is_multiple_of(8) {
            for word in words.chunks_exact_mut(8).take(8) {
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
    let lie = |says, body: Body| lied_to(&runtime, says, body);
    for (name, body) in bodies {
        for says in [
            SAID as u64,
            1 << 50,
            1 << 58,
            u64::MAX >> 3,
            u64::MAX - 8,
            u64::MAX,
        ] {
            let result = lie(says, body);
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

/// What rank 0 makes of a rank 1 that lies.
fn lied_to(
    runtime: &Runtime,
    says: u64,
    body: impl Fn(&Communicator) -> Result<(), CollectiveError> + Sync,
) -> Result<(), CollectiveError> {
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
    std::thread::scope(|scope| {
        scope.spawn(|| drop(body(&liar)));
        body(&victim)
    })
}

/// Few values come along with their number; that many can't.
#[test]
fn more_values_than_can_have_come_along_are_refused() {
    let receive = |comm: &Communicator| match comm.rank() {
        Rank(0) => comm.receive::<u8>(Rank(1)).map(drop),
        _ => comm.send(&[1_u8; Liar::SAID], Rank(0)),
    };
    let runtime = runtime();
    assert_eq!(lied_to(&runtime, 1024, receive), Ok(()));
    let error = lied_to(&runtime, 1025, receive).unwrap_err();
    assert!(
        matches!(error, CollectiveError::Protocol { rank: Rank(1), .. }),
        "{error}"
    );
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
    static GROUP: OnceLock<GroupId> = OnceLock::new();
    *GROUP.get_or_init(|| ask_for_group_of_names(runtime))
}

fn ask_for_group_of_names(runtime: &Runtime) -> GroupId {
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
            // MessagePack: {"Ask": {key: (call, name), request: {operation, limit: {secs, nanos}, serial, epoch}}} as arrays and maps of
            // serde's making.
            let name = format!("{sent:08}");
            let mut message = vec![0x81, 0xa3];
            message.extend_from_slice(b"Ask");
            message.extend_from_slice(&[0x92, 0x92, 0, 0xa8]);
            message.extend_from_slice(name.as_bytes());
            message.extend_from_slice(&[0x94, 0xdc, 0, HEADER as u8]);
            for byte in operation {
                if byte > 0x7f {
                    message.push(0xcc);
                }
                message.push(byte);
            }
            message.extend_from_slice(&[0x92, 0xce, 0, 0xff, 0xff, 0xff, 0, 0xce]);
            message.extend_from_slice(&(sent + 1).to_be_bytes());
            message.push(0);
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

/// Makes links, and hands the other ends out.
#[derive(Debug)]
struct Hands(Sender<MemoryLane>);

impl Connector for Hands {
    fn connect(&self, _peer: Rank) -> Connecting {
        let (mine, theirs) = MemoryLane::pair(1 << 20);
        self.0.send(theirs).unwrap();
        Box::pin(async move { Ok(Box::new(mine) as Box<dyn Lane>) })
    }

    fn connect_group(&self, peer: Rank, _group: GroupId) -> Connecting {
        self.connect(peer)
    }
}

/// Rank 0 says with which number named operations run.
#[test]
fn a_number_that_no_frame_holds_is_refused() {
    for number in [1 << 48, u64::MAX] {
        let runtime = runtime();
        let (sender, lanes) = channel();
        let handle = runtime.handle().clone();
        let connector = Arc::new(Hands(sender));
        let comm = Communicator::new(Rank(1), 2, GENERATION, JOB, connector, handle).unwrap();
        let waiting = comm.named("w").barrier();
        let mut zero = lanes.recv().unwrap();
        // MessagePack: {"Run": [call, number, heard, follows, ["w"]]}.
        let mut message = b"\x81\xa3Run\x95\0\xcf".to_vec();
        message.extend_from_slice(&u64::to_be_bytes(number));
        message.extend_from_slice(b"\x7f\xc0\x91\xa1w");
        let mut bytes = (message.len() as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(&message);
        write(&runtime, &mut zero, &bytes);
        let error = waiting.wait().unwrap_err().to_string();
        assert!(error.contains(&format!("the number {number}")), "{error}");
    }
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
