//! A line for each generation: rank 0 tells the times to the driver, which prints them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kolo::prelude::*;
use kolo::{LogLine, Stdio};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// Begins a line for the driver on the standard output of rank 0.
const MARK: &str = "elastic-report: ";

/// A time in microseconds, on the clock that all processes of a host share.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    // The clock begins with the machine.
    time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_nsec.unsigned_abs() / 1000
}

/// Something that rank 0 tells the driver.
#[derive(Debug, Serialize, Deserialize)]
pub enum News {
    /// The first step of a generation is made.
    Entered(Entry),
    /// A step begins, so that its number is known when all ranks are lost.
    Step {
        /// Counts steps from 1.
        number: u64,
        /// The last commit on disk, or 0.
        durable: u64,
    },
}

impl News {
    pub fn tell(&self) -> anyhow::Result<()> {
        println!("{MARK}{}", serde_json::to_string(self)?);
        Ok(())
    }

    fn parse(line: &[u8]) -> Option<Self> {
        serde_json::from_slice(line.strip_prefix(MARK.as_bytes())?).ok()
    }
}

/// How a generation came about. Times are those of [`now`].
#[derive(Debug, Serialize, Deserialize)]
pub struct Entry {
    pub generation: u64,
    pub cause: String,
    /// When the first and the last of the ranks that stay stopped working in the generation before.
    pub stopped: Option<[u64; 2]>,
    /// When rank 0 had the members.
    pub formed: u64,
    /// How long the first exchange of the members took in microseconds, links included.
    pub connect: u64,
    /// When rank 0 had the state.
    pub entered: u64,
    /// When the first step was made.
    pub stepped: u64,
    /// Committed steps at the beginning.
    pub steps: u64,
    /// Steps that some rank which stays had begun, and none has committed.
    pub redone: u64,
}

impl Entry {
    /// Where the time went, since the change if its time is known.
    fn phases(&self, changed: Option<u64>) -> String {
        let mut phases = Vec::new();
        let mut phase = |name: &str, from: u64, to: u64| {
            phases.push(format!("{name} {}", millis(to.saturating_sub(from))));
        };
        match (self.stopped, changed) {
            (Some([first, last]), _) => {
                if let Some(changed) = changed {
                    phase("detect", changed, first);
                }
                phase("revoke", first, last);
                phase("decide", last, self.formed);
            }
            // No rank stays.
            (None, Some(changed)) => phase("detect, decide and start", changed, self.formed),
            (None, None) => {}
        }
        phase("connect", 0, self.connect);
        phase("sync", self.formed + self.connect, self.entered);
        phase("first step", self.entered, self.stepped);
        phases.join(", ")
    }
}

/// Microseconds as milliseconds.
fn millis(micros: u64) -> String {
    format!("{:.1}", micros as f64 / 1e3)
}

/// What the driver has heard. Clones are the same.
#[derive(Debug, Clone)]
pub struct Report {
    heard: Arc<Mutex<Heard>>,
    progress: watch::Sender<Progress>,
}

/// How far the group has come.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// The last generation that has made a step.
    pub generation: u64,
    /// The last commit on disk, or 0.
    pub durable: u64,
}

#[derive(Debug, Default)]
struct Heard {
    /// When the cluster was changed, if no generation has followed yet.
    changed: Option<u64>,
    begun: u64,
    redone: u64,
}

impl Report {
    pub fn new() -> Self {
        Self {
            heard: Arc::default(),
            progress: watch::Sender::default(),
        }
    }

    /// Prints a line for each generation, and passes on what else the workers write.
    pub fn output(&self) -> Output {
        let report = self.clone();
        Output::callback(move |line: LogLine| {
            if let Some(news) = News::parse(&line.text) {
                return report.hear(&news);
            }
            let text = String::from_utf8_lossy(&line.text);
            match line.stream {
                Stdio::Stdout => println!("[{}] {text}", line.rank),
                Stdio::Stderr => eprintln!("[{}] {text}", line.rank),
            }
        })
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        // Nothing in here panics half-way.
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self, news: &News) {
        let mut heard = self.heard();
        match news {
            News::Step { number, durable } => {
                heard.begun = *number;
                self.progress
                    .send_modify(|progress| progress.durable = *durable);
            }
            News::Entered(entry) => {
                // If no rank stays, none of the new ones knows how far the others were.
                let redone = entry.redone.max(heard.begun.saturating_sub(entry.steps));
                heard.begun = entry.steps + 1;
                heard.redone += redone;
                let stopped = entry.stopped.map(|[first, _]| first);
                let is_after = |at: &mut u64| *at < stopped.unwrap_or(entry.formed);
                let changed = heard.changed.take_if(is_after);
                let from = changed.or(stopped).unwrap_or(entry.formed);
                println!(
                    "generation {} at step {}, {redone} steps lost, after {} ms ({}): {}",
                    entry.generation,
                    entry.steps,
                    millis(entry.stepped.saturating_sub(from)),
                    entry.phases(changed),
                    entry.cause,
                );
                self.progress
                    .send_modify(|progress| progress.generation = entry.generation);
            }
        }
    }

    /// The cluster is about to be changed.
    pub fn change(&self) {
        self.heard().changed = Some(now());
    }

    /// Steps that were made again.
    pub fn redone(&self) -> u64 {
        self.heard().redone
    }

    /// Waits until the group has come so far.
    pub async fn until(&self, is_there: impl FnMut(&Progress) -> bool) {
        // The sender lives as long as this.
        drop(self.progress.subscribe().wait_for(is_there).await);
    }
}
