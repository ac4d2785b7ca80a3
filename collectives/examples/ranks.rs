//! Processes that add up their numbers: a whole program with collectives, and nothing else.
//!
//! ```console
//! $ cargo run --release -p kolo-collectives --example ranks -- --world 4
//! ```
//!
//! starts four of itself. Or start each one by hand, in any order:
//!
//! ```console
//! $ ranks --rank 0 --world 2 --folder /tmp/sums & ranks --rank 1 --world 2 --folder /tmp/sums
//! ```

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use kolo_collectives::{Rank, ReduceOp, peers};

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

const HELP: &str = "\
Processes that add up their numbers.

  ranks [--world N]                            start N of them here (2 if nothing is said)
  ranks --rank R --world N --folder FOLDER     be one of N that meet in a folder";

#[derive(Default)]
struct Arguments {
    rank: Option<u32>,
    world: Option<u32>,
    folder: Option<PathBuf>,
}

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        // What it says is a sentence; a `main` that returns it would show its fields.
        eprintln!("{error}");
        ExitCode::FAILURE
    })
}

fn run() -> Result<ExitCode> {
    let Some(given) = arguments()? else {
        println!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    };
    let world = given.world.unwrap_or(2);
    match (given.rank, given.folder) {
        (Some(rank), Some(folder)) => work(rank, world, &folder).map(|()| ExitCode::SUCCESS),
        (None, None) => start(world),
        _ => Err("give both --rank and --folder, or none of them".into()),
    }
}

/// What each rank does.
fn work(rank: u32, world: u32, folder: &Path) -> Result {
    let comm = peers::Local::in_folder(folder).join(Rank(rank), world)?;

    let mut gradient = vec![rank as f32; 1 << 20];
    comm.all_reduce(&mut gradient, ReduceOp::Average)?;
    let begun = Instant::now();
    comm.all_reduce(&mut gradient, ReduceOp::Average)?;
    let took = begun.elapsed();

    // Every second rank, in a group of their own.
    if let Some(half) = comm.split(Some(rank % 2), 0)? {
        let members = half.all_gather(&[rank])?;
        println!(
            "rank {rank} of {world}: the average of 4 MiB is {} after {took:?}; with {members:?}",
            gradient[0]
        );
    }
    Ok(())
}

/// Starts all ranks and waits for them.
fn start(world: u32) -> Result<ExitCode> {
    let folder = std::env::temp_dir().join(format!("kolo-ranks-{}", std::process::id()));
    let program = std::env::current_exe()?;
    // Each is a process here.
    if !(1..=64).contains(&world) {
        return Err(format!("--world {world}: 1 to 64 ranks are started").into());
    }
    std::fs::create_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let ranks = (0..world).map(|rank| {
        Command::new(&program)
            .args(["--rank", &rank.to_string(), "--world", &world.to_string()])
            .arg("--folder")
            .arg(&folder)
            .spawn()
    });
    let ranks: Vec<_> = ranks.collect::<std::io::Result<_>>()?;
    let mut code = ExitCode::SUCCESS;
    for mut rank in ranks {
        if !rank.wait()?.success() {
            code = ExitCode::FAILURE;
        }
    }
    // Each has taken its socket away, but for one that was killed.
    std::fs::remove_dir_all(&folder)?;
    Ok(code)
}

/// None if help is asked for.
fn arguments() -> Result<Option<Arguments>> {
    let mut found = Arguments::default();
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let mut value = || given.next().ok_or_else(|| format!("{name} has no value"));
        let number = |text: String| {
            let parsed = text.parse::<u32>();
            parsed.map_err(|_| format!("{name} {text}: that is no number of 0 or more"))
        };
        match name.as_str() {
            "--rank" => found.rank = Some(number(value()?)?),
            "--world" => found.world = Some(number(value()?)?),
            "--folder" => found.folder = Some(value()?.into()),
            "--help" | "-h" => return Ok(None),
            _ => return Err(format!("{name} is no option here.\n\n{HELP}").into()),
        }
    }
    Ok(Some(found))
}
