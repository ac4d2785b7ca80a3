//! Lines of this command's own.

use kolo_transport::wire::WorkerSignal;

use super::super::output::{Screen, failure, write_if_read};
use super::super::progress;

/// A line of this command's own. If nobody reads it there is nobody to tell, and nothing waits for that.
pub(crate) fn say(text: &str) {
    tell(format!("kolo: {text}"));
}

/// The same of something that has failed: in red on a terminal.
pub(super) fn failed(text: &str) {
    let line = failure(&format!("kolo: {text}"), Screen::of_this_process());
    tell(line);
}

fn tell(mut line: String) {
    line.push('\n');
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
