//! The `kolo` command: run programs, see what a cluster does, read logs, stop jobs.
//!
//! [`main`] is all that the binary calls. Commands write to the streams that they are given, so that tests can
//! read what they say; results go to standard output, everything else to standard error.

mod args;
mod client;
mod command;
mod complete;
mod doctor;
mod down;
mod down_exclusion;
mod error;
mod host_args;
mod ids;
mod interfaces;
mod link;
mod login;
mod logs;
mod mistakes;
mod node;
mod output;
mod plan;
mod progress;
mod run;
mod show;
mod stop;
mod trust;
mod up;
mod up_head;
mod up_record;

use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use kolo_transport::descriptors::make_room;

use command::{Args, Command};
use error::CliError;
use output::Output;
pub use output::Screen;

use crate::settings::in_words;

/// Descriptors that a command needs for its connections; what it starts needs more.
const DESCRIPTORS: u64 = 24;

/// Runs the command line of this process and returns its exit code.
#[must_use]
pub fn main() -> ExitCode {
    let code = run(
        std::env::args_os(),
        &mut BufWriter::new(io::stdout().lock()),
        &mut io::stderr().lock(),
        Screen::of_this_process(),
    );
    ExitCode::from(code)
}

/// Runs a command line, the name of the program first. Returns the exit code.
pub fn run(
    args: impl IntoIterator<Item = OsString>,
    out: &mut dyn Write,
    err: &mut dyn Write,
    screen: Screen,
) -> u8 {
    let line = match run::translate(args.into_iter().collect(), &Args::command()) {
        Ok(line) => line,
        Err(message) => return tell(err, &CliError::Usage(message), screen),
    };
    let is_run = run::is_run(&line, &Args::command());
    let line = if is_run { line } else { mistakes::joined(line) };
    let args = match Args::try_parse_from(&line) {
        Ok(args) => args,
        Err(error) => {
            if let Some(known) = run::elsewhere(&error).filter(|_| is_run) {
                return tell(err, &known, screen);
            }
            return wrong_line(err, mistakes::explained(error), screen);
        }
    };
    let result = dispatch(args, line, &mut Output::new(out, screen)).and_then(|code| {
        out.flush()?;
        Ok(code)
    });
    match result {
        Ok(code) => code,
        // Whoever read the output has enough.
        Err(CliError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => 0,
        Err(error) => tell(err, &error, screen),
    }
}

/// Says why a command failed. Returns the exit code.
fn tell(err: &mut dyn Write, error: &CliError, screen: Screen) -> u8 {
    let (cause, remedy) = error.cause_and_remedy();
    let cause = ids::shortened(&format!("kolo: {cause}"));
    let mut text = output::failure(&cause, screen);
    if let Some(remedy) = remedy {
        text.extend(["\n      ", &remedy]);
    }
    // If nobody can read that, the code has to do.
    drop(writeln!(err, "{text}"));
    error.exit_code()
}

/// Says what is wrong with a command line, or what was asked for: the help, the version. Returns the exit code.
fn wrong_line(err: &mut dyn Write, error: clap::Error, screen: Screen) -> u8 {
    let code = u8::try_from(error.exit_code()).unwrap_or(error::USAGE);
    let told = if error.use_stderr() {
        write!(err, "{}", in_words("kolo", &error, screen.message_colours))
    } else {
        // clap knows whether standard output is a terminal.
        error.print()
    };
    match told {
        Ok(()) => code,
        // Whoever read it has enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => code,
        Err(_) => error::FAILURE,
    }
}

fn dispatch(args: Args, line: Vec<OsString>, out: &mut Output<'_>) -> Result<u8, CliError> {
    let Args {
        command,
        format,
        connect,
    } = args;
    // Planning needs no cluster, and so neither threads nor credentials.
    match &command {
        Command::Plan(options) => return plan::run(options, format, out).map(|()| 0),
        Command::Completions(options) => return complete::completions(options, out).map(|()| 0),
        Command::Man(options) => return complete::manual(options, out).map(|()| 0),
        _ => {}
    }
    // The doctor looks at what it can with a few.
    let needed = match command {
        Command::Doctor(_) => 8,
        _ => DESCRIPTORS,
    };
    make_room("kolo", needed)?;
    if let Command::Run(options) = command {
        let command = Args::command();
        let line = run::Line {
            words: line,
            command,
        };
        return run::run(*options, line, &connect, format, out);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CliError::Start)?;
    let result = runtime.block_on(async {
        match command {
            Command::Plan(_) | Command::Run(_) | Command::Completions(_) | Command::Man(_) => {
                unreachable!("it is done above")
            }
            Command::Status(options) => show::status(&options, &connect, format, out).await?,
            Command::Jobs(options) => show::jobs(&options, &connect, format, out).await?,
            Command::Stop(options) => stop::run(&options, &connect, format, out).await?,
            Command::Login(options) => login::run(&options, &connect, format, out).await?,
            Command::Up(options) => return up::run(&options, &connect, format, out).await,
            Command::Down(options) => return down::run(&options, &connect, format, out).await,
            Command::Token(options) => trust::token(&options, &connect, format, out).await?,
            Command::Revoke(options) => trust::revoke(&options, &connect, format, out).await?,
            Command::Node(options) => node::run(&options, &connect, format, out).await?,
            Command::Interfaces(options) => {
                return interfaces::run(&options, &connect, format, out).await;
            }
            Command::Doctor(options) => {
                return doctor::run(&options, &connect, format, out).await;
            }
            Command::Logs(options) => return logs::run(&options, &connect, format, out).await,
        }
        Ok(0)
    });
    // A name server that hangs must not hold the command up after its deadline.
    runtime.shutdown_background();
    result
}
