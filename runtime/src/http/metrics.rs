//! The metrics of the cluster, in the text format of Prometheus.

use std::fmt::Write as _;

use actix_web::{HttpRequest, HttpResponse, web};
use kolo_transport::wire::{ClusterInfo, MetricSum};

use super::dto::ErrorBody;
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
    let nodes = |alive: bool| {
        cluster
            .nodes
            .iter()
            .filter(|node| node.alive == alive)
            .count()
    };
    let mut page = format!(
        "# HELP kolo_nodes Nodes that the head knows.\n\
         # TYPE kolo_nodes gauge\n\
         kolo_nodes{{state=\"alive\"}} {}\n\
         kolo_nodes{{state=\"lost\"}} {}\n\
         # HELP kolo_running_jobs Jobs that have not ended.\n\
         # TYPE kolo_running_jobs gauge\n\
         kolo_running_jobs {}\n\
         # HELP kolo_agent_metric Values of the metrics of agents, by torchelastic's names, since the start of the head.\n\
         # TYPE kolo_agent_metric summary\n",
        nodes(true),
        nodes(false),
        cluster.running_jobs
    );
    for MetricSum { name, count, sum } in sums {
        let name = name
            .replace('\\', "\\\\")
            .replace('"', "\\\"")
            .replace('\n', "\\n");
        // A String takes all.
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
