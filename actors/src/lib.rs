//! The actors of kolo: Coordinator, NodeColocator and Worker. They carry messages; `kolo-core` decides.
pub mod budget;
pub mod head;
mod later;
pub mod node;
