//! Peers that keep to the form of the protocol and lie: about lengths, and about named operations.

#![allow(clippy::unwrap_used)]

mod common;

use std::future::poll_fn;
use std::io::IoSlice;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use common::victim::{NoConnector, lonely, right, runtime, write};
use common::{GENERATION, JOB, LONG, bodies};
use kolo_collectives::header::{Data, HEADER, Header};
use kolo_collectives::lane::{Connecting, MemoryLane};
use kolo_collectives::{
    Acceptor, CollectiveError, Communicator, Connector, GroupId, Handle, Lane, LaneError,
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
    const SAID: usize = Liar::SAID;
    // Three bytes say what an object is and how long.
    fn text(length: usize) -> String {
        "x".repeat(length - 3)
    }
    let bodies = bodies! { comm:
        comm.all_gather_varcount(&vec![1_i32; SAID * comm.rank().index()]) => "all_gather_varcount";
        comm.gather_varcount(&[1_u8; SAID], Rank(0)) => "gather_varcount";
        comm.scatter_varcount(&[0_u64; SAID + 1], &[SAID, 1], Rank(1)) => "scatter_varcount";
        comm.all_to_all_varcount(&[1_u8; SAID + 1], &[SAID, 1]) => "all_to_all_varcount";
        comm.broadcast_object(Some(text(SAID)), Rank(1)) => "broadcast_object";
        comm.all_gather_object(&text([8, SAID][comm.rank().index()])) => "all_gather_object";
        match comm.rank() {
            Rank(0) => comm.receive::<u16>(Rank(1)).map(drop),
            _ => comm.send(&[1_u16; SAID], Rank(0)),
        } => "receive";
        match comm.rank() {
            Rank(0) => comm.receive_into(&mut [0_i8; SAID], Rank(1)),
            _ => comm.send(&[1_i8; SAID], Rank(0)),
        } => "receive_into";
    };
    let runtime = runtime();
    for (body, name) in bodies {
        for says in [
            SAID as u64,
            1 << 50,
            1 << 58,
            u64::MAX >> 3,
            u64::MAX - 8,
            u64::MAX,
        ] {
            let result = lied_to(&runtime, says, body);
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

/// Makes links, and hands the other ends out with the groups that they are for.
#[derive(Debug)]
struct Hands(Sender<(GroupId, MemoryLane)>);

impl Connector for Hands {
    fn connect(&self, peer: Rank) -> Connecting {
        self.connect_group(peer, GroupId::WORLD)
    }

    fn connect_group(&self, _peer: Rank, group: GroupId) -> Connecting {
        let (mine, theirs) = MemoryLane::pair(1 << 20);
        self.0.send((group, theirs)).unwrap();
        Box::pin(async move { Ok(Box::new(mine) as Box<dyn Lane>) })
    }
}

/// Rank 1 waits in a named barrier. The group over whose links it is negotiated, and the other end of the link.
fn waits_by_name(runtime: &Runtime) -> (Communicator, Handle<()>, (GroupId, MemoryLane)) {
    let (sender, lanes) = channel();
    let (connector, handle) = (Arc::new(Hands(sender)), runtime.handle().clone());
    let comm = Communicator::new(Rank(1), 2, GENERATION, JOB, connector, handle).unwrap();
    let waiting = comm.named("w").barrier();
    (comm, waiting, lanes.recv().unwrap())
}

/// As rank 0, which has a link for names.
fn is_asked_by_name(runtime: &Runtime) -> (Communicator, Handle<()>, MemoryLane) {
    static GROUP: OnceLock<GroupId> = OnceLock::new();
    let group = *GROUP.get_or_init(|| waits_by_name(runtime).2.0);
    let comm = lonely(runtime, 0);
    let waiting = comm.named("w").barrier();
    let (mine, theirs) = MemoryLane::pair(1 << 20);
    comm.acceptor()
        .accept_group(group, Rank(1), Box::new(mine))
        .unwrap();
    (comm, waiting, theirs)
}

/// A message for or from a coordinator, with its length.
fn message(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_le_bytes(), bytes].concat()
}

/// A rank that never stops asking for new names is left, and what the others wait for ends.
#[test]
fn names_without_end_are_refused() {
    let runtime = runtime();
    let (_comm, waiting, mut theirs) = is_asked_by_name(&runtime);
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
            let mut ask = b"\x81\xa3Ask\x92\x92\0\xa8".to_vec();
            ask.extend_from_slice(format!("{sent:08}").as_bytes());
            ask.extend_from_slice(&[0x94, 0xdc, 0, HEADER as u8]);
            for byte in operation {
                if byte > 0x7f {
                    ask.push(0xcc);
                }
                ask.push(byte);
            }
            ask.extend_from_slice(&[0x92, 0xce, 0, 0xff, 0xff, 0xff, 0, 0xce]);
            ask.extend_from_slice(&(sent + 1).to_be_bytes());
            ask.push(0);
            let bytes = message(&ask);
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

/// Rank 0 says with which number named operations run.
#[test]
fn a_number_that_no_frame_holds_is_refused() {
    for number in [1 << 48, u64::MAX] {
        let runtime = runtime();
        let (_comm, waiting, (_, mut zero)) = waits_by_name(&runtime);
        // MessagePack: {"Run": [call, number, heard, follows, ["w"]]}.
        let mut run = b"\x81\xa3Run\x95\0\xcf".to_vec();
        run.extend_from_slice(&u64::to_be_bytes(number));
        run.extend_from_slice(b"\x7f\xc0\x91\xa1w");
        write(&runtime, &mut zero, &message(&run));
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
        let (_comm, waiting, mut theirs) = is_asked_by_name(&runtime);
        let mut bytes: Vec<u8> = messages.iter().flat_map(|one| message(one)).collect();
        bytes.extend_from_slice(&noise);
        write(&runtime, &mut theirs, &bytes);
        drop(theirs);
        prop_assert!(waiting.wait().is_err());
    }
}
