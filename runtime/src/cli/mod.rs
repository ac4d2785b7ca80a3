//! The `kolo` command: see what a cluster does, read logs, stop jobs, and plan without starting anything.
//!
//! [`main`] is all that the binary calls. Commands write to the streams that they are given, so that tests can
//! read what they say; results go to standard output, everything else to standard error.

mod args;
pub mod client;
mod doctor;
mod down;
mod down_exclusion;
mod error;
mod host_args;
mod interfaces;
mod login;
mod logs;
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
use std::io::{self, BufWriter, IsTerminal, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use kolo_transport::descriptors::make_room;

use args::{Args, Command};
pub use error::CliError;
use output::Output;

/// Descriptors that a command needs for its connections; what it starts needs more.
const DESCRIPTORS: u64 = 24;

/// Runs the command line of this process and returns its exit code.
#[must_use]
pub fn main() -> ExitCode {
    let stdout = io::stdout();
    let is_terminal = stdout.is_terminal();
    let code = run(
        std::env::args_os(),
        &mut BufWriter::new(stdout.lock()),
        &mut io::stderr().lock(),
        is_terminal && colours_wanted(),
    );
    ExitCode::from(code)
}

/// <https://no-color.org>, and terminals that can't.
fn colours_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Runs a command line, the name of the program first. Returns the exit code.
pub fn run(
    args: impl IntoIterator<Item = OsString>,
    out: &mut dyn Write,
    err: &mut dyn Write,
    colours: bool,
) -> u8 {
    let args = match run::translate(args.into_iter().collect(), &Args::command()) {
        Ok(args) => args,
        Err(message) => return tell(err, &CliError::Usage(message)),
    };
    let is_run = run::is_run(&args, &Args::command());
    let args = match Args::try_parse_from(args) {
        Ok(args) => args,
        Err(error) => {
            if let Some(known) = run::elsewhere(&error).filter(|_| is_run) {
                return tell(err, &known);
            }
            // Help and version are no errors. clap knows which stream is meant, and whether it is a terminal.
            let code = u8::try_from(error.exit_code()).unwrap_or(error::USAGE);
            return match error.print() {
                Ok(()) => code,
                // Whoever read it has enough.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => code,
                Err(_) => error::FAILURE,
            };
        }
    };
    let result = dispatch(args, &mut Output::new(out, colours)).and_then(|code| {
        out.flush()?;
        Ok(code)
    });
    match result {
        Ok(code) => code,
        // Whoever read the output has enough.
        Err(CliError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => 0,
        Err(error) => tell(err, &error),
    }
}

/// Says why a command failed. Returns the exit code.
fn tell(err: &mut dyn Write, error: &CliError) -> u8 {
    // If nobody can read that, the code has to do.
    drop(writeln!(err, "kolo: {error}"));
    error.exit_code()
}

fn dispatch(args: Args, out: &mut Output<'_>) -> Result<u8, CliError> {
    let Args {
        command,
        format,
        connect,
    } = args;
    // Planning needs no cluster, and so neither threads nor credentials.
    if let Command::Plan(options) = &command {
        plan::run(options, format, out)?;
        return Ok(0);
    }
    // The doctor looks at what it can with a few.
    let needed = match command {
        Command::Doctor(_) => 8,
        _ => DESCRIPTORS,
    };
    make_room("kolo", needed)?;
    if let Command::Run(options) = command {
        return run::run(*options, &connect, format, out);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CliError::Start)?;
    let result = runtime.block_on(async {
        match command {
            Command::Plan(_) | Command::Run(_) => unreachable!("it is done above"),
            Command::Status => show::status(&connect, format, out).await?,
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
