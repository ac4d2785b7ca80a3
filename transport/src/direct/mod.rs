//! Threads that sleep on their own sockets.
//!
//! A thread that blocks on what a runtime's sockets bring is usually woken in two steps: the runtime's thread wakes up, finds who
//! waits, and wakes that one. Here it waits in `poll(2)` by itself: [`block_on`] runs a future on the calling thread, and a
//! [`Socket`] that is polled by it and has nothing to give is put on the list of what the thread sleeps on. Polled by any other
//! task, the same socket is registered with its runtime.
//!
//! ```
//! use std::io::{Read, Write};
//! use std::os::unix::net::UnixStream;
//!
//! use kolo_transport::direct::{Socket, block_on};
//!
//! let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_io().build()?;
//! let (near, mut far) = UnixStream::pair()?;
//! near.set_nonblocking(true)?;
//! let mut socket = Socket::new(near.into(), runtime.handle().clone());
//! let thread = std::thread::spawn(move || far.write_all(b"hello"));
//! let mut bytes = [0; 5];
//! let count = block_on(|| None, || false, std::future::poll_fn(|cx| {
//!     socket.poll_read_with(cx, bytes.len(), |fd| Ok(rustix::io::read(fd, &mut bytes)?))
//! }))?;
//! assert_eq!(&bytes[..count], &b"hello"[..count]);
//! thread.join().unwrap()?;
//! # Ok::<(), std::io::Error>(())
//! ```

mod patience;
mod sleeper;
mod socket;

pub use sleeper::{block_on, is_direct, looker, polls_again};
pub use socket::Socket;
