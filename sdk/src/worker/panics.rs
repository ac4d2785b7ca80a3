//! Panics of user code: caught, and told with their message, place and backtrace.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::Once;

use kolo_transport::wire::{CallFailure, FailureKind};

/// The frame below which a backtrace is kolo's and not the user's. Looked for by this name.
const BOUNDARY: &str = "kolo_user_code_begins_here";

#[derive(Debug)]
struct Captured {
    place: Option<String>,
    backtrace: Backtrace,
}

/// What the hook does on this thread.
#[derive(Debug)]
enum Notes {
    /// Outside of [`catch`] panics are none of our business.
    Off,
    /// Take some.
    On,
    /// Of the last panic.
    Taken(Captured),
}

thread_local! {
    static NOTES: RefCell<Notes> = const { RefCell::new(Notes::Off) };
}

/// Puts a hook in front of the one that is there, once per process. It only takes notes, and only for
/// panics inside of [`catch`]; the hook that was there prints the message to standard error as ever.
fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            note(info);
            before(info);
        }));
    });
}

fn note(info: &PanicHookInfo<'_>) {
    // A panic while the slot is borrowed or the thread ends must not become a second one.
    NOTES
        .try_with(|notes| {
            if let Ok(mut notes) = notes.try_borrow_mut()
                && !matches!(*notes, Notes::Off)
            {
                *notes = Notes::Taken(Captured {
                    place: info.location().map(ToString::to_string),
                    backtrace: Backtrace::force_capture(),
                });
            }
        })
        .unwrap_or(());
}

/// Runs user code. A panic becomes a failure with its message, place and backtrace.
///
/// Has no effect in programs built with `panic = "abort"`: there a panic ends the process.
pub(crate) fn catch<T>(code: impl FnOnce() -> T) -> Result<T, CallFailure> {
    install();
    NOTES.set(Notes::On);
    // What user code leaves in an unknown state is its executable, which is poisoned after a panic.
    let result = panic::catch_unwind(AssertUnwindSafe(|| kolo_user_code_begins_here(code)));
    let notes = NOTES.replace(Notes::Off);
    result.map_err(|payload| {
        let captured = match notes {
            Notes::Taken(captured) => Some(captured),
            Notes::Off | Notes::On => None,
        };
        failure(payload, captured)
    })
}

#[inline(never)]
fn kolo_user_code_begins_here<T>(code: impl FnOnce() -> T) -> T {
    let result = code();
    // Keeps the frame: without something after the call it could become a jump.
    std::hint::black_box(());
    result
}

fn failure(payload: Box<dyn Any + Send>, captured: Option<Captured>) -> CallFailure {
    let text = message(&*payload);
    // The payload is the user's value: its drop may panic too, and that would end the process.
    if panic::catch_unwind(AssertUnwindSafe(|| drop(payload))).is_err() {
        tracing::warn!("the payload of a panic panicked when it was dropped");
    }
    let (place, backtrace) = captured.map_or((None, None), |captured| {
        (captured.place, trimmed(&captured.backtrace))
    });
    let message = match place {
        Some(place) => format!("{text} ({place})"),
        None => text,
    };
    CallFailure {
        backtrace,
        ..CallFailure::new(FailureKind::Panic, message)
    }
}

fn message(payload: &(dyn Any + Send)) -> String {
    payload
        .downcast_ref::<&'static str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic whose payload is no text".to_owned())
}

/// The user's frames of a backtrace, if it was captured.
pub(crate) fn trimmed(backtrace: &Backtrace) -> Option<String> {
    (backtrace.status() == BacktraceStatus::Captured).then(|| trim(&backtrace.to_string()))
}

/// Leaves only the frames of user code: after the machinery of the panic, before kolo's own.
fn trim(backtrace: &str) -> String {
    // One frame is a line `  12: name`, with a line `at file:line:column` where that is known.
    let mut frames: Vec<Vec<&str>> = Vec::new();
    for line in backtrace.lines() {
        let starts = line
            .trim_start()
            .split_once(": ")
            .is_some_and(|(number, _)| number.bytes().all(|byte| byte.is_ascii_digit()));
        match frames.last_mut() {
            Some(frame) if !starts => frame.push(line),
            _ => frames.push(vec![line]),
        }
    }
    let is = |frame: &[&str], names: &[&str]| names.iter().any(|name| frame[0].contains(name));
    let end = frames
        .iter()
        .position(|frame| is(frame, &[BOUNDARY]))
        .unwrap_or(frames.len());
    // The outermost frame of the machinery: everything above is how the panic came to be told.
    let machinery = [
        "rust_begin_unwind",
        "__rustc::",
        "core::panicking::",
        "std::panicking::",
        "core::result::unwrap_failed",
        "core::option::unwrap_failed",
        "core::option::expect_failed",
        // An error that keeps its own.
        "std::backtrace::Backtrace::",
        "<kolo::error::Error as core::convert::From<",
        "kolo::error::Error::msg",
        "core::ops::try_trait::FromResidual",
    ];
    let start = frames[..end]
        .iter()
        .take_while(|frame| !frame[0].is_empty())
        .enumerate()
        .take(24)
        .filter(|(_, frame)| is(frame, &machinery))
        .map(|(index, _)| index + 1)
        .last()
        .unwrap_or(0);
    let mut text = String::new();
    for (number, frame) in frames[start..end].iter().enumerate() {
        let name = frame[0].split_once(": ").map_or(frame[0], |(_, name)| name);
        text.push_str(&[&format!("{number:4}"), ": ", name, "\n"].concat());
        for line in &frame[1..] {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(never)]
    fn the_users_function(value: Option<u32>) -> u32 {
        value.expect("there is a value")
    }

    #[test]
    fn a_panic_is_told_with_message_place_and_the_users_frames() {
        assert_eq!(catch(|| 5).unwrap(), 5);
        let failure = catch(|| the_users_function(None)).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Panic);
        assert!(
            failure.message.starts_with("there is a value (")
                && failure.message.contains("panics.rs:"),
            "{}",
            failure.message
        );
        let backtrace = failure.backtrace.unwrap();
        assert!(backtrace.contains("the_users_function"), "{backtrace}");
        for machinery in ["begin_unwind", "catch_unwind", BOUNDARY, "expect_failed"] {
            assert!(!backtrace.contains(machinery), "{machinery} in {backtrace}");
        }
        assert!(backtrace.starts_with("   0: "), "{backtrace}");
    }

    #[test]
    fn odd_payloads_are_told_too() {
        let failure = catch(|| panic::panic_any(7_u32)).unwrap_err();
        assert!(
            failure
                .message
                .starts_with("a panic whose payload is no text")
        );
        let failure = catch(|| panic!("{}", 1 + 1)).unwrap_err();
        assert!(failure.message.starts_with("2 ("), "{}", failure.message);
        // Passed on by hand: no hook, so no place and no backtrace.
        let failure = catch(|| panic::resume_unwind(Box::new("as it was"))).unwrap_err();
        assert_eq!(failure.message, "as it was");
        assert_eq!(failure.backtrace, None);
    }

    #[test]
    fn a_payload_that_panics_when_dropped_is_survived() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("bomb");
            }
        }
        let failure = catch(|| panic::panic_any(Bomb)).unwrap_err();
        assert!(failure.message.starts_with("a panic whose payload"));
    }

    #[test]
    fn a_backtrace_without_known_frames_is_left_whole() {
        let text = "   0: a::b\n             at src/a.rs:1:2\n   1: c\n";
        assert_eq!(trim(text), text);
    }
}
