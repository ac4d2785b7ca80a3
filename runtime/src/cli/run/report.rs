//! How a run ended: the exit code, and the words for it.

use std::time::Duration;

use kolo_transport::ids::JobId;
use kolo_transport::wire::counted::Counted;
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{
    Exit, Fall, Follower, Followers, JobState, RankFailure, Refusal, RefusalKind, WorkerError,
};
use serde::Serialize;

use super::super::error::CliError;
use super::super::ids::shortened;
use super::super::output::human;

/// The job has run as long as it may; the same as timeout(1).
const TIMED_OUT: u8 = 124;

/// The program can't be executed.
const NOT_EXECUTABLE: u8 = 126;

/// The program is not there.
const NOT_FOUND: u8 = 127;

/// What is known when a job has ended.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    pub(crate) job: Option<JobId>,
    pub(crate) state: Option<JobState>,
    pub(crate) refusal: Option<Refusal>,
    pub(crate) failure: Option<RankFailure>,
    /// What has failed after that.
    pub(crate) followers: Followers,
    /// The signal that this command was sent first.
    pub(crate) signal: Option<i32>,
    /// The job has run as long as it may, and was ended.
    pub(crate) timed_out: Option<Duration>,
    /// The last line of the workers' standard error has no end.
    pub(crate) mid_line: bool,
    /// Nobody reads the output any more.
    pub(crate) broken_pipe: bool,
    /// Output that was not delivered, and why.
    pub(crate) lost_output: Vec<String>,
    pub(crate) workers: u32,
    /// The group was started anew at changes, so that the end has a reason beside the last failure.
    pub(crate) is_elastic: bool,
    /// How many workers were ended with the job; `None` if the head does not say.
    pub(crate) stopped: Option<u32>,
    /// The job was told to end, and nobody knows whether it has.
    pub(crate) left: Option<String>,
}

#[derive(Serialize)]
struct Json<'a> {
    job: Option<String>,
    state: Option<JobState>,
    exit_code: u8,
    reason: Option<&'a str>,
    failure: Option<JsonFailure<'a>>,
    followers: Vec<JsonFollower<'a>>,
    more_followers: u32,
}

#[derive(Serialize)]
struct JsonFailure<'a> {
    rank: u32,
    host: &'a str,
    pid: u32,
    exit_code: Option<i32>,
    signal: Option<i32>,
    reason: Option<&'a str>,
    error: Option<&'a WorkerError>,
    stderr: &'a [String],
}

#[derive(Serialize)]
struct JsonFollower<'a> {
    after_ms: u64,
    #[serde(flatten)]
    failure: JsonFailure<'a>,
}

impl<'a> JsonFailure<'a> {
    fn new(failure: &'a RankFailure) -> Self {
        let (exit_code, signal) = match failure.exit {
            Exit::Code(code) => (Some(code), None),
            Exit::Signal(signal) => (None, Some(signal)),
            Exit::Unknown => (None, None),
        };
        Self {
            rank: failure.rank.0,
            host: &failure.hostname,
            pid: failure.pid,
            exit_code,
            signal,
            reason: failure.reason.as_deref(),
            error: failure.error(),
            stderr: &failure.stderr_tail,
        }
    }
}

/// A line for each failure that came after the first cause.
fn told_after(followers: &Followers) -> Vec<String> {
    let line = |follower: &Follower| {
        let when = match follower.after_ms {
            0 => "at the same time".to_owned(),
            ms => format!("{} later", Span(Duration::from_millis(ms))),
        };
        format!("{when}: {}", follower.failure)
    };
    let mut lines: Vec<String> = followers.first.iter().map(line).collect();
    if followers.more > 0 {
        lines.push(format!("and {} more workers failed", followers.more));
    }
    lines
}

/// The lines for a fall of a group that goes on. A failure that comes alone is told in the reason of the change already.
pub(super) fn fall(fall: &Fall) -> Vec<String> {
    let mut lines = told_after(&fall.followers);
    if !lines.is_empty() {
        lines.insert(0, fall.cause.headline(true));
    }
    lines
}

/// Says of a group that begins with fewer workers than are wanted that more may come.
pub(super) fn begins_small(workers: u32, most: u32) -> Option<String> {
    let there = Counted(workers, "worker");
    let told = || {
        format!("the group begins with {there} of at most {most}: there is room for no more yet")
    };
    (workers < most).then(told)
}

/// Says that there is another group, and how long the last loss took.
pub(super) fn next_group(starts_anew: bool, cause: &str, healed: Option<Duration>) -> String {
    let how = if starts_anew {
        "is started anew"
    } else {
        "goes on"
    };
    let healed = healed.map_or_else(String::new, |time| {
        format!("; healed in {}", human(time.as_millis() as u64))
    });
    format!("the group {how}: {cause}{healed}")
}

/// Says why a group is stopped.
pub(super) fn fell(
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
        Some((restart, most)) => format!("; restart {restart} of {most}"),
    };
    format!("{cause}{others}{restart}")
}

/// A failure in one line, with its error or its last word.
pub(super) fn in_a_line(failure: &RankFailure) -> String {
    let told = failure.to_string();
    let line = told.lines().next().unwrap_or_default();
    match failure.stderr_tail.last() {
        Some(last) if failure.error().is_none() => format!("{line}: {last}"),
        _ => line.to_owned(),
    }
}

/// Says that a job has run as long as it may.
pub(super) fn overran(limit: Duration) -> String {
    format!(
        "the job has run for {}, which is its --timeout",
        Span(limit)
    )
}

fn code_of(exit: Exit) -> u8 {
    match exit {
        // What is 0 here was a success, and yet not what was wanted.
        Exit::Code(code) => u8::try_from(code & 0xff).unwrap_or(1).max(1),
        Exit::Signal(signal) => of_signal(signal),
        Exit::Unknown => 1,
    }
}

/// What is said of the workers that did not fail. Those that had ended by themselves are no news.
fn ended(others: u32, stopped: Option<u32>) -> Option<String> {
    Some(match (others, stopped?) {
        (_, 0) => return None,
        (1, _) => "kolo: the other worker was ended".to_owned(),
        (others, stopped) if stopped >= others => {
            format!("kolo: the other {others} workers were ended")
        }
        (others, 1) => format!("kolo: 1 of the other {others} workers was ended"),
        (others, stopped) => format!("kolo: {stopped} of the other {others} workers were ended"),
    })
}

pub(super) fn of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(1)
}

impl Outcome {
    /// What the command ends with.
    pub(crate) fn exit_code(&self) -> u8 {
        if let Some(signal) = self.signal {
            return of_signal(signal);
        }
        if self.broken_pipe {
            return of_signal(13);
        }
        if self.has_overrun() {
            return TIMED_OUT;
        }
        if let Some(failure) = &self.failure {
            return code_of(failure.exit);
        }
        match &self.refusal {
            Some(refusal) => match refusal.kind {
                RefusalKind::NoProgram => NOT_FOUND,
                RefusalKind::NotExecutable => NOT_EXECUTABLE,
                _ => CliError::Refused(refusal.clone()).exit_code(),
            },
            None if !self.lost_output.is_empty() => 1,
            None if self.state == Some(JobState::Succeeded) => 0,
            None => 1,
        }
    }

    fn has_overrun(&self) -> bool {
        self.timed_out.is_some() && self.state != Some(JobState::Succeeded)
    }

    /// Lines for people; empty if all is well.
    pub(crate) fn text(&self) -> String {
        let mut lines = Vec::new();
        // This command has said why it has ended the job.
        let is_ended_here = self.signal.is_some() || self.timed_out.is_some();
        let reason = self.refusal.as_ref().filter(|_| self.is_elastic);
        if let Some(reason) = reason.filter(|_| !is_ended_here) {
            // The last failure is a part of it.
            // Words of workers stay as they are.
            let reason = match self.failure {
                Some(_) => reason.to_string(),
                None => shortened(&reason.to_string()),
            };
            lines.push(format!("kolo: {reason}"));
            lines.extend(self.told_after());
        } else if let Some(failure) = &self.failure {
            if self.followers.is_empty() {
                lines.push(format!("kolo: {failure}"));
            } else {
                lines.push(format!("kolo: {}", failure.headline(true)));
                lines.extend(failure.last_words());
                lines.extend(self.told_after());
            }
            if !is_ended_here {
                lines.extend(ended(self.workers.saturating_sub(1), self.stopped));
            }
        } else if let Some(refusal) = &self.refusal
            && !is_ended_here
            // That this command itself has ended it since then is no news.
            && (self.lost_output.is_empty() || refusal.kind != RefusalKind::Stopped)
        {
            lines.push(format!("kolo: {}", shortened(&refusal.to_string())));
        }
        for lost in &self.lost_output {
            lines.push(format!("kolo: output is missing: {lost}"));
        }
        if self.broken_pipe {
            lines.clear();
        }
        if let Some(left) = &self.left {
            lines.push(format!("kolo: {left}"));
        }
        if !lines.is_empty() {
            // The last one ends, too.
            lines.push(String::new());
        }
        lines.join("\n")
    }

    fn told_after(&self) -> impl Iterator<Item = String> {
        let lines = told_after(&self.followers).into_iter();
        lines.map(|line| format!("kolo: {line}"))
    }

    /// Of a job that never was; why. Gives the line for programs.
    pub(crate) fn refused(error: &CliError) -> String {
        let json = Json {
            job: None,
            state: None,
            exit_code: error.exit_code(),
            reason: Some(&error.to_string()),
            failure: None,
            followers: Vec::new(),
            more_followers: 0,
        };
        serde_json::to_string(&json).unwrap_or_default() + "\n"
    }

    /// One line for programs.
    pub(crate) fn json(&self) -> String {
        let overran = self.timed_out.filter(|_| self.has_overrun()).map(overran);
        let json = Json {
            job: self.job.map(|job| job.to_string()),
            state: self.state,
            exit_code: self.exit_code(),
            reason: overran
                .as_deref()
                .or(self.refusal.as_ref().map(|refusal| &*refusal.message))
                .or(self.left.as_deref()),
            failure: self.failure.as_ref().map(JsonFailure::new),
            followers: self
                .followers
                .first
                .iter()
                .map(|follower| JsonFollower {
                    after_ms: follower.after_ms,
                    failure: JsonFailure::new(&follower.failure),
                })
                .collect(),
            more_followers: self.followers.more,
        };
        // Texts and numbers can always be written.
        serde_json::to_string(&json).unwrap_or_default() + "\n"
    }
}

#[cfg(test)]
mod tests {
    use kolo_transport::ids::{NodeId, Rank};
    use kolo_transport::wire::Account;

    use super::*;

    fn failed(exit: Exit) -> Outcome {
        Outcome {
            state: Some(JobState::Failed),
            refusal: Some(Refusal::new(RefusalKind::Worker, "no")),
            failure: Some(RankFailure {
                rank: Rank(2),
                node: NodeId(1),
                hostname: "b".to_owned(),
                pid: 4711,
                exit,
                reason: None,
                stderr_tail: vec!["boom".to_owned()],
                account: None,
            }),
            workers: 4,
            stopped: Some(3),
            ..Outcome::default()
        }
    }

    #[test]
    fn only_workers_that_were_ended_are_said_to_be() {
        for (others, stopped, text) in [
            (0, Some(0), None),
            (1, Some(0), None),
            (3, None, None),
            (1, Some(1), Some("kolo: the other worker was ended")),
            (3, Some(3), Some("kolo: the other 3 workers were ended")),
            (3, Some(1), Some("kolo: 1 of the other 3 workers was ended")),
            (
                3,
                Some(2),
                Some("kolo: 2 of the other 3 workers were ended"),
            ),
        ] {
            assert_eq!(ended(others, stopped).as_deref(), text);
        }
    }

    #[test]
    fn the_exit_code_is_that_of_the_first_failure() {
        for (exit, code) in [
            (Exit::Code(3), 3),
            (Exit::Code(255), 255),
            (Exit::Code(0), 1),
            (Exit::Signal(9), 137),
            (Exit::Signal(15), 143),
            (Exit::Unknown, 1),
        ] {
            assert_eq!(failed(exit).exit_code(), code);
        }
        let well = Outcome {
            state: Some(JobState::Succeeded),
            ..Outcome::default()
        };
        assert_eq!((well.exit_code(), well.text().as_str()), (0, ""));
        let interrupted = Outcome {
            signal: Some(2),
            ..failed(Exit::Code(3))
        };
        assert_eq!(interrupted.exit_code(), 130);
        let timed_out = Outcome {
            timed_out: Some(Duration::from_secs(5)),
            refusal: Some(Refusal::new(
                RefusalKind::Stopped,
                "its driver has ended it",
            )),
            ..Outcome::default()
        };
        assert_eq!(
            (timed_out.exit_code(), timed_out.text().as_str()),
            (124, "")
        );
        for (kind, code) in [
            (RefusalKind::NoProgram, 127),
            (RefusalKind::NotExecutable, 126),
            // What the head does not like about the job is nothing that is wrong with the program.
            (RefusalKind::Invalid, 2),
            (RefusalKind::Forbidden, 5),
            (RefusalKind::Unplaceable, 2),
        ] {
            let refused = Outcome {
                refusal: Some(Refusal::new(kind, "why")),
                ..Outcome::default()
            };
            assert_eq!(
                (refused.exit_code(), refused.text().as_str()),
                (code, "kolo: why\n")
            );
        }
        let lossy = Outcome {
            lost_output: vec!["b: gone".to_owned()],
            ..well
        };
        assert_eq!(
            (lossy.exit_code(), lossy.text().as_str()),
            (1, "kolo: output is missing: b: gone\n")
        );
        let ended_for_it = Outcome {
            refusal: Some(Refusal::new(
                RefusalKind::Stopped,
                "its driver has ended it",
            )),
            ..lossy
        };
        assert_eq!(ended_for_it.text(), "kolo: output is missing: b: gone\n");
        let unfinished = Outcome {
            signal: Some(15),
            left: Some("it is still there".to_owned()),
            ..Outcome::default()
        };
        assert_eq!(
            (unfinished.exit_code(), unfinished.text().as_str()),
            (143, "kolo: it is still there\n")
        );
    }

    #[test]
    fn the_report_names_rank_host_pid_end_and_last_words() {
        assert_eq!(
            failed(Exit::Signal(9)).text(),
            "kolo: rank 2 on b (pid 4711) ended with signal 9 (SIGKILL)\n  [2]<stderr>:boom\n\
             kolo: the other 3 workers were ended\n"
        );
        assert_eq!(
            in_a_line(failed(Exit::Code(3)).failure.as_ref().unwrap()),
            "rank 2 on b (pid 4711) ended with exit code 3: boom"
        );
        let json: serde_json::Value =
            serde_json::from_str(&failed(Exit::Signal(9)).json()).unwrap();
        assert_eq!(json["exit_code"], 137);
        assert_eq!(json["failure"]["signal"], 9);
        assert_eq!(json["failure"]["exit_code"], serde_json::Value::Null);
        assert_eq!(json["failure"]["stderr"][0], "boom");
        assert_eq!(json["state"], "failed");
    }

    #[test]
    fn those_that_followed_come_after_the_first_cause() {
        let mut outcome = failed(Exit::Code(1));
        let error = WorkerError {
            message: "ValueError: bad batch".to_owned(),
            place: Some("train.py:12".to_owned()),
            callstack: vec!["    raise ValueError(batch)".to_owned()],
            at_s: Some(7),
        };
        let follower = RankFailure {
            rank: Rank(0),
            hostname: "a".to_owned(),
            stderr_tail: Vec::new(),
            ..outcome.failure.clone().unwrap()
        };
        outcome.failure.as_mut().unwrap().account = Some(Box::new(Account {
            at_ms: 7500,
            age_ms: 0,
            error: Some(error),
        }));
        outcome.followers = Followers {
            first: vec![Follower {
                after_ms: 412,
                failure: follower,
            }],
            more: 2,
        };
        outcome.stopped = Some(0);
        assert_eq!(
            outcome.text(),
            "kolo: rank 2 on b (pid 4711) failed first, with exit code 1: ValueError: bad batch (train.py:12)\n  \
             [2]<callstack>:    raise ValueError(batch)\n\
             kolo: 412ms later: rank 0 on a (pid 4711) ended with exit code 1\n\
             kolo: and 2 more workers failed\n"
        );
        let json: serde_json::Value = serde_json::from_str(&outcome.json()).unwrap();
        assert_eq!(json["failure"]["error"]["place"], "train.py:12");
        assert_eq!(json["followers"][0]["rank"], 0);
        assert_eq!(json["followers"][0]["after_ms"], 412);
        assert_eq!(json["more_followers"], 2);

        // What came at the same time, after a rank whose end nobody has seen.
        outcome.followers.first[0].after_ms = 0;
        outcome.failure.as_mut().unwrap().exit = Exit::Unknown;
        let told = outcome.text();
        for part in [
            "(pid 4711) was lost first: ValueError",
            "kolo: at the same time: rank 0 on a ",
        ] {
            assert!(told.contains(part), "{told}");
        }

        let told = Fall {
            cause: outcome.failure.clone().unwrap(),
            followers: outcome.followers.clone(),
        };
        assert_eq!(fall(&told).len(), 3);
        let alone = Fall {
            followers: Followers::default(),
            ..told
        };
        assert_eq!(fall(&alone), [""; 0], "the reason of the change has it");
    }

    #[test]
    fn a_group_that_begins_with_fewer_than_it_may_have_says_so() {
        assert_eq!(begins_small(4, 4), None);
        let told = begins_small(1, 4).unwrap();
        assert!(
            told.starts_with("the group begins with 1 worker of at most 4: "),
            "{told}"
        );
    }

    #[test]
    fn a_group_that_falls_says_why_and_what_that_costs() {
        let failure = failed(Exit::Code(3)).failure.unwrap();
        let why = "rank 2 on b: exit code 3";
        for (stopped, restart, rest) in [
            (3, Some((1, 3)), "; 3 workers are stopped; restart 1 of 3"),
            (1, Some((2, 3)), "; 1 worker is stopped; restart 2 of 3"),
            (0, Some((1, 1)), "; restart 1 of 1"),
        ] {
            assert_eq!(
                fell(why, Some(&failure), stopped, restart),
                format!("rank 2 on b (pid 4711) ended with exit code 3{rest}")
            );
        }
        assert_eq!(
            fell("there is room for more", None, 2, None),
            "there is room for more; 2 workers are stopped"
        );
    }
}
