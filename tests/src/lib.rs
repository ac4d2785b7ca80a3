//! End-to-end tests of kolo
