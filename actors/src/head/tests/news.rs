//! What nodes report, and what is pushed to them.

use super::*;

#[test]
fn a_push_is_tried_until_it_is_taken() {
    run(async {
        let world = World::new(LONG);
        let mut failures = 2;
        let mut node = world
            .register(1, 1, move |request| {
                if matches!(request, NodeRequest::Membership(_)) && failures > 0 {
                    failures -= 1;
                    return Some(Reply::Unknown("lost".to_owned()));
                }
                good(request)
            })
            .await;
        let (job, mut events) = world.submit(Placement::Pack { workers: 1 }).await.unwrap();
        world.report(&node, ready(job.job, 0)).await.unwrap();
        told(&mut events, |event| {
            matches!(event, JobEvent::Healthy { .. })
        })
        .await;
        for _ in 0..3 {
            node.sees(|request| matches!(request, NodeRequest::Membership(_)))
                .await;
        }
    });
}

#[test]
fn a_node_that_takes_no_push_is_asked_less_and_less_often() {
    run(async {
        let world = World::new(LONG);
        let mut node = world
            .register(1, 1, move |request| match request {
                NodeRequest::Membership(_) => Some(Reply::Unknown("broken".to_owned())),
                other => good(other),
            })
            .await;
        let (job, _events) = world.submit(Placement::Pack { workers: 1 }).await.unwrap();
        world.report(&node, ready(job.job, 0)).await.unwrap();
        let mut last = std::time::Instant::now();
        for pause in [0, 250, 500, 1000] {
            node.sees(|request| matches!(request, NodeRequest::Membership(_)))
                .await;
            let passed = last.elapsed();
            assert!(passed >= Duration::from_millis(pause), "{passed:?}");
            last = std::time::Instant::now();
        }
    });
}

#[test]
fn reports_that_come_together_keep_their_order() {
    run(async {
        let world = World::new(LONG);
        let node = world.register(1, 40, good).await;
        let placement = Placement::Pack { workers: 40 };
        let (job, mut events) = world.submit(placement).await.unwrap();
        // More than a mailbox takes at once; a worker that has ended does not become ready.
        let mut all: Vec<NodeEvent> = (0..40).map(|slot| ready(job.job, slot)).collect();
        all.push(exited(job.job, 39, Exit::Code(3)));
        let report = Report {
            node: node.id,
            session: node.session,
            events: all,
        };
        world.head.send(report).await.unwrap().unwrap();
        told(&mut events, |event| {
            matches!(event, JobEvent::Healthy { .. })
        })
        .await;
    });
}

#[test]
fn a_report_of_a_job_that_nobody_knows_has_it_stopped() {
    run(async {
        let world = World::new(LONG);
        let mut node = world.register(1, 1, good).await;
        world.report(&node, ready(JobId(9), 0)).await.unwrap();
        node.sees_stop(JobId(9)).await;
        // The last report of a job that ended is welcome.
        world
            .report(&node, NodeEvent::JobGone { job: JobId(8) })
            .await
            .unwrap();
    });
}

#[test]
fn a_node_that_reports_jobs_without_end_is_not_asked_without_end() {
    run(async {
        let world = World::new(LONG);
        let mut deaf = world.register(1, 1, |_| None).await;
        for job in 0..=MAX_CLEANING as u64 {
            world.report(&deaf, ready(JobId(job), 0)).await.unwrap();
        }
        let asked = std::iter::from_fn(|| deaf.seen.try_recv().ok()).count();
        assert_eq!(asked, MAX_CLEANING);
    });
}
