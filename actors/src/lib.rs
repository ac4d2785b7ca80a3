//! The actors of kolo: Coordinator, NodeColocator and Worker, as pure cores with thin actix shells
