//! Unmodified scripts as static jobs: on one host, on two nodes of a cluster, on two hosts with networks of their own.

use kolo_harness::{Framework, TestCluster, kolo, netns};
use rustix::system::uname;

use crate::jobs::{Script, Shape, on_nodes, turn};
use crate::world::World;

fn find(framework: Framework) -> anyhow::Result<Option<Script>> {
    let file = match framework {
        Framework::Horovod => "horovod_static.py",
        Framework::Torch => "torch_static.py",
    };
    Script::find(framework, file)
}

async fn on_this_machine(framework: Framework) -> anyhow::Result<()> {
    let Some(script) = find(framework)? else {
        return Ok(());
    };
    let _turn = turn().await;
    script.check(kolo(), &["-H", "localhost:2"], Shape { size: 2, hosts: 1 })
}

async fn on_two_nodes(framework: Framework) -> anyhow::Result<()> {
    let Some(script) = find(framework)? else {
        return Ok(());
    };
    let _turn = turn().await;
    let cluster = TestCluster::builder().nodes(2).slots(2).start().await?;
    on_nodes(&cluster, script, 4)?;
    Ok(cluster.stop().await?)
}

async fn in_two_namespaces(framework: Framework) -> anyhow::Result<()> {
    let Some(script) = find(framework)? else {
        return Ok(());
    };
    if let Err(reason) = netns::available() {
        eprintln!("SKIPPED: {reason}");
        return Ok(());
    }
    let _turn = turn().await;
    let world = World::new(&["a", "b"])?;
    world.network("eth0", "10.1.0.", 1500)?;
    // Horovod's process sets and torch look up the host's own name, which has to lead to the network: the name is the machine's.
    let name = uname().nodename().to_string_lossy().into_owned();
    for (number, host) in (1..).zip(&world.hosts) {
        let hosts = format!("127.0.0.1 localhost\n10.1.0.{number} {name}\n");
        host.write_etc("hosts", &hosts)?;
    }
    world.run("10.1.0.100", async |cluster| on_nodes(cluster, script, 2))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn horovod_on_this_machine() -> anyhow::Result<()> {
    on_this_machine(Framework::Horovod).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn horovod_on_two_nodes() -> anyhow::Result<()> {
    on_two_nodes(Framework::Horovod).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn horovod_in_two_namespaces() -> anyhow::Result<()> {
    in_two_namespaces(Framework::Horovod).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn torch_on_this_machine() -> anyhow::Result<()> {
    on_this_machine(Framework::Torch).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn torch_on_two_nodes() -> anyhow::Result<()> {
    on_two_nodes(Framework::Torch).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn torch_in_two_namespaces() -> anyhow::Result<()> {
    in_two_namespaces(Framework::Torch).await
}
