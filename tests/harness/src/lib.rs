//! A real kolo cluster inside cargo test, with faults on demand
