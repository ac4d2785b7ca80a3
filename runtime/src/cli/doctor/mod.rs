//! `kolo doctor`: what an operator would look at on a host and towards its cluster.

mod cluster;
mod host;
mod surroundings;

use std::path::PathBuf;

use clap::Args as ClapArgs;
use serde::Serialize;

use super::args::{Connect, Format};
use super::error::CliError;
use super::output::{Cell, Output, Tone};

pub(super) const EXAMPLES: &str = "\
Example:
  kolo doctor
  kolo doctor --local --identity /var/lib/kolo-node/identity
  kolo doctor --format json

Without credentials it looks at this host alone.
Exit codes: 0 nothing is wrong (there may be warnings), 1 something is.";

#[derive(Debug, ClapArgs)]
pub(super) struct Doctor {
    /// Look at this host alone, not at the cluster
    #[arg(long)]
    pub(super) local: bool,
    /// Also look at the certificate in this folder: that of a node is identity/ in its state folder
    #[arg(long, value_name = "DIR")]
    pub(super) identity: Option<PathBuf>,
}

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// As it should be.
    Good,
    /// It was not found out, or costs speed.
    Warning,
    /// Something will not work.
    Bad,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    check: &'static str,
    level: Level,
    /// What was seen.
    found: String,
    /// What to do about it.
    #[serde(rename = "do")]
    remedy: Option<String>,
}

impl Finding {
    fn good(check: &'static str, found: impl Into<String>) -> Self {
        Self {
            check,
            level: Level::Good,
            found: found.into(),
            remedy: None,
        }
    }

    fn warning(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            check,
            level: Level::Warning,
            found: found.into(),
            remedy: Some(remedy.into()),
        }
    }

    fn bad(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            level: Level::Bad,
            ..Self::warning(check, found, remedy)
        }
    }
}

pub(super) async fn run(
    options: &Doctor,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    let mut findings = host::examine(options.identity.as_deref());
    findings.extend(host::surroundings(options, connect).await);
    if !options.local {
        findings.extend(cluster::examine(connect).await);
    }
    let worst = findings.iter().map(|finding| finding.level).max();
    if format == Format::Json {
        out.json(&findings)?;
    } else {
        show(&findings, out)?;
    }
    Ok(u8::from(worst == Some(Level::Bad)))
}

fn show(findings: &[Finding], out: &mut Output<'_>) -> Result<(), CliError> {
    let rows: Vec<[Cell; 3]> = findings
        .iter()
        .map(|finding| {
            let level = match finding.level {
                Level::Good => Cell::toned("good", Tone::Good),
                Level::Warning => Cell::toned("warning", Tone::Changing),
                Level::Bad => Cell::toned("BAD", Tone::Bad),
            };
            [finding.check.into(), level, finding.found.as_str().into()]
        })
        .collect();
    out.table(["CHECK", "STATE", "FOUND"], &rows)?;
    let mut first = true;
    for finding in findings {
        if let Some(remedy) = &finding.remedy {
            if std::mem::take(&mut first) {
                out.line("")?;
                out.line("What to do:")?;
            }
            out.line(&format!("  {}: {remedy}", finding.check))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::output::Screen;
    use super::*;

    #[test]
    fn a_finding_says_what_to_do_in_both_formats() {
        let findings = [
            Finding::good("clock", "fine"),
            Finding::bad("ports", "closed", "open them"),
        ];
        let mut text = Vec::new();
        show(&findings, &mut Output::new(&mut text, Screen::default())).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("ports  BAD    closed\n"), "{text}");
        assert!(
            text.ends_with("What to do:\n  ports: open them\n"),
            "{text}"
        );
        assert_eq!(
            serde_json::to_string(&findings[1]).unwrap(),
            r#"{"check":"ports","level":"bad","found":"closed","do":"open them"}"#
        );
    }
}
