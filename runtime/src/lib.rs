//! The kolo daemons: head, node, HTTP and the command line
#![forbid(unsafe_code)]

pub mod cli;
pub mod head;
pub mod http;
pub mod node;

pub use head::{Head, HeadConfig, HeadError, HeadState};
pub use node::{
    Node, NodeConfig, NodeCredentials, NodeError, NodeResources, ProgramSource, ProgramsError,
    ResourcesError,
};
