//! The links over which names are negotiated, when they are made and when they come.

use std::sync::Arc;

use kolo_transport::ids::Rank;

use super::hub::Hub;
use super::loss::Loss;
use super::wire::{self, Down, Up};
use super::{Command, Names};
use crate::cause::Cause;
use crate::lane::{Lane, LaneError};

impl Hub {
    /// Starts making the link to rank 0, if there is none.
    pub(super) fn link(&mut self, names: &Arc<Names>) {
        let line = &mut self.lines[0];
        if line.lane.is_some() || line.connecting {
            return;
        }
        line.connecting = true;
        let connecting = names.family.connect(names.id, names.members[0]);
        let commands = names.commands.downgrade();
        names.family.handle.spawn(async move {
            let lane = connecting.await.map(|lane| (lane, Vec::new()));
            if let Some(commands) = commands.upgrade() {
                drop(commands.send(Command::Arrived { rank: 0, lane }));
            }
        });
    }

    pub(super) fn arrived(
        &mut self,
        names: &Arc<Names>,
        rank: u32,
        lane: Result<(Box<dyn Lane>, Vec<u8>), LaneError>,
    ) {
        if lane.is_ok() {
            self.judge_before_it_is_back(names, rank);
            self.said = None;
        }
        let index = if self.me == 0 { rank as usize } else { 0 };
        let line = &mut self.lines[index];
        line.connecting = false;
        let is_asked = std::mem::take(&mut line.is_asked);
        match lane {
            Ok((lane, read)) => {
                names.family.meet(names.members[rank as usize]);
                // It is there again.
                self.ended_last.take_if(|words| words.is_of(rank));
                line.last_words = None;
                line.inbox.clear();
                line.inbox.push(&read);
                let old = line.lane.replace(lane);
                if old.is_some() {
                    // What was on its way may be lost.
                    (line.out, line.sent) = (Vec::new(), 0);
                }
                let Some(book) = &mut self.book else {
                    // Rank 0 may never have heard that, or has forgotten it with the link before.
                    if let Some(join) = names.lock().joining.open() {
                        wire::put(&mut line.out, &Up::Join(join));
                    }
                    return;
                };
                if old.is_none() {
                    if book.wants_to_know(rank) {
                        wire::put(&mut line.out, &Down::Query);
                    }
                } else {
                    book.unlinked(rank);
                    let reason = "its link for names was replaced while it was in use".to_owned();
                    let rank = Rank(rank);
                    let for_good = false;
                    book.lost(
                        Cause::Lost {
                            rank,
                            reason,
                            for_good,
                        },
                        for_good,
                    );
                }
            }
            // One that has come all the same will do.
            Err(_) if line.lane.is_some() => {}
            // What was started since has not had its time.
            Err(_) if is_asked => {
                if !line.out.is_empty() {
                    self.link(names);
                }
            }
            Err(error) => {
                let words = std::mem::take(line).last_words;
                let loss = Loss {
                    rank,
                    reason: error.to_string(),
                    for_good: false,
                };
                if let Some(first) = self.first_before(names, &loss, words.as_ref()) {
                    return self.fail_what_waits(names, &first);
                }
                let numbers = |rank: u32| (Rank(rank), Rank(names.members[rank as usize]));
                let ((_, own), peer) = (numbers(self.me), numbers(rank));
                let cause = Cause::unlinked(&error, own, peer, self.me != 0);
                // If it is not this rank's own fault.
                if cause.absent() == Some(Rank(rank)) {
                    self.farewell.say_elsewhere(names.tell_elsewhere(&loss));
                }
                if let Some(book) = &mut self.book {
                    book.unlinked(rank);
                    book.lost(cause, false);
                } else {
                    self.fail_waiting(names, names.unlinked(cause));
                }
            }
        }
    }
}
