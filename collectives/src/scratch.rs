//! Buffers that are kept from one operation to the next.

/// Bytes that are aligned for every element type. They keep what they held.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    words: Vec<u64>,
}

impl Scratch {
    /// As [`Scratch::reserve`], and says whether there is so much memory: the process goes on if there is not. For sizes
    /// that peers have a say in.
    pub(crate) fn try_reserve(&mut self, bytes: usize) -> bool {
        let words = bytes.div_ceil(size_of::<u64>());
        if self.words.len() < words {
            self.words = Vec::new();
            // It is asked for and given back, and then taken as zeros, which the system has at hand.
            if Vec::<u64>::new().try_reserve_exact(words).is_err() {
                return false;
            }
            self.words = vec![0; words];
        }
        true
    }

    /// Makes sure that at least `bytes` bytes are there. Does nothing if they are.
    pub(crate) fn reserve(&mut self, bytes: usize) {
        let words = bytes.div_ceil(size_of::<u64>());
        if self.words.len() < words {
            // A fresh vector: nobody needs a copy of what the old one held.
            self.words = Vec::new();
            self.words = vec![0; words];
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.words)
    }

    /// Gives the memory back.
    pub(crate) fn release(&mut self) {
        self.words = Vec::new();
    }
}
