//! `kolo run`: any program as the workers.

pub(super) mod args;
mod config_file;
mod files;
mod glob;
mod job;
mod layout;
mod lines;
mod merge;
mod place;
mod plan;
mod prefix;
mod ranks;
mod report;
mod show;
mod signals;
mod sink;
mod stdin;
mod synonyms;

use std::ffi::OsString;

use clap::{CommandFactory, Parser};

use self::args::Run;
pub(super) use self::job::Link;
use self::job::Request;
use self::plan::{Plan, Surroundings};
use self::report::Outcome;
use self::signals::Signals;
use self::sink::{Sink, Style, WriteError};
pub(super) use self::synonyms::translate;
use super::args::{Args, Command, Connect, Format};
use super::error::CliError;
use super::output::Output;

/// Runs the program, and gives the exit code.
pub(super) fn run(
    options: Run,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    let options = with_file(options)?;
    let here = Surroundings {
        vars: std::env::vars_os().collect(),
        cwd: std::env::current_dir().map_err(|error| CliError::File {
            path: ".".into(),
            error,
        })?,
        hostname: rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned(),
        has_head: connect
            .head
            .as_deref()
            .is_some_and(|head| !head.trim().is_empty()),
    };
    let plan = plan::plan(&options, &here)?;
    for note in &plan.notes {
        job::say(note);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CliError::Start)?;
    let result = runtime.block_on(async {
        let outcome = if options.dry_run {
            match show::dry_run(&options, &plan, &here, connect, format, out).await? {
                Some(refused) => refused,
                None => return Ok(0),
            }
        } else {
            execute(&options, plan, &here, connect).await?
        };
        let text = match format {
            Format::Table => outcome.text(),
            Format::Json => outcome.json(),
        };
        // If nobody can read it, the exit code has to do.
        sink::write_all(rustix::stdio::stderr(), text.as_bytes()).ok();
        Ok(outcome.exit_code())
    });
    // A read of standard input may still be under way.
    runtime.shutdown_background();
    result
}

/// The options with those of `--config-file`.
fn with_file(options: Run) -> Result<Run, CliError> {
    let Some(path) = options.config_file.clone() else {
        return Ok(options);
    };
    let mut command = Args::command();
    let Some(known) = command.find_subcommand_mut("run") else {
        return Ok(options);
    };
    let words = ["kolo", "run"]
        .into_iter()
        .map(OsString::from)
        .chain(config_file::words(&path, known)?);
    let file = Args::try_parse_from(words).map_err(|error| {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        let reason = first.strip_prefix("error: ").unwrap_or(first);
        CliError::Usage(format!("{}: {reason}", path.display()))
    })?;
    match file.command {
        Command::Run(file) => Ok(merge::merge(options, *file)),
        _ => Ok(options),
    }
}

async fn execute(
    options: &Run,
    plan: Plan,
    here: &Surroundings,
    connect: &Connect,
) -> Result<Outcome, CliError> {
    files::prepare(plan.output_dir.as_deref())?;
    // From here on a signal ends what was begun.
    let mut signals = Signals::take().map_err(CliError::Start)?;
    let mut plan = plan;
    let preparing = place::prepare(options, &mut plan, here, connect);
    let grounds = tokio::select! {
        grounds = preparing => grounds?,
        signal = signals.next() => {
            return Ok(Outcome {
                signal: Some(signal),
                ..Outcome::default()
            });
        }
    };
    let shown: Vec<bool> = (0..plan.workers)
        .map(|rank| plan.ranks.contains(rank))
        .collect();
    let without = match plan.output_dir {
        Some(_) => Vec::new(),
        None => (0..)
            .zip(&shown)
            .filter(|(_, shown)| !**shown)
            .map(|(rank, _)| kolo_transport::ids::Rank(rank))
            .collect(),
    };
    let (sink, writer, trouble) = Sink::start(Style {
        prefix: plan.prefix,
        ranks: plan.ranks,
        output_dir: plan.output_dir,
        workers: plan.workers,
    })
    .map_err(CliError::Start)?;
    let request = Request {
        spec: plan.spec,
        workers: plan.workers,
        start_timeout: plan.start_timeout,
        grace: plan.grace,
        without,
    };
    let ran = job::run(&grounds.link, request, sink, trouble, &mut signals).await;
    let written = tokio::task::spawn_blocking(move || writer.finish());
    let written = tokio::select! {
        written = written => written.unwrap_or(Ok(())),
        // Whoever reads the output has stopped, and somebody wants an end.
        signal = signals.next() => {
            tracing::debug!(signal, "the output is not waited for");
            Ok(())
        }
    };
    let mut outcome = ran?;
    match written {
        Ok(()) => {}
        Err(WriteError::Closed) => outcome.broken_pipe = true,
        Err(WriteError::Failed(text)) => {
            if !outcome.lost_output.contains(&text) {
                outcome.lost_output.push(text);
            }
        }
    }
    tokio::select! {
        () = grounds.end() => {}
        // Nodes whose launcher is gone leave by themselves.
        signal = signals.next() => tracing::debug!(signal, "the end of the nodes is not waited for"),
    }
    Ok(outcome)
}
