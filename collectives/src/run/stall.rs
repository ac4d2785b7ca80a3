//! What a rank does while it waits for long: it says what it asks for, so that those who ask for something else hear of it,
//! and it tells people who did not come.

use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use super::{Mode, Run};
use crate::cause::cut;
use crate::error::DOING;
use crate::header::Header;
use crate::stall::{Missing, StallReport, as_said};

/// A rank that waits for so long and hears nothing says what it asks for.
const SAY: Duration = Duration::from_millis(100);

/// So long it collects what others know of those that did not come.
const COLLECT: Duration = Duration::from_millis(300);

/// A rank that waits for so long says it again, and after twice as long once more: what the others do may be something else by
/// then. (Not just before the deadline, which may be that of the others, too: then they do nothing any more.) Each time it also asks
/// for the links that it lacks and that are the peers' to make.
const REPEAT: Duration = Duration::from_secs(1);

/// What is to be done when.
#[derive(Debug)]
pub(super) struct Watch {
    repeat_at: Option<Instant>,
    say_at: Option<Instant>,
    said: bool,
    /// Something came since the last look.
    pub(super) moved: bool,
    collect_at: Option<Instant>,
    report_at: Option<Instant>,
    /// The ranks that are known to be missing, and what they do.
    missing: Vec<(u32, String)>,
}

impl Watch {
    pub(super) fn new(started: Instant, after: Duration) -> Self {
        Self {
            repeat_at: Some(started + REPEAT),
            say_at: Some(started + SAY),
            said: false,
            moved: false,
            collect_at: started.checked_add(after),
            report_at: None,
            missing: Vec::new(),
        }
    }

    /// When to look next.
    pub(super) fn next(&self) -> Option<Instant> {
        let Self {
            repeat_at,
            say_at,
            collect_at,
            report_at,
            ..
        } = *self;
        [repeat_at, say_at, collect_at, report_at]
            .into_iter()
            .flatten()
            .min()
    }
}

impl Run<'_> {
    /// Looks whether it is time to say or report something. Returns whether there is something to write.
    pub(super) fn look(&mut self, now: Instant) -> bool {
        let mut told = false;
        if self.watch.say_at.is_some_and(|at| now >= at) {
            if std::mem::take(&mut self.watch.moved) {
                self.watch.say_at = Some(now + SAY);
            } else {
                self.watch.say_at = None;
                self.watch.said = true;
                self.say();
                told = true;
            }
        }
        if self.watch.repeat_at.is_some_and(|at| now >= at) {
            let waited = now.saturating_duration_since(self.started);
            let is_early = now + waited + waited / 2 <= self.deadline;
            self.watch.repeat_at = is_early.then(|| now + waited);
            self.request_links();
            if self.watch.said {
                self.say();
                told = true;
            }
        }
        self.look_who_is_gone(now);
        if self.watch.collect_at.is_some_and(|at| now >= at) {
            self.watch.collect_at = None;
            self.watch.report_at = Some(now + COLLECT);
            self.say();
            for rank in self.silent() {
                let doing = self.doing_of(rank.0);
                self.missing_heard(None, rank.0, doing);
            }
            told = true;
        }
        if self.watch.report_at.is_some_and(|at| now >= at) {
            self.watch.report_at = None;
            self.report();
        }
        told
    }

    /// Says what this rank asks for.
    fn say(&mut self) {
        let frame = self.ask_frame();
        for link in &mut self.engine.links {
            link.notify(&frame);
        }
    }

    /// Asks for the links that this operation lacks and that are the peers' to make.
    pub(super) fn request_links(&mut self) {
        let (me, world) = (self.engine.me, self.engine.world);
        let mut wanted: Vec<u32> = match self.mode {
            Mode::Links => {
                let consenting = self.consent.iter();
                let consenting = consenting.flat_map(|consent| consent.peers(me, world));
                let peers = self.engine.schedule.peers_from(self.step);
                peers.chain(consenting).collect()
            }
            Mode::Form => (0..world).filter(|peer| *peer != me).collect(),
            Mode::Shared => Vec::new(),
        };
        wanted.sort_unstable();
        wanted.dedup();
        wanted.retain(|peer| {
            let link = &self.engine.links[*peer as usize];
            !link.is_up() && !link.is_over() && !self.engine.dials(*peer)
        });
        for peer in wanted {
            (self.connect)(peer);
        }
    }

    /// The deadline comes before the report is due, or at the same time: it is made now.
    pub(super) fn report_before_the_end(&mut self) {
        if self.stalls.after() <= self.started.elapsed() {
            let silent = self.silent();
            self.report_now(silent);
        }
    }

    /// The deadline of another rank has passed, which came a little sooner: what this one was about to report is reported now.
    pub(super) fn report_with_others(&mut self, late: &[Rank]) {
        let me = Rank(self.engine.me);
        let late: Vec<Rank> = late.iter().copied().filter(|rank| *rank != me).collect();
        if !late.is_empty() && self.stalls.after() <= self.started.elapsed() + COLLECT {
            self.report_now(late);
        }
    }

    /// Reports, unless that was done, that these ranks did not come, too.
    fn report_now(&mut self, silent: Vec<Rank>) {
        let due = [self.watch.collect_at.take(), self.watch.report_at.take()];
        if due.iter().all(Option::is_none) {
            return;
        }
        for rank in silent {
            let doing = self.doing_of(rank.0);
            if !self.watch.missing.iter().any(|(known, _)| *known == rank.0) {
                self.watch.missing.push((rank.0, doing));
            }
        }
        self.report();
    }

    /// Those that this rank waits for and that are not known to be here.
    fn silent(&self) -> Vec<Rank> {
        let mut silent = self.waited_for();
        if self.mode == Mode::Shared {
            return silent;
        }
        silent.retain(|rank| {
            let came = self.engine.links[rank.index()].came;
            came.is_none_or(|(tag, _)| tag != self.tag)
        });
        silent
    }

    /// Of late ranks, what those said themselves that are known to do something else.
    pub(super) fn what_they_do(&self, late: &[Rank]) -> Vec<Missing> {
        let said = |rank: &Rank| {
            let (tag, doing, said) = self.engine.links[rank.index()].doing.as_ref()?;
            (*tag == self.tag).then(|| Missing {
                rank: *rank,
                doing: as_said(doing, said.elapsed()),
            })
        };
        late.iter().filter_map(said).take(DOING).collect()
    }

    fn doing_of(&self, peer: u32) -> String {
        let link = &self.engine.links[peer as usize];
        match &link.doing {
            Some((tag, doing, said)) if *tag == self.tag => as_said(doing, said.elapsed()),
            _ if !link.is_up() => "there is no link to it".to_owned(),
            _ => match link.came {
                Some((tag, asked)) if tag > self.tag => format!("it is in {asked} ({tag})"),
                Some((tag, asked)) => {
                    format!("nothing was heard from it since {asked} ({tag})")
                }
                None => "nothing was heard from it".to_owned(),
            },
        }
    }

    fn report(&mut self) {
        let signals = self.signals;
        let job_rank = |rank: u32| Rank(signals.lock().job_rank(rank));
        let mut missing: Vec<Missing> = self
            .watch
            .missing
            .iter()
            .map(|(rank, doing)| Missing {
                rank: job_rank(*rank),
                doing: doing.clone(),
            })
            .collect();
        if missing.is_empty() {
            // All have come, and something else holds them up.
            missing.extend(self.waited_for().into_iter().map(|rank| Missing {
                rank: job_rank(rank.0),
                doing: "it is in the operation, too".to_owned(),
            }));
        }
        missing.sort_unstable_by_key(|missing| missing.rank);
        self.stalls.report(StallReport {
            operation: self.request.to_string(),
            group: self.id,
            tag: self.tag,
            waited: self.started.elapsed(),
            missing,
        });
    }

    /// Somebody knows what a rank does. It is passed on once, so that it reaches those that wait for others that wait.
    pub(super) fn missing_heard(&mut self, from: Option<u32>, rank: u32, doing: String) {
        if rank >= self.engine.world || rank == self.engine.me {
            return;
        }
        if from == Some(rank) {
            // It is not in the operation, and says so itself.
            let said = (self.tag, doing.clone(), Instant::now());
            self.engine.links[rank as usize].doing = Some(said);
        }
        let known = self
            .watch
            .missing
            .iter_mut()
            .find(|(known, _)| *known == rank);
        match known {
            // What it says itself is better than what others think.
            Some((_, text)) => {
                if from == Some(rank) {
                    *text = doing;
                }
                return;
            }
            None if from == Some(rank) && self.watch.collect_at.is_some() => return,
            None => self.watch.missing.push((rank, doing.clone())),
        }
        let text = cut(&doing);
        let header = Header::Doing {
            generation: self.engine.generation,
            tag: self.tag,
            rank: Rank(rank),
            length: text.len() as u32,
        };
        let mut frame = header.encode().to_vec();
        frame.extend_from_slice(text.as_bytes());
        self.unsaid = true;
        for (peer, link) in (0..).zip(&mut self.engine.links) {
            if Some(peer) != from && peer != rank {
                link.notify(&frame);
            }
        }
    }

    /// A link has come while this rank waits.
    pub(super) fn tell_newcomer(&mut self, peer: u32) {
        self.tell_missed(peer);
        if self.watch.said {
            let frame = self.ask_frame();
            self.engine.links[peer as usize].notify(&frame);
        }
    }
}
