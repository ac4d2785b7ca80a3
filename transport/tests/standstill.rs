//! Sides of a link that stand still: silence counts only for those who listened.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use common::{Cluster, within};
use kolo_transport::wire::{HeadReply, HeadRequest};
use kolo_transport::{
    Connection, ConnectionLost, Endpoint, EndpointConfig, Expect, Limits, TransportRuntime,
};

const IDLE: Duration = Duration::from_secs(2);

/// A side whose links have a thread of their own.
struct Side {
    runtime: TransportRuntime,
    endpoint: Endpoint,
}

/// A side stands still until this is dropped.
struct Still(#[allow(dead_code)] Sender<()>);

impl Side {
    fn new(bind: impl FnOnce(&TransportRuntime, EndpointConfig) -> Endpoint) -> Self {
        let runtime = TransportRuntime::new(1).unwrap();
        let config = EndpointConfig {
            idle_timeout: IDLE,
            keep_alive: IDLE / 5,
            ..EndpointConfig::default()
        };
        let endpoint = bind(&runtime, config);
        Self { runtime, endpoint }
    }

    /// Takes its only thread, as a signal or a machine with too much to do does.
    fn stand_still(&self) -> Still {
        let (hold, held) = channel::<()>();
        let (tell, told) = channel();
        self.runtime.handle().spawn(async move {
            tell.send(()).unwrap();
            held.recv().unwrap_err();
        });
        told.recv().unwrap();
        Still(hold)
    }
}

/// A head and a driver, and their ends of a connection.
async fn linked() -> ([Side; 2], [Connection; 2]) {
    let cluster = Cluster::new();
    let head =
        Side::new(|runtime, config| Endpoint::bind(runtime, cluster.head(), config).unwrap());
    let driver =
        Side::new(|runtime, config| Endpoint::bind(runtime, cluster.driver(1), config).unwrap());
    let address = head.endpoint.local_addr();
    let (server, client) = within(async {
        tokio::join!(
            head.endpoint.accept(),
            driver.endpoint.connect(address, Expect::head())
        )
    })
    .await;
    ([head, driver], [server.unwrap(), client.unwrap()])
}

/// The driver asks and the head answers.
async fn works([server, client]: &[Connection; 2]) {
    let answers = async {
        let mut stream = server.accept(Limits::CONTROL).await.unwrap();
        let request = stream.recv.expect::<HeadRequest>().await.unwrap();
        assert_eq!(request.head, HeadRequest::Jobs);
        stream.send.send(&HeadReply::Done, &[]).await.unwrap();
        stream.send.finish();
    };
    let asks = client.request::<_, HeadReply>(&HeadRequest::Jobs, Duration::from_secs(20));
    let (reply, ()) = within(async { tokio::join!(asks, answers) }).await;
    assert_eq!(reply, Ok(HeadReply::Done));
}

async fn stood_still_together(first: usize) {
    let (sides, connections) = linked().await;
    works(&connections).await;
    let still = [0, 1].map(|side| sides[side].stand_still());
    tokio::time::sleep(IDLE * 3).await;
    let mut still = still.map(Some);
    drop(still[first].take());
    // One that is back looks for the other one for some time before that is back, too.
    tokio::time::sleep(IDLE / 10).await;
    drop(still);
    works(&connections).await;
    assert!(connections.iter().all(|one| !one.is_closed()));
}

#[tokio::test]
async fn two_sides_that_stood_still_together_have_lost_nothing_however_long_it_was() {
    tokio::join!(stood_still_together(0), stood_still_together(1));
}

async fn stood_still_alone(side: usize) {
    let (sides, connections) = linked().await;
    works(&connections).await;
    let still = sides[side].stand_still();
    tokio::time::sleep(IDLE / 2).await;
    drop(still);
    works(&connections).await;
    // For too long, the other one loses it,
    let still = sides[side].stand_still();
    let lost = within(connections[1 - side].closed()).await;
    assert_eq!(lost, ConnectionLost::TimedOut);
    // and that one finds out when it is back.
    drop(still);
    let lost = within(connections[side].closed()).await;
    assert!(lost.is_retryable(), "{lost}");
}

#[tokio::test]
async fn a_side_that_stands_still_is_kept_for_the_idle_timeout_and_not_longer() {
    tokio::join!(stood_still_alone(0), stood_still_alone(1));
}

#[tokio::test]
async fn an_answer_that_came_while_its_reader_stood_still_is_in_time() {
    let (sides, [server, client]) = linked().await;
    let limit = IDLE / 2;
    let asked = tokio::spawn(async move {
        let reply = client
            .request::<_, HeadReply>(&HeadRequest::Jobs, limit)
            .await;
        (reply, client)
    });
    let mut stream = within(server.accept(Limits::CONTROL)).await.unwrap();
    within(stream.recv.expect::<HeadRequest>()).await.unwrap();
    let still = sides[1].stand_still();
    stream.send.send(&HeadReply::Done, &[]).await.unwrap();
    stream.send.finish();
    tokio::time::sleep(limit * 3 / 2).await;
    drop(still);
    let (reply, _client) = within(asked).await.unwrap();
    assert_eq!(reply, Ok(HeadReply::Done));
}
