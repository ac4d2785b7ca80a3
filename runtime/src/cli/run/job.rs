//! A job from its submission to its end.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_transport::frame::{FrameError, Limits};
use kolo_transport::ids::{JobId, Rank};
use kolo_transport::session::{Connection, Stream};
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{
    HeadReply, HeadRequest, JobEvent, JobSpec, JobState, NodeReply, NodeRequest, OnChange,
    OutputChunk, PlacedNode, RankFailure, Refusal, SubmitFrame, WorkerSignal,
};
use kolo_transport::{
    AwakeClock, CloseCode, Credentials, Endpoint, EndpointConfig, Expect, TransportRuntime,
};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use super::super::error::CliError;
use super::super::output::{human, write_if_read};
use super::super::progress;
use super::discovery;
use super::report::{self, Outcome};
use super::signals::{Heard, SIGINT, Signals};
use super::sink::{Sink, WriteError};
use super::stdin;
use super::survey::survey;
use crate::hosts::HostSlots;
use crate::signals::{ECHO, name};

/// Pieces of output.
const OUTPUT: Limits = Limits {
    head: 64 << 10,
    body: 4 << 20,
};

/// How long a node may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// After the end of the job: how long a node may be silent before all its output has come.
const SILENCE: Duration = Duration::from_secs(10);

/// How long the head may take longer than the job's own deadlines: it knows better what went wrong.
const HEAD_HAS_THE_WORD: Duration = Duration::from_secs(5);

/// How long after the loss of output the head has to tell of the loss of a node.
const LOSS: Duration = Duration::from_secs(5);

/// How long hosts may take to come before a job that has not begun says that it waits for them.
const ARRIVAL: Duration = Duration::from_secs(5);

/// How long the head may take to kill a job.
const KILL: Duration = Duration::from_secs(10);

/// The way to a cluster.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) runtime: TransportRuntime,
    pub(crate) credentials: Credentials,
    /// The endpoint that the head was reached from.
    pub(crate) endpoint: Endpoint,
    pub(crate) head: Connection,
    pub(crate) connect_timeout: Duration,
}

impl Link {
    /// Connects to a node. The endpoint must live as long as the connection.
    pub(super) async fn node(&self, node: &PlacedNode) -> Result<(Endpoint, Connection), String> {
        let own = self.endpoint.local_addr();
        let fits = own.is_ipv4() == node.address.is_ipv4()
            && (own.ip().is_unspecified()
                || own.ip().is_loopback() == node.address.ip().is_loopback());
        let endpoint = if fits {
            self.endpoint.clone()
        } else {
            let mut config = EndpointConfig::towards(node.address);
            config.handshake_timeout = self.connect_timeout;
            config.idle_timeout = config.idle_timeout.max(self.connect_timeout);
            Endpoint::bind(&self.runtime, self.credentials.clone(), config)
                .map_err(|error| error.to_string())?
        };
        let connection = endpoint
            .connect(node.address, Expect::node(node.node))
            .await
            .map_err(|error| error.to_string())?;
        Ok((endpoint, connection))
    }
}

/// What is run, and for whom.
#[derive(Clone)]
pub(crate) struct Request {
    pub(crate) spec: JobSpec,
    pub(crate) workers: u32,
    pub(crate) start_timeout: Duration,
    pub(crate) grace: Duration,
    /// Output that nobody wants.
    pub(crate) without: Vec<Rank>,
    /// Said when several workers run on a host.
    pub(crate) if_shared: Option<&'static str>,
    /// How long the job may run.
    pub(crate) limit: Option<Duration>,
    /// The hosts that the job may use, if these change.
    pub(crate) hosts: Option<watch::Receiver<Vec<HostSlots>>>,
}

/// How far a job has come, for those that take its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Course {
    /// It has not ended.
    Open,
    /// It has ended, and all its workers ran.
    Ran,
    /// It has ended before all its workers ran; the head says why.
    NeverWhole,
}

/// The stream broke on which the head tells of the job.
fn head_lost(job: Option<JobId>, error: FrameError) -> CliError {
    match job {
        Some(job) => CliError::JobLost {
            job,
            error: error.into(),
        },
        None => CliError::stream("the head", error),
    }
}

/// The nodes on which a job would start, or why it would not.
///
/// # Errors
///
/// [`CliError`] if the head does not say.
pub(crate) async fn try_out(
    link: &Link,
    spec: JobSpec,
    start_timeout: Duration,
) -> Result<Result<Vec<PlacedNode>, Refusal>, CliError> {
    // What was reserved is given back before the head answers.
    let limit = start_timeout + ANSWER + HEAD_HAS_THE_WORD;
    match link.head.request(&HeadRequest::DryRun(spec), limit).await {
        Ok(HeadReply::Placed(nodes)) => Ok(Ok(nodes)),
        Ok(HeadReply::Refused(refusal)) => Ok(Err(refusal)),
        Ok(_) => Err(CliError::Answer("the head".to_owned())),
        Err(error) => Err(CliError::Request {
            what: "the head".to_owned(),
            error,
        }),
    }
}

/// Runs a job to its end.
///
/// # Errors
///
/// [`CliError`] if the head is lost. A job that fails is an [`Outcome`].
pub(crate) async fn run(
    link: &Arc<Link>,
    request: Request,
    sink: Sink,
    trouble: &mut oneshot::Receiver<WriteError>,
    signals: &mut Signals,
) -> Result<Outcome, CliError> {
    let stream = link.head.open(Limits::CONTROL).await;
    let Stream { mut send, mut recv } = stream.map_err(|lost| CliError::lost("the head", lost))?;
    let grace = request.grace;
    let is_elastic = request.spec.elastic.is_some();
    let on_change = request
        .spec
        .elastic
        .as_deref()
        .map(|elastic| elastic.on_change);
    let starts_anew = on_change == Some(OnChange::Restart);
    let input = request
        .spec
        .installed
        .as_ref()
        .is_some_and(|installed| installed.stdin);
    let limit = request.start_timeout + grace + HEAD_HAS_THE_WORD;
    let sent = send.send(&HeadRequest::Submit(request.spec), &[]).await;
    // A head that refuses may say why before it has read everything.
    if let Err(error) = sent {
        tracing::debug!(%error, "the job was not submitted whole");
    }
    let mut outcome = Outcome {
        workers: request.workers,
        ..Outcome::default()
    };
    let (ended, course) = watch::channel(Course::Open);
    // By the clock of the link: what came while this process stood still is read before a time is over.
    let clock = link.runtime.clock();
    let mut outputs: JoinSet<Result<(), String>> = JoinSet::new();
    let mut healthy = false;
    // All workers run; not between two groups.
    let mut running = false;
    // Why the last group has fallen, once that was said.
    let mut fallen = String::new();
    // Hosts of which output may be missing, since the last group.
    let mut missing: BTreeSet<String> = BTreeSet::new();
    // It was told to end the job.
    let mut ending = false;
    // And at once, since then.
    let mut killing = None;
    let mut heard_trouble = false;
    // For workers of whom it is not known yet that all run.
    let mut early: Vec<WorkerSignal> = Vec::new();
    // Until when the head must have said something, and what it means if it has not.
    // A job that goes on has times of its own, which the head keeps.
    let mut deadline = (!is_elastic).then(|| clock.now() + limit);
    let mut hosts = request.hosts;
    let mut over_at = request.limit.map(|limit| clock.now() + limit);
    // What to say of a group that waits for room, and when.
    let mut shortage: Option<(Instant, String)> = None;
    let mut surveying: JoinSet<Vec<String>> = JoinSet::new();
    let mut lost_at = None;
    loop {
        tokio::select! {
            // What has come counts before a time that is over.
            biased;
            event = recv.next::<JobEvent>() => {
                let event = match event {
                    Ok(Some(frame)) => frame.head,
                    Ok(None) => return Err(head_lost(outcome.job, FrameError::Truncated { got: 0 })),
                    Err(error) => return Err(head_lost(outcome.job, error)),
                };
                if let JobEvent::Generation { fall: Some(fall), .. } = &event {
                    for line in report::fall(fall) {
                        say(&line);
                    }
                }
                match event {
                    JobEvent::Placed { job, nodes } => {
                        outcome.job = Some(job);
                        let nodes = Arc::new(nodes);
                        sink.placed(job, Arc::clone(&nodes)).await;
                        for index in 0..nodes.len() {
                            let taking = take_output(
                                Arc::clone(link),
                                Arc::clone(&nodes),
                                index,
                                job,
                                request.without.clone(),
                                input,
                                sink.clone(),
                                course.clone(),
                            );
                            outputs.spawn_on(taking, link.runtime.handle());
                        }
                    }
                    JobEvent::Healthy { table, nodes } | JobEvent::Generation { table, nodes, .. } => {
                        progress::end();
                        if is_elastic {
                            outcome.workers = table.world_size();
                            // The first one may have failed before all its workers ran.
                            if table.generation.0 > 1 {
                                let how = if starts_anew { "is started anew" } else { "goes on" };
                                let told = format!(": {}", std::mem::take(&mut fallen));
                                let cause = table.cause.strip_suffix(&told).unwrap_or(&table.cause);
                                say(&format!("the group {how}: {cause}"));
                            }
                            missing.clear();
                            sink.members(table.members).await;
                        }
                        let shared = nodes.iter().any(|node| node.ranks.len() > 1);
                        if let Some(note) = request.if_shared.filter(|_| shared && !healthy) {
                            say(note);
                        }
                        (healthy, running) = (true, true);
                        shortage = None;
                        if !ending {
                            deadline = None;
                            let still = signals.is_still().then_some(WorkerSignal::Stop);
                            for signal in early.drain(..).chain(still) {
                                let frame = SubmitFrame::Signal(signal);
                                send.send(&frame, &[]).await.map_err(|error| head_lost(outcome.job, error))?;
                            }
                        }
                    }
                    JobEvent::Fell { why, failure, stopped, restart } => {
                        running = false;
                        say(&fell(&why, failure.as_deref(), stopped, restart));
                        fallen = why;
                    }
                    JobEvent::Waits { room, needed, for_ms } => {
                        let limit = human(for_ms);
                        let line = format!("room for {room} of {needed} workers; waiting for hosts, up to {limit}");
                        // At first they may be on their way.
                        let at = if healthy { clock.now() } else { clock.now() + ARRIVAL };
                        shortage = Some((at, line));
                    }
                    JobEvent::RankLost { failure, .. } => tracing::debug!(%failure, "a rank is gone"),
                    JobEvent::Ended { state, refusal, failure, stopped, followers } => {
                        outcome.state = Some(state);
                        outcome.stopped = stopped;
                        outcome.refusal = refusal;
                        outcome.failure = failure;
                        outcome.followers = followers;
                        break;
                    }
                }
            }
            heard = signals.next() => {
                let frames = match heard {
                    Heard::First(signal) => {
                        outcome.signal = Some(signal);
                        say(&format!(
                            "{}: ending the job; the workers have {}; another signal, or the same after a second, ends it at once",
                            name(signal),
                            Span(grace)
                        ));
                        ending = true;
                        deadline = Some(ended_by(clock, grace));
                        // An older head does not know the first.
                        let interrupt = (signal == SIGINT).then_some(SubmitFrame::Interrupt);
                        interrupt.into_iter().chain([SubmitFrame::Stop]).collect()
                    }
                    Heard::Second => match killing {
                        // Signals that come together are one wish.
                        Some(since) if clock.now() < since + ECHO => continue,
                        Some(_) => {
                            outcome.left = Some(left(outcome.job, |job| format!("a third signal came before the end of {job}")));
                            return Ok(outcome);
                        }
                        None => {
                            ending = true;
                            killing = Some(clock.now());
                            deadline = Some(clock.now() + KILL);
                            vec![SubmitFrame::Kill]
                        }
                    }
                    Heard::Workers(signal) if ending => {
                        not_passed_on(signal);
                        continue;
                    }
                    Heard::Workers(signal) if running => vec![SubmitFrame::Signal(signal)],
                    Heard::Workers(signal) => {
                        // Whether they are to stand still is seen when they run.
                        let user = matches!(signal, WorkerSignal::User1 | WorkerSignal::User2);
                        if user && !early.contains(&signal) {
                            early.push(signal);
                        }
                        continue;
                    }
                };
                for frame in frames {
                    send.send(&frame, &[]).await.map_err(|error| head_lost(outcome.job, error))?;
                }
            }
            error = &mut *trouble, if !heard_trouble => {
                heard_trouble = true;
                match error {
                    Ok(WriteError::Closed) => outcome.broken_pipe = true,
                    Ok(WriteError::Failed(text)) => outcome.lost_output.push(text),
                    // The thread has ended, which it does after this only.
                    Err(_) => continue,
                }
                if !std::mem::replace(&mut ending, true) {
                    deadline = Some(ended_by(clock, grace));
                }
                send.send(&SubmitFrame::Stop, &[]).await.map_err(|error| head_lost(outcome.job, error))?;
            }
            Some(taken) = outputs.join_next(), if !outputs.is_empty() => {
                let error = match taken {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => error,
                    Err(error) => error.to_string(),
                };
                if is_elastic {
                    // The job goes on without a node that is lost; its last output went with it.
                    let host = error.split(": ").next().unwrap_or_default();
                    if missing.insert(host.to_owned()) {
                        say(&format!("output may be missing: {error}"));
                    }
                    continue;
                }
                outcome.lost_output.push(error);
                // If its node is gone the head says so soon, and that is the better reason.
                lost_at.get_or_insert_with(|| clock.now() + LOSS);
            }
            list = next_list(&mut hosts), if !ending => {
                let frame = SubmitFrame::Hosts(discovery::of_job(&list));
                send.send(&frame, &[]).await.map_err(|error| head_lost(outcome.job, error))?;
            }
            () = until(clock, shortage.as_ref().map(|(at, _)| *at)) => {
                if let Some((_, line)) = shortage.take() {
                    say(&line);
                }
            }
            () = until(clock, over_at) => {
                over_at = None;
                if ending {
                    continue;
                }
                outcome.timed_out = request.limit;
                let limit = Span(request.limit.unwrap_or_default());
                say(&format!("the job has run for {limit}, which is its --timeout, and is ended"));
                surveying.spawn_on(survey(Arc::clone(link), outcome.job), link.runtime.handle());
            }
            Some(told) = surveying.join_next(), if !surveying.is_empty() => {
                for line in told.unwrap_or_default() {
                    say(&line);
                }
                if !std::mem::replace(&mut ending, true) {
                    deadline = Some(ended_by(clock, grace));
                }
                send.send(&SubmitFrame::Stop, &[]).await.map_err(|error| head_lost(outcome.job, error))?;
            }
            () = until(clock, lost_at) => {
                lost_at = None;
                if !std::mem::replace(&mut ending, true) {
                    deadline = Some(ended_by(clock, grace));
                }
                send.send(&SubmitFrame::Stop, &[]).await.map_err(|error| head_lost(outcome.job, error))?;
            }
            () = until(clock, deadline) => {
                if !ending && !healthy {
                    return Err(CliError::Local(format!("the head did not start the job within {}", Span(limit))));
                }
                outcome.left = Some(left(outcome.job, |job| format!("the head did not end {job} in time")));
                return Ok(outcome);
            }
        }
    }
    let ran = healthy || outcome.state == Some(JobState::Succeeded);
    ended.send_replace(if ran { Course::Ran } else { Course::NeverWhole });
    drop(sink);
    outcome.is_elastic = is_elastic;
    let mut first = outcome.signal;
    let rest = async {
        let mut lost = Vec::new();
        while let Some(taken) = outputs.join_next().await {
            match taken {
                Ok(Ok(())) => {}
                Ok(Err(error)) => lost.push(error),
                Err(error) => lost.push(error.to_string()),
            }
        }
        lost
    };
    if let Some(lost) = signals.unless_hurried(&mut first, rest).await {
        outcome.lost_output.extend(lost);
    }
    outcome.signal = first;
    // A node that is lost takes its last output with it; that is a part of the failure that is told.
    if outcome.failure.is_some() || is_elastic {
        outcome.lost_output.clear();
    }
    Ok(outcome)
}

/// Says why a group is stopped.
fn fell(
    why: &str,
    failure: Option<&RankFailure>,
    stopped: u32,
    restart: Option<(u32, u32)>,
) -> String {
    // Its call stack is told with the next group, or at the end.
    let failure = failure.map(ToString::to_string);
    let cause = failure.as_deref().and_then(|told| told.lines().next());
    let cause = cause.unwrap_or(why);
    let others = match stopped {
        0 => String::new(),
        1 => "; 1 worker is stopped".to_owned(),
        more => format!("; {more} workers are stopped"),
    };
    let restart = match restart {
        None => String::new(),
        Some((restart, most)) if restart > most => "; no restart is left".to_owned(),
        Some((restart, most)) => format!("; restart {restart} of {most}"),
    };
    format!("{cause}{others}{restart}")
}

/// Says of a job whose end is not known what has become of it.
fn left(job: Option<JobId>, what: impl FnOnce(&str) -> String) -> String {
    let (job, look) = match job {
        Some(job) => (job.to_string(), format!("kolo jobs {job}")),
        None => ("the job".to_owned(), "kolo jobs".to_owned()),
    };
    format!("{}; `{look}` shows what is left of it", what(&job))
}

/// When a job that is ended from now on must have ended.
fn ended_by(clock: &AwakeClock, grace: Duration) -> Instant {
    clock.now() + grace * 2 + HEAD_HAS_THE_WORD + KILL
}

/// The hosts, when they are others.
async fn next_list(hosts: &mut Option<watch::Receiver<Vec<HostSlots>>>) -> Vec<HostSlots> {
    if let Some(list) = hosts
        && list.changed().await.is_ok()
    {
        return list.borrow_and_update().clone();
    }
    // They never change, or whoever looks for them has ended.
    std::future::pending().await
}

async fn until(clock: &AwakeClock, deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => clock.sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// A line of this command's own. If nobody reads it there is nobody to tell, and nothing waits for that.
pub(crate) fn say(text: &str) {
    let line = format!("kolo: {text}\n");
    progress::above(|| write_if_read(rustix::stdio::stderr(), line.as_bytes()));
}

/// Says of a signal that no worker gets it.
pub(crate) fn not_passed_on(signal: WorkerSignal) {
    let name = match signal {
        WorkerSignal::User1 => "SIGUSR1",
        WorkerSignal::User2 => "SIGUSR2",
        // It is about this command: the workers get it when they run.
        WorkerSignal::Stop | WorkerSignal::Continue => return,
    };
    say(&format!(
        "{name}: not passed on: the job has not begun, or is ending"
    ));
}

/// Takes all output of the job's workers on one node, and brings rank 0 its input if it is there.
#[allow(clippy::too_many_arguments)] // each is a part of one sentence
async fn take_output(
    link: Arc<Link>,
    nodes: Arc<Vec<PlacedNode>>,
    index: usize,
    job: JobId,
    without: Vec<Rank>,
    input: bool,
    sink: Sink,
    mut course: watch::Receiver<Course>,
) -> Result<(), String> {
    let node = &nodes[index];
    let lost = |error: &dyn std::fmt::Display| format!("{}: {error}", node.hostname);
    let (_endpoint, connection) = link.node(node).await.map_err(|error| lost(&error))?;
    let stream = connection
        .open(OUTPUT)
        .await
        .map_err(|error| lost(&error))?;
    let Stream { mut send, mut recv } = stream;
    let request = NodeRequest::Output { job, without };
    send.send(&request, &[])
        .await
        .map_err(|error| lost(&error))?;
    match recv.expect_within::<NodeReply>(ANSWER).await {
        Ok(frame) => match frame.head {
            NodeReply::Output => {}
            // It was released before it had begun; the head says why.
            NodeReply::Refused(_) if *course.borrow() == Course::NeverWhole => return Ok(()),
            NodeReply::Refused(refusal) => return Err(lost(&refusal)),
            other => {
                return Err(lost(&format!(
                    "{other:?} is no answer to a request for output"
                )));
            }
        },
        Err(error) => return Err(lost(&error)),
    }
    let mut pump = None;
    if input && node.ranks.contains(&Rank(0)) {
        pump = Some(tokio::spawn(stdin::pump(send)));
    } else {
        send.finish();
    }
    let clock = link.runtime.clock();
    let mut over = *course.borrow() != Course::Open;
    let result = loop {
        let next = tokio::select! {
            // Output that is there counts before the time.
            biased;
            next = recv.next::<OutputChunk>() => next,
            _ = course.changed(), if !over => {
                over = true;
                continue;
            }
            () = async { clock.sleep_until(clock.now() + SILENCE).await }, if over => {
                break Err(lost(&format!("its end did not come within {SILENCE:?}")));
            }
        };
        match next {
            Ok(Some(frame)) => sink.piece(frame.head, frame.body).await,
            Ok(None) => break Ok(()),
            Err(error) => break Err(lost(&error)),
        }
    };
    if let Some(pump) = pump {
        pump.abort();
    }
    if result.is_ok() {
        recv.stop(CloseCode::Done);
    }
    result
}

#[cfg(test)]
mod tests;
