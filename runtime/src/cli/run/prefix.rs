//! What stands before each line: a template such as `[{rank}]<{stream}>:`.

use kolo_transport::wire::Stdio;

use super::super::output::timestamp;

/// What is before each line unless something else is asked for.
pub(crate) const DEFAULT: &str = "[{rank}]<{stream}>:";

/// The same with the time.
pub(crate) const WITH_TIME: &str = "{time} [{rank}]<{stream}>:";

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Rank,
    LocalRank,
    Host,
    Stream,
    Time,
}

/// A template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Prefix {
    parts: Vec<Part>,
}

/// What goes into a template.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Values<'a> {
    pub(crate) rank: u32,
    pub(crate) local_rank: u32,
    pub(crate) host: &'a str,
    pub(crate) stream: Stdio,
    /// Milliseconds since 1970.
    pub(crate) time_ms: u64,
}

impl Prefix {
    /// Reads a template; `none` is an empty one, and `{{` and `}}` are braces.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self { parts: Vec::new() });
        }
        let mut parts = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            plain.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                plain.push_str(brace);
                rest = after;
                continue;
            }
            let name = (brace == "{").then(|| rest.split_once('}')).flatten();
            let Some((name, after)) = name else {
                return Err(format!(
                    "a single `{brace}` in the prefix `{text}`; a brace is written twice, and a field as {{rank}}"
                ));
            };
            let part = match name {
                "rank" => Part::Rank,
                "local_rank" => Part::LocalRank,
                "host" => Part::Host,
                "stream" => Part::Stream,
                "time" => Part::Time,
                other => {
                    return Err(format!(
                        "the prefix has the field `{{{other}}}`; there are {{rank}}, {{local_rank}}, {{host}}, {{stream}} and {{time}}"
                    ));
                }
            };
            if !plain.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut plain)));
            }
            parts.push(part);
            rest = after;
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            parts.push(Part::Text(plain));
        }
        Ok(Self { parts })
    }

    /// Whether it is the same for all lines of a stream.
    pub(crate) fn is_fixed(&self) -> bool {
        !self.parts.contains(&Part::Time)
    }

    /// The text for these values.
    pub(crate) fn render(&self, values: Values<'_>) -> Vec<u8> {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                Part::Text(plain) => text.push_str(plain),
                Part::Rank => text.push_str(&values.rank.to_string()),
                Part::LocalRank => text.push_str(&values.local_rank.to_string()),
                Part::Host => text.push_str(values.host),
                Part::Stream => text.push_str(stream_name(values.stream)),
                Part::Time => text.push_str(&timestamp(values.time_ms)),
            }
        }
        text.into_bytes()
    }
}

/// `stdout` or `stderr`.
pub(crate) fn stream_name(stream: Stdio) -> &'static str {
    match stream {
        Stdio::Stdout => "stdout",
        Stdio::Stderr => "stderr",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: Values<'_> = Values {
        rank: 12,
        local_rank: 3,
        host: "b",
        stream: Stdio::Stderr,
        time_ms: 1_795_273_445_678,
    };

    fn rendered(template: &str) -> String {
        let prefix = Prefix::parse(template).unwrap();
        String::from_utf8(prefix.render(VALUES)).unwrap()
    }

    #[test]
    fn fields_are_filled_in() {
        assert_eq!(rendered(DEFAULT), "[12]<stderr>:");
        assert_eq!(
            rendered(WITH_TIME),
            "2026-11-21T15:04:05.678Z [12]<stderr>:"
        );
        assert_eq!(rendered("{host}.{local_rank}> "), "b.3> ");
        assert_eq!(rendered("{{{rank}}}"), "{12}");
        assert_eq!(rendered("none"), "");
        assert_eq!(rendered(""), "");
        assert!(Prefix::parse(DEFAULT).unwrap().is_fixed());
        assert!(!Prefix::parse(WITH_TIME).unwrap().is_fixed());
    }

    #[test]
    fn what_is_no_template_is_refused() {
        let error = Prefix::parse("{rnak}").unwrap_err();
        assert!(
            error.contains("`{rnak}`") && error.contains("{local_rank}"),
            "{error}"
        );
        for bad in ["{rank", "rank}", "{", "a}b"] {
            assert!(Prefix::parse(bad).unwrap_err().contains("single"), "{bad}");
        }
    }
}
