//! The actors of kolo: Coordinator, NodeColocator and Worker, and its local agent. They carry messages; `kolo-core` decides.
pub mod agent;
pub mod budget;
pub mod head;
mod later;
pub mod log;
pub mod node;
