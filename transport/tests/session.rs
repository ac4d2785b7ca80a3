//! Connections, streams and requests between members of one cluster.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use std::future::Future;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::mpsc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::lent::block_on;
use common::{Cluster, within};
use kolo_transport::frame::InvalidFrame;
use kolo_transport::wire::{HeadReply, HeadRequest, Refusal, RefusalKind, SubmitFrame};
use kolo_transport::{
    CloseCode, Connection, ConnectionLost, Endpoint, EndpointConfig, Expect, FrameError, Limits,
    RequestError, Role, StreamEnd, TransportRuntime,
};

const SECOND: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(20);

/// Answers every request with `Done`.
async fn answer_all(connection: Connection) {
    while let Ok(mut stream) = connection.accept(Limits::CONTROL).await {
        stream.recv.expect::<HeadRequest>().await.unwrap();
        stream.send.send(&HeadReply::Done, &[]).await.unwrap();
    }
}

#[tokio::test]
async fn both_sides_know_who_the_other_is() {
    let cluster = Cluster::new();
    let pair = cluster.pair().await;
    assert_eq!(pair.client.peer(), pair.head.identity());
    assert_eq!(pair.server.peer(), pair.driver.identity());
    assert_eq!(pair.server.peer().role, Role::Driver);
    assert_eq!(pair.client.remote_addr(), pair.head.local_addr());
    assert_eq!(pair.server.remote_addr(), pair.driver.local_addr());
    assert_eq!(pair.client.local_ip(), Some(pair.driver.local_addr().ip()));
    assert_eq!(pair.server.local_ip(), Some(pair.head.local_addr().ip()));
    assert!(pair.client.rtt() > Duration::ZERO);
}

#[tokio::test]
async fn members_on_all_interfaces_know_their_own_address_on_the_way_to_the_peer() {
    let cluster = Cluster::new();
    for any in ["0.0.0.0:0", "[::]:0"] {
        if UdpSocket::bind(any).is_err() {
            eprintln!("this host has no IPv6: {any} is left out");
            continue;
        }
        let everywhere = |config: &mut EndpointConfig| config.listen = any.parse().unwrap();
        let head = cluster.bind_with(cluster.head(), everywhere);
        let driver = cluster.bind_with(cluster.driver(1), everywhere);
        let address = (Ipv4Addr::LOCALHOST, head.local_addr().port()).into();
        let client = within(driver.connect(address, Expect::head()))
            .await
            .unwrap();
        let server = within(head.accept()).await.unwrap();
        assert_eq!(client.local_ip(), Some(Ipv4Addr::LOCALHOST.into()));
        assert_eq!(server.local_ip(), Some(Ipv4Addr::LOCALHOST.into()));
        // Without the form of an IPv4 address that IPv6 sockets use.
        assert_eq!(client.remote_addr().ip(), Ipv4Addr::LOCALHOST);
        assert_eq!(server.remote_addr().ip(), Ipv4Addr::LOCALHOST);
    }
}

#[tokio::test]
async fn requests_are_answered_on_streams_of_their_own_in_both_directions() {
    let cluster = Cluster::new();
    let pair = cluster.pair().await;
    for (asks, answers) in [(&pair.client, &pair.server), (&pair.server, &pair.client)] {
        let server = cluster.runtime.handle().spawn(answer_all(answers.clone()));
        let requests = (0..200).map(|_| asks.request::<_, HeadReply>(&HeadRequest::Cluster, LONG));
        let replies = within(futures(requests)).await;
        assert!(replies.iter().all(|reply| *reply == Ok(HeadReply::Done)));
        server.abort();
    }
}

/// Runs all at once.
async fn futures<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut pending: Vec<_> = futures.map(|f| (Box::pin(f), None)).collect();
    std::future::poll_fn(|cx| {
        let mut all = true;
        for (future, output) in &mut pending {
            if output.is_none() {
                match future.as_mut().poll(cx) {
                    Poll::Ready(value) => *output = Some(value),
                    Poll::Pending => all = false,
                }
            }
        }
        if all { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    pending
        .into_iter()
        .filter_map(|(_, output)| output)
        .collect()
}

#[tokio::test]
async fn large_bodies_cross_and_more_streams_open_than_before_the_welcome() {
    let cluster = Cluster::new();
    let pair = cluster.pair().await;
    let body: Bytes = (0..8_u32 << 20).map(|i| (i >> 3) as u8).collect();
    let server = pair.server.clone();
    let echo = cluster.runtime.handle().spawn(async move {
        let mut echoed = Vec::new();
        while echoed.len() < 4 {
            let mut stream = server.accept(Limits::CALLS).await.unwrap();
            echoed.push(tokio::spawn(async move {
                while let Some(frame) = stream.recv.next::<SubmitFrame>().await.unwrap() {
                    stream
                        .send
                        .send_bytes(&frame.head, frame.body)
                        .await
                        .unwrap();
                }
            }));
        }
        for task in echoed {
            task.await.unwrap();
        }
    });
    let echo_once = |index: u32| {
        let (client, body) = (pair.client.clone(), body.clone());
        async move {
            let mut stream = client.open(Limits::CALLS).await.unwrap();
            let (mut send, mut recv) = (stream.send, stream.recv);
            let sent = body.clone();
            let sending = tokio::spawn(async move {
                if index.is_multiple_of(2) {
                    send.send(&SubmitFrame::Stop, &sent).await.unwrap();
                } else {
                    send.send_bytes(&SubmitFrame::Stop, sent).await.unwrap();
                }
                send.finish();
            });
            let frame = recv.expect::<SubmitFrame>().await.unwrap();
            assert_eq!(frame.body, body);
            assert!(recv.next::<SubmitFrame>().await.unwrap().is_none());
            sending.await.unwrap();
            stream = client.open(Limits::CALLS).await.unwrap();
            drop(stream);
        }
    };
    within(futures((0..4).map(echo_once))).await;
    within(echo).await.unwrap();
}

#[tokio::test]
async fn large_packets_are_used_where_they_fit() {
    let cluster = Cluster::new();
    for mtu in [8900, 65_000] {
        let jumbo = |config: &mut EndpointConfig| config.mtu_upper_bound = mtu;
        let head = cluster.bind_with(cluster.head(), jumbo);
        let driver = cluster.bind_with(cluster.driver(1), jumbo);
        let client = within(driver.connect(head.local_addr(), Expect::head()))
            .await
            .unwrap();
        let server = within(head.accept()).await.unwrap();
        let body: Bytes = (0..16_u32 << 20).map(|i| (i >> 5) as u8).collect();
        let send = async {
            let mut stream = client.open(Limits::CALLS).await.unwrap();
            for _ in 0..2 {
                let sent = stream.send.send_bytes(&SubmitFrame::Stop, body.clone());
                sent.await.unwrap();
            }
            stream.send.finish();
            assert_eq!(stream.send.stopped().await, StreamEnd::Delivered);
        };
        let receive = async {
            let mut stream = server.accept(Limits::CALLS).await.unwrap();
            let mut count = 0;
            while let Some(frame) = stream.recv.next::<SubmitFrame>().await.unwrap() {
                assert_eq!(frame.body, body);
                count += 1;
            }
            assert_eq!(count, 2);
        };
        within(async { tokio::join!(send, receive) }).await;
    }
}

#[tokio::test]
async fn a_dropped_request_is_seen_by_its_handler() {
    let cluster = Cluster::new();
    let pair = cluster.pair().await;
    let mut request = Box::pin(
        pair.client
            .request::<_, HeadReply>(&HeadRequest::Jobs, LONG),
    );
    let mut stream = within(async {
        tokio::select! {
            stream = pair.server.accept(Limits::CONTROL) => stream.unwrap(),
            _ = &mut request => panic!("nobody has answered"),
        }
    })
    .await;
    stream.recv.expect::<HeadRequest>().await.unwrap();
    let stopped = stream.send.stopped();
    drop(request);
    assert_eq!(
        within(stopped).await,
        StreamEnd::Stopped(CloseCode::Cancelled)
    );
    assert!(!pair.server.is_closed());
}

#[tokio::test]
async fn a_request_that_is_not_answered_ends_at_its_deadline_and_resets_its_stream() {
    let cluster = Cluster::new();
    let pair = cluster.pair().await;
    let after = Duration::from_millis(700);
    let (reply, end) = within(async {
        tokio::join!(
            pair.client
                .request::<_, HeadReply>(&HeadRequest::Jobs, after),
            async {
                let mut stream = pair.server.accept(Limits::CONTROL).await.unwrap();
                stream.recv.expect::<HeadRequest>().await.unwrap();
                stream.send.stopped().await
            }
        )
    })
    .await;
    let error = reply.unwrap_err();
    assert_eq!(error, RequestError::Deadline { after });
    assert!(error.is_retryable());
    assert_eq!(end, StreamEnd::Stopped(CloseCode::Cancelled));
}

#[tokio::test]
async fn an_aborted_stream_ends_the_reads_and_writes_of_the_peer() {
    let cluster = Cluster::new();
    let pair = cluster.pair().await;
    let mut near = pair.client.open(Limits::CONTROL).await.unwrap();
    near.send.send(&SubmitFrame::Stop, &[]).await.unwrap();
    let mut far = within(pair.server.accept(Limits::CONTROL)).await.unwrap();
    far.recv.expect::<SubmitFrame>().await.unwrap();
    near.abort(CloseCode::Forbidden);
    let read = within(far.recv.next::<SubmitFrame>()).await.unwrap_err();
    assert_eq!(read, FrameError::Reset(CloseCode::Forbidden));
    assert_eq!(
        within(far.send.stopped()).await,
        StreamEnd::Stopped(CloseCode::Forbidden)
    );
    let written = within(far.send.send(&SubmitFrame::Stop, &[]))
        .await
        .unwrap_err();
    assert_eq!(written, FrameError::Reset(CloseCode::Forbidden));
}

#[tokio::test]
async fn what_the_handler_does_wrong_is_told_apart() {
    let cluster = Cluster::new();
    let pair = cluster.pair().await;
    let server = pair.server.clone();
    let serve = async {
        // No reply, a reset, a reply of another kind, a refusal before the request is read.
        drop(server.accept(Limits::CONTROL).await.unwrap());
        let mut stream = server.accept(Limits::CONTROL).await.unwrap();
        stream.abort(CloseCode::Busy);
        let mut stream = server.accept(Limits::CONTROL).await.unwrap();
        stream.send.send(&SubmitFrame::Stop, &[]).await.unwrap();
        let mut stream = server.accept(Limits::JOIN).await.unwrap();
        let long = stream.recv.expect::<HeadRequest>().await.unwrap_err();
        assert!(
            matches!(
                long,
                FrameError::Invalid(InvalidFrame::TooLong { part: "head", .. })
            ),
            "{long}"
        );
        stream.recv.stop(CloseCode::TooLarge);
        let refusal = Refusal::new(RefusalKind::TooLarge, "too long");
        stream
            .send
            .send(&HeadReply::Refused(refusal), &[])
            .await
            .unwrap();
    };
    let ask = async {
        let ask = || {
            pair.client
                .request::<_, HeadReply>(&HeadRequest::Jobs, LONG)
        };
        assert_eq!(ask().await, Err(RequestError::Unanswered));
        let busy = ask().await.unwrap_err();
        assert_eq!(
            busy,
            RequestError::Rejected {
                code: CloseCode::Busy
            }
        );
        assert!(busy.is_retryable());
        let other = ask().await.unwrap_err();
        assert!(
            matches!(
                other,
                RequestError::Frame(FrameError::Invalid(InvalidFrame::Malformed { .. }))
            ),
            "{other}"
        );
        assert!(!other.is_retryable());
        let long = HeadRequest::SignWorker {
            job: kolo_transport::ids::JobId(1),
            slot: kolo_transport::ids::Slot(0),
            csr: vec![0; 3 << 20],
        };
        let refused: HeadReply = pair.client.request(&long, LONG).await.unwrap();
        assert!(matches!(refused, HeadReply::Refused(_)));
    };
    within(async { tokio::join!(serve, ask) }).await;
}

/// The answer comes while the request is being written. A writer that waits for room by then must be woken.
#[tokio::test]
async fn a_request_that_is_refused_before_it_is_read_ends_at_once() {
    let cluster = Cluster::new();
    let pair = cluster.pair().await;
    let server = pair.server.clone();
    let serve = async move {
        while let Ok(mut stream) = server.accept(Limits::JOIN).await {
            stream.recv.expect::<HeadRequest>().await.unwrap_err();
            stream.recv.stop(CloseCode::TooLarge);
            let refusal = Refusal::new(RefusalKind::TooLarge, "too long");
            let refusal = HeadReply::Refused(refusal);
            stream.send.send(&refusal, &[]).await.unwrap();
        }
    };
    let serving = tokio::spawn(serve);
    let long = HeadRequest::SignWorker {
        job: kolo_transport::ids::JobId(1),
        slot: kolo_transport::ids::Slot(0),
        csr: vec![0; 3 << 20],
    };
    for _ in 0..100 {
        let begun = Instant::now();
        let refused: HeadReply = within(pair.client.request(&long, LONG)).await.unwrap();
        assert!(matches!(refused, HeadReply::Refused(_)));
        assert!(begun.elapsed() < LONG, "only the deadline has woken it");
    }
    serving.abort();
}

#[tokio::test]
async fn close_codes_and_reasons_arrive() {
    for code in [
        CloseCode::StaleGeneration,
        CloseCode::Shutdown,
        CloseCode::Duplicate,
    ] {
        let cluster = Cluster::new();
        let pair = cluster.pair().await;
        let mut stream = pair.client.open(Limits::CONTROL).await.unwrap();
        stream.send.send(&SubmitFrame::Stop, &[]).await.unwrap();
        pair.server.close(code, "generation 3 is over");
        let lost = within(pair.client.closed()).await;
        let expected = ConnectionLost::Closed {
            code,
            reason: "generation 3 is over".to_owned(),
        };
        assert_eq!(lost, expected);
        assert_eq!(lost.is_retryable(), code == CloseCode::Shutdown);
        assert!(pair.client.is_closed());
        assert_eq!(
            within(pair.server.closed()).await,
            ConnectionLost::ClosedHere
        );
        // All that waits ends with the same reason.
        assert_eq!(
            stream.recv.next::<SubmitFrame>().await.unwrap_err(),
            FrameError::Lost(expected.clone())
        );
        assert_eq!(
            pair.client
                .request::<_, HeadReply>(&HeadRequest::Jobs, SECOND)
                .await,
            Err(RequestError::Lost(expected.clone()))
        );
        assert_eq!(
            pair.client.accept(Limits::CONTROL).await.unwrap_err(),
            expected
        );
    }
}

#[tokio::test]
async fn an_endpoint_that_closes_tells_its_peers_and_accepts_no_more() {
    let cluster = Cluster::new();
    let pair = cluster.pair().await;
    pair.head.close(CloseCode::Shutdown, "the head stops");
    let lost = within(pair.client.closed()).await;
    assert!(
        matches!(
            lost,
            ConnectionLost::Closed {
                code: CloseCode::Shutdown,
                ..
            }
        ),
        "{lost}"
    );
    assert!(within(pair.head.accept()).await.is_none());
    within(pair.head.drained()).await;
    let error = within(pair.head.connect(
        pair.driver.local_addr(),
        Expect {
            role: Role::Driver,
            name: None,
        },
    ))
    .await
    .unwrap_err();
    assert_eq!(error, kolo_transport::ConnectError::ClosedHere);
}

#[tokio::test]
async fn a_dropped_endpoint_accepts_no_more_and_its_connections_live() {
    let cluster = Cluster::new();
    let pair = cluster.pair().await;
    let address = pair.head.local_addr();
    drop(pair.head);
    let server = cluster
        .runtime
        .handle()
        .spawn(answer_all(pair.server.clone()));
    let reply = within(
        pair.client
            .request::<_, HeadReply>(&HeadRequest::Jobs, LONG),
    )
    .await;
    assert_eq!(reply, Ok(HeadReply::Done));
    let impatient = cluster.bind_with(cluster.driver(2), |config| {
        config.handshake_timeout = Duration::from_millis(300);
    });
    assert!(
        within(impatient.connect(address, Expect::head()))
            .await
            .is_err()
    );
    server.abort();
}

#[tokio::test]
async fn a_peer_that_vanishes_times_out() {
    let cluster = Cluster::new();
    // A runtime that is torn down closes nothing in an orderly way, as after kill -9.
    let doomed = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let quick = EndpointConfig {
        idle_timeout: Duration::from_millis(1500),
        keep_alive: Duration::from_millis(150),
        ..EndpointConfig::default()
    };
    let head = Endpoint::bind(
        &TransportRuntime::from_handle(doomed.handle().clone()),
        cluster.head(),
        quick.clone(),
    )
    .unwrap();
    let driver = Endpoint::bind(&cluster.runtime, cluster.driver(1), quick).unwrap();
    let client = within(driver.connect(head.local_addr(), Expect::head()))
        .await
        .unwrap();
    let server = within(head.accept()).await.unwrap();
    // Keep-alives hold it for longer than the idle timeout.
    let silence = tokio::time::timeout(Duration::from_secs(2), client.closed()).await;
    assert!(silence.is_err(), "{silence:?}");
    doomed.shutdown_background();
    let lost = within(client.closed()).await;
    assert_eq!(lost, ConnectionLost::TimedOut);
    assert!(lost.is_retryable());
    drop((head, server));
}

#[test]
fn everything_works_without_a_runtime_on_the_callers_side() {
    let cluster = Cluster::new();
    let head = cluster.bind(cluster.head());
    let driver = cluster.bind(cluster.driver(1));
    let address = head.local_addr();
    let server = std::thread::spawn(move || {
        block_on(async {
            let connection = head.accept().await.unwrap();
            let mut stream = connection.accept(Limits::CONTROL).await.unwrap();
            let request = stream
                .recv
                .expect_within::<HeadRequest>(LONG)
                .await
                .unwrap();
            assert_eq!(request.head, HeadRequest::Jobs);
            stream.send.send(&HeadReply::Done, &[]).await.unwrap();
            stream.send.finish();
            let mut stream = connection.accept(Limits::CONTROL).await.unwrap();
            let error = stream
                .recv
                .expect_within::<HeadRequest>(Duration::from_millis(1))
                .await;
            drop(error);
            connection.closed().await
        })
    });
    block_on(async {
        let connection = driver.connect(address, Expect::head()).await.unwrap();
        let reply = connection
            .request::<_, HeadReply>(&HeadRequest::Jobs, LONG)
            .await;
        assert_eq!(reply, Ok(HeadReply::Done));
        let reply = connection
            .request::<_, HeadReply>(&HeadRequest::Jobs, Duration::from_millis(20))
            .await;
        assert!(reply.is_err());
        connection.close(CloseCode::Done, "");
        driver.close(CloseCode::Done, "");
        driver.drained().await;
    });
    assert!(matches!(
        server.join().unwrap(),
        ConnectionLost::Closed {
            code: CloseCode::Done,
            ..
        }
    ));
}

#[tokio::test]
async fn the_last_clone_of_a_runtime_may_be_dropped_anywhere() {
    // Inside asynchronous code.
    drop(TransportRuntime::new(1).unwrap());
    // On the runtime itself, where nothing may block.
    let runtime = TransportRuntime::new(1).unwrap();
    let (done, dropped) = mpsc::channel();
    let inside = runtime.clone();
    let (go, wait) = tokio::sync::oneshot::channel();
    runtime.handle().spawn(async move {
        wait.await.unwrap();
        drop(inside);
        done.send(()).unwrap();
    });
    drop(runtime);
    go.send(()).unwrap();
    dropped.recv_timeout(LONG).unwrap();
    // With an endpoint and its connections.
    let cluster = Cluster::new();
    let pair = cluster.pair().await;
    drop(cluster);
    drop(pair);
}
