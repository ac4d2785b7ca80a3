//! Supervision of worker processes: the warden, spawning, output, exit and stop
