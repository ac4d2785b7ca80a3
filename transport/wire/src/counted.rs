//! Numbers of things, in words.

use std::fmt;

/// Shows how many of something there are: `1 node`, `2 nodes`.
///
/// ```
/// use kolo_wire::counted::Counted;
///
/// assert_eq!(Counted(0, "slot").to_string(), "0 slots");
/// assert_eq!(Counted(1, "slot").to_string(), "1 slot");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counted<N>(pub N, pub &'static str);

impl<N: fmt::Display + PartialEq + From<u8>> fmt::Display for Counted<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(number, what) = self;
        let plural = if *number == N::from(1) { "" } else { "s" };
        write!(f, "{number} {what}{plural}")
    }
}
