//! What runs on a host: `kolo-node launched`, started by the script, told what to do by one line.

use std::borrow::Cow;
use std::io::{self, BufRead as _, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use kolo_transport::TransportRuntime;
use kolo_transport::awake::{AwakeClock, TICK};
use kolo_transport::descriptors;
use kolo_transport::join::{JoinError, join_any};
use rustix::process::{Pid, Signal, kill_process};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing_subscriber::EnvFilter;

use super::protocol::{Answer, LONGEST_LINE, Order, ReadyNode, StopOrder, Task, Word};
use super::state::{HostDir, Locked};
use crate::node::default_listen;
use crate::signals::{self, Ends};
use crate::{Node, NodeConfig, NodeResources};

/// The first argument of a program that is started by a launcher.
const LAUNCHED: &str = "launched";

/// Its second argument where it is to run on by itself.
const BACKGROUND: &str = "background";

/// How long the launcher may take to say what to do.
const ORDER_TIMEOUT: Duration = Duration::from_secs(60);

/// How much earlier than the next address an address of the head is tried.
const HEAD_START: Duration = Duration::from_millis(250);

/// How long jobs may take to end when the launcher is gone: nobody waits for them any more.
pub(super) const ORPHAN_GRACE: Duration = Duration::from_secs(10);

/// Is the node that a launcher has asked for, if this process was started so: `kolo-node` calls it first. The exit code
/// is that of the process.
#[must_use]
pub fn run_if_launched() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != LAUNCHED {
        return None;
    }
    let background = arguments.next().is_some_and(|word| word == BACKGROUND);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let code = match runtime {
        Ok(runtime) => {
            let code = runtime.block_on(serve(background));
            // A thread that reads standard input can't be ended.
            runtime.shutdown_background();
            code
        }
        Err(error) => {
            say(&Answer::Failed(format!("its threads can't start: {error}")));
            ExitCode::FAILURE
        }
    };
    Some(code)
}

/// Tells the launcher, which may be gone.
fn say(answer: &Answer) {
    let mut stdout = io::stdout().lock();
    drop(
        stdout
            .write_all(answer.line().as_bytes())
            .and_then(|()| stdout.flush()),
    );
}

/// The lines of standard input, and `None` for its end. Read by a thread of its own: it may be a pipe, a socket or a
/// terminal.
fn input() -> mpsc::Receiver<Option<String>> {
    let (sender, lines) = mpsc::channel(16);
    std::thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        loop {
            let mut line = Vec::new();
            let read = stdin
                .by_ref()
                .take(LONGEST_LINE as u64)
                .read_until(b'\n', &mut line);
            let line = match read {
                Ok(1..) => Some(String::from_utf8_lossy(&line).into_owned()),
                _ => None,
            };
            let over = line.is_none();
            if sender.blocking_send(line).is_err() || over {
                return;
            }
        }
    });
    lines
}

async fn serve(background: bool) -> ExitCode {
    let mut lines = input();
    if !background {
        say(&Answer::Order(kolo_transport::interfaces::machine()));
    }
    let order = match timeout(ORDER_TIMEOUT, lines.recv()).await {
        Ok(Some(Some(line))) => line,
        // The launcher has gone.
        Ok(_) => return ExitCode::FAILURE,
        Err(_) => {
            say(&Answer::Failed("no order came".to_owned()));
            return ExitCode::FAILURE;
        }
    };
    // What serde says could repeat a part of the token.
    let Ok(task) = serde_json::from_str::<Task>(&order) else {
        say(&Answer::Failed(
            "the order is not understood; are launcher and host of the same version?".to_owned(),
        ));
        return ExitCode::FAILURE;
    };
    let done = match task {
        Task::Stop(stop) => end(&stop).await,
        Task::Start(start) if background => live(start, lines, background).await,
        Task::Start(start) => match check_alone(&start) {
            Err(text) => Err(text),
            Ok(()) if start.lease_ms.is_none() => detach(&start, order.as_bytes(), lines).await,
            Ok(()) => live(start, lines, background).await,
        },
    };
    match done {
        Ok(answer) => {
            if let Some(answer) = answer {
                say(&answer);
            }
            ExitCode::SUCCESS
        }
        Err(text) => {
            tracing::error!(error = text, "the node could not start");
            say(&Answer::Failed(text));
            ExitCode::FAILURE
        }
    }
}

/// Starts this program again, in a session of its own, and passes on what it says until it is ready. Until then it ends with
/// the launcher.
async fn detach(
    order: &Order,
    line: &[u8],
    mut lines: mpsc::Receiver<Option<String>>,
) -> Result<Option<Answer>, String> {
    let failed = |error: io::Error| format!("it can't run in the background: {error}");
    let dir = HostDir::of(&order.cluster, &order.hostname)?;
    let log = dir.open_log()?;
    let mut child = Command::new("/proc/self/exe")
        .arg0("kolo-node")
        .args([LAUNCHED, BACKGROUND])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(failed)?;
    // Its end tells the node that nobody waits for it any more.
    let mut held = child.stdin.take();
    if let Some(stdin) = &mut held {
        stdin.write_all(line).map_err(failed)?;
    }
    let mut started = tokio::task::spawn_blocking(move || {
        let mut answer = None;
        if let Some(stdout) = child.stdout.take() {
            for line in io::BufReader::new(stdout).lines() {
                if let Some(said) = Answer::parse(&line?) {
                    answer = Some(said);
                    break;
                }
            }
        }
        if !matches!(answer, Some(Answer::Ready(_))) {
            // It has ended, or is about to.
            child.wait()?;
        }
        io::Result::Ok(answer)
    });
    let started = loop {
        tokio::select! {
            started = &mut started => break started,
            line = lines.recv(), if held.is_some() => {
                if !matches!(line, Some(Some(_))) {
                    drop(held.take());
                }
            }
        }
    };
    match started {
        Ok(Ok(Some(answer))) => Ok(Some(answer)),
        Ok(Ok(None)) if held.is_none() => Ok(None),
        Ok(Ok(None)) => Err(format!(
            "it ended before it was ready; {} may say why",
            dir.log().display()
        )),
        Ok(Err(error)) => Err(failed(error)),
        Err(error) => Err(failed(io::Error::other(error))),
    }
}

/// Is the node, from its start to its end.
async fn live(
    order: Order,
    mut lines: mpsc::Receiver<Option<String>>,
    background: bool,
) -> Result<Option<Answer>, String> {
    if background {
        // Away from the terminal and the session of whoever started it.
        rustix::process::setsid().map_err(|error| format!("no session can be had: {error}"))?;
    }
    let mut kinds = vec![SignalKind::terminate(), SignalKind::interrupt()];
    if !background {
        kinds.push(SignalKind::hangup());
    }
    let mut ends = Ends::take(&kinds).map_err(|error| error.to_string())?;
    // In the background it ends nothing.
    let _hangup = signal(SignalKind::hangup()).map_err(|error| error.to_string())?;
    drop(
        tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::new("info"))
            .with_writer(io::stderr)
            .with_ansi(false)
            .try_init(),
    );
    descriptors::raise();
    let dir = HostDir::of(&order.cluster, &order.hostname)?;
    let lock = match dir.lock()? {
        Locked::Ours(lock) => lock,
        Locked::Theirs(pid) => return Ok(Some(Answer::Running(pid))),
    };
    let starting = start(&order);
    tokio::pin!(starting);
    let (node, head) = loop {
        tokio::select! {
            started = &mut starting => break started?,
            _ = ends.next() => {}
            line = lines.recv() => {
                if matches!(line, Some(Some(_))) {
                    continue;
                }
                // The launcher has gone.
            }
        }
        // What is dropped here ends.
        dir.remove();
        return Ok(None);
    };
    say(&Answer::Ready(ReadyNode {
        node: node.id(),
        address: node.address(),
        head,
        pid: std::process::id(),
        state: dir.path().display().to_string(),
    }));
    let lease = order.lease_ms.map(Duration::from_millis);
    let mut grace = Duration::from_millis(order.stop_timeout_ms);
    let mut told = false;
    let mut revoked = false;
    // A launcher that spoke while this process stood still was not silent.
    let clock = AwakeClock::start(&tokio::runtime::Handle::current(), TICK);
    let why: Cow<'static, str> = loop {
        let heard = async {
            match lease {
                Some(lease) => clock.timeout(lease, lines.recv()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            signal = ends.next() => break signals::name(signal).into(),
            reason = node.revoked() => {
                tracing::warn!(reason, "the head has put this node out of the cluster");
                grace = grace.min(ORPHAN_GRACE);
                revoked = true;
                break "its revocation".into();
            }
            heard = heard => match heard {
                Some(Some(Some(line))) => match Word::parse(&line) {
                    Word::Beat => {}
                    Word::Stop => {
                        told = true;
                        break "the launcher's word".into();
                    }
                    Word::Kill => {
                        told = true;
                        grace = Duration::ZERO;
                        break "the launcher's word".into();
                    }
                },
                Some(_) => {
                    grace = grace.min(ORPHAN_GRACE);
                    break "the launcher's end".into();
                }
                None => {
                    grace = grace.min(ORPHAN_GRACE);
                    break "silence of the launcher".into();
                }
            },
        }
    };
    tracing::info!(%why, ?grace, "stopping");
    let drain = dir.asked_to_drain();
    if background && !drain.is_zero() {
        tokio::select! {
            drained = node.drain(drain) => if !drained {
                tracing::warn!(?drain, "not all jobs have ended by themselves; they are ended");
            },
            _ = ends.next() => {}
        }
    }
    if grace.is_zero() {
        node.kill();
    } else {
        let stopping = node.stop();
        tokio::pin!(stopping);
        let deadline = tokio::time::sleep(grace);
        tokio::pin!(deadline);
        loop {
            tokio::select! {
                () = &mut stopping => break,
                // Dropping the future kills what is left.
                () = &mut deadline => break,
                _ = ends.next() => break,
                line = lines.recv(), if told => match line {
                    Some(Some(line)) if Word::parse(&line) != Word::Kill => {}
                    // Told to hurry, or nobody waits any more.
                    _ => break,
                },
            }
        }
    }
    // A detached one leaves its log for `kolo down`, which does not come to a host that was given up.
    if !background || revoked {
        dir.remove();
    }
    drop(lock);
    Ok(told.then_some(Answer::Stopped))
}

/// Refuses a second node of a cluster on this machine, which has one under another name.
fn check_alone(order: &Order) -> Result<(), String> {
    match HostDir::of(&order.cluster, &order.hostname)?.other() {
        Some((other, pid)) => Err(format!(
            "a node of this cluster runs on this machine already, as {} (process {pid}); give the host by that name, or \
             end it by `kolo down`",
            other.name()
        )),
        None => Ok(()),
    }
}

async fn start(order: &Order) -> Result<(Node, SocketAddr), String> {
    let limit = Duration::from_millis(order.join_timeout_ms);
    let tried = order.heads.join(", ");
    let heads = timeout(limit, resolve(&order.heads))
        .await
        .unwrap_or_default();
    if heads.is_empty() {
        return Err(format!(
            "none of the head's addresses is known there: {tried}"
        ));
    }
    let token = order
        .token
        .parse()
        .map_err(|_| "the order holds no join token".to_owned())?;
    let runtime =
        TransportRuntime::new(1).map_err(|error| format!("its threads can't start: {error}"))?;
    let deadline = tokio::time::Instant::now() + limit;
    let (head, credentials) = loop {
        match join_any(&runtime, &heads, &token, HEAD_START).await {
            Ok(joined) => break joined,
            // The secret was not sent, so it can be tried again.
            Err(JoinError::Connect(error))
                if error.is_retryable() && tokio::time::Instant::now() + HEAD_START < deadline =>
            {
                tokio::time::sleep(HEAD_START).await;
            }
            Err(error @ JoinError::Connect(_)) => {
                return Err(format!(
                    "the head is not reached (tried were {tried}): {error}; is its UDP port open?"
                ));
            }
            Err(error) => return Err(error.to_string()),
        }
    };
    let mut config = NodeConfig::new(head, credentials);
    config.hostname = Some(order.hostname.clone());
    config.listen = default_listen(head);
    config.resources = NodeResources {
        cpus: Some(order.cpus),
        ..NodeResources::default()
    };
    config.gpus_for_all = order.gpus_for_all;
    config.stop_timeout = Duration::from_millis(order.stop_timeout_ms);
    config.join_timeout = limit;
    config.transport = Some(runtime);
    let node = Node::start(config)
        .await
        .map_err(|error| error.to_string())?;
    Ok((node, head))
}

/// All addresses of all names, in order, each once.
async fn resolve(names: &[String]) -> Vec<SocketAddr> {
    let mut addresses = Vec::new();
    for name in names {
        if let Ok(found) = tokio::net::lookup_host(name.as_str()).await {
            for address in found {
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
        }
    }
    addresses
}

/// Ends the node that runs here for a cluster under this name, if one does.
async fn end(order: &StopOrder) -> Result<Option<Answer>, String> {
    let mut dir = HostDir::of(&order.cluster, &order.hostname)?;
    if !dir.path().exists() {
        match dir.other() {
            Some((other, _)) => dir = other,
            None => return Ok(Some(Answer::Stopped)),
        }
    }
    let drain = Duration::from_millis(order.drain_ms);
    let deadline = tokio::time::Instant::now() + drain + Duration::from_millis(order.timeout_ms);
    let mut signalled = false;
    loop {
        match dir.lock()? {
            Locked::Ours(lock) => {
                dir.remove();
                drop(lock);
                // What ran here may have had another name.
                match dir.other().filter(|_| !signalled) {
                    Some((other, _)) => dir = other,
                    None => return Ok(Some(Answer::Stopped)),
                }
                continue;
            }
            Locked::Theirs(pid) => {
                if tokio::time::Instant::now() > deadline {
                    return Err(format!(
                        "process {pid} has not ended in time; end it by `kolo down --force`"
                    ));
                }
                // 0: it has the lock, and is just about to write its id.
                if !signalled && pid != 0 {
                    // Whoever holds the lock has written its id there, so the id is no other's.
                    dir.ask_to_drain(drain)?;
                    let signal = if order.force {
                        Signal::KILL
                    } else {
                        Signal::TERM
                    };
                    let process = i32::try_from(pid).ok().and_then(Pid::from_raw);
                    let process = process.ok_or("the node's process is not known")?;
                    match kill_process(process, signal) {
                        Ok(()) | Err(rustix::io::Errno::SRCH) => signalled = true,
                        Err(error) => {
                            return Err(format!("process {pid} can't be ended: {error}"));
                        }
                    }
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
