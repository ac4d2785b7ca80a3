//! A driver on a lent runtime, and a head that echoes.

use std::future::{Future, poll_fn};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread, ThreadId};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kolo_transport::runtime::Sends;
use kolo_transport::{
    Connection, Endpoint, EndpointConfig, Expect, FrameSender, Limits, TransportRuntime, frame,
};
use tokio::runtime::{Builder, Runtime};

use super::{Cluster, within};

pub const LONG: Duration = Duration::from_secs(30);

/// A driver's connection on a lent runtime to a head that echoes.
pub struct Bed {
    pub connection: Connection,
    _driver: Endpoint,
    pub runtime: TransportRuntime,
    _head: Option<Head>,
}

pub struct Head {
    cluster: Cluster,
    endpoint: Endpoint,
}

impl Head {
    pub fn new(idle_timeout: Duration) -> Self {
        let cluster = Cluster::new();
        let endpoint = cluster.bind_with(cluster.head(), times(idle_timeout));
        cluster.runtime.handle().spawn(echo_all(endpoint.clone()));
        Self { cluster, endpoint }
    }
}

pub fn times(idle_timeout: Duration) -> impl FnOnce(&mut EndpointConfig) {
    move |config| {
        config.idle_timeout = idle_timeout;
        config.keep_alive = idle_timeout / 4;
    }
}

impl Bed {
    pub fn new(idle_timeout: Duration) -> Self {
        let head = Head::new(idle_timeout);
        let bed = Self::on(&head, idle_timeout);
        Self {
            _head: Some(head),
            ..bed
        }
    }

    pub fn on(head: &Head, idle_timeout: Duration) -> Self {
        let address = head.endpoint.local_addr();
        let runtime = TransportRuntime::lent().unwrap();
        let mut config = EndpointConfig::towards(address);
        times(idle_timeout)(&mut config);
        let driver = Endpoint::bind(&runtime, head.cluster.driver(1), config).unwrap();
        let connecting = driver.clone();
        let connected = runtime
            .handle()
            .spawn(async move { connecting.connect(address, Expect::head()).await });
        let connection = block_on(connected).unwrap().unwrap();
        Self {
            connection,
            _driver: driver,
            runtime,
            _head: None,
        }
    }

    pub async fn caller(&self) -> Caller {
        let stream = self.connection.open(Limits::CALLS).await.unwrap();
        let (tell, answers) = mpsc::channel();
        let (wake, woken) = tokio::sync::mpsc::unbounded_channel();
        let mut replies = stream.recv;
        let reading = self.runtime.drive(async move {
            while let Ok(Some(frame)) = replies.next::<u64>().await {
                let answer = Answer {
                    number: frame.head,
                    body: frame.body,
                    thread: thread::current().id(),
                };
                if tell.send(answer).is_err() || wake.send(()).is_err() {
                    return;
                }
            }
        });
        self.runtime.handle().spawn(reading);
        Caller {
            runtime: self.runtime.clone(),
            send: stream.send,
            answers,
            woken,
        }
    }
}

async fn echo_all(head: Endpoint) {
    while let Some(connection) = head.accept().await {
        tokio::spawn(async move {
            while let Ok(mut stream) = connection.accept(Limits::CALLS).await {
                tokio::spawn(async move {
                    while let Ok(Some(frame)) = stream.recv.next::<u64>().await {
                        let sent = stream.send.send_bytes(&frame.head, frame.body).await;
                        if sent.is_err() {
                            return;
                        }
                    }
                });
            }
        });
    }
}

pub struct Answer {
    pub number: u64,
    pub body: Bytes,
    /// That has read it.
    pub thread: ThreadId,
}

pub struct Caller {
    pub runtime: TransportRuntime,
    send: FrameSender,
    pub answers: mpsc::Receiver<Answer>,
    pub woken: tokio::sync::mpsc::UnboundedReceiver<()>,
}

impl Caller {
    /// As a call that is awaited: sent in a turn.
    pub async fn ask(&mut self, number: u64, body: &[u8]) -> Answer {
        let mut out = BytesMut::new();
        frame::encode(&mut out, &number, body).unwrap();
        let mut chunks = [out.freeze()];
        poll_fn(|cx| {
            let sends = match number % 3 {
                0 => Sends::Now { awaited: true },
                _ => Sends::WithOthers,
            };
            let _turn = self.runtime.turn(sends);
            while !chunks[0].is_empty() {
                if self.send.poll_send_chunks(cx, &mut chunks)?.is_pending() {
                    return Poll::Pending;
                }
            }
            Poll::Ready(Ok::<_, frame::FrameError>(()))
        })
        .await
        .unwrap();
        self.woken.recv().await.unwrap();
        let answer = self.answers.recv().unwrap();
        assert_eq!(answer.number, number);
        assert_eq!(answer.body, body);
        answer
    }

    /// Sends in a turn, and goes on without yielding.
    pub fn send_only(&mut self, number: u64) {
        let mut out = BytesMut::new();
        frame::encode(&mut out, &number, b"").unwrap();
        let _turn = self.runtime.turn(Sends::WithOthers);
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let sent = self.send.poll_send_chunks(&mut cx, &mut [out.freeze()]);
        assert!(sent.is_ready());
    }

    /// Calls until one is driven by this thread.
    pub async fn until_driven_here(&mut self) {
        let here = thread::current().id();
        within(async { while self.ask(1, b"here").await.thread != here {} }).await;
    }
}

pub fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// An executor that is not tokio's.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let mut future = std::pin::pin!(future);
    let waker = Arc::new(Unpark(thread::current())).into();
    let mut cx = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
        thread::park();
    }
}
