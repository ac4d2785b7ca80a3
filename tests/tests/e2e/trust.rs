//! Jobs whose node or driver is put out, and jobs that outlive their certificates.

use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime};

use kolo::prelude::*;
use kolo::{Cluster, Executor};
use kolo_harness::TestCluster;
use kolo_transport::wire::{HeadReply, HeadRequest};
use kolo_transport::{
    Connection, Credentials, Endpoint, EndpointConfig, Expect, Role, TransportRuntime, join,
};

use crate::support::{gone, hang, is_running, pid, soon, whoami};

/// The operator of a cluster.
struct Operator {
    head: SocketAddr,
    runtime: TransportRuntime,
    connection: Connection,
    endpoint: Endpoint,
}

impl Operator {
    async fn of(cluster: &TestCluster) -> anyhow::Result<Self> {
        let runtime = TransportRuntime::new(1)?;
        let head = cluster.address()?;
        let config = EndpointConfig::towards(head);
        let endpoint = Endpoint::bind(&runtime, cluster.credentials()?, config)?;
        let connection = soon(endpoint.connect(head, Expect::head())).await?;
        Ok(Self {
            head,
            runtime,
            connection,
            endpoint,
        })
    }

    async fn ask(&self, request: HeadRequest) -> anyhow::Result<HeadReply> {
        let limit = Duration::from_secs(30);
        Ok(self.connection.request(&request, limit).await?)
    }

    /// Credentials of a driver that is not the operator.
    async fn driver(&self) -> anyhow::Result<Credentials> {
        let request = HeadRequest::CreateToken {
            role: Role::Driver,
            admin: false,
            ttl_s: 600,
            uses: Some(1),
        };
        let HeadReply::Token { token, .. } = self.ask(request).await? else {
            anyhow::bail!("no token");
        };
        Ok(soon(join(&self.runtime, self.head, &token.0.parse()?)).await?)
    }

    async fn revoke(&self, role: Role, name: String) -> anyhow::Result<()> {
        let reason = "the test".to_owned();
        let reply = self.ask(HeadRequest::Revoke { role, name, reason }).await?;
        anyhow::ensure!(matches!(reply, HeadReply::Revoked { .. }), "{reply:?}");
        Ok(())
    }
}

async fn start(cluster: &Cluster, hosts: u32) -> anyhow::Result<Executor> {
    let executor = Executor::builder()
        .hosts(hosts)
        .slots(1)
        .grace(Duration::from_secs(1))
        .output(Output::Silent);
    Ok(soon(executor.start(cluster)).await?)
}

#[tokio::test]
async fn the_jobs_of_a_revoked_node_fail_as_if_it_was_lost() -> anyhow::Result<()> {
    // No lease ends in the time of this test.
    let lease = Duration::from_secs(60);
    let cluster = TestCluster::builder()
        .nodes(2)
        .slots(1)
        .lease(lease)
        .start()
        .await?;
    let operator = Operator::of(&cluster).await?;
    let executor = start(&cluster.connect().await?, 2).await?;
    let pids = soon(executor.run(pid, ())).await?;
    let lost = cluster.node_id(1)?;
    let table = executor.table();
    let member = table.members.iter().find(|member| member.node == lost);
    let rank = member.expect("it has a worker there").rank;
    let pending = executor.run(hang, ()).submit();
    operator.revoke(Role::Node, lost.to_string()).await?;
    for (index, call) in pending.into_iter().enumerate() {
        if index == rank.index() {
            let error = soon(call).await.unwrap_err().to_string();
            assert!(error.contains(&format!("rank {rank}")), "{error}");
        }
    }
    gone(pids[rank.index()]).await;
    assert!(is_running(pids[1 - rank.index()]));
    let status = cluster.status().await?;
    assert_eq!(status.revoked[0].name, lost.to_string());
    assert_eq!(status.nodes.iter().filter(|node| node.alive).count(), 1);
    executor.shutdown().await.ok();
    // What is left of the cluster goes on.
    let executor = start(&cluster.connect().await?, 1).await?;
    assert_eq!(soon(executor.run(whoami, ())).await?, [0]);
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn the_jobs_of_a_revoked_driver_end() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().nodes(1).slots(2).start().await?;
    let operator = Operator::of(&cluster).await?;
    let credentials = operator.driver().await?;
    let name = credentials.identity().name.clone();
    let driver = Cluster::connect(cluster.address()?, credentials.clone()).await?;
    let executor = start(&driver, 1).await?;
    let other = start(&cluster.connect().await?, 1).await?;
    let pids = soon(executor.run(pid, ())).await?;
    let pending = executor.run(hang, ()).submit();
    let begin = Instant::now();
    operator.revoke(Role::Driver, name).await?;
    for call in pending {
        soon(call).await.unwrap_err();
    }
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
    for pid in pids {
        gone(pid).await;
    }
    cluster
        .wait_until("the job ends", |info| info.running_jobs == 1)
        .await?;
    let error = soon(driver.status()).await.unwrap_err().to_string();
    assert!(error.contains("was revoked"), "{error}");
    let error = soon(Cluster::connect(cluster.address()?, credentials)).await;
    assert!(error.unwrap_err().to_string().contains("was revoked"));
    // Other drivers see nothing of it.
    assert_eq!(soon(other.run(whoami, ())).await?, [0]);
    other.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}

#[kolo::function]
fn sum(ctx: &Context) -> anyhow::Result<f64> {
    let mut value = [1.0];
    ctx.comm().all_reduce(&mut value, ReduceOp::Sum)?;
    Ok(value[0])
}

#[tokio::test]
async fn a_job_outlives_the_certificates_of_all_that_run_it() -> anyhow::Result<()> {
    let life = Duration::from_secs(6);
    let cluster = TestCluster::builder()
        .nodes(2)
        .slots(1)
        .certificate_life(life)
        .start()
        .await?;
    let operator = Operator::of(&cluster).await?;
    let driver = Cluster::connect(cluster.address()?, operator.driver().await?).await?;
    let executor = start(&driver, 2).await?;
    let pids = soon(executor.run(pid, ())).await?;
    // Certificates have whole seconds, of which the last one counts.
    let all_ended = SystemTime::now() + life + Duration::from_secs(2);
    while let Ok(left) = all_ended.duration_since(SystemTime::now()) {
        tokio::time::sleep(left).await;
    }
    // The workers connect to each other now for the first time, the driver anew to the head, and both go on.
    assert_eq!(soon(executor.run(sum, ())).await?, [2.0, 2.0]);
    assert_eq!(soon(executor.run(pid, ())).await?, pids);
    executor.shutdown().await?;
    let executor = start(&driver, 2).await?;
    assert_eq!(soon(executor.run(sum, ())).await?, [2.0, 2.0]);
    executor.shutdown().await?;
    // The operator of the test renews nothing.
    let late = Endpoint::bind(
        &operator.runtime,
        operator.endpoint.credentials(),
        EndpointConfig::towards(operator.head),
    )?;
    assert!(
        soon(late.connect(operator.head, Expect::head()))
            .await
            .is_err()
    );
    cluster.stop().await?;
    Ok(())
}
