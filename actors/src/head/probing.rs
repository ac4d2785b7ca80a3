//! Carries out a [`Discovery`]: orders to the nodes, their answers back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use kolo_transport::ids::NodeId;
use kolo_transport::wire::{NetworkReport, NodeReply, NodeRequest, Probe, ProbeResult};

use super::job::Reply;
use super::link::NodeLink;
use crate::interfaces::{Discovery, Network, Step};

/// Finds out what connects the nodes behind these links. Each address may take `limit`. When the future is dropped, the
/// nodes learn that nobody waits any more.
pub(super) async fn discover(
    mut discovery: Discovery,
    links: HashMap<NodeId, Arc<dyn NodeLink>>,
    limit: Duration,
) -> Result<Arc<Network>, NetworkReport> {
    let start = Instant::now();
    let mut answers = FuturesUnordered::new();
    let mut step = discovery.start();
    loop {
        match step {
            Step::Probe(orders) => {
                for order in orders {
                    let deadline = order.deadline(limit);
                    let node = order.node;
                    let request = NodeRequest::Probe(Probe {
                        targets: order.targets,
                        limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
                    });
                    let asked = links.get(&node).map(|link| link.request(request, deadline));
                    answers.push(async move {
                        let reply = match asked {
                            Some(asked) => tokio::time::timeout(deadline, asked)
                                .await
                                .unwrap_or_else(|_| {
                                    Reply::Unknown(format!("no answer within {deadline:?}"))
                                }),
                            None => Reply::Unknown("there is no connection to it".to_owned()),
                        };
                        (node, results(reply))
                    });
                }
            }
            Step::Wait => {}
            Step::Done(result) => {
                let took_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
                return match *result {
                    Ok(mut network) => {
                        network.report.took_ms = took_ms;
                        Ok(Arc::new(network))
                    }
                    Err(mut report) => {
                        report.took_ms = took_ms;
                        Err(report)
                    }
                };
            }
        }
        // Every order has an answer, so there is nothing left to wait for only when it is done.
        step = if let Some((node, results)) = answers.next().await {
            discovery.answered(node, results)
        } else {
            let left = discovery.waits_for().next();
            match left {
                Some(node) => discovery.answered(node, Err("it was not asked".to_owned())),
                None => return Err(discovery.abandoned()),
            }
        };
    }
}

fn results(reply: Reply) -> Result<Vec<ProbeResult>, String> {
    match reply {
        Reply::Answer(NodeReply::Probed(results)) => Ok(results),
        Reply::Answer(_) => Err("its answer is none to a probe".to_owned()),
        Reply::Refused(refusal) => Err(refusal.message),
        Reply::Unknown(reason) => Err(reason),
    }
}
