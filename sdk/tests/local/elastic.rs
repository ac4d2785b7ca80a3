//! Groups that lose workers and gain others.

use kolo::LocalCluster;
use kolo::prelude::*;

use super::Outcome;

/// One sum over all ranks.
#[kolo::function]
fn add_up(ctx: &Context) -> Result<u64> {
    let mut one = [1_u64];
    ctx.comm().all_reduce(&mut one, ReduceOp::Sum)?;
    Ok(one[0])
}

/// Without the word that the workers there have ended, the head would wait for more than a minute (G-3).
pub(super) async fn an_elastic_run_goes_on_when_the_node_of_half_its_workers_is_killed() -> Outcome
{
    let cluster = LocalCluster::builder().slots(2).start().await?;
    let added = cluster.add_local_node().await?;
    let elastic = Executor::builder().workers(1..=4).output(Output::Silent);
    let executor = elastic.start(&cluster).await?;
    let mut changes = executor.generations();
    while executor.world_size() < 4 {
        changes.next().await;
    }
    cluster.kill_local_node(added).await?;
    loop {
        match executor.run(add_up, ()).await {
            Ok(sums) => break assert_eq!(sums, [2, 2]),
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
        executor.recovered().await?;
    }
    executor.shutdown().await?;
    Ok(())
}

/// One sum over all ranks, that fails for all in the first generation though nobody is lost.
#[kolo::function]
fn add_up_later(ctx: &Context) -> Result<u64> {
    if ctx.generation().0 == 1 && ctx.rank() == 0 {
        ctx.comm().revoke("the first generation is not good enough");
    }
    let mut one = [1_u64];
    ctx.comm().all_reduce(&mut one, ReduceOp::Sum)?;
    Ok(one[0])
}

/// Only the workers know that their generation is over.
pub(super) async fn a_driver_goes_on_after_a_generation_that_ends_without_a_loss() -> Outcome {
    let cluster = LocalCluster::builder().slots(2).start().await?;
    let elastic = Executor::builder().workers(1..=2).output(Output::Silent);
    let executor = elastic.start(&cluster).await?;
    let mut changes = executor.generations();
    let first = changes.next().await.unwrap().table;
    let error = executor.run(add_up_later, ()).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    let next = executor.recovered().await?;
    assert_eq!(next.world_size, first.members.len());
    assert!(next.cause.contains("not good enough"), "{}", next.cause);
    assert_eq!(executor.run(add_up_later, ()).await?, [2, 2]);
    executor.shutdown().await?;
    Ok(())
}

/// Counts ranks. A rank ends its process on the way, if it is told so.
struct Headcount {
    sum: u64,
    steps: u64,
}

impl Elastic for Headcount {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        parts.value("sum", &mut self.sum);
        parts.value("steps", &mut self.steps);
    }
}

#[kolo::executable(elastic)]
impl Headcount {
    fn new(first: u64) -> Self {
        Self {
            sum: first,
            steps: 0,
        }
    }

    fn step(&mut self, ctx: &Context, dies: Option<usize>) -> Result<u64> {
        if dies == Some(ctx.rank()) {
            std::process::exit(3);
        }
        let mut one = [1_u64];
        ctx.comm().all_reduce(&mut one, ReduceOp::Sum)?;
        self.sum += one[0];
        self.steps += 1;
        Ok(self.sum)
    }

    fn state(&self) -> (u64, u64) {
        (self.sum, self.steps)
    }
}

/// A process is lost during a call and between two calls, in a group of a fixed size and in one that shrinks and grows again.
pub(super) async fn values_of_elastic_groups_go_back_to_their_last_commit() -> Outcome {
    for (workers, fixed) in [(2..=2, true), (1..=3, false)] {
        let cluster = LocalCluster::builder().slots(4).start().await?;
        let elastic = Executor::builder()
            .workers(workers)
            .output(Output::Silent)
            .restarts_without_progress(20);
        let executor = elastic.start(&cluster).await?;
        let value = executor.create::<Headcount>(100).await?;
        // The sum after each commit.
        let mut sums = vec![(100, 0)];
        let mut lost = 0;
        while sums.len() <= 6 {
            let commit = sums.len() as u64 - 1;
            let dies = (commit == 2 && lost == 0).then_some(0);
            let step = async {
                let sum = value.step(dies).await?;
                assert_eq!(sum, vec![sum[0]; sum.len()]);
                if commit == 4 && lost == 1 {
                    // Nobody hears of this one before the loss is over.
                    let gone = value.on(Rank(0)).step(Some(0)).await.unwrap_err();
                    assert_eq!(gone.kind(), CallErrorKind::GenerationOver, "{gone}");
                    executor.recovered().await?;
                }
                Ok::<_, kolo::Error>((sum[0], value.commit().await?))
            };
            match step.await {
                Ok((sum, number)) => {
                    assert_eq!(number, commit + 1);
                    sums.push((sum, number));
                }
                Err(error) => {
                    let error = error.downcast_ref::<CallError>().cloned().unwrap();
                    assert!(error.is_retryable(), "{error}");
                    let at = value.recovered().await?;
                    // A commit that was under way may count.
                    assert!(at == commit || at == commit + 1, "{at} {commit}");
                    let states = match value.state().await {
                        Ok(states) => states,
                        Err(again) => {
                            assert!(again.is_retryable(), "{again}");
                            continue;
                        }
                    };
                    if at == commit {
                        let expected = (sums[at as usize].0, at);
                        assert_eq!(states, vec![expected; states.len()]);
                    } else {
                        sums.push(states[0]);
                    }
                    assert!(!fixed || states.len() == 2);
                    lost += 1;
                }
            }
        }
        assert!(lost >= 2, "{lost}");
        executor.shutdown().await?;
    }
    Ok(())
}
