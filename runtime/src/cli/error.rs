//! How a command fails, and with which exit code.

use std::io;
use std::path::PathBuf;

use kolo_transport::descriptors::TooFewDescriptors;
use kolo_transport::endpoint::{BindError, ConnectError};
use kolo_transport::frame::FrameError;
use kolo_transport::identity::IdentityError;
use kolo_transport::ids::JobId;
use kolo_transport::join::JoinError;
use kolo_transport::session::RequestError;
use kolo_transport::wire::{Refusal, RefusalKind};
use kolo_transport::{CloseCode, ConnectionLost};

use crate::ssh::UpError;

pub(super) const FAILURE: u8 = 1;
pub(super) const USAGE: u8 = 2;
const NO_JOB: u8 = 3;
const UNREACHABLE: u8 = 4;
pub(super) const CREDENTIALS: u8 = 5;

/// Why a command of `kolo` failed. [`CliError::exit_code`] says what the process ends with.
#[derive(Debug, thiserror::Error)]
pub(super) enum CliError {
    /// What is asked for makes no sense. The message says what is allowed.
    #[error("{0}")]
    Usage(String),
    /// The plan can't be read, or what is planned can't be placed.
    #[error(transparent)]
    Plan(#[from] kolo_core::plan::PlanError),
    /// There is no such job. `kolo jobs` shows those that the head remembers.
    #[error("there is no job `{0}`; `kolo jobs` shows all that the head remembers")]
    NoSuchJob(String),
    /// The address is no `HOST:PORT`.
    #[error(
        "the head `{head}` is no HOST:PORT; give one by --head or KOLO_HEAD, an IPv6 address as [ADDRESS]:PORT"
    )]
    Address { head: String },
    /// No head is given, and none is remembered.
    #[error(
        "no head is given, and none is remembered from a login; give --head HOST:PORT, set KOLO_HEAD=HOST:PORT, or log in by \
         `kolo login --head HOST:PORT --token-file FILE`"
    )]
    NoHead,
    /// The host of the head has no address that is known.
    #[error(
        "the head `{head}` can't be found: {reason}; correct the name (--head, KOLO_HEAD, or the `kolo login` that remembers it) or \
         the name server's entry"
    )]
    Resolve { head: String, reason: String },
    /// Nobody answers, or somebody else does. Check the address, and that the daemon runs.
    #[error("{what} can't be reached: {error}")]
    Connect { what: String, error: ConnectError },
    /// No address of the head answered in time. Check the address, and that the head runs.
    #[error(
        "the head at {head} did not answer in time; look whether kolo-head runs there, and whether firewalls let UDP through to its \
         port (--connect-timeout waits longer)"
    )]
    Unreachable { head: String },
    /// The connection broke, or there was no answer in time.
    #[error(
        "{what} did not answer: {error}; look whether {what} runs, by `kolo doctor`, and try again"
    )]
    Request { what: String, error: RequestError },
    /// The connection broke over which a job lives: the head is gone, or has put this driver out.
    #[error(
        "the connection to the head has ended ({error}), and {job} ends with it: its nodes end the workers as soon as the head is \
         back, and else after their --orphan-timeout (60s by default)"
    )]
    JobLost { job: JobId, error: RequestError },
    /// There are no credentials yet.
    #[error("there are no credentials in {}; get some by `kolo login --head HOST:PORT --token-file FILE`", .0.display())]
    NoCredentials(PathBuf),
    /// The credentials can't be read or written.
    #[error(transparent)]
    Credentials(#[from] IdentityError),
    /// The cluster could not be joined.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The daemon said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The daemon's answer belongs to another question. Versions differ, or it is faulty.
    #[error("{0} gave an answer to another question; is it of another version?")]
    Answer(String),
    /// Hosts could not be brought up.
    #[error(transparent)]
    Up(#[from] UpError),
    /// Hosts, or what is on record of them, are not as they must be; the message says what to do.
    #[error("{0}")]
    Hosts(String),
    /// Several nodes could not do their part.
    #[error("{text}")]
    Nodes { code: u8, text: String },
    /// A file can't be read or written.
    #[error("{path}: {error}", path = path.display())]
    File { path: PathBuf, error: io::Error },
    /// There are too few descriptors. Raise the limit of open files.
    #[error(transparent)]
    Descriptors(#[from] TooFewDescriptors),
    /// No thread or socket could be made here.
    #[error("kolo can't start: {0}")]
    Start(io::Error),
    /// The socket for connections could not be made.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The cluster for this one job could not be started, or can't hold it.
    #[error("{0}")]
    Local(String),
    /// The results can't be written.
    #[error("the output can't be written: {0}")]
    Output(io::Error),
    /// The results can't be written as JSON. A fault in kolo.
    #[error("the output can't be encoded: {0}")]
    Encode(serde_json::Error),
}

impl From<io::Error> for CliError {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl From<serde_json::Error> for CliError {
    fn from(error: serde_json::Error) -> Self {
        Self::Encode(error)
    }
}

impl CliError {
    /// What the process ends with: see `kolo --help`.
    pub(super) fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_)
            | Self::Plan(_)
            | Self::Address { .. }
            | Self::NoHead
            | Self::Up(UpError::NoHosts | UpError::SameMachine { .. }) => USAGE,
            Self::NoSuchJob(_) => NO_JOB,
            Self::Connect { error, .. } => of_connect(error),
            Self::Nodes { code, .. } => *code,
            Self::Request { error, .. } | Self::JobLost { error, .. } => of_request(error),
            Self::Resolve { .. } | Self::Unreachable { .. } | Self::Up(UpError::Hosts { .. }) => {
                UNREACHABLE
            }
            Self::NoCredentials(_) | Self::Credentials(_) => CREDENTIALS,
            Self::Join(error) => match error {
                JoinError::Connect(error) => of_connect(error),
                JoinError::Unanswered { .. } => UNREACHABLE,
                JoinError::Local { .. } | JoinError::Answer(_) => FAILURE,
                _ => CREDENTIALS,
            },
            Self::Refused(refusal) => match refusal.kind {
                RefusalKind::Forbidden | RefusalKind::Token => CREDENTIALS,
                RefusalKind::Invalid | RefusalKind::Unplaceable => USAGE,
                RefusalKind::NotFound => NO_JOB,
                _ => FAILURE,
            },
            _ => FAILURE,
        }
    }

    /// What has failed, and what to do about it, if no connection could be had. Of other failures all is told at once.
    pub(super) fn cause_and_remedy(&self) -> (String, Option<String>) {
        let text = self.to_string();
        if let Self::Connect {
            error:
                ConnectError::Lost {
                    lost:
                        ConnectionLost::Closed {
                            code: CloseCode::Revoked,
                            reason,
                        },
                    ..
                },
            ..
        } = self
        {
            let remedy = "an administrator lets it in again by `kolo revoke ID --undo`";
            return (reason.clone(), Some(remedy.to_owned()));
        }
        let is_of_connecting = matches!(
            self,
            Self::Address { .. }
                | Self::NoHead
                | Self::Resolve { .. }
                | Self::Connect { .. }
                | Self::Unreachable { .. }
                | Self::NoCredentials(_)
                | Self::Join(_)
        );
        // Messages say first what is, then what to do.
        match text.split_once("; ").filter(|_| is_of_connecting) {
            Some((cause, remedy)) => (cause.to_owned(), Some(remedy.to_owned())),
            None => (text, None),
        }
    }

    /// An error of the stream to `what`.
    pub(super) fn stream(what: impl Into<String>, error: FrameError) -> Self {
        Self::Request {
            what: what.into(),
            error: error.into(),
        }
    }

    /// The connection to `what` broke.
    pub(super) fn lost(what: impl Into<String>, error: ConnectionLost) -> Self {
        Self::Request {
            what: what.into(),
            error: error.into(),
        }
    }
}

fn of_request(error: &RequestError) -> u8 {
    match error {
        RequestError::Lost(lost) => of_loss(lost),
        RequestError::Deadline { .. } | RequestError::Frame(FrameError::TimedOut { .. }) => {
            UNREACHABLE
        }
        _ => FAILURE,
    }
}

fn of_connect(error: &ConnectError) -> u8 {
    match error {
        ConnectError::Certificate { .. }
        | ConnectError::Rejected { .. }
        | ConnectError::Date { .. } => CREDENTIALS,
        ConnectError::Lost { lost, .. } => of_loss(lost),
        _ => UNREACHABLE,
    }
}

fn of_loss(lost: &ConnectionLost) -> u8 {
    match lost {
        ConnectionLost::Closed {
            code: CloseCode::Revoked | CloseCode::Unauthenticated,
            ..
        } => CREDENTIALS,
        _ => UNREACHABLE,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn exit_codes_are_those_of_the_help() {
        let address = ([127, 0, 0, 1], 1).into();
        let connect = |error| CliError::Connect {
            what: "the head".to_owned(),
            error,
        };
        let refused = |kind| CliError::from(Refusal::new(kind, "no"));
        let after = Duration::from_secs(1);
        let lost = |lost| connect(ConnectError::Lost { address, lost });
        let revoked = ConnectionLost::Closed {
            code: CloseCode::Revoked,
            reason: String::new(),
        };
        let rejected = ConnectError::Rejected {
            address,
            reason: String::new(),
        };
        let unknown = CliError::Resolve {
            head: "x:1".to_owned(),
            reason: "unknown".to_owned(),
        };
        let late = CliError::Request {
            what: "the head".to_owned(),
            error: RequestError::Deadline { after },
        };
        let job_lost = CliError::JobLost {
            job: JobId(1),
            error: ConnectionLost::TimedOut.into(),
        };
        let truncated = CliError::stream("the head", FrameError::Truncated { got: 3 });
        for (error, code) in [
            (CliError::Usage(String::new()), 2),
            (CliError::NoHead, 2),
            (CliError::NoSuchJob("x".to_owned()), 3),
            (unknown, 4),
            (connect(ConnectError::TimedOut { address }), 4),
            (connect(ConnectError::Busy { address }), 4),
            (connect(ConnectError::Version { address }), 4),
            (connect(rejected), 5),
            (lost(revoked), 5),
            (lost(ConnectionLost::Reset), 4),
            (late, 4),
            (CliError::lost("the head", ConnectionLost::TimedOut), 4),
            (job_lost, 4),
            (truncated, 1),
            (CliError::NoCredentials(PathBuf::new()), 5),
            (refused(RefusalKind::Forbidden), 5),
            (refused(RefusalKind::NotFound), 3),
            (refused(RefusalKind::Invalid), 2),
            (refused(RefusalKind::Unplaceable), 2),
            (refused(RefusalKind::Internal), 1),
        ] {
            assert_eq!(error.exit_code(), code, "{error}");
        }
    }

    #[test]
    fn a_chain_tells_each_cause_once() {
        use crate::{head::HeadError, http::HttpStartError, node::NodeError};

        let taken = || io::Error::from(io::ErrorKind::AddrInUse);
        let address = ([127, 0, 0, 1], 1).into();
        let busy = || ConnectError::Busy { address };
        let socket = BindError::Socket {
            address,
            error: taken(),
        };
        let file = || IdentityError::File {
            path: PathBuf::from("identity.pem"),
            error: taken(),
        };
        for error in [
            anyhow::Error::from(NodeError::Join(busy().into())),
            NodeError::Join(JoinError::Answer(file())).into(),
            NodeError::Connect(busy()).into(),
            NodeError::Register(RequestError::Unanswered).into(),
            NodeError::Threads(taken()).into(),
            HeadError::Bind(socket).into(),
            HeadError::Identity(file()).into(),
            HeadError::Http(HttpStartError::Bind {
                address,
                error: taken(),
            })
            .into(),
            HeadError::Thread(taken()).into(),
            CliError::Output(taken()).into(),
            CliError::lost("the head", ConnectionLost::TimedOut).into(),
            CliError::from(Refusal::new(RefusalKind::Internal, "no")).into(),
        ] {
            assert_eq!(format!("{error:#}"), error.to_string());
        }
    }
}
