use std::net::UdpSocket;
use std::sync::mpsc;
use std::thread;

use tokio::runtime::Builder;

use super::*;

const LONG: Duration = Duration::from_secs(30);

fn lent() -> (Runtime, Arc<Pump>, Arc<Socket>) {
    let own = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let pump = Pump::start(own.handle());
    let io = UdpSocket::bind("127.0.0.1:0").unwrap();
    let socket = Arc::new(Socket::told(io, 1, own.handle()).unwrap());
    pump.add_socket(&socket);
    (own, pump, socket)
}

#[test]
fn a_runtime_that_nobody_polls_is_waited_for_once() {
    let (own, pump, _socket) = lent();
    let guest = Builder::new_current_thread().enable_all().build().unwrap();
    // The own thread does what the guest does not.
    let call = || {
        let _entered = guest.enter();
        let awaited = pump.awaited();
        let (tell, done) = mpsc::channel();
        let turn = pump.turn();
        pump.spawn(Box::pin(async move { tell.send(()).unwrap() }));
        drop(turn);
        assert_eq!(done.recv_timeout(LONG), Ok(()));
        awaited
    };
    assert!(call());
    let begun = Instant::now();
    while call() {
        assert!(begun.elapsed() < LONG, "it is still waited for");
    }
    for _ in 0..100 {
        assert!(!call(), "it is waited for again");
    }
    // Once it is polled it drives them again.
    guest.block_on(async {
        while !pump.awaited() {
            assert!(begun.elapsed() < LONG, "it is there and not used");
            tokio::task::yield_now().await;
        }
    });
    pump.close(Some(own));
}

#[test]
fn what_comes_when_it_is_closed_is_dropped_without_a_lock() {
    struct Last(Arc<Pump>);
    impl Drop for Last {
        fn drop(&mut self) {
            self.0.forget(7);
        }
    }
    let (own, pump, _socket) = lent();
    pump.close(Some(own));
    let (tell, done) = mpsc::channel();
    thread::spawn(move || {
        let last = Last(Arc::clone(&pump));
        pump.spawn(Box::pin(async move { drop(last) }));
        tell.send(()).unwrap();
    });
    assert_eq!(done.recv_timeout(LONG), Ok(()));
}
