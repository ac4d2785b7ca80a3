//! Collective operations for a group of ranks: schedules, reductions and the communicator
