//! What agents measure on the nodes, on the page of the head.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::drain::site_with_node;
use crate::process::PATIENCE;
use crate::trust::https;

/// The page of metrics: each line by its name and labels.
async fn page(admin: &Path, http: std::net::SocketAddr) -> BTreeMap<String, i64> {
    let mut stream = https(admin, http).await;
    let request = "GET /metrics HTTP/1.1\r\nHost: kolo\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // The end of the connection may come without the end of TLS.
    stream.read_to_end(&mut answer).await.ok();
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let (_, page) = answer.split_once("\r\n\r\n").unwrap();
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.map(|line| line.rsplit_once(' ').unwrap());
    pairs
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

#[tokio::test]
async fn what_agents_measure_is_on_the_page_of_the_head() {
    let (site, _node) = site_with_node(&[], &[]);
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3";
    let options = ["run", "-n", "1", "--max-restarts", "1", "--role", "trainer"];
    let run = [&options[..], &["--", "sh", "-c", script]].concat();
    site.operator(&run);
    let begin = Instant::now();
    let of = |name: &str, part: &str| format!("kolo_agent_metric_{part}{{name=\"{name}\"}}");
    let total = of("workers.trainer.run_total", "sum");
    // The node's report is under way.
    let page = loop {
        let page = page(&site.admin(), site.http).await;
        if page.contains_key(&total) {
            break page;
        }
        assert!(begin.elapsed() < PATIENCE, "{page:?}");
    };
    for (name, sum) in [
        ("workers.trainer.run_total", 1),
        ("workers.trainer.run_success_with_retries", 1),
        ("workers.trainer.run_failed_with_retries", 0),
        ("workers.trainer.failed", 1),
        ("workers.trainer.succeeded", 1),
        ("SimpleElasticAgent._initialize_workers.success", 2),
        ("SimpleElasticAgent._rendezvous.success", 2),
    ] {
        assert_eq!(page.get(&of(name, "sum")), Some(&sum), "{name}: {page:#?}");
    }
    let took = of("SimpleElasticAgent._rendezvous.duration.ms", "count");
    assert_eq!(page[&took], 2);
    assert_eq!(page["kolo_nodes{state=\"alive\"}"], 1);
}
