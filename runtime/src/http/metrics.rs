//! The metrics of the cluster, in the text format of Prometheus.

use std::fmt::Write as _;

use actix_web::{HttpRequest, HttpResponse, web};
use kolo_transport::wire::{ClusterInfo, MetricSum, NodeInfo};

use super::dto::{ErrorBody, NodeState};
use super::state::{Answer, Api, PATIENCE, answered};

/// Nodes, jobs, and what the agents of jobs that are started anew at each change have measured, for Prometheus.
#[utoipa::path(
    get, path = "/metrics", tag = "cluster",
    responses(
        (status = 200, description = "The metrics, in the text format of Prometheus", body = String, content_type = "text/plain"),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "The caller's role may not do this", body = ErrorBody),
    )
)]
pub(super) async fn metrics(request: HttpRequest, api: web::Data<Api>) -> Answer {
    api.operator(&request)?;
    let cluster = answered(PATIENCE, api.head.cluster()).await?;
    let text = page(&cluster, &api.head.metrics());
    let answer = HttpResponse::Ok()
        .content_type("text/plain; version=0.0.4; charset=utf-8")
        .body(text);
    Ok(answer)
}

fn page(cluster: &ClusterInfo, sums: &[MetricSum]) -> String {
    let mut page =
        "# HELP kolo_nodes Nodes that the head knows, by state.\n# TYPE kolo_nodes gauge\n"
            .to_owned();
    for state in NodeState::ALL {
        let is_in = |node: &&NodeInfo| NodeState::of(node, &cluster.revoked) == state;
        let count = cluster.nodes.iter().filter(is_in).count();
        // A String takes all.
        writeln!(page, "kolo_nodes{{state=\"{}\"}} {count}", state.word()).ok();
    }
    write!(
        page,
        "# HELP kolo_running_jobs Jobs that have not ended.\n\
         # TYPE kolo_running_jobs gauge\n\
         kolo_running_jobs {}\n\
         # HELP kolo_agent_metric Values of the metrics of agents, by torchelastic's names, since the start of the head.\n\
         # TYPE kolo_agent_metric summary\n",
        cluster.running_jobs
    )
    .ok();
    for MetricSum { name, count, sum } in sums {
        let name = name
            .replace('\\', "\\\\")
            .replace('"', "\\\"")
            .replace('\n', "\\n");
        writeln!(page, "kolo_agent_metric_sum{{name=\"{name}\"}} {sum}").ok();
        writeln!(page, "kolo_agent_metric_count{{name=\"{name}\"}} {count}").ok();
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_can_break_the_page() {
        let cluster = ClusterInfo {
            cluster: kolo_transport::ids::ClusterId(1),
            version: String::new(),
            uptime_ms: 0,
            nodes: Vec::new(),
            running_jobs: 3,
            revoked: Vec::new(),
            time_ms: 0,
        };
        let sum = MetricSum {
            name: "a\"} 1\n\\b".to_owned(),
            count: 2,
            sum: -5,
        };
        let page = page(&cluster, &[sum]);
        assert!(page.contains("\nkolo_running_jobs 3\n"), "{page}");
        let name = r#"{name="a\"} 1\n\\b"}"#;
        let expected = format!("kolo_agent_metric_sum{name} -5\nkolo_agent_metric_count{name} 2\n");
        assert!(page.ends_with(&expected), "{page}");
    }
}
