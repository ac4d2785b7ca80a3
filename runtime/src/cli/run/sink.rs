//! A thread that shows output and writes it to files. It may block as long as its reader wants: then the queue before it
//! fills, and the workers wait.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use bytes::Bytes;
use kolo_transport::ids::JobId;
use kolo_transport::wire::ink;
use kolo_transport::wire::{Member, OutputChunk, PlacedNode, Stdio};
use rustix::fd::BorrowedFd;
use tokio::sync::{mpsc, oneshot};

use super::super::progress;
use super::files::{Destination, Files};
use super::lines::{Lines, Source};
use super::prefix::{Prefix, Values};
use super::ranks::Ranks;
use super::streams::Shown;

/// Pieces that wait for the thread.
const QUEUE: usize = 16;

/// How much is put together before it is written.
const WRITE: usize = 256 << 10;

/// What becomes of the output.
#[derive(Debug, Clone)]
pub(crate) struct Style {
    pub(crate) prefix: Prefix,
    pub(crate) ranks: Ranks,
    pub(crate) shown: Shown,
    pub(crate) output: Option<Destination>,
    pub(crate) workers: u32,
    /// Whether the prefixes of standard output and of standard error have colours.
    pub(crate) colours: [bool; 2],
}

/// For the thread.
enum Item {
    /// Where everybody is.
    Placed(JobId, Arc<Vec<PlacedNode>>),
    /// Who everybody is from now on.
    Members(Vec<Member>),
    /// A piece of output; an empty one is the end of its source.
    Piece(OutputChunk, Bytes),
}

/// Gives pieces to the thread.
#[derive(Debug, Clone)]
pub(crate) struct Sink {
    queue: mpsc::Sender<Item>,
}

/// The thread.
#[derive(Debug)]
pub(crate) struct Writer {
    thread: JoinHandle<Written>,
}

/// Why output was not written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WriteError {
    /// Whoever read it has enough.
    Closed,
    /// It can't be written.
    Failed(String),
}

impl Sink {
    /// Starts the thread; the receiver hears of what goes wrong as soon as it does.
    pub(crate) fn start(style: Style) -> io::Result<(Self, Writer, oneshot::Receiver<WriteError>)> {
        let (queue, items) = mpsc::channel(QUEUE);
        let (trouble, heard) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("kolo-output".to_owned())
            .spawn(move || Printer::new(style).run(items, trouble))?;
        Ok((Self { queue }, Writer { thread }, heard))
    }

    async fn put(&self, item: Item) {
        // The thread takes everything until the end, unless it has panicked, which its end shows.
        drop(self.queue.send(item).await);
    }

    /// The job is placed.
    pub(crate) async fn placed(&self, job: JobId, nodes: Arc<Vec<PlacedNode>>) {
        self.put(Item::Placed(job, nodes)).await;
    }

    /// The group of an elastic job is another one.
    pub(crate) async fn members(&self, members: Vec<Member>) {
        self.put(Item::Members(members)).await;
    }

    /// A piece came. Waits while too much is waiting already.
    pub(crate) async fn piece(&self, head: OutputChunk, piece: Bytes) {
        self.put(Item::Piece(head, piece)).await;
    }
}

/// What became of the output.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) result: Result<(), WriteError>,
    /// The last line of standard error has no end.
    pub(crate) mid_line: bool,
}

impl Writer {
    /// Waits until everything is written; all sinks must have been dropped. Blocks.
    pub(crate) fn finish(self) -> Written {
        self.thread.join().unwrap_or_else(|_| Written {
            result: Err(WriteError::Failed("the output thread panicked".to_owned())),
            mid_line: false,
        })
    }
}

struct Place {
    host: String,
    local_rank: u32,
}

struct Printer {
    style: Style,
    lines: Lines,
    places: HashMap<u32, Place>,
    /// Prefixes that do not change.
    fixed: HashMap<Source, Vec<u8>>,
    files: Option<Files>,
    /// Its nodes were told before: those of an elastic job come one by one.
    placed: bool,
    out: Vec<u8>,
    err: Vec<u8>,
    result: Result<(), WriteError>,
    mid_line: bool,
    trouble: Option<oneshot::Sender<WriteError>>,
}

impl Printer {
    fn new(style: Style) -> Self {
        let shown = (0..style.workers)
            .filter(|rank| style.ranks.contains(*rank))
            .take(2)
            .count();
        Self {
            lines: Lines::new(shown <= 1),
            style,
            places: HashMap::new(),
            fixed: HashMap::new(),
            files: None,
            placed: false,
            out: Vec::new(),
            err: Vec::new(),
            result: Ok(()),
            mid_line: false,
            trouble: None,
        }
    }

    fn run(
        mut self,
        mut items: mpsc::Receiver<Item>,
        trouble: oneshot::Sender<WriteError>,
    ) -> Written {
        self.trouble = Some(trouble);
        loop {
            let item = match items.try_recv() {
                Ok(item) => item,
                Err(mpsc::error::TryRecvError::Empty) => {
                    // Nothing more at the moment: show what there is.
                    self.flush();
                    match items.blocking_recv() {
                        Some(item) => item,
                        None => break,
                    }
                }
                Err(mpsc::error::TryRecvError::Disconnected) => break,
            };
            self.take(item);
            if self.out.len() >= WRITE || self.err.len() >= WRITE {
                self.flush();
            }
        }
        for source in self.lines.open() {
            self.show(source, 0, &[]);
        }
        self.flush();
        Written {
            result: self.result,
            mid_line: self.mid_line,
        }
    }

    fn take(&mut self, item: Item) {
        match item {
            Item::Placed(job, nodes) => {
                for node in nodes.iter() {
                    for (local_rank, rank) in (0..).zip(&node.ranks) {
                        let host = node.hostname.clone();
                        self.places.insert(rank.0, Place { host, local_rank });
                    }
                }
                let is_first = !std::mem::replace(&mut self.placed, true);
                if let Some(output) = self.style.output.as_ref().filter(|_| is_first) {
                    match Files::create(output, job, self.style.workers) {
                        Ok(files) => self.files = Some(files),
                        Err(error) => {
                            let text = format!("the files in {}: {error}", output.dir().display());
                            self.fail(WriteError::Failed(text));
                        }
                    }
                }
            }
            Item::Members(members) => {
                self.fixed.clear();
                for member in members {
                    let place = Place {
                        host: member.hostname,
                        local_rank: member.local_rank.0,
                    };
                    self.places.insert(member.rank.0, place);
                }
            }
            Item::Piece(head, piece) => {
                if let Some(files) = &mut self.files
                    && let Err(error) = files.write(&head, &piece)
                {
                    let text = format!("a file in {}: {error}", files.folder().display());
                    self.files = None;
                    self.fail(WriteError::Failed(text));
                }
                if self.is_shown(&head) {
                    self.show((head.rank.0, head.stream), head.time_ms, &piece);
                }
            }
        }
    }

    fn is_shown(&self, head: &OutputChunk) -> bool {
        let place = self.places.get(&head.rank.0);
        let local_rank = place.map(|place| place.local_rank);
        self.style.ranks.contains(head.rank.0) && self.style.shown.contains(local_rank, head.stream)
    }

    fn prefix(&mut self, source: Source, time_ms: u64) -> Vec<u8> {
        if let Some(prefix) = self.fixed.get(&source) {
            return prefix.clone();
        }
        let place = self.places.get(&source.0);
        let prefix = self.style.prefix.render(Values {
            rank: source.0,
            local_rank: place.map_or(0, |place| place.local_rank),
            host: place.map_or("", |place| place.host.as_str()),
            stream: source.1,
            time_ms,
        });
        let [stdout, stderr] = self.style.colours;
        let has_colours = match source.1 {
            Stdio::Stdout => stdout,
            Stdio::Stderr => stderr,
        };
        let prefix = if has_colours && !prefix.is_empty() {
            ink::prefix(&prefix, source.0, source.1)
        } else {
            prefix
        };
        if self.style.prefix.is_fixed() {
            self.fixed.insert(source, prefix.clone());
        }
        prefix
    }

    /// Shows a piece of a source; an empty one is its end.
    fn show(&mut self, source: Source, time_ms: u64, piece: &[u8]) {
        let prefix = self.prefix(source, time_ms);
        let out = match source.1 {
            Stdio::Stdout => &mut self.out,
            Stdio::Stderr => &mut self.err,
        };
        if piece.is_empty() {
            self.lines.end(source, &prefix, out);
        } else {
            self.lines.push(source, &prefix, piece, out);
        }
    }

    fn flush(&mut self) {
        let (mut out, mut err) = (std::mem::take(&mut self.out), std::mem::take(&mut self.err));
        if !(out.is_empty() && err.is_empty()) {
            // The workers speak: they run.
            progress::end();
        }
        if let Some(last) = err.last() {
            self.mid_line = *last != b'\n';
        }
        for (fd, bytes) in [
            (rustix::stdio::stdout(), &mut out),
            (rustix::stdio::stderr(), &mut err),
        ] {
            if self.result.is_ok()
                && let Err(error) = write_all(fd, bytes)
            {
                self.fail(if error == rustix::io::Errno::PIPE {
                    WriteError::Closed
                } else {
                    WriteError::Failed(format!("the output: {}", io::Error::from(error)))
                });
            }
            bytes.clear();
        }
        (self.out, self.err) = (out, err);
    }

    /// Goes on taking what comes, so that nobody waits for it.
    fn fail(&mut self, error: WriteError) {
        if self.result.is_ok() {
            self.result = Err(error.clone());
            if let Some(trouble) = self.trouble.take() {
                // The job may have ended meanwhile.
                drop(trouble.send(error));
            }
        }
    }
}

/// Past the standard library's own buffers: others of this process hold their locks.
pub(crate) fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8]) -> Result<(), rustix::io::Errno> {
    use rustix::event::{PollFd, PollFlags};
    use rustix::io::Errno;
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            // Somebody else has made it non-blocking, as some terminals' programs do.
            Err(Errno::AGAIN) => {
                let mut fds = [PollFd::new(&fd, PollFlags::OUT)];
                match rustix::event::poll(&mut fds, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(error),
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
