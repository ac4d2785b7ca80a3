//! How jobs come to a node, and how their workers start or fail to.

use kolo_transport::wire::Exit;
use tempfile::TempDir;

use crate::bed::{Bed, own_program};

#[tokio::test]
async fn a_program_that_does_not_speak_as_it_should_is_killed() {
    let dir = TempDir::new().unwrap();
    let copy = dir.path().join("copy");
    std::fs::copy(own_program().1, &copy).unwrap();
    let copy = copy.to_str().unwrap();
    for (mode, parts) in [
        ("garbage", ["its control socket", ""]),
        ("hang-up", ["closed its control socket", ""]),
        ("replace", [copy, "not the job's program"]),
    ] {
        let bed = Bed::start().await;
        let mut start = bed.job(1, mode);
        let name = "TEST_WORKER_COPY".to_owned();
        start.user_env.insert(name, copy.to_owned());
        let failure = bed.fails(&start).await;
        assert_eq!(failure.exit, Exit::Signal(9), "{mode}");
        let reason = failure.reason.unwrap();
        assert!(parts.iter().all(|part| reason.contains(part)), "{reason}");
        bed.stop(start.job).await;
        bed.end().await;
    }
}

#[tokio::test]
async fn a_node_without_a_warden_says_so_and_lives_on() {
    let bed = Bed::start_with(|config| config.warden_exe = Some("/no/such/warden".into())).await;
    let start = bed.job(1, "");
    let failure = bed.fails(&start).await;
    assert!(failure.reason.unwrap().contains("/no/such/warden"));
    bed.stop(start.job).await;
    bed.end().await;
}
