//! Clusters on hosts with networks of their own (network namespaces).
//!
//! Needs root, `ip` and `nft`. Without them each test says that it is skipped, and passes.

mod interfaces;
mod lab;
mod run;
mod test_service;
mod test_task_service;
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
