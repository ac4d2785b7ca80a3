//! Hearing of a failure from a peer that is ahead.
//!
//! A link keeps the order of what is sent on it, and what is not for the present step stays in it. So a rank that waits for one
//! peer would hear only at its deadline that another one gave up, if that one had begun a later step before. When nothing comes
//! for a while, it looks behind what it can't use yet, as far as that has come.

use std::task::Context;

use super::{Mode, Run};
use crate::error::CollectiveError;
use crate::header::SEGMENT;

/// Most bytes that are held to look behind what is not wanted yet: of all links, and of one, with its bounds. What a peer had sent
/// when it gave up is in the buffers of the network, a few MiB.
const MOST: usize = 32 << 20;
const OF_LINK: (usize, usize) = (2 * SEGMENT, 32 * SEGMENT);

impl Run<'_> {
    /// Takes in notices that stand behind frames that are not wanted yet, if nothing else has come for a while. Returns
    /// whether there were any.
    pub(super) fn look_ahead(&mut self, cx: &mut Context<'_>) -> Result<bool, CollectiveError> {
        if self.mode != Mode::Links || !self.watch.is_quiet() {
            return Ok(false);
        }
        let most = (MOST / self.engine.world as usize).clamp(OF_LINK.0, OF_LINK.1);
        let mut found = false;
        for peer in 0..self.engine.world {
            while let Some((header, text)) = self.engine.links[peer as usize].poll_notice(cx, most)
            {
                found = true;
                match self.place_of(header) {
                    Some((generation, _)) if generation != self.engine.generation => break,
                    Some((_, tag)) if tag <= self.tag => self.told(peer, header, &text)?,
                    // The peer gave up a later operation.
                    _ => {}
                }
            }
        }
        Ok(found)
    }
}
