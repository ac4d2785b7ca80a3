//! The task that moves messages between the links, the coordinator's book and this rank.

mod suspicions;

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Instant;

use kolo_transport::ids::Rank;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Sleep;

use super::book::{Book, Decision};
use super::ending::{self, Endings, lost};
use super::line::{Ended, Line};
use super::messages::{self, BATCH, Down, Up};
use super::{Command, Negotiation, THRESHOLD, turn};
use crate::error::CollectiveError;
use crate::lane::{Lane, LaneError};
use crate::operation::Tag;
use crate::times::{FOREVER, LIVED, PATIENCE, REST, SILENT};

/// Most bytes that are read at once.
const READ: usize = 16 << 10;

/// Most rounds before other tasks have their turn: a peer that never stops talking holds up nobody.
const MOST_ROUNDS: usize = 64;

pub(super) struct Shell {
    negotiation: Weak<Negotiation>,
    todo: UnboundedReceiver<Command>,
    me: u32,
    /// On the coordinator one for each member, on the others one.
    lines: Vec<Line>,
    /// Only on the coordinator.
    book: Option<Book>,
    /// On the others: when to look whether the coordinator is silent for too long.
    look_at: Option<Instant>,
    /// On the others: when the coordinator last had operations run or gave them up.
    decided: Option<Instant>,
    /// On the others: the call and the number that the next operation has of which the coordinator says that it runs.
    next: (u64, u64),
    endings: Endings,
    /// On the others: a link is made to see whether the coordinator is there.
    is_looking: bool,
    /// On the coordinator: when to ask which members for new links.
    again: Vec<(Instant, u32)>,
    buffer: Vec<u8>,
    /// The communicator is gone, and what was decided last is still being said.
    is_leaving: bool,
}

impl Shell {
    pub(super) fn new(negotiation: &Arc<Negotiation>, todo: UnboundedReceiver<Command>) -> Self {
        let (me, world) = (negotiation.me, negotiation.world);
        let stall_after = negotiation.rank_shared.stalls.after();
        let book = (me == 0).then(|| Book::new(world, THRESHOLD, stall_after));
        let lines = if me == 0 { world } else { 1 };
        Self {
            negotiation: Arc::downgrade(negotiation),
            todo,
            me,
            lines: (0..lines).map(|_| Line::default()).collect(),
            book,
            look_at: None,
            decided: None,
            next: (0, 0),
            endings: Endings::new(PATIENCE),
            is_looking: false,
            again: Vec::new(),
            buffer: vec![0; READ],
            is_leaving: false,
        }
    }

    /// Runs until the communicator is gone.
    pub(super) async fn run(mut self) {
        let mut sleep = pin!(tokio::time::sleep(FOREVER));
        poll_fn(|cx| self.poll(cx, sleep.as_mut())).await;
    }

    fn poll(&mut self, cx: &mut Context<'_>, mut sleep: Pin<&mut Sleep>) -> Poll<()> {
        for _ in 0..MOST_ROUNDS {
            let mut commands = Vec::new();
            let open = loop {
                match self.todo.poll_recv(cx) {
                    Poll::Ready(Some(command)) => commands.push(command),
                    Poll::Ready(None) => break false,
                    Poll::Pending => break true,
                }
            };
            let Some(negotiation) = self.negotiation.upgrade().filter(|_| open) else {
                return self.say_the_rest(cx, sleep);
            };
            let mut busy = !commands.is_empty();
            for command in commands {
                self.obey(&negotiation, command);
            }
            for index in 0..self.lines.len() {
                busy |= self.serve(&negotiation, index, cx);
            }
            let now = Instant::now();
            busy |= self.decide(&negotiation, now);
            busy |= self.end_what_is_told(&negotiation, now);
            busy |= self.ask_again(&negotiation, now);
            // What was put on the lines is written in the next round.
            if busy {
                continue;
            }
            let alarm = self.alarm().unwrap_or(now + FOREVER);
            sleep.as_mut().reset(alarm.into());
            if sleep.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// When to look again though nothing comes.
    fn alarm(&self) -> Option<Instant> {
        let book = self.book.as_ref().and_then(Book::next_alarm);
        let again = self.again.iter().map(|(at, _)| *at).min();
        [book, self.look_at, self.endings.alarm(), again]
            .into_iter()
            .flatten()
            .min()
    }

    /// Writes what is left: the others hear of what was decided though this rank has gone.
    fn say_the_rest(&mut self, cx: &mut Context<'_>, mut sleep: Pin<&mut Sleep>) -> Poll<()> {
        if !std::mem::replace(&mut self.is_leaving, true) {
            sleep.as_mut().reset(tokio::time::Instant::now() + REST);
        }
        for line in &mut self.lines {
            if line.poll(cx, &mut self.buffer).is_err() {
                *line = Line::default();
            }
        }
        if self.lines.iter().any(Line::is_unsaid) {
            return sleep.as_mut().poll(cx);
        }
        Poll::Ready(())
    }

    fn obey(&mut self, negotiation: &Arc<Negotiation>, command: Command) {
        match command {
            Command::Say(message) => self.say_or_hear(negotiation, message),
            Command::Over {
                before,
                cause,
                error,
            } => {
                negotiation.fail_with(self.endings.take_own(before), &error);
                self.say_or_hear(negotiation, Up::Over { before, cause });
            }
            Command::Revoked(error) => {
                negotiation.fail_with(self.endings.take_own(u64::MAX), &error);
            }
            Command::Lost(cause) => {
                for suspicion in self.endings.take_all() {
                    self.settle(negotiation, suspicion, Some(&cause));
                }
                if let Some(book) = &mut self.book {
                    book.lost(cause);
                } else {
                    // The coordinator hears of that on the link that is there, or on the one that the coordinator asks for.
                    let before = u64::MAX;
                    messages::put(&mut self.lines[0].out, &Up::Over { before, cause });
                }
            }
            Command::Arrived { member, lane } => self.arrived(negotiation, member, lane),
            Command::NotAsked { member, error } => self.not_asked(negotiation, member, &error),
            Command::Requested => {
                // The coordinator may have seen the end of a link that is still there for this rank.
                self.lines[0].is_requested = self.lines[0].lane.is_some();
                self.link(negotiation);
            }
            Command::Connecting => self.lines[0].connecting |= self.me != 0,
            Command::Ended => {
                if let Some(book) = &mut self.book {
                    book.ended();
                }
            }
            Command::SetThreshold(threshold) => {
                if let Some(book) = &mut self.book {
                    book.threshold = threshold;
                }
            }
        }
    }

    /// This rank says something to the coordinator, which it may be itself.
    fn say_or_hear(&mut self, negotiation: &Arc<Negotiation>, message: Up) {
        let now = Instant::now();
        if let Some(book) = &mut self.book {
            book.set_stall_after(now, negotiation.rank_shared.stalls.after());
            return book.hear(now, 0, message);
        }
        let line = &self.lines[0];
        // A coordinator that was never told anything has nothing to take back.
        let is_known = line.lane.is_some() || line.connecting;
        match message {
            Up::Unjoin { .. } | Up::Over { .. } if !is_known => {}
            Up::Ask { key, request } if line.is_overfull() => {
                let reason = "it does not read what it is asked for".to_owned();
                let rank = Rank(0);
                let taken = negotiation.take(key.0, &[key.1], request.serial);
                negotiation.fail(taken, &CollectiveError::Connect { rank, reason });
            }
            message => {
                if let Up::Ask { request, .. } = &message {
                    let at = now + request.limit + SILENT;
                    self.look_at = Some(self.look_at.map_or(at, |look_at| look_at.min(at)));
                }
                self.say(negotiation, &message);
            }
        }
    }

    /// Tells the coordinator something. Makes the link first if there is none.
    fn say(&mut self, negotiation: &Arc<Negotiation>, message: &Up) {
        messages::put(&mut self.lines[0].out, message);
        self.link(negotiation);
    }

    /// Starts making the link to the coordinator, if there is none.
    fn link(&mut self, negotiation: &Arc<Negotiation>) {
        let line = &mut self.lines[0];
        if line.lane.is_some() || line.connecting {
            return;
        }
        line.connecting = true;
        let rank_shared = &negotiation.rank_shared;
        let connecting = rank_shared.connect(negotiation.id, negotiation.members[0]);
        let commands = negotiation.commands.downgrade();
        rank_shared.handle.spawn(async move {
            let lane = connecting.await.map(|lane| (lane, Vec::new()));
            if let Some(commands) = commands.upgrade() {
                drop(commands.send(Command::Arrived { member: 0, lane }));
            }
        });
    }

    fn index(&self, member: u32) -> usize {
        if self.me == 0 { member as usize } else { 0 }
    }

    /// The line to a member.
    fn line(&mut self, member: u32) -> &mut Line {
        let index = self.index(member);
        &mut self.lines[index]
    }

    /// Asks members for new links in place of those that broke. Returns whether there were any.
    fn ask_again(&mut self, negotiation: &Negotiation, now: Instant) -> bool {
        let due: Vec<_> = self.again.extract_if(.., |(at, _)| now >= *at).collect();
        for (_, member) in &due {
            if self.line(*member).lane.is_none() {
                let rank = negotiation.job_rank(*member);
                negotiation.rank_shared.request(negotiation.id, rank);
            }
        }
        !due.is_empty()
    }

    /// A link is there, or can't be made.
    fn arrived(
        &mut self,
        negotiation: &Arc<Negotiation>,
        member: u32,
        lane: Result<(Box<dyn Lane>, Vec<u8>), LaneError>,
    ) {
        let is_looking = std::mem::take(&mut self.is_looking);
        let line = self.line(member);
        line.connecting = false;
        let is_up = line.lane.is_some();
        match lane {
            // A link that has come all the same will do.
            Err(_) if is_up => {}
            Err(error) => {
                let tried = if self.me == 0 { member } else { self.me };
                let tried = negotiation.job_rank(tried);
                let cause = CollectiveError::unlinked(Rank(member), &error, tried);
                if is_looking && error.says_nobody_is_there() {
                    self.miss_the_rest(negotiation, &cause);
                }
                self.suspect(negotiation, member, cause, false);
            }
            Ok((lane, read)) => {
                if is_up {
                    // What was on its way may be lost.
                    let reason = "its link for named operations was replaced while it was in use";
                    self.suspect(negotiation, member, lost(member, reason.to_owned()), false);
                }
                self.is_there(negotiation, member);
                let first = self.first_words(member);
                // The coordinator may not have heard of it, or has forgotten it with the link before.
                let join = self
                    .book
                    .is_none()
                    .then(|| negotiation.lock().joining.open());
                let line = self.line(member);
                line.lane = Some(lane);
                line.since = Some(Instant::now());
                line.out.splice(0..0, first);
                if let Some(join) = join.flatten() {
                    // Behind what waits: the rank has data for what it asked for before it joined.
                    messages::put(&mut line.out, &Up::Join(join));
                }
                line.inbox.push(&read);
            }
        }
    }

    /// What a link begins with.
    fn first_words(&self, member: u32) -> Vec<u8> {
        let mut first = Vec::new();
        match &self.book {
            Some(book) if book.wants_to_know(member) => messages::put(&mut first, &Down::Query),
            Some(_) => {}
            None => {
                let (call, next) = self.next;
                messages::put(&mut first, &Up::Heard { call, next });
            }
        }
        first
    }

    /// Moves what can be moved on a link. Returns whether anything came.
    fn serve(
        &mut self,
        negotiation: &Arc<Negotiation>,
        index: usize,
        cx: &mut Context<'_>,
    ) -> bool {
        let member = if self.me == 0 { index as u32 } else { 0 };
        if self.lines[index].lane.is_none() {
            return false;
        }
        let polled = self.lines[index].poll(cx, &mut self.buffer);
        let mut came = matches!(polled, Ok(true));
        let heard = loop {
            match self.hear(negotiation, member) {
                Ok(true) => came = true,
                Ok(false) if self.me == 0 && self.lines[index].is_overfull() => {
                    break Err("it asks for more and more and reads no answer".to_owned());
                }
                Ok(false) => break Ok(()),
                Err(fault) => break Err(fault),
            }
        };
        match (heard, polled) {
            (Ok(()), Ok(_)) => return came,
            (Ok(()), Err(Ended { reason, is_final })) => {
                let Line {
                    is_requested,
                    has_heard,
                    since,
                    ..
                } = self.lines[index];
                self.suspect(negotiation, member, lost(member, reason), is_final);
                match &self.book {
                    // It may not have heard of that. A link over which nothing came is not made again and again.
                    Some(book) if book.has_decided() && has_heard && !is_final => {
                        let now = Instant::now();
                        let at = since.map_or(now, |since| now.max(since + LIVED));
                        self.again.push((at, member));
                    }
                    None if is_requested => self.link(negotiation),
                    _ => {}
                }
            }
            (Err(fault), _) => {
                self.suspect(negotiation, member, lost(member, fault), false);
                self.is_there(negotiation, member);
            }
        }
        true
    }

    /// Takes the next message of a member. Returns whether there was one.
    ///
    /// Fails if the member says something that it can't mean.
    fn hear(&mut self, negotiation: &Arc<Negotiation>, member: u32) -> Result<bool, String> {
        let index = self.index(member);
        let inbox = &mut self.lines[index].inbox;
        if let Some(book) = &mut self.book {
            let Some(up) = inbox.take()? else {
                return Ok(false);
            };
            check(book, member, &up)?;
            if matches!(up, Up::Heard { .. })
                && std::mem::replace(&mut self.lines[index].has_heard, true)
            {
                return Err("it said twice what it has heard".to_owned());
            }
            book.hear(Instant::now(), member, up);
        } else {
            let Some(down) = inbox.take()? else {
                return Ok(false);
            };
            self.told(negotiation, down)?;
        }
        Ok(true)
    }

    /// A member hears of the coordinator.
    fn told(&mut self, negotiation: &Arc<Negotiation>, message: Down) -> Result<(), String> {
        match message {
            Down::Run { number, .. } | Down::Missed { number, .. } if number > Tag::MOST => {
                return Err(format!("it gave an operation the number {number}"));
            }
            Down::Run {
                call,
                number,
                heard,
                follows,
                names,
            } => {
                self.has_decided((call, number));
                negotiation.run((call, number), names, heard, follows);
            }
            Down::Missed { call, number } => {
                self.has_decided((call, number));
                negotiation.miss((call, number), turn::unheard());
            }
            Down::Fail {
                call,
                heard,
                names,
                cause,
            } => {
                self.decided = Some(Instant::now());
                negotiation.fail(negotiation.take(call, &names, heard), &cause);
            }
            Down::Query => {
                let text = negotiation.rank_shared.present();
                self.say(negotiation, &Up::Doing { text });
            }
            Down::Stalled {
                call,
                names,
                waited,
                missing,
            } => negotiation.report_stall(call, names, waited, missing),
        }
        Ok(())
    }

    /// The coordinator has decided that an operation with this number of the call runs.
    fn has_decided(&mut self, (call, number): (u64, u64)) {
        self.decided = Some(Instant::now());
        self.next = (call, number + 1);
    }

    /// On the coordinator: does and tells what follows from all that came. On the others: gives up what the coordinator does not
    /// answer. Returns whether anything was decided.
    fn decide(&mut self, negotiation: &Arc<Negotiation>, now: Instant) -> bool {
        if self.look_at.is_some_and(|at| now >= at) {
            self.look_at = negotiation.expire(now, self.decided);
        }
        let book = self.book.as_mut();
        let decisions = book.map_or_else(Vec::new, |book| book.decisions(now));
        let any = !decisions.is_empty();
        for decision in decisions {
            self.execute(negotiation, decision);
        }
        any
    }

    fn execute(&mut self, negotiation: &Arc<Negotiation>, decision: Decision) {
        match decision {
            Decision::Run {
                call,
                number,
                heard,
                names,
                followers,
            } => {
                let follows = |member| {
                    let follower = followers.iter().find(|(follower, _)| *follower == member);
                    follower.map(|(_, join)| *join)
                };
                for (member, line) in self.linked() {
                    let run = Down::Run {
                        call,
                        number,
                        heard: heard[member as usize],
                        follows: follows(member),
                        names: names.clone(),
                    };
                    messages::put(&mut line.out, &run);
                }
                negotiation.run((call, number), names, heard[0], follows(0));
            }
            Decision::Fail(failed) => {
                let own = negotiation.take(failed.call, &failed.names, failed.heard[0]);
                ending::tell(&mut self.lines, &failed, &failed.cause);
                self.endings.end_later(Instant::now(), own, failed.cause);
            }
            Decision::Missed {
                member,
                call,
                numbers,
            } => {
                let line = self.line(member);
                // A link that has ended meanwhile begins anew with what the member has heard.
                for number in numbers.filter(|_| line.lane.is_some()) {
                    messages::put(&mut line.out, &Down::Missed { call, number });
                }
            }
            Decision::Query { members } => {
                for member in members {
                    let line = &mut self.lines[member as usize];
                    if line.is_read() {
                        messages::put(&mut line.out, &Down::Query);
                    } else if let (0, Some(book)) = (member, &mut self.book) {
                        let text = negotiation.rank_shared.present();
                        book.hear(Instant::now(), 0, Up::Doing { text });
                    } else if line.lane.is_none() {
                        // It has started nothing with a name, and is asked when its link comes.
                        let rank = negotiation.job_rank(member);
                        negotiation.rank_shared.request(negotiation.id, rank);
                    }
                }
            }
            Decision::Stalled {
                call,
                mut names,
                waited,
                missing,
            } => {
                names.truncate(BATCH);
                let message = Down::Stalled {
                    call,
                    names: names.clone(),
                    waited,
                    missing: missing.clone(),
                };
                for line in self.lines.iter_mut().filter(|line| line.is_read()) {
                    messages::put(&mut line.out, &message);
                }
                negotiation.report_stall(call, names, waited, missing);
            }
        }
    }

    /// The members that have links. The others have asked for nothing.
    fn linked(&mut self) -> impl Iterator<Item = (u32, &mut Line)> {
        (0..)
            .zip(&mut self.lines)
            .filter(|(_, line)| line.lane.is_some())
    }
}

/// Whether a member can mean what it says.
fn check(book: &Book, member: u32, message: &Up) -> Result<(), String> {
    let Up::Ask { key, .. } = message else {
        return Ok(());
    };
    if key.1.len() > messages::NAME {
        return Err(format!("it sent a name of {} bytes", key.1.len()));
    }
    if book.is_greedy(member) {
        return Err("it has asked for more than can be under way".to_owned());
    }
    Ok(())
}
