//! This command's input, for rank 0.

use std::os::fd::AsFd;
use std::time::Duration;

use bytes::Bytes;
use kolo_transport::FrameSender;
use kolo_transport::wire::StdinChunk;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use tokio::sync::mpsc;

/// Pieces that wait to be sent.
const QUEUE: usize = 4;

/// How much is read at once.
const PIECE: usize = 64 << 10;

/// How often a terminal is tried that is somebody else's at the moment.
const BACKGROUND: Duration = Duration::from_millis(250);

/// Whether the terminal is somebody else's: this process is in its background.
fn is_in_background() -> bool {
    let stdin = rustix::stdio::stdin();
    rustix::termios::isatty(stdin)
        && rustix::termios::tcgetpgrp(stdin).is_ok_and(|group| group != rustix::process::getpgrp())
}

/// Sends all input to the node of rank 0, until either side ends.
///
/// The thread that reads can't be ended while nothing comes; it ends with the process.
pub(crate) async fn pump(mut send: FrameSender) {
    if is_in_background() {
        send.finish();
        return;
    }
    let (queue, mut pieces) = mpsc::channel(QUEUE);
    let reader = std::thread::Builder::new()
        .name("kolo-input".to_owned())
        .spawn(move || read(&queue));
    if let Err(error) = reader {
        tracing::error!(%error, "no thread to read the input");
    }
    loop {
        tokio::select! {
            piece = pieces.recv() => match piece {
                Some(piece) => {
                    if send.send_bytes(&StdinChunk {}, piece).await.is_err() {
                        // Rank 0 has closed its input, or has ended.
                        return;
                    }
                }
                None => break,
            },
            _ = send.stopped() => return,
        }
    }
    send.finish();
}

fn read(queue: &mpsc::Sender<Bytes>) {
    let stdin = rustix::stdio::stdin();
    let stdin = stdin.as_fd();
    loop {
        // A read that waits on a terminal would go on after Ctrl-Z, and take what is meant for the shell.
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        match rustix::event::poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return tracing::debug!(%error, "waiting for input"),
        }
        let mut buffer = vec![0; PIECE];
        match rustix::io::read(stdin, &mut buffer[..]) {
            Ok(0) => return,
            Ok(length) => {
                buffer.truncate(length);
                if queue.blocking_send(Bytes::from(buffer)).is_err() {
                    return;
                }
            }
            // Others that have it, too, may have made it non-blocking: that is not its end.
            Err(Errno::INTR | Errno::AGAIN) => {}
            // The terminal is the shell's at the moment.
            Err(Errno::IO) if is_in_background() => std::thread::sleep(BACKGROUND),
            Err(error) => {
                // A closed standard input is an empty one.
                tracing::debug!(%error, "reading the input");
                return;
            }
        }
    }
}
