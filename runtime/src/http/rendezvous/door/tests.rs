use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};

use actix_rt::Arbiter;
use aws_lc_rs::hmac;
use kolo_actors::budget::Budget;
use kolo_core::membership::Process;
use kolo_core::rendezvous::RendezvousPlan;
use kolo_transport::ids::{
    CrossRank, Generation, Incarnation, JobId, LocalRank, NodeId, Rank, Slot,
};
use kolo_transport::wire::{Handover, Member};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(20);

struct Opened {
    server: DoorServer,
    address: SocketAddr,
    news: UnboundedReceiver<DoorNews>,
}

fn process(slot: u32) -> Process {
    Process {
        slot: Slot(slot),
        incarnation: Incarnation::FIRST,
    }
}

/// The door of a process on a node of this machine, or of another one.
fn open_for(slot: u32, peer: IpAddr) -> Opened {
    let (send, news) = unbounded_channel();
    let tell: TellNews = Arc::new(move |news| {
        send.send(news).ok();
        Box::pin(async {})
    });
    let opening = DoorOpening {
        job: JobId(1),
        process: process(slot),
        node: NodeId(1),
        hostname: "host".to_owned(),
        peers: vec![peer],
        local: None,
    };
    let connections = Connections::new(1000, 1000);
    let thread = Arbiter::new().handle();
    let (server, address) =
        DoorServer::open(opening, LOCALHOST, connections, thread, tell).unwrap();
    Opened {
        server,
        address,
        news,
    }
}

fn open(slot: u32) -> Opened {
    open_for(slot, LOCALHOST)
}

/// A generation of processes, and its place.
fn generation(number: u64, slots: &[u32]) -> (GenerationTable, Place) {
    let members = (0..).zip(slots).map(|(rank, slot)| Member {
        rank: Rank(rank),
        local_rank: LocalRank(rank),
        local_size: slots.len() as u32,
        cross_rank: CrossRank(0),
        cross_size: 1,
        slot: Slot(*slot),
        node: NodeId(1),
        hostname: "host".to_owned(),
        address: None,
        incarnation: Incarnation::FIRST,
    });
    let table = GenerationTable {
        job: JobId(1),
        generation: Generation(number),
        members: members.collect(),
        cause: String::new(),
        handover: Handover::None,
    };
    let nodes = |member: &Member| member.node.to_string();
    let plan = RendezvousPlan::from_members(&table.members, nodes, []);
    (table, Place::new(plan, &Budget::new(1 << 20)))
}

fn send(address: SocketAddr, request: &str, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let length = body.len();
    write!(
        stream,
        "{request} HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n"
    )
    .unwrap();
    stream.write_all(body).unwrap();
    stream
}

/// The status and the body of an answer.
async fn answer(mut stream: TcpStream) -> (u16, String) {
    let read = tokio::task::spawn_blocking(move || {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    });
    let answer = read.await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap();
    (status.parse().unwrap(), body.to_owned())
}

async fn ask(address: SocketAddr, request: &str, body: &[u8]) -> (u16, String) {
    answer(send(address, request, body)).await
}

#[actix_rt::test]
async fn a_process_waits_for_its_generation_and_finds_no_other() {
    let (mut old, mut new) = (open(0), open(1));
    let put = send(old.address, "PUT /global/0", b"old");
    assert_eq!(old.news.recv().await, Some(DoorNews::Arrived));
    let (table, place) = generation(1, &[0]);
    old.server.admit(&table, &place);
    new.server.admit(&table, &place);
    assert_eq!(answer(put).await.0, 200);
    assert_eq!(
        ask(old.address, "GET /global/0", b"").await,
        (200, "old".to_owned())
    );

    // The next group is of the other one alone.
    let put = send(new.address, "PUT /local_host/0", b"new");
    assert_eq!(new.news.recv().await, Some(DoorNews::Arrived));
    let (table, place) = generation(2, &[1]);
    old.server.admit(&table, &place);
    new.server.admit(&table, &place);
    assert_eq!(answer(put).await.0, 200);
    assert_eq!(ask(new.address, "GET /global/0", b"").await.0, 404);
    assert_eq!(ask(old.address, "PUT /global/0", b"late").await.0, 200);
    assert_eq!(ask(new.address, "GET /global/0", b"").await.0, 404);
    assert_eq!(ask(new.address, "GET /local_host/0", b"").await.1, "new");
    assert_eq!(ask(new.address, "GET /other/0", b"").await.0, 403);
}

#[actix_rt::test]
async fn a_rank_is_answered_when_the_next_generation_is_there() {
    let mut door = open(1);
    let (table, place) = generation(1, &[0, 1]);
    door.server.admit(&table, &place);
    assert_eq!(ask(door.address, "GET /global/0", b"").await.0, 404);
    let asked = send(door.address, "GET /rank_and_size/host:1", b"");
    assert_eq!(door.news.recv().await, Some(DoorNews::Asked(Generation(1))));
    let (table, place) = generation(2, &[1]);
    door.server.admit(&table, &place);
    assert_eq!(answer(asked).await, (200, "0,1,0,1,0,1".to_owned()));
    assert_eq!(
        ask(door.address, "PUT /rank_and_size/host:1", b"x").await.0,
        403
    );
}

#[actix_rt::test]
async fn a_process_has_one_request_that_waits() {
    let mut door = open(0);
    let first = send(door.address, "PUT /global/0", b"first");
    assert_eq!(door.news.recv().await, Some(DoorNews::Arrived));
    let second = send(door.address, "PUT /global/0", b"second");
    assert_eq!(answer(first).await.0, 503);
    let (table, place) = generation(1, &[0]);
    door.server.admit(&table, &place);
    assert_eq!(answer(second).await.0, 200);
    assert_eq!(ask(door.address, "GET /global/0", b"").await.1, "second");
}

#[actix_rt::test]
async fn a_door_that_closes_ends_what_waits_there() {
    let mut door = open(0);
    let waits = send(door.address, "PUT /global/0", b"x");
    assert_eq!(door.news.recv().await, Some(DoorNews::Arrived));
    drop(door.server);
    assert_eq!(answer(waits).await.0, 410);
    let gone = async {
        while TcpStream::connect(door.address).is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.unwrap();
}

#[actix_rt::test]
async fn strangers_and_what_is_no_table_of_addresses_are_refused() {
    let door = open_for(0, IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)));
    assert_eq!(ask(door.address, "PUT /global/0", b"x").await.0, 403);
    let mut door = open(0);
    let path = "PUT /worker_addresses/host:0";
    assert_eq!(ask(door.address, path, b"not base64!").await.0, 400);
    let calls = BASE64_STANDARD.encode(b"cos\nsystem\n(X\x02\0\0\0lstR.");
    let (status, why) = ask(door.address, path, calls.as_bytes()).await;
    assert!(
        status == 400 && why.contains("the operation 0x63"),
        "{status} {why}"
    );
    let long = vec![b'A'; EAR_BYTES + 4];
    assert_eq!(ask(door.address, path, &long).await.0, 413);
    assert_eq!(
        ask(door.address, "GET /worker_addresses/host:0", b"")
            .await
            .0,
        403
    );
    assert!(door.news.try_recv().is_err());
    door.server.notice(1);
    let why = "it has not said where it listens".to_owned();
    assert_eq!(door.news.recv().await, Some(DoorNews::Noticed(1, Err(why))));
}

/// `({'e': [('h', port)]}, key)`, pickled.
fn addresses(port: u16, key: [u8; 32]) -> Vec<u8> {
    let port = port.to_le_bytes();
    let parts: [&[u8]; 5] = [
        b"}\x8c\x01e]\x8c\x01hM",
        &port,
        b"\x86asC\x20",
        &key,
        b"\x86.",
    ];
    BASE64_STANDARD.encode(parts.concat()).into_bytes()
}

/// A worker that takes one notice and signs its answer with a key: what it got.
fn worker(listener: TcpListener, key: [u8; 32], length: i32) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut got = vec![0; 36 + 95];
        stream.read_exact(&mut got).unwrap();
        let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
        stream.write_all(hmac::sign(&key, b"ok").as_ref()).unwrap();
        stream.write_all(&length.to_le_bytes()).unwrap();
        stream.write_all(b"ok").unwrap();
        got
    })
}

#[actix_rt::test]
async fn a_notice_is_signed_and_its_answer_is_looked_at() {
    const KEY: [u8; 32] = {
        let mut key = [0; 32];
        let mut at = 0;
        while at < 32 {
            key[at] = at as u8;
            at += 1;
        }
        key
    };
    // By Python's hmac, of the notice with number 258.
    const DIGEST: [u8; 32] = [
        0xda, 0x3e, 0xb4, 0x1a, 0x72, 0xf0, 0x70, 0x8f, 0x59, 0x1e, 0xe8, 0xd6, 0x1f, 0xd8, 0x86,
        0xb5, 0x55, 0x38, 0x9a, 0x83, 0x16, 0x98, 0x28, 0xab, 0xc9, 0xff, 0x64, 0xb6, 0xfc, 0x36,
        0x4d, 0x00,
    ];
    let mut door = open(0);
    for (signs_with, length, expected) in [
        (KEY, 2, Ok(())),
        (
            [9; 32],
            2,
            Err("its answer is signed with another key".to_owned()),
        ),
        (KEY, i32::MAX, Err("its answer is too long".to_owned())),
        (KEY, -1, Err("its answer is too long".to_owned())),
    ] {
        let listener = TcpListener::bind((LOCALHOST, 0)).unwrap();
        let value = addresses(listener.local_addr().unwrap().port(), KEY);
        let path = "PUT /worker_addresses/host:0";
        assert_eq!(ask(door.address, path, &value).await.0, 200);
        assert_eq!(door.news.recv().await, Some(DoorNews::Hears));
        let worker = worker(listener, signs_with, length);
        door.server.notice(258);
        assert_eq!(
            door.news.recv().await,
            Some(DoorNews::Noticed(258, expected))
        );
        let got = worker.join().unwrap();
        assert_eq!(got[..32], DIGEST);
        assert_eq!(got[32..36], 95_i32.to_le_bytes());
    }
}
