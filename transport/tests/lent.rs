//! Links that the runtime which awaits their answers drives, and the thread that watches over it.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use std::future::{Future, poll_fn};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread, ThreadId};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use common::{Cluster, within};
use kolo_transport::runtime::Sends;
use kolo_transport::{
    Connection, Endpoint, EndpointConfig, Expect, FrameSender, Limits, TransportRuntime, frame,
};
use tokio::runtime::{Builder, Runtime};

const LONG: Duration = Duration::from_secs(30);

/// Of connections whose silence is to be noticed soon.
const SHORT_IDLE: Duration = Duration::from_millis(600);

/// A driver's connection on a lent runtime to a head that echoes.
struct Bed {
    connection: Connection,
    _driver: Endpoint,
    runtime: TransportRuntime,
    _head: Option<Head>,
}

struct Head {
    cluster: Cluster,
    endpoint: Endpoint,
}

impl Head {
    fn new(idle_timeout: Duration) -> Self {
        let cluster = Cluster::new();
        let endpoint = cluster.bind_with(cluster.head(), times(idle_timeout));
        cluster.runtime.handle().spawn(echo_all(endpoint.clone()));
        Self { cluster, endpoint }
    }
}

fn times(idle_timeout: Duration) -> impl FnOnce(&mut EndpointConfig) {
    move |config| {
        config.idle_timeout = idle_timeout;
        config.keep_alive = idle_timeout / 4;
    }
}

impl Bed {
    fn new(idle_timeout: Duration) -> Self {
        let head = Head::new(idle_timeout);
        let bed = Self::on(&head, idle_timeout);
        Self {
            _head: Some(head),
            ..bed
        }
    }

    fn on(head: &Head, idle_timeout: Duration) -> Self {
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

    async fn caller(&self) -> Caller {
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

struct Answer {
    number: u64,
    body: Bytes,
    /// That has read it.
    thread: ThreadId,
}

struct Caller {
    runtime: TransportRuntime,
    send: FrameSender,
    answers: mpsc::Receiver<Answer>,
    woken: tokio::sync::mpsc::UnboundedReceiver<()>,
}

impl Caller {
    /// As a call that is awaited: sent in a turn.
    async fn ask(&mut self, number: u64, body: &[u8]) -> Answer {
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
    fn send_only(&mut self, number: u64) {
        let mut out = BytesMut::new();
        frame::encode(&mut out, &number, b"").unwrap();
        let _turn = self.runtime.turn(Sends::WithOthers);
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let sent = self.send.poll_send_chunks(&mut cx, &mut [out.freeze()]);
        assert!(sent.is_ready());
    }

    /// Calls until one is driven by this thread.
    async fn until_driven_here(&mut self) {
        let here = thread::current().id();
        within(async { while self.ask(1, b"here").await.thread != here {} }).await;
    }
}

fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// An executor that is not tokio's.
fn block_on<F: Future>(future: F) -> F::Output {
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

#[test]
fn the_runtime_that_awaits_answers_drives_the_links() {
    let bed = Bed::new(LONG);
    one_thread().block_on(async {
        let mut caller = bed.caller().await;
        caller.until_driven_here().await;
    });
}

#[test]
fn a_caller_that_blocks_its_runtime_holds_up_neither_messages_nor_heartbeats() {
    let bed = Bed::new(SHORT_IDLE);
    let here = thread::current().id();
    one_thread().block_on(async {
        let mut caller = bed.caller().await;
        for round in 0..3 {
            caller.until_driven_here().await;
            // This thread does not yield from here on: the message, and its answer, need somebody else.
            caller.send_only(round);
            let answer = caller.answers.recv_timeout(LONG).unwrap();
            assert_eq!(answer.number, round);
            assert_ne!(answer.thread, here);
            thread::sleep(2 * SHORT_IDLE);
            assert!(!bed.connection.is_closed());
            caller.woken.recv().await.unwrap();
        }
        caller.ask(4, b"still there").await;
    });
}

#[test]
fn a_runtime_that_is_not_polled_any_more_holds_up_nothing() {
    let bed = Bed::new(SHORT_IDLE);
    let left = one_thread();
    let mut caller = left.block_on(async {
        let mut caller = bed.caller().await;
        caller.until_driven_here().await;
        caller.send_only(7);
        caller
    });
    assert_eq!(caller.answers.recv_timeout(LONG).unwrap().number, 7);
    // Nor does it when it is gone, with something on its way.
    left.block_on(async {
        caller.woken.recv().await.unwrap();
        caller.until_driven_here().await;
        caller.send_only(8);
    });
    drop(left);
    assert_eq!(caller.answers.recv_timeout(LONG).unwrap().number, 8);
    thread::sleep(2 * SHORT_IDLE);
    one_thread().block_on(async {
        caller.woken.recv().await.unwrap();
        caller.until_driven_here().await;
    });
    assert!(!bed.connection.is_closed());
}

#[test]
fn runtimes_take_turns_as_guests() {
    let bed = Bed::new(LONG);
    let runtimes = [one_thread(), one_thread()];
    let mut caller = runtimes[0].block_on(bed.caller());
    for round in 0..4 {
        // The other one is not polled meanwhile, and makes room.
        runtimes[round % 2].block_on(caller.until_driven_here());
    }
}

#[test]
fn a_runtime_without_a_reactor_can_wait_for_answers() {
    let bed = Bed::new(LONG);
    let blind = Builder::new_current_thread().build().unwrap();
    blind.block_on(async {
        let mut caller = bed.caller().await;
        for number in 0..10 {
            caller.ask(number, b"").await;
        }
    });
}

#[test]
fn callers_on_all_kinds_of_executors_get_their_answers_at_the_same_time() {
    let bed = Arc::new(Bed::new(LONG));
    let body: Vec<u8> = (0..1_u32 << 20).map(|i| (i >> 3) as u8).collect();
    let work = |bed: Arc<Bed>, body: Vec<u8>| async move {
        let mut caller = bed.caller().await;
        let until = Instant::now() + Duration::from_secs(1);
        for number in 0.. {
            // Large ones fill the stream's window and the socket's batches.
            let length = if number % 50 == 0 { body.len() } else { 64 };
            caller.ask(number, &body[..length]).await;
            if Instant::now() > until {
                return number;
            }
        }
        0
    };
    let threads: Vec<_> = (0..6)
        .map(|index| {
            let work = work(Arc::clone(&bed), body.clone());
            thread::spawn(move || match index % 3 {
                0 => one_thread().block_on(work),
                1 => {
                    let runtime = Builder::new_multi_thread().enable_all().build().unwrap();
                    runtime.block_on(async { tokio::spawn(work).await.unwrap() })
                }
                _ => block_on(work),
            })
        })
        .collect();
    for thread in threads {
        assert!(thread.join().unwrap() > 0);
    }
}

#[test]
fn driven_work_ends_with_its_handle_its_runtime_or_its_panic() {
    let runtime = TransportRuntime::lent().unwrap();
    let (alive, gone) = mpsc::channel::<()>();
    let forever = |alive: mpsc::Sender<()>| async move {
        std::future::pending::<()>().await;
        drop(alive);
    };
    // Its handle is dropped.
    drop(runtime.drive(forever(alive.clone())));
    let task = runtime.handle().spawn(runtime.drive(forever(alive)));
    task.abort();
    let ended = Err(mpsc::RecvTimeoutError::Disconnected);
    assert_eq!(gone.recv_timeout(LONG), ended);
    // It panics, and others go on.
    let panics = runtime.drive(async { panic!("this panic is part of a test") });
    block_on(panics);
    block_on(runtime.drive(async {}));
    // Its runtime ends, inside of asynchronous code.
    let (alive, gone) = mpsc::channel::<()>();
    let driven = runtime.drive(forever(alive));
    one_thread().block_on(async move { drop(runtime) });
    assert_eq!(gone.recv_timeout(LONG), ended);
    block_on(driven);
}

#[test]
fn a_runtime_ends_while_its_guest_drives_it() {
    let head = Head::new(LONG);
    for round in 0..20 {
        let bed = Bed::on(&head, LONG);
        let guest = Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let (tell, calls) = mpsc::channel();
        let mut tasks = tokio::task::JoinSet::new();
        for mut caller in (0..4).map(|_| guest.block_on(bed.caller())) {
            let tell = tell.clone();
            let calling = async move {
                for number in 0.. {
                    caller.ask(number, b"").await;
                    if tell.send(()).is_err() {
                        return;
                    }
                }
            };
            tasks.spawn_on(calling, guest.handle());
        }
        for _ in 0..20 + round {
            calls.recv_timeout(LONG).unwrap();
        }
        // The last clones go here and on the guest's threads.
        tasks.abort_all();
        drop((bed, calls));
        guest.block_on(async { while tasks.join_next().await.is_some() {} });
    }
}

#[test]
fn a_runtime_that_ends_leaves_its_timers_to_the_thread_that_drives_it() {
    let runtime = TransportRuntime::lent().unwrap();
    let (driven_here, driven) = mpsc::channel();
    let (dropped, go_on) = mpsc::channel();
    let (end, ended) = mpsc::channel();
    let driving = thread::spawn({
        let runtime = runtime.clone();
        move || {
            let handle = runtime.handle().clone();
            let turn = runtime.turn(Sends::Now { awaited: false });
            let work = runtime.drive(poll_fn(move |cx| {
                let _entered = handle.enter();
                let mut sleep = std::pin::pin!(tokio::time::sleep(LONG));
                driven_here.send(()).unwrap();
                go_on.recv_timeout(LONG).unwrap();
                // Tokio panics here once the runtime is ending.
                let until = Instant::now() + Duration::from_millis(200);
                while Instant::now() < until {
                    assert!(sleep.as_mut().poll(cx).is_pending());
                }
                end.send(()).unwrap();
                Poll::Ready(())
            }));
            drop(runtime);
            drop(turn);
            block_on(work);
        }
    });
    driven.recv_timeout(LONG).unwrap();
    // The last clone. It does not wait for the work.
    drop(runtime);
    dropped.send(()).unwrap();
    assert_eq!(ended.recv_timeout(LONG), Ok(()));
    driving.join().unwrap();
}
