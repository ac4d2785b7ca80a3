//! `kolo stop`.

use super::args::{Connect, Format, Stop};
use super::client::Client;
use super::error::CliError;
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
        client.stop(before.job, options.timeout).await?;
    }
    let after = client.job(before.job).await?;
    client.close().await;
    if format == Format::Json {
        return out.json(&dto::Job::from(&after));
    }
    if before.state.is_final() {
        out.line(&format!("{} has ended already: {}", after.job, after.state))
    } else {
        out.line(&format!("{} has ended: {}", after.job, after.state))
    }
}
