//! Worker processes as a node starts them: environment, descriptors, output, exit codes.
//!
//! The workers are this program again, so it has a `main` of its own in place of the test runner's.

// Clippy does not see that this is a test.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use bytes::BytesMut;
use kolo::{Context, Executable, Function, Generation, JobId, NodeId, Rank, codec};
use kolo_transport::frame::{self, Decoder, Limits};
use kolo_transport::ids::{CallId, ClusterId, CrossRank, Incarnation, LocalRank, ObjectId, Slot};
use kolo_transport::wire::{
    CallOp, FromWorker, Member, Outcome, ToWorker, WorkerCall, WorkerResult,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde::Serialize;
use serde::de::DeserializeOwned;

fn main() {
    kolo::worker::run_if_worker();
    let tests: [(&str, fn()); 6] = [
        ("a_worker_works_and_stops", a_worker_works_and_stops),
        (
            "nothing_leaks_to_other_programs",
            nothing_leaks_to_other_programs,
        ),
        (
            "a_node_that_dies_ends_its_worker",
            a_node_that_dies_ends_its_worker,
        ),
        ("nonsense_ends_the_worker", nonsense_ends_the_worker),
        ("a_wrong_environment_is_told", a_wrong_environment_is_told),
        ("a_worker_may_exit_by_itself", a_worker_may_exit_by_itself),
    ];
    let filters: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    for (name, test) in tests {
        if filters.is_empty() || filters.iter().any(|filter| name.contains(filter)) {
            // A failed check ends the program with its message.
            test();
            println!("test {name} ... ok");
        }
    }
}

#[kolo::function]
fn prints(ctx: &Context) {
    println!("a line of rank {}", ctx.rank());
    print!("no end");
    eprintln!("a line of errors");
}

#[kolo::function]
fn runs(command: String) -> String {
    let output = Command::new("sh").args(["-c", &command]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[kolo::function]
fn leaves(code: i32) {
    std::process::exit(code);
}

#[kolo::function]
fn sleeps() {
    std::thread::sleep(Duration::from_secs(600));
}

#[kolo::function]
fn panics() {
    panic!("in a worker");
}

struct Last;

#[kolo::executable]
impl Last {
    fn new() -> Self {
        Self
    }
}

impl Drop for Last {
    fn drop(&mut self) {
        println!("dropped at the end");
    }
}

/// A worker process with the node's ends of its sockets.
struct Worker {
    child: Child,
    calls: Socket,
    control: Socket,
}

struct Socket {
    stream: UnixStream,
    decoder: Decoder,
}

/// The second end is inherited by the next program that is started.
fn pair() -> (Socket, OwnedFd) {
    let (here, there) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::empty(),
        None,
    )
    .unwrap();
    rustix::io::fcntl_setfd(&here, rustix::io::FdFlags::CLOEXEC).unwrap();
    let stream = UnixStream::from(here);
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    (
        Socket {
            stream,
            decoder: Decoder::new(Limits::CALLS),
        },
        there,
    )
}

impl Socket {
    fn send(&mut self, head: &impl Serialize, body: &[u8]) {
        let mut out = BytesMut::new();
        frame::encode(&mut out, head, body).unwrap();
        self.stream.write_all(&out).unwrap();
    }

    fn receive<T: DeserializeOwned>(&mut self) -> (T, Vec<u8>) {
        loop {
            if let Some(frame) = self.decoder.next::<T>().unwrap() {
                return (frame.head, frame.body.to_vec());
            }
            let mut chunk = [0; 4096];
            let count = self.stream.read(&mut chunk).unwrap();
            assert_ne!(count, 0, "the worker closed the socket");
            self.decoder.buffer().extend_from_slice(&chunk[..count]);
        }
    }
}

fn command() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

impl Worker {
    fn start() -> Self {
        let (calls, calls_there) = pair();
        let (control, control_there) = pair();
        let numbers = format!("{},{}", calls_there.as_raw_fd(), control_there.as_raw_fd());
        let child = command().env("KOLO_WORKER_FDS", numbers).spawn().unwrap();
        Self {
            child,
            calls,
            control,
        }
    }

    fn ready() -> Self {
        let mut worker = Self::start();
        let (hello, _) = worker.control.receive::<FromWorker>();
        let FromWorker::Hello { pid, registry, .. } = hello else {
            panic!("{hello:?}")
        };
        assert_eq!(
            (pid, registry),
            (worker.child.id(), kolo::registry_digest())
        );
        let member = Member {
            rank: Rank(0),
            local_rank: LocalRank(0),
            local_size: 1,
            cross_rank: CrossRank(0),
            cross_size: 1,
            slot: Slot(0),
            node: NodeId(1),
            hostname: "here".to_owned(),
            address: None,
            incarnation: Incarnation::FIRST,
        };
        let welcome = ToWorker::Welcome {
            cluster: ClusterId(1),
            job: JobId(1),
            generation: Generation(1),
            member,
            world_size: 1,
            needs_data_plane: false,
            next_within_ms: None,
        };
        worker.control.send(&welcome, &[]);
        assert_eq!(
            worker.control.receive::<FromWorker>().0,
            FromWorker::Ready { address: None }
        );
        worker
    }

    fn send(&mut self, op: CallOp, args: &impl Serialize) {
        let call = WorkerCall {
            call: CallId(1),
            generation: Generation(1),
            deadline_ms: None,
            op,
        };
        self.calls.send(&call, &codec::encode(args).unwrap());
    }

    fn send_function<F: Function>(&mut self, _: impl FnOnce() -> F, args: F::Args)
    where
        F::Args: Serialize,
    {
        self.send(
            CallOp::Function {
                name: F::NAME.to_owned(),
            },
            &args,
        );
    }

    fn run<F: Function>(&mut self, function: impl FnOnce() -> F, args: F::Args) -> F::Output
    where
        F::Args: Serialize,
        F::Output: DeserializeOwned,
    {
        self.send_function(function, args);
        let (result, body) = self.calls.receive::<WorkerResult>();
        assert_eq!(result.outcome, Outcome::Returned);
        codec::decode(&body).unwrap()
    }

    fn stop(mut self) -> Output {
        self.control.send(
            &ToWorker::Stop {
                reason: "the test ends".to_owned(),
            },
            &[],
        );
        self.child.wait_with_output().unwrap()
    }

    /// As when the daemon is killed.
    fn abandon(self) -> Output {
        drop((self.calls, self.control));
        self.child.wait_with_output().unwrap()
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn a_worker_works_and_stops() {
    let mut worker = Worker::ready();
    let create = CallOp::Create {
        object: ObjectId(1),
        class: Last::NAME.to_owned(),
    };
    worker.send(create, &());
    assert_eq!(
        worker.calls.receive::<WorkerResult>().0.outcome,
        Outcome::Returned
    );
    worker.run(prints, ());
    worker.send_function(panics, ());
    let (result, _) = worker.calls.receive::<WorkerResult>();
    let Outcome::Failed(failure) = result.outcome else {
        panic!("{result:?}")
    };
    assert!(
        failure.message.starts_with("in a worker ("),
        "{}",
        failure.message
    );
    assert!(failure.backtrace.unwrap().contains("panics"));
    let output = worker.stop();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(
        text(&output.stdout),
        "a line of rank 0\nno enddropped at the end\n"
    );
    let stderr = text(&output.stderr);
    assert!(stderr.starts_with("a line of errors\n"), "{stderr}");
    // The usual message of a panic, and once.
    assert_eq!(stderr.matches("in a worker").count(), 1, "{stderr}");
}

fn nothing_leaks_to_other_programs() {
    let mut worker = Worker::ready();
    assert_eq!(
        worker.run(runs, ("echo ${KOLO_WORKER_FDS-none}".to_owned(),)),
        "none\n"
    );
    // `ls` has its own descriptor of the directory.
    let open = worker.run(runs, ("ls -l /proc/self/fd".to_owned(),));
    assert!(!open.contains("socket:"), "{open}");
    worker.stop();
}

fn a_node_that_dies_ends_its_worker() {
    // While user code runs, while it waits for calls, and before it is ready.
    let mut running = Worker::ready();
    running.send_function(sleeps, ());
    for worker in [running, Worker::ready(), Worker::start()] {
        let output = worker.abandon();
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        let stderr = text(&output.stderr);
        assert!(
            stderr.starts_with("kolo worker: the node closed the "),
            "{stderr}"
        );
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}

fn nonsense_ends_the_worker() {
    let mut worker = Worker::ready();
    worker.calls.send(&"no call", &[]);
    let output = worker.child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(70), "{output:?}");
    let stderr = text(&output.stderr);
    assert!(
        stderr.starts_with("kolo worker: the call socket brought what is no call: "),
        "{stderr}"
    );
    assert_eq!(stderr.lines().count(), 1, "{stderr}");

    let mut worker = Worker::start();
    worker.control.stream.write_all(&[0xff; 8]).unwrap();
    let output = worker.child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(70), "{output:?}");
    let stderr = text(&output.stderr);
    assert!(stderr.contains("over the limit"), "{stderr}");
}

fn a_wrong_environment_is_told() {
    for given in ["", "3", "3,3", "1,2", "3,4,5", "a,b", "77777,77778", "-1,4"] {
        let output = command().env("KOLO_WORKER_FDS", given).output().unwrap();
        assert_eq!(output.status.code(), Some(70), "{given}: {output:?}");
        let stderr = text(&output.stderr);
        assert!(
            stderr.contains(&format!("KOLO_WORKER_FDS is `{given}`")),
            "{stderr}"
        );
    }
}

fn a_worker_may_exit_by_itself() {
    let mut worker = Worker::ready();
    worker.send_function(leaves, (7,));
    let output = worker.child.wait_with_output().unwrap();
    assert_eq!(
        (output.status.code(), output.status.signal()),
        (Some(7), None)
    );
    assert!(output.stderr.is_empty(), "{output:?}");
}
