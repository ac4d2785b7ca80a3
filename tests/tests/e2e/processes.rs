//! What workers see.

use kolo::prelude::*;
use kolo_harness::TestCluster;

use crate::support::{environment, soon};

#[tokio::test]
async fn the_environment_is_that_of_both_families_and_of_kolo() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().nodes(2).slots(2).start().await?;
    let executor = Executor::builder()
        .hosts(2)
        .slots(2)
        .env("MINE", "yes")
        .env("OMP_NUM_THREADS", "3")
        .output(Output::Silent)
        .start(&cluster.connect().await?)
        .await?;
    let seen = soon(executor.run(environment, ())).await?;
    for (rank, env) in seen.iter().enumerate() {
        let get = |name: &str| env.get(name).map(String::as_str).unwrap_or_default();
        for (names, value) in [
            (&["HOROVOD_RANK", "RANK", "KOLO_RANK"][..], rank),
            (&["HOROVOD_SIZE", "WORLD_SIZE", "KOLO_SIZE"], 4),
            (&["HOROVOD_LOCAL_RANK", "LOCAL_RANK"], rank % 2),
            (&["HOROVOD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"], 2),
            (&["HOROVOD_CROSS_RANK", "GROUP_RANK"], rank / 2),
            (&["HOROVOD_CROSS_SIZE", "GROUP_WORLD_SIZE"], 2),
        ] {
            for name in names {
                assert_eq!(get(name), value.to_string(), "{name} of rank {rank}");
            }
        }
        assert_eq!((get("MINE"), get("OMP_NUM_THREADS")), ("yes", "3"));
        assert_eq!(
            (get("HOROVOD_CONTROLLER"), get("HOROVOD_CPU_OPERATIONS")),
            ("gloo", "gloo")
        );
        assert!(get("MASTER_PORT").parse::<u16>().is_ok_and(|port| port > 0));
        assert_eq!(get("MASTER_ADDR"), seen[0]["MASTER_ADDR"]);
        assert!(env.get("CUDA_VISIBLE_DEVICES").is_none_or(String::is_empty));
        assert!(
            !env.keys().any(|name| name.contains("TOKEN")),
            "no secret in an environment"
        );
    }
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}
