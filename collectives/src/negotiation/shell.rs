//! The task that moves messages between the links, the coordinator's book and this rank.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Sleep;

use super::book::{Book, Decision, Failed, Request};
use super::ending::{self, Endings, Suspicion, lost};
use super::line::{Ended, Line};
use super::messages::{self, BATCH, Down, Up};
use super::{Command, Negotiation, SILENT, THRESHOLD, YEAR};
use crate::cause::{Cause, cut};
use crate::lane::{Lane, LaneError};
use crate::operation::Tag;
use crate::rank_shared::Member as _;

/// Most bytes that are read at once.
const READ: usize = 16 << 10;

/// Most rounds before other tasks have their turn: a peer that never stops talking holds up nobody.
const MOST_ROUNDS: usize = 64;

/// The end of a link is a suspicion for so long, whether somebody watches the ranks or not: a member that is done may go. A word
/// from the node or the head in this time says which rank is lost.
const PATIENCE: Duration = Duration::from_secs(1);

/// What was decided last is said for so long when the communicator is gone.
const REST: Duration = Duration::from_secs(1);

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
    endings: Endings,
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
            endings: Endings::new(PATIENCE),
            buffer: vec![0; READ],
            is_leaving: false,
        }
    }

    /// Runs until the communicator is gone.
    pub(super) async fn run(mut self) {
        let mut sleep = pin!(tokio::time::sleep(YEAR));
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
            // What was put on the lines is written in the next round.
            if busy {
                continue;
            }
            let alarm = self.alarm().unwrap_or(now + YEAR);
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
        [book, self.look_at, self.endings.alarm()]
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
        let now = Instant::now();
        match command {
            Command::Arrived { member, lane } => self.arrived(negotiation, member, lane),
            Command::Revoked(error) => {
                for own in self.endings.take_own() {
                    negotiation.fail_with(own, &error);
                }
            }
            Command::Lost(cause) => {
                for suspicion in self.endings.take_all() {
                    self.settle(negotiation, suspicion, Some(&cause));
                }
                if let Some(book) = &mut self.book {
                    book.lost(cause);
                }
            }
            command => match &mut self.book {
                Some(book) => match command {
                    Command::Ask { key, request } => {
                        book.set_stall_after(now, negotiation.rank_shared.stalls.after());
                        book.ask(now, 0, key, request);
                    }
                    Command::Join(join) => book.join(0, join),
                    Command::Unjoin { serial, all } => book.unjoin(0, serial, all),
                    Command::Over { before, cause } => book.over(before, cause),
                    Command::Ended => book.ended(),
                    Command::SetThreshold(threshold) => book.threshold = threshold,
                    _ => {}
                },
                None => self.pass_on(negotiation, now, command),
            },
        }
    }

    /// Tells the coordinator.
    fn pass_on(&mut self, negotiation: &Arc<Negotiation>, now: Instant, command: Command) {
        let line = &mut self.lines[0];
        // A coordinator that was never told anything has nothing to take back.
        let is_known = line.lane.is_some() || line.connecting;
        let message = match command {
            Command::Ask { key, request } => {
                if line.is_overfull() {
                    let reason = "it does not read what it is asked for".to_owned();
                    let rank = Rank(0);
                    let unread = Cause::Connect { rank, reason };
                    let taken = negotiation.take(key.0, &[key.1], request.serial);
                    return negotiation.fail(taken, &unread);
                }
                let at = now + request.limit + SILENT;
                self.look_at = Some(self.look_at.map_or(at, |look_at| look_at.min(at)));
                Up::Ask {
                    call: key.0,
                    name: key.1,
                    operation: messages::encode_operation(request.operation),
                    limit_ms: request.limit.as_millis() as u64,
                    serial: request.serial,
                    epoch: request.epoch,
                }
            }
            Command::Join(join) => Up::Join(join),
            Command::Unjoin { serial, all } if is_known => Up::Unjoin { serial, all },
            Command::Over { before, cause } if is_known => Up::Over {
                before,
                cause: cause.encode(),
            },
            Command::Requested => return self.link(negotiation),
            Command::Connecting => {
                line.connecting = true;
                return;
            }
            _ => return,
        };
        self.say(negotiation, &message);
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

    /// The line to a member.
    fn line(&mut self, member: u32) -> &mut Line {
        let index = if self.me == 0 { member as usize } else { 0 };
        &mut self.lines[index]
    }

    /// A link is there, or can't be made.
    fn arrived(
        &mut self,
        negotiation: &Arc<Negotiation>,
        member: u32,
        lane: Result<(Box<dyn Lane>, Vec<u8>), LaneError>,
    ) {
        let line = self.line(member);
        line.connecting = false;
        let is_up = line.lane.is_some();
        match lane {
            // A link that has come all the same will do.
            Err(_) if is_up => {}
            Err(error) => {
                let numbers = |member| (Rank(member), Rank(negotiation.job_rank(member)));
                let own = Rank(negotiation.job_rank(self.me));
                let cause = Cause::unlinked(&error, own, numbers(member), self.me != 0);
                self.suspect(negotiation, member, cause, false);
            }
            Ok((lane, read)) => {
                if is_up {
                    // What was on its way may be lost.
                    let reason = "its link for named operations was replaced while it was in use";
                    self.suspect(negotiation, member, lost(member, reason.to_owned()), false);
                }
                self.is_there(negotiation, member);
                let line = self.line(member);
                line.lane = Some(lane);
                line.inbox.push(&read);
                let book = self.book.as_ref();
                if book.is_some_and(|book| book.wants_to_know(member)) {
                    messages::put(&mut self.line(member).out, &Down::Query);
                } else if book.is_none()
                    && let Some(join) = negotiation.lock().joining.open()
                {
                    // The coordinator may not have heard that, or has forgotten it with the link before.
                    messages::put(&mut self.lines[0].out, &Up::Join(join));
                }
            }
        }
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
                self.suspect(negotiation, member, lost(member, reason), is_final);
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
        let is_coordinator = self.me == 0;
        let inbox = &mut self.line(member).inbox;
        if is_coordinator {
            match inbox.take()? {
                Some(up) => self.heard(member, up).map(|()| true),
                None => Ok(false),
            }
        } else {
            match inbox.take()? {
                Some(down) => self.told(negotiation, down).map(|()| true),
                None => Ok(false),
            }
        }
    }

    /// The coordinator hears of a member.
    fn heard(&mut self, member: u32, message: Up) -> Result<(), String> {
        let Some(book) = &mut self.book else {
            return Ok(());
        };
        let now = Instant::now();
        match message {
            Up::Ask {
                call,
                name,
                operation,
                limit_ms,
                serial,
                epoch,
            } => {
                if name.len() > messages::NAME {
                    return Err(format!("it sent a name of {} bytes", name.len()));
                }
                if book.is_greedy(member) {
                    return Err("it has asked for more than can be under way".to_owned());
                }
                let Some(operation) = messages::decode_operation(&operation) else {
                    return Err(format!(
                        "its request by the name of `{name}` is not understood"
                    ));
                };
                let request = Request {
                    operation,
                    limit: Duration::from_millis(limit_ms).min(YEAR),
                    serial,
                    epoch,
                };
                book.ask(now, member, (call, name), request);
            }
            Up::Join(join) => book.join(member, join),
            Up::Unjoin { serial, all } => book.unjoin(member, serial, all),
            Up::Over { before, cause } => {
                book.over(before, messages::decode_cause(&cause, member));
            }
            Up::Doing { text } => book.doing(now, member, cut(&text).to_owned()),
        }
        Ok(())
    }

    /// A member hears of the coordinator.
    fn told(&mut self, negotiation: &Arc<Negotiation>, message: Down) -> Result<(), String> {
        match message {
            Down::Run { number, .. } if number > Tag::MOST => {
                return Err(format!("it gave an operation the number {number}"));
            }
            Down::Run {
                call,
                number,
                heard,
                follows,
                names,
            } => {
                self.decided = Some(Instant::now());
                negotiation.run((call, number), names, heard, follows);
            }
            Down::Fail {
                call,
                heard,
                names,
                cause,
            } => {
                self.decided = Some(Instant::now());
                let cause = messages::decode_cause(&cause, 0);
                negotiation.fail(negotiation.take(call, &names, heard), &cause);
            }
            Down::Query => {
                let text = negotiation.rank_shared.present();
                self.say(negotiation, &Up::Doing { text });
            }
            Down::Stalled {
                call,
                names,
                waited_ms,
                missing,
            } => {
                let waited = Duration::from_millis(waited_ms);
                negotiation.report_stall(call, names, waited, missing);
            }
        }
        Ok(())
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
            Decision::Query { members } => {
                for member in members {
                    let line = &mut self.lines[member as usize];
                    if line.is_read() {
                        messages::put(&mut line.out, &Down::Query);
                    } else if let (0, Some(book)) = (member, &mut self.book) {
                        book.doing(Instant::now(), 0, negotiation.rank_shared.present());
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
                    waited_ms: waited.as_millis() as u64,
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

    /// The link of a member has ended, or can't be made. What waits now fails as soon as it is clear which rank is lost.
    fn suspect(
        &mut self,
        negotiation: &Arc<Negotiation>,
        member: u32,
        cause: Cause,
        is_final: bool,
    ) {
        *self.line(member) = Line::default();
        let (failed, own) = match &mut self.book {
            Some(book) => {
                book.unlinked(member);
                let failed = book.fail_all(u64::MAX, &cause);
                let of_one =
                    |failed: &Failed| negotiation.take(failed.call, &failed.names, failed.heard[0]);
                let own = failed.iter().flat_map(of_one).collect();
                (failed, own)
            }
            None => (Vec::new(), negotiation.take_before(u64::MAX)),
        };
        let suspicion = Suspicion {
            member,
            cause,
            is_final,
            failed,
            own,
        };
        self.endings.suspect(Instant::now(), suspicion);
    }

    /// A suspicion ends: with the word on who is lost, or without one.
    fn settle(
        &mut self,
        negotiation: &Arc<Negotiation>,
        suspicion: Suspicion,
        word: Option<&Cause>,
    ) {
        let cause = word.unwrap_or(&suspicion.cause);
        if let (true, None, Cause::Lost { reason, .. }) = (suspicion.is_final, word, cause) {
            // Nothing with a name works any more. An operation that was decided may wait for ranks that never heard of it.
            if let Some(book) = &mut self.book {
                book.lost(cause.clone());
            }
            // One that has done its part may be gone. No link comes from the member any more: that ends what needs the link.
            let rank = negotiation.job_rank(suspicion.member);
            let reason = reason.clone();
            let lane = Err(LaneError::Ended { reason });
            if let Err(error) = Arc::clone(&negotiation.data).lane(rank, lane, true) {
                tracing::debug!(%error, "a member is in no group for data");
            }
        }
        for failed in &suspicion.failed {
            ending::tell(&mut self.lines, failed, cause);
        }
        let cause = cause.clone();
        self.endings.end_later(Instant::now(), suspicion.own, cause);
    }

    /// The member is there: suspicions of it end without a word.
    fn is_there(&mut self, negotiation: &Arc<Negotiation>, member: u32) {
        for mut suspicion in self.endings.take_those_of(member) {
            suspicion.is_final = false;
            self.settle(negotiation, suspicion, None);
        }
    }

    /// Ends suspicions whose time is over, and operations of which the others have been told. Returns whether there were any.
    fn end_what_is_told(&mut self, negotiation: &Arc<Negotiation>, now: Instant) -> bool {
        let old = self.endings.take_old(now);
        let is_said = !self.lines.iter().any(Line::is_unsaid);
        let told = self.endings.take_told(now, is_said);
        let any = !old.is_empty() || !told.is_empty();
        for (own, cause) in told {
            negotiation.fail(own, &cause);
        }
        for suspicion in old {
            self.settle(negotiation, suspicion, None);
        }
        any
    }
}
