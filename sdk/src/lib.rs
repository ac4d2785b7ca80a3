//! Run one stateful Rust type on every slot of a cluster as one synchronous group
