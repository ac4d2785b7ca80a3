//! `kolo login`.

use std::path::Path;
use std::time::Duration;

use kolo_transport::endpoint::ConnectError;
use kolo_transport::identity::Role;
use kolo_transport::join::{JoinError, join_any};
use kolo_transport::runtime::TransportRuntime;
use kolo_transport::token::JoinToken;
use kolo_transport::wire::{HeadRequest, RefusalKind};
use kolo_transport::{Credentials, Fingerprint};
use serde::Serialize;

use super::args::{Connect, Format, Login};
use super::client::{Client, ClientConfig, HEAD_START, remember_head, resolve, unreachable};
use super::error::{CREDENTIALS, CliError};
use super::output::Output;
use super::up::eprintln_or_ignore;
use crate::secret;

/// How long the head may take to say whether an identity is an administrator's.
const ANSWER: Duration = Duration::from_secs(5);

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
    let head = &config.head(&dir)?;
    let token = read_token(&options.token_file)?;
    if token.role() != Role::Driver {
        return Err(CliError::Usage(format!(
            "this is a token for a {}; a driver's token is needed, which the head's administrator can make",
            token.role()
        )));
    }
    if !options.replace
        && let Some(what) = irreplaceable(&config, &dir, &token).await?
    {
        return Err(CliError::Usage(format!(
            "{} holds {what}; give another folder by --credentials DIR, or --replace to write over it",
            dir.display()
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
        head: head.clone(),
        credentials: dir.display().to_string(),
    };
    match format {
        Format::Json => out.json(&done),
        Format::Table => out.line(&format!(
            "joined {} at {head} as {}; the credentials are in {}",
            done.cluster, done.driver, done.credentials
        )),
    }
}

/// What is lost if `dir` gets another identity; `None` if it is one that a login gives back.
///
/// # Errors
///
/// If the head can't be asked.
async fn irreplaceable(
    config: &ClientConfig,
    dir: &Path,
    token: &JoinToken,
) -> Result<Option<String>, CliError> {
    if !Credentials::are_in(dir) {
        return Ok(None);
    }
    let there = match Credentials::load_undated(dir) {
        Ok(there) => there,
        Err(error) => return Ok(Some(format!("an identity that can't be read ({error})"))),
    };
    let identity = there.identity();
    if identity.role != Role::Driver {
        return Ok(Some(format!(
            "the identity of the {} {}",
            identity.role, identity.name
        )));
    }
    if Fingerprint::of(&there.authority()) != token.fingerprint() {
        return Ok(Some(format!(
            "{} of another cluster ({})",
            identity.name, identity.cluster
        )));
    }
    // The head knows who administers it. One that the head does not take any more is no loss.
    let client = match Client::connect_undated(config).await {
        Ok(client) => client,
        // Good again when the clock is.
        Err(
            error @ CliError::Connect {
                error: ConnectError::Date { .. },
                ..
            },
        ) => {
            return Ok(Some(format!(
                "{}, of whom the head can't be asked ({error})",
                identity.name
            )));
        }
        Err(error) if error.exit_code() == CREDENTIALS => return Ok(None),
        Err(error) => return Err(error),
    };
    let tokens = client.request(&HeadRequest::Tokens, ANSWER).await;
    client.close().await;
    match tokens {
        Ok(_) => Ok(Some(format!(
            "{}, which is an administrator's",
            identity.name
        ))),
        Err(CliError::Refused(refusal)) if refusal.kind == RefusalKind::Forbidden => Ok(None),
        Err(error) => Err(error),
    }
}

fn read_token(path: &Path) -> Result<JoinToken, CliError> {
    let failed = |error| CliError::File {
        path: path.to_owned(),
        error,
    };
    let text = if path == Path::new("-") {
        secret::text_of(std::io::stdin()).map_err(failed)?
    } else {
        let secret = secret::read(path).map_err(failed)?;
        if let Some(warning) = &secret.warning {
            eprintln_or_ignore(&format!("kolo: {warning}"));
        }
        secret.text
    };
    text.parse()
        .map_err(|error: kolo_transport::token::ParseTokenError| {
            CliError::Usage(format!("{}: {error}", path.display()))
        })
}
