//! The kolo daemons: head, node, HTTP and the command line
#![forbid(unsafe_code)]

pub mod cli;
pub mod daemon;
pub mod head;
pub mod health;
pub mod hosts;
pub mod http;
pub mod limiter;
pub mod local;
pub mod node;
pub mod notify;
pub mod private_file;
pub mod secret;
pub mod settings;
pub mod signals;
pub mod ssh;
mod surroundings;

pub use head::{Head, HeadConfig, HeadError, HeadState};
pub use node::{
    Node, NodeConfig, NodeCredentials, NodeError, NodeResources, ProgramSource, ProgramsError,
    ResourcesError,
};
