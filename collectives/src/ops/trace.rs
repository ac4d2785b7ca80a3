//! What all ranks did, on one clock.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use kolo_transport::ids::Rank;

use crate::communicator::Communicator;
use crate::error::CollectiveError;
use crate::group_id::GroupId;
use crate::options::Options;
use crate::record::{Outcome, Record};
use crate::shape::Mark;

/// Rounds in which the ranks tell each other their clocks.
const ROUNDS: usize = 8;

/// A round, on the clocks of two ranks: when each began and had ended it. Nobody ends it before all have begun.
#[derive(Debug, Clone, Copy)]
struct Round {
    mine: (i64, i64),
    theirs: (i64, i64),
}

/// What is added to my clock to get theirs, in nanoseconds: the middle of what the rounds leave possible.
fn offset(rounds: &[Round]) -> i64 {
    let least = rounds
        .iter()
        .map(|round| round.theirs.0 - round.mine.1)
        .max();
    let most = rounds
        .iter()
        .map(|round| round.theirs.1 - round.mine.0)
        .min();
    match (least, most) {
        (Some(least), Some(most)) => least + (most - least) / 2,
        _ => 0,
    }
}

impl Communicator {
    /// A trace of the last 4096 operations of every rank of this group (in all the groups that they are in), on the clock
    /// of rank 0, which gets it; the others get `None`. All ranks call it. It is a JSON object as `chrome://tracing` and
    /// Perfetto read it: a process for each rank, a thread for each group, and a `NEGOTIATE_...` span before each operation
    /// for the time that it waited for its turn.
    ///
    /// The ranks' clocks are compared by nine small operations; what is left of the difference is below half the time that
    /// the fastest of them took.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// run_local(2, |comm| {
    ///     comm.barrier().unwrap();
    ///     if let Some(json) = comm.trace().unwrap() {
    ///         assert!(json.contains("\"name\":\"barrier\""));
    ///     }
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn trace(&self) -> Result<Option<String>, CollectiveError> {
        let plain = self.with(Options::new());
        let clocks = self.with(Options::new().marked(Mark::Trace));
        let records = self.records();
        let recorder = &self.inner.rank_shared.recorder;
        let clock = || recorder.clock(Instant::now()).as_nanos() as i64;
        let me = self.inner.me as usize;
        let mut all = vec![0_i64; 2 * self.world()];
        let mut rounds = Vec::new();
        let mut began = Vec::new();
        let mut last_end = 0;
        // The ends of a round travel in the next one.
        for round in 0..=ROUNDS {
            let start = clock();
            clocks.all_gather_into(&[start, last_end], &mut all)?;
            last_end = clock();
            if round > 0 {
                let (mine, root): (i64, i64) = began[round - 1];
                rounds.push(Round {
                    mine: (mine, all[2 * me + 1]),
                    theirs: (root, all[1]),
                });
            }
            began.push((start, all[0]));
        }
        let offset = if me == 0 { 0 } else { offset(&rounds) };
        let mut events = String::new();
        self.write_process(&mut events);
        let groups: BTreeSet<GroupId> = records.iter().map(|record| record.group).collect();
        for group in groups {
            write_thread(&mut events, self.inner.rank_shared.me, group);
        }
        for record in &records {
            write_record(&mut events, self.inner.rank_shared.me, record, offset);
        }
        let Some(parts) = plain.gather_varcount(events.as_bytes(), Rank(0))? else {
            return Ok(None);
        };
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |now| now.as_micros() as i64 - clock() / 1000);
        let events = String::from_utf8_lossy(&parts.values);
        let events = events.trim_end_matches(",\n");
        Ok(Some(format!(
            "{{\"displayTimeUnit\":\"ns\",\"otherData\":{{\"start_time_since_epoch_in_micros\":{since}}},\
             \"traceEvents\":[\n{events}\n]}}\n"
        )))
    }

    fn write_process(&self, out: &mut String) {
        let me = self.inner.rank_shared.me;
        let host = {
            let state = self.inner.signals.lock();
            state.host_of(self.inner.me).map(str::to_owned)
        };
        let name = match host {
            Some(host) => format!("rank {me} on {host}"),
            None => format!("rank {me}"),
        };
        let _infallible = writeln!(
            out,
            "{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{me},\"tid\":0,\"args\":{{\"name\":{}}}}},\n\
             {{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":{me},\"tid\":0,\"args\":{{\"sort_index\":{me}}}}},",
            quoted(&name)
        );
    }
}

/// What viewers take for threads. They want small numbers for these.
fn thread(group: GroupId) -> u64 {
    group.0 >> 40
}

/// What a group is called in the viewer.
fn write_thread(out: &mut String, rank: u32, group: GroupId) {
    let _infallible = writeln!(
        out,
        "{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{rank},\"tid\":{},\"args\":{{\"name\":{}}}}},",
        thread(group),
        quoted(&group.to_string())
    );
}

/// One or two spans: waiting for its turn, and the operation.
fn write_record(out: &mut String, rank: u32, record: &Record, offset: i64) {
    if record.outcome == Outcome::Running {
        return;
    }
    let operation = &record.operation;
    let kind = operation.kind.name();
    let name = match record.name.as_str() {
        "" => kind.to_owned(),
        name => format!("{kind}.{name}"),
    };
    let micros = |time: std::time::Duration| (time.as_nanos() as i64 + offset) as f64 / 1000.0;
    let thread = thread(record.group);
    let mut span = |name: &str, from: std::time::Duration, to: std::time::Duration, args: &str| {
        let _infallible = writeln!(
            out,
            "{{\"name\":{},\"cat\":\"collective\",\"ph\":\"X\",\"pid\":{rank},\"tid\":{thread},\"ts\":{:.3},\
             \"dur\":{:.3},\"args\":{{{args}}}}},",
            quoted(name),
            micros(from),
            to.saturating_sub(from).as_nanos() as f64 / 1000.0,
        );
    };
    // Nothing that a person could see.
    if record.started.saturating_sub(record.asked).as_micros() > 0 {
        let waiting = format!("NEGOTIATE_{}", kind.to_uppercase());
        span(&waiting, record.asked, record.started, "");
    }
    let args = format!(
        "\"operation\":{},\"group\":{},\"call\":{},\"number\":{},\"bytes\":{},\"algorithm\":\"{}\",\"lanes\":\"{}\",\
         \"sent\":{},\"received\":{},\"ok\":{}",
        quoted(&operation.to_string()),
        quoted(&record.group.to_string()),
        record.tag.call,
        record.tag.operation,
        record.bytes(),
        operation.algorithm,
        record.lanes,
        record.sent,
        record.received,
        record.outcome == Outcome::Done,
    );
    span(&name, record.started, record.ended, &args);
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            control if control < ' ' => {
                let _infallible = write!(out, "\\u{:04x}", control as u32);
            }
            other => out.push(other),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Two clocks that differ by whatever; rounds that take different times on both sides.
        #[test]
        fn clocks_are_compared_to_half_of_the_fastest_round(
            difference in -1_000_000_000_i64..1_000_000_000,
            rounds in prop::collection::vec((0_i64..1000, 0_i64..1000, 1_i64..100, 1_i64..100), 1..9),
        ) {
            let mut time = 0;
            let mut fastest = i64::MAX;
            let rounds: Vec<Round> = rounds
                .into_iter()
                .map(|(wait_mine, wait_theirs, end_mine, end_theirs)| {
                    let (mine, theirs) = (time + wait_mine, time + wait_theirs);
                    let all = mine.max(theirs);
                    let (mine_end, theirs_end) = (all + end_mine, all + end_theirs);
                    time = mine_end.max(theirs_end);
                    fastest = fastest.min((mine_end - theirs) + (theirs_end - mine));
                    Round {
                        mine: (mine, mine_end),
                        theirs: (theirs + difference, theirs_end + difference),
                    }
                })
                .collect();
            let error = (offset(&rounds) - difference).abs();
            prop_assert!(error <= fastest / 2 + 1, "{} of {}", error, fastest);
        }

        #[test]
        fn any_text_is_a_json_string(text in ".*") {
            let back: String = serde_json::from_str(&quoted(&text)).unwrap();
            prop_assert_eq!(back, text);
        }
    }
}
