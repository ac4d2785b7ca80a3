//! Why a head does not start or does not do what it should.

use std::path::PathBuf;

use kolo_transport::descriptors::TooFewDescriptors;
use kolo_transport::{BindError, IdentityError};

use crate::http::HttpStartError;

/// Why a head does not start or does not do what it should.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeadError {
    /// A setting makes no sense. Set what is allowed.
    #[error("{field} is {given}; allowed is {allowed}")]
    Config {
        /// The field of [`HeadConfig`](super::HeadConfig).
        field: &'static str,
        /// Its value.
        given: String,
        /// What is allowed.
        allowed: String,
    },
    /// Another head uses the state folder. Stop it, or use another folder.
    #[error("{path} is in use by another head; stop that one, or use another state folder", path = path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// A file of the state folder can't be read or written. Check its owner and the space on the disk.
    #[error("{path}: {error}", path = path.display())]
    Store {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        error: std::io::Error,
    },
    /// A file of the state folder is damaged. Restore it; without `tokens.json` all tokens must be made again, without
    /// `authority.pem` the cluster is lost.
    #[error("{path} is damaged: {reason}; restore it from a backup", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The authority or a certificate could not be read or made. The cause says which file and what to do.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The address for nodes and drivers can't be used. It may be in use, or not be one of this machine.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The address for HTTPS can't be used.
    #[error(transparent)]
    Http(#[from] HttpStartError),
    /// There are too few descriptors. Raise the limit of open files.
    #[error(transparent)]
    Descriptors(#[from] TooFewDescriptors),
    /// A thread could not be started. The machine is at a limit of processes or memory.
    #[error("a thread could not be started: {0}")]
    Thread(std::io::Error),
    /// The head's thread has ended by a fault in kolo. The log says more.
    #[error("the head has ended by itself, which is a fault in kolo; its log says more")]
    Crashed,
}
