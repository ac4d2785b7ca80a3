//! Which streams of which local ranks are shown, in torchrun's words: `3`, or `0:1,1:3`.

use std::collections::BTreeMap;

use kolo_transport::wire::Stdio;

use super::ranks::Ranks;

/// Streams of each local rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Streams {
    /// The same of all.
    All(Std),
    /// None of those that are not listed.
    Of(BTreeMap<u32, Std>),
}

/// Standard output 1, standard error 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Std(u8);

impl Std {
    fn parse(text: &str) -> Option<Self> {
        matches!(text, "0" | "1" | "2" | "3").then(|| Self(text.as_bytes()[0] - b'0'))
    }

    fn has(self, stream: Stdio) -> bool {
        let bit = match stream {
            Stdio::Stdout => 1,
            Stdio::Stderr => 2,
        };
        self.0 & bit != 0
    }
}

impl Streams {
    /// Reads `3`, or `0:1,1:3` by local rank.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if let Some(all) = Std::parse(text) {
            return Ok(Self::All(all));
        }
        let pair = |part: &str| {
            let (rank, streams) = part.split_once(':')?;
            Some((rank.parse().ok()?, Std::parse(streams)?))
        };
        let mut of = BTreeMap::new();
        for part in text.split(',') {
            let known =
                pair(part).is_some_and(|(rank, streams)| of.insert(rank, streams).is_none());
            if !known {
                return Err(format!(
                    "`{}` is no list of streams; allowed are 0 for none, 1 for standard output, 2 for standard error and 3 for both, \
                     or these for each local rank once, as 0:1,1:3",
                    part.escape_debug()
                ));
            }
        }
        Ok(Self::Of(of))
    }

    /// The highest local rank that is listed.
    pub(crate) fn highest(&self) -> Option<u32> {
        match self {
            Self::All(_) => None,
            Self::Of(of) => of.keys().next_back().copied(),
        }
    }

    fn has(&self, local_rank: Option<u32>, stream: Stdio) -> bool {
        match self {
            Self::All(all) => all.has(stream),
            Self::Of(of) => {
                local_rank.is_some_and(|rank| of.get(&rank).is_some_and(|std| std.has(stream)))
            }
        }
    }
}

/// What is shown of the output. Files get all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Shown {
    /// These are not.
    pub(crate) redirects: Option<Streams>,
    /// These are, all the same.
    pub(crate) tee: Option<Streams>,
    /// Nothing of others.
    pub(crate) local_ranks: Ranks,
}

impl Shown {
    /// Whether a stream is shown. All of a worker is whose local rank is not known yet, unless that does not matter.
    pub(crate) fn contains(&self, local_rank: Option<u32>, stream: Stdio) -> bool {
        let has = |streams: &Option<Streams>| {
            let streams = streams.as_ref();
            streams.is_some_and(|streams| streams.has(local_rank, stream))
        };
        let is_wanted = local_rank.is_none_or(|rank| self.local_ranks.contains(rank));
        is_wanted && (has(&self.tee) || !has(&self.redirects))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `Std.from_str` of torchelastic's own tests, and local ranks of two digits, which torchrun does not take.
    #[test]
    fn std_from_str() {
        for (text, expected) in [
            ("0", [false; 2]),
            ("1", [true, false]),
            ("2", [false, true]),
            ("3", [true; 2]),
        ] {
            let streams = Streams::parse(text).unwrap();
            let has = [Stdio::Stdout, Stdio::Stderr].map(|stream| streams.has(None, stream));
            assert_eq!(has, expected, "{text}");
        }
        let streams = Streams::parse("0:1,11:3").unwrap();
        assert!(streams.has(Some(11), Stdio::Stderr));
        assert!(streams.has(Some(0), Stdio::Stdout) && !streams.has(Some(0), Stdio::Stderr));
        assert!(
            !streams.has(Some(1), Stdio::Stdout),
            "a rank that is missing has none"
        );
        for text in [
            "", "0:1,", "11", "4", "0:1,1", "1,0:1", "0:4", "x:1", "0:1,0:2", "-1:1",
        ] {
            assert!(
                Streams::parse(text).unwrap_err().contains("0:1,1:3"),
                "{text}"
            );
        }
    }

    #[test]
    fn what_is_redirected_is_not_shown_unless_it_is_teed() {
        let shown = |redirects: &str, tee: &str, ranks: &str| Shown {
            redirects: Streams::parse(redirects).ok(),
            tee: Streams::parse(tee).ok(),
            local_ranks: Ranks::parse(ranks).unwrap(),
        };
        let seen = |shown: &Shown| {
            [
                (0, Stdio::Stdout),
                (0, Stdio::Stderr),
                (1, Stdio::Stdout),
                (1, Stdio::Stderr),
            ]
            .map(|(rank, stream)| u8::from(shown.contains(Some(rank), stream)))
        };
        assert_eq!(seen(&Shown::default()), [1, 1, 1, 1]);
        assert_eq!(seen(&shown("3", "", "all")), [0, 0, 0, 0]);
        assert_eq!(seen(&shown("1", "", "all")), [0, 1, 0, 1]);
        assert_eq!(seen(&shown("3", "0:1,1:2", "all")), [1, 0, 0, 1]);
        assert_eq!(seen(&shown("0:3", "", "all")), [0, 0, 1, 1]);
        assert_eq!(seen(&shown("", "3", "1")), [0, 0, 1, 1]);
        assert!(!shown("3", "", "1").contains(None, Stdio::Stdout));
    }
}
