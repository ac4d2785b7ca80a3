//! What a head does for a job over the network. The life of a job is proved by the core, the simulation and the end-to-end tests.

use std::time::Duration;

use kolo_transport::wire::{HeadReply, HeadRequest, JobEvent, NodeRequest, SubmitFrame};

use super::fake::{Driver, FakeNode, config, pack, soon};
use crate::head::Head;

#[tokio::test]
async fn a_job_that_asks_for_a_rendezvous_has_one_until_it_ends() {
    let head = Head::start(config()).await.unwrap();
    let mut node = FakeNode::good(&head, 1).await;
    let driver = Driver::new(&head).await;
    let mut with = pack(1);
    with.rendezvous = true;
    let mut job = driver.submit(with).await;
    let (id, _) = job.placed().await;
    let start = node
        .sees(|request| matches!(request, NodeRequest::Start(_)))
        .await;
    let NodeRequest::Start(start) = start else {
        panic!("{start:?}");
    };
    let address = format!(
        "{}:{}",
        start.env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], start.env["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    );
    drop(tokio::net::TcpStream::connect(&address).await.unwrap());
    node.ready(id, 0).await;
    assert!(matches!(job.next().await, JobEvent::Healthy { .. }));
    let HeadReply::Job(info) = driver.member.ask(&HeadRequest::Job { job: id }).await else {
        panic!("no job");
    };
    assert_eq!(info.rendezvous.unwrap().to_string(), address);
    job.say(SubmitFrame::Stop).await;
    job.ended().await;
    soon(async {
        while tokio::net::TcpStream::connect(&address).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    head.stop().await;
}
