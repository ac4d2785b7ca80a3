//! Which parts of a range are free. Pure.

/// Parts of a range, of which some are free. Lengths are the caller's affair; there is no smallest one.
#[derive(Debug)]
pub(super) struct Parts {
    /// From here on nothing is used.
    end: usize,
    size: usize,
    /// Start and length of the free ones before, by start. No two of them touch, and none touches the end.
    free: Vec<(usize, usize)>,
}

impl Parts {
    pub(super) fn new(size: usize) -> Self {
        Self {
            end: 0,
            size,
            free: Vec::new(),
        }
    }

    /// A part, which is taken from the smallest that is large enough.
    pub(super) fn take(&mut self, length: usize) -> Option<usize> {
        let fitting = self.free.iter().enumerate();
        let fitting = fitting.filter(|(_, (_, free))| *free >= length);
        if let Some((index, _)) = fitting.min_by_key(|(_, (_, free))| *free) {
            let (start, free) = &mut self.free[index];
            let taken = *start;
            *start += length;
            *free -= length;
            if *free == 0 {
                self.free.remove(index);
            }
            return Some(taken);
        }
        let start = self.end;
        self.end = start.checked_add(length).filter(|end| *end <= self.size)?;
        Some(start)
    }

    /// Frees a part that was taken.
    pub(super) fn give_back(&mut self, mut start: usize, mut length: usize) {
        let mut at = self.free.partition_point(|(other, _)| *other < start);
        if let Some((next, free)) = self.free.get(at).copied()
            && start + length == next
        {
            length += free;
            self.free.remove(at);
        }
        if let Some(before) = at.checked_sub(1)
            && let (other, free) = self.free[before]
            && other + free == start
        {
            (start, length) = (other, free + length);
            self.free.remove(before);
            at = before;
        }
        if start + length == self.end {
            self.end = start;
        } else {
            self.free.insert(at, (start, length));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::bed::Numbers;

    /// Against the plain way: a byte for each place.
    #[test]
    fn nothing_is_given_twice_and_what_is_given_back_is_whole_again() {
        let mut numbers = Numbers(1);
        let mut parts = Parts::new(500);
        let mut used = [false; 500];
        let mut taken: Vec<(usize, usize)> = Vec::new();
        for _ in 0..20_000 {
            if numbers.below(2) == 0 && !taken.is_empty() {
                let (start, length) = taken.swap_remove(numbers.below(taken.len()));
                used[start..start + length].fill(false);
                parts.give_back(start, length);
            } else {
                let length = 1 + numbers.below(60);
                let fits = used.windows(length).any(|window| !window.contains(&true));
                let start = parts.take(length);
                assert_eq!(start.is_some(), fits);
                if let Some(start) = start {
                    assert!(!used[start..start + length].contains(&true));
                    used[start..start + length].fill(true);
                    taken.push((start, length));
                }
            }
        }
        for (start, length) in taken {
            parts.give_back(start, length);
        }
        assert_eq!(parts.take(500), Some(0));
        assert_eq!(parts.take(usize::MAX), None);
    }
}
