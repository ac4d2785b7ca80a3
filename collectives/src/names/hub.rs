//! The links over which named operations are negotiated: from every rank to rank 0.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Sleep;

use super::asking::Asking;
use super::book::{Book, Request, Verdict};
use super::farewell::{Farewell, Then};
use super::line::Line;
use super::loss::{Loss, Postponed, Words};
use super::wire::{self, BATCH, Down, Up};
use super::{Command, Names, THRESHOLD, until};
use crate::cause::{Cause, cut};
use crate::operation::Tag;
use kolo_transport::ids::Rank;

/// Most bytes that are read at once.
const READ: usize = 16 << 10;

/// Most rounds before other tasks have their turn: a rank that never stops talking holds up nobody.
const MOST_ROUNDS: usize = 64;

/// So long after the deadline of an operation the others wait for rank 0 to say so.
pub(super) const SILENT: Duration = Duration::from_secs(2);

/// So long what was decided last is being said when the names are gone.
const REST: Duration = Duration::from_secs(1);

pub(super) struct Hub {
    names: Weak<Names>,
    todo: UnboundedReceiver<Command>,
    pub(super) me: u32,
    /// On rank 0 one for each rank, on the others one.
    pub(super) lines: Vec<Line>,
    /// Only on rank 0.
    pub(super) book: Option<Book>,
    /// On the others: when to look whether rank 0 is silent for too long.
    look_at: Option<Instant>,
    /// When rank 0 last had names run or gave them up.
    decided: Option<Instant>,
    buffer: Vec<u8>,
    asking: Asking,
    /// Because of which rank the last link ended.
    pub(super) ended_last: Option<Words>,
    pub(super) farewell: Farewell,
    /// Because of whom no name works any more.
    pub(super) declared: Option<Loss>,
    /// Of which rank it was said last that it is lost, and nothing was asked for since.
    pub(super) said: Option<u32>,
    /// Lines that have ended while it is not clear who began.
    pub(super) postponed: Vec<Postponed>,
    /// The names are gone, and what was decided last is still being said.
    is_leaving: bool,
}

impl Hub {
    pub(super) fn new(names: &Arc<Names>, todo: UnboundedReceiver<Command>) -> Self {
        let book =
            (names.me == 0).then(|| Book::new(names.world, THRESHOLD, names.family.stalls.after()));
        let lines = if names.me == 0 { names.world } else { 1 };
        Self {
            names: Arc::downgrade(names),
            todo,
            me: names.me,
            lines: (0..lines).map(|_| Line::default()).collect(),
            book,
            look_at: None,
            decided: None,
            buffer: vec![0; READ],
            asking: Asking::default(),
            ended_last: None,
            farewell: Farewell::default(),
            declared: None,
            said: None,
            postponed: Vec::new(),
            is_leaving: false,
        }
    }

    /// Runs until the names are gone.
    pub(super) async fn run(mut self) {
        let mut sleep = pin!(tokio::time::sleep_until(until(None, Instant::now()).into()));
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
            let Some(names) = self.names.upgrade().filter(|_| open) else {
                return self.say_the_rest(cx, sleep);
            };
            let mut busy = !commands.is_empty();
            for command in commands {
                self.obey(&names, command);
            }
            for index in 0..self.lines.len() {
                busy |= self.serve(&names, index, cx);
            }
            let postponed = self.judge_postponed(&names);
            let alarm = self.decide(&names);
            let farewell = self.farewell.see_off(&names, &mut self.lines, cx);
            // What was decided is written at once.
            if busy {
                self.asking.stir(Instant::now());
                continue;
            }
            let looks = self
                .look_who_is_gone(&names)
                .into_iter()
                .chain(farewell)
                .chain(postponed);
            let alarm = alarm.into_iter().chain(looks).min();
            let at = tokio::time::Instant::from_std(until(alarm, Instant::now()));
            if alarm.is_some() || sleep.deadline() < at {
                sleep.as_mut().reset(at);
            }
            if sleep.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Has it asked about those that are waited for and of whom nothing is heard. Returns when to look again.
    fn look_who_is_gone(&mut self, names: &Arc<Names>) -> Option<Instant> {
        if !self.asking.is_due(Instant::now()) {
            return self.asking.at();
        }
        let is_silent = |rank: &u32| {
            let lane = self
                .lines
                .get(*rank as usize)
                .and_then(|line| line.lane.as_ref());
            *rank != self.me && lane.is_none()
        };
        let waited: Vec<u32> = match &self.book {
            Some(book) => book.waits_for().into_iter().filter(is_silent).collect(),
            None if names.is_waiting() => std::iter::once(0).filter(is_silent).collect(),
            None => Vec::new(),
        };
        self.asking.ask(names, waited);
        None
    }

    /// Whoever has heard of a failure may go at once. The others are to hear of it, too.
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

    fn obey(&mut self, names: &Arc<Names>, command: Command) {
        let now = Instant::now();
        match (command, &mut self.book) {
            (Command::Arrived { rank, lane }, _) => self.arrived(names, rank, lane),
            (Command::Requested, None) => {
                let line = &mut self.lines[0];
                line.is_asked |= line.lane.is_none() && !line.connecting;
                self.link(names);
            }
            (Command::Connecting, None) => {
                (self.lines[0].connecting, self.lines[0].is_asked) = (true, true);
            }
            // It was given up meanwhile: others would find that it is there, and wait for it in vain.
            (Command::Ask { key, request }, _) if !names.still_waits(&key, &request) => {}
            (Command::Ask { key, request }, Some(book)) => {
                self.said = None;
                book.set_stall_after(now, names.family.stalls.after());
                book.ask(now, 0, key, request);
            }
            (Command::Join(join), Some(book)) => book.join(0, join),
            (Command::Unjoin { serial, all }, Some(book)) => book.unjoin(0, serial, all),
            (Command::Over { before, cause }, Some(book)) => book.over(before, cause),
            (Command::Lost(loss), _) => self.declare_lost(names, loss),
            (Command::Gone(loss), _) => self.found_gone(names, &loss),
            (Command::LostInTurn { loss, told }, _) => {
                self.farewell.add(Then::Tell(told));
                if loss.for_good {
                    self.declare_lost(names, loss);
                } else if self.said != Some(loss.rank) {
                    self.said = Some(loss.rank);
                    self.say_why(names, &loss);
                }
            }
            (Command::Ended, Some(book)) => book.ended(),
            (Command::Settings { threshold }, Some(book)) => book.threshold = threshold,
            (Command::Ask { key, request }, None) => {
                // What is under way now has begun before now.
                let at = now + request.limit + SILENT;
                self.look_at = Some(self.look_at.map_or(at, |look_at| look_at.min(at)));
                let ask = Up::Ask {
                    call: key.0,
                    name: key.1.clone(),
                    operation: wire::encode_operation(request.operation),
                    limit_ms: request.limit.as_millis().min(u128::from(u64::MAX)) as u64,
                    serial: request.serial,
                    epoch: request.epoch,
                };
                if self.lines[0].is_overfull() {
                    let unread = Cause::Connect {
                        rank: Rank(0),
                        reason: "it does not read what it is asked for".to_owned(),
                    };
                    names.fail(key.0, &[key.1], request.serial, &unread);
                    return;
                }
                self.said = None;
                self.say(names, &ask);
            }
            (Command::Join(join), None) => self.say(names, &Up::Join(join)),
            (Command::Unjoin { serial, all }, None) => {
                // If it is not linked rank 0 counts on no join of this rank.
                if self.lines[0].lane.is_some() || self.lines[0].connecting {
                    self.say(names, &Up::Unjoin { serial, all });
                }
            }
            (Command::Over { before, cause }, None) => {
                let cause = cause.encode();
                // If nothing was said to rank 0 yet, there is nothing to take back.
                if self.lines[0].lane.is_some() || self.lines[0].connecting {
                    self.say(names, &Up::Over { before, cause });
                }
            }
            (Command::Ended | Command::Settings { .. }, None)
            | (Command::Requested | Command::Connecting, Some(_)) => {}
        }
    }

    /// Tells rank 0 something; makes the link first if there is none.
    pub(super) fn say(&mut self, names: &Arc<Names>, message: &Up) {
        wire::put(&mut self.lines[0].out, message);
        self.link(names);
    }

    /// Moves what can be moved on a link. Returns whether messages came.
    fn serve(&mut self, names: &Arc<Names>, index: usize, cx: &mut Context<'_>) -> bool {
        let rank = if self.me == 0 { index as u32 } else { 0 };
        let line = &mut self.lines[index];
        if line.lane.is_none() {
            return false;
        }
        let polled = line.poll(cx, &mut self.buffer);
        let mut came = matches!(polled, Ok(true));
        let (ended, mut fault) = (polled.err(), None);
        loop {
            let inbox = &mut self.lines[index].inbox;
            let taken = if self.me == 0 {
                inbox.take().and_then(|up| match up {
                    Some(up) => self.heard(names, rank, up).map(Some),
                    None => Ok(None),
                })
            } else {
                inbox.take().and_then(|down| match down {
                    Some(down) => self.told(names, down).map(Some),
                    None => Ok(None),
                })
            };
            match taken {
                Ok(Some(())) => came = true,
                Ok(None) => break,
                Err(reason) => {
                    fault = Some(reason);
                    break;
                }
            }
        }
        if fault.is_none() && self.me == 0 && self.lines[index].is_overfull() {
            fault = Some("it asks for more and more and reads no answer".to_owned());
        }
        if fault.is_none() && ended.is_none() {
            return came;
        }
        let line = std::mem::take(&mut self.lines[index]);
        if let Some(book) = &mut self.book {
            book.unlinked(rank);
        }
        let loss = |reason, for_good| Loss {
            rank,
            reason,
            for_good,
        };
        match (fault, ended) {
            // Its own, whatever else has ended.
            (Some(fault), _) => self.fail_what_waits(names, &loss(fault, false)),
            (None, Some((reason, for_good))) => {
                self.postpone(loss(reason, for_good), line.last_words);
                // Nobody waits for a rank that has joined, if that is known.
                if self.book.is_none() && !for_good && names.lock().joining.links_again() {
                    self.link(names);
                }
            }
            (None, None) => {}
        }
        true
    }

    /// Rank 0 hears of a rank. Fails if it says what it can't mean.
    fn heard(&mut self, names: &Arc<Names>, rank: u32, message: Up) -> Result<(), String> {
        let Some(book) = &mut self.book else {
            return Ok(());
        };
        match message {
            Up::Ask {
                call,
                name,
                operation,
                limit_ms,
                serial,
                epoch,
            } => {
                if name.len() > wire::NAME {
                    return Err(format!("it sent a name of {} bytes", name.len()));
                }
                if book.is_greedy(rank) {
                    return Err("it has asked for more than can be under way".to_owned());
                }
                let Some(operation) = wire::decode_operation(&operation) else {
                    return Err(format!(
                        "what it asks for by the name of `{name}` is not understood"
                    ));
                };
                // Whatever it has lost, it goes on.
                self.lines[rank as usize].last_words = None;
                let request = Request {
                    operation,
                    limit: Duration::from_millis(limit_ms).min(super::YEAR),
                    serial,
                    epoch,
                };
                book.ask(Instant::now(), rank, (call, name), request);
            }
            Up::Join(join) => book.join(rank, join),
            Up::Unjoin { serial, all } => book.unjoin(rank, serial, all),
            Up::Over { before, cause } => {
                let cause = wire::decode_cause(&cause, rank);
                match Loss::of(&cause, self.lines.len() as u32) {
                    Some(loss) if before == 0 && loss.for_good && loss.rank != 0 => {
                        // Once: whoever says more of them makes no work for the others.
                        if !book.has_lost() {
                            self.declare_lost(names, loss);
                        }
                    }
                    Some(loss) if before == 0 => {
                        self.lines[rank as usize].last_words = Some(Words::now(loss));
                    }
                    _ => book.over(before, cause),
                }
            }
            Up::Doing { text } => book.doing(Instant::now(), rank, cut(&text).to_owned()),
        }
        Ok(())
    }

    /// A rank hears of rank 0. Fails if that says what it can't mean.
    fn told(&mut self, names: &Arc<Names>, message: Down) -> Result<(), String> {
        match message {
            Down::Run { number, .. } if number > Tag::MOST => {
                return Err(format!("it gave an operation the number {number}"));
            }
            Down::Run {
                call,
                number,
                heard,
                follows,
                names: which,
            } => {
                self.decided = Some(Instant::now());
                self.lines[0].last_words = None;
                names.run((call, number), which, heard, follows);
            }
            Down::Fail {
                call,
                heard,
                names: which,
                cause,
            } => {
                self.decided = Some(Instant::now());
                let cause = wire::decode_cause(&cause, 0);
                if let Some(loss) = Loss::of(&cause, names.world) {
                    self.lines[0].last_words = Some(Words::now(loss));
                }
                names.fail(call, &which, heard, &cause);
            }
            Down::Query => {
                let text = names.family.present();
                self.say(names, &Up::Doing { text });
            }
            Down::Stalled {
                call,
                names: which,
                waited_ms,
                missing,
            } => names.stalled(call, which, Duration::from_millis(waited_ms), missing),
        }
        Ok(())
    }

    /// On rank 0: does and tells what follows from all that came. On the others: gives up what rank 0 does not answer.
    /// Returns when to look again.
    fn decide(&mut self, names: &Arc<Names>) -> Option<Instant> {
        let now = Instant::now();
        let Some(book) = &mut self.book else {
            if self.look_at.is_some_and(|at| now >= at) {
                self.look_at = names.expire(now, self.decided);
            }
            return self.look_at;
        };
        let verdicts = book.verdicts(now);
        let any = !verdicts.is_empty();
        for verdict in verdicts {
            self.execute(names, verdict);
        }
        // What was put on the links is written when they are polled again, which is now.
        if any {
            return Some(now);
        }
        self.book.as_ref()?.next_alarm()
    }

    fn execute(&mut self, names: &Arc<Names>, verdict: Verdict) {
        match verdict {
            Verdict::Run {
                call,
                number,
                heard,
                names: which,
                followers,
            } => {
                let follows = |rank| {
                    let follower = followers.iter().find(|(follower, _)| *follower == rank);
                    follower.map(|(_, join)| *join)
                };
                let to_all = |_| true;
                self.say_each(to_all, |rank| Down::Run {
                    call,
                    number,
                    heard: heard[rank as usize],
                    follows: follows(rank),
                    names: which.clone(),
                });
                names.run((call, number), which, heard[0], follows(0));
            }
            Verdict::Fail {
                call,
                heard,
                names: which,
                cause,
                asked,
            } => {
                let then = Then::Fail {
                    call,
                    names: names.take(call, &which, heard[0]),
                    cause: cause.clone(),
                };
                self.farewell.add(then);
                for some in which.chunks(BATCH) {
                    // Who reads nothing would have more and more to read of what the others do.
                    let has_asked = |rank| asked[rank as usize];
                    self.say_each(has_asked, |rank| Down::Fail {
                        call,
                        heard: heard[rank as usize],
                        names: some.to_vec(),
                        cause: cause.encode(),
                    });
                }
            }
            Verdict::Query { ranks } => {
                for rank in ranks {
                    if rank == 0 {
                        let text = names.family.present();
                        if let Some(book) = &mut self.book {
                            book.doing(Instant::now(), 0, text);
                        }
                    } else if self.lines[rank as usize].lane.is_some() {
                        if !self.lines[rank as usize].is_read() {
                            continue;
                        }
                        wire::put(&mut self.lines[rank as usize].out, &Down::Query);
                    } else {
                        // It has started nothing with a name, and is asked when its link comes.
                        names.family.request(names.id, names.members[rank as usize]);
                    }
                }
            }
            Verdict::Stalled {
                call,
                names: mut which,
                waited,
                missing,
            } => {
                which.truncate(BATCH);
                let message = Down::Stalled {
                    call,
                    names: which.clone(),
                    waited_ms: waited.as_millis() as u64,
                    missing: missing.clone(),
                };
                for line in self.lines.iter_mut().filter(|line| line.is_read()) {
                    wire::put(&mut line.out, &message);
                }
                names.stalled(call, which, waited, missing);
            }
        }
    }

    /// Tells all ranks that are linked; those that are not have asked for nothing.
    pub(super) fn say_all(&mut self, message: &Down) {
        for line in &mut self.lines {
            if line.lane.is_some() {
                wire::put(&mut line.out, message);
            }
        }
    }

    /// As [`Hub::say_all`] to some, to each its own.
    fn say_each(&mut self, whom: impl Fn(u32) -> bool, message: impl Fn(u32) -> Down) {
        for (rank, line) in (0..).zip(&mut self.lines) {
            if line.lane.is_some() && whom(rank) {
                wire::put(&mut line.out, &message(rank));
            }
        }
    }
}
