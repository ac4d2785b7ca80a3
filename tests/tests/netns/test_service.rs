//! The rows of Horovod's `test_service.py` that are about the services of hosts. Those about commands, their output and
//! exit codes are where kolo runs programs.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::needs_namespaces;
use crate::world::{Group, World};

/// `test_concurrent_requests_basic`: requests of 2 s each run side by side, and hold up no others.
#[test]
fn concurrent_requests() {
    needs_namespaces!();
    let world = World::new(&["a", "b"]).unwrap();
    world.network("eth0", "10.1.0.", 1500).unwrap();
    world.network("eth1", "10.2.0.", 1500).unwrap();
    // What comes to b over one network is lost, so that each probe takes its two seconds.
    world.hosts[1]
        .nft("add rule inet test input ip daddr 10.2.0.2 drop")
        .unwrap();
    world
        .run("10.1.0.100", async |cluster| {
            // The program is sent before, so that the group below only starts.
            Group::start(cluster, 2).await?.stop().await?;
            let ended = AtomicBool::new(false);
            let mut probes = (0..5)
                .map(|_| {
                    let mut kolo = cluster.kolo()?;
                    let args = ["interfaces", "--no-cache", "--format", "json"];
                    Ok(kolo
                        .args(args)
                        .stdout(std::process::Stdio::piped())
                        .spawn()?)
                })
                .collect::<anyhow::Result<Vec<_>>>()?;
            let begun = std::time::Instant::now();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| {
                    probes[0].wait().unwrap();
                    ended.store(true, Ordering::SeqCst);
                });
                let others = tokio::task::block_in_place(|| {
                    tokio::runtime::Handle::current().block_on(async {
                        for _ in 0..20 {
                            assert_eq!(cluster.status().await?.nodes.len(), 2);
                        }
                        anyhow::Ok(ended.load(Ordering::SeqCst))
                    })
                });
                assert!(!others.unwrap(), "the others waited for the probe");
                waiting.join().unwrap();
            });
            for probe in probes {
                let output = probe.wait_with_output()?;
                assert!(output.status.success());
            }
            // One after the other they would take ten.
            assert!(begun.elapsed().as_secs() < 8, "{:?}", begun.elapsed());
            Ok(())
        })
        .unwrap();
}
