//! What a rank does while it waits: it looks at the clock, says what it asks for, asks at its deadline who is still there, and tells
//! people who did not come.

use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use super::{Mode, Run};
use crate::cause::{Cause, cut};
use crate::error::CollectiveError;
use crate::header::Header;
use crate::stall::{Missing, StallReport};
use crate::verdict::{Report, Ruling, Seen};

/// In groups up to this size a rank whose deadline has passed asks all others, linked so far or not. In larger ones each only asks
/// those that it is linked with and some more: late ranks that nobody waits for are not named there.
const ASKS_ALL: u32 = 64;

/// A rank that waits has a turn so often at least ...
pub(crate) const TURN: Duration = Duration::from_secs(1);
/// ... and of the time between two of them so much counts: whoever was stopped, maybe with all others, comes back to ranks that
/// are not late because of that.
pub(crate) const MOST: Duration = Duration::from_secs(2);

impl Run<'_> {
    /// Time in which this rank stood still does not count.
    pub(super) fn move_deadline(&mut self, now: Instant) {
        // Not more often: what wakes this rank next stays the same meanwhile.
        if now >= self.awake.ticked() + TURN {
            self.deadline += self.awake.stood_still(now);
        }
    }

    /// Looks at the clock. Returns whether there is something new to tell the peers.
    pub(super) fn check_time(&mut self, fired: bool) -> Result<bool, CollectiveError> {
        let now = Instant::now();
        let now = if fired { now.max(self.wake_at()) } else { now };
        self.move_deadline(now);
        let mut told = self.look(now);
        if self.verdict.is_calling_the_roll() || now >= self.verdict.next(self.deadline) {
            let seen = self.see();
            match self.verdict.decide(now, self.deadline, &seen) {
                Ruling::Wait => {}
                Ruling::CallTheRoll => {
                    self.call_the_roll();
                    told = true;
                }
                Ruling::End(error) => return Err(error),
            }
        }
        if let Some(cause) = self.verdict.take_news() {
            let frame = self.engine.notice(self.tag, &cause);
            self.engine.notify_all(&frame);
            told = true;
        }
        Ok(told)
    }

    /// What is known of all ranks.
    fn see(&self) -> Vec<Seen> {
        let waited = self.waited_for();
        let late_in_shared = match self.mode {
            Mode::Shared => Some(self.engine.late_in_shared()),
            _ => None,
        };
        let links = (0..).map(Rank).zip(&self.engine.links);
        links
            .map(|(rank, link)| Seen {
                is_waited_for: waited.contains(&rank),
                is_linked: link.is_up(),
                has_come: link.came.is_some_and(|(tag, _)| tag >= self.tag)
                    || late_in_shared
                        .as_ref()
                        .is_some_and(|late| !late.contains(&rank)),
            })
            .collect()
    }

    /// Asks who is still there.
    fn call_the_roll(&mut self) {
        let asked = self.request.to_string();
        let notice = self.engine.tell(self.tag, &Cause::Stalled { asked });
        self.place.signals.lock().put_notice(notice);
        if self.engine.world > ASKS_ALL {
            self.link_neighbours();
            self.request_links();
            return;
        }
        let (me, world) = (self.engine.me, self.engine.world);
        for peer in (0..world).filter(|peer| *peer != me) {
            let link = &self.engine.links[peer as usize];
            let is_asked_for = !link.is_up() && !link.is_over() && !self.engine.dials(peer);
            if is_asked_for || self.engine.may_begin_link(peer) {
                (self.place.connect)(peer);
            }
        }
    }

    /// Says or reports what it is time for. Returns whether there is something to write.
    pub(super) fn look(&mut self, now: Instant) -> bool {
        let due = self.watch.due(now, self.deadline);
        if due.links {
            self.request_links();
        }
        if due.say {
            self.say();
        }
        match due.report {
            Some(Report::Collect) => {
                for rank in self.silent() {
                    let doing = self.doing_of(rank.0);
                    self.missing_heard(None, rank.0, doing);
                }
            }
            Some(Report::Make) => self.report(),
            None => {}
        }
        due.say
    }

    /// Says what this rank asks for.
    fn say(&mut self) {
        let frame = self.ask_frame();
        for link in &mut self.engine.links {
            link.notify(&frame);
        }
    }

    /// Asks for the links that this operation lacks and that are the peers' to make.
    fn request_links(&mut self) {
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
            (self.place.connect)(peer);
        }
    }

    /// The operation ends because these ranks are late: what was about to be reported of them is reported now.
    pub(super) fn report_before_the_end(&mut self, late: &[Rank]) {
        if !self.watch.report_before_the_end(Instant::now()) {
            return;
        }
        let me = Rank(self.engine.me);
        let late: Vec<Rank> = late.iter().copied().filter(|rank| *rank != me).collect();
        let late = if late.is_empty() { self.silent() } else { late };
        for rank in late {
            let doing = self.doing_of(rank.0);
            if !self.missing_ranks.iter().any(|(known, _)| *known == rank.0) {
                self.missing_ranks.push((rank.0, doing));
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

    fn doing_of(&self, peer: u32) -> String {
        if let Some(missing) = self.verdict.what_it_does(Rank(peer), Instant::now()) {
            return missing.doing;
        }
        let link = &self.engine.links[peer as usize];
        match link.came {
            _ if !link.is_up() => "there is no link to it".to_owned(),
            Some((tag, asked)) if tag > self.tag => format!("it is in {asked} ({tag})"),
            Some((tag, asked)) => format!("nothing was heard from it since {asked} ({tag})"),
            None => "nothing was heard from it".to_owned(),
        }
    }

    fn report(&self) {
        let job_rank = |rank: u32| Rank(self.place.signals.lock().job_rank(rank));
        let missing = self.missing_ranks.iter();
        let mut missing: Vec<Missing> = missing
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
        self.place.stalls.report(StallReport {
            operation: self.request.to_string(),
            group: self.place.id,
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
        let is_own_word = from == Some(rank);
        if is_own_word {
            // The rank is not in the operation, and says so itself.
            let (rank, doing, at) = (Rank(rank), doing.clone(), Instant::now());
            self.verdict.does(rank, doing, at);
        }
        let known = self.missing_ranks.iter_mut();
        match known.into_iter().find(|(known, _)| *known == rank) {
            // What it says itself is better than what others think.
            Some((_, text)) => {
                if is_own_word {
                    *text = doing;
                }
                return;
            }
            None if is_own_word && !self.watch.is_collecting() => return,
            None => self.missing_ranks.push((rank, doing.clone())),
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

    /// A link has come while this rank waits: the peer is told what the others were.
    pub(super) fn tell_newcomer(&mut self, peer: u32) {
        let mut frames = Vec::new();
        if let Some(cause) = self.verdict.missed() {
            frames.extend(self.engine.notice(self.tag, &cause));
        }
        if self.watch.has_said() {
            frames.extend(self.ask_frame());
        }
        self.engine.links[peer as usize].notify(&frames);
    }
}
