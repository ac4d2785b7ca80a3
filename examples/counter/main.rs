//! Four workers add up numbers together.

use kolo::prelude::*;

struct Counter {
    total: f64,
}

#[kolo::executable]
impl Counter {
    fn new(start: f64) -> Self {
        Self { total: start }
    }

    /// Adds up a number from every rank. All ranks get the same bits.
    fn add(&mut self, ctx: &Context, step: f64) -> anyhow::Result<f64> {
        let mut sum = step * ctx.rank() as f64;
        ctx.comm().all_reduce(&mut sum, ReduceOp::Sum)?;
        self.total += sum;
        Ok(self.total)
    }
}

#[kolo::function]
fn whoami(ctx: &Context) -> usize {
    ctx.rank()
}

#[kolo::main]
async fn main() -> anyhow::Result<()> {
    let cluster = Cluster::connect_or_local().await?;
    let executor = Executor::builder().workers(4).start(&cluster).await?;

    // A function, on all ranks. Results are in rank order.
    let ranks = executor.run(whoami, ()).await?;
    assert_eq!(ranks, [0, 1, 2, 3]);

    // One value on every rank, and a method of it on all of them: 10 + 0 + 1 + 2 + 3.
    let counter = executor.create::<Counter>((10.0,)).await?;
    let totals = counter.add(1.0).await?;
    assert_eq!(totals, [16.0; 4]);

    executor.shutdown().await?;
    println!("counter: ranks={ranks:?} totals={totals:?}");
    Ok(())
}
