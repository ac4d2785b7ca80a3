//! `kolo login`.

use std::io::Read;
use std::path::Path;

use kolo_transport::endpoint::ConnectError;
use kolo_transport::identity::Role;
use kolo_transport::join::{JoinError, join_any};
use kolo_transport::runtime::TransportRuntime;
use kolo_transport::token::JoinToken;
use serde::Serialize;

use super::args::{Connect, Format, Login};
use super::client::{HEAD_START, remember_head, resolve, unreachable};
use super::error::CliError;
use super::output::Output;
use super::up::eprintln_or_ignore;
use crate::secret;

/// The most bytes that are read of standard input: a token is one short line.
const LONGEST_TOKEN: u64 = 4096;

#[derive(Serialize)]
struct LoggedIn {
    cluster: String,
    driver: String,
    head: String,
    credentials: String,
}

pub(super) async fn run(
    options: &Login,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<(), CliError> {
    let config = connect.config();
    let dir = config.credentials_dir()?;
    let Some(head) = config.head.as_deref().map(str::trim) else {
        return Err(CliError::Usage(
            "the head to log in at is not given: give --head HOST:PORT".to_owned(),
        ));
    };
    let token = read_token(&options.token_file)?;
    if token.role() != Role::Driver {
        return Err(CliError::Usage(format!(
            "this is a token for a {}; a driver's token is needed, which the head's administrator can make",
            token.role()
        )));
    }
    let addresses = resolve(head, config.connect_timeout).await?;
    let runtime = TransportRuntime::new(1).map_err(CliError::Start)?;
    let joining = join_any(&runtime, &addresses, &token, HEAD_START);
    let (_, credentials) = tokio::time::timeout(config.connect_timeout, joining)
        .await
        .map_err(|_| unreachable(head))?
        .map_err(|error| match error {
            JoinError::Connect(ConnectError::TimedOut { .. }) => unreachable(head),
            other => other.into(),
        })?;
    credentials.save(&dir)?;
    remember_head(&dir, head)?;
    let identity = credentials.identity();
    let done = LoggedIn {
        cluster: identity.cluster.to_string(),
        driver: identity.name.clone(),
        head: head.to_owned(),
        credentials: dir.display().to_string(),
    };
    match format {
        Format::Json => out.json(&done),
        Format::Table => out.line(&format!(
            "joined {} as {}; the credentials are in {}",
            done.cluster, done.driver, done.credentials
        )),
    }
}

fn read_token(path: &Path) -> Result<JoinToken, CliError> {
    let failed = |error| CliError::File {
        path: path.to_owned(),
        error,
    };
    let mut text = String::new();
    if path == Path::new("-") {
        std::io::stdin()
            .take(LONGEST_TOKEN)
            .read_to_string(&mut text)
            .map_err(failed)?;
    } else {
        let secret = secret::read(path).map_err(failed)?;
        if let Some(warning) = &secret.warning {
            eprintln_or_ignore(&format!("kolo: {warning}"));
        }
        text = secret.text;
    }
    text.trim()
        .parse()
        .map_err(|error: kolo_transport::token::ParseTokenError| {
            CliError::Usage(format!("{}: {error}", path.display()))
        })
}
