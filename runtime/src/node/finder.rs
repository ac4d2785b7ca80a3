//! What orders of the head need of this host: programs and ports.

use std::sync::Arc;

use kolo_actors::node::{BoxFuture, Launch, ProgramFinder};
use kolo_core::node::messages::Wanted;
use kolo_transport::wire::Refusal;

use super::installed;
use super::ports::Ports;
use super::programs::Programs;

#[derive(Debug)]
pub(super) struct Finder {
    pub(super) programs: Arc<Programs>,
    pub(super) ports: Ports,
}

impl ProgramFinder for Finder {
    fn find(&self, program: Wanted) -> BoxFuture<Result<Option<Launch>, Refusal>> {
        let programs = self.programs.clone();
        Box::pin(async move {
            match program {
                Wanted::Sent(hash) => Ok(programs.get(hash).await.map(Launch::Sent)),
                Wanted::Installed(program) => {
                    let file = installed::find(&program).await?;
                    Ok(Some(Launch::Installed(file)))
                }
            }
        })
    }

    fn free_port(&self) -> u16 {
        self.ports.take()
    }
}
