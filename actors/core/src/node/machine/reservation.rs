//! The answer to a reservation: when the program was looked for, and the node was checked.

use kolo_wire::ids::JobId;
use kolo_wire::{HealthCheck, InstalledHere, NodeReply, Refusal, RefusalKind};

use super::{AskId, Found, NodeCore, Output, Stay, refused};

fn ended_meanwhile(job: JobId) -> NodeReply {
    let message = format!("the reservation of {job} has ended meanwhile");
    refused(Refusal::new(RefusalKind::Stopped, message))
}

impl NodeCore {
    /// The answer to a reservation, now that its program was looked for.
    pub(super) fn reserved(
        &self,
        stay: Stay,
        installed: Option<InstalledHere>,
        (program, free_port): (Found, u16),
        outputs: &mut Vec<Output>,
    ) -> NodeReply {
        if self.stay(stay.job) != Some(stay) {
            return ended_meanwhile(stay.job);
        }
        if let Some(InstalledHere { owner, program: of }) = &installed
            && program == Found::Here
            && of.stream_output
        {
            // The driver may come for it before the job is started here.
            outputs.push(Output::OpenOutput {
                job: stay.job,
                owner: *owner,
                stdin: of.stdin,
            });
        }
        NodeReply::Reserved {
            has_program: installed.is_none() && program == Found::Here,
            free_port,
            problem: match program {
                Found::Unusable(problem) => Some(problem),
                Found::Here | Found::NotSent => None,
            },
        }
    }

    /// The answer to a reservation, if nothing is to be checked first.
    pub(super) fn check(
        &mut self,
        (ask, stay): (AskId, Stay),
        reply: NodeReply,
        check: Option<HealthCheck>,
        outputs: &mut Vec<Output>,
    ) -> Option<NodeReply> {
        let is_held = matches!(reply, NodeReply::Reserved { problem: None, .. });
        let Some(check) = check.filter(|_| is_held) else {
            return Some(reply);
        };
        self.checking.insert(ask, (stay, reply));
        self.with(stay, outputs, |job| job.check_health(ask, check));
        None
    }

    /// The answer to a reservation, now that the node was checked.
    pub(super) fn checked(&mut self, ask: AskId, checked: Result<(), String>) -> Option<NodeReply> {
        let (stay, mut reply) = self.checking.remove(&ask)?;
        if self.stay(stay.job) != Some(stay) {
            return Some(ended_meanwhile(stay.job));
        }
        if let (NodeReply::Reserved { problem, .. }, Err(why)) = (&mut reply, checked) {
            let message = format!("its health check has failed: {why}");
            *problem = Some(Refusal::new(RefusalKind::Unplaceable, message));
        }
        Some(reply)
    }
}
