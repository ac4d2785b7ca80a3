//! The rows of Horovod's `test/single/test_service.py` about services that are shut down, by name. The service is a daemon
//! here, and a request is a job of `kolo run`.

use rustix::process::Signal;

use crate::drain::{Job, site_with_node};
use crate::process::{KOLO, command};

/// `test_shutdown_during_request_basic`: five requests run when the service is shut down. It waits for all of them, refuses new
/// ones, and all succeed.
#[test]
fn test_shutdown_during_request_basic() {
    let (mut site, _node) = site_with_node(&[], &[]);
    // Each has begun before the first may end: they are side by side.
    let mut jobs: Vec<Job> = (0..5)
        .map(|number| Job::with(&site, &format!("end{number}"), "echo slept"))
        .collect();
    // As `timeout` does it: the same again is no second signal.
    site.head.signal(Signal::TERM);
    site.head.signal(Signal::TERM);
    site.head.says("waiting for jobs to end");
    let refused = site.kolo(&site.admin(), &["run", "-n", "1", "--", "true"]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(error.contains("takes no more jobs"), "{refused:?}");
    let last = jobs.pop().unwrap();
    for mut job in jobs.into_iter().chain([last]) {
        assert!(site.head.is_running(), "{}", site.head.printed.text());
        job.end();
        assert!(job.kolo.end().success(), "{}", job.kolo.printed.text());
        assert_eq!(job.kolo.printed.count("slept"), 1);
    }
    assert!(site.head.end().success(), "{}", site.head.printed.text());
}

/// `test_shutdown_during_request_basic_task`: a command's exit code reaches whoever waits for it also when the service is shut
/// down meanwhile; after that it can't be called.
#[test]
fn test_shutdown_during_request_basic_task() {
    let (mut site, mut node) = site_with_node(&[], &[]);
    let mut job = Job::with(&site, "end", "exit 3");
    // Both services: the one that runs the command, and the one that is waited at.
    node.signal(Signal::TERM);
    node.says("waiting for jobs to end");
    site.head.signal(Signal::TERM);
    site.head.says("waiting for jobs to end");
    job.end();
    let status = job.kolo.end();
    assert_eq!(status.code(), Some(3), "{}", job.kolo.printed.text());
    assert!(node.end().success(), "{}", node.printed.text());
    assert!(site.head.end().success(), "{}", site.head.printed.text());
    let after = command(KOLO)
        .args(["--head", &site.address.to_string(), "--credentials"])
        .arg(site.admin())
        .args(["--connect-timeout", "1", "jobs"])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&after.stderr).into_owned();
    assert_eq!(after.status.code(), Some(4), "{error}");
}
