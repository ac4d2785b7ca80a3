//! `kolo run`: any program as the workers.

pub(super) mod args;
mod config_file;
mod counts;
mod discovery;
mod elastic;
mod files;
mod glob;
mod job;
mod joining;
mod layout;
mod lines;
mod output;
mod place;
mod plan;
mod prefix;
mod ranks;
mod report;
mod say;
mod show;
mod signals;
mod sink;
mod stdin;
mod streams;
mod survey;
mod synonyms;
mod target;
mod torchrun;
mod wait;

use std::sync::Arc;

use kolo_process::Side;
use kolo_transport::wire::Exit;
use kolo_transport::wire::counted::Counted;

use self::args::Run;
pub(super) use self::config_file::Line;
use self::discovery::Hosts;
pub(super) use self::elastic::elsewhere;
use self::job::Request;
use self::plan::Plan;
use self::report::Outcome;
use self::signals::{Heard, Signals};
use self::sink::{Sink, Style, WriteError, Written};
pub(super) use self::synonyms::{is_run, join_negative, translate};
use self::target::Surroundings;
use super::args::{Connect, Format};
use super::error::CliError;
use super::output::{Output, Screen, failure};
use super::progress;
use crate::signals::name;

/// Runs the program, and gives the exit code. `line` is what the options come from.
pub(super) fn run(
    options: Run,
    line: Line,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    match divided(options, line, connect, format, out) {
        Err(error) if format == Format::Json && !matches!(error, CliError::Output(_)) => {
            tell(&Outcome::refused(&error));
            Ok(error.exit_code())
        }
        result => result,
    }
}

fn divided(
    options: Run,
    line: Line,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    let options = config_file::with_file(options, line)?;
    let here = Surroundings {
        vars: std::env::vars_os().collect(),
        cwd: std::env::current_dir().map_err(|error| {
            CliError::Usage(format!(
                "the current directory can't be found ({error}); change to one that exists"
            ))
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
    // From here on signals are taken, and a front stands still in place of what works.
    let front = if options.dry_run {
        None
    } else {
        match kolo_process::divide().map_err(CliError::Start)? {
            Side::Front(exit) => return Ok(exit_of_runner(exit)),
            Side::Runner(front) => Some(front),
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CliError::Start)?;
    let result = runtime.block_on(async {
        let Some(front) = front else {
            let (options, plan) = planned(options, &here, connect).await?;
            let refused = show::dry_run(&options, plan, &here, connect, format, out).await?;
            return Ok(refused.map_or(0, |outcome| {
                tell(&report(&outcome, format));
                outcome.exit_code()
            }));
        };
        let mut signals = Signals::take(front).map_err(CliError::Start)?;
        let running = execute(options, &here, connect, format, &mut signals);
        let mut outcome = Box::pin(running).await?;
        let text = report(&outcome, format);
        progress::end();
        let told = tokio::task::spawn_blocking(move || tell(&text));
        signals.unless_hurried(&mut outcome.signal, told).await;
        Ok(outcome.exit_code())
    });
    progress::end();
    // A read of standard input may still be under way, and a write that nobody reads.
    runtime.shutdown_background();
    result
}

/// The exit code for how the process ended that ran the job.
fn exit_of_runner(exit: Exit) -> u8 {
    if let Exit::Signal(_) | Exit::Unknown = exit {
        say::say(&format!("the process that ran the job ended with {exit}"));
    }
    match exit {
        Exit::Code(code) => u8::try_from(code & 0xff).unwrap_or(1),
        Exit::Signal(signal) => report::of_signal(signal),
        Exit::Unknown => 1,
    }
}

fn report(outcome: &Outcome, format: Format) -> String {
    let text = match format {
        Format::Table => red(&outcome.text()),
        Format::Json => outcome.json(),
    };
    // On a line of its own.
    let end = if outcome.mid_line && !text.is_empty() {
        "\n"
    } else {
        ""
    };
    format!("{end}{text}")
}

/// The lines of a report, those of kolo in red on a terminal.
fn red(text: &str) -> String {
    let screen = Screen::of_this_process();
    let lines = text.split_inclusive('\n').map(|line| {
        let (words, end) = line.split_at(line.trim_end_matches('\n').len());
        if words.starts_with("kolo:") {
            failure(words, screen) + end
        } else {
            line.to_owned()
        }
    });
    lines.collect()
}

/// If nobody can read the report, the exit code has to do.
fn tell(report: &str) {
    sink::write_all(rustix::stdio::stderr(), report.as_bytes()).ok();
}

/// What is to be run, with what a cluster says of its nodes if that matters.
async fn planned(
    options: Run,
    here: &Surroundings,
    connect: &Connect,
) -> Result<(Run, Plan), CliError> {
    let options = counts::settle(options, here, connect).await?;
    let plan = plan::plan(&options, here)?;
    for note in &plan.notes {
        say::say(note);
    }
    Ok((options, plan))
}

/// Does what comes before the job. A signal is the end of it, and what is dropped then ends.
async fn before_the_job<T>(
    signals: &mut Signals,
    work: impl Future<Output = T>,
) -> Result<T, Box<Outcome>> {
    tokio::pin!(work);
    loop {
        let heard = tokio::select! {
            done = &mut work => return Ok(done),
            heard = signals.next() => heard,
        };
        match heard {
            Heard::First(signal) => {
                say::say(&format!("{}: ended before the job began", name(signal)));
                return Err(Box::new(Outcome {
                    signal: Some(signal),
                    ..Outcome::default()
                }));
            }
            Heard::Workers(signal) => say::not_passed_on(signal),
            // The first was the end of this.
            Heard::Second => {}
        }
    }
}

async fn execute(
    options: Run,
    here: &Surroundings,
    connect: &Connect,
    format: Format,
    signals: &mut Signals,
) -> Result<Outcome, CliError> {
    progress::show("starting".to_owned());
    let preparing = async {
        let (options, mut plan) = planned(options, here, connect).await?;
        progress::show(format!("starting {}", Counted(plan.workers, "worker")));
        files::prepare(plan.output.as_ref())?;
        let hosts = Hosts::find(&options, &mut plan.spec).await?;
        let grounds = place::prepare(&options, &mut plan, here, connect).await?;
        Ok::<_, CliError>((plan, grounds, hosts))
    };
    let (plan, mut grounds, hosts) = match Box::pin(before_the_job(signals, preparing)).await {
        Ok(prepared) => prepared?,
        Err(ended) => return Ok(*ended),
    };
    let screen = Screen::of_this_process();
    let shown: Vec<bool> = (0..plan.workers)
        .map(|rank| plan.ranks.contains(rank))
        .collect();
    let without = match plan.output {
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
        shown: plan.shown,
        output: plan.output,
        workers: plan.workers,
        colours: [screen.colours, screen.message_colours],
    })
    .map_err(CliError::Start)?;
    let if_shared = (format == Format::Table && plan.limits_threads).then_some(plan::THREADS);
    let request = Request {
        spec: plan.spec,
        workers: plan.workers,
        start_timeout: plan.start_timeout,
        grace: plan.grace,
        without,
        if_shared,
        limit: plan.timeout,
        hosts: hosts.as_ref().map(Hosts::watch),
    };
    let patience = plan.wait;
    let link = Arc::clone(&grounds.link);
    let ran = tokio::select! {
        ran = wait::run(&link, request, sink, trouble, signals, patience) => ran,
        never = grounds.keep(hosts.as_ref()) => match never {},
    };
    drop(link);
    let written = tokio::task::spawn_blocking(move || writer.finish());
    // If whoever reads the output has stopped, and somebody is in a hurry, the rest of it is not waited for.
    let mut late = None;
    let written = match signals.unless_hurried(&mut late, written).await {
        Some(Ok(written)) => written,
        Some(Err(_)) | None => Written {
            result: Ok(()),
            mid_line: false,
        },
    };
    let mut outcome = ran?;
    outcome.mid_line = written.mid_line;
    outcome.signal = outcome.signal.or(late);
    match written.result {
        Ok(()) => {}
        Err(WriteError::Closed) => outcome.broken_pipe = true,
        Err(WriteError::Failed(text)) => {
            if !outcome.lost_output.contains(&text) {
                outcome.lost_output.push(text);
            }
        }
    }
    // Nodes whose launcher is gone leave by themselves.
    signals
        .unless_hurried(&mut outcome.signal, grounds.end())
        .await;
    Ok(outcome)
}
