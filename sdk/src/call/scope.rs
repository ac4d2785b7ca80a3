//! On which ranks a call runs, and what shape its results have.

use kolo_transport::ids::Rank;

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::All {}
    impl Sealed for super::One {}
    impl Sealed for super::Ranks {}
}

/// The ranks that a call or a handle is for: [`All`], [`One`] or [`Ranks`].
///
/// It decides the shape of the results: `Vec<T>` in rank order, or `T` for one rank.
pub trait Scope: sealed::Sealed + Clone + Send + Sync + Unpin + 'static {
    /// What a call gives whose results are of type `T`.
    type Output<T>;

    /// The ranks, in the order of the results. `world_size` is the number of ranks that there are; a rank
    /// beyond it is found by the executor, which answers with an error.
    fn ranks(&self, world_size: usize) -> Vec<Rank>;

    /// Puts results, one for each of [`Scope::ranks`] in that order, into their shape.
    fn collect<T>(&self, results: Vec<T>) -> Self::Output<T>;
}

/// All ranks. Results come as a `Vec` whose index is the rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct All;

/// One rank. The result comes by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct One(pub Rank);

/// Some ranks, in ascending order and each once. Results come as a `Vec` in that order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranks(Vec<Rank>);

impl Ranks {
    /// These ranks. They are sorted, and one that is given twice counts once.
    pub fn new(ranks: impl IntoIterator<Item = Rank>) -> Self {
        let mut ranks: Vec<Rank> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        Self(ranks)
    }

    /// The ranks, ascending.
    #[must_use]
    pub fn as_slice(&self) -> &[Rank] {
        &self.0
    }
}

impl From<&[Rank]> for Ranks {
    fn from(ranks: &[Rank]) -> Self {
        Self::new(ranks.iter().copied())
    }
}

impl Scope for All {
    type Output<T> = Vec<T>;

    fn ranks(&self, world_size: usize) -> Vec<Rank> {
        (0..world_size as u32).map(Rank).collect()
    }

    fn collect<T>(&self, results: Vec<T>) -> Vec<T> {
        results
    }
}

impl Scope for One {
    type Output<T> = T;

    fn ranks(&self, _world_size: usize) -> Vec<Rank> {
        vec![self.0]
    }

    fn collect<T>(&self, results: Vec<T>) -> T {
        let mut results = results.into_iter();
        results.next().expect("a call on one rank has one result")
    }
}

impl Scope for Ranks {
    type Output<T> = Vec<T>;

    fn ranks(&self, _world_size: usize) -> Vec<Rank> {
        self.0.clone()
    }

    fn collect<T>(&self, results: Vec<T>) -> Vec<T> {
        results
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_give_ranks_in_order_and_shape_results() {
        assert_eq!(All.ranks(3), [Rank(0), Rank(1), Rank(2)]);
        assert_eq!(All.collect(vec!['a', 'b']), ['a', 'b']);
        assert_eq!(One(Rank(5)).ranks(3), [Rank(5)]);
        assert_eq!(One(Rank(5)).collect(vec!['a']), 'a');
        let some = Ranks::new([Rank(2), Rank(0), Rank(2)]);
        assert_eq!(some.ranks(1), [Rank(0), Rank(2)]);
        assert_eq!(some.collect(vec!['a', 'b']), ['a', 'b']);
        assert_eq!(Ranks::from(&[Rank(1)][..]).as_slice(), [Rank(1)]);
    }
}
