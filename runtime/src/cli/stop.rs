//! `kolo stop`.

use kolo_transport::RequestError;
use kolo_transport::wire::span::Span;

use super::args::{Connect, Format, Stop};
use super::client::Client;
use super::error::CliError;
use super::ids::shortened;
use super::output::Output;
use crate::http::dto;

pub(super) async fn run(
    options: &Stop,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<(), CliError> {
    let client = Client::connect(&connect.config()).await?;
    let before = client.find(&options.job).await?;
    if !before.state.is_final() {
        client
            .stop(before.job, options.timeout)
            .await
            .map_err(|error| match error {
                // The head has answered before: it is the job that takes its time.
                CliError::Request {
                    error: RequestError::Deadline { after },
                    ..
                } => CliError::Local(format!(
                    "{0} has not ended within {1}; it is being stopped all the same, and `kolo jobs {0}` shows what is left of it",
                    before.job,
                    Span(after)
                )),
                other => other,
            })?;
    }
    let after = client.job(before.job).await?;
    client.close().await;
    if format == Format::Json {
        return out.json(&dto::Job::from(&after));
    }
    if before.state.is_final() {
        out.line(&shortened(&format!(
            "{} has ended already: {}",
            after.job, after.state
        )))
    } else {
        out.line(&shortened(&format!(
            "{} has ended: {}",
            after.job, after.state
        )))
    }
}
