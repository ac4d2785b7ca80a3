//! Calls: order, results, errors, panics, deadlines, cancellation.

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

#[tokio::test]
async fn results_come_in_rank_order_from_all_one_and_some() -> anyhow::Result<()> {
    let (cluster, executor) = group(2, 2).await?;
    assert_eq!(executor.world_size(), 4);
    assert_eq!(soon(executor.run(whoami, ())).await?, [0, 1, 2, 3]);
    assert_eq!(soon(executor.on(Rank(2)).run(whoami, ())).await?, 2);
    assert_eq!(
        soon(executor.on_ranks(&[Rank(3), Rank(0)]).run(whoami, ())).await?,
        [0, 3]
    );
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn an_error_names_rank_and_message_and_the_worker_lives_on() -> anyhow::Result<()> {
    let (cluster, executor) = group(1, 2).await?;
    let error = soon(executor.run(fails_on, (1,))).await.unwrap_err();
    assert_eq!(error.rank(), Some(Rank(1)));
    assert!(
        error.to_string().contains("rank 1 was told to fail"),
        "{error}"
    );
    let each = executor.submit(fails_on, (1,));
    let mut results = Vec::new();
    for result in each {
        results.push(soon(result).await.is_ok());
    }
    assert_eq!(results, [true, false]);
    assert_eq!(soon(executor.run(whoami, ())).await?, [0, 1]);
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn a_panic_comes_with_its_backtrace_and_the_worker_lives_on() -> anyhow::Result<()> {
    let (cluster, executor) = group(1, 2).await?;
    let error = soon(executor.run(panics_on, (0,))).await.unwrap_err();
    assert_eq!(error.rank(), Some(Rank(0)));
    assert!(
        error.to_string().contains("rank 0 was told to panic"),
        "{error}"
    );
    let backtrace = error.backtrace().unwrap_or_default();
    assert!(backtrace.contains("panics_on"), "{backtrace}");
    assert_eq!(soon(executor.run(panics_on, (9,))).await?, [0, 1]);
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn large_results_arrive_whole() -> anyhow::Result<()> {
    let (cluster, executor) = group(2, 1).await?;
    let texts = soon(executor.run(repeat, (b'k', 20_000_000))).await?;
    assert!(
        texts
            .iter()
            .all(|text| text.len() == 20_000_000 && text.bytes().all(|byte| byte == b'k'))
    );
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn a_deadline_ends_an_async_call_and_the_next_one_works() -> anyhow::Result<()> {
    let (cluster, executor) = group(1, 2).await?;
    let error = soon(
        executor
            .run(sleeps, (600_000,))
            .deadline(Duration::from_millis(50)),
    )
    .await
    .unwrap_err();
    assert!(error.to_string().contains("deadline"), "{error}");
    assert_eq!(soon(executor.run(sleeps, (1,))).await?, [1, 1]);
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[kolo::function]
fn seconds_left(ctx: &Context) -> Option<u64> {
    let deadline = ctx.deadline()?;
    Some(deadline.saturating_duration_since(Instant::now()).as_secs())
}

#[tokio::test]
async fn a_deadline_may_be_as_far_as_a_duration_goes() -> anyhow::Result<()> {
    let (cluster, executor) = group(1, 1).await?;
    // In milliseconds, the last two take more than 64 bits.
    for secs in [3600, u64::MAX / 1000 + 1, u64::MAX] {
        let call = executor
            .run(seconds_left, ())
            .deadline(Duration::from_secs(secs));
        let left = soon(call).await?[0];
        assert!(left.is_none_or(|left| left >= 3500), "{secs}: {left:?}");
    }
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn a_dropped_call_is_cancelled_and_the_next_one_works() -> anyhow::Result<()> {
    let (cluster, executor) = group(1, 1).await?;
    let pending = executor.submit(sleeps, (600_000,));
    drop(pending);
    assert_eq!(soon(executor.run(whoami, ())).await?, [0]);
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn a_worker_that_hangs_holds_up_only_itself_and_stops_with_the_group() -> anyhow::Result<()> {
    let (cluster, executor) = group(1, 2).await?;
    let pending = executor.on(Rank(0)).run(hang, ()).submit();
    assert_eq!(soon(executor.on(Rank(1)).run(whoami, ())).await?, 1);
    soon(executor.shutdown()).await?;
    for call in pending {
        assert!(soon(call).await.is_err());
    }
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn many_calls_in_flight_all_return() -> anyhow::Result<()> {
    let (cluster, executor) = group(2, 2).await?;
    let pending: Vec<_> = (0..500).map(|_| executor.submit(whoami, ())).collect();
    for call in pending {
        for (rank, result) in call.into_iter().enumerate() {
            assert_eq!(soon(result).await?, rank);
        }
    }
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn ranks_that_do_not_exist_and_calls_after_shutdown_are_refused() -> anyhow::Result<()> {
    let (cluster, executor) = group(1, 1).await?;
    let error = soon(executor.on(Rank(5)).run(whoami, ()))
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("no rank 5"), "{error}");
    let late = executor.clone();
    executor.shutdown().await?;
    assert!(soon(late.run(whoami, ())).await.is_err());
    cluster.stop().await?;
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
