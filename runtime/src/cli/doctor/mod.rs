//! `kolo doctor`: what an operator would look at on a host and towards its cluster.

mod cluster;
mod host;
mod surroundings;

use kolo_transport::wire::counted::Counted;
use std::path::PathBuf;

use clap::Args as ClapArgs;
use serde::Serialize;

use super::args::{Connect, Format};
use super::error::CliError;
use super::output::{Cell, Output, Tone};

pub(super) const EXAMPLES: &str = "\
Without a head only this host is looked at.

Exit codes:
  0  nothing is wrong; there may be warnings
  1  something is wrong

Examples:
  kolo doctor
  kolo doctor --local --identity /var/lib/kolo-node/identity
  kolo doctor --format json";

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
    /// Where: `here`, `head`, `cluster`, or the name of a node.
    at: String,
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
            at: "here".to_owned(),
            check,
            level: Level::Good,
            found: found.into(),
            remedy: None,
        }
    }

    fn at(self, at: &str) -> Self {
        Self {
            at: at.to_owned(),
            ..self
        }
    }

    fn warning(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            level: Level::Warning,
            remedy: Some(remedy.into()),
            ..Self::good(check, found)
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
    let rows: Vec<[Cell; 4]> = findings
        .iter()
        .map(|finding| {
            let level = match finding.level {
                Level::Good => Cell::toned("good", Tone::Good),
                Level::Warning => Cell::toned("warning", Tone::Changing),
                Level::Bad => Cell::toned("BAD", Tone::Bad),
            };
            let Finding {
                at, check, found, ..
            } = finding;
            [
                at.as_str().into(),
                (*check).into(),
                level,
                found.as_str().into(),
            ]
        })
        .collect();
    out.table(["WHERE", "CHECK", "STATE", "FOUND"], &rows)?;
    // What is to be done in several places is said once.
    let mut to_do: Vec<(&str, &str, Vec<&str>)> = Vec::new();
    for Finding {
        at, check, remedy, ..
    } in findings
    {
        let Some(remedy) = remedy.as_deref() else {
            continue;
        };
        match to_do
            .iter_mut()
            .find(|known| (known.0, known.1) == (check, remedy))
        {
            Some((.., places)) => places.push(at),
            None => to_do.push((check, remedy, vec![at])),
        }
    }
    if !to_do.is_empty() {
        out.line("")?;
        out.line("What to do:")?;
    }
    for (check, remedy, mut places) in to_do {
        places.dedup();
        out.prose(&format!("  {check} ({}): {remedy}", places.join(", ")))?;
    }
    out.line("")?;
    out.line(&verdict(findings))
}

fn verdict(findings: &[Finding]) -> String {
    let of = |level| {
        findings
            .iter()
            .filter(|finding| finding.level == level)
            .count()
    };
    let warnings = match of(Level::Warning) {
        0 => String::new(),
        some => format!("; {}", Counted(some, "warning")),
    };
    match of(Level::Bad) {
        0 => format!("nothing is wrong{warnings}"),
        1 => format!("1 thing is wrong{warnings}"),
        bad => format!("{bad} things are wrong{warnings}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::output::Screen;
    use super::*;

    #[test]
    fn a_finding_says_what_to_do_in_both_formats() {
        let closed = |at| Finding::bad("ports", "closed", "open them").at(at);
        let findings = [
            Finding::good("clock", "fine"),
            closed("a"),
            closed("b"),
            Finding::warning("user", "root", "be another"),
        ];
        let mut text = Vec::new();
        show(&findings, &mut Output::new(&mut text, Screen::default())).unwrap();
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "\
WHERE  CHECK  STATE    FOUND
here   clock  good     fine
a      ports  BAD      closed
b      ports  BAD      closed
here   user   warning  root

What to do:
  ports (a, b): open them
  user (here): be another

2 things are wrong; 1 warning
"
        );
        assert_eq!(verdict(&findings[..1]), "nothing is wrong");
        assert_eq!(
            serde_json::to_string(&findings[1]).unwrap(),
            r#"{"at":"a","check":"ports","level":"bad","found":"closed","do":"open them"}"#
        );
    }
}
