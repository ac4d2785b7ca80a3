//! Drives the call loop over a socket pair, as a node does.
#![allow(unsafe_code)] // of linkme, whose entries the macros make

mod batches;
mod caller;
mod calls;
mod checkpoints;
mod ends;
mod executables;
mod generations;
mod group;
mod node;
mod recovery;
mod user;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use kolo_transport::ids::{CrossRank, Incarnation, JobId, LocalRank, NodeId, Rank, Slot};
use kolo_transport::wire::Member;

use crate::context::{Context, Session};
use crate::registry::Registry;
use crate::worker::calls::{LoopEnd, LoopError, serve};
use crate::worker::dispatch::Dispatcher;
use caller::Caller;

/// One worker's call loop, without a node.
struct Worker {
    caller: Caller,
    context: Context,
    stopping: Arc<AtomicBool>,
    writes: Arc<AtomicUsize>,
    thread: Option<JoinHandle<Result<LoopEnd, LoopError>>>,
}

impl std::ops::Deref for Worker {
    type Target = Caller;

    fn deref(&self) -> &Caller {
        &self.caller
    }
}

impl std::ops::DerefMut for Worker {
    fn deref_mut(&mut self) -> &mut Caller {
        &mut self.caller
    }
}

/// Counts the writes.
struct Counted(UnixStream, Arc<AtomicUsize>);

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

fn session() -> (Arc<Session>, Context) {
    let member = Member {
        rank: Rank(2),
        local_rank: LocalRank(1),
        local_size: 2,
        cross_rank: CrossRank(0),
        cross_size: 1,
        slot: Slot(2),
        node: NodeId(7),
        hostname: "here".to_owned(),
        address: None,
        incarnation: Incarnation::FIRST,
    };
    let comm = kolo_collectives::local_group(4).unwrap().swap_remove(2);
    let session = Session::new(tokio::sync::mpsc::unbounded_channel().0);
    let context = Context::new(member, comm, JobId(5), Some(&session));
    session.enter(context.clone());
    (session, context)
}

impl Worker {
    fn start() -> Self {
        let (socket, theirs) = UnixStream::pair().unwrap();
        let stopping = Arc::new(AtomicBool::new(false));
        let writes = Arc::new(AtomicUsize::new(0));
        let (session, context) = session();
        let thread = std::thread::spawn({
            let (stopping, writes) = (Arc::clone(&stopping), Arc::clone(&writes));
            move || {
                let mut dispatcher = Dispatcher::new(Registry::get().unwrap(), session);
                let writer = Counted(theirs.try_clone().unwrap(), writes);
                let end = serve(theirs, writer, &mut dispatcher, &stopping);
                dispatcher.drop_all();
                end
            }
        });
        Self {
            caller: Caller::new(socket),
            context,
            stopping,
            writes,
            thread: Some(thread),
        }
    }

    fn end(&mut self) -> Result<LoopEnd, LoopError> {
        self.socket.shutdown(std::net::Shutdown::Both).unwrap();
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take()
            && !std::thread::panicking()
        {
            self.socket.shutdown(std::net::Shutdown::Both).unwrap();
            assert_eq!(thread.join().unwrap().unwrap(), LoopEnd::Closed);
        }
    }
}
