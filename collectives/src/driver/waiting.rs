//! What a rank does while it waits: it looks at the clock, says what it asks for, asks at its deadline who is still there, and tells
//! people who did not come.

use std::task::Context;
use std::time::Instant;

use kolo_transport::ids::Rank;
use kolo_transport::wire::span::Span;

use super::engine::next_transfer;
use super::{Driver, Linked, Mode, Place};
use crate::cause::Cause;
use crate::error::CollectiveError;
use crate::header::{Header, SEGMENT};
use crate::lane::LaneError;
use crate::link::Link;
use crate::schedule::Action;
use crate::stall::{Missing, StallReport};
use crate::verdict::{Event, Report, Ruling, Seen, Verdict};

/// In groups up to this size a rank whose deadline has passed asks all others, linked so far or not. In larger ones each only asks
/// those that it is linked with and some more: late ranks that nobody waits for are not named there.
const ASKS_ALL: u32 = 64;

/// Most bytes that are held to look [ahead](Driver::look_ahead): of all links, and of one, with its bounds. What a peer had sent
/// when it gave up is in the buffers of the network, a few MiB.
const AHEAD: usize = 32 << 20;
const AHEAD_OF_LINK: (usize, usize) = (2 * SEGMENT, 32 * SEGMENT);

impl Driver<'_> {
    /// Looks at the clock. Returns whether there is something new to tell the peers.
    pub(super) fn check_time(&mut self, fired: bool) -> Result<bool, CollectiveError> {
        let now = Instant::now();
        let now = if fired { now.max(self.wake_at()) } else { now };
        self.limit.move_on(now);
        let mut told = self.look(now);
        if self.verdict.is_calling_the_roll() || now >= self.verdict.next(self.limit.deadline) {
            let seen = self.see();
            match self.verdict.decide(now, self.limit.deadline, &seen) {
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
                has_come: link.said.came.is_some_and(|(tag, _)| tag >= self.tag)
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
        self.place.signals.lock().notices.put(notice);
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
        let due = self.watch.due(now, self.limit.deadline);
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
                let peers = self.engine.schedule.peers_from(self.step);
                peers.chain(self.agreement.peers()).collect()
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
            let came = self.engine.links[rank.index()].said.came;
            came.is_none_or(|(tag, _)| tag != self.tag)
        });
        silent
    }

    fn doing_of(&self, peer: u32) -> String {
        if let Some(missing) = self.verdict.what_it_does(Rank(peer), Instant::now()) {
            return missing.doing;
        }
        let link = &self.engine.links[peer as usize];
        match link.said.came {
            _ if !link.is_up() => "there is no link to it".to_owned(),
            Some((tag, asked)) if tag > self.tag => format!("it is in {asked} ({tag})"),
            Some((tag, asked)) => format!("nothing was heard from it since {asked} ({tag})"),
            None => "nothing was heard from it".to_owned(),
        }
    }

    fn report(&self) {
        let job_rank = |rank: u32| Rank(self.place.signals.lock().job_rank(rank));
        let missing = self.watch.missing.iter();
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
            waited: self.limit.started.elapsed(),
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
        let is_collecting = self.watch.is_collecting();
        let known = self.watch.missing.iter_mut();
        match known.into_iter().find(|(known, _)| *known == rank) {
            // What it says itself is better than what others think.
            Some((_, text)) => {
                if is_own_word {
                    *text = doing;
                }
                return;
            }
            None if is_own_word && !is_collecting => return,
            None => self.watch.missing.push((rank, doing.clone())),
        }
        let frame = Header::doing(self.engine.generation, self.tag, Rank(rank), &doing);
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

    /// Whether anything is left to exchange with a peer.
    pub(super) fn needs(&self, peer: u32) -> bool {
        match self.mode {
            Mode::Links => {}
            Mode::Form => return true,
            Mode::Shared => return self.engine.lacks(peer),
        }
        self.awaits(peer) || self.needs_to_send(peer)
    }

    /// Whether anything is left to receive from a peer.
    pub(super) fn awaits(&self, peer: u32) -> bool {
        self.agreement.awaited().any(|other| other == peer)
            || self.next(peer, false).is_some()
            || self
                .later()
                .any(|action| action.receive().is_some_and(|(other, _)| other == peer))
    }

    pub(super) fn next(&self, peer: u32, sends: bool) -> Option<usize> {
        let step = self.engine.schedule.step(self.step);
        next_transfer(step, &self.engine.progress, peer, sends)
    }

    fn later(&self) -> impl Iterator<Item = &Action> {
        self.engine.schedule.steps().skip(self.step + 1).flatten()
    }

    /// The peer can't be written to any more, and it should be: only what it said before is of interest.
    pub(super) fn is_draining(&self, peer: u32) -> bool {
        self.engine.links[peer as usize].write_error.is_some() && self.needs_to_send(peer)
    }

    pub(super) fn needs_to_send(&self, peer: u32) -> bool {
        self.agreement.owed().any(|other| other == peer)
            || self.next(peer, true).is_some()
            || self
                .later()
                .any(|action| matches!(action, Action::Send { peer: other, .. } if *other == peer))
    }

    /// The peers that the present step waits for; or that have not shared memory so far.
    pub(super) fn waited_for(&self) -> Vec<Rank> {
        match self.mode {
            Mode::Links => {}
            Mode::Form => return self.not_attached(),
            Mode::Shared => return self.engine.late_in_shared(),
        }
        let step = self.engine.schedule.step(self.step);
        let open = step.iter().zip(&self.engine.progress);
        let mut ranks: Vec<Rank> = open
            .filter(|(_, progress)| !progress.done)
            .filter_map(|(action, _)| action.transfer())
            .map(|(peer, _)| Rank(peer))
            .collect();
        if ranks.is_empty() {
            let unlinked = |peer: &u32| !self.engine.links[*peer as usize].is_up();
            let owed = self.agreement.owed().filter(unlinked);
            ranks.extend(self.agreement.awaited().chain(owed).map(Rank));
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Takes in notices that stand behind frames that are not wanted yet, if nothing else has come for a while. Returns
    /// whether there were any.
    ///
    /// A link keeps the order of what is sent on it, and what is not for the present step stays in it. So a rank that waits for one
    /// peer would hear only at its deadline that another one gave up, if that one had begun a later step before.
    pub(super) fn look_ahead(&mut self, cx: &mut Context<'_>) -> Result<bool, CollectiveError> {
        if self.mode != Mode::Links || !self.watch.is_quiet() {
            return Ok(false);
        }
        let (least, most) = AHEAD_OF_LINK;
        let most = (AHEAD / self.engine.world as usize).clamp(least, most);
        let mut found = false;
        for peer in 0..self.engine.world {
            while let Some((header, text)) = self.engine.links[peer as usize].poll_ahead(cx, most) {
                let Some(text) = text else { continue };
                found = true;
                match self.place_of(header) {
                    Some((generation, _)) if generation != self.engine.generation => break,
                    Some((_, tag)) if tag <= self.tag => self.told(peer, header, &text)?,
                    // The peer gave up a later operation.
                    _ => {}
                }
            }
        }
        Ok(found)
    }

    pub(super) fn take_signals(&mut self, cx: &Context<'_>) -> Result<(), CollectiveError> {
        let (arrivals, requests, notices) = {
            let mut state = self.place.signals.lock();
            state.register(cx);
            if let Some(error) = state.obstacle(self.tag) {
                return self.verdict.hear(Event::Word(error));
            }
            if state.is_nothing_new() {
                return Ok(());
            }
            let requests = std::mem::take(&mut state.requests);
            (state.take_arrivals(), requests, state.notices.frames())
        };
        if !arrivals.is_empty() {
            self.watch.stir();
        }
        // All are taken in before any of them ends the operation.
        let mut failure = None;
        for arrival in arrivals {
            let peer = arrival.rank;
            let link = &self.engine.links[peer as usize];
            let replaces = link.is_up() && link.present.used;
            // Begun for another operation, or for a peer that had asked for it: it may be the time of that which has passed.
            let is_old = !arrival.theirs && !link.present.begun;
            let theirs = arrival.theirs;
            match self.engine.arrive(arrival, &notices) {
                Ok(()) => {
                    let made = Event::LinkMade {
                        rank: Rank(peer),
                        replaces: replaces && self.needs(peer),
                    };
                    match self.verdict.hear(made) {
                        Ok(()) if !replaces => {
                            let asks = self.as_data();
                            let link = &mut self.engine.links[peer as usize];
                            self.agreement.repeat(peer, link, asks);
                            self.tell_newcomer(peer);
                        }
                        Ok(()) => {}
                        Err(error) => failure = Some(error),
                    }
                }
                Err(_) if is_old => self.linked = Linked::Unknown,
                // A link that has come all the same will do.
                Err(error) if self.needs(peer) && !self.engine.links[peer as usize].is_up() => {
                    let link = &mut self.engine.links[peer as usize];
                    let is_gone = error.says_nobody_is_there() && !theirs && link.nobody_is_there();
                    let lacks = if is_gone {
                        self.lack_link(peer)
                    } else {
                        self.lack(peer, &error, theirs)
                    };
                    failure = lacks.err().or(failure);
                }
                Err(_) => {}
            }
        }
        // After that: what is asked for may just have come.
        for peer in requests {
            if self.engine.is_asked_by(peer) {
                (self.place.connect)(peer);
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// There is no link to a peer that this rank needs; `theirs` says that it is the peer that has tried.
    fn lack(&mut self, peer: u32, error: &LaneError, theirs: bool) -> Result<(), CollectiveError> {
        let (rank, at) = (Rank(peer), Instant::now());
        let tried = if theirs { peer } else { self.engine.me };
        let tried = self.place.signals.lock().job_rank(tried);
        let error = CollectiveError::unlinked(rank, error, tried);
        self.verdict.hear(Event::NoLink { rank, at, error })
    }

    /// The link to a peer that this rank needs has ended.
    pub(super) fn lack_link(&mut self, peer: u32) -> Result<(), CollectiveError> {
        if self.verdict.suspects(Rank(peer)) {
            return Ok(());
        }
        let link = &self.engine.links[peer as usize];
        let (reason, at) = match &link.ended {
            Some(ended) => (ended.reason.as_str(), ended.at),
            None => ("its link ended", Instant::now()),
        };
        let state = self.place.signals.lock();
        let host = state
            .host_of(peer)
            .map_or_else(String::new, |host| format!("on host {host}: "));
        let reason = if self.place.patience.is_zero() {
            format!("{host}{reason}")
        } else {
            format!(
                "link lost to rank {}: {host}{reason}; nothing else was heard of the rank's end within {}",
                state.job_rank(peer),
                Span(self.place.patience)
            )
        };
        drop(state);
        self.verdict.hear(Event::LinkEnded {
            rank: Rank(peer),
            at,
            reason,
            is_used: link.present.used,
        })
    }

    /// Starts making all links that the operation will use and that are this rank's to make.
    pub(super) fn want_links(&mut self) -> Result<(), CollectiveError> {
        let Self {
            engine,
            place,
            verdict,
            agreement,
            ..
        } = self;
        self.linked = Linked::All;
        // A peer that has all that it needs from this step may be gone.
        let mut gone = Vec::new();
        for peer in (engine.schedule.peers_from(self.step)).chain(agreement.peers()) {
            let dials = engine.dials(peer);
            let link = &mut engine.links[peer as usize];
            if link.is_up() {
                continue;
            }
            if !link.connecting && link.is_over() {
                gone.push(peer);
                continue;
            }
            self.linked = Linked::Awaited;
            begin_link(link, dials, peer, (&*place, &*verdict));
        }
        match gone.into_iter().find(|peer| self.needs(*peer)) {
            Some(peer) => self.lack_link(peer),
            None => Ok(()),
        }
    }

    /// As [`begin_link`].
    pub(super) fn begin_link(&mut self, peer: u32) {
        let dials = self.engine.dials(peer);
        let link = &mut self.engine.links[peer as usize];
        begin_link(link, dials, peer, (&self.place, &self.verdict));
    }

    pub(super) fn link_neighbours(&mut self) {
        for peer in self.engine.unlinked_neighbours() {
            (self.place.connect)(peer);
        }
    }
}

/// Starts making the link to a peer, if it is this rank's to make. If it is the peer's and there was one before, asks for it at
/// once: who can't be asked is gone.
pub(super) fn begin_link(
    link: &mut Link,
    dials: bool,
    peer: u32,
    (place, verdict): (&Place<'_>, &Verdict),
) {
    let asks = !dials && link.ended.is_some() && !link.present.begun;
    if (dials || asks) && !link.connecting && !verdict.suspects(Rank(peer)) {
        (link.connecting, link.present.begun) = (dials, true);
        (place.connect)(peer);
    }
}
