//! A job from its submission to its end.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_transport::AwakeClock;
use kolo_transport::frame::{FrameError, Limits};
use kolo_transport::ids::{Generation, JobId, Rank};
use kolo_transport::session::{FrameSender, Stream};
use kolo_transport::wire::counted::Counted;
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{
    GenerationTable, HeadReply, HeadRequest, JobEvent, JobSpec, JobState, OnChange, PlacedNode,
    Refusal, SubmitFrame, WorkerSignal,
};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use super::super::error::CliError;
use super::super::link::Link;
use super::super::output::human;
use super::super::progress;
use super::discovery;
use super::output::{self, Course, Source};
use super::report::{self, Outcome};
use super::say::{failed, not_passed_on, say};
use super::signals::{Heard, SIGINT, Signals};
use super::sink::{Sink, WriteError};
use super::survey::survey;
use crate::hosts::HostSlots;
use crate::signals::{ECHO, name};

/// How long the head may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// How long the head may take longer than the job's own deadlines: it knows better what went wrong.
const HEAD_HAS_THE_WORD: Duration = Duration::from_secs(5);

/// How long after the loss of output the head has to tell of the loss of a node.
const LOSS: Duration = Duration::from_secs(5);

/// How long hosts may take to come before a job that has not begun says that it waits for them.
const ARRIVAL: Duration = Duration::from_secs(5);

/// How long the head may take to kill a job.
const KILL: Duration = Duration::from_secs(10);

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
    let sent = send
        .send(&HeadRequest::Submit(request.spec.clone()), &[])
        .await;
    // A head that refuses may say why before it has read everything.
    if let Err(error) = sent {
        tracing::debug!(%error, "the job was not submitted whole");
    }
    // By the clock of the link: what came while this process stood still is read before a time is over.
    let clock = link.runtime.clock();
    let limit = request.start_timeout + request.grace + HEAD_HAS_THE_WORD;
    let (ended, course) = watch::channel(Course::Open);
    let mut hosts = request.hosts.clone();
    let mut over_at = request.limit.map(|limit| clock.now() + limit);
    let mut surveying: JoinSet<Vec<String>> = JoinSet::new();
    let mut heard_trouble = false;
    let mut job = Job::new(link, send, sink, course, request);
    if !job.is_elastic() {
        // A job that goes on has times of its own, which the head keeps.
        job.deadline = Some(clock.now() + limit);
    }
    loop {
        tokio::select! {
            // What has come counts before a time that is over.
            biased;
            event = recv.next::<JobEvent>() => {
                let event = match event {
                    Ok(Some(frame)) => frame.head,
                    Ok(None) => return Err(job.head_lost(FrameError::Truncated { got: 0 })),
                    Err(error) => return Err(job.head_lost(error)),
                };
                let still = signals.is_still().then_some(WorkerSignal::Stop);
                if job.event(event, still).await?.is_break() {
                    break;
                }
            }
            heard = signals.next() => if let Some(left) = job.heard(heard).await? {
                job.outcome.left = Some(left);
                return Ok(job.outcome);
            },
            error = &mut *trouble, if !heard_trouble => {
                heard_trouble = true;
                match error {
                    Ok(WriteError::Closed) => job.outcome.broken_pipe = true,
                    Ok(WriteError::Failed(text)) => job.outcome.lost_output.push(text),
                    // The thread has ended, which it does after this only.
                    Err(_) => continue,
                }
                job.end().await?;
            }
            Some(taken) = job.outputs.join_next(), if !job.outputs.is_empty() => {
                if let Some(error) = output::error(taken) {
                    job.output_lost(error);
                }
            }
            list = next_list(&mut hosts), if !job.ending => {
                job.tell(&SubmitFrame::Hosts(discovery::of_job(&list))).await?;
            }
            () = until(clock, job.group.shortage.as_ref().map(|(at, _)| *at)) => {
                if let Some((_, line)) = job.group.shortage.take() {
                    say(&line);
                }
            }
            () = until(clock, over_at) => {
                over_at = None;
                if job.ending {
                    continue;
                }
                job.outcome.timed_out = job.request.limit;
                let told = job.request.limit.map(report::overran);
                say(&format!("{}, and is ended", told.unwrap_or_default()));
                surveying.spawn_on(survey(Arc::clone(link), job.outcome.job), link.runtime.handle());
            }
            Some(told) = surveying.join_next(), if !surveying.is_empty() => {
                for line in told.unwrap_or_default() {
                    say(&line);
                }
                job.end().await?;
            }
            () = until(clock, job.lost_at) => {
                job.lost_at = None;
                job.end().await?;
            }
            () = until(clock, job.deadline) => {
                if !job.ending && !job.group.healthy {
                    return Err(CliError::Local(format!("the head did not start the job within {}", Span(limit))));
                }
                job.outcome.left = Some(job.left(|job| format!("the head did not end {job} in time")));
                return Ok(job.outcome);
            }
        }
    }
    let ran = job.group.healthy || job.outcome.state == Some(JobState::Succeeded);
    ended.send_replace(if ran { Course::Ran } else { Course::NeverWhole });
    Ok(job.over(signals).await)
}

/// A job under way.
struct Job<'a> {
    link: &'a Arc<Link>,
    send: FrameSender,
    sink: Sink,
    course: watch::Receiver<Course>,
    request: Request,
    outcome: Outcome,
    outputs: JoinSet<Result<(), String>>,
    group: Group,
    /// For workers of whom it is not known yet that all run.
    early: Vec<WorkerSignal>,
    /// It was told to end.
    ending: bool,
    /// And at once, since then.
    killing: Option<Instant>,
    /// Until when the head must have said something, and what it means if it has not.
    deadline: Option<Instant>,
    /// When output is missed that came with no lost node.
    lost_at: Option<Instant>,
}

/// What is known of its workers.
#[derive(Default)]
struct Group {
    /// Its number.
    present: Generation,
    /// There was one.
    healthy: bool,
    /// All workers run; not between two groups.
    running: bool,
    /// Why the last one has fallen, once that was said.
    fallen: String,
    /// When a loss was heard for the first time since it was whole.
    broken_at: Option<Instant>,
    /// Hosts of which output may be missing, since the last one.
    missing: BTreeSet<String>,
    /// What to say of one that waits for room, and when.
    shortage: Option<(Instant, String)>,
}

impl<'a> Job<'a> {
    fn new(
        link: &'a Arc<Link>,
        send: FrameSender,
        sink: Sink,
        course: watch::Receiver<Course>,
        request: Request,
    ) -> Self {
        let outcome = Outcome {
            workers: request.workers,
            is_elastic: request.spec.elastic.is_some(),
            ..Outcome::default()
        };
        Self {
            link,
            send,
            sink,
            course,
            request,
            outcome,
            outputs: JoinSet::new(),
            group: Group::default(),
            early: Vec::new(),
            ending: false,
            killing: None,
            deadline: None,
            lost_at: None,
        }
    }

    fn is_elastic(&self) -> bool {
        self.outcome.is_elastic
    }

    fn starts_anew(&self) -> bool {
        let elastic = self.request.spec.elastic.as_deref();
        elastic.is_some_and(|elastic| elastic.on_change == OnChange::Restart)
    }

    fn now(&self) -> Instant {
        self.link.runtime.clock().now()
    }

    /// The stream broke on which the head tells of the job.
    fn head_lost(&self, error: FrameError) -> CliError {
        match self.outcome.job {
            Some(job) => CliError::JobLost {
                job,
                error: error.into(),
            },
            None => CliError::stream("the head", error),
        }
    }

    async fn tell(&mut self, frame: &SubmitFrame) -> Result<(), CliError> {
        let sent = self.send.send(frame, &[]).await;
        sent.map_err(|error| self.head_lost(error))
    }

    /// Ends the job for a reason that is known.
    async fn end(&mut self) -> Result<(), CliError> {
        if !std::mem::replace(&mut self.ending, true) {
            self.deadline = Some(self.ended_by());
        }
        if let Some(limit) = self.outcome.timed_out {
            let limit_ms = limit.as_millis() as u64;
            self.tell(&SubmitFrame::Overran { limit_ms }).await?;
        }
        self.tell(&SubmitFrame::Stop).await
    }

    /// When the job must have ended if it is ended from now on.
    fn ended_by(&self) -> Instant {
        self.now() + self.request.grace * 2 + HEAD_HAS_THE_WORD + KILL
    }

    async fn event(
        &mut self,
        event: JobEvent,
        still: Option<WorkerSignal>,
    ) -> Result<ControlFlow<()>, CliError> {
        match event {
            JobEvent::Placed { job, nodes } => self.placed(job, Arc::new(nodes)).await,
            JobEvent::Healthy { table, .. } => self.runs(table, still).await?,
            JobEvent::Generation { table, fall, .. } => {
                for line in fall.iter().flat_map(|fall| report::fall(fall)) {
                    failed(&line);
                }
                self.runs(table, still).await?;
            }
            JobEvent::Fell {
                why,
                failure,
                stopped,
                restart,
            } => {
                self.group.running = false;
                // With no restart left it is told with the end of the job.
                if restart.is_none_or(|(restart, most)| restart <= most) {
                    let told = report::fell(&why, failure.as_deref(), stopped, restart);
                    match &failure {
                        Some(_) => failed(&told),
                        None => say(&told),
                    }
                    self.group.fallen = why;
                }
                if failure.is_some() {
                    self.breaks();
                }
            }
            JobEvent::Waits {
                room,
                needed,
                for_ms,
            } => {
                let limit = human(for_ms);
                let line = format!(
                    "room for {room} of {}; waiting for hosts, up to {limit}",
                    Counted(needed, "worker")
                );
                // At first they may be on their way.
                let healthy = self.group.healthy;
                if !healthy {
                    progress::show(line.clone());
                }
                let patience = if healthy { Duration::ZERO } else { ARRIVAL };
                self.group.shortage = Some((self.now() + patience, line));
            }
            // A member's loss is the cause of the next group.
            JobEvent::RankLost {
                generation,
                failure,
            } => {
                if generation <= self.group.present {
                    self.breaks();
                } else if self.is_elastic() && !self.starts_anew() {
                    let failure = report::in_a_line(&failure);
                    failed(&format!("a new worker has failed: {failure}"));
                }
            }
            // No call of this command is under way.
            JobEvent::Hold { .. } => {}
            JobEvent::Ended {
                state,
                refusal,
                failure,
                stopped,
                followers,
            } => {
                let outcome = &mut self.outcome;
                outcome.state = Some(state);
                outcome.stopped = stopped;
                outcome.refusal = refusal;
                outcome.failure = failure;
                outcome.followers = followers;
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// A member is lost.
    fn breaks(&mut self) {
        let now = self.now();
        self.group.broken_at.get_or_insert(now);
    }

    /// Takes the output of nodes.
    async fn placed(&mut self, job: JobId, nodes: Arc<Vec<PlacedNode>>) {
        self.outcome.job = Some(job);
        if !self.group.healthy {
            progress::show(format!(
                "starting {}",
                Counted(self.request.workers, "worker")
            ));
        }
        // Before any output of theirs.
        let shared = nodes.iter().any(|node| node.ranks.len() > 1);
        if let Some(note) = self.request.if_shared.take_if(|_| shared) {
            say(note);
        }
        self.sink.placed(job, Arc::clone(&nodes)).await;
        let installed = self.request.spec.installed.as_ref();
        for index in 0..nodes.len() {
            let source = Source {
                link: Arc::clone(self.link),
                nodes: Arc::clone(&nodes),
                index,
                job,
                without: self.request.without.clone(),
                input: installed.is_some_and(|installed| installed.stdin),
            };
            let taking = source.take(self.sink.clone(), self.course.clone());
            self.outputs.spawn_on(taking, self.link.runtime.handle());
        }
    }

    /// All workers run, of the first group or the next one.
    async fn runs(
        &mut self,
        table: GenerationTable,
        still: Option<WorkerSignal>,
    ) -> Result<(), CliError> {
        progress::end();
        let (starts_anew, now) = (self.starts_anew(), self.now());
        let group = &mut self.group;
        let broken_at = group.broken_at.take();
        if self.outcome.is_elastic {
            self.outcome.workers = table.world_size();
            let elastic = self.request.spec.elastic.as_deref();
            let most = elastic.map_or(0, |limits| limits.max);
            let small = report::begins_small(table.world_size(), most);
            if let Some(told) = small.filter(|_| !group.healthy) {
                say(&told);
            }
            // The first one may have failed before all its workers ran.
            if table.generation.0 > 1 {
                let told = format!(": {}", std::mem::take(&mut group.fallen));
                let cause = table.cause.strip_suffix(&told).unwrap_or(&table.cause);
                let healed = broken_at.map(|at| now.saturating_duration_since(at));
                say(&report::next_group(starts_anew, cause, healed));
            }
            group.missing.clear();
            group.present = table.generation;
            let shared = table.members.iter().any(|member| member.local_size > 1);
            if let Some(note) = self.request.if_shared.take_if(|_| shared) {
                say(note);
            }
            self.sink.members(table.members).await;
        }
        (group.healthy, group.running) = (true, true);
        group.shortage = None;
        if !self.ending {
            self.deadline = None;
            for signal in std::mem::take(&mut self.early).into_iter().chain(still) {
                self.tell(&SubmitFrame::Signal(signal)).await?;
            }
        }
        Ok(())
    }

    /// Does what a signal asks for. If that is not to wait any more, gives what is said of the job then.
    async fn heard(&mut self, heard: Heard) -> Result<Option<String>, CliError> {
        match heard {
            Heard::First(signal) => {
                self.outcome.signal = Some(signal);
                say(&format!(
                    "{}: ending the job; the workers have {}; another signal, or the same after a second, ends it at once",
                    name(signal),
                    Span(self.request.grace)
                ));
                self.ending = true;
                self.deadline = Some(self.ended_by());
                if signal == SIGINT {
                    // An older head does not know it.
                    self.tell(&SubmitFrame::Interrupt).await?;
                }
                self.tell(&SubmitFrame::Stop).await?;
            }
            Heard::Second => match self.killing {
                // Signals that come together are one wish.
                Some(since) if self.now() < since + ECHO => {}
                Some(_) => {
                    let left =
                        self.left(|job| format!("a third signal came before the end of {job}"));
                    return Ok(Some(left));
                }
                None => {
                    self.ending = true;
                    self.killing = Some(self.now());
                    self.deadline = Some(self.now() + KILL);
                    self.tell(&SubmitFrame::Kill).await?;
                }
            },
            Heard::Workers(signal) if self.ending => not_passed_on(signal),
            Heard::Workers(signal) if self.group.running => {
                self.tell(&SubmitFrame::Signal(signal)).await?;
            }
            Heard::Workers(signal) => {
                // Whether they are to stand still is seen when they run.
                let user = matches!(signal, WorkerSignal::User1 | WorkerSignal::User2);
                if user && !self.early.contains(&signal) {
                    self.early.push(signal);
                }
            }
        }
        Ok(None)
    }

    /// The output of a node has ended early.
    fn output_lost(&mut self, error: String) {
        if self.is_elastic() {
            // The job goes on without a node that is lost; its last output went with it.
            let host = error.split(": ").next().unwrap_or_default();
            if self.group.missing.insert(host.to_owned()) {
                say(&format!("output may be missing: {error}"));
            }
            return;
        }
        self.outcome.lost_output.push(error);
        // If its node is gone the head says so soon, and that is the better reason.
        let at = self.now() + LOSS;
        self.lost_at.get_or_insert(at);
    }

    /// Says of a job whose end is not known what has become of it.
    fn left(&self, what: impl FnOnce(&str) -> String) -> String {
        let (job, look) = match self.outcome.job {
            Some(job) => (job.to_string(), format!("kolo jobs {job}")),
            None => ("the job".to_owned(), "kolo jobs".to_owned()),
        };
        format!("{}; `{look}` shows what is left of it", what(&job))
    }

    /// The job has ended: takes the rest of its output.
    async fn over(self, signals: &mut Signals) -> Outcome {
        let Self {
            mut outcome,
            mut outputs,
            ..
        } = self;
        let mut first = outcome.signal;
        let rest = async {
            let mut lost = Vec::new();
            while let Some(taken) = outputs.join_next().await {
                lost.extend(output::error(taken));
            }
            lost
        };
        if let Some(lost) = signals.unless_hurried(&mut first, rest).await {
            outcome.lost_output.extend(lost);
        }
        outcome.signal = first;
        // A node that is lost takes its last output with it; that is a part of the failure that is told.
        if outcome.failure.is_some() || outcome.is_elastic {
            outcome.lost_output.clear();
        }
        outcome
    }
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
