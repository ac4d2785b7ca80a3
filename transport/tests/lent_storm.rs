//! Callers of every kind, which come, block, wait for each other and go at any moment, on two clusters at once.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::lent::{Bed, Caller, Head, LONG, block_on, one_thread};
use tokio::runtime::Builder;
use tokio::task::LocalSet;

/// Numbers that a seed determines (splitmix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

/// Some calls, each answered within the time, with pauses that block the thread.
async fn calls(bed: &Bed, dice: &mut Dice) -> Caller {
    let mut caller = bed.caller().await;
    for _ in 0..dice.below(30) {
        let number = dice.below(1 << 40);
        let body = vec![number as u8; [0, 64, 100_000][dice.below(3) as usize]];
        let answer = bed.runtime.timeout(LONG, caller.ask(number, &body)).await;
        assert!(answer.is_some(), "a call was not answered");
        match dice.below(12) {
            0 => thread::sleep(Duration::from_millis(dice.below(12))),
            1 => bed
                .runtime
                .timeout(Duration::ZERO, std::future::pending::<()>())
                .await
                .unwrap_or(()),
            _ => {}
        }
    }
    caller
}

/// The last message of a caller whose runtime is gone, or is not polled any more.
fn leave(mut caller: Caller, number: u64) {
    caller.send_only(number);
    assert_eq!(caller.answers.recv_timeout(LONG).unwrap().number, number);
}

fn one_after_the_other(beds: [Arc<Bed>; 2], mut dice: Dice, until: Instant) {
    while Instant::now() < until {
        let bed = &beds[dice.below(2) as usize];
        let kind = dice.below(7);
        let last = dice.below(1 << 40);
        match kind {
            0 => {
                let runtime = one_thread();
                let caller = runtime.block_on(calls(bed, &mut dice));
                let _entered = runtime.enter();
                leave(caller, last);
            }
            1 => {
                // Its last message is on its way when it ends.
                let runtime = one_thread();
                let mut caller = runtime.block_on(async {
                    let mut caller = calls(bed, &mut dice).await;
                    caller.send_only(last);
                    caller
                });
                drop(runtime);
                assert_eq!(caller.answers.recv_timeout(LONG).unwrap().number, last);
                caller.woken.close();
            }
            2 => leave(block_on(calls(bed, &mut dice)), last),
            3 => {
                // Nobody polls the runtime that the calls are made in.
                let runtime = one_thread();
                let _entered = runtime.enter();
                leave(block_on(calls(bed, &mut dice)), last);
            }
            4 => {
                let runtime = one_thread();
                LocalSet::new().block_on(&runtime, async {
                    let bed = Arc::clone(bed);
                    let mut dice = Dice(last);
                    let calls = async move { leave(calls(&bed, &mut dice).await, last) };
                    tokio::task::spawn_local(calls).await.unwrap();
                });
            }
            5 => {
                // From a thread for blocking work, while the runtime waits for it.
                let runtime = one_thread();
                let bed = Arc::clone(bed);
                let mut dice = Dice(last);
                let inside = runtime.handle().clone();
                let work = runtime.spawn_blocking(move || {
                    let caller = inside.block_on(calls(&bed, &mut dice));
                    leave(caller, last);
                });
                if last.is_multiple_of(2) {
                    runtime.block_on(work).unwrap();
                } else {
                    while !work.is_finished() {
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            }
            _ => {
                let runtime = Builder::new_multi_thread()
                    .worker_threads(2)
                    .enable_all()
                    .build()
                    .unwrap();
                let work = (0..3).map(|index| {
                    let (bed, mut dice) = (Arc::clone(&beds[index % 2]), Dice(last + index as u64));
                    runtime.spawn(async move { drop(calls(&bed, &mut dice).await) })
                });
                let mut work: Vec<_> = work.collect();
                // One is in the middle of something when the runtime ends.
                drop(work.pop());
                for work in work {
                    runtime.block_on(work).unwrap();
                }
                runtime.shutdown_background();
            }
        }
    }
}

#[test]
fn every_call_is_answered_whatever_the_runtimes_of_the_others_do() {
    let head = Head::new(LONG);
    let beds = [(); 2].map(|()| Arc::new(Bed::on(&head, LONG)));
    let until = Instant::now() + Duration::from_secs(3);
    let threads: Vec<_> = (0..4)
        .map(|seed| {
            let beds = beds.clone();
            thread::spawn(move || one_after_the_other(beds, Dice(seed), until))
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    for bed in beds {
        assert!(!bed.connection.is_closed());
        drop(block_on(calls(&bed, &mut Dice(4))));
    }
}
