//! Pieces of output of many ranks become lines with prefixes, none of them mixed with another.

use std::collections::HashMap;

use kolo_transport::wire::Stdio;

/// The longest line that is held until it is whole. What is longer is shown in lines of this length.
pub(crate) const LONGEST: usize = 256 << 10;

/// One stream of one rank.
pub(crate) type Source = (u32, Stdio);

#[derive(Debug, Default)]
struct State {
    /// A line that has no end yet.
    rest: Vec<u8>,
    /// The last byte that was given out was a CR, whose LF may follow.
    after_cr: bool,
    /// Something of the current line was given out already.
    begun: bool,
}

/// Puts lines together.
#[derive(Debug)]
pub(crate) struct Lines {
    sources: HashMap<Source, State>,
    /// Nobody else writes, so that nothing has to be held.
    alone: bool,
    /// Whose line was given out last.
    last: Option<Source>,
}

impl Lines {
    /// For the output of one rank alone, all of which is given out as it comes, or of several.
    pub(crate) fn new(alone: bool) -> Self {
        Self {
            sources: HashMap::new(),
            alone,
            last: None,
        }
    }

    /// Adds a piece of a source; what can be shown is appended to `out`. A line ends with LF or CR.
    pub(crate) fn push(
        &mut self,
        source: Source,
        prefix: &[u8],
        mut piece: &[u8],
        out: &mut Vec<u8>,
    ) {
        let state = self.sources.entry(source).or_default();
        if state.after_cr {
            if let Some(after) = piece.strip_prefix(b"\n") {
                // Behind the line of somebody else it would be an empty line of nobody.
                if self.alone || self.last == Some(source) {
                    out.push(b'\n');
                }
                piece = after;
            }
            if piece.is_empty() {
                return;
            }
            state.after_cr = false;
        }
        while let Some(at) = memchr::memchr2(b'\n', b'\r', piece) {
            let mut end = at + 1;
            if piece[at] == b'\r' {
                match piece.get(end) {
                    Some(b'\n') => end += 1,
                    Some(_) => {}
                    None => state.after_cr = true,
                }
            }
            state.begin(prefix, out);
            out.append(&mut state.rest);
            out.extend_from_slice(&piece[..end]);
            state.begun = false;
            self.last = Some(source);
            piece = &piece[end..];
        }
        if piece.is_empty() {
            return;
        }
        if self.alone {
            state.begin(prefix, out);
            out.extend_from_slice(piece);
            return;
        }
        while state.rest.len() + piece.len() > LONGEST {
            let (now, later) = piece.split_at(LONGEST - state.rest.len());
            out.extend_from_slice(prefix);
            out.append(&mut state.rest);
            out.extend_from_slice(now);
            out.push(b'\n');
            self.last = Some(source);
            piece = later;
        }
        state.rest.extend_from_slice(piece);
    }

    /// A source has ended: what is left of it is shown.
    pub(crate) fn end(&mut self, source: Source, prefix: &[u8], out: &mut Vec<u8>) {
        let Some(mut state) = self.sources.remove(&source) else {
            return;
        };
        if !state.rest.is_empty() {
            out.extend_from_slice(prefix);
            out.append(&mut state.rest);
            // Whoever writes next begins a line of its own.
            out.push(b'\n');
            self.last = Some(source);
        }
    }

    /// The sources that have not ended.
    pub(crate) fn open(&self) -> Vec<Source> {
        let mut open: Vec<Source> = self.sources.keys().copied().collect();
        open.sort_unstable_by_key(|(rank, stream)| (*rank, *stream == Stdio::Stderr));
        open
    }
}

impl State {
    fn begin(&mut self, prefix: &[u8], out: &mut Vec<u8>) {
        if !self.begun {
            out.extend_from_slice(prefix);
            self.begun = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ZERO: Source = (0, Stdio::Stdout);
    const ONE: Source = (1, Stdio::Stdout);

    fn shown(pieces: &[(Source, &[u8])]) -> Vec<u8> {
        let mut lines = Lines::new(false);
        let mut out = Vec::new();
        for (source, piece) in pieces {
            let prefix = format!("[{}]", source.0);
            lines.push(*source, prefix.as_bytes(), piece, &mut out);
        }
        for source in lines.open() {
            let prefix = format!("[{}]", source.0);
            lines.end(source, prefix.as_bytes(), &mut out);
        }
        out
    }

    #[test]
    fn a_line_is_shown_when_it_is_whole() {
        let out = shown(&[
            (ZERO, b"he"),
            (ONE, b"one\ntw"),
            (ZERO, b"llo\n"),
            (ONE, b"o\n\n"),
        ]);
        assert_eq!(out, b"[1]one\n[0]hello\n[1]two\n[1]\n");
    }

    #[test]
    fn a_last_line_without_an_end_is_shown_at_the_end() {
        assert_eq!(
            shown(&[(ZERO, b"a\nb"), (ONE, b"\xff\xfe")]),
            b"[0]a\n[0]b\n[1]\xff\xfe\n"
        );
    }

    #[test]
    fn a_carriage_return_ends_a_line_and_one_with_a_line_feed_is_one_end() {
        assert_eq!(shown(&[(ZERO, b"10%\r20%\r\n")]), b"[0]10%\r[0]20%\r\n");
        assert_eq!(
            shown(&[(ZERO, b"a\r"), (ZERO, b"\nb\n")]),
            b"[0]a\r\n[0]b\n"
        );
        assert_eq!(shown(&[(ZERO, b"a\r"), (ZERO, b"b\n")]), b"[0]a\r[0]b\n");
        assert_eq!(
            shown(&[(ZERO, b"a\r"), (ONE, b"b\n"), (ZERO, b"\nc\n")]),
            b"[0]a\r[1]b\n[0]c\n",
            "the rest of an end that comes late is no line of nobody"
        );
    }

    #[test]
    fn who_is_alone_is_shown_at_once_and_as_it_is() {
        let mut lines = Lines::new(true);
        let mut out = Vec::new();
        for piece in [&b"name"[..], b"? ", b"x\ny", b""] {
            lines.push(ZERO, b">", piece, &mut out);
        }
        lines.end(ZERO, b">", &mut out);
        assert_eq!(out, b">name? x\n>y");
    }

    #[test]
    fn a_line_that_is_too_long_is_shown_in_parts() {
        let long = vec![b'x'; LONGEST * 2 + 10];
        let mut pieces: Vec<(Source, &[u8])> =
            long.chunks(1000).map(|piece| (ZERO, piece)).collect();
        pieces.push((ZERO, b"\n"));
        let out = shown(&pieces);
        let lengths: Vec<usize> = out.split(|byte| *byte == b'\n').map(<[u8]>::len).collect();
        assert_eq!(lengths, [LONGEST + 3, LONGEST + 3, 13, 0]);
    }

    proptest! {
        /// However the bytes of two ranks are cut and mixed, each line comes whole, once and in its rank's order.
        #[test]
        fn no_line_is_lost_or_mixed(
            texts in proptest::collection::vec("[a-c]{0,4}", 0..40),
            cuts in proptest::collection::vec((0_usize..2, 1_usize..7), 0..80),
        ) {
            let whole = |rank: u32| -> Vec<u8> {
                texts.iter().flat_map(|text| format!("{rank}{text}\n").into_bytes()).collect()
            };
            let all = [whole(0), whole(1)];
            let mut at = [0_usize; 2];
            let mut pieces = Vec::new();
            for (rank, length) in cuts.into_iter().chain([(0, usize::MAX), (1, usize::MAX)]) {
                let end = at[rank].max(all[rank].len().min(at[rank].saturating_add(length)));
                let source = if rank == 0 { ZERO } else { ONE };
                pieces.push((source, &all[rank][at[rank]..end]));
                at[rank] = end;
            }
            let out = shown(&pieces);
            for rank in 0..2_u32 {
                let prefix = format!("[{rank}]");
                let own: Vec<u8> = out
                    .split_inclusive(|byte| *byte == b'\n')
                    .filter_map(|line| line.strip_prefix(prefix.as_bytes()))
                    .flatten()
                    .copied()
                    .collect();
                prop_assert_eq!(&own, &all[rank as usize]);
            }
        }
    }
}
