//! What goes over the links: frames out of the working buffer and into it, and what a frame that comes is for.

use std::task::{Context, Poll};

use kolo_transport::ids::{Generation, Rank};

use super::engine::{Engine, next_transfer};
use super::place::written;
use super::{Driver, Mode};
use crate::cause::Cause;
use crate::error::CollectiveError;
use crate::header::{Data, Header, SENDER, Share};
use crate::link::{Inbound, Stop};
use crate::operation::{Operation, Tag};
use crate::reduce;
use crate::schedule::{Action, Algorithm};
use crate::verdict::Event;

/// Most things that are read from one link in a row: a peer that never stops sending holds up neither the other links
/// nor the deadline.
const MOST_READS: usize = 1024;

/// What to do with a frame whose header has come.
enum Sorted {
    Wait,
    Discard,
    Text,
    Payload {
        header: Data,
        action: usize,
    },
    /// It is about shared memory.
    Share(Share),
}

impl Driver<'_> {
    pub(super) fn write(&mut self, peer: u32, cx: &mut Context<'_>) {
        let size = self.request.element_size();
        let Engine {
            links,
            work,
            schedule,
            progress,
            generation,
            ..
        } = &mut *self.engine;
        let work = match &self.in_place {
            None => work.bytes(),
            Some(place) => place.bytes(),
        };
        let link = &mut links[peer as usize];
        let step = schedule.step(self.step);
        while link.write_error.is_none() {
            let send = next_transfer(step, progress, peer, true)
                .map(|index| (index, progress[index].segment(step[index], size)));
            if let Some((index, segment)) = &send
                && !link.is_sending()
            {
                let header = Header::Data(Data {
                    generation: *generation,
                    tag: self.tag,
                    operation: self.request,
                    step: self.step as u32,
                    offset: progress[*index].bytes as u64,
                    length: segment.len as u32,
                });
                link.send(&header, segment.start..segment.end());
            }
            match link.poll_write(cx, work) {
                Poll::Pending | Poll::Ready(Ok(false)) => return,
                Poll::Ready(Ok(true)) => {
                    if let Some((index, segment)) = send {
                        progress[index] = progress[index].after(step[index], size, segment.len);
                    }
                }
                // It may have said why before: reading goes on until it ends.
                Poll::Ready(Err(error)) => link.write_error = Some(error.to_string()),
            }
        }
    }

    pub(super) fn read(&mut self, peer: u32, cx: &mut Context<'_>) -> Result<(), CollectiveError> {
        for _ in 0..MOST_READS {
            let link = &mut self.engine.links[peer as usize];
            let Some(inbound) = link.inbound.take() else {
                return Ok(());
            };
            let (next, polled) = match inbound {
                Inbound::Header => match link.poll_header(cx) {
                    Poll::Ready(Ok(header)) => (Inbound::Held(header), Poll::Ready(Ok(()))),
                    other => (Inbound::Header, other.map_ok(|_| ())),
                },
                Inbound::Held(header) => match self.sort(peer, header) {
                    Ok(Sorted::Wait) => (Inbound::Held(header), Poll::Pending),
                    Ok(Sorted::Discard) => (Inbound::Discard(header.length()), Poll::Ready(Ok(()))),
                    Ok(Sorted::Share(share)) => {
                        self.engine.links[peer as usize].inbound = Some(Inbound::Header);
                        self.shared(peer, share);
                        continue;
                    }
                    Ok(Sorted::Text) => {
                        let text = Vec::with_capacity(header.length());
                        (Inbound::Text { header, text }, Poll::Ready(Ok(())))
                    }
                    Ok(Sorted::Payload { header, action }) => {
                        if self.reduces(action) {
                            let stage = &mut self.engine.links[peer as usize].stage;
                            stage.reserve(header.length as usize);
                        }
                        let got = 0;
                        (
                            Inbound::Payload {
                                header,
                                action,
                                got,
                            },
                            Poll::Ready(Ok(())),
                        )
                    }
                    Err(error) => {
                        // The next operation drops its payload.
                        let link = &mut self.engine.links[peer as usize];
                        if link.is_up() {
                            link.inbound = Some(Inbound::Held(header));
                        }
                        return Err(error);
                    }
                },
                Inbound::Payload {
                    header,
                    action,
                    got,
                } if got == header.length as usize => {
                    self.segment_done(peer, header, action);
                    (Inbound::Header, Poll::Ready(Ok(())))
                }
                Inbound::Payload {
                    header,
                    action,
                    got,
                } => {
                    let polled = self.poll_segment(peer, cx, header, action, got);
                    let count = match &polled {
                        Poll::Ready(Ok(count)) => *count,
                        _ => 0,
                    };
                    let got = got + count;
                    (
                        Inbound::Payload {
                            header,
                            action,
                            got,
                        },
                        polled.map_ok(|_| ()),
                    )
                }
                Inbound::Text { header, text } if text.len() == header.length() => {
                    link.inbound = Some(Inbound::Header);
                    self.told(peer, header, &text)?;
                    continue;
                }
                Inbound::Text { header, mut text } => {
                    let mut piece = [0; 512];
                    let most = piece.len().min(header.length() - text.len());
                    let polled = link.poll_payload(cx, &mut piece[..most]).map_ok(|count| {
                        text.extend_from_slice(&piece[..count]);
                    });
                    (Inbound::Text { header, text }, polled)
                }
                Inbound::Discard(0) => (Inbound::Header, Poll::Ready(Ok(()))),
                Inbound::Discard(left) => {
                    let polled = link.poll_discard(cx, left);
                    let count = match &polled {
                        Poll::Ready(Ok(count)) => *count,
                        _ => 0,
                    };
                    (Inbound::Discard(left - count), polled.map_ok(|_| ()))
                }
            };
            self.engine.links[peer as usize].inbound = Some(next);
            match polled {
                Poll::Ready(Ok(())) => {}
                Poll::Pending => return Ok(()),
                Poll::Ready(Err(stop)) => return self.stopped(peer, stop),
            }
        }
        // There may be more. The other links and the clock have their turn first.
        cx.waker().wake_by_ref();
        Ok(())
    }

    fn reduces(&self, action: usize) -> bool {
        matches!(
            self.engine.schedule.step(self.step)[action],
            Action::ReceiveReduce { .. }
        )
    }

    fn poll_segment(
        &mut self,
        peer: u32,
        cx: &mut Context<'_>,
        header: Data,
        action: usize,
        got: usize,
    ) -> Poll<Result<usize, Stop>> {
        let length = header.length as usize;
        if self.reduces(action) {
            return self.engine.links[peer as usize].poll_stage(cx, got..length);
        }
        let place = self.engine.schedule.step(self.step)[action];
        let start = self.engine.progress[action]
            .segment(place, self.request.element_size())
            .start;
        let Engine { links, work, .. } = &mut *self.engine;
        let (work, begin) = written(&mut self.in_place, work);
        let start = start - begin;
        links[peer as usize].poll_payload(cx, &mut work[start + got..start + length])
    }

    fn segment_done(&mut self, peer: u32, header: Data, index: usize) {
        let size = self.request.element_size();
        self.watch.stir();
        let length = header.length as usize;
        let action = self.engine.schedule.step(self.step)[index];
        let progress = self.engine.progress[index];
        if let (Action::ReceiveReduce { .. }, Some(dtype), Some(op)) =
            (action, self.request.wire_type(), self.request.reduce)
        {
            let start = progress.segment(action, size).start;
            let Engine { links, work, .. } = &mut *self.engine;
            let (work, begin) = written(&mut self.in_place, work);
            let start = start - begin;
            let from = &links[peer as usize].stage.bytes()[..length];
            reduce::combine(dtype, op, &mut work[start..start + length], from);
        }
        self.engine.progress[index] = progress.after(action, size, length);
    }

    /// Decides what a frame is for.
    fn sort(&mut self, peer: u32, header: Header) -> Result<Sorted, CollectiveError> {
        if let Header::Share { generation, share } = header
            && generation == self.engine.generation
        {
            return Ok(Sorted::Share(share));
        }
        let Some((generation, tag)) = self.place_of(header) else {
            return Err(self.broken(peer, "a hello in the middle of a link".to_owned()));
        };
        if generation != self.engine.generation {
            let reason = format!(
                "a frame of generation {generation} on a link of generation {}",
                self.engine.generation
            );
            return Err(self.broken(peer, reason));
        }
        if let Header::Ask(data) | Header::Consent(data) | Header::Data(data) = header {
            self.heard_of(peer, &data);
        }
        if tag < self.tag {
            if matches!(header, Header::AbortOperation { .. }) {
                // It may be that the peer does not come to this one either.
                return Ok(Sorted::Text);
            }
            return self
                .left_over(peer, header)
                .map_or(Ok(Sorted::Discard), Err);
        }
        if tag > self.tag {
            // Links keep the order: nothing of this operation will follow.
            if self.awaits(peer) {
                let rank = Rank(peer);
                self.verdict.hear(Event::IsAhead { rank, tag })?;
            }
            return Ok(if self.is_draining(peer) {
                Sorted::Discard
            } else {
                Sorted::Wait
            });
        }
        let (Header::Data(data) | Header::Ask(data) | Header::Consent(data)) = header else {
            return Ok(Sorted::Text);
        };
        // In shared memory all see by themselves who asks for what.
        let may_learn = self.mode == Mode::Links && self.request.is_join();
        if may_learn && !data.operation.is_join() {
            // The frame stays where it is: it is for what this rank does now.
            self.agreement.learned = Some(data.operation);
            return Ok(Sorted::Wait);
        }
        // What it only asks it may ask while it waits for this rank to share memory.
        if self.mode == Mode::Form && !matches!(header, Header::Ask(_)) {
            self.peer_shares_nothing();
        }
        if self.mode != Mode::Links && data.operation.is_join() && !self.request.is_join() {
            // What it says next may be that it can't take part.
            self.peer_has_joined(peer);
            return Ok(Sorted::Discard);
        }
        if self.mode != Mode::Links {
            // For that peer all agree already, and it goes on over the links. What it asks for stands in the memory.
            return Ok(match header {
                Header::Ask(_) => Sorted::Discard,
                _ => Sorted::Wait,
            });
        }
        if data.operation.is_join() {
            self.peer_has_joined(peer);
            if !self.request.is_join() {
                return Ok(Sorted::Discard);
            }
        } else if data.operation != self.request && !self.is_asked_alike(header) {
            let (rank, operation) = (Rank(peer), data.operation);
            self.verdict.hear(Event::AsksFor { rank, operation })?;
        }
        match header {
            Header::Ask(_) => return Ok(Sorted::Discard),
            Header::Consent(_) => {
                self.watch.stir();
                self.agreement.hear(data.step);
                return Ok(Sorted::Discard);
            }
            _ => {}
        }
        if self.is_draining(peer) {
            return Ok(Sorted::Discard);
        }
        let Some(action) = self.next(peer, false) else {
            return Ok(Sorted::Wait);
        };
        let progress = self.engine.progress[action];
        let place = self.engine.schedule.step(self.step)[action];
        let expected = progress.segment(place, self.request.element_size()).len;
        if data.offset != progress.bytes as u64 || data.length as usize != expected {
            let reason = format!(
                "{} bytes at {} of its step {} came where {expected} bytes at {} were due",
                data.length, data.offset, data.step, progress.bytes
            );
            return Err(self.broken(peer, reason));
        }
        self.engine.links[peer as usize].present.used = true;
        Ok(Sorted::Payload {
            header: data,
            action,
        })
    }

    /// The generation and the operation of a frame; `None` if it has none.
    pub(super) fn place_of(&self, header: Header) -> Option<(Generation, Tag)> {
        match header {
            Header::Data(data) | Header::Ask(data) | Header::Consent(data) => {
                Some((data.generation, data.tag))
            }
            Header::Doing {
                generation, tag, ..
            }
            | Header::AbortOperation {
                generation, tag, ..
            } => Some((generation, tag)),
            Header::AbortCall {
                generation, call, ..
            } => {
                // It counts for whatever operation of the call this rank is in.
                let tag = if call == self.tag.call {
                    self.tag
                } else {
                    Tag::new(call, 0)
                };
                Some((generation, tag))
            }
            Header::Hello { .. }
            | Header::Welcome
            | Header::Refusal { .. }
            | Header::Share { .. } => None,
        }
    }

    /// A frame of the previous operation, which succeeded here without it. If the peer asked for something
    /// else then (two ranks that both think they are the root, say), this is the first chance to see it.
    fn left_over(&mut self, peer: u32, header: Header) -> Option<CollectiveError> {
        let (tag, asked) = self.engine.previous?;
        // A question may be from before it was settled how the operation is done.
        let (Header::Data(data) | Header::Consent(data)) = header else {
            return None;
        };
        if data.operation.is_join() || asked.is_join() {
            return None;
        }
        // A call that has ended is not to trouble the next one.
        if data.tag != tag || tag.call != self.tag.call || data.operation == asked {
            return None;
        }
        Some(CollectiveError::Mismatch {
            rank: Rank(self.engine.me),
            asked: format!("{asked} ({tag}, which ended here)"),
            other: Rank(peer),
            other_asked: data.operation.to_string(),
        })
    }

    /// Whether a peer asks for the same, and only has not settled yet how it is done.
    fn is_asked_alike(&self, header: Header) -> bool {
        let Header::Ask(data) = header else {
            return false;
        };
        let Operation {
            algorithm, segment, ..
        } = self.request;
        data.operation.algorithm == Algorithm::Local
            && self.request
                == Operation {
                    algorithm,
                    segment,
                    ..data.operation
                }
    }

    /// Where a peer is.
    fn heard_of(&mut self, peer: u32, data: &Data) {
        let came = &mut self.engine.links[peer as usize].said.came;
        if came.is_none_or(|(tag, _)| tag != data.tag) {
            *came = Some((data.tag, data.operation));
        }
    }

    /// A peer tells why it gave up.
    pub(super) fn told(
        &mut self,
        peer: u32,
        header: Header,
        text: &[u8],
    ) -> Result<(), CollectiveError> {
        // Its header may have come in an earlier operation, which has ended without the text.
        let before = match self.place_of(header) {
            Some((_, tag)) if tag == self.tag => None,
            Some((_, tag)) if matches!(header, Header::AbortOperation { .. }) => Some(tag),
            _ => return Ok(()),
        };
        if let Header::Doing { rank, .. } = header {
            let doing = String::from_utf8_lossy(text).into_owned();
            let rank = if rank == SENDER { peer } else { rank.0 };
            self.missing_heard(Some(peer), rank, doing);
            return Ok(());
        }
        let Some(cause) = Cause::parse(text) else {
            return Err(self.broken(peer, "a notice that is none".to_owned()));
        };
        let world = self.engine.world;
        if let Some(rank) = cause.ranks().into_iter().find(|rank| rank.0 >= world) {
            let reason = format!("a notice about rank {rank} of a world of {world}");
            return Err(self.broken(peer, reason));
        }
        let by = Rank(peer);
        let is_part = before.is_none_or(|tag| tag.is_part_of(self.tag));
        if !cause.ends_operation() {
            if before.is_none() {
                self.engine.links[peer as usize].said.stalled_in = Some(self.tag);
            } else {
                // The peer waits in an operation that this rank is through with.
                let frame = self.ask_frame();
                self.engine.links[peer as usize].notify(&frame);
                self.unsaid = true;
            }
            return match cause {
                // What it asks for in another part is not to be compared.
                Cause::Stalled { .. } if is_part && before.is_some() => {
                    self.verdict.is_here(by);
                    Ok(())
                }
                cause if is_part => self.verdict.hear(Event::Told { by, cause }),
                _ => Ok(()),
            };
        }
        // A rank that gives up a part of an operation gives up all of it.
        if !is_part {
            return Ok(());
        }
        self.ends_call = matches!(header, Header::AbortCall { .. });
        self.verdict.hear(Event::Told { by, cause })
    }

    pub(super) fn stopped(&mut self, peer: u32, stop: Stop) -> Result<(), CollectiveError> {
        match stop {
            Stop::Protocol(reason) => Err(self.broken(peer, reason)),
            Stop::Ended(reason) => {
                let link = &mut self.engine.links[peer as usize];
                link.end(reason);
                let is_final = link.ended.as_ref().is_none_or(|ended| ended.is_final);
                let may_relink = !link.present.used && !is_final && !link.present.relinked;
                self.watch.stir();
                if self.engine.renews(peer) {
                    (self.place.connect)(peer);
                }
                // A peer that has all that it needs from this operation may go.
                if !self.needs(peer) {
                    return Ok(());
                }
                if may_relink {
                    // It broke before it carried anything of this operation: another one will do. Once: a network that cuts every
                    // link is no reason to make links for ever.
                    self.engine.links[peer as usize].present.relinked = true;
                    self.begin_link(peer);
                    return Ok(());
                }
                if !is_final && !self.place.patience.is_zero() {
                    // Whether the peer is gone shows while the word is awaited.
                    self.begin_link(peer);
                }
                self.lack_link(peer)
            }
        }
    }

    fn broken(&mut self, peer: u32, reason: String) -> CollectiveError {
        self.engine.links[peer as usize].end(reason.clone());
        CollectiveError::Protocol {
            rank: Rank(peer),
            reason,
        }
    }
}
