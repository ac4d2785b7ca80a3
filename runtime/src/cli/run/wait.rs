//! `--wait`: a job is submitted again until there is room for it. A little while it waits anyway, for jobs that are ending.

use std::sync::Arc;
use std::time::Duration;

use kolo_transport::wire::span::Span;
use kolo_transport::wire::{HeadReply, HeadRequest, RefusalKind};
use tokio::sync::oneshot;

use super::super::error::CliError;
use super::super::ids::shortened;
use super::super::link::Link;
use super::super::progress;
use super::super::show::is_ending;
use super::before_the_job;
use super::job::{self, Request};
use super::report::Outcome;
use super::say::say;
use super::signals::Signals;
use super::sink::{Sink, WriteError};

/// How soon the head is asked again: at first, and at the most, since each time it looks at all its nodes.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];

/// How long a job waits without `--wait` for the room of others that are ending.
const ENDING: Duration = Duration::from_secs(5);

/// How long the head may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Runs a job to its end. While there is no room for it, it waits at most so long.
///
/// # Errors
///
/// As [`job::run`].
pub(super) async fn run(
    link: &Arc<Link>,
    request: Request,
    sink: Sink,
    mut trouble: oneshot::Receiver<WriteError>,
    signals: &mut Signals,
    patience: Duration,
) -> Result<Outcome, CliError> {
    let clock = link.runtime.clock();
    let begun = clock.now();
    let until = begun + patience;
    let [mut pause, longest] = PAUSES;
    let mut is_told = false;
    loop {
        let outcome = job::run(link, request.clone(), sink.clone(), &mut trouble, signals).await?;
        let Some(why) = lacks_room(&outcome) else {
            return Ok(outcome);
        };
        let now = clock.now();
        let mut again = now + pause;
        if now < until {
            if !std::mem::replace(&mut is_told, true) {
                let why = why.lines().next().unwrap_or_default();
                let patience = Span(patience);
                let why = shortened(why);
                say(&format!("waiting at most {patience} for room: {why}"));
                progress::show("waiting for room".to_owned());
            }
            again = again.min(until);
        } else if now > begun + ENDING || !somebody_ends(link).await {
            return Ok(outcome);
        }
        pause = longest.min(pause * 2);
        if let Err(ended) = before_the_job(signals, clock.sleep_until(again)).await {
            return Ok(*ended);
        }
    }
}

/// Whether there are jobs that give their room back soon.
async fn somebody_ends(link: &Link) -> bool {
    let jobs = link.head.request(&HeadRequest::Jobs, ANSWER).await;
    matches!(jobs, Ok(HeadReply::Jobs(jobs)) if jobs.iter().any(is_ending))
}

/// What a job lacked that did not begin, if others may give it back.
fn lacks_room(outcome: &Outcome) -> Option<&str> {
    let refusal = outcome.refusal.as_ref()?;
    let has_no_room = matches!(refusal.kind, RefusalKind::Unplaceable | RefusalKind::Busy);
    let is_meant = has_no_room && outcome.job.is_none() && outcome.signal.is_none();
    is_meant.then_some(refusal.message.as_str())
}
