//! Results on their way to the node: encoded once, straight into the bytes that are written.

use bytes::BytesMut;
use kolo_transport::frame::{self, FrameError, InvalidFrame, Limits};
use kolo_transport::ids::{CallId, Generation};
use kolo_transport::wire::{CallFailure, FailureKind, Outcome, WorkerResult};
use serde::Serialize;

use crate::codec::{self, Failed};

/// Longest message and longest backtrace of a failure, in bytes.
const MAX_TEXT: usize = 64 << 10;

/// Appends one result after the other to a buffer.
#[derive(Debug)]
pub struct Reply {
    out: BytesMut,
    /// Where the frame of the current call begins.
    frame: usize,
    /// Where its body begins.
    body: usize,
    /// The longest body.
    limit: usize,
}

impl Reply {
    /// An empty buffer for results of at most `limit` bytes each.
    pub(crate) fn new(limit: u32) -> Self {
        Self {
            out: BytesMut::new(),
            frame: 0,
            body: 0,
            limit: limit as usize,
        }
    }

    /// With the limit of the call socket.
    pub(crate) fn for_calls() -> Self {
        Self::new(Limits::CALLS.body)
    }

    /// Begins the frame of a call, for now as one that returned.
    pub(crate) fn begin(&mut self, call: CallId) -> Result<(), FrameError> {
        self.frame = self.out.len();
        self.returned(call, Generation(0))
    }

    fn returned(&mut self, call: CallId, generation: Generation) -> Result<(), FrameError> {
        let head = WorkerResult {
            call,
            generation,
            outcome: Outcome::Returned,
        };
        frame::encode_head(&mut self.out, &head, 0)?;
        self.body = self.out.len();
        Ok(())
    }

    /// Writes the result's value.
    pub(crate) fn serialize<T: Serialize + 'static>(
        &mut self,
        value: &T,
    ) -> Result<(), CallFailure> {
        let done = codec::append(&mut self.out, self.body + self.limit, |out| {
            codec::write(value, out)
        });
        done.map_err(|error| {
            let type_name = std::any::type_name::<T>();
            let message = match error {
                Failed::TooLong => format!(
                    "the result, a `{type_name}`, takes more than {} bytes, the most that a call carries; \
                     return it in parts or write it to storage",
                    self.limit
                ),
                Failed::Encode(error) => {
                    format!("the result, a `{type_name}`, can't be encoded: {error}")
                }
            };
            CallFailure::new(FailureKind::Result, message)
        })
    }

    /// Ends the frame of the call: with the value that was written, or as failed. `generation` is 0, or the later one that the call
    /// has come to.
    pub(crate) fn end(
        &mut self,
        (call, generation): (CallId, Generation),
        ended: Result<(), CallFailure>,
    ) -> Result<(), FrameError> {
        match ended {
            Ok(()) => {
                if generation != Generation(0) {
                    let value = self.out.split_off(self.body);
                    self.out.truncate(self.frame);
                    self.returned(call, generation)?;
                    self.out.unsplit(value);
                }
                let length = u32::try_from(self.out.len() - self.body).map_err(|_| {
                    InvalidFrame::TooLong {
                        part: "body",
                        given: (self.out.len() - self.body) as u64,
                        limit: u32::MAX,
                    }
                })?;
                // The prefix is the head's length, then the body's.
                self.out[self.frame + 4..self.frame + 8].copy_from_slice(&length.to_be_bytes());
                Ok(())
            }
            Err(mut failure) => {
                self.out.truncate(self.frame);
                cut(&mut failure.message);
                if let Some(backtrace) = &mut failure.backtrace {
                    cut(backtrace);
                }
                let head = WorkerResult {
                    call,
                    generation,
                    outcome: Outcome::Failed(failure),
                };
                Ok(frame::encode_head(&mut self.out, &head, 0)?)
            }
        }
    }

    /// The frames so far.
    pub(crate) fn frames(&self) -> &[u8] {
        &self.out
    }

    /// Forgets the frames, and the memory of an unusually long one.
    pub(crate) fn clear(&mut self) {
        if self.out.capacity() > 1 << 20 {
            self.out = BytesMut::new();
        } else {
            self.out.clear();
        }
    }
}

/// Shortens a text at a character boundary and says so.
fn cut(text: &mut String) {
    if text.len() > MAX_TEXT {
        let mut end = MAX_TEXT;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let left_out = text.len() - end;
        text.truncate(end);
        text.push_str(" ... (");
        text.push_str(&left_out.to_string());
        text.push_str(" more bytes)");
    }
}

#[cfg(test)]
mod tests {
    use kolo_transport::frame::Decoder;

    use super::*;

    fn frames(reply: &Reply) -> Vec<(WorkerResult, Vec<u8>)> {
        let mut decoder = Decoder::new(Limits::CALLS);
        decoder.buffer().extend_from_slice(reply.frames());
        let mut all = Vec::new();
        while let Some(frame) = decoder.next::<WorkerResult>().unwrap() {
            all.push((frame.head, frame.body.to_vec()));
        }
        assert_eq!(decoder.pending(), 0);
        all
    }

    #[test]
    fn a_batch_holds_values_and_failures_in_order() {
        let mut reply = Reply::new(100);
        for call in 0..3 {
            let call = CallId(call);
            reply.begin(call).unwrap();
            let mut ended = reply.serialize(&"some value");
            if call.0 == 1 {
                ended = Err(CallFailure::new(FailureKind::Error, "no"));
            }
            // The last one has come to a later generation.
            let generation = Generation(if call.0 == 2 { 7 } else { 0 });
            reply.end((call, generation), ended).unwrap();
        }
        let frames = frames(&reply);
        let value = rmp_serde::to_vec("some value").unwrap();
        assert_eq!(frames.len(), 3);
        assert_eq!(frames[0].0.outcome, Outcome::Returned);
        assert_eq!(frames[0].1, value);
        assert!(matches!(&frames[1].0.outcome, Outcome::Failed(f) if f.message == "no"));
        assert!(frames[1].1.is_empty());
        assert_eq!(frames[2].0.call, CallId(2));
        assert_eq!(frames[2].0.generation, Generation(7));
        assert_eq!(frames[2].1, value);
    }

    #[test]
    fn a_result_over_the_limit_fails_and_leaves_the_batch_whole() {
        let mut reply = Reply::new(16);
        for (call, len) in [(1, 16), (2, 10_000), (3, 4)] {
            let call = CallId(call);
            reply.begin(call).unwrap();
            // A string of 15 bytes has one byte in front.
            let ended = reply.serialize(&"x".repeat(len - 1));
            reply.end((call, Generation(0)), ended).unwrap();
        }
        let frames = frames(&reply);
        assert_eq!(frames[0].1.len(), 16);
        let Outcome::Failed(failure) = &frames[1].0.outcome else {
            panic!("{frames:?}");
        };
        assert_eq!(failure.kind, FailureKind::Result);
        assert!(
            failure.message.contains("takes more than 16 bytes"),
            "{}",
            failure.message
        );
        assert_eq!(frames[2].0.outcome, Outcome::Returned);
    }

    #[test]
    fn long_messages_are_cut_at_a_character() {
        let mut reply = Reply::new(16);
        reply.begin(CallId(1)).unwrap();
        let mut failure = CallFailure::new(FailureKind::Panic, "€".repeat(MAX_TEXT));
        failure.backtrace = Some("frame\n".to_owned());
        reply.end((CallId(1), Generation(0)), Err(failure)).unwrap();
        let frames = frames(&reply);
        let Outcome::Failed(failure) = &frames[0].0.outcome else {
            panic!("{frames:?}");
        };
        assert!(failure.message.len() < MAX_TEXT + 40);
        assert!(failure.message.ends_with("more bytes)"));
        assert_eq!(failure.backtrace.as_deref(), Some("frame\n"));
    }
}
