//! In which buffers of the caller's a schedule can work.

use super::{Action, Output, Schedule, Span};

impl Schedule {
    /// Whether it can work in a buffer of `count` elements that holds the input and shall hold the result.
    #[must_use]
    pub fn is_in_place(&self, count: usize) -> bool {
        let all = Span::between(0, count);
        self.is_into(count) && self.input.is_none_or(|input| input == all)
    }

    /// Whether it can work in a buffer of `count` elements that is to hold the result, if the input is put in its place there.
    #[must_use]
    pub fn is_into(&self, count: usize) -> bool {
        let all = Span::between(0, count);
        self.buffer == count && self.outputs == [Output { from: all, to: 0 }]
    }

    /// Whether it can work on two buffers, one of `input` elements that holds the input and is only read, and one for a result of
    /// `result` elements. Returns which part of its buffer the second one is then: it sends nothing of that, and writes nothing
    /// beside it. Outputs that are of the input, also where the two overlap, are in the result before it begins.
    pub(crate) fn is_apart(&self, input: usize, result: usize) -> Option<Span> {
        let written = match self.outputs[..] {
            [output] if self.buffer == input => output.from,
            _ if self.buffer == input + result => Span::between(input, self.buffer),
            _ => return None,
        };
        let is_written = |span: Span| span.start >= written.start && span.end() <= written.end();
        let is_read = |span: Span| {
            let is_beside = span.end() <= written.start || span.start >= written.end();
            span.end() <= input && (span.len == 0 || is_beside)
        };
        let suits = self.input == Some(Span::between(0, input))
            && written.len == result
            && self.outputs.iter().all(|output| {
                let stays = output.from.start == written.start + output.to;
                is_written(output.from) && stays || is_read(output.from)
            })
            && self.actions.iter().all(|action| match *action {
                Action::Send { span, .. } => is_read(span),
                Action::Receive { span, .. }
                | Action::ReceiveReduce { span, .. }
                | Action::Finish { span } => is_written(span),
                _ => false,
            });
        suits.then_some(written)
    }

    /// Whether it changes anything in its buffer.
    #[must_use]
    pub fn is_writing(&self) -> bool {
        self.actions
            .iter()
            .any(|action| !matches!(action, Action::Send { .. }))
    }
}
