//! `kolo run`: the error files of workers, and the first cause of several failures.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::path::Path;

use kolo_harness::{TestCluster, kolo};

use crate::run::{code, output, script, sorted, text};
use crate::support::soon;

/// A shell function that writes an error as torch's `@record` does: text, line in `train.py`, seconds ago.
const FAIL: &str = r#"
fail() {
  stack="Traceback (most recent call last):\\n  File \\\"/home/me/train.py\\\", line $2, in main\\n    step()\\n$1"
  printf '{"message": {"message": "%s", "extraInfo": {"py_callstack": "%s", "timestamp": "%s"}}}' \
    "$1" "$stack" "$(($(date +%s) - $3))" > "$TORCHELASTIC_ERROR_FILE"
}
"#;

/// The directories of the error files, which the workers have printed. None is there any more.
fn are_gone(files: &[String]) {
    for file in files {
        let folder = Path::new(file).parent().unwrap();
        assert!(
            folder
                .file_name()
                .unwrap()
                .to_string_lossy()
                .starts_with("kolo-node-")
        );
        assert!(!folder.exists(), "{}", folder.display());
    }
}

#[test]
fn a_worker_tells_its_error_in_a_file_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let said = dir.path().join("said");
    let said = said.display();
    let program = format!(
        "{FAIL} echo $TORCHELASTIC_ERROR_FILE; [ $RANK = 1 ] || {{ : > {said}; exec sleep 1000; }}; \
         until [ -e {said} ]; do sleep 0.01; done; \
         fail 'ValueError: bad batch' 12 0; echo noise >&2; exit 3"
    );
    let options = ["-n", "2", "--prefix", "none"];
    let out = output(script(kolo(), &options, &program));
    assert_eq!(code(&out), 3, "{out:?}");
    let err = text(&out.stderr);
    let expected = "ended with exit code 3: ValueError: bad batch (train.py:12)\n  \
                    [1]<callstack>:Traceback (most recent call last):\n  \
                    [1]<callstack>:  File \"/home/me/train.py\", line 12, in main\n  \
                    [1]<callstack>:    step()\n  \
                    [1]<callstack>:ValueError: bad batch\nkolo: the other worker was ended\n";
    assert!(err.ends_with(expected), "{err}");
    let files = sorted(&out.stdout);
    assert_eq!(files.len(), 2);
    assert_ne!(files[0], files[1]);
    are_gone(&files);

    // Each generation has files of its own; what is no JSON is told as it is.
    let program = "echo $TORCHELASTIC_ERROR_FILE; \
                   [ -e $TORCHELASTIC_ERROR_FILE ] && exit 99; echo 'out of luck' > $TORCHELASTIC_ERROR_FILE; exit 4";
    let options = ["-n", "1", "--max-restarts", "1", "--prefix", "none"];
    let mut command = kolo();
    command.args(["--format", "json"]);
    let out = output(script(command, &options, program));
    assert_eq!(code(&out), 4, "{out:?}");
    let files = sorted(&out.stdout);
    assert_eq!(files.len(), 2);
    assert_ne!(files[0], files[1]);
    are_gone(&files);
    let err = text(&out.stderr);
    let json: serde_json::Value = serde_json::from_str(err.lines().last().unwrap()).unwrap();
    assert_eq!(json["failure"]["error"]["message"], "out of luck");
    assert_eq!(json["failure"]["exit_code"], 4);

    // A file of the user's own is not touched.
    let own = dir.path().join("own");
    let setting = format!("TORCHELASTIC_ERROR_FILE={}", own.display());
    let out = output(script(
        kolo(),
        &["-n", "1", "--env", &setting],
        "echo mine > $TORCHELASTIC_ERROR_FILE; exit 5",
    ));
    assert_eq!(code(&out), 5, "{out:?}");
    assert!(!text(&out.stderr).contains("mine"), "{out:?}");
    assert_eq!(std::fs::read_to_string(&own).unwrap(), "mine\n");
}

/// Rank 0 has an error and takes its time to end; rank 1 fails of that at once, and is heard first.
#[tokio::test]
async fn the_error_that_came_first_is_the_cause_whoever_is_heard_first() {
    let builder = TestCluster::builder().nodes(2).slots(1);
    let cluster = builder.hostnames(["a", "b"]).start().await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let program = format!(
        "{FAIL} said=$SAID.$KOLO_GENERATION; \
         if [ $RANK = 0 ]; then trap 'exit 6' TERM; fail 'ValueError: bad batch' 12 5; : > $said; \
         else until [ -e $said ]; do sleep 0.01; done; fail 'RuntimeError: connection closed' 99 0; exit 3; fi; \
         while :; do sleep 0.05; done"
    );
    for restarts in [0, 1] {
        let (kolo, program) = (cluster.kolo().unwrap(), program.clone());
        let said = dir.path().join(format!("said-{restarts}"));
        let run = tokio::task::spawn_blocking(move || {
            let restarts = restarts.to_string();
            let options = ["-n", "2", "--max-restarts", &restarts, "--pass-env", "SAID"];
            let mut command = script(kolo, &options, &program);
            command.env("SAID", said);
            output(command)
        });
        let out = soon(run).await.unwrap();
        assert_eq!(code(&out), 6, "{out:?}");
        let err = text(&out.stderr);
        let first = "failed first, with exit code 6: ValueError: bad batch (train.py:12)";
        let lines: Vec<&str> = err.lines().collect();
        let place = lines.iter().position(|line| line.ends_with(first));
        let place = place.unwrap_or_else(|| panic!("{err}"));
        assert!(lines[place].starts_with("kolo: rank 0 on a (pid "), "{err}");
        let follows = |line: &&str| {
            line.contains(" later: rank 1 on b (pid ")
                && line.ends_with(
                    "ended with exit code 3: RuntimeError: connection closed (train.py:99)",
                )
        };
        let followers = lines.iter().filter(|line| follows(line)).count();
        assert_eq!(followers, 1 + restarts, "{err}");
        if restarts == 1 {
            let anew = lines
                .iter()
                .find(|line| line.contains("started anew"))
                .unwrap();
            assert!(
                anew.contains("failures so far 1 of 1: rank 0 on a: exit code 6"),
                "{err}"
            );
            assert!(
                err.contains("; the last failure: rank 0 on a (pid "),
                "{err}"
            );
        }
    }
    cluster.stop().await.unwrap();
}
