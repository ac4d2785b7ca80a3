//! End-to-end tests of kolo: whole clusters of real processes, through the public API and `kolo-harness` alone.
//!
//! They are one test binary, `tests/e2e`, so that they link once.
