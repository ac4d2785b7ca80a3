//! A script for Horovod's elastic launcher.

use kolo_harness::{Framework, TestCluster, kolo};

use crate::jobs::{Script, Shape, on_nodes, turn};

/// Nobody leaves and nobody comes: it is a script like others, as under `horovodrun`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_elastic_horovod_program_runs_as_a_static_job() -> anyhow::Result<()> {
    let Some(script) = Script::find(Framework::Horovod, "horovod_elastic.py")? else {
        return Ok(());
    };
    let _turn = turn().await;
    script.check(kolo(), &["-n", "2"], Shape { size: 2, hosts: 1 })?;
    let cluster = TestCluster::builder().nodes(2).slots(2).start().await?;
    on_nodes(&cluster, script)?;
    Ok(cluster.stop().await?)
}
