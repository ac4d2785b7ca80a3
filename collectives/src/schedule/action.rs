//! What a rank does in a step.

/// A stretch of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Span {
    /// First element.
    pub start: usize,
    /// Number of elements; may be 0.
    pub len: usize,
}

impl Span {
    /// The elements from `start` to before `end`.
    #[must_use]
    pub fn between(start: usize, end: usize) -> Self {
        Self {
            start,
            len: end - start,
        }
    }

    /// The first element after it.
    #[must_use]
    pub fn end(self) -> usize {
        self.start + self.len
    }
}

/// One thing to do. Spans are in the rank's own working buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Action {
    /// Send these elements. A transfer of no elements is still sent: it says that the rank is there.
    Send {
        /// To whom.
        peer: u32,
        /// What.
        span: Span,
    },
    /// Receive elements into their place.
    Receive {
        /// From whom.
        peer: u32,
        /// Where to.
        span: Span,
    },
    /// Receive elements and combine them: `own = own op received`. May be done as they come.
    ReceiveReduce {
        /// From whom.
        peer: u32,
        /// With which.
        span: Span,
    },
    /// Local: `into = into op from`. The spans have one length and do not overlap.
    Combine {
        /// The right operands.
        from: Span,
        /// The left operands and the results.
        into: Span,
    },
    /// Local: make results of combined values ([`reduce::finish`](crate::reduce::finish)): divide them by the world
    /// size for an average, multiply them with the postscale factor.
    Finish {
        /// What.
        span: Span,
    },
    /// Local: copy. The spans have one length and do not overlap.
    Copy {
        /// What.
        from: Span,
        /// Where to.
        into: Span,
    },
    /// Local, for Adasum: put the [scalar products](crate::reduce::dots) of two vectors at a place that is aligned for
    /// `f64` and has room for three.
    Dots {
        /// The vector of the lower ranks.
        left: Span,
        /// The vector of the higher ranks.
        right: Span,
        /// Where to.
        into: Span,
    },
    /// Local, for Adasum: [add up](crate::reduce::Dots::plus) scalar products.
    AddDots {
        /// What is added.
        from: Span,
        /// To what.
        into: Span,
    },
    /// Local, for Adasum: [blend](crate::reduce::blend) two vectors.
    Blend {
        /// The vector that is added.
        from: Span,
        /// The vector that it is added to.
        into: Span,
        /// The scalar products of the whole vectors.
        dots: Span,
        /// `into` is the right vector, not the left one.
        mirrored: bool,
    },
}

impl Action {
    /// The peer and the span of a transfer; `None` for local actions.
    #[must_use]
    pub fn transfer(&self) -> Option<(u32, Span)> {
        match *self {
            Self::Send { peer, span }
            | Self::Receive { peer, span }
            | Self::ReceiveReduce { peer, span } => Some((peer, span)),
            _ => None,
        }
    }

    /// The peer and the span of a receive, reducing or not.
    #[must_use]
    pub fn receive(&self) -> Option<(u32, Span)> {
        self.transfer()
            .filter(|_| !matches!(self, Self::Send { .. }))
    }

    /// The same transfer the other way; `None` for local actions.
    pub(super) fn back(self) -> Option<Self> {
        match self {
            Self::Send { peer, span } => Some(Self::Receive { peer, span }),
            Self::Receive { peer, span } | Self::ReceiveReduce { peer, span } => {
                Some(Self::Send { peer, span })
            }
            _ => None,
        }
    }

    /// Where what it touches ends.
    pub(crate) fn end(&self) -> usize {
        match *self {
            Self::Send { span, .. }
            | Self::Receive { span, .. }
            | Self::ReceiveReduce { span, .. }
            | Self::Finish { span } => span.end(),
            Self::Combine { from, into }
            | Self::Copy { from, into }
            | Self::AddDots { from, into } => from.end().max(into.end()),
            Self::Dots { left, right, into } => left.end().max(right.end()).max(into.end()),
            Self::Blend {
                from, into, dots, ..
            } => from.end().max(into.end()).max(dots.end()),
        }
    }

    pub(super) fn peer_mut(&mut self) -> Option<&mut u32> {
        match self {
            Self::Send { peer, .. }
            | Self::Receive { peer, .. }
            | Self::ReceiveReduce { peer, .. } => Some(peer),
            _ => None,
        }
    }
}
