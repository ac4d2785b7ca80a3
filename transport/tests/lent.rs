//! Links that the runtime which awaits their answers drives, and the thread that watches over it.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use std::future::poll_fn;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use common::lent::{Bed, Head, LONG, block_on, one_thread};
use kolo_transport::TransportRuntime;
use kolo_transport::runtime::Sends;
use tokio::runtime::Builder;
use tokio::sync::mpsc::unbounded_channel;

/// Of connections whose silence is to be noticed soon.
const SHORT_IDLE: Duration = Duration::from_millis(600);

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
fn driven_work_that_panics_when_it_is_dropped_ends_nothing_else() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("this panic is part of a test");
        }
    }
    let runtime = TransportRuntime::lent().unwrap();
    let (tell, polled) = mpsc::channel();
    let (go_on, cancelled) = mpsc::channel();
    let bomb = Bomb;
    let work = runtime.drive(poll_fn(move |_| {
        let _held = &bomb;
        tell.send(()).unwrap();
        cancelled.recv_timeout(LONG).unwrap();
        Poll::Pending
    }));
    polled.recv_timeout(LONG).unwrap();
    // The thread that polls it is to drop it.
    drop(work);
    go_on.send(()).unwrap();
    let (tell, others) = mpsc::channel();
    let other = runtime.drive(async move { tell.send(()).unwrap() });
    assert_eq!(others.recv_timeout(LONG), Ok(()));
    block_on(other);
}

#[test]
fn a_task_that_has_used_up_its_turn_drives_the_links_all_the_same() {
    let runtime = TransportRuntime::lent().unwrap();
    for _ in 0..20 {
        // Its own thread may poll it as well; that has gone to sleep most of the time.
        block_on(runtime.drive(async {}));
        thread::sleep(Duration::from_millis(1));
        let polls = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&polls);
        let (fill, mut full) = unbounded_channel();
        for _ in 0..1000 {
            fill.send(()).unwrap();
        }
        let (tell, told) = unbounded_channel();
        tell.send(()).unwrap();
        let mut told = Some(told);
        let work = one_thread().block_on(poll_fn(|cx| {
            while full.poll_recv(cx).is_ready() {}
            assert!(!full.is_empty(), "tokio lets a task do all that it likes");
            let _turn = runtime.turn(Sends::Now { awaited: false });
            let counted = Arc::clone(&counted);
            let mut told = told.take().unwrap();
            Poll::Ready(runtime.drive(poll_fn(move |cx| {
                counted.fetch_add(1, Ordering::Relaxed);
                told.poll_recv(cx).map(drop)
            })))
        }));
        block_on(work);
        assert_eq!(polls.load(Ordering::Relaxed), 1);
    }
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
