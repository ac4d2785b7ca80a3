use kolo::{Executor, Rank};

#[kolo::function]
fn add(a: u32, b: u32) -> u32 {
    a + b
}

struct Counter;

#[kolo::executable]
impl Counter {
    fn new(_first: u64) -> Self {
        Counter
    }

    fn count(&mut self, by: u64) -> u64 {
        by
    }
}

async fn calls(executor: &Executor) -> kolo::Result<()> {
    let _sum: Vec<u32> = executor.run(add, (1, "two")).await?;
    let counter = executor.create::<Counter>("first").await?;
    let _count: Vec<u64> = counter.count("by").await?;
    let _one: Vec<u64> = counter.on(Rank(0)).count(1).await?;
    Ok(())
}

fn main() {
    let _ = calls;
}
