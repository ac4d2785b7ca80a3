//! Colours for terminals.

use std::ffi::OsString;

use crate::node::Stdio;

/// Begins red text: failures, and what ranks write to standard error.
pub const RED: &str = "\x1b[31m";

/// Ends coloured text.
pub const RESET: &str = "\x1b[0m";

/// The colours of ranks, one after the other.
const RANKS: [&str; 6] = [
    "\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[32m", "\x1b[34m", "\x1b[96m",
];

/// Whether the environment lets a terminal have colours: not with `NO_COLOR` (<https://no-color.org>) or `TERM=dumb`. `var` looks a
/// variable up.
pub fn is_wanted(var: impl Fn(&'static str) -> Option<OsString>) -> bool {
    let is_asked_not = var("NO_COLOR").is_some_and(|value| !value.is_empty());
    !is_asked_not && var("TERM").is_none_or(|term| term != "dumb")
}

/// What stands before a line of a rank, in the colour of the rank; before a line on standard error in red.
#[must_use]
pub fn prefix(prefix: &[u8], rank: u32, stream: Stdio) -> Vec<u8> {
    let colour = match stream {
        Stdio::Stdout => RANKS[rank as usize % RANKS.len()],
        Stdio::Stderr => RED,
    };
    [colour.as_bytes(), prefix, RESET.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_their_errors_have_colours() {
        assert_eq!(prefix(b"[7]", 7, Stdio::Stdout), b"\x1b[33m[7]\x1b[0m");
        assert_eq!(prefix(b"[7]", 7, Stdio::Stderr), b"\x1b[31m[7]\x1b[0m");
        for (variable, value, wanted) in [
            ("NO_COLOR", "1", false),
            ("NO_COLOR", "", true),
            ("TERM", "dumb", false),
            ("TERM", "xterm", true),
        ] {
            let var = |name| (name == variable).then(|| value.into());
            assert_eq!(is_wanted(var), wanted, "{variable}={value}");
        }
    }
}
