//! What workers of `kolo run` inherit, and what they are assigned, on this machine.

use std::path::Path;
use std::process::Command;

use crate::kolo::{Ran, command};

/// `kolo run` on this machine with the environment of a process of another launcher.
fn inner(args: &[&str]) -> Command {
    let words: Vec<&str> = ["run", "--local", "--no-stdin", "--prefix", "none"]
        .iter()
        .chain(args)
        .copied()
        .collect();
    let mut kolo = command(Path::new("/nonexistent"), &words);
    kolo.env("PATH", std::env::var_os("PATH").unwrap_or_default());
    for (name, value) in [
        ("RANK", "5"),
        ("WORLD_SIZE", "9"),
        ("LOCAL_RANK", "3"),
        ("MASTER_ADDR", "10.9.9.9"),
        ("HOROVOD_SIZE", "9"),
        ("SLURM_PROCID", "7"),
        ("SLURM_JOB_ID", "77"),
        ("OMPI_COMM_WORLD_RANK", "7"),
        ("PMIX_RANK", "7"),
        ("TORCHELASTIC_ERROR_FILE", "/tmp/outer"),
        ("KOLO_RANK", "8"),
        ("MINE", "yes"),
        ("OMP_NUM_THREADS", "2"),
        ("PWD", "/elsewhere"),
        ("OLDPWD", "/elsewhere"),
    ] {
        kolo.env(name, value);
    }
    kolo
}

fn ran(kolo: &mut Command) -> (Vec<String>, String) {
    let ran = Ran::of(&kolo.output().unwrap());
    assert_eq!(ran.code, 0, "{ran:?}");
    let mut lines: Vec<String> = ran.out.lines().map(str::to_owned).collect();
    lines.sort();
    (lines, ran.err)
}

const TELL: &str = "echo $RANK/$WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $HOROVOD_SIZE $KOLO_RANK ${SLURM_PROCID-none} \
                    ${OMPI_COMM_WORLD_RANK-none} ${PMIX_RANK-none} \
                    $([ $TORCHELASTIC_ERROR_FILE = /tmp/outer ] && echo outer || echo own) $SLURM_JOB_ID $MINE";

#[test]
fn what_is_inherited_or_passed_by_a_pattern_never_overrides_what_kolo_sets() {
    let expected =
        [0, 1].map(|rank| format!("{rank}/2 {rank} 127.0.0.1 2 {rank} none none none own 77 yes"));
    for passed in [
        &[][..],
        &["--pass-env", "*"],
        &["--pass-env", "?*_*", "--pass-env", "RAN*"],
    ] {
        let args: Vec<&str> = [passed, &["-n", "2", "--", "sh", "-c", TELL]].concat();
        let (lines, err) = ran(&mut inner(&args));
        assert_eq!((lines, err.as_str()), (expected.to_vec(), ""), "{passed:?}");
    }
    // By its name it is told why.
    let args = [
        "--pass-env",
        "RANK",
        "-n",
        "1",
        "--",
        "sh",
        "-c",
        "echo $RANK",
    ];
    let (lines, err) = ran(&mut inner(&args));
    assert_eq!(lines, ["0"]);
    assert!(
        err.contains("--pass-env: RANK is not passed, since kolo sets it"),
        "{err}"
    );
}

#[test]
fn a_value_that_is_given_on_purpose_overrides_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    std::fs::write(&file, "[env]\nRANK = \"7\"\n").unwrap();
    let file = file.to_str().unwrap();
    for given in [["--env", "RANK=7"], ["--config-file", file]] {
        let args = [
            &given[..],
            &["-n", "2", "--", "sh", "-c", "echo $RANK $KOLO_SIZE"],
        ]
        .concat();
        let (lines, err) = ran(&mut inner(&args));
        assert_eq!(lines, ["7 2", "7 2"]);
        assert!(
            err.contains("kolo: --env: all workers have RANK=7 in place of what kolo sets"),
            "{err}"
        );
        assert_eq!(err.lines().count(), 1, "{err}");
    }
    let args = ["--env", "KOLO_RANK=1", "true"];
    let refused = Ran::of(&inner(&args).output().unwrap()).bad(2);
    assert!(refused.contains("KOLO_"), "{refused}");
}

#[test]
fn a_run_inside_a_worker_is_a_group_of_its_own() {
    let kolo = env!("CARGO_BIN_EXE_kolo");
    let script =
        format!("{kolo} run --prefix none --no-stdin -n 2 --pass-env '*' -- sh -c '{TELL}'");
    let (lines, err) = ran(&mut inner(&["-n", "1", "--", "sh", "-c", &script]));
    assert_eq!(err, "");
    assert!(
        lines[0].starts_with("0/2 0 127.0.0.1 2 0 none"),
        "{lines:?}"
    );
    assert!(
        lines[1].starts_with("1/2 1 127.0.0.1 2 1 none"),
        "{lines:?}"
    );
}

#[test]
fn gpus_are_shared_out_from_what_is_visible() {
    let seen = |visible: &str, args: &[&str]| {
        let tell = "echo \"<${CUDA_VISIBLE_DEVICES-unset}>\"";
        let args = [args, &["--", "sh", "-c", tell]].concat();
        let mut kolo = inner(&args);
        kolo.env("CUDA_VISIBLE_DEVICES", visible);
        Ran::of(&kolo.output().unwrap())
    };
    for (visible, args, devices) in [
        ("4,5,6", &["--gpus-per-worker", "2"][..], "4,5"),
        ("4, 5,6", &["--gpus-per-worker", "3"], "4,5,6"),
        ("GPU-a,GPU-b", &["--gpus-per-worker", "1"], "GPU-a"),
        // Nothing is shared out, and nobody else is there.
        ("4,5,6", &[], "4,5,6"),
        ("", &[], ""),
        // None is asked for.
        ("4,5,6", &["--gpus-per-worker", "0"], ""),
        // What others see is no business of these workers.
        ("4,5,6", &["--gpus-per-worker", "0", "--pass-env", "*"], ""),
        (
            "4,5,6",
            &["--gpus-per-worker", "1", "--pass-env", "CUDA_*"],
            "4",
        ),
        (
            "4,5,6",
            &["--gpus-per-worker", "1", "--env", "CUDA_VISIBLE_DEVICES=6"],
            "6",
        ),
    ] {
        let ran = seen(visible, args);
        assert_eq!(
            (ran.code, ran.out),
            (0, format!("<{devices}>\n")),
            "{visible} {args:?}"
        );
    }
    for visible in ["0,0", "0,-1,1", "3"] {
        let ran = seen(visible, &["--gpus-per-worker", "2"]);
        assert_ne!(ran.code, 0, "{ran:?}");
        assert!(ran.err.contains("this machine has 1 GPU ("), "{ran:?}");
    }
}

#[test]
fn workers_find_what_unmodified_programs_look_for() {
    const TELL: &str = "printenv PWD HOROVOD_HOSTNAME OMP_NUM_THREADS TORCHELASTIC_SIGNALS_TO_HANDLE ROLE_NAME OLDPWD | paste -sd' '";
    let own = rustix::system::uname();
    let own = own.nodename().to_str().unwrap();
    let expected = |threads| {
        let line = format!("/usr {own} {threads} SIGTERM,SIGINT,SIGHUP,SIGQUIT default");
        [line.clone(), line]
    };
    // A word such as of Python: its libraries are who would take more threads.
    let args = ["--cwd", "/usr", "-n", "2", "--", "bash", "-c", TELL, "x.py"];
    let (lines, err) = ran(&mut inner(&args));
    assert_eq!((lines, err.as_str()), (expected("2").to_vec(), ""));
    // Nobody has given a number of threads.
    let mut kolo = inner(&args);
    let (lines, err) = ran(kolo.env_remove("OMP_NUM_THREADS"));
    assert_eq!(lines, expected("1"));
    let note = "kolo: OMP_NUM_THREADS=1 for workers that share a host (--env OMP_NUM_THREADS=N)\n";
    assert_eq!(err, note);
    let mut kolo = inner(&[&["--env", "OMP_NUM_THREADS=3"], &args[..]].concat());
    let (lines, err) = ran(kolo.env_remove("OMP_NUM_THREADS"));
    assert_eq!((lines, err.as_str()), (expected("3").to_vec(), ""));
    let mut kolo = inner(&["-n", "1", "--", "sh", "-c", "echo ${OMP_NUM_THREADS-none}"]);
    let (lines, err) = ran(kolo.env_remove("OMP_NUM_THREADS"));
    assert_eq!((lines, err.as_str()), (vec!["none".to_owned()], ""));
}

#[test]
fn as_people_of_other_launchers_write_it() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let run = |text: &str| {
        let words = [
            "-np=2",
            "-output-filename",
            out.to_str().unwrap(),
            "-cwd",
            "/",
        ];
        let script = format!("echo {text} $RANK; echo why >&2");
        ran(&mut inner(&[&words[..], &["sh", "-c", &script]].concat()));
        for rank in 0..2 {
            let read = |stream: &str| {
                std::fs::read_to_string(out.join(format!("rank.{rank}/{stream}"))).unwrap()
            };
            assert_eq!(read("stdout"), format!("{text} {rank}\n"));
            assert_eq!(read("stderr"), "why\n");
        }
    };
    run("first");
    run("again");
    let mut hosts = command(
        Path::new("/nonexistent"),
        &[
            "run",
            "-np",
            "2",
            "-host",
            "localhost:2",
            "sh",
            "-c",
            "echo $WORLD_SIZE",
        ],
    );
    hosts.env("PATH", std::env::var_os("PATH").unwrap_or_default());
    assert_eq!(ran(&mut hosts).0, ["[0]<stdout>:2", "[1]<stdout>:2"]);
    for words in [
        &["run", "-hots", "localhost:2", "true"][..],
        &["run", "-np", "2", "-hx", "true"],
        &["-hx", "run", "true"],
        &["run", "-nope", "true"],
        &["run", "--hots", "localhost:2", "true"],
    ] {
        let refused = Ran::of(&command(Path::new("/nonexistent"), words).output().unwrap());
        assert_eq!(
            (refused.code, refused.out.as_str()),
            (2, ""),
            "{words:?}: {refused:?}"
        );
    }
}
