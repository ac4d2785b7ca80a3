//! `--dry-run`: what would run where.

use kolo_core::plan::{PlanRow, plan_ranks};
use kolo_transport::wire::{JobState, PlacedNode, Refusal};
use serde::Serialize;

use super::super::args::{Connect, Format};
use super::super::error::CliError;
use super::super::output::Output;
use super::super::plan::table;
use super::args::Run;
use super::discovery::Hosts;
use super::place;
use super::plan::Plan;
use super::report::Outcome;
use super::target::{Surroundings, Target};
use super::{files, job};

#[derive(Serialize)]
struct Json<'a> {
    target: &'static str,
    program: &'a str,
    args: &'a [String],
    cwd: Option<&'a str>,
    env: &'a std::collections::BTreeMap<String, String>,
    workers: &'a [PlanRow],
    #[serde(skip_serializing_if = "Option::is_none")]
    elastic: Option<Bounds>,
}

/// How far an elastic job may change.
#[derive(Serialize)]
struct Bounds {
    min: u32,
    max: u32,
    max_restarts: u32,
}

/// The hosts of all ranks, with what tells each from others, or why a run would not start.
async fn hosts(
    options: &Run,
    plan: &mut Plan,
    here: &Surroundings,
    connect: &Connect,
) -> Result<Result<Vec<(u64, String)>, Refusal>, CliError> {
    Hosts::find(options, &mut plan.spec).await?;
    let grounds = place::prepare(options, plan, here, connect).await?;
    let placed = job::try_out(&grounds.link, plan.spec.clone(), plan.start_timeout).await;
    grounds.end().await;
    Ok(placed?.map(|nodes| {
        let names = nodes.into_iter();
        let of_each =
            |node: PlacedNode| std::iter::repeat_n((node.node.0, node.hostname), node.ranks.len());
        names.flat_map(of_each).collect()
    }))
}

/// Prints the plan, or says what a run would end with before anything is started.
pub(crate) async fn dry_run(
    options: &Run,
    mut plan: Plan,
    here: &Surroundings,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<Option<Outcome>, CliError> {
    files::try_to_prepare(plan.output.as_ref())?;
    let hosts = match hosts(options, &mut plan, here, connect).await? {
        Ok(hosts) => hosts,
        Err(refusal) => {
            return Ok(Some(Outcome {
                state: Some(JobState::Failed),
                refusal: Some(refusal),
                workers: plan.workers,
                ..Outcome::default()
            }));
        }
    };
    let rows = plan_ranks(hosts.into_iter())?;
    let (program, cwd) = plan
        .spec
        .installed
        .as_ref()
        .map(|installed| (installed.program.as_str(), installed.cwd.as_deref()))
        .unwrap_or_default();
    let target = match plan.target {
        Target::Local => "this machine",
        Target::Cluster | Target::Nodes(_) => "the cluster",
        Target::Hosts(_) | Target::Discovered => "hosts",
    };
    let bounds = plan.spec.elastic.as_ref().map(|elastic| Bounds {
        min: elastic.min,
        max: elastic.max,
        max_restarts: elastic.restarts_without_progress,
    });
    if format == Format::Json {
        out.json(&Json {
            target,
            program,
            args: &plan.spec.args,
            cwd,
            env: &plan.spec.env,
            workers: &rows,
            elastic: bounds,
        })?;
        return Ok(None);
    }
    table(&rows, out)?;
    let words: Vec<String> = std::iter::once(program.to_owned())
        .chain(plan.spec.args.iter().cloned())
        .map(|word| quoted(&word))
        .collect();
    out.line(&format!(
        "on {target}, in {}: {}",
        cwd.unwrap_or("."),
        words.join(" ")
    ))?;
    if let Some(Bounds {
        min,
        max,
        max_restarts,
    }) = bounds
    {
        out.line(&format!(
            "the job begins so, and goes on with {min} to {max} workers; restarts after failures: {max_restarts}"
        ))?;
    }
    for (name, value) in &plan.spec.env {
        out.line(&format!("  {name}={}", quoted(value)))?;
    }
    Ok(None)
}

/// As a shell would need it.
fn quoted(word: &str) -> String {
    let plain = |char: char| char.is_ascii_alphanumeric() || "-_./=:,@%+".contains(char);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_as_a_shell_needs_it() {
        assert_eq!(quoted("--lr=0.1"), "--lr=0.1");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
