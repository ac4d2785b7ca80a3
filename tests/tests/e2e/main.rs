//! Whole clusters of real processes, through the public API.

// `pub` says here what other files use; sums of small integers are exact as floats.
#![allow(unreachable_pub, clippy::float_cmp)]

mod bad_input;
mod calls;
mod collectives;
mod deaths;
mod elastic;
mod ends;
mod executables;
mod horovod;
mod jobs;
mod obituary;
mod placement;
mod processes;
mod run;
mod run_edges;
mod run_elastic;
mod run_failures;
mod run_options;
mod run_signals;
mod standstill;
mod support;
mod test_elastic;
mod test_ray;
mod test_run;
mod test_service;
mod test_task_service;
mod trust;
