//! `kolo run` beside `mpirun`: a program that does nothing, and a flood of output.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Instant;

use kolo_harness::TestCluster;

use crate::launchers::{kolo, reach};
use crate::report::Figure;
use crate::stats::median;

/// Bytes of output of each of the four ranks.
const FLOOD: u64 = 250_000_000;

/// Bytes of a line.
const LINE: u64 = 100;

fn mpirun() -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe"]);
    command
}

/// Milliseconds from the start of a command to its end.
fn time(command: &mut Command) -> anyhow::Result<f64> {
    command.stdin(Stdio::null());
    let start = Instant::now();
    let status = command.status()?;
    let time = start.elapsed().as_secs_f64() * 1e3;
    anyhow::ensure!(status.success(), "{command:?} ended with {status}");
    Ok(time)
}

/// Seconds of processor time of children that have been waited for.
fn children_cpu() -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    // Fields 16 and 17 of the file, in ticks of 10 ms.
    let ticks = |index: usize| -> anyhow::Result<f64> { Ok(fields[index].parse::<f64>()?) };
    Ok((ticks(13)? + ticks(14)?) / 100.0)
}

struct Flood {
    mb_per_second: f64,
    cpu_seconds: f64,
}

/// Reads everything, counts the lines of each rank and looks at every one.
fn flood(mut command: Command, what: &str) -> anyhow::Result<Flood> {
    let cpu = children_cpu()?;
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let Some(mut stdout) = child.stdout.take() else {
        anyhow::bail!("{what} has no output");
    };
    let mut lines = [0_u64; 4];
    let mut buffer = vec![0; 1 << 20];
    let mut line: Vec<u8> = Vec::new();
    loop {
        let read = stdout.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        for piece in buffer[..read].split_inclusive(|byte| *byte == b'\n') {
            line.extend_from_slice(piece);
            if piece.ends_with(b"\n") {
                // Whatever prefix it has, it ends with its rank, 99 times.
                let length = line.len();
                anyhow::ensure!(length >= LINE as usize, "a short line from {what}");
                let text = &line[length - LINE as usize..length - 1];
                anyhow::ensure!(
                    text.iter().all(|byte| *byte == text[0]),
                    "a mixed line from {what}: {}",
                    String::from_utf8_lossy(&line)
                );
                lines[usize::from(text[0] - b'0')] += 1;
                line.clear();
            }
        }
    }
    let status = child.wait()?;
    let seconds = start.elapsed().as_secs_f64();
    anyhow::ensure!(
        status.success() && line.is_empty(),
        "{what} ended with {status}"
    );
    anyhow::ensure!(lines == [FLOOD / LINE; 4], "{what} lost lines: {lines:?}");
    Ok(Flood {
        mb_per_second: 4.0 * FLOOD as f64 / 1e6 / seconds,
        cpu_seconds: children_cpu()? - cpu,
    })
}

/// Measures all in turn, `rounds` times.
pub(crate) fn run(rounds: u32) -> anyhow::Result<Vec<Figure>> {
    let kolo = kolo()?;
    let local = || {
        let mut command = Command::new(&kolo);
        command.env_remove("KOLO_HEAD").args(["run", "-n", "4"]);
        command
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let cluster = runtime.block_on(TestCluster::builder().nodes(1).slots(4).start())?;
    let on_cluster = || -> anyhow::Result<Command> {
        let mut command = Command::new(&kolo);
        reach(&mut command, &cluster)?;
        command.args(["run", "-n", "4"]);
        Ok(command)
    };
    let has_peer = mpirun().arg("--version").output().is_ok();
    if !has_peer {
        eprintln!("mpirun is missing (Debian: openmpi-bin): kolo stands alone");
    }
    let (mut cold, mut warm, mut peer) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        cold.push(time(local().arg("true"))?);
        warm.push(time(on_cluster()?.arg("true"))?);
        if has_peer {
            peer.push(time(mpirun().args(["-np", "4", "true"]))?);
        }
    }
    runtime.block_on(cluster.stop())?;
    let beside = |case: &str, times: &[f64]| {
        let figure = Figure::new("run", case, "p50", "ms", median(times));
        if has_peer {
            figure.beside("mpirun", median(&peer))
        } else {
            figure
        }
    };
    let mut figures = vec![
        beside("-n 4 true, on this machine", &cold),
        beside("-n 4 true, on a running cluster", &warm),
    ];
    let text = format!(
        "yes $(head -c 99 /dev/zero | tr '\\0' ${{RANK:-$OMPI_COMM_WORLD_RANK}}) | head -c {FLOOD}"
    );
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds.min(3) {
        let mut command = local();
        command.args(["--", "sh", "-c", &text]);
        ours.push(flood(command, "kolo run")?);
        if has_peer {
            let mut command = mpirun();
            command.args(["--tag-output", "-np", "4", "sh", "-c", &text]);
            theirs.push(flood(command, "mpirun"));
        }
    }
    let rates = |floods: &[Flood]| {
        median(
            &floods
                .iter()
                .map(|flood| flood.mb_per_second)
                .collect::<Vec<_>>(),
        )
    };
    let cpu = |floods: &[Flood]| {
        median(
            &floods
                .iter()
                .map(|flood| flood.cpu_seconds)
                .collect::<Vec<_>>(),
        )
    };
    // What the peer does not bring whole is no figure.
    let theirs: Vec<Flood> = theirs
        .into_iter()
        .filter_map(|flood| flood.map_err(|error| eprintln!("{error}")).ok())
        .collect();
    let mut rate = Figure::new(
        "run",
        "1 GB of lines of 100 bytes from 4 ranks",
        "p50",
        "MB/s",
        rates(&ours),
    );
    let mut spent = Figure::new(
        "run",
        "the same, processor time of all processes",
        "p50",
        "s",
        cpu(&ours),
    );
    if !theirs.is_empty() {
        rate = rate.beside("mpirun --tag-output", rates(&theirs));
        spent = spent.beside("mpirun --tag-output", cpu(&theirs));
    }
    figures.extend([rate, spent]);
    Ok(figures)
}
