//! The actors of kolo: Coordinator, NodeColocator and Worker, as pure cores with thin actix shells
pub mod budget;
pub mod env;
pub mod head;
pub mod interfaces;
pub mod node;
pub mod pace;
pub mod placement;
pub mod plan;
pub mod ranks;
pub mod rendezvous;
