//! A head that a launch has started, and has not yet put on record.

use std::io::Read as _;
use std::path::Path;

/// Set for such a head. Its standard input is the launcher's to write to.
pub const HELD: &str = "KOLO_LAUNCH_HELD";

/// What the launcher writes when it has put the head on record.
pub const NOTED: &[u8] = b"noted\n";

/// Ends this process, and removes its state folder, if it was started by a launcher that goes away before it has put it on
/// record: nobody would ever find it. Otherwise does nothing. `kolo-head` calls it at its start.
pub fn end_unless_noted(state: &Path) {
    if std::env::var_os(HELD).is_none() {
        return;
    }
    let state = state.to_owned();
    std::thread::spawn(move || {
        let mut first = [0];
        if std::io::stdin().read_exact(&mut first).is_ok() {
            return;
        }
        tracing::warn!("the launcher has gone before it has taken note of this head, which ends");
        // The head may be writing there: then there is something left after the first time.
        for _ in 0..10 {
            if std::fs::remove_dir_all(&state).is_ok() {
                break;
            }
        }
        std::process::exit(1);
    });
}
