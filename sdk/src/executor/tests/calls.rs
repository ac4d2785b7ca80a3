//! Calls, as nodes and drivers see them.

use super::*;

#[tokio::test]
async fn arguments_over_the_limit_are_refused_before_anything_is_sent() {
    let (executor, _job, fake) = Fake::group(1, 1).await;
    // Zeroes that are never looked at take no memory.
    let huge = vec![0_u8; crate::call::MAX_BODY + 1];
    let op = CallOp::Function {
        name: "f".to_owned(),
    };
    let target = executor.inner.target.clone();
    let call = Call::<All, u32>::new(target, All, "f".to_owned(), op, Ok(huge));
    let error = soon(call).await.unwrap_err();
    assert_eq!(error.kind(), CallErrorKind::Arguments);
    assert!(error.to_string().contains("1073741824"), "{error}");
    let next = tokio::spawn(executor.run(add, 1).into_future());
    let (call, ranks, ..) = fake.nodes[0].call().await;
    fake.nodes[0].returns(call, ranks[0], &1_u32).await;
    assert_eq!(soon(next).await.unwrap().unwrap(), [1]);
}

#[tokio::test]
async fn a_dropped_future_is_cancelled_at_the_node_and_its_late_result_is_ignored() {
    let (executor, _job, fake) = Fake::group(1, 2).await;
    let node = &fake.nodes[0];
    let dropped = tokio::spawn(executor.run(add, 1).into_future());
    let (late, ..) = node.call().await;
    node.returns(late, Rank(0), &1_u32).await;
    dropped.abort();
    let cancelled = soon(node.frame()).await.0;
    let on_both = CallFrame::Cancel {
        call: late,
        ranks: vec![Rank(0), Rank(1)],
    };
    let on_rest = CallFrame::Cancel {
        call: late,
        ranks: vec![Rank(1)],
    };
    assert!(
        cancelled == on_both || cancelled == on_rest,
        "{cancelled:?}"
    );
    let next = tokio::spawn(executor.run(add, 2).into_future());
    let (call, ..) = node.call().await;
    node.returns(late, Rank(1), &77_u32).await;
    node.returns(call, Rank(0), &2_u32).await;
    node.returns(call, Rank(1), &3_u32).await;
    assert_eq!(soon(next).await.unwrap().unwrap(), [2, 3]);

    let mut each = executor.submit(add, 1);
    let (call, ..) = node.call().await;
    drop(each.remove(0));
    assert_eq!(
        soon(node.frame()).await.0,
        CallFrame::Cancel {
            call,
            ranks: vec![Rank(0)]
        }
    );
    node.returns(call, Rank(1), &9_u32).await;
    assert_eq!(soon(each.remove(0)).await.unwrap(), 9);
}

#[tokio::test]
async fn a_deadline_ends_the_call_here_and_is_told_to_the_node() {
    let (executor, _job, fake) = Fake::group(1, 2).await;
    let call = executor.run(add, 1).deadline(Duration::from_millis(20));
    let waiting = tokio::spawn(call.into_future());
    let frame = soon(fake.nodes[0].frame()).await.0;
    let CallFrame::Call {
        call, deadline_ms, ..
    } = frame
    else {
        panic!("{frame:?}")
    };
    assert_eq!(deadline_ms, Some(20));
    let error = soon(waiting).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), CallErrorKind::Deadline);
    assert!(error.is_retryable());
    let ranks = vec![Rank(0), Rank(1)];
    assert_eq!(
        soon(fake.nodes[0].frame()).await.0,
        CallFrame::Cancel { call, ranks }
    );
}

#[tokio::test]
async fn calls_in_flight_are_bounded() {
    let (builder, fake) = (Executor::builder().max_in_flight(2), Fake::new(1).await);
    let (executor, _job) = fake.run(builder.workers(1)).await;
    let node = &fake.nodes[0];
    let first = executor.submit(add, 1);
    let second = executor.submit(add, 2);
    let refused = soon(executor.submit(add, 3).remove(0)).await.unwrap_err();
    assert_eq!(refused.kind(), CallErrorKind::Busy);
    assert!(refused.is_retryable());
    // One that is awaited waits its turn.
    let mut third = tokio::spawn(executor.run(add, 3).into_future());
    settle(&mut third).await;
    let (call, ..) = node.call().await;
    node.returns(call, Rank(0), &1_u32).await;
    let (other, ..) = node.call().await;
    assert!(other > call);
    let (turn, _, _, args) = node.call().await;
    assert_eq!(crate::codec::decode::<(u32,)>(&args).unwrap(), (3,));
    node.returns(turn, Rank(0), &3_u32).await;
    assert_eq!(soon(third).await.unwrap().unwrap(), [3]);
    // A future that is dropped gives its place back.
    drop((first, second));
    assert_eq!(
        executor.submit(add, 4).len() + executor.submit(add, 5).len(),
        2
    );
}

#[tokio::test]
async fn values_are_made_called_and_dropped_in_order() {
    let (executor, _job, fake) = Fake::group(1, 2).await;
    let node = &fake.nodes[0];
    let both = |call| async move {
        node.returns(call, Rank(0), &1_u32).await;
        node.returns(call, Rank(1), &2_u32).await;
    };
    let create = tokio::spawn(executor.create::<Counter>(7).into_future());
    let (call, _, op, args) = node.call().await;
    let CallOp::Create { object, class } = op else {
        panic!("{op:?}")
    };
    assert_eq!(
        (class.as_str(), &args[..]),
        ("tests::Counter", &[0x91, 7][..])
    );
    both(call).await;
    let counter = soon(create).await.unwrap().unwrap();
    let one = counter.on(Rank(1));
    let add = tokio::spawn(counter.add(3).into_future());
    let (call, _, op, args) = node.call().await;
    assert_eq!(
        op,
        CallOp::Method {
            object,
            name: "add".to_owned()
        }
    );
    assert_eq!(&args[..], [0x91, 3]);
    both(call).await;
    assert_eq!(soon(add).await.unwrap().unwrap(), [1, 2]);
    // A call that is sent after the last handle has gone still finds the value.
    let call = one.add(4);
    drop((counter, one));
    let late = call.submit();
    assert!(matches!(node.call().await.2, CallOp::Method { .. }));
    assert_eq!(node.call().await.2, CallOp::Drop { object });
    drop(late);
}

#[tokio::test]
async fn a_value_that_one_rank_could_not_make_is_dropped_on_the_others() {
    let (executor, _job, fake) = Fake::group(2, 1).await;
    let create = tokio::spawn(executor.create::<Counter>(7).into_future());
    let (call, _, op, _) = fake.nodes[1].call().await;
    let CallOp::Create { object, .. } = op else {
        panic!("{op:?}")
    };
    fake.nodes[0].call().await;
    fake.nodes[1]
        .fails(
            call,
            Rank(1),
            CallFailure::new(FailureKind::Error, "no file"),
        )
        .await;
    let error = soon(create).await.unwrap().map(drop).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("`tests::Counter` failed on rank 1 (host-1)"),
        "{error}"
    );
    for node in &fake.nodes {
        assert_eq!(node.call().await.2, CallOp::Drop { object });
    }
}
