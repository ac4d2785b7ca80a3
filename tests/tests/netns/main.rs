//! Clusters on hosts with networks of their own (network namespaces).
//!
//! Needs root, `ip` and `nft`. Without them each test says that it is skipped, and passes.

// `pub` says here what other files use.
#![allow(unreachable_pub)]

mod elastic;
mod interfaces;
#[allow(dead_code)] // the other tests use more of it
#[path = "../e2e/elastic/job.rs"]
mod job;
mod lab;
mod run;
#[allow(dead_code)]
#[path = "../e2e/support.rs"]
mod support;
mod test_service;
mod test_task_service;
#[path = "../e2e/elastic/training.rs"]
mod training;
mod world;

/// Ends the test, with a line that says so, where network namespaces can't be made.
#[macro_export]
macro_rules! needs_namespaces {
    () => {
        needs_namespaces!(())
    };
    ($result:expr) => {
        if let Err(reason) = kolo_harness::netns::available() {
            eprintln!("SKIPPED {}: {reason}", module_path!());
            return $result;
        }
    };
}
