//! Calls: order, results, errors, panics, deadlines, cancellation.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::future::poll_fn;
use std::task::Poll;
use std::time::{Duration, Instant};

use kolo::prelude::*;

use crate::support::{group, hang, soon, whoami};

#[kolo::function]
fn fails_on(ctx: &Context, rank: usize) -> anyhow::Result<usize> {
    anyhow::ensure!(ctx.rank() != rank, "rank {rank} was told to fail");
    Ok(ctx.rank())
}

#[kolo::function]
fn panics_on(ctx: &Context, rank: usize) -> usize {
    assert!(ctx.rank() != rank, "rank {rank} was told to panic");
    ctx.rank()
}

#[kolo::function]
fn repeat(byte: u8, count: usize) -> String {
    char::from(byte).to_string().repeat(count)
}

#[kolo::function]
async fn sleeps(millis: u64) -> u64 {
    tokio::time::sleep(Duration::from_millis(millis)).await;
    millis
}

/// The same workers live on through all of it.
#[tokio::test]
async fn calls_return_fail_panic_and_are_cancelled_and_the_workers_live_on() -> anyhow::Result<()> {
    let (cluster, executor) = group(2, 2).await?;
    assert_eq!(executor.world_size(), 4);
    results_come_in_rank_order_from_all_one_and_some(&executor).await?;
    an_error_names_rank_and_message(&executor).await?;
    a_panic_comes_with_its_backtrace(&executor).await?;
    large_results_arrive_whole(&executor).await?;
    deadlines_end_calls_and_may_be_as_far_as_a_duration_goes(&executor).await?;
    drop(executor.submit(sleeps, (600_000,)));
    many_calls_in_flight_all_return(&executor).await?;
    let error = soon(executor.on(Rank(5)).run(whoami, ())).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("no rank 5"), "{error}");

    // One that hangs holds up only itself, and stops with the group.
    let pending = executor.on(Rank(0)).run(hang, ()).submit();
    assert_eq!(soon(executor.on(Rank(1)).run(whoami, ())).await?, 1);
    let late = executor.clone();
    soon(executor.shutdown()).await?;
    for call in pending {
        assert!(soon(call).await.is_err());
    }
    assert!(soon(late.run(whoami, ())).await.is_err());
    cluster.stop().await?;
    Ok(())
}

async fn results_come_in_rank_order_from_all_one_and_some(all: &Executor) -> anyhow::Result<()> {
    assert_eq!(soon(all.run(whoami, ())).await?, [0, 1, 2, 3]);
    assert_eq!(soon(all.on(Rank(2)).run(whoami, ())).await?, 2);
    let some = all.on_ranks(&[Rank(3), Rank(0)]);
    assert_eq!(soon(some.run(whoami, ())).await?, [0, 3]);
    Ok(())
}

async fn an_error_names_rank_and_message(all: &Executor) -> anyhow::Result<()> {
    let error = soon(all.run(fails_on, (1,))).await.unwrap_err();
    assert_eq!(error.rank(), Some(Rank(1)));
    let text = error.to_string();
    assert!(text.contains("rank 1 was told to fail"), "{text}");
    let mut results = Vec::new();
    for result in all.submit(fails_on, (1,)) {
        results.push(soon(result).await.is_ok());
    }
    assert_eq!(results, [true, false, true, true]);
    Ok(())
}

async fn a_panic_comes_with_its_backtrace(all: &Executor) -> anyhow::Result<()> {
    let error = soon(all.run(panics_on, (0,))).await.unwrap_err();
    assert_eq!(error.rank(), Some(Rank(0)));
    let text = error.to_string();
    assert!(text.contains("rank 0 was told to panic"), "{text}");
    let backtrace = error.backtrace().unwrap_or_default();
    assert!(backtrace.contains("panics_on"), "{backtrace}");
    assert_eq!(soon(all.run(panics_on, (9,))).await?, [0, 1, 2, 3]);
    Ok(())
}

async fn large_results_arrive_whole(all: &Executor) -> anyhow::Result<()> {
    let two = all.on_ranks(&[Rank(0), Rank(2)]);
    let texts = soon(two.run(repeat, (b'k', 20_000_000))).await?;
    let is_whole =
        |text: &String| text.len() == 20_000_000 && text.bytes().all(|byte| byte == b'k');
    assert!(texts.len() == 2 && texts.iter().all(is_whole));
    Ok(())
}

#[kolo::function]
fn seconds_left(ctx: &Context) -> Option<u64> {
    let deadline = ctx.deadline()?;
    Some(deadline.saturating_duration_since(Instant::now()).as_secs())
}

async fn deadlines_end_calls_and_may_be_as_far_as_a_duration_goes(
    all: &Executor,
) -> anyhow::Result<()> {
    let call = all.run(sleeps, (600_000,));
    let error = soon(call.deadline(Duration::from_millis(50))).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("deadline"), "{error}");
    assert_eq!(soon(all.run(sleeps, (1,))).await?, [1; 4]);
    // In milliseconds, the last two take more than 64 bits.
    for secs in [3600, u64::MAX / 1000 + 1, u64::MAX] {
        let call = all
            .run(seconds_left, ())
            .deadline(Duration::from_secs(secs));
        let left = soon(call).await?[0];
        assert!(left.is_none_or(|left| left >= 3500), "{secs}: {left:?}");
    }
    Ok(())
}

async fn many_calls_in_flight_all_return(all: &Executor) -> anyhow::Result<()> {
    let pending: Vec<_> = (0..500).map(|_| all.submit(whoami, ())).collect();
    for call in pending {
        for (rank, result) in call.into_iter().enumerate() {
            assert_eq!(soon(result).await?, rank);
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_driver_that_blocks_its_runtime_keeps_its_cluster() -> anyhow::Result<()> {
    let (cluster, executor) = group(2, 1).await?;
    // So that this runtime drives the links, and could take them with it.
    for _ in 0..50 {
        soon(executor.run(whoami, ())).await?;
    }
    let mut call = Box::pin(executor.run(repeat, (b'x', 8 << 20)).into_future());
    let begun = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_pending())).await;
    assert!(begun);
    // Longer than any link may be silent.
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(soon(call).await?.len(), 2);
    assert_eq!(soon(executor.run(whoami, ())).await?, [0, 1]);
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}
