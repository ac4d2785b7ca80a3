//! The OpenAPI document of the API, made from the code that serves it.

use actix_web::HttpResponse;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::{Modify, OpenApi};

use super::{metrics, routes};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "kolo head",
        description = "The cluster and its jobs.",
        license(name = "MIT")
    ),
    paths(
        routes::healthz,
        routes::readyz,
        routes::cluster,
        metrics::metrics,
        routes::nodes,
        routes::drain,
        routes::undrain,
        routes::jobs,
        routes::job,
        routes::stop,
        routes::workers,
    ),
    tags(
        (name = "health", description = "For probes; open to all"),
        (name = "cluster", description = "Nodes and what they have"),
        (name = "jobs", description = "Groups of workers"),
    ),
    security(("certificate" = []), ("bearer" = [])),
    modifiers(&Schemes)
)]
struct Document;

struct Schemes;

impl Modify for Schemes {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        components.add_security_scheme(
            "bearer",
            SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)),
        );
        components.add_security_scheme(
            "certificate",
            SecurityScheme::MutualTls {
                description: Some("A certificate that the cluster's head has issued".to_owned()),
                extensions: None,
            },
        );
    }
}

/// The document.
pub fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}

pub(super) async fn serve() -> HttpResponse {
    HttpResponse::Ok().json(document())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// To take a change over: `KOLO_BLESS=1 cargo test -p kolo-runtime openapi`.
    #[test]
    fn the_document_is_the_one_that_clients_know() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/http/openapi.json");
        let found = document().to_pretty_json().unwrap() + "\n";
        if std::env::var_os("KOLO_BLESS").is_some() {
            std::fs::write(path, &found).unwrap();
        }
        let golden = std::fs::read_to_string(path).unwrap_or_default();
        let differs = golden
            .lines()
            .zip(found.lines())
            .enumerate()
            .find(|(_, (golden, found))| golden != found);
        assert!(
            golden == found,
            "the API has changed; first difference (line, golden, found): {differs:?}"
        );
    }

    #[test]
    fn all_but_the_probes_need_a_credential() {
        let document = serde_json::to_value(document()).unwrap();
        let open: Vec<&str> = document["paths"]
            .as_object()
            .unwrap()
            .iter()
            .filter(|(_, methods)| {
                methods
                    .as_object()
                    .unwrap()
                    .values()
                    .any(|operation| operation.get("security").is_some())
            })
            .map(|(path, _)| path.as_str())
            .collect();
        assert_eq!(open, ["/healthz", "/readyz"]);
        assert_eq!(document["security"].as_array().unwrap().len(), 2);
    }
}
