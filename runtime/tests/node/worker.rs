//! What the workers of these tests run: this test binary again, as a process that speaks the worker's
//! protocol over plain blocking sockets.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::BytesMut;
use kolo_transport::frame::{Decoder, Limits, encode};
use kolo_transport::ids::{CallId, Generation, Rank};
use kolo_transport::local::{self, FdReceiver};
use kolo_transport::wire::worker::LOCAL_PROTOCOL;
use kolo_transport::wire::{
    CallFailure, CallOp, FailureKind, FromWorker, Outcome, ToWorker, WorkerCall, WorkerResult,
};

/// Chooses what a worker does at its start.
pub(crate) const MODE: &str = "TEST_WORKER_MODE";

/// How long a worker waits for what a test should make happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the control socket said.
#[derive(Default)]
struct Seen {
    cancelled: Mutex<BTreeSet<CallId>>,
    lost: Mutex<Vec<Rank>>,
}

struct Worker {
    calls: UnixStream,
    rank: Rank,
    seen: Arc<Seen>,
}

/// Takes over an inherited descriptor.
fn inherited(number: i32) -> OwnedFd {
    // SAFETY: the node gave the descriptor to this process for this use, and nobody else here uses it.
    unsafe { OwnedFd::from_raw_fd(number) }
}

fn say(control: &OwnedFd, message: &FromWorker) {
    let frame = local::encode(message, 0).unwrap();
    let mut bytes = &frame[..];
    while !bytes.is_empty() {
        let count = local::send_some(control.as_fd(), bytes, &[]).unwrap();
        bytes = &bytes[count..];
    }
}

fn hear(control: &OwnedFd, receiver: &mut FdReceiver) -> Option<(ToWorker, Vec<OwnedFd>)> {
    loop {
        if let Some(message) = receiver.next::<ToWorker>().unwrap() {
            return Some(message);
        }
        if receiver.fill(control.as_fd()).unwrap_or(0) == 0 {
            return None;
        }
    }
}

/// The whole life of a worker.
pub(crate) fn run() -> ! {
    let calls = UnixStream::from(inherited(3));
    let control = Arc::new(inherited(4));
    let mode = std::env::var(MODE).unwrap_or_default();
    match mode.as_str() {
        "garbage" => {
            let mut socket = UnixStream::from(control.try_clone().unwrap());
            socket.write_all(&[0xff; 64]).unwrap();
            forever();
        }
        "hang-up" => {
            drop(control);
            forever();
        }
        "replace" => {
            use std::os::unix::process::CommandExt;
            // The same process with the same sockets, but another file.
            let copy = std::env::var("TEST_WORKER_COPY").unwrap();
            let error = Command::new(copy)
                .args(std::env::args().skip(1))
                .env(MODE, "normal")
                .exec();
            panic!("{error}");
        }
        _ => {}
    }
    let hello = FromWorker::Hello {
        protocol: LOCAL_PROTOCOL,
        pid: std::process::id(),
        registry: 1,
    };
    say(&control, &hello);
    let mut receiver = FdReceiver::new();
    let welcome = hear(&control, &mut receiver).unwrap().0;
    let ToWorker::Welcome {
        member,
        needs_data_plane,
        ..
    } = welcome
    else {
        panic!("{welcome:?} is no welcome");
    };
    if needs_data_plane {
        let request = kolo_transport::CertificateRequest::generate().unwrap();
        let csr = request.der().to_vec();
        say(&control, &FromWorker::Sign { csr });
        let Some((
            ToWorker::Certificate {
                certificate,
                authority,
            },
            _,
        )) = hear(&control, &mut receiver)
        else {
            panic!("no certificate");
        };
        let credentials = request.finish(&certificate, &authority).unwrap();
        println!("identity {}", credentials.identity().uri());
    }
    say(&control, &FromWorker::Ready { address: None });
    let seen = Arc::new(Seen::default());
    std::thread::spawn({
        let (control, seen, mode) = (control.clone(), seen.clone(), mode.clone());
        move || listen(&control, &seen, receiver, &mode)
    });
    let worker = Worker {
        calls,
        rank: member.rank,
        seen,
    };
    worker.serve();
    // The node has closed the calls; what ends the process is the control socket.
    forever();
}

fn forever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

fn listen(control: &OwnedFd, seen: &Seen, mut receiver: FdReceiver, mode: &str) {
    while let Some((message, _)) = hear(control, &mut receiver) {
        match message {
            ToWorker::Cancel { call } => {
                seen.cancelled.lock().unwrap().insert(call);
            }
            ToWorker::RankLost { failure, .. } => seen.lost.lock().unwrap().push(failure.rank),
            ToWorker::Stop { reason } => {
                println!("stop: {reason}");
                if mode != "stubborn" {
                    std::process::exit(0);
                }
            }
            ToWorker::Membership(table) => {
                let generation = table.generation;
                println!("membership {}", table.world_size());
                say(control, &FromWorker::Taken { generation });
            }
            ToWorker::Welcome { .. }
            | ToWorker::Peer { .. }
            | ToWorker::Certificate { .. }
            | ToWorker::Revoke { .. }
            | ToWorker::Hold { .. }
            | ToWorker::LinkRequested { .. } => {}
        }
    }
    if mode != "stubborn" {
        std::process::exit(0);
    }
}

impl Worker {
    fn serve(&self) {
        let mut decoder = Decoder::new(Limits::CALLS);
        let mut chunk = vec![0; 64 * 1024];
        let mut out = BytesMut::new();
        loop {
            while let Some(frame) = decoder.next::<WorkerCall>().unwrap() {
                let call = frame.head.call;
                let (outcome, body) = self.perform(&frame.head, &frame.body);
                encode(
                    &mut out,
                    &WorkerResult {
                        call,
                        generation: Generation(0),
                        outcome,
                    },
                    &body,
                )
                .unwrap();
                if !decoder.is_ready() {
                    (&self.calls).write_all(&out).unwrap();
                    out.clear();
                }
            }
            let count = (&self.calls).read(&mut chunk).unwrap();
            if count == 0 {
                return;
            }
            decoder.buffer().extend_from_slice(&chunk[..count]);
        }
    }

    fn wait(&self, until: impl Fn(&Seen) -> bool) -> bool {
        let deadline = std::time::Instant::now() + PATIENCE;
        // The tests wait for events; a worker that serves many of them may look from time to time.
        while std::time::Instant::now() < deadline {
            if until(&self.seen) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        false
    }

    fn perform(&self, call: &WorkerCall, body: &[u8]) -> (Outcome, Vec<u8>) {
        let CallOp::Function { name } = &call.op else {
            return failed(FailureKind::UnknownTarget, "only functions here");
        };
        let (name, argument) = name.split_once(':').unwrap_or((name, ""));
        let returned = |body: Vec<u8>| (Outcome::Returned, body);
        match name {
            "echo" => returned(body.to_vec()),
            "rank" => returned(self.rank.to_string().into_bytes()),
            "print" => {
                let stderr = std::io::stderr();
                for line in 0..argument.parse::<u32>().unwrap() {
                    println!("out {line}");
                    writeln!(&stderr, "err {line}").unwrap();
                }
                returned(Vec::new())
            }
            "die" => {
                eprintln!("about to die");
                let own = rustix::process::getpid();
                rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
                forever();
            }
            "exit" => std::process::exit(argument.parse().unwrap()),
            "await-cancel" => {
                if self.wait(|seen| seen.cancelled.lock().unwrap().contains(&call.call)) {
                    failed(FailureKind::Cancelled, "cancelled")
                } else {
                    failed(FailureKind::Error, "no cancel came")
                }
            }
            "await-loss" => {
                let rank = Rank(argument.parse().unwrap());
                if self.wait(|seen| seen.lost.lock().unwrap().contains(&rank)) {
                    returned(Vec::new())
                } else {
                    failed(FailureKind::Error, "no loss came")
                }
            }
            "await-file" => {
                if self.wait(|_| std::path::Path::new(argument).exists()) {
                    returned(Vec::new())
                } else {
                    failed(FailureKind::Error, "no file came")
                }
            }
            "grandchild" => {
                // Leaves its session, so that only the warden can find it.
                let child = Command::new("setsid").args(["sleep", "3600"]).spawn();
                let pid = child.as_ref().unwrap().id();
                // It is somebody else's to end.
                std::mem::forget(child);
                returned(pid.to_string().into_bytes())
            }
            "garbage" => {
                (&self.calls).write_all(&[0xff; 64]).unwrap();
                forever();
            }
            "hang-up" => {
                self.calls.shutdown(std::net::Shutdown::Both).unwrap();
                forever();
            }
            "unasked" => {
                // A result for a call that nobody made, before the real one.
                let call = CallId(u64::MAX);
                let outcome = Outcome::Returned;
                let mut out = BytesMut::new();
                encode(
                    &mut out,
                    &WorkerResult {
                        call,
                        generation: Generation(0),
                        outcome,
                    },
                    b"x",
                )
                .unwrap();
                (&self.calls).write_all(&out).unwrap();
                returned(b"asked".to_vec())
            }
            other => failed(FailureKind::UnknownTarget, other),
        }
    }
}

fn failed(kind: FailureKind, message: &str) -> (Outcome, Vec<u8>) {
    (Outcome::Failed(CallFailure::new(kind, message)), Vec::new())
}
