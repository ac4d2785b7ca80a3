//! What the driver's operations fail with.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use kolo_transport::endpoint::{BindError, ConnectError as TransportError};
use kolo_transport::identity::IdentityError;
use kolo_transport::ids::JobId;
use kolo_transport::join::JoinError;
use kolo_transport::session::RequestError;
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{JobState, NodeReply, PlacedNode, RankFailure, Refusal};

pub use crate::call::{BusyRank, CallError, CallErrorKind, FailedCall, RankCause, RankError};
pub use crate::entry::EntryError;
pub use crate::options::OptionsError;

/// `Result` with [`Error`](struct@Error) as the default error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error, with the backtrace of where it became one.
///
/// For programs that do not care which error it is: every error type converts into it with `?`. It prints itself
/// with its sources; a backtrace is kept if `RUST_BACKTRACE` asks for it. It is no [`std::error::Error`] itself, for else
/// that conversion would not be possible; [`Error::into_inner`] gives one.
pub struct Error {
    inner: Box<dyn std::error::Error + Send + Sync>,
    backtrace: std::backtrace::Backtrace,
}

impl Error {
    /// An error with this message.
    pub fn msg(message: impl fmt::Display) -> Self {
        Self {
            inner: message.to_string().into(),
            backtrace: std::backtrace::Backtrace::capture(),
        }
    }

    /// The error that it was made of.
    pub fn into_inner(self) -> Box<dyn std::error::Error + Send + Sync> {
        self.inner
    }

    /// The error that it was made of, if it is an `E`.
    pub fn downcast_ref<E: std::error::Error + 'static>(&self) -> Option<&E> {
        self.inner.downcast_ref()
    }

    /// Where it became an [`Error`](struct@Error); its status tells whether it was kept.
    pub fn backtrace(&self) -> &std::backtrace::Backtrace {
        &self.backtrace
    }
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for Error {
    fn from(error: E) -> Self {
        Self {
            inner: Box::new(error),
            backtrace: std::backtrace::Backtrace::capture(),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.inner, f)?;
        let mut shown = self.inner.to_string();
        let mut source = self.inner.source();
        while let Some(error) = source {
            // Many errors repeat their source in their own text.
            let text = error.to_string();
            if !shown.contains(&text) {
                write!(f, ": {text}")?;
                shown = text;
            }
            source = error.source();
        }
        Ok(())
    }
}

/// What `main` prints: the error as people read it, and its backtrace if it was kept.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)?;
        if self.backtrace.status() == std::backtrace::BacktraceStatus::Captured {
            write!(f, "\n\n{}", self.backtrace)?;
        }
        Ok(())
    }
}

/// Why there are no usable credentials.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {
    /// The files of a directory are missing, unreadable, readable by others, or do not belong together. Get new ones with
    /// `kolo login`.
    #[error("no usable credentials in {}: {error}", .dir.display())]
    Directory {
        /// The directory.
        dir: PathBuf,
        /// What is wrong.
        error: IdentityError,
    },
    /// The file of a token can't be read.
    #[error("the token file {} can't be read: {error}", .path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// Why not.
        error: std::io::Error,
    },
    /// What should be a token is none. Copy the whole line that the head printed.
    #[error("{origin} holds no token: {reason}")]
    Token {
        /// Where it came from.
        origin: String,
        /// What is wrong. The token itself is not in it.
        reason: String,
    },
    /// `KOLO_HEAD` is set, but no credentials are. Set `KOLO_CREDENTIALS` to a directory that `kolo login` made, or
    /// `KOLO_TOKEN_FILE` to the file of a driver token.
    #[error(
        "KOLO_HEAD is {head}, but there are no credentials for it: set KOLO_CREDENTIALS to a directory that `kolo login` made, or KOLO_TOKEN_FILE to the file of a driver token"
    )]
    Missing {
        /// The head.
        head: String,
    },
    /// A variable is not valid UTF-8.
    #[error("the variable {name} is not valid UTF-8")]
    Variable {
        /// Its name.
        name: &'static str,
    },
}

/// Why a cluster can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// This process is no driver: kolo started it, or its `main` lacks kolo's entry.
    #[error(transparent)]
    Entry(#[from] EntryError),
    /// The head's address is none, or its name is not known. Give `HOST:PORT`.
    #[error("`{given}` is no address of a head: {reason}; give HOST:PORT")]
    Address {
        /// What was given.
        given: String,
        /// What is wrong.
        reason: String,
    },
    /// There are no usable credentials.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The credentials are those of a node, worker or head. Use those of a driver.
    #[error("the credentials are those of {given}; a driver's are needed")]
    NotDriver {
        /// Whose they are.
        given: String,
    },
    /// The token was refused, or the head could not be reached with it.
    #[error("the cluster could not be joined: {0}")]
    Join(JoinError),
    /// The head can't be reached, is of another cluster, or does not let this driver in.
    #[error("can't connect to the head: {0}")]
    Head(TransportError),
    /// No socket or thread could be had.
    #[error("the driver's endpoint could not be made: {reason}")]
    Endpoint {
        /// What failed.
        reason: String,
    },
    /// The cluster inside this process could not be started.
    #[error("the local cluster could not be started: {reason}")]
    Local {
        /// What failed.
        reason: String,
    },
}

impl From<JoinError> for ConnectError {
    fn from(error: JoinError) -> Self {
        Self::Join(error)
    }
}

impl ConnectError {
    /// Whether the same attempt may succeed later without a change.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Head(error) => error.is_retryable(),
            Self::Join(error) => error.is_retryable(),
            _ => false,
        }
    }
}

impl From<BindError> for ConnectError {
    fn from(error: BindError) -> Self {
        Self::Endpoint {
            reason: error.to_string(),
        }
    }
}

/// Why the head did not answer a question.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// The connection to the head had ended, and there is no new one.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The head gave no answer.
    #[error("the head at {head} gave no answer: {error}")]
    Request {
        /// The head.
        head: SocketAddr,
        /// What happened.
        error: RequestError,
    },
    /// The head said no. Its message says what to do.
    #[error("the head refused: {0}")]
    Refused(Refusal),
    /// The head's answer does not fit the question. It is of another version, or faulty.
    #[error("the head's answer does not fit the question: {reply}")]
    Unexpected {
        /// The answer.
        reply: String,
    },
}

impl From<Refusal> for ClusterError {
    fn from(error: Refusal) -> Self {
        Self::Refused(error)
    }
}

impl ClusterError {
    /// Whether the same question may be answered later without a change.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connect(error) => error.is_retryable(),
            Self::Request { error, .. } => error.is_retryable(),
            Self::Refused(refusal) => refusal.is_retryable(),
            Self::Unexpected { .. } => false,
        }
    }
}

/// Why a group did not start. Nothing of it is left then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// This program's `main` lacks kolo's entry, so that it can't be run as a worker.
    #[error(transparent)]
    Entry(#[from] EntryError),
    /// The options make no sense, or not together. The message says what to change.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// This program's own executable can't be read, which the workers are to run.
    #[error("the program's own executable {} can't be read: {reason}", .path.display())]
    Program {
        /// Its path.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The head can't be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The head refused the job: it can't be placed now, a worker did not start, it took too long. The message
    /// says what was asked for, what there is, and where.
    #[error("the group did not start: {refusal}{}", worker_text(&.refusal.message, .failure.as_deref()))]
    Refused {
        /// The head's reason.
        refusal: Refusal,
        /// The worker that failed first, if it was one.
        failure: Option<Box<RankFailure>>,
    },
    /// The connection to the head ended while the group was starting.
    #[error("the group did not start: the head at {head} is gone: {reason}")]
    HeadLost {
        /// The head.
        head: SocketAddr,
        /// What happened.
        reason: String,
    },
    /// A node can't be reached from here, though it can from the head. Check the network and the address under which
    /// the node listens.
    #[error("the group did not start: the driver can't reach {hostname} at {address}: {reason}")]
    NodeUnreachable {
        /// The node's hostname.
        hostname: String,
        /// Its daemon's address.
        address: SocketAddr,
        /// What happened.
        reason: String,
    },
    /// A node did not take the program, or does not let this driver call its workers.
    #[error("the group did not start: {hostname} refused {what}: {refusal}")]
    NodeRefused {
        /// The node's hostname.
        hostname: String,
        /// What it refused.
        what: &'static str,
        /// Its reason.
        refusal: Refusal,
    },
    /// It took longer than the start timeout, and the head did not say why. Raise `start_timeout`, or look at the
    /// head's log.
    #[error(
        "the group did not start within {}, while {phase}; raise start_timeout, or look at the logs of the head and the nodes",
        Span(*after)
    )]
    TimedOut {
        /// The start timeout.
        after: Duration,
        /// What was being done.
        phase: &'static str,
    },
    /// The head or a node said something that does not fit. It is of another version, or faulty.
    #[error("the group did not start: {from} answered something that does not fit: {reply}")]
    Unexpected {
        /// Who.
        from: String,
        /// What.
        reply: String,
    },
}

/// A worker's end on lines of its own, unless the message has it already.
fn worker_text(message: &str, failure: Option<&RankFailure>) -> String {
    let text = failure.map(RankFailure::to_string).unwrap_or_default();
    if message.contains(&text) {
        String::new()
    } else {
        format!("\n{text}")
    }
}

impl StartError {
    pub(crate) fn unreachable(node: &PlacedNode, error: &dyn fmt::Display) -> Self {
        Self::NodeUnreachable {
            hostname: node.hostname.clone(),
            address: node.address,
            reason: error.to_string(),
        }
    }

    /// A node was asked for something, and its reply is not the one that was hoped for.
    pub(crate) fn unfit(node: &PlacedNode, what: &'static str, reply: NodeReply) -> Self {
        let hostname = node.hostname.clone();
        match reply {
            NodeReply::Refused(refusal) => Self::NodeRefused {
                hostname,
                what,
                refusal,
            },
            other => Self::Unexpected {
                from: hostname,
                reply: format!("{other:?}"),
            },
        }
    }

    /// Whether the same start may succeed later without a change: resources may be free by then, a node may be
    /// back. A mistake in the options or a program that does not start is not.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connect(error) => error.is_retryable(),
            Self::Refused { refusal, .. } | Self::NodeRefused { refusal, .. } => {
                use kolo_transport::wire::RefusalKind::{NodeLost, Stopped};
                refusal.is_retryable() || matches!(refusal.kind, NodeLost | Stopped)
            }
            Self::HeadLost { .. } | Self::NodeUnreachable { .. } | Self::TimedOut { .. } => true,
            Self::Entry(_) | Self::Options(_) | Self::Program { .. } | Self::Unexpected { .. } => {
                false
            }
        }
    }
}

/// Why there is no next generation of a group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecoveryError {
    /// The group never changes its members, and has lost one. Start a new one; give bounds of the number of workers, so that it goes on
    /// by itself.
    #[error(
        "{job} has lost a worker, and never changes its members; give bounds of the number of workers, so that a group goes on without them"
    )]
    Fixed {
        /// The job.
        job: JobId,
    },
    /// The group has ended: too few workers were left for too long, say. Fix what the reason names, and start a new one.
    #[error("{job} has ended: {reason}")]
    Ended {
        /// The job.
        job: JobId,
        /// Why.
        reason: String,
        /// The last worker that failed, if the group ended because of such.
        failure: Option<Box<RankFailure>>,
    },
}

/// Why a group's end is not known to be a good one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShutdownError {
    /// The group had failed before, or failed while it was stopped. Nothing of it is left.
    #[error("{job} {state}: {reason}{}", worker_text(.reason, .failure.as_deref()))]
    Failed {
        /// The job.
        job: JobId,
        /// Its last state.
        state: JobState,
        /// Why.
        reason: String,
        /// The worker that failed first, if it was one.
        failure: Option<Box<RankFailure>>,
    },
    /// The head is gone, so that nobody tells when the group has ended. Its workers end when the head is back, or with their
    /// nodes.
    #[error("whether {job} has ended is not known, for the head is gone: {reason}")]
    HeadLost {
        /// The job.
        job: JobId,
        /// What happened.
        reason: String,
    },
    /// The group did not end in time. The head goes on to stop it.
    #[error("{job} did not end within {}; the head goes on to stop it", Span(*after))]
    TimedOut {
        /// The job.
        job: JobId,
        /// How long was waited.
        after: Duration,
    },
}

#[cfg(test)]
mod tests {
    use kolo_transport::wire::RefusalKind;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::fmt::Error);

    #[test]
    fn any_error_converts_and_prints_its_sources() {
        fn fails() -> Result<()> {
            Err(Outer(std::fmt::Error))?;
            Ok(())
        }
        let error = fails().unwrap_err();
        let source = std::fmt::Error.to_string();
        assert_eq!(error.to_string(), format!("outer: {source}"));
        assert!(format!("{error:?}").starts_with("outer: "));
        assert!(error.downcast_ref::<Outer>().is_some());
        assert_eq!(Error::msg("plain").to_string(), "plain");
        assert_eq!(Error::msg("plain").into_inner().to_string(), "plain");
    }

    #[test]
    fn starts_that_may_be_tried_again() {
        let refused = |kind| StartError::Refused {
            refusal: Refusal::new(kind, "no"),
            failure: None,
        };
        assert!(refused(RefusalKind::Unplaceable).is_retryable());
        assert!(refused(RefusalKind::NodeLost).is_retryable());
        assert!(!refused(RefusalKind::Invalid).is_retryable());
        assert!(!refused(RefusalKind::Worker).is_retryable());
        assert!(!StartError::from(OptionsError::NoSize).is_retryable());
        assert!(
            StartError::TimedOut {
                after: Duration::ZERO,
                phase: "placing"
            }
            .is_retryable()
        );
    }

    #[test]
    fn a_worker_that_failed_is_told_with_its_last_words() {
        let failure = crate::call::test_failure(1, kolo_transport::wire::Exit::Code(3));
        let error = StartError::Refused {
            refusal: Refusal::new(RefusalKind::Worker, "a worker ended while it was starting"),
            failure: Some(Box::new(failure)),
        };
        let text = error.to_string();
        assert!(
            text.contains("exit code 3") && text.ends_with("[1]<stderr>:out of memory"),
            "{text}"
        );
        // And once, if the head has told it already.
        let failure = crate::call::test_failure(1, kolo_transport::wire::Exit::Code(3));
        let reason = format!("all workers have ended; the first cause: {failure}");
        let error = ShutdownError::Failed {
            job: JobId(1),
            state: JobState::Failed,
            reason,
            failure: Some(Box::new(failure)),
        };
        assert_eq!(error.to_string().matches("out of memory").count(), 1);
    }

    #[test]
    fn a_message_holds_its_cause_and_is_the_end_of_the_chain() {
        use std::error::Error as _;

        let busy = || TransportError::Busy {
            address: ([127, 0, 0, 1], 1).into(),
        };
        let cause = busy().to_string();
        for error in [
            ConnectError::Head(busy()),
            ConnectError::Join(busy().into()),
        ] {
            assert!(error.to_string().ends_with(&cause), "{error}");
            assert!(error.source().is_none(), "{error}");
            let outer = ClusterError::from(error);
            assert!(outer.to_string().ends_with(&cause), "{outer}");
            assert!(outer.source().is_none(), "{outer}");
        }
    }
}
