//! Lines of this command's own.

use kolo_transport::wire::WorkerSignal;

use super::super::output::write_if_read;
use super::super::progress;

/// A line of this command's own. If nobody reads it there is nobody to tell, and nothing waits for that.
pub(crate) fn say(text: &str) {
    let line = format!("kolo: {text}\n");
    progress::above(|| write_if_read(rustix::stdio::stderr(), line.as_bytes()));
}

/// Says of a signal that no worker gets it.
pub(crate) fn not_passed_on(signal: WorkerSignal) {
    let name = match signal {
        WorkerSignal::User1 => "SIGUSR1",
        WorkerSignal::User2 => "SIGUSR2",
        // It is about this command: the workers get it when they run.
        WorkerSignal::Stop | WorkerSignal::Continue => return,
    };
    say(&format!(
        "{name}: not passed on: the job has not begun, or is ending"
    ));
}
