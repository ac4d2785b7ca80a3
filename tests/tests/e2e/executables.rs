//! Stateful types: constructors, methods of every kind, order, poison.

use kolo::prelude::*;

use crate::support::{group, soon};

struct Journal {
    rank: usize,
    entries: Vec<u32>,
}

#[kolo::executable]
impl Journal {
    fn new(ctx: &Context, first: u32) -> anyhow::Result<Self> {
        anyhow::ensure!(first < 100, "first is {first}; allowed is less than 100");
        Ok(Self {
            rank: ctx.rank(),
            entries: vec![first],
        })
    }

    fn add(&mut self, entry: u32) -> usize {
        self.entries.push(entry);
        self.entries.len()
    }

    async fn add_later(&mut self, entry: u32) -> anyhow::Result<usize> {
        tokio::task::yield_now().await;
        self.entries.push(entry);
        Ok(self.entries.len())
    }

    fn entries(&self) -> Vec<u32> {
        self.entries.clone()
    }

    fn spoil(&mut self) {
        self.entries.clear();
        panic!("rank {} spoils its journal", self.rank);
    }
}

#[tokio::test]
async fn state_stays_calls_run_in_order_and_a_panic_poisons_one_value() -> anyhow::Result<()> {
    let (cluster, executor) = group(2, 2).await?;
    let journal = soon(executor.create::<Journal>((7,))).await?;
    let pending: Vec<_> = (0..200).map(|entry| journal.add(entry).submit()).collect();
    assert_eq!(soon(journal.add_later(999)).await?, [202; 4]);
    for calls in pending {
        for call in calls {
            soon(call).await?;
        }
    }
    let expected: Vec<u32> = [7].into_iter().chain(0..200).chain([999]).collect();
    assert_eq!(soon(journal.entries()).await?, vec![expected.clone(); 4]);
    assert_eq!(soon(journal.on(Rank(3)).entries()).await?, expected);
    assert_eq!(soon(journal.on(Rank(3)).add(1)).await?, 203);
    assert_eq!(
        soon(journal.on_ranks(&[Rank(1), Rank(3)]).add(2)).await?,
        [203, 204]
    );

    // Another value of the type is another one, and a constructor that fails says why.
    let other = soon(executor.create::<Journal>((2,))).await?;
    assert_eq!(soon(other.entries()).await?, vec![[2]; 4]);
    let failed = soon(executor.create::<Journal>((100,))).await.map(drop);
    let error = failed.expect_err("it must fail").to_string();
    assert!(error.contains("first is 100"), "{error}");

    let error = soon(journal.spoil()).await.unwrap_err().to_string();
    assert!(error.contains("spoils its journal"), "{error}");
    let error = soon(journal.entries()).await.unwrap_err().to_string();
    assert!(error.contains("panic"), "{error}");
    assert_eq!(soon(other.entries()).await?, vec![[2]; 4]);
    let again = soon(executor.create::<Journal>((3,))).await?;
    assert_eq!(soon(again.entries()).await?, vec![[3]; 4]);
    drop((journal, other, again));
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}
