//! Where the events of a worker go: to standard error, which the driver shows.

use tracing_subscriber::EnvFilter;

/// What is shown where `RUST_LOG` says nothing: the user's own events, and of kolo and its links what is wrong.
const DEFAULT: &str = "info,kolo::=warn,kolo_collectives=warn,kolo_transport=warn,kolo_process=warn,quinn=warn,rustls=warn";

/// Sets a subscriber, unless there is one.
pub(super) fn start() {
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter(std::env::var(EnvFilter::DEFAULT_ENV).ok()))
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .without_time();
    // An error means that the user's `init` has set one.
    drop(subscriber.try_init());
}

fn filter(given: Option<String>) -> EnvFilter {
    let given = given.filter(|given| !given.trim().is_empty());
    match given.as_deref().map(EnvFilter::try_new) {
        Some(Ok(filter)) => filter,
        Some(Err(error)) => {
            super::complain(&format_args!("RUST_LOG is not understood: {error}"));
            EnvFilter::new(DEFAULT)
        }
        None => EnvFilter::new(DEFAULT),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Text(Arc<Mutex<Vec<u8>>>);

    impl Write for Text {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// What is written of one event of each kind.
    fn shown(given: Option<&str>) -> String {
        let text = Text::default();
        let writer = text.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter(given.map(str::to_owned)))
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(target: "kolo_app::train", "a");
            tracing::debug!(target: "app", "b");
            tracing::info!(target: "kolo::worker::control", "c");
            tracing::warn!(target: "kolo_collectives::stall", "d");
            tracing::info!(target: "kolo_transport::session", "e");
        });
        let text = text.0.lock().unwrap().clone();
        let text = String::from_utf8(text).unwrap();
        let last = |line: &str| line.chars().next_back().unwrap();
        text.lines().map(last).collect()
    }

    #[test]
    fn users_events_are_shown_from_info_on_and_kolos_from_warn_on() {
        for (given, expected) in [
            (None, "ad"),
            (Some(""), "ad"),
            (Some("debug"), "abcde"),
            (Some("error"), ""),
            (Some("kolo=info"), "acde"),
            (Some("no[such"), "ad"),
        ] {
            assert_eq!(shown(given), expected, "{given:?}");
        }
    }
}
