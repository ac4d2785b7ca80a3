//! Moving bytes: frames out of the working buffer and into it, and what a rank does by itself between steps.

use std::task::{Context, Poll};

use super::frames::Sorted;
use super::{InPlace, Run};
use crate::engine::{Engine, Progress, finish_of, next_transfer};
use crate::error::CollectiveError;
use crate::header::{Data, Header, SEGMENT};
use crate::link::{Inbound, Stop};
use crate::reduce::{self, Dots};
use crate::schedule::{Action, Span};
use crate::scratch::Scratch;

/// Most things that are read from one link in a row: a peer that never stops sending holds up neither the other links
/// nor the deadline.
const MOST_READS: usize = 1024;

impl Run<'_> {
    pub(super) fn write(&mut self, peer: u32, cx: &mut Context<'_>) {
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
                .map(|index| (index, segment(step[index], progress[index], self.size)));
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
                        progress[index] =
                            after(step[index], progress[index], self.size, segment.len);
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
                        let payload = Inbound::Payload {
                            header,
                            action,
                            got,
                        };
                        (payload, Poll::Ready(Ok(())))
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
                } => match self.poll_segment(peer, cx, header, action, got) {
                    Poll::Ready(Ok(count)) => {
                        let got = got + count;
                        let payload = Inbound::Payload {
                            header,
                            action,
                            got,
                        };
                        (payload, Poll::Ready(Ok(())))
                    }
                    other => {
                        let payload = Inbound::Payload {
                            header,
                            action,
                            got,
                        };
                        (payload, other.map_ok(|_| ()))
                    }
                },
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
        let start = segment(place, self.engine.progress[action], self.size).start;
        let Engine { links, work, .. } = &mut *self.engine;
        let (work, begin) = written(&mut self.in_place, work);
        let start = start - begin;
        links[peer as usize].poll_payload(cx, &mut work[start + got..start + length])
    }

    fn segment_done(&mut self, peer: u32, header: Data, index: usize) {
        self.watch.stir();
        let length = header.length as usize;
        let action = self.engine.schedule.step(self.step)[index];
        let progress = self.engine.progress[index];
        if let (Action::ReceiveReduce { .. }, Some(dtype), Some(op)) =
            (action, self.request.wire_type(), self.request.reduce)
        {
            let start = segment(action, progress, self.size).start;
            let Engine { links, work, .. } = &mut *self.engine;
            let (work, begin) = written(&mut self.in_place, work);
            let start = start - begin;
            let from = &links[peer as usize].stage.bytes()[..length];
            reduce::combine(dtype, op, &mut work[start..start + length], from);
        }
        self.engine.progress[index] = after(action, progress, self.size, length);
    }

    pub(super) fn transfers_done(&self) -> bool {
        self.engine.progress.iter().all(|progress| progress.done)
    }

    pub(super) fn enter_step(&mut self) {
        let Engine {
            schedule, progress, ..
        } = &mut *self.engine;
        progress.clear();
        progress.extend(schedule.step(self.step).iter().map(|action| Progress {
            bytes: 0,
            done: action.transfer().is_none(),
        }));
        self.keep();
        self.watch.stir();
    }

    /// Keeps what the present step may overwrite in the caller's buffer.
    pub(super) fn keep(&mut self) {
        if let Some(place) = &mut self.in_place {
            let Engine { schedule, work, .. } = &mut *self.engine;
            place.keep(work, schedule.step(self.step), self.size, &self.request);
        }
    }

    pub(super) fn do_local_actions(&mut self) {
        let Engine {
            schedule,
            work,
            world,
            ..
        } = &mut *self.engine;
        let step = schedule.step(self.step);
        if step.iter().all(|action| action.transfer().is_some()) {
            return;
        }
        let finish = finish_of(&self.request, *world);
        let (work, begin) = written(&mut self.in_place, work);
        let size = self.size;
        let bytes = |span: Span| span.start * size - begin..span.end() * size - begin;
        for action in step {
            if let Action::Copy { from, into } = *action {
                work.copy_within(bytes(from), bytes(into).start);
            }
            let (Some(dtype), Some(op)) = (self.request.wire_type(), self.request.reduce) else {
                continue;
            };
            match *action {
                Action::Combine { from, into } => {
                    let (into, from) = disjoint(work, into, from, size);
                    reduce::combine(dtype, op, into, from);
                }
                Action::Finish { span } => {
                    if let Some(finish) = &finish {
                        reduce::finish(dtype, &mut work[bytes(span)], finish);
                    }
                }
                Action::Dots { left, right, into } => {
                    let dots = reduce::dots(dtype, &work[bytes(left)], &work[bytes(right)]);
                    work[bytes(into)].copy_from_slice(&dots.to_bytes());
                }
                Action::AddDots { from, into } => {
                    let sum = Dots::from_bytes(&work[bytes(into)])
                        .plus(Dots::from_bytes(&work[bytes(from)]));
                    work[bytes(into)].copy_from_slice(&sum.to_bytes());
                }
                Action::Blend {
                    from,
                    into,
                    dots,
                    mirrored,
                } => {
                    let dots = Dots::from_bytes(&work[bytes(dots)]);
                    let dots = if mirrored { dots.mirrored() } else { dots };
                    let (into, from) = disjoint(work, into, from, size);
                    reduce::blend(dtype, into, from, &dots);
                }
                Action::Send { .. }
                | Action::Receive { .. }
                | Action::ReceiveReduce { .. }
                | Action::Copy { .. } => {}
            }
        }
    }
}

/// Where an operation writes, and at which byte of the schedule's buffer that begins.
fn written<'a>(place: &'a mut Option<InPlace<'_>>, work: &'a mut Scratch) -> (&'a mut [u8], usize) {
    match place {
        None => (work.bytes_mut(), 0),
        Some(place) => place.written(),
    }
}

/// The bytes of a transfer that go in its next frame, in the working buffer.
pub(super) fn segment(action: Action, progress: Progress, size: usize) -> Span {
    let span = span_of(action);
    let start = span.start * size + progress.bytes;
    let left = span.len * size - progress.bytes;
    Span::between(start, start + left.min(SEGMENT))
}

fn after(action: Action, progress: Progress, size: usize, bytes: usize) -> Progress {
    let bytes = progress.bytes + bytes;
    Progress {
        bytes,
        done: bytes == span_of(action).len * size,
    }
}

/// Of a transfer.
fn span_of(action: Action) -> Span {
    action.transfer().map_or(Span::default(), |(_, span)| span)
}

/// Two spans of one buffer that do not overlap.
fn disjoint(work: &mut [u8], into: Span, from: Span, size: usize) -> (&mut [u8], &[u8]) {
    let bytes = |span: Span| (span.start * size, span.end() * size);
    let ((into_start, into_end), (from_start, from_end)) = (bytes(into), bytes(from));
    if into_start < from_start {
        let (low, high) = work.split_at_mut(from_start);
        (
            &mut low[into_start..into_end],
            &high[..from_end - from_start],
        )
    } else {
        let (low, high) = work.split_at_mut(into_start);
        (
            &mut high[..into_end - into_start],
            &low[from_start..from_end],
        )
    }
}
