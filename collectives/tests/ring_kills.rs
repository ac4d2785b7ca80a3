//! Links over rings whose one end is killed (`kill -9`) at any moment: the other end reads a true beginning of what was sent, and
//! then the end. The ends are processes; the test's own one is the survivor, again and again: what is left behind would add up.

#![allow(clippy::unwrap_used)]

mod common;

use std::future::poll_fn;
use std::io::{BufRead, BufReader, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::task::Poll;
use std::time::{Duration, Instant};

use common::{LONG, hello};
use kolo_collectives::lane::UnixLane;
use kolo_collectives::{Lane, LaneError};
use kolo_transport::ids::Rank;

/// What a survivor takes at most to see the death.
const SOON: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Talk {
    sends: bool,
    reads: bool,
    /// Lengths of its pieces follow from it.
    seed: u64,
}

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn next(seed: &mut u64) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    [1, 100, 5000, 70_000, 400_000][(*seed >> 33) as usize % 5]
}

/// Sends and reads until the link ends. Returns how much came, and the error, if it was one.
async fn talk(lane: &mut UnixLane, given: Talk) -> (u64, Option<LaneError>) {
    let mut seed = given.seed;
    let (mut sent, mut got) = (0_u64, 0_u64);
    let mut write_error = None;
    let mut out = Vec::new();
    let mut into = vec![0; 400_000];
    let ended = poll_fn(|cx| {
        // Some at a time, so that the deadline of who waits for this has its turn.
        for _ in 0..8 {
            let mut stuck = true;
            if given.sends && write_error.is_none() {
                if out.is_empty() {
                    out.extend((0..next(&mut seed) as u64).map(|at| byte(sent + at)));
                }
                match lane.poll_write(cx, &[IoSlice::new(&out)]) {
                    Poll::Ready(Ok(count)) => {
                        out.drain(..count);
                        sent += count as u64;
                        stuck = false;
                    }
                    Poll::Ready(Err(error)) => write_error = Some(error),
                    Poll::Pending => {}
                }
            }
            if given.reads || write_error.is_some() {
                let most = next(&mut seed);
                match lane.poll_read(cx, &mut into[..most]) {
                    Poll::Ready(Ok(0)) => return Poll::Ready(None),
                    Poll::Ready(Ok(count)) => {
                        for value in &into[..count] {
                            assert_eq!(*value, byte(got), "at {got}");
                            got += 1;
                        }
                        stuck = false;
                    }
                    Poll::Ready(Err(error)) => return Poll::Ready(Some(error)),
                    Poll::Pending => {}
                }
            }
            if stuck {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
    (got, ended)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

async fn open(socket: UnixStream, rank: u32) -> Result<UnixLane, LaneError> {
    UnixLane::open(socket, &hello(Rank(rank)), Rank(1 - rank), LONG).await
}

/// The end that is killed, in a process of its own.
#[test]
fn child() {
    let Ok(given) = std::env::var("KOLO_TEST_CHILD") else {
        return;
    };
    let given: Vec<u64> = given.split(',').map(|part| part.parse().unwrap()).collect();
    let [fd, rank, sends, reads, seed] = given[..] else {
        unreachable!("the parent gives five numbers");
    };
    // SAFETY: the parent made this descriptor for this process, and names it once.
    let socket = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
    runtime().block_on(async {
        println!("\nkolo: begun");
        let mut lane = open(UnixStream::from(socket), rank as u32).await.unwrap();
        println!("\nkolo: ready");
        let given = Talk {
            sends: sends == 1,
            reads: reads == 1,
            seed,
        };
        talk(&mut lane, given).await;
    });
}

struct Victim(Child);

impl Victim {
    fn start(socket: &UnixStream, rank: u32, talk: Talk) -> Self {
        let fd = socket.as_raw_fd();
        let given = format!(
            "{fd},{rank},{},{},{}",
            u8::from(talk.sends),
            u8::from(talk.reads),
            talk.seed
        );
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["child", "--exact", "--nocapture"])
            .env("KOLO_TEST_CHILD", given)
            .stdout(Stdio::piped());
        let inherit = move || {
            // SAFETY: the parent keeps it open until the child runs.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
            Ok(())
        };
        // SAFETY: between fork and exec it makes a system call alone.
        unsafe { command.pre_exec(inherit) };
        Self(command.spawn().unwrap())
    }

    fn wait_for(&mut self, line: &str) {
        let output = self.0.stdout.as_mut().unwrap();
        let said = BufReader::new(output).lines();
        let mut said = said.map_while(Result::ok);
        assert!(said.any(|said| said == format!("kolo: {line}")), "{line}");
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn left() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (
        std::fs::read_dir("/proc/self/fd").unwrap().count(),
        maps.matches("kolo-ring").count(),
    )
}

#[test]
fn a_killed_end_leaves_a_true_beginning_and_nothing_else() {
    if std::env::var_os("KOLO_TEST_CHILD").is_some() {
        return;
    }
    let mut seed = 11_u64;
    let mut most = 0;
    // What the first one makes once.
    drop(runtime());
    for round in 0..100_u32 {
        let before = left();
        let victim_sends = round % 3 > 0;
        let victim = Talk {
            sends: victim_sends,
            reads: round % 3 != 1,
            seed: u64::from(round),
        };
        let own = Talk {
            sends: victim.reads,
            reads: victim.sends,
            seed: u64::from(round) + 1000,
        };
        let rank = round / 3 % 2;
        next(&mut seed);
        let moment = Duration::from_micros((seed >> 33) % 12_000);
        // One in ten dies before it has said hello, or in the middle of that.
        let is_early = round % 10 == 9;
        let (mine, theirs) = UnixStream::pair().unwrap();
        let mut process = Victim::start(&theirs, rank, victim);
        drop(theirs);
        runtime().block_on(async {
            let kill = |mut process: Victim| async move {
                process.wait_for("ready");
                tokio::time::sleep(moment).await;
                process.0.kill().unwrap();
                let died = Instant::now();
                process.0.wait().unwrap();
                died
            };
            if is_early {
                process.wait_for("begun");
                tokio::time::sleep(moment / 20).await;
                process.0.kill().unwrap();
                let Ok(mut lane) = open(mine, 1 - rank).await else {
                    return;
                };
                talk(&mut lane, own).await;
                return;
            }
            let mut lane = open(mine, 1 - rank).await.unwrap();
            assert_eq!(lane.kind(), "shm-ring");
            let ((got, ended), died) = tokio::join!(talk(&mut lane, own), kill(process));
            assert!(died.elapsed() < SOON, "{:?}", died.elapsed());
            assert!(
                matches!(ended, None | Some(LaneError::Ended { .. })),
                "{ended:?}"
            );
            assert!(lane.end_is_final());
            most = most.max(got);
        });
        assert_eq!(left(), before, "round {round}");
    }
    assert!(most > 512 << 10, "they talked little: {most}");
}
