//! The file in which a worker leaves its error: `TORCHELASTIC_ERROR_FILE`, in torch's format.
//!
//! A worker whose entry point has torch's `@record` writes it when an exception ends the worker. The file is in a directory of
//! the job's warden.

use std::ffi::OsString;
use std::path::PathBuf;

use kolo_core::env::ERROR_FILE;
use kolo_process::Warden;
use kolo_transport::wire::WorkerError;
use serde_json::Value;

/// Most bytes that are read: torch writes a call stack of some KiB.
const MOST_BYTES: u64 = 1 << 20;

/// Longest message and longest line, in bytes.
const MOST_TEXT: usize = 1 << 10;

/// Most lines of a call stack.
const MOST_LINES: usize = 12;

/// The file of one worker.
#[derive(Debug)]
pub(super) struct ErrorFile(PathBuf);

impl ErrorFile {
    /// Names a file for a worker in the worker's environment, unless the user has: that one is the user's.
    pub(super) async fn name(
        warden: &Warden,
        name: &str,
        env: &mut Vec<(OsString, OsString)>,
    ) -> Option<Self> {
        if env.iter().any(|(name, _)| name == ERROR_FILE) {
            return None;
        }
        match warden.folder().await {
            Ok(folder) => {
                let path = folder.join(name);
                env.push((ERROR_FILE.into(), path.clone().into()));
                Some(Self(path))
            }
            Err(error) => {
                tracing::warn!(%error, "workers have no file for their errors");
                None
            }
        }
    }

    /// The worker's word, if it has left any. Reads and removes a file.
    pub(super) fn take(self) -> Option<WorkerError> {
        let bytes = kolo_process::take_file(&self.0, MOST_BYTES)?;
        (!bytes.is_empty()).then(|| parse(&bytes))
    }
}

/// What the file says. One that is not torch's is told as it is.
fn parse(bytes: &[u8]) -> WorkerError {
    let text = String::from_utf8_lossy(bytes);
    let value: Value = serde_json::from_slice(bytes).unwrap_or_default();
    let at = |pointer: &str| value.pointer(pointer);
    let message = at("/message/message").or_else(|| at("/message"));
    let Some(message) = message.and_then(Value::as_str) else {
        let mut lines = text.lines();
        let message = lines.by_ref().find(|line| !line.trim().is_empty());
        return WorkerError {
            message: shortened(message.unwrap_or_default()),
            callstack: last_lines(lines),
            ..WorkerError::default()
        };
    };
    let callstack = at("/message/extraInfo/py_callstack").and_then(Value::as_str);
    let callstack = callstack.unwrap_or_default();
    let second = at("/message/extraInfo/timestamp");
    let second = second.and_then(|second| match second {
        Value::String(text) => text.trim().parse().ok(),
        other => other.as_u64(),
    });
    // The whole text is at the end of the call stack.
    let first = message.lines().find(|line| !line.trim().is_empty());
    WorkerError {
        message: shortened(first.unwrap_or_default()),
        place: place(callstack),
        callstack: last_lines(callstack.lines()),
        at_s: second,
    }
}

fn shortened(line: &str) -> String {
    let mut end = line.len().min(MOST_TEXT);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    line[..end].to_owned()
}

fn last_lines<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    let lines: Vec<&str> = lines.filter(|line| !line.trim().is_empty()).collect();
    let from = lines.len().saturating_sub(MOST_LINES);
    lines[from..].iter().map(|line| shortened(line)).collect()
}

/// File and line of the innermost frame of a Python call stack.
fn place(callstack: &str) -> Option<String> {
    let frames = callstack.lines().rev();
    let mut frames = frames.filter_map(|line| {
        let (path, rest) = line
            .trim_start()
            .strip_prefix("File \"")?
            .split_once("\", line ")?;
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let file = path.rsplit('/').next()?;
        (digits > 0).then(|| format!("{file}:{}", &rest[..digits]))
    });
    frames.next().map(|place| shortened(&place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_torch_writes_is_understood() {
        let text = r#"{"message": {"message": "ValueError: bad\nbatch", "extraInfo": {"py_callstack":
            "Traceback (most recent call last):\n  File \"/lib/torch/record.py\", line 300, in wrapper\n    return f()\n  File \"/home/me/train.py\", line 12, in main\n    raise ValueError(x)\nValueError: bad\nbatch\n",
            "timestamp": "1700000000"}}}"#.replace("\n            ", " ");
        let error = parse(text.as_bytes());
        assert_eq!(error.to_string(), "ValueError: bad (train.py:12)");
        assert_eq!(error.at_s, Some(1_700_000_000));
        assert_eq!(error.callstack.len(), 7);
        assert_eq!(error.callstack[6], "batch");
    }

    #[test]
    fn other_forms_are_told_as_text_and_never_a_panic() {
        for (text, message, lines) in [
            (&b"{\"message\": \"plain\"}"[..], "plain", 0),
            (b"{\"message\": {\"message\": \"short\"}}", "short", 0),
            (
                b"{\"message\": {\"message\": \"a\", \"extraInfo\": 3}}",
                "a",
                0,
            ),
            (
                b"{\"message\": {\"message\": 7}}",
                "{\"message\": {\"message\": 7}}",
                0,
            ),
            (b"{\"message\": {\"mess", "{\"message\": {\"mess", 0),
            (b"\n\nout of memory\nat step 3\n", "out of memory", 1),
            (b"\xff\xfe", "\u{fffd}\u{fffd}", 0),
            (b"[[[[", "[[[[", 0),
            (b" \n", "", 0),
        ] {
            let error = parse(text);
            assert_eq!((&*error.message, error.callstack.len()), (message, lines));
            assert_eq!((error.place, error.at_s), (None, None));
        }
        let deep = "[".repeat(100_000);
        assert_eq!(parse(deep.as_bytes()).message.len(), MOST_TEXT);
        let long = format!("{}\n", "\u{e9}".repeat(MOST_TEXT)).repeat(100);
        let error = parse(long.as_bytes());
        assert!(error.message.len() <= MOST_TEXT);
        assert_eq!(error.callstack.len(), MOST_LINES);
        let late = br#"{"message": {"message": "a", "extraInfo": {"timestamp": -1}}}"#;
        assert_eq!(parse(late).at_s, None);
        let number = br#"{"message": {"message": "a", "extraInfo": {"timestamp": 7}}}"#;
        assert_eq!(parse(number).at_s, Some(7));
    }
}
