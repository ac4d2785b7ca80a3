//! Lines of the core in the log.

use kolo_core::head::job::GroupState;
use kolo_core::head::messages::{Level, Line};
use tracing::field::display;

pub(super) fn write(line: &Line) {
    let (job, node) = (line.job.map(display), line.node.map(display));
    let text = &line.text;
    if let Some(group) = &line.group {
        let GroupState {
            state,
            generation,
            members,
            restarts,
            cause,
        } = group;
        let generation = generation.0;
        crate::news!(job, state, generation, members, restarts, cause, "{text}");
        return;
    }
    match line.level {
        Level::Error => tracing::error!(job, node, "{text}"),
        Level::Warn => tracing::warn!(job, node, "{text}"),
        Level::Info => crate::news!(job, node, "{text}"),
    }
}
