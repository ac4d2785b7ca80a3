//! Lists in messages.

use std::fmt::Write as _;

/// How many of a list a message names.
const LISTED: usize = 8;

/// The first of these, separated by commas.
pub(super) fn listed<S: AsRef<str>>(names: &[S]) -> String {
    let mut text = String::new();
    for (index, name) in names.iter().take(LISTED).enumerate() {
        text.push_str(if index == 0 { "" } else { ", " });
        text.push_str(name.as_ref());
    }
    if names.len() > LISTED {
        let _ = write!(text, " and {} more", names.len() - LISTED);
    }
    text
}
