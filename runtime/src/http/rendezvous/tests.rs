use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::thread;
use std::time::Instant;

use kolo_core::rendezvous::RendezvousSlot;

use super::*;

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Longer than any limit of the server, so that a test that fails ends.
const PATIENCE: Duration = Duration::from_secs(20);

fn slot(hostname: &str, local_rank: u32, local_size: u32, cross_size: u32) -> RendezvousSlot {
    RendezvousSlot {
        hostname: hostname.to_owned(),
        local_rank,
        local_size,
        cross_size,
    }
}

/// Four ranks, two on each of two hosts.
fn two_by_two() -> RendezvousPlan {
    RendezvousPlan::new(
        [("a", 0), ("a", 1), ("b", 0), ("b", 1)].map(|(host, local)| slot(host, local, 2, 2)),
        [LOCALHOST],
    )
}

async fn start(plan: RendezvousPlan) -> RendezvousServer {
    start_at(plan, LOCALHOST).await.unwrap()
}

async fn start_at(
    plan: RendezvousPlan,
    bind: IpAddr,
) -> Result<RendezvousServer, RendezvousStartError> {
    let connections = Connections::new(1000, 1000);
    RendezvousServer::start(plan, bind, connections, &Budget::new(1 << 30)).await
}

/// Has a client talk to a server of this plan, and stops the server. How full the server was at the end.
async fn served(
    plan: RendezvousPlan,
    client: impl FnOnce(SocketAddr) + Send + 'static,
) -> RendezvousUsage {
    let server = start(plan).await;
    let address = server.address();
    blocking(move || client(address)).await;
    let usage = server.usage();
    server.stop().await;
    usage
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends bytes and reads until the server closes.
fn exchange(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = connect(address);
    stream.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

fn status(answer: &str) -> u16 {
    answer
        .strip_prefix("HTTP/1.1 ")
        .and_then(|rest| rest.get(..3))
        .and_then(|code| code.parse().ok())
        .unwrap_or_else(|| panic!("no status line in {answer:?}"))
}

/// The bytes of Horovod's C++ client (reference section 3.3).
fn cpp_request(method: &str, path: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!(
        "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// As that client reads: header names with regard to case; without a length it takes what came with the headers.
fn cpp_client(address: SocketAddr, method: &str, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
    let mut stream = connect(address);
    stream.write_all(&cpp_request(method, path, body)).unwrap();
    let mut received = Vec::new();
    let mut piece = vec![0; 4096];
    loop {
        let count = stream.read(&mut piece).unwrap();
        received.extend_from_slice(&piece[..count]);
        let Some(end) = received.windows(4).position(|window| window == b"\r\n\r\n") else {
            assert_ne!(count, 0, "closed within the headers");
            continue;
        };
        let head = String::from_utf8(received[..end].to_vec()).unwrap();
        let length: usize = head
            .lines()
            .find_map(|line| line.strip_prefix("Content-Length: "))
            .map_or(0, |length| length.parse().unwrap());
        let body = &received[end + 4..];
        if count == 0 || body.len() >= length {
            return (status(&head), body.to_vec());
        }
    }
}

#[tokio::test]
async fn answers_are_in_the_form_that_horovods_client_reads() {
    served(two_by_two(), move |address| {
        let answer = exchange(address, &cpp_request("PUT", "/global/rank_0", b"node7"));
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("\r\nContent-Length: 0\r\n"), "{answer}");
        assert!(answer.ends_with("\r\n\r\n"), "{answer}");

        let answer = exchange(address, &cpp_request("GET", "/global/rank_0", b""));
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("\r\nContent-Length: 5\r\n"), "{answer}");
        assert!(answer.ends_with("\r\n\r\nnode7"), "{answer}");

        let answer = exchange(address, &cpp_request("GET", "/global/rank_1", b""));
        assert!(answer.starts_with("HTTP/1.1 404 Not Found\r\n"), "{answer}");
        assert!(answer.contains("\r\nContent-Length: 0\r\n"), "{answer}");
        assert!(answer.ends_with("\r\n\r\n"), "{answer}");

        for answer in [
            exchange(address, &cpp_request("DELETE", "/global/0", b"")),
            exchange(address, &cpp_request("DELETE", "/global/unknown", b"")),
        ] {
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
            assert!(!answer.contains("content-length"), "{answer}");
            assert!(!answer.contains("Transfer-Encoding"), "{answer}");
        }
    })
    .await;
}

#[tokio::test]
async fn values_are_bytes_of_any_kind_and_length() {
    served(two_by_two(), move |address| {
        // What a rank of 1024 publishes is 139 KB.
        let large: Vec<u8> = (0..136 * 1023_u32)
            .map(|index| (index % 251) as u8)
            .collect();
        for value in [&b""[..], &[0, 255, b'\r', b'\n', 0], &large] {
            assert_eq!(cpp_client(address, "PUT", "/global/0", value).0, 200);
            let (status, found) = cpp_client(address, "GET", "/global/0", b"");
            assert_eq!(status, 200);
            assert!(found == value, "{} bytes", found.len());
        }
    })
    .await;
}

#[tokio::test]
async fn the_path_is_taken_as_it_stands() {
    served(two_by_two(), move |address| {
        let put = |path: &str, value: &[u8]| cpp_client(address, "PUT", path, value).0;
        let get = |path: &str| cpp_client(address, "GET", path, b"");
        assert_eq!(put("/global/a%20b", b"encoded"), 200);
        assert_eq!(put("/global/k?x=1", b"query"), 200);
        assert_eq!(get("/global/a%20b"), (200, b"encoded".to_vec()));
        assert_eq!(get("/global/k?x=1"), (200, b"query".to_vec()));
        assert_eq!(get("/global/k").0, 404);
        // `global`, written another way, is another scope.
        assert_eq!(get("/globa%6c/k").0, 403);
        for path in [
            "/",
            "/global",
            "/global/",
            "//global/0",
            "/global/0/",
            "/global/0/1",
            "/global/k?a/b",
        ] {
            assert_eq!(get(path).0, 400, "{path}");
            assert_eq!(put(path, b"x"), 400, "{path}");
        }
    })
    .await;
}

#[tokio::test]
async fn only_scopes_of_the_job_are_served() {
    served(two_by_two(), move |address| {
        for scope in [
            "local_a",
            "cross_1",
            "global_process_set_hash_1f0a",
            "local_b_process_set_hash_7",
        ] {
            let path = format!("/{scope}/0");
            assert_eq!(cpp_client(address, "PUT", &path, b"x").0, 200, "{scope}");
            assert_eq!(cpp_client(address, "GET", &path, b"").0, 200, "{scope}");
        }
        // The scope of a process set is ad hoc: nobody knows when it is over.
        let ad_hoc = "/local_b_process_set_hash_7/0";
        assert_eq!(cpp_client(address, "DELETE", ad_hoc, b"").0, 200);
        assert_eq!(cpp_client(address, "GET", ad_hoc, b"").0, 404);
        for scope in ["local_c", "cross_2", "runfunc", "rank_and_size"] {
            let path = format!("/{scope}/a:0");
            for method in ["GET", "PUT", "DELETE"] {
                assert_eq!(
                    cpp_client(address, method, &path, b"").0,
                    403,
                    "{method} {scope}"
                );
            }
        }
    })
    .await;
}

#[tokio::test]
async fn members_publish_the_addresses_of_their_notification_services() {
    served(two_by_two(), move |address| {
        let ask = |method: &str, key: &str, value: &[u8]| {
            let path = format!("/worker_addresses/{key}");
            cpp_client(address, method, &path, value)
        };
        for key in ["a:0", "a:1", "b:0", "b:1"] {
            assert_eq!(ask("PUT", key, b"pickled").0, 200, "{key}");
            assert_eq!(ask("GET", key, b""), (200, b"pickled".to_vec()));
        }
        // A scope of which nobody knows when it is over.
        assert_eq!(ask("DELETE", "a:0", b"").0, 200);
        assert_eq!(ask("GET", "a:0", b"").0, 404);
        for key in ["a:2", "c:0", "a", "a:x"] {
            assert_eq!(ask("PUT", key, b"x").0, 403, "{key}");
        }
    })
    .await;
}

#[tokio::test]
async fn other_methods_are_not_known_and_every_version_of_http_1_is() {
    served(two_by_two(), move |address| {
        for method in ["HEAD", "POST", "OPTIONS", "PATCH", "TRACE", "FROBNICATE"] {
            let answer = exchange(address, &cpp_request(method, "/global/0", b""));
            assert_eq!(status(&answer), 501, "{method}: {answer}");
            if method == "HEAD" {
                assert!(answer.ends_with("\r\n\r\n"), "{answer}");
            }
        }
        for rest in [
            "0\r\n\r\n",
            "1\r\nHost: x\r\n\r\n",
            "1\r\nHost: x\r\nConnection: close\r\n\r\n",
            "1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n",
        ] {
            let answer = exchange(address, format!("GET /global/0 HTTP/1.{rest}").as_bytes());
            assert!(answer.contains(" 404 Not Found\r\n"), "{rest}: {answer}");
        }
    })
    .await;
}

#[tokio::test]
async fn bodies_that_are_too_long_or_without_a_length_are_refused_unread() {
    served(two_by_two(), move |address| {
        let head = |rest: &str| format!("PUT /global/0 HTTP/1.1\r\nHost: x\r\n{rest}\r\n");
        for none in ["", "Transfer-Encoding: chunked\r\n\r\n5\r\nab"] {
            let (answer, took) = stall(address, head(none).as_bytes());
            assert_eq!(status(&answer), 411, "{answer}");
            assert!(took < Duration::from_secs(8), "{took:?}");
        }
        let answer = exchange(address, head("Content-Length: 99999999\r\n").as_bytes());
        assert_eq!(status(&answer), 413, "{answer}");
        assert!(
            answer.contains("99999999 bytes or more; allowed are up to"),
            "{answer}"
        );
        for bad in ["-1", "x", "1, 2", "99999999999999999999999"] {
            let answer = exchange(
                address,
                head(&format!("Content-Length: {bad}\r\n")).as_bytes(),
            );
            assert_eq!(status(&answer), 400, "{bad}: {answer}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_full_store_says_so_and_goes_on() {
    let plan = RendezvousPlan::new([slot("a", 0, 1, 1)], [LOCALHOST]);
    let limit = 64 << 20;
    let usage = served(plan, move |address| {
        let value = vec![7; 1 << 20];
        let mut stored = 0;
        let refused = loop {
            let path = format!("/global/{stored}");
            match cpp_client(address, "PUT", &path, &value).0 {
                200 => stored += 1,
                other => break other,
            }
            assert!(stored * value.len() <= limit);
        };
        assert_eq!(refused, 507);
        assert_eq!(stored, 63);
        assert_eq!(cpp_client(address, "GET", "/global/62", b"").1, value);
        assert_eq!(cpp_client(address, "DELETE", "/global/0", b"").0, 200);
    })
    .await;
    assert_eq!(usage.keys, 0);
}

/// Sends `first`, then nothing more, and returns the answer and how long the server waited.
fn stall(address: SocketAddr, first: &[u8]) -> (String, Duration) {
    let began = Instant::now();
    let answer = exchange(address, first);
    (answer, began.elapsed())
}

#[tokio::test]
async fn a_client_that_stalls_is_cut_off_and_others_are_served_meanwhile() {
    served(two_by_two(), move |address| {
        let short_body = b"PUT /global/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc";
        let short_head = b"PUT /global/0 HTTP/1.1\r\nHost";
        let stalled: Vec<_> = [&short_body[..], &short_head[..], b""]
            .into_iter()
            .flat_map(|bytes| std::iter::repeat_n(bytes.to_vec(), 8))
            .map(|bytes| thread::spawn(move || (bytes.clone(), stall(address, &bytes))))
            .collect();
        assert_eq!(cpp_client(address, "PUT", "/global/1", b"x").0, 200);
        for stalled in stalled {
            let (sent, (answer, took)) = stalled.join().unwrap();
            assert!(took >= Duration::from_secs(2), "{took:?}");
            assert!(took < Duration::from_secs(8), "{took:?}");
            if !sent.is_empty() {
                assert_eq!(status(&answer), 408, "{answer}");
            }
        }
        assert_eq!(cpp_client(address, "GET", "/global/0", b"").0, 404);
    })
    .await;
}

#[tokio::test]
async fn a_client_that_sends_a_byte_now_and_then_is_cut_off() {
    served(two_by_two(), move |address| {
        let head = "PUT /global/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n";
        let drip = |first: &str| {
            let mut stream = connect(address);
            stream.write_all(first.as_bytes()).unwrap();
            stream
                .set_read_timeout(Some(Duration::from_millis(300)))
                .unwrap();
            let began = Instant::now();
            // The server ends it, by an answer or by closing; until then a byte comes every 0.3 seconds.
            loop {
                assert!(began.elapsed() < PATIENCE, "still open");
                let mut byte = [0];
                match stream.read(&mut byte) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Ok(_) | Err(_) => break,
                }
                if stream.write_all(b"x").is_err() {
                    break;
                }
            }
            assert!(began.elapsed() < Duration::from_secs(8));
        };
        thread::scope(|threads| {
            for first in [head, "GET /global/"] {
                threads.spawn(move || drip(first));
            }
        });
    })
    .await;
}

#[tokio::test]
async fn an_address_of_no_node_is_refused_before_its_body_is_read() {
    let plan = RendezvousPlan::new(
        [slot("a", 0, 1, 1)],
        [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1))],
    );
    let usage = served(plan, move |address| {
        let head = b"PUT /global/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n";
        let (answer, took) = stall(address, head);
        assert_eq!(status(&answer), 403, "{answer}");
        assert!(
            answer.contains("127.0.0.1 is not the address of a node of this job"),
            "{answer}"
        );
        assert!(took < Duration::from_secs(3), "{took:?}");
        assert_eq!(cpp_client(address, "GET", "/global/0", b"").0, 403);
    })
    .await;
    assert_eq!(usage.keys, 0);
}

#[tokio::test]
async fn what_is_no_http_is_refused() {
    served(two_by_two(), move |address| {
        let long_head = format!("GET /global/0 HTTP/1.1\r\nX: {}\r\n", "y".repeat(1 << 20));
        for bytes in [
            &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"[..],
            b"nonsense\r\n\r\n",
            long_head.as_bytes(),
        ] {
            let mut stream = connect(address);
            // The server may close before it has read all.
            let sent = stream.write_all(bytes);
            let mut answer = Vec::new();
            let read = stream.read_to_end(&mut answer);
            let text = String::from_utf8_lossy(&answer);
            assert!(
                text.starts_with("HTTP/1.1 4") || sent.is_err() || read.is_err(),
                "{text}"
            );
        }
        assert_eq!(cpp_client(address, "GET", "/global/0", b"").0, 404);
    })
    .await;
}

#[tokio::test]
async fn nobody_is_served_after_stop() {
    for graceful in [true, false] {
        let server = start(two_by_two()).await;
        let address = server.address();
        let open = connect(address);
        if graceful {
            server.stop().await;
        } else {
            drop(server);
        }
        blocking(move || {
            let mut open = open;
            let mut byte = [0];
            // Closed or reset, and at once: less than the limit for a head.
            let end = open.read(&mut byte);
            assert!(!matches!(end, Ok(1..)), "{end:?}");
            let began = Instant::now();
            while TcpStream::connect(address).is_ok() {
                assert!(began.elapsed() < PATIENCE, "it still listens");
                thread::yield_now();
            }
        })
        .await;
    }
}

proptest::proptest! {
    #[test]
    fn a_path_is_split_in_two_or_refused(path in "[/a%?#. ]{0,12}") {
        if let Some((scope, key)) = split(&path) {
            proptest::prop_assert_eq!(format!("/{scope}/{key}"), path.clone());
            proptest::prop_assert!(!scope.is_empty() && !key.is_empty());
            proptest::prop_assert!(!scope.contains('/') && !key.contains('/'));
        }
    }
}

#[tokio::test]
async fn an_address_of_another_machine_can_not_be_bound() {
    let bind = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
    let error = start_at(two_by_two(), bind).await.unwrap_err().to_string();
    assert!(error.contains("can't listen on 192.0.2.1"), "{error}");
}

/// Addresses of a rank's listening sockets in the form of gloo: 136 bytes for each peer, in order of rank.
fn addresses(scope: &str, rank: usize, size: usize) -> Vec<u8> {
    (0..size)
        .filter(|peer| *peer != rank)
        .flat_map(|peer| {
            let mut address = format!("{scope}: {rank} listens for {peer}").into_bytes();
            address.resize(136, 0);
            address
        })
        .collect()
}

/// What a worker does in `hvd.init()` for one scope (reference section 3.4), without the sockets themselves.
fn connect_full_mesh(address: SocketAddr, scope: &str, rank: usize, size: usize) {
    let call = |method: &str, key: &str, body: &[u8]| {
        cpp_client(address, method, &format!("/{scope}/{key}"), body)
    };
    assert_eq!(
        call("PUT", &format!("rank_{rank}"), b"kernel-hostname").0,
        200
    );
    for earlier in 0..rank {
        assert!([200, 404].contains(&call("GET", &format!("rank_{earlier}"), b"").0));
    }
    let mine = addresses(scope, rank, size);
    assert_eq!(call("PUT", &rank.to_string(), &mine).0, 200);
    for peer in (0..size).filter(|peer| *peer != rank) {
        let key = peer.to_string();
        let began = Instant::now();
        while call("GET", &key, b"").0 != 200 {
            assert!(began.elapsed() < PATIENCE, "{scope}/{key} never came");
            thread::sleep(Duration::from_millis(10)); // as the client does
        }
        let (status, theirs) = call("GET", &key, b"");
        assert_eq!(status, 200);
        assert_eq!(theirs.len(), 136 * (size - 1));
        let index = if rank > peer { rank - 1 } else { rank };
        let slice = String::from_utf8_lossy(&theirs[136 * index..136 * (index + 1)]).into_owned();
        assert_eq!(
            slice.trim_end_matches('\0'),
            format!("{scope}: {peer} listens for {rank}")
        );
    }
}

#[tokio::test]
async fn four_ranks_on_two_hosts_go_through_the_exchange_of_hvd_init() {
    let server = start(two_by_two()).await;
    let address = server.address();
    // Twice: workers may initialise again in the same job.
    for _ in 0..2 {
        blocking(move || {
            let barriers: Vec<std::sync::Barrier> = [4, 2, 2, 2, 2]
                .into_iter()
                .map(std::sync::Barrier::new)
                .collect();
            thread::scope(|threads| {
                for rank in 0..4_usize {
                    let (host, local) = (rank / 2, rank % 2);
                    let scopes = [
                        ("global".to_owned(), rank, 4, &barriers[0]),
                        (
                            format!("local_{}", ["a", "b"][host]),
                            local,
                            2,
                            &barriers[1 + host],
                        ),
                        (format!("cross_{local}"), host, 2, &barriers[3 + local]),
                    ];
                    threads.spawn(move || {
                        for (scope, rank, size, barrier) in scopes {
                            connect_full_mesh(address, &scope, rank, size);
                            barrier.wait(); // gloo's own
                            let path = format!("/{scope}/{rank}");
                            assert_eq!(cpp_client(address, "DELETE", &path, b"").0, 200);
                        }
                    });
                }
            });
        })
        .await;
        assert_eq!(server.usage(), RendezvousUsage::default());
    }
    server.stop().await;
}
