//! The shell around [`Host`]: one process of ssh, its streams, clocks.

use std::net::IpAddr;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use super::error::HostError;
use super::host::{Action, Ended, Event, Host, Stage};
use super::protocol::{LONGEST_LINE, ReadyNode, Word};

/// How much is written at once, so that progress is seen.
const CHUNK: usize = 64 << 10;

/// How long ssh may take to end once nothing is left to say.
const GOODBYE: Duration = Duration::from_secs(5);

/// What is wanted of all hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wish {
    Run,
    Stop,
    Kill,
}

/// The line with an order, or why there is none.
pub(super) type OrderLine = Result<Vec<u8>, HostError>;

/// What a host says of itself before it gets its order.
#[derive(Debug)]
pub(super) struct Greeting {
    /// The launcher's address as the host sees it.
    pub(super) from: Option<IpAddr>,
    /// Which machine it is; nothing if it does not know.
    pub(super) machine: String,
}

/// What happened to a host, by its place in the list.
#[derive(Debug)]
pub(super) enum Report {
    Stage(usize, Stage),
    /// It waits for the line with its order, or for why there is none.
    WantsOrder(usize, Greeting, oneshot::Sender<OrderLine>),
    Up(usize, ReadyNode),
    Failed(usize, HostError),
    Down(usize),
}

/// One host to bring up and to keep.
pub(super) struct Carrier {
    pub(super) index: usize,
    pub(super) command: Command,
    pub(super) script: String,
    pub(super) program: Option<Arc<[u8]>>,
    pub(super) host: Host,
    pub(super) stall_timeout: Duration,
    pub(super) stop_timeout: Duration,
    /// How often the node hears that the launcher lives; never if it is detached.
    pub(super) beat: Option<Duration>,
    pub(super) turns: Arc<Semaphore>,
    pub(super) reports: mpsc::Sender<Report>,
    pub(super) wishes: watch::Receiver<Wish>,
}

/// What is written to a host, in order.
enum Chunk {
    Program(Arc<[u8]>),
    Line(Vec<u8>),
}

/// Writes to a host without holding up what reads from it. Its end closes the host's standard input.
async fn write(mut stdin: ChildStdin, mut chunks: mpsc::Receiver<Chunk>, written: Arc<AtomicU64>) {
    while let Some(chunk) = chunks.recv().await {
        let bytes: &[u8] = match &chunk {
            Chunk::Program(bytes) => bytes,
            Chunk::Line(bytes) => bytes,
        };
        for part in bytes.chunks(CHUNK) {
            if stdin.write_all(part).await.is_err() {
                // It has ended, which its status tells better.
                return;
            }
            written.fetch_add(part.len() as u64, Ordering::Relaxed);
        }
        if stdin.flush().await.is_err() {
            return;
        }
    }
}

/// Splits a stream into lines. What is longer than allowed is cut.
struct Lines<R> {
    stream: Option<R>,
    buffer: Vec<u8>,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    fn new(stream: Option<R>) -> Self {
        Self {
            stream,
            buffer: Vec::new(),
        }
    }

    /// The next line; `None` for ever at the end. Cancel safe.
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Some(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            if self.buffer.len() >= LONGEST_LINE
                || (self.stream.is_none() && !self.buffer.is_empty())
            {
                let line = std::mem::take(&mut self.buffer);
                return Some(String::from_utf8_lossy(&line).into_owned());
            }
            let mut chunk = [0; 4096];
            match self.stream.as_mut()?.read(&mut chunk).await {
                Ok(count @ 1..) => self.buffer.extend_from_slice(&chunk[..count]),
                Ok(0) | Err(_) => self.stream = None,
            }
        }
    }

    fn is_over(&self) -> bool {
        self.stream.is_none() && self.buffer.is_empty()
    }
}

fn ended(status: ExitStatus) -> Ended {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => Ended::Code(code),
        (None, signal) => Ended::Signal(signal.unwrap_or_default()),
    }
}

/// Waits for ever if there is nothing to wait for.
async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

impl Carrier {
    /// Brings the host up, keeps it, and ends it. Ends when the process has ended.
    pub(super) async fn run(mut self) {
        let turns = Arc::clone(&self.turns);
        let turn = turns.acquire_owned().await.ok();
        let mut child = match self.spawn() {
            Ok(child) => child,
            Err(error) => {
                self.report(Report::Failed(self.index, error)).await;
                return;
            }
        };
        self.carry(&mut child, turn).await;
        // It ends by itself when its standard input has ended, but for a connection that hangs.
        if timeout(GOODBYE, child.wait()).await.is_err() {
            drop(child.kill().await);
        }
    }

    fn spawn(&mut self) -> Result<Child, HostError> {
        self.command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C is for the launcher, which then ends its nodes with care.
            .process_group(0)
            .spawn()
            .map_err(|error| HostError::NoSsh {
                program: self
                    .command
                    .as_std()
                    .get_program()
                    .to_string_lossy()
                    .into_owned(),
                reason: error.to_string(),
            })
    }

    async fn report(&self, report: Report) {
        // Nobody listens: then the launch has been given up, and this task is about to be dropped.
        drop(self.reports.send(report).await);
    }

    async fn carry(&mut self, child: &mut Child, turn: Option<tokio::sync::OwnedSemaphorePermit>) {
        let mut turn = turn;
        let mut stdout = Lines::new(child.stdout.take());
        let mut stderr = Lines::new(child.stderr.take());
        let (sender, chunks) = mpsc::channel(8);
        let mut to_host = Some(sender);
        let written = Arc::new(AtomicU64::new(0));
        if let Some(stdin) = child.stdin.take() {
            tokio::spawn(write(stdin, chunks, Arc::clone(&written)));
        }
        let script = std::mem::take(&mut self.script).into_bytes();
        send(to_host.as_ref(), Chunk::Line(script)).await;
        let mut seen = 0;
        let mut heard = Instant::now();
        let mut beats = interval(self.beat.unwrap_or(Duration::from_secs(3600)));
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut exit = None;
        let mut actions = self.host.on(Event::Spawned);
        loop {
            for action in std::mem::take(&mut actions) {
                heard = Instant::now();
                match action {
                    Action::Show(stage) => self.report(Report::Stage(self.index, stage)).await,
                    Action::SendProgram => match &self.program {
                        Some(bytes) => {
                            send(to_host.as_ref(), Chunk::Program(Arc::clone(bytes))).await;
                        }
                        None => to_host = None,
                    },
                    Action::SendOrder(from, machine) => {
                        match self.order(Greeting { from, machine }).await {
                            Ok(line) => send(to_host.as_ref(), Chunk::Line(line)).await,
                            Err(error) => actions.extend(self.host.on(Event::NoOrder(error))),
                        }
                    }
                    Action::Up(node) => {
                        turn = None;
                        if self.beat.is_none() {
                            to_host = None;
                        }
                        self.report(Report::Up(self.index, node)).await;
                    }
                    Action::Failed(error) => {
                        drop(turn.take());
                        drop(to_host.take());
                        if exit.is_none() {
                            // What is left there ends with the connection.
                            drop(child.start_kill());
                        }
                        self.report(Report::Failed(self.index, error)).await;
                        return;
                    }
                    Action::Down => {
                        drop(to_host.take());
                        self.report(Report::Down(self.index)).await;
                        return;
                    }
                }
            }
            if !actions.is_empty() {
                continue;
            }
            if let Some(exit) = exit
                && stdout.is_over()
                && stderr.is_over()
            {
                actions = self.host.on(Event::Exited(exit));
                if actions.is_empty() {
                    return;
                }
                continue;
            }
            let deadline = match self.host.stage() {
                Stage::Waiting | Stage::Up | Stage::Ended => None,
                Stage::Stopping => Some(heard + self.stop_timeout + self.stall_timeout),
                _ => Some(heard + self.stall_timeout),
            };
            tokio::select! {
                Some(line) = stdout.next() => {
                    heard = Instant::now();
                    actions = self.host.on(Event::Line(&line));
                }
                Some(line) = stderr.next() => {
                    actions = self.host.on(Event::Complaint(&line));
                }
                status = child.wait(), if exit.is_none() => {
                    exit = Some(status.map_or(Ended::Code(-1), ended));
                    // Whoever still holds the other ends of the streams says nothing to us.
                    let rest = async {
                        while let Some(line) = stdout.next().await {
                            actions.extend(self.host.on(Event::Line(&line)));
                        }
                        while let Some(line) = stderr.next().await {
                            actions.extend(self.host.on(Event::Complaint(&line)));
                        }
                    };
                    drop(timeout(Duration::from_millis(500), rest).await);
                    stdout = Lines::new(None);
                    stderr = Lines::new(None);
                }
                _ = beats.tick(), if self.beat.is_some() && matches!(self.host.stage(), Stage::Up | Stage::Stopping) => {
                    if let Some(sender) = &to_host {
                        // One that is full has more to say than this.
                        sender.try_send(Chunk::Line(Word::Beat.line().to_vec())).ok();
                    }
                }
                Ok(()) = self.wishes.changed() => {
                    let wish = *self.wishes.borrow_and_update();
                    match (wish, self.host.stage()) {
                        (Wish::Run, _) => {}
                        (Wish::Stop, Stage::Up) => {
                            send(to_host.as_ref(), Chunk::Line(Word::Stop.line().to_vec())).await;
                            actions = self.host.on(Event::StopAsked);
                        }
                        (Wish::Kill, Stage::Up | Stage::Stopping) => {
                            send(to_host.as_ref(), Chunk::Line(Word::Kill.line().to_vec())).await;
                            actions = self.host.on(Event::StopAsked);
                        }
                        // It was on its way up.
                        (Wish::Stop | Wish::Kill, _) => actions = vec![Action::Failed(HostError::GivenUp)],
                    }
                }
                () = until(deadline) => {
                    let now = written.load(Ordering::Relaxed);
                    if now == seen {
                        actions = self.host.on(Event::Silent(self.stall_timeout));
                    } else {
                        // It takes what it is sent.
                        seen = now;
                        heard = Instant::now();
                    }
                }
            }
        }
    }

    async fn order(&self, greeting: Greeting) -> OrderLine {
        let (sender, order) = oneshot::channel();
        self.report(Report::WantsOrder(self.index, greeting, sender))
            .await;
        order.await.unwrap_or(Err(HostError::GivenUp))
    }
}

async fn send(to_host: Option<&mpsc::Sender<Chunk>>, chunk: Chunk) {
    if let Some(sender) = to_host {
        // Its end is seen by its status.
        drop(sender.send(chunk).await);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn streams_are_split_into_lines_the_last_one_included() {
        let stream: &[u8] = b"one\ntwo\r\n\nth\xffree";
        let mut lines = Lines::new(Some(stream));
        let mut all = Vec::new();
        while let Some(line) = lines.next().await {
            all.push(line);
        }
        assert_eq!(all, ["one", "two\r", "", "th\u{fffd}ree"]);
        assert!(lines.is_over());
    }

    #[tokio::test]
    async fn a_line_without_an_end_takes_no_memory() {
        let stream = tokio::io::repeat(b'x');
        let mut lines = Lines::new(Some(stream));
        let line = lines.next().await.unwrap();
        assert!(line.len() < LONGEST_LINE + 8192);
    }
}
